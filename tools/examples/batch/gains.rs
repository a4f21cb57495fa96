//! The gain from batching.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use foretoken::{Engine, GenerateOptions, Probe, Scheduler};
use foretoken_tools::{measure, println};

use crate::{Args, add, scheduler_options};

/// Total tokens per second of several sequences, after their prompts.
///
/// # Errors
/// The engine's, or if every sequence ends before a pass that reads no prompt.
fn together(
    args: &Args,
    engine: &Engine,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
    sequences: usize,
) -> Result<f64> {
    let mut scheduler = Scheduler::new(engine, scheduler_options(args));
    let ids: Result<Vec<_>> =
        (0..sequences).map(|i| add(&mut scheduler, engine, &args.kv, &prompts[i % prompts.len()], options)).collect();
    let ids = ids?;
    let mut reading = ids.len();
    let (mut tokens, mut time) = (0, Duration::ZERO);
    while scheduler.is_active() {
        let (start, decoding) = (Instant::now(), reading == 0);
        let events = scheduler.step();
        if decoding {
            time += start.elapsed();
        }
        for event in events {
            let written = event.piece?.tokens.len();
            tokens += if decoding { written } else { 0 };
        }
        reading = ids.iter().filter_map(|id| scheduler.statistics(*id)).filter(|s| s.generated_tokens == 0).count();
    }
    ensure!(tokens > 0, "--measure: the texts end with their first tokens; use other prompts, or pass --ignore-eos");
    Ok(tokens as f64 / time.as_secs_f64())
}

/// The gain from batching, and the gain if forward passes were the only cost.
pub fn print(
    args: &Args,
    engine: &Engine,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
    times: usize,
) -> Result<()> {
    let mut probe = Probe::new(engine, &args.kv.options())?;
    let ids = measure::ids(engine, prompts[0].len().max(1024));
    probe.read(&prompts[0])?;
    // Fails here, not after a measurement, if the largest pass does not fit the context.
    probe.verify(&ids[..args.max_sequences()])?;
    let mut single = Vec::new();
    let mut measured: Vec<_> = args.sequences.iter().map(|n| (*n, Vec::new(), Vec::new())).collect();
    for time in 0..=times {
        let one = together(args, engine, prompts, options, 1)?;
        let pass_of_one = probe.verify(&ids[..1])?.as_secs_f64();
        // The first turn is a warm-up.
        single.extend((time > 0).then_some(one));
        for (n, speeds, v) in &mut measured {
            let speed = together(args, engine, prompts, options, *n)?;
            let pass = probe.verify(&ids[..*n])?.as_secs_f64();
            speeds.extend((time > 0).then_some(speed));
            v.extend((time > 0).then_some(pass / pass_of_one));
        }
    }
    let one = measure::median(single);
    let rows = measured.into_iter().map(|(n, speeds, v)| {
        let (speed, v) = (measure::median(speeds), measure::median(v));
        (n, speed, speed / one, v, speed / one / (n as f64 / v))
    });
    if args.json {
        let rows = rows.map(|(n, speed, gain, v, share)| {
            serde_json::json!({"sequences": n, "tokens_per_second": speed, "gain": gain, "v": v, "of_n_over_v": share})
        });
        let rows: Vec<_> = rows.collect();
        println!("{}", serde_json::json!({"one_sequence": one, "batches": rows, "threads": engine.threads()}));
        return Ok(());
    }
    println!("one sequence: {one:.1} tokens/s\n");
    println!("sequences  tokens/s   gain   v(N)  of N / v(N)");
    for (n, speed, gain, v, share) in rows {
        println!("{n:9} {speed:9.1} {gain:6.2} {v:6.2} {:8.1} %", 100.0 * share);
    }
    Ok(())
}
