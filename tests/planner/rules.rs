//! The planner's rules, case by case.

use foretoken::speculative::{
    AvailableDrafter, BlockSize, Costs, DecisionInput, DraftCost, DraftOutcome, DrafterKind, Machine, ModelSteps,
    MtpPreset, Observation, OtherSequences, Plan, Planner, Reason,
};
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::simulation::{LOOKUP, Lookup, MODEL, SimulatedRound, Simulation, linear, mean, rate};

/// Drift of the machine's speed neither changes the block nor counts as a loss.
#[test]
fn a_machine_that_slows_down_is_no_reason() {
    let mut machine = Simulation::new("drift", |rows| 1.0 + 0.1 * (rows - 1) as f64, 0.05, &[0.85]);
    let (mut rng, mut planner) = (StdRng::seed_from_u64(3), machine.planner(BlockSize::Measured));
    machine.run(&mut planner, 200, &mut rng);
    for factor in [2.0, 0.5, 1.5, 0.4] {
        machine.verify.iter_mut().for_each(|ms| *ms *= factor);
        machine.step *= factor;
        let rounds = machine.run(&mut planner, 150, &mut rng);
        let reached = rate(&rounds) / machine.best();
        assert!(reached >= 0.95, "speed times {factor}: {reached:.3} of the best");
        assert!(rounds.iter().all(|round| round.reason != Reason::LossLimit), "speed times {factor}");
    }
}

/// On average over texts, as single ones vary by some per cent.
#[test]
fn lookups_are_used_as_far_as_they_are_good() {
    for (chance, used) in [(0.99, true), (0.1, false)] {
        let model = Simulation::new("lookup", linear(0.08), 0.1, &[0.75]);
        let machine = model.clone().with_lookup(Some(Lookup { found: 0.9, tokens: 48, chance }));
        let (mut shares, mut speeds) = (Vec::new(), Vec::new());
        for seed in 0..8 {
            let (mut rng, mut planner) = (StdRng::seed_from_u64(seed), machine.planner(BlockSize::Measured));
            machine.run(&mut planner, 200, &mut rng);
            let rounds = machine.run(&mut planner, 400, &mut rng);
            let lookups = rounds.iter().filter(|round| matches!(round.plan, Plan::Draft { drafter: LOOKUP, .. }));
            shares.push(lookups.count() as f64 / 400.0);
            speeds.push(rate(&rounds) / model.best());
        }
        let (share, speed) = (mean(&shares), mean(&speeds));
        println!("lookup drafts accepted at {chance}: {share:.2} used, {speed:.3} of the model alone");
        if used {
            assert!(share > 0.8 && speed > 1.3, "{share:.2} used, {speed:.2} times the model alone");
        } else {
            assert!(share < 0.1 && speed > 0.96, "{share:.2} used, {speed:.3} of the model alone");
        }
    }
}

/// An unused prompt lookup drafter is scored by the text that the model writes.
#[test]
fn lookups_are_observed_without_being_used() {
    let machine = Simulation::new("compared", |rows| 1.0 + 0.05 * (rows - 1) as f64, 0.1, &[0.8]);
    let (mut rng, mut planner) = (StdRng::seed_from_u64(8), machine.planner(BlockSize::Measured));
    machine.run(&mut planner, 200, &mut rng);
    let model = AvailableDrafter { drafter: MODEL, kind: DrafterKind::Mtp, cost: DraftCost::PerToken, tokens: 63 };
    let lookup = AvailableDrafter { drafter: LOOKUP, kind: DrafterKind::NgramMapK, cost: DraftCost::Once, tokens: 16 };
    let mut plan_after = |accepted: usize| {
        for _ in 0..20 {
            let found = [DraftOutcome { drafter: LOOKUP, drafted: 4, accepted }];
            planner.observe(&Observation {
                context: 200,
                rows: 4,
                others: OtherSequences::default(),
                verify_ms: machine.verify[3],
                steps: Some(ModelSteps { kind: DrafterKind::Mtp, tokens: 3, ms: 3.0 * machine.step }),
                verified: Some(DraftOutcome { drafter: MODEL, drafted: 3, accepted: 3 }),
                found: &found,
                emitted: 4,
            });
        }
        let offer =
            DecisionInput { context: 200, max_rows: 64, drafters: &[lookup, model], others: OtherSequences::default() };
        let mut decisions = (0..50).map(|_| planner.decide(&offer)).filter(|decision| decision.reason == Reason::Best);
        decisions.next().expect("a round that is no probe").plan
    };
    let (bad, good) = (plan_after(0), plan_after(4));
    assert!(matches!(bad, Plan::Draft { drafter: MODEL, .. }), "{bad:?}");
    assert!(matches!(good, Plan::Draft { drafter: LOOKUP, .. }), "{good:?}");
}

/// Costs are those of the whole batch: if its rows cost nothing more, drafts continue; if every row costs,
/// few are verified, and none with many sequences.
#[test]
fn a_batch_leaves_less_to_speculation() {
    // 8 rows cost as much as one, each further one a quarter of that.
    let machine = Simulation::new("batch", |rows| 1.0 + 0.25 * rows.saturating_sub(8) as f64, 0.02, &[0.6]);
    let mut rng = StdRng::seed_from_u64(3);
    let mut planner = machine.planner(BlockSize::Measured);
    machine.run(&mut planner, 400, &mut rng);
    for rows in (1..=24).cycle().take(240) {
        let (rows, others) = (1, OtherSequences { rows: rows - 1, tokens: rows - 1, prompt_rows: 0 });
        planner.observe(&Observation {
            context: 0,
            rows,
            others,
            verify_ms: machine.verify[others.rows],
            steps: None,
            verified: None,
            found: &[],
            emitted: 1,
        });
    }
    let model = AvailableDrafter { drafter: MODEL, kind: DrafterKind::Mtp, cost: DraftCost::PerToken, tokens: 63 };
    let mut drafted = |others| {
        let offer = DecisionInput { context: 0, max_rows: 8, drafters: &[model], others };
        match planner.decide(&offer).plan {
            Plan::Plain => 0,
            Plan::Draft { tokens, .. } => tokens,
        }
    };
    let sequences = |rows| OtherSequences { rows, tokens: rows, prompt_rows: 0 };
    let (few, many) = (drafted(sequences(3)), drafted(sequences(15)));
    assert!((2..=4).contains(&few), "{few} drafts with three other sequences: rows up to the eighth are free");
    assert_eq!(many, 0, "with fifteen other sequences every row costs more than it gains");
}

/// A pass with a prompt chunk says nothing about passes with as many verified rows.
#[test]
fn passes_that_read_prompts_are_not_measured() {
    let machine = Simulation::new("prompts", |rows| 1.0 + 0.25 * (rows - 1) as f64, 0.02, &[0.6]);
    let mut planner = machine.planner(BlockSize::Measured);
    machine.run(&mut planner, 400, &mut StdRng::seed_from_u64(3));
    let estimates = |planner: &Planner| planner.costs().verify(0, 80);
    let before = estimates(&planner);
    for prompt_rows in 1..=64 {
        planner.observe(&Observation {
            context: 0,
            rows: 1,
            others: OtherSequences { rows: prompt_rows, tokens: 0, prompt_rows },
            verify_ms: 1.0,
            steps: None,
            verified: None,
            found: &[],
            emitted: 1,
        });
    }
    assert_eq!(estimates(&planner), before);
}

/// The first rounds after a prompt cost more: costs learnt before are unchanged.
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
            now.round(&mut planner, text, &mut rng, &mut |_, _| None);
        }
        costs = planner.costs().clone();
    }
    let (estimates, rows) = (costs.verify(0, 8), [2, 3, 4, 6, 8]);
    for rows in rows {
        let (found, truth) = (estimates[rows - 1].ms / estimates[0].ms, machine.verify[rows - 1] / machine.verify[0]);
        assert!((found / truth).ln().abs() < 0.1, "{rows} rows: {found:.2}, in truth {truth:.2}");
    }
}

/// After a long prompt more rounds than the skipped ones cost more. Costs measured all the time must not become
/// cheaper by this relative to those measured once.
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
            now.round(&mut planner, text, &mut rng, &mut |_, _| None);
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
    let drafted = |rounds: &[SimulatedRound]| rounds.iter().filter(|round| round.plan != Plan::Plain).count();
    let near = drafted(&machine.run(&mut planner, 100, &mut rng));
    let mut at = |simulation: &Simulation, context, rounds| -> Vec<SimulatedRound> {
        (0..rounds).map(|_| simulation.round(&mut planner, context, &mut rng, &mut |_, _| None)).collect()
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

/// A streak of rejections pauses the model, not prompt lookup.
#[test]
fn streaks_fall_to_lookup() {
    let mut machine = Simulation::new("streak", |rows| rows as f64, 0.5, &[0.0]);
    let costs = [DraftCost::PerToken, DraftCost::Once];
    let mut planner = Planner::new(BlockSize::Fixed(4), Some(3), &costs, Costs::default());
    let mut rng = StdRng::seed_from_u64(7);
    let plans: Vec<Plan> = machine.run(&mut planner, 8, &mut rng).iter().map(|round| round.plan).collect();
    let (model, plain) = (Plan::Draft { drafter: MODEL, tokens: 3 }, Plan::Plain);
    assert_eq!(plans, [model, model, model, plain, model, model, model, plain]);
    machine.lookup = Some(Lookup { found: 1.0, tokens: 8, chance: 0.0 });
    let lookup = Plan::Draft { drafter: LOOKUP, tokens: 3 };
    assert_eq!(machine.run(&mut planner, 1, &mut rng)[0].plan, lookup);
}

/// The model is paused after drafts of its own, for rounds: a decision that is taken back is none.
#[test]
fn a_pause_is_of_rounds_after_the_models_drafts() {
    let costs = [DraftCost::PerToken, DraftCost::Once];
    let mut planner = Planner::new(BlockSize::Fixed(4), Some(1), &costs, Costs::default());
    let model = AvailableDrafter { drafter: MODEL, kind: DrafterKind::Mtp, cost: DraftCost::PerToken, tokens: 7 };
    let mut drafts_after = |rejected: Option<(usize, usize)>| {
        planner.observe(&Observation {
            context: 9,
            rows: 4,
            others: OtherSequences::default(),
            verify_ms: 1.0,
            steps: None,
            verified: rejected.map(|(drafter, drafted)| DraftOutcome { drafter, drafted, accepted: 0 }),
            found: &[],
            emitted: 1,
        });
        let offer = DecisionInput { context: 9, max_rows: 8, drafters: &[model], others: OtherSequences::default() };
        [(); 3].map(|()| planner.decide(&offer).plan != Plan::Plain)
    };
    assert_eq!(drafts_after(Some((LOOKUP, 3))), [true; 3]);
    assert_eq!(drafts_after(Some((MODEL, 0))), [true; 3], "there was no draft");
    assert_eq!(drafts_after(Some((MODEL, 3))), [false; 3]);
    assert_eq!(drafts_after(None), [true; 3]);
}

#[test]
fn costs_are_saved_and_loaded() {
    let own = Machine { processor: "avx2".into(), threads: 3, step_bytes: 1000, step_multiply_adds: 500 };
    let mut costs = Costs::new(own.clone());
    for (rows, ms) in [(1, 4.0), (2, 4.2), (4, 5.0), (8, 7.0)] {
        (0..9).for_each(|_| costs.verified(600, rows, ms));
    }
    (0..2).for_each(|_| costs.drafted(DrafterKind::Mtp, 4, 2.0));
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
    for text in [&b""[..], b"{", b"[]", b"{\"machine\xff"] {
        std::fs::write(&path, text).expect("a file");
        let complaint = Costs::load(&path, &own).expect_err("no costs").to_string();
        assert!(complaint.contains("costs.json") && complaint.contains("delete it"), "{complaint}");
    }
    let complaint = Costs::load("/dev/null", &own).expect_err("a device").to_string();
    assert_eq!(complaint, "/dev/null: is not a regular file; a cost table is expected here");

    // The first measurements of a cost may be in a file: one more is no median of its own.
    let mut few = Costs::new(own.clone());
    (0..4).for_each(|_| few.verified(0, 1, 10.0));
    few.save(&path).expect("a file");
    let mut few = Costs::load(&path, &own).expect("the same costs");
    few.verified(0, 1, 100.0);
    assert_eq!(few.verify(0, 1)[0].ms, 10.0);
}

/// Out-of-range values in a file are rejected by name; all other values can be planned with.
#[test]
fn costs_out_of_range_are_refused() {
    let own = Machine { processor: "avx2".into(), threads: 3, step_bytes: 1000, step_multiply_adds: 500 };
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("costs.json");
    let load = |verify: &str, draft: &str| {
        let machine = r#"{"isa":"avx2","threads":3,"step_bytes":1000,"step_multiply_adds":500}"#;
        let text = format!(r#"{{"machine":{machine},"verify":{verify},"draft":{draft}}}"#);
        std::fs::write(&path, text).expect("a file");
        Costs::load(&path, &own)
    };
    let of = |ms: &str| format!(r#"{{"ms":{ms},"samples":9}}"#);
    for ms in ["-1.0", "0.0", "1e-300", "1e300", "1e10"] {
        for (verify, draft, field) in [
            (
                format!(r#"{{"0":{{"1":{}}},"2":{{"1":{},"4":{}}}}}"#, of("1.0"), of("1.0"), of(ms)),
                "{}".into(),
                "verify.2.4.ms",
            ),
            ("{}".into(), format!(r#"{{"mtp":{}}}"#, of(ms)), "draft.mtp.ms"),
        ] {
            let complaint = load(&verify, &draft).expect_err("out of range").to_string();
            for part in ["costs.json", field, "delete it"] {
                assert!(complaint.contains(part), "{ms}: {complaint}");
            }
        }
    }
    let (many, once) = (usize::MAX, r#"{"ms":1e6,"samples":1}"#);
    for here in [
        format!(r#"{{"0":{once},"1":{{"ms":1e-6,"samples":{many}}},"{many}":{once}}}"#),
        format!(r#"{{"0":{{"ms":3.0,"samples":0}},"1":{once}}}"#),
        format!(r#"{{"2":{{"ms":1e-6,"samples":9}},"64":{{"ms":1e6,"samples":9}},"3":{once}}}"#),
    ] {
        for verify in [format!(r#"{{"0":{here}}}"#), format!(r#"{{"0":{here},"{many}":{{"1":{once},"2":{once}}}}}"#)] {
            let mut costs = load(&verify, "{}").expect("costs");
            for rows in [1, 1, 1, 2, 2, 2] {
                costs.verified(0, rows, 1.0);
            }
            for estimate in [costs.verify(0, 64), costs.verify(1 << 40, 64)].concat() {
                assert!(
                    estimate.ms.is_finite() && estimate.ms > 0.0 && estimate.least_ms >= 0.0,
                    "{verify}: {estimate:?}"
                );
            }
        }
    }
}
