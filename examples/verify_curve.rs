//! What a verification costs: `cargo run --release --example verify_curve -- --threads 1`.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Parser;
use foretoken::gemma4::{Output, Wanted};
use foretoken::kv::KvCache;
use foretoken::nn::Arena;
use foretoken::{Engine, EngineOptions, SessionOptions};
use foretoken_kernels::measure;

/// Measure v(B), the cost of verifying B rows in single steps, beside what the machine can do at best.
///
/// Example: verify_curve --model e2b.gguf --assistant e2b-assistant.gguf --threads 1
#[derive(Parser)]
#[command(version)]
struct Args {
    /// The target's checkpoint; by default, the demo pair.
    #[arg(long)]
    model: Option<PathBuf>,
    /// The assistant's checkpoint.
    #[arg(long)]
    assistant: Option<PathBuf>,
    /// Threads; by default, the physical cores.
    #[arg(long)]
    threads: Option<usize>,
    /// Positions in the cache when a step is measured.
    #[arg(long, default_value_t = 64)]
    depth: usize,
    /// Measurements of each row count, taken in turn; the median counts.
    #[arg(long, default_value_t = 7)]
    repeats: usize,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

const MOST_ROWS: usize = 16;
const PREFILL: usize = 512;

fn main() -> Result<()> {
    let args = Args::parse();
    let demo = |part: &str| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo/")).join(part);
    let engine = Engine::load(&EngineOptions {
        assistant: args.assistant.clone().or_else(|| args.model.is_none().then(|| demo("assistant"))),
        threads: args.threads,
        ..EngineOptions::new(args.model.clone().unwrap_or_else(|| demo("target")))
    })?;
    engine.run(|| measure_all(&args, &engine))
}

fn measure_all(args: &Args, engine: &Engine) -> Result<()> {
    let target = engine.target();
    let vocab = target.config().vocab_size as u32;
    let ids: Vec<u32> = (0..args.depth.max(PREFILL) as u32).map(|i| (300 + i * 7919) % vocab).collect();
    let cache = || -> Result<KvCache> {
        let options = SessionOptions::default();
        Ok(KvCache::new(target.kv_layout(), &options.kv, usize::MAX / 2, engine.isa())?)
    };

    let mut kv = cache()?;
    let start = Instant::now();
    let output = forward(engine, &mut kv, &ids[..PREFILL], Wanted::Last, Keep::All)?;
    let prefill = PREFILL as f64 / start.elapsed().as_secs_f64();

    let mut kv = cache()?;
    for chunk in ids[..args.depth].chunks(kv.max_round_rows()) {
        forward(engine, &mut kv, chunk, Wanted::Nothing, Keep::All)?;
    }
    let mut verify = vec![Vec::new(); MOST_ROWS];
    let mut draft = Vec::new();
    for repeat in 0..=args.repeats {
        for (rows, times) in (1..).zip(&mut verify) {
            let start = Instant::now();
            forward(engine, &mut kv, &ids[..rows], Wanted::All, Keep::Nothing)?;
            // The first turn only warms up.
            times.extend((repeat > 0).then(|| 1e3 * start.elapsed().as_secs_f64()));
        }
        if let (Some(assistant), Some(output)) = (engine.assistant(), &output) {
            let start = Instant::now();
            assistant.step(target, ids[0], &output.hidden, kv.committed())?;
            draft.extend((repeat > 0).then(|| 1e3 * start.elapsed().as_secs_f64()));
        }
    }
    let ms: Vec<f64> = verify.into_iter().map(median).collect();
    let v: Vec<f64> = ms.iter().map(|rows| rows / ms[0]).collect();
    let draft_ms = engine.assistant().map(|_| median(draft));
    let (read, peak) = (read_bandwidth(engine).context("no memory to measure with")?, peak_multiply_adds(engine));
    if args.json {
        let report = serde_json::json!({
            "v": v,
            "ms": ms,
            "draft_ms": draft_ms,
            "prefill_512_tokens_per_second": prefill,
            "read_gb_per_second": read,
            "peak_gmac_per_second": peak,
            "step_bytes": target.step_cost().bytes,
            "step_multiply_adds": target.step_cost().multiply_adds,
            "threads": engine.threads(),
            "isa": engine.isa().name(),
        });
        println!("{report}");
        return Ok(());
    }
    let (bytes, multiply_adds) = (target.step_cost().bytes as f64 / 1e9, target.step_cost().multiply_adds as f64 / 1e9);
    println!("{} threads, {}, depth {}", engine.threads(), engine.isa().name(), args.depth);
    println!(
        "reads {read:.1} GB/s and multiplies {} at best",
        peak.map_or("unknown".into(), |p| format!("{p:.0} G/s"))
    );
    println!("a step reads {bytes:.3} GB of weights and does {multiply_adds:.2} G multiply-adds a row\n");
    println!("rows      ms   v(B)   GB/s   G/s");
    for (rows, (ms, v)) in (1..).zip(ms.iter().zip(&v)) {
        let per_second = |amount: f64| amount / ms * 1e3;
        let rate = per_second(multiply_adds * f64::from(rows));
        println!("{rows:4} {ms:7.2} {v:6.2} {:6.1} {rate:5.0}", per_second(bytes));
    }
    if let Some(draft_ms) = draft_ms {
        println!("\na draft step takes {draft_ms:.2} ms");
    }
    println!("a prompt of {PREFILL} tokens is read at {prefill:.0} tokens/s");
    Ok(())
}

enum Keep {
    All,
    Nothing,
}

fn forward(engine: &Engine, kv: &mut KvCache, ids: &[u32], wanted: Wanted, keep: Keep) -> Result<Option<Output>> {
    let mut round = kv.begin_round(ids.len())?;
    let output = engine.target().forward(ids, &mut round, wanted).context("a forward pass")?;
    if let Keep::All = keep {
        round.commit(ids.len());
    }
    Ok(output)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// The best of three passes over more memory than any cache holds, all threads at once.
fn read_bandwidth(engine: &Engine) -> Option<f64> {
    const BYTES: usize = 1 << 30;
    // The memory that packed weights lie in: with small pages, reading is slower.
    let mut piece = Arena::default().take(BYTES)?;
    piece.as_mut_slice().fill(1);
    let data = piece.as_slice();
    let pass = || {
        let start = Instant::now();
        let part = data.len() / engine.threads();
        rayon::scope(|scope| {
            for part in data.chunks(part) {
                scope.spawn(move |_| {
                    std::hint::black_box(measure::read_all(engine.isa(), part));
                });
            }
        });
        BYTES as f64 / 1e9 / start.elapsed().as_secs_f64()
    };
    Some((0..3).map(|_| pass()).fold(0.0, f64::max))
}

/// Billions of 8-bit multiply-adds per second, all threads at once; `None` if the processor has no instruction for them.
fn peak_multiply_adds(engine: &Engine) -> Option<f64> {
    const ROUNDS: usize = 20_000_000;
    measure::int8_multiply_adds(engine.isa(), 1)?;
    let start = Instant::now();
    rayon::scope(|scope| {
        for _ in 0..engine.threads() {
            scope.spawn(|_| {
                std::hint::black_box(measure::int8_multiply_adds(engine.isa(), ROUNDS));
            });
        }
    });
    let all = 64.0 * 16.0 * ROUNDS as f64 * engine.threads() as f64;
    Some(all / 1e9 / start.elapsed().as_secs_f64())
}
