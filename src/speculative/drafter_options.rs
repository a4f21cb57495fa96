//! Which drafters a request uses, with their parameters.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use super::drafter::Drafter;
use super::drafter_kind::DrafterKind;
use super::drafters::{NgramCacheOptions, NgramMapOptions, NgramModOptions, NgramSimpleOptions, OCCURRENCES};
use crate::{Error, Result};

/// A drafter with its parameters.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum DrafterOptions {
    /// [`Mtp`](super::Mtp)
    Mtp,
    /// [`DraftModel`](super::DraftModel)
    DraftModel,
    /// [`NgramSimple`](super::NgramSimple)
    NgramSimple(NgramSimpleOptions),
    /// [`NgramMapK`](super::NgramMapK)
    NgramMapK(NgramMapOptions),
    /// [`NgramMapK4v`](super::NgramMapK4v)
    NgramMapK4v(NgramMapOptions),
    /// [`NgramMod`](super::NgramMod)
    NgramMod(NgramModOptions),
    /// [`NgramCacheDrafter`](super::NgramCacheDrafter)
    NgramCache(NgramCacheOptions),
    /// [`Forced`](super::Forced): added before all others if there is a constraint.
    Forced,
    /// A custom drafter.
    Custom(CustomDrafter),
}

impl DrafterOptions {
    /// A built-in drafter with its default parameters; `None` for a custom one.
    fn of(kind: DrafterKind) -> Option<Self> {
        Some(match kind {
            DrafterKind::Mtp => Self::Mtp,
            DrafterKind::DraftModel => Self::DraftModel,
            DrafterKind::NgramSimple => Self::NgramSimple(NgramSimpleOptions::default()),
            DrafterKind::NgramMapK => Self::NgramMapK(NgramMapOptions::default()),
            DrafterKind::NgramMapK4v => Self::NgramMapK4v(NgramMapOptions::default()),
            DrafterKind::NgramMod => Self::NgramMod(NgramModOptions::default()),
            DrafterKind::NgramCache => Self::NgramCache(NgramCacheOptions::default()),
            DrafterKind::Forced => Self::Forced,
            DrafterKind::Custom => return None,
        })
    }

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
            Self::NgramSimple(o) => vec![("n", &mut o.ngram_len), ("m", &mut o.max_draft_tokens)],
            Self::NgramMapK(o) | Self::NgramMapK4v(o) => {
                vec![("n", &mut o.ngram_len), ("m", &mut o.max_draft_tokens), ("hits", &mut o.min_hits)]
            }
            Self::NgramMod(o) => {
                let (min, max) = (&mut o.min_draft_tokens, &mut o.max_draft_tokens);
                vec![("n", &mut o.ngram_len), ("min", min), ("max", max)]
            }
            Self::NgramCache(o) => vec![("max", &mut o.max_draft_tokens)],
        }
    }

    /// # Errors
    /// If a parameter is zero, or such that there is never a draft.
    pub(crate) fn check(&self) -> Result<()> {
        let problem = match self.clone().parameters().iter().find(|(_, value)| **value == 0) {
            Some((name, _)) => format!("{name} is 0, must be at least 1"),
            None => match self {
                Self::NgramMapK(o) if o.min_hits > OCCURRENCES => {
                    format!("hits is {}, must be at most {OCCURRENCES}: no more occurrences are stored", o.min_hits)
                }
                Self::NgramMod(o) if o.min_draft_tokens > o.max_draft_tokens => {
                    format!("min is {}, must be at most max, which is {}", o.min_draft_tokens, o.max_draft_tokens)
                }
                _ => return Ok(()),
            },
        };
        Err(Error::argument("drafters", format!("{}: {problem}", self.kind())))
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
        let Some(mut options) = DrafterKind::named().find(|kind| kind.name() == name).and_then(Self::of) else {
            let names: Vec<_> = DrafterKind::named().map(DrafterKind::name).collect();
            let shown: String = name.chars().take(MAX_SHOWN).collect();
            let names = names.join(", ");
            let problem = format!("{shown:?} is not a drafter; expected some of {names}, or auto alone");
            return Err(Error::argument("drafters", problem));
        };
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

/// Constructor of a custom drafter, called for a session's first generation that lists it, and again after one that has
/// other drafters, or in which one failed. A fork has a copy ([`Drafter::fork`]), or calls it again.
#[derive(Clone)]
pub struct CustomDrafter {
    pub(super) name: Arc<str>,
    pub(super) make: Arc<dyn Fn() -> Box<dyn Drafter> + Send + Sync>,
}

impl CustomDrafter {
    /// `make` makes a drafter that has seen no tokens; `name` is for messages.
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
    /// As [`Drafters::Best`]: `ngram-map-k` with [`NgramMapOptions::AUTO`], and the assistant or NextN head, or without
    /// one the draft model, if there is one.
    #[default]
    Auto,
    /// The first of the list that has a draft.
    Priority(Vec<DrafterOptions>),
    /// The draft with the highest expected tokens per millisecond.
    Best(Vec<DrafterOptions>),
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
