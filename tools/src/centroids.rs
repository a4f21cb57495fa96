//! The option `--centroids`.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Result, ensure};
use foretoken::gemma4::{BuildCentroids, CentroidConfig, CentroidUsage, Centroids};

/// The value of `--centroids`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CentroidChoice {
    /// Its own; if it has none, built ones if that is faster.
    Auto,
    /// Its own.
    Own,
    /// None.
    None,
    /// Built ones.
    Built(CentroidConfig),
}

impl FromStr for CentroidChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let sizes = || {
            let (count, scored) = text.split_once('/')?;
            let sizes = CentroidConfig { num_centroids: count.parse().ok()?, top_k: scored.parse().ok()? };
            let fits = (1..=sizes.num_centroids).contains(&sizes.top_k);
            Some(sizes).filter(|sizes| sizes.num_centroids.is_power_of_two() && fits)
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
    /// Refuses a choice without an assistant that it is for.
    ///
    /// # Errors
    /// If it is not [`CentroidChoice::Own`], the default, and there is no assistant.
    pub fn check(&self, assistant: Option<&Path>) -> Result<()> {
        let has_effect = assistant.is_some() || *self == Self::Own;
        ensure!(has_effect, "--centroids: no assistant is loaded; pass --assistant, or omit it");
        Ok(())
    }

    /// The engine's option, with this cache directory for built centroids.
    pub fn with_cache(&self, cache: Option<PathBuf>) -> Centroids {
        match self {
            Self::Auto => Centroids::Build(BuildCentroids { cache, ..BuildCentroids::default() }),
            Self::Own => Centroids::Own,
            Self::None => Centroids::None,
            Self::Built(sizes) => {
                Centroids::Build(BuildCentroids { sizes: sizes.clone(), cache, usage: CentroidUsage::Always })
            }
        }
    }
}
