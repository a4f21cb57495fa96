//! Drafters that run on the target's device.

use std::sync::Arc;

use parking_lot::Mutex;
use rand::rngs::StdRng;

use super::device_pass::{AcceptRule, DeviceOutput, DevicePass, PassPart, StepRows};
use super::draft_steps::DraftRow;
use super::models::Models;
use super::passes::Passes;
use super::sequence::{DRAFTED, Sequence};
use super::step_scores::{StepScores, drafted, grouped_steps};
use crate::Result;
use crate::kv::{HeldPage, KvOptions};
use crate::model::{ChainModel, DraftKv, DraftRows, DraftStep, Model, OutputRows};
use crate::speculative::{ChainStep, Context, Draft, DraftChain, DraftCost, Drafter, DrafterKind};

/// [`Mtp`](crate::speculative::Mtp) on a device. Greedy drafts stay there: the host has
/// placeholders until the target's accept result.
pub(crate) struct DeviceMtp {
    models: Arc<Models>,
    sequence: Arc<Mutex<Sequence>>,
}

/// A row of a draft step.
struct DeviceDraft {
    sequence: Arc<Mutex<Sequence>>,
    position: usize,
    tokens: Vec<u32>, // the last one, and drafts
    stays: bool,      // chosen on the device, without host synchronisation
}

impl DeviceMtp {
    /// The drafter of a sequence of `models`, which have an assistant.
    pub fn new(models: Arc<Models>, sequence: Arc<Mutex<Sequence>>) -> Self {
        Self { models, sequence }
    }
}

impl Drafter for DeviceMtp {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Mtp
    }

    fn cost(&self) -> DraftCost {
        DraftCost::PerToken
    }

    fn chain(&mut self) -> Option<&mut dyn DraftChain> {
        Some(self)
    }
}

impl DraftChain for DeviceMtp {
    fn model(&self) -> Arc<dyn ChainModel> {
        self.models.clone()
    }

    fn next<'a>(&'a mut self, context: &Context<'a>, draft: &Draft) -> Result<ChainStep<'a>> {
        let Some(last) = context.tokens.last() else { return Ok(ChainStep::End) };
        let row = DeviceDraft {
            sequence: self.sequence.clone(),
            position: context.kv.position(),
            tokens: [&[*last], &draft.tokens[..]].concat(),
            stays: StepScores::by(context) == StepScores::None,
        };
        Ok(ChainStep::Pass(DraftRows { ids: Vec::new(), hidden: None, kv: DraftKv::Model(Box::new(row)) }))
    }

    fn advance(&mut self, _: &DraftStep) {}
}

impl ChainModel for Models {
    fn step(&self, sequences: &mut [DraftRows<'_>]) -> Result<Vec<DraftStep>> {
        let rows: Vec<&DeviceDraft> = DraftRows::of_model(sequences)?;
        grouped_steps(&rows, DeviceDraft::shares_step, |together| {
            let mut passes = self.passes();
            let Passes { workspace, drafts, .. } = &mut *passes;
            let draft_rows: Vec<_> = together.iter().map(|row| row.row()).collect();
            let indices = drafts.step(workspace, &self.loaded, &draft_rows)?;
            let scores = together.iter().zip(indices).map(|(row, index)| match row.stays {
                true => Ok(drafted()),
                false => drafts.scores(workspace, &self.loaded, index),
            });
            scores.collect()
        })
    }
}

/// Drafts `count` tokens after `last`, which stay on the device, and waits for them.
///
/// # Errors
/// If the models have no assistant, or the device is out of memory or fails.
pub(crate) fn draft_greedily(
    models: &Models,
    sequence: &Arc<Mutex<Sequence>>,
    last: u32,
    position: usize,
    count: usize,
) -> Result<()> {
    let mut passes = models.passes();
    let Passes { workspace, drafts, .. } = &mut *passes;
    let mut tokens = vec![last];
    for _ in 0..count {
        drafts.step(workspace, &models.loaded, &[DraftRow { sequence, position, tokens: &tokens }])?;
        tokens.push(DRAFTED);
    }
    workspace.wait()
}

impl DeviceDraft {
    /// Whether both can be rows of one step.
    fn shares_step(&self, other: &Self) -> bool {
        let plan = |of: &Self| of.sequence.lock().plan().id();
        self.tokens.len() == other.tokens.len() && plan(self) == plan(other)
    }

    fn row(&self) -> DraftRow<'_> {
        DraftRow { sequence: &self.sequence, position: self.position, tokens: &self.tokens }
    }
}

/// [`DraftModel`](crate::speculative::DraftModel) on the target's device.
///
/// Its sequence receives the start of each pass, so that it can be truncated: rows of a draft stay, and accepted ones
/// are not recomputed. The host learns every token as it is drafted, because the target's sequence is a different one.
pub(crate) struct DeviceDraftModel {
    models: Arc<Models>,
    sequence: Mutex<Sequence>,
    max_context: usize,
    max_round_rows: usize,
    read: Vec<u32>,  // tokens whose rows are on the device
    written: usize,  // positions below it may have been written since there were none
    matching: usize, // number of tokens known to match the text
}

/// Maximum tokens read one by one, in recorded passes: what a fully accepted round adds.
const MAX_SINGLE_READS: usize = 2;

impl DeviceDraftModel {
    /// A drafter for sequences of at most `context` tokens, with an empty cache; see
    /// [`DraftModel::new`](crate::speculative::DraftModel::new). `models` has `model` on the device.
    ///
    /// # Errors
    /// If an option of the cache is out of its range, or memory is exhausted.
    pub fn new(models: &Arc<Models>, model: &dyn Model, kv: &KvOptions, context: usize) -> Result<Self> {
        let own = model.max_position_embeddings();
        let kv = KvOptions { max_context: kv.max_context.map(|most| most.min(own)), ..kv.clone() };
        let (sequence, fits) = models.sequence(&kv, own)?;
        let max_context = context.min(own).min(sequence.plan().context());
        let max_round_rows = kv.max_round_rows.min(fits);
        let (models, sequence) = (models.clone(), Mutex::new(sequence));
        Ok(Self { models, sequence, max_context, max_round_rows, read: Vec::new(), written: 0, matching: 0 })
    }

    /// Drops the rows that do not match `text`, and that of its last token, whose scores are needed.
    fn rewind_to(&mut self, text: &[u32]) {
        let (read, text_behind) = (&self.read[self.matching..], &text[self.matching..]);
        let same = self.matching + read.iter().zip(text_behind).take_while(|(a, b)| a == b).count();
        self.matching = same.min(text.len().saturating_sub(1));
        // Rows of a sliding window that later ones overwrote are read again, with all others.
        if self.matching == 0 || !self.sequence.get_mut().plan().holds(self.matching, self.written) {
            (self.matching, self.written) = (0, 0);
        }
        self.read.truncate(self.matching);
    }

    /// Reads `tokens` after those already read, and `use_output` of the last pass, which has the
    /// scores after the last token.
    fn pass<T>(&mut self, tokens: &[u32], use_output: impl FnOnce(&mut DeviceOutput<'_>) -> Result<T>) -> Result<T> {
        // A pass is recorded if all of its rows have outputs.
        let is_recorded = tokens.len() <= MAX_SINGLE_READS;
        let (rows, outputs) = if is_recorded { (1, OutputRows::Last) } else { (self.max_round_rows, OutputRows::None) };
        let (before, last) = tokens.split_at(tokens.len().saturating_sub(1) / rows * rows);
        self.read_chunks(before, rows, outputs)?;
        let mut pass = self.run(last, OutputRows::Last)?;
        let used = use_output(&mut pass.output(0));
        drop(pass);
        self.read.extend(last);
        used
    }

    /// Reads `tokens` after those already read, in passes of at most `rows` rows.
    fn read_chunks(&mut self, tokens: &[u32], rows: usize, outputs: OutputRows) -> Result<()> {
        for chunk in tokens.chunks(rows) {
            self.run(chunk, outputs).map(drop)?;
            self.read.extend(chunk);
        }
        Ok(())
    }

    fn run(&mut self, ids: &[u32], outputs: OutputRows) -> Result<DevicePass<'_>> {
        self.written = self.written.max(self.read.len() + ids.len());
        let rows = StepRows { ids: ids.to_vec(), position: self.read.len(), states: Vec::new() };
        DevicePass::run(&self.models, vec![PassPart::of_draft(&self.sequence, rows, outputs)])
    }
}

impl Drafter for DeviceDraftModel {
    fn kind(&self) -> DrafterKind {
        DrafterKind::DraftModel
    }

    fn cost(&self) -> DraftCost {
        DraftCost::PerToken
    }

    fn read_prompt(&mut self, tokens: &[u32]) -> Result<()> {
        self.begin(tokens);
        // Past the end of its context it drafts nothing.
        if tokens.len() > self.max_context {
            return Ok(());
        }
        self.read_chunks(&tokens[self.matching..], self.max_round_rows, OutputRows::None)?;
        self.matching = self.read.len();
        Ok(())
    }

    fn begin(&mut self, tokens: &[u32]) {
        self.matching = 0;
        self.rewind_to(tokens);
    }

    fn truncate(&mut self, len: usize) {
        if len < self.read.len() {
            self.sequence.get_mut().trim(len);
            self.read.truncate(len);
            self.matching = self.matching.min(len);
        }
    }

    fn draft(&mut self, context: &Context<'_>, most: usize, draft: &mut Draft, rng: &mut StdRng) -> Result<()> {
        let left = self.max_context.saturating_sub(context.tokens.len());
        let most = most.min(left).min(self.max_round_rows);
        let scores = StepScores::by(context);
        while draft.tokens.len() < most {
            let tokens = match draft.tokens.last() {
                None => {
                    self.rewind_to(context.tokens);
                    context.tokens[self.matching..].to_vec()
                }
                Some(newest) => vec![*newest],
            };
            self.pass(&tokens, |output| {
                if scores == StepScores::None {
                    // Accepting without drafts gives the model's own choice.
                    draft.tokens.push(output.accept(&mut [], AcceptRule::Argmax)?.next);
                    return Ok(());
                }
                let (ids, logits) = scores.read(output)?;
                context.draft_token(draft, ids.as_deref(), &logits, rng)
            })?;
        }
        Ok(())
    }

    fn max_context(&self) -> usize {
        self.max_context
    }

    /// The page tables hold no more positions than the model's own context.
    fn set_max_context(&mut self, positions: usize) {
        self.max_context = positions.min(self.sequence.get_mut().plan().context());
    }

    fn fork(&self) -> Option<Box<dyn Drafter>> {
        let rows = self.read.len();
        match self.models.fork(&mut self.sequence.lock(), rows) {
            Ok(sequence) => Some(Box::new(Self {
                models: self.models.clone(),
                sequence: Mutex::new(sequence),
                read: self.read.clone(),
                ..*self
            })),
            Err(error) => {
                tracing::warn!(%error, "a fork's draft model starts without K and V");
                None
            }
        }
    }

    fn holds_pages(&self) -> bool {
        true
    }

    fn held_pages(&self) -> Vec<HeldPage> {
        self.sequence.lock().held_pages().collect()
    }

    fn page_bytes(&self, end: usize) -> usize {
        self.sequence.lock().kv().bytes_to_reserve(self.matching, end)
    }
}
