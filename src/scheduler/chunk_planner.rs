//! Chooses how many prompt rows a pass reads while other sequences decode, from measured times.
//!
//! Decoding sequences wait for the whole pass. The baseline is measured from passes without prompts, the
//! marginal cost of a prompt row from passes with. A chunk has as many rows as keep the pass within a
//! multiple of the baseline. The planner reads no clock.

use std::collections::VecDeque;
use std::time::Duration;

use crate::speculative::{Tuning, median};

/// Chunks are multiples of this many rows, at least one: a whole row block of the quantized CPU kernels
/// (`ROW_BLOCK`), whose sums fill the registers.
const STEP: usize = 8;

/// Passes with chunks before the next pass without, which refreshes the baseline: at the default slowdown of 3 that
/// takes 1 / (1 + 3 * 16) = 2 % of the time, [`Tuning::loss`].
const PASSES_TO_TRIAL: usize = 16;

/// Chooses the number of prompt rows.
#[derive(Clone, Debug)]
pub(crate) struct ChunkPlanner {
    slowdown: f64,
    /// Seconds of passes without prompts, since the number of decoding sequences last crossed a power of two.
    baseline: Recent,
    decoding: usize,
    chunks: usize, // passes with chunks since the last without
    row: Recent,   // seconds per prompt row
}

/// The last measurements, as many as a planner's median has.
#[derive(Clone, Debug, Default)]
struct Recent(VecDeque<f64>);

impl ChunkPlanner {
    /// Passes with chunks take at most `slowdown` times as long as those without, unless [`STEP`] rows take longer.
    pub fn new(slowdown: f64) -> Self {
        Self { slowdown, baseline: Recent::default(), decoding: 0, chunks: 0, row: Recent::default() }
    }

    /// Prompt rows of the next pass, in which `decoding` sequences decode. 0: the baseline must be measured first.
    pub fn rows(&self, decoding: usize) -> usize {
        if decoding == 0 || self.slowdown == f64::INFINITY {
            return usize::MAX;
        }
        if self.slowdown.is_nan() || self.slowdown <= 1.0 {
            return STEP;
        }
        let is_known = self.decoding == decoding.next_power_of_two() && self.chunks < PASSES_TO_TRIAL;
        let Some(pass) = self.baseline.median().filter(|_| is_known) else { return 0 };
        let row = self.row.median().unwrap_or(f64::INFINITY);
        let rows = (self.slowdown - 1.0) * pass / row;
        (rows as usize / STEP * STEP).max(STEP)
    }

    /// Records a pass of `decoding` decoding sequences and `prompt_rows` prompt rows that took
    /// `time`, proposing and accepting included.
    pub fn observe(&mut self, decoding: usize, prompt_rows: usize, time: Duration) {
        if decoding == 0 {
            return;
        }
        let (decoding, time) = (decoding.next_power_of_two(), time.as_secs_f64());
        if self.decoding != decoding {
            (self.decoding, self.baseline) = (decoding, Recent::default());
        }
        if prompt_rows == 0 {
            self.baseline.add(time);
            self.chunks = 0;
        } else {
            self.chunks += 1;
            // A remainder of a few rows may cost nothing. At most half of the pass is attributed to decoding: a
            // baseline measured while the machine was slower would make prompt rows seem free.
            if let Some(pass) = self.baseline.median().filter(|_| prompt_rows >= STEP && time > 0.0) {
                self.row.add((time - pass).max(0.5 * time) / prompt_rows as f64);
            }
        }
    }
}

impl Recent {
    fn add(&mut self, value: f64) {
        self.0.push_front(value);
        self.0.truncate(Tuning::default().median);
    }

    fn median(&self) -> Option<f64> {
        median(self.0.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    /// Reads prompts while 4 sequences decode, on a machine of (baseline milliseconds, milliseconds
    /// per prompt row). Times vary by a quarter, one in 20 is eight times as long. Returns
    /// undisturbed pass times relative to the baseline.
    fn times(planner: &mut ChunkPlanner, (baseline, row): (f64, f64), rng: &mut StdRng) -> Vec<f64> {
        let step = |_| {
            let rows = planner.rows(4).min(512);
            let ms = baseline + row * rows as f64;
            let outlier = if rng.random_bool(0.05) { 8.0 } else { 1.0 };
            let seconds = 1e-3 * ms * outlier * rng.random_range(0.75..1.25);
            planner.observe(4, rows, Duration::from_secs_f64(seconds));
            ms / baseline
        };
        (0..1000).map(step).collect()
    }

    #[test]
    fn chunks_are_as_long_as_the_slowdown_allows() {
        for seed in 0..20 {
            let mut rng = StdRng::seed_from_u64(seed);
            let mut planner = ChunkPlanner::new(3.0);
            for machine in [(2.5, 0.2), (70.0, 5.0), (20.0, 0.3), (2.5, 0.2)] {
                let times = times(&mut planner, machine, &mut rng);
                let measured = &times[200..];
                let mean = measured.iter().sum::<f64>() / measured.len() as f64;
                assert!((2.3..3.1).contains(&mean), "seed {seed}, {machine:?}: {mean:.2} times the baseline");
                let longer = measured.iter().filter(|time| **time > 4.0).count();
                assert!(longer <= measured.len() / 20, "seed {seed}, {machine:?}: {longer} passes were too long");
            }
        }
    }

    #[test]
    fn the_baseline_is_measured_first() {
        let (mut planner, ms) = (ChunkPlanner::new(3.0), Duration::from_millis);
        assert_eq!((planner.rows(0), planner.rows(4)), (usize::MAX, 0));
        planner.observe(4, 0, ms(10));
        assert_eq!((planner.rows(4), planner.rows(3), planner.rows(5)), (STEP, STEP, 0));
        planner.observe(4, STEP, ms(14)); // 0.875 ms a row, at least half is attributed to the rows
        assert_eq!(planner.rows(4), 16);
        (1..PASSES_TO_TRIAL).for_each(|_| planner.observe(4, 2, ms(10))); // remainders
        assert_eq!(planner.rows(4), 0);
        planner.observe(4, 0, ms(20));
        assert_eq!(planner.rows(4), 16); // the lower median
        // The baseline of another number of sequences is discarded: whether they draft may have changed since.
        planner.observe(2, 0, ms(1));
        assert_eq!(planner.rows(4), 0);
        planner.observe(4, 0, ms(30));
        assert_eq!(planner.rows(4), 64);
    }

    #[test]
    fn chunks_do_not_grow_without_bound_on_a_machine_that_got_faster() {
        let mut planner = ChunkPlanner::new(3.0);
        planner.observe(4, 0, Duration::from_millis(100));
        for _ in 1..PASSES_TO_TRIAL {
            let rows = planner.rows(4);
            let ms = 10 + rows as u64;
            assert!(ms <= 400, "{ms} ms, but 300 was three times the baseline");
            planner.observe(4, rows, Duration::from_millis(ms));
        }
    }

    #[test]
    fn prompts_go_on_whatever_is_asked_for() {
        for (slowdown, rows) in [(0.0, STEP), (1.0, STEP), (1.01, STEP), (f64::NAN, STEP), (f64::INFINITY, usize::MAX)]
        {
            let mut planner = ChunkPlanner::new(slowdown);
            planner.observe(4, 0, Duration::from_millis(10));
            planner.observe(4, STEP, Duration::ZERO);
            planner.observe(4, STEP, Duration::from_millis(20));
            assert_eq!(planner.rows(4), rows, "{slowdown}");
        }
    }
}
