//! Verdicts on the divergences, and a recommendation.

use foretoken::kv::KvPreset;
use foretoken_tools::println;

use crate::{Case, summary};

/// Verdicts by the largest median divergence in nats.
const VERDICTS: [(f64, &str); 4] = [
    (1e-3, "indistinguishable from exact"),
    (1e-2, "safe: differs only where probabilities are close"),
    (1e-1, "noticeably changes the output"),
    (f64::INFINITY, "unusable"),
];
/// Largest median divergence of a safe format.
const SAFE: f64 = 1e-2;

/// Prints a line for every measured preset, and a recommendation.
pub fn print(cases: &[Case]) {
    let of_presets = KvPreset::ALL.into_iter().filter(|preset| *preset != KvPreset::Exact);
    let measured: Vec<_> =
        of_presets.filter_map(|preset| cases.iter().find(|case| case.name == preset.name())).collect();
    for case in &measured {
        let [median, ..] = summary(case);
        let verdict = VERDICTS.iter().find(|(limit, _)| median <= *limit).map_or("not finite", |(_, words)| words);
        println!("{}: {verdict} ({median:.1e} nats at the median)", case.name);
    }
    let safe = measured.iter().filter(|case| summary(case)[0] <= SAFE);
    match safe.min_by(|a, b| a.bits.total_cmp(&b.bits)) {
        Some(case) => println!("recommendation: on this text --kv-preset {} is the smallest that is safe", case.name),
        None if measured.is_empty() => {}
        None => println!("recommendation: on this text no preset is safe; keep the KV cache exact"),
    }
}
