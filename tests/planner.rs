//! The planner on simulated machines: tables of what rounds cost and of how often drafts stand, with noise, and the
//! verdict against the best that could be done on them.

use foretoken::speculative::{
    BlockSize, Costs, DraftCost, DrafterKind, Found, Machine, MtpPreset, Observation, Offer, Offered, Plan, Planner,
    Verified, Why,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const MODEL: usize = 0;
const LOOK_UP: usize = 1;

/// A machine, and a text with its drafters.
#[derive(Clone)]
struct Simulation {
    name: String,
    /// Milliseconds of verifying 1, 2, ... rows.
    verify: Vec<f64>,
    /// Milliseconds of a draft step.
    step: f64,
    /// Chance that the model's draft at a place stands if those before it do.
    model: Vec<f64>,
    /// How often the look-up finds something, how long it is, and the chance of each of its tokens.
    look_up: Option<(f64, usize, f64)>,
    /// Share by which measured times vary.
    noise: f64,
    /// Now and then the processor is someone else's for a while: in one of so many rounds, this many times longer.
    pause: (usize, f64),
    /// How many times slower the machine is than its table for now.
    slow: f64,
}

/// What a run did, round by round: tokens that are to be expected of the plan, tokens that it gave, true milliseconds.
#[derive(Clone, Copy)]
struct Round {
    plan: Plan,
    why: Why,
    expected: f64,
    emitted: usize,
    ms: f64,
}

fn staircase(rows: usize) -> f64 {
    [1.0, 1.04, 1.08, 1.1, 1.45, 1.48, 1.5, 1.52, 2.1][rows.min(9) - 1] + 0.11 * rows.saturating_sub(9) as f64
}

fn table(v: impl Fn(usize) -> f64, plain_ms: f64) -> Vec<f64> {
    (1..=64).map(|rows| plain_ms * v(rows)).collect()
}

impl Simulation {
    fn new(name: &str, v: impl Fn(usize) -> f64, step: f64, model: &[f64]) -> Self {
        let plain_ms = 4.0;
        Self {
            name: name.into(),
            verify: table(v, plain_ms),
            step: step * plain_ms,
            model: model.to_vec(),
            look_up: None,
            noise: 0.08,
            pause: (200, 8.0),
            slow: 1.0,
        }
    }

    fn chance(&self, place: usize) -> f64 {
        self.model[place.min(self.model.len() - 1)]
    }

    /// Expected tokens of verifying so many of the model's drafts.
    fn tokens(&self, drafts: usize) -> f64 {
        let mut stand = 1.0;
        let chances = (0..drafts).map(|place| {
            stand *= self.chance(place);
            stand
        });
        1.0 + chances.sum::<f64>()
    }

    /// Expected tokens of verifying so many of the look-up's.
    fn found_tokens(&self, drafts: usize) -> f64 {
        let chance = self.look_up.map_or(0.0, |(_, _, chance)| chance);
        (0..=drafts).map(|k| chance.powi(k as i32)).sum()
    }

    /// Tokens per millisecond with `rows` rows in every round.
    fn fixed(&self, rows: usize) -> f64 {
        self.tokens(rows - 1) / (self.verify[rows - 1] + (rows - 1) as f64 * self.step)
    }

    fn best_fixed(&self) -> f64 {
        (1..=16).map(|rows| self.fixed(rows)).fold(0.0, f64::max)
    }

    fn time(&self, ms: f64, rng: &mut StdRng) -> f64 {
        let (every, times) = self.pause;
        let pause = if rng.random_range(0..every) == 0 { times } else { 1.0 };
        ms * self.slow * pause * rng.random_range(1.0 - self.noise..=1.0 + self.noise)
    }

    fn planner(&self, block: BlockSize) -> Planner {
        Planner::new(block, None, &[DraftCost::PerToken, DraftCost::Once], Costs::default())
    }

    /// One round; `stands(place)` may overrule the table.
    fn round(
        &self,
        planner: &mut Planner,
        context: usize,
        rng: &mut StdRng,
        stands: &mut dyn FnMut(usize) -> Option<bool>,
    ) -> Round {
        let mut offered =
            vec![Offered { drafter: MODEL, kind: DrafterKind::Mtp, cost: DraftCost::PerToken, tokens: 63 }];
        if let Some((share, tokens, _)) = self.look_up
            && rng.random::<f64>() < share
        {
            let (kind, cost) = (DrafterKind::NgramMapK, DraftCost::Once);
            offered.insert(0, Offered { drafter: LOOK_UP, kind, cost, tokens });
        }
        let decision = planner.decide(&Offer { context, most_rows: 64, drafters: &offered });
        let (drafter, drafted, steps) = match decision.plan {
            Plan::Plain => (None, 0, 0),
            Plan::Draft { drafter: MODEL, tokens } => (Some(MODEL), tokens, tokens),
            Plan::Draft { drafter, tokens } => (Some(drafter), tokens, 0),
            // Here a model never agrees by chance: it agrees where the look-up is right.
            Plan::Confirm { agreed, otherwise, .. } => {
                if rng.random::<f64>() < self.look_up.map_or(0.0, |(_, _, chance)| chance) {
                    (Some(LOOK_UP), agreed, 1)
                } else {
                    (Some(MODEL), otherwise, otherwise)
                }
            }
        };
        let confirmed = matches!(decision.plan, Plan::Confirm { .. }) && drafter == Some(LOOK_UP);
        let mut stands = |place: usize| {
            let chance = match drafter {
                Some(LOOK_UP) if confirmed && place == 0 => 1.0,
                Some(LOOK_UP) => self.look_up.map_or(0.0, |(_, _, chance)| chance),
                _ => self.chance(place),
            };
            stands(place).unwrap_or_else(|| rng.random::<f64>() < chance)
        };
        let accepted = (0..drafted).take_while(|place| stands(*place)).count();
        let ms = self.verify[drafted] + steps as f64 * self.step;
        let expected = match drafter {
            Some(LOOK_UP) => self.found_tokens(drafted),
            _ => self.tokens(drafted),
        };
        let asked = matches!(decision.plan, Plan::Confirm { .. });
        let found = match drafter {
            Some(LOOK_UP) => Some(Found { drafter: LOOK_UP, drafted, accepted, agreed: asked.then_some(true) }),
            _ => asked.then_some(Found { drafter: LOOK_UP, drafted: 1, accepted: 0, agreed: Some(false) }),
        };
        planner.observe(&Observation {
            context,
            rows: drafted + 1,
            verify_ms: self.time(self.verify[drafted], rng),
            steps: (steps > 0).then(|| (DrafterKind::Mtp, steps, self.time(steps as f64 * self.step, rng))),
            verified: drafter.map(|drafter| Verified { drafter, drafted, accepted }),
            found: found.as_slice(),
            emitted: accepted + 1,
        });
        Round { plan: decision.plan, why: decision.why, expected, emitted: accepted + 1, ms }
    }

    fn run(&self, planner: &mut Planner, rounds: usize, rng: &mut StdRng) -> Vec<Round> {
        (0..rounds).map(|round| self.round(planner, round, rng, &mut |_| None)).collect()
    }
}

/// Expected tokens per true millisecond.
fn rate(rounds: &[Round]) -> f64 {
    rounds.iter().map(|round| round.expected).sum::<f64>() / rounds.iter().map(|round| round.ms).sum::<f64>()
}

fn machines() -> Vec<Simulation> {
    let linear = |slope: f64| move |rows: usize| 1.0 + slope * (rows - 1) as f64;
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
            all.push(Simulation::new(&name("flat"), linear(0.03), step, &model));
            all.push(Simulation::new(&name("demo"), linear(0.1), step, &model));
            all.push(Simulation::new(&name("steep"), linear(0.5), step, &model));
            all.push(Simulation::new(&name("stairs"), staircase, step, &model));
            all.push(Simulation::new(
                &name("double"),
                |rows| if rows == 1 { 1.0 } else { 2.2 + 0.02 * rows as f64 },
                step,
                &model,
            ));
        }
    }
    all
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

#[test]
fn two_hundred_rounds_find_the_best_block() {
    let (mut worst, mut missed, mut means) = ((f64::INFINITY, String::new()), Vec::new(), Vec::new());
    for machine in machines() {
        let reached: Vec<f64> = (0..12)
            .map(|seed| {
                let mut rng = StdRng::seed_from_u64(seed);
                let mut planner = machine.planner(BlockSize::Measured);
                machine.run(&mut planner, 200, &mut rng);
                rate(&machine.run(&mut planner, 1000, &mut rng)) / machine.best_fixed()
            })
            .collect();
        let mean = mean(&reached);
        means.push(mean);
        if mean < worst.0 {
            worst = (mean, machine.name.clone());
        }
        // Where the second row alone costs more than a plain step, a draft of which nothing stands costs 1.2 steps or
        // more. The floor lends five, and then 2 % of the time: one such draft in 60 rounds. A text that was unlucky with
        // the first ones has seen too few in 200 rounds to tell a gain of a tenth or a quarter from none.
        let gain = machine.best_fixed() / machine.fixed(1);
        let least = if machine.verify[1] > 2.0 * machine.verify[0] && gain > 1.0 && gain < 1.5 { 0.95 } else { 0.98 };
        if mean < least {
            missed.push(format!("{} (gain {gain:.2}): {mean:.3} of the best; {reached:.3?}", machine.name));
        }
    }
    let all = mean(&means);
    println!("steady: {all:.4} of the best fixed block, at worst {:.4}: {}", worst.0, worst.1);
    assert!(missed.is_empty(), "{missed:#?}");
}

/// Tables that nobody thought of, measured with times that vary by a fifth, now and then by a factor of three, on a machine
/// that is half as fast for a while.
#[test]
fn random_machines_are_mastered() {
    let (mut all, mut late_losses) = (Vec::new(), Vec::new());
    for seed in 0..300 {
        let mut rng = StdRng::seed_from_u64(seed);
        let machine = random(&mut rng);
        let mut reached = Vec::new();
        for _ in 0..3 {
            let (mut machine, mut planner) = (machine.clone(), machine.planner(BlockSize::Measured));
            let mut rounds = Vec::new();
            for (slow, count) in [(1.0, 100), (2.0, 60), (1.0, 300), (2.0, 140), (1.0, 600)] {
                machine.slow = slow;
                rounds.extend(machine.run(&mut planner, count, &mut rng));
            }
            reached.push(rate(&rounds[200..]) / machine.best_fixed());
            late_losses.push((worst_loss(&rounds, machine.verify[0]), seed));
        }
        all.push((mean(&reached), seed, machine.best_fixed() / machine.fixed(1)));
    }
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    late_losses.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mean = mean(&all.iter().map(|one| one.0).collect::<Vec<_>>());
    let (under, slower) =
        (all.iter().filter(|one| one.0 < 0.98).count(), late_losses.iter().filter(|one| one.0 > 1.03).count());
    println!("{mean:.4} of the best, {under} of 300 under 0.98, at worst {:.3?}", &all[..4]);
    println!("{slower} of 900 texts slower than 1.03, at worst {:.3?}", &late_losses[..4]);
    assert!(mean >= 0.98 && under <= 40 && all[0].0 >= 0.85, "{mean:.4}, {under}, {:?}", all[0]);
    // With measurements this bad what a draft costs against a plain step is known to a few hundredths only.
    assert!(slower <= 45 && late_losses[0].0 <= 1.08, "{slower}, {:?}", late_losses[0]);
}

fn random(rng: &mut StdRng) -> Simulation {
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
    (machine.noise, machine.pause) = (0.2, (50, 3.0));
    machine
}

/// What a machine costs is learnt on the way: the first tokens on one that nothing is known about, against the best.
#[test]
fn the_first_rounds_are_not_wasted() {
    let mut missed = Vec::new();
    for machine in machines().iter().filter(|machine| machine.best_fixed() > 1.2 * machine.fixed(1)) {
        let reached = [0, 1, 2, 3].map(|seed| {
            let mut rng = StdRng::seed_from_u64(seed);
            rate(&machine.run(&mut machine.planner(BlockSize::Measured), 60, &mut rng)) / machine.best_fixed()
        });
        let mean = reached.iter().sum::<f64>() / reached.len() as f64;
        println!("{}: {mean:.3} of the best in the first 60 rounds", machine.name);
        if mean < 0.7 {
            missed.push(format!("{}: {mean:.3}", machine.name));
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
}

#[test]
fn a_change_is_followed_within_fifty_rounds() {
    let linear = |slope: f64| move |rows: usize| 1.0 + slope * (rows - 1) as f64;
    let mut missed = Vec::new();
    for (curve, step) in [("linear", 0.05), ("flat", 0.05), ("stairs", 0.1)] {
        for (before, after) in
            [(0.9, 0.2), (0.2, 0.9), (0.95, 0.5), (0.5, 0.95), (0.9, 0.0), (0.03, 0.9), (0.7, 0.4), (0.4, 0.7)]
        {
            let reached: Vec<f64> = (0..80)
                .map(|seed| {
                    let mut rng = StdRng::seed_from_u64(seed);
                    let machine = |chance: f64| match curve {
                        "linear" => Simulation::new(curve, linear(0.1), step, &[chance]),
                        "flat" => Simulation::new(curve, linear(0.03), step, &[chance]),
                        _ => Simulation::new(curve, staircase, step, &[chance]),
                    };
                    let (first, second) = (machine(before), machine(after));
                    let mut planner = first.planner(BlockSize::Measured);
                    first.run(&mut planner, 300, &mut rng);
                    second.run(&mut planner, 50, &mut rng);
                    rate(&second.run(&mut planner, 50, &mut rng)) / second.best_fixed()
                })
                .collect();
            let mean = mean(&reached);
            println!("{curve}, {before} -> {after}: {mean:.3} of the best");
            // What nobody drafts for is noticed by probes only, and behind a stair lies what was never measured.
            let least = if before < 0.3 && after > 0.8 && curve != "linear" { 0.965 } else { 0.98 };
            if mean < least {
                missed.push(format!("{curve}, {before} -> {after}: {mean:.3} of the best"));
            }
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
}

/// Short texts on machines that nothing is known about, against blocks of four and against off, the whole text long.
#[test]
fn short_texts_are_planned_well_from_the_start() {
    let curves: [(&str, &[f64], f64); 2] = [
        ("typical", &[1.0, 1.08, 1.16, 1.24, 1.4, 1.5, 1.55, 1.61], 0.05),
        ("demo", &[1.0, 1.3, 1.45, 1.6, 1.9, 2.1, 2.3, 2.5], 0.08),
    ];
    let mut missed = Vec::new();
    for (name, v, step) in curves {
        let v = |rows: usize| v[rows.min(8) - 1] + 0.1 * rows.saturating_sub(8) as f64;
        for (noise, pause) in [(0.08, (200, 8.0)), (0.2, (50, 3.0))] {
            let mut machine = Simulation::new(name, v, step, &[0.75]);
            (machine.noise, machine.pause) = (noise, pause);
            for tokens in [48, 64, 96, 128] {
                let texts: Vec<Vec<Round>> = (0..100)
                    .map(|seed| {
                        let (mut rng, mut planner) =
                            (StdRng::seed_from_u64(seed), machine.planner(BlockSize::Measured));
                        let (mut rounds, mut emitted) = (Vec::new(), 0);
                        while emitted < tokens {
                            rounds.push(machine.round(&mut planner, rounds.len(), &mut rng, &mut |_| None));
                            emitted += rounds[rounds.len() - 1].emitted;
                        }
                        rounds
                    })
                    .collect();
                let reached = rate(&texts.concat()) / machine.fixed(4);
                // More steps than plain decoding takes and three in a hundred.
                let steps = |round: &Round| round.ms / machine.verify[0] - 1.03 * round.emitted as f64;
                let owed = texts.iter().map(|text| text.iter().map(steps).sum::<f64>()).fold(f64::MIN, f64::max);
                println!(
                    "{name}, noise {noise}, {tokens} tokens: {reached:.3} of blocks of four, {owed:.2} steps owed at most"
                );
                if reached < 0.95 || owed > 1.5 {
                    missed.push(format!("{name}, {tokens} tokens: {reached:.3}, {owed:.2}"));
                }
            }
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
}

/// Time against plain decoding's, by the stricter of two accounts. One begins with the first token, and texts of less than 256
/// count as such of 256: so long as it is at most 1.03, no text loses more than 3 %, and the first rounds of one no more than 8
/// plain steps. The other begins behind 64 tokens, from 256 on: what these have won is not to be lost later.
fn worst_loss(rounds: &[Round], plain_ms: f64) -> f64 {
    let (mut tokens, mut steps, mut worst) = (0.0, 0.0, 0.0_f64);
    let (mut late_tokens, mut late_steps) = (0.0, 0.0);
    for round in rounds {
        if tokens >= 64.0 {
            late_tokens += round.emitted as f64;
            late_steps += round.ms / plain_ms;
        }
        tokens += round.emitted as f64;
        steps += round.ms / plain_ms;
        worst = worst.max(1.0 + (steps - tokens) / tokens.max(256.0));
        if tokens >= 256.0 {
            worst = worst.max(late_steps / late_tokens);
        }
    }
    worst
}

#[test]
fn never_three_percent_slower_than_off() {
    let (mut worst, mut missed) = ((0.0, String::new()), Vec::new());
    for machine in machines() {
        for seed in 0..3 {
            let mut rng = StdRng::seed_from_u64(seed);
            let mut planner = machine.planner(BlockSize::Measured);
            let rounds = machine.run(&mut planner, 2000, &mut rng);
            let loss = worst_loss(&rounds, machine.verify[0]);
            if loss > worst.0 {
                worst = (loss, format!("{}, seed {seed}", machine.name));
            }
            if loss > 1.03 {
                missed.push(format!("{}, seed {seed}: {loss:.3} of the time of plain decoding", machine.name));
            }
        }
    }
    println!("at worst {:.4} of the time of plain decoding: {}", worst.0, worst.1);
    assert!(missed.is_empty(), "{missed:#?}");
}

/// Texts that know what the planner does, and answer so that it hurts.
#[test]
fn adversaries_gain_nothing() {
    let machines = [
        Simulation::new("demo", |rows| 1.0 + 0.1 * (rows - 1) as f64, 0.1, &[0.5]),
        Simulation::new("stairs", staircase, 0.25, &[0.5]),
        Simulation::new("double", |rows| if rows == 1 { 1.0 } else { 2.2 }, 0.5, &[0.5]),
        Simulation::new("cheap trap", |rows| if rows < 4 { 1.0 } else { 4.0 + rows as f64 }, 0.02, &[0.5]),
    ];
    let mut missed = Vec::new();
    type Adversary = Box<dyn FnMut(&[Round], usize) -> bool>;
    for machine in machines {
        let name = &machine.name;
        let adversaries: Vec<(&str, Adversary)> = vec![
            ("rejects everything", Box::new(|_, _| false)),
            // Praises probes, and lets down what follows.
            ("lures", Box::new(|past, _| past.last().is_none_or(|round| round.plan == Plan::Plain))),
            // Everything stands for a while, then nothing.
            ("alternates by 7", Box::new(|past, _| past.len() / 7 % 2 == 0)),
            ("alternates by 40", Box::new(|past, _| past.len() / 40 % 2 == 0)),
            ("alternates by 150", Box::new(|past, _| past.len() / 150 % 2 == 0)),
            // Takes all but the last token that was needed to break even.
            ("nearly", Box::new(|past, place| place == 0 && past.len() % 2 == 0)),
            ("generous at first", Box::new(|past, _| past.len() < 60)),
        ];
        for (adversary, mut stands) in adversaries {
            let mut rng = StdRng::seed_from_u64(1);
            let mut planner = machine.planner(BlockSize::Measured);
            let mut rounds: Vec<Round> = Vec::new();
            for context in 0..3000 {
                let round = machine.round(&mut planner, context, &mut rng, &mut |place| Some(stands(&rounds, place)));
                rounds.push(round);
            }
            let loss = worst_loss(&rounds, machine.verify[0]);
            println!("{name}, {adversary}: {loss:.3} of the time of plain decoding");
            if loss > 1.03 {
                missed.push(format!("{name}, {adversary}: {loss:.3}"));
            }
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
}

/// Drift of the machine's speed is not taken for a reason to change the block, nor for a debt.
#[test]
fn a_machine_that_slows_down_is_no_reason() {
    let mut machine = Simulation::new("drift", |rows| 1.0 + 0.1 * (rows - 1) as f64, 0.05, &[0.85]);
    let (mut rng, mut planner) = (StdRng::seed_from_u64(3), machine.planner(BlockSize::Measured));
    machine.run(&mut planner, 200, &mut rng);
    for factor in [2.0, 0.5, 1.5, 0.4] {
        machine.verify.iter_mut().for_each(|ms| *ms *= factor);
        machine.step *= factor;
        let rounds = machine.run(&mut planner, 150, &mut rng);
        let reached = rate(&rounds) / machine.best_fixed();
        assert!(reached >= 0.95, "speed times {factor}: {reached:.3} of the best");
        assert!(rounds.iter().all(|round| round.why != Why::Floor), "speed times {factor}");
    }
}

#[test]
fn look_ups_are_used_as_far_as_they_are_good() {
    let linear = |rows: usize| 1.0 + 0.08 * (rows - 1) as f64;
    for (chance, used) in [(0.99, true), (0.1, false)] {
        let mut machine = Simulation::new("look-up", linear, 0.1, &[0.75]);
        machine.look_up = Some((0.9, 48, chance));
        let (mut rng, mut planner) = (StdRng::seed_from_u64(4), machine.planner(BlockSize::Measured));
        machine.run(&mut planner, 200, &mut rng);
        let rounds = machine.run(&mut planner, 400, &mut rng);
        let share = |of: fn(&Plan) -> bool| rounds.iter().filter(|round| of(&round.plan)).count() as f64 / 400.0;
        let looked_up = share(|plan| matches!(plan, Plan::Draft { drafter: LOOK_UP, .. } | Plan::Confirm { .. }));
        let alone = share(|plan| matches!(plan, Plan::Draft { drafter: LOOK_UP, .. }));
        println!("look-ups that stand at {chance}: {looked_up:.2} used, {alone:.2} unconfirmed");
        if used {
            assert!(looked_up > 0.8, "{looked_up:.2} used");
            let gain = rate(&rounds) / machine.best_fixed();
            assert!(gain > 1.3, "{gain:.2} times the model alone");
        } else {
            assert!(alone < 0.1, "{alone:.2} used");
            let reached = rate(&rounds) / machine.best_fixed();
            assert!(reached > 0.96, "{reached:.3} of the model alone");
        }
    }
}

/// A look-up that is not used is judged by the text that the model writes.
#[test]
fn look_ups_are_judged_without_being_used() {
    let machine = Simulation::new("judged", |rows| 1.0 + 0.05 * (rows - 1) as f64, 0.1, &[0.8]);
    let (mut rng, mut planner) = (StdRng::seed_from_u64(8), machine.planner(BlockSize::Measured));
    machine.run(&mut planner, 200, &mut rng);
    let model = Offered { drafter: MODEL, kind: DrafterKind::Mtp, cost: DraftCost::PerToken, tokens: 63 };
    let look_up = Offered { drafter: LOOK_UP, kind: DrafterKind::NgramMapK, cost: DraftCost::Once, tokens: 16 };
    let mut plan_after = |accepted: usize| {
        for _ in 0..20 {
            let found = [Found { drafter: LOOK_UP, drafted: 4, accepted, agreed: Some(accepted > 0) }];
            planner.observe(&Observation {
                context: 200,
                rows: 4,
                verify_ms: machine.verify[3],
                steps: Some((DrafterKind::Mtp, 3, 3.0 * machine.step)),
                verified: Some(Verified { drafter: MODEL, drafted: 3, accepted: 3 }),
                found: &found,
                emitted: 4,
            });
        }
        planner.decide(&Offer { context: 200, most_rows: 64, drafters: &[look_up, model] }).plan
    };
    let (bad, good) = (plan_after(0), plan_after(4));
    assert!(matches!(bad, Plan::Draft { drafter: MODEL, .. }), "{bad:?}");
    assert!(matches!(good, Plan::Draft { drafter: LOOK_UP, .. } | Plan::Confirm { .. }), "{good:?}");
}

/// The first rounds behind a prompt are dearer: costs that were learnt before stay what they are.
#[test]
fn texts_that_begin_cold_leave_costs_as_they_are() {
    let machine = Simulation::new("cold", |rows| 1.0 + 0.15 * (rows - 1) as f64, 0.1, &[0.0]);
    let (mut rng, mut costs) = (StdRng::seed_from_u64(9), Costs::default());
    for text in 0..60 {
        let mut planner = Planner::new(BlockSize::Measured, None, &[DraftCost::PerToken], costs);
        for cold in [1.2, 0.6, 0.2, 0.1].into_iter().chain([0.0; 116]) {
            let mut now = machine.clone();
            now.verify.iter_mut().for_each(|ms| *ms += cold * machine.verify[0]);
            now.model = vec![[0.5, 0.7, 0.9, 0.95][text % 4]];
            now.round(&mut planner, text, &mut rng, &mut |_| None);
        }
        costs = planner.costs().clone();
    }
    let (estimates, rows) = (costs.verify(0, 8), [2, 3, 4, 6, 8]);
    for rows in rows {
        let (found, truth) = (estimates[rows - 1].ms / estimates[0].ms, machine.verify[rows - 1] / machine.verify[0]);
        assert!((found / truth).ln().abs() < 0.1, "{rows} rows: {found:.2}, in truth {truth:.2}");
    }
}

/// Behind a long prompt more rounds are dearer than are left out. What is verified all the time must not become cheaper by
/// it than what was measured once.
#[test]
fn slow_beginnings_make_nothing_cheap() {
    let machine = Simulation::new("slow beginnings", |rows| 1.0 + 0.15 * (rows - 1) as f64, 0.1, &[0.8]);
    let mut rng = StdRng::seed_from_u64(10);
    let mut costs = Costs::default();
    for rows in [1, 2, 3, 4, 5, 6, 8] {
        (0..6).for_each(|_| costs.verified(0, rows, machine.time(machine.verify[rows - 1], &mut rng)));
    }
    for text in 0..100 {
        let mut planner = Planner::new(BlockSize::Fixed(5), None, &[DraftCost::PerToken], costs);
        for round in 0..60 {
            let mut now = machine.clone();
            let slow = 1.0 + 0.2 * (-f64::from(round) / 12.0).exp();
            now.verify.iter_mut().for_each(|ms| *ms *= slow);
            now.round(&mut planner, text, &mut rng, &mut |_| None);
        }
        costs = planner.costs().clone();
    }
    let estimates = costs.verify(0, 8);
    let (found, truth) = (estimates[7].ms / estimates[4].ms, machine.verify[7] / machine.verify[4]);
    assert!((found / truth).ln().abs() < 0.1, "8 rows are {found:.2} times 5 rows, in truth {truth:.2}");
}

#[test]
fn a_context_length_is_measured_for_itself() {
    // Beyond 4096 positions every row costs as much as the first.
    let machine = Simulation::new("short", |rows| 1.0 + 0.05 * (rows - 1) as f64, 0.05, &[0.6]);
    let far = Simulation::new("long", |rows| rows as f64, 0.05, &[0.6]);
    let (mut rng, mut planner) = (StdRng::seed_from_u64(5), machine.planner(BlockSize::Measured));
    machine.run(&mut planner, 300, &mut rng);
    let drafted = |rounds: &[Round]| rounds.iter().filter(|round| round.plan != Plan::Plain).count();
    let near = drafted(&machine.run(&mut planner, 100, &mut rng));
    let mut at = |simulation: &Simulation, context, rounds| -> Vec<Round> {
        (0..rounds).map(|_| simulation.round(&mut planner, context, &mut rng, &mut |_| None)).collect()
    };
    at(&far, 5000, 100);
    let there = drafted(&at(&far, 5000, 100));
    let back = drafted(&at(&machine, 100, 100));
    assert!(near > 90 && there < 20 && back > 90, "{near}, {there} and {back} of 100 rounds drafted");
}

#[test]
fn given_blocks_are_kept() {
    let machine = Simulation::new("given", |rows| rows as f64, 0.5, &[0.0]);
    for (block, rows) in [
        (BlockSize::Fixed(1), 1),
        (BlockSize::Fixed(5), 5),
        (BlockSize::Preset(MtpPreset::Throughput), 2),
        (BlockSize::Preset(MtpPreset::Lift), 3),
        (BlockSize::Preset(MtpPreset::Balanced), 3),
        (BlockSize::Preset(MtpPreset::Quality), 4),
    ] {
        let (mut rng, mut planner) = (StdRng::seed_from_u64(6), machine.planner(block));
        for round in machine.run(&mut planner, 20, &mut rng) {
            let want = if rows == 1 { Plan::Plain } else { Plan::Draft { drafter: MODEL, tokens: rows - 1 } };
            assert_eq!(round.plan, want, "{block:?}");
        }
    }
}

/// A streak of failures rests the model, not the look-up.
#[test]
fn streaks_fall_to_the_look_up() {
    let mut machine = Simulation::new("streak", |rows| rows as f64, 0.5, &[0.0]);
    let costs = [DraftCost::PerToken, DraftCost::Once];
    let mut planner = Planner::new(BlockSize::Fixed(4), Some(3), &costs, Costs::default());
    let mut rng = StdRng::seed_from_u64(7);
    let plans: Vec<Plan> = machine.run(&mut planner, 8, &mut rng).iter().map(|round| round.plan).collect();
    let (model, plain) = (Plan::Draft { drafter: MODEL, tokens: 3 }, Plan::Plain);
    assert_eq!(plans, [model, model, model, plain, model, model, model, plain]);
    machine.look_up = Some((1.0, 8, 0.0));
    let look_up = Plan::Draft { drafter: LOOK_UP, tokens: 3 };
    assert_eq!(machine.run(&mut planner, 1, &mut rng)[0].plan, look_up);
}

#[test]
fn costs_are_saved_and_loaded() {
    let own = Machine { isa: "avx2".into(), threads: 3, step_bytes: 1000, step_multiply_adds: 500 };
    let mut costs = Costs::new(own.clone());
    for (rows, ms) in [(1, 4.0), (2, 4.2), (4, 5.0), (8, 7.0)] {
        (0..9).for_each(|_| costs.verified(600, rows, ms));
    }
    costs.drafted(DrafterKind::Mtp, 4, 2.0);
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("costs.json");
    costs.save(&path).expect("a file");
    let loaded = Costs::load(&path, &own).expect("the same costs");
    assert_eq!(loaded.verify(700, 16), costs.verify(700, 16));
    assert_eq!(loaded.step(DrafterKind::Mtp, 0), 0.5);
    let estimates = loaded.verify(700, 8);
    assert!((estimates[3].ms - 5.0).abs() < 0.01 && (5.0..6.0).contains(&estimates[4].ms), "{estimates:?}");

    let other = Machine { threads: 4, ..own.clone() };
    let complaint = Costs::load(&path, &other).expect_err("another machine's").to_string();
    assert!(complaint.contains("costs.json") && complaint.contains("threads: 4"), "{complaint}");
    for text in [
        "",
        "{",
        "[]",
        r#"{"machine":{"isa":"avx2","threads":3,"step_bytes":1000,"step_multiply_adds":500},"verify":{"0":{"1":{"ms":-1.0,"samples":9}}},"draft":{}}"#,
        r#"{"machine":{"isa":"avx2","threads":3,"step_bytes":1000,"step_multiply_adds":500},"verify":{},"draft":{},"pace":{"noise":0.0}}"#,
    ] {
        std::fs::write(&path, text).expect("a file");
        let complaint = Costs::load(&path, &own).expect_err("no costs").to_string();
        assert!(complaint.contains("costs.json") && complaint.contains("delete it"), "{complaint}");
    }
}
