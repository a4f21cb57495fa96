//! Zero-centred norms.

use super::config::TextConfig;
use crate::Result;
use crate::checkpoint::Loader;
use crate::nn::RmsNorm;

/// `x / sqrt(mean(x^2) + eps) * (1 + weight) * scale`: of all norms but the delta nets' own.
pub(super) fn zero_centred(
    loader: &mut Loader,
    name: &str,
    width: usize,
    config: &TextConfig,
    scale: f32,
) -> Result<RmsNorm> {
    let mut weight = loader.vector(name, width)?;
    weight.iter_mut().for_each(|weight| *weight = (1.0 + *weight) * scale);
    Ok(RmsNorm::new(weight, config.rms_norm_eps, loader.isa()))
}
