//! The files that have chat templates and the special tokens that they see.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use crate::checkpoint::gguf::Gguf;
use crate::checkpoint::{Fields, is_present, read_text, regular_file};
use crate::{Error, Result};

/// The name of the template that is used unless another one is asked for.
pub(crate) const DEFAULT_TEMPLATE: &str = "default";
/// The name of the template that is used with tools, if there is one.
pub(super) const TOOL_TEMPLATE: &str = "tool_use";
/// The directory of the templates with other names, `NAME.jinja`.
pub(crate) const NAMED_TEMPLATES: &str = "additional_chat_templates";

/// Texts by name.
pub(super) type Texts = BTreeMap<String, String>;

/// The templates of a directory: `chat_template.jinja` and those in `additional_chat_templates`, or else those in
/// `tokenizer_config.json`, or else that in `chat_template.json` (used by older processors).
///
/// # Errors
/// If a file is malformed.
pub(crate) fn template_sources(directory: &Path) -> Result<Texts> {
    let mut sources = Texts::new();
    let file = directory.join("chat_template.jinja");
    if is_present(&file) {
        sources.insert(DEFAULT_TEMPLATE.into(), read(&file)?);
    }
    let named = directory.join(NAMED_TEMPLATES);
    if named.is_dir() {
        for entry in std::fs::read_dir(&named).map_err(Error::io(&named))? {
            let path = entry.map_err(Error::io(&named))?.path();
            let name = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".jinja"));
            if let Some(name) = name {
                sources.insert(name.to_owned(), read(&path)?);
            }
        }
    }
    for file in ["tokenizer_config.json", "chat_template.json"] {
        if sources.contains_key(DEFAULT_TEMPLATE) {
            break;
        }
        if let Some(config) = Fields::read_if_present(directory.join(file))? {
            templates_in(&config).into_iter().for_each(|(name, source)| {
                sources.entry(name).or_insert(source);
            });
        }
    }
    Ok(sources)
}

fn read(path: &Path) -> Result<String> {
    regular_file(path, "a chat template")?;
    read_text(path)
}

/// The template itself, or a list of several with names.
fn templates_in(config: &Fields) -> Texts {
    let named = |entry: &Value| Some((entry["name"].as_str()?.to_owned(), entry["template"].as_str()?.to_owned()));
    match config.get("chat_template") {
        Some(Value::String(source)) => Texts::from([(DEFAULT_TEMPLATE.into(), source.clone())]),
        Some(Value::Array(several)) => several.iter().filter_map(named).collect(),
        _ => Texts::new(),
    }
}

/// The special tokens of a directory, by the variables of templates (`bos_token`, `image_token`): those of
/// `tokenizer_config.json`, and, unless that lists `added_tokens_decoder`, those of
/// `special_tokens_map.json`, as in transformers.
///
/// # Errors
/// If a file is malformed.
pub(super) fn special_tokens(directory: &Path) -> Result<Texts> {
    let mut tokens = Texts::new();
    let config = Fields::read_if_present(directory.join("tokenizer_config.json"))?;
    config.iter().for_each(|config| add_special_tokens(config, &mut tokens));
    if config.is_none_or(|config| config.get("added_tokens_decoder").is_none()) {
        let map = Fields::read_if_present(directory.join("special_tokens_map.json"))?;
        map.iter().for_each(|map| add_special_tokens(map, &mut tokens));
    }
    Ok(tokens)
}

fn add_special_tokens(fields: &Fields, tokens: &mut Texts) {
    // Older files have an object with the token's flags.
    let text = |value: &Value| Some(value.as_str().or_else(|| value.get("content")?.as_str())?.to_owned());
    let own = fields.names().filter(|name| name.ends_with("_token"));
    tokens.extend(own.filter_map(|name| Some((name.to_owned(), text(fields.get(name)?)?))));
    for list in ["extra_special_tokens", "model_specific_special_tokens"] {
        let named = fields.get(list).and_then(Value::as_object).into_iter().flatten();
        tokens.extend(named.filter_map(|(name, token)| Some((name.clone(), text(token)?))));
    }
}

/// The special tokens of a GGUF file, by the variables of templates.
pub(crate) fn gguf_special_tokens(gguf: &Gguf) -> Texts {
    let keys = [
        ("bos", "bos_token"),
        ("eos", "eos_token"),
        ("unknown", "unk_token"),
        ("padding", "pad_token"),
        ("mask", "mask_token"),
    ];
    let Some(tokens) = gguf.metadata("tokenizer.ggml.tokens").and_then(|tokens| tokens.as_array()) else {
        return Texts::new();
    };
    let token = |key: &str| {
        let id = gguf.metadata(&format!("tokenizer.ggml.{key}_token_id"))?.as_u64()?;
        Some(tokens.iter().nth(usize::try_from(id).ok()?)?.as_str()?.to_owned())
    };
    keys.into_iter().filter_map(|(key, name)| Some((name.to_owned(), token(key)?))).collect()
}
