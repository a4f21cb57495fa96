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
    /// sqrt 2`. `x0` `(rows, hidden)` is the first layer's input. `narrowed` is a layer, from which on only these rows'
    /// inputs are read, and are computed.
    pub(super) fn forward(
        &self,
        ops: &O,
        ids: O::Ids<'_>,
        x0: &O::Tensor,
        narrowed: Option<(usize, &[usize])>,
    ) -> Result<O::Tensor> {
        let from_tokens = ops.embed(&self.embed_tokens_per_layer, ids).map_err(|e| match e {
            Error::Argument { name, problem } => Error::argument(name, format!("per-layer embeddings: {problem}")),
            other => other,
        })?;
        let projection = &self.per_layer_model_projection;
        let context = match narrowed {
            Some((layer, rows)) => ops.linear_narrowed(projection, x0, layer * self.width, rows)?,
            None => ops.linear(projection, x0)?,
        };
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use foretoken_kernels::Isa;

    use super::*;
    use crate::checkpoint::{Checkpoint, LoadOptions};
    use crate::nn::{F32View, tensor};
    use crate::ops::{CpuDestination, CpuOps};

    /// The epsilon is added to the mean square of the scaled projection. That of the fixtures is too small to show it.
    #[test]
    fn the_epsilon_is_that_of_scaled_rows() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/edge/target");
        let (checkpoint, eps) = (Checkpoint::open(&path).expect("a checkpoint"), 0.1);
        let config = TextConfig { rms_norm_eps: eps, ..checkpoint.target_config().expect("a configuration") };
        let (hidden, width, isa) = (config.hidden_size, config.hidden_size_per_layer_input, Isa::best());
        let (to, ops, options) = (CpuDestination { isa }, CpuOps { isa }, LoadOptions::from(isa));
        let mut loader = Loader::new(&checkpoint, checkpoint.text_prefix().expect("a prefix"), &options);
        let per_layer = PerLayerEmbeddings::load(&mut loader, &to, &config).expect("the tensors");
        let ids: &[u32] = &[5];
        let x0 = tensor((0..hidden).map(|i| (i as f32).sin()).collect(), (1, hidden)).expect("a row");

        let inputs = per_layer.forward(&ops, ids, &x0, None).expect("inputs");
        let context = ops.linear(&per_layer.per_layer_model_projection, &x0).expect("a projection");
        let table = ops.embed(&per_layer.embed_tokens_per_layer, ids).expect("a row of the table");
        let [inputs, context, table] = [&inputs, &context, &table].map(|x| F32View::new(x).expect("floats"));
        let weight = per_layer.per_layer_projection_norm.weight().expect("a weight");
        let scaled = |x: &f32| f64::from(*x) / (hidden as f64).sqrt();
        for (i, input) in inputs.iter().enumerate() {
            let of_layer = &context[i / width * width..][..width];
            let mean = of_layer.iter().map(|x| scaled(x).powi(2)).sum::<f64>() / width as f64;
            let normed = scaled(&context[i]) / (mean + eps).sqrt() * f64::from(weight[i % width]);
            let want = (normed + f64::from(table[i])) / 2f64.sqrt();
            assert!((f64::from(*input) - want).abs() < 1e-4, "channel {i}: {input} instead of {want}");
        }
    }
}
