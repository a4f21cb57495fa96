//! The decoder layer: see `gemma4::layer`.

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::pointwise::{Strided, gelu_gate};

use super::attention::DeviceAttention;
use super::moe::DeviceMoe;
use super::per_layer::DevicePerLayerInput;
use super::workspace::Pass;
use super::{Norm, linear};
use crate::Result;
use crate::device::{Device, DeviceKv, Input, Matrices};
use crate::gemma4::LayerConfig;
use crate::gemma4::layer::DecoderLayer;

pub(super) struct DeviceLayer {
    input_layernorm: Norm,
    self_attn: DeviceAttention,
    post_attention_layernorm: Norm,
    pre_feedforward_layernorm: Norm,
    gate_proj: Matrices,
    up_proj: Matrices,
    down_proj: Matrices,
    moe: Option<DeviceMoe>,
    post_feedforward_layernorm: Norm,
    per_layer_input: Option<DevicePerLayerInput>,
    layer_scalar: f32,
}

impl DeviceLayer {
    pub(super) fn upload(device: &dyn Device, index: usize, config: &LayerConfig, from: &DecoderLayer) -> Result<Self> {
        let name = format!("layers.{index}.");
        let per_layer_input = from.per_layer_input.as_ref();
        Ok(Self {
            input_layernorm: Norm::upload(device, &from.input_layernorm)?,
            self_attn: DeviceAttention::upload(device, &format!("{name}self_attn."), config, &from.self_attn)?,
            post_attention_layernorm: Norm::upload(device, &from.post_attention_layernorm)?,
            pre_feedforward_layernorm: Norm::upload(device, &from.pre_feedforward_layernorm)?,
            gate_proj: linear(device, &format!("{name}mlp.gate_proj"), &from.mlp.gate_proj)?,
            up_proj: linear(device, &format!("{name}mlp.up_proj"), &from.mlp.up_proj)?,
            down_proj: linear(device, &format!("{name}mlp.down_proj"), &from.mlp.down_proj)?,
            moe: from.moe.as_ref().map(|moe| DeviceMoe::upload(device, &name, moe)).transpose()?,
            post_feedforward_layernorm: Norm::upload(device, &from.post_feedforward_layernorm)?,
            per_layer_input: per_layer_input
                .map(|input| DevicePerLayerInput::upload(device, &name, input))
                .transpose()?,
            layer_scalar: from.layer_scalar,
        })
    }

    /// Applies the layer to `h` `(rows, hidden)` in place. `donor` is the target's layer whose K and V it reads,
    /// `input` its per-layer input, if the model has one.
    pub(super) fn forward(
        &self,
        pass: &Pass<'_>,
        kv: &DeviceKv,
        donor: usize,
        (h, input): (DeviceSlice<f32>, Option<Strided>),
    ) -> Result<()> {
        let Pass { launcher, workspace, placed } = *pass;
        let (rows, normed, branch) = (placed.positions.rows, workspace.normed.slice(), workspace.branch.slice());
        self.input_layernorm.write(launcher, h, rows, normed)?;
        self.self_attn.forward(pass, kv, donor)?;
        self.post_attention_layernorm.add_to(launcher, h, branch, rows, 1.0)?;

        self.pre_feedforward_layernorm.write(launcher, h, rows, normed)?;
        let (gate, up, width) = (workspace.gate.slice(), workspace.up.slice(), self.gate_proj.outputs());
        let x = Input::new(&workspace.quants, normed, (rows, self.gate_proj.inputs()));
        self.gate_proj.multiply(launcher, &x, gate)?;
        self.up_proj.multiply(launcher, &x, up)?;
        let strided = |slice| Strided { slice, stride: width };
        launcher.run(gelu_gate(strided(gate), strided(up), (rows, width), workspace.gated.slice()))?;
        let gated = Input::new(&workspace.quants, workspace.gated.slice(), (rows, width));
        self.down_proj.multiply(launcher, &gated, branch)?;
        if let Some(moe) = &self.moe {
            moe.forward(pass, h)?;
        }
        match (&self.per_layer_input, input) {
            (Some(per_layer_input), Some(input)) => {
                self.post_feedforward_layernorm.add_to(launcher, h, branch, rows, 1.0)?;
                per_layer_input.forward(pass, h, input, self.layer_scalar)
            }
            _ => self.post_feedforward_layernorm.add_to(launcher, h, branch, rows, self.layer_scalar),
        }
    }
}
