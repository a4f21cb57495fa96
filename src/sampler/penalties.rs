//! Penalties of repeated tokens.

use super::processor::LogitsProcessor;
use crate::{Error, Result};

/// Penalties of tokens that occur among the last ones, in the prompt or the text. Default: none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Penalties {
    /// Divides positive logits of such tokens, and multiplies negative ones (Keskar et al. 2019);
    /// from 0.1 to 10. Default: 1.
    pub repeat: f32,
    /// Subtracted once per occurrence; from -100 to 100. Default: 0.
    pub frequency: f32,
    /// Subtracted once from the logits of such tokens; from -100 to 100. Default: 0.
    pub presence: f32,
    /// Number of last tokens considered; `None` for all. Default: 64.
    pub last_n: Option<usize>,
}

impl Default for Penalties {
    fn default() -> Self {
        Self { repeat: 1.0, frequency: 0.0, presence: 0.0, last_n: Some(64) }
    }
}

impl Penalties {
    /// # Errors
    /// If one is out of its range.
    pub(super) fn check(&self) -> Result<()> {
        let range = -100.0..=100.0;
        check_ranges([
            ("penalties.repeat", (0.1..=10.0).contains(&self.repeat), "must be from 0.1 to 10; 1 for none"),
            ("penalties.frequency", range.contains(&self.frequency), "must be from -100 to 100; 0 for none"),
            ("penalties.presence", range.contains(&self.presence), "must be from -100 to 100; 0 for none"),
        ])
    }

    /// Number of last tokens that it reads.
    pub(super) fn history(&self) -> usize {
        let none = self.repeat == 1.0 && self.frequency == 0.0 && self.presence == 0.0;
        if none { 0 } else { self.last_n.unwrap_or(usize::MAX) }
    }
}

/// Longer histories are counted in a table of the vocabulary instead of sorted.
const MAX_SORTED: usize = 1024;

impl LogitsProcessor for Penalties {
    fn process(&self, tokens: &[u32], logits: &mut [f32]) -> Result<()> {
        let tokens = newest(tokens, self.history());
        let penalize = |logit: &mut f32, count: usize| {
            *logit = if *logit > 0.0 { *logit / self.repeat } else { *logit * self.repeat };
            *logit -= count as f32 * self.frequency + self.presence;
        };
        if tokens.len() <= MAX_SORTED {
            let mut tokens = tokens.to_vec();
            tokens.sort_unstable();
            for same in tokens.chunk_by(|a, b| a == b) {
                logits.get_mut(same[0] as usize).into_iter().for_each(|logit| penalize(logit, same.len()));
            }
            return Ok(());
        }
        let mut counts = vec![0u32; logits.len()];
        for token in tokens {
            counts.get_mut(*token as usize).into_iter().for_each(|count| *count += 1);
        }
        let counted = logits.iter_mut().zip(counts).filter(|(_, count)| *count > 0);
        counted.for_each(|(logit, count)| penalize(logit, count as usize));
        Ok(())
    }
}

/// Checks parameters, each a name, whether its value is in its range, and that range in words.
///
/// # Errors
/// If one is out of its range; the first is named.
pub(super) fn check_ranges<const N: usize>(parameters: [(&'static str, bool, &str); N]) -> Result<()> {
    match parameters.into_iter().find(|(_, is_in_range, _)| !is_in_range) {
        Some((name, _, range)) => Err(Error::argument(name, range)),
        None => Ok(()),
    }
}

/// The last `most` tokens.
pub(super) fn newest(tokens: &[u32], most: usize) -> &[u32] {
    &tokens[tokens.len().saturating_sub(most)..]
}
