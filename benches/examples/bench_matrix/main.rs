//! Benchmark matrix: `cargo run --release --example bench_matrix -- --threads 1`.

mod journal;
mod llama;
mod machine;
mod matrix;
mod ours;
mod page;
mod plot;
mod summary;
mod tables;
mod texts;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use foretoken::{Isa, WeightType};
use foretoken_tools::arguments::{NamedKv, pair, quantized_type};
use foretoken_tools::report::count;
use foretoken_tools::{eprintln, println};

use journal::{Event, Journal, Origin, Record, Run, Turn};
use llama::Llama;
use matrix::{Cell, Mode, Plan, Prompt};
use ours::Ours;

/// Measure pairs of checkpoints with every KV cache format, prompt and drafting mode, and write an HTML report.
///
/// Writes runs.ndjson (every measurement, immediately), results.csv and report.html to OUT. The cells of a pair are
/// interleaved, one run of each at a time, so that drifting machine speed affects all of them equally. After an
/// interruption, run it again to measure what is missing; other options add cells, another commit starts over.
///
/// Example: bench_matrix --model e2b-target.gguf --assistant e2b-assistant.gguf --kv f16,balanced --prompts short,long,4k
#[derive(Parser)]
#[command(version)]
pub struct Args {
    /// Target checkpoint; may be repeated. Default: the demo pair.
    #[arg(short, long)]
    model: Vec<PathBuf>,
    /// Assistant checkpoint, one per --model; without any, only prompt-lookup drafters are used.
    #[arg(long)]
    assistant: Vec<PathBuf>,
    /// Quantize floating-point matrices while loading: q4_k, q6_k, q8_0, ...; an unknown type lists all. Default: the
    /// types of the file.
    #[arg(long, value_name = "TYPE", value_parser = quantized_type, conflicts_with_all = ["llama_server", "llama_url"])]
    quantize: Option<WeightType>,
    /// KV cache presets, or formats for both keys and values.
    #[arg(long, value_delimiter = ',', default_value = "f16,balanced")]
    kv: Vec<NamedKv>,
    /// Rows per verification, with the assistant alone; plain decoding is always measured.
    #[arg(long, value_delimiter = ',', default_value = "2,4,6")]
    blocks: Vec<usize>,
    /// auto (ngram-map-k:n=6 and the assistant or NextN head, as the planner chooses), or a list of drafters in order
    /// of priority, as in generate's --spec-type; the planner chooses draft lengths; may be repeated.
    #[arg(long, value_name = "LIST", default_values = ["auto"])]
    mixture: Vec<String>,
    /// Prompt lengths: short (128 tokens), long (512), or a number of tokens: 4k, 16k, 32k.
    #[arg(long, value_delimiter = ',', default_value = "short,long")]
    prompts: Vec<Prompt>,
    /// Prompts of each length, measured together.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    texts: usize,
    /// Text file that prompts are cut from; - is stdin. Default: held-out Rust and this project's sources.
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Tokens after each prompt.
    #[arg(short = 'n', long, default_value_t = 128, value_parser = at_least_two)]
    max_tokens: usize,
    /// Runs of every cell; the median is reported.
    #[arg(long, default_value_t = 5, value_parser = at_least_one)]
    runs: usize,
    /// Number of threads. Default: physical cores.
    #[arg(short, long)]
    threads: Option<usize>,
    /// Instruction set of the CPU kernels. Default: the widest that the processor supports.
    #[arg(long, value_name = "NAME")]
    isa: Option<Isa>,
    /// Accept drafts at random: RATE is the share of rounds that accept the draft; several rates are by position, e.g.
    /// .92,.78,.67,.57. For pairs with synthetic weights.
    #[arg(long, value_name = "RATE,..", value_delimiter = ',', value_parser = rate)]
    simulate_acceptance: Vec<f64>,
    /// Output directory; created if missing.
    #[arg(long, default_value = "target/bench_matrix")]
    out: PathBuf,
    /// Start this llama.cpp server with the same target, for comparison.
    #[arg(long, value_name = "PATH", group = "llama")]
    llama_server: Option<PathBuf>,
    /// Use a llama.cpp server that is already running with the same target.
    #[arg(long, value_name = "URL", group = "llama")]
    llama_url: Option<String>,
    /// Additional arguments for the server, as one string; each repetition starts a separate server.
    /// With --llama-url, only its name in the report.
    #[arg(long, value_name = "ARGS", default_values = [""], allow_hyphen_values = true, requires = "llama")]
    llama_args: Vec<String>,
    /// List the cells and the existing runs without measuring.
    #[arg(long)]
    dry_run: bool,
    /// Regenerate the report and tables of the last commit and machine in OUT without measuring; of the other options,
    /// only --out and --markdown apply.
    #[arg(long, conflicts_with = "dry_run")]
    render: bool,
    /// Print the results as a Markdown table.
    #[arg(long, conflicts_with = "dry_run")]
    markdown: bool,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n >= 1).ok_or_else(|| "must be a number, at least 1".into())
}

/// The first token comes from the prompt's forward pass.
fn at_least_two(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n >= 2).ok_or_else(|| "must be a number, at least 2".into())
}

/// Refused here: NaN would be null in the journal, which then could not be read.
fn rate(text: &str) -> Result<f64, String> {
    text.parse::<f64>().ok().filter(|rate| (0.0..=1.0).contains(rate)).ok_or_else(|| "must be from 0 to 1".into())
}

fn main() -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(tracing::Level::ERROR).init();
    foretoken_tools::run(command)
}

fn command(args: Args) -> Result<()> {
    let path = args.out.join("runs.ndjson");
    if args.dry_run {
        let text = texts::text(args.text.as_deref())?;
        let records = if path.exists() { journal::read(&path)?.0 } else { Vec::new() };
        let done = Done::new(&records, &machine::origin(args.isa));
        plans(&args, &text)?.iter().for_each(|plan| list(plan, &args, &done));
        return Ok(());
    }
    if args.render {
        let records = journal::read(&path)?.0;
        let last = records.last().with_context(|| format!("{}: is empty; measure first", path.display()))?;
        return report(&args, &records, &last.origin);
    }
    std::fs::create_dir_all(&args.out).with_context(|| format!("{}: cannot be created", args.out.display()))?;
    let (mut journal, here) = (Journal::open(&path)?, machine::origin(args.isa));
    let measured = measure_all(&args, &mut journal, &here);
    // Measurements made before an error are still reported.
    measured.and(report(&args, &journal.records, &here))
}

/// Everything to measure, pair by pair.
fn plans(args: &Args, text: &str) -> Result<Vec<Plan>> {
    let (of, with) = (args.model.len(), args.assistant.len());
    ensure!(with == 0 || of > 0, "--assistant needs --model");
    ensure!(with == 0 || with == of, "{of} times --model and {with} times --assistant: pass them in pairs");
    let one = of <= 1 && args.llama_args.len() == 1;
    ensure!(one || args.llama_url.is_none(), "--llama-url is a single server: pass one --model and one --llama-args");
    let text = crc32fast::hash(text.as_bytes());
    let plan = |i: usize| {
        let [model, assistant] = [&args.model, &args.assistant].map(|list| list.get(i).map(PathBuf::as_path));
        let pair = pair(model, assistant)?;
        Plan::new(args, &pair.model, pair.assistant.as_deref(), text)
    };
    (0..of.max(1)).map(plan).collect()
}

/// The runs that count as done: those of this machine and commit.
struct Done<'a>(Vec<&'a Run>);

impl<'a> Done<'a> {
    fn new(records: &'a [Record], here: &Origin) -> Self {
        let own = records.iter().filter(|record| record.origin == *here);
        Self(own.filter_map(|record| if let Event::Run(run) = &record.event { Some(run) } else { None }).collect())
    }

    fn of<'s>(&'s self, plan: &'s Plan, cell: &'s Cell) -> impl Iterator<Item = &'a Run> + 's {
        self.0.iter().copied().filter(move |run| run.setting == plan.setting && run.cell == *cell)
    }

    /// Speculation must not change the text. (llama.cpp rounds differently; the report says whether
    /// its text is the same.)
    fn check(&self, plan: &Plan, run: &Run) -> Result<()> {
        let off = Cell { mode: matrix::OFF.into(), ..run.cell.clone() };
        let free = !plan.setting.simulated_acceptance.is_empty() || run.cell.mode.starts_with(matrix::LLAMA);
        let same = free || self.of(plan, &off).all(|off| off.written == run.written);
        ensure!(same, "the text differs from plain decoding");
        Ok(())
    }
}

fn list(plan: &Plan, args: &Args, done: &Done) {
    let (cells, runs) = (count(plan.cells.len(), "cell"), count(args.runs, "run"));
    println!("{}: {cells}, {runs} of each", plan.setting.pair);
    for (cell, _) in &plan.cells {
        let there = done.of(plan, cell).filter(|run| run.run <= args.runs).count();
        println!("  {cell}{}", if there > 0 { format!(": {there} of {} runs done", args.runs) } else { String::new() });
    }
    plan.left_out.iter().for_each(|what| println!("  skipped: {what}"));
}

fn measure_all(args: &Args, journal: &mut Journal, here: &Origin) -> Result<()> {
    let text = texts::text(args.text.as_deref())?;
    let plans = plans(args, &text)?;
    let mut started = false;
    for plan in &plans {
        plan.left_out.iter().for_each(|what| eprintln!("{}: skipped: {what}", plan.setting.pair));
        // One pair at a time: two large ones do not fit most machines.
        let mut engines: Option<Engines> = None;
        for run in 1..=args.runs {
            let done = Done::new(&journal.records, here);
            let is_missing = |(cell, _): &&(Cell, Mode)| !done.of(plan, cell).any(|other| other.run == run);
            let missing: Vec<_> = plan.cells.iter().filter(is_missing).collect();
            if missing.is_empty() {
                continue;
            }
            let record = |event| Record { origin: here.clone(), event };
            if !std::mem::replace(&mut started, true) {
                journal.append(record(Event::Start { command: machine::command(), time: machine::now() }))?;
            }
            let engines = match &mut engines {
                Some(engines) => engines,
                none => {
                    none.insert(Engines { ours: Ours::load(args, plan, &text)?, servers: HashMap::new(), args, plan })
                }
            };
            let turn = engines.ours.turn(run)?;
            journal.append(record(Event::Turn(turn.clone())))?;
            for (cell, mode) in missing {
                let named = || format!("{}, {cell}, run {run}", plan.setting.pair);
                let measured = engines.measure(cell, mode, &turn).with_context(named)?;
                Done::new(&journal.records, here).check(plan, &measured).with_context(named)?;
                eprintln!("{}: {:.1} tokens/s", named(), measured.tokens_per_second);
                journal.append(record(Event::Run(measured)))?;
            }
        }
    }
    Ok(())
}

/// What computes a pair's cells.
struct Engines<'a> {
    args: &'a Args,
    plan: &'a Plan,
    ours: Ours<'a>,
    servers: HashMap<&'a str, Llama>, // by their arguments
}

impl<'a> Engines<'a> {
    /// Measures a cell once.
    fn measure(&mut self, cell: &Cell, mode: &'a Mode, turn: &Turn) -> Result<Run> {
        match mode {
            Mode::Ours { kv, speculation } => self.ours.run(cell, kv, speculation, turn),
            Mode::Llama { arguments } => {
                let prompts = self.ours.prompts(cell.prompt)?;
                let server = match self.servers.entry(arguments) {
                    Entry::Occupied(server) => server.into_mut(),
                    Entry::Vacant(none) => none.insert(Llama::new(self.args, self.plan, arguments)?),
                };
                server.run(cell, &prompts, self.plan, turn.run)
            }
        }
    }
}

/// Writes the tables and the report for a machine and commit.
fn report(args: &Args, records: &[Record], origin: &Origin) -> Result<()> {
    let records: Vec<&Record> = records.iter().filter(|record| record.origin == *origin).collect();
    if !records.iter().any(|record| matches!(record.event, Event::Run(_))) {
        return Ok(());
    }
    let sections = summary::sections(&records);
    write(&args.out.join("results.csv"), &tables::csv(origin, &records, &sections))?;
    let page = args.out.join("report.html");
    write(&page, &page::page(origin, &records, &sections))?;
    if args.markdown {
        println!("{}", tables::markdown(&sections).trim_end());
    }
    eprintln!("{}", page.display());
    Ok(())
}

/// Replaces a file when its new contents are complete.
fn write(path: &Path, contents: &str) -> Result<()> {
    let aside = path.with_extension("partial");
    let written = std::fs::write(&aside, contents).and_then(|()| std::fs::rename(&aside, path));
    written.with_context(|| path.display().to_string())
}
