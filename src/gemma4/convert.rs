//! Contents of a Gemma 4's GGUF file, and of its directory.

use super::config::{AssistantConfig, TextConfig};
use super::implied::{implied, implied_of_assistant};
use super::names::gguf_names;
use super::{config_json, describe};
use crate::Result;
use crate::checkpoint::convert::options::{AssistantLayout, ToGgufOptions};
use crate::checkpoint::convert::plan::{Description, Directory, plan};
use crate::checkpoint::gguf::GgufWriter;
use crate::checkpoint::{Checkpoint, Expected, Fields, is_head, is_tower};

const ROPE_FREQS: &str = "rope_freqs.weight";

enum Config {
    Target(TextConfig),
    Assistant(AssistantConfig),
}

/// Describes the GGUF file of a target or an assistant.
///
/// # Errors
/// If the configuration needs something that is not implemented, or a tensor belongs to no text model.
pub(crate) fn description(source: &Checkpoint, options: &ToGgufOptions) -> Result<Description> {
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
            return Err("image and audio towers are not part of a text model");
        }
        Ok(gguf_name(name, layout))
    };
    let (planned, left_out) = plan(source, options, "Gemma 4", name)?;
    let (vocab_size, bos, eos) = (text.vocab_size, text.bos_token_id, text.eos_token_ids.clone());
    let constants = describe::rope_freqs(text).map(|freqs| (ROPE_FREQS, freqs)).into_iter().collect();
    let implied = implied_tensors(source, &config)?;
    let (path, layout) = (source.path().to_owned(), options.layout);
    let architecture = match &config {
        Config::Target(_) => "gemma4",
        Config::Assistant(_) => layout.architecture(),
    };
    let describe = move |file: &mut GgufWriter| match &config {
        Config::Target(text) => describe::text(file, &path, architecture, text),
        Config::Assistant(assistant) => describe::assistant(file, &path, assistant, layout),
    };
    let describe = Box::new(describe);
    Ok(Description { architecture, vocab_size, bos, eos, describe, constants, planned, left_out, implied })
}

/// The tensors that the configuration implies.
fn implied_tensors(source: &Checkpoint, config: &Config) -> Result<Vec<Expected>> {
    match config {
        Config::Target(_) => Ok(implied(source)?.tensors),
        Config::Assistant(config) => Ok(implied_of_assistant(config)),
    }
}

/// Describes the directory of a target or an assistant in a GGUF file.
///
/// # Errors
/// If the metadata need something that is not implemented.
pub(crate) fn directory(source: &Checkpoint) -> Result<Directory> {
    let config = read_config(source)?;
    let json = match &config {
        Config::Target(text) => config_json::target(text),
        Config::Assistant(assistant) => config_json::assistant(assistant),
    };
    Ok(Directory {
        family: "Gemma 4",
        implied: implied_tensors(source, &config)?,
        config: json,
        reads_back: Box::new(move |fields| reads_back(fields, &config)),
        left_out: &[ROPE_FREQS],
        outside: &["lm_head.", "pre_projection.", "post_projection.", "masked_embedding."],
        shape: |_, shape| shape,
        change: Box::new(|_| None),
    })
}

fn reads_back(fields: &Fields, config: &Config) -> Result<bool> {
    Ok(match config {
        Config::Target(config) => {
            let mut read = TextConfig::target(fields)?;
            read.eos_token_ids.clone_from(&config.eos_token_ids);
            read == *config
        }
        Config::Assistant(config) => {
            let mut read = AssistantConfig::read(fields)?;
            read.text.eos_token_ids.clone_from(&config.text.eos_token_ids);
            // Assistants compute no V; not every layout has `k_eq_v`.
            read.text.layers.iter_mut().zip(&config.text.layers).for_each(|(read, own)| read.k_eq_v = own.k_eq_v);
            read == *config
        }
    })
}

fn read_config(source: &Checkpoint) -> Result<Config> {
    match source.is_assistant()? {
        true => source.assistant_config().map(Config::Assistant),
        false => source.target_config().map(Config::Target),
    }
}

fn gguf_name(name: &str, layout: AssistantLayout) -> Option<String> {
    let names = gguf_names(name);
    let older = names.iter().find(|name| name.starts_with("mtp.")).filter(|_| layout == AssistantLayout::Mtp);
    older.or(names.first()).cloned()
}
