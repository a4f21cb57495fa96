//! Stop conditions of requests, and which stop string ended a text.

use foretoken::{EndOfGeneration, Engine, Stop};

use crate::api_error::Result;
use crate::fields::Fields;

/// Maximum number of stop tokens: every token is compared with all of them.
const MAX_STOP_TOKENS: usize = 1024;

/// Stop conditions, with vLLM's and llama.cpp's `ignore_eos` and `stop_token_ids`.
pub(crate) fn conditions(fields: &mut Fields, strings: Vec<String>) -> Result<Stop> {
    let end_of_generation = match fields.flag("ignore_eos")? {
        Some(true) => EndOfGeneration::Ignored,
        _ => EndOfGeneration::Stops,
    };
    let list = fields.list("stop_token_ids")?.unwrap_or_default();
    fields.check_count("stop_token_ids", list.len(), "token ids", MAX_STOP_TOKENS)?;
    let tokens = fields.token_ids("stop_token_ids", &list)?;
    Ok(Stop { end_of_generation, tokens, strings, ..Stop::default() })
}

/// Which stop string ended a text of these tokens: one after the last control token, as none has one within it, that
/// ends with the last token, as earlier ones were not looked for (`min_tokens`). Of several the first one, at the same
/// place the longest.
pub(crate) fn stop_string(engine: &Engine, tokens: &[u32], strings: &[String]) -> Option<String> {
    let tokenizer = engine.tokenizer().ok()?;
    let part = tokens.rsplit(|token| tokenizer.is_control(*token)).find(|part| !part.is_empty())?;
    let bytes: Vec<u8> = part.iter().flat_map(|token| tokenizer.token_bytes(*token)).collect();
    let text = String::from_utf8_lossy(&bytes);
    let own_bytes = part.last().map_or(0, |token| tokenizer.token_bytes(*token).len());
    let before = whole_characters(&bytes[..bytes.len() - own_bytes]);
    let find = |string: &String| {
        let from = text.ceil_char_boundary((before + 1).saturating_sub(string.len()));
        text[from..].find(string.as_str()).map(|at| from + at)
    };
    let found = strings.iter().filter_map(|string| Some((find(string)?, string)));
    found.min_by_key(|(at, string)| (*at, std::cmp::Reverse(string.len()))).map(|(_, string)| string.clone())
}

/// The length of the bytes' text, in which U+FFFD is written for invalid ones, without a character that the end cuts.
fn whole_characters(bytes: &[u8]) -> usize {
    let is_cut = |last: &[u8]| std::str::from_utf8(last).is_err_and(|error| error.error_len().is_none());
    let cut = bytes.utf8_chunks().last().is_some_and(|chunk| is_cut(chunk.invalid()));
    String::from_utf8_lossy(bytes).len() - if cut { char::REPLACEMENT_CHARACTER.len_utf8() } else { 0 }
}
