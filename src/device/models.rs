//! Loaded models on a device.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::experts::MAX_ROUTE;
use foretoken_gpu::plan::vocabulary::MAX_TOP_K;

use super::experts::DeviceExperts;
use super::ops::{DeviceCentroidHead, DeviceEmbedding, DeviceNorm};
use super::{Buffer, Device, DeviceKv, DeviceOps, Matrices, Sequence};
use crate::gemma4::{Assistant, AssistantModel, Target, TextConfig, TextModel};
use crate::kv::{KvLayout, KvOptions};
use crate::nn::{CentroidHead, Embedding, Experts, Linear, RmsNorm, Rotary, Weight};
use crate::ops::Upload;
use crate::{Error, Result};

/// A target and its assistant, if any, on a device; shared by any number of sequences.
pub(crate) struct Models {
    device: Arc<dyn Device>,
    pub(super) target: TextModel<DeviceOps>,
    pub(super) assistant: Option<DeviceAssistant>,
    suppressed: Option<Buffer<u32>>, // ids that are never chosen
}

/// An assistant on a device.
pub(super) struct DeviceAssistant {
    pub model: AssistantModel<DeviceOps>,
    pub donors: Vec<usize>, // for each layer, the target's layer whose K and V it reads
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
        check_head_dims(on, target.config())?;
        let suppressed = (!suppressed.is_empty()).then(|| Buffer::of(on, suppressed)).transpose()?;
        let target = target.model().upload(&Uploader::new(on))?;
        let assistant = assistant.map(|assistant| -> Result<_> {
            let model = assistant.model().upload(&Uploader::new(on))?;
            Ok(DeviceAssistant { model, donors: assistant.donors().to_vec() })
        });
        let assistant = assistant.transpose()?;
        tracing::info!(device = on.name(), "weights are on the device");
        Ok(Self { device, target, assistant, suppressed })
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// An empty sequence, and its context: `options.max_context`, or the largest up to `default` that fits memory. 1/16
    /// of the free memory is left for activations.
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

    pub(super) fn suppressed(&self) -> Option<(DeviceSlice<u32>, usize)> {
        self.suppressed.as_ref().map(|ids| (ids.slice(), ids.len()))
    }
}

/// Head widths for which there are attention kernels.
const HEAD_DIMS: [usize; 4] = [64, 128, 256, 512];

fn check_head_dims(device: &dyn Device, config: &TextConfig) -> Result<()> {
    let Some((i, layer)) = config.layers.iter().enumerate().find(|(_, layer)| !HEAD_DIMS.contains(&layer.head_dim))
    else {
        return Ok(());
    };
    let problem = format!("heads of {}; the kernels have 64, 128, 256 and 512; use the CPU", layer.head_dim);
    let problem = format!("tensor layers.{i}.self_attn.q_proj.weight: {problem}");
    Err(Error::Device { device: device.name(), problem })
}

/// Copies weights to a device; a matrix that is used twice (a tied output head) is copied once.
struct Uploader<'a> {
    device: &'a dyn Device,
    copied: RefCell<HashMap<*const u8, Arc<Matrices>>>,
}

impl<'a> Uploader<'a> {
    fn new(device: &'a dyn Device) -> Self {
        Self { device, copied: RefCell::default() }
    }

    fn matrices(&self, weight: &Weight) -> Result<Arc<Matrices>> {
        let key = weight.stored().bytes().as_ptr();
        if let Some(copied) = self.copied.borrow().get(&key) {
            return Ok(copied.clone());
        }
        let matrices = Arc::new(Matrices::upload(self.device, weight)?);
        self.copied.borrow_mut().insert(key, matrices.clone());
        Ok(matrices)
    }

    fn refuse(&self, problem: String) -> Error {
        Error::Device { device: self.device.name(), problem: format!("{problem}; use the CPU") }
    }
}

impl Upload for Uploader<'_> {
    type Ops = DeviceOps;

    fn linear(&self, from: &Linear) -> Result<Arc<Matrices>> {
        self.matrices(from.weight())
    }

    fn norm(&self, from: &RmsNorm) -> Result<DeviceNorm> {
        let weight = from.weight().map(|weight| Buffer::of(self.device, weight)).transpose()?;
        Ok(DeviceNorm { weight, width: from.width(), eps: from.eps() })
    }

    fn embedding(&self, from: &Embedding) -> Result<DeviceEmbedding> {
        Ok(DeviceEmbedding { table: self.matrices(from.weight())?, scale: from.scale() })
    }

    fn rotary(&self, from: &Rotary) -> Result<Buffer<f32>> {
        Buffer::of(self.device, from.inverse_frequencies())
    }

    fn experts(&self, from: &Experts) -> Result<DeviceExperts> {
        let (count, top_k) = (from.per_expert_scale.len(), from.top_k);
        if count > MAX_ROUTE.1 || top_k > MAX_ROUTE.2 {
            let most = format!("the kernels choose at most {} of {}", MAX_ROUTE.2, MAX_ROUTE.1);
            return Err(self.refuse(format!("{top_k} of {count} experts; {most}")));
        }
        Ok(DeviceExperts {
            gate_up_proj: Matrices::upload(self.device, &from.gate_up_proj)?,
            down_proj: Matrices::upload(self.device, &from.down_proj)?,
            per_expert_scale: Buffer::of(self.device, &from.per_expert_scale)?,
            top_k,
        })
    }

    fn centroid_head(&self, from: &CentroidHead) -> Result<DeviceCentroidHead> {
        let (count, best) = (from.table.count(), from.top_k);
        if count > MAX_TOP_K {
            return Err(self.refuse(format!("an assistant of {count} centroids; the kernels rank {MAX_TOP_K} at most")));
        }
        let starts: Vec<i32> = (0..=best as i32).collect();
        Ok(DeviceCentroidHead {
            centroids: self.linear(&from.centroids)?,
            table: self.matrices(&from.table)?,
            ordering: Buffer::of(self.device, &from.token_ordering)?,
            token_ordering: from.token_ordering.clone(),
            top_k: best,
            starts: Buffer::of(self.device, &starts)?,
            count: Buffer::of(self.device, &[best as i32])?,
            row: Buffer::of(self.device, &vec![0; best])?,
        })
    }
}
