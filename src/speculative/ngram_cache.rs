//! `ngram-cache`: counts of next tokens after one to four tokens, in the context, in earlier texts and in a corpus.

use std::collections::HashMap;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use rand::rngs::StdRng;

use super::{Context, Draft, DraftCost, Drafter, DrafterKind, Observed};
use crate::{Error, Result};

/// The longest n-gram counted.
const LONGEST: usize = 4;

/// Magic number of a file; the last byte is the version.
const MAGIC: &[u8; 8] = b"ngrams\0\x01";

/// How often each token followed each n-gram.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NgramCache {
    counts: HashMap<Ngram, HashMap<u32, u32>>,
}

/// One to four tokens; shorter ones are left-padded with a token that no vocabulary has.
type Ngram = [u32; LONGEST];

fn ngram(tokens: &[u32]) -> Ngram {
    let mut ngram = [u32::MAX; LONGEST];
    ngram[LONGEST - tokens.len()..].copy_from_slice(tokens);
    ngram
}

impl NgramCache {
    /// Counts the n-grams of `tokens` that precede a token of `tokens[from..]`, up to `longest` tokens.
    pub fn learn(&mut self, tokens: &[u32], from: usize, longest: usize) {
        for (i, token) in tokens.iter().enumerate().skip(from.max(1)) {
            for n in 1..=longest.min(LONGEST).min(i) {
                let count = self.counts.entry(ngram(&tokens[i - n..i])).or_default().entry(*token).or_default();
                *count = count.saturating_add(1);
            }
        }
    }

    /// Adds another's counts.
    pub fn merge(&mut self, other: &Self) {
        for (ngram, next) in &other.counts {
            let own = self.counts.entry(*ngram).or_default();
            for (token, count) in next {
                let sum = own.entry(*token).or_default();
                *sum = sum.saturating_add(*count);
            }
        }
    }

    /// Number of n-grams.
    pub fn len(&self) -> usize {
        self.counts.len()
    }

    /// Whether there are no counts.
    pub fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    /// # Errors
    /// If a token is outside a vocabulary of `vocab` tokens.
    pub(super) fn check(&self, vocab: usize) -> Result<()> {
        let tokens = self.counts.values().flat_map(HashMap::keys);
        match tokens.max().filter(|token| **token as usize >= vocab) {
            Some(token) => {
                let problem = format!("the n-gram cache has token {token}, the vocabulary has {vocab}");
                Err(Error::argument("drafters", format!("{problem}; build it with this model's tokenizer")))
            }
            None => Ok(()),
        }
    }

    /// Writes the counts: magic, entries (u64), then for each its n-gram (4 x u32), token and count (u32), little-endian and
    /// sorted, so that equal caches give equal files. The file is replaced atomically.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        let mut entries: Vec<(&Ngram, u32, u32)> = (self.counts.iter())
            .flat_map(|(ngram, next)| next.iter().map(move |(token, count)| (ngram, *token, *count)))
            .collect();
        entries.sort_unstable();
        let mut bytes = Vec::with_capacity(16 + 24 * entries.len());
        bytes.extend(MAGIC);
        bytes.extend((entries.len() as u64).to_le_bytes());
        for (ngram, token, count) in entries {
            let numbers = ngram.iter().copied().chain([token, count]);
            bytes.extend(numbers.flat_map(u32::to_le_bytes));
        }
        let mut name = path.as_os_str().to_owned();
        name.push(".new");
        let new = Path::new(&name);
        let write = || std::fs::File::create(new)?.write_all(&bytes);
        write().and_then(|()| std::fs::rename(new, path)).map_err(Error::io(path))
    }

    /// Reads a file of [`NgramCache::save`].
    ///
    /// # Errors
    /// If the file is missing, truncated, or something else.
    pub fn load(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(Error::io(path))?;
        let refuse = |problem: String| Err(Error::file(path, format!("{problem}; write the n-gram cache again")));
        let Some((magic, rest)) = bytes.split_first_chunk::<8>() else { return refuse("is truncated".into()) };
        if magic != MAGIC {
            return refuse("is not an n-gram cache of this version".into());
        }
        let Some((count, entries)) = rest.split_first_chunk::<8>() else { return refuse("is truncated".into()) };
        let count = u64::from_le_bytes(*count);
        let (entries, over) = entries.as_chunks::<24>();
        if entries.len() as u64 != count || !over.is_empty() {
            let has = 24 * entries.len() + over.len();
            return refuse(format!("declares {count} entries of 24 bytes but has {has} bytes"));
        }
        let mut counts: HashMap<Ngram, HashMap<u32, u32>> = HashMap::new();
        for entry in entries {
            let number =
                |i: usize| u32::from_le_bytes([entry[4 * i], entry[4 * i + 1], entry[4 * i + 2], entry[4 * i + 3]]);
            counts.entry(std::array::from_fn(number)).or_default().insert(number(LONGEST), number(LONGEST + 1));
        }
        Ok(Self { counts })
    }
}

/// Parameters of [`NgramCacheDrafter`].
#[derive(Clone, Debug, PartialEq)]
pub struct NgramCacheOptions {
    /// Maximum tokens drafted. Default: 8.
    pub max: usize,
    /// The static cache: two-token n-grams of a large corpus. Default: none.
    pub corpus: Option<Arc<NgramCache>>,
    /// The dynamic cache, learnt from earlier texts. Default: none.
    pub earlier: Option<Arc<NgramCache>>,
}

impl Default for NgramCacheOptions {
    fn default() -> Self {
        Self { max: 8, corpus: None, earlier: None }
    }
}

/// Thresholds by n-gram length (1 to 4 tokens): occurrences, and the share of its most frequent next token.
struct Trust {
    seen: [u32; LONGEST],
    percent: [u32; LONGEST],
}

/// The context is the current text: low thresholds.
const CONTEXT: Trust = Trust { seen: [2, 2, 1, 1], percent: [66, 50, 50, 50] };
/// Earlier texts may be about anything.
const EARLIER: Trust = Trust { seen: [4, 3, 2, 2], percent: [75, 66, 66, 66] };
/// The corpus alone, with n-grams of two tokens.
const CORPUS: Trust = Trust { seen: [u32::MAX, 2, u32::MAX, u32::MAX], percent: [100, 50, 100, 100] };

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
        trusted(&self.context, &CONTEXT, corpus, tokens)
            .or_else(|| trusted(earlier?, &EARLIER, corpus, tokens))
            .or_else(|| trusted(corpus?, &CORPUS, None, tokens))
    }
}

/// The next token after the longest n-gram at the end of `tokens` that reaches the thresholds in `cache`. A token's count is
/// multiplied by a hundred times its count in the corpus, if any.
fn trusted(cache: &NgramCache, trust: &Trust, corpus: Option<&NgramCache>, tokens: &[u32]) -> Option<u32> {
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
        let sure =
            total >= u64::from(trust.seen[n - 1]) && 100 * u64::from(*count) >= u64::from(trust.percent[n - 1]) * total;
        sure.then_some(*token)
    })
}

impl NgramCacheDrafter {
    fn learn(&mut self, tokens: &[u32]) {
        self.context.learn(tokens, self.indexed, LONGEST);
        self.indexed = tokens.len();
    }
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
        while tokens.len() < given + most.min(self.options.max) {
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
