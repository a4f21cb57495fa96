//! Chooses each round's drafter and draft length from measured costs and acceptance rates.
//!
//! The planner uses neither clock nor RNG. For every available draft it knows the expected tokens of verifying
//! it to each length, from acceptance probabilities by position, and the expected milliseconds, from measured
//! costs; it maximizes tokens per millisecond over the whole table, because v(B) has steps at which hill
//! climbing would stop. A plain step is one of the choices.
//!
//! Two budgets limit the cost of this. *Exploration*, a share of the time, accumulates to try the
//! candidate that would be fastest at the lower confidence bound of its cost, if that beats the best
//! choice. *Loss*, a share of plain decoding's time plus all that drafts have gained, must cover a round
//! in which no draft is accepted; else a plain step is taken.
//!
//! On simulated machines, with and without prompt-lookup drafts, a text takes at most 5 % longer than plain decoding if
//! measured times vary by 8 %, 12 % if they vary by 20 %, and 8 % if acceptance is adversarial (a text under 256 tokens
//! counts as 256); from round 200 on, a model's drafts reach 0.97 of the best fixed choice's speed, and 0.95 together
//! with prompt-lookup drafts (0.9 if one round in ten has one), on average over texts and machines.

mod acceptance;
mod batch_planner;
mod block;
mod costs;
mod streak;
mod tuning;

pub(crate) use batch_planner::{BatchPlanner, PassMode};
pub use block::{BlockSize, MtpPreset};
pub(crate) use costs::median;
pub use costs::{Costs, Estimate, Machine};
pub use tuning::Tuning;

use std::ops::Add;

use crate::speculative::{DraftCost, DrafterKind};
use acceptance::Acceptance;
use streak::Streak;

/// Minimum length of a text in the loss budget: the loss allowed for this many tokens may occur at once.
const MIN_TEXT_TOKENS: usize = 256;

/// A drafter available in this round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AvailableDrafter {
    /// Its index in the session's list.
    pub drafter: usize,
    /// Its kind: steps of a kind cost the same.
    pub kind: DrafterKind,
    /// How its cost scales with the length.
    pub cost: DraftCost,
    /// Maximum tokens: what prompt lookup found, any number for a model.
    pub tokens: usize,
}

/// Other sequences of the same pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OtherSequences {
    /// Their rows.
    pub rows: usize,
    /// Minimum tokens that they emit: one for each that decodes.
    pub tokens: usize,
    /// Rows of those that read prompts.
    pub prompt_rows: usize,
}

impl OtherSequences {
    /// The others without `one`.
    pub(crate) fn without(self, one: Self) -> Self {
        Self {
            rows: self.rows - one.rows,
            tokens: self.tokens - one.tokens,
            prompt_rows: self.prompt_rows - one.prompt_rows,
        }
    }
}

impl Add for OtherSequences {
    type Output = Self;

    fn add(self, more: Self) -> Self {
        Self {
            rows: self.rows + more.rows,
            tokens: self.tokens + more.tokens,
            prompt_rows: self.prompt_rows + more.prompt_rows,
        }
    }
}

/// Inputs of a decision.
#[derive(Clone, Copy, Debug)]
pub struct DecisionInput<'a> {
    /// Committed positions.
    pub context: usize,
    /// Maximum rows to verify.
    pub max_rows: usize,
    /// The available drafters.
    pub drafters: &'a [AvailableDrafter],
    /// Other sequences in the pass: costs are those of the whole batch.
    pub others: OtherSequences,
}

/// The plan of a round. Drafters are indices in the session's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// One plain step.
    Plain,
    /// Verifies `tokens` of a drafter's draft.
    Draft {
        /// The drafter.
        drafter: usize,
        /// Number of tokens.
        tokens: usize,
    },
}

impl Plan {
    /// The drafter, unless it is a plain step.
    pub(super) fn drafter(self) -> Option<usize> {
        match self {
            Self::Plain => None,
            Self::Draft { drafter, .. } => Some(drafter),
        }
    }
}

/// Why a plan was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// It has the highest expected tokens per millisecond.
    Best,
    /// At the lower bound of its cost it beats the best, and the exploration budget covers its expected loss.
    Probe,
    /// The cost of a plain step was not measured, or too long ago.
    MeasurePlain,
    /// Faster plans could lose more than the balance.
    LossLimit,
    /// The block size is fixed.
    FixedBlock,
    /// No draft is available.
    Nothing,
}

/// A plan, and the planner's estimates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// The plan.
    pub plan: Plan,
    /// The reason.
    pub reason: Reason,
    /// Expected tokens.
    pub tokens: f64,
    /// Expected milliseconds of drafting and verifying.
    pub ms: f64,
    /// Expected milliseconds of a plain step.
    pub plain_ms: f64,
    /// Plain steps that may be lost: those gained over plain decoding so far, plus the loss budget.
    pub balance: f64,
}

/// Result of a round.
#[derive(Clone, Copy, Debug)]
pub struct Observation<'a> {
    /// Committed positions before it.
    pub context: usize,
    /// Rows verified.
    pub rows: usize,
    /// Other sequences in the pass.
    pub others: OtherSequences,
    /// Milliseconds of the whole batch's pass and of this sequence's acceptance.
    pub verify_ms: f64,
    /// The draft steps of a model, if one drafted.
    pub steps: Option<ModelSteps>,
    /// The draft that was verified.
    pub verified: Option<DraftOutcome>,
    /// Prompt lookup drafts, verified or not, up to the number of emitted tokens.
    pub found: &'a [DraftOutcome],
    /// Tokens emitted.
    pub emitted: usize,
}

/// The draft steps of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelSteps {
    /// The drafter's kind.
    pub kind: DrafterKind,
    /// Tokens drafted, verified or not.
    pub tokens: usize,
    /// Milliseconds of all steps.
    pub ms: f64,
}

/// A draft, and how much of it the target's tokens confirm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftOutcome {
    /// The drafter.
    pub drafter: usize,
    /// Tokens that were verified, or compared with emitted tokens.
    pub drafted: usize,
    /// How many of those were accepted, or emitted.
    pub accepted: usize,
}

/// One choice for the round.
#[derive(Clone, Copy)]
struct Candidate {
    plan: Plan,
    tokens: f64,
    cost: Estimate, // of drafting and verifying
}

impl Candidate {
    fn rate(&self) -> f64 {
        self.tokens / self.cost.ms
    }

    fn upper_rate(&self) -> f64 {
        self.tokens / self.cost.least_ms
    }
}

fn fastest<'a>(candidates: impl IntoIterator<Item = &'a Candidate>) -> Option<&'a Candidate> {
    candidates.into_iter().max_by(|a, b| a.rate().total_cmp(&b.rate()))
}

/// Chooses the rounds of one sequence.
#[derive(Clone, Debug)]
pub struct Planner {
    block: BlockSize,
    costs: Costs,
    drafters: Vec<DraftCost>,
    acceptance: Vec<Acceptance>,
    emitted: usize,
    since_plain: usize,
    gained: f64,      // plain steps gained over plain decoding
    exploration: f64, // plain steps that may be spent on probes
    streak: Option<Streak>,
}

impl Planner {
    /// A planner for `drafters` drafters that starts from `costs`.
    pub fn new(block: BlockSize, skip_streak: Option<usize>, drafters: &[DraftCost], mut costs: Costs) -> Self {
        costs.begin();
        let tuning = *costs.tuning();
        let acceptance = drafters.iter().map(|cost| match cost {
            DraftCost::PerToken | DraftCost::Once => Acceptance::new(tuning.prior, &tuning),
            DraftCost::Forced => Acceptance::new(1.0, &tuning),
        });
        Self {
            block,
            acceptance: acceptance.collect(),
            drafters: drafters.to_vec(),
            costs,
            emitted: 0,
            since_plain: 0,
            gained: 0.0,
            exploration: 0.0,
            streak: skip_streak.map(Streak::new),
        }
    }

    /// The costs measured so far.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// Whether it chooses among several numbers of rows. If all rounds have the same, relative costs cannot be
    /// separated from the machine's speed, and are not reused for the next text.
    pub(super) fn chooses(&self) -> bool {
        self.block == BlockSize::Measured && !self.acceptance.is_empty()
    }

    /// Whether models draft nothing in the next round.
    pub(super) fn pauses_models(&self) -> bool {
        self.streak.as_ref().is_some_and(Streak::is_paused)
    }

    /// The plan of the next round.
    pub fn decide(&mut self, offer: &DecisionInput<'_>) -> Decision {
        let candidates = self.candidates(offer);
        let (plain, tuning) = (&candidates[0], *self.costs.tuning());
        let (plain_ms, balance) = (plain.cost.ms, self.gained + tuning.loss * self.emitted.max(MIN_TEXT_TOKENS) as f64);
        let decision = |of: &Candidate, reason| Decision {
            plan: of.plan,
            reason,
            tokens: of.tokens,
            ms: of.cost.ms,
            plain_ms,
            balance,
        };
        let Some(best) = fastest(&candidates[1..]) else {
            return decision(plain, Reason::Nothing);
        };
        if self.block != BlockSize::Measured {
            return decision(best, Reason::FixedBlock);
        }
        let best = fastest(&candidates).unwrap_or(plain);
        if offer.others.rows > 0 {
            // The best for the whole batch. Probes and the loss budget apply to single sequences only: they compare
            // with the same text by plain steps, which is one sequence's.
            return decision(best, Reason::Best);
        }
        if plain.cost.samples == 0 {
            return decision(plain, Reason::MeasurePlain);
        }
        let is_covered = |of: &&Candidate| of.cost.ms - plain_ms <= (balance * plain_ms).max(0.0);
        let covered: Vec<&Candidate> = candidates.iter().filter(is_covered).collect();
        let chosen = fastest(covered.iter().copied()).unwrap_or(plain);
        let reason = if best.rate() > chosen.rate() { Reason::LossLimit } else { Reason::Best };
        // Expected loss against the choice, in plain steps.
        let price = |of: &Candidate| (of.cost.ms - of.tokens / chosen.rate()) / plain_ms;
        // A plain step is measured again sooner if it is less well known or cheaper.
        let unknown = (tuning.median as f64 / plain.cost.samples as f64).max(1.0);
        let saved = self.since_plain as f64 * tuning.exploration * unknown;
        if chosen.plan != Plan::Plain && saved > price(plain) {
            return decision(plain, Reason::MeasurePlain);
        }
        let probe = (covered.into_iter())
            .filter(|of| of.plan != chosen.plan && of.upper_rate() > chosen.rate())
            .max_by(|a, b| a.upper_rate().total_cmp(&b.upper_rate()));
        // A probe that the budget does not cover yet waits until it does.
        match probe.filter(|of| price(of) <= self.exploration) {
            Some(probe) => {
                self.exploration -= price(probe);
                decision(probe, Reason::Probe)
            }
            None => decision(chosen, reason),
        }
    }

    /// A plain step, and every draft that could be verified.
    fn candidates(&self, offer: &DecisionInput<'_>) -> Vec<Candidate> {
        let (given, others, tuning) = (self.block.rows(), offer.others, self.costs.tuning());
        let longest = match given {
            None => tuning
                .growth
                .saturating_mul(self.costs.measured_rows(offer.context))
                .max(tuning.first_rows)
                .saturating_sub(others.rows + 1),
            Some((chain, lookup)) => chain.max(lookup).saturating_sub(1),
        };
        let longest = longest.min(offer.max_rows.saturating_sub(1));
        let plain = others.rows + 1;
        let estimates = self.costs.verify_rows(offer.context, plain..=plain + longest);
        let candidate = |plan, drafted: usize, tokens: f64, drafting: f64| {
            let cost = &estimates[drafted];
            let cost = Estimate { ms: cost.ms + drafting, least_ms: cost.least_ms + drafting, ..*cost };
            Candidate { plan, tokens: tokens + others.tokens as f64, cost }
        };
        let mut candidates = vec![candidate(Plan::Plain, 0, 1.0, 0.0)];
        let is_paused = |one: &AvailableDrafter| one.cost == DraftCost::PerToken && self.pauses_models();
        for one in offer.drafters.iter().filter(|one| one.tokens > 0 && !is_paused(one)) {
            let (rows, step) = match one.cost {
                DraftCost::PerToken => (given.map(|(chain, _)| chain), self.costs.step(one.kind, offer.context)),
                // Already drafted.
                DraftCost::Once | DraftCost::Forced => (given.map(|(_, lookup)| lookup), 0.0),
            };
            let most = one.tokens.min(rows.map_or(longest, |rows| longest.min(rows.saturating_sub(1))));
            let expected = self.acceptance[one.drafter].tokens(most, tuning);
            let lengths = if given.is_none() { 1..=most } else { most.max(1)..=most };
            for tokens in lengths {
                let plan = Plan::Draft { drafter: one.drafter, tokens };
                candidates.push(candidate(plan, tokens, expected[tokens], tokens as f64 * step));
            }
        }
        candidates
    }

    /// Records the result of a round.
    pub fn observe(&mut self, round: &Observation<'_>) {
        let tuning = *self.costs.tuning();
        // Prompt rows have no logits, and attend to each other: their cost differs from verified rows'.
        if round.others.prompt_rows == 0 {
            self.costs.verified(round.context, round.rows + round.others.rows, round.verify_ms);
        }
        // A share of a batched pass would underestimate the steps of a single sequence.
        if let Some(steps) = round.steps.filter(|_| round.others.tokens == 0) {
            self.costs.drafted(steps.kind, steps.tokens, steps.ms);
        }
        for (i, acceptance) in self.acceptance.iter_mut().enumerate() {
            match round.found.iter().chain(&round.verified).find(|draft| draft.drafter == i) {
                Some(draft) => acceptance.observe(draft.drafted, draft.accepted, &tuning),
                None => acceptance.idle(&tuning),
            }
        }
        if let Some(streak) = &mut self.streak {
            // Of a draft without tokens, none could be rejected.
            let of_model = |draft: &DraftOutcome| {
                draft.drafted > 0 && self.drafters.get(draft.drafter) == Some(&DraftCost::PerToken)
            };
            streak.observe(round.verified.filter(of_model).map(|draft| draft.accepted));
        }
        if round.others.rows > 0 {
            return;
        }
        let estimates = self.costs.verify(round.context, round.rows.max(1));
        let (plain, rows) = (&estimates[0], &estimates[estimates.len() - 1]);
        let estimate = |steps: ModelSteps| steps.tokens as f64 * self.costs.step(steps.kind, round.context);
        let spent_ms = rows.ms + round.steps.map_or(0.0, estimate);
        self.exploration += tuning.exploration * spent_ms / plain.ms;
        self.emitted += round.emitted;
        // A plain step is assumed to cost its lower bound: while that is uncertain, less may be lost.
        let drafted = round.rows > 1 || round.steps.is_some_and(|steps| steps.tokens > 0);
        self.gained += round.emitted as f64 - if drafted { spent_ms / plain.least_ms } else { 1.0 };
        self.since_plain = if round.rows > 1 { self.since_plain + 1 } else { 0 };
    }
}
