//! A tokenizer's tokens as bytes, for grammars.

use std::collections::HashMap;
use std::sync::Arc;

use llguidance::toktrie::{TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// The tokens as a trie, and the tokenizer, which encodes forced text.
struct Vocabulary {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
}

/// How the vocabulary spells bytes.
#[derive(Clone, Copy)]
enum Spelling {
    /// Text with `\u{2581}` for a space, and `<0xNN>` for bytes.
    ByteFallback,
    /// A character for every byte (GPT-2's table).
    ByteLevel,
}

/// The vocabulary of `tokenizer`, with `vocab_size` tokens; those in `end` end a text.
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

/// The bytes of every token, empty for unused ids. Special tokens and those in `end` begin with toktrie's marker, so that no text
/// encodes to them.
fn token_bytes(tokenizer: &Tokenizer, vocab_size: usize, end: &[u32]) -> Result<Vec<Vec<u8>>> {
    let (inner, spelling) = (tokenizer.inner(), spelling(tokenizer)?);
    let added = inner.get_added_tokens_decoder();
    let is_special = |id: u32| added.get(&id).is_some_and(|token| token.special) || end.contains(&id);
    let characters = byte_characters();
    let mut words = vec![Vec::new(); vocab_size];
    for (token, id) in inner.get_vocab(true) {
        let Some(word) = words.get_mut(id as usize) else { continue };
        *word = match spelling {
            _ if is_special(id) => [&[TokTrie::SPECIAL_TOKEN_MARKER], token.as_bytes()].concat(),
            Spelling::ByteFallback => match byte(&token) {
                Some(byte) => vec![byte],
                None => token.replace('\u{2581}', " ").into_bytes(),
            },
            Spelling::ByteLevel => {
                let bytes: Option<Vec<u8>> = token.chars().map(|c| characters.get(&c).copied()).collect();
                bytes.unwrap_or_else(|| token.into_bytes())
            }
        };
    }
    Ok(words)
}

/// `NN` of `<0xNN>`.
fn byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>').filter(|digits| digits.len() == 2)?;
    u8::from_str_radix(digits, 16).ok()
}

fn spelling(tokenizer: &Tokenizer) -> Result<Spelling> {
    let decoder = tokenizer.inner().get_decoder().and_then(|decoder| serde_json::to_value(decoder).ok());
    let decoder = decoder.unwrap_or_default();
    let parts = decoder["decoders"].as_array().map_or(std::slice::from_ref(&decoder), Vec::as_slice);
    let has = |kind: &str| parts.iter().any(|part| part["type"] == kind);
    match (has("ByteFallback"), has("ByteLevel")) {
        (true, _) => Ok(Spelling::ByteFallback),
        (_, true) => Ok(Spelling::ByteLevel),
        _ => {
            let kinds: Vec<_> = parts.iter().filter_map(|part| part["type"].as_str()).collect();
            let problem = format!("is {:?}; constraints support ByteFallback and ByteLevel", kinds.join(", "));
            Err(Error::Unsupported { path: None, what: "decoder of the tokenizer".into(), problem })
        }
    }
}

/// GPT-2's characters for bytes: printable ones map to themselves, the others to U+0100 and on.
fn byte_characters() -> HashMap<char, u8> {
    let mut next = 0x100u32;
    let character = |byte: u8| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => (char::from(byte), byte),
        _ => {
            next += 1;
            (char::from_u32(next - 1).unwrap_or_default(), byte)
        }
    };
    (0..=u8::MAX).map(character).collect()
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
