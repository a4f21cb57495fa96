//! The interface of passes to a target of any family, or to a NextN head.

use foretoken_gpu::DeviceSlice;

use super::ops::DeviceOps;
use super::positions::PassKv;
use super::recurrent::DeltaNets;
use super::weights::DeviceEmbedding;
use crate::Result;
use crate::kv::KvLayout;
use crate::model::Request;

/// The models of a checkpoint.
pub(crate) struct DeviceModels {
    pub target: Box<dyn DeviceModel>,
    /// Its NextN head, if there is one.
    pub nextn: Option<Box<dyn DeviceModel>>,
}

/// The weights of a target, or of a NextN head, on a device.
pub(crate) trait DeviceModel: Send + Sync {
    /// Width of a hidden state.
    fn hidden_size(&self) -> usize;

    /// Logits per row.
    fn vocab_size(&self) -> usize;

    /// The soft cap of the logits, if there is one.
    fn soft_cap(&self) -> Option<f32> {
        None
    }

    /// The layout of K and V.
    fn kv_layout(&self) -> KvLayout;

    /// The delta nets, if it has any.
    fn delta_nets(&self) -> Option<DeltaNets> {
        None
    }

    /// Whether a row has a hidden state `(hidden)` beside its token: [`DeviceOps::states`].
    fn reads_states(&self) -> bool {
        false
    }

    /// The embedding table.
    fn embed_tokens(&self) -> &DeviceEmbedding;

    /// Launches a pass over the rows of `ids`. Its results are in the outputs of `ops`.
    ///
    /// # Errors
    /// If the device is out of memory, or the driver fails.
    fn forward(&self, ops: &DeviceOps, ids: DeviceSlice<u32>, kv: &mut PassKv<'_>, request: &Request) -> Result<()>;
}
