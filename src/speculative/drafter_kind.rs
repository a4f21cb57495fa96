//! The drafters by name.

use std::fmt;

/// The drafters by their command line names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum DrafterKind {
    /// The assistant, or the model's own NextN head, run autoregressively.
    Mtp,
    /// A smaller model with the same vocabulary.
    DraftModel,
    /// The tokens after the last occurrence of the last n-gram.
    NgramSimple,
    /// The tokens that followed it often enough.
    NgramMapK,
    /// The most frequent of up to four continuations.
    NgramMapK4v,
    /// A hash table of next tokens, shared by the sessions of an engine.
    NgramMod,
    /// Counts of next tokens: after one to four tokens in the context and in earlier texts, after two in a corpus.
    NgramCache,
    /// The tokens that a constraint forces.
    Forced,
    /// A custom drafter.
    Custom,
}

/// The names of those that can be requested, the source of every list of them.
const NAMED: [(DrafterKind, &str); 7] = [
    (DrafterKind::Mtp, "mtp"),
    (DrafterKind::DraftModel, "draft-model"),
    (DrafterKind::NgramSimple, "ngram-simple"),
    (DrafterKind::NgramMapK, "ngram-map-k"),
    (DrafterKind::NgramMapK4v, "ngram-map-k4v"),
    (DrafterKind::NgramMod, "ngram-mod"),
    (DrafterKind::NgramCache, "ngram-cache"),
];

impl DrafterKind {
    /// Those with a command line name.
    pub fn named() -> impl Iterator<Item = Self> {
        NAMED.iter().map(|(kind, _)| *kind)
    }

    /// Its name on a command line and in a trace.
    pub fn name(self) -> &'static str {
        let unlisted = if self == Self::Forced { "forced" } else { "custom" };
        NAMED.iter().find(|(kind, _)| *kind == self).map_or(unlisted, |(_, name)| name)
    }
}

impl fmt::Display for DrafterKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
