//! `ngram-cache`: drafts token by token from three caches of counts.

use rand::rngs::StdRng;

use super::ngram_cache::{LONGEST, NgramCache, NgramCacheOptions, ngram};
use crate::Result;
use crate::speculative::{Context, Draft, DraftCost, Drafter, DrafterKind, Observed};

/// Thresholds by n-gram length (1 to 4 tokens): occurrences, and the share of its most frequent next token.
struct Thresholds {
    samples: [u32; LONGEST],
    percent: [u32; LONGEST],
}

/// The context is the current text: low thresholds.
const CONTEXT: Thresholds = Thresholds { samples: [2, 2, 1, 1], percent: [66, 50, 50, 50] };
/// Earlier texts may be about anything.
const EARLIER: Thresholds = Thresholds { samples: [4, 3, 2, 2], percent: [75, 66, 66, 66] };
/// The corpus alone, with n-grams of two tokens.
const CORPUS: Thresholds = Thresholds { samples: [u32::MAX, 2, u32::MAX, u32::MAX], percent: [100, 50, 100, 100] };

/// Drafts token by token from three caches: the context's, the earlier texts', the corpus's.
pub struct NgramCacheDrafter {
    options: NgramCacheOptions,
    context: NgramCache,
    indexed: usize, // tokens counted so far
}

impl NgramCacheDrafter {
    /// A drafter with an empty context.
    pub fn new(options: NgramCacheOptions) -> Self {
        Self { options, context: NgramCache::default(), indexed: 0 }
    }

    fn next(&self, tokens: &[u32]) -> Option<u32> {
        let corpus = self.options.corpus.as_deref();
        let earlier = self.options.earlier.as_deref();
        most_frequent(&self.context, &CONTEXT, corpus, tokens)
            .or_else(|| most_frequent(earlier?, &EARLIER, corpus, tokens))
            .or_else(|| most_frequent(corpus?, &CORPUS, None, tokens))
    }

    fn learn(&mut self, tokens: &[u32]) {
        self.context.learn(tokens, self.indexed, LONGEST);
        self.indexed = tokens.len();
    }
}

/// The next token after the longest n-gram at the end of `tokens` that reaches the thresholds in `cache`. A token's
/// count is multiplied by a hundred times its count in the corpus, if any.
fn most_frequent(cache: &NgramCache, least: &Thresholds, corpus: Option<&NgramCache>, tokens: &[u32]) -> Option<u32> {
    let bigram = tokens.len().checked_sub(2).map(|start| ngram(&tokens[start..]));
    let known = bigram.and_then(|bigram| corpus?.counts.get(&bigram));
    (1..=LONGEST.min(tokens.len())).rev().find_map(|n| {
        let next = cache.counts.get(&ngram(&tokens[tokens.len() - n..]))?;
        let total: u64 = next.values().map(|count| u64::from(*count)).sum();
        let weight = |token: &u32, count: u32| {
            let known = known.and_then(|known| known.get(token)).map_or(1, |count| 100 * u64::from(*count));
            u64::from(count).saturating_mul(known)
        };
        // The lowest id of equals, because maps are unordered.
        let (token, count) =
            next.iter().max_by_key(|(token, count)| (weight(token, **count), std::cmp::Reverse(**token)))?;
        let sure = total >= u64::from(least.samples[n - 1])
            && 100 * u64::from(*count) >= u64::from(least.percent[n - 1]) * total;
        sure.then_some(*token)
    })
}

impl Drafter for NgramCacheDrafter {
    fn kind(&self) -> DrafterKind {
        DrafterKind::NgramCache
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
            (self.context, self.indexed) = (NgramCache::default(), 0);
        }
    }

    fn draft(&mut self, context: &Context<'_>, most: usize, draft: &mut Draft, _: &mut StdRng) -> Result<()> {
        let newest = context.tokens.len().saturating_sub(LONGEST);
        let mut tokens = context.tokens[newest..].to_vec();
        let given = tokens.len();
        while tokens.len() < given + most.min(self.options.max_draft_tokens) {
            let Some(next) = self.next(&tokens) else { break };
            tokens.push(next);
        }
        draft.tokens = tokens.split_off(given);
        Ok(())
    }

    /// Counts the n-grams before every new token; they may begin among earlier tokens.
    fn observe(&mut self, seen: &Observed<'_>) -> Result<()> {
        self.learn(seen.tokens);
        Ok(())
    }

    /// The earlier texts' cache, and this context's counts.
    fn learnt(&self) -> Option<NgramCache> {
        let mut all = self.options.earlier.as_deref().cloned().unwrap_or_default();
        all.merge(&self.context);
        Some(all)
    }
}
