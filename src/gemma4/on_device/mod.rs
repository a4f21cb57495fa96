//! The models on a device: the modules beside this folder as lists of launches over rooms with names.
//!
//! Weights come from the loaded modules, so nothing about checkpoints is said twice. Every launch of a pass goes to one
//! queue; the host waits when it reads.

mod assistant;
mod attention;
mod layer;
mod moe;
mod per_layer;
mod room;
mod sequence;
mod standing;
mod target;

use std::sync::Arc;

use foretoken_kernels::gpu::Span;
use foretoken_kernels::gpu::pointwise::rms_norm;
use foretoken_kernels::gpu::rows::HeadNorm;

use super::{Assistant, Target};
use crate::Result;
use crate::device::{Buffer, Device, DeviceKv, Matrices, Work};
use crate::kv::{KvLayout, KvOptions};
use crate::nn::{Linear, RmsNorm};
use assistant::DeviceAssistant;
use target::DeviceTarget;

pub(crate) use sequence::{Chooser, DRAFTED, Judge, Sequence};

/// A pair on a device, for any number of sequences.
pub(crate) struct Models {
    device: Arc<dyn Device>,
    target: DeviceTarget,
    assistant: Option<DeviceAssistant>,
    suppressed: Option<Buffer<u32>>, // ids that are never chosen
}

impl Models {
    /// Sends the weights of a pair, or of a model by itself, to `device`. `suppressed` are the ids that are never chosen.
    ///
    /// # Errors
    /// If the kernels do not read a weight, or memory does not reach; nothing stays allocated then.
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

    /// An empty sequence whose K and V are kept as `options` say, and how many positions fit: what the options ask for, or
    /// `default`, or less if memory does not reach, a sixteenth of which is left for the rooms of passes.
    ///
    /// # Errors
    /// If the kernels do not read a format, or memory does not reach; nothing stays allocated then.
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
        // No round has more rows, whatever a file says.
        let options = KvOptions { max_round_rows: options.max_round_rows.min(context), ..options.clone() };
        Ok((Sequence::new(self.clone(), layout, &options, context)?, context))
    }

    fn suppressed(&self) -> Option<(Span<u32>, usize)> {
        self.suppressed.as_ref().map(|ids| (ids.span(), ids.len()))
    }
}

/// Sends the matrix of a layer, of the tensor `name`.
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

    /// As rows of heads are normed on their way to the cache.
    fn of_heads(&self) -> HeadNorm {
        HeadNorm { weight: self.weight(), eps: self.eps }
    }

    fn weight(&self) -> Option<Span<f32>> {
        self.weight.as_ref().map(Buffer::span)
    }

    /// `y = norm(x)` of `(rows, width)`.
    fn write(&self, work: &Work, x: Span<f32>, rows: usize, y: Span<f32>) -> Result<()> {
        work.run(rms_norm(x, (rows, self.width), self.weight(), self.eps, None, y))
    }

    /// `y = (y + norm(x)) * scale`: the norm that closes a branch of a layer.
    fn add_to(&self, work: &Work, y: Span<f32>, x: Span<f32>, rows: usize, scale: f32) -> Result<()> {
        work.run(rms_norm(x, (rows, self.width), self.weight(), self.eps, Some((y, scale)), y))
    }
}
