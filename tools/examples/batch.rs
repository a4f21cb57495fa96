//! Many prompts in one batch: `cargo run --release --example batch -- prompts.txt --sequences 8`.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use clap::Parser;
use foretoken::{
    DraftPipeline, Engine, FinishReason, GenerateOptions, Probe, Sampling, Scheduler, SchedulerOptions, SequenceId,
};
use foretoken_tools::interrupt::{INTERRUPTED, cancel_on_interrupt};
use foretoken_tools::println;
use foretoken_tools::report::count;
use foretoken_tools::sampling::GenerateArgs;
use foretoken_tools::{arguments, demo, describe, input, measure};

/// Continue the prompts of a file, one per line, several at a time in one batch.
///
/// Ctrl-C ends the texts that are being written, and no others are begun; a second one ends the command. The exit code
/// is 130 then. If a prompt fails, the others are still continued, and the exit code is 1.
///
/// Example: batch prompts.txt --sequences 8 --max-tokens 64
///
/// With --measure, print the gain from batching: batch --measure --sequences 1,4,8 --threads 1
/// --no-speculation --ignore-eos
#[derive(Parser)]
#[command(version)]
struct Args {
    /// File with one prompt per line, of which empty ones are skipped; - is stdin. Default: the demo pair's prompts;
    /// with --model, arbitrary tokens.
    file: Option<PathBuf>,
    /// Number of sequences decoded together; with --measure, a list.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "4")]
    sequences: Vec<usize>,
    /// Tokens per arbitrary prompt.
    #[arg(long, value_name = "N", default_value_t = 64, requires = "model", conflicts_with = "file")]
    prompt_tokens: usize,
    /// Maximum rows per forward pass; rows not used by rounds read prompts.
    #[arg(long, value_name = "N", default_value_t = SchedulerOptions::default().max_rows)]
    max_rows: usize,
    /// Print tokens/s for every number of sequences instead of the text, compared with v(N), the cost of a pass over N
    /// rows relative to one row; interleaved, repeated this many times (without TIMES: 5).
    #[arg(long, value_name = "TIMES", num_args = 0..=1, default_missing_value = "5", value_parser = times)]
    measure: Option<usize>,
    #[command(flatten)]
    load: arguments::Load,
    #[command(flatten)]
    drafting: arguments::Drafting,
    #[command(flatten)]
    generate: GenerateArgs,
    #[command(flatten)]
    kv: arguments::Kv,
    /// Print one JSON object: the figures with --measure, otherwise the text of every prompt, why it ended (null if it
    /// was not begun), and its error; docs/commands.md describes its fields.
    #[arg(long)]
    json: bool,
}

impl Args {
    fn max_sequences(&self) -> usize {
        self.sequences.iter().copied().max().unwrap_or(1)
    }
}

/// The value of `--measure`, which takes a FILE after it for its own.
fn times(text: &str) -> Result<usize, String> {
    let times = text.parse().ok().filter(|times| *times > 0);
    times.ok_or_else(|| "TIMES must be a number, at least 1; put a FILE before --measure".into())
}

fn main() -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(tracing::Level::WARN).init();
    foretoken_tools::run(command)
}

fn command(args: Args) -> Result<ExitCode> {
    ensure!(args.sequences.iter().all(|n| (1..=1024).contains(n)), "--sequences must be from 1 to 1024");
    ensure!(args.measure.is_some() || args.sequences.len() == 1, "--sequences is a list only with --measure");
    // v(N) is a pass over N rows.
    let max_rows = args.kv.options().kv.max_round_rows;
    ensure!(
        args.measure.is_none() || args.sequences.iter().all(|n| *n <= max_rows),
        "--sequences must be from 1 to {max_rows} with --measure"
    );
    ensure!(args.max_rows > 0, "--max-rows must be at least 1");
    // Speeds are measured after the first token.
    ensure!(args.measure.is_none() || args.generate.max_tokens() > 1, "--max-tokens must be at least 2 with --measure");
    let listed = listed(&args)?;
    let engine = Engine::load(&args.load.options(&args.drafting)?)?;
    let prompts = prompts(&args, listed.as_deref(), &engine)?;
    let speculation = args.drafting.options(&engine, DraftPipeline::InTurn)?;
    let options = GenerateOptions { speculation, ..args.generate.options(&engine, &Sampling::default())? };
    args.drafting.check_sampled(&options.sampling)?;
    match args.measure {
        Some(times) => gains(&args, &engine, &prompts, &options, times).map(|()| ExitCode::SUCCESS),
        None => texts(&args, &engine, &prompts, &options),
    }
}

/// The prompts of the file or of the demo pair; `None` if they are arbitrary tokens.
fn listed(args: &Args) -> Result<Option<Vec<String>>> {
    match &args.file {
        Some(path) => {
            let text = input::text(path)?;
            let prompts: Vec<_> = text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect();
            ensure!(!prompts.is_empty(), "{}: has no prompts; put one on each line", path.display());
            Ok(Some(prompts))
        }
        None if args.load.model.is_none() => Ok(Some(input::prompts(&demo("prompts.json"))?)),
        None => Ok(None),
    }
}

fn prompts(args: &Args, listed: Option<&[String]>, engine: &Engine) -> Result<Vec<Vec<u32>>> {
    if let Some(texts) = listed {
        return texts.iter().map(|text| Ok(engine.tokenizer()?.encode(text)?)).collect();
    }
    // A context that does not fit memory is refused here, before as many tokens are made.
    let context = engine.session(&args.kv.options())?.kv().max_context();
    let len = args.prompt_tokens;
    ensure!((1..=context).contains(&len), "--prompt-tokens is {len}, must be from 1 to the context of {context}");
    let most = args.max_sequences();
    let ids = measure::ids(engine, len.saturating_add(most));
    Ok((0..most).map(|i| ids[i..i + len].to_vec()).collect())
}

/// Latency does not matter here: prompts are read as fast as possible.
fn scheduler_options(args: &Args) -> SchedulerOptions {
    SchedulerOptions { max_rows: args.max_rows, prompt_slowdown: f64::INFINITY, ..SchedulerOptions::default() }
}

/// What was written after a prompt.
#[derive(Clone, Default)]
struct Written {
    text: String,
    /// `None` if the prompt was not begun, or could not be.
    finish_reason: Option<FinishReason>,
    error: Option<String>,
}

impl Written {
    /// Prints the text of prompt `i`.
    fn print(&self, i: usize) -> std::io::Result<()> {
        let error = self.error.as_ref().map(|error| format!("\n== {} failed: {error}", i + 1)).unwrap_or_default();
        writeln!(std::io::stdout(), "== {}\n{}{error}", i + 1, self.text)
    }
}

/// Continues all prompts, `--sequences` at a time, up to Ctrl-C.
fn texts(args: &Args, engine: &Engine, prompts: &[Vec<u32>], options: &GenerateOptions) -> Result<ExitCode> {
    cancel_on_interrupt(options.cancel.clone());
    let mut scheduler = Scheduler::new(engine, scheduler_options(args));
    let mut running: Vec<(SequenceId, usize)> = Vec::new();
    let mut written = vec![Written::default(); prompts.len()];
    let (mut next, mut printed, mut tokens) = (0, 0, 0);
    let most = args.max_sequences();
    let begins = |next: usize| next < prompts.len() && !options.cancel.is_cancelled();
    let start = Instant::now();
    while begins(next) || scheduler.is_active() {
        while running.len() < most && begins(next) {
            match add(&mut scheduler, engine, &args.kv, &prompts[next], options) {
                Ok(id) => running.push((id, next)),
                Err(error) => written[next].error = Some(describe::<Args>(&error)),
            }
            next += 1;
        }
        for event in scheduler.step() {
            let Some((_, prompt)) = running.iter().find(|(id, _)| *id == event.id) else { continue };
            let of_prompt = &mut written[*prompt];
            match event.piece {
                Ok(piece) => {
                    of_prompt.text += &piece.text;
                    tokens += piece.tokens.len();
                }
                Err(error) => of_prompt.error = Some(describe::<Args>(&error.into())),
            }
            if event.finish_reason.is_some() {
                of_prompt.finish_reason = event.finish_reason;
                scheduler.remove(event.id);
                running.retain(|(id, _)| *id != event.id);
            }
        }
        // In order, each as soon as those before it are complete: a killed run has written them.
        while !args.json && printed < next && running.iter().all(|(_, prompt)| *prompt != printed) {
            written[printed].print(printed)?;
            printed += 1;
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    if args.json {
        writeln!(std::io::stdout(), "{}", json(&written, tokens, seconds))?;
    }
    let all = count(prompts.len(), "prompt");
    let begun = if next < prompts.len() { format!("{next} of {all}") } else { all };
    let (per_second, tokens) = (tokens as f64 / seconds, count(tokens, "token"));
    eprintln!("{begun}, {most} at a time: {tokens} at {per_second:.1} tokens/s in total");
    let is_cut = |of: &Written| of.finish_reason == Some(FinishReason::Cancelled);
    let is_interrupted = next < prompts.len() || written.iter().any(is_cut);
    failures(&written)?;
    Ok(if is_interrupted { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}

/// One JSON object, with a list over all prompts for each kind of result.
fn json(written: &[Written], tokens: usize, seconds: f64) -> serde_json::Value {
    serde_json::json!({
        "texts": written.iter().map(|of| &of.text).collect::<Vec<_>>(),
        "finish_reasons": written.iter().map(|of| of.finish_reason.map(FinishReason::name)).collect::<Vec<_>>(),
        "errors": written.iter().map(|of| &of.error).collect::<Vec<_>>(),
        "generated_tokens": tokens,
        "seconds": seconds,
    })
}

/// # Errors
/// If a prompt failed.
fn failures(written: &[Written]) -> Result<()> {
    let mut failed = written.iter().enumerate().filter_map(|(i, of)| Some((i + 1, of.error.as_ref()?)));
    match failed.next() {
        Some((first, error)) => {
            bail!("{} of {} prompts failed; prompt {first}: {error}", 1 + failed.count(), written.len())
        }
        None => Ok(()),
    }
}

fn add(
    scheduler: &mut Scheduler,
    engine: &Engine,
    kv: &arguments::Kv,
    prompt: &[u32],
    options: &GenerateOptions,
) -> Result<SequenceId> {
    let session = engine.session(&kv.options())?;
    Ok(scheduler.add(session, prompt, options).map_err(foretoken::Error::from)?)
}

/// Total tokens per second of several sequences, after their prompts.
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
    Ok(tokens as f64 / time.as_secs_f64())
}

/// The gain from batching, and the gain if forward passes were the only cost.
fn gains(args: &Args, engine: &Engine, prompts: &[Vec<u32>], options: &GenerateOptions, times: usize) -> Result<()> {
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
