//! The cells to measure: every prompt with every KV cache format in every mode.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::UNIX_EPOCH;

use anyhow::{Context, Result, ensure};
use foretoken::checkpoint::{Checkpoint, model_name};
use foretoken::kv::KvOptions;
use foretoken::speculative::{DrafterOptions, Drafters};
use foretoken::{OwnDrafter, Speculation, SpeculationOptions, target_facts};
use serde::{Deserialize, Serialize};

use crate::Args;

/// The mode that the others are compared with: plain decoding.
pub const OFF: &str = "off";
/// Prefix of the modes of llama.cpp's server.
pub const LLAMA: &str = "llama.cpp";

/// What figures must have in common to be compared.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Setting {
    pub pair: String,
    /// Size of the checkpoints, and their modification time (seconds since 1970): a known name may
    /// now be a different pair.
    pub bytes: u64,
    pub changed: u64,
    pub quantize: Option<String>,
    /// `None`: the physical cores.
    pub threads: Option<usize>,
    /// Tokens after each prompt.
    pub max_tokens: usize,
    /// Prompts of each length.
    pub texts: usize,
    /// A checksum of the text that the prompts are cut from.
    pub text: u32,
    /// By position; empty if acceptance is not simulated.
    pub simulated_acceptance: Vec<f64>,
}

/// One cell of the matrix.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    pub prompt: Prompt,
    pub kv: String,
    pub mode: String,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, K/V {}, {}", self.prompt, self.kv, self.mode)
    }
}

/// A prompt with this number of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Prompt(pub usize);

impl FromStr for Prompt {
    type Err = String;

    /// `short`, `long`, or tokens: `4096` or `4k`.
    fn from_str(text: &str) -> Result<Self, String> {
        let lower = text.to_ascii_lowercase();
        let tokens = match (lower.as_str(), lower.strip_suffix('k')) {
            ("short", _) => Some(128),
            ("long", _) => Some(512),
            (_, Some(thousands)) => thousands.parse::<usize>().ok().and_then(|n| n.checked_mul(1024)),
            (tokens, None) => tokens.parse().ok(),
        };
        let tokens = tokens.filter(|tokens| (2..=1 << 24).contains(tokens));
        tokens.map(Prompt).ok_or_else(|| {
            format!("{text:?} is not a prompt length; use short, long, or a number of tokens such as 4096 or 4k")
        })
    }
}

impl fmt::Display for Prompt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            128 => f.write_str("short (128 tokens)"),
            512 => f.write_str("long (512 tokens)"),
            tokens if tokens.is_multiple_of(1024) => write!(f, "{} K deep", tokens / 1024),
            tokens => write!(f, "{tokens} tokens"),
        }
    }
}

/// How a cell is computed.
#[derive(Clone, Debug)]
pub enum Mode {
    Ours {
        kv: KvOptions,
        speculation: Speculation,
    },
    /// A server of llama.cpp that was started with these arguments.
    Llama {
        arguments: String,
    },
}

/// A pair and everything that is measured with it.
pub struct Plan {
    pub model: PathBuf,
    pub assistant: Option<PathBuf>,
    pub setting: Setting,
    /// Whether it has an assistant or a head of its own.
    drafts: bool,
    pub cells: Vec<(Cell, Mode)>,
    /// Skipped cells, and why.
    pub left_out: Vec<String>,
}

impl Plan {
    /// # Errors
    /// If a checkpoint or the server is missing or unsuitable.
    pub fn new(args: &Args, model: &Path, assistant: Option<&Path>, text: u32) -> Result<Self> {
        let facts = target_facts(&Checkpoint::open(model)?)?;
        if let Some(assistant) = assistant {
            Checkpoint::open(assistant)?.assistant_config()?;
        }
        if let Some(server) = &args.llama_server {
            ensure!(server.exists(), "{}: is missing; pass the path of llama.cpp's llama-server", server.display());
            let (remedy, name) = ("cargo run --release --example convert", model.display());
            ensure!(!model.is_dir(), "{name}: llama.cpp reads GGUF files; create one: {remedy} -- {name} FILE.gguf");
        }
        let (mut bytes, mut changed) = (0, 0);
        for path in [Some(model), assistant].into_iter().flatten() {
            let (size, time) = size_and_time(path).with_context(|| path.display().to_string())?;
            (bytes, changed) = (bytes + size, changed.max(time));
        }
        let setting = Setting {
            pair: pair_name(model),
            bytes,
            changed,
            quantize: args.quantize.map(|weight_type| weight_type.name().into()),
            threads: args.threads,
            max_tokens: args.max_tokens,
            texts: args.texts,
            text,
            simulated_acceptance: args.simulate_acceptance.clone(),
        };
        let (model, assistant) = (model.to_owned(), assistant.map(Path::to_owned));
        let drafts = assistant.is_some() || matches!(facts.own_drafter, OwnDrafter::NextnHead(_));
        let mut plan = Self { model, assistant, setting, drafts, cells: Vec::new(), left_out: Vec::new() };
        for prompt in &args.prompts {
            let (needed, most) = (prompt.0 + args.max_tokens, facts.max_position_embeddings);
            if needed > most {
                plan.left_out.push(format!("{prompt}: {needed} positions, the model supports {most}"));
                continue;
            }
            for kv in &args.kv {
                for (mode, speculation) in modes(args)? {
                    let cell = Cell { prompt: *prompt, kv: kv.name.clone(), mode };
                    let options = KvOptions { max_context: Some(needed), ..kv.options.clone() };
                    plan.add(cell, Mode::Ours { kv: options, speculation });
                }
            }
            let servers = args.llama_server.is_some() || args.llama_url.is_some();
            for arguments in args.llama_args.iter().filter(|_| servers) {
                // Its cache is f16 unless its arguments, which are part of the name, set another type.
                let exact = args.kv.iter().find(|kv| kv.options == KvOptions::default());
                let kv = exact.map_or("f16", |kv| kv.name.as_str()).to_owned();
                let cell = Cell { prompt: *prompt, kv, mode: llama_name(arguments) };
                plan.add(cell, Mode::Llama { arguments: arguments.clone() });
            }
        }
        Ok(plan)
    }

    fn add(&mut self, cell: Cell, mode: Mode) {
        let drafts = match &mode {
            Mode::Ours { speculation: Speculation::With(options), .. } => match &options.drafters {
                Drafters::Priority(list) | Drafters::Best(list) => list.contains(&DrafterOptions::Mtp),
                _ => false,
            },
            _ => false,
        };
        if drafts && !self.drafts {
            self.left_out.push(format!("{cell}: no assistant"));
        } else if !self.cells.iter().any(|(other, _)| *other == cell) {
            self.cells.push((cell, mode));
        }
    }
}

/// The modes in order, the one that the others are compared with first.
fn modes(args: &Args) -> Result<Vec<(String, Speculation)>> {
    let mut modes = vec![(OFF.to_owned(), Speculation::Off)];
    let most = KvOptions::default().max_round_rows;
    for rows in &args.blocks {
        ensure!((2..=most).contains(rows), "--blocks: is {rows}, must be from 2 to {most}");
        let speculation = Speculation::With(SpeculationOptions::mtp(*rows));
        modes.push((format!("B = {rows}"), speculation));
    }
    for name in &args.mixture {
        let drafters = name.parse().with_context(|| format!("--mixture {name}"))?;
        modes.push((name.clone(), Speculation::With(SpeculationOptions { drafters, ..SpeculationOptions::default() })));
    }
    Ok(modes)
}

/// llama.cpp with its arguments; only the last component of paths.
fn llama_name(arguments: &str) -> String {
    let short = |word: &str| word.rsplit('/').next().unwrap_or_default().to_owned();
    std::iter::once(LLAMA.into()).chain(arguments.split_whitespace().map(short)).collect::<Vec<_>>().join(" ")
}

/// The pair's name: the target's, without a "target" suffix.
fn pair_name(model: &Path) -> String {
    let name = |path: &Path| model_name(path).trim_end_matches(".gguf").to_owned();
    let own = name(model);
    let own = model.parent().filter(|_| own == "target").map_or(own, name);
    own.strip_suffix("-target").map_or(own.clone(), str::to_owned)
}

/// Bytes in a file, or in a directory's files, and when they last changed.
fn size_and_time(path: &Path) -> std::io::Result<(u64, u64)> {
    if path.is_dir() {
        let files = std::fs::read_dir(path)?.collect::<Result<Vec<_>, _>>()?;
        let all = files.iter().map(|file| file.path()).filter(|path| path.is_file());
        return all.map(|path| size_and_time(&path)).try_fold((0, 0), |(bytes, changed), one| {
            let (size, time) = one?;
            Ok((bytes + size, changed.max(time)))
        });
    }
    let file = std::fs::metadata(path)?;
    let changed = file.modified()?.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    Ok((file.len(), changed))
}
