//! The drafter of a NextN head on the target's device.

use std::ops::Range;
use std::sync::Arc;

use foretoken_gpu::DeviceSlice;
use parking_lot::Mutex;

use super::buffer::{Buffer, subslice};
use super::device_model::DeviceModel;
use super::device_pass::{DevicePass, PassPart, StepRows};
use super::models::Models;
use super::sequence::{DRAFTED, Sequence};
use super::states::{DeviceStates, copy};
use super::step_scores::{StepScores, grouped_steps};
use crate::Result;
use crate::kv::{HeldPage, KvOptions};
use crate::model::{ChainModel, DraftKv, DraftRows, DraftStep, OutputRows};
use crate::speculative::{
    ChainStep, Context, Draft, DraftChain, DraftCost, Drafter, DrafterKind, MAX_UNREAD, Observed, Reads,
};

/// A NextN head on its target's device. As a [`ChainModel`], a step is one pass over the rows of all sequences.
pub(crate) struct DeviceNextnHead {
    models: Models,
    max_position_embeddings: usize,
}

/// [`NextN`](crate::speculative::NextN) on a device: the head's K and V, and the target's hidden
/// states that it has not read.
///
/// Greedy drafts stay on the device, in the state of the target's sequence. The rows of a draft
/// stay until others are written to their positions.
pub(crate) struct DeviceNextN {
    head: Arc<DeviceNextnHead>,
    sequence: Arc<Mutex<Sequence>>,
    max_context: usize,
    max_round_rows: usize,
    first: usize,                     // the position of the sequence's first row
    rows: usize,                      // rows from the target's states; those after them are a draft's
    written: usize,                   // rows below it may have been written since there were none
    states: Buffer<f32>,              // (MAX_UNREAD, hidden)
    held: Range<usize>,               // their positions: those that are not read, or the last one
    target: Option<Arc<Buffer<u32>>>, // the state of the target's sequence; `None` until a pass is observed
    step: usize,                      // rows after the step that is run
    chain: Option<usize>,             // rows after the last step of the draft, if it has begun
}

/// A sequence's part of a step.
struct Step {
    sequence: Arc<Mutex<Sequence>>,
    rows: StepRows,
    index: usize,         // of the draft
    to: Arc<Buffer<u32>>, // the state that gets it
    scores: StepScores,
}

impl DeviceNextnHead {
    /// Takes the head's weights, with those that it shares with the target. Its sequences' pages are counted with those
    /// of `target`. `suppressed` ids are never drafted.
    ///
    /// # Errors
    /// If the device is out of memory.
    pub fn new(
        target: &Models,
        head: Box<dyn DeviceModel>,
        max_position_embeddings: usize,
        suppressed: &[u32],
    ) -> Result<Self> {
        Ok(Self { models: target.sharing_pages(head, suppressed)?, max_position_embeddings })
    }
}

impl ChainModel for DeviceNextnHead {
    fn step(&self, sequences: &mut [DraftRows<'_>]) -> Result<Vec<DraftStep>> {
        let steps: Vec<&Step> = DraftRows::of_model(sequences)?;
        grouped_steps(&steps, Step::shares_pass, |together| {
            let parts = together.iter().map(|step| step.part()).collect();
            let mut pass = DevicePass::run(&self.models, parts)?;
            let states: Vec<_> = together.iter().map(|step| step.to.slice()).collect();
            pass.draft(together[0].index, &states)?;
            let scores = together.iter().enumerate().map(|(i, step)| step.scores.read(&mut pass.output(i)));
            scores.collect()
        })
    }
}

impl Step {
    fn shares_pass(&self, other: &Self) -> bool {
        let plan = |of: &Self| of.sequence.lock().plan().id();
        self.index == other.index && plan(self) == plan(other)
    }

    fn part(&self) -> PassPart<'_> {
        PassPart::of_draft(&self.sequence, self.rows.clone(), OutputRows::Last)
    }
}

impl DeviceNextN {
    /// The drafter of an empty sequence of at most `context` tokens, with K and V made from `options`. Per-layer formats
    /// apply only to the target.
    ///
    /// # Errors
    /// If an option is out of its range, or the device is out of memory.
    pub fn new(head: Arc<DeviceNextnHead>, options: &KvOptions, context: usize) -> Result<Self> {
        let options = KvOptions { layers: Vec::new(), ..options.clone() };
        let (sequence, fits) = head.models.sequence(&options, head.max_position_embeddings)?;
        let max_context = context.min(sequence.plan().context());
        let states = Buffer::new(&**head.models.device(), MAX_UNREAD * sequence.hidden().len())?;
        Ok(Self {
            head,
            sequence: Arc::new(Mutex::new(sequence)),
            max_context,
            max_round_rows: options.max_round_rows.min(fits),
            first: 0,
            rows: 0,
            written: 0,
            states,
            held: 0..0,
            target: None,
            step: 0,
            chain: None,
        })
    }

    fn width(&self) -> usize {
        self.states.len() / MAX_UNREAD
    }

    /// The position of the first state that is not read.
    fn unread(&self) -> usize {
        self.first + self.rows
    }

    /// Clears everything: the next state is that of position `first`.
    fn restart(&mut self, first: usize) {
        (self.first, self.rows, self.written, self.held, self.chain) = (first, 0, 0, first..first, None);
    }

    /// Drops the rows from position `rows` on, and the states from position `states` on.
    fn drop_from(&mut self, rows: usize, states: usize) {
        let dropped = self.unread().saturating_sub(rows);
        if dropped == 0 && self.held.end <= states {
            return;
        }
        if rows < self.first {
            return self.restart(rows);
        }
        (self.rows, self.chain) = (self.rows - dropped, None);
        let end = self.held.end.min(states);
        // Those after the rows that are left.
        self.held = if self.held.start <= self.unread() { self.held.start..end } else { self.unread()..self.unread() };
    }

    /// Drops the rows of a draft, to write those of `positions`; and those before as well, if the context has no room
    /// for both, or if some that the new ones read were overwritten.
    fn free_rows(&mut self, positions: Range<usize>) {
        self.chain = None;
        let before = positions.start - self.first;
        let fits = positions.end - self.first <= self.max_context;
        if before == 0 || !fits || !self.sequence.lock().plan().holds(before, self.written) {
            (self.first, self.rows, self.written) = (positions.start, 0, 0);
        }
    }

    /// The held states of `positions`.
    fn held_states(&self, positions: Range<usize>) -> DeviceSlice<f32> {
        let width = self.width();
        subslice(self.states.slice(), (positions.start - self.held.start) * width, positions.len() * width)
    }

    /// The states of `positions`: held ones, and those after them in `new`.
    fn states(&self, positions: &Range<usize>, new: DeviceSlice<f32>) -> Vec<DeviceSlice<f32>> {
        let (border, width) = (self.held.end.clamp(positions.start, positions.end), self.width());
        let mut states = Vec::with_capacity(2);
        if positions.start < border {
            states.push(self.held_states(positions.start..border));
        }
        if border < positions.end {
            states.push(subslice(new, (border - self.held.end) * width, (positions.end - border) * width));
        }
        states
    }

    /// The rows of the states of `positions`, each with the token after it.
    fn rows_of(&self, positions: Range<usize>, tokens: &[u32], new: DeviceSlice<f32>) -> StepRows {
        let ids = tokens[positions.start + 1..positions.end + 1].to_vec();
        StepRows { ids, position: positions.start - self.first, states: self.states(&positions, new) }
    }

    /// Reads the states before position `end` in passes of their own.
    fn read(&mut self, tokens: &[u32], end: usize, new: DeviceSlice<f32>) -> Result<()> {
        while self.unread() < end {
            let positions = self.unread()..end.min(self.unread() + self.max_round_rows);
            let rows = positions.len();
            self.written = self.written.max(self.rows + rows);
            let part = PassPart::of_draft(&self.sequence, self.rows_of(positions, tokens, new), OutputRows::None);
            DevicePass::run(&self.head.models, vec![part])?;
            self.rows += rows;
        }
        Ok(())
    }

    /// Appends the states of `positions` to those held, or replaces them if all of them are read.
    fn hold(&mut self, positions: Range<usize>, states: DeviceSlice<f32>) -> Result<()> {
        if self.unread() >= self.held.end {
            self.held = positions.start..positions.start;
        }
        let to = self.held_states(positions.clone());
        copy(self.head.models.passes().workspace.launcher(), states, to)?;
        self.held.end = positions.end;
        Ok(())
    }

    /// The rows of the step after the last token, which reads the states that were not read yet, or the last one
    /// again. `None` if other states were observed.
    fn first_step(&mut self, tokens: &[u32]) -> Result<Option<StepRows>> {
        let end = tokens.len().saturating_sub(1);
        if self.held.end != end || self.held.is_empty() {
            return Ok(None);
        }
        let none = DeviceSlice::new(0, 0);
        self.free_rows(self.unread().min(end - 1)..end);
        self.read(tokens, end.saturating_sub(self.max_round_rows), none)?;
        let begin = self.unread().min(end - 1);
        self.begin_step(end - self.first);
        Ok(Some(self.rows_of(begin..end, tokens, none)))
    }

    /// The row of the step after the draft's last token, from the head's own state. `None` if the context is full,
    /// or another draft was made with this state.
    fn next_step(&mut self, token: u32) -> Option<StepRows> {
        let position = self.chain.filter(|rows| *rows < self.max_context)?;
        let sequence = self.sequence.lock();
        if token == DRAFTED && !sequence.is_at((position, token)) {
            return None;
        }
        let states = vec![sequence.hidden()];
        drop(sequence);
        self.begin_step(position + 1);
        Some(StepRows { ids: vec![token], position, states })
    }

    /// Begins a step after which there are `rows` rows.
    fn begin_step(&mut self, rows: usize) {
        (self.step, self.written) = (rows, self.written.max(rows));
    }

    /// Drafts `tokens` tokens after `position` rows from any state, and waits for them: a measurement.
    ///
    /// # Errors
    /// If the device is out of memory, or the driver fails.
    pub fn chain_at(&mut self, position: usize, last: u32, tokens: usize) -> Result<()> {
        self.chain = Some(position);
        let state = self.sequence.lock().state().clone();
        for (draft, token) in std::iter::once(last).chain(std::iter::repeat(DRAFTED)).take(tokens).enumerate() {
            let Some(rows) = self.next_step(token) else { break };
            let part = PassPart::of_draft(&self.sequence, rows, OutputRows::Last);
            let mut pass = DevicePass::run(&self.head.models, vec![part])?;
            pass.draft(draft, &[state.slice()])?;
            self.chain = Some(self.step);
        }
        self.head.models.passes().wait()
    }

    fn forked(&self) -> Result<Self> {
        let sequence = self.head.models.fork(&mut self.sequence.lock(), self.rows)?;
        let states = Buffer::new(&**self.head.models.device(), self.states.len())?;
        copy(self.head.models.passes().workspace.launcher(), self.states.slice(), states.slice())?;
        let (head, held) = (self.head.clone(), self.held.clone());
        // The target's sequence is another one.
        Ok(Self { head, sequence: Arc::new(Mutex::new(sequence)), states, held, target: None, ..*self })
    }
}

impl Drafter for DeviceNextN {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Mtp
    }

    fn cost(&self) -> DraftCost {
        DraftCost::PerToken
    }

    fn reads(&self) -> Reads {
        Reads { hidden: true, taps: Vec::new() }
    }

    fn chain(&mut self) -> Option<&mut dyn DraftChain> {
        Some(self)
    }

    fn set_max_context(&mut self, positions: usize) {
        self.max_context = positions.min(self.sequence.lock().plan().context());
    }

    fn fork(&self) -> Option<Box<dyn Drafter>> {
        match self.forked() {
            Ok(fork) => Some(Box::new(fork)),
            Err(error) => {
                tracing::warn!(%error, "a fork's drafter starts without K and V");
                None
            }
        }
    }

    fn truncate(&mut self, len: usize) {
        // The row of the last token's state is of the token after it.
        self.drop_from(len.saturating_sub(1), len);
    }

    fn holds_pages(&self) -> bool {
        true
    }

    fn held_pages(&self) -> Vec<HeldPage> {
        self.sequence.lock().held_pages().collect()
    }

    fn page_bytes(&self, end: usize) -> usize {
        self.sequence.lock().kv().bytes_to_reserve(self.rows, end.saturating_sub(self.first))
    }

    fn observe(&mut self, seen: &Observed<'_>) -> Result<()> {
        let Some(DeviceStates { rows: states, state }) = seen.on_device else { return Ok(()) };
        let (states, width) = (*states, self.width());
        self.target = Some(state.clone());
        let end = seen.first + states.len() / width;
        self.drop_from(seen.first, seen.first);
        if self.held.end != seen.first {
            self.restart(seen.first);
        }
        let begin = if self.unread() < seen.first { self.held.start } else { seen.first };
        // After a prompt the token after the last state is unknown; otherwise the next draft reads it.
        let after_prompt = seen.tokens.len() == end;
        if !after_prompt && end - begin <= MAX_UNREAD {
            return self.hold(seen.first..end, states);
        }
        self.free_rows(self.unread()..end - 1);
        self.read(seen.tokens, end - 1, states)?;
        let last = subslice(states, states.len() - width, width);
        self.held = end - 1..end - 1;
        self.hold(end - 1..end, last)
    }
}

impl DraftChain for DeviceNextN {
    fn model(&self) -> Arc<dyn ChainModel> {
        self.head.clone()
    }

    fn next<'a>(&'a mut self, context: &Context<'a>, draft: &Draft) -> Result<ChainStep<'a>> {
        let index = draft.tokens.len();
        // Words of the state: a length, a token, drafts.
        let Some(to) = self.target.clone().filter(|state| index + 2 < state.len()) else { return Ok(ChainStep::End) };
        let rows = match draft.tokens.last() {
            None => self.first_step(context.tokens)?,
            Some(token) => self.next_step(*token),
        };
        let Some(rows) = rows else { return Ok(ChainStep::End) };
        let (sequence, scores) = (self.sequence.clone(), StepScores::by(context));
        let step = Step { sequence, rows, index, to, scores };
        Ok(ChainStep::Pass(DraftRows { ids: Vec::new(), hidden: None, kv: DraftKv::Model(Box::new(step)) }))
    }

    fn advance(&mut self, _: &DraftStep) {
        if self.chain.is_none() {
            self.rows = self.step;
        }
        self.chain = Some(self.step);
    }
}
