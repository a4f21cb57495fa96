//! How many drafts, and whose: chosen for every round from what rounds cost and how often drafts stood.
//!
//! The planner is a function of what it is told: it reads no clock and draws no number. For every draft that is on offer
//! it knows the expected tokens of verifying it to each length, from the chances of acceptance place by place, and the
//! expected milliseconds, from measured costs; it takes the most tokens per millisecond over the whole table, because
//! v(B) has stairs on which a climb would rest. Not drafting is one of the choices.
//!
//! Two accounts keep it honest. The *probe* account gets a small share of the time and pays for rounds that are only taken
//! to learn something. The *floor* account (the ledger) holds what was won against plain decoding, plus a small share of
//! its time; a round that may cost more than that is not taken.
//!
//! On simulated machines, with prompt lookup drafts and without, a text takes at most 3 % longer than plain decoding
//! where some fixed choice of drafter and block is at least 1.5 times as fast, and elsewhere at most 6 % longer if
//! measured times vary by 8 %, 16 % if they vary by 20 % (a text under 256 tokens counts as 256); from round 200 on, a
//! model's drafts reach 0.98 of the best fixed choice's speed, and 0.95 with prompt lookup drafts beside them, on
//! average over texts and machines.

use super::acceptance::{Acceptance, Chance, Expected};
use super::ledger::Ledger;
use super::streak::Streak;
use super::{BlockSize, Costs, DraftCost, DrafterKind, Estimate};

/// Share of the time that may go to probes: at least, at most where drafts are verified, and at most in the first tokens
/// and where they are not.
const PROBES: f64 = 0.007;
const MORE_PROBES: f64 = 0.012;
const MOST_PROBES: f64 = 0.03;

/// That share, by how much better than the best choice a probe may turn out to be.
const EAGER: f64 = 0.1;

/// Plain steps that the probe account begins with, and holds at most.
const FIRST_PROBE: f64 = 0.2;
const PROBE_CREDIT: f64 = 6.0;

/// How much better than the best a choice must perhaps be to be worth a probe.
const HOPE: f64 = 1.035;

/// Plain steps that do not matter in the price of a probe.
const CHEAP: f64 = 0.1;

/// Share of what a probe costs at worst in its price, the rest being what it costs on average.
const FEAR: f64 = 0.5;

/// Tokens in which a probe's price is the worst, and what was never measured is taken to cost more than it seems to, by
/// this share of the worst: a short text does not live to see what it was good for.
const EARLY: usize = 192;
const CAUTION: f64 = 0.6;

/// Share of speculation's gain that may go to measuring a plain step again: where the gain is small, what a plain step
/// costs must be known well.
const ANCHOR: f64 = 0.004;

/// Plain steps that are measured at a new context length, the first before anything else; the rounds between these; and
/// the gain under which they are not put off.
const ANCHORS: usize = 5;
const ANCHOR_ROUNDS: usize = 20;
const SMALL_GAIN: f64 = 0.1;

/// How many times as much as it should a plain step may cost before it is measured again.
const SUSPECT: f64 = 1.2;

/// Rounds between tries of a drafter that does not seem worth its price.
const PATIENCE: usize = 8;

/// How many times as many rows as were ever measured may be tried.
const FRONTIER: usize = 2;

/// Chances that a draft's first token stands before anything is known, and their weight in observations: a model's; a
/// look-up's, of which much less can be said beforehand, because it is the text's; and one that a model agreed with.
const OF_MODEL: (f64, f64) = (0.75, 8.0);
const OF_LOOK_UP: (f64, f64) = (0.5, 2.0);
const OF_AGREED: (f64, f64) = (0.9, 8.0);

/// The most rows that are considered for a model's chain, and for a look-up.
const MOST_CHAINED: usize = 16;
const MOST_LOOKED_UP: usize = 64;

/// A drafter that could draft this round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offered {
    /// Its place in the session's list.
    pub drafter: usize,
    /// Which one it is: steps of a kind cost the same.
    pub kind: DrafterKind,
    /// How its price grows.
    pub cost: DraftCost,
    /// Tokens it can offer: what a look-up found, and for a model any number.
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
    /// A model drafts one token. Where a look-up has the same, `agreed` tokens of the look-up are verified; else the model
    /// goes on to `otherwise` tokens.
    Confirm {
        /// The model.
        model: usize,
        /// The look-up.
        look_up: usize,
        /// Tokens of the look-up.
        agreed: usize,
        /// Tokens of the model.
        otherwise: usize,
    },
}

/// Why a plan was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It promises the most tokens per millisecond.
    Best,
    /// It may be better than what is known to be best, and what it can cost was saved up.
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
    pub why: Why,
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
    /// Milliseconds of the verification.
    pub verify_ms: f64,
    /// The model that drafted, with the tokens that it was asked for and the milliseconds it took.
    pub steps: Option<(DrafterKind, usize, f64)>,
    /// The draft that was verified.
    pub verified: Option<Verified>,
    /// The look-ups that had a draft, verified or not: the emitted tokens judge them all.
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
    /// Tokens that stood.
    pub accepted: usize,
}

/// What a look-up found, and what the emitted tokens say of it.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    /// The look-up.
    pub drafter: usize,
    /// Tokens that can be judged: no more than were emitted.
    pub drafted: usize,
    /// Tokens of those that stand.
    pub accepted: usize,
    /// Whether a model's first token is the look-up's, where a model drafted.
    pub agreed: Option<bool>,
}

/// What is known about one drafter.
#[derive(Clone, Debug)]
struct Known {
    alone: Acceptance,
    confirmed: Acceptance,
    agrees: Chance,
}

/// One way to spend the round.
#[derive(Clone, Copy)]
struct Candidate {
    plan: Plan,
    tokens: f64,
    ms: f64,
    paid_ms: f64,      // if nothing that was measured was an accident
    fears: (f64, f64), // tokens and ms if both are as bad as they may be
    hopes: f64,        // tokens per ms if both are as good as they may be
}

impl Candidate {
    fn rate(&self) -> f64 {
        self.tokens / self.ms
    }
}

/// Chooses the rounds of one sequence.
#[derive(Clone, Debug)]
pub struct Planner {
    block: BlockSize,
    costs: Costs,
    known: Vec<Known>,
    since_plain: usize,
    since_draft: usize,
    around: usize, // rows of the best choice
    ledger: Ledger,
    probes: f64, // probe account, in plain steps
    hope: f64,   // by how much the most promising probe may be better than the best choice
    streak: Option<Streak>,
}

impl Planner {
    /// A planner for `drafters` drafters that starts from `costs`.
    pub fn new(block: BlockSize, skip_streak: Option<usize>, drafters: &[DraftCost], mut costs: Costs) -> Self {
        costs.begin();
        let known = drafters.iter().map(|cost| Known {
            alone: Acceptance::new(match cost {
                DraftCost::PerToken => OF_MODEL,
                DraftCost::Once => OF_LOOK_UP,
            }),
            confirmed: Acceptance::new(OF_AGREED),
            agrees: Chance::default(),
        });
        Self {
            block,
            costs,
            known: known.collect(),
            since_plain: 0,
            since_draft: 0,
            around: 1,
            ledger: Ledger::new(),
            probes: FIRST_PROBE,
            hope: 0.0,
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
        self.block == BlockSize::Measured && !self.known.is_empty()
    }

    /// The plan of the next round.
    pub fn decide(&mut self, offer: &Offer<'_>) -> Decision {
        let resting = self.streak.as_mut().is_some_and(Streak::rests);
        let offered: Vec<Offered> = (offer.drafters.iter().copied())
            .filter(|offered| offered.tokens > 0 && !(resting && offered.cost == DraftCost::PerToken))
            .collect();
        let most = offered.iter().map(|one| self.most(one, offer.most_rows)).max().unwrap_or(0);
        let estimates = self.costs.verify(offer.context, most + 1);
        let plain_ms = estimates[0].ms;
        let plain = Candidate {
            plan: Plan::Plain,
            tokens: 1.0,
            ms: plain_ms,
            paid_ms: plain_ms,
            fears: (1.0, plain_ms),
            hopes: 1.0 / plain_ms,
        };
        let balance = self.ledger.balance();
        let decision =
            |of: &Candidate, why| Decision { plan: of.plan, why, tokens: of.tokens, ms: of.ms, plain_ms, balance };
        let candidates = Table { offer, estimates: &estimates, planner: self }.candidates(&offered);
        let Some(best) = candidates.iter().max_by(|a, b| a.rate().total_cmp(&b.rate())).copied() else {
            return decision(&plain, Why::Nothing);
        };
        if self.block != BlockSize::Measured {
            return decision(&best, Why::Given);
        }
        let best = if best.rate() > plain.rate() { best } else { plain };
        let covered = |c: &Candidate| c.paid_ms - plain_ms <= balance * plain_ms;
        if !covered(&best) {
            let safer = candidates.iter().filter(|c| covered(c) && c.rate() > plain.rate());
            let safer = safer.max_by(|a, b| a.rate().total_cmp(&b.rate()));
            // Here, too, a plain step is measured again: one that seems dear makes drafts safe that are not.
            let safer = safer.filter(|c| !self.is_anchor_due(c.rate() / plain.rate() - 1.0));
            return decision(safer.unwrap_or(&plain), Why::Floor);
        }
        self.around = match best.plan {
            Plan::Plain => 1,
            Plan::Draft { tokens, .. } | Plan::Confirm { otherwise: tokens, .. } => tokens + 1,
        };
        let gain = best.rate() / plain.rate() - 1.0;
        // Near break-even at once, else now and then; at once, too, if more rows cost less.
        let urgent = gain < SMALL_GAIN || estimates[0].paid_ms > SUSPECT * plain_ms;
        let few = estimates[0].samples < ANCHORS && (urgent || self.since_plain >= ANCHOR_ROUNDS);
        if estimates[0].samples == 0 || few || self.is_anchor_due(gain) {
            return decision(&plain, Why::Anchor);
        }
        if !self.costs.are_settled() {
            // What is new would be mistaken for the reason of what may be the machine's.
            let known = estimates[self.around - 1].samples >= ANCHORS;
            return if known { decision(&best, Why::Best) } else { decision(&plain, Why::Anchor) };
        }
        // What a probe loses against the best choice, in plain steps.
        let fear = if self.is_early() { 1.0 } else { FEAR };
        let price = |c: &Candidate| {
            let ms = c.ms + fear * (c.fears.1 - c.ms);
            let tokens = c.tokens + fear * (c.fears.0 - c.tokens);
            ((ms - tokens / best.rate()) / plain_ms).max(0.0)
        };
        let hope = |c: &Candidate| c.hopes / best.rate();
        let promise = |c: &Candidate| (hope(c) - 1.0) / (price(c) + CHEAP);
        let possible = |c: &&Candidate| c.plan != best.plan && covered(c) && price(c) <= PROBE_CREDIT;
        let hopeful = candidates.iter().filter(|c| hope(c) > HOPE).filter(possible);
        let probe = hopeful.max_by(|a, b| promise(a).total_cmp(&promise(b))).or_else(|| {
            // Without a draft nothing would ever be learnt about drafts again; the cheapest is tried now and then.
            let cheapest = candidates.iter().filter(possible).min_by(|a, b| a.ms.total_cmp(&b.ms));
            cheapest.filter(|_| best.plan == Plan::Plain && self.since_draft >= PATIENCE)
        });
        self.hope = probe.map_or(0.0, |c| hope(c) - 1.0);
        // What is not affordable yet is saved up for.
        match probe.filter(|c| price(c) <= self.probes) {
            Some(probe) => {
                self.probes -= price(probe);
                decision(probe, Why::Probe)
            }
            None => decision(&best, Why::Best),
        }
    }

    /// Whether a plain step was measured too long ago for a choice that is better than plain decoding by `gain`.
    fn is_anchor_due(&self, gain: f64) -> bool {
        self.since_plain as f64 * ANCHOR > gain.max(ANCHOR)
    }

    /// Whether drafts are verified in a text that may end soon.
    fn is_early(&self) -> bool {
        self.ledger.emitted() < EARLY && self.around > 1
    }

    /// The longest draft of a drafter that may be verified.
    fn most(&self, one: &Offered, most_rows: usize) -> usize {
        let (chain, look_up) = self.block.rows().unwrap_or((MOST_CHAINED, MOST_LOOKED_UP));
        let rows = match one.cost {
            DraftCost::PerToken => chain,
            DraftCost::Once => look_up,
        };
        one.tokens.min(rows.min(most_rows).saturating_sub(1))
    }

    /// Takes in what a round turned out to be.
    pub fn observe(&mut self, round: &Observation<'_>) {
        self.costs.verified(round.context, round.rows, round.verify_ms);
        if let Some((kind, tokens, ms)) = round.steps {
            self.costs.drafted(kind, tokens, ms);
        }
        for (i, known) in self.known.iter_mut().enumerate() {
            let found = round.found.iter().find(|found| found.drafter == i);
            let verified = round.verified.filter(|verified| verified.drafter == i);
            let verdict = found.map(|found| (found.drafted, found.accepted));
            match verdict.or(verified.map(|verified| (verified.drafted, verified.accepted))) {
                Some((drafted, accepted)) => known.alone.observe(drafted, accepted),
                None => known.alone.fade(),
            }
            match found.and_then(|found| Some((found, found.agreed?))) {
                Some((found, true)) => known.confirmed.observe(found.drafted, found.accepted),
                _ => known.confirmed.fade(),
            }
            if let Some(agreed) = found.and_then(|found| found.agreed) {
                known.agrees.add(agreed);
            }
        }
        if let (Some(streak), Some(verified)) = (&mut self.streak, round.verified) {
            streak.observe(verified.accepted);
        }

        self.ledger.add(round, &self.costs);
        let estimates = self.costs.verify(round.context, round.rows.max(1));
        let steps = round.steps.map_or(0.0, |(kind, tokens, _)| tokens as f64 * self.costs.step(kind, round.context));
        let spent = (estimates[estimates.len() - 1].ms + steps) / estimates[0].ms;
        let most = if self.ledger.is_new() || self.around == 1 { MOST_PROBES } else { MORE_PROBES };
        self.probes = (self.probes + (EAGER * self.hope).clamp(PROBES, most) * spent).min(PROBE_CREDIT);
        let plain = round.rows == 1;
        self.since_plain = if plain { 0 } else { self.since_plain + 1 };
        self.since_draft = if plain { self.since_draft + 1 } else { 0 };
    }
}

/// Everything that a round could do, priced.
struct Table<'a> {
    offer: &'a Offer<'a>,
    estimates: &'a [Estimate],
    planner: &'a Planner,
}

impl Table<'_> {
    fn candidates(&self, offered: &[Offered]) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        for one in offered {
            let expected = self.planner.known[one.drafter].alone.tokens(self.most(one));
            for tokens in self.lengths(one) {
                candidates.push(self.draft(one, tokens, expected[tokens]));
            }
        }
        let models = offered.iter().filter(|one| one.cost == DraftCost::PerToken);
        for (model, look_up) in models.flat_map(|model| offered.iter().map(move |other| (model, other))) {
            if look_up.cost == DraftCost::Once {
                candidates.extend(self.confirm(model, look_up));
            }
        }
        candidates
    }

    fn most(&self, one: &Offered) -> usize {
        self.planner.most(one, self.offer.most_rows)
    }

    /// The lengths that are considered: all short ones, and of the long ones few, so that their costs get measured.
    fn lengths(&self, one: &Offered) -> Vec<usize> {
        let most = self.most(one);
        if self.planner.block != BlockSize::Measured {
            return if most == 0 { Vec::new() } else { vec![most] };
        }
        let around = self.planner.around;
        let worth = |rows: &usize| match rows {
            0..=8 => true,
            9..=16 => rows.is_multiple_of(4) || rows.abs_diff(around) <= 1,
            17..=32 => rows.is_multiple_of(4),
            _ => rows.is_multiple_of(8),
        };
        let measured = self.estimates.iter().rposition(|rows| rows.known).map_or(1, |last| last + 1);
        let frontier = (FRONTIER * measured).max(4);
        (1..=most.min(frontier - 1)).filter(|tokens| worth(&(tokens + 1))).collect()
    }

    fn step(&self, one: &Offered) -> f64 {
        match one.cost {
            DraftCost::PerToken => self.planner.costs.step(one.kind, self.offer.context),
            DraftCost::Once => 0.0, // it has been paid
        }
    }

    fn draft(&self, one: &Offered, tokens: usize, expected: Expected) -> Candidate {
        let (rows, steps) = (&self.estimates[tokens], tokens as f64 * self.step(one));
        let never = if rows.samples == 0 && self.planner.is_early() { CAUTION } else { 0.0 };
        Candidate {
            plan: Plan::Draft { drafter: one.drafter, tokens },
            tokens: expected.mean,
            ms: rows.ms + never * (rows.most_ms - rows.ms) + steps,
            paid_ms: rows.paid_ms + steps,
            fears: (expected.low, rows.most_ms + steps),
            hopes: expected.high / (rows.least_ms + steps),
        }
    }

    /// The best lengths for a look-up that a model confirms, and for the model where it does not.
    fn confirm(&self, model: &Offered, look_up: &Offered) -> Option<Candidate> {
        let (of_model, of_look_up) = (&self.planner.known[model.drafter], &self.planner.known[look_up.drafter]);
        let step = self.step(model);
        let best = |one: &Offered, acceptance: &Acceptance, drafted: &dyn Fn(usize) -> f64| {
            let expected = acceptance.tokens(self.most(one));
            let of_length = self.lengths(one).into_iter().map(|tokens| {
                let rows = &self.estimates[tokens];
                (tokens, expected[tokens], rows.ms + drafted(tokens), rows.paid_ms + drafted(tokens))
            });
            of_length.max_by(|a, b| (a.1.mean / a.2).total_cmp(&(b.1.mean / b.2)))
        };
        let (agreed, yes, yes_ms, yes_paid_ms) = best(look_up, &of_look_up.confirmed, &|_| step)?;
        let (otherwise, no, no_ms, no_paid_ms) = best(model, &of_model.alone, &|tokens| tokens as f64 * step)?;
        if yes.high / yes_ms <= no.high / no_ms {
            return None; // even where it agrees the model had better go on
        }
        let chance = of_look_up.agrees.mean(0.5);
        let mix = |yes: f64, no: f64| chance * yes + (1.0 - chance) * no;
        let ms = mix(yes_ms, no_ms);
        Some(Candidate {
            plan: Plan::Confirm { model: model.drafter, look_up: look_up.drafter, agreed, otherwise },
            tokens: mix(yes.mean, no.mean),
            ms,
            paid_ms: yes_paid_ms.max(no_paid_ms), // the text says which of them it is
            fears: (mix(yes.low, no.low), ms),
            hopes: mix(yes.high, no.high) / ms,
        })
    }
}
