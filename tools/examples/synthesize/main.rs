//! Writes a full-size checkpoint without a download: `cargo run --release --example synthesize -- /tmp/echo e2b`.
//!
//! The model repeats its input token. Attention, MLP and per-layer embeddings add zero to the residual stream, so the
//! stream stays the embedding of the token and the target predicts the token that it was given. The assistant's
//! pre-projection is a random projection `P`, its embedding the normalised `E P^T`: it predicts the same token, and
//! every draft is accepted (ids below 300 are control tokens and bytes; use ids above that in prompts). A NextN head
//! projects its input to the embedding alone, for the same effect. All other weights are random and all shapes real: a
//! step costs the same as with the real checkpoint.

mod echo;
mod gemma4;
mod qwen35;
mod shape;
mod stored;
mod tensors;
mod variant;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use foretoken::checkpoint::gguf::{GgufWriter, TensorWriter};
use foretoken::{Cancel, Error};
use foretoken_tools::interrupt::{cancel_on_interrupt, exit_code};
use foretoken_tools::progress::ProgressLine;
use rayon::prelude::*;

use echo::{ROWS, Random};
use stored::{Quantize, Stored};
use tensors::{Contents, Tensor};
use variant::Variant;

/// Write a synthetic target and drafter with the shapes of a real variant, for benchmarks. All drafts are accepted.
///
/// Writes OUT_DIR/VARIANT-target.gguf and, if the drafter is a separate file,
/// OUT_DIR/VARIANT-assistant.gguf: 3 GB for e2b, 18 GB for 26b.
///
/// Ctrl-C ends the command with exit code 130, and removes the incomplete file.
///
/// Example: synthesize /tmp/echo 26b --quantize q4_k_m
#[derive(Parser)]
#[command(version)]
pub struct Args {
    /// Output directory; created if missing.
    out_dir: PathBuf,
    /// Variant whose shapes to use.
    variant: Variant,
    /// Type of the matrices: q4_k_m (Q4_K and Q6_K mixed), q8_0, q4_0, q4_k, q6_k, ..., f16, bf16, f32.
    #[arg(long, value_name = "TYPE", default_value = "q4_k_m")]
    quantize: Quantize,
    /// Layers of the target, at least one of every kind (2; qwen: 4). Default: as many as the variant has.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(2..=1024))]
    layers: Option<u16>,
    /// Random seed of the weights.
    #[arg(long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// Weight of the key norms. At 1 the scores of random weights spread so far that most
    /// exponentials are subnormal, which slows attention down several times unless they are flushed
    /// to zero; 0.125 spreads them about as much as real text.
    #[arg(long, value_name = "W", default_value_t = 1.0, value_parser = key_norm)]
    key_norm: f32,
    /// Give the assistant a centroid head, as for e2b and e4b, in the older file layout.
    #[arg(long)]
    centroids: bool,
    /// Tokens in the vocabulary (a smaller one, for tests).
    #[arg(long, hide = true, value_parser = clap::value_parser!(u32).range(1024..=262_144))]
    vocab: Option<u32>,
}

fn main() -> ExitCode {
    foretoken_tools::run(|args: Args| {
        let cancel = Cancel::default();
        cancel_on_interrupt(cancel.clone());
        exit_code(run(&args, cancel))
    })
}

/// Writes a file's metadata.
type Describe = Box<dyn FnOnce(&mut GgufWriter) -> Result<()>>;

/// A file to be written.
pub struct File {
    name: String,
    tensors: Vec<Tensor>,
    describe: Describe,
}

/// Writes the files of the variant.
///
/// # Errors
/// If the options do not fit the variant, a file cannot be written, or `cancel` is cancelled.
pub fn run(args: &Args, cancel: Cancel) -> Result<()> {
    let files = args.variant.files(args)?;
    let directory = &args.out_dir;
    std::fs::create_dir_all(directory).with_context(|| format!("{}: cannot be created", directory.display()))?;
    let all = files.iter().flat_map(|file| &file.tensors);
    let line = ProgressLine::new("", all.map(|tensor| tensor.bytes as u64).sum());
    let mut job = Job { seed: args.seed, banks: HashMap::new(), line, cancel };
    files.into_iter().try_for_each(|file| job.write(&directory.join(&file.name), &file.tensors, file.describe))
}

fn key_norm(text: &str) -> Result<f32> {
    let norm: f32 = text.parse()?;
    anyhow::ensure!(norm.is_finite() && norm > 0.0, "must be positive and finite");
    Ok(norm)
}

/// Bytes generated at once before they are written.
const BATCH: usize = 16 << 20;
/// Random weights are drawn in pieces of `PIECE` weights (whole blocks of every type) from a bank of `PIECES` pieces.
const PIECE: usize = 256;
const PIECES: usize = 1024;
/// Pieces that one thread draws in a row.
const RUN: usize = 256;

/// Pieces of random weights of a type: quantizing 18 GB would take minutes, copying takes seconds.
struct Bank {
    piece: usize, // bytes
    bytes: Vec<u8>,
}

struct Job {
    seed: u64,
    banks: HashMap<(u32, u32), Bank>, // by type and the bits of the deviation
    line: ProgressLine,
    cancel: Cancel,
}

impl Job {
    fn write(
        &mut self,
        path: &Path,
        tensors: &[Tensor],
        describe: impl FnOnce(&mut GgufWriter) -> Result<()>,
    ) -> Result<()> {
        let mut file = GgufWriter::create(path)?;
        describe(&mut file)?;
        for tensor in tensors {
            file.tensor(&tensor.name, tensor.ggml_id, &tensor.shape)?;
        }
        let mut file = file.begin()?;
        self.line.label(path.file_name().map_or(String::new(), |name| name.display().to_string()));
        for tensor in tensors {
            self.fill(&mut file, tensor)?;
        }
        Ok(file.finish()?)
    }

    fn fill(&mut self, file: &mut TensorWriter, tensor: &Tensor) -> Result<()> {
        let mut write = |bytes: &[u8]| -> Result<()> {
            if self.cancel.is_cancelled() {
                return Err(Error::Cancelled.into());
            }
            file.write(&tensor.name, bytes)?;
            self.line.add(bytes.len() as u64);
            Ok(())
        };
        match &tensor.contents {
            Contents::Zeros => {
                let zeros = vec![0; tensor.bytes.min(BATCH)];
                batches(tensor.bytes, zeros.len()).try_for_each(|(_, len)| write(&zeros[..len]))
            }
            Contents::Values(values) => write(&values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>()),
            Contents::Ids(ids) => write(&ids.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>()),
            Contents::Rows(stored, rows) => {
                let inputs = tensor.shape.last().copied().unwrap_or(1);
                let row = stored.bytes(inputs);
                write_parts(tensor.bytes, ROWS * row, write, |i, out| {
                    let mut x = vec![0.0; out.len() / row * inputs];
                    rows(i * ROWS, &mut x);
                    for (x, out) in x.chunks_exact(inputs).zip(out.chunks_exact_mut(row)) {
                        stored.encode(x, out);
                    }
                })
            }
            Contents::Random(stored, std) => {
                let seed = self.seed;
                let make = || Bank::new(seed, *stored, *std);
                let bank = &*self.banks.entry((tensor.ggml_id, std.to_bits())).or_insert_with(make);
                write_parts(tensor.bytes, RUN * bank.piece, write, |i, out| {
                    bank.draw(&mut Random::new(seed, &tensor.name, i as u64), out);
                })
            }
        }
    }
}

/// Writes `total` bytes in batches, whose parts of `len` bytes are filled on all threads by `fill(index, part)`.
fn write_parts(
    total: usize,
    len: usize,
    mut write: impl FnMut(&[u8]) -> Result<()>,
    fill: impl Fn(usize, &mut [u8]) + Sync,
) -> Result<()> {
    let mut buffer = vec![0; total.min((BATCH / len).max(1) * len)];
    batches(total, buffer.len()).try_for_each(|(start, bytes)| {
        let out = &mut buffer[..bytes];
        out.par_chunks_mut(len).enumerate().for_each(|(i, part)| fill(start / len + i, part));
        write(out)
    })
}

/// `(start, length)` of the pieces of `total` that are `len` long, except for the last.
fn batches(total: usize, len: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..total).step_by(len.max(1)).map(move |start| (start, len.min(total - start)))
}

impl Bank {
    fn new(seed: u64, stored: Stored, std: f32) -> Self {
        let piece = stored.bytes(PIECE);
        let mut bytes = vec![0; PIECES * piece];
        bytes.par_chunks_mut(piece).enumerate().for_each(|(i, out)| {
            let mut x = [0.0; PIECE];
            Random::new(seed, "bank", i as u64).fill(std, &mut x);
            stored.encode(&x, out);
        });
        Self { piece, bytes }
    }

    fn draw(&self, random: &mut Random, out: &mut [u8]) {
        for out in out.chunks_mut(self.piece) {
            let at = (random.next() % PIECES as u64) as usize * self.piece;
            out.copy_from_slice(&self.bytes[at..at + out.len()]);
        }
    }
}
