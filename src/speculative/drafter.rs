//! What a drafter is, and which there are.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use candle_core::Tensor;
use rand::rngs::StdRng;

use super::draft_model::DeviceDraftModel;
use super::mtp::DeviceMtp;
use super::{
    Draft, DraftModel, DraftSampling, Mtp, NgramCache, NgramCacheDrafter, NgramCacheOptions, NgramMapK, NgramMapK4v,
    NgramMapOptions, NgramMod, NgramModOptions, NgramPool, NgramSimple, NgramSimpleOptions, Passes,
};
use crate::gemma4::on_device::Models;
use crate::gemma4::{Assistant, Target};
use crate::kv::{Committed, KvOptions};
use crate::sampler::Sampler;
use crate::{Error, Isa, Result};

/// What a drafter may read: the sequence as it stands between two rounds.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// All tokens, the newest included, which the target has not read yet.
    pub tokens: &'a [u32],
    /// `(1, hidden)`: the target's state, after the final norm, that predicted the newest token.
    pub hidden: &'a Tensor,
    /// The target's K and V of all tokens but the newest.
    pub kv: Committed<'a>,
    /// How the request chooses tokens.
    pub sampler: &'a Sampler,
    /// How drafts are chosen by drafters that have a distribution.
    pub drafts: DraftSampling,
    /// Whether the drafts' probabilities are wanted (a trace shows them).
    pub confidence: Confidence,
}

/// Whether a draft says how probable its drafter thinks its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Confidence {
    /// No: nobody looks at it.
    #[default]
    Unsaid,
    /// Yes, in [`Draft::confidence`].
    Said,
}

/// What the target said about a draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Tokens that were verified.
    pub drafted: usize,
    /// Leading tokens of those that stand.
    pub accepted: usize,
}

/// How the price of a draft grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftCost {
    /// A step of a model for every token: the planner decides how many before they are drafted.
    PerToken,
    /// Next to nothing, whatever its length: it is drafted first, and the planner decides how much of it is verified.
    Once,
}

/// Proposes tokens. Whatever it proposes, the text stays the target's; only the speed is at stake.
pub trait Drafter: Send {
    /// Which one it is.
    fn kind(&self) -> DrafterKind;

    /// How the price of its drafts grows.
    fn cost(&self) -> DraftCost;

    /// A generation begins after `tokens`: the sequence of the last generation, longer, or another one.
    fn begin(&mut self, tokens: &[u32]);

    /// Lengthens `draft`, which is empty or its own of this round, to at most `most` tokens.
    ///
    /// # Errors
    /// If a model's numbers are none.
    fn draft(&mut self, context: &Context<'_>, most: usize, draft: &mut Draft, rng: &mut StdRng) -> Result<()>;

    /// The round is over and `tokens` the sequence now; `own` is the verdict if the draft was this drafter's.
    fn accept(&mut self, tokens: &[u32], own: Option<Verdict>);

    /// What it has learnt that may serve other sequences.
    fn learnt(&self) -> Option<NgramCache> {
        None
    }
}

/// The drafters, by the names that users give them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DrafterKind {
    /// The assistant, chained with itself.
    Mtp,
    /// A smaller Gemma 4.
    DraftModel,
    /// What followed the newest n-gram when it last occurred.
    NgramSimple,
    /// What followed it often enough.
    NgramMapK,
    /// What followed it most often, of up to four continuations.
    NgramMapK4v,
    /// A hash table of next tokens, shared by the sessions of an engine.
    NgramMod,
    /// Counts of next tokens after one to four tokens, in the context, in earlier texts and in a corpus.
    NgramCache,
}

impl DrafterKind {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Mtp,
        Self::DraftModel,
        Self::NgramSimple,
        Self::NgramMapK,
        Self::NgramMapK4v,
        Self::NgramMod,
        Self::NgramCache,
    ];

    /// Its name on a command line and in a trace.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mtp => "mtp",
            Self::DraftModel => "draft-model",
            Self::NgramSimple => "ngram-simple",
            Self::NgramMapK => "ngram-map-k",
            Self::NgramMapK4v => "ngram-map-k4v",
            Self::NgramMod => "ngram-mod",
            Self::NgramCache => "ngram-cache",
        }
    }
}

impl fmt::Display for DrafterKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A drafter with its parameters.
#[derive(Clone, Debug, PartialEq)]
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
        }
    }

    /// The parameters by the short names that [`FromStr`] takes.
    fn parameters(&mut self) -> Vec<(&'static str, &mut usize)> {
        match self {
            Self::Mtp | Self::DraftModel => Vec::new(),
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
            Some((name, _)) => Err(Error::Input(format!("{}: {name} is 0, must be at least 1", self.kind()))),
            None => Ok(()),
        }
    }
}

impl From<DrafterKind> for DrafterOptions {
    /// The drafter with its default parameters.
    fn from(kind: DrafterKind) -> Self {
        match kind {
            DrafterKind::Mtp => Self::Mtp,
            DrafterKind::DraftModel => Self::DraftModel,
            DrafterKind::NgramSimple => Self::NgramSimple(NgramSimpleOptions::default()),
            DrafterKind::NgramMapK => Self::NgramMapK(NgramMapOptions::default()),
            DrafterKind::NgramMapK4v => Self::NgramMapK4v(NgramMapOptions::default()),
            DrafterKind::NgramMod => Self::NgramMod(NgramModOptions::default()),
            DrafterKind::NgramCache => Self::NgramCache(NgramCacheOptions::default()),
        }
    }
}

/// A name with parameters behind it: `mtp`, `ngram-map-k:n=8:m=24:hits=2`.
impl FromStr for DrafterOptions {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut parts = text.split(':');
        let name = parts.next().unwrap_or_default();
        let Some(kind) = DrafterKind::ALL.into_iter().find(|kind| kind.name() == name) else {
            let names: Vec<_> = DrafterKind::ALL.iter().map(|kind| kind.name()).collect();
            let problem =
                format!("{name:?} is no drafter; there are {}, and auto for the best of them", names.join(", "));
            return Err(Error::Input(problem));
        };
        let mut options = Self::from(kind);
        for part in parts {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            let mut parameters = options.parameters();
            let names: Vec<_> = parameters.iter().map(|(name, _)| *name).collect();
            let Some((_, to)) = parameters.iter_mut().find(|(name, _)| *name == key) else {
                let names = if names.is_empty() { "none".into() } else { names.join(", ") };
                return Err(Error::Input(format!("{name} has no parameter {key:?}; it has {names}")));
            };
            **to = value.parse().map_err(|_| Error::Input(format!("{name}: {key} is {value:?}, must be a number")))?;
        }
        options.check()?;
        Ok(options)
    }
}

/// Which drafters propose, and whose draft is verified.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Drafters {
    /// Those that the engine can offer without being asked: the assistant or a draft model if one is loaded, and a
    /// look-up; as [`Drafters::Best`].
    #[default]
    Auto,
    /// The first of the list that has a draft.
    Priority(Vec<DrafterOptions>),
    /// The draft that promises the most tokens per millisecond; a long look-up may be put to a model's first token, and
    /// is verified where that agrees.
    Best(Vec<DrafterOptions>),
}

/// `auto`, or a list by priority: `ngram-mod,mtp`.
impl FromStr for Drafters {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        Ok(Self::Priority(text.split(',').map(DrafterOptions::from_str).collect::<Result<_>>()?))
    }
}

/// What drafters are made from; an engine's.
#[derive(Clone)]
pub(crate) struct Sources {
    pub target: Arc<Target>,
    pub assistant: Option<Arc<Assistant>>,
    pub draft_model: Option<Arc<Target>>,
    /// The draft model where the target computes, if that is a device.
    pub device_draft_model: Option<Arc<Models>>,
    pub pool: Arc<NgramPool>,
    pub isa: Isa,
}

impl Sources {
    /// The list that [`Drafters`] stands for.
    pub fn list(&self, drafters: &Drafters) -> Vec<DrafterOptions> {
        match drafters {
            Drafters::Priority(list) | Drafters::Best(list) => list.clone(),
            Drafters::Auto => {
                let look_up = DrafterOptions::NgramMapK(NgramMapOptions::AUTO);
                let assistant = self.assistant.as_ref().map(|_| DrafterOptions::Mtp);
                let model = self.draft_model.as_ref().map(|_| DrafterOptions::DraftModel);
                [Some(look_up), assistant.or(model)].into_iter().flatten().collect()
            }
        }
    }

    /// Makes a drafter for one sequence, whose target runs in `passes` and whose cache is made as `kv` says.
    ///
    /// # Errors
    /// If its model was not loaded, or a parameter is out of range.
    pub fn drafter(&self, options: &DrafterOptions, passes: &Passes, kv: &KvOptions) -> Result<Box<dyn Drafter>> {
        options.check()?;
        Ok(match options {
            DrafterOptions::Mtp => {
                let missing =
                    || Error::Input("speculation needs an assistant; load one, or turn speculation off".into());
                let assistant = self.assistant.clone().ok_or_else(missing)?;
                match &passes.device {
                    Some(sequence) => Box::new(DeviceMtp::new(sequence.clone())),
                    None => Box::new(Mtp::new(self.target.clone(), assistant)),
                }
            }
            DrafterOptions::DraftModel => {
                let missing = || Error::Input("draft-model needs a draft model; load one, or leave it out".into());
                let model = self.draft_model.clone().ok_or_else(missing)?;
                match &self.device_draft_model {
                    Some(models) => Box::new(DeviceDraftModel::new(models, &model, kv)?),
                    None => Box::new(DraftModel::new(model, kv, self.isa)?),
                }
            }
            DrafterOptions::NgramSimple(options) => Box::new(NgramSimple::new(*options)),
            DrafterOptions::NgramMapK(options) => Box::new(NgramMapK::new(*options)),
            DrafterOptions::NgramMapK4v(options) => Box::new(NgramMapK4v::new(*options)),
            DrafterOptions::NgramMod(options) => Box::new(NgramMod::new(*options, self.pool.clone())),
            DrafterOptions::NgramCache(options) => {
                let vocab = self.target.config().num_readable_tokens();
                for cache in options.corpus.iter().chain(&options.earlier) {
                    cache.check(vocab)?;
                }
                Box::new(NgramCacheDrafter::new(options.clone()))
            }
        })
    }
}
