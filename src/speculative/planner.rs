//! How many drafts, and whose: chosen for every round from what rounds cost and how often drafts are accepted.
//!
//! The planner is a function of what it is told: it reads no clock and draws no number. For every draft on offer it knows
//! the expected tokens of verifying it to each length, from acceptance probabilities by position, and the expected
//! milliseconds, from measured costs; it takes the most tokens per millisecond over the whole table, because v(B) has
//! stairs at which hill climbing would stop. A plain step is one of the choices.
//!
//! Two budgets bound what that may cost. *Exploration*, a share of the time, is saved up for the draft with the highest
//! upper confidence bound where that is above the best choice. *Loss*, a share of plain decoding's time and all that
//! drafts have won, must cover a round if none of its drafts is accepted; else a plain step is taken.
//!
//! On simulated machines, with prompt lookup drafts and without, a text takes at most 5 % longer than plain decoding if
//! measured times vary by 8 %, 12 % if they vary by 20 %, and 8 % if it answers so that it hurts (a text under 256
//! tokens counts as 256); from round 200 on, a model's drafts reach 0.97 of the best fixed choice's speed, and 0.95
//! with prompt lookup drafts beside them (0.9 where one round of ten has one), on average over texts and machines.

use super::acceptance::{Acceptance, Interval};
use super::costs::octave;
use super::streak::Streak;
use super::{BlockSize, Costs, DraftCost, DrafterKind, Tuning};

/// Tokens of the shortest text: what may be lost of so many may be lost at once.
const SHORTEST: usize = 256;

/// Rows of other sequences beside which a pass is measured.
const MOST_OTHERS: usize = 64;

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
    /// Tokens that they emit at least.
    pub tokens: usize,
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
    /// Its upper confidence bound is above the best, and what it may cost was saved up.
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
    /// What was won against plain decoding so far, in plain steps: the floor account.
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
    pub verified: Option<Verified>,
    /// The prompt lookup drafters that had a draft, verified or not: the emitted tokens judge them all.
    pub found: &'a [Found],
    /// Tokens emitted.
    pub emitted: usize,
}

/// A draft and its verdict.
#[derive(Clone, Copy, Debug)]
pub struct Verified {
    /// The drafter.
    pub drafter: usize,
    /// Tokens verified.
    pub drafted: usize,
    /// Tokens that were accepted.
    pub accepted: usize,
}

/// What prompt lookup found, and how much of it the emitted tokens confirm.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    /// The drafter.
    pub drafter: usize,
    /// Tokens that can be judged: no more than were emitted.
    pub drafted: usize,
    /// Tokens of those that were emitted.
    pub accepted: usize,
}

/// One way to spend the round.
#[derive(Clone, Copy)]
struct Candidate {
    plan: Plan,
    tokens: Interval,
    ms: Interval,
    known: bool, // as many rows were measured
}

impl Candidate {
    fn rate(&self) -> f64 {
        self.tokens.mean / self.ms.mean
    }

    fn upper_rate(&self) -> f64 {
        self.tokens.high / self.ms.low
    }
}

/// Chooses the rounds of one sequence.
#[derive(Clone, Debug)]
pub struct Planner {
    block: BlockSize,
    costs: Costs,
    acceptance: Vec<Acceptance>,
    emitted: usize,
    since_plain: usize,
    context: usize,   // of the last round
    allowed: f64,     // plain steps that rounds with drafts may have taken
    rounds: Vec<f64>, // that verified drafts at this octave of the context, by rows
    drafted_ms: f64,  // drafting for them, divided by the speed factor
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
        });
        Self {
            block,
            acceptance: acceptance.collect(),
            costs,
            emitted: 0,
            since_plain: 0,
            context: 0,
            allowed: tuning.loss * SHORTEST as f64,
            rounds: Vec::new(),
            drafted_ms: 0.0,
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

    fn tuning(&self) -> &Tuning {
        self.costs.tuning()
    }

    /// The plan of the next round.
    pub fn decide(&mut self, offer: &Offer<'_>) -> Decision {
        let resting = self.streak.as_mut().is_some_and(Streak::rests);
        let (plain, drafts) = self.candidates(offer, resting);
        let plain_ms = plain.ms.mean;
        let shared = offer.others.rows > 0;
        let balance = if shared { 0.0 } else { self.balance(offer.context) };
        let decision = |of: &Candidate, reason| {
            let (tokens, ms) = (of.tokens.mean, of.ms.mean);
            Decision { plan: of.plan, reason, tokens, ms, plain_ms, balance }
        };
        let fastest =
            |of: &mut dyn Iterator<Item = &Candidate>| of.max_by(|a, b| a.rate().total_cmp(&b.rate())).copied();
        if shared && self.block == BlockSize::Measured {
            // The best of the whole batch, of what is known: probes and the loss budget are for sequences by themselves, whose
            // counterfactual, the same text by plain steps, is one sequence's.
            let known = drafts.iter().filter(|of| of.known).chain([&plain]);
            let best = fastest(&mut { known }).unwrap_or(plain);
            return decision(&best, Reason::Best);
        }
        let Some(best) = fastest(&mut drafts.iter()) else {
            return decision(&plain, Reason::Nothing);
        };
        if self.block != BlockSize::Measured {
            return decision(&best, Reason::Given);
        }
        let plain_samples = self.costs.verify(offer.context, 1)[0].samples;
        if plain_samples == 0 {
            return decision(&plain, Reason::Anchor);
        }
        let covered: Vec<Candidate> =
            drafts.into_iter().filter(|c| c.ms.mean - plain_ms <= balance * plain_ms).collect();
        let chosen = fastest(&mut covered.iter().chain([&plain])).unwrap_or(plain);
        let reason = if best.rate() > chosen.rate() { Reason::Floor } else { Reason::Best };
        // What it may lose against the choice, in plain steps.
        let price = |c: &Candidate| ((c.ms.high - c.tokens.low / chosen.rate()) / plain_ms).max(0.0);
        // A plain step is measured again the sooner the less is known about it, and the less it costs.
        let unknown = (self.tuning().median as f64 / plain_samples as f64).max(1.0);
        let saved = self.since_plain as f64 * self.tuning().exploration * unknown;
        if chosen.plan != Plan::Plain && saved > price(&plain) {
            return decision(&plain, Reason::Anchor);
        }
        let probe = (covered.iter().chain([&plain]))
            .filter(|c| c.plan != chosen.plan && c.upper_rate() > chosen.rate())
            .max_by(|a, b| a.upper_rate().total_cmp(&b.upper_rate()));
        // What cannot be afforded yet is saved up for.
        match probe.filter(|c| price(c) <= self.exploration) {
            Some(probe) => {
                self.exploration -= price(probe);
                decision(probe, if probe.plan == Plan::Plain { Reason::Anchor } else { Reason::Probe })
            }
            None => decision(&chosen, reason),
        }
    }

    /// Plain steps that may be lost. Rounds are priced as costs are known now, so that an accident is no lasting debt. A
    /// plain step is taken to cost no more than its lower bound: while it is known badly less may be lost.
    fn balance(&self, context: usize) -> f64 {
        let estimates = self.costs.verify(context, self.rounds.len().max(1));
        let plain = &estimates[0];
        let low = plain.ms * (-self.tuning().confidence * plain.error).exp();
        let verified: f64 = self.rounds.iter().zip(&estimates).map(|(count, rows)| count * rows.ms).sum();
        self.allowed - (verified + self.drafted_ms * self.costs.speed_factor()) / low
    }

    /// A plain step, and every draft that could be verified.
    fn candidates(&self, offer: &Offer<'_>, resting: bool) -> (Candidate, Vec<Candidate>) {
        let (chain, lookup) = self.block.rows().unwrap_or((usize::MAX, usize::MAX));
        let offered = offer.drafters.iter().filter(|one| !(resting && one.cost == DraftCost::PerToken));
        let offered = offered.map(|one| {
            let (rows, step) = match one.cost {
                DraftCost::PerToken => (chain, self.costs.step(one.kind, offer.context)),
                DraftCost::Once => (lookup, 0.0), // drafted already
            };
            (one.drafter, one.tokens.min(rows.min(offer.most_rows).saturating_sub(1)), step)
        });
        let offered: Vec<_> = offered.filter(|(_, most, _)| *most > 0).collect();
        let rows = 1 + offered.iter().map(|(_, most, _)| *most).max().unwrap_or(0);
        let Others { rows: other_rows, tokens: other_tokens } = offer.others;
        let estimates = self.costs.verify(offer.context, other_rows + rows);
        let ms = |rows: usize, drafting: f64| {
            let of = &estimates[other_rows + rows - 1];
            Interval { mean: of.ms + drafting, low: of.least_ms + drafting, high: of.most_ms + drafting }
        };
        let in_all = |tokens: Interval| {
            let other = other_tokens as f64;
            Interval { mean: tokens.mean + other, low: tokens.low + other, high: tokens.high + other }
        };
        let tokens = in_all(Interval::exact(1.0));
        let plain = Candidate { plan: Plan::Plain, tokens, ms: ms(1, 0.0), known: true };
        let measured = estimates.iter().rposition(|rows| rows.known).map_or(1, |last| last + 1);
        let longest = (self.tuning().growth * measured).max(4) - 1;
        let mut drafts = Vec::new();
        for (drafter, most, step) in offered {
            let expected = self.acceptance[drafter].tokens(most, self.tuning());
            let lengths = if self.block == BlockSize::Measured { 1..=most.min(longest) } else { most..=most };
            for tokens in lengths.filter(|tokens| self.block != BlockSize::Measured || is_considered(tokens + 1)) {
                let plan = Plan::Draft { drafter, tokens };
                let drafting = tokens as f64 * step;
                let known = other_rows + tokens < measured;
                let (tokens, ms) = (in_all(expected[tokens]), ms(tokens + 1, drafting));
                drafts.push(Candidate { plan, tokens, ms, known });
            }
        }
        (plain, drafts)
    }

    /// Takes in what a round turned out to be.
    pub fn observe(&mut self, round: &Observation<'_>) {
        let tuning = *self.tuning();
        // Passes with a prompt's chunk say little about those of few rows.
        if round.others.rows <= MOST_OTHERS {
            self.costs.verified(round.context, round.rows + round.others.rows, round.verify_ms);
        }
        if let Some((kind, tokens, ms)) = round.steps {
            self.costs.drafted(kind, tokens, ms);
        }
        for (i, acceptance) in self.acceptance.iter_mut().enumerate() {
            let found =
                round.found.iter().find(|found| found.drafter == i).map(|found| (found.drafted, found.accepted));
            let verified = round.verified.filter(|verified| verified.drafter == i);
            match found.or(verified.map(|verified| (verified.drafted, verified.accepted))) {
                Some((drafted, accepted)) => acceptance.observe(drafted, accepted, &tuning),
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
        let drafting =
            round.steps.map_or(0.0, |(kind, tokens, _)| tokens as f64 * self.costs.step(kind, round.context));
        let spent = (rows.ms + drafting) / plain.ms;
        self.exploration += tuning.exploration * spent;
        if octave(self.context) != octave(round.context) {
            self.allowed = self.balance(self.context);
            self.rounds.clear();
            self.drafted_ms = 0.0;
        }
        self.context = round.context;
        let free = (self.emitted + round.emitted).saturating_sub(self.emitted.max(SHORTEST));
        self.emitted += round.emitted;
        self.allowed += round.emitted as f64 + tuning.loss * free as f64;
        self.since_plain = if round.rows > 1 { self.since_plain + 1 } else { 0 };
        if round.rows > 1 {
            self.rounds.resize(self.rounds.len().max(round.rows), 0.0);
            self.rounds[round.rows - 1] += 1.0;
        } else {
            self.allowed -= 1.0;
        }
        self.drafted_ms += drafting / self.costs.speed_factor();
    }
}

/// All short blocks, and of the long ones few, so that their costs get measured.
fn is_considered(rows: usize) -> bool {
    match rows {
        0..=8 => true,
        9..=32 => rows.is_multiple_of(4),
        _ => rows.is_multiple_of(16),
    }
}
