//! `ngram-map-k`: what followed the last n-gram often enough.

use std::collections::HashMap;

use rand::rngs::StdRng;

use super::ngram::{copy, hash, next_cap};
use crate::Result;
use crate::speculative::{Context, Draft, DraftCost, Drafter, DrafterKind, Observed};

/// Parameters of [`NgramMapK`] and [`super::NgramMapK4v`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NgramMapOptions {
    /// Tokens per key. Default: 12.
    pub ngram_len: usize,
    /// Maximum tokens drafted. [`super::NgramMapK4v`] counts continuations of exactly this length. Default: 48.
    pub max_draft_tokens: usize,
    /// How often the draft must have followed the key; for [`NgramMapK`] at most 16. Default: 1.
    pub min_hits: usize,
}

impl NgramMapOptions {
    /// Parameters of `auto`: shorter keys, because the planner weighs their acceptance.
    pub const AUTO: Self = Self { ngram_len: 6, max_draft_tokens: 48, min_hits: 1 };
}

impl Default for NgramMapOptions {
    fn default() -> Self {
        Self { ngram_len: 12, max_draft_tokens: 48, min_hits: 1 }
    }
}

/// Maximum occurrences stored per key; beyond, the oldest is dropped.
pub(in crate::speculative) const OCCURRENCES: usize = 16;

/// Stores the positions of every n-gram.
pub struct NgramMapK {
    options: NgramMapOptions,
    keys: HashMap<u64, Key>,
    indexed: usize,       // tokens whose n-grams are indexed, except the one at the end
    drafted: Option<u64>, // the key of the last draft
}

struct Key {
    ends: Vec<u32>, // its occurrences, oldest first: index of the token after each
    cap: usize,     // maximum tokens of its next draft
}

impl NgramMapK {
    /// A drafter without history.
    pub fn new(options: NgramMapOptions) -> Self {
        Self { options, keys: HashMap::new(), indexed: 0, drafted: None }
    }

    /// Indexes the new n-grams that are followed by a token, including those across rounds.
    fn index(&mut self, tokens: &[u32]) {
        let NgramMapOptions { ngram_len: n, max_draft_tokens, .. } = self.options;
        let new = || Key { ends: Vec::new(), cap: max_draft_tokens };
        for end in self.indexed.max(n)..tokens.len() {
            let ngram = &tokens[end - n..end];
            let key = self.keys.entry(hash(ngram)).or_insert_with(new);
            // Hash collision: the newer n-gram replaces the older.
            if key.ends.last().is_some_and(|last| tokens[*last as usize - n..*last as usize] != *ngram) {
                *key = new();
            }
            if key.ends.len() == OCCURRENCES {
                key.ends.remove(0);
            }
            key.ends.push(end as u32);
        }
        self.indexed = tokens.len();
    }
}

impl Drafter for NgramMapK {
    fn kind(&self) -> DrafterKind {
        DrafterKind::NgramMapK
    }

    fn cost(&self) -> DraftCost {
        DraftCost::Once
    }

    fn begin(&mut self, tokens: &[u32]) {
        self.truncate(tokens.len());
        self.index(tokens);
    }

    fn truncate(&mut self, len: usize) {
        if len < self.indexed {
            (self.keys, self.indexed) = (HashMap::new(), 0);
        }
    }

    /// Follows the last occurrence while at least `min_hits` occurrences agree.
    fn draft(&mut self, context: &Context<'_>, most: usize, draft: &mut Draft, _: &mut StdRng) -> Result<()> {
        self.drafted = None;
        let (tokens, n) = (context.tokens, self.options.ngram_len);
        let Some(start) = tokens.len().checked_sub(n) else { return Ok(()) };
        let hash = hash(&tokens[start..]);
        let Some(key) = self.keys.get(&hash) else { return Ok(()) };
        let Some(last) = key.ends.last().map(|last| *last as usize) else { return Ok(()) };
        if tokens[last - n..last] != tokens[start..] {
            return Ok(());
        }
        let mut found = copy(tokens, last, most.min(key.cap));
        if self.options.min_hits > 1 {
            // How far each occurrence agrees with the draft; the min_hits-th longest is the length.
            let mut agreed: Vec<usize> = (key.ends.iter())
                .map(|end| tokens[*end as usize..].iter().zip(&found).take_while(|(a, b)| a == b).count())
                .collect();
            agreed.sort_unstable_by(|a, b| b.cmp(a));
            found.truncate(agreed.get(self.options.min_hits - 1).copied().unwrap_or(0));
        }
        if !found.is_empty() {
            self.drafted = Some(hash);
        }
        draft.tokens = found;
        Ok(())
    }

    fn observe(&mut self, seen: &Observed<'_>) -> Result<()> {
        let Observed { tokens, own, .. } = *seen;
        if let (Some(hash), Some(own)) = (self.drafted.take(), own)
            && let Some(key) = self.keys.get_mut(&hash)
        {
            key.cap = next_cap(key.cap, own, self.options.max_draft_tokens);
        }
        self.index(tokens);
        Ok(())
    }
}
