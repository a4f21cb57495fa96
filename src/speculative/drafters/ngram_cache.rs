//! The caches of `ngram-cache`: counts of next tokens, after one to four tokens in the context and in earlier texts,
//! after two in a corpus.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use crate::checkpoint::{Partial, regular_file};
use crate::{Error, Result};

/// The longest n-gram counted.
pub(super) const LONGEST: usize = 4;

/// Magic number of a file; the last byte is the version.
const MAGIC: &[u8; 8] = b"ngrams\0\x01";

/// How often each token followed each n-gram.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NgramCache {
    pub(super) counts: HashMap<Ngram, HashMap<u32, u32>>,
    largest: Option<u32>, // token that is counted
}

/// One to four tokens; shorter ones are left-padded with a token that no vocabulary has.
pub(super) type Ngram = [u32; LONGEST];

pub(super) fn ngram(tokens: &[u32]) -> Ngram {
    let mut ngram = [u32::MAX; LONGEST];
    ngram[LONGEST - tokens.len()..].copy_from_slice(tokens);
    ngram
}

impl NgramCache {
    /// Counts the n-grams of `tokens` that precede a token of `tokens[from..]`, up to `longest` tokens.
    pub fn learn(&mut self, tokens: &[u32], from: usize, longest: usize) {
        for (i, token) in tokens.iter().enumerate().skip(from.max(1)) {
            for n in 1..=longest.min(LONGEST).min(i) {
                self.add(ngram(&tokens[i - n..i]), *token, 1);
            }
        }
    }

    /// Adds another's counts.
    pub fn merge(&mut self, other: &Self) {
        for (ngram, next) in &other.counts {
            next.iter().for_each(|(token, count)| self.add(*ngram, *token, *count));
        }
    }

    fn add(&mut self, ngram: Ngram, token: u32, count: u32) {
        let sum = self.counts.entry(ngram).or_default().entry(token).or_default();
        *sum = sum.saturating_add(count);
        self.largest = self.largest.max(Some(token));
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
    pub(crate) fn check(&self, vocab: usize) -> Result<()> {
        match self.largest.filter(|token| *token as usize >= vocab) {
            Some(token) => {
                let problem = format!("the n-gram cache has token {token}, the vocabulary has {vocab}");
                Err(Error::argument("drafters", format!("{problem}; build it with this model's tokenizer")))
            }
            None => Ok(()),
        }
    }

    /// Writes the counts: magic, entries (u64), then for each its n-gram (4 x u32), token and count (u32),
    /// little-endian and sorted, so that equal caches give equal files. The file is replaced atomically.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
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
        let mut file = Partial::create(path.as_ref())?;
        file.put(&bytes)?;
        file.publish()
    }

    /// Reads a file of [`NgramCache::save`].
    ///
    /// # Errors
    /// If the file is missing, truncated, or something else.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        regular_file(path, "an n-gram cache")?;
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
        let mut cache = Self::default();
        for entry in entries {
            let number =
                |i: usize| u32::from_le_bytes([entry[4 * i], entry[4 * i + 1], entry[4 * i + 2], entry[4 * i + 3]]);
            cache.add(std::array::from_fn(number), number(LONGEST), number(LONGEST + 1));
        }
        Ok(cache)
    }
}

/// Parameters of [`NgramCacheDrafter`](super::NgramCacheDrafter).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NgramCacheOptions {
    /// Maximum tokens drafted. Default: 8.
    pub max_draft_tokens: usize,
    /// The static cache: two-token n-grams of a large corpus. Default: none.
    pub corpus: Option<Arc<NgramCache>>,
    /// The dynamic cache, learnt from earlier texts. Default: none.
    pub earlier: Option<Arc<NgramCache>>,
}

impl Default for NgramCacheOptions {
    fn default() -> Self {
        Self { max_draft_tokens: 8, corpus: None, earlier: None }
    }
}
