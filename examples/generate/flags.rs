//! The command line, and the options that it stands for.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, anyhow};
use clap::Parser;
use foretoken::chat::{Message, Role, Thinking};
use foretoken::kv::{KvFormat, KvOptions, KvPreset};
use foretoken::speculative::DraftSampling;
use foretoken::{
    EndOfGeneration, Engine, EngineOptions, GenerateOptions, MtpOptions, Sampling, SessionOptions, Speculation, Stop,
    WeightType, hub,
};
use indicatif::{ProgressBar, ProgressStyle};

/// Generate text with a Gemma 4 and its assistant.
///
/// With nothing given, the demo pair in models/demo continues a piece of Rust.
///
/// Example: generate "Why is the sky blue?" --chat --model google/gemma-4-E2B-it --assistant google/gemma-4-E2B-it-assistant
#[derive(Parser)]
#[command(version)]
pub struct Args {
    /// The text to continue (with --chat: the user's message).
    #[arg(default_value = "/// Returns the largest element of the slice, or `None` if it is empty.\n")]
    prompt: String,
    /// The target's checkpoint: a directory, a GGUF file, or a name on the Hugging Face Hub.
    #[arg(long)]
    model: Option<PathBuf>,
    /// The assistant's checkpoint, likewise.
    #[arg(long)]
    assistant: Option<PathBuf>,
    /// Quantize floating-point matrices while loading: q4_k, q6_k, q8_0, ...
    #[arg(long, value_name = "TYPE")]
    quantize: Option<WeightType>,
    /// One token per pass of the target.
    #[arg(long)]
    no_speculation: bool,
    /// Rows of a verification; one token less is drafted.
    #[arg(long, value_name = "B")]
    draft_block_size: Option<usize>,
    /// Draw drafts from the drafter's distribution instead of taking its best token.
    #[arg(long)]
    sample_drafts: bool,
    /// Tokens to generate at most.
    #[arg(long, default_value_t = 128)]
    max_tokens: usize,
    /// 0 takes the most probable token.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Keep the K most probable tokens.
    #[arg(long)]
    top_k: Option<usize>,
    /// Keep the most probable tokens up to this sum of probabilities.
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Keep tokens at least this probable relative to the best.
    #[arg(long, default_value_t = 0.0)]
    min_p: f32,
    /// Seed of the draws.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// How K and V are kept: exact (f16), or in codes: quality, balanced, compact.
    #[arg(long, value_name = "NAME", default_value = "exact")]
    kv_preset: KvPreset,
    /// Type of the cached keys, instead of the preset's: f32, f16, bf16, tqc2..tqc6, turbo2..turbo4, q8_0, q4_0.
    #[arg(long, value_name = "T")]
    cache_type_k: Option<KvFormat>,
    /// Type of the cached values, likewise.
    #[arg(long, value_name = "T")]
    cache_type_v: Option<KvFormat>,
    /// Positions that fit the cache; by default, what the model was made for.
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Threads; by default, the physical cores.
    #[arg(long)]
    threads: Option<usize>,
    /// Token ids instead of a prompt.
    #[arg(long, value_name = "2,500,..", value_delimiter = ',', conflicts_with_all = ["prompt", "chat"])]
    prompt_ids: Option<Vec<u32>>,
    /// Go on past the tokens that end a text.
    #[arg(long)]
    ignore_eos: bool,
    /// End the text before this string; may be given several times.
    #[arg(long, value_name = "STRING")]
    stop: Vec<String>,
    /// Put the prompt through the checkpoint's chat template.
    #[arg(long)]
    chat: bool,
    /// The system message, with --chat.
    #[arg(long, requires = "chat")]
    system: Option<String>,
    /// Let the model think first, with --chat.
    #[arg(long, requires = "chat")]
    think: bool,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
}

/// The command line; what is wrong with it on one line, for people and for tools that run this.
pub fn arguments() -> Result<Args> {
    Args::try_parse().map_err(|error| {
        if !error.use_stderr() {
            error.exit(); // --help and --version
        }
        let message = error.to_string();
        let complaint =
            message.lines().take_while(|line| !line.is_empty()).map(str::trim).collect::<Vec<_>>().join(" ");
        anyhow!("{}; see --help", complaint.strip_prefix("error: ").unwrap_or(&complaint))
    })
}

/// What to load; with no model named, the demo pair.
pub fn engine_options(args: &Args) -> Result<EngineOptions> {
    let demo = |part: &str| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo/")).join(part);
    let assistant = args.assistant.clone().or_else(|| args.model.is_none().then(|| demo("assistant")));
    let bar = ProgressBar::new(0).with_style(ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes} {eta}")?);
    let download = bar.clone();
    let from = hub::HubOptions {
        cache: std::env::home_dir().map(|home| home.join(".cache/huggingface/hub")),
        progress: Some(Arc::new(move |file| {
            download.set_length(file.total);
            download.set_position(file.done);
        })),
        ..hub::HubOptions::default()
    };
    Ok(EngineOptions {
        assistant: assistant.map(|path| hub::resolve_with(&path, &from)).transpose()?,
        threads: args.threads,
        quantize: args.quantize,
        progress: Some(Arc::new(move |progress| {
            bar.set_length(progress.total);
            bar.set_position(progress.loaded);
        })),
        ..EngineOptions::new(hub::resolve_with(&args.model.clone().unwrap_or_else(|| demo("target")), &from)?)
    })
}

pub fn prompt(args: &Args, engine: &Engine) -> Result<Vec<u32>> {
    if let Some(ids) = &args.prompt_ids {
        return Ok(ids.clone());
    }
    if !args.chat {
        return Ok(engine.tokenizer()?.encode(&args.prompt)?);
    }
    let system = args.system.iter().map(|content| Message { role: Role::System, content: content.clone() });
    let user = Message { role: Role::User, content: args.prompt.clone() };
    let thinking = if args.think { Thinking::On } else { Thinking::Off };
    Ok(engine.encode_chat(&system.chain([user]).collect::<Vec<_>>(), thinking)?)
}

/// How K and V are kept.
pub fn session_options(args: &Args) -> SessionOptions {
    let preset = KvOptions::from(args.kv_preset);
    SessionOptions {
        kv: KvOptions {
            key: args.cache_type_k.unwrap_or(preset.key),
            value: args.cache_type_v.unwrap_or(preset.value),
            max_context: args.context,
            ..preset
        },
    }
}

pub fn generate_options(args: &Args) -> GenerateOptions {
    let drafts = if args.sample_drafts { DraftSampling::Sampled } else { DraftSampling::Greedy };
    let mtp = |block_size| Speculation::Mtp(MtpOptions { block_size, drafts });
    let speculation = match (args.no_speculation, args.draft_block_size) {
        (true, _) => Speculation::Off,
        (false, Some(block_size)) => mtp(block_size),
        (false, None) if args.sample_drafts => mtp(MtpOptions::default().block_size),
        (false, None) => Speculation::WherePossible,
    };
    let end_of_generation = if args.ignore_eos { EndOfGeneration::Ignored } else { EndOfGeneration::Stops };
    let Args { temperature, top_k, top_p, min_p, .. } = *args;
    GenerateOptions {
        max_tokens: args.max_tokens,
        sampling: Sampling { temperature, top_k, top_p, min_p },
        seed: args.seed,
        speculation,
        stop: Stop { end_of_generation, tokens: Vec::new(), strings: args.stop.clone() },
    }
}
