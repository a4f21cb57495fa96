//! `ngram-mod`: a hash table of next tokens, shared by the sessions of an engine.

use std::sync::Arc;

use parking_lot::Mutex;
use rand::rngs::StdRng;

use super::ngram::hash;
use crate::Result;
use crate::speculative::{Context, Draft, DraftCost, Drafter, DrafterKind, Observed};

/// Parameters of [`NgramMod`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NgramModOptions {
    /// Tokens per key. Default: 16.
    pub ngram_len: usize,
    /// Minimum length of a draft. Default: 2; the planner decides whether a short draft pays off.
    pub min_draft_tokens: usize,
    /// Maximum tokens drafted. Default: 64.
    pub max_draft_tokens: usize,
}

impl Default for NgramModOptions {
    fn default() -> Self {
        Self { ngram_len: 16, min_draft_tokens: 2, max_draft_tokens: 64 }
    }
}

const SLOTS: u32 = 22; // bits: 4 Mi slots of 8 bytes; memory is committed on first use
const TOKEN: u32 = 24; // bits of an entry for the token; the rest verify the key

/// The token that followed each n-gram, over all sessions of an engine: the last writer of a slot wins.
///
/// A table of constant size has no room for keys. An entry has 40 bits of the n-gram's hash besides its token, and the
/// slot index is another 22 bits, so that about one lookup in 10^12 matches a wrong n-gram.
#[derive(Default)]
pub struct NgramPool {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    entries: Vec<u64>, // empty until it is first used; 0 is an empty slot
    used: usize,
}

impl NgramPool {
    /// Inserts the windows of `n` tokens and the token after each, from `tokens[from]` on.
    fn learn(&self, tokens: &[u32], n: usize, from: usize) {
        if tokens.len() <= from.max(n) {
            return;
        }
        let mut table = self.table.lock();
        // Above a quarter of the slots, newer n-grams begin to overwrite the beginnings of drafts.
        if table.entries.is_empty() || table.used > table.entries.len() / 4 {
            *table = Table { entries: vec![0; 1 << SLOTS], used: 0 };
        }
        for end in from.max(n)..tokens.len() {
            let token = u64::from(tokens[end]) + 1;
            if token >> TOKEN == 0 {
                let hash = hash(&tokens[end - n..end]);
                let slot = (hash >> (64 - SLOTS)) as usize;
                table.used += usize::from(table.entries[slot] == 0);
                table.entries[slot] = hash << TOKEN | token;
            }
        }
    }

    /// The tokens that follow `key`, each looked up after the one before it, until one is unknown.
    fn follow(&self, key: &[u32], max: usize) -> Vec<u32> {
        let table = self.table.lock();
        let (mut window, n) = (key.to_vec(), key.len());
        while window.len() < n + max && !table.entries.is_empty() {
            let hash = hash(&window[window.len() - n..]);
            let entry = table.entries[(hash >> (64 - SLOTS)) as usize];
            if entry == 0 || entry >> TOKEN != hash << TOKEN >> TOKEN {
                break;
            }
            window.push((entry & ((1 << TOKEN) - 1)) as u32 - 1);
        }
        window.split_off(n)
    }
}

/// Reads and fills a [`NgramPool`].
pub struct NgramMod {
    options: NgramModOptions,
    pool: Arc<NgramPool>,
    indexed: usize, // tokens inserted in the pool
}

impl NgramMod {
    /// A drafter on `pool`.
    pub fn new(options: NgramModOptions, pool: Arc<NgramPool>) -> Self {
        Self { options, pool, indexed: 0 }
    }

    fn learn(&mut self, tokens: &[u32]) {
        self.pool.learn(tokens, self.options.ngram_len, self.indexed);
        self.indexed = tokens.len();
    }
}

impl Drafter for NgramMod {
    fn kind(&self) -> DrafterKind {
        DrafterKind::NgramMod
    }

    fn cost(&self) -> DraftCost {
        DraftCost::Once
    }

    fn begin(&mut self, tokens: &[u32]) {
        self.truncate(tokens.len());
        self.learn(tokens);
    }

    fn truncate(&mut self, len: usize) {
        if len < self.indexed {
            self.indexed = 0;
        }
    }

    fn draft(&mut self, context: &Context<'_>, most: usize, draft: &mut Draft, _: &mut StdRng) -> Result<()> {
        let NgramModOptions { ngram_len: n, min_draft_tokens: min, max_draft_tokens: max } = self.options;
        let Some(start) = context.tokens.len().checked_sub(n) else { return Ok(()) };
        let found = self.pool.follow(&context.tokens[start..], max.min(most));
        if found.len() >= min.min(most) {
            draft.tokens = found;
        }
        Ok(())
    }

    /// Inserts every completed window, including those across a round boundary.
    fn observe(&mut self, seen: &Observed<'_>) -> Result<()> {
        self.learn(seen.tokens);
        Ok(())
    }
}
