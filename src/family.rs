//! Model families: the checkpoints each one reads, and how the engine loads them.

use std::sync::Arc;

use crate::chat::{CallSyntax, ChannelCalls, Channels, ChatOptions, ReplySyntax};
use crate::checkpoint::convert::options::ToGgufOptions;
use crate::checkpoint::convert::plan::{Description, Directory};
use crate::checkpoint::{Architecture, Checkpoint, Implied, LoadOptions, TargetFacts};
use crate::device::{Device, DeviceDestination, DeviceModels, check_head_dims};
use crate::model::{Model, NextnHead};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result, gemma4, qwen35};

/// A loaded target.
pub(crate) struct Loaded {
    pub model: Arc<dyn Model>,
    /// The same model, if it is a Gemma 4: only those have assistants.
    pub gemma4: Option<Arc<gemma4::Target>>,
    /// The same model, if it has a NextN head on the CPU.
    pub nextn: Option<Arc<dyn NextnHead>>,
    /// The weights, if they are on a device: the host modules hold none then.
    pub on_device: Option<DeviceModels>,
    /// End-of-generation tokens of its configuration.
    pub eos_token_ids: Vec<u32>,
    /// End-of-generation tokens by name: instruction-tuned checkpoints stop at all of them,
    /// whatever subset their files list.
    pub end_of_generation: &'static [&'static str],
}

/// A model family.
struct Family {
    load: fn(&Checkpoint, &LoadOptions, Option<&dyn Device>) -> Result<Loaded>,
    /// Contents of the GGUF file for a Hugging Face checkpoint.
    describe: fn(&Checkpoint, &ToGgufOptions) -> Result<Description>,
    /// Contents of the Hugging Face directory for a GGUF checkpoint.
    directory: fn(&Checkpoint) -> Result<Directory>,
    facts: fn(&Checkpoint) -> Result<TargetFacts>,
    vocab_size: fn(&Checkpoint) -> Result<usize>,
    /// What `verify` checks in a target.
    implied: fn(&Checkpoint) -> Result<Implied>,
    /// The reply syntax, if its markers are tokens of the tokenizer.
    reply: fn(&Tokenizer, &ChatOptions) -> Option<Box<dyn ReplySyntax>>,
    /// The syntax of calls in grammars, if the tokenizer has its tokens.
    calls: fn(&Tokenizer) -> Option<Box<dyn CallSyntax>>,
}

static QWEN35: Family = Family {
    load: qwen35,
    describe: qwen35::description,
    directory: qwen35::directory,
    facts: qwen35::facts,
    vocab_size: |checkpoint| Ok(qwen35::TextConfig::of(checkpoint)?.vocab_size),
    implied: qwen35::implied,
    reply: |tokenizer, options| Some(Box::new(qwen35::XmlReply::new(tokenizer, options)?)),
    calls: |tokenizer| Some(Box::new(qwen35::XmlCalls::new(tokenizer)?)),
};

static GEMMA4: Family = Family {
    load: gemma4,
    describe: gemma4::description,
    directory: gemma4::directory,
    facts: gemma4::facts,
    vocab_size: |checkpoint| Ok(checkpoint.target_config()?.vocab_size),
    implied: gemma4::implied,
    reply: |tokenizer, options| Some(Box::new(Channels::new(tokenizer, !options.tools.is_empty())?)),
    calls: |tokenizer| Some(Box::new(ChannelCalls::new(tokenizer)?)),
};

/// In the order in which they claim a tokenizer by its tokens.
static FAMILIES: [&Family; 2] = [&QWEN35, &GEMMA4];

/// Loads the target of a checkpoint of any family, to memory or to a device.
///
/// # Errors
/// If the checkpoint needs something that is not implemented, or a tensor is missing or has another shape; if the
/// device cannot compute the family or a tensor, or is out of memory.
pub(crate) fn load(checkpoint: &Checkpoint, options: &LoadOptions, device: Option<&dyn Device>) -> Result<Loaded> {
    (of(checkpoint)?.load)(checkpoint, options, device)
}

/// The error for a feature that the checkpoint's family lacks.
pub(crate) fn not_implemented(what: &str, remedy: &str, checkpoint: &Checkpoint) -> Error {
    let name = match checkpoint.model_type() {
        Ok(name) => name,
        Err(error) => return error,
    };
    let problem = format!("is not implemented for {name}; {remedy}");
    Error::Unsupported { path: Some(checkpoint.path().to_owned()), what: what.into(), problem }
}

/// Contents of the GGUF file for a checkpoint of any family.
///
/// # Errors
/// If the configuration needs something that is not implemented, or a tensor belongs to no text model.
pub(crate) fn describe(checkpoint: &Checkpoint, options: &ToGgufOptions) -> Result<Description> {
    (of(checkpoint)?.describe)(checkpoint, options)
}

/// Contents of the Hugging Face directory for a GGUF checkpoint of any family.
///
/// # Errors
/// If the metadata need something that is not implemented.
pub(crate) fn directory(checkpoint: &Checkpoint) -> Result<Directory> {
    (of(checkpoint)?.directory)(checkpoint)
}

/// Summarizes a target of any family, from its configuration and tensor names.
///
/// # Errors
/// If the configuration is malformed or needs something that is not implemented.
pub fn target_facts(checkpoint: &Checkpoint) -> Result<TargetFacts> {
    (of(checkpoint)?.facts)(checkpoint)
}

/// The size of the vocabulary in the configuration of a target of any family.
///
/// # Errors
/// As [`target_facts`].
pub(crate) fn vocab_size(checkpoint: &Checkpoint) -> Result<usize> {
    (of(checkpoint)?.vocab_size)(checkpoint)
}

/// What the configuration of a target of any family implies.
///
/// # Errors
/// If the configuration is malformed or needs something that is not implemented.
pub(crate) fn implied(checkpoint: &Checkpoint) -> Result<Implied> {
    (of(checkpoint)?.implied)(checkpoint)
}

/// The reply syntax whose markers are tokens of the tokenizer; without any, everything is text.
pub(crate) fn reply_syntax(tokenizer: &Tokenizer, options: &ChatOptions) -> Box<dyn ReplySyntax> {
    let plain: Box<dyn ReplySyntax> = Box::<Channels>::default();
    FAMILIES.iter().find_map(|family| (family.reply)(tokenizer, options)).unwrap_or(plain)
}

/// The syntax of calls whose tokens are the tokenizer's.
pub(crate) fn call_syntax(tokenizer: &Tokenizer) -> Option<Box<dyn CallSyntax>> {
    FAMILIES.iter().find_map(|family| (family.calls)(tokenizer))
}

/// The family of a checkpoint. What reading its files needs is in [`Architecture`].
fn of(checkpoint: &Checkpoint) -> Result<&'static Family> {
    Ok(match Architecture::of(&checkpoint.model_type()?) {
        Architecture::Qwen35 => &QWEN35,
        Architecture::Gemma4 => &GEMMA4,
    })
}

fn gemma4(checkpoint: &Checkpoint, options: &LoadOptions, device: Option<&dyn Device>) -> Result<Loaded> {
    let Some(device) = device else {
        return gemma4::Target::load(checkpoint, options.clone()).map(|target| loaded_gemma4(target, None));
    };
    let config = checkpoint.target_config()?;
    check_head_dims(device, config.layers.iter().map(|layer| layer.head_dim).enumerate())?;
    let (target, weights) = gemma4::Target::load_to(&DeviceDestination(device), checkpoint, options)?;
    Ok(loaded_gemma4(target, Some(DeviceModels { target: Box::new(weights), nextn: None })))
}

fn loaded_gemma4(target: gemma4::Target, on_device: Option<DeviceModels>) -> Loaded {
    let target = Arc::new(target);
    Loaded {
        model: target.clone(),
        eos_token_ids: target.config().eos_token_ids.clone(),
        gemma4: Some(target),
        nextn: None,
        on_device,
        end_of_generation: &["<eos>", "<turn|>", "<|tool_response>"],
    }
}

fn qwen35(checkpoint: &Checkpoint, options: &LoadOptions, device: Option<&dyn Device>) -> Result<Loaded> {
    let Some(device) = device else {
        return qwen35::Target::load(checkpoint, options.clone()).map(|target| loaded_qwen35(target, None));
    };
    let config = qwen35::TextConfig::of(checkpoint)?;
    let attention = config.layers.iter().enumerate().filter(|(_, layer)| **layer == qwen35::LayerType::Full);
    check_head_dims(device, attention.map(|(i, _)| (i, config.head_dim)))?;
    let (target, weights) = qwen35::Target::load_to(&DeviceDestination(device), checkpoint, options)?;
    Ok(loaded_qwen35(target, Some(weights.models())))
}

fn loaded_qwen35(target: qwen35::Target, on_device: Option<DeviceModels>) -> Loaded {
    let target = Arc::new(target);
    Loaded {
        model: target.clone(),
        gemma4: None,
        eos_token_ids: target.config().eos_token_ids.clone(),
        nextn: target.has_nextn().then_some(target as Arc<dyn NextnHead>),
        on_device,
        end_of_generation: &["<|im_end|>", "<|endoftext|>"],
    }
}
