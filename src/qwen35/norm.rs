//! Zero-centred norms.

use super::config::{TensorLayout, TextConfig};
use crate::Result;
use crate::checkpoint::Loader;
use crate::nn::RmsNorm;

/// `x / sqrt(mean(x^2) + eps) * (1 + weight) * scale`: all norms except the delta nets' own.
pub(super) fn zero_centred(
    loader: &mut Loader,
    name: &str,
    width: usize,
    config: &TextConfig,
    scale: f32,
) -> Result<RmsNorm> {
    let (mut weight, offset) = match config.tensor_layout {
        TensorLayout::HuggingFace => (loader.vector(name, width)?, 1.0),
        TensorLayout::Gguf => (loader.factors(name, width)?, 0.0),
    };
    weight.iter_mut().for_each(|weight| *weight = (offset + *weight) * scale);
    Ok(RmsNorm::new(weight, config.rms_norm_eps, loader.isa()))
}
