//! Quantizes GGUF files: `cargo run --release --example quantize -- demo-f16.gguf demo-q4_k_m.gguf q4_k_m`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use foretoken::Cancel;
use foretoken::checkpoint::quantize::{Importance, Mix, QuantizeOptions, Requantize, Rules, quantize};
use foretoken::checkpoint::{Checkpoint, Progress};
use foretoken_tools::arguments::resolve;
use foretoken_tools::interrupt::{cancel_on_interrupt, exit_code};
use foretoken_tools::println;
use foretoken_tools::progress::ProgressLine;
use foretoken_tools::report::{count, size};

/// Quantize a GGUF file of a target or an assistant, by llama.cpp's rules.
///
/// Ctrl-C ends the command with exit code 130, and removes the incomplete file.
///
/// Example: quantize gemma-4-E2B-it-bf16.gguf gemma-4-E2B-it-q4_k_m.gguf q4_k_m --imatrix imatrix.gguf
#[derive(Parser)]
#[command(version)]
struct Args {
    /// GGUF file, the first part of a split one, or (feature hub) a Hugging Face Hub name of one.
    source: PathBuf,
    /// The file (NAME.gguf) to write.
    destination: PathBuf,
    /// q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl, iq4_xs, mxfp4_moe (experts; with --pure all), q2_k, q3_k_s, q3_k_m,
    /// q3_k_l, q4_k_s, q4_k_m, q5_k_s, q5_k_m, q6_k.
    mix: Mix,
    /// Importance matrix from llama-imatrix (GGUF or .dat), to weight errors.
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// One type for all matrices, instead of more bits for embeddings, output heads and some other matrices.
    #[arg(long)]
    pure: bool,
    /// Allow quantizing matrices that are already quantized.
    #[arg(long)]
    allow_requantize: bool,
    /// Number of threads. Default: all hardware threads.
    #[arg(short, long, default_value_t = 0, hide_default_value = true)]
    threads: usize,
    /// Print each tensor.
    #[arg(long)]
    verbose: bool,
}

fn main() -> ExitCode {
    foretoken_tools::log_warnings();
    foretoken_tools::run(|args| exit_code(command(args)))
}

fn command(args: Args) -> Result<()> {
    ensure!(args.threads <= 1024, "--threads must be from 1 to 1024, or 0 for all hardware threads");
    let path = resolve(&args.source)?;
    let cancel = Cancel::default();
    cancel_on_interrupt(cancel.clone());
    let source = Checkpoint::open(path)?;
    let line = ProgressLine::new("quantizing", 0);
    let options = QuantizeOptions {
        rules: if args.pure { Rules::Pure } else { Rules::Mixed },
        importance: args.imatrix.as_deref().map(Importance::read).transpose()?,
        requantize: if args.allow_requantize { Requantize::Allowed } else { Requantize::Refused },
        progress: Some(Arc::new(move |progress: Progress| line.set(progress.loaded, progress.total))),
        cancel,
        ..QuantizeOptions::new(args.mix)
    };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(args.threads).build().context("threads")?;
    let start = Instant::now();
    let tensors = pool.install(|| quantize(&source, &args.destination, &options))?;
    if args.verbose {
        for tensor in &tensors {
            let how = if tensor.by_importance { ", by importance" } else { "" };
            println!("{:40} {} -> {}, {} bytes{how}", tensor.name, tensor.from, tensor.to, tensor.bytes);
        }
    }
    let without = tensors.iter().filter(|tensor| tensor.from != tensor.to && !tensor.by_importance).count();
    if options.importance.is_some() && without > 0 {
        println!("not in the importance matrix, so quantized without importance: {}", count(without, "tensor"));
    }
    let (path, written) = (args.destination.display(), count(tensors.len(), "tensor"));
    let (bytes, seconds) = (size(tensors.iter().map(|tensor| tensor.bytes).sum()), start.elapsed().as_secs_f64());
    println!("{path}: {written}, {bytes} in {seconds:.1} s");
    Ok(())
}
