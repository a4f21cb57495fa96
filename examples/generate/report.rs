//! What a generation did, for people and for tools.

use std::time::Duration;

use foretoken::Statistics;
use foretoken::kv::KvCache;
use serde_json::{Value, json};

/// Says how K and V are kept: layers that are kept alike on one line.
pub fn kept(kv: &KvCache) -> String {
    let mut kinds: Vec<(String, Vec<String>)> = Vec::new();
    for store in kv.report() {
        let key = store.key.map_or("made of values".into(), |key| key.to_string());
        let kind = format!("keys {key}, values {}, {} bytes per token each", store.value, store.bytes_per_token);
        match kinds.iter_mut().find(|(other, _)| *other == kind) {
            Some((_, layers)) => layers.push(store.layer.to_string()),
            None => kinds.push((kind, vec![store.layer.to_string()])),
        }
    }
    kinds.iter().map(|(kind, layers)| format!("K/V of layers {}: {kind}\n", layers.join(", "))).collect()
}

/// For people, on stderr.
pub fn print(s: &Statistics, kv_bytes: usize) {
    eprintln!(
        "\n{} tokens at {:.1} tokens/s after {} at {:.1} tokens/s; {} rounds, {:.2} tokens per round, {:.0} % of {} drafts \
         accepted; {:.1} MiB of K/V",
        s.generated_tokens,
        s.decode_tokens_per_second(),
        s.prompt_tokens,
        s.prefill_tokens_per_second(),
        s.rounds,
        s.tokens_per_round(),
        100.0 * s.acceptance_rate(),
        s.drafted,
        kv_bytes as f64 / f64::from(1 << 20),
    );
    if !s.speculation.drafters.is_empty() {
        print_speculation(s);
    }
    if s.simulated {
        eprintln!("acceptance was simulated: the text is meaningless");
    }
}

fn print_speculation(statistics: &Statistics) {
    let s = &statistics.speculation;
    for d in &s.drafters {
        let at = d.accepted_at.iter().zip(&d.drafted_at).map(|(a, n)| format!("{:.0}", 100.0 * *a as f64 / *n as f64));
        eprintln!(
            "{}: {} calls, {} drafts verified of which {} were of use, {} tokens of which {} stood, {:.2} tokens per draft; \
             stood at each place (%): {}; {:.1} ms",
            d.kind.map_or("", |kind| kind.name()),
            d.calls,
            d.drafts,
            d.accepted_drafts,
            d.drafted,
            d.accepted,
            d.mean_accepted_length(),
            at.collect::<Vec<_>>().join(" "),
            ms(d.draft),
        );
    }
    let rows = s.rows.iter().enumerate().filter(|(_, n)| **n > 0).map(|(rows, n)| format!("{n} of {rows}"));
    let why = s.why.iter().map(|(why, n)| format!("{n} {why}"));
    eprintln!(
        "rounds by rows: {}; by reason: {}; {} passes saved",
        rows.collect::<Vec<_>>().join(", "),
        why.collect::<Vec<_>>().join(", "),
        s.passes_saved,
    );
    let v = s.verify_ms.iter().map(|ms| format!("{:.2}", ms / s.verify_ms[0])).collect::<Vec<_>>();
    let steps = s.drafters.iter().filter_map(|d| Some(format!("{} {:.2} ms", d.kind?.name(), d.step_ms?)));
    eprintln!(
        "begin {:.1}, draft {:.1} (waited for {:.1}), verify {:.1}, accept {:.1} ms; v(B): {}; a step: {}",
        ms(s.begin),
        ms(s.draft),
        ms(s.wait),
        ms(s.verify),
        ms(s.accept),
        v.join(" "),
        steps.collect::<Vec<_>>().join(", "),
    );
}

fn ms(time: Duration) -> f64 {
    1e3 * time.as_secs_f64()
}

/// For tools: `report` with the figures added.
pub fn json(mut report: Value, s: &Statistics, (kv, kv_bytes): (&KvCache, usize)) -> Value {
    for (name, value) in [
        ("prompt_tokens", json!(s.prompt_tokens)),
        ("generated_tokens", json!(s.generated_tokens)),
        ("prefill_tokens_per_second", json!(s.prefill_tokens_per_second())),
        ("decode_tokens_per_second", json!(s.decode_tokens_per_second())),
        ("rounds", json!(s.rounds)),
        ("drafted", json!(s.drafted)),
        ("accepted", json!(s.accepted)),
        ("acceptance_rate", json!(s.acceptance_rate())),
        ("tokens_per_round", json!(s.tokens_per_round())),
        ("simulated_acceptance", json!(s.simulated)),
        ("speculation", json!(s.speculation)),
        ("kv_bytes", json!(kv_bytes)),
        ("kv_bytes_per_token", json!(kv.bytes_per_token())),
        ("peak_rss_bytes", json!(peak_rss_bytes())),
    ] {
        report[name] = value;
    }
    report
}

/// The most memory that the process has held, where the system tells.
fn peak_rss_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}
