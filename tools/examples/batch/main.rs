//! Many prompts in one batch: `cargo run --release --example batch -- prompts.txt --sequences 8`.

mod gains;
mod texts;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::Parser;
use foretoken::{DraftPipeline, Engine, GenerateOptions, Sampling, Scheduler, SchedulerOptions, SequenceId};
use foretoken_tools::sampling::GenerateArgs;
use foretoken_tools::{arguments, demo, input, measure};

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
    foretoken_tools::log_warnings();
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
    args.drafting.check_dynamic()?;
    let listed = listed(&args)?;
    let engine = Engine::load(&args.load.options(&args.drafting)?)?;
    let prompts = prompts(&args, listed.as_deref(), &engine)?;
    let speculation = args.drafting.options(&engine, DraftPipeline::InTurn)?;
    let options = GenerateOptions { speculation, ..args.generate.options(&engine, &Sampling::default())? };
    args.drafting.check_effects(&engine, &options.speculation, &options.sampling)?;
    match args.measure {
        Some(times) => gains::print(&args, &engine, &prompts, &options, times).map(|()| ExitCode::SUCCESS),
        None => texts::print(&args, &engine, &prompts, &options),
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
