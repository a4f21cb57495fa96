//! The command line, and the options that it stands for.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, anyhow};
use clap::Parser;
use foretoken::chat::{Message, Role, Thinking};
use foretoken::kv::{KvFormat, KvOptions, KvPreset};
use foretoken::speculative::{BlockSize, DraftSampling, DrafterOptions, Drafters, MtpPreset, NgramCache, Trace};
use foretoken::{
    DeviceChoice, EndOfGeneration, Engine, EngineOptions, GenerateOptions, Pipeline, Sampling, SessionOptions,
    Speculation, SpeculationOptions, Stop, WeightType, hub,
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
    /// Who drafts: auto, or a list by priority of mtp, draft-model, ngram-simple, ngram-map-k, ngram-map-k4v, ngram-mod,
    /// ngram-cache, with parameters behind a name (ngram-map-k:n=8:m=24:hits=2). Default: auto where there is an assistant or
    /// a draft model; the assistant where a block size or a preset is given.
    #[arg(long, value_name = "LIST", conflicts_with = "no_speculation")]
    spec_type: Option<Drafters>,
    /// Rows of every verification; one token less is drafted. Default: what measured costs say, round by round.
    #[arg(long, value_name = "B")]
    draft_block_size: Option<usize>,
    /// Rows by a preset: throughput, lift, balanced, quality.
    #[arg(long, value_name = "NAME", conflicts_with = "draft_block_size")]
    mtp_preset: Option<MtpPreset>,
    /// Rest the model that drafts after N drafts in a row that failed whole (1 to 32).
    #[arg(long, value_name = "N")]
    skip_streak: Option<usize>,
    /// 2 drafts the next round while this one's text is written.
    #[arg(long, value_name = "1|2", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
    pipeline_depth: u8,
    /// Draw drafts from the drafter's distribution instead of taking its best token.
    #[arg(long)]
    sample_drafts: bool,
    /// A smaller Gemma 4 for the drafter draft-model: a directory, a GGUF file, or a name on the Hugging Face Hub.
    #[arg(long, value_name = "MODEL")]
    draft_model: Option<PathBuf>,
    /// N-gram counts of a corpus for ngram-cache.
    #[arg(long, value_name = "FILE")]
    ngram_static: Option<PathBuf>,
    /// N-gram counts of earlier texts for ngram-cache; made if missing, and written back.
    #[arg(long, value_name = "FILE")]
    pub ngram_dynamic: Option<PathBuf>,
    /// Measured costs of this machine; made if missing, and written back.
    #[arg(long, value_name = "FILE")]
    pub costs: Option<PathBuf>,
    /// Accept drafts by chance: RATE is the share of rounds that accept the draft, by position if several are given, as
    /// .92,.78,.67,.57. Measures speed, and the text is meaningless.
    #[arg(long, value_name = "RATE,..", value_delimiter = ',')]
    pub simulate_acceptance: Vec<f64>,
    /// Tell what every round did, a line of JSON each; - is stderr.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
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
    /// Where the models compute: cpu, cuda, cuda:N, metal, metal:N, or auto for a GPU where one works and else the CPU (build
    /// with --features cuda, cuda-prebuilt or metal).
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: DeviceChoice,
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
        draft_model: args.draft_model.as_deref().map(|path| hub::resolve_with(path, &from)).transpose()?,
        threads: args.threads,
        device: args.device.clone(),
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

pub fn generate_options(args: &Args, engine: &Engine) -> Result<GenerateOptions> {
    let trace = args.trace.as_deref().map(|path| match path.to_str() {
        Some("-") => Ok(Trace::stderr()),
        _ => Trace::file(path),
    });
    let end_of_generation = if args.ignore_eos { EndOfGeneration::Ignored } else { EndOfGeneration::Stops };
    let Args { temperature, top_k, top_p, min_p, .. } = *args;
    Ok(GenerateOptions {
        max_tokens: args.max_tokens,
        sampling: Sampling { temperature, top_k, top_p, min_p },
        seed: args.seed,
        speculation: speculation(args, engine)?,
        simulate_acceptance: args.simulate_acceptance.clone(),
        trace: trace.transpose()?,
        stop: Stop { end_of_generation, tokens: Vec::new(), strings: args.stop.clone() },
    })
}

/// Who drafts, and how much. A block size or a preset alone means the assistant.
fn speculation(args: &Args, engine: &Engine) -> Result<Speculation> {
    let able = engine.assistant().is_some() || engine.draft_model().is_some();
    if args.no_speculation || (args.spec_type.is_none() && !able && args.draft_block_size.is_none()) {
        return Ok(Speculation::Off);
    }
    let block = match (args.draft_block_size, args.mtp_preset) {
        (Some(rows), _) => BlockSize::Fixed(rows),
        (None, Some(preset)) => BlockSize::Preset(preset),
        (None, None) => BlockSize::Measured,
    };
    let mut drafters = match &args.spec_type {
        Some(drafters) => drafters.clone(),
        None if block != BlockSize::Measured && (engine.assistant().is_some() || engine.draft_model().is_none()) => {
            Drafters::Priority(vec![DrafterOptions::Mtp])
        }
        None => Drafters::Auto,
    };
    if let Drafters::Priority(list) = &mut drafters {
        for options in list {
            if let DrafterOptions::NgramCache(options) = options {
                options.corpus = args.ngram_static.as_deref().map(NgramCache::load).transpose()?.map(Arc::new);
                let dynamic = args.ngram_dynamic.as_deref().filter(|path| path.exists());
                options.earlier = dynamic.map(NgramCache::load).transpose()?.map(Arc::new);
            }
        }
    }
    Ok(Speculation::With(SpeculationOptions {
        drafters,
        block,
        skip_streak: args.skip_streak,
        drafts: if args.sample_drafts { DraftSampling::Sampled } else { DraftSampling::Greedy },
        pipeline: if args.pipeline_depth == 2 { Pipeline::Ahead } else { Pipeline::InTurn },
    }))
}
