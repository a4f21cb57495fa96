//! Says what checkpoints are and what they do here: `cargo run --release --example doctor -- models/demo/target`.

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
use foretoken::verify::VerifyOptions;
use foretoken::{TargetFacts, target_facts};

/// Say what checkpoints are, which features they can use, how long a context fits this machine's memory, how many tokens a
/// second to expect, and with which command to generate.
///
/// With --check, every tensor and invariant is checked and a short text generated; the exit code is 1 if a check failed, and
/// every failure names the tensor or field, and what to do about it.
///
/// Example: doctor gemma-4-E2B-it-q4_k_m.gguf gemma-4-E2B-it-assistant-q8_0.gguf --check
#[derive(Parser)]
#[command(version)]
struct Args {
    /// A target, an assistant, or both: directories or GGUF files. An assistant beside a target is found.
    #[arg(required = true, num_args = 1..=2)]
    checkpoints: Vec<PathBuf>,
    /// List the metadata and the tensors, too.
    #[arg(long)]
    contents: bool,
    /// Read all weights and check them, then generate a short text.
    #[arg(long)]
    check: bool,
    /// What --check continues.
    #[arg(long, requires = "check")]
    prompt: Option<String>,
    /// Print the checks as one JSON object, and nothing else.
    #[arg(long, requires = "check")]
    json: bool,
    /// Threads; by default, the physical cores.
    #[arg(long)]
    threads: Option<usize>,
}

/// What the files are.
#[derive(Default)]
struct Patients {
    target: Option<(Checkpoint, TargetFacts)>,
    assistant: Option<(Checkpoint, AssistantConfig)>,
}

fn main() -> ExitCode {
    foretoken_tools::run(command)
}

fn command(args: Args) -> Result<ExitCode> {
    let path = |at: usize| args.checkpoints.get(at).cloned();
    if args.check && args.json {
        // Also of what cannot be read: that is a finding.
        let patients = Patients::of(&args.checkpoints);
        let (target, assistant) = patients.map_or_else(|_| (path(0), path(1)), |patients| patients.paths());
        return Ok(check::json(&VerifyOptions { target, assistant, prompt: args.prompt }));
    }
    let patients = Patients::of(&args.checkpoints)?;
    for checkpoint in patients.checkpoints().filter(|_| args.contents) {
        contents::print(checkpoint)?;
    }
    let threads = args.threads.unwrap_or_else(foretoken::default_threads);
    ensure!((1..=1024).contains(&threads), "--threads must be from 1 to 1024");
    if let Some((checkpoint, facts)) = &patients.target {
        features::target(checkpoint, facts, patients.assistant.as_ref())?;
    }
    if let Some((checkpoint, config)) = &patients.assistant {
        features::assistant(checkpoint, config);
    }
    if let Some((checkpoint, facts)) = &patients.target {
        speed::print((checkpoint, facts), patients.assistant.as_ref(), threads)?;
    }
    if !args.check {
        return Ok(ExitCode::SUCCESS);
    }
    let (target, assistant) = patients.paths();
    Ok(check::print(&VerifyOptions { target, assistant, prompt: args.prompt }))
}

impl Patients {
    /// Opens the files as what they are, and looks for an assistant if only a target is given.
    fn of(paths: &[PathBuf]) -> Result<Self> {
        let mut patients = Self::default();
        for path in paths {
            let checkpoint = Checkpoint::open(path)?;
            match (target_facts(&checkpoint), checkpoint.assistant_config()) {
                (Ok(facts), _) if patients.target.is_none() => patients.target = Some((checkpoint, facts)),
                (_, Ok(config)) if patients.assistant.is_none() => patients.assistant = Some((checkpoint, config)),
                (Ok(_), _) => bail!("{}: is a second target; give one, and its assistant", path.display()),
                (_, Ok(_)) => bail!("{}: is a second assistant; give one, and its target", path.display()),
                (Err(error), _) => return Err(error.into()),
            }
        }
        if let (Some((target, _)), None) = (&patients.target, &patients.assistant) {
            patients.assistant = beside(target.path())?;
        }
        Ok(patients)
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

/// The assistant beside the target, if one fits it.
fn beside(target: &Path) -> Result<Option<(Checkpoint, AssistantConfig)>> {
    let found = find_assistants(target)?;
    found.misfits.iter().for_each(|(path, error)| println!("{} is not used: {error}", path.display()));
    let Some(path) = found.only() else {
        found.fitting.iter().for_each(|path| println!("{} fits; give the one to use", path.display()));
        return Ok(None);
    };
    let checkpoint = Checkpoint::open_assistant(path)?;
    let config = checkpoint.assistant_config()?;
    Ok(Some((checkpoint, config)))
}
