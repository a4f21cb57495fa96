//! Simulated machines: tables of round costs and acceptance rates, with noise, and the planner's rounds on them.

use foretoken::speculative::{
    AvailableDrafter, BlockSize, Costs, DecisionInput, DraftCost, DraftOutcome, DrafterKind, ModelSteps, Observation,
    OtherSequences, Plan, Planner, Reason, Tuning,
};
use rand::Rng;
use rand::rngs::StdRng;

/// The drafters' indices in the session's list.
pub const MODEL: usize = 0;
pub const LOOKUP: usize = 1;

/// Maximum rows of a model's chain and of a prompt lookup draft in the search for the best choice.
const MOST_ROWS: usize = 64;

/// Share by which measured times vary, and outliers: one in so many rounds is preempted and takes so many times longer.
pub type Noise = (f64, (usize, f64));
pub const QUIET: Noise = (0.08, (200, 8.0));
pub const NOISY: Noise = (0.2, (50, 3.0));

/// A prompt lookup drafter.
#[derive(Clone, Copy, Debug)]
pub struct Lookup {
    /// Share of the rounds in which it has a draft.
    pub found: f64,
    /// Tokens of a draft.
    pub tokens: usize,
    /// Probability that a token is accepted if those before it are.
    pub chance: f64,
}

/// A machine, and a text with its drafters.
#[derive(Clone, Debug)]
pub struct Simulation {
    pub name: String,
    /// Milliseconds of verifying 1, 2, ... rows.
    pub verify: Vec<f64>,
    /// Milliseconds of a draft step.
    pub step: f64,
    /// Probability that the model's token at a position is accepted if those before it are.
    pub model: Vec<f64>,
    pub lookup: Option<Lookup>,
    pub noise: f64,
    pub pause: (usize, f64),
    /// The machine's current slowdown relative to its table.
    pub slow: f64,
    /// The planner's constants.
    pub tuning: Tuning,
}

/// Result of a round: expected tokens, emitted tokens, milliseconds without noise.
#[derive(Clone, Copy, Debug)]
pub struct SimulatedRound {
    pub plan: Plan,
    pub reason: Reason,
    pub expected: f64,
    pub emitted: usize,
    pub ms: f64,
}

/// Whether the model and the prompt lookup have the target's token at a position; `None` uses their probabilities.
pub type Text<'a> = dyn FnMut(Plan, usize) -> Option<[bool; 2]> + 'a;

/// v(B) of vector kernels that process four rows at a time, in plain steps.
pub fn staircase(rows: usize) -> f64 {
    [1.0, 1.04, 1.08, 1.1, 1.45, 1.48, 1.5, 1.52, 2.1][rows.min(9) - 1] + 0.11 * rows.saturating_sub(9) as f64
}

/// v(B) that grows by `slope` plain steps per row.
pub fn linear(slope: f64) -> impl Fn(usize) -> f64 {
    move |rows| 1.0 + slope * (rows - 1) as f64
}

/// Expected tokens of a draft chain with these probabilities, including the target's own.
fn chain(chances: impl Iterator<Item = f64>) -> f64 {
    let accepted = chances.scan(1.0, |accepted, chance| {
        *accepted *= chance;
        Some(*accepted)
    });
    1.0 + accepted.sum::<f64>()
}

impl Simulation {
    /// `v` and `step` are in plain steps.
    pub fn new(name: &str, v: impl Fn(usize) -> f64, step: f64, model: &[f64]) -> Self {
        let plain_ms = 4.0;
        Self {
            name: name.into(),
            verify: (1..=MOST_ROWS).map(|rows| plain_ms * v(rows)).collect(),
            step: step * plain_ms,
            model: model.to_vec(),
            lookup: None,
            noise: QUIET.0,
            pause: QUIET.1,
            slow: 1.0,
            tuning: Tuning::default(),
        }
    }

    pub fn with_lookup(mut self, lookup: Option<Lookup>) -> Self {
        if let Some(Lookup { found, tokens, chance }) = lookup {
            self.name += &format!(", lookup {tokens} tokens in {found:.2} of rounds at {chance:.2}");
        }
        self.lookup = lookup;
        self
    }

    pub fn plain_ms(&self) -> f64 {
        self.verify[0]
    }

    pub fn planner(&self, block: BlockSize) -> Planner {
        Planner::new(block, None, &[DraftCost::PerToken, DraftCost::Once], Costs::tuned(self.tuning))
    }

    fn chance(&self, place: usize) -> f64 {
        self.model[place.min(self.model.len() - 1)]
    }

    fn lookup_chance(&self) -> f64 {
        self.lookup.map_or(0.0, |lookup| lookup.chance)
    }

    /// Expected tokens of verifying that many of the model's drafts from `place` on.
    fn tokens(&self, place: usize, drafts: usize) -> f64 {
        chain((place..place + drafts).map(|place| self.chance(place)))
    }

    fn lookup_tokens(&self, drafts: usize) -> f64 {
        chain((0..drafts).map(|_| self.lookup_chance()))
    }

    /// Tokens per millisecond with `rows` rows in every round, drafted by the model.
    pub fn fixed(&self, rows: usize) -> f64 {
        self.tokens(0, rows - 1) / (self.verify[rows - 1] + (rows - 1) as f64 * self.step)
    }

    /// Tokens per millisecond of the best fixed choice: one plan for the rounds in which the prompt lookup has a draft,
    /// one for the others.
    pub fn best(&self) -> f64 {
        let model = |drafts: usize| (self.tokens(0, drafts), self.verify[drafts] + drafts as f64 * self.step);
        let without: Vec<_> = (0..MOST_ROWS).map(model).collect();
        let Some(lookup) = self.lookup else {
            return without.iter().map(|(tokens, ms)| tokens / ms).fold(0.0, f64::max);
        };
        let mut with = without.clone();
        let found = 1..=lookup.tokens.min(MOST_ROWS - 1);
        with.extend(found.clone().map(|drafts| (self.lookup_tokens(drafts), self.verify[drafts])));
        // The best quotient of sums (Dinkelbach 1967): iterate on the gain at the best rate so far,
        // until there is none.
        let mut rate = self.fixed(1);
        for _ in 0..50 {
            let most = |plans: &[(f64, f64)]| {
                plans
                    .iter()
                    .copied()
                    .max_by(|a, b| (a.0 - rate * a.1).total_cmp(&(b.0 - rate * b.1)))
                    .unwrap_or((1.0, 1.0))
            };
            let mix = |share: f64, a: (f64, f64), b: (f64, f64)| {
                (share * a.0 + (1.0 - share) * b.0, share * a.1 + (1.0 - share) * b.1)
            };
            let (tokens, ms) = mix(lookup.found, most(&with), most(&without));
            rate = tokens / ms;
        }
        rate
    }

    /// The best fixed choice's speed-up over plain decoding.
    pub fn gain(&self) -> f64 {
        self.best() / self.fixed(1)
    }

    pub fn time(&self, ms: f64, rng: &mut StdRng) -> f64 {
        let (every, times) = self.pause;
        let pause = if rng.random_range(0..every) == 0 { times } else { 1.0 };
        ms * self.slow * pause * rng.random_range(1.0 - self.noise..=1.0 + self.noise)
    }

    /// One round.
    pub fn round(
        &self,
        planner: &mut Planner,
        context: usize,
        rng: &mut StdRng,
        text: &mut Text<'_>,
    ) -> SimulatedRound {
        let mut offered =
            vec![AvailableDrafter { drafter: MODEL, kind: DrafterKind::Mtp, cost: DraftCost::PerToken, tokens: 63 }];
        let found = self.lookup.filter(|lookup| rng.random::<f64>() < lookup.found).map_or(0, |lookup| lookup.tokens);
        let (kind, cost) = (DrafterKind::NgramMapK, DraftCost::Once);
        offered.insert(0, AvailableDrafter { drafter: LOOKUP, kind, cost, tokens: found });
        let decision = planner.decide(&DecisionInput {
            context,
            max_rows: MOST_ROWS,
            drafters: &offered,
            others: OtherSequences::default(),
        });
        let plan = decision.plan;
        let mut correct = |place: usize| {
            let easy = rng.random::<f64>();
            text(plan, place).unwrap_or([easy < self.chance(place), easy < self.lookup_chance()])
        };
        let correct: Vec<[bool; 2]> = (0..MOST_ROWS).map(&mut correct).collect();

        let (drafter, drafted, steps, expected) = match plan {
            Plan::Plain => (None, 0, 0, 1.0),
            Plan::Draft { drafter: MODEL, tokens } => (Some(MODEL), tokens, tokens, self.tokens(0, tokens)),
            Plan::Draft { drafter, tokens } => (Some(drafter), tokens, 0, self.lookup_tokens(tokens)),
        };
        let accepted =
            |drafter: usize, drafted: usize| correct[..drafted].iter().take_while(|correct| correct[drafter]).count();
        let count = drafter.map_or(0, |drafter| accepted(drafter, drafted));
        let emitted = count + 1;
        let ms = self.verify[drafted] + steps as f64 * self.step;
        let outcome = DraftOutcome {
            drafter: LOOKUP,
            drafted: found.min(emitted),
            accepted: accepted(LOOKUP, found.min(emitted)),
        };
        let of_model = |ms| ModelSteps { kind: DrafterKind::Mtp, tokens: steps, ms };
        planner.observe(&Observation {
            context,
            rows: drafted + 1,
            others: OtherSequences::default(),
            verify_ms: self.time(self.verify[drafted], rng),
            steps: (steps > 0).then(|| of_model(self.time(steps as f64 * self.step, rng))),
            verified: drafter.map(|drafter| DraftOutcome { drafter, drafted, accepted: count }),
            found: if found > 0 { std::slice::from_ref(&outcome) } else { &[] },
            emitted,
        });
        SimulatedRound { plan, reason: decision.reason, expected, emitted, ms }
    }

    pub fn run(&self, planner: &mut Planner, rounds: usize, rng: &mut StdRng) -> Vec<SimulatedRound> {
        (0..rounds).map(|round| self.round(planner, round, rng, &mut |_, _| None)).collect()
    }
}

/// Expected tokens per millisecond.
pub fn rate(rounds: &[SimulatedRound]) -> f64 {
    rounds.iter().map(|round| round.expected).sum::<f64>() / rounds.iter().map(|round| round.ms).sum::<f64>()
}

pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}
