//! What context costs: `cargo run --release --example depth -- --threads 1`.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Parser;
use foretoken::gemma4::{Target, Wanted};
use foretoken::kv::{KvCache, KvFormat, KvOptions, KvPreset};
use foretoken::{Engine, EngineOptions};

/// Measure single steps and verifications of four rows deep in a context, for several ways to keep K and V in turn.
///
/// Example: depth --model e2b.gguf --depths 4096,16384 --kv f16,balanced,turbo3 --threads 1
#[derive(Parser)]
#[command(version)]
struct Args {
    /// The target's checkpoint; by default, the demo pair's.
    #[arg(long)]
    model: Option<PathBuf>,
    /// Positions in the cache.
    #[arg(long, value_delimiter = ',', default_value = "512,1024,2048")]
    depths: Vec<usize>,
    /// Presets, or formats of both keys and values.
    #[arg(long, value_delimiter = ',', default_value = "f16,balanced,turbo3,q8_0")]
    kv: Vec<String>,
    /// Threads; by default, the physical cores.
    #[arg(long)]
    threads: Option<usize>,
    /// Measurements of each, in turn; the median counts.
    #[arg(long, default_value_t = 7)]
    repeats: usize,
    /// Print one JSON object per line instead of a table.
    #[arg(long)]
    json: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let demo = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo/target"));
    let model = args.model.clone().unwrap_or(demo);
    let engine = Engine::load(&EngineOptions { threads: args.threads, ..EngineOptions::new(model) })?;
    engine.run(|| measure(&args, &engine))
}

fn measure(args: &Args, engine: &Engine) -> Result<()> {
    let target = engine.target();
    let longest = args.depths.iter().max().context("no depths")? + 16;
    let vocab = target.config().vocab_size as u32;
    let ids: Vec<u32> = (0..longest as u32).map(|i| (300 + i * 7919) % vocab).collect();
    let mut caches = Vec::new();
    for name in &args.kv {
        let options = KvOptions { max_context: Some(longest), ..options(name)? };
        caches.push(KvCache::new(target.kv_layout(), &options, longest, engine.isa())?);
    }
    if !args.json {
        println!("depth    K/V          step ms  4 rows ms  ratio   K/V MiB");
    }
    let mut depths = args.depths.clone();
    depths.sort_unstable();
    for depth in depths {
        for kv in &mut caches {
            let rest = &ids[kv.len()..depth.max(kv.len())];
            for chunk in rest.chunks(kv.max_round_rows()) {
                pass(target, kv, chunk, Wanted::Nothing, chunk.len())?;
            }
        }
        let mut times = vec![[Vec::new(), Vec::new()]; caches.len()];
        for repeat in 0..=args.repeats {
            for (kv, times) in caches.iter_mut().zip(&mut times) {
                for (rows, times) in [1, 4].into_iter().zip(times) {
                    let start = Instant::now();
                    pass(target, kv, &ids[..rows], Wanted::All, 0)?;
                    // The first turn only warms up.
                    times.extend((repeat > 0).then(|| 1e3 * start.elapsed().as_secs_f64()));
                }
            }
        }
        for ((name, kv), times) in args.kv.iter().zip(&caches).zip(times) {
            let [step, four] = times.map(median);
            if args.json {
                let bytes = kv.bytes();
                let report = serde_json::json!({"depth": depth, "kv": name, "step_ms": step, "four_rows_ms": four, "kv_bytes": bytes});
                println!("{report}");
            } else {
                let mebibytes = kv.bytes() as f64 / f64::from(1 << 20);
                println!("{depth:<8} {name:<10} {step:>9.2} {four:>10.2} {:>6.2} {mebibytes:>9.1}", four / step);
            }
        }
    }
    Ok(())
}

/// A preset, or one format for keys and values.
fn options(name: &str) -> Result<KvOptions> {
    if let Ok(preset) = name.parse::<KvPreset>() {
        return Ok(preset.into());
    }
    let format: KvFormat = name.parse().map_err(anyhow::Error::msg)?;
    Ok(KvOptions { key: format, value: format, ..KvOptions::default() })
}

/// Runs `ids` behind what the cache has, and keeps the first `keep` of them.
fn pass(target: &Target, kv: &mut KvCache, ids: &[u32], wanted: Wanted, keep: usize) -> Result<()> {
    let mut round = kv.begin_round(ids.len())?;
    target.forward(ids, &mut round, wanted)?;
    round.commit(keep);
    Ok(())
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
