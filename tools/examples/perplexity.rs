//! Perplexity over a text: `cargo run --release --example perplexity -- README.md`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use foretoken::kv::{ExactZones, KvFormat, KvOptions};
use foretoken::perplexity::{PerplexityOptions, perplexity};
use foretoken::{Engine, EngineOptions, WeightType};
use foretoken_tools::arguments::{quantized_type, target};
use foretoken_tools::progress::StatusLine;
use foretoken_tools::report::count;
use foretoken_tools::{input, println};

/// Perplexity of a target over a text file, to measure the cost of quantization and cache types.
///
/// Windowed as in llama.cpp: the text is split into windows, each starts with BOS if the tokenizer adds it to texts,
/// and the second half of each is scored.
///
/// Example: perplexity wiki.test.raw --model gemma-4-E2B-it-q4_k_m.gguf --cache-type-k bf16
#[derive(Parser)]
#[command(version)]
struct Args {
    /// The text file; - is stdin.
    text: PathBuf,
    /// Target checkpoint: a directory, a GGUF file, or (feature hub) a Hugging Face Hub name. Default: the demo target.
    #[arg(short, long)]
    model: Option<PathBuf>,
    /// Quantize floating-point matrices while loading: q4_k, q6_k, q8_0, ...; an unknown type lists all. Default: the
    /// types of the file.
    #[arg(long, value_name = "TYPE", value_parser = quantized_type)]
    quantize: Option<WeightType>,
    /// Tokens per window.
    #[arg(long, default_value_t = PerplexityOptions::default().window)]
    window: usize,
    /// Maximum number of windows. Default: all of the text.
    #[arg(long, value_name = "N")]
    windows: Option<usize>,
    /// Type of the cached keys: f32, f16, bf16, or q8_0, q4_0, tqc2 to tqc6, turbo2 to turbo4. Of layers without a window,
    /// a row then reads all pages of 128 positions before its own quantized, none exactly.
    #[arg(long, value_name = "T", default_value = "f16")]
    cache_type_k: KvFormat,
    /// Type of the cached values: the same.
    #[arg(long, value_name = "T", default_value = "f16")]
    cache_type_v: KvFormat,
    /// Number of threads. Default: physical cores.
    #[arg(short, long)]
    threads: Option<usize>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    foretoken_tools::log_warnings();
    foretoken_tools::run(command)
}

fn command(args: Args) -> Result<()> {
    let text = input::text(&args.text)?;
    let model = target(args.model.as_deref())?;
    let load = EngineOptions { threads: args.threads, quantize: args.quantize, ..EngineOptions::new(model) };
    let engine = Engine::load(&load)?;
    let tokens = engine.tokenizer()?.encode(&text).with_context(|| args.text.display().to_string())?;
    let (defaults, none) = (KvOptions::default(), ExactZones { head: 0, tail: 0, ..ExactZones::default() });
    // The default zones would hold a whole window.
    let kv = KvOptions { key: args.cache_type_k, value: args.cache_type_v, exact: none, ..defaults };
    let options = PerplexityOptions { window: args.window, max_windows: args.windows, kv };
    let status = StatusLine::new("");
    let result = perplexity(&engine, &tokens, &options, |so_far| {
        status.set(&format!("{}: {:.4}", count(so_far.windows, "window"), so_far.value()));
    });
    drop(status);
    let result = result?;
    if args.json {
        let report = serde_json::json!({
            "perplexity": result.value(),
            "error": result.error(),
            "windows": result.windows,
            "scored_tokens": result.tokens,
        });
        println!("{report}");
    } else {
        let (value, error) = (result.value(), result.error());
        let (tokens, windows) = (count(result.tokens, "token"), count(result.windows, "window"));
        println!("perplexity {value:.4} +/- {error:.4} over {tokens} in {windows}");
    }
    Ok(())
}
