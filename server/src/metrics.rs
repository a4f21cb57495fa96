//! Counters in Prometheus' text format, under vLLM's names where it has them.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use foretoken::{Engine, Statistics};

/// Upper bounds of time histograms in seconds.
const SECONDS: [f64; 16] =
    [0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5.0, 10.0, 30.0, 120.0, 600.0];

/// Labels of finished requests.
const REASONS: [&str; 4] = ["stop", "length", "abort", "error"];

/// What the server counts.
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
    /// By drafter: for each place in its drafts, tokens that were verified, and those that were accepted.
    drafters: Mutex<BTreeMap<String, [Vec<u64>; 2]>>,
    first_token: Histogram,
    queue: Histogram,
    per_token: Histogram,
    total: Histogram,
}

#[derive(Default)]
struct Histogram {
    counts: [AtomicU64; SECONDS.len()],
    count: AtomicU64,
    nanoseconds: AtomicU64,
}

impl Metrics {
    /// Requests with and without a sequence.
    pub fn queues(&self, running: usize, waiting: usize) {
        self.running.store(running, Relaxed);
        self.waiting.store(waiting, Relaxed);
    }

    /// Tokens of a round.
    pub fn generated(&self, tokens: usize) {
        self.generation_tokens.fetch_add(tokens as u64, Relaxed);
    }

    /// A job's prompt of `tokens` tokens, of which a kept prefix has `cached`.
    pub fn prompt(&self, tokens: usize, cached: usize) {
        self.prompt_tokens.fetch_add(tokens as u64, Relaxed);
        self.cached_tokens.fetch_add(cached as u64, Relaxed);
    }

    /// The first token of a generation, `after` its admission.
    pub fn first_token(&self, after: Duration) {
        self.first_token.observe(after);
    }

    /// A request is over, for one of [`REASONS`].
    pub fn finished(&self, reason: &str) {
        let at = REASONS.iter().position(|known| *known == reason).unwrap_or(REASONS.len() - 1);
        self.finished[at].fetch_add(1, Relaxed);
    }

    /// A request found the queue full.
    pub fn refused(&self) {
        self.refused.fetch_add(1, Relaxed);
    }

    /// A generation's statistics, and its times from admission to its sequence, its first token and its end.
    pub fn ended(&self, statistics: &Statistics, (queued, first, total): (Duration, Duration, Duration)) {
        self.rounds.fetch_add(statistics.rounds as u64, Relaxed);
        // Of one row there is no draft.
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
        drop(drafters);
        self.queue.observe(queued);
        self.total.observe(total);
        if statistics.generated_tokens > 1 {
            self.per_token.observe((total - first) / (statistics.generated_tokens - 1) as u32);
        }
    }

    /// All of it, with `model` as the label `model_name`.
    pub fn text(&self, model: &str, engine: &Engine) -> String {
        let mut text = Text { text: String::new(), label: format!("model_name=\"{}\"", escape(model)) };
        text.gauge("vllm:num_requests_running", "Requests that have a sequence.", self.running.load(Relaxed) as f64);
        text.gauge("vllm:num_requests_waiting", "Requests that wait for one.", self.waiting.load(Relaxed) as f64);
        let held = engine.pages().held();
        if let Some(left) = engine.pages().available() {
            let used = held as f64 / (held + left).max(1) as f64;
            text.gauge("vllm:kv_cache_usage_perc", "K and V held, of --kv-memory; 1 is all.", used);
        }
        text.gauge("foretoken:kv_cache_bytes", "Bytes of K and V held.", held as f64);
        for (name, help, value) in [
            ("vllm:prompt_tokens_total", "Tokens of prompts.", &self.prompt_tokens),
            ("vllm:prefix_cache_queries_total", "Tokens that were looked up in kept prefixes.", &self.prompt_tokens),
            ("vllm:prefix_cache_hits_total", "Those that were there.", &self.cached_tokens),
            ("vllm:generation_tokens_total", "Tokens generated.", &self.generation_tokens),
            ("foretoken:rounds_total", "Passes of the target behind prompts, per request.", &self.rounds),
            ("vllm:spec_decode_num_drafts_total", "Those that verified a draft.", &self.drafts),
            ("vllm:spec_decode_num_draft_tokens_total", "Tokens drafted and verified.", &self.drafted),
            ("vllm:spec_decode_num_accepted_tokens_total", "Drafted tokens that were emitted.", &self.accepted),
            ("foretoken:requests_refused_total", "Requests that found the queue full.", &self.refused),
        ] {
            text.head(name, help, "counter");
            text.line(name, "", value.load(Relaxed) as f64);
        }
        let name = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
        text.head(name, "Drafted tokens that were emitted, by place in the draft.", "counter");
        let at = self.accepted_at.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for (position, accepted) in at.iter().enumerate() {
            text.line(name, &format!("position=\"{position}\""), *accepted as f64);
        }
        let drafters = self.drafters.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for (name, help, which) in [
            (
                "foretoken:drafter_draft_tokens_total",
                "Tokens drafted and verified, by drafter and place in its draft.",
                0,
            ),
            ("foretoken:drafter_accepted_tokens_total", "Those that were emitted.", 1),
        ] {
            text.head(name, help, "counter");
            for (drafter, counts) in &drafters {
                for (position, count) in counts[which].iter().enumerate() {
                    let label = format!("drafter=\"{}\",position=\"{position}\"", escape(drafter));
                    text.line(name, &label, *count as f64);
                }
            }
        }
        text.head("vllm:request_success_total", "Requests that are over, by reason.", "counter");
        for (reason, count) in REASONS.iter().zip(&self.finished) {
            let label = format!("finished_reason=\"{reason}\"");
            text.line("vllm:request_success_total", &label, count.load(Relaxed) as f64);
        }
        for (name, help, histogram) in [
            ("vllm:time_to_first_token_seconds", "From admission to the first token.", &self.first_token),
            ("vllm:request_queue_time_seconds", "From admission to a sequence.", &self.queue),
            ("vllm:request_time_per_output_token_seconds", "Behind the first, per token.", &self.per_token),
            ("vllm:e2e_request_latency_seconds", "From admission to the end.", &self.total),
        ] {
            text.histogram(name, help, histogram);
        }
        text.text
    }
}

/// Adds counts by place.
fn add(to: &mut Vec<u64>, counts: &[usize]) {
    to.resize(to.len().max(counts.len()), 0);
    to.iter_mut().zip(counts).for_each(|(to, count)| *to += *count as u64);
}

impl Histogram {
    fn observe(&self, time: Duration) {
        if let Some(at) = SECONDS.iter().position(|bound| time.as_secs_f64() <= *bound) {
            self.counts[at].fetch_add(1, Relaxed);
        }
        self.nanoseconds.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Relaxed);
        self.count.fetch_add(1, Relaxed);
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
        for (bound, count) in SECONDS.iter().zip(&histogram.counts) {
            below += count.load(Relaxed);
            self.line(&bucket, &format!("le=\"{bound}\""), below as f64);
        }
        let count = histogram.count.load(Relaxed) as f64;
        self.line(&bucket, "le=\"+Inf\"", count);
        self.line(&format!("{name}_sum"), "", histogram.nanoseconds.load(Relaxed) as f64 / 1e9);
        self.line(&format!("{name}_count"), "", count);
    }
}

fn escape(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
