//! The target on a device.

use foretoken_gpu::DeviceSlice;

use super::text_model::TextModel;
use crate::Result;
use crate::device::{DeviceEmbedding, DeviceModel, DeviceOps, PassKv};
use crate::kv::KvLayout;
use crate::model::Request;

impl DeviceModel for TextModel<DeviceOps> {
    fn hidden_size(&self) -> usize {
        self.config.hidden_size
    }

    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn soft_cap(&self) -> Option<f32> {
        self.config.final_logit_softcapping.map(|cap| cap as f32)
    }

    fn kv_layout(&self) -> KvLayout {
        Self::kv_layout(self)
    }

    fn embed_tokens(&self) -> &DeviceEmbedding {
        &self.embed_tokens
    }

    fn forward(&self, ops: &DeviceOps, ids: DeviceSlice<u32>, kv: &mut PassKv<'_>, request: &Request) -> Result<()> {
        Self::forward(self, ops, ids, ids.len(), kv, request).map(drop)
    }
}
