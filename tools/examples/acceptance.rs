//! Acceptance of a target and assistant pair: `cargo run --release --example acceptance -- --threads 1`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::Parser;
use foretoken::{Engine, EngineOptions, GenerateOptions, SessionOptions, Speculation, SpeculationOptions, Statistics};
use foretoken_tools::arguments::Pair;
use foretoken_tools::centroids::CentroidChoice;
use foretoken_tools::measure::generate;
use foretoken_tools::println;
use foretoken_tools::report::count;
use foretoken_tools::{demo, input};

/// Continue every prompt of a file greedily, without speculation and with several block sizes, interleaved, and print
/// tokens per second and acceptance at each draft position.
///
/// Example: acceptance --prompts models/demo/prompts.json --blocks 2,4,8 --json
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    pair: Pair,
    /// File with a JSON list of prompts; - is stdin. Default: the demo pair's held-out prompts.
    #[arg(long)]
    prompts: Option<PathBuf>,
    /// Rows per verification; 1 is plain decoding.
    #[arg(long, value_delimiter = ',', default_value = "1,2,3,4,6,8")]
    blocks: Vec<usize>,
    /// Maximum number of tokens per prompt.
    #[arg(short = 'n', long, default_value_t = 128)]
    max_tokens: usize,
    /// Centroids of the assistant: own, none, auto (its own; if it has none, builds 2048 if a draft step is faster with
    /// them), or N/K (builds N, of which K are scored).
    #[arg(long, value_name = "WHICH", default_value = "own")]
    centroids: CentroidChoice,
    /// Number of threads. Default: physical cores.
    #[arg(short, long)]
    threads: Option<usize>,
    /// Print a JSON list instead of a table.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    foretoken_tools::run(command)
}

fn command(args: Args) -> Result<()> {
    // Speeds are measured after the first token.
    ensure!(args.max_tokens > 1, "--max-tokens must be at least 2");
    let path = args.prompts.clone().unwrap_or_else(|| demo("prompts.json"));
    let prompts = input::prompts(&path)?;
    ensure!(!prompts.is_empty(), "{}: has no prompts", path.display());
    let pair = args.pair.options()?;
    args.centroids.check(pair.assistant.as_deref())?;
    let (centroids, threads) = (args.centroids.with_cache(None), args.threads);
    let engine = Engine::load(&EngineOptions { centroids, threads, ..pair })?;
    ensure!(
        engine.has_mtp() || args.blocks.iter().all(|rows| *rows == 1),
        "--assistant: is missing, and the target has no NextN head; pass the target's assistant, or --blocks 1"
    );
    let mut totals = vec![Statistics::default(); args.blocks.len()];
    for prompt in &prompts {
        let prompt = engine.tokenizer()?.encode(prompt)?;
        for (block_size, total) in args.blocks.iter().zip(&mut totals) {
            let speculation = match *block_size {
                1 => Speculation::Off,
                block_size => Speculation::With(SpeculationOptions::mtp(block_size)),
            };
            let options = GenerateOptions { max_tokens: args.max_tokens, speculation, ..GenerateOptions::default() };
            total.add(&generate(&mut engine.session(&SessionOptions::default())?, &prompt, &options)?.1);
        }
    }
    if args.json {
        let rows = args.blocks.iter().zip(&totals).map(|(block, s)| {
            serde_json::json!({
                "block_size": block,
                "tokens_per_second": s.decode_tokens_per_second(),
                "tokens_per_round": s.tokens_per_round(),
                "acceptance_rate": s.acceptance_rate(),
                "acceptance_at": per_position(s),
                "draft_ms_per_round": 1e3 * s.speculation.draft.as_secs_f64() / s.rounds as f64,
                "verify_ms_per_round": 1e3 * s.speculation.verify.as_secs_f64() / s.rounds as f64,
            })
        });
        println!("{}", serde_json::Value::from_iter(rows));
        return Ok(());
    }
    let (prompts, threads) = (count(prompts.len(), "prompt"), count(engine.threads(), "thread"));
    println!("{prompts}, up to {} tokens each, {threads}", args.max_tokens);
    println!("block  tokens/s  tokens/round  accepted  at each position");
    for (block, s) in args.blocks.iter().zip(&totals) {
        let at: Vec<_> = per_position(s).iter().map(|rate| format!("{:.0} %", 100.0 * rate)).collect();
        let (speed, per_round, rate) =
            (s.decode_tokens_per_second(), s.tokens_per_round(), 100.0 * s.acceptance_rate());
        println!("{block:5} {speed:9.1} {per_round:13.2} {rate:7.0} %  {}", at.join("  "));
    }
    Ok(())
}

/// Share of the rounds with a draft at each position in which it was accepted.
fn per_position(s: &Statistics) -> Vec<f64> {
    s.accepted_at.iter().zip(&s.drafted_at).map(|(accepted, drafted)| *accepted as f64 / *drafted as f64).collect()
}
