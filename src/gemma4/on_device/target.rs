//! The target: see `gemma4::target`.

use std::sync::Arc;

use foretoken_kernels::gpu::Span;
use foretoken_kernels::gpu::positions::Stand;
use foretoken_kernels::gpu::vocabulary::Scores;

use super::layer::{DeviceLayer, Pass};
use super::per_layer::{DevicePerLayerEmbeddings, PerLayerRoom};
use super::room::LayerRoom;
use super::standing::{At, Frequencies, Places};
use super::{Norm, linear};
use crate::Result;
use crate::device::{Buffer, Device, DeviceKv, Input, Matrices, Work, part};
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

/// Rooms for passes of up to so many rows, of which so many results are wanted.
pub(super) struct TargetRoom {
    wanted: usize,
    h: Buffer<f32>, // (rows, hidden)
    layers: LayerRoom,
    per_layer: Option<PerLayerRoom>,
    places: Places,
    newest: Places,
    pub(super) hidden: Buffer<f32>,       // (wanted, hidden), after the final norm
    pub(super) logits: Buffer<f32>,       // (wanted, vocab), before the soft cap
    pub(super) partial: Buffer<[u32; 2]>, // of the argmax
    pub(super) chosen: Buffer<u32>,       // (wanted): the argmax of every row
}

/// Where the rows of a pass begin, as the device has it.
#[derive(Clone, Copy)]
pub(super) struct Begin {
    /// Committed positions.
    pub(super) length: Span<i32>,
    /// As many more for the newest wanted rows, where not all are.
    pub(super) newest: Span<i32>,
    /// What is added to the length first.
    pub(super) emitted: Option<Span<u32>>,
    /// The position that this is.
    pub(super) at: At,
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

    pub(super) fn room(&self, device: &dyn Device, rows: usize, wanted: usize) -> Result<TargetRoom> {
        let (hidden, vocab) = (self.config.hidden_size, self.lm_head.outputs());
        Ok(TargetRoom {
            wanted,
            h: Buffer::new(device, rows * hidden)?,
            layers: LayerRoom::new(device, &self.config, rows, hidden)?,
            per_layer: self.per_layer.as_ref().map(|per_layer| per_layer.room(device, rows)).transpose()?,
            places: Places::new(device, &self.frequencies, rows)?,
            newest: Places::new(device, &self.frequencies, wanted)?,
            hidden: Buffer::new(device, wanted * hidden)?,
            logits: Buffer::new(device, wanted * vocab)?,
            partial: Buffer::new(device, Scores::partial_len(wanted, vocab))?,
            chosen: Buffer::new(device, wanted)?,
        })
    }

    /// The scaled embeddings of `count` ids: `(count, hidden)`.
    pub(super) fn embed(&self, work: &Work, ids: (Span<u32>, usize), y: Span<f32>) -> Result<()> {
        self.embed_tokens.look_up(work, ids, self.scale, y)
    }

    /// One pass over `rows` ids, whose K and V are staged behind `begin`: the results of the newest `wanted` rows are left
    /// in `room`.
    pub(super) fn forward(
        &self,
        work: &Work,
        room: &TargetRoom,
        kv: &DeviceKv,
        (ids, rows, wanted): (Span<u32>, usize, usize),
        begin: &Begin,
    ) -> Result<()> {
        let (hidden, own_kv_layers) = (self.config.hidden_size, self.config.num_own_kv_layers());
        let mut h = part(room.h.span(), 0, rows * hidden);
        self.embed(work, (ids, rows), h)?;
        if let (Some(per_layer), Some(inputs)) = (&self.per_layer, &room.per_layer) {
            per_layer.forward(work, (inputs, &room.layers.quants), (ids, rows), h)?;
        }
        let start = (begin.length, begin.emitted, begin.at);
        let mut placed = room.places.place(work, &self.frequencies, start, (rows, Stand::Following))?;
        let mut first = 0; // row that is still computed
        for (i, layer) in self.layers.iter().enumerate() {
            // From here on layers write no K or V: rows that nobody wants need not be computed.
            if i == own_kv_layers && wanted < rows {
                if wanted == 0 {
                    return Ok(());
                }
                first = rows - wanted;
                h = part(h, first * hidden, wanted * hidden);
                let at = At { position: begin.at.position + first, ..begin.at };
                let start = (begin.newest, None, at);
                placed = room.newest.place(work, &self.frequencies, start, (wanted, Stand::Following))?;
            }
            let input = match (&self.per_layer, &room.per_layer) {
                (Some(per_layer), Some(inputs)) => Some(per_layer.input(inputs, i, first)),
                _ => None,
            };
            let pass = Pass { work, room: &room.layers, placed: &placed };
            layer.forward(&pass, kv, i, (h, input))?;
        }
        if wanted == 0 {
            return Ok(());
        }
        let skipped = rows - first - wanted;
        let h = part(h, skipped * hidden, wanted * hidden);
        self.norm.write(work, h, wanted, room.hidden.span())?;
        let x = Input::new(&room.layers.quants, room.hidden.span(), (wanted, hidden));
        self.lm_head.multiply(work, &x, room.logits.span())
    }
}

impl TargetRoom {
    /// See [`crate::device::Room::grown`].
    pub(super) fn grown(&self) -> usize {
        self.layers.attention.grown()
    }

    pub(super) fn fits(&self, rows: usize, wanted: usize) -> bool {
        rows <= self.layers.rows && wanted <= self.wanted
    }

    /// Rows, and wanted ones.
    pub(super) fn size(&self) -> (usize, usize) {
        (self.layers.rows, self.wanted)
    }
}
