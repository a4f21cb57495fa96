//! What the divergences mean, in words.

use foretoken::kv::KvPreset;

use crate::{Case, summary};

/// Median divergences in nats up to which a format is called so.
const VERDICTS: [(f64, &str); 4] = [
    (1e-3, "as good as exact"),
    (1e-2, "safe: other words only where the choice is open"),
    (1e-1, "changes what is written"),
    (f64::INFINITY, "unusable: the text is another one"),
];
/// The last that is to be used.
const SAFE: f64 = 1e-2;

/// A line for every preset that was measured, and which to take.
pub fn print(cases: &[Case]) {
    let of_presets = KvPreset::ALL.into_iter().filter(|preset| *preset != KvPreset::Exact);
    let measured: Vec<_> =
        of_presets.filter_map(|preset| cases.iter().find(|case| case.name == preset.name())).collect();
    for case in &measured {
        let [median, ..] = summary(case);
        let verdict = VERDICTS.iter().find(|(limit, _)| median <= *limit).map_or("no number", |(_, words)| words);
        println!("{}: {verdict} ({median:.1e} nats at the median)", case.name);
    }
    let safe = measured.iter().filter(|case| summary(case)[0] <= SAFE);
    match safe.min_by(|a, b| a.bits.total_cmp(&b.bits)) {
        Some(case) => println!("verdict: on this text --kv-preset {} is the smallest that is safe", case.name),
        None if measured.is_empty() => {}
        None => println!("verdict: on this text no preset is safe; keep K and V exact"),
    }
}
