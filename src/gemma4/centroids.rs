//! Options: an assistant's centroids.

use std::path::PathBuf;

use super::config::CentroidConfig;

/// An assistant's centroids. They may change the drafts, never the text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Centroids {
    /// Those of the file; if it has none, every id is scored.
    #[default]
    Own,
    /// None: every id is scored.
    None,
    /// Those of the file, or built ones.
    Build(BuildCentroids),
}

/// How centroids are built for an assistant that has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuildCentroids {
    /// Number of groups, a power of two that divides the vocabulary, and how many of them are scored. Default:
    /// those of published assistants, 2048 and 32.
    pub sizes: CentroidConfig,
    /// Cache directory, created if missing: centroids are built once per head. Default: none.
    pub cache: Option<PathBuf>,
    /// When they are used. Default: if drafting is faster with them.
    pub usage: CentroidUsage,
}

/// When built centroids are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CentroidUsage {
    /// If the file has none, and the head is measured to be faster with them at load time.
    #[default]
    IfFaster,
    /// Always, even instead of the file's own; sizes that do not divide the vocabulary are an error then.
    Always,
}

impl Default for BuildCentroids {
    fn default() -> Self {
        let sizes = CentroidConfig { num_centroids: 2048, top_k: 32 };
        Self { sizes, cache: None, usage: CentroidUsage::default() }
    }
}
