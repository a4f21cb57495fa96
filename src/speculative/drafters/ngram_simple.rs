//! `ngram-simple`: what followed the last occurrence of the last n-gram.

use rand::rngs::StdRng;

use super::ngram::copy;
use crate::Result;
use crate::speculative::{Context, Draft, DraftCost, Drafter, DrafterKind};

/// Parameters of [`NgramSimple`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NgramSimpleOptions {
    /// Tokens that must match. Default: 12.
    pub ngram_len: usize,
    /// Maximum tokens drafted. Default: 48.
    pub max_draft_tokens: usize,
}

impl Default for NgramSimpleOptions {
    fn default() -> Self {
        Self { ngram_len: 12, max_draft_tokens: 48 }
    }
}

/// Searches the history backwards at every draft; stores nothing.
pub struct NgramSimple {
    options: NgramSimpleOptions,
}

impl NgramSimple {
    /// A drafter for any sequence.
    pub fn new(options: NgramSimpleOptions) -> Self {
        Self { options }
    }
}

impl Drafter for NgramSimple {
    fn kind(&self) -> DrafterKind {
        DrafterKind::NgramSimple
    }

    fn cost(&self) -> DraftCost {
        DraftCost::Once
    }

    fn draft(&mut self, context: &Context<'_>, most: usize, draft: &mut Draft, _: &mut StdRng) -> Result<()> {
        let (tokens, n) = (context.tokens, self.options.ngram_len);
        let Some(start) = tokens.len().checked_sub(n) else { return Ok(()) };
        let key = &tokens[start..];
        // Comparing slices is a call: for nearly all places the first token decides.
        let begins = |at: usize| key.first().is_none_or(|first| tokens[at] == *first);
        if let Some(at) = (0..start).rev().find(|at| begins(*at) && tokens[*at..at + n] == *key) {
            draft.tokens = copy(tokens, at + n, most.min(self.options.max_draft_tokens));
        }
        Ok(())
    }
}
