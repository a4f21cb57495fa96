//! Loads an engine's models to memory or to a device.

use std::sync::Arc;

use crate::Result;
use crate::checkpoint::{Checkpoint, LoadOptions};
use crate::device::{Device, DeviceChoice, DeviceDestination, DeviceModels, DeviceNextnHead, Models};
use crate::family::{self, Loaded};
use crate::gemma4::Assistant;
use crate::options::EngineOptions;
use crate::speculative::check_vocabulary;
use crate::tokenizer::Tokenizer;

/// The models of an engine.
pub(crate) struct ReadModels {
    pub target: Loaded,
    pub assistant: Option<Arc<Assistant>>,
    pub draft_model: Option<Loaded>,
    pub tokenizer: Option<Tokenizer>,
    /// The weights of target and assistant on a device; the host modules hold none then.
    pub on_device: Option<Arc<Models>>,
    /// The target's NextN head on a device.
    pub nextn_on_device: Option<Arc<DeviceNextnHead>>,
    /// The draft model on a device.
    pub draft_on_device: Option<Arc<Models>>,
}

impl ReadModels {
    /// The ids that end a text, sorted: `also`, those of the target's configuration, and those its family has by name.
    pub fn end_of_generation(&self, also: Vec<u32>) -> Vec<u32> {
        let mut ids = [&also[..], &self.target.eos_token_ids].concat();
        if let Some(tokenizer) = &self.tokenizer {
            ids.extend(self.target.end_of_generation.iter().filter_map(|name| tokenizer.id(name)));
        }
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}

/// An unsupported feature and its remedy: a draft model on a device drops rows by truncation, which
/// recurrent states do not support.
const DRAFT_ON_DEVICE: (&str, &str) = ("draft model on a device", "omit it, or use the CPU");

/// [`read`], to memory if the models cannot run on a device that was chosen automatically.
///
/// # Errors
/// As [`read`].
pub(crate) fn read_with_fallback(
    options: &EngineOptions,
    load: &LoadOptions,
    checkpoint: &Checkpoint,
    device: Option<&Arc<dyn Device>>,
    suppressed: &[u32],
) -> Result<ReadModels> {
    match (read(options, load, checkpoint, device, suppressed), &options.device) {
        (Err(error), DeviceChoice::Auto) if device.is_some() => {
            tracing::warn!(%error, "the models cannot run on the device; using the CPU");
            read(options, load, checkpoint, None, suppressed)
        }
        (read, _) => read,
    }
}

/// Loads the models of `options` to `device` or to memory; `checkpoint` is the target's.
/// `suppressed` ids are never chosen.
///
/// # Errors
/// If a file is missing or malformed, two models do not fit each other, one of them cannot run there, or memory is
/// exhausted; nothing stays allocated on the device then.
fn read(
    options: &EngineOptions,
    load: &LoadOptions,
    checkpoint: &Checkpoint,
    device: Option<&Arc<dyn Device>>,
    suppressed: &[u32],
) -> Result<ReadModels> {
    let (target, models) = read_target(checkpoint, load, device)?;
    let (mut assistant, mut assistant_model) = (None, None);
    if let Some(path) = &options.assistant {
        let Some(target) = &target.gemma4 else {
            return Err(family::not_implemented(("assistant", "omit it"), checkpoint));
        };
        let checkpoint = Checkpoint::open_assistant(path)?;
        let read = match device {
            None => Assistant::load(&checkpoint, target, load.clone())?,
            Some(device) => {
                let (read, model) =
                    Assistant::load_to(&DeviceDestination(&**device), &checkpoint, target.config(), load)?;
                assistant_model = Some((model, read.donors().to_vec()));
                read
            }
        };
        assistant = Some(Arc::new(read));
    }
    let tokenizer = checkpoint.tokenizer(target.model.vocab_size())?;
    let draft = options.draft_model.as_ref().map(|path| -> Result<_> {
        let checkpoint = Checkpoint::open(path)?;
        let draft = read_target(&checkpoint, load, device)?;
        if draft.1.as_ref().is_some_and(|models| models.target.delta_nets().is_some()) {
            return Err(family::not_implemented(DRAFT_ON_DEVICE, &checkpoint));
        }
        let own = checkpoint.tokenizer(draft.0.model.vocab_size())?;
        check_vocabulary((&*target.model, tokenizer.as_ref()), (&*draft.0.model, own.as_ref()))?;
        Ok(draft)
    });
    let (draft_model, draft_models) = draft.transpose()?.unzip();
    let context = target.model.max_position_embeddings();
    let (mut on_device, mut nextn_on_device, mut draft_on_device) = (None, None, None);
    if let Some((device, DeviceModels { target, nextn })) = device.zip(models) {
        let models = Models::new(device.clone(), target, assistant_model, suppressed, options.kv_memory)?;
        let nextn = nextn.map(|head| DeviceNextnHead::new(&models, (head, context), suppressed)).transpose()?;
        // A draft model drafts without its head.
        let draft = draft_models.flatten().map(|draft| models.sharing_pages(draft.target, suppressed)).transpose()?;
        (on_device, nextn_on_device, draft_on_device) =
            (Some(Arc::new(models)), nextn.map(Arc::new), draft.map(Arc::new));
    }
    Ok(ReadModels { on_device, nextn_on_device, draft_on_device, target, assistant, draft_model, tokenizer })
}

/// A target, and its weights if they are on a device.
fn read_target(
    checkpoint: &Checkpoint,
    load: &LoadOptions,
    device: Option<&Arc<dyn Device>>,
) -> Result<(Loaded, Option<DeviceModels>)> {
    match device {
        None => Ok((family::load(checkpoint, load.clone())?, None)),
        Some(device) => {
            let (loaded, models) = family::load_to_device(checkpoint, load, &**device)?;
            Ok((loaded, Some(models)))
        }
    }
}
