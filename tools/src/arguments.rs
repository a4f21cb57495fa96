//! Groups of command-line options, and the library options they map to.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use clap::Args;
use foretoken::checkpoint::find_assistants;
use foretoken::kv::{KvFormat, KvOptions, KvPreset};
use foretoken::speculative::{BlockSize, DraftSampling, DrafterKind, DrafterOptions, Drafters, MtpPreset, NgramCache};
use foretoken::{
    DeviceChoice, DraftPipeline, Engine, EngineOptions, Isa, Sampling, SessionOptions, Speculation, SpeculationOptions,
    WeightType, hub,
};

use crate::centroids::CentroidChoice;
use crate::environment::{hub_cache, hub_endpoint, hub_offline, hub_token, own_cache};
use crate::eprintln;
use crate::progress::ProgressLine;

/// Checkpoints, and what computes.
#[derive(Args)]
pub struct Load {
    /// Target checkpoint: a directory, a GGUF file, or (feature hub) a Hugging Face Hub name (owner/name, or
    /// owner/name:Q4_K_M for a GGUF file; with a branch, tag or commit, owner/name@REVISION or
    /// owner/name@REVISION:Q4_K_M).
    #[arg(short, long)]
    pub model: Option<PathBuf>,
    /// Assistant checkpoint, likewise. Default: the matching one next to the model (mtp-*.gguf, *-assistant*.gguf,
    /// MTP/, MODEL-assistant; for a model in the Hub cache, the repository NAME-assistant there); several are an error.
    #[arg(long)]
    pub assistant: Option<PathBuf>,
    /// Use no assistant, even if there is one next to the model.
    #[arg(long, conflicts_with = "assistant")]
    pub no_assistant: bool,
    /// Smaller model with the same tokenizer for the drafter draft-model: a directory, a GGUF file, or a Hugging Face
    /// Hub name.
    #[arg(long, value_name = "MODEL")]
    pub draft_model: Option<PathBuf>,
    /// Centroids of the assistant: own, none, auto (its own; if it has none, builds and caches 2048 if a
    /// draft step is faster with them), or N/K (always builds N, of which K are scored). Built centroids
    /// lower the acceptance; the text is the same.
    #[arg(long, value_name = "WHICH", default_value = "own", conflicts_with = "no_assistant")]
    pub centroids: CentroidChoice,
    /// Do not cache built centroids (default: foretoken in XDG_CACHE_HOME, or in .cache in the home directory).
    #[arg(long)]
    pub no_cache: bool,
    /// Download cache. Default: HF_HUB_CACHE, or hub in HF_HOME, or huggingface/hub in XDG_CACHE_HOME or in .cache in
    /// the home directory. The token is HF_TOKEN, or the one stored by hf auth login; HF_ENDPOINT is a mirror,
    /// and with HF_HUB_OFFLINE=1 nothing is downloaded.
    #[arg(long, value_name = "DIR")]
    pub hf_cache: Option<PathBuf>,
    /// Quantize floating-point matrices while loading: q4_k, q6_k, q8_0, ...; an unknown type lists all. Default: the
    /// types of the file.
    #[arg(long, value_name = "TYPE", value_parser = quantized_type)]
    pub quantize: Option<WeightType>,
    /// Compute device, threads and instruction set.
    #[command(flatten)]
    pub compute: Compute,
}

impl Load {
    /// The engine's options; without a model, the demo pair. Hub names are resolved, with a progress bar on a
    /// terminal. Without an assistant, and unless `drafting` disables speculation, a matching one is searched
    /// for next to the model and reported on stderr.
    ///
    /// # Errors
    /// If a listed drafter's model is missing, --no-cache or --centroids has no effect, a checkpoint cannot be
    /// downloaded from the Hub, the model cannot be read to match assistants, or several match.
    pub fn options(&self, drafting: &Drafting) -> Result<EngineOptions> {
        ensure!(
            self.draft_model.is_some() || !drafting.lists(DrafterKind::DraftModel),
            "--spec-type: draft-model needs a draft model; pass --draft-model, or omit it"
        );
        ensure!(
            !self.no_cache || matches!(self.centroids, CentroidChoice::Auto | CentroidChoice::Built(_)),
            "--no-cache: no centroids are built; pass --centroids auto or N/K, or omit it"
        );
        let demo = || (self.model.is_none() && !self.no_assistant).then(|| crate::demo("assistant"));
        let assistant = self.assistant.clone().or_else(demo);
        let (from, load) = (hub_options(self.hf_cache.clone()), ProgressLine::new("loading", 0));
        let model = hub::resolve(self.model.clone().unwrap_or_else(|| crate::demo("target")), &from)?;
        let assistant = match assistant {
            Some(path) => Some(hub::resolve(path, &from)?),
            None if self.no_assistant || drafting.no_speculation => None,
            None => found_assistant(&model)?,
        };
        self.centroids.check(assistant.as_deref())?;
        Ok(self.compute.options(EngineOptions {
            assistant,
            centroids: self.centroids.with_cache(own_cache().filter(|_| !self.no_cache)),
            draft_model: self.draft_model.as_deref().map(|path| hub::resolve(path, &from)).transpose()?,
            quantize: self.quantize,
            progress: Some(Arc::new(move |progress| load.set(progress.loaded, progress.total))),
            ..EngineOptions::new(model)
        }))
    }

    /// Reports on stderr that the assistant has no centroids, unless `--centroids` was given.
    pub fn report_centroids(&self, engine: &Engine) {
        let is_dense = engine.assistant().is_some_and(|assistant| !assistant.has_centroids());
        if is_dense && self.centroids == CentroidChoice::Own {
            eprintln!(
                "centroids: the assistant has none, so every draft step reads its whole LM head (--centroids auto: build \
                 them if that is faster)"
            );
        }
    }
}

/// Compute device, threads and instruction set.
#[derive(Args)]
pub struct Compute {
    /// Compute device: cpu, cuda, cuda:N, metal, metal:N, or auto for a GPU if one works and otherwise the CPU (build
    /// with --features cuda, cuda-prebuilt or metal).
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: DeviceChoice,
    /// Number of threads. Default: physical cores.
    #[arg(short, long)]
    pub threads: Option<usize>,
    /// Instruction set of the CPU kernels. Default: the widest that the processor supports.
    #[arg(long, value_name = "NAME")]
    pub isa: Option<Isa>,
}

impl Compute {
    /// `options` with these.
    pub fn options(&self, options: EngineOptions) -> EngineOptions {
        EngineOptions { device: self.device.clone(), threads: self.threads, isa: self.isa, ..options }
    }
}

/// The checkpoints of a command without [`Load`].
#[derive(Args)]
pub struct Pair {
    /// Target checkpoint. Default: the demo pair.
    #[arg(short, long)]
    model: Option<PathBuf>,
    /// Assistant checkpoint; not needed if the target has a NextN head.
    #[arg(long)]
    assistant: Option<PathBuf>,
}

impl Pair {
    /// The engine's options.
    ///
    /// # Errors
    /// As [`pair`].
    pub fn options(&self) -> Result<EngineOptions> {
        pair(self.model.as_deref(), self.assistant.as_deref())
    }
}

/// A weight type that matrices can be quantized to; the others can only be loaded.
///
/// # Errors
/// If it is none of those, which are listed.
pub fn quantized_type(name: &str) -> Result<WeightType, String> {
    let parsed = name.parse::<WeightType>();
    let what = if parsed.is_ok() { "can be loaded, but not quantized to" } else { "is unknown" };
    parsed.ok().filter(|weight_type| weight_type.is_written()).ok_or_else(|| {
        let written = WeightType::ALL.into_iter().filter(|weight_type| weight_type.is_written());
        let names: Vec<_> = written.map(|weight_type| weight_type.name().to_ascii_lowercase()).collect();
        format!("{what}; use one of {}", names.join(", "))
    })
}

/// The options of the Hub, with a progress bar on a terminal.
fn hub_options(cache: Option<PathBuf>) -> hub::HubOptions {
    let download = ProgressLine::new("downloading", 0);
    let default = hub::HubOptions::default();
    hub::HubOptions {
        endpoint: hub_endpoint().unwrap_or(default.endpoint),
        cache: cache.or_else(hub_cache),
        token: hub_token(),
        offline: hub_offline(),
        progress: Some(Arc::new(move |file| download.set(file.done, file.total))),
        ..default
    }
}

/// The path of a checkpoint that may be named on the Hub.
///
/// # Errors
/// If it cannot be downloaded.
pub fn resolve(checkpoint: &Path) -> Result<PathBuf> {
    Ok(hub::resolve(checkpoint, &hub_options(None))?)
}

/// The options for a target and its assistant; without a model, the demo pair. Hub names are resolved.
///
/// # Errors
/// If one cannot be downloaded.
pub fn pair(model: Option<&Path>, assistant: Option<&Path>) -> Result<EngineOptions> {
    let demo = || model.is_none().then(|| crate::demo("assistant"));
    let assistant = assistant.map(Path::to_owned).or_else(demo);
    Ok(EngineOptions {
        assistant: assistant.as_deref().map(resolve).transpose()?,
        ..EngineOptions::new(target(model)?)
    })
}

/// As [`pair`], of the target alone.
///
/// # Errors
/// If it cannot be downloaded.
pub fn target(model: Option<&Path>) -> Result<PathBuf> {
    model.map_or_else(|| Ok(crate::demo("target")), resolve)
}

/// The assistant next to the model, if one fits; prints which, or why one is ignored.
///
/// # Errors
/// If several fit.
fn found_assistant(model: &Path) -> Result<Option<PathBuf>> {
    let found = find_assistants(model)?;
    if let Some(path) = found.only() {
        match path == model {
            true => eprintln!("assistant: the one inside the model (disable with --no-assistant)"),
            false => eprintln!("assistant: {} (found automatically; disable with --no-assistant)", path.display()),
        }
        return Ok(Some(path.to_owned()));
    }
    if !found.fitting.is_empty() {
        let paths: Vec<_> = found.fitting.iter().map(|path| path.display().to_string()).collect();
        bail!(
            "several assistants fit the model; choose one with --assistant, or pass --no-assistant: {}",
            paths.join(", ")
        );
    }
    for (path, error) in found.misfits {
        eprintln!("ignoring assistant {}: {error}", path.display());
    }
    Ok(None)
}

/// Speculative decoding.
#[derive(Args)]
pub struct Drafting {
    /// Disable speculative decoding.
    #[arg(long, conflicts_with_all = ["draft_block_size", "mtp_preset", "skip_streak", "sample_drafts"])]
    pub no_speculation: bool,
    /// Drafters: auto (ngram-map-k:n=6 and the assistant, NextN head or draft model, as the planner chooses), or a list
    /// in order of priority of mtp, draft-model, ngram-simple, ngram-map-k, ngram-map-k4v, ngram-mod, ngram-cache, with
    /// parameters after a name (ngram-map-k:n=8:m=24:hits=2). Default: auto if there is an assistant, a NextN head or a
    /// draft model; the assistant or NextN head if a block size or a preset is given.
    #[arg(long, value_name = "LIST", conflicts_with = "no_speculation")]
    pub spec_type: Option<Drafters>,
    /// Rows per verification: the number of drafts plus one. Default: chosen for every round from measured costs.
    #[arg(long, value_name = "B")]
    pub draft_block_size: Option<usize>,
    /// Block size preset: throughput, balanced, quality.
    #[arg(long, value_name = "NAME", conflicts_with = "draft_block_size")]
    pub mtp_preset: Option<MtpPreset>,
    /// Pause the drafting model after N consecutive fully rejected drafts (1 to 32). Default: never.
    #[arg(long, value_name = "N")]
    pub skip_streak: Option<usize>,
    /// Sample drafts from the drafter's distribution instead of taking its most probable token, at temperatures above
    /// 0.
    #[arg(long)]
    pub sample_drafts: bool,
    /// N-gram counts of a corpus for ngram-cache, which --spec-type must list.
    #[arg(long, value_name = "FILE", conflicts_with = "no_speculation")]
    pub ngram_static: Option<PathBuf>,
    /// N-gram counts of earlier texts for ngram-cache, which --spec-type must list; `generate`
    /// creates and updates the file.
    #[arg(long, value_name = "FILE", conflicts_with = "no_speculation")]
    pub ngram_dynamic: Option<PathBuf>,
}

/// When drafts are made, in commands that generate one text at a time: a scheduler makes no drafts ahead.
#[derive(Args)]
pub struct Pipelining {
    /// 2: draft the next round while the text of this one is processed.
    #[arg(long, value_name = "1|2", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
    pub pipeline_depth: u8,
}

impl Pipelining {
    /// The option of the library.
    pub fn pipeline(&self) -> DraftPipeline {
        if self.pipeline_depth == 2 { DraftPipeline::Ahead } else { DraftPipeline::InTurn }
    }
}

impl Drafting {
    /// The speculation options. A block size or a preset alone selects the assistant.
    ///
    /// # Errors
    /// If a drafter needs an assistant and there is none, a file of n-gram counts cannot be read, or no drafter uses it
    /// or another option.
    pub fn options(&self, engine: &Engine, pipeline: DraftPipeline) -> Result<Speculation> {
        self.check_ngram_files()?;
        let (block, option) = match (self.draft_block_size, self.mtp_preset) {
            (Some(rows), _) => (BlockSize::Fixed(rows), "--draft-block-size"),
            (None, Some(preset)) => (BlockSize::Preset(preset), "--mtp-preset"),
            (None, None) => (BlockSize::Measured, "--spec-type"),
        };
        let has_model = engine.has_mtp() || engine.draft_model().is_some();
        if self.no_speculation || self.spec_type.is_none() && !has_model && block == BlockSize::Measured {
            self.check_unused(pipeline)?;
            return Ok(Speculation::Off);
        }
        let mut drafters = match &self.spec_type {
            Some(drafters) => drafters.clone(),
            None if block != BlockSize::Measured && (engine.has_mtp() || engine.draft_model().is_none()) => {
                Drafters::Priority(vec![DrafterOptions::Mtp])
            }
            None => Drafters::Auto,
        };
        if let Drafters::Priority(list) = &mut drafters {
            let has_mtp = list.iter().any(|options| options.kind() == DrafterKind::Mtp);
            ensure!(
                engine.has_mtp() || !has_mtp,
                "{}: mtp needs an assistant, or a model with a NextN head; pass --assistant, or omit it",
                if self.spec_type.is_some() { "--spec-type" } else { option }
            );
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
            pipeline,
        }))
    }

    /// Refuses options without effect on a command's own texts. Not for a server's defaults: requests may choose other
    /// drafters, and sample.
    ///
    /// # Errors
    /// If --sample-drafts was given and the temperature is 0, it or --skip-streak was given and no model drafts, or
    /// nothing drafts with the draft model.
    pub fn check_effects(&self, engine: &Engine, speculation: &Speculation, sampling: &Sampling) -> Result<()> {
        ensure!(
            !self.sample_drafts || sampling.temperature != 0.0,
            "--sample-drafts: nothing is sampled at temperature 0; pass a --temperature above 0, or omit it"
        );
        let Speculation::With(SpeculationOptions { drafters, .. }) = speculation else { return Ok(()) };
        let (mtp, draft_model) = match drafters {
            Drafters::Priority(list) | Drafters::Best(list) => {
                let lists = |kind| list.iter().any(|options| options.kind() == kind);
                (lists(DrafterKind::Mtp), lists(DrafterKind::DraftModel))
            }
            _ => (engine.has_mtp(), !engine.has_mtp() && engine.draft_model().is_some()),
        };
        for (option, is_given) in
            [("--skip-streak", self.skip_streak.is_some()), ("--sample-drafts", self.sample_drafts)]
        {
            let has_effect = !is_given || mtp || draft_model;
            ensure!(has_effect, "{option}: no model drafts; list mtp or draft-model in --spec-type, or omit it");
        }
        ensure!(
            draft_model || engine.draft_model().is_none(),
            "--draft-model: nothing drafts with it; list draft-model in --spec-type, or omit it"
        );
        Ok(())
    }

    /// For commands that read the file of --ngram-dynamic, and do not create it.
    ///
    /// # Errors
    /// If it is missing.
    pub fn check_dynamic(&self) -> Result<()> {
        match &self.ngram_dynamic {
            Some(path) if !path.exists() => {
                bail!("--ngram-dynamic: {} does not exist; generate creates it", path.display())
            }
            _ => Ok(()),
        }
    }

    /// # Errors
    /// If an option of drafts was given, but there are none.
    fn check_unused(&self, pipeline: DraftPipeline) -> Result<()> {
        let given = [
            ("--skip-streak", self.skip_streak.is_some()),
            ("--sample-drafts", self.sample_drafts),
            ("--pipeline-depth 2", pipeline == DraftPipeline::Ahead),
        ];
        match given.iter().find(|(_, is_given)| *is_given) {
            Some((option, _)) => bail!("{option}: nothing drafts; pass --assistant or --spec-type, or omit it"),
            None => Ok(()),
        }
    }

    /// Whether --spec-type lists the drafter.
    fn lists(&self, kind: DrafterKind) -> bool {
        matches!(&self.spec_type, Some(Drafters::Priority(list)) if list.iter().any(|options| options.kind() == kind))
    }

    /// # Errors
    /// If there is a file of n-gram counts, but --spec-type does not list the drafter that uses it.
    fn check_ngram_files(&self) -> Result<()> {
        if self.lists(DrafterKind::NgramCache) {
            return Ok(());
        }
        for (option, file) in [("--ngram-static", &self.ngram_static), ("--ngram-dynamic", &self.ngram_dynamic)] {
            ensure!(file.is_none(), "{option}: only the drafter ngram-cache uses it; list it in --spec-type");
        }
        Ok(())
    }
}

/// KV cache.
#[derive(Args)]
pub struct Kv {
    /// KV cache preset: exact (f16), or quantized: quality, balanced, compact.
    #[arg(long, value_name = "NAME", default_value = "exact")]
    pub kv_preset: KvPreset,
    /// Type of the cached keys; overrides the preset: f32, f16, bf16, tqc2..tqc6, turbo2..turbo4, q8_0, q4_0.
    #[arg(long, value_name = "T")]
    pub cache_type_k: Option<KvFormat>,
    /// Type of the cached values, likewise.
    #[arg(long, value_name = "T")]
    pub cache_type_v: Option<KvFormat>,
    /// Context size in tokens, with a warning if the model was trained for less. Default: the maximum of the model, or
    /// the largest that fits memory.
    #[arg(long, visible_alias = "ctx-size", value_name = "N")]
    pub context: Option<usize>,
}

impl Kv {
    /// The preset, with formats and context overridden as given.
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

/// A KV cache of a comparison: a preset, or one format for keys and values.
#[derive(Clone, Debug)]
pub struct NamedKv {
    /// The name that was given.
    pub name: String,
    /// What it names.
    pub options: KvOptions,
}

impl FromStr for NamedKv {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let options = match name.parse::<KvPreset>() {
            Ok(preset) => preset.into(),
            Err(_) => {
                let format: KvFormat = name.parse().map_err(|problem| {
                    let presets = KvPreset::ALL.map(KvPreset::name).join(", ");
                    format!("{problem}; presets are {presets}")
                })?;
                KvOptions { key: format, value: format, ..KvOptions::default() }
            }
        };
        Ok(Self { name: name.into(), options })
    }
}
