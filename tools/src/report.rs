//! Generation statistics, as text and as JSON.

use std::time::Duration;

use foretoken::kv::KvCache;
use foretoken::speculative::DrafterStats;
use foretoken::{Sampling, Session, Statistics};
use serde_json::{Value, json};

/// A number of things, by their noun, whose plural ends in s.
pub fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// A number of bytes in MiB or GiB.
pub fn size(bytes: u64) -> String {
    match bytes {
        0x4000_0000.. => format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30)),
        _ => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
    }
}

/// With three significant digits.
pub fn significant(x: f64) -> String {
    let exponent = format!("{x:.2e}").rsplit('e').next().and_then(|exponent| exponent.parse().ok());
    format!("{x:.*}", (2 - exponent.unwrap_or(0)).max(0) as usize)
}

/// A word of a command, quoted for a shell.
pub fn shell_word(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:@%,".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

/// A percentage with one decimal; a dash for NaN, where it is unknown.
pub fn percent(x: f64) -> String {
    if x.is_nan() { "-".into() } else { format!("{x:.1} %") }
}

/// Why passes read weights faster than the best read bandwidth; `None` if none does. NaN: the bandwidth is unknown.
pub fn above_bandwidth(percent_of_best: &[f64]) -> Option<&'static str> {
    percent_of_best.iter().any(|percent| *percent > 100.0).then_some(
        "above 100 % of the best: weights stay in caches between passes, or the machine was slower when the bandwidth was \
         measured",
    )
}

/// KV cache formats, a line for each kind of layer.
pub fn kv(kv: &KvCache) -> String {
    let mut kinds: Vec<(String, Vec<String>)> = Vec::new();
    for store in kv.report() {
        let key = store.key.map_or("computed from values".into(), |key| key.to_string());
        let kind = format!("keys {key}, values {}, {} bytes per token each", store.value, store.bytes_per_token);
        match kinds.iter_mut().find(|(other, _)| *other == kind) {
            Some((_, layers)) => layers.push(store.layer.to_string()),
            None => kinds.push((kind, vec![store.layer.to_string()])),
        }
    }
    kinds.iter().map(|(kind, layers)| format!("K/V of layers {}: {kind}\n", layers.join(", "))).collect()
}

/// The sampling parameters of a chat, on one line.
pub fn sampling(sampling: &Sampling) -> String {
    let Sampling { temperature, top_k, top_p, min_p, .. } = sampling;
    let top_k = top_k.map_or_else(|| "all".into(), |k| k.to_string());
    let repeat = sampling.penalties.repeat;
    let rarer = [("repeat penalty", repeat), ("typical", sampling.typical_p)];
    let rarer = rarer.map(|(name, x)| if x == 1.0 { String::new() } else { format!(", {name} {x}") });
    let xtc = sampling.xtc.map_or_else(String::new, |xtc| format!(", XTC {} above {}", xtc.probability, xtc.threshold));
    format!(
        "sampling: temperature {temperature}, top-k {top_k}, top-p {top_p}, min-p {min_p}{}{xtc}; checkpoint defaults \
         unless overridden by an option",
        rarer.concat()
    )
}

/// In place of figures about the drafts that were verified.
const NO_DRAFT: &str = "no draft was verified";

/// Rounds, drafters and estimated costs, a line each.
pub fn details(s: &Statistics, kv_bytes: usize) -> String {
    let accepted = match s.drafted {
        0 => NO_DRAFT.into(),
        drafted => format!("{:.0} % of {} accepted", 100.0 * s.acceptance_rate(), count(drafted, "drafted token")),
    };
    let mut text = format!(
        "{} at {:.1} tokens/s; {}, {:.2} tokens per round, {accepted}; {} of KV cache\n",
        count(s.prompt_tokens, "prompt token"),
        s.prefill_tokens_per_second(),
        count(s.rounds, "round"),
        s.tokens_per_round(),
        size(kv_bytes as u64),
    );
    if !s.speculation.drafters.is_empty() {
        text += &drafters(s);
        text += &rounds(s);
    }
    text
}

fn drafters(s: &Statistics) -> String {
    let line = |d: &DrafterStats| {
        let (name, calls) = (d.kind.map_or("", |kind| kind.name()), count(d.calls, "call"));
        if d.drafts == 0 {
            return format!("{name}: {calls}, {NO_DRAFT}; {:.1} ms\n", ms(d.draft));
        }
        let at = d.accepted_at.iter().zip(&d.drafted_at).map(|(a, n)| format!("{:.0}", 100.0 * *a as f64 / *n as f64));
        format!(
            "{name}: {calls}, {} verified, {} at least partly accepted; {} verified, {} accepted; {:.2} tokens per draft; \
             acceptance by position (%): {}; {:.1} ms\n",
            count(d.drafts, "draft"),
            d.accepted_drafts,
            count(d.drafted, "token"),
            d.accepted,
            d.mean_accepted_length(),
            at.collect::<Vec<_>>().join(" "),
            ms(d.draft),
        )
    };
    s.speculation.drafters.iter().map(line).collect()
}

fn rounds(s: &Statistics) -> String {
    let s = &s.speculation;
    let rows = s.rows.iter().enumerate().filter(|(_, n)| **n > 0).map(|(rows, n)| format!("{n} of {rows}"));
    let reasons = s.reasons.iter().map(|(reason, n)| format!("{n} {reason}"));
    let v = s.verify_ms.iter().map(|ms| format!("{:.2}", ms / s.verify_ms[0]));
    let steps = s.drafters.iter().filter_map(|d| Some(format!("{} {:.2} ms", d.kind?.name(), d.step_ms?)));
    let or_none = |list: Vec<String>, between: &str| match list.is_empty() {
        true => "none".into(),
        false => list.join(between),
    };
    format!(
        "rounds by rows: {}; by reason: {}; target passes saved: {}\n\
         begin {:.1}, draft {:.1} (waited for {:.1}), verify {:.1}, accept {:.1} ms; estimated v(B): {}; draft step: {}\n",
        or_none(rows.collect(), ", "),
        or_none(reasons.collect(), ", "),
        s.passes_saved,
        ms(s.begin),
        ms(s.draft),
        ms(s.wait),
        ms(s.verify),
        ms(s.accept),
        or_none(v.collect(), " "),
        or_none(steps.collect(), ", "),
    )
}

fn ms(time: Duration) -> f64 {
    1e3 * time.as_secs_f64()
}

/// One JSON object: `report` with the figures added.
pub fn json(mut report: Value, s: &Statistics, session: &Session) -> Value {
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
        ("kv_bytes", json!(session.kv_bytes())),
        ("kv_bytes_per_token", json!(session.kv().bytes_per_token())),
        ("peak_rss_bytes", json!(peak_rss_bytes())),
    ] {
        report[name] = value;
    }
    report
}

/// Peak memory of the process in bytes, if the system reports it.
pub fn peak_rss_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_and_sizes_units() {
        let figures = [0.01234, 0.9996, 1.0, 9.994, 9.996, 99.96, 1234.5, f64::NAN].map(significant);
        assert_eq!(figures, ["0.0123", "1.00", "1.00", "9.99", "10.0", "100", "1234", "NaN"]);
        assert_eq!([0, 5 << 19, (1 << 30) - 1, 1 << 30].map(size), ["0.0 MiB", "2.5 MiB", "1024.0 MiB", "1.00 GiB"]);
    }

    #[test]
    fn words_are_quoted_for_a_shell() {
        let words = ["--kv", "f16,q8_0", "", "Why?", "it's", "a\nb", "\u{e4}"].map(shell_word);
        assert_eq!(words, ["--kv", "f16,q8_0", "''", "'Why?'", r"'it'\''s'", "'a\nb'", "'\u{e4}'"]);
    }

    #[test]
    fn an_unknown_percentage_is_a_dash() {
        assert_eq!([0.04, 77.26, 100.0, f64::NAN].map(percent), ["0.0 %", "77.3 %", "100.0 %", "-"]);
    }

    #[test]
    fn shares_above_the_bandwidth_are_explained() {
        assert_eq!(above_bandwidth(&[77.0, 100.0]), None);
        assert_eq!(above_bandwidth(&[f64::NAN]), None);
        assert!(above_bandwidth(&[250.0, 77.0]).is_some_and(|line| line.starts_with("above 100 % of the best: ")));
    }
}
