//! What a GGUF file of a Gemma 4 has in it.

use super::describe;
use super::options::{AssistantLayout, ToGguf};
use super::plan::{Description, plan};
use crate::Result;
use crate::checkpoint::gguf::{GgufWriter, gguf_names};
use crate::checkpoint::{Checkpoint, Fields};
use crate::gemma4::{AssistantConfig, TextConfig, is_head, is_tower};

pub(super) const ROPE_FREQS: &str = "rope_freqs.weight";

enum Config {
    Target(TextConfig),
    Assistant(AssistantConfig),
}

/// That of a target or an assistant.
///
/// # Errors
/// If the configuration needs something that is not implemented, or there are tensors that no text model has.
pub(crate) fn description(source: &Checkpoint, options: &ToGguf) -> Result<Description> {
    let config = read_config(source)?;
    let (prefix, text, layout) = match &config {
        Config::Target(text) => (source.text_prefix()?, text, AssistantLayout::Nextn),
        Config::Assistant(assistant) => ("model.", &assistant.text, options.layout),
    };
    let name = |own: &str| {
        let name = own.strip_prefix(prefix).unwrap_or(own);
        let name = if is_head(own) { "lm_head.weight" } else { name };
        if name == "lm_head.weight" && text.tie_word_embeddings {
            return Err("the embedding is the head");
        }
        if is_tower(own) {
            return Err("image and audio towers are no part of a text model");
        }
        Ok(gguf_name(name, layout).map(|name| (name, None)))
    };
    let (planned, left_out) = plan(source, options, "Gemma 4", name)?;
    let (vocab_size, bos, eos) = (text.vocab_size, text.bos_token_id, text.eos_token_ids.first().copied());
    let constants = describe::rope_freqs(text).map(|freqs| (ROPE_FREQS, freqs)).into_iter().collect();
    let (path, layout) = (source.path().to_owned(), options.layout);
    let architecture = match &config {
        Config::Target(_) => "gemma4",
        Config::Assistant(_) => layout.architecture(),
    };
    let describe = move |file: &mut GgufWriter| match &config {
        Config::Target(text) => describe::target(file, &path, text),
        Config::Assistant(assistant) => describe::assistant(file, &path, assistant, layout),
    };
    let describe = Box::new(describe);
    Ok(Description { architecture, vocab_size, bos, eos, describe, constants, planned, left_out })
}

fn read_config(source: &Checkpoint) -> Result<Config> {
    let kind = Fields::read(source.path().join("config.json"))?.optional_string("model_type")?;
    match kind.is_some_and(|kind| kind.ends_with("_assistant")) {
        true => source.assistant_config().map(Config::Assistant),
        false => source.target_config().map(Config::Target),
    }
}

fn gguf_name(name: &str, layout: AssistantLayout) -> Option<String> {
    let names = gguf_names(name);
    let older = names.iter().find(|name| name.starts_with("mtp.")).filter(|_| layout == AssistantLayout::Mtp);
    older.or(names.first()).cloned()
}
