//! What has been measured: a line of JSON each, written as soon as it is known. The file is the results and, after an
//! interruption, what need not be measured again.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use serde::{Deserialize, Serialize};

use crate::matrix::{Cell, Setting};

/// A line: an event, and what it happened on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    pub machine: String,
    pub commit: String,
    #[serde(flatten)]
    pub event: Event,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// Somebody began, or went on, to measure.
    Start { command: String, time: String },
    /// What the machine and a pair's passes were like when a run through the cells began.
    Turn(Turn),
    /// A cell was measured once.
    Run(Run),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Turn {
    pub setting: Setting,
    pub run: usize,
    pub threads: usize,
    /// The machine's best, in GB/s.
    pub read_gb_per_second: Option<f64>,
    /// Bytes of weights that a pass reads, whatever its rows.
    pub step_bytes: usize,
    /// Median milliseconds of verifying so many rows.
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
    /// After the first token, which the prompt's pass gives.
    pub tokens_per_second: f64,
    pub prefill_tokens_per_second: f64,
    pub rounds: usize,
    pub tokens_per_round: f64,
    pub drafted: usize,
    pub accepted: usize,
    pub drafted_at: Vec<usize>,
    pub accepted_at: Vec<usize>,
    /// Milliseconds of a round spent drafting, and in the target's pass. `None` here and below: nobody tells.
    pub draft_ms: Option<f64>,
    pub verify_ms: Option<f64>,
    /// Weights read by the target's passes, and what the machine reads at best, as measured at the turn's begin.
    pub weights_gb_per_second: Option<f64>,
    pub read_gb_per_second: Option<f64>,
    pub kv_bytes: Option<usize>,
    pub peak_rss_bytes: Option<u64>,
    /// A checksum of the tokens written after each prompt.
    pub written: Vec<u32>,
}

pub struct Journal {
    path: PathBuf,
    file: File,
    pub records: Vec<Record>,
}

impl Journal {
    /// Opens or makes the file. Half a line at its end, which an interruption leaves, is dropped.
    ///
    /// # Errors
    /// If it cannot be written, somebody else is writing it, or it is no journal.
    pub fn open(path: &Path) -> Result<Self> {
        let named = || path.display().to_string();
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(path).with_context(named)?;
        file.try_lock().map_err(|error| match error {
            std::fs::TryLockError::WouldBlock => anyhow!("{}: another bench_matrix is writing it", path.display()),
            std::fs::TryLockError::Error(error) => anyhow!(error).context(named()),
        })?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).with_context(named)?;
        let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        let mut records = Vec::new();
        for (number, line) in (1..).zip(bytes[..whole].split_inclusive(|byte| *byte == b'\n')) {
            let record = serde_json::from_slice(line);
            let foreign = || format!("{}:{number}: is no line of a bench_matrix; give another --out", path.display());
            records.push(record.with_context(foreign)?);
        }
        if whole < bytes.len() {
            ensure!(!records.is_empty() || bytes[0] == b'{', "{}: is no journal; give another --out", path.display());
            eprintln!("{}: half a line at the end is dropped", path.display());
            file.set_len(whole as u64).with_context(named)?;
            file.seek(std::io::SeekFrom::End(0)).with_context(named)?;
        }
        Ok(Self { path: path.to_owned(), file, records })
    }

    /// Writes an event, and returns when it is on the disk.
    pub fn append(&mut self, record: Record) -> Result<()> {
        let line = serde_json::to_string(&record)? + "\n";
        let written = self.file.write_all(line.as_bytes()).and_then(|()| self.file.sync_data());
        written.with_context(|| self.path.display().to_string())?;
        self.records.push(record);
        Ok(())
    }
}
