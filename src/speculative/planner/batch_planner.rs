//! Decides whether the sequences of a batch draft, by measured tokens per second.
//!
//! A sequence's [planner](super::Planner) weighs what verifying costs, and draft steps at the price of a single
//! sequence. The cost of proposing for a batch (prompt lookups one after another, draft steps together) shows only in
//! the time of whole passes. So passes with and without drafts are tried alternately, the faster mode is used, and
//! the next trial is scheduled so that its loss stays within a share of the time. Alternately, because other
//! processes slow a machine down by more than the modes differ. Numbers of sequences are grouped by powers of two: a
//! server's passes have many numbers, few of each.

use std::collections::BTreeMap;
use std::time::Duration;

use super::tuning::Tuning;

/// Passes of a trial, half of them with drafts. On simulated machines whose passes vary by a quarter, trials of 8
/// to 64 passes reach .99 of the faster mode's speed; in the 4000 passes after a change of the text 16 reach
/// .984, 64 .969. Averaging over trials gains nothing.
const TRIAL: usize = 16;

/// How the sequences of a pass decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassMode {
    /// Those whose planners choose may draft.
    WithDrafts,
    /// Those draft nothing.
    Plain,
}

/// Modes by number of sequences, rounded up to a power of two. All schedulers of an engine share it: one may plan a
/// pass before another has observed its own.
#[derive(Clone, Debug, Default)]
pub struct BatchPlanner {
    up_to: BTreeMap<usize, Mode>,
}

/// The faster mode, between and during trials.
#[derive(Clone, Debug, Default)]
struct Mode {
    advantage: f64, // log of tokens/s with drafts over tokens/s of plain steps
    passes: usize,  // since the last trial began
    next: usize,    // passes from the start of the last trial to the next
    with_drafts: Speed,
    plain: Speed,
}

#[derive(Clone, Copy, Debug, Default)]
struct Speed {
    passes: usize,
    tokens: usize,
    time: Duration,
}

impl BatchPlanner {
    /// The mode of the next pass of `sequences` sequences. A single one always may draft: its planner knows all costs.
    pub fn mode(&self, sequences: usize) -> PassMode {
        let drafts = sequences <= 1 || self.up_to.get(&sequences.next_power_of_two()).is_none_or(Mode::drafts);
        if drafts { PassMode::WithDrafts } else { PassMode::Plain }
    }

    /// Records a pass of `sequences` sequences without prompts that emitted `tokens` tokens in
    /// `time`, proposing and accepting included.
    pub fn observe(&mut self, sequences: usize, mode: PassMode, tokens: usize, time: Duration) {
        if sequences > 1 && tokens > 0 && !time.is_zero() {
            self.up_to.entry(sequences.next_power_of_two()).or_default().observe(mode, tokens, time);
        }
    }
}

impl Mode {
    fn drafts(&self) -> bool {
        if self.passes < TRIAL { self.with_drafts.passes <= self.plain.passes } else { self.advantage > 0.0 }
    }

    fn observe(&mut self, mode: PassMode, tokens: usize, time: Duration) {
        if self.passes < TRIAL {
            let speed = match mode {
                PassMode::WithDrafts => &mut self.with_drafts,
                PassMode::Plain => &mut self.plain,
            };
            *speed = Speed { passes: speed.passes + 1, tokens: speed.tokens + tokens, time: speed.time + time };
        }
        self.passes += 1;
        // If memory was short, no pass may have had drafts: the last comparison holds then.
        let compares = self.with_drafts.passes > 0 && self.plain.passes > 0;
        if self.passes == TRIAL && compares {
            self.advantage = (self.with_drafts.per_second() / self.plain.per_second()).ln();
            let lost = 0.5 * (1.0 - (-self.advantage.abs()).exp()); // of the time of a trial
            self.next = (TRIAL as f64 * (lost / Tuning::default().exploration).max(1.0)) as usize;
        }
        if self.passes >= self.next.max(TRIAL) {
            (self.passes, self.with_drafts, self.plain) = (0, Speed::default(), Speed::default());
        }
    }
}

impl Speed {
    fn per_second(self) -> f64 {
        self.tokens as f64 / self.time.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    /// Runs passes of 8 sequences that take (milliseconds, tokens) with and without drafts, times varying by a quarter,
    /// and returns their speed relative to the faster mode's.
    fn speed(planner: &mut BatchPlanner, with_drafts: (f64, usize), plain: (f64, usize), rng: &mut StdRng) -> f64 {
        let (mut tokens, mut ms) = (0.0, 0.0);
        let mut slow = 1.0_f64;
        for _ in 0..4000 {
            slow = (slow * rng.random_range(0.9..1.1)).clamp(0.7, 1.5); // due to other processes
            let mode = planner.mode(8);
            let (mean, emitted) = if mode == PassMode::WithDrafts { with_drafts } else { plain };
            let seconds = 1e-3 * mean * slow * rng.random_range(0.75..1.25);
            planner.observe(8, mode, emitted, Duration::from_secs_f64(seconds));
            (tokens, ms) = (tokens + emitted as f64, ms + mean);
        }
        tokens / ms / (with_drafts.1 as f64 / with_drafts.0).max(plain.1 as f64 / plain.0)
    }

    #[test]
    fn trials_lose_little_and_find_the_faster_mode() {
        for seed in 0..20 {
            let (mut planner, mut rng) = (BatchPlanner::default(), StdRng::seed_from_u64(seed));
            for (with_drafts, plain) in
                [((8.0, 12), (4.0, 8)), ((5.0, 16), (4.0, 8)), ((6.0, 12), (4.0, 8)), ((4.4, 8), (4.0, 8))]
            {
                let of_best = speed(&mut planner, with_drafts, plain, &mut rng);
                assert!(of_best > 0.97, "seed {seed}: {of_best:.3} of the faster of {with_drafts:?} and {plain:?}");
            }
        }
    }

    #[test]
    fn powers_of_two_are_tried_apart() {
        let mut planner = BatchPlanner::default();
        for _ in 0..TRIAL {
            let mode = planner.mode(8);
            let (ms, tokens) = if mode == PassMode::WithDrafts { (8, 12) } else { (4, 8) };
            planner.observe(8, mode, tokens, Duration::from_millis(ms));
        }
        assert_eq!([8, 5].map(|sequences| planner.mode(sequences)), [PassMode::Plain; 2]);
        assert_eq!([9, 4, 1].map(|sequences| planner.mode(sequences)), [PassMode::WithDrafts; 3]);
    }

    /// Two schedulers of an engine plan a pass each before either has observed one.
    #[test]
    fn passes_count_in_the_mode_that_they_had() {
        let mut planner = BatchPlanner::default();
        for _ in 0..TRIAL / 2 {
            for mode in [planner.mode(8), planner.mode(8)] {
                let ms = if mode == PassMode::WithDrafts { 4 } else { 8 };
                planner.observe(8, mode, 8, Duration::from_millis(ms));
            }
        }
        assert_eq!(planner.mode(8), PassMode::WithDrafts);
    }
}
