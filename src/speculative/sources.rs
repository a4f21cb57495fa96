//! An engine's models and pools, from which a sequence's drafters are made.

use std::sync::Arc;

use super::backend::{Backend, DeviceSequence};
use super::drafter::{Drafter, Reads};
use super::drafter_options::{DrafterOptions, Drafters};
use super::drafters::{
    ChainedModel, DraftModel, Forced, Mtp, NextN, NgramCacheDrafter, NgramMapK, NgramMapK4v, NgramMapOptions, NgramMod,
    NgramPool, NgramSimple,
};
use crate::device::{DeviceDraftModel, DeviceMtp, DeviceNextN, DeviceNextnHead, Models};
use crate::gemma4::{Assistant, Target};
use crate::kv::{KvOptions, PagePool};
use crate::model::{Model, NextnHead};
use crate::{Error, Result};

/// An engine's models and pools, from which drafters are made.
pub(crate) struct Sources {
    pub model: Arc<dyn Model>,
    /// The target, if it is a Gemma 4.
    pub gemma4: Option<Arc<Target>>,
    pub assistant: Option<Arc<Assistant>>,
    /// The target's NextN head, if it has one.
    pub nextn: Option<Arc<dyn NextnHead>>,
    /// The same, if the target runs on a device.
    pub device_nextn: Option<Arc<DeviceNextnHead>>,
    pub draft_model: Option<Arc<ChainedModel>>,
    /// The draft model, if the target runs on a device.
    pub device_draft_model: Option<Arc<Models>>,
    pub ngrams: Arc<NgramPool>,
    pub pages: PagePool,
}

impl Sources {
    /// A target without models that draft.
    pub fn new(model: Arc<dyn Model>, pages: PagePool) -> Self {
        Self {
            model,
            gemma4: None,
            assistant: None,
            nextn: None,
            device_nextn: None,
            draft_model: None,
            device_draft_model: None,
            ngrams: Arc::default(),
            pages,
        }
    }

    /// The resolved list of [`Drafters`].
    pub fn list(&self, drafters: &Drafters) -> Vec<DrafterOptions> {
        match drafters {
            Drafters::Priority(list) | Drafters::Best(list) => list.clone(),
            Drafters::Auto => {
                let lookup = DrafterOptions::NgramMapK(NgramMapOptions::AUTO);
                let mtp = self.has_mtp().then_some(DrafterOptions::Mtp);
                let model = self.draft_model.as_ref().map(|_| DrafterOptions::DraftModel);
                [Some(lookup), mtp.or(model)].into_iter().flatten().collect()
            }
        }
    }

    /// Whether the drafter `mtp` is available.
    pub fn has_mtp(&self) -> bool {
        self.assistant.is_some() || self.nextn.is_some() || self.device_nextn.is_some()
    }

    /// Makes a drafter for one sequence of at most `context` tokens, whose target runs in `backend` and whose cache is
    /// made from `kv`.
    ///
    /// # Errors
    /// If its model was not loaded, a parameter is out of range, or memory is exhausted.
    pub fn drafter(
        &self,
        options: &DrafterOptions,
        backend: &Backend,
        kv: &KvOptions,
        context: usize,
    ) -> Result<Box<dyn Drafter>> {
        options.check()?;
        // Formats of layers are the target's.
        let kv = &KvOptions { layers: Vec::new(), ..kv.clone() };
        Ok(match options {
            DrafterOptions::Mtp => self.mtp(backend, kv, context)?,
            DrafterOptions::DraftModel => self.draft_model(kv, context)?,
            DrafterOptions::NgramSimple(options) => Box::new(NgramSimple::new(*options)),
            DrafterOptions::NgramMapK(options) => Box::new(NgramMapK::new(*options)),
            DrafterOptions::NgramMapK4v(options) => Box::new(NgramMapK4v::new(*options)),
            DrafterOptions::NgramMod(options) => Box::new(NgramMod::new(*options, self.ngrams.clone())),
            DrafterOptions::NgramCache(options) => {
                let vocab = self.model.num_readable_tokens();
                for cache in options.corpus.iter().chain(&options.earlier) {
                    cache.check(vocab)?;
                }
                Box::new(NgramCacheDrafter::new(options.clone()))
            }
            DrafterOptions::Forced => Box::new(Forced),
            DrafterOptions::Custom(custom) => {
                let drafter = (custom.make)();
                if drafter.reads() != Reads::default() && backend.device.is_some() {
                    let problem = format!("the drafter {} reads hidden states, which stay on the device", custom.name);
                    return Err(Error::argument("drafters", format!("{problem}; use the CPU")));
                }
                drafter
            }
        })
    }

    fn mtp(&self, backend: &Backend, kv: &KvOptions, context: usize) -> Result<Box<dyn Drafter>> {
        if let Some(head) = &self.nextn {
            let mut drafter = NextN::new(head.clone(), kv, &self.pages)?;
            drafter.set_max_context(context);
            return Ok(Box::new(drafter));
        }
        if let Some(head) = &self.device_nextn {
            return Ok(Box::new(DeviceNextN::new(head.clone(), kv, context)?));
        }
        let Some(assistant) = &self.assistant else {
            let problem = "mtp needs an assistant, or a model with a NextN head; load one, or turn speculation off";
            return Err(Error::argument("drafters", problem));
        };
        Ok(match &backend.device {
            Some(DeviceSequence { models, sequence }) => Box::new(DeviceMtp::new(models.clone(), sequence.clone())),
            None => Box::new(Mtp::new(assistant.clone())),
        })
    }

    fn draft_model(&self, kv: &KvOptions, context: usize) -> Result<Box<dyn Drafter>> {
        let Some(model) = &self.draft_model else {
            return Err(Error::argument("drafters", "draft-model needs a draft model; load one, or omit it"));
        };
        if let Some(models) = &self.device_draft_model {
            return Ok(Box::new(DeviceDraftModel::new(models, &*model.0, kv, context)?));
        }
        let mut drafter = DraftModel::new(model.clone(), kv, &self.pages)?;
        drafter.set_max_context(context);
        Ok(Box::new(drafter))
    }
}
