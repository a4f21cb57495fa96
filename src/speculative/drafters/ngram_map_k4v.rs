//! `ngram-map-k4v`: what followed the last n-gram most often, of up to four continuations.

use std::collections::HashMap;

use rand::rngs::StdRng;

use super::ngram::{hash, next_cap};
use crate::Result;
use crate::speculative::{Context, Draft, DraftCost, Drafter, DrafterKind, NgramMapOptions, Observed};

/// Maximum continuations per key.
const VALUES: usize = 4;

/// Counts the m-grams that followed each n-gram.
pub struct NgramMapK4v {
    options: NgramMapOptions,
    keys: HashMap<u64, Key>,
    indexed: usize,                // tokens whose m-grams are counted
    drafted: Option<(u64, usize)>, // key and value of the last draft
}

struct Key {
    end: u32, // its last occurrence: index of the token after it
    values: Vec<Value>,
}

struct Value {
    start: u32, // its position in the history: m tokens from here
    count: usize,
    cap: usize, // maximum tokens of its next draft
}

impl NgramMapK4v {
    /// A drafter without history.
    pub fn new(options: NgramMapOptions) -> Self {
        Self { options, keys: HashMap::new(), indexed: 0, drafted: None }
    }

    /// Counts every completed m-gram under the key before it.
    fn index(&mut self, tokens: &[u32]) {
        let NgramMapOptions { ngram_len: n, max_draft_tokens: m, .. } = self.options;
        for len in (self.indexed + 1).max(n.saturating_add(m))..=tokens.len() {
            let start = len - m;
            let (ngram, mgram) = (&tokens[start - n..start], &tokens[start..len]);
            let key = self.keys.entry(hash(ngram)).or_insert_with(|| Key { end: start as u32, values: Vec::new() });
            let end = key.end as usize;
            if tokens[end - n..end] != *ngram {
                key.values.clear(); // hash collision: the newer n-gram replaces the older
            }
            key.end = start as u32;
            let same = |value: &&mut Value| tokens[value.start as usize..value.start as usize + m] == *mgram;
            if let Some(value) = key.values.iter_mut().find(same) {
                value.count += 1;
                continue;
            }
            if key.values.len() == VALUES
                && let Some(least) = (0..VALUES).min_by_key(|i| key.values[*i].count)
            {
                key.values.remove(least);
            }
            key.values.push(Value { start: start as u32, count: 1, cap: m });
        }
        self.indexed = tokens.len();
    }
}

impl Drafter for NgramMapK4v {
    fn kind(&self) -> DrafterKind {
        DrafterKind::NgramMapK4v
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

    /// Drafts the most frequent m-gram, if it is at least twice as frequent as the others together.
    fn draft(&mut self, context: &Context<'_>, most: usize, draft: &mut Draft, _: &mut StdRng) -> Result<()> {
        self.drafted = None;
        let (tokens, NgramMapOptions { ngram_len: n, min_hits, .. }) = (context.tokens, self.options);
        let Some(start) = tokens.len().checked_sub(n) else { return Ok(()) };
        let hash = hash(&tokens[start..]);
        let Some(key) = self.keys.get(&hash) else { return Ok(()) };
        if tokens[key.end as usize - n..key.end as usize] != tokens[start..] {
            return Ok(());
        }
        let total: usize = key.values.iter().map(|value| value.count).sum();
        let best = (0..key.values.len()).max_by_key(|i| key.values[*i].count);
        let Some((i, best)) = best.map(|i| (i, &key.values[i])) else { return Ok(()) };
        if best.count >= min_hits && best.count >= 2 * (total - best.count) {
            let from = best.start as usize;
            draft.tokens = tokens[from..from + most.min(best.cap)].to_vec();
            self.drafted = Some((hash, i));
        }
        Ok(())
    }

    fn observe(&mut self, seen: &Observed<'_>) -> Result<()> {
        let Observed { tokens, own, .. } = *seen;
        if let (Some((hash, i)), Some(own)) = (self.drafted.take(), own)
            && let Some(value) = self.keys.get_mut(&hash).and_then(|key| key.values.get_mut(i))
        {
            value.cap = next_cap(value.cap, own, self.options.max_draft_tokens);
        }
        self.index(tokens);
        Ok(())
    }
}
