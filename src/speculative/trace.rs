//! Traces every round as a line of JSON.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::{DrafterKind, Proposal, RoundResult};
use crate::tokenizer::{StreamDecoder, Tokenizer};
use crate::{Error, Result};

/// Where trace lines are written. Clones write to the same place, so sessions may share one; lines are written whole.
///
/// A generation's lines, by their `event`: one `begin` with the prompt's size and the drafters, one `first` with the
/// token drawn from the prompt's pass, a `round` each with the decision, the draft, the accept result and microseconds,
/// a `cancelled` for a discarded draft, and one `end`, whose `finish` is the name of the
/// [`FinishReason`](crate::FinishReason), or `dropped`. A round's `path` is `sync` if it was drafted before its pass,
/// `lazy` if it was drafted in parallel with the caller, and `skip` if nothing was drafted.
#[derive(Clone)]
pub struct Trace {
    sink: Arc<Mutex<Sink>>,
}

struct Sink {
    out: Option<Box<dyn Write + Send>>, // until it fails
    name: String,
    start: Instant,
}

impl std::fmt::Debug for Trace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Trace({})", self.sink.lock().name)
    }
}

impl Trace {
    /// Traces to a new file, or in place of an earlier trace, which the first line replaces.
    ///
    /// # Errors
    /// If it cannot be created, or is some other file, such as the checkpoint.
    pub fn file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if is_other_file(path) {
            return Err(Error::file(path, "exists and is not a trace; choose another path for the trace"));
        }
        let file =
            OpenOptions::new().write(true).create(true).truncate(false).open(path).map_err(|cause| {
                match cause.kind() {
                    std::io::ErrorKind::NotFound => {
                        Error::file(path, "cannot be created: its directory does not exist")
                    }
                    _ => Error::file(path, format!("cannot be written: {cause}; choose another path for the trace")),
                }
            })?;
        Ok(Self::to(TraceFile { file, has_lines: false }, path.display().to_string()))
    }

    /// Traces to standard error.
    pub fn stderr() -> Self {
        Self::to(std::io::stderr(), "stderr".into())
    }

    /// Traces to a writer, which receives each line in one write; `name` is for messages.
    pub fn to(out: impl Write + Send + 'static, name: String) -> Self {
        Self { sink: Arc::new(Mutex::new(Sink { out: Some(Box::new(out)), name, start: Instant::now() })) }
    }

    /// Writes a line. If that fails the trace ends, and the generation continues.
    fn line(&self, mut value: Value) {
        let mut sink = self.sink.lock();
        value["us"] = json!(sink.start.elapsed().as_micros() as u64);
        let Some(out) = &mut sink.out else { return };
        if let Err(problem) = out.write_all(format!("{value}\n").as_bytes()).and_then(|()| out.flush()) {
            tracing::warn!("{}: {problem}; the trace ends here, the generation continues", sink.name);
            sink.out = None;
        }
    }
}

/// A file that is emptied before the first line, so that a generation that is refused leaves an earlier trace.
struct TraceFile {
    file: File,
    has_lines: bool,
}

impl Write for TraceFile {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        // A pipe or a terminal has no length.
        if !self.has_lines && self.file.metadata()?.is_file() {
            self.file.set_len(0)?;
        }
        self.has_lines = true;
        self.file.write(line)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}

/// Whether `path` is a file with contents that do not begin with a line of a trace.
fn is_other_file(path: &Path) -> bool {
    if !path.metadata().is_ok_and(|found| found.is_file() && found.len() > 0) {
        return false;
    }
    let mut line = Vec::new();
    let read = File::open(path).and_then(|file| BufReader::new(file.take(1 << 16)).read_until(b'\n', &mut line));
    read.is_ok() && !serde_json::from_slice::<Value>(&line).is_ok_and(|line| line["event"].is_string())
}

/// One generation's lines.
pub(crate) struct Tracer {
    trace: Trace,
    session: u64,
    iteration: usize,
    kinds: Vec<DrafterKind>,
    decoder: StreamDecoder,
}

impl Tracer {
    pub fn begin(trace: &Trace, session: u64, prompt_tokens: usize, kinds: Vec<DrafterKind>) -> Self {
        let names: Vec<_> = kinds.iter().map(|kind| kind.name()).collect();
        trace.line(json!({"event": "begin", "session": session, "prompt_tokens": prompt_tokens, "drafters": names}));
        Self { trace: trace.clone(), session, iteration: 0, kinds, decoder: StreamDecoder::default() }
    }

    /// Records the token drawn from the prompt's pass, not from a round.
    pub fn first(&mut self, tokenizer: Option<&Tokenizer>, token: u32) {
        let tokens = self.tokens(tokenizer, &[token]);
        self.trace.line(json!({"event": "first", "session": self.session, "tokens": tokens}));
    }

    /// Records a round. `waited`: how long it waited for a draft made in parallel with the caller; `None` if it made
    /// its own.
    pub fn round(&mut self, tokenizer: Option<&Tokenizer>, round: &RoundResult, waited: Option<Duration>) {
        let us = |time: Duration| time.as_micros() as u64;
        let Proposal { draft, decision: d, calls, time, .. } = &round.proposal;
        let drafted = draft.tokens.iter().enumerate().map(|(i, id)| match draft.confidence.get(i) {
            Some(p) => json!({"id": id, "p": p}),
            None => json!({"id": id}),
        });
        let path = match waited {
            _ if draft.tokens.is_empty() => "skip",
            None => "sync",
            Some(_) => "lazy",
        };
        self.iteration += 1;
        let calls = calls.iter().map(
            |call| json!({"drafter": self.kinds[call.drafter].name(), "tokens": call.tokens, "us": us(call.time)}),
        );
        let mut line = json!({
            "event": "round",
            "session": self.session,
            "iteration": self.iteration,
            "path": path,
            "drafter": d.plan.drafter().map(|drafter| self.kinds[drafter].name()),
            "last": round.last,
            "position": round.timing.position,
            "hidden_l2": round.hidden_l2,
            "draft": drafted.collect::<Vec<_>>(),
            "calls": calls.collect::<Vec<_>>(),
            "rows": 1 + draft.tokens.len(),
            "reason": d.reason.name(),
            "expected": {"tokens": d.tokens, "ms": d.ms, "plain_ms": d.plain_ms, "balance": d.balance},
            "accepted": round.accepted,
            "next": round.tokens.last(),
            "us_draft": us(*time),
            "us_wait": us(waited.unwrap_or(*time)),
            "us_verify": us(round.timing.verify),
            "us_accept": us(round.accept_time),
        });
        line["tokens"] = self.tokens(tokenizer, &round.tokens);
        self.trace.line(line);
    }

    pub fn cancelled(&self, drafted: usize) {
        self.trace
            .line(json!({"event": "cancelled", "session": self.session, "path": "cancelled", "drafted": drafted}));
    }

    pub fn end(&self, finish: &str) {
        self.trace.line(json!({"event": "end", "session": self.session, "finish": finish}));
    }

    /// The tokens with the text that each completes.
    fn tokens(&mut self, tokenizer: Option<&Tokenizer>, ids: &[u32]) -> Value {
        let mut text = |id: &u32| match tokenizer {
            Some(tokenizer) => json!({"id": id, "text": self.decoder.push(tokenizer, *id).unwrap_or_default()}),
            None => json!({"id": id}),
        };
        ids.iter().map(&mut text).collect()
    }
}
