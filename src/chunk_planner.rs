//! How many rows of prompts a pass reads while other sequences decode, by measured times.
//!
//! The others wait for the whole pass. How long it takes without prompts is known from passes that read none, and what a row of a
//! prompt adds from passes that do; a chunk has as many rows as keep the pass within a multiple of the time without. The planner
//! is a function of what it is told: it reads no clock.

use std::collections::VecDeque;
use std::time::Duration;

/// Rows of a chunk are a multiple of these, and at least as many: fewer would read the weights for too little.
const STEP: usize = 8;

/// Measurements whose median counts.
const WINDOW: usize = 5;

/// Passes with chunks after which one without is due, so that what is usual is known of the machine as it is now.
const PASSES_TO_TRIAL: usize = 16;

/// Chooses the rows.
#[derive(Clone, Debug)]
pub(crate) struct ChunkPlanner {
    slowdown: f64,
    /// Seconds of passes without prompts, since the number of decoding sequences has been up to this power of two.
    usual: Recent,
    decoding: usize,
    chunks: usize, // passes with chunks since the last without
    row: Recent,   // seconds of a prompt's row
}

/// The newest measurements.
#[derive(Clone, Debug, Default)]
struct Recent(VecDeque<f64>);

impl ChunkPlanner {
    /// Passes with chunks take `slowdown` times as long as those without.
    pub fn new(slowdown: f64) -> Self {
        Self { slowdown, usual: Recent::default(), decoding: 0, chunks: 0, row: Recent::default() }
    }

    /// Rows of prompts in the next pass, in which `decoding` sequences decode. 0: one without is to be measured first.
    pub fn rows(&self, decoding: usize) -> usize {
        if decoding == 0 || self.slowdown == f64::INFINITY {
            return usize::MAX;
        }
        if self.slowdown.is_nan() || self.slowdown <= 1.0 {
            return STEP;
        }
        let is_known = self.decoding == decoding.next_power_of_two() && self.chunks < PASSES_TO_TRIAL;
        let Some(pass) = self.usual.median().filter(|_| is_known) else { return 0 };
        let row = self.row.median().unwrap_or(f64::INFINITY);
        let rows = (self.slowdown - 1.0) * pass / row;
        (rows as usize / STEP * STEP).max(STEP)
    }

    /// Takes in a pass in which `decoding` sequences decoded, beside `prompt_rows` rows of prompts, that took `time`, proposing and
    /// accepting included.
    pub fn observe(&mut self, decoding: usize, prompt_rows: usize, time: Duration) {
        if decoding == 0 {
            return;
        }
        let (decoding, time) = (decoding.next_power_of_two(), time.as_secs_f64());
        if self.decoding != decoding {
            (self.decoding, self.usual) = (decoding, Recent::default());
        }
        if prompt_rows == 0 {
            self.usual.add(time);
            self.chunks = 0;
        } else {
            self.chunks += 1;
            // A remainder of a few rows may cost nothing. No more than half of a pass is put down to the others: if the usual one
            // was measured while the machine was slower, a prompt's row would seem to cost nothing.
            if let Some(pass) = self.usual.median().filter(|_| prompt_rows >= STEP && time > 0.0) {
                self.row.add((time - pass).max(0.5 * time) / prompt_rows as f64);
            }
        }
    }
}

impl Recent {
    fn add(&mut self, value: f64) {
        self.0.push_front(value);
        self.0.truncate(WINDOW);
    }

    fn median(&self) -> Option<f64> {
        let mut values: Vec<f64> = self.0.iter().copied().collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len().saturating_sub(1) / 2).copied()
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    /// Reads prompts beside 4 sequences on a machine of (milliseconds of a pass without prompts, of a row), times varying by a
    /// quarter and one of 20 eight times as long, and returns the times of the passes without that, in those of a usual one.
    fn times(planner: &mut ChunkPlanner, (usual, row): (f64, f64), rng: &mut StdRng) -> Vec<f64> {
        let step = |_| {
            let rows = planner.rows(4).min(512);
            let ms = usual + row * rows as f64;
            let outlier = if rng.random_bool(0.05) { 8.0 } else { 1.0 };
            let seconds = 1e-3 * ms * outlier * rng.random_range(0.75..1.25);
            planner.observe(4, rows, Duration::from_secs_f64(seconds));
            ms / usual
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
                let settled = &times[200..];
                let mean = settled.iter().sum::<f64>() / settled.len() as f64;
                assert!((2.3..3.1).contains(&mean), "seed {seed}, {machine:?}: {mean:.2} times a usual pass");
                let longer = settled.iter().filter(|time| **time > 4.0).count();
                assert!(longer <= settled.len() / 20, "seed {seed}, {machine:?}: {longer} passes were too long");
            }
        }
    }

    #[test]
    fn what_is_usual_is_measured_first() {
        let (mut planner, ms) = (ChunkPlanner::new(3.0), Duration::from_millis);
        assert_eq!((planner.rows(0), planner.rows(4)), (usize::MAX, 0));
        planner.observe(4, 0, ms(10));
        assert_eq!((planner.rows(4), planner.rows(3), planner.rows(5)), (STEP, STEP, 0));
        planner.observe(4, STEP, ms(14)); // 0.875 ms a row, for at least half is the rows'
        assert_eq!(planner.rows(4), 16);
        (1..PASSES_TO_TRIAL).for_each(|_| planner.observe(4, 2, ms(10))); // remainders
        assert_eq!(planner.rows(4), 0);
        planner.observe(4, 0, ms(20));
        assert_eq!(planner.rows(4), 16); // the lower median
        // What was usual of another number of sequences is forgotten: whether they draft may have changed since.
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
            assert!(ms <= 400, "{ms} ms, where 300 were three times as long as usual before");
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
