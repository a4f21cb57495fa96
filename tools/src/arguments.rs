//! Groups of command-line options, and what they stand for.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Result, bail};
use clap::Args;
use foretoken::chat::{ChatOptions, Json, Message, Thinking};
use foretoken::checkpoint::find_assistants;
use foretoken::gemma4::{BuildCentroids, CentroidConfig, Centroids, CentroidsWanted};
use foretoken::kv::{KvFormat, KvOptions, KvPreset};
use foretoken::speculative::{BlockSize, DraftSampling, DrafterOptions, Drafters, MtpPreset, NgramCache};
use foretoken::{
    DeviceChoice, Engine, EngineOptions, Isa, Pipeline, SessionOptions, Speculation, SpeculationOptions, WeightType,
    hub,
};

use crate::progress::ProgressLine;

/// Which checkpoints, and what computes.
#[derive(Args)]
pub struct Load {
    /// The target's checkpoint: a directory, a GGUF file, or a name on the Hugging Face Hub (owner/name, owner/name:Q4_K_M for a
    /// GGUF file there).
    #[arg(long)]
    pub model: Option<PathBuf>,
    /// The assistant's checkpoint, likewise. Default: the one that fits the model and lies beside it (mtp-*.gguf,
    /// *-assistant*.gguf, MTP/, MODEL-assistant; of a model in the Hub's cache, the repository NAME-assistant there); several
    /// are an error.
    #[arg(long)]
    pub assistant: Option<PathBuf>,
    /// No assistant, also if one lies beside the model.
    #[arg(long, conflicts_with = "assistant")]
    pub no_assistant: bool,
    /// A smaller Gemma 4 for the drafter draft-model: a directory, a GGUF file, or a name on the Hugging Face Hub.
    #[arg(long, value_name = "MODEL")]
    pub draft_model: Option<PathBuf>,
    /// Centroids of the assistant: own, none, auto (its own; without, 2048 are built and kept if a draft step is faster with them),
    /// or N/K (builds N, of which K are scored, in any case). Built ones have fewer drafts accepted; the text is the same.
    #[arg(long, value_name = "WHICH", default_value = "own")]
    pub centroids: CentroidChoice,
    /// Do not keep built centroids: they are in foretoken in XDG_CACHE_HOME, or in .cache in the home directory.
    #[arg(long)]
    pub no_cache: bool,
    /// Where downloads are kept. Default: HF_HUB_CACHE, or hub in HF_HOME, or .cache/huggingface/hub in the home directory. The
    /// token is HF_TOKEN, or what hf auth login stored.
    #[arg(long, value_name = "DIR")]
    pub hf_cache: Option<PathBuf>,
    /// Quantize floating-point matrices while loading: q4_k, q6_k, q8_0, ...
    #[arg(long, value_name = "TYPE")]
    pub quantize: Option<WeightType>,
    /// Where the models compute: cpu, cuda, cuda:N, metal, metal:N, or auto for a GPU where one works and else the CPU (build
    /// with --features cuda, cuda-prebuilt or metal).
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: DeviceChoice,
    /// Threads; by default, the physical cores.
    #[arg(long)]
    pub threads: Option<usize>,
    /// Instruction set of the CPU's kernels; by default, the widest that the processor has.
    #[arg(long, value_name = "NAME")]
    pub isa: Option<Isa>,
}

impl Load {
    /// What to load; with no model named, the demo pair. Names on the Hub are resolved, with a bar on a terminal. With no
    /// assistant named, and `drafting` not off, one is looked for beside the model; what is found is said on stderr.
    ///
    /// # Errors
    /// If a name is the Hub's, and the checkpoint cannot be downloaded, the model that assistants are to fit cannot be read,
    /// or several fit.
    pub fn options(&self, drafting: &Drafting) -> Result<EngineOptions> {
        let demo = || (self.model.is_none() && !self.no_assistant).then(|| crate::demo("assistant"));
        let assistant = self.assistant.clone().or_else(demo);
        let (download, load) = (ProgressLine::new("downloading", 0), ProgressLine::new("loading", 0));
        let from = hub::HubOptions {
            cache: self.hf_cache.clone().or_else(hub_cache),
            token: std::env::var("HF_TOKEN").ok().filter(|token| !token.is_empty()),
            progress: Some(Arc::new(move |file| download.set(file.done, file.total))),
            ..hub::HubOptions::default()
        };
        let model = hub::resolve_with(&self.model.clone().unwrap_or_else(|| crate::demo("target")), &from)?;
        let assistant = match assistant {
            Some(path) => Some(hub::resolve_with(&path, &from)?),
            None if self.no_assistant || drafting.no_speculation => None,
            None => found_assistant(&model)?,
        };
        Ok(EngineOptions {
            assistant,
            centroids: self.centroids.with_cache(own_cache().filter(|_| !self.no_cache)),
            draft_model: self.draft_model.as_deref().map(|path| hub::resolve_with(path, &from)).transpose()?,
            threads: self.threads,
            device: self.device.clone(),
            isa: self.isa,
            quantize: self.quantize,
            progress: Some(Arc::new(move |progress| load.set(progress.loaded, progress.total))),
            ..EngineOptions::new(model)
        })
    }

    /// Says on stderr that the assistant has no centroids, if nothing was said of them.
    pub fn say_centroids(&self, engine: &Engine) {
        let is_dense = engine.assistant().is_some_and(|assistant| !assistant.has_centroids());
        if is_dense && self.centroids == CentroidChoice::Own {
            eprintln!(
                "centroids: the assistant has none, so that a draft step reads its whole LM head (--centroids auto: builds \
                 them if that is faster)"
            );
        }
    }
}

/// The directory that Hugging Face's own tools use.
fn hub_cache() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    let home = || std::env::home_dir().map(|home| home.join(".cache/huggingface"));
    set("HF_HUB_CACHE").or_else(|| Some(set("HF_HOME").or_else(home)?.join("hub")))
}

/// The user's directory of what can be made again.
fn own_cache() -> Option<PathBuf> {
    let set = std::env::var_os("XDG_CACHE_HOME").filter(|path| !path.is_empty()).map(PathBuf::from);
    let directory = set.or_else(|| Some(std::env::home_dir()?.join(".cache")))?;
    Some(directory.join("foretoken"))
}

/// Which centroids an assistant drafts with, as it is given on a command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CentroidChoice {
    /// Its own, or built ones where that is faster.
    Auto,
    /// Its own.
    Own,
    /// None.
    None,
    /// Built ones.
    Built(CentroidSizes),
}

/// How many centroids there are, and how many of them are scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CentroidSizes {
    count: usize,
    scored: usize,
}

impl FromStr for CentroidChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let sizes = || {
            let (count, scored) = text.split_once('/')?;
            let (count, scored) = (count.parse::<usize>().ok()?, scored.parse().ok()?);
            (count.is_power_of_two() && (1..=count).contains(&scored)).then_some(CentroidSizes { count, scored })
        };
        match text {
            "auto" => Ok(Self::Auto),
            "own" => Ok(Self::Own),
            "none" => Ok(Self::None),
            _ => sizes()
                .map(Self::Built)
                .ok_or("must be auto, own, none, or N/K, N a power of two and K at most N".into()),
        }
    }
}

impl CentroidChoice {
    /// The engine's option, with this directory for what is built.
    pub fn with_cache(self, cache: Option<PathBuf>) -> Centroids {
        match self {
            Self::Auto => Centroids::Build(BuildCentroids { cache, ..BuildCentroids::default() }),
            Self::Own => Centroids::Own,
            Self::None => Centroids::None,
            Self::Built(CentroidSizes { count, scored }) => Centroids::Build(BuildCentroids {
                sizes: CentroidConfig { num_centroids: count, top_k: scored },
                cache,
                wanted: CentroidsWanted::Always,
            }),
        }
    }
}

/// The assistant beside the model, if one fits; says which, or why none is used.
///
/// # Errors
/// If several fit.
fn found_assistant(model: &Path) -> Result<Option<PathBuf>> {
    let found = find_assistants(model)?;
    if let Some(path) = found.only() {
        match path == model {
            true => eprintln!("assistant: the one inside the model (--no-assistant: without)"),
            false => eprintln!("assistant: {}, found for the model (--no-assistant: without)", path.display()),
        }
        return Ok(Some(path.to_owned()));
    }
    if !found.fitting.is_empty() {
        let paths: Vec<_> = found.fitting.iter().map(|path| path.display().to_string()).collect();
        bail!(
            "several assistants fit the model; name one with --assistant, or give --no-assistant: {}",
            paths.join(", ")
        );
    }
    for (path, error) in found.misfits {
        eprintln!("no assistant: {} is not used: {error}", path.display());
    }
    Ok(None)
}

/// Who drafts, and how much.
#[derive(Args)]
pub struct Drafting {
    /// One token per pass of the target.
    #[arg(long)]
    pub no_speculation: bool,
    /// Who drafts: auto, or a list by priority of mtp, draft-model, ngram-simple, ngram-map-k, ngram-map-k4v, ngram-mod,
    /// ngram-cache, with parameters behind a name (ngram-map-k:n=8:m=24:hits=2). Default: auto where there is an assistant or
    /// a draft model; the assistant where a block size or a preset is given.
    #[arg(long, value_name = "LIST", conflicts_with = "no_speculation")]
    pub spec_type: Option<Drafters>,
    /// Rows of every verification; one token less is drafted. Default: chosen for every round from measured costs.
    #[arg(long, value_name = "B")]
    pub draft_block_size: Option<usize>,
    /// Rows by a preset: throughput, lift, balanced, quality.
    #[arg(long, value_name = "NAME", conflicts_with = "draft_block_size")]
    pub mtp_preset: Option<MtpPreset>,
    /// Rest the model that drafts after N drafts in a row of which nothing was accepted (1 to 32).
    #[arg(long, value_name = "N")]
    pub skip_streak: Option<usize>,
    /// 2 drafts the next round while this one's text is written.
    #[arg(long, value_name = "1|2", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
    pub pipeline_depth: u8,
    /// Draw drafts from the drafter's distribution instead of taking its best token.
    #[arg(long)]
    pub sample_drafts: bool,
    /// N-gram counts of a corpus for ngram-cache.
    #[arg(long, value_name = "FILE")]
    pub ngram_static: Option<PathBuf>,
    /// N-gram counts of earlier texts for ngram-cache; made if missing, and written back.
    #[arg(long, value_name = "FILE")]
    pub ngram_dynamic: Option<PathBuf>,
}

impl Drafting {
    /// Who drafts. A block size or a preset alone means the assistant.
    ///
    /// # Errors
    /// If a file of n-gram counts cannot be read.
    pub fn options(&self, engine: &Engine) -> Result<Speculation> {
        let able = engine.has_mtp() || engine.draft_model().is_some();
        if self.no_speculation || (self.spec_type.is_none() && !able && self.draft_block_size.is_none()) {
            return Ok(Speculation::Off);
        }
        let block = match (self.draft_block_size, self.mtp_preset) {
            (Some(rows), _) => BlockSize::Fixed(rows),
            (None, Some(preset)) => BlockSize::Preset(preset),
            (None, None) => BlockSize::Measured,
        };
        let mut drafters = match &self.spec_type {
            Some(drafters) => drafters.clone(),
            None if block != BlockSize::Measured && (engine.has_mtp() || engine.draft_model().is_none()) => {
                Drafters::Priority(vec![DrafterOptions::Mtp])
            }
            None => Drafters::Auto,
        };
        if let Drafters::Priority(list) = &mut drafters {
            for options in list {
                if let DrafterOptions::NgramCache(options) = options {
                    options.corpus = self.ngram_static.as_deref().map(NgramCache::load).transpose()?.map(Arc::new);
                    let dynamic = self.ngram_dynamic.as_deref().filter(|path| path.exists());
                    options.earlier = dynamic.map(NgramCache::load).transpose()?.map(Arc::new);
                }
            }
        }
        Ok(Speculation::With(SpeculationOptions {
            drafters,
            block,
            skip_streak: self.skip_streak,
            drafts: if self.sample_drafts { DraftSampling::Sampled } else { DraftSampling::Greedy },
            pipeline: if self.pipeline_depth == 2 { Pipeline::Ahead } else { Pipeline::InTurn },
        }))
    }
}

/// How K and V are stored.
#[derive(Args)]
pub struct Kv {
    /// K/V cache preset: exact (f16), or quantized: quality, balanced, compact.
    #[arg(long, value_name = "NAME", default_value = "exact")]
    pub kv_preset: KvPreset,
    /// Type of the cached keys, instead of the preset's: f32, f16, bf16, tqc2..tqc6, turbo2..turbo4, q8_0, q4_0.
    #[arg(long, value_name = "T")]
    pub cache_type_k: Option<KvFormat>,
    /// Type of the cached values, likewise.
    #[arg(long, value_name = "T")]
    pub cache_type_v: Option<KvFormat>,
    /// Positions that fit the cache; by default, what the model was made for.
    #[arg(long, visible_alias = "ctx-size", value_name = "N")]
    pub context: Option<usize>,
}

impl Kv {
    /// The preset, with the formats and the context that were given instead of its own.
    pub fn options(&self) -> SessionOptions {
        let preset = KvOptions::from(self.kv_preset);
        SessionOptions {
            kv: KvOptions {
                key: self.cache_type_k.unwrap_or(preset.key),
                value: self.cache_type_v.unwrap_or(preset.value),
                max_context: self.context,
                ..preset
            },
        }
    }
}

/// What is continued.
#[derive(Args)]
pub struct Prompt {
    /// The text to continue (with --chat: the user's message).
    #[arg(default_value = "/// Returns the largest element of the slice, or `None` if it is empty.\n")]
    pub prompt: String,
    /// Token ids instead of a prompt.
    #[arg(long, value_name = "2,500,..", value_delimiter = ',', conflicts_with_all = ["prompt", "chat"])]
    pub prompt_ids: Option<Vec<u32>>,
    /// Put the prompt through the checkpoint's chat template.
    #[arg(long)]
    pub chat: bool,
    /// The system message, with --chat.
    #[arg(long, requires = "chat")]
    pub system: Option<String>,
    /// Let the model think first, with --chat.
    #[arg(long, requires = "chat")]
    pub think: bool,
    /// A JSON list of messages instead of the prompt, with --chat: as for OpenAI's chat completions.
    #[arg(long, value_name = "FILE", requires = "chat", conflicts_with = "prompt")]
    pub messages: Option<PathBuf>,
    /// A JSON list of the tools' schemas, with --chat.
    #[arg(long, value_name = "FILE", requires = "chat")]
    pub tools: Option<PathBuf>,
    /// Further variables of the chat template: a JSON object.
    #[arg(long, value_name = "JSON", requires = "chat")]
    pub chat_template_kwargs: Option<String>,
}

fn read(path: &Path) -> foretoken::Result<String> {
    std::fs::read_to_string(path).map_err(|cause| foretoken::Error::Io { path: path.to_owned(), cause })
}

impl Prompt {
    /// Its token ids.
    ///
    /// # Errors
    /// If the checkpoint has no tokenizer or, with --chat, no template; or a file is no such JSON.
    pub fn ids(&self, engine: &Engine) -> foretoken::Result<Vec<u32>> {
        if let Some(ids) = &self.prompt_ids {
            return Ok(ids.clone());
        }
        if !self.chat {
            return engine.tokenizer()?.encode(&self.prompt);
        }
        let system = self.system.iter().map(Message::system);
        let messages: Vec<Message> = match &self.messages {
            Some(path) => system.chain(Message::list(&Json::parse(&read(path)?)?)?).collect(),
            None => system.chain([Message::user(&self.prompt)]).collect(),
        };
        engine.encode_chat(&messages, &self.chat_options()?)
    }

    /// What a chat is rendered with.
    ///
    /// # Errors
    /// If a file is no such JSON.
    pub fn chat_options(&self) -> foretoken::Result<ChatOptions> {
        Ok(ChatOptions {
            thinking: if self.think { Thinking::On } else { Thinking::Off },
            tools: self
                .tools
                .as_deref()
                .map(|path| Json::parse(&read(path)?)?.into_list())
                .transpose()?
                .unwrap_or_default(),
            variables: self
                .chat_template_kwargs
                .as_deref()
                .map(|text| Json::parse(text)?.into_fields())
                .transpose()?
                .unwrap_or_default(),
            ..ChatOptions::default()
        })
    }
}
