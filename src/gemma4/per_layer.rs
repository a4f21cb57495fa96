//! Per-layer embeddings: a second, narrow input to every layer, from its own table and from the first layer's input.

use std::f32::consts::FRAC_1_SQRT_2;

use foretoken_kernels::ElementType;
use half::{bf16, f16};

use super::config::TextConfig;
use crate::checkpoint::{Loader, TableUse};
use crate::nn::Gate;
use crate::ops::{Destination, Ops};
use crate::{Error, Result};

/// The part shared by all layers.
pub(super) struct PerLayerEmbeddings<O: Ops> {
    embed_tokens_per_layer: O::Embedding, // (vocab_size_per_layer_input, layers * width)
    per_layer_model_projection: O::Linear, // (layers * width, hidden)
    per_layer_projection_norm: O::Norm,   // (width), shared by the layers
    width: usize,
}

impl<O: Ops> PerLayerEmbeddings<O> {
    pub(super) fn load(loader: &mut Loader, to: &impl Destination<Ops = O>, config: &TextConfig) -> Result<Self> {
        let (hidden, width) = (config.hidden_size, config.hidden_size_per_layer_input);
        let all = config.layers.len() * width;
        let (table, shape) = ("embed_tokens_per_layer.weight", [config.vocab_size_per_layer_input, all]);
        let scale = |element| round_to(element, (width as f32).sqrt());
        // The projection is scaled by 1 / sqrt(hidden): norm(s x) with an epsilon e is norm(x) with e / s^2.
        let eps = config.rms_norm_eps * hidden as f64;
        let projection = "per_layer_model_projection.weight";
        Ok(Self {
            embed_tokens_per_layer: to.embedding(loader.embedding(table, shape, TableUse::LookUp, scale)?)?,
            per_layer_model_projection: to.linear(loader.exact_linear(projection, all, hidden)?)?,
            per_layer_projection_norm: to.norm(loader.norm("per_layer_projection_norm.weight", width, eps)?)?,
            width,
        })
    }

    /// The inputs of all layers `(rows, layers * width)`: `(norm(x0 W^T / sqrt(hidden)) + table[id] sqrt(width)) /
    /// sqrt 2`. `x0` `(rows, hidden)` is the first layer's input.
    pub(super) fn forward(&self, ops: &O, ids: O::Ids<'_>, x0: &O::Tensor) -> Result<O::Tensor> {
        let from_tokens = ops.embed(&self.embed_tokens_per_layer, ids).map_err(|e| match e {
            Error::Argument { name, problem } => Error::argument(name, format!("per-layer embeddings: {problem}")),
            other => other,
        })?;
        let context = ops.linear(&self.per_layer_model_projection, x0)?;
        ops.add_norm(&self.per_layer_projection_norm, &from_tokens, &context, FRAC_1_SQRT_2)
    }

    /// The input of layer `layer`: `(rows, width)`.
    pub(super) fn input(&self, ops: &O, inputs: &O::Tensor, layer: usize) -> Result<O::Tensor> {
        ops.columns(inputs, layer * self.width, self.width)
    }
}

/// A layer's part, applied after the feed-forward block.
pub(super) struct PerLayerInput<O: Ops> {
    per_layer_input_gate: O::Linear, // (width, hidden)
    per_layer_projection: O::Linear, // (hidden, width)
    post_per_layer_input_norm: O::Norm,
}

impl<O: Ops> PerLayerInput<O> {
    pub(super) fn load(
        loader: &mut Loader,
        to: &impl Destination<Ops = O>,
        name: &str,
        config: &TextConfig,
    ) -> Result<Self> {
        let (hidden, width) = (config.hidden_size, config.hidden_size_per_layer_input);
        let norm = format!("{name}post_per_layer_input_norm.weight");
        let mut linear =
            |part: &str, outputs, inputs| to.linear(loader.linear(&format!("{name}{part}.weight"), outputs, inputs)?);
        Ok(Self {
            per_layer_input_gate: linear("per_layer_input_gate", width, hidden)?,
            per_layer_projection: linear("per_layer_projection", hidden, width)?,
            post_per_layer_input_norm: to.norm(loader.norm(&norm, hidden, config.rms_norm_eps)?)?,
        })
    }

    /// `(h + norm(projection(gelu_tanh(gate(h)) * input))) * layer_scalar`.
    pub(super) fn forward(&self, ops: &O, h: &O::Tensor, input: &O::Tensor, layer_scalar: f32) -> Result<O::Tensor> {
        let gated = ops.gate(Gate::GeluTanh, &ops.linear(&self.per_layer_input_gate, h)?, input)?;
        let projected = ops.linear(&self.per_layer_projection, &gated)?;
        ops.add_norm(&self.post_per_layer_input_norm, h, &projected, layer_scalar)
    }
}

/// The embedding scale is rounded to the table's type, as in the reference. Not for quantized
/// tables: the engines that write them do not round it.
pub(super) fn round_to(element: Option<ElementType>, x: f32) -> f32 {
    match element {
        None | Some(ElementType::F32) => x,
        Some(ElementType::F16) => f16::from_f32(x).to_f32(),
        Some(ElementType::Bf16) => bf16::from_f32(x).to_f32(),
    }
}
