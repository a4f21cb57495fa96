//! The planner's gains and losses on sets of simulated machines and texts.

use std::ops::Range;

use foretoken::speculative::{BlockSize, Plan, Tuning};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::simulation::{LOOKUP, Lookup, NOISY, QUIET, SimulatedRound, Simulation, linear, mean, rate, staircase};

pub const WARM_UP: usize = 200;
pub const FLOOR_TOKENS: usize = 256;

/// Result of one machine and text.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub name: String,
    pub lookup: Option<Lookup>,
    /// Share by which measured times vary.
    pub noise: f64,
    /// The best fixed choice's speed-up over plain decoding.
    pub gain: f64,
    /// Speed relative to the best fixed choice's, per seed, from the set's starting round on.
    pub reached: Vec<f64>,
    /// Worst time relative to plain decoding's, per seed.
    pub slowdowns: Vec<f64>,
}

impl Outcome {
    fn new(machine: &Simulation) -> Self {
        let (reached, slowdowns) = (Vec::new(), Vec::new());
        Self {
            name: machine.name.clone(),
            lookup: machine.lookup,
            noise: machine.noise,
            gain: machine.gain(),
            reached,
            slowdowns,
        }
    }

    pub fn mean(&self) -> f64 {
        mean(&self.reached)
    }

    pub fn worst(&self) -> f64 {
        self.slowdowns.iter().copied().fold(0.0, f64::max)
    }
}

/// The mean of the means.
pub fn reached<'a>(outcomes: impl IntoIterator<Item = &'a Outcome>) -> f64 {
    mean(&outcomes.into_iter().map(Outcome::mean).collect::<Vec<_>>())
}

/// The worst slowdown.
pub fn worst<'a>(outcomes: impl IntoIterator<Item = &'a Outcome>) -> f64 {
    outcomes.into_iter().map(Outcome::worst).fold(0.0, f64::max)
}

/// Time relative to plain decoding's at the worst length; texts shorter than `FLOOR_TOKENS` count as that long.
pub fn slowdown(rounds: &[SimulatedRound], plain_ms: f64) -> f64 {
    let (mut tokens, mut steps, mut worst) = (0.0, 0.0, 0.0_f64);
    for round in rounds {
        tokens += round.emitted as f64;
        steps += round.ms / plain_ms;
        worst = worst.max(1.0 + (steps - tokens) / tokens.max(FLOOR_TOKENS as f64));
    }
    worst
}

pub fn machines(tuning: Tuning) -> Vec<Simulation> {
    let mut all = Vec::new();
    for (chances, model) in [
        ("sure", vec![0.97]),
        ("good", vec![0.83, 0.87, 0.9]),
        ("fair", vec![0.7, 0.65, 0.6]),
        ("poor", vec![0.4, 0.35]),
        ("useless", vec![0.02]),
        ("first only", vec![0.9, 0.1]),
    ] {
        for (curve, step) in [("cheap", 0.02), ("dear", 0.25)] {
            let name = |of: &str| format!("{of} rows, {curve} steps, {chances}");
            let double = |rows: usize| if rows == 1 { 1.0 } else { 2.2 + 0.02 * rows as f64 };
            all.push(Simulation::new(&name("flat"), linear(0.03), step, &model));
            all.push(Simulation::new(&name("demo"), linear(0.1), step, &model));
            all.push(Simulation::new(&name("steep"), linear(0.5), step, &model));
            all.push(Simulation::new(&name("stairs"), staircase, step, &model));
            all.push(Simulation::new(&name("double"), double, step, &model));
        }
    }
    all.iter_mut().for_each(|machine| machine.tuning = tuning);
    all
}

/// No prompt lookup; one that copies long passages; one that is right about half the time; one that
/// rarely has a draft; one that is never right.
pub fn lookups() -> [Option<Lookup>; 5] {
    let lookup = |found, tokens, chance| Some(Lookup { found, tokens, chance });
    [None, lookup(0.9, 48, 0.97), lookup(0.5, 12, 0.6), lookup(0.1, 24, 0.95), lookup(1.0, 48, 0.05)]
}

/// 1200 rounds on every machine; reached from round `WARM_UP` on.
pub fn fixed_machines(tuning: Tuning, lookup: Option<Lookup>, seeds: Range<u64>) -> Vec<Outcome> {
    let outcome = |machine: Simulation| {
        let machine = machine.with_lookup(lookup);
        let (mut outcome, best) = (Outcome::new(&machine), machine.best());
        for seed in seeds.clone() {
            let (mut rng, mut planner) = (StdRng::seed_from_u64(seed), machine.planner(BlockSize::Measured));
            let rounds = machine.run(&mut planner, 1200, &mut rng);
            outcome.reached.push(rate(&rounds[WARM_UP..]) / best);
            outcome.slowdowns.push(slowdown(&rounds, machine.plain_ms()));
        }
        outcome
    };
    machines(tuning).into_iter().map(outcome).collect()
}

/// Unusual tables, measured with times that vary by a fifth, by a factor of three in one of 50 rounds, on a machine
/// that is half as fast for a while. First those without prompt lookup.
pub fn random_machines(tuning: Tuning, seeds: Range<u64>) -> (Vec<Outcome>, Vec<Outcome>) {
    let (mut alone, mut with) = (Vec::new(), Vec::new());
    for seed in seeds {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut model = random(&mut rng);
        model.tuning = tuning;
        let lookup =
            Lookup { found: rng.random(), tokens: rng.random_range(2..=48), chance: rng.random_range(0.0..0.99) };
        for (mut machine, all) in [(model.clone(), &mut alone), (model.with_lookup(Some(lookup)), &mut with)] {
            machine.name += &format!(", seed {seed}");
            let (mut outcome, best) = (Outcome::new(&machine), machine.best());
            for _ in 0..2 {
                let (mut planner, mut rounds) = (machine.planner(BlockSize::Measured), Vec::new());
                for (slow, count) in [(1.0, 100), (2.0, 60), (1.0, 300), (2.0, 140), (1.0, 600)] {
                    machine.slow = slow;
                    rounds.extend(machine.run(&mut planner, count, &mut rng));
                }
                outcome.reached.push(rate(&rounds[WARM_UP..]) / best);
                outcome.slowdowns.push(slowdown(&rounds, machine.plain_ms()));
            }
            all.push(outcome);
        }
    }
    (alone, with)
}

pub fn random(rng: &mut StdRng) -> Simulation {
    let slope = 0.01 * 30_f64.powf(rng.random());
    let (stairs, mut v) = (rng.random_range(0.0..0.4), vec![1.0]);
    for rows in 1..64 {
        let stair = if rng.random::<f64>() < stairs { rng.random_range(0.0..0.6) } else { 0.0 };
        v.push(v[rows - 1] + slope * rng.random_range(0.2..1.8) + stair);
    }
    let (mut chance, fall) = (rng.random_range(0.02..0.98_f64), rng.random_range(0.9..1.05));
    let chances: Vec<f64> = (0..16)
        .map(|_| {
            let now = chance;
            chance = (chance * fall * rng.random_range(0.95..1.05)).min(0.99);
            now
        })
        .collect();
    let step = 0.01 * 40_f64.powf(rng.random());
    let mut machine = Simulation::new("random", |rows| v[rows - 1], step, &chances);
    (machine.noise, machine.pause) = NOISY;
    machine
}

/// The first 60 rounds on unknown machines that gain at least a fifth.
pub fn first_rounds(tuning: Tuning, lookup: Option<Lookup>, seeds: Range<u64>) -> Vec<Outcome> {
    let clear = machines(tuning).into_iter().map(|machine| machine.with_lookup(lookup));
    let outcome = |machine: Simulation| {
        let mut outcome = Outcome::new(&machine);
        for seed in seeds.clone() {
            let mut rng = StdRng::seed_from_u64(seed);
            let rounds = machine.run(&mut machine.planner(BlockSize::Measured), 60, &mut rng);
            outcome.reached.push(rate(&rounds) / machine.best());
        }
        outcome
    };
    clear.filter(|machine| machine.gain() > 1.2).map(outcome).collect()
}

/// The model's acceptance changes, and so does that of a prompt lookup drafter: rounds 50 to 100 after the change.
pub fn changes(tuning: Tuning, seeds: Range<u64>) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    for (curve, step, found) in
        [("linear", 0.05, 0.0), ("flat", 0.05, 0.0), ("stairs", 0.1, 0.0), ("linear", 0.05, 0.5), ("stairs", 0.1, 0.5)]
    {
        for (before, after) in
            [(0.9, 0.2), (0.2, 0.9), (0.95, 0.5), (0.5, 0.95), (0.9, 0.0), (0.03, 0.9), (0.7, 0.4), (0.4, 0.7)]
        {
            let machine = |chance: f64| {
                let mut machine = match curve {
                    "linear" => Simulation::new(curve, linear(0.1), step, &[chance]),
                    "flat" => Simulation::new(curve, linear(0.03), step, &[chance]),
                    _ => Simulation::new(curve, staircase, step, &[chance]),
                };
                machine.tuning = tuning;
                machine.with_lookup((found > 0.0).then_some(Lookup { found, tokens: 12, chance }))
            };
            let (first, second) = (machine(before), machine(after));
            let mut outcome = Outcome::new(&second);
            outcome.name = format!("{}, {before} -> {after}", second.name);
            for seed in seeds.clone() {
                let (mut rng, mut planner) = (StdRng::seed_from_u64(seed), first.planner(BlockSize::Measured));
                first.run(&mut planner, 300, &mut rng);
                second.run(&mut planner, 50, &mut rng);
                outcome.reached.push(rate(&second.run(&mut planner, 50, &mut rng)) / second.best());
            }
            outcomes.push(outcome);
        }
    }
    outcomes
}

/// Short texts on unknown machines, over the whole text, relative to blocks of four. A prompt lookup drafter is never
/// right, or there is none. One figure for all seeds together.
pub fn short_texts(tuning: Tuning, seeds: Range<u64>) -> Vec<Outcome> {
    let curves: [(&str, &[f64], f64); 2] = [
        ("typical", &[1.0, 1.08, 1.16, 1.24, 1.4, 1.5, 1.55, 1.61], 0.05),
        ("demo", &[1.0, 1.3, 1.45, 1.6, 1.9, 2.1, 2.3, 2.5], 0.08),
    ];
    let mut outcomes = Vec::new();
    let [none, .., useless] = lookups();
    for ((name, v, step), lookup) in curves.into_iter().flat_map(|curve| [(curve, none), (curve, useless)]) {
        let v = |rows: usize| v[rows.min(8) - 1] + 0.1 * rows.saturating_sub(8) as f64;
        for noise in [QUIET, NOISY] {
            let mut machine = Simulation::new(name, v, step, &[0.75]).with_lookup(lookup);
            (machine.noise, machine.pause, machine.tuning) = (noise.0, noise.1, tuning);
            for tokens in [48, 64, 96, 128] {
                let mut outcome = Outcome::new(&machine);
                outcome.name = format!("{}, noise {}, {tokens} tokens", machine.name, noise.0);
                let mut all = Vec::new();
                for seed in seeds.clone() {
                    let (mut rng, mut planner) = (StdRng::seed_from_u64(seed), machine.planner(BlockSize::Measured));
                    let (mut rounds, mut emitted) = (Vec::new(), 0);
                    while emitted < tokens {
                        rounds.push(machine.round(&mut planner, rounds.len(), &mut rng, &mut |_, _| None));
                        emitted += rounds[rounds.len() - 1].emitted;
                    }
                    outcome.slowdowns.push(slowdown(&rounds, machine.plain_ms()));
                    all.extend(rounds);
                }
                outcome.reached.push(rate(&all) / machine.fixed(4));
                outcomes.push(outcome);
            }
        }
    }
    outcomes
}

/// Adversarial texts that know the planner's decisions.
pub fn adversaries(tuning: Tuning, seeds: Range<u64>) -> Vec<Outcome> {
    let machines = [
        Simulation::new("demo", linear(0.1), 0.1, &[0.5]),
        Simulation::new("stairs", staircase, 0.25, &[0.5]),
        Simulation::new("double", |rows| if rows == 1 { 1.0 } else { 2.2 }, 0.5, &[0.5]),
        Simulation::new("cheap trap", |rows| if rows < 4 { 1.0 } else { 4.0 + rows as f64 }, 0.02, &[0.5]),
    ];
    // Whether the model's and the lookup's token at a position is the target's, by the rounds
    // before, the plan and the position.
    type Adversary = fn(&[SimulatedRound], Plan, usize) -> [bool; 2];
    let adversaries: [(&str, Adversary); 10] = [
        ("rejects everything", |_, _, _| [false; 2]),
        // Accepts probes, and rejects what follows.
        ("lures", |past, _, _| [past.last().is_none_or(|round| round.plan == Plan::Plain); 2]),
        ("alternates by 7", |past, _, _| [past.len() / 7 % 2 == 0; 2]),
        ("alternates by 40", |past, _, _| [past.len() / 40 % 2 == 0; 2]),
        ("alternates by 150", |past, _, _| [past.len() / 150 % 2 == 0; 2]),
        // Accepts all but the last token that was needed to break even.
        ("nearly", |past, _, place| [place == 0 && past.len() % 2 == 0; 2]),
        ("generous at first", |past, _, _| [past.len() < 60; 2]),
        // The prompt lookup drafter is right as long as its draft is not verified.
        ("right unless verified", |_, plan, _| [false, !matches!(plan, Plan::Draft { drafter: LOOKUP, .. })]),
        // What both agree on is right for one token.
        ("agrees once", |_, _, place| [place == 0; 2]),
        ("one after the other", |past, _, _| [past.len() / 20 % 2 == 0, past.len() / 20 % 2 == 1]),
    ];
    let mut outcomes = Vec::new();
    for lookup in [None, Some(Lookup { found: 1.0, tokens: 48, chance: 0.5 })] {
        for ((name, accepted), machine) in adversaries.iter().flat_map(|a| machines.iter().map(move |m| (a, m))) {
            let mut machine = machine.clone().with_lookup(lookup);
            machine.tuning = tuning;
            let mut outcome = Outcome::new(&machine);
            outcome.name = format!("{}, {name}", machine.name);
            for seed in seeds.clone() {
                let (mut rng, mut planner) = (StdRng::seed_from_u64(seed), machine.planner(BlockSize::Measured));
                let mut rounds: Vec<SimulatedRound> = Vec::new();
                for context in 0..3000 {
                    let text = &mut |plan, place| Some(accepted(&rounds, plan, place));
                    let round = machine.round(&mut planner, context, &mut rng, text);
                    rounds.push(round);
                }
                outcome.slowdowns.push(slowdown(&rounds, machine.plain_ms()));
            }
            outcomes.push(outcome);
        }
    }
    outcomes
}
