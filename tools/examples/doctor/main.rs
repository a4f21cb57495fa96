//! Describes checkpoints and what to expect of them on this machine: `cargo run --release --example
//! doctor -- models/demo/target`.

mod check;
mod contents;
mod features;
mod speed;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail, ensure};
use clap::Parser;
use foretoken::checkpoint::{Checkpoint, find_assistants};
use foretoken::gemma4::AssistantConfig;
use foretoken::verify::{Finding, Outcome, Part, VerifyOptions, verify};
use foretoken::{TargetFacts, target_facts};
use foretoken_tools::arguments::resolve;
use foretoken_tools::eprintln;

/// Describe checkpoints: supported features, the context that fits this machine's memory, the expected
/// tokens per second, and the command to run them.
///
/// With --check, every tensor and invariant is checked and a short text is generated; the exit code is 1 if a check
/// failed, and every failure names the tensor or field and how to fix it.
///
/// Example: doctor gemma-4-E2B-it-q4_k_m.gguf gemma-4-E2B-it-assistant-q8_0.gguf --check
#[derive(Parser)]
#[command(version)]
struct Args {
    /// A target, an assistant, or both: directories, GGUF files, or (feature hub) Hugging Face Hub names. An assistant
    /// next to a target is found automatically.
    #[arg(required = true, num_args = 1..=2)]
    checkpoints: Vec<PathBuf>,
    /// Also list the metadata and the tensors.
    #[arg(long)]
    contents: bool,
    /// Read all weights and check them, then generate a short text.
    #[arg(long)]
    check: bool,
    /// Prompt for --check. Default: "The quick brown fox".
    #[arg(long, requires = "check")]
    prompt: Option<String>,
    /// Print only the checks, as one JSON object.
    #[arg(long, requires = "check", conflicts_with = "contents")]
    json: bool,
    /// Number of threads. Default: physical cores.
    #[arg(short, long)]
    threads: Option<usize>,
}

/// The checkpoints given, and the assistant found.
#[derive(Default)]
struct Pair {
    target: Option<(Checkpoint, TargetFacts)>,
    assistant: Option<(Checkpoint, AssistantConfig)>,
}

fn main() -> ExitCode {
    foretoken_tools::log_warnings();
    foretoken_tools::run(command)
}

fn command(args: Args) -> Result<ExitCode> {
    let (mut checkpoints, mut findings) = (Vec::new(), Vec::new());
    for (path, part) in args.checkpoints.iter().zip([Part::Target, Part::Assistant]) {
        match resolve(path) {
            Ok(local) => checkpoints.push(local),
            Err(error) if args.check && args.json => {
                let (outcome, detail) = (Outcome::Failed, error.to_string());
                findings.push(Finding { part, check: "file", outcome, detail });
            }
            Err(error) => return Err(error),
        }
    }
    if args.check && args.json {
        if !checkpoints.is_empty() {
            let pair = Pair::of(&checkpoints);
            let (target, assistant) = pair.map_or_else(|_| claimed_parts(&checkpoints), |pair| pair.paths());
            let options = VerifyOptions { target, assistant, prompt: args.prompt, threads: args.threads };
            findings.extend(verify(&options));
        }
        return Ok(check::json(&findings));
    }
    let pair = Pair::of(&checkpoints)?;
    for checkpoint in pair.checkpoints().filter(|_| args.contents) {
        contents::print(checkpoint)?;
    }
    let threads = args.threads.unwrap_or_else(foretoken::default_threads);
    ensure!((1..=1024).contains(&threads), "--threads must be from 1 to 1024");
    if let Some((checkpoint, facts)) = &pair.target {
        features::target(checkpoint, facts, pair.assistant.as_ref())?;
    }
    if let Some((checkpoint, config)) = &pair.assistant {
        features::assistant(checkpoint, config);
    }
    if let Some((checkpoint, facts)) = &pair.target {
        speed::print(checkpoint, facts, pair.assistant.as_ref(), threads)?;
    }
    if !args.check {
        return Ok(ExitCode::SUCCESS);
    }
    let (target, assistant) = pair.paths();
    Ok(check::print(&VerifyOptions { target, assistant, prompt: args.prompt, threads: args.threads }))
}

impl Pair {
    /// Opens the files by their type, and searches for an assistant if only a target is given.
    fn of(paths: &[PathBuf]) -> Result<Self> {
        let mut pair = Self::default();
        for path in paths {
            let checkpoint = Checkpoint::open(path)?;
            match (target_facts(&checkpoint), checkpoint.assistant_config()) {
                (Ok(facts), _) if pair.target.is_none() => pair.target = Some((checkpoint, facts)),
                (_, Ok(config)) if pair.assistant.is_none() => pair.assistant = Some((checkpoint, config)),
                (Ok(_), _) => bail!("{}: is a second target; pass one target and its assistant", path.display()),
                (_, Ok(_)) => bail!("{}: is a second assistant; pass one assistant and its target", path.display()),
                (Err(_), Err(error)) if checkpoint.is_assistant()? => return Err(error.into()),
                (Err(error), _) => return Err(error.into()),
            }
        }
        if let (Some((target, _)), None) = (&pair.target, &pair.assistant) {
            pair.assistant = beside(target.path())?;
        }
        Ok(pair)
    }

    fn checkpoints(&self) -> impl Iterator<Item = &Checkpoint> {
        self.target
            .iter()
            .map(|(checkpoint, _)| checkpoint)
            .chain(self.assistant.iter().map(|(checkpoint, _)| checkpoint))
    }

    fn paths(&self) -> (Option<PathBuf>, Option<PathBuf>) {
        let path = |checkpoint: &Checkpoint| checkpoint.path().to_owned();
        (
            self.target.as_ref().map(|(target, _)| path(target)),
            self.assistant.as_ref().map(|(assistant, _)| path(assistant)),
        )
    }
}

/// The target and the assistant among files of which one cannot be read, by what they claim to be.
fn claimed_parts(paths: &[PathBuf]) -> (Option<PathBuf>, Option<PathBuf>) {
    let is_assistant =
        |path: &PathBuf| Checkpoint::open(path).and_then(|checkpoint| checkpoint.is_assistant()).unwrap_or(false);
    match paths {
        [one] if is_assistant(one) => (None, Some(one.clone())),
        [first, second] if is_assistant(first) && !is_assistant(second) => (Some(second.clone()), Some(first.clone())),
        _ => (paths.first().cloned(), paths.get(1).cloned()),
    }
}

/// The assistant next to the target, if one fits it; prints on stderr why one is ignored.
fn beside(target: &Path) -> Result<Option<(Checkpoint, AssistantConfig)>> {
    let found = find_assistants(target)?;
    found.misfits.iter().for_each(|(path, error)| eprintln!("ignoring assistant {}: {error}", path.display()));
    let Some(path) = found.only() else {
        found.fitting.iter().for_each(|path| eprintln!("{} fits; pass the one to use", path.display()));
        return Ok(None);
    };
    let checkpoint = Checkpoint::open_assistant(path)?;
    let config = checkpoint.assistant_config()?;
    Ok(Some((checkpoint, config)))
}
