//! Sampling parameters.

use super::dry::Dry;
use super::penalties::{Penalties, check_ranges};
use crate::Result;

/// Sampling parameters, applied in field order, which is that of llama.cpp's default chain: penalties, filters,
/// temperature. Default: greedy, without penalties.
///
/// All are functions of one row of logits and of the tokens before it, so that every verified row has the distribution
/// that it has without speculation. Mirostat, whose target depends on the surprisal of emitted tokens, is not
/// supported.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Penalties of repeated tokens. Default: none.
    pub penalties: Penalties,
    /// Penalties of tokens that would extend a repetition. Default: none.
    pub dry: Option<Dry>,
    /// Keeps tokens whose logits are at most this many standard deviations of the row below the largest
    /// (top-n-sigma, Tang et al. 2024). Default: all.
    pub top_n_sigma: Option<f32>,
    /// Keeps this many of the most probable tokens. Default: all.
    pub top_k: Option<usize>,
    /// Keeps the tokens whose surprisal is closest to the entropy until their probabilities reach this sum (locally
    /// typical sampling, Meister et al. 2022); 1 keeps all. Default: 1.
    pub typical_p: f32,
    /// Keeps the most probable tokens until their probabilities reach this sum; 1 keeps all. Default: 1.
    pub top_p: f32,
    /// Keeps tokens at least this probable relative to the most probable; 0 keeps all. Default: 0.
    pub min_p: f32,
    /// Excludes the most probable tokens at random. Default: never.
    pub xtc: Option<Xtc>,
    /// Divides the remaining logits; 0 takes the most probable token after the penalties, without filters. Default: 0.
    pub temperature: f32,
}

/// Exclude top choices: of the tokens at least as probable as the threshold, all but the least probable are removed
/// with a given probability. No random number is drawn for this: the distribution is the mixture of both cases.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Xtc {
    /// Probability of the exclusion. Default: 0.5.
    pub probability: f32,
    /// Minimum probability of a top choice, up to 0.5. Default: 0.1.
    pub threshold: f32,
}

impl Default for Xtc {
    fn default() -> Self {
        Self { probability: 0.5, threshold: 0.1 }
    }
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            penalties: Penalties::default(),
            dry: None,
            top_n_sigma: None,
            top_k: None,
            typical_p: 1.0,
            top_p: 1.0,
            min_p: 0.0,
            xtc: None,
            temperature: 0.0,
        }
    }
}

impl Sampling {
    /// Checks the ranges of the parameters.
    ///
    /// # Errors
    /// If one is out of its range.
    pub fn check(&self) -> Result<()> {
        self.penalties.check()?;
        self.dry.iter().try_for_each(Dry::check)?;
        let is_share = |p: f32| p > 0.0 && p <= 1.0;
        let sigma_fits = self.top_n_sigma.is_none_or(|n| n > 0.0 && n.is_finite());
        let xtc = self.xtc.unwrap_or_default();
        check_ranges([
            ("temperature", (0.0..=f32::MAX).contains(&self.temperature), "must be a finite number of 0 or more"),
            ("top_n_sigma", sigma_fits, "must be above 0 and finite; omit it to keep all tokens"),
            ("top_k", self.top_k != Some(0), "must be at least 1; omit it to keep all tokens"),
            ("typical_p", is_share(self.typical_p), "must be above 0 and at most 1"),
            ("top_p", is_share(self.top_p), "must be above 0 and at most 1"),
            ("min_p", (0.0..=1.0).contains(&self.min_p), "must be from 0 to 1"),
            ("xtc.probability", (0.0..=1.0).contains(&xtc.probability), "must be from 0 to 1"),
            (
                "xtc.threshold",
                (0.0..=0.5).contains(&xtc.threshold),
                "must be from 0 to 0.5: no two tokens are more probable than that",
            ),
        ])
    }
}
