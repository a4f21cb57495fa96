//! A tokenizer's tokens as bytes, for grammars.

use std::sync::Arc;

use llguidance::toktrie::{TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// The tokens as a trie, and the tokenizer, which encodes forced text.
struct Vocabulary {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
}

/// The vocabulary of `tokenizer`, of whose `vocab_size` tokens those in `end` end a text.
///
/// # Errors
/// If the tokenizer's decoder is not supported, or no token ends a text.
pub(super) fn vocabulary(tokenizer: &Arc<Tokenizer>, vocab_size: usize, end: &[u32]) -> Result<TokEnv> {
    let end: Vec<u32> = end.iter().copied().filter(|id| (*id as usize) < vocab_size).collect();
    let Some(first) = end.first() else {
        return Err(Error::argument("constraint", "needs an end-of-generation token, and the checkpoint has none"));
    };
    let words = token_bytes(tokenizer, vocab_size, &end)?;
    let info = TokRxInfo::new(vocab_size as u32, *first);
    let trie = TokTrie::from(&info, &words).with_eos_tokens(&end);
    Ok(Arc::new(Vocabulary { trie, tokenizer: tokenizer.clone() }))
}

/// The bytes of every token, empty for unused ids. Special tokens and those in `end` begin with
/// toktrie's marker, so that no text encodes to them.
fn token_bytes(tokenizer: &Tokenizer, vocab_size: usize, end: &[u32]) -> Result<Vec<Vec<u8>>> {
    check_decoder(tokenizer)?;
    let inner = tokenizer.inner();
    let added = inner.get_added_tokens_decoder();
    let is_special = |id: u32| added.get(&id).is_some_and(|token| token.special) || end.contains(&id);
    let mut words = vec![Vec::new(); vocab_size];
    for (token, id) in tokenizer.spellings() {
        let Some(word) = words.get_mut(id as usize) else { continue };
        *word = match is_special(id) {
            true => [&[TokTrie::SPECIAL_TOKEN_MARKER], token.as_bytes()].concat(),
            false => tokenizer.token_bytes(id),
        };
    }
    Ok(words)
}

/// # Errors
/// If the tokenizer's decoder is neither of those that [`Tokenizer::token_bytes`] knows.
fn check_decoder(tokenizer: &Tokenizer) -> Result<()> {
    let decoder = tokenizer.inner().get_decoder().and_then(|decoder| serde_json::to_value(decoder).ok());
    let decoder = decoder.unwrap_or_default();
    let parts = decoder["decoders"].as_array().map_or(std::slice::from_ref(&decoder), Vec::as_slice);
    let has = |kind: &str| parts.iter().any(|part| part["type"] == kind);
    if has("ByteFallback") || has("ByteLevel") {
        return Ok(());
    }
    let kinds: Vec<_> = parts.iter().filter_map(|part| part["type"].as_str()).collect();
    let problem = format!("is {:?}; constraints support ByteFallback and ByteLevel", kinds.join(", "));
    Err(Error::Unsupported { path: None, what: "decoder of the tokenizer".into(), problem })
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    /// As the tokenizer encodes `bytes`, unless that adds something: a special token, or a leading space.
    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| {
            let encoded = self.tokenizer.inner().encode_fast(text, false);
            let ids = encoded.map(|encoding| encoding.get_ids().to_vec()).unwrap_or_default();
            let special = ids.iter().any(|id| self.trie.is_special_token(*id));
            match !special && self.trie.decode_raw(&ids) == text.as_bytes() {
                true => ids,
                false => self.trie.greedy_tokenize(text.as_bytes()),
            }
        })
    }
}
