//! The tokenizer described by a GGUF file's metadata.
//!
//! Gemma 4's is BPE over whole texts: spaces become `▁`, no pre-tokenization, byte fallback for
//! characters without a token. Files say `gemma4` and list the merges; some say `llama`, with
//! merges or with only scores, which imply the merges.

use std::collections::BTreeMap;

use tokenizers::AddedToken;
use tokenizers::decoders::sequence::Sequence;
use tokenizers::decoders::{DecoderWrapper, byte_fallback::ByteFallback, fuse::Fuse};
use tokenizers::normalizers::{NormalizerWrapper, Replace};
use tokenizers::processors::template::TemplateProcessing;

use super::byte_level;
use super::file::Gguf;
use super::keys::Keys;
use super::metadata::{Array, Value, ValueType, shown};
use crate::tokenizer::{Bpe, BpeOptions, BpeTokenizer, Merges, Repeated, Tokenizer, Vocabulary};
use crate::{Error, Result};

const MODEL: &str = "tokenizer.ggml.model";
/// Value of [`MODEL`] without a tokenizer.
const NONE: &str = "no_vocab";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const SCORES: &str = "tokenizer.ggml.scores";

/// Replaces a space inside tokens.
const SPACE: &str = "\u{2581}";

/// Merges are derived from scores by trying every split of every token; Gemma's longest have some 100 bytes.
const MAX_SCORED_TOKEN: usize = 1024;

/// The values of `token_type` used here.
const NORMAL: u64 = 1;
const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;
const UNUSED: u64 = 5;

/// Gemma 4's control tokens. Some published files give some of them another type (`<eos>`, `<|tool_response>`), so
/// that their text would be merged like any other; llama.cpp's converter marks others user-defined (`<|tool_call>`),
/// which would make them part of the decoded text.
const CONTROL_TOKENS: [&str; 24] = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<mask>",
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    "<|\"|>",
    "<|think|>",
    "<|channel>",
    "<channel|>",
    "<|turn>",
    "<turn|>",
    "<|image>",
    "<image|>",
    "<|image|>",
    "<|audio>",
    "<audio|>",
    "<|audio|>",
    "<|video|>",
];
/// Qwen's control tokens, for files that give them another type.
const QWEN_CONTROL_TOKENS: [&str; 14] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
];
/// Qwen's tokens that are matched whole, but stay visible.
const QWEN_VISIBLE_TOKENS: [&str; 6] =
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"];
/// An HTML tag to Gemma 4: one token, but visible.
const STRIKE_END: &str = "</s>";

/// The tokenizer, or `None` if the file has none.
///
/// # Errors
/// If it is of an unsupported kind, or its lists are inconsistent.
pub fn tokenizer(gguf: &Gguf) -> Result<Option<BpeTokenizer>> {
    let keys = Keys::new(gguf, "");
    let Some(model) = keys.optional_str(MODEL)?.filter(|model| *model != NONE) else { return Ok(None) };
    if !["gemma4", "llama", byte_level::MODEL].contains(&model) {
        let problem = format!("{model:?} is not implemented (gemma4, llama and gpt2 are); add a tokenizer.json");
        return Err(keys.unsupported(MODEL, problem));
    }
    let tokens = tokens(&keys)?;
    let kinds = kinds(&keys, &tokens)?;
    let named = tokens.iter().copied().zip(0..).zip(&kinds);
    let named = named.filter(|((token, id), kind)| **kind != UNUSED || !is_placeholder(token, *id));
    let vocabulary = Vocabulary::new(named.map(|(token, _)| token)).map_err(|repeated| twice(&keys, &repeated))?;
    // An empty list counts as absent: every text would be its characters.
    let merges = match keys.value(MERGES).filter(|merges| merges.as_array().is_none_or(|array| !array.is_empty())) {
        Some(_) => listed_merges(&keys, &vocabulary)?,
        None if model == "llama" => scored_merges(&keys, &tokens, &kinds, &vocabulary)?,
        None => return Err(keys.missing(MERGES)),
    };
    let mut tokenizer = match model {
        byte_level::MODEL => byte_level::tokenizer(&keys, vocabulary, merges)?,
        _ => whole_texts(&keys, &tokens, &kinds, vocabulary, merges)?,
    };

    let of_kind = |kinds_of: &'static [u64]| {
        tokens
            .iter()
            .zip(&kinds)
            .filter(move |(token, kind)| kinds_of.contains(kind) && !token.is_empty())
            .map(|(token, _)| *token)
    };
    // Both are matched in the input text; special ones are omitted from decoded text.
    let special = of_kind(&[UNKNOWN, CONTROL]).map(|token| AddedToken::from(token, true).normalized(false));
    tokenizer.add_special_tokens(special).map_err(failed(&keys, TYPES))?;
    let visible = of_kind(&[USER_DEFINED]).map(|token| AddedToken::from(token, false).normalized(false));
    tokenizer.add_tokens(visible).map_err(failed(&keys, TYPES))?;
    keys.refuse_misspelt()?;
    Ok(Some(tokenizer))
}

/// Whether the name is the one that converters give the embedding row `id` if it has no token (`[PAD511]`).
fn is_placeholder(name: &str, id: u32) -> bool {
    let number = name.strip_prefix("[PAD").and_then(|rest| rest.strip_suffix(']'));
    number.is_some_and(|number| number.parse::<u32>() == Ok(id))
}

/// Gemma 4's tokenizer, without special tokens.
fn whole_texts(
    keys: &Keys<'_>,
    tokens: &[&str],
    kinds: &[u64],
    vocabulary: Vocabulary,
    merges: Merges,
) -> Result<BpeTokenizer> {
    let token = |id: u32, key: &str| {
        let outside = || keys.error(key, format!("is {id}, but there are {} tokens", tokens.len()));
        tokens.get(id as usize).copied().ok_or_else(outside)
    };
    let unknown = match keys.optional_token_id("tokenizer.ggml.unknown_token_id")? {
        Some(id) => Some(token(id, "tokenizer.ggml.unknown_token_id")?),
        None => kinds.iter().position(|kind| *kind == UNKNOWN).and_then(|id| tokens.get(id).copied()),
    };
    let unknown = unknown.map(str::to_owned);
    let options = BpeOptions { unknown, fuse_unknown: true, byte_fallback: true, ignore_merges: false };
    let mut tokenizer = BpeTokenizer::new(Bpe::new(vocabulary, merges, options));
    replace_spaces(keys, &mut tokenizer)?;
    // Regardless of `add_bos_token`: Gemma 4 always begins with it, and files say false.
    if let Some(id) = keys.optional_token_id("tokenizer.ggml.bos_token_id")? {
        let bos = token(id, "tokenizer.ggml.bos_token_id")?;
        let template = template(bos, id).map_err(failed(keys, "tokenizer.ggml.bos_token_id"))?;
        tokenizer.with_post_processor(Some(template));
    }
    Ok(tokenizer)
}

/// The error for a value of `key` that the `tokenizers` crate rejects.
fn failed<'a>(keys: &'a Keys<'_>, key: &'a str) -> impl FnOnce(Box<dyn std::error::Error + Send + Sync>) -> Error + 'a {
    move |e| keys.error(key, format!("does not form a tokenizer ({e}); convert the checkpoint again"))
}

/// Spaces become `▁` in tokens, and spaces again in texts. Nothing is prepended, regardless of `add_space_prefix`.
fn replace_spaces(keys: &Keys<'_>, tokenizer: &mut BpeTokenizer) -> Result<()> {
    let to_tokens: NormalizerWrapper = Replace::new(" ", SPACE).map_err(failed(keys, MODEL))?.into();
    tokenizer.with_normalizer(Some(to_tokens)).map_err(failed(keys, MODEL))?;
    let to_text: DecoderWrapper = Replace::new(SPACE, " ").map_err(failed(keys, MODEL))?.into();
    let decoders = vec![to_text, ByteFallback::new().into(), Fuse::new().into()];
    tokenizer.with_decoder(Some(Sequence::new(decoders)));
    Ok(())
}

/// Prepends the token `bos` to a text.
fn template(bos: &str, id: u32) -> tokenizers::Result<TemplateProcessing> {
    let mut template = TemplateProcessing::builder();
    template.try_single(vec![bos, "$A"])?.try_pair(vec![bos, "$A", bos, "$B"])?.special_tokens(vec![(bos, id)]);
    Ok(template.build()?)
}

/// Checks id by id that another tokenizer (a tokenizer.json) has this file's tokens.
///
/// # Errors
/// If one differs, or the file lists none.
pub fn check_tokenizer(gguf: &Gguf, other: &Tokenizer) -> Result<()> {
    check_tokens(gguf, other.spellings())
}

/// The same for the tokens of another tokenizer; of those with one id, the last counts.
pub(crate) fn check_tokens<'a>(gguf: &Gguf, others: impl Iterator<Item = (&'a str, u32)>) -> Result<()> {
    let keys = Keys::new(gguf, "");
    let tokens = tokens(&keys)?;
    let kinds = kinds(&keys, &tokens)?;
    let differs = |id: usize, other: Option<&str>| {
        let (token, other) = (tokens.get(id).map(|token| shown(token)), other.map(shown));
        let (token, other) = (token.unwrap_or_else(|| "absent".into()), other.unwrap_or_else(|| "absent".into()));
        let remedy = "use the tokenizer that came with the checkpoint";
        Err(keys.error(TOKENS, format!("id {id} is {token} here, {other} in the tokenizer.json; {remedy}")))
    };
    let others: BTreeMap<usize, &str> = others.map(|(token, id)| (id as usize, token)).collect();
    for (id, (token, kind)) in tokens.iter().zip(&kinds).enumerate() {
        match others.get(&id).copied() {
            // Converters give unused ids different names.
            None if *kind == UNUSED => {}
            Some(other) if same(token, other) => {}
            other => return differs(id, other),
        }
    }
    let beyond = others.range(tokens.len()..).next();
    beyond.map_or(Ok(()), |(id, token)| differs(*id, Some(token)))
}

/// Converters write spaces in user-defined tokens as spaces, tokenizer.json as `▁`.
fn same(a: &str, b: &str) -> bool {
    a == b || a.replace(SPACE, " ") == b.replace(SPACE, " ")
}

fn tokens<'a>(keys: &Keys<'a>) -> Result<Vec<&'a str>> {
    let array = array(keys, TOKENS, ValueType::String)?;
    if array.is_empty() || array.len() >= 1 << 31 {
        return Err(keys.error(TOKENS, format!("has {} tokens", array.len())));
    }
    if let Some(table) = keys.gguf().info("token_embd.weight").filter(|table| table.shape()[0] < array.len()) {
        let problem = format!("has {} tokens, but token_embd.weight only {} rows", array.len(), table.shape()[0]);
        return Err(keys.error(TOKENS, format!("{problem}; convert the checkpoint again")));
    }
    Ok(array.strings().into_iter().flatten().collect())
}

/// Token types, corrected for control tokens of other types.
fn kinds(keys: &Keys<'_>, tokens: &[&str]) -> Result<Vec<u64>> {
    let is_byte_level = keys.optional_str(MODEL)? == Some(byte_level::MODEL);
    let of_all = |value: Value<'_>| -> Option<Vec<u64>> {
        let array = value.as_array().filter(|array| array.len() == tokens.len())?;
        array.iter().map(|kind| kind.as_u64()).collect()
    };
    let mut kinds = match keys.value(TYPES) {
        // Gemma's control tokens are known by name.
        None if !is_byte_level => vec![NORMAL; tokens.len()],
        None => return Err(keys.missing(TYPES)),
        Some(value) => of_all(value).ok_or_else(|| {
            keys.error(TYPES, format!("is {value:?}, must be {} integers, one for each token", tokens.len()))
        })?,
    };
    let (control, visible): (&[&str], &[&str]) = match is_byte_level {
        true => (&QWEN_CONTROL_TOKENS, &QWEN_VISIBLE_TOKENS),
        false => (&CONTROL_TOKENS, &[STRIKE_END]),
    };
    for (token, kind) in tokens.iter().zip(&mut kinds).filter(|(_, kind)| ![UNKNOWN, CONTROL].contains(kind)) {
        if control.contains(token) {
            *kind = CONTROL;
        } else if visible.contains(token) {
            *kind = USER_DEFINED;
        }
    }
    Ok(kinds)
}

fn array<'a>(keys: &Keys<'a>, key: &str, element: ValueType) -> Result<Array<'a>> {
    let value = keys.value(key).ok_or_else(|| keys.missing(key))?;
    let array = value.as_array().filter(|array| array.element() == element);
    array.ok_or_else(|| keys.error(key, format!("is {value:?}, must be an array of {element:?}")))
}

/// The error for a token that is listed twice.
fn twice(keys: &Keys<'_>, repeated: &Repeated) -> Error {
    let problem = match repeated {
        Repeated::Spelling(token, first, second) => format!("ids {first} and {second} are both {}", shown(token)),
        Repeated::Id(id) => format!("two tokens have id {id}"),
    };
    keys.error(TOKENS, format!("{problem}; convert the checkpoint again"))
}

/// The merges of the file, `left right` each, best first.
fn listed_merges(keys: &Keys<'_>, vocabulary: &Vocabulary) -> Result<Merges> {
    let array = array(keys, MERGES, ValueType::String)?;
    // Not for as many as are listed: before one is read, entries of no bytes would take twice their file.
    let mut merges = Merges::default();
    for (i, merge) in array.strings().into_iter().flatten().enumerate() {
        let merged = merge.split_once(' ').and_then(|(left, right)| merges.push(vocabulary, left, right));
        merged.ok_or_else(|| {
            keys.error(MERGES, format!("entry {i} is not a pair that forms a token; convert the checkpoint again"))
        })?;
    }
    Ok(merges)
}

/// The merges implied by a list of scores: every way to split a token into two others, tokens with high scores first.
/// (SentencePiece merges the neighbours whose token has the highest score.)
fn scored_merges(keys: &Keys<'_>, tokens: &[&str], kinds: &[u64], vocabulary: &Vocabulary) -> Result<Merges> {
    let array = array(keys, SCORES, ValueType::F32)?;
    let scores: Vec<f32> =
        array.iter().filter_map(|score| if let Value::F32(score) = score { Some(score) } else { None }).collect();
    if scores.len() != tokens.len() {
        return Err(keys.error(SCORES, format!("has {} entries for {} tokens", scores.len(), tokens.len())));
    }
    let are_ids = scores.iter().enumerate().all(|(id, score)| *score == id as f32);
    if are_ids || scores.iter().all(|score| *score == scores[0]) {
        let problem = "do not define the order of merges, and there is no list of merges; add a tokenizer.json";
        return Err(keys.error(SCORES, problem));
    }
    let mut splits = Vec::new();
    for (id, token) in tokens.iter().enumerate() {
        if ![NORMAL, USER_DEFINED].contains(&kinds[id]) {
            continue;
        }
        if token.len() > MAX_SCORED_TOKEN {
            return Err(
                keys.error(TOKENS, format!("token {id} is {} bytes long; convert the checkpoint again", token.len()))
            );
        }
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if let (Some(left), Some(right)) = (vocabulary.id(left), vocabulary.id(right)) {
                splits.push((id, left, right));
            }
        }
    }
    splits.sort_by(|a, b| scores[b.0].total_cmp(&scores[a.0]).then(a.cmp(b)));
    let mut merges = Merges::with_capacity(splits.len());
    for (_, left, right) in splits {
        let merged = merges.push(vocabulary, tokens[left as usize], tokens[right as usize]);
        debug_assert!(merged.is_some(), "parts of a token");
    }
    Ok(merges)
}
