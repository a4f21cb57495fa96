//! Cost of context length: `cargo run --release --example depth -- --threads 1`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use foretoken::kv::KvOptions;
use foretoken::{Engine, EngineOptions, Probe, SessionOptions};
use foretoken_tools::arguments::{Compute, NamedKv, target};
use foretoken_tools::measure::median;
use foretoken_tools::println;

/// Measure decode steps and verifications of four rows deep in a context, for several KV cache formats, interleaved.
///
/// Example: depth --model e2b.gguf --depths 4096,16384 --kv f16,balanced,turbo3 --threads 1
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Target checkpoint. Default: the demo pair's.
    #[arg(short, long)]
    model: Option<PathBuf>,
    /// Positions in the cache.
    #[arg(long, value_delimiter = ',', default_value = "512,1024,2048")]
    depths: Vec<usize>,
    /// Presets, or formats for both keys and values.
    #[arg(long, value_delimiter = ',', default_value = "f16,balanced,turbo3,q8_0")]
    kv: Vec<NamedKv>,
    #[command(flatten)]
    compute: Compute,
    /// Measurements of each, interleaved; the median is reported.
    #[arg(long, default_value_t = 7)]
    repeats: usize,
    /// Print one JSON object per line instead of a table.
    #[arg(long)]
    json: bool,
}

/// Rows of the largest pass that is measured.
const MOST_ROWS: usize = 4;

fn main() -> ExitCode {
    foretoken_tools::run(command)
}

fn command(args: Args) -> Result<()> {
    ensure!(args.repeats > 0, "--repeats must be at least 1");
    let options = args.compute.options(EngineOptions::new(target(args.model.as_deref())?));
    measure(&args, &Engine::load(&options)?)
}

fn measure(args: &Args, engine: &Engine) -> Result<()> {
    let (deepest, context) =
        (*args.depths.iter().max().context("no depths")?, engine.target().max_position_embeddings());
    let longest = deepest.saturating_add(MOST_ROWS);
    ensure!(
        longest <= context,
        "--depths: {deepest} positions and {MOST_ROWS} rows do not fit the context of {context}; lower the largest depth"
    );
    let mut probes = Vec::new();
    for kv in &args.kv {
        let kv = KvOptions { max_context: Some(longest), ..kv.options.clone() };
        probes.push(Probe::new(engine, &SessionOptions { kv })?);
    }
    if !args.json {
        println!("depth    K/V          step ms  4 rows ms  ratio   K/V MiB");
    }
    let mut depths = args.depths.clone();
    depths.sort_unstable();
    for depth in depths {
        for probe in &mut probes {
            probe.skip_to(depth)?;
        }
        let mut times = vec![[Vec::new(), Vec::new()]; probes.len()];
        for repeat in 0..=args.repeats {
            for (probe, times) in probes.iter_mut().zip(&mut times) {
                for (rows, times) in [1, MOST_ROWS].into_iter().zip(times) {
                    let time = probe.verify(&[300, 500, 700, 900][..rows])?;
                    // The first turn is a warm-up.
                    times.extend((repeat > 0).then_some(1e3 * time.as_secs_f64()));
                }
            }
        }
        for ((NamedKv { name, .. }, probe), times) in args.kv.iter().zip(&probes).zip(times) {
            let ([step, four], bytes) = (times.map(median), probe.kv_bytes());
            if args.json {
                let report = serde_json::json!({"depth": depth, "kv": name, "step_ms": step, "four_rows_ms": four, "kv_bytes": bytes});
                println!("{report}");
            } else {
                let mebibytes = bytes as f64 / f64::from(1 << 20);
                println!("{depth:<8} {name:<10} {step:>9.3} {four:>10.3} {:>6.2} {mebibytes:>9.1}", four / step);
            }
        }
    }
    Ok(())
}
