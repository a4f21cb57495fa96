//! The target: see `gemma4::target`.

use std::sync::Arc;

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::positions::Placement;
use foretoken_gpu::plan::vocabulary::Scores;

use super::layer::DeviceLayer;
use super::per_layer::{DevicePerLayerEmbeddings, PerLayerWorkspace};
use super::positions::{Frequencies, HostPosition, PositionBuffers};
use super::workspace::LayerWorkspace;
use super::workspace::Pass;
use super::{Norm, linear};
use crate::Result;
use crate::device::{Buffer, Device, DeviceKv, Input, Launcher, Matrices, subslice};
use crate::gemma4::{Target, TextConfig};

pub(super) struct DeviceTarget {
    config: TextConfig,
    embed_tokens: Arc<Matrices>,
    scale: f32,
    per_layer: Option<DevicePerLayerEmbeddings>,
    layers: Vec<DeviceLayer>,
    norm: Norm,
    lm_head: Arc<Matrices>,
    frequencies: Frequencies,
}

/// Buffers for passes of up to `layers.rows` rows, of which the newest `outputs` have logits.
pub(super) struct TargetWorkspace {
    outputs: usize,
    h: Buffer<f32>, // (rows, hidden)
    layers: LayerWorkspace,
    per_layer: Option<PerLayerWorkspace>,
    places: PositionBuffers,
    newest: PositionBuffers,
    pub(super) hidden: Buffer<f32>,       // (outputs, hidden), after the final norm
    pub(super) logits: Buffer<f32>,       // (outputs, vocab), before the soft cap
    pub(super) partial: Buffer<[u32; 2]>, // of the argmax
    pub(super) chosen: Buffer<u32>,       // (outputs): the argmax of every row
}

/// Start of a pass, in device memory.
#[derive(Clone, Copy)]
pub(super) struct PassStart {
    /// Committed positions.
    pub(super) length: DeviceSlice<i32>,
    /// Position of the first output row, if not all rows are output rows.
    pub(super) newest: DeviceSlice<i32>,
    /// Tokens emitted by the last round, to be added to `length` first.
    pub(super) emitted: Option<DeviceSlice<u32>>,
    /// The host's copy of the position after that.
    pub(super) at: HostPosition,
}

impl DeviceTarget {
    pub(super) fn upload(device: &dyn Device, from: &Target) -> Result<Self> {
        let embed_tokens = Arc::new(Matrices::upload(device, "embed_tokens.weight", from.embed_tokens.weight())?);
        let lm_head = match from.config.tie_word_embeddings {
            true => embed_tokens.clone(),
            false => Arc::new(linear(device, "lm_head", &from.lm_head)?),
        };
        let per_layer = from.per_layer.as_ref().map(|of| DevicePerLayerEmbeddings::upload(device, of)).transpose()?;
        let layers = from.layers.iter().zip(&from.config.layers).enumerate();
        let layers = layers.map(|(i, (layer, config))| DeviceLayer::upload(device, i, config, layer));
        Ok(Self {
            scale: from.embed_tokens.scale(),
            per_layer,
            layers: layers.collect::<Result<_>>()?,
            norm: Norm::upload(device, &from.norm)?,
            frequencies: Frequencies::upload(device, &from.rotations)?,
            config: from.config.clone(),
            embed_tokens,
            lm_head,
        })
    }

    pub(super) fn config(&self) -> &TextConfig {
        &self.config
    }

    pub(super) fn workspace(&self, device: &dyn Device, rows: usize, outputs: usize) -> Result<TargetWorkspace> {
        let (hidden, vocab) = (self.config.hidden_size, self.lm_head.outputs());
        Ok(TargetWorkspace {
            outputs,
            h: Buffer::new(device, rows * hidden)?,
            layers: LayerWorkspace::new(device, &self.config, rows, hidden)?,
            per_layer: self.per_layer.as_ref().map(|per_layer| per_layer.workspace(device, rows)).transpose()?,
            places: PositionBuffers::new(device, &self.frequencies, rows)?,
            newest: PositionBuffers::new(device, &self.frequencies, outputs)?,
            hidden: Buffer::new(device, outputs * hidden)?,
            logits: Buffer::new(device, outputs * vocab)?,
            partial: Buffer::new(device, Scores::partial_len(outputs, vocab))?,
            chosen: Buffer::new(device, outputs)?,
        })
    }

    /// The scaled embeddings of `count` ids: `(count, hidden)`.
    pub(super) fn embed(&self, launcher: &Launcher, ids: (DeviceSlice<u32>, usize), y: DeviceSlice<f32>) -> Result<()> {
        self.embed_tokens.embed_rows(launcher, ids, self.scale, y)
    }

    /// One pass over `rows` ids, whose K and V are staged after `begin`. Hidden states and logits of the newest
    /// `outputs` rows are written to `workspace`.
    pub(super) fn forward(
        &self,
        launcher: &Launcher,
        workspace: &TargetWorkspace,
        kv: &DeviceKv,
        (ids, rows, outputs): (DeviceSlice<u32>, usize, usize),
        begin: &PassStart,
    ) -> Result<()> {
        let (hidden, own_kv_layers) = (self.config.hidden_size, self.config.num_own_kv_layers());
        let mut h = subslice(workspace.h.slice(), 0, rows * hidden);
        self.embed(launcher, (ids, rows), h)?;
        if let (Some(per_layer), Some(inputs)) = (&self.per_layer, &workspace.per_layer) {
            per_layer.forward(launcher, (inputs, &workspace.layers.quants), (ids, rows), h)?;
        }
        let start = (begin.length, begin.emitted, begin.at);
        let mut placed = workspace.places.place(launcher, &self.frequencies, start, (rows, Placement::Consecutive))?;
        let mut first = 0; // first row still computed
        for (i, layer) in self.layers.iter().enumerate() {
            // The remaining layers write no K or V: only output rows are computed.
            if i == own_kv_layers && outputs < rows {
                if outputs == 0 {
                    return Ok(());
                }
                first = rows - outputs;
                h = subslice(h, first * hidden, outputs * hidden);
                let at = HostPosition { position: begin.at.position + first, ..begin.at };
                let start = (begin.newest, None, at);
                placed =
                    workspace.newest.place(launcher, &self.frequencies, start, (outputs, Placement::Consecutive))?;
            }
            let input = match (&self.per_layer, &workspace.per_layer) {
                (Some(per_layer), Some(inputs)) => Some(per_layer.input(inputs, i, first)),
                _ => None,
            };
            let pass = Pass { launcher, workspace: &workspace.layers, placed: &placed };
            layer.forward(&pass, kv, i, (h, input))?;
        }
        if outputs == 0 {
            return Ok(());
        }
        let skipped = rows - first - outputs;
        let h = subslice(h, skipped * hidden, outputs * hidden);
        self.norm.write(launcher, h, outputs, workspace.hidden.slice())?;
        let x = Input::new(&workspace.layers.quants, workspace.hidden.slice(), (outputs, hidden));
        self.lm_head.multiply(launcher, &x, workspace.logits.slice())
    }
}

impl TargetWorkspace {
    /// See [`crate::device::AttentionWorkspace::grown`].
    pub(super) fn grown(&self) -> usize {
        self.layers.attention.grown()
    }

    pub(super) fn fits(&self, rows: usize, outputs: usize) -> bool {
        rows <= self.layers.rows && outputs <= self.outputs
    }

    /// Capacity: rows, and output rows.
    pub(super) fn size(&self) -> (usize, usize) {
        (self.layers.rows, self.outputs)
    }
}
