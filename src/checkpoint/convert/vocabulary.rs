//! The tokenizer of a Hugging Face directory in a GGUF file, as written by llama.cpp's converter.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::representable;
use super::tokenizer_file::{AddedToken, Merge, TokenizerFile};
use crate::checkpoint::gguf::GgufWriter;
use crate::checkpoint::{Architecture, Fields, is_present, regular_file};
use crate::tokenizer::byte_token;
use crate::{Error, Result, chat};

/// Special tokens that stay visible in generated text, for parsers of tool calls.
const VISIBLE: [&str; 7] =
    ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|\"|>"];

/// llama.cpp's token types.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// The score of every token: BPE uses only the merge order, and llama.cpp's converter writes this value.
const SCORE: f32 = -1000.0;

/// Size limit of tokenizer files.
const MAX_BYTES: u64 = 1 << 30;

/// Declares the tokenizer and the chat template of `directory` for a model of `vocab_size` tokens. Without
/// a tokenizer.json, declares that there is none.
pub(super) fn declare(
    file: &mut GgufWriter,
    architecture: &str,
    directory: &Path,
    vocab_size: usize,
    config: &SpecialIds,
) -> Result<()> {
    let path = directory.join("tokenizer.json");
    if !is_present(&path) {
        file.value("tokenizer.ggml.model", "no_vocab")?;
        file.value(&format!("{architecture}.vocab_size"), vocab_size as u32)?;
        return declare_ids(file, config);
    }
    let source = read(&path)?;
    let pre = Architecture::of(architecture).pre_tokenizer();
    representable::check(&path, &source, pre.map(|(_, pattern)| pattern))?;
    let (tokens, kinds) = tokens(&path, &source, vocab_size)?;
    file.value("tokenizer.ggml.model", if source.model.byte_fallback { "gemma4" } else { "gpt2" })?;
    if let Some((name, _)) = pre.filter(|_| !source.model.byte_fallback) {
        file.value("tokenizer.ggml.pre", name)?;
    }
    file.array("tokenizer.ggml.tokens", tokens.iter().map(String::as_str))?;
    file.array("tokenizer.ggml.scores", tokens.iter().map(|_| SCORE))?;
    file.array("tokenizer.ggml.token_type", kinds)?;
    file.array("tokenizer.ggml.merges", merges(&path, &source.model.merges)?)?;
    declare_ids(file, &named_ids(directory, &source, config)?)?;
    file.value("tokenizer.ggml.add_bos_token", source.model.byte_fallback)?;
    file.value("tokenizer.ggml.add_space_prefix", false)?;
    declare_templates(file, chat::template_sources(directory)?)
}

/// Declares the chat templates: the default one, and those with names, which `tokenizer.chat_templates` lists.
fn declare_templates(file: &mut GgufWriter, mut templates: BTreeMap<String, String>) -> Result<()> {
    if let Some(template) = templates.remove(chat::DEFAULT_TEMPLATE) {
        file.value("tokenizer.chat_template", template)?;
    }
    // As in llama.cpp's converter.
    let plain = |name: &str| name.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
    let templates: BTreeMap<_, _> = templates.into_iter().map(|(name, template)| (plain(&name), template)).collect();
    if templates.is_empty() {
        return Ok(());
    }
    file.array("tokenizer.chat_templates", templates.keys().map(String::as_str))?;
    for (name, template) in templates {
        file.value(&format!("tokenizer.chat_template.{name}"), template)?;
    }
    Ok(())
}

/// Ids of special tokens, by their GGUF key names.
#[derive(Clone, Default)]
pub(super) struct SpecialIds {
    pub(super) bos: Option<u32>,
    pub(super) eos: Option<u32>,
    pub(super) unknown: Option<u32>,
    pub(super) padding: Option<u32>,
    pub(super) mask: Option<u32>,
}

fn declare_ids(file: &mut GgufWriter, ids: &SpecialIds) -> Result<()> {
    let SpecialIds { bos, eos, unknown, padding, mask } = *ids;
    for (name, id) in [("bos", bos), ("eos", eos), ("unknown", unknown), ("padding", padding), ("mask", mask)] {
        if let Some(id) = id {
            file.value(&format!("tokenizer.ggml.{name}_token_id"), id)?;
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<TokenizerFile> {
    let len = regular_file(path, "a tokenizer.json")?.len();
    if len > MAX_BYTES {
        return Err(Error::file(path, format!("is {len} bytes long, too long for a tokenizer")));
    }
    let text = std::fs::read(path).map_err(Error::io(path))?;
    let source: TokenizerFile = serde_json::from_slice(&text).map_err(|e| {
        Error::file(path, format!("is not a BPE tokenizer ({e}); use the one that came with the model"))
    })?;
    let is_byte_level = || source.pre_tokenizer.to_string().contains("\"ByteLevel\"");
    if source.model.kind != "BPE" || !(source.model.byte_fallback || is_byte_level()) {
        let problem = "is neither BPE with byte fallback nor byte-level BPE; use the one that came with the model";
        return Err(Error::file(path, problem));
    }
    Ok(source)
}

/// Tokens by id, with their types.
fn tokens(path: &Path, source: &TokenizerFile, vocab_size: usize) -> Result<(Vec<String>, Vec<i32>)> {
    let mut tokens: Vec<Option<&str>> = vec![None; vocab_size];
    let mut kinds = vec![UNUSED; vocab_size];
    let outside = |token: &str, id: u32| {
        let problem = format!("token {token:?} has id {id}, but the model's vocabulary has {vocab_size} entries");
        Error::file(path, format!("{problem}; use the tokenizer that came with the checkpoint"))
    };
    for (token, id) in &source.model.vocab {
        let place = tokens.get_mut(*id as usize).ok_or_else(|| outside(token, *id))?;
        if let Some(other) = place.replace(token) {
            return Err(Error::file(path, format!("tokens {other:?} and {token:?} both have id {id}; fix the file")));
        }
        kinds[*id as usize] = if byte_token(token).is_some() { BYTE } else { NORMAL };
    }
    for AddedToken { id, content, special, .. } in &source.added_tokens {
        let place = tokens.get_mut(*id as usize).ok_or_else(|| outside(content, *id))?;
        *place = Some(content);
        let visible = !special || VISIBLE.contains(&content.as_str());
        kinds[*id as usize] = if visible { USER_DEFINED } else { CONTROL };
    }
    // Embedding rows without a token get a placeholder name, which llama.cpp requires.
    let named = tokens.iter().enumerate();
    let named = named.map(|(id, token)| token.map_or_else(|| format!("[PAD{id}]"), str::to_owned));
    Ok((named.collect(), kinds))
}

fn merges(path: &Path, merges: &[Merge]) -> Result<Vec<String>> {
    let joined = merges.iter().enumerate().map(|(i, merge)| match merge {
        Merge::Joined(merge) => Ok(merge.clone()),
        Merge::Pair([left, right]) if !left.contains(' ') && !right.contains(' ') => Ok(format!("{left} {right}")),
        Merge::Pair(_) => Err(Error::file(
            path,
            format!("merge {i} has a space in it, which GGUF files cannot represent; fix the file"),
        )),
    });
    joined.collect()
}

/// The ids of tokenizer_config.json, else of the model's configuration.
fn named_ids(directory: &Path, source: &TokenizerFile, config: &SpecialIds) -> Result<SpecialIds> {
    let names = Fields::read_if_present(directory.join("tokenizer_config.json"))?;
    let id = |token: &str| {
        let added = source.added_tokens.iter().find(|added| added.content == token).map(|added| added.id);
        added.or_else(|| source.model.vocab.get(token).copied())
    };
    let named = |field: &str| {
        let value = names.as_ref().and_then(|names| names.get(field))?;
        // Older files have an object with the token's flags.
        id(value.as_str().or_else(|| value.get("content").and_then(Value::as_str))?)
    };
    Ok(SpecialIds {
        bos: named("bos_token").or(config.bos),
        eos: named("eos_token").or(config.eos),
        unknown: named("unk_token").or_else(|| id(source.model.unk_token.as_deref()?)),
        padding: named("pad_token").or(config.padding),
        mask: named("mask_token"),
    })
}
