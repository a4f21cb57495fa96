//! Options: which centroids an assistant drafts with.

use std::path::PathBuf;

use super::config::CentroidConfig;

/// Which centroids an assistant drafts with. What is drafted may change with them, and never the text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Centroids {
    /// Those of the file; without, every id is scored.
    #[default]
    Own,
    /// None: every id is scored.
    None,
    /// Those of the file, or built ones.
    Build(BuildCentroids),
}

/// How an assistant without centroids gets some.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuildCentroids {
    /// Groups, a power of two that divides the vocabulary, and how many of them are scored. Default: those of published
    /// assistants, 2048 and 32.
    pub sizes: CentroidConfig,
    /// Directory that keeps them, made if missing: they are built once for a head. Default: none.
    pub cache: Option<PathBuf>,
    /// Whether they are used. Default: if drafting is faster with them.
    pub wanted: CentroidsWanted,
}

/// When built centroids are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CentroidsWanted {
    /// If the file has none, and the head is measured to be faster with them when the assistant is loaded.
    #[default]
    IfFaster,
    /// In any case, also in the place of the file's own; sizes that do not divide the vocabulary are an error then.
    Always,
}

impl Default for BuildCentroids {
    fn default() -> Self {
        let sizes = CentroidConfig { num_centroids: 2048, top_k: 32 };
        Self { sizes, cache: None, wanted: CentroidsWanted::default() }
    }
}
