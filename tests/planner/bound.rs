//! The planner's bound, on machines and texts with seeds on which no planner constant was tuned.

use foretoken::speculative::Tuning;

use crate::figures::{
    FLOOR_TOKENS, Outcome, WARM_UP, adversaries, changes, first_rounds, fixed_machines, lookups, random_machines,
    reached, short_texts,
};
use crate::simulation::{Lookup, NOISY, QUIET};

/// The bound stated in DESIGN.md and the planner's documentation.
fn bound() -> String {
    format!(
        "On simulated machines, with and without prompt-lookup drafts, a text takes at most {:.0} % longer than plain \
         decoding if measured times vary by {:.0} %, {:.0} % if they vary by {:.0} %, and {:.0} % if acceptance is adversarial \
         (a text under {FLOOR_TOKENS} tokens counts as {FLOOR_TOKENS}); from round {WARM_UP} on, a model's drafts reach \
         {MODEL_ALONE} of the best fixed choice's speed, and {WITH_LOOKUP} together with prompt-lookup drafts \
         ({WITH_RARE_LOOKUP} if one round in ten has one), on average over texts and machines.",
        100.0 * (SLOWDOWN - 1.0),
        100.0 * QUIET.0,
        100.0 * (NOISY_SLOWDOWN - 1.0),
        100.0 * NOISY.0,
        100.0 * (HOSTILE_SLOWDOWN - 1.0),
    )
}

const SLOWDOWN: f64 = 1.05;
const NOISY_SLOWDOWN: f64 = 1.12;
const HOSTILE_SLOWDOWN: f64 = 1.08;
const MODEL_ALONE: f64 = 0.97;
const MODEL_ALONE_AT_WORST: f64 = 0.8;
const WITH_LOOKUP: f64 = 0.95;
const WITH_RARE_LOOKUP: f64 = 0.9;
const CHANGED: f64 = 0.87;
const CHANGED_WITH_LOOKUP: f64 = 0.8;
const SHORT: f64 = 0.9;

#[test]
fn the_documents_state_the_bound() {
    let words = |text: &str| text.split_whitespace().filter(|word| *word != "//!").collect::<Vec<_>>().join(" ");
    for (file, text) in [
        ("DESIGN.md", include_str!("../../DESIGN.md")),
        ("src/speculative/planner/mod.rs", include_str!("../../src/speculative/planner/mod.rs")),
    ] {
        assert!(words(text).contains(&bound()), "{file} does not say: {}", bound());
    }
}

/// Seeds for `count` machines or texts, printed. `$PLANNER_SEEDS` sets the first.
fn held_out(count: u64) -> std::ops::Range<u64> {
    let given = std::env::var("PLANNER_SEEDS").ok().map(|seed| seed.parse().expect("PLANNER_SEEDS is a number"));
    let first = given.unwrap_or(20_261_122_000);
    println!("seeds {first} to {}", first + count - 1);
    first..first + count
}

/// Those slower than `quiet` allows, or than the bound if measured times vary by more.
fn too_slow<'a>(outcomes: impl IntoIterator<Item = &'a Outcome>, quiet: f64) -> Vec<String> {
    let allowed = |outcome: &Outcome| if outcome.noise > QUIET.0 { NOISY_SLOWDOWN } else { quiet };
    let slow = outcomes.into_iter().filter(|outcome| outcome.worst() > allowed(outcome));
    slow.map(|outcome| format!("{}: {:.3} of the time of plain decoding", outcome.name, outcome.worst())).collect()
}

/// Those whose mean does not reach `least`.
fn below(outcomes: &[Outcome], least: f64) -> Vec<String> {
    for outcome in outcomes {
        println!("{:.3} of the best ({:.2} times plain): {}", outcome.mean(), outcome.gain, outcome.name);
    }
    let low = outcomes.iter().filter(|outcome| outcome.mean() < least);
    low.map(|outcome| format!("{}: {:.3} of the best, not {least}", outcome.name, outcome.mean())).collect()
}

#[test]
fn two_hundred_rounds_find_the_best_choice() {
    let seeds = held_out(4);
    for lookup in lookups() {
        let outcomes = fixed_machines(Tuning::default(), lookup, seeds.clone());
        let mut missed = below(&outcomes, if lookup.is_none() { MODEL_ALONE_AT_WORST } else { 0.0 });
        missed.extend(too_slow(&outcomes, SLOWDOWN));
        let least = match lookup {
            None => MODEL_ALONE,
            Some(Lookup { found, .. }) if found <= 0.1 => WITH_RARE_LOOKUP,
            Some(_) => WITH_LOOKUP,
        };
        let all = reached(&outcomes);
        println!("{lookup:?}: {all:.4} of the best fixed choice");
        assert!(missed.is_empty() && all >= least, "{lookup:?}: {all:.4}, {missed:#?}");
    }
}

#[test]
fn random_machines_are_mastered() {
    let (alone, with) = random_machines(Tuning::default(), held_out(300));
    let (model, lookup) = (reached(&alone), reached(&with));
    println!("{model:.4} of the best, {lookup:.4} with prompt lookup drafts");
    let missed = too_slow(alone.iter().chain(&with), SLOWDOWN);
    assert!(model >= MODEL_ALONE && lookup >= WITH_LOOKUP && missed.is_empty(), "{model:.4}, {lookup:.4}, {missed:#?}");
}

/// A machine's costs are learnt on the way: the first tokens on an unknown machine, against the best.
#[test]
fn the_first_rounds_are_not_wasted() {
    let seeds = held_out(4);
    for (lookup, least) in lookups().into_iter().zip([0.55, 0.25, 0.5, 0.4, 0.5]) {
        let missed = below(&first_rounds(Tuning::default(), lookup, seeds.clone()), least);
        assert!(missed.is_empty(), "{missed:#?}");
    }
}

#[test]
fn a_change_is_followed_within_fifty_rounds() {
    let outcomes = changes(Tuning::default(), held_out(60));
    let (alone, with): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(|outcome| outcome.lookup.is_none());
    let missed = [below(&alone, CHANGED), below(&with, CHANGED_WITH_LOOKUP)].concat();
    assert!(missed.is_empty(), "{missed:#?}");
}

#[test]
fn short_texts_are_planned_well_from_the_start() {
    let outcomes = short_texts(Tuning::default(), held_out(100));
    let mut missed = too_slow(&outcomes, SLOWDOWN);
    let (alone, with): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(|outcome| outcome.lookup.is_none());
    missed.extend(below(&alone, SHORT));
    missed.extend(below(&with, SHORT));
    assert!(missed.is_empty(), "{missed:#?}");
}

#[test]
fn adversaries_gain_nothing() {
    let outcomes = adversaries(Tuning::default(), held_out(2));
    for outcome in &outcomes {
        println!("{:.3} of the time of plain decoding: {}", outcome.worst(), outcome.name);
    }
    let missed = too_slow(&outcomes, HOSTILE_SLOWDOWN);
    assert!(missed.is_empty(), "{missed:#?}");
}
