//! Recorded passes.

use std::collections::HashMap;

use foretoken_gpu::plan::accept::Accepting;

use super::Recording;

/// Minimum distance of horizons in positions: two attention splits.
const MIN_HORIZON: usize = 512;

/// Maximum number of recordings, at which the least recently used is dropped. A batch has as many shapes as its drafts
/// have lengths.
const MAX_RECORDINGS: usize = 256;

/// The key of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum RecordedPass {
    /// A target pass over the rows of some segments, all of them output rows.
    Verify { plan: u64, segments: usize, rows: usize, longest: usize },
    /// Accepting drafts of the last pass, which has `rows` output rows.
    Accept { segments: usize, rows: usize, accepting: Accepting },
    /// Draft `index` of every segment of the last pass.
    Choose { segments: usize, index: usize },
    /// The largest logits of the last pass, which has `rows` output rows.
    Largest { rows: usize },
    /// Step `step` of a draft.
    Draft { plan: u64, segments: usize, step: usize },
}

/// Recordings, and the state that they are valid for.
#[derive(Default)]
pub(super) struct Recordings {
    made: HashMap<RecordedPass, Made>,
    uses: u64,
    horizon: usize,
    shallow: u32, // passes since one needed a quarter of the horizon
}

struct Made {
    recording: Box<dyn Recording>,
    used: u64, // of `uses`, the last time
}

/// The value of `shallow` above which the horizon shrinks. Surplus splits cost launches of blocks that end at once, in
/// every pass of every layer; recording again costs a few rounds, and deep sequences may alternate with others.
const MAX_SHALLOW: u32 = 64;

impl Recordings {
    /// The horizon for positions below `end`. If `end` exceeds the current one, the new one is the next multiple of 1/8
    /// of the next power of two, and all recordings are dropped: recording takes about as long as a few rounds. It
    /// shrinks when no pass has needed a quarter of it for long.
    pub fn reach(&mut self, end: usize) -> usize {
        // A query that sees no position has a split as well.
        let end = end.max(1);
        let step = (end.next_power_of_two() / 8).max(MIN_HORIZON);
        let horizon = end.next_multiple_of(step);
        self.shallow = if horizon <= self.horizon / 4 { self.shallow + 1 } else { 0 };
        if end > self.horizon || self.shallow > MAX_SHALLOW {
            *self = Self { horizon, ..Self::default() };
        }
        self.horizon
    }

    /// Positions below it are covered.
    pub fn horizon(&self) -> usize {
        self.horizon
    }

    pub fn is_empty(&self) -> bool {
        self.made.is_empty()
    }

    /// Drops all.
    pub fn clear(&mut self) {
        self.made.clear();
    }

    /// The recording of a pass, for a use.
    pub fn get(&mut self, pass: &RecordedPass) -> Option<&dyn Recording> {
        self.uses += 1;
        let made = self.made.get_mut(pass)?;
        made.used = self.uses;
        Some(&*made.recording)
    }

    pub fn insert(&mut self, pass: RecordedPass, recording: Box<dyn Recording>) {
        if self.made.len() >= MAX_RECORDINGS {
            let oldest = self.made.iter().min_by_key(|(_, made)| made.used).map(|(pass, _)| *pass);
            if let Some(oldest) = oldest {
                self.made.remove(&oldest);
            }
        }
        self.made.insert(pass, Made { recording, used: self.uses });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Result;

    struct Nothing;

    impl Recording for Nothing {
        unsafe fn replay(&self) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_least_recently_used_recording_is_dropped() {
        let mut recordings = Recordings::default();
        let pass = |rows| RecordedPass::Largest { rows };
        for rows in 0..MAX_RECORDINGS + 9 {
            assert!(recordings.get(&pass(rows)).is_none());
            recordings.insert(pass(rows), Box::new(Nothing));
            assert!(recordings.get(&pass(0)).is_some(), "{rows}");
        }
        let held: Vec<_> = (0..MAX_RECORDINGS + 9).filter(|rows| recordings.get(&pass(*rows)).is_some()).collect();
        assert_eq!(held, [0].into_iter().chain(10..MAX_RECORDINGS + 9).collect::<Vec<_>>());
    }

    #[test]
    fn the_horizon_follows_the_passes() {
        let mut recordings = Recordings::default();
        assert_eq!([recordings.reach(0), recordings.reach(MIN_HORIZON)], [MIN_HORIZON; 2]);
        let deep = recordings.reach(200_000);
        assert!((200_000..230_000).contains(&deep));
        // Of two sequences, one is deep.
        for _ in 0..3 * MAX_SHALLOW {
            assert_eq!([recordings.reach(1000), recordings.reach(190_000)], [deep; 2]);
        }
        let shallow: Vec<_> = (0..3 * MAX_SHALLOW).map(|_| recordings.reach(1000)).collect();
        let (before, after) = shallow.split_at(MAX_SHALLOW as usize);
        assert!(before.iter().all(|horizon| *horizon == deep));
        assert!(after.iter().all(|horizon| *horizon == after[0] && (1000..4 * 1000).contains(horizon)));
        assert_eq!(recordings.reach(1001), after[0]);
    }
}
