//! Per-layer embeddings: a second, narrow input to every layer, from its own table and from the first layer's input.

use candle_core::Tensor;
use candle_nn::Module;
use foretoken_kernels::{ElementType, Isa};
use half::{bf16, f16};

use super::config::TextConfig;
use crate::checkpoint::{Loader, TableUse};
use crate::nn::{Embedding, F32View, Linear, RmsNorm, gelu_gate, tensor};
use crate::{Error, Result};

/// The model's shared part.
pub(super) struct PerLayerEmbeddings {
    pub(super) embed_tokens_per_layer: Embedding, // (vocab_size_per_layer_input, layers * width)
    pub(super) per_layer_model_projection: Linear, // (layers * width, hidden)
    pub(super) per_layer_projection_norm: RmsNorm, // (width), shared by the layers
    pub(super) layers: usize,
    pub(super) width: usize,
    pub(super) context_scale: f32,
}

impl PerLayerEmbeddings {
    pub(super) fn load(loader: &mut Loader, config: &TextConfig) -> Result<Self> {
        let (layers, width) = (config.layers.len(), config.hidden_size_per_layer_input);
        let all = layers * width;
        let (table, shape) = ("embed_tokens_per_layer.weight", [config.vocab_size_per_layer_input, all]);
        Ok(Self {
            embed_tokens_per_layer: loader
                .embedding(table, shape, TableUse::LookUp, |element| round_to(element, (width as f32).sqrt()))?,
            per_layer_model_projection: loader.exact_linear(
                "per_layer_model_projection.weight",
                all,
                config.hidden_size,
            )?,
            per_layer_projection_norm: loader.norm("per_layer_projection_norm.weight", width, config.rms_norm_eps)?,
            layers,
            width,
            context_scale: (config.hidden_size as f32).powf(-0.5),
        })
    }

    /// The inputs of every layer, `(rows, width)` each: `(norm(x0 W^T / sqrt(hidden)) + table[id] sqrt(width)) / sqrt
    /// 2`.
    ///
    /// `x0` `(rows, hidden)` is the first layer's input.
    pub(super) fn forward(&self, ids: &[u32], x0: &Tensor) -> Result<Vec<Tensor>> {
        let from_tokens = self.embed_tokens_per_layer.forward(ids).map_err(|e| match e {
            Error::Argument { name, problem } => Error::argument(name, format!("per-layer embeddings: {problem}")),
            other => other,
        })?;
        let from_tokens = F32View::new(&from_tokens)?;
        let context = self.per_layer_model_projection.forward(x0)?;
        let mut context = F32View::new(&context)?.to_vec();
        context.iter_mut().for_each(|x| *x *= self.context_scale);
        let context =
            self.per_layer_projection_norm.forward(&tensor(context, (ids.len(), self.layers * self.width))?)?;
        let context = F32View::new(&context)?;
        (0..self.layers)
            .map(|layer| {
                let rows = (0..ids.len()).flat_map(|row| {
                    let at = (row * self.layers + layer) * self.width;
                    let pairs = context[at..at + self.width].iter().zip(&from_tokens[at..at + self.width]);
                    pairs.map(|(context, token)| (context + token) * std::f32::consts::FRAC_1_SQRT_2)
                });
                tensor(rows.collect(), (ids.len(), self.width))
            })
            .collect()
    }
}

/// A layer's part, applied after the feed-forward block.
pub(super) struct PerLayerInput {
    pub(super) per_layer_input_gate: Linear, // (width, hidden)
    pub(super) per_layer_projection: Linear, // (hidden, width)
    pub(super) post_per_layer_input_norm: RmsNorm,
    isa: Isa,
}

impl PerLayerInput {
    pub(super) fn load(loader: &mut Loader, name: &str, config: &TextConfig) -> Result<Self> {
        let (hidden, width) = (config.hidden_size, config.hidden_size_per_layer_input);
        let norm = format!("{name}post_per_layer_input_norm.weight");
        Ok(Self {
            per_layer_input_gate: loader.linear(&format!("{name}per_layer_input_gate.weight"), width, hidden)?,
            per_layer_projection: loader.linear(&format!("{name}per_layer_projection.weight"), hidden, width)?,
            post_per_layer_input_norm: loader.norm(&norm, hidden, config.rms_norm_eps)?,
            isa: loader.isa(),
        })
    }

    /// `(h + norm(projection(gelu_tanh(gate(h)) * input))) * layer_scalar`.
    pub(super) fn forward(&self, h: &Tensor, input: &Tensor, layer_scalar: f32) -> Result<Tensor> {
        let gated = gelu_gate(&self.per_layer_input_gate.forward(h)?, input, self.isa)?;
        let projected = self.per_layer_projection.forward(&gated)?;
        self.post_per_layer_input_norm.add_to(h, &projected, layer_scalar)
    }
}

/// The embedding scale is rounded to the table's type, as in the reference. For quantized tables it is not: the engines
/// that write them do not round it.
pub(super) fn round_to(element: Option<ElementType>, x: f32) -> f32 {
    match element {
        None | Some(ElementType::F32) => x,
        Some(ElementType::F16) => f16::from_f32(x).to_f32(),
        Some(ElementType::Bf16) => bf16::from_f32(x).to_f32(),
    }
}
