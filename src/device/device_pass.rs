//! A pass on a device, and its results for the host.

use std::ops::Range;

use parking_lot::{Mutex, MutexGuard};

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::vocabulary::{KEPT, MAX_KEPT_OF, NO_ID};

use super::buffer::subslice;
use super::loaded::LoadedModels;
use super::models::Models;
use super::outputs::Row;
use super::passes::{Passes, SequenceRows};
use super::sequence::{DRAFTED, Sequence};
use super::states::DeviceStates;
use crate::model::OutputRows;
use crate::speculative::Accepted;
use crate::{Error, Result};

/// A sequence's part of a pass.
pub(crate) struct PassPart<'a> {
    pub sequence: &'a Mutex<Sequence>,
    pub ids: Vec<u32>,
    pub position: usize,
    /// The hidden states beside the tokens, if the model reads any.
    pub states: Vec<DeviceSlice<f32>>,
    /// Rows with logits and hidden states.
    pub outputs: OutputRows,
    /// Rows with hidden states: the same, or all.
    pub hidden: OutputRows,
    /// Whether the rows are committed whole or not at all.
    pub is_whole: bool,
}

/// The rows of a draft step.
#[derive(Clone)]
pub(super) struct StepRows {
    pub ids: Vec<u32>,
    pub position: usize,
    /// The hidden states beside the tokens, if the model reads any.
    pub states: Vec<DeviceSlice<f32>>,
}

impl<'a> PassPart<'a> {
    /// Rows of a drafter, any first ones of which can be committed; those with logits have hidden states.
    pub(super) fn of_draft(sequence: &'a Mutex<Sequence>, rows: StepRows, outputs: OutputRows) -> Self {
        let StepRows { ids, position, states } = rows;
        Self { sequence, ids, position, states, outputs, hidden: outputs, is_whole: false }
    }
}

/// A pass. Its results are there until it is dropped; other passes of the models wait for that.
pub(crate) struct DevicePass<'a> {
    models: &'a LoadedModels,
    passes: MutexGuard<'a, Passes>,
    sequences: Vec<MutexGuard<'a, Sequence>>,
    parts: Vec<Part>,
}

/// The rows of a part.
#[derive(Clone, Copy)]
struct Part {
    position: usize, // of the first output row
    first: usize,
    rows: usize,
    outputs: usize,
    output: usize,       // index among the parts with outputs
    first_output: usize, // row
}

/// The results of one part of a pass.
pub(crate) struct DeviceOutput<'p> {
    models: &'p LoadedModels,
    passes: &'p mut Passes,
    sequences: Vec<&'p mut Sequence>,
    parts: &'p [Part],
    index: usize,
}

/// How drafts are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum AcceptRule {
    /// A draft is accepted if it is the target's argmax.
    Argmax,
    /// All given drafts are accepted: the host simulates acceptance, to measure speed.
    All,
}

impl<'a> DevicePass<'a> {
    /// Runs a pass over the rows of some sequences of one plan.
    ///
    /// # Errors
    /// If the device is out of memory, or the driver fails.
    pub fn run(models: &'a Models, parts: Vec<PassPart<'a>>) -> Result<Self> {
        let mut sequences: Vec<_> = parts.iter().map(|part| part.sequence.lock()).collect();
        let mut passes = models.passes();
        let (mut rows, mut placed) = (Vec::with_capacity(parts.len()), Vec::with_capacity(parts.len()));
        let (mut first, mut output, mut first_output) = (0, 0, 0);
        for (sequence, part) in sequences.iter_mut().zip(&parts) {
            let (len, outputs) = (part.ids.len(), part.outputs.of(part.ids.len()));
            let position = part.position + len - outputs;
            placed.push(Part { position, first, rows: len, outputs, output, first_output });
            first += len;
            output += usize::from(outputs > 0);
            first_output += outputs;
            rows.push(SequenceRows {
                sequence,
                ids: &part.ids,
                position: part.position,
                states: &part.states,
                outputs,
                keeps_states: part.hidden == OutputRows::All,
                is_whole: part.is_whole,
            });
        }
        passes.forward(&models.loaded, &mut rows)?;
        Ok(Self { models: &models.loaded, passes, sequences, parts: placed })
    }

    /// The results of part `index`.
    pub fn output(&mut self, index: usize) -> DeviceOutput<'_> {
        let sequences = self.sequences.iter_mut().map(|sequence| &mut **sequence).collect();
        DeviceOutput { models: self.models, passes: &mut self.passes, sequences, parts: &self.parts, index }
    }

    /// Accepts the drafts of all parts by [`AcceptRule::Argmax`].
    ///
    /// # Errors
    /// If K or V were NaN or infinite, or the driver fails.
    pub fn accept(&mut self) -> Result<()> {
        self.output(0).accept_argmax()
    }

    /// Chooses the most probable token after the last row of each part, without a wait: it is draft `index` in the
    /// state in `drafts`, and the newest token of the part's own sequence.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn draft(&mut self, index: usize, drafts: &[DeviceSlice<u32>]) -> Result<()> {
        self.sequences.iter_mut().for_each(|sequence| sequence.set_known(None));
        self.passes.draft(self.models, index, drafts)?;
        for (part, sequence) in self.parts.iter().zip(&mut self.sequences) {
            sequence.set_known(Some((part.position + 1, DRAFTED)));
        }
        Ok(())
    }

    /// Waits for the pass, and for the [`DeviceOutput::largest_logits`] of all parts if `count` are wanted.
    ///
    /// # Errors
    /// If K or V were NaN or infinite, or the driver fails.
    pub fn wait(&mut self, count: Option<usize>) -> Result<()> {
        if let Some(count) = count {
            self.output(0).largest_logits(0, count)?;
        }
        self.passes.wait()
    }
}

impl DeviceOutput<'_> {
    fn part(&self) -> Part {
        self.parts[self.index]
    }

    /// Accepts drafts by `rule`: returns how many, and the token after them. [`DRAFTED`] ids in
    /// `drafts` are replaced by the real ones.
    ///
    /// # Errors
    /// If the scores, or K or V, are NaN or infinite, or the driver fails.
    pub fn accept(&mut self, drafts: &mut [u32], rule: AcceptRule) -> Result<Accepted> {
        let part = self.part();
        let [accepted, next] = match rule {
            AcceptRule::Argmax => {
                self.accept_argmax()?;
                self.passes.accept(self.models)?[part.output]
            }
            AcceptRule::All => {
                let sequence = &mut self.sequences[self.index];
                if self.passes.has_accepted() {
                    // For another sequence, and this one has advanced with it.
                    let start = part.position + part.outputs - part.rows;
                    sequence.set(self.passes.workspace.launcher(), (start, NO_ID), None)?;
                }
                sequence.set_known(None);
                let result = self.passes.accept_count(self.models, part.output, drafts.len())?;
                self.sequences[self.index].set_known(part.state_after(result));
                result
            }
        };
        part.copy_tokens(self.passes.ids()?, drafts);
        if next == NO_ID { Err(Error::logits(None)) } else { Ok(Accepted { count: accepted as usize, next }) }
    }

    /// Accepts the drafts of all parts, unless that is done.
    fn accept_argmax(&mut self) -> Result<()> {
        if self.passes.has_accepted() {
            return Ok(());
        }
        let parts = self.parts.iter().zip(&mut self.sequences);
        let mut parts: Vec<_> = parts.filter(|(part, _)| part.outputs > 0).collect();
        // Until the results are read, only the device knows.
        parts.iter_mut().for_each(|(_, sequence)| sequence.set_known(None));
        let accepted = self.passes.accept(self.models)?;
        for (part, sequence) in parts {
            sequence.set_known(part.state_after(accepted[part.output]));
        }
        Ok(())
    }

    /// Continues the sequence with `token` after output row `row`. No launch if accepting had the same result.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn set_newest(&mut self, row: usize, token: u32) -> Result<()> {
        let (part, width) = (self.part(), self.models.hidden_size());
        let hidden = self.passes.hidden(part.first_output + row, width);
        let launcher = self.passes.workspace.launcher();
        self.sequences[self.index].set(launcher, (part.position + row + 1, token), Some(hidden))
    }

    /// Waits for the pass.
    ///
    /// # Errors
    /// If K or V were NaN or infinite, or the driver fails.
    pub fn wait(&self) -> Result<()> {
        self.passes.wait()
    }

    /// Logits of the first `rows` output rows, after the soft cap: `(rows, vocab)`.
    ///
    /// # Errors
    /// As [`DeviceOutput::wait`].
    pub fn logits(&self, rows: usize) -> Result<Vec<f32>> {
        self.passes.logits(self.models, self.part().first_output, rows)
    }

    /// The `count` largest logits of each of the first `rows` output rows, or more, after the soft cap;
    /// `None` if the device does not find that many.
    ///
    /// # Errors
    /// As [`DeviceOutput::wait`].
    pub fn largest_logits(&mut self, rows: usize, count: usize) -> Result<Option<&[Row]>> {
        if count > KEPT || self.models.target.vocab_size() > MAX_KEPT_OF {
            return Ok(None);
        }
        let first = self.part().first_output;
        Ok(Some(&self.passes.largest_logits(self.models)?[first..first + rows]))
    }

    /// The hidden states of the output rows `rows`: `(rows, hidden)`.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn hidden(&self, rows: Range<usize>) -> Result<Vec<f32>> {
        let width = self.models.hidden_size();
        let hidden = &self.passes.workspace.ops.outputs.hidden;
        hidden.read((self.part().first_output + rows.start) * width, rows.len() * width)
    }

    /// The hidden states of the part's first `rows` rows, all of which have one.
    pub fn states(&self, rows: usize) -> DeviceStates {
        let (part, ops, width) = (self.part(), &self.passes.workspace.ops, self.models.hidden_size());
        let (states, first) = match &ops.all_states {
            Some(states) => (states.slice(), part.first),
            None => (ops.outputs.hidden.slice(), part.first_output),
        };
        let rows = subslice(states, first * width, rows * width);
        DeviceStates { rows, state: self.sequences[self.index].state().clone() }
    }

    /// The last output row.
    pub fn last_row(&self) -> usize {
        self.part().outputs.saturating_sub(1)
    }

    /// Replaces [`DRAFTED`] ids by the ids in device memory.
    ///
    /// # Errors
    /// If the driver fails, or a draft's scores were NaN or infinite.
    pub fn resolve(&self, drafts: &mut [u32]) -> Result<()> {
        if drafts.contains(&DRAFTED) {
            self.part().copy_tokens(self.passes.ids()?, drafts);
        }
        if drafts.contains(&NO_ID) { Err(Error::logits(None).of_draft()) } else { Ok(()) }
    }
}

impl Part {
    /// Writes the part's tokens after its first output row to `drafts`.
    fn copy_tokens(&self, ids: &[u32], drafts: &mut [u32]) {
        let first = self.first + self.rows - self.outputs + 1;
        drafts.copy_from_slice(&ids[first..first + drafts.len()]);
    }

    /// The sequence's state after accepting.
    fn state_after(&self, [accepted, next]: [u32; 2]) -> Option<(usize, u32)> {
        (next != NO_ID).then_some((self.position + accepted as usize + 1, next))
    }
}
