//! The families of models: which checkpoints each one reads, and what an engine gets of it.

use std::sync::Arc;

use crate::checkpoint::convert::gemma4::description;
use crate::checkpoint::convert::options::ToGguf;
use crate::checkpoint::convert::plan::Description;
use crate::checkpoint::{Checkpoint, LoadOptions};
use crate::facts::TargetFacts;
use crate::model::Model;
use crate::speculative::OwnDrafter;
use crate::verify::expected::{self, Implied};
use crate::{Result, gemma4, qwen35};

/// A loaded target.
pub(crate) struct Loaded {
    pub model: Arc<dyn Model>,
    /// The same, if it is a Gemma 4: it may have an assistant, and may run on a device.
    pub gemma4: Option<Arc<gemma4::Target>>,
    /// The same, if it drafts for itself.
    pub own_drafter: Option<Arc<dyn OwnDrafter>>,
    /// End-of-generation tokens of its configuration.
    pub eos_token_ids: Vec<u32>,
    /// End-of-generation tokens by name: instruction-tuned checkpoints stop on all of them, whatever subset their files
    /// list.
    pub end_of_generation: &'static [&'static str],
}

/// A family.
struct Family {
    /// Whether checkpoints of this `model_type` (config.json) or architecture (GGUF) are its own, to be read or refused
    /// by name.
    claims: fn(&str) -> bool,
    load: fn(&Checkpoint, LoadOptions) -> Result<Loaded>,
    /// What a GGUF file of a checkpoint at Hugging Face has in it.
    describe: fn(&Checkpoint, &ToGguf) -> Result<Description>,
    facts: fn(&Checkpoint) -> Result<TargetFacts>,
    /// What `verify` checks of a target.
    implied: fn(&Checkpoint) -> Result<Implied>,
    takes_assistants: bool,
}

/// The last one claims the rest, whose errors say what is read.
static REGISTRY: [Family; 2] = [
    Family {
        claims: |name| name.starts_with("qwen"),
        load: qwen35,
        describe: qwen35::description,
        facts: qwen35::facts,
        implied: qwen35::implied,
        takes_assistants: false,
    },
    Family {
        claims: |_| true,
        load: gemma4,
        describe: description,
        facts: gemma4::facts,
        implied: expected::gemma4,
        takes_assistants: true,
    },
];

/// Loads the target of a checkpoint of any family.
///
/// # Errors
/// If the checkpoint needs something that is not implemented, or a tensor is missing or has another shape.
pub(crate) fn load(checkpoint: &Checkpoint, options: LoadOptions) -> Result<Loaded> {
    (of(checkpoint)?.load)(checkpoint, options)
}

/// What a GGUF file of a checkpoint of any family has in it.
///
/// # Errors
/// If the configuration needs something that is not implemented, or there are tensors that no text model has.
pub(crate) fn describe(checkpoint: &Checkpoint, options: &ToGguf) -> Result<Description> {
    (of(checkpoint)?.describe)(checkpoint, options)
}

/// What a target of any family is, from its configuration and its tensors' names.
///
/// # Errors
/// If the configuration is malformed or needs something that is not implemented.
pub fn target_facts(checkpoint: &Checkpoint) -> Result<TargetFacts> {
    (of(checkpoint)?.facts)(checkpoint)
}

/// What the configuration of a target of any family implies.
///
/// # Errors
/// If the configuration is malformed or needs something that is not implemented.
pub(crate) fn implied(checkpoint: &Checkpoint) -> Result<Implied> {
    (of(checkpoint)?.implied)(checkpoint)
}

/// Whether assistants draft for the target.
///
/// # Errors
/// If config.json is missing or malformed.
pub(crate) fn takes_assistants(checkpoint: &Checkpoint) -> Result<bool> {
    Ok(of(checkpoint)?.takes_assistants)
}

fn of(checkpoint: &Checkpoint) -> Result<&'static Family> {
    let name = checkpoint.model_type()?;
    Ok(REGISTRY.iter().find(|family| (family.claims)(&name)).unwrap_or(&REGISTRY[REGISTRY.len() - 1]))
}

fn gemma4(checkpoint: &Checkpoint, options: LoadOptions) -> Result<Loaded> {
    let target = Arc::new(gemma4::Target::load(checkpoint, options)?);
    Ok(Loaded {
        model: target.clone(),
        eos_token_ids: target.config().eos_token_ids.clone(),
        gemma4: Some(target),
        own_drafter: None,
        end_of_generation: &["<eos>", "<turn|>", "<|tool_response>"],
    })
}

fn qwen35(checkpoint: &Checkpoint, options: LoadOptions) -> Result<Loaded> {
    let target = Arc::new(qwen35::Target::load(checkpoint, options)?);
    Ok(Loaded {
        model: target.clone(),
        gemma4: None,
        eos_token_ids: target.config().eos_token_ids.clone(),
        own_drafter: target.has_nextn().then_some(target as Arc<dyn OwnDrafter>),
        end_of_generation: &["<|im_end|>", "<|endoftext|>"],
    })
}
