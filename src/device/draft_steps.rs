//! Draft steps of any number of sequences.

use std::sync::{Arc, Weak};

use foretoken_gpu::plan::positions::{DraftInput, begin_step};
use foretoken_gpu::plan::segments::{ON_DEVICE, Segment, Segments};
use foretoken_gpu::plan::vocabulary::{Chosen, Scores, argmax, argmax_parts};
use parking_lot::Mutex;

use super::buffer::subslice;
use super::kv::Span;
use super::list::List;
use super::loaded::{DeviceAssistant, LoadedModels};
use super::ops::{DeviceOps, no_assistant};
use super::outputs::IdsAndScores;
use super::positions::{DraftAngles, PassKv, PassSegments, Stores};
use super::recordings::RecordedPass;
use super::sequence::Sequence;
use super::workspace::Workspace;
use crate::{Error, Result};

/// Rows allocated initially.
const MIN_ROWS: usize = 4;

/// A sequence's row of a draft step.
pub(super) struct DraftRow<'a> {
    pub sequence: &'a Arc<Mutex<Sequence>>,
    pub position: usize,
    /// The last token and the drafts after it, [`ON_DEVICE`] where the host does not know them.
    pub tokens: &'a [u32],
}

/// The current draft: each of its steps has one row per sequence.
#[derive(Default)]
pub(super) struct DraftSteps {
    lists: Option<Lists>,
    angles: DraftAngles,
    /// The sequences in order of rows, each with its [`Sequence::id`]. A sequence whose draft is complete keeps its
    /// row, which is computed and not used.
    sequences: Vec<(Weak<Mutex<Sequence>>, u64)>,
    done: usize, // steps
}

/// What the host writes before a step.
struct Lists {
    given: List<u32>,
    segments: List<Segment>,
}

impl DraftSteps {
    /// Drafts the token after those of each row; all rows have equally many tokens, and their sequences one plan. The
    /// tokens become drafts in the sequences' states. Returns each one's row in [`DraftSteps::scores`].
    ///
    /// # Errors
    /// If the models have no assistant, there are as many tokens as a pass may have rows, or the
    /// device is out of memory or fails.
    pub fn step(
        &mut self,
        workspace: &mut Workspace,
        models: &LoadedModels,
        rows: &[DraftRow<'_>],
    ) -> Result<Vec<usize>> {
        let Some(first) = rows.first() else { return Ok(Vec::new()) };
        let (plan, last_step) = (first.sequence.lock().plan().clone(), first.tokens.len() - 1);
        if last_step + 1 >= plan.max_rows() {
            let most = plan.max_rows() - 1;
            return Err(Error::argument("drafts", format!("must be at most {most}, one less than rows of a pass")));
        }
        let sequences = match self.continued(rows, last_step) {
            Some(sequences) => sequences,
            None => self.begin(workspace, models, rows)?,
        };
        let row_of = |row: &DraftRow<'_>| sequences.iter().position(|one| Arc::ptr_eq(one, row.sequence));
        let indices: Vec<usize> = rows.iter().filter_map(row_of).collect();
        let end = rows.iter().map(|row| row.position).max().unwrap_or(0);
        for step in self.done..=last_step {
            let mut given = vec![ON_DEVICE; sequences.len()];
            // The first step's tokens are in the sequences' states.
            if step > 0 {
                rows.iter().zip(&indices).for_each(|(row, index)| given[*index] = row.tokens[step]);
            }
            let horizon = workspace.reach(end);
            if let Some(lists) = &mut self.lists {
                lists.given.set(workspace.launcher(), &given)?;
            }
            let recorded = RecordedPass::Draft { plan: plan.id(), segments: sequences.len(), step };
            workspace.replay(recorded, |workspace, ops| {
                let stores = Stores { plan: &plan, tables: Vec::new(), faults: workspace.readback.faults() };
                self.launch(ops, models, stores, sequences.len(), step, horizon)
            })?;
            self.done = step + 1;
        }
        Ok(indices)
    }

    /// The sequences of the draft, if `rows` are next steps of some of them. If other drafts were made in between, the
    /// hidden states of the last step are lost, and all steps are repeated. The returned references keep the sequences
    /// alive until the step is launched; memory is freed after the kernels that read it.
    fn continued(&self, rows: &[DraftRow<'_>], step: usize) -> Option<Vec<Arc<Mutex<Sequence>>>> {
        // The id differs if a snapshot replaced the sequence. One that is locked waits for this workspace.
        let same = |sequence: &Mutex<Sequence>, id| sequence.try_lock().is_some_and(|sequence| sequence.id() == id);
        let alive = |(sequence, id): &(Weak<_>, _)| sequence.upgrade().filter(|sequence| same(sequence, *id));
        let sequences: Vec<_> = self.sequences.iter().map(alive).collect::<Option<_>>()?;
        let is_in = |row: &DraftRow<'_>| sequences.iter().any(|one| Arc::ptr_eq(one, row.sequence));
        (step > 0 && self.done == step && rows.iter().all(is_in)).then_some(sequences)
    }

    /// Begins a draft.
    fn begin(
        &mut self,
        workspace: &mut Workspace,
        models: &LoadedModels,
        rows: &[DraftRow<'_>],
    ) -> Result<Vec<Arc<Mutex<Sequence>>>> {
        // After an error the lists may be new, or have sequences of either draft: none goes on with them.
        (self.sequences, self.done) = (Vec::new(), 0);
        self.grow(workspace, models, rows.len())?;
        let (mut segments, mut sequences) = (Vec::with_capacity(rows.len()), Vec::with_capacity(rows.len()));
        for (i, row) in rows.iter().enumerate() {
            let mut sequence = row.sequence.lock();
            sequence.set(workspace.launcher(), (row.position, row.tokens[0]), None)?;
            segments.push(sequence.segment(i, 1));
            sequences.push((Arc::downgrade(row.sequence), sequence.id()));
        }
        if let Some(lists) = &mut self.lists {
            lists.segments.set(workspace.launcher(), &segments)?;
        }
        self.sequences = sequences;
        Ok(rows.iter().map(|row| row.sequence.clone()).collect())
    }

    /// Launches step `step` over `rows` rows, whose positions are below `horizon`.
    fn launch(
        &self,
        ops: &DeviceOps,
        models: &LoadedModels,
        stores: Stores<'_>,
        rows: usize,
        step: usize,
        horizon: usize,
    ) -> Result<()> {
        let both = models.assistant.as_ref().zip(ops.draft.as_deref()).zip(self.lists.as_ref());
        let ((DeviceAssistant { model, donors }, outputs), lists) = both.ok_or_else(no_assistant)?;
        let segments = Segments { slice: lists.segments.slice(), count: rows, longest: 1 };
        let (places, ids) = (outputs.places.slice(), subslice(outputs.ids.slice(), 0, rows));
        let (input, launcher) = (outputs.input.slice(), &ops.queue.launcher);
        let begin = DraftInput {
            given: lists.given.slice(),
            step,
            hidden: (step > 0).then(|| outputs.hidden.slice()),
            ids,
            input,
            width: models.hidden_size(),
        };
        launcher.run(begin_step(&segments, places, &begin))?;
        // The host's positions are not used below a horizon.
        let spans = (0..rows).map(|first| Span { first, rows: 1, position: 0, end: 0 }).collect();
        let pass = PassSegments { segments, spans, horizon: Some(horizon) };
        let mut kv = PassKv::draft(stores, pass, places, &self.angles, donors, step);
        let (scores, _) = model.step(ops, models.target.embed_tokens(), ids, &input, &mut kv)?;
        let scores = Scores { suppressed: models.suppressed(), ..scores };
        let chosen = Chosen::Draft { segments, index: step };
        launcher.run(argmax_parts(&scores, outputs.partial.slice(), &chosen))?;
        launcher.run(argmax(&scores, outputs.partial.slice(), &chosen))
    }

    /// Reallocates what is too small for `rows` rows.
    fn grow(&mut self, workspace: &mut Workspace, models: &LoadedModels, rows: usize) -> Result<()> {
        if workspace.ops.draft.as_ref().is_some_and(|outputs| rows <= outputs.rows) {
            return Ok(());
        }
        let assistant = models.assistant.as_ref().ok_or_else(no_assistant)?;
        let (on, rows) = (&*models.device, rows.next_power_of_two().max(MIN_ROWS));
        // Both or neither, if memory is exhausted.
        let outputs = assistant.outputs(on, rows, models.hidden_size())?;
        let lists = Lists { given: List::new(on, rows)?, segments: List::new(on, rows)? };
        workspace.drop_recordings();
        (workspace.ops.draft, self.lists) = (Some(Arc::new(outputs)), Some(lists));
        Ok(())
    }

    /// The last step's scores of row `row`.
    ///
    /// # Errors
    /// If the models have no assistant, or the driver fails.
    pub fn scores(&self, workspace: &Workspace, models: &LoadedModels, row: usize) -> Result<IdsAndScores> {
        let both = models.assistant.as_ref().zip(workspace.ops.draft.as_deref());
        let (assistant, outputs) = both.ok_or_else(no_assistant)?;
        assistant.read_scores(outputs, row)
    }
}

#[cfg(test)]
mod tests {
    use foretoken_gpu::DeviceSlice;

    use super::*;
    use crate::device::Device;
    use crate::device::addresses::Addresses;
    use crate::device::device_model::DeviceModel;
    use crate::device::kv::KvPlan;
    use crate::device::outputs::DraftOutputs;
    use crate::device::pages::PageMemory;
    use crate::device::readback::Readback;
    use crate::device::weights::DeviceEmbedding;
    use crate::kv::{KvLayout, KvOptions, PagePool};
    use crate::model::Request;

    /// A target without layers.
    struct Target;

    impl DeviceModel for Target {
        fn hidden_size(&self) -> usize {
            4
        }

        fn vocab_size(&self) -> usize {
            16
        }

        fn kv_layout(&self) -> KvLayout {
            KvLayout { stores: Vec::new(), store_of_layer: Vec::new(), inverse_frequencies: Vec::new() }
        }

        fn embed_tokens(&self) -> &DeviceEmbedding {
            unreachable!("not called")
        }

        fn forward(&self, _: &DeviceOps, _: DeviceSlice<u32>, _: &mut PassKv<'_>, _: &Request) -> Result<()> {
            unreachable!("not called")
        }
    }

    #[test]
    fn a_draft_that_cannot_begin_ends_the_one_before() {
        let device: Arc<dyn Device> = Arc::new(Addresses::default());
        let readback = Readback::new(&*device, Vec::new(), 0, 1, 1).expect("memory");
        let mut workspace = Workspace::new(&device, &Target, 1, None, readback).expect("memory");
        workspace.ops.draft = Some(Arc::new(DraftOutputs::new(&*device, MIN_ROWS, 4, 1, 16).expect("memory")));
        let plan = KvPlan::new(&*device, &Target.kv_layout(), &KvOptions::default(), 64, 0).expect("a plan");
        let pages = Arc::new(PageMemory::new(device.clone(), PagePool::new(None)));
        let sequence = Arc::new(Mutex::new(Sequence::new(&pages, Arc::new(plan), 4, None).expect("memory")));
        let models = LoadedModels { device, target: Box::new(Target), assistant: None, suppressed: None };
        let row = |position| DraftRow { sequence: &sequence, position, tokens: &[7] };
        let mut steps = DraftSteps::default();
        steps.begin(&mut workspace, &models, &[row(1)]).expect("a draft");
        steps.done = 1;
        assert!(steps.continued(&[row(1)], 1).is_some());
        // No state has this length.
        assert!(steps.begin(&mut workspace, &models, &[row(usize::MAX)]).is_err());
        assert!(steps.continued(&[row(1)], 1).is_none());
    }
}
