//! Generates text: `cargo run --release --example generate -- "fn main() {"`.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use clap::Parser;
use foretoken::speculative::{Costs, Trace};
use foretoken::{Engine, GenerateOptions};
use foretoken_tools::text::Text;
use foretoken_tools::{arguments, report};

/// Generate text with a Gemma 4 and its assistant.
///
/// With nothing given, the demo pair in models/demo continues a piece of Rust.
///
/// Example: generate "Why is the sky blue?" --chat --model google/gemma-4-E2B-it --assistant google/gemma-4-E2B-it-assistant
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    prompt: arguments::Prompt,
    #[command(flatten)]
    load: arguments::Load,
    #[command(flatten)]
    drafting: arguments::Drafting,
    #[command(flatten)]
    text: Text,
    #[command(flatten)]
    kv: arguments::Kv,
    /// Measured costs of this machine; made if missing, and written back.
    #[arg(long, value_name = "FILE")]
    costs: Option<PathBuf>,
    /// Accept drafts by chance: RATE is the share of rounds that accept the draft, by position if several are given, as
    /// .92,.78,.67,.57. Measures speed, and the text is meaningless.
    #[arg(long, value_name = "RATE,..", value_delimiter = ',')]
    simulate_acceptance: Vec<f64>,
    /// Write a trace of the rounds, a line of JSON each; - is stderr.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
    /// Print on stderr how K and V are stored, and what drafters and planner did.
    #[arg(long)]
    stats: bool,
}

fn main() -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(tracing::Level::WARN).init();
    foretoken_tools::run(generate)
}

fn generate(args: Args) -> Result<()> {
    let start = Instant::now();
    let engine = Engine::load(&args.load.options(&args.drafting)?)?;
    let load_seconds = start.elapsed().as_secs_f64();
    if let Some(path) = args.costs.as_deref().filter(|path| path.exists()) {
        engine.set_costs(Costs::load(path, engine.costs().machine())?)?;
    }
    let prompt = args.prompt.ids(&engine)?;
    let mut session = engine.session(&args.kv.options())?;
    let kv = report::kv(session.kv());
    let mut generation = session.generate(&prompt, &options(&args, &engine)?)?;
    let (mut text, mut tokens, mut out) = (String::new(), Vec::new(), std::io::stdout().lock());
    for piece in generation.by_ref() {
        let piece = piece?;
        if !args.json {
            write!(out, "{}", piece.text)?;
            out.flush()?;
        }
        text += &piece.text;
        tokens.extend(piece.tokens);
    }
    let statistics = generation.statistics().clone();
    drop(generation);
    if let Some(path) = &args.costs {
        engine.costs().save(path)?;
    }
    if let (Some(path), Some(cache)) = (&args.drafting.ngram_dynamic, session.learnt_ngrams()) {
        cache.save(path)?;
    }
    if args.json {
        let own = serde_json::json!({"text": text, "tokens": tokens, "load_seconds": load_seconds});
        writeln!(out, "{}", report::json(own, &statistics, &session))?;
    } else {
        writeln!(out)?;
    }
    if args.stats {
        eprint!("{kv}{}", report::details(&statistics, session.kv_bytes()));
    }
    eprintln!("{statistics}");
    Ok(())
}

fn options(args: &Args, engine: &Engine) -> Result<GenerateOptions> {
    let trace = args.trace.as_deref().map(|path| match path.to_str() {
        Some("-") => Ok(Trace::stderr()),
        _ => Trace::file(path),
    });
    let defaults = engine.sampling_defaults().filter(|_| args.prompt.chat);
    let text = args.text.options(engine, &defaults.cloned().unwrap_or_default())?;
    if defaults.is_some() && text.sampling.temperature > 0.0 {
        eprintln!("{}", report::sampling(&text.sampling));
    }
    Ok(GenerateOptions {
        speculation: args.drafting.options(engine)?,
        simulate_acceptance: args.simulate_acceptance.clone(),
        trace: trace.transpose()?,
        ..text
    })
}
