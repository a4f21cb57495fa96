//! DRY ("don't repeat yourself"): penalizes tokens that would extend a repetition.

use std::collections::HashMap;
use std::sync::Arc;

use super::penalties::{check_ranges, newest};
use super::processor::LogitsProcessor;
use crate::Result;

/// If the last `n` tokens have occurred before, the token that followed them then is penalized by `multiplier *
/// base^(n - allowed_length)`, with the largest `n` of all occurrences.
#[derive(Clone, Debug, PartialEq)]
pub struct Dry {
    /// Scale of the penalty, from 0 to 100. Default: 0.8.
    pub multiplier: f32,
    /// Growth of the penalty per further token, from 1 to 16. Default: 1.75.
    pub base: f32,
    /// Length of a repetition that is not penalized, at least 1. Default: 2.
    pub allowed_length: usize,
    /// Number of last tokens considered; `None` for all. Default: all.
    pub last_n: Option<usize>,
    /// Tokens that end a repetition, such as line ends and quotes, and are not penalized. Default: none.
    pub breakers: Breakers,
}

/// Tokens that end a repetition ([`Tokenizer::ids_with`](crate::tokenizer::Tokenizer::ids_with) finds them), collected
/// from ids in any order. A short string is in a large part of the vocabulary: clones share the ids.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Breakers(Arc<[u32]>);

impl Breakers {
    /// The ids, ascending and without repetitions.
    pub fn ids(&self) -> &[u32] {
        &self.0
    }

    fn contains(&self, token: u32) -> bool {
        self.0.binary_search(&token).is_ok()
    }
}

impl FromIterator<u32> for Breakers {
    fn from_iter<I: IntoIterator<Item = u32>>(ids: I) -> Self {
        let mut ids = Vec::from_iter(ids);
        ids.sort_unstable();
        ids.dedup();
        Self(ids.into())
    }
}

impl Default for Dry {
    fn default() -> Self {
        Self { multiplier: 0.8, base: 1.75, allowed_length: 2, last_n: None, breakers: Breakers::default() }
    }
}

/// Maximum penalty: no sum of penalties makes a logit infinite.
const MAX_PENALTY: f32 = 1e30;

impl Dry {
    /// # Errors
    /// If a parameter is out of its range.
    pub(super) fn check(&self) -> Result<()> {
        check_ranges([
            ("dry.multiplier", (0.0..=100.0).contains(&self.multiplier), "must be from 0 to 100"),
            ("dry.base", (1.0..=16.0).contains(&self.base), "must be from 1 to 16"),
            ("dry.allowed_length", self.allowed_length > 0, "must be at least 1"),
        ])
    }

    /// Number of last tokens that it reads.
    pub(super) fn history(&self) -> usize {
        if self.multiplier == 0.0 { 0 } else { self.last_n.unwrap_or(usize::MAX) }
    }
}

impl LogitsProcessor for Dry {
    fn process(&self, tokens: &[u32], logits: &mut [f32]) -> Result<()> {
        let tokens = newest(tokens, self.history());
        let unbroken = tokens.iter().rev().take_while(|token| !self.breakers.contains(**token)).count();
        if unbroken < self.allowed_length {
            return Ok(());
        }
        let mut longest: HashMap<u32, usize> = HashMap::new();
        // `repeats[back]`: length of the run that ends `back` before the last token and equals the last ones.
        for (back, repeat) in repeats(tokens).into_iter().enumerate().skip(1) {
            let (repeat, next) = (repeat.min(unbroken), tokens[tokens.len() - back]);
            // A breaker ends the repetition.
            if repeat >= self.allowed_length && !self.breakers.contains(next) {
                let length = longest.entry(next).or_default();
                *length = repeat.max(*length);
            }
        }
        for (token, length) in longest {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            let exponent = (length - self.allowed_length).min(1 << 16) as i32;
            *logit -= (self.multiplier * self.base.powi(exponent)).min(MAX_PENALTY);
        }
        Ok(())
    }
}

/// For every `i`, the length of the run that ends `i` before the last token and equals the end of the sequence: the
/// Z-function of the reversed tokens (Gusfield 1997), in linear time.
fn repeats(tokens: &[u32]) -> Vec<usize> {
    let at = |i: usize| tokens[tokens.len() - 1 - i];
    let mut lengths = vec![0; tokens.len()];
    // The occurrence with the greatest end: `start..end`.
    let (mut start, mut end) = (0, 0);
    for i in 1..tokens.len() {
        let mut length = if i < end { lengths[i - start].min(end - i) } else { 0 };
        while i + length < tokens.len() && at(length) == at(i + length) {
            length += 1;
        }
        if i + length > end {
            (start, end) = (i, i + length);
        }
        lengths[i] = length;
    }
    lengths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn breakers_are_sorted_and_shared() {
        let dry = Dry { breakers: [7, 1, 7, 3].into_iter().collect(), ..Dry::default() };
        assert_eq!(dry.breakers.ids(), [1, 3, 7]);
        assert!(dry.breakers.contains(3) && !dry.breakers.contains(2));
        assert!(std::ptr::eq(dry.clone().breakers.ids(), dry.breakers.ids()));
    }
}
