//! Byte-level BPE (`gpt2`): tokens are runs of bytes, each byte written as a printable character, and texts
//! are split by a regular expression before merging.

use tokenizers::SplitDelimiterBehavior;
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};

use super::keys::Keys;
use crate::Result;
use crate::checkpoint::architecture::Architecture;
use crate::tokenizer::{Bpe, BpeOptions, BpeTokenizer, Merges, Vocabulary};

/// The name of the model.
pub(super) const MODEL: &str = "gpt2";

const PRE: &str = "tokenizer.ggml.pre";

/// The tokenizer, without special tokens.
///
/// # Errors
/// If no family has this pre-tokenizer, or the lists do not form a tokenizer.
pub(super) fn tokenizer(keys: &Keys<'_>, vocabulary: Vocabulary, merges: Merges) -> Result<BpeTokenizer> {
    let pre = keys.optional_str(PRE)?.unwrap_or_default();
    let Some(pattern) = Architecture::pre_tokenizer_pattern(pre) else {
        return Err(keys.unsupported(PRE, format!("{pre:?} is not implemented; add a tokenizer.json")));
    };
    if keys.optional_bool("tokenizer.ggml.add_bos_token")?.unwrap_or(false) {
        return Err(
            keys.unsupported("tokenizer.ggml.add_bos_token", "is true, which is not implemented; add a tokenizer.json")
        );
    }
    let failed = |e: Box<dyn std::error::Error + Send + Sync>| {
        keys.error("tokenizer.ggml.merges", format!("does not form a tokenizer ({e}); convert the checkpoint again"))
    };
    let mut tokenizer = BpeTokenizer::new(Bpe::new(vocabulary, merges, BpeOptions::default()));
    let pattern = SplitPattern::Regex(pattern.into());
    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(failed)?;
    let bytes = ByteLevel::new(false, false, false);
    tokenizer.with_normalizer(Some(NFC)).map_err(failed)?;
    tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![split.into(), bytes.into()])));
    tokenizer.with_decoder(Some(bytes));
    Ok(tokenizer)
}
