//! Passes of any number of sequences, on the memory and with the recordings that all sequences of a model share.
//!
//! A greedy round has one host synchronisation: drafts stay in device memory from step to step and into verification,
//! drafts are accepted on the device, and the host reads the result: [`Readback`].
//!
//! Passes are recorded once per shape (segments, rows) and replayed: their parameters are constant, variable data is in
//! device memory. The number of attention splits covers positions up to a horizon, beyond which everything is recorded
//! again, as it is after the outputs grew. Pages that leave the exact tail are quantized before a recorded pass, by
//! launches that have the numbers of these pages as parameters. Passes with more rows of prompts than a recording holds
//! are launched directly.

use std::cell::OnceCell;
use std::sync::Arc;

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::accept::{Accepting, Verified, accept};
use foretoken_gpu::plan::positions::Tokens;
use foretoken_gpu::plan::segments::{ON_DEVICE, Segment, Segments};
use foretoken_gpu::plan::vocabulary::{Chosen, Scores, argmax, argmax_parts, largest, largest_parts};

use super::Device;
use super::buffer::{Buffer, subslice};
use super::device_model::DeviceModel;
use super::draft_steps::DraftSteps;
use super::kv::{KvPlan, Span, fault_words};
use super::list::List;
use super::loaded::LoadedModels;
use super::ops::DeviceOps;
use super::outputs::{Row, TargetOutputs};
use super::positions::{PassKv, PassSegments, Stores};
use super::readback::Readback;
use super::recordings::RecordedPass;
use super::recurrent::RecurrentState;
use super::recurrent_rounds::{PassStates, RecurrentRounds, RecurrentRows};
use super::sequence::Sequence;
use super::states::StateInputs;
use super::workspace::Workspace;
use crate::Result;
use crate::model::Request;

/// Rows allocated initially, so that verification rarely reallocates; and the rows of a recorded segment, at most.
const MIN_ROWS: usize = 16;

/// Segments allocated initially.
const MIN_SEGMENTS: usize = 4;

/// The rows of a sequence in a pass.
pub(super) struct SequenceRows<'a> {
    pub sequence: &'a mut Sequence,
    pub ids: &'a [u32],
    pub position: usize,
    /// The hidden states beside the tokens, if the model reads any: of `(ids, hidden)`, consecutive rows each.
    pub states: &'a [DeviceSlice<f32>],
    /// The last rows, which have logits and hidden states.
    pub outputs: usize,
    /// Whether all rows have hidden states.
    pub keeps_states: bool,
    /// Whether the rows are committed whole or not at all.
    pub is_whole: bool,
}

/// The target's passes.
pub(super) struct Passes {
    pub workspace: Workspace,
    pub drafts: DraftSteps,
    /// `None`: the model has no delta nets.
    pub recurrent: Option<RecurrentRounds>,
    lists: Lists,
    states: Option<Arc<Buffer<f32>>>, // of all rows of a pass
    last: Shape,
    // What the host has read of the last pass.
    ids: OnceCell<Vec<u32>>,
    accepted: Option<Vec<[u32; 2]>>,
    largest: Option<Vec<Row>>,
}

/// What the host writes before a pass.
struct Lists {
    rows: usize,
    segments: usize,
    given: List<u32>,
    all: List<Segment>,
    outputs: List<Segment>, // after the rows without outputs are dropped
    drafts: List<Segment>,  // the states that get drafts
}

/// The shape of a pass.
#[derive(Clone, Copy, Default)]
struct Shape {
    segments: usize,
    rows: usize,
    longest: usize,
    /// Rows of the longest segment of which some rows may be rejected.
    longest_logged: usize,
    output_segments: usize,
    output_rows: usize,
    /// Whether rows without logits have hidden states.
    keeps_states: bool,
}

/// A pass that is to be launched.
#[derive(Clone)]
struct Planned<'a> {
    plan: &'a KvPlan,
    tables: Vec<DeviceSlice<u64>>,
    states: Option<PassStates>,
    all: PassSegments,
    outputs: PassSegments,
    output_rows: Vec<usize>,
}

impl Lists {
    fn new(device: &dyn Device, rows: usize, segments: usize) -> Result<Self> {
        Ok(Self {
            rows,
            segments,
            given: List::new(device, rows)?,
            all: List::new(device, segments)?,
            outputs: List::new(device, segments)?,
            drafts: List::new(device, segments)?,
        })
    }

    /// Launches the target.
    fn launch(
        &self,
        workspace: &Workspace,
        ops: &DeviceOps,
        models: &LoadedModels,
        planned: Planned<'_>,
    ) -> Result<()> {
        let Planned { plan, tables, states, all, outputs, output_rows } = planned;
        let (rows, readback) = (all.rows(), &workspace.readback);
        if models.target.reads_states() {
            // The passes of a NextN head are not waited for: faults of other sequences' drafts may be left.
            readback.clear_faults(&ops.queue.launcher)?;
        }
        let ids = readback.ids(rows);
        let tokens = Tokens { given: self.given.slice(), ids };
        let stores = Stores { plan, tables, faults: readback.faults() };
        let hidden = if ops.all_states.is_some() { (0..rows).collect() } else { output_rows.clone() };
        let request = Request { logits: output_rows, hidden, taps: Vec::new() };
        let mut kv = PassKv::consecutive(&ops.queue, stores, states, [all, outputs], &tokens)?;
        models.target.forward(ops, ids, &mut kv, &request)
    }

    /// Chooses the target's tokens for the rows of the last pass, and accepts drafts. With the index of
    /// a draft, the tokens become drafts as well.
    fn accept(
        &self,
        workspace: &Workspace,
        ops: &DeviceOps,
        models: &LoadedModels,
        last: &Shape,
        accepting: Accepting,
        draft: Option<usize>,
    ) -> Result<()> {
        let (outputs, launcher, scores) = (&ops.outputs, &ops.queue.launcher, last.scores(ops, models));
        let chosen = Chosen::Ids(outputs.chosen.slice());
        launcher.run(argmax_parts(&scores, outputs.partial.slice(), &chosen))?;
        launcher.run(argmax(&scores, outputs.partial.slice(), &chosen))?;
        if let Some(index) = draft {
            let segments = Segments { slice: self.drafts.slice(), count: last.output_segments, longest: 1 };
            launcher.run(argmax(&scores, outputs.partial.slice(), &Chosen::Draft { segments, index }))?;
        }
        let verified = Verified {
            ids: workspace.readback.ids(last.rows),
            chosen: outputs.chosen.slice(),
            hidden: outputs.hidden.slice(),
            width: models.hidden_size(),
        };
        let (count, longest) = (last.output_segments, last.longest);
        let segments = Segments { slice: self.outputs.slice(), count, longest };
        launcher.run(accept(&segments, &verified, accepting, workspace.readback.results()))
    }
}

impl Shape {
    /// The target's scores of the output rows.
    fn scores(&self, ops: &DeviceOps, models: &LoadedModels) -> Scores {
        let vocab = models.target.vocab_size();
        Scores {
            x: ops.outputs.logits.slice(),
            rows: self.output_rows,
            n: vocab,
            stride: vocab,
            cap: models.target.soft_cap(),
            suppressed: models.suppressed(),
            grouped: None,
        }
    }

    fn of(pass: &[SequenceRows<'_>]) -> Self {
        Self {
            segments: pass.len(),
            rows: pass.iter().map(|part| part.ids.len()).sum(),
            longest: pass.iter().map(|part| part.ids.len()).max().unwrap_or(0),
            longest_logged: pass.iter().filter(|part| !part.is_whole).map(|part| part.ids.len()).max().unwrap_or(0),
            output_segments: pass.iter().filter(|part| part.outputs > 0).count(),
            output_rows: pass.iter().map(|part| part.outputs).sum(),
            keeps_states: pass.iter().any(|part| part.keeps_states && part.outputs < part.ids.len()),
        }
    }
}

impl Passes {
    /// # Errors
    /// If the device is out of memory.
    pub fn new(device: &Arc<dyn Device>, target: &dyn DeviceModel) -> Result<Self> {
        let layout = target.kv_layout();
        let faults = fault_words(&layout);
        let readback = Readback::new(&**device, layout.store_of_layer, faults, MIN_SEGMENTS, MIN_ROWS)?;
        let inputs = target.reads_states().then(|| StateInputs::new(&**device, MIN_ROWS, target.hidden_size()));
        Ok(Self {
            workspace: Workspace::new(device, target, MIN_ROWS, inputs.transpose()?.map(Arc::new), readback)?,
            drafts: DraftSteps::default(),
            recurrent: (target.delta_nets())
                .map(|nets| RecurrentRounds::new(&**device, nets, MIN_SEGMENTS))
                .transpose()?,
            lists: Lists::new(&**device, MIN_ROWS, MIN_SEGMENTS)?,
            states: None,
            last: Shape::default(),
            ids: OnceCell::new(),
            accepted: None,
            largest: None,
        })
    }

    /// One pass over rows of sequences of one plan. Logits and hidden states of the output rows stay on the device.
    /// [`DRAFTED`](super::sequence::DRAFTED) ids are read from the sequences' states.
    ///
    /// # Errors
    /// If the device is out of memory, or the driver fails.
    pub fn forward(&mut self, models: &LoadedModels, pass: &mut [SequenceRows<'_>]) -> Result<()> {
        let Some(plan) = pass.first().map(|part| part.sequence.plan().clone()) else { return Ok(()) };
        let shape = Shape::of(pass);
        self.grow(models, &shape)?;
        (self.last, self.ids, self.accepted, self.largest) = (shape, OnceCell::new(), None, None);
        // Of the rows of a NextN head only the last has outputs.
        let is_nextn = models.target.reads_states();
        let has_outputs = pass.iter().all(|part| part.outputs == if is_nextn { 1 } else { part.ids.len() });
        let is_recorded = has_outputs && shape.longest <= MIN_ROWS && plan.completes_pages_before(shape.longest);
        let planned = self.prepare(pass, &plan)?;
        self.workspace.ops.output_segments = Some(planned.outputs.clone());
        let launched = match is_recorded {
            true => self.replay(models, &shape, planned),
            false => self.launch(models, pass, planned),
        };
        launched.inspect_err(|_| states_of(pass).for_each(RecurrentState::cancel))?;
        // Rows committed without accept are checked for NaN and infinity here.
        if is_recorded { Ok(()) } else { self.wait() }
    }

    /// Launches a pass that is not recorded, once all of it is planned.
    fn launch(&mut self, models: &LoadedModels, pass: &mut [SequenceRows<'_>], planned: Planned<'_>) -> Result<()> {
        let Self { workspace, lists, .. } = self;
        let launches = |workspace: &Workspace, ops: &DeviceOps| lists.launch(workspace, ops, models, planned.clone());
        let launched = workspace.record(launches)?.launch();
        // Some of the launches may have run.
        launched.inspect_err(|_| states_of(pass).for_each(RecurrentState::lose))
    }

    /// Launches a pass that verifies drafts.
    fn replay(&mut self, models: &LoadedModels, shape: &Shape, mut planned: Planned<'_>) -> Result<()> {
        let (Self { workspace, lists, .. }, plan) = (self, planned.plan);
        plan.quantize_pages(&workspace.ops.queue, &planned.all.spans, &planned.tables)?;
        let end = planned.all.spans.iter().map(|span| span.end).max().unwrap_or(0);
        planned.all.horizon = Some(workspace.reach(end));
        let Shape { segments, rows, longest, .. } = *shape;
        let recorded = RecordedPass::Verify { plan: plan.id(), segments, rows, longest };
        workspace.replay(recorded, |workspace, ops| lists.launch(workspace, ops, models, planned.clone()))
    }

    /// Reserves pages, and writes what the pass reads from lists.
    fn prepare<'a>(&mut self, pass: &mut [SequenceRows<'_>], plan: &'a KvPlan) -> Result<Planned<'a>> {
        let (launcher, recurrent) = (self.workspace.launcher(), &mut self.recurrent);
        let (mut given, mut output_rows) = (Vec::new(), Vec::new());
        let (mut all, mut outputs) = ((Vec::new(), Vec::new()), (Vec::new(), Vec::new()));
        for (i, part) in pass.iter_mut().enumerate() {
            let (first, rows, end) = (given.len(), part.ids.len(), part.position + part.ids.len());
            part.sequence.kv_mut().reserve(launcher, part.position, end)?;
            part.sequence.set(launcher, (part.position, part.ids[0]), None)?;
            if let Some(inputs) = &self.workspace.ops.inputs {
                inputs.set(launcher, first, part.states)?;
            }
            given.push(ON_DEVICE);
            given.extend(&part.ids[1..]);
            let record = recurrent.as_ref().map_or(0, |recurrent| recurrent.record(i));
            let segment = Segment { recurrent: record, ..part.sequence.segment(first, rows) };
            all.0.push(segment);
            all.1.push(Span { first, rows, position: part.position, end });
            if part.outputs == 0 {
                continue;
            }
            let (skipped, before) = (rows - part.outputs, output_rows.len());
            outputs.0.push(segment.kept(skipped, before));
            outputs.1.push(Span { first: before, rows: part.outputs, position: part.position + skipped, end });
            output_rows.extend(first + skipped..first + rows);
        }
        self.lists.given.set(launcher, &given)?;
        self.lists.all.set(launcher, &all.0)?;
        self.lists.outputs.set(launcher, &outputs.0)?;
        let of = |list: &List<Segment>, spans: Vec<Span>| {
            let longest = spans.iter().map(|span| span.rows).max().unwrap_or(0);
            let segments = Segments { slice: list.slice(), count: spans.len(), longest };
            PassSegments { segments, spans, horizon: None }
        };
        let tables = pass.iter().map(|part| part.sequence.kv().tables()).collect();
        let (all, outputs) = (of(&self.lists.all, all.1), of(&self.lists.outputs, outputs.1));
        let rows = pass.iter_mut().filter_map(|part| {
            let (position, rows, whole) = (part.position, part.ids.len(), part.is_whole);
            part.sequence.recurrent_mut().map(|state| RecurrentRows { state, position, rows, whole })
        });
        let mut rows: Vec<_> = rows.collect();
        let states = recurrent.as_mut().map(|recurrent| recurrent.begin(launcher, &mut rows)).transpose()?;
        Ok(Planned { plan, tables, states, all, outputs, output_rows })
    }

    /// Reallocates what is too small for a pass.
    fn grow(&mut self, models: &LoadedModels, shape: &Shape) -> Result<()> {
        let on = &*models.device;
        if shape.rows > self.lists.rows || shape.segments > self.lists.segments {
            let rows = shape.rows.max(self.lists.rows).next_power_of_two();
            let segments = shape.segments.max(self.lists.segments).next_power_of_two();
            let lists = Lists::new(on, rows, segments)?;
            if let Some(inputs) = &mut self.workspace.ops.inputs {
                *inputs = Arc::new(StateInputs::new(on, rows, inputs.width)?);
            }
            self.workspace.drop_recordings();
            self.workspace.readback.grow(on, segments, rows)?;
            self.recurrent.as_mut().map_or(Ok(()), |recurrent| recurrent.grow(on, segments))?;
            self.lists = lists;
        }
        if let Some(recurrent) = self.recurrent.as_mut().filter(|one| shape.longest_logged > one.log_rows()) {
            self.workspace.drop_recordings();
            recurrent.lengthen_logs(shape.longest_logged.next_power_of_two());
        }
        if shape.output_rows > self.workspace.ops.outputs.rows {
            self.workspace.drop_recordings();
            let (hidden, vocab) = (models.hidden_size(), models.target.vocab_size());
            self.workspace.ops.outputs = Arc::new(TargetOutputs::new(on, shape.output_rows, hidden, vocab)?);
        }
        let states = shape.rows * models.hidden_size();
        if shape.keeps_states && self.states.as_ref().is_none_or(|held| held.len() < states) {
            self.states = Some(Arc::new(Buffer::new(on, states)?));
        }
        self.workspace.ops.all_states = self.states.clone().filter(|_| shape.keeps_states);
        Ok(())
    }

    /// The recurrent state of an empty sequence; `None` without delta nets.
    ///
    /// # Errors
    /// If the device is out of memory, or the driver fails.
    pub fn new_recurrent(&mut self) -> Result<Option<RecurrentState>> {
        let launcher = self.workspace.launcher();
        self.recurrent.as_mut().map(|recurrent| recurrent.new_state(launcher)).transpose()
    }

    /// Ends the last round of a sequence of `len` positions: all committed rows are in the matrices
    /// of its delta nets then.
    ///
    /// # Errors
    /// If the device is out of memory, or the driver fails.
    pub fn apply_committed(&mut self, sequence: &mut Sequence, len: usize) -> Result<()> {
        let both = self.recurrent.as_mut().zip(sequence.recurrent_mut());
        both.map_or(Ok(()), |(recurrent, state)| recurrent.apply_committed(self.workspace.launcher(), state, len))
    }

    /// Whether [`Passes::accept`] was called for the last pass.
    pub fn has_accepted(&self) -> bool {
        self.accepted.is_some()
    }

    /// Accepts the drafts of the last pass that equal the target's tokens: for every segment with outputs, how many,
    /// and the token after them. Called again, it returns the same.
    ///
    /// # Errors
    /// If K or V of the pass were NaN or infinite, or the driver fails.
    pub fn accept(&mut self, models: &LoadedModels) -> Result<&[[u32; 2]]> {
        let accepted = match self.accepted.take() {
            Some(accepted) => accepted,
            None => self.run_accept(models, Accepting::Argmax)?,
        };
        Ok(self.accepted.insert(accepted))
    }

    /// Accepts `drafts` drafts of the `segment`th segment with outputs: the host simulates acceptance, to measure
    /// speed.
    ///
    /// # Errors
    /// As [`Passes::accept`].
    pub fn accept_count(&mut self, models: &LoadedModels, segment: usize, drafts: usize) -> Result<[u32; 2]> {
        Ok(self.run_accept(models, Accepting::Count { segment, drafts })?[segment])
    }

    fn run_accept(&mut self, models: &LoadedModels, accepting: Accepting) -> Result<Vec<[u32; 2]>> {
        let Shape { output_segments: segments, output_rows: rows, .. } = self.last;
        let Self { workspace, lists, last, .. } = self;
        workspace.replay(RecordedPass::Accept { segments, rows, accepting }, |workspace, ops| {
            lists.accept(workspace, ops, models, last, accepting, None)
        })?;
        let (accepted, ids) = workspace.readback.read(last.rows)?;
        self.ids = OnceCell::from(ids);
        Ok(accepted)
    }

    /// Chooses the token after the last row of every segment, without a wait: it is the newest token of the segment's
    /// sequence, and draft `index` of the state in `drafts`.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn draft(&mut self, models: &LoadedModels, index: usize, drafts: &[DeviceSlice<u32>]) -> Result<()> {
        let Self { workspace, lists, last, .. } = self;
        let segment = |state: &DeviceSlice<u32>| Segment { state: state.address(), ..Segment::default() };
        lists.drafts.set(workspace.launcher(), &drafts.iter().map(segment).collect::<Vec<_>>())?;
        let chosen = RecordedPass::Choose { segments: last.output_segments, index };
        workspace
            .replay(chosen, |workspace, ops| lists.accept(workspace, ops, models, last, Accepting::Argmax, Some(index)))
    }

    /// The tokens of the last pass.
    ///
    /// # Errors
    /// If its K or V were NaN or infinite, or the driver fails.
    pub fn ids(&self) -> Result<&[u32]> {
        match self.ids.get() {
            Some(ids) => Ok(ids),
            None => {
                let (_, ids) = self.workspace.readback.read(self.last.rows)?;
                Ok(self.ids.get_or_init(|| ids))
            }
        }
    }

    /// Waits for the last pass.
    ///
    /// # Errors
    /// As [`Passes::ids`].
    pub fn wait(&self) -> Result<()> {
        self.ids().map(drop)
    }

    /// Logits of `rows` output rows of the last pass from `first` on, after the soft cap: `(rows, vocab)`.
    ///
    /// # Errors
    /// If K or V of the pass were NaN or infinite, or the driver fails.
    pub fn logits(&self, models: &LoadedModels, first: usize, rows: usize) -> Result<Vec<f32>> {
        self.wait()?;
        let vocab = models.target.vocab_size();
        let mut logits = self.workspace.ops.outputs.logits.read(first * vocab, rows * vocab)?;
        models.soft_cap(&mut logits);
        Ok(logits)
    }

    /// The [`KEPT`](foretoken_gpu::plan::vocabulary::KEPT) largest logits of every output row of the last pass, after
    /// the soft cap, by ascending id, without tokens that are never chosen.
    ///
    /// # Errors
    /// As [`Passes::logits`].
    pub fn largest_logits(&mut self, models: &LoadedModels) -> Result<&[Row]> {
        let rows = match self.largest.take() {
            Some(rows) => rows,
            None => self.find_largest(models)?,
        };
        Ok(self.largest.insert(rows))
    }

    fn find_largest(&mut self, models: &LoadedModels) -> Result<Vec<Row>> {
        let last = self.last;
        self.workspace.replay(RecordedPass::Largest { rows: last.output_rows }, |_, ops| {
            let (scores, to) = (last.scores(ops, models), ops.outputs.largest());
            ops.queue.launcher.run(largest_parts(&scores, &to))?;
            ops.queue.launcher.run(largest(&scores, &to))
        })?;
        self.wait()?;
        let mut rows = self.workspace.ops.outputs.read_largest(last.output_rows)?;
        rows.iter_mut().for_each(|row| models.soft_cap(&mut row.logits));
        Ok(rows)
    }

    /// The hidden state of output row `row` of the last pass: `(hidden)`.
    pub fn hidden(&self, row: usize, width: usize) -> DeviceSlice<f32> {
        subslice(self.workspace.ops.outputs.hidden.slice(), row * width, width)
    }
}

fn states_of<'s>(pass: &'s mut [SequenceRows<'_>]) -> impl Iterator<Item = &'s mut RecurrentState> {
    pass.iter_mut().filter_map(|part| part.sequence.recurrent_mut())
}
