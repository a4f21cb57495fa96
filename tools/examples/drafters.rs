//! Compares drafters on five kinds of text: `cargo run --release --example drafters -- --threads 1`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use foretoken::speculative::{BlockSize, Drafters};
use foretoken::{
    EndOfGeneration, Engine, EngineOptions, GenerateOptions, SessionOptions, Speculation, SpeculationOptions,
    Statistics, Stop,
};
use foretoken_tools::arguments::{Pair, Pipelining};
use foretoken_tools::measure::{generate, median};
use foretoken_tools::report::count;
use foretoken_tools::{check_directory_of, demo, input, println};
use serde_json::json;

/// Continue five kinds of text greedily: code that repeats, code that does not, prose, numbers, and an edit of a file
/// of 2000 tokens. Without drafts, with the assistant at every block size, with auto, and with lists of drafters;
/// interleaved, several times; medians are reported. All must generate the same text.
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    pair: Pair,
    /// Block sizes of the assistant alone.
    #[arg(long, value_delimiter = ',', default_value = "2,3,4,6,8")]
    blocks: Vec<usize>,
    /// Lists of drafters in order of priority, whose draft lengths the planner chooses (one list each); auto is always
    /// measured. ngram-mod keeps what it learnt in the previous run, so its figures
    /// here would be those of a repeated text.
    #[arg(long, default_values = ["mtp", "ngram-simple:n=8,mtp", "ngram-map-k:n=6,mtp", "ngram-map-k4v:n=6:m=16,mtp"])]
    mixture: Vec<Drafters>,
    /// Tokens per text.
    #[arg(short = 'n', long, default_value_t = 384)]
    max_tokens: usize,
    /// Number of runs.
    #[arg(long, default_value_t = 5)]
    repeats: usize,
    #[command(flatten)]
    pipelining: Pipelining,
    /// Number of threads. Default: physical cores.
    #[arg(short, long)]
    threads: Option<usize>,
    /// Write all figures to this file as JSON.
    #[arg(long)]
    out: Option<PathBuf>,
}

/// A drafter list and its results.
struct Mode {
    name: String,
    speculation: Speculation,
    speeds: Vec<f64>, // tokens/s of each run
    last: Statistics,
}

impl Mode {
    fn json(&self) -> serde_json::Value {
        let s = &self.last;
        json!({
            "mode": self.name,
            "tokens_per_second": median(self.speeds.clone()),
            "tokens_per_second_sorted": self.speeds,
            "tokens_per_round": s.tokens_per_round(),
            "acceptance_rate": s.acceptance_rate(),
            "rows": s.speculation.rows,
            "reasons": s.speculation.reasons,
            "drafters": s.speculation.drafters,
        })
    }
}

fn main() -> ExitCode {
    foretoken_tools::run(command)
}

fn command(args: Args) -> Result<()> {
    ensure!(args.repeats > 0, "--repeats must be at least 1");
    // Speeds are measured after the first token.
    ensure!(args.max_tokens > 1, "--max-tokens must be at least 2");
    if let Some(out) = &args.out {
        check_directory_of(out)?;
    }
    let engine = Engine::load(&EngineOptions { threads: args.threads, ..args.pair.options()? })?;
    ensure!(engine.has_mtp(), "--assistant: is missing, and the target has no NextN head; pass the target's assistant");
    let mut kinds = Vec::new();
    for (kind, text) in texts()? {
        let prompt = engine.tokenizer()?.encode(&text)?;
        let mut modes = modes(&args);
        measure(&args, &engine, kind, &prompt, &mut modes)?;
        print(kind, prompt.len(), &modes);
        let modes: Vec<_> = modes.iter().map(Mode::json).collect();
        kinds.push(json!({"kind": kind, "prompt_tokens": prompt.len(), "modes": modes}));
    }
    if let Some(out) = &args.out {
        let report = json!({
            "max_tokens": args.max_tokens,
            "repeats": args.repeats,
            "threads": engine.threads(),
            "isa": engine.isa().name(),
            "pipeline_depth": args.pipelining.pipeline_depth,
            "costs": engine.costs(),
            "kinds": kinds,
        });
        std::fs::write(out, serde_json::to_string_pretty(&report)?).with_context(|| out.display().to_string())?;
    }
    Ok(())
}

/// Runs all modes, interleaved.
fn measure(args: &Args, engine: &Engine, kind: &str, prompt: &[u32], modes: &mut [Mode]) -> Result<()> {
    let stop = Stop { end_of_generation: EndOfGeneration::Ignored, ..Stop::default() };
    let plain = GenerateOptions { max_tokens: args.max_tokens, stop, ..GenerateOptions::default() };
    // The first turn is a warm-up, in which the planner learns the costs of rounds.
    for turn in 0..=args.repeats {
        let mut written: Option<Vec<u32>> = None;
        for mode in modes.iter_mut() {
            let options = GenerateOptions { speculation: mode.speculation.clone(), ..plain.clone() };
            let (ids, statistics) = generate(&mut engine.session(&SessionOptions::default())?, prompt, &options)?;
            let same = written.get_or_insert_with(|| ids.clone()) == &ids;
            ensure!(same, "{kind}: {} generates a different text", mode.name);
            if turn > 0 {
                mode.speeds.push(statistics.decode_tokens_per_second());
                mode.last = statistics;
            }
        }
    }
    modes.iter_mut().for_each(|mode| mode.speeds.sort_by(f64::total_cmp));
    Ok(())
}

/// The kinds of text, from the demo pair's held-out prompts and this repository.
fn texts() -> Result<Vec<(&'static str, String)>> {
    let prompts = input::prompts(&demo("prompts.json"))?;
    let prompt = |index: usize| prompts.get(index).cloned().context("prompts.json has too few prompts");
    Ok(vec![
        ("code that repeats", prompt(1)?),
        ("code that does not", prompt(8)?),
        ("prose", prompt(3)?),
        ("numbers", prompt(11)?),
        ("an edit of a given file", edited_file()),
    ])
}

/// Two blocks that are adapted to a type, NAME.
const BLOCKS: &str = r#"impl Serialize for NAME {
    #[inline]
    fn serialize<S>(&self, serializer: S) -> Result<S::Ok, S::Error>
    where
        S: Serializer,
    {
        // The width goes first, so that a reader of another width can refuse.
        let width = std::mem::size_of::<NAME>();
        let mut state = serializer.serialize_struct("NAME", 2)?;
        state.serialize_field("width", &width)?;
        state.serialize_field("value", &self.to_le_bytes())?;
        state.end()
    }
}

impl<'de> Deserialize<'de> for NAME {
    #[inline]
    fn deserialize<D>(deserializer: D) -> Result<Self, D::Error>
    where
        D: Deserializer<'de>,
    {
        let (width, bytes) = deserializer.deserialize_struct("NAME", FIELDS, PairVisitor)?;
        if width != std::mem::size_of::<NAME>() {
            return Err(Error::custom("another width"));
        }
        Ok(NAME::from_le_bytes(bytes))
    }
}

"#;

/// A file of 2000 tokens in which the same two blocks have been adapted to one type after the other, up to the start of
/// the next: an edit that the demo pair, which does not follow instructions, can continue.
fn edited_file() -> String {
    let done = ["u8", "u16", "u32", "u64", "usize", "i8", "i16"].map(|name| BLOCKS.replace("NAME", name));
    done.concat() + "impl Serialize for i32 {"
}

fn modes(args: &Args) -> Vec<Mode> {
    let pipeline = args.pipelining.pipeline();
    let with = |drafters: &Drafters, block| {
        let drafters = drafters.clone();
        Speculation::With(SpeculationOptions { drafters, block, pipeline, ..SpeculationOptions::default() })
    };
    let assistant = Drafters::Priority(vec![foretoken::speculative::DrafterOptions::Mtp]);
    let mut modes = vec![("off".to_owned(), Speculation::Off)];
    modes.extend(args.blocks.iter().map(|rows| (format!("B = {rows}"), with(&assistant, BlockSize::Fixed(*rows)))));
    modes.push(("auto".into(), with(&Drafters::Auto, BlockSize::Measured)));
    modes.extend(args.mixture.iter().map(|list| (name(list), with(list, BlockSize::Measured))));
    let mode = |(name, speculation)| Mode { name, speculation, speeds: Vec::new(), last: Statistics::default() };
    modes.into_iter().map(mode).collect()
}

fn name(list: &Drafters) -> String {
    match list {
        Drafters::Priority(list) | Drafters::Best(list) => {
            list.iter().map(|one| one.kind().name()).collect::<Vec<_>>().join(",")
        }
        _ => "auto".into(),
    }
}

fn print(kind: &str, prompt_tokens: usize, modes: &[Mode]) {
    println!("{kind}, {}", count(prompt_tokens, "prompt token"));
    let off = median(modes[0].speeds.clone());
    for mode in modes {
        let speed = median(mode.speeds.clone());
        let s = &mode.last;
        let rows =
            s.speculation.rows.iter().enumerate().filter(|(_, n)| **n > 0).map(|(rows, n)| format!("{rows}:{n}"));
        println!(
            "  {:24} {speed:8.1} tokens/s {:6.2} x plain {:6.2} tokens per round  {}",
            mode.name,
            speed / off,
            s.tokens_per_round(),
            rows.collect::<Vec<_>>().join(" "),
        );
    }
}
