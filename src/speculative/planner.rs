//! How many drafts, and whose: chosen for every round from what rounds cost and how often drafts are accepted.
//!
//! The planner is a function of what it is told: it reads no clock and draws no number. For every draft on offer it knows
//! the expected tokens of verifying it to each length, from acceptance probabilities by position, and the expected
//! milliseconds, from measured costs; it takes the most tokens per millisecond over the whole table, because v(B) has
//! stairs at which hill climbing would stop. A plain step is one of the choices.
//!
//! Two budgets bound what that may cost. *Exploration*, a share of the time, is saved up for what would be fastest at the
//! lower confidence bound of its cost, where that is above the best choice. *Loss*, a share of plain decoding's time and
//! all that drafts have won, must cover a round if none of its drafts is accepted; else a plain step is taken.
//!
//! On simulated machines, with prompt lookup drafts and without, a text takes at most 5 % longer than plain decoding if
//! measured times vary by 8 %, 12 % if they vary by 20 %, and 8 % if it answers so that it hurts (a text under 256
//! tokens counts as 256); from round 200 on, a model's drafts reach 0.97 of the best fixed choice's speed, and 0.95
//! with prompt lookup drafts beside them (0.9 where one round of ten has one), on average over texts and machines.

use std::ops::Add;

use super::acceptance::Acceptance;
use super::streak::Streak;
use super::{BlockSize, Costs, DraftCost, DrafterKind, Estimate};

/// Tokens of the shortest text: what may be lost of so many may be lost at once.
const SHORTEST: usize = 256;

/// A drafter that could draft this round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offered {
    /// Its place in the session's list.
    pub drafter: usize,
    /// Which one it is: steps of a kind cost the same.
    pub kind: DrafterKind,
    /// How its price grows.
    pub cost: DraftCost,
    /// Tokens it can offer: what prompt lookup found, and for a model any number.
    pub tokens: usize,
}

/// Other sequences of the same pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Others {
    /// Their rows.
    pub rows: usize,
    /// Tokens that they emit at least: one for each that reads no prompt.
    pub tokens: usize,
    /// Those of the rows that read prompts.
    pub prompt_rows: usize,
}

impl Others {
    /// Without `one` of them.
    pub(crate) fn without(self, one: Self) -> Self {
        Self {
            rows: self.rows - one.rows,
            tokens: self.tokens - one.tokens,
            prompt_rows: self.prompt_rows - one.prompt_rows,
        }
    }
}

impl Add for Others {
    type Output = Self;

    fn add(self, more: Self) -> Self {
        Self {
            rows: self.rows + more.rows,
            tokens: self.tokens + more.tokens,
            prompt_rows: self.prompt_rows + more.prompt_rows,
        }
    }
}

/// What there is to choose from.
#[derive(Clone, Copy, Debug)]
pub struct Offer<'a> {
    /// Committed positions.
    pub context: usize,
    /// Rows that may be verified.
    pub most_rows: usize,
    /// The drafters that could draft.
    pub drafters: &'a [Offered],
    /// Who shares the pass: costs are those of the whole batch.
    pub others: Others,
}

/// What a round does. Drafters are named by their place in the session's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// One plain step.
    Plain,
    /// Verifies `tokens` of a drafter's draft.
    Draft {
        /// Whose.
        drafter: usize,
        /// How many.
        tokens: usize,
    },
}

/// Why a plan was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It promises the most tokens per millisecond.
    Best,
    /// At the lower bound of its cost it is faster than the best, and what it is expected to lose was saved up.
    Probe,
    /// What a plain step costs was measured too long ago, or not yet.
    Anchor,
    /// Better ones could lose more than speculation has won so far.
    Floor,
    /// The block size was given.
    Given,
    /// Nothing is on offer.
    Nothing,
}

/// A plan, and what the planner expects of it.
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
    /// Plain steps that may be lost: those won against plain decoding so far, and the loss budget.
    pub balance: f64,
}

/// What a round turned out to be.
#[derive(Clone, Copy, Debug)]
pub struct Observation<'a> {
    /// Committed positions before it.
    pub context: usize,
    /// Rows verified.
    pub rows: usize,
    /// Who shared the pass.
    pub others: Others,
    /// Milliseconds of the verification, of the whole batch.
    pub verify_ms: f64,
    /// The model that drafted, with the tokens that it was asked for and the milliseconds it took.
    pub steps: Option<(DrafterKind, usize, f64)>,
    /// The draft that was verified.
    pub verified: Option<Judged>,
    /// What prompt lookup found, verified or not, as far as it can be judged: no more tokens than were emitted.
    pub found: &'a [Judged],
    /// Tokens emitted.
    pub emitted: usize,
}

/// A draft, and how much of it the target's tokens confirm.
#[derive(Clone, Copy, Debug)]
pub struct Judged {
    /// The drafter.
    pub drafter: usize,
    /// Tokens that were verified, or that the emitted tokens judge.
    pub drafted: usize,
    /// Tokens of those that were accepted, or emitted.
    pub accepted: usize,
}

/// One way to spend the round.
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
    acceptance: Vec<Acceptance>,
    emitted: usize,
    since_plain: usize,
    won: f64,         // plain steps, against plain decoding
    exploration: f64, // plain steps that may be spent on probes
    streak: Option<Streak>,
}

impl Planner {
    /// A planner for `drafters` drafters that starts from `costs`.
    pub fn new(block: BlockSize, skip_streak: Option<usize>, drafters: &[DraftCost], mut costs: Costs) -> Self {
        costs.begin();
        let tuning = *costs.tuning();
        let acceptance = drafters.iter().map(|cost| match cost {
            DraftCost::PerToken => Acceptance::new(tuning.model_prior),
            DraftCost::Once => Acceptance::new(tuning.lookup_prior),
            DraftCost::Forced => Acceptance::new(tuning.forced_prior),
        });
        Self {
            block,
            acceptance: acceptance.collect(),
            costs,
            emitted: 0,
            since_plain: 0,
            won: 0.0,
            exploration: 0.0,
            streak: skip_streak.map(Streak::new),
        }
    }

    /// The costs as measured so far.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// Whether it chooses among several numbers of rows. Where all rounds have the same, what they cost against others is
    /// not to be told from the machine's speed, and is nothing to start the next text from.
    pub(super) fn chooses(&self) -> bool {
        self.block == BlockSize::Measured && !self.acceptance.is_empty()
    }

    /// The plan of the next round.
    pub fn decide(&mut self, offer: &Offer<'_>) -> Decision {
        let resting = self.streak.as_mut().is_some_and(Streak::rests);
        let candidates = self.candidates(offer, resting);
        let (plain, tuning) = (&candidates[0], *self.costs.tuning());
        let (plain_ms, balance) = (plain.cost.ms, self.won + tuning.loss * self.emitted.max(SHORTEST) as f64);
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
            return decision(best, Reason::Given);
        }
        let best = fastest(&candidates).unwrap_or(plain);
        if offer.others.rows > 0 {
            // The best of the whole batch: probes and the loss budget are for sequences by themselves, whose
            // counterfactual, the same text by plain steps, is one sequence's.
            return decision(best, Reason::Best);
        }
        if plain.cost.samples == 0 {
            return decision(plain, Reason::Anchor);
        }
        let is_covered = |of: &&Candidate| of.cost.ms - plain_ms <= (balance * plain_ms).max(0.0);
        let covered: Vec<&Candidate> = candidates.iter().filter(is_covered).collect();
        let chosen = fastest(covered.iter().copied()).unwrap_or(plain);
        let reason = if best.rate() > chosen.rate() { Reason::Floor } else { Reason::Best };
        // What it is expected to lose against the choice, in plain steps.
        let price = |of: &Candidate| (of.cost.ms - of.tokens / chosen.rate()) / plain_ms;
        // A plain step is measured again the sooner the less is known about it, and the less it costs.
        let unknown = (tuning.median as f64 / plain.cost.samples as f64).max(1.0);
        let saved = self.since_plain as f64 * tuning.exploration * unknown;
        if chosen.plan != Plan::Plain && saved > price(plain) {
            return decision(plain, Reason::Anchor);
        }
        let probe = (covered.into_iter())
            .filter(|of| of.plan != chosen.plan && of.upper_rate() > chosen.rate())
            .max_by(|a, b| a.upper_rate().total_cmp(&b.upper_rate()));
        // What cannot be afforded yet is saved up for.
        match probe.filter(|of| price(of) <= self.exploration) {
            Some(probe) => {
                self.exploration -= price(probe);
                decision(probe, Reason::Probe)
            }
            None => decision(chosen, reason),
        }
    }

    /// A plain step, and every draft that could be verified.
    fn candidates(&self, offer: &Offer<'_>, resting: bool) -> Vec<Candidate> {
        let (given, others, tuning) = (self.block.rows(), offer.others, self.costs.tuning());
        let longest = match given {
            None => tuning
                .growth
                .saturating_mul(self.costs.measured_rows(offer.context))
                .max(4)
                .saturating_sub(others.rows + 1),
            Some((chain, lookup)) => chain.max(lookup).saturating_sub(1),
        };
        let longest = longest.min(offer.most_rows.saturating_sub(1));
        let estimates = self.costs.verify(offer.context, others.rows + 1 + longest);
        let candidate = |plan, drafted: usize, tokens: f64, drafting: f64| {
            let cost = &estimates[others.rows + drafted];
            let cost = Estimate { ms: cost.ms + drafting, least_ms: cost.least_ms + drafting, ..*cost };
            Candidate { plan, tokens: tokens + others.tokens as f64, cost }
        };
        let mut candidates = vec![candidate(Plan::Plain, 0, 1.0, 0.0)];
        for one in offer.drafters.iter().filter(|one| one.tokens > 0 && !(resting && one.cost == DraftCost::PerToken)) {
            let (rows, step) = match one.cost {
                DraftCost::PerToken => (given.map(|(chain, _)| chain), self.costs.step(one.kind, offer.context)),
                // Drafted already.
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

    /// Takes in what a round turned out to be.
    pub fn observe(&mut self, round: &Observation<'_>) {
        let tuning = *self.costs.tuning();
        // Rows of prompts have no logits, and attend to each other: they do not cost what verified rows do.
        if round.others.prompt_rows == 0 {
            self.costs.verified(round.context, round.rows + round.others.rows, round.verify_ms);
        }
        // A share of a pass would make steps look cheap to the sequence that is left alone.
        if let Some((kind, tokens, ms)) = round.steps.filter(|_| round.others.tokens == 0) {
            self.costs.drafted(kind, tokens, ms);
        }
        for (i, acceptance) in self.acceptance.iter_mut().enumerate() {
            match round.found.iter().chain(&round.verified).find(|draft| draft.drafter == i) {
                Some(draft) => acceptance.observe(draft.drafted, draft.accepted, &tuning),
                None => acceptance.idle(&tuning),
            }
        }
        if let (Some(streak), Some(verified)) = (&mut self.streak, round.verified) {
            streak.observe(verified.accepted);
        }
        if round.others.rows > 0 {
            return;
        }
        let estimates = self.costs.verify(round.context, round.rows.max(1));
        let (plain, rows) = (&estimates[0], &estimates[estimates.len() - 1]);
        let step = |(kind, tokens, _)| tokens as f64 * self.costs.step(kind, round.context);
        let spent_ms = rows.ms + round.steps.map_or(0.0, step);
        self.exploration += tuning.exploration * spent_ms / plain.ms;
        self.emitted += round.emitted;
        // A plain step is taken to cost no more than its lower bound: while it is known badly less may be lost.
        self.won += round.emitted as f64 - if round.rows > 1 { spent_ms / plain.least_ms } else { 1.0 };
        self.since_plain = if round.rows > 1 { self.since_plain + 1 } else { 0 };
    }
}
