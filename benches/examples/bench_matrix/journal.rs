//! The measurements, one line of JSON each, written immediately. The file holds the results and is
//! the state from which an interrupted run resumes.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use foretoken_tools::eprintln;
use serde::{Deserialize, Serialize};

use crate::matrix::{Cell, Setting};

/// A line: an event, and its machine and commit.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    #[serde(flatten)]
    pub origin: Origin,
    #[serde(flatten)]
    pub event: Event,
}

/// Machine and commit of a figure: figures of different ones are never compared.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Origin {
    pub machine: String,
    pub commit: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// A run of the benchmark was started or resumed.
    Start { command: String, time: String },
    /// Machine bandwidth and cost of a pair's forward passes at the start of a turn.
    Turn(Turn),
    /// A cell was measured once.
    Run(Run),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Turn {
    pub setting: Setting,
    pub run: usize,
    pub threads: usize,
    /// Best read bandwidth of the machine in GB/s.
    pub read_gb_per_second: Option<f64>,
    /// Bytes of weights that a pass reads, for any number of rows; of experts those of one row.
    pub step_bytes: usize,
    /// Median milliseconds of a verification, by number of rows.
    pub verify_ms: Vec<(usize, f64)>,
    /// Median milliseconds of a draft step.
    pub draft_ms: Option<f64>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    pub setting: Setting,
    #[serde(flatten)]
    pub cell: Cell,
    pub run: usize,
    /// After the first token, which comes from the prompt's forward pass.
    pub tokens_per_second: f64,
    pub prefill_tokens_per_second: f64,
    pub rounds: usize,
    pub tokens_per_round: f64,
    pub drafted: usize,
    pub accepted: usize,
    pub drafted_at: Vec<usize>,
    pub accepted_at: Vec<usize>,
    /// Milliseconds per round of drafting, and of the target's pass. `None` here and below: not reported.
    pub draft_ms: Option<f64>,
    pub verify_ms: Option<f64>,
    /// Bandwidth of weights read by the target's passes, and the best read bandwidth measured at the start of the turn.
    pub weights_gb_per_second: Option<f64>,
    pub read_gb_per_second: Option<f64>,
    pub kv_bytes: Option<usize>,
    pub peak_rss_bytes: Option<u64>,
    /// A checksum of the tokens generated after each prompt; empty if a server does not report them.
    pub written: Vec<u32>,
}

pub struct Journal {
    path: PathBuf,
    file: File,
    pub records: Vec<Record>,
}

impl Journal {
    /// Opens or creates the file. An incomplete last line, left by an interruption, is dropped.
    ///
    /// # Errors
    /// If it cannot be written, another process is writing it, or it is not a journal.
    pub fn open(path: &Path) -> Result<Self> {
        let named = || path.display().to_string();
        let file = OpenOptions::new().append(true).create(true).open(path).with_context(named)?;
        file.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => anyhow!("{}: another bench_matrix is writing it", path.display()),
            TryLockError::Error(error) => anyhow!(error).context(named()),
        })?;
        let (records, whole) = read(path)?;
        if file.metadata().with_context(named)?.len() > whole {
            eprintln!("{}: dropping an incomplete last line", path.display());
            file.set_len(whole).with_context(named)?;
        }
        Ok(Self { path: path.to_owned(), file, records })
    }

    /// Writes an event, and returns when it is on disk.
    pub fn append(&mut self, record: Record) -> Result<()> {
        let line = serde_json::to_string(&record)? + "\n";
        let written = self.file.write_all(line.as_bytes()).and_then(|()| self.file.sync_data());
        written.with_context(|| self.path.display().to_string())?;
        self.records.push(record);
        Ok(())
    }
}

/// The complete lines of a journal, and their bytes.
///
/// # Errors
/// If it cannot be read, or is not a journal.
pub fn read(path: &Path) -> Result<(Vec<Record>, u64)> {
    /// Prefix of all lines.
    const BEGIN: &[u8] = b"{\"machine\":";
    let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    let (mut records, mut whole) = (Vec::new(), 0);
    for (number, line) in (1..).zip(bytes.split_inclusive(|byte| *byte == b'\n')) {
        let foreign = || format!("{}:{number}: is not a line of bench_matrix; use another --out", path.display());
        if line.ends_with(b"\n") {
            records.push(serde_json::from_slice(line).with_context(foreign)?);
            whole += line.len() as u64;
        } else {
            ensure!(line.starts_with(BEGIN) || BEGIN.starts_with(line), foreign());
        }
    }
    Ok((records, whole))
}
