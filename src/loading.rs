//! Loads an engine's models to memory or to a device.

use std::path::Path;
use std::sync::Arc;

use crate::checkpoint::{Checkpoint, GenerationTokens, LoadOptions};
use crate::device::{Device, DeviceChoice, DeviceDestination, DeviceModels, DeviceNextnHead, DeviceOps, Models};
use crate::family::{self, Loaded};
use crate::gemma4::{Assistant, AssistantModel, Target};
use crate::kv::PagePool;
use crate::options::EngineOptions;
use crate::speculative::{ChainedModel, Sources, check_vocabulary};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// The models of an engine.
pub(crate) struct ReadModels {
    pub sources: Sources,
    /// The weights of target and assistant on a device; the host modules hold none then.
    pub on_device: Option<Arc<Models>>,
    pub tokenizer: Option<Tokenizer>,
    /// The ids that end a text, sorted.
    pub end_of_generation: Vec<u32>,
}

/// [`read`], to memory if an automatically chosen device cannot run the models, or has too little memory.
///
/// # Errors
/// As [`read`].
pub(crate) fn read_with_fallback(
    options: &EngineOptions,
    load: &LoadOptions,
    checkpoint: &Checkpoint,
    device: Option<&Arc<dyn Device>>,
    tokens: &GenerationTokens,
) -> Result<ReadModels> {
    match (read(options, load, checkpoint, device, tokens), &options.device) {
        (Err(error @ (Error::Device { .. } | Error::Memory { .. })), DeviceChoice::Auto) if device.is_some() => {
            tracing::warn!(%error, "the models cannot run on the device; using the CPU");
            read(options, load, checkpoint, None, tokens)
        }
        (read, _) => read,
    }
}

/// Loads the models of `options` to `device` or to memory; `checkpoint` and `tokens` are the target's.
///
/// # Errors
/// If a file is missing or malformed, two models do not fit each other, one of them cannot run there, or memory is
/// exhausted; nothing stays allocated on the device then.
fn read(
    options: &EngineOptions,
    load: &LoadOptions,
    checkpoint: &Checkpoint,
    device: Option<&Arc<dyn Device>>,
    tokens: &GenerationTokens,
) -> Result<ReadModels> {
    // One thread makes the tokenizer; the weights' errors come first.
    let vocab_size = family::vocab_size(checkpoint);
    let (target, tokenizer) = rayon::join(
        || family::load(checkpoint, load, device.map(|device| &**device)),
        || checkpoint.tokenizer(vocab_size?),
    );
    let target = target?;
    let assistant = options.assistant.as_ref().map(|path| match &target.gemma4 {
        Some(target) => read_assistant(path, target, load, device),
        None => Err(family::not_implemented("assistant", "omit it", checkpoint)),
    });
    let (assistant, assistant_model) = assistant.transpose()?.unzip();
    let tokenizer = tokenizer?;
    let draft = options.draft_model.as_ref().map(|path| -> Result<_> {
        let checkpoint = Checkpoint::open(path)?;
        let load = LoadOptions { nextn: false, ..load.clone() };
        let draft = family::load(&checkpoint, &load, device.map(|device| &**device))?;
        let has_delta_nets = draft.on_device.as_ref().is_some_and(|models| models.target.delta_nets().is_some());
        if let Some(device) = device.filter(|_| has_delta_nets) {
            // It drops rows by truncation, which recurrent states do not support.
            let problem = "a draft model with delta nets is not implemented; omit it, or use the CPU";
            return Err(Error::Device { device: device.name(), problem: problem.into() });
        }
        let own = checkpoint.tokenizer(draft.model.vocab_size())?;
        check_vocabulary((&*target.model, tokenizer.as_ref()), (&*draft.model, own.as_ref()))?;
        Ok((Arc::new(ChainedModel(draft.model)), draft.on_device))
    });
    let (draft_model, draft_on_device) = draft.transpose()?.unzip();
    let end_of_generation = end_of_generation(&target, tokenizer.as_ref(), &tokens.end);
    let (context, suppressed) = (target.model.max_position_embeddings(), &tokens.suppressed[..]);
    let mut sources = Sources {
        gemma4: target.gemma4,
        assistant: assistant.map(Arc::new),
        nextn: target.nextn,
        draft_model,
        ..Sources::new(target.model, PagePool::new(options.kv_memory))
    };
    let mut on_device = None;
    if let Some((device, DeviceModels { target, nextn })) = device.zip(target.on_device) {
        let assistant = assistant_model.flatten().zip(sources.assistant.as_ref());
        let assistant = assistant.map(|(model, host)| (model, host.donors().to_vec()));
        let models = Models::new(device.clone(), target, assistant, suppressed, options.kv_memory)?;
        let nextn = nextn.map(|head| DeviceNextnHead::new(&models, head, context, suppressed)).transpose()?;
        let draft =
            draft_on_device.flatten().map(|draft| models.sharing_pages(draft.target, suppressed)).transpose()?;
        sources.pages = models.pages().clone();
        (sources.device_nextn, sources.device_draft_model) = (nextn.map(Arc::new), draft.map(Arc::new));
        on_device = Some(Arc::new(models));
    }
    Ok(ReadModels { sources, on_device, tokenizer, end_of_generation })
}

/// The ids that end a text, sorted: `also`, those of the target's configuration, and those its family has by name.
fn end_of_generation(target: &Loaded, tokenizer: Option<&Tokenizer>, also: &[u32]) -> Vec<u32> {
    let mut ids = [also, &target.eos_token_ids].concat();
    if let Some(tokenizer) = tokenizer {
        ids.extend(target.end_of_generation.iter().filter_map(|name| tokenizer.id(name)));
    }
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// An assistant for `target`, and its weights if they are on a device.
fn read_assistant(
    path: &Path,
    target: &Target,
    load: &LoadOptions,
    device: Option<&Arc<dyn Device>>,
) -> Result<(Assistant, Option<AssistantModel<DeviceOps>>)> {
    let checkpoint = Checkpoint::open_assistant(path)?;
    match device {
        None => Ok((Assistant::load(&checkpoint, target, load.clone())?, None)),
        Some(device) => {
            let to = DeviceDestination(&**device);
            let (assistant, model) = Assistant::load_to(&to, &checkpoint, target.config(), load)?;
            Ok((assistant, Some(model)))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use foretoken_kernels::Isa;

    use super::*;
    use crate::checkpoint::Progress;
    use crate::device::addresses::Addresses;
    use crate::device::{AnyLaunch, Memory, Recording, out_of_memory};

    /// A device without free memory.
    struct Full;

    // SAFETY: it allocates nothing and runs no kernel.
    unsafe impl Device for Full {
        fn name(&self) -> String {
            "full".into()
        }

        fn free_bytes(&self) -> Result<usize> {
            Ok(0)
        }

        fn allocate(&self, bytes: usize) -> Result<Box<dyn Memory>> {
            Err(out_of_memory("full", bytes, 0))
        }

        unsafe fn launch(&self, _: &AnyLaunch) -> Result<()> {
            unreachable!("not called")
        }

        fn record(&self, _: &[AnyLaunch]) -> Result<Box<dyn Recording>> {
            unreachable!("not called")
        }
    }

    #[test]
    fn only_errors_of_the_device_fall_back_to_memory() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target");
        let checkpoint = Checkpoint::open(&path).expect("a checkpoint");
        let tokens = checkpoint.generation_tokens().expect("tokens");
        let options = EngineOptions { device: DeviceChoice::Auto, ..EngineOptions::new(&path) };
        let read = |options: &EngineOptions, device: Arc<dyn Device>| {
            let tensors = Arc::new(AtomicUsize::new(0));
            let counter = tensors.clone();
            let count = move |_: Progress| {
                counter.fetch_add(1, Ordering::Relaxed);
            };
            let load = LoadOptions { progress: Some(Arc::new(count)), ..LoadOptions::from(Isa::best()) };
            let read = read_with_fallback(options, &load, &checkpoint, Some(&device), &tokens);
            (read, tensors.load(Ordering::Relaxed))
        };
        // The first upload fails, and all is read to memory.
        let (in_memory, once) = read(&options, Arc::new(Full));
        assert!(in_memory.expect("models").on_device.is_none());
        let missing = EngineOptions { draft_model: Some("nowhere".into()), ..options };
        let (error, tensors) = read(&missing, Arc::new(Addresses::default()));
        assert!(matches!(error.err(), Some(Error::Io { .. })));
        assert!(tensors <= once, "{tensors} tensors were read, {once} are there");
    }
}
