//! Statistics of speculation.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::{Costs, DrafterKind, Proposal, Reason, RoundResult};

/// Minimum measurements of a plain step for a comparison: the first one after a prompt runs with cold caches.
const MIN_PLAIN_MEASUREMENTS: usize = 2;

/// Counts and times of speculation.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SpeculationStats {
    /// The drafters, in the order of the request's list.
    pub drafters: Vec<DrafterStats>,
    /// Rounds by the rows that they verified: `rows[b]` rounds verified `b`.
    pub rows: Vec<usize>,
    /// Rounds by the planner's reason.
    pub reasons: BTreeMap<&'static str, usize>,
    /// Passes of the target that drafts saved: tokens emitted, less rounds.
    pub passes_saved: usize,
    /// Time the drafters took to start a generation: part of that for its prompt.
    #[serde(serialize_with = "milliseconds")]
    pub begin: Duration,
    /// Time spent drafting; at pipeline depth 2 partly in parallel with the caller.
    #[serde(serialize_with = "milliseconds")]
    pub draft: Duration,
    /// Time that rounds waited for drafts.
    #[serde(serialize_with = "milliseconds")]
    pub wait: Duration,
    /// Time in the target's passes.
    #[serde(serialize_with = "milliseconds")]
    pub verify: Duration,
    /// Time for acceptance, text and commit.
    #[serde(serialize_with = "milliseconds")]
    pub accept: Duration,
    /// Drafts discarded because their generation had ended.
    pub cancelled: usize,
    /// Estimated milliseconds of verifying 1, 2, ... rows at the final context: v(B).
    pub verify_ms: Vec<f64>,
    /// Estimated milliseconds of plain decoding passes for the tokens of the rounds; `None` if plain steps were not
    /// measured. Plain steps are scaled by the slowdown of the measured passes (due to other processes).
    #[serde(skip)]
    pub plain_ms: Option<f64>,
}

/// One drafter's statistics.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DrafterStats {
    /// The drafter; `None` only in an empty default.
    pub kind: Option<DrafterKind>,
    /// Calls for a draft.
    pub calls: usize,
    /// Tokens it proposed, whether or not they were verified.
    pub proposed: usize,
    /// Its drafts that were verified.
    pub drafts: usize,
    /// Drafts with at least one accepted token.
    pub accepted_drafts: usize,
    /// Its tokens that were verified.
    pub drafted: usize,
    /// Those that were accepted.
    pub accepted: usize,
    /// For each draft position, drafts that had a token there.
    pub drafted_at: Vec<usize>,
    /// For each of these positions, drafts whose token there was accepted.
    pub accepted_at: Vec<usize>,
    /// Time for its drafts.
    #[serde(serialize_with = "milliseconds")]
    pub draft: Duration,
    /// Estimated milliseconds of a step, if it is a model.
    pub step_ms: Option<f64>,
}

impl DrafterStats {
    /// Tokens per round that it drafts for, including the target's own.
    pub fn mean_accepted_length(&self) -> f64 {
        if self.drafts > 0 { 1.0 + self.accepted as f64 / self.drafts as f64 } else { 1.0 }
    }

    fn add(&mut self, other: &Self) {
        self.kind = self.kind.or(other.kind);
        self.calls += other.calls;
        self.proposed += other.proposed;
        self.drafts += other.drafts;
        self.accepted_drafts += other.accepted_drafts;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        add_all(&mut self.drafted_at, &other.drafted_at);
        add_all(&mut self.accepted_at, &other.accepted_at);
        self.draft += other.draft;
        self.step_ms = other.step_ms.or(self.step_ms);
    }
}

/// Times in JSON are milliseconds.
fn milliseconds<S: serde::Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(1e3 * time.as_secs_f64())
}

/// Adds element by element.
pub(crate) fn add_all(to: &mut Vec<usize>, from: &[usize]) {
    to.resize(to.len().max(from.len()), 0);
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}

/// Counts a draft of `drafted` tokens, of which the first `accepted` were accepted, at each position. Both lists have
/// an element for every position drafted so far.
pub(crate) fn count_draft(drafted_at: &mut Vec<usize>, accepted_at: &mut Vec<usize>, drafted: usize, accepted: usize) {
    for (at, places) in [(drafted_at, drafted), (accepted_at, accepted)] {
        at.resize(at.len().max(drafted), 0);
        at[..places].iter_mut().for_each(|n| *n += 1);
    }
}

impl SpeculationStats {
    pub(crate) fn new(kinds: &[DrafterKind]) -> Self {
        let drafter = |kind: &DrafterKind| DrafterStats { kind: Some(*kind), ..DrafterStats::default() };
        Self { drafters: kinds.iter().map(drafter).collect(), ..Self::default() }
    }

    pub(crate) fn count(&mut self, round: &RoundResult, wait: Duration) {
        let Proposal { draft, decision, calls, time, .. } = &round.proposal;
        let (drafted, rows) = (draft.tokens.len(), 1 + draft.tokens.len());
        self.rows.resize(self.rows.len().max(rows + 1), 0);
        self.rows[rows] += 1;
        *self.reasons.entry(decision.reason.name()).or_default() += 1;
        self.passes_saved += round.tokens.len() - 1;
        self.draft += *time;
        self.wait += wait;
        self.verify += round.timing.verify;
        self.accept += round.accept_time;
        for call in calls {
            let drafter = &mut self.drafters[call.drafter];
            drafter.calls += 1;
            drafter.proposed += call.tokens;
            drafter.draft += call.time;
        }
        if let Some(drafter) = decision.plan.drafter().filter(|_| drafted > 0) {
            let drafter = &mut self.drafters[drafter];
            drafter.drafts += 1;
            drafter.accepted_drafts += usize::from(round.accepted > 0);
            drafter.drafted += drafted;
            drafter.accepted += round.accepted;
            count_draft(&mut drafter.drafted_at, &mut drafter.accepted_at, drafted, round.accepted);
        }
    }

    /// Records the planner's cost estimates.
    pub(crate) fn estimate(&mut self, costs: &Costs, context: usize) {
        let most = self.rows.len().max(9) - 1;
        let estimates = costs.verify(context, most);
        self.verify_ms = estimates.iter().map(|estimate| estimate.ms).collect();
        for drafter in &mut self.drafters {
            drafter.step_ms = drafter.kind.and_then(|kind| costs.known_step(kind));
        }
        let passes: f64 = self.rows.iter().skip(1).zip(&self.verify_ms).map(|(n, ms)| *n as f64 * ms).sum();
        let plain = estimates.first().filter(|plain| plain.samples >= MIN_PLAIN_MEASUREMENTS && passes > 0.0);
        self.plain_ms = plain.map(|plain| {
            let tokens = self.passes_saved + self.rows.iter().sum::<usize>();
            let slower = 1e3 * (self.verify + self.accept).as_secs_f64() / passes;
            tokens as f64 * plain.ms * slower
        });
    }

    /// Adds another generation's counts and times; drafters are matched by index.
    pub fn add(&mut self, other: &Self) {
        self.plain_ms = match (self.plain_ms, other.plain_ms) {
            (Some(own), Some(other)) => Some(own + other),
            (None, other) if self.rows.is_empty() => other,
            (own, None) if other.rows.is_empty() => own,
            _ => None,
        };
        self.drafters.resize(self.drafters.len().max(other.drafters.len()), DrafterStats::default());
        self.drafters.iter_mut().zip(&other.drafters).for_each(|(to, from)| to.add(from));
        add_all(&mut self.rows, &other.rows);
        other.reasons.iter().for_each(|(reason, n)| *self.reasons.entry(reason).or_default() += n);
        self.passes_saved += other.passes_saved;
        self.begin += other.begin;
        self.draft += other.draft;
        self.wait += other.wait;
        self.verify += other.verify;
        self.accept += other.accept;
        self.cancelled += other.cancelled;
        if !other.verify_ms.is_empty() {
            self.verify_ms = other.verify_ms.clone();
        }
    }
}

impl Reason {
    /// Its name in statistics and traces.
    pub fn name(self) -> &'static str {
        match self {
            Self::Best => "best",
            Self::Probe => "probe",
            Self::MeasurePlain => "measure plain",
            Self::LossLimit => "loss limit",
            Self::FixedBlock => "fixed block",
            Self::Nothing => "nothing",
        }
    }
}
