//! Per-layer embeddings: see `gemma4::per_layer`.

use foretoken_kernels::gpu::Span;
use foretoken_kernels::gpu::pointwise::{Strided, gelu_gate};

use super::layer::Pass;
use super::{Norm, linear};
use crate::Result;
use crate::device::{Buffer, Device, Input, Matrices, Quants, Work, part};
use crate::gemma4::per_layer::{PerLayerEmbeddings, PerLayerInput};

pub(super) struct DevicePerLayerEmbeddings {
    embed_tokens_per_layer: Matrices,
    scale: f32,
    per_layer_model_projection: Matrices,
    per_layer_projection_norm: Norm,
    layers: usize,
    width: usize,
}

/// Room for the inputs of all layers.
pub(super) struct PerLayerRoom {
    context: Buffer<f32>, // (rows, layers * width)
    inputs: Buffer<f32>,  // (rows, layers * width)
}

impl DevicePerLayerEmbeddings {
    pub(super) fn upload(device: &dyn Device, from: &PerLayerEmbeddings) -> Result<Self> {
        let table = from.embed_tokens_per_layer.weight();
        let mut norm = Norm::upload(device, &from.per_layer_projection_norm)?;
        // norm(s x) with an epsilon e is norm(x) with e / s^2: the context's scale needs no launch of its own.
        norm.eps /= from.context_scale * from.context_scale;
        Ok(Self {
            embed_tokens_per_layer: Matrices::upload(device, "embed_tokens_per_layer.weight", table)?,
            scale: from.embed_tokens_per_layer.scale(),
            per_layer_model_projection: linear(device, "per_layer_model_projection", &from.per_layer_model_projection)?,
            per_layer_projection_norm: norm,
            layers: from.layers,
            width: from.width,
        })
    }

    pub(super) fn room(&self, device: &dyn Device, rows: usize) -> Result<PerLayerRoom> {
        let len = rows * self.layers * self.width;
        Ok(PerLayerRoom { context: Buffer::new(device, len)?, inputs: Buffer::new(device, len)? })
    }

    /// Makes the inputs of every layer from the ids and the first layer's input `x0` `(rows, hidden)`.
    pub(super) fn forward(
        &self,
        work: &Work,
        (room, quants): (&PerLayerRoom, &Quants),
        (ids, rows): (Span<u32>, usize),
        x0: Span<f32>,
    ) -> Result<()> {
        let (context, inputs) = (room.context.span(), room.inputs.span());
        self.embed_tokens_per_layer.look_up(work, (ids, rows), self.scale, inputs)?;
        let x0 = Input::new(quants, x0, (rows, self.per_layer_model_projection.inputs()));
        self.per_layer_model_projection.multiply(work, &x0, context)?;
        self.per_layer_projection_norm.add_to(
            work,
            inputs,
            context,
            rows * self.layers,
            std::f32::consts::FRAC_1_SQRT_2,
        )
    }

    /// The input of layer `layer`, of the rows from `first` on.
    pub(super) fn input(&self, room: &PerLayerRoom, layer: usize, first: usize) -> Strided {
        let (stride, inputs) = (self.layers * self.width, room.inputs.span());
        let start = first * stride + layer * self.width;
        Strided { span: part(inputs, start, inputs.len()), stride }
    }
}

pub(super) struct DevicePerLayerInput {
    per_layer_input_gate: Matrices,
    per_layer_projection: Matrices,
    post_per_layer_input_norm: Norm,
}

impl DevicePerLayerInput {
    pub(super) fn upload(device: &dyn Device, name: &str, from: &PerLayerInput) -> Result<Self> {
        let matrix = |part: &str, of| linear(device, &format!("{name}{part}"), of);
        Ok(Self {
            per_layer_input_gate: matrix("per_layer_input_gate", &from.per_layer_input_gate)?,
            per_layer_projection: matrix("per_layer_projection", &from.per_layer_projection)?,
            post_per_layer_input_norm: Norm::upload(device, &from.post_per_layer_input_norm)?,
        })
    }

    pub(super) fn forward(&self, pass: &Pass<'_>, h: Span<f32>, input: Strided, layer_scalar: f32) -> Result<()> {
        let Pass { work, room, placed } = *pass;
        let (rows, width) = (placed.standing.rows, self.per_layer_input_gate.outputs());
        let (gate, gated, branch) = (room.gate.span(), room.gated.span(), room.branch.span());
        let x = Input::new(&room.quants, h, (rows, self.per_layer_input_gate.inputs()));
        self.per_layer_input_gate.multiply(work, &x, gate)?;
        work.run(gelu_gate(Strided { span: gate, stride: width }, input, (rows, width), gated))?;
        let x = Input::new(&room.quants, gated, (rows, width));
        self.per_layer_projection.multiply(work, &x, branch)?;
        self.post_per_layer_input_norm.add_to(work, h, branch, rows, layer_scalar)
    }
}
