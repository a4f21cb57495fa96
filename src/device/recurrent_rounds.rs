//! Rounds of recurrent states: what a pass commits before it begins, and where its rows are staged.
//!
//! The host decides what a round commits, after the pass: it cuts texts at stop tokens. So a round is committed at the
//! beginning of the sequence's next pass, from its position, in stream order and without a wait.

use std::sync::Arc;

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::delta_net::{Committed, Layer, commit, delta_rule};
use foretoken_gpu::plan::segments::{Recurrent, Segment, Segments};

use super::Device;
use super::buffer::Buffer;
use super::launcher::Launcher;
use super::list::List;
use super::recurrent::{DeltaNets, RecurrentState};
use crate::{Error, Result};

/// The recurrent states' part of passes.
pub(super) struct RecurrentRounds {
    /// With the rows of the logs of new rounds.
    nets: DeltaNets,
    records: List<Recurrent>,
    ended: List<Segment>,
    counts: List<u32>,
    /// Matrices that no sequence has: those before the last rounds that were committed whole. The rounds of the next pass
    /// take them; if none does, one is kept.
    spare: Vec<Arc<Buffer<f32>>>,
}

/// A sequence's rows in a pass.
pub(super) struct RecurrentRows<'a> {
    pub state: &'a mut RecurrentState,
    pub position: usize,
    pub rows: usize,
    /// Whether they are committed whole or not at all.
    pub whole: bool,
}

/// The recurrent states of a pass.
#[derive(Clone, Copy)]
pub(super) struct PassStates {
    pub nets: DeltaNets,
    /// Whether rows of a segment are not logged.
    pub has_whole: bool,
}

impl RecurrentRows<'_> {
    /// Whether the matrices after the rows are written to other memory, with logs of `log_rows` rows.
    fn writes_other_matrices(&self, log_rows: usize) -> bool {
        self.whole && self.rows > log_rows
    }
}

impl RecurrentRounds {
    /// For passes of `segments` segments.
    ///
    /// # Errors
    /// If the device is out of memory.
    pub fn new(device: &dyn Device, nets: DeltaNets, segments: usize) -> Result<Self> {
        let (records, ended) = (List::new(device, segments)?, List::new(device, segments)?);
        Ok(Self { nets, records, ended, counts: List::new(device, 2 * segments)?, spare: Vec::new() })
    }

    /// The same for more segments.
    ///
    /// # Errors
    /// If the device is out of memory.
    pub fn grow(&mut self, device: &dyn Device, segments: usize) -> Result<()> {
        let Self { records, ended, counts, .. } = Self::new(device, self.nets, segments)?;
        (self.records, self.ended, self.counts) = (records, ended, counts);
        Ok(())
    }

    /// The state of an empty sequence.
    ///
    /// # Errors
    /// If the device is out of memory, or the driver fails.
    pub fn new_state(&mut self, launcher: &Launcher) -> Result<RecurrentState> {
        let matrices = self.take_matrices(launcher.device())?;
        RecurrentState::new(launcher, self.nets, matrices)
    }

    /// The address of segment `index`'s record: see [`Segment::recurrent`].
    pub fn record(&self, index: usize) -> u64 {
        self.records.slice().address() + (index * size_of::<Recurrent>()) as u64
    }

    /// Largest number of rows of a round that logs them, so that any number from the first on can be committed.
    pub fn log_rows(&self) -> usize {
        self.nets.shape.log_rows
    }

    /// Lengthens the logs of new rounds. Passes recorded before are invalid then.
    pub fn lengthen_logs(&mut self, log_rows: usize) {
        self.nets = self.nets.with_log_rows(log_rows);
    }

    /// Commits the last rounds of the sequences of a pass, and begins its own.
    ///
    /// # Errors
    /// If the device is out of memory, or the driver fails; the last rounds may be committed then,
    /// and no round is begun.
    pub fn begin(&mut self, launcher: &Launcher, pass: &mut [RecurrentRows<'_>]) -> Result<PassStates> {
        let log_rows = self.log_rows();
        for RecurrentRows { state, position, .. } in pass.iter_mut() {
            if state.has_other_logs(log_rows) {
                self.apply_committed(launcher, state, *position)?;
            }
        }
        self.commit(launcher, pass.iter_mut().map(|rows| (&mut *rows.state, rows.position)))?;
        let needed = pass.iter().filter(|rows| rows.writes_other_matrices(log_rows)).count();
        self.spare.truncate(needed.max(1));
        let mut whole = Vec::with_capacity(pass.len());
        for rows in pass.iter_mut() {
            let to_other_memory = rows.writes_other_matrices(log_rows);
            rows.state.reserve_logs(launcher.device(), log_rows)?;
            if rows.state.replays() && !to_other_memory {
                rows.state.make_unique(launcher)?;
            }
            whole.push(to_other_memory.then(|| self.take_matrices(launcher.device())).transpose()?);
        }
        let has_whole = whole.iter().any(Option::is_some);
        let begin = |(rows, whole): (&mut RecurrentRows<'_>, _)| {
            rows.state.begin(rows.position, rows.rows, whole);
            rows.state.record()
        };
        let records: Vec<_> = pass.iter_mut().zip(whole).map(begin).collect();
        // A round that stays open is committed later, with no rows, as if its pass had applied the accepted ones.
        let written = self.records.set(launcher, &records);
        written.inspect_err(|_| pass.iter_mut().for_each(|rows| rows.state.cancel()))?;
        Ok(PassStates { nets: self.nets, has_whole })
    }

    /// Commits the last round of a sequence of `len` positions, and applies all committed rows to its matrices.
    ///
    /// # Errors
    /// If the device is out of memory, or the driver fails.
    pub fn apply_committed(&mut self, launcher: &Launcher, state: &mut RecurrentState, len: usize) -> Result<()> {
        self.commit(launcher, [(&mut *state, len)])?;
        self.spare.truncate(1);
        if !state.replays() {
            return Ok(());
        }
        state.make_unique(launcher)?;
        let DeltaNets { shape, layers } = state.nets();
        let segments = self.list(launcher, &[state.record()])?;
        let apply = |index| {
            let layer = Layer { shape, index, layers, segments, rows: 0, inputs: None };
            launcher.run(delta_rule(&layer, DeviceSlice::new(0, 0)))
        };
        apply(0)?;
        let rest = (1..layers)
            .try_for_each(apply)
            .and_then(|()| launcher.run(commit(&shape, layers, &segments, &Committed::Rows { segment: 0, rows: 0 })));
        rest.inspect_err(|_| state.lose())?;
        state.mark_applied();
        Ok(())
    }

    /// Commits the last rounds of sequences, whose logs have the same length, at their numbers of positions.
    ///
    /// # Errors
    /// If a state is lost, or a launch fails.
    fn commit<'a>(
        &mut self,
        launcher: &Launcher,
        states: impl IntoIterator<Item = (&'a mut RecurrentState, usize)>,
    ) -> Result<()> {
        let mut ended = Vec::new();
        for (state, len) in states {
            if state.is_lost() {
                let problem = "a recurrent state was lost when a pass failed in part; start a new session".into();
                return Err(Error::Device { device: launcher.device().name(), problem });
            }
            if let Some(rows) = state.committed(len)? {
                ended.push((state, rows));
            }
        }
        let Some((state, _)) = ended.first() else { return Ok(()) };
        let DeltaNets { shape, layers } = state.nets();
        let records: Vec<_> = ended.iter().map(|(state, _)| state.record()).collect();
        let segments = self.list(launcher, &records)?;
        // As acceptance counts: without the first row.
        let counts: Vec<_> = ended.iter().flat_map(|(_, rows)| [(*rows as u32).wrapping_sub(1), 0]).collect();
        self.counts.set(launcher, &counts)?;
        launcher.run(commit(&shape, layers, &segments, &Committed::Accepted(self.counts.slice())))?;
        for (state, rows) in ended {
            self.spare.extend(state.end(rows));
        }
        Ok(())
    }

    /// Segments without rows, of these records.
    fn list(&mut self, launcher: &Launcher, records: &[Recurrent]) -> Result<Segments> {
        self.records.set(launcher, records)?;
        let segment = |i| Segment { recurrent: self.record(i), ..Segment::default() };
        let segments: Vec<_> = (0..records.len()).map(segment).collect();
        self.ended.set(launcher, &segments)?;
        Ok(Segments { slice: self.ended.slice(), count: segments.len(), longest: 0 })
    }

    fn take_matrices(&mut self, device: &dyn Device) -> Result<Arc<Buffer<f32>>> {
        self.spare.pop().map_or_else(|| self.nets.new_matrices(device), Ok)
    }
}

#[cfg(test)]
mod tests {
    use foretoken_gpu::plan::delta_net::{HeadOrder, Shape};

    use super::*;
    use crate::device::addresses::Addresses;
    use crate::device::temporaries::Temporaries;

    /// Prompts read in passes of all sequences: the matrices before a chunk become those after the next one.
    #[test]
    fn whole_rounds_take_the_matrices_of_those_before() {
        let (order, device) = (HeadOrder::Grouped, Arc::new(Addresses::default()));
        let shape = Shape { key_heads: 1, value_heads: 1, key_dim: 4, value_dim: 4, order, taps: 2, log_rows: 2 };
        let launcher = Launcher::new(Temporaries::new(device.clone()));
        let mut rounds = RecurrentRounds::new(&*device, DeltaNets { shape, layers: 1 }, 3).expect("memory");
        let mut states: Vec<_> = (0..3).map(|_| rounds.new_state(&launcher).expect("a state")).collect();
        let mut begin = |position: usize, rows: usize, whole: bool| {
            let rows = states.iter_mut().map(|state| RecurrentRows { state, position, rows, whole });
            rounds.begin(&launcher, &mut rows.collect::<Vec<_>>()).expect("a pass");
            (device.allocations(), device.live())
        };
        let (allocations, live) = begin(0, 5, true);
        assert_eq!(begin(5, 5, true), (allocations, live), "a chunk after the first one allocates");
        // Of matrices that no round takes, those of one sequence are kept.
        assert_eq!(begin(10, 1, false), (allocations, live - 2 * 4 * shape.matrices_len()));
    }
}
