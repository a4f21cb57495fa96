//! Verifies checkpoints: `cargo run --release --example verify -- --model models/demo/target --assistant models/demo/assistant`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::Parser;
use foretoken::verify::{Finding, Outcome, VerifyOptions, verify};

/// Check a target, an assistant, or a pair: every tensor, every invariant, then a short run.
///
/// The exit code is 1 if a check failed. Every failure names the tensor or field, and what to do about it.
///
/// Example: verify --model gemma-4-E2B-it-q4_k_m.gguf --assistant gemma-4-E2B-it-assistant-q8_0.gguf
#[derive(Parser)]
#[command(version)]
struct Args {
    /// The target's checkpoint: a directory or a GGUF file.
    #[arg(long)]
    model: Option<PathBuf>,
    /// The assistant's.
    #[arg(long)]
    assistant: Option<PathBuf>,
    /// What the run continues.
    #[arg(long)]
    prompt: Option<String>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    foretoken_tools::run(command)
}

fn command(args: Args) -> Result<ExitCode> {
    ensure!(args.model.is_some() || args.assistant.is_some(), "nothing to verify; give --model, --assistant, or both");
    let Args { model, assistant, prompt, json } = args;
    let findings = verify(&VerifyOptions { target: model, assistant, prompt });
    let failed = findings.iter().filter(|finding| finding.outcome == Outcome::Failed).count();
    if json {
        println!("{}", serde_json::json!({ "passed": failed == 0, "findings": findings }));
    } else {
        findings.iter().for_each(print);
        println!("{}", if failed == 0 { "sound".into() } else { format!("{failed} failures") });
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print(finding: &Finding) {
    let outcome = match finding.outcome {
        Outcome::Passed => "ok",
        Outcome::Warned => "warning",
        Outcome::Failed => "FAILED",
    };
    let part = format!("{:?}", finding.part).to_lowercase();
    println!("{outcome:8}{part:10}{:16}{}", finding.check, finding.detail);
}
