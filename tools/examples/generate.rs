//! Generates text: `cargo run --release --example generate -- "fn main() {"`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, ensure};
use clap::Parser;
use foretoken::speculative::{Costs, Trace};
use foretoken::{Engine, FinishReason, GenerateOptions, Speculation};
use foretoken_tools::interrupt::{INTERRUPTED, cancel_on_interrupt};
use foretoken_tools::prompt::Prompt;
use foretoken_tools::reply::{Reply, Shown};
use foretoken_tools::sampling::GenerateArgs;
use foretoken_tools::{arguments, check_directory_of, describe, eprintln, println, report};

/// Generate text with a Gemma 4 and its assistant, or a Qwen3.5.
///
/// Without arguments, the demo pair in models/demo continues a Rust snippet. Ctrl-C ends the generation, a second one
/// the command; the exit code is 130 then.
///
/// Example: generate "Why is the sky blue?" --chat --model google/gemma-4-E2B-it --assistant google/gemma-4-E2B-it-assistant
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    prompt: Prompt,
    #[command(flatten)]
    load: arguments::Load,
    #[command(flatten)]
    drafting: arguments::Drafting,
    #[command(flatten)]
    pipelining: arguments::Pipelining,
    #[command(flatten)]
    generate: GenerateArgs,
    #[command(flatten)]
    kv: arguments::Kv,
    /// Measured costs of this machine; created if missing, and updated.
    #[arg(long, value_name = "FILE")]
    costs: Option<PathBuf>,
    /// Accept drafts at random: RATE is the share of rounds that accept the draft; several rates are by position, e.g.
    /// .92,.78,.67,.57. For measuring speed; the text is meaningless.
    #[arg(long, value_name = "RATE,..", value_delimiter = ',', conflicts_with = "no_speculation")]
    simulate_acceptance: Vec<f64>,
    /// Write a trace of the rounds, one JSON object per line; - is stderr.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Print one JSON object instead of text; docs/commands.md describes its fields.
    #[arg(long)]
    json: bool,
    /// Print KV cache formats and statistics of drafters and planner on stderr.
    #[arg(long)]
    stats: bool,
}

fn main() -> ExitCode {
    foretoken_tools::log_warnings();
    foretoken_tools::run(generate)
}

fn generate(args: Args) -> Result<ExitCode> {
    let text = args.prompt.text()?;
    // A trace to `-` has no directory.
    for file in [&args.costs, &args.drafting.ngram_dynamic, &args.trace].into_iter().flatten() {
        check_directory_of(file)?;
    }
    let start = Instant::now();
    let engine = Engine::load(&args.load.options(&args.drafting)?)?;
    let load_seconds = start.elapsed().as_secs_f64();
    args.load.report_centroids(&engine);
    if let Some(path) = args.costs.as_deref().filter(|path| path.exists()) {
        engine.set_costs(Costs::load(path, engine.costs().machine())?)?;
    }
    let mut session = engine.session(&args.kv.options())?;
    let prompt = args.prompt.ids(&engine, &text, session.kv().max_context())?;
    let kv = report::kv(session.kv());
    let options = options(&args, &engine)?;
    cancel_on_interrupt(options.cancel.clone());
    let mut generation = session.generate(&prompt, &options)?;
    let shown = if args.json { Shown::AtTheEnd } else { Shown::AsItArrives };
    let mut reply = Reply::new(args.prompt.reply_parser(&engine)?, shown);
    let mut tokens = Vec::new();
    // An error is reported when all that was written before it is printed and saved.
    let mut written = generation.by_ref().try_for_each(|piece| {
        let piece = piece?;
        reply.push(&piece)?;
        tokens.extend(piece.tokens);
        anyhow::Ok(())
    });
    written = written.and(reply.finish());
    let (statistics, finish_reason) = (generation.statistics().clone(), generation.finish_reason());
    drop(generation);
    // Saved before the output is completed, because a write to a full stdout ends the command. An error is returned at
    // the end, so that the other file is saved.
    let saved = args.costs.as_ref().map_or(Ok(()), |path| engine.costs().save(path));
    let learnt = args.drafting.ngram_dynamic.as_ref().zip(session.learnt_ngrams());
    let saved = saved.and(learnt.map_or(Ok(()), |(path, cache)| cache.save(path)));
    if args.json {
        let mut own = reply.json(&tokens, load_seconds);
        own["finish_reason"] = serde_json::json!(finish_reason.map(FinishReason::name));
        if let Err(error) = &written {
            own["error"] = serde_json::json!(describe::<Args>(error));
        }
        println!("{}", report::json(own, &statistics, &session));
    } else {
        println!("");
        let context = session.kv().max_context();
        let limit = finish_reason.and_then(|reason| args.generate.limit_reached(reason, context, args.kv.context));
        limit.iter().for_each(|limit| eprintln!("{limit}"));
    }
    if args.stats {
        let details = report::details(&statistics, session.kv_bytes());
        eprintln!("{kv}{}", details.trim_end());
    }
    eprintln!("{statistics}");
    let is_interrupted = finish_reason == Some(FinishReason::Cancelled);
    written?;
    saved?;
    Ok(if is_interrupted { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}

fn options(args: &Args, engine: &Engine) -> Result<GenerateOptions> {
    let defaults = engine.sampling_defaults().filter(|_| args.prompt.chat);
    let generate = args.generate.options(engine, &defaults.cloned().unwrap_or_default())?;
    if defaults.is_some() && generate.sampling.temperature > 0.0 {
        eprintln!("{}", report::sampling(&generate.sampling));
    }
    let speculation = args.drafting.options(engine, args.pipelining.pipeline())?;
    args.drafting.check_effects(engine, &speculation, &generate.sampling)?;
    ensure!(
        args.simulate_acceptance.is_empty() || speculation != Speculation::Off,
        "--simulate-acceptance: nothing drafts; pass --assistant or --spec-type, or omit it"
    );
    let trace = args.trace.as_deref().map(|path| match path.to_str() {
        Some("-") => Ok(Trace::stderr()),
        _ => Trace::file(path),
    });
    Ok(GenerateOptions {
        speculation,
        simulate_acceptance: args.simulate_acceptance.clone(),
        trace: trace.transpose()?,
        ..generate
    })
}
