//! What speculation has won against plain decoding, and may lose.

use super::costs::octave;
use super::{Costs, DrafterKind, Observation};

/// Share of plain decoding's time that speculation may lose, and of how many tokens at least.
const FLOOR: f64 = 0.0195;
const LEAST: usize = 256;

/// Plain steps that the account holds at most: what was won long ago is not to be gambled away.
const CREDIT: f64 = 32.0;

/// By how much of its uncertainty a plain step is taken to be cheaper than measured.
const CAUTION: f64 = 1.0;

/// The floor account. It keeps the rounds, not what they seemed to cost when they were new, and prices them again as
/// costs become known better; a pause that the machine took is nobody's debt.
#[derive(Clone, Debug)]
pub(super) struct Ledger {
    emitted: usize,
    balance: f64, // in plain steps
    octave: usize,
    settled: f64,     // tokens, and what may be lost, less what is not in question any more
    rounds: Vec<f64>, // by rows
    steps: Vec<(DrafterKind, f64)>,
}

impl Ledger {
    pub(super) fn new() -> Self {
        Self::from(0, 0, FLOOR * LEAST as f64)
    }

    fn from(emitted: usize, octave: usize, balance: f64) -> Self {
        Self { emitted, octave, balance, settled: balance, rounds: Vec::new(), steps: Vec::new() }
    }

    /// Plain steps that may be lost now.
    pub(super) fn balance(&self) -> f64 {
        self.balance
    }

    /// Whether the text is still shorter than what the least loss is allowed for.
    pub(super) fn is_new(&self) -> bool {
        self.emitted < LEAST
    }

    pub(super) fn emitted(&self) -> usize {
        self.emitted
    }

    pub(super) fn add(&mut self, round: &Observation<'_>, costs: &Costs) {
        if self.octave != octave(round.context) {
            *self = Self::from(self.emitted, octave(round.context), self.balance);
        }
        let emitted = self.emitted + round.emitted;
        self.settled += round.emitted as f64 + FLOOR * emitted.saturating_sub(self.emitted.max(LEAST)) as f64;
        self.emitted = emitted;
        let rows = round.rows.max(1);
        if self.rounds.len() < rows {
            self.rounds.resize(rows, 0.0);
        }
        self.rounds[rows - 1] += 1.0;
        if let Some((kind, tokens, _)) = round.steps {
            match self.steps.iter_mut().find(|(other, _)| *other == kind) {
                Some((_, steps)) => *steps += tokens as f64,
                None => self.steps.push((kind, tokens as f64)),
            }
        }

        let estimates = costs.verify(round.context, self.rounds.len());
        let plain_ms = estimates[0].ms - CAUTION * (estimates[0].ms - estimates[0].least_ms);
        let drafts = self.rounds.iter().zip(&estimates).skip(1);
        let verified = drafts.map(|(count, rows)| count * rows.paid_ms).sum::<f64>();
        let drafted = self.steps.iter().map(|(kind, steps)| steps * costs.step(*kind, round.context)).sum::<f64>();
        self.balance = self.settled - self.rounds[0] - (verified + drafted) / plain_ms;
        if self.balance > CREDIT {
            *self = Self::from(self.emitted, self.octave, CREDIT);
        }
    }
}
