//! What context costs: `cargo run --release --example depth -- --threads 1`.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Parser;
use foretoken::gemma4::Wanted;
use foretoken::kv::{KvAccess, KvCache, KvFormat, KvLayout, KvOptions, KvPreset};
use foretoken::{Engine, EngineOptions};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

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
    let mut rng = StdRng::seed_from_u64(1);
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
            while kv.len() < depth {
                fill(target.kv_layout(), kv, kv.max_round_rows().min(depth - kv.len()), &mut rng)?;
            }
        }
        let mut times = vec![[Vec::new(), Vec::new()]; caches.len()];
        for repeat in 0..=args.repeats {
            for (kv, times) in caches.iter_mut().zip(&mut times) {
                for (rows, times) in [1, 4].into_iter().zip(times) {
                    let start = Instant::now();
                    let mut round = kv.begin_round(rows)?;
                    target.forward(&[300, 500, 700, 900][..rows], &mut round, Wanted::All)?;
                    drop(round);
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

/// Commits rows of noise, in no time beside a prefill: what a step costs does not depend on what K and V say.
fn fill(layout: KvLayout, kv: &mut KvCache, rows: usize, rng: &mut StdRng) -> Result<()> {
    let mut round = kv.begin_round(rows)?;
    for (index, store) in layout.stores.iter().enumerate() {
        let layer = layout.store_of_layer.iter().position(|of| *of == index).context("a store without a layer")?;
        let mut noise = || {
            // As large as normed rows are: elements of variance 1.
            let count = rows * store.num_kv_heads * store.head_dim;
            let noise = (0..count).map(|_| rng.random_range(-1.7f32..1.7)).collect();
            foretoken::nn::tensor(noise, (rows, store.num_kv_heads, store.head_dim))
        };
        round.append(layer, &noise()?, &noise()?)?;
    }
    round.commit(rows);
    Ok(())
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
