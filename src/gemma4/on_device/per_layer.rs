//! Per-layer embeddings: see `gemma4::per_layer`.

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::pointwise::{Strided, gelu_gate};

use super::workspace::Pass;
use super::{Norm, linear};
use crate::Result;
use crate::device::{Buffer, Device, Input, Launcher, Matrices, QuantizedInputs, subslice};
use crate::gemma4::per_layer::{PerLayerEmbeddings, PerLayerInput};

pub(super) struct DevicePerLayerEmbeddings {
    embed_tokens_per_layer: Matrices,
    scale: f32,
    per_layer_model_projection: Matrices,
    per_layer_projection_norm: Norm,
    layers: usize,
    width: usize,
}

/// Buffers for the inputs of all layers.
pub(super) struct PerLayerWorkspace {
    context: Buffer<f32>, // (rows, layers * width)
    inputs: Buffer<f32>,  // (rows, layers * width)
}

impl DevicePerLayerEmbeddings {
    pub(super) fn upload(device: &dyn Device, from: &PerLayerEmbeddings) -> Result<Self> {
        let table = from.embed_tokens_per_layer.weight();
        let mut norm = Norm::upload(device, &from.per_layer_projection_norm)?;
        // norm(s x) with an epsilon e is norm(x) with e / s^2: so the context scale needs no launch.
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

    pub(super) fn workspace(&self, device: &dyn Device, rows: usize) -> Result<PerLayerWorkspace> {
        let len = rows * self.layers * self.width;
        Ok(PerLayerWorkspace { context: Buffer::new(device, len)?, inputs: Buffer::new(device, len)? })
    }

    /// Computes the inputs of every layer from the ids and the first layer's input `x0` `(rows, hidden)`.
    pub(super) fn forward(
        &self,
        launcher: &Launcher,
        (workspace, quants): (&PerLayerWorkspace, &QuantizedInputs),
        (ids, rows): (DeviceSlice<u32>, usize),
        x0: DeviceSlice<f32>,
    ) -> Result<()> {
        let (context, inputs) = (workspace.context.slice(), workspace.inputs.slice());
        self.embed_tokens_per_layer.embed_rows(launcher, (ids, rows), self.scale, inputs)?;
        let x0 = Input::new(quants, x0, (rows, self.per_layer_model_projection.inputs()));
        self.per_layer_model_projection.multiply(launcher, &x0, context)?;
        self.per_layer_projection_norm.add_to(
            launcher,
            inputs,
            context,
            rows * self.layers,
            std::f32::consts::FRAC_1_SQRT_2,
        )
    }

    /// The input of layer `layer` for the rows from `first` on.
    pub(super) fn input(&self, workspace: &PerLayerWorkspace, layer: usize, first: usize) -> Strided {
        let (stride, inputs) = (self.layers * self.width, workspace.inputs.slice());
        let start = first * stride + layer * self.width;
        Strided { slice: subslice(inputs, start, inputs.len()), stride }
    }
}

pub(super) struct DevicePerLayerInput {
    per_layer_input_gate: Matrices,
    per_layer_projection: Matrices,
    post_per_layer_input_norm: Norm,
}

impl DevicePerLayerInput {
    pub(super) fn upload(device: &dyn Device, name: &str, from: &PerLayerInput) -> Result<Self> {
        let matrix = |name_part: &str, of| linear(device, &format!("{name}{name_part}"), of);
        Ok(Self {
            per_layer_input_gate: matrix("per_layer_input_gate", &from.per_layer_input_gate)?,
            per_layer_projection: matrix("per_layer_projection", &from.per_layer_projection)?,
            post_per_layer_input_norm: Norm::upload(device, &from.post_per_layer_input_norm)?,
        })
    }

    pub(super) fn forward(
        &self,
        pass: &Pass<'_>,
        h: DeviceSlice<f32>,
        input: Strided,
        layer_scalar: f32,
    ) -> Result<()> {
        let Pass { launcher, workspace, placed } = *pass;
        let (rows, width) = (placed.positions.rows, self.per_layer_input_gate.outputs());
        let (gate, gated, branch) = (workspace.gate.slice(), workspace.gated.slice(), workspace.branch.slice());
        let x = Input::new(&workspace.quants, h, (rows, self.per_layer_input_gate.inputs()));
        self.per_layer_input_gate.multiply(launcher, &x, gate)?;
        launcher.run(gelu_gate(Strided { slice: gate, stride: width }, input, (rows, width), gated))?;
        let x = Input::new(&workspace.quants, gated, (rows, width));
        self.per_layer_projection.multiply(launcher, &x, branch)?;
        self.post_per_layer_input_norm.add_to(launcher, h, branch, rows, layer_scalar)
    }
}
