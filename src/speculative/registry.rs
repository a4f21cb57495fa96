//! The drafters by name, and their construction.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use super::{
    Backend, ChainedModel, DraftModel, Drafter, Forced, Mtp, NextN, NgramCacheDrafter, NgramCacheOptions, NgramMapK,
    NgramMapK4v, NgramMapOptions, NgramMod, NgramModOptions, NgramPool, NgramSimple, NgramSimpleOptions, Reads,
};
use crate::device::{DeviceDraftModel, DeviceMtp, Models};
use crate::gemma4::{Assistant, Target};
use crate::kv::{KvOptions, PagePool};
use crate::model::{Model, NextnHead};
use crate::{Error, Result};

/// The drafters by their command line names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum DrafterKind {
    /// The assistant, or the model's own NextN head, run autoregressively.
    Mtp,
    /// A smaller model with the same vocabulary.
    DraftModel,
    /// What followed the last occurrence of the last n-gram.
    NgramSimple,
    /// What followed it often enough.
    NgramMapK,
    /// What followed it most often, of up to four continuations.
    NgramMapK4v,
    /// A hash table of next tokens, shared by the sessions of an engine.
    NgramMod,
    /// Counts of next tokens after one to four tokens, in the context, in earlier texts and in a corpus.
    NgramCache,
    /// The tokens that a constraint forces.
    Forced,
    /// A custom drafter.
    Custom,
}

/// A named drafter.
struct Entry {
    kind: DrafterKind,
    name: &'static str,
    /// With its default parameters.
    options: fn() -> DrafterOptions,
}

/// The named drafters, the source of every list of them.
static REGISTRY: [Entry; 7] = [
    Entry { kind: DrafterKind::Mtp, name: "mtp", options: || DrafterOptions::Mtp },
    Entry { kind: DrafterKind::DraftModel, name: "draft-model", options: || DrafterOptions::DraftModel },
    Entry {
        kind: DrafterKind::NgramSimple,
        name: "ngram-simple",
        options: || DrafterOptions::NgramSimple(NgramSimpleOptions::default()),
    },
    Entry {
        kind: DrafterKind::NgramMapK,
        name: "ngram-map-k",
        options: || DrafterOptions::NgramMapK(NgramMapOptions::default()),
    },
    Entry {
        kind: DrafterKind::NgramMapK4v,
        name: "ngram-map-k4v",
        options: || DrafterOptions::NgramMapK4v(NgramMapOptions::default()),
    },
    Entry {
        kind: DrafterKind::NgramMod,
        name: "ngram-mod",
        options: || DrafterOptions::NgramMod(NgramModOptions::default()),
    },
    Entry {
        kind: DrafterKind::NgramCache,
        name: "ngram-cache",
        options: || DrafterOptions::NgramCache(NgramCacheOptions::default()),
    },
];

impl DrafterKind {
    /// Those with a command line name.
    pub fn named() -> impl Iterator<Item = Self> {
        REGISTRY.iter().map(|entry| entry.kind)
    }

    /// Its name on a command line and in a trace.
    pub fn name(self) -> &'static str {
        REGISTRY.iter().find(|entry| entry.kind == self).map_or(self.unlisted(), |entry| entry.name)
    }

    /// The name of a drafter that cannot be requested by name.
    fn unlisted(self) -> &'static str {
        if self == Self::Forced { "forced" } else { "custom" }
    }
}

impl fmt::Display for DrafterKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A drafter with its parameters.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum DrafterOptions {
    /// [`Mtp`]
    Mtp,
    /// [`DraftModel`]
    DraftModel,
    /// [`NgramSimple`]
    NgramSimple(NgramSimpleOptions),
    /// [`NgramMapK`]
    NgramMapK(NgramMapOptions),
    /// [`NgramMapK4v`]
    NgramMapK4v(NgramMapOptions),
    /// [`NgramMod`]
    NgramMod(NgramModOptions),
    /// [`NgramCacheDrafter`]
    NgramCache(NgramCacheOptions),
    /// [`Forced`]: added before all others if there is a constraint.
    Forced,
    /// A custom drafter.
    Custom(CustomDrafter),
}

impl DrafterOptions {
    /// Which drafter it is.
    pub fn kind(&self) -> DrafterKind {
        match self {
            Self::Mtp => DrafterKind::Mtp,
            Self::DraftModel => DrafterKind::DraftModel,
            Self::NgramSimple(_) => DrafterKind::NgramSimple,
            Self::NgramMapK(_) => DrafterKind::NgramMapK,
            Self::NgramMapK4v(_) => DrafterKind::NgramMapK4v,
            Self::NgramMod(_) => DrafterKind::NgramMod,
            Self::NgramCache(_) => DrafterKind::NgramCache,
            Self::Forced => DrafterKind::Forced,
            Self::Custom(_) => DrafterKind::Custom,
        }
    }

    /// The parameters by the short names that [`FromStr`] accepts.
    fn parameters(&mut self) -> Vec<(&'static str, &mut usize)> {
        match self {
            Self::Mtp | Self::DraftModel | Self::Forced | Self::Custom(_) => Vec::new(),
            Self::NgramSimple(o) => vec![("n", &mut o.n), ("m", &mut o.m)],
            Self::NgramMapK(o) | Self::NgramMapK4v(o) => {
                vec![("n", &mut o.n), ("m", &mut o.m), ("hits", &mut o.min_hits)]
            }
            Self::NgramMod(o) => vec![("n", &mut o.n), ("min", &mut o.min), ("max", &mut o.max)],
            Self::NgramCache(o) => vec![("max", &mut o.max)],
        }
    }

    /// # Errors
    /// If a parameter is zero.
    pub(crate) fn check(&self) -> Result<()> {
        match self.clone().parameters().iter().find(|(_, value)| **value == 0) {
            Some((name, _)) => {
                Err(Error::argument("drafters", format!("{}: {name} is 0, must be at least 1", self.kind())))
            }
            None => Ok(()),
        }
    }
}

/// Characters of an unknown drafter's name that an error repeats.
const MAX_SHOWN: usize = 32;

/// A name followed by parameters: `mtp`, `ngram-map-k:n=8:m=24:hits=2`.
impl FromStr for DrafterOptions {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut parts = text.split(':');
        let name = parts.next().unwrap_or_default();
        let Some(entry) = REGISTRY.iter().find(|entry| entry.name == name) else {
            let names: Vec<_> = REGISTRY.iter().map(|entry| entry.name).collect();
            let shown: String = name.chars().take(MAX_SHOWN).collect();
            let names = names.join(", ");
            let problem = format!("{shown:?} is not a drafter; expected one of {names}, or auto");
            return Err(Error::argument("drafters", problem));
        };
        let mut options = (entry.options)();
        for part in parts {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            let mut parameters = options.parameters();
            let names: Vec<_> = parameters.iter().map(|(name, _)| *name).collect();
            let Some((_, to)) = parameters.iter_mut().find(|(name, _)| *name == key) else {
                let names = if names.is_empty() { "none".into() } else { names.join(", ") };
                let problem = format!("{name} has no parameter {key:?}; it has {names}");
                return Err(Error::argument("drafters", problem));
            };
            let problem = |_| Error::argument("drafters", format!("{name}: {key} is {value:?}, must be a number"));
            **to = value.parse().map_err(problem)?;
        }
        options.check()?;
        Ok(options)
    }
}

/// Constructor of a custom drafter, called once per session.
#[derive(Clone)]
pub struct CustomDrafter {
    name: Arc<str>,
    make: Arc<dyn Fn() -> Box<dyn Drafter> + Send + Sync>,
}

impl CustomDrafter {
    /// `make` makes the drafter of an empty sequence; `name` is for messages.
    pub fn new(name: &str, make: impl Fn() -> Box<dyn Drafter> + Send + Sync + 'static) -> Self {
        Self { name: name.into(), make: Arc::new(make) }
    }
}

impl fmt::Debug for CustomDrafter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// Clones are equal: a session keeps its drafters and their state as long as its options are equal.
impl PartialEq for CustomDrafter {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.make, &other.make)
    }
}

/// Which drafters propose, and which draft is verified.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Drafters {
    /// The engine's defaults, as [`Drafters::Best`]: a prompt lookup drafter, and the assistant, NextN head or draft model if
    /// there is one.
    #[default]
    Auto,
    /// The first of the list that has a draft.
    Priority(Vec<DrafterOptions>),
    /// The draft with the highest expected tokens per millisecond.
    Best(Vec<DrafterOptions>),
    /// A single custom drafter. In a list, use [`DrafterOptions::Custom`].
    Custom(CustomDrafter),
}

/// `auto`, or a list by priority: `ngram-mod,mtp`. A drafter may be listed once, or once for each set of parameters.
impl FromStr for Drafters {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let mut list = Vec::new();
        for part in text.split(',') {
            let options: DrafterOptions = part.parse()?;
            if list.contains(&options) {
                let problem = format!("{} is listed twice with the same parameters; list it once", options.kind());
                return Err(Error::argument("drafters", problem));
            }
            list.push(options);
        }
        Ok(Self::Priority(list))
    }
}

/// An engine's models and pools, from which drafters are made.
#[derive(Clone)]
pub(crate) struct Sources {
    pub model: Arc<dyn Model>,
    /// The target, if it is a Gemma 4.
    pub gemma4: Option<Arc<Target>>,
    pub assistant: Option<Arc<Assistant>>,
    /// The target's NextN head, if it has one.
    pub nextn: Option<Arc<dyn NextnHead>>,
    pub draft_model: Option<Arc<ChainedModel>>,
    /// The draft model, if the target runs on a device.
    pub device_draft_model: Option<(Arc<Models>, Arc<Target>)>,
    pub ngrams: Arc<NgramPool>,
    pub pages: PagePool,
}

impl Sources {
    /// The resolved list of [`Drafters`].
    pub fn list(&self, drafters: &Drafters) -> Vec<DrafterOptions> {
        match drafters {
            Drafters::Priority(list) | Drafters::Best(list) => list.clone(),
            Drafters::Custom(custom) => vec![DrafterOptions::Custom(custom.clone())],
            Drafters::Auto => {
                let lookup = DrafterOptions::NgramMapK(NgramMapOptions::AUTO);
                let mtp = self.has_mtp().then_some(DrafterOptions::Mtp);
                let model = self.draft_model.as_ref().map(|_| DrafterOptions::DraftModel);
                [Some(lookup), mtp.or(model)].into_iter().flatten().collect()
            }
        }
    }

    /// Whether the drafter `mtp` is available.
    pub fn has_mtp(&self) -> bool {
        self.assistant.is_some() || self.nextn.is_some()
    }

    /// Makes a drafter for one sequence, whose target runs in `backend` and whose cache is made from `kv`.
    ///
    /// # Errors
    /// If its model was not loaded, or a parameter is out of range.
    pub fn drafter(&self, options: &DrafterOptions, backend: &Backend, kv: &KvOptions) -> Result<Box<dyn Drafter>> {
        options.check()?;
        Ok(match options {
            DrafterOptions::Mtp => {
                if let Some(head) = &self.nextn {
                    return Ok(Box::new(NextN::new(head.clone(), kv, &self.pages)?));
                }
                let missing = || {
                    Error::argument(
                        "drafters",
                        "mtp needs an assistant, or a model with a NextN head; load one, or turn speculation off",
                    )
                };
                let assistant = self.assistant.clone().ok_or_else(missing)?;
                match &backend.device {
                    Some(sequence) => Box::new(DeviceMtp::new(sequence.clone())),
                    None => Box::new(Mtp::new(assistant)),
                }
            }
            DrafterOptions::DraftModel => {
                let missing = || Error::argument("drafters", "draft-model needs a draft model; load one, or omit it");
                let model = self.draft_model.clone().ok_or_else(missing)?;
                match &self.device_draft_model {
                    Some((models, target)) => Box::new(DeviceDraftModel::new(models, target, kv)?),
                    None => Box::new(DraftModel::new(model, kv, &self.pages)?),
                }
            }
            DrafterOptions::NgramSimple(options) => Box::new(NgramSimple::new(*options)),
            DrafterOptions::NgramMapK(options) => Box::new(NgramMapK::new(*options)),
            DrafterOptions::NgramMapK4v(options) => Box::new(NgramMapK4v::new(*options)),
            DrafterOptions::NgramMod(options) => Box::new(NgramMod::new(*options, self.ngrams.clone())),
            DrafterOptions::NgramCache(options) => {
                let vocab = self.model.num_readable_tokens();
                for cache in options.corpus.iter().chain(&options.earlier) {
                    cache.check(vocab)?;
                }
                Box::new(NgramCacheDrafter::new(options.clone()))
            }
            DrafterOptions::Forced => Box::new(Forced),
            DrafterOptions::Custom(custom) => {
                let drafter = (custom.make)();
                if drafter.reads() != Reads::default() && backend.device.is_some() {
                    let problem = format!("the drafter {} reads hidden states, which stay on the device", custom.name);
                    return Err(Error::argument("drafters", format!("{problem}; use the CPU")));
                }
                drafter
            }
        })
    }
}
