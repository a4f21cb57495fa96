//! The models on a device: each module of `gemma4` as a list of launches over named buffers.
//!
//! Weights are uploaded from the loaded modules, so checkpoints are read in one place. All launches go to one stream;
//! the host waits only when it reads.

mod assistant;
mod attention;
mod layer;
mod moe;
mod per_layer;
mod positions;
mod sequence;
mod target;
mod workspace;

use std::sync::Arc;

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::pointwise::rms_norm;
use foretoken_gpu::plan::rows::HeadNorm;

use super::{Assistant, Target};
use crate::Result;
use crate::device::{Buffer, Device, DeviceKv, Launcher, Matrices};
use crate::kv::{KvLayout, KvOptions};
use crate::nn::{Linear, RmsNorm};
use assistant::DeviceAssistant;
use target::DeviceTarget;

pub(crate) use sequence::{Chooser, DRAFTED, Judge, Sequence};

/// A target and its assistant, if any, on a device; shared by any number of sequences.
pub(crate) struct Models {
    device: Arc<dyn Device>,
    target: DeviceTarget,
    assistant: Option<DeviceAssistant>,
    suppressed: Option<Buffer<u32>>, // ids that are never chosen
}

impl Models {
    /// Uploads the weights to `device`. `suppressed` are ids that are never chosen.
    ///
    /// # Errors
    /// If no kernel reads a weight's type, or the device is out of memory; nothing stays allocated then.
    pub fn upload(
        device: Arc<dyn Device>,
        target: &Target,
        assistant: Option<&Assistant>,
        suppressed: &[u32],
    ) -> Result<Self> {
        let on = &*device;
        let suppressed = (!suppressed.is_empty()).then(|| Buffer::of(on, suppressed)).transpose()?;
        let (target, assistant) = (
            DeviceTarget::upload(on, target)?,
            assistant.map(|assistant| DeviceAssistant::upload(on, assistant)).transpose()?,
        );
        tracing::info!(device = on.name(), "weights are on the device");
        Ok(Self { device, target, assistant, suppressed })
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// An empty sequence, and its context: `options.max_context`, or the largest up to `default` that fits memory. 1/16
    /// of the free memory is left for workspaces.
    ///
    /// # Errors
    /// If no kernel reads a K/V format, or the device is out of memory; nothing stays allocated then.
    pub fn sequence(
        self: &Arc<Self>,
        layout: &KvLayout,
        options: &KvOptions,
        default: usize,
    ) -> Result<(Sequence, usize)> {
        options.check(layout)?;
        let (free, _) = self.device.memory()?;
        let memory = options.memory.unwrap_or((free - free / 16) as u64);
        let bytes_at = DeviceKv::bytes_at(&*self.device, layout, options)?;
        let context = KvOptions { memory: Some(memory), ..options.clone() }.context(default, bytes_at)?;
        // A session file may ask for more rows than the context has positions.
        let options = KvOptions { max_round_rows: options.max_round_rows.min(context), ..options.clone() };
        Ok((Sequence::new(self.clone(), layout, &options, context)?, context))
    }

    fn suppressed(&self) -> Option<(DeviceSlice<u32>, usize)> {
        self.suppressed.as_ref().map(|ids| (ids.slice(), ids.len()))
    }
}

/// Uploads the matrix of a linear layer, tensor `{name}.weight`.
fn linear(device: &dyn Device, name: &str, linear: &Linear) -> Result<Matrices> {
    Matrices::upload(device, &format!("{name}.weight"), linear.weight())
}

/// A root-mean-square norm.
struct Norm {
    weight: Option<Buffer<f32>>, // (width)
    width: usize,
    eps: f32,
}

impl Norm {
    fn upload(device: &dyn Device, norm: &RmsNorm) -> Result<Self> {
        let weight = norm.weight().map(|weight| Buffer::of(device, weight)).transpose()?;
        Ok(Self { weight, width: norm.width(), eps: norm.eps() })
    }

    /// The same norm, fused into the kernel that writes heads to the cache.
    fn of_heads(&self) -> HeadNorm {
        HeadNorm { weight: self.weight(), eps: self.eps }
    }

    fn weight(&self) -> Option<DeviceSlice<f32>> {
        self.weight.as_ref().map(Buffer::slice)
    }

    /// `y = norm(x)` of `(rows, width)`.
    fn write(&self, launcher: &Launcher, x: DeviceSlice<f32>, rows: usize, y: DeviceSlice<f32>) -> Result<()> {
        launcher.run(rms_norm(x, (rows, self.width), self.weight(), self.eps, None, y))
    }

    /// `y = (y + norm(x)) * scale`: the norm that closes a branch of a layer.
    fn add_to(
        &self,
        launcher: &Launcher,
        y: DeviceSlice<f32>,
        x: DeviceSlice<f32>,
        rows: usize,
        scale: f32,
    ) -> Result<()> {
        launcher.run(rms_norm(x, (rows, self.width), self.weight(), self.eps, Some((y, scale)), y))
    }
}
