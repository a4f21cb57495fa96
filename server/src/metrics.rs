//! Metrics in Prometheus' text format, with vLLM's names where it has them.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use foretoken::{Engine, FinishReason, Statistics};

/// Upper bounds of time histograms in seconds.
const SECONDS: [f64; 16] =
    [0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5.0, 10.0, 30.0, 120.0, 600.0];

/// Labels of finished requests.
const REASONS: [&str; 4] = ["stop", "length", "abort", "error"];

/// As vLLM's label `finished_reason`, one of [`REASONS`].
pub(crate) fn finish_name(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::EndOfText | FinishReason::StopString | FinishReason::Constraint => "stop",
        FinishReason::MaxTokens | FinishReason::Context => "length",
        FinishReason::Cancelled => "abort",
        _ => "error",
    }
}

#[derive(Default)]
pub(crate) struct Metrics {
    running: AtomicUsize,
    waiting: AtomicUsize,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    generation_tokens: AtomicU64,
    finished: [AtomicU64; REASONS.len()],
    refused: AtomicU64,
    rounds: AtomicU64,
    drafts: AtomicU64,
    drafted: AtomicU64,
    accepted: AtomicU64,
    accepted_at: Mutex<Vec<u64>>,
    /// By drafter: for each position in its drafts, tokens that were verified, and those that were accepted.
    drafters: Mutex<BTreeMap<String, [Vec<u64>; 2]>>,
    first_token: Histogram,
    queue: Histogram,
    per_token: Histogram,
    total: Histogram,
}

#[derive(Default)]
struct Histogram {
    /// Times up to each bound and above the one before, and those above all. Their sum is the number of times: a count
    /// of its own could be read before a time is in both.
    counts: [AtomicU64; SECONDS.len() + 1],
    nanoseconds: AtomicU64,
}

impl Metrics {
    /// Records the numbers of running and waiting requests, each choice counted.
    pub fn queues(&self, running: usize, waiting: usize) {
        self.running.store(running, Relaxed);
        self.waiting.store(waiting, Relaxed);
    }

    /// Counts the tokens of a round.
    pub fn generated(&self, tokens: usize) {
        self.generation_tokens.fetch_add(tokens as u64, Relaxed);
    }

    /// Counts a job's prompt of `tokens` tokens, which is read, and of which the prefix cache had `cached`.
    pub fn prompt(&self, tokens: usize, cached: usize) {
        self.prompt_tokens.fetch_add(tokens as u64, Relaxed);
        self.cached_tokens.fetch_add(cached as u64, Relaxed);
    }

    /// Records the first token of a generation, `after` its admission.
    pub fn first_token(&self, after: Duration) {
        self.first_token.observe(after);
    }

    /// Counts a request that has ended, for one of [`REASONS`].
    pub fn finished(&self, reason: &str) {
        let at = REASONS.iter().position(|known| *known == reason).unwrap_or(REASONS.len() - 1);
        self.finished[at].fetch_add(1, Relaxed);
    }

    /// Counts a request that found a queue full.
    pub fn refused(&self) {
        self.refused.fetch_add(1, Relaxed);
    }

    /// Adds the rounds and drafts of a generation that has ended or failed.
    pub fn decoded(&self, statistics: &Statistics) {
        self.rounds.fetch_add(statistics.rounds as u64, Relaxed);
        // A pass of one row verifies no draft.
        let drafts: usize = statistics.speculation.rows.iter().skip(2).sum();
        self.drafts.fetch_add(drafts as u64, Relaxed);
        self.drafted.fetch_add(statistics.drafted as u64, Relaxed);
        self.accepted.fetch_add(statistics.accepted as u64, Relaxed);
        add(&mut self.accepted_at.lock().unwrap_or_else(PoisonError::into_inner), &statistics.accepted_at);
        let mut drafters = self.drafters.lock().unwrap_or_else(PoisonError::into_inner);
        for drafter in statistics.speculation.drafters.iter().filter(|drafter| drafter.drafted > 0) {
            let Some(kind) = drafter.kind else { continue };
            let [drafted, accepted] = drafters.entry(kind.to_string()).or_default();
            add(drafted, &drafter.drafted_at);
            add(accepted, &drafter.accepted_at);
        }
    }

    /// Adds a generation's times from admission to start, first token and end.
    pub fn ended(&self, statistics: &Statistics, queued: Duration, first: Duration, total: Duration) {
        self.queue.observe(queued);
        self.total.observe(total);
        if statistics.generated_tokens > 1 {
            self.per_token.observe((total - first) / (statistics.generated_tokens - 1) as u32);
        }
    }

    /// All metrics, with `model` as the label `model_name`.
    pub fn text(&self, model: &str, engine: &Engine) -> String {
        let mut text = Text { text: String::new(), label: format!("model_name=\"{}\"", escape(model)) };
        self.gauges(&mut text, engine);
        self.totals(&mut text);
        self.accepted_by_position(&mut text);
        self.tokens_by_drafter(&mut text);
        self.reasons(&mut text);
        self.times(&mut text);
        text.text
    }

    fn gauges(&self, text: &mut Text, engine: &Engine) {
        text.gauge(
            "vllm:num_requests_running",
            "Number of running requests; every choice counts.",
            self.running.load(Relaxed) as f64,
        );
        text.gauge(
            "vllm:num_requests_waiting",
            "Number of waiting requests; every choice counts.",
            self.waiting.load(Relaxed) as f64,
        );
        let held = engine.pages().held();
        if let Some(left) = engine.pages().available() {
            let used = held as f64 / (held + left).max(1) as f64;
            let help = "K/V cache usage, cached prefixes included, as a fraction of its limit (1 is 100 percent).";
            text.gauge("vllm:kv_cache_usage_perc", help, used);
        }
        text.gauge("foretoken:kv_cache_bytes", "Bytes of the K/V cache in use, cached prefixes included.", held as f64);
    }

    fn totals(&self, text: &mut Text) {
        let refused = "Number of requests refused because a queue was full (429).";
        for (name, help, value) in [
            ("vllm:prompt_tokens_total", "Number of prompt tokens.", &self.prompt_tokens),
            ("vllm:prefix_cache_queries_total", "Prefix cache queries, in tokens.", &self.prompt_tokens),
            ("vllm:prefix_cache_hits_total", "Prefix cache hits, in tokens.", &self.cached_tokens),
            ("vllm:generation_tokens_total", "Number of generated tokens.", &self.generation_tokens),
            ("foretoken:rounds_total", "Decoding passes of the target model, counted per request.", &self.rounds),
            ("vllm:spec_decode_num_drafts_total", "Number of verified drafts.", &self.drafts),
            ("vllm:spec_decode_num_draft_tokens_total", "Number of verified draft tokens.", &self.drafted),
            ("vllm:spec_decode_num_accepted_tokens_total", "Number of accepted draft tokens.", &self.accepted),
            ("foretoken:requests_refused_total", refused, &self.refused),
        ] {
            text.head(name, help, "counter");
            text.line(name, "", value.load(Relaxed) as f64);
        }
    }

    fn accepted_by_position(&self, text: &mut Text) {
        let name = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
        text.head(name, "Accepted draft tokens by position in the draft.", "counter");
        let at = self.accepted_at.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for (position, accepted) in at.iter().enumerate() {
            text.line(name, &format!("position=\"{position}\""), *accepted as f64);
        }
    }

    fn tokens_by_drafter(&self, text: &mut Text) {
        let drafters = self.drafters.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let by = "draft tokens by drafter and position in the draft.";
        for (name, help, which) in [
            ("foretoken:drafter_draft_tokens_total", format!("Verified {by}"), 0),
            ("foretoken:drafter_accepted_tokens_total", format!("Accepted {by}"), 1),
        ] {
            text.head(name, &help, "counter");
            for (drafter, counts) in &drafters {
                for (position, count) in counts[which].iter().enumerate() {
                    let label = format!("drafter=\"{}\",position=\"{position}\"", escape(drafter));
                    text.line(name, &label, *count as f64);
                }
            }
        }
    }

    fn reasons(&self, text: &mut Text) {
        let name = "vllm:request_success_total";
        text.head(name, "Number of finished requests by reason.", "counter");
        for (reason, count) in REASONS.iter().zip(&self.finished) {
            text.line(name, &format!("finished_reason=\"{reason}\""), count.load(Relaxed) as f64);
        }
    }

    fn times(&self, text: &mut Text) {
        let per_token = "Time per output token after the first in seconds.";
        for (name, help, histogram) in [
            ("vllm:time_to_first_token_seconds", "Time to first token in seconds.", &self.first_token),
            ("vllm:request_queue_time_seconds", "Time in the queue in seconds.", &self.queue),
            ("vllm:request_time_per_output_token_seconds", per_token, &self.per_token),
            ("vllm:e2e_request_latency_seconds", "End-to-end request latency in seconds.", &self.total),
        ] {
            text.histogram(name, help, histogram);
        }
    }
}

/// Adds counts by position.
fn add(to: &mut Vec<u64>, counts: &[usize]) {
    to.resize(to.len().max(counts.len()), 0);
    to.iter_mut().zip(counts).for_each(|(to, count)| *to += *count as u64);
}

impl Histogram {
    fn observe(&self, time: Duration) {
        let at = SECONDS.partition_point(|bound| *bound < time.as_secs_f64());
        self.counts[at].fetch_add(1, Relaxed);
        self.nanoseconds.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }
}

struct Text {
    text: String,
    label: String,
}

impl Text {
    fn head(&mut self, name: &str, help: &str, kind: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn line(&mut self, name: &str, label: &str, value: f64) {
        let comma = if label.is_empty() { "" } else { "," };
        let _ = writeln!(self.text, "{name}{{{}{comma}{label}}} {value}", self.label);
    }

    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.head(name, help, "gauge");
        self.line(name, "", value);
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.head(name, help, "histogram");
        let (bucket, mut below) = (format!("{name}_bucket"), 0);
        let bounds = SECONDS.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
        for (bound, count) in bounds.zip(&histogram.counts) {
            below += count.load(Relaxed);
            self.line(&bucket, &format!("le=\"{bound}\""), below as f64);
        }
        self.line(&format!("{name}_sum"), "", histogram.nanoseconds.load(Relaxed) as f64 / 1e9);
        self.line(&format!("{name}_count"), "", below as f64);
    }
}

fn escape(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A time that is a bound is in the bucket that ends there; one beyond the last bound is in the one without.
    #[test]
    fn buckets_end_at_their_bounds() {
        let histogram = Histogram::default();
        for nanoseconds in [0, 1_000_000, 1_000_001, 5_000_000, 600_000_000_000, 600_000_000_001] {
            histogram.observe(Duration::from_nanos(nanoseconds));
        }
        let mut written = Text { text: String::new(), label: "model_name=\"m\"".into() };
        written.histogram("h", "Help.", &histogram);
        for (line, count) in [
            ("h_bucket{model_name=\"m\",le=\"0.001\"}", 2),
            ("h_bucket{model_name=\"m\",le=\"0.005\"}", 4),
            ("h_bucket{model_name=\"m\",le=\"0.01\"}", 4),
            ("h_bucket{model_name=\"m\",le=\"120\"}", 4),
            ("h_bucket{model_name=\"m\",le=\"600\"}", 5),
            ("h_bucket{model_name=\"m\",le=\"+Inf\"}", 6),
            ("h_count{model_name=\"m\"}", 6),
        ] {
            let line = format!("{line} {count}");
            assert!(written.text.lines().any(|other| other == line), "no {line} in {}", written.text);
        }
        // A time that is only in its bucket yet: another thread is between the two additions.
        histogram.counts[0].fetch_add(1, Relaxed);
        written.histogram("half", "Help.", &histogram);
        for line in ["half_bucket{model_name=\"m\",le=\"+Inf\"} 7", "half_count{model_name=\"m\"} 7"] {
            assert!(written.text.lines().any(|other| other == line), "no {line} in {}", written.text);
        }
    }
}
