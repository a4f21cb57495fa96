//! The effect of each planner constant: the figures with it changed.

use foretoken::speculative::Tuning;

use crate::figures::{
    Outcome, adversaries, changes, fixed_machines, lookups, random_machines, reached, short_texts, worst,
};

/// Prints a table, one line per variant. Speeds are relative to the best fixed choice's (to blocks of four in short
/// texts), losses in per cent of plain decoding's time, worst case.
#[test]
#[ignore = "prints a table; takes minutes"]
fn ablation() {
    let base = Tuning::default();
    println!(
        "{:22} {:5} {:5} {:5} {:5} {:5} {:5} {:5} {:5} {:6} {:7} {:5} {:7} {:6} {:6} {:6}",
        "constant",
        "model",
        "long",
        "half",
        "rare",
        "never",
        "least",
        "rand",
        "rand+",
        "change",
        "change+",
        "short",
        "short+",
        "quiet",
        "noisy",
        "hostile"
    );
    line("as it is", base);
    for (name, tuning) in variants(base) {
        line(name, tuning);
    }
}

/// Every constant at about half and twice its value, or disabled.
fn variants(base: Tuning) -> Vec<(&'static str, Tuning)> {
    vec![
        ("row_cost 0.04", Tuning { row_cost: 0.04, ..base }),
        ("row_cost 0.16", Tuning { row_cost: 0.16, ..base }),
        ("unmeasured 0.1", Tuning { unmeasured: 0.1, ..base }),
        ("unmeasured 0.4", Tuning { unmeasured: 0.4, ..base }),
        ("outlier 1.5", Tuning { outlier: 1.5, ..base }),
        ("outlier off", Tuning { outlier: 1e9, ..base }),
        ("median 1 (off)", Tuning { median: 1, ..base }),
        ("median 9", Tuning { median: 9, ..base }),
        ("prior 0.5", Tuning { prior: 0.5, ..base }),
        ("prior 0.9", Tuning { prior: 0.9, ..base }),
        ("prior_weight 2", Tuning { prior_weight: 2.0, ..base }),
        ("prior_weight 8", Tuning { prior_weight: 8.0, ..base }),
        ("positions 5", Tuning { positions: 5, ..base }),
        ("positions 20", Tuning { positions: 20, ..base }),
        ("window 64", Tuning { window: 64.0, ..base }),
        ("window off", Tuning { window: 1e9, ..base }),
        ("change_window 6", Tuning { change_window: 6.0, ..base }),
        ("change_window 24", Tuning { change_window: 24.0, ..base }),
        ("change_keep 0", Tuning { change_keep: 0.0, ..base }),
        ("change_keep 1 (off)", Tuning { change_keep: 1.0, ..base }),
        ("confidence 0 (off)", Tuning { confidence: 0.0, ..base }),
        ("confidence 0.75", Tuning { confidence: 0.75, ..base }),
        ("confidence 3", Tuning { confidence: 3.0, ..base }),
        ("exploration 0 (off)", Tuning { exploration: 0.0, ..base }),
        ("exploration 0.004", Tuning { exploration: 0.004, ..base }),
        ("exploration 0.016", Tuning { exploration: 0.016, ..base }),
        ("growth off", Tuning { growth: 64, ..base }),
        ("first_rows 2", Tuning { first_rows: 2, ..base }),
        ("first_rows 8", Tuning { first_rows: 8, ..base }),
        ("loss 0.01", Tuning { loss: 0.01, ..base }),
        ("loss 0.04", Tuning { loss: 0.04, ..base }),
        ("loss off", Tuning { loss: 1e9, ..base }),
    ]
}

fn line(name: &str, tuning: Tuning) {
    let first = 77_000;
    let fixed = lookups().map(|lookup| fixed_machines(tuning, lookup, first..first + 2));
    let (alone, with) = random_machines(tuning, first..first + 40);
    let (changes, changes_with) = split(changes(tuning, first..first + 8));
    let (short, short_with) = split(short_texts(tuning, first..first + 24));
    let adversaries = adversaries(tuning, first..first + 1);
    let least = |of: &[Outcome]| of.iter().map(Outcome::mean).fold(f64::MAX, f64::min);
    let loss = |slowdown: f64| 100.0 * (slowdown - 1.0);
    let fixed_reached = fixed.each_ref().map(|outcomes| format!("{:.3}", reached(outcomes))).join(" ");
    println!(
        "{name:22} {fixed_reached} {:.3} {:.3} {:.3} {:.3}  {:.3}   {:.3} {:.3}   {:5.1}  {:5.1}  {:5.1}",
        least(&fixed[0]),
        reached(&alone),
        reached(&with),
        reached(&changes),
        reached(&changes_with),
        least(&short),
        least(&short_with),
        loss(worst(fixed.iter().flatten())),
        loss(worst(alone.iter().chain(&with))),
        loss(worst(&adversaries)),
    );
}

/// Without prompt lookup, and with it.
fn split(outcomes: Vec<Outcome>) -> (Vec<Outcome>, Vec<Outcome>) {
    outcomes.into_iter().partition(|outcome| outcome.lookup.is_none())
}
