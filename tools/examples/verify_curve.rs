//! Cost of verification: `cargo run --release --example verify_curve -- --threads 1`.

use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Result, ensure};
use clap::Parser;
use foretoken::{Engine, Probe, SessionOptions};
use foretoken_kernels::measure::int8_multiply_adds;
use foretoken_tools::arguments::{Compute, Pair};
use foretoken_tools::measure::{self, Rollback};
use foretoken_tools::println;
use foretoken_tools::progress::StatusLine;
use foretoken_tools::report::{above_bandwidth, count, percent};
use serde_json::json;

/// Measure v(B), the cost of verifying B rows relative to one row, compared with the machine's best
/// bandwidth and multiply rate.
///
/// Example: verify_curve --model e2b.gguf --assistant e2b-assistant.gguf --threads 1
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    pair: Pair,
    #[command(flatten)]
    compute: Compute,
    /// Positions in the cache during the measurement.
    #[arg(long, default_value_t = 64)]
    depth: usize,
    /// Measurements of each row count, interleaved; the median is reported.
    #[arg(long, default_value_t = 7)]
    repeats: usize,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

const MOST_ROWS: usize = 16;
const PREFILL: usize = 512;
/// Rounds whose rollback is measured: rows, and committed rows.
const ROUNDS: [(usize, usize); 4] = [(3, 1), (3, 3), (5, 1), (5, 5)];
/// Pairs of passes per repeat: a rollback is a small difference of large times.
const ROLLBACKS: usize = 9;

fn main() -> ExitCode {
    foretoken_tools::run(command)
}

fn command(args: Args) -> Result<()> {
    ensure!(args.repeats > 0, "--repeats must be at least 1");
    let engine = Engine::load(&args.compute.options(args.pair.options()?))?;
    check_depth(&args, &engine)?;
    let measured = measure_all(&args, &engine)?;
    print(&args, &engine, &measured);
    Ok(())
}

/// Checks that what is measured fits the context.
fn check_depth(args: &Args, engine: &Engine) -> Result<()> {
    // Only a recurrent state has a rollback to measure, whose rounds commit rows.
    let committed = match Probe::new(engine, &SessionOptions::default())?.recurrent_bytes() {
        0 => 0,
        _ => ROUNDS.iter().map(|(_, keep)| keep).sum::<usize>().saturating_mul(args.repeats.saturating_mul(ROLLBACKS)),
    };
    let (depth, rows) = (args.depth, committed.saturating_add(MOST_ROWS));
    let context = engine.target().max_position_embeddings();
    ensure!(
        depth.saturating_add(rows) <= context,
        "--depth: {depth} positions and {rows} rows do not fit the context of {context}; lower --depth or --repeats"
    );
    Ok(())
}

/// What is printed.
struct Measured {
    /// Prompt tokens per second.
    prefill: f64,
    /// Milliseconds of verifying 1, 2, ... rows.
    ms: Vec<f64>,
    /// Milliseconds of a draft step.
    draft_ms: Option<f64>,
    rollbacks: Vec<Rollback>,
    /// Best read bandwidth in GB/s.
    read: Option<f64>,
    /// Best rate of 8-bit multiply-adds of vectors, in billions per second.
    peak: Option<f64>,
}

fn measure_all(args: &Args, engine: &Engine) -> Result<Measured> {
    let status = StatusLine::new(&format!("measuring a prompt of {PREFILL} tokens"));
    let mut probe = Probe::new(engine, &SessionOptions::default())?;
    let prefill = PREFILL as f64 / probe.read(&measure::ids(engine, PREFILL))?.as_secs_f64();
    drop(probe);

    status.set(&format!("measuring passes over 1 to {MOST_ROWS} rows"));
    let rows: Vec<usize> = (1..=MOST_ROWS).collect();
    let curve = measure::curve(engine, args.depth, &rows, args.repeats)?;
    let ms = curve.verify.into_iter().map(|(_, ms)| ms).collect();
    status.set("measuring rollbacks");
    let rollbacks = measure::rollback(engine, args.depth, &ROUNDS, ROLLBACKS * args.repeats)?;
    status.set("measuring the read bandwidth");
    let read = measure::read_bandwidth(engine);
    status.set("measuring the multiply rate");
    let peak = if engine.device().is_none() { peak_multiply_adds(engine) } else { None };
    Ok(Measured { prefill, ms, draft_ms: curve.draft, rollbacks, read, peak })
}

fn print(args: &Args, engine: &Engine, measured: &Measured) {
    let (target, Measured { prefill, ms, draft_ms, rollbacks, read, peak }) = (engine.target(), measured);
    let v: Vec<f64> = ms.iter().map(|rows| rows / ms[0]).collect();
    // Share of a round including its drafts.
    let share = |r: &Rollback| r.rollback / (r.verify + r.rollback + draft_ms.unwrap_or(0.0) * (r.rows - 1) as f64);
    let processor = || format!("{}, {}", count(engine.threads(), "thread"), engine.isa().name());
    let computes = engine.device().unwrap_or_else(processor);
    if args.json {
        let report = json!({
            "v": v,
            "ms": ms,
            "draft_ms": draft_ms,
            "rollback": rollbacks.iter().map(|r| json!({
                "rows": r.rows, "keep": r.keep, "verify_ms": r.verify, "ms": r.rollback, "of_round": share(r),
            })).collect::<Vec<_>>(),
            "prefill_512_tokens_per_second": prefill,
            "read_gb_per_second": read,
            "peak_gmac_per_second": peak,
            "step_bytes": target.step_cost().bytes,
            "step_multiply_adds": target.step_cost().multiply_adds,
            "threads": engine.threads(),
            "isa": engine.isa().name(),
            "device": engine.device(),
        });
        println!("{report}");
        return;
    }
    let (bytes, multiply_adds) = (target.step_cost().bytes as f64 / 1e9, target.step_cost().multiply_adds as f64 / 1e9);
    println!("{computes}, depth {}", args.depth);
    let known = |x: Option<f64>, unit: &str| x.map_or("unknown".into(), |x| format!("{x:.1} {unit}"));
    println!("reads {} and multiplies {} at best", known(*read, "GB/s"), known(*peak, "G/s"));
    println!("a step reads {bytes:.3} GB of weights and does {multiply_adds:.2} G multiply-adds per row\n");
    println!("rows      ms   v(B)   GB/s  of best   G/s");
    let of_best: Vec<f64> = ms.iter().map(|ms| 1e5 * bytes / ms / read.unwrap_or(f64::NAN)).collect();
    for (rows, ((ms, v), of_best)) in (1..).zip(ms.iter().zip(&v).zip(of_best.iter().copied())) {
        let per_second = |amount: f64| amount / ms * 1e3;
        let rate = per_second(multiply_adds * f64::from(rows));
        println!("{rows:4} {ms:7.3} {v:6.2} {:6.1} {:>8} {rate:5.0}", per_second(bytes), percent(of_best));
    }
    above_bandwidth(&of_best).iter().for_each(|remark| println!("{remark}"));
    if let Some(draft_ms) = draft_ms {
        println!("\na draft step takes {draft_ms:.3} ms");
    }
    for r in rollbacks {
        let (rows, keep, ms, percent) = (r.rows, r.keep, r.rollback, 100.0 * share(r));
        println!("a round of {rows} rows that commits {keep} replays them in {ms:.3} ms, {percent:.1} % of the round");
    }
    println!("a prompt of {PREFILL} tokens is processed at {prefill:.0} tokens/s");
}

/// Billions of 8-bit multiply-adds per second on all threads; `None` if the processor has no instruction for them.
fn peak_multiply_adds(engine: &Engine) -> Option<f64> {
    const ROUNDS: usize = 20_000_000;
    int8_multiply_adds(engine.isa(), 1)?;
    let (start, done) = (Instant::now(), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..engine.threads() {
            scope.spawn(|| {
                let (multiply_adds, _) = int8_multiply_adds(engine.isa(), ROUNDS).unwrap_or_default();
                done.fetch_add(multiply_adds, Ordering::Relaxed);
            });
        }
    });
    Some(done.into_inner() as f64 / 1e9 / start.elapsed().as_secs_f64())
}
