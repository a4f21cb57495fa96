//! Cost of constraints, and speed-up from speculation under them:
//! `cargo run --release --features constraint --example constraint`.

use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::Parser;
use foretoken::{
    Constraint, ConstraintLimits, Engine, GenerateOptions, Sampling, SessionOptions, Speculation, Statistics,
};
use foretoken_tools::arguments;
use foretoken_tools::measure::{generate, median};
use foretoken_tools::println;
use foretoken_tools::report::count;
use serde_json::{Value, json};

/// Measure the cost of masks, and generation under JSON schemas with and without speculation, interleaved.
///
/// Requires the cargo feature `constraint`.
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    load: arguments::Load,
    #[command(flatten)]
    drafting: arguments::Drafting,
    #[command(flatten)]
    pipelining: arguments::Pipelining,
    /// The prompt.
    #[arg(long, default_value = "impl Default for Options {\n    fn default() -> Self {\n        ")]
    prompt: String,
    /// Number of turns; the median is reported.
    #[arg(long, default_value_t = 5)]
    turns: usize,
    /// Maximum number of tokens per text.
    #[arg(short = 'n', long, default_value_t = 400)]
    max_tokens: usize,
    /// Maximum number of consecutive white space characters in JSON.
    #[arg(long, default_value_t = ConstraintLimits::default().json_whitespace)]
    whitespace: usize,
}

fn main() -> ExitCode {
    foretoken_tools::run(measure)
}

/// Typical schemas: property names, texts, a list of objects, enums, numbers.
fn schemas() -> Vec<(&'static str, Value)> {
    let text = |most: u32| json!({"type": "string", "maxLength": most});
    let count = json!({"type": "integer", "minimum": 0, "maximum": 9999});
    let closed = |properties: Value| {
        let required: Vec<_> = properties.as_object().into_iter().flat_map(|of| of.keys().cloned()).collect();
        json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
    };
    let address = closed(
        json!({"street": text(24), "city": text(16), "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"}}),
    );
    let item = closed(json!({"product_name": text(20), "quantity": count, "in_stock": {"type": "boolean"}}));
    vec![
        ("person", closed(json!({"first_name": text(16), "last_name": text(16), "age": count, "address": address}))),
        (
            "order",
            closed(json!({"identifier": {"type": "string", "format": "uuid"},
            "items": {"type": "array", "items": item, "minItems": 3, "maxItems": 3}})),
        ),
        (
            "extract",
            closed(json!({"summary": text(120), "sentiment": {"enum": ["positive", "neutral", "negative"]},
            "keywords": {"type": "array", "items": text(12), "minItems": 4, "maxItems": 4}})),
        ),
        (
            "call",
            closed(json!({"function": {"enum": ["search_documents", "send_message", "create_event"]},
            "arguments": closed(json!({"title": text(30), "starts_at": {"type": "string", "format": "date-time"},
                "attendees": {"type": "array", "items": text(16), "minItems": 2, "maxItems": 2}}))})),
        ),
        (
            "log",
            json!({"type": "array", "minItems": 6, "maxItems": 6, "items": closed(json!({"timestamp_ms": count,
            "level": {"enum": ["debug", "info", "warning", "error"]}, "component": {"enum": ["scheduler", "cache", "server"]},
            "duration_us": count}))}),
        ),
    ]
}

/// # Errors
/// If an option is out of its range or without effect.
fn check(args: &Args) -> Result<()> {
    ensure!(args.turns > 0, "--turns must be at least 1");
    // Speeds are measured after the first token.
    ensure!(args.max_tokens > 1, "--max-tokens must be at least 2");
    ensure!(!args.drafting.sample_drafts, "--sample-drafts: all texts are greedy; omit it");
    args.drafting.check_dynamic()
}

fn measure(args: Args) -> Result<()> {
    check(&args)?;
    let engine = Engine::load(&args.load.options(&args.drafting)?)?;
    let on = args.drafting.options(&engine, args.pipelining.pipeline())?;
    args.drafting.check_effects(&engine, &on, &Sampling::default())?;
    let prompt = engine.tokenizer()?.encode(&args.prompt)?;
    let base = GenerateOptions { max_tokens: args.max_tokens, ..GenerateOptions::default() };
    let limits = ConstraintLimits { json_whitespace: args.whitespace, ..ConstraintLimits::default() };
    let threads = count(engine.threads(), "thread");
    println!("vocabulary {}, {threads}, {}", engine.target().vocab_size(), engine.isa().name());
    println!(
        "schema   tokens  plain t/s  spec t/s  ratio  tokens/round  forced  mask us/token  mask %plain  mask %spec  accept %spec"
    );
    let (mut ratios, mut shares) = (Vec::new(), Vec::new());
    for (name, schema) in schemas() {
        let constraint = Constraint::json_schema(schema.to_string()).with_limits(limits.clone());
        engine.compile(&constraint)?;
        let plain = GenerateOptions { constraint: Some(constraint), speculation: Speculation::Off, ..base.clone() };
        let speculative = GenerateOptions { speculation: on.clone(), ..plain.clone() };
        // The first turn warms up caches and cost estimates, and is not counted.
        let (mut off, mut fast, mut tokens) = (Vec::new(), Vec::new(), 0);
        for turn in 0..=args.turns {
            let measured = |options| generate(&mut engine.session(&SessionOptions::default())?, &prompt, options);
            let ((want, alone), (got, drafted)) = (measured(&plain)?, measured(&speculative)?);
            ensure!(want == got, "{name}: the text with speculation differs");
            tokens = want.len();
            if turn > 0 {
                off.push(alone);
                fast.push(drafted);
            }
        }
        let per_token =
            median(off.iter().map(|s| 1e6 * s.constraint.as_secs_f64() / s.generated_tokens as f64).collect());
        let accept =
            median(fast.iter().map(|s| 100.0 * s.speculation.accept.as_secs_f64() / s.decode.as_secs_f64()).collect());
        let last = &fast[fast.len() - 1];
        let forced: usize = (last.speculation.drafters.iter())
            .filter(|drafter| drafter.kind.is_some_and(|kind| kind.name() == "forced"))
            .map(|drafter| drafter.accepted)
            .sum();
        ratios.push(speed(&fast) / speed(&off));
        shares.push(share(&fast));
        println!(
            "{name:<8} {tokens:>6} {:>10.1} {:>9.1} {:>6.2} {:>13.2} {forced:>7} {per_token:>14.1} {:>12.2} {:>11.2} {accept:>13.2}",
            speed(&off),
            speed(&fast),
            speed(&fast) / speed(&off),
            last.tokens_per_round(),
            share(&off),
            share(&fast),
        );
    }
    println!(
        "median ratio {:.2}, largest share of masks {:.2} %",
        median(ratios),
        shares.iter().copied().fold(0.0, f64::max)
    );
    Ok(())
}

/// Median tokens per second.
fn speed(all: &[Statistics]) -> f64 {
    median(all.iter().map(Statistics::decode_tokens_per_second).collect())
}

/// Median percentage of the time of decoding that masks take.
fn share(all: &[Statistics]) -> f64 {
    median(all.iter().map(|s| 100.0 * s.constraint.as_secs_f64() / s.decode.as_secs_f64()).collect())
}
