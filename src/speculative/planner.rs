//! How many drafts, and whose: chosen for every round from what rounds cost and how often drafts stood.
//!
//! The planner is a function of what it is told: it reads no clock and draws no number. For every draft that is on offer
//! it knows the expected tokens of verifying it to each length, from the chances of acceptance place by place, and the
//! expected milliseconds, from measured costs; it takes the most tokens per millisecond over the whole table, because
//! v(B) has stairs on which a climb would rest. Not drafting is one of the choices.
//!
//! Two accounts keep it honest. The *probe* account gets a small share of the time and pays for rounds that are only taken
//! to learn something. The *floor* account holds what was won against plain decoding, plus a small share of its time;
//! while it is in debt, rounds are plain. So a prompt on which nothing is ever accepted, or on which acceptance changes
//! to spite the planner, costs that share and no more.

use super::acceptance::{Acceptance, Chance};
use super::streak::Streak;
use super::{BlockSize, Costs, DraftCost, DrafterKind, Estimate};

/// Share of plain decoding's time that speculation may lose: the floor.
const FLOOR: f64 = 0.018;

/// Share of the time that may go to probes.
const PROBES: f64 = 0.006;

/// Plain steps by which the floor account may be overdrawn if everything goes wrong.
const OVERDRAFT: f64 = 0.25;

/// Tokens at the beginning during which the floor does not bind yet.
const WARM_UP: usize = 64;

/// How much better than the best a choice must perhaps be to be worth a probe.
const HOPE: f64 = 1.03;

/// Plain steps that the probe account begins with, and holds at most.
const PROBE_CREDIT: f64 = 6.0;

/// Plain steps that the floor account holds at most: what was won long ago is not to be gambled away.
const FLOOR_CREDIT: f64 = 32.0;

/// Share of speculation's gain that may go to measuring a plain step again: where the gain is small, what a plain step
/// costs must be known well.
const ANCHOR: f64 = 0.004;

/// Plain steps that are measured at a new context length, the first before anything else.
const ANCHORS: usize = 3;

/// Rounds between these, and between tries of a drafter that does not seem worth its price.
const PATIENCE: usize = 8;

/// How many times as many rows as were ever measured may be tried.
const FRONTIER: usize = 2;

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
pub struct Observation {
    /// Committed positions before it.
    pub context: usize,
    /// Rows verified.
    pub rows: usize,
    /// Milliseconds of the verification.
    pub verify_ms: f64,
    /// The model that drafted, with the tokens that it was asked for and the milliseconds it took.
    pub steps: Option<(DrafterKind, usize, f64)>,
    /// Whose draft was verified, and how.
    pub verified: Option<Verified>,
    /// Whether the model's first token was the look-up's, where that was asked: the look-up, and the answer.
    pub agreed: Option<(usize, bool)>,
    /// Tokens emitted.
    pub emitted: usize,
}

/// A draft and its verdict.
#[derive(Clone, Copy, Debug)]
pub struct Verified {
    /// The drafter.
    pub drafter: usize,
    /// Whether a model's first token agreed with it.
    pub confirmed: bool,
    /// Tokens verified.
    pub drafted: usize,
    /// Tokens that stood.
    pub accepted: usize,
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
    firm_ms: f64, // what it would cost if the few measurements of it were accidents
    hopes: f64,   // tokens per ms if luck and costs are as good as they may be
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
    emitted: usize,
    since_plain: usize,
    since_draft: usize,
    balance: f64, // floor account, in plain steps
    probes: f64,  // probe account, in plain steps
    streak: Option<Streak>,
}

impl Planner {
    /// A planner for `drafters` drafters that starts from `costs`.
    pub fn new(block: BlockSize, skip_streak: Option<usize>, drafters: &[DraftCost], costs: Costs) -> Self {
        let known = drafters.iter().map(|cost| Known {
            alone: Acceptance::new(match cost {
                DraftCost::PerToken => 0.7,
                DraftCost::Once => 0.5,
            }),
            confirmed: Acceptance::new(0.9),
            agrees: Chance::default(),
        });
        Self {
            block,
            costs,
            known: known.collect(),
            emitted: 0,
            since_plain: 0,
            since_draft: 0,
            balance: 0.0,
            probes: PROBE_CREDIT,
            streak: skip_streak.map(Streak::new),
        }
    }

    /// The costs as measured so far.
    pub fn costs(&self) -> &Costs {
        &self.costs
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
        let plain =
            Candidate { plan: Plan::Plain, tokens: 1.0, ms: plain_ms, firm_ms: plain_ms, hopes: 1.0 / plain_ms };
        let decision = |of: &Candidate, why| Decision {
            plan: of.plan,
            why,
            tokens: of.tokens,
            ms: of.ms,
            plain_ms,
            balance: self.balance,
        };
        let table = Table { offer, estimates: &estimates, planner: self };
        let candidates = table.candidates(&offered);
        let Some(best) = candidates.iter().max_by(|a, b| a.rate().total_cmp(&b.rate())).copied() else {
            return decision(&plain, Why::Nothing);
        };
        if self.block != BlockSize::Measured {
            return decision(&best, Why::Given);
        }
        let warm = self.emitted >= WARM_UP;
        let best = if best.rate() > plain.rate() { best } else { plain };
        let at_worst = |c: &Candidate| (c.ms - plain_ms) / plain_ms;
        let covered = |c: &Candidate| !warm || at_worst(c) <= self.balance + OVERDRAFT;
        if !covered(&best) {
            let safer = candidates.iter().filter(|c| covered(c) && c.rate() > plain.rate());
            return decision(safer.max_by(|a, b| a.rate().total_cmp(&b.rate())).unwrap_or(&plain), Why::Floor);
        }
        let gain = best.rate() / plain.rate() - 1.0;
        // Near break-even at once, else now and then.
        let few = estimates[0].samples < ANCHORS && (gain < 0.5 || self.since_plain >= PATIENCE);
        if estimates[0].samples == 0 || few || self.since_plain as f64 * ANCHOR > gain.max(ANCHOR) {
            return decision(&plain, Why::Anchor);
        }
        // What a probe loses against the best choice, in plain steps.
        let regret = |c: &Candidate| ((c.firm_ms - c.tokens / best.rate()) / plain_ms).max(0.0);
        let affordable = |c: &&Candidate| c.plan != best.plan && regret(c) <= self.probes && covered(c);
        let hopeful = candidates.iter().filter(|c| c.hopes > HOPE * best.rate()).filter(affordable);
        let probe = hopeful.max_by(|a, b| a.hopes.total_cmp(&b.hopes)).or_else(|| {
            // Without a draft nothing would ever be learnt about drafts again; the cheapest is tried now and then.
            let cheapest = candidates.iter().filter(affordable).min_by(|a, b| a.ms.total_cmp(&b.ms));
            cheapest.filter(|_| best.plan == Plan::Plain && self.since_draft >= PATIENCE)
        });
        match probe {
            Some(probe) => {
                let (decision, paid) = (decision(probe, Why::Probe), regret(probe));
                self.probes -= paid;
                decision
            }
            None => decision(&best, Why::Best),
        }
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
    pub fn observe(&mut self, round: &Observation) {
        self.costs.verified(round.context, round.rows, round.verify_ms);
        if let Some((kind, tokens, ms)) = round.steps {
            self.costs.drafted(kind, tokens, ms);
        }
        for (i, known) in self.known.iter_mut().enumerate() {
            let verified = round.verified.filter(|verified| verified.drafter == i);
            match verified {
                Some(Verified { confirmed: true, drafted, accepted, .. }) => known.confirmed.observe(drafted, accepted),
                Some(Verified { confirmed: false, drafted, accepted, .. }) => known.alone.observe(drafted, accepted),
                None => {
                    known.alone.fade();
                    known.confirmed.fade();
                }
            }
            if let Some((_, agreed)) = round.agreed.filter(|(look_up, _)| *look_up == i) {
                known.agrees.add(agreed);
            }
        }
        if let (Some(streak), Some(verified)) = (&mut self.streak, round.verified) {
            streak.observe(verified.accepted);
        }

        // By estimates: a pause that the machine took is nobody's debt.
        let estimates = self.costs.verify(round.context, round.rows.max(1));
        let plain_ms = estimates[0].ms;
        let steps = round.steps.map_or(0.0, |(kind, tokens, _)| tokens as f64 * self.costs.step(kind, round.context));
        let spent = (estimates[estimates.len() - 1].ms + steps) / plain_ms;
        let was_cold = self.emitted < WARM_UP;
        self.emitted += round.emitted;
        self.balance = (self.balance + round.emitted as f64 * (1.0 + FLOOR) - spent).min(FLOOR_CREDIT);
        if was_cold && self.emitted >= WARM_UP {
            self.balance = self.balance.max(0.0);
        }
        self.probes = (self.probes + PROBES * spent).min(PROBE_CREDIT);
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
        let worth = |rows: &usize| match rows {
            0..=8 => true,
            9..=16 => rows.is_multiple_of(2),
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

    fn draft(&self, one: &Offered, tokens: usize, (expected, hoped): (f64, f64)) -> Candidate {
        let (rows, steps) = (&self.estimates[tokens], tokens as f64 * self.step(one));
        Candidate {
            plan: Plan::Draft { drafter: one.drafter, tokens },
            tokens: expected,
            ms: rows.ms + steps,
            firm_ms: rows.firm_ms + steps,
            hopes: hoped / (rows.least_ms + steps),
        }
    }

    /// The best lengths for a look-up that a model confirms, and for the model where it does not.
    fn confirm(&self, model: &Offered, look_up: &Offered) -> Option<Candidate> {
        let (of_model, of_look_up) = (&self.planner.known[model.drafter], &self.planner.known[look_up.drafter]);
        let step = self.step(model);
        let best = |one: &Offered, acceptance: &Acceptance, drafted: &dyn Fn(usize) -> f64| {
            let expected = acceptance.tokens(self.most(one));
            let of_length = self.lengths(one).into_iter().map(|tokens| {
                let ms = self.estimates[tokens].ms + drafted(tokens);
                (tokens, expected[tokens], ms)
            });
            of_length.max_by(|a, b| (a.1.0 / a.2).total_cmp(&(b.1.0 / b.2)))
        };
        let (agreed, yes, yes_ms) = best(look_up, &of_look_up.confirmed, &|_| step)?;
        let (otherwise, no, no_ms) = best(model, &of_model.alone, &|tokens| tokens as f64 * step)?;
        if yes.1 / yes_ms <= no.1 / no_ms {
            return None; // even where it agrees the model had better go on
        }
        let chance = of_look_up.agrees.mean(0.5);
        let mix = |yes: f64, no: f64| chance * yes + (1.0 - chance) * no;
        let ms = mix(yes_ms, no_ms);
        Some(Candidate {
            plan: Plan::Confirm { model: model.drafter, look_up: look_up.drafter, agreed, otherwise },
            tokens: mix(yes.0, no.0),
            ms,
            firm_ms: ms,
            hopes: mix(yes.1, no.1) / ms,
        })
    }
}
