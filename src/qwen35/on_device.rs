//! The target and its NextN head on a device.

use foretoken_gpu::DeviceSlice;

use super::config::TextConfig;
use super::nextn::Head;
use super::target::Weights;
use super::text_model::TextModel;
use crate::Result;
use crate::device::{DeltaNets, DeviceEmbedding, DeviceModel, DeviceModels, DeviceOps, PassKv};
use crate::kv::KvLayout;
use crate::model::Request;
use crate::ops::Ops;

type Linear = <DeviceOps as Ops>::Linear;

/// A NextN head with the trunk's rotary frequencies, and its embedding and output head where it has none of its own.
struct NextnModel {
    config: TextConfig,
    embed_tokens: DeviceEmbedding,
    head: Head<DeviceOps>,
    lm_head: Linear, // (vocab, hidden)
    rotary: <DeviceOps as Ops>::Rotary,
}

impl Weights<DeviceOps> {
    /// The models that a device runs.
    pub(crate) fn models(self) -> DeviceModels {
        let Self { model, nextn } = self;
        let nextn = nextn.map(|mut head| -> Box<dyn DeviceModel> {
            Box::new(NextnModel {
                config: model.config.clone(),
                embed_tokens: head.embed_tokens.take().unwrap_or_else(|| model.embed_tokens.clone()),
                lm_head: head.lm_head.take().unwrap_or_else(|| model.lm_head.clone()),
                rotary: model.rotary.clone(),
                head,
            })
        });
        DeviceModels { nextn, target: Box::new(model) }
    }
}

impl DeviceModel for TextModel<DeviceOps> {
    fn hidden_size(&self) -> usize {
        self.config.hidden_size
    }

    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn kv_layout(&self) -> KvLayout {
        self.config.kv_layout()
    }

    fn delta_nets(&self) -> Option<DeltaNets> {
        DeltaNets::of(TextModel::delta_nets(self))
    }

    fn embed_tokens(&self) -> &DeviceEmbedding {
        &self.embed_tokens
    }

    fn forward(&self, ops: &DeviceOps, ids: DeviceSlice<u32>, kv: &mut PassKv<'_>, request: &Request) -> Result<()> {
        Self::forward(self, ops, ids, ids.len(), kv, request).map(drop)
    }
}

/// Passes of the head: a row is a token, and beside it the hidden state of the position before.
impl DeviceModel for NextnModel {
    fn hidden_size(&self) -> usize {
        self.config.hidden_size
    }

    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn kv_layout(&self) -> KvLayout {
        self.config.nextn_kv_layout()
    }

    fn reads_states(&self) -> bool {
        true
    }

    fn embed_tokens(&self) -> &DeviceEmbedding {
        &self.embed_tokens
    }

    fn forward(&self, ops: &DeviceOps, ids: DeviceSlice<u32>, kv: &mut PassKv<'_>, request: &Request) -> Result<()> {
        let (embedding, states) = (ops.embed(&self.embed_tokens, ids)?, ops.states(ids.len())?);
        let angles = ops.angles(&self.rotary, kv)?;
        if request.logits.is_empty() {
            return self.head.append(ops, &embedding, &states, &angles, kv);
        }
        let h = self.head.forward(ops, &embedding, &states, &angles, kv)?;
        let hidden = ops.final_norm(&self.head.norm, &ops.rows(&h, &request.logits)?)?;
        ops.logits(&self.lm_head, &hidden, None).map(drop)
    }
}
