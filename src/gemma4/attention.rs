//! Self-attention: QK-norm, weightless V-norm, scale 1, grouped queries.

use super::config::{AttentionType, LayerConfig, TextConfig};
use super::rope::PassAngles;
use crate::Result;
use crate::checkpoint::Loader;
use crate::nn::RmsNorm;
use crate::ops::{CpuOps, Heads, Ops, Upload};

/// `self_attn` of a decoder layer. KV-shared layers, and all layers of an assistant, have queries only.
pub(super) struct Attention<O: Ops> {
    attention: AttentionType,
    q_proj: O::Linear, // (heads * head_dim, hidden)
    q_norm: O::Norm,
    kv: Option<KeysValues<O>>,
    o_proj: O::Linear, // (hidden, heads * head_dim)
}

struct KeysValues<O: Ops> {
    k_proj: O::Linear,         // (num_kv_heads * head_dim, hidden)
    v_proj: Option<O::Linear>, // the same; `None` if K = V
    k_norm: O::Norm,
    v_norm: O::Norm, // weightless
}

impl Attention<CpuOps> {
    pub(super) fn load(loader: &mut Loader, name: &str, config: &TextConfig, layer: &LayerConfig) -> Result<Self> {
        let (hidden, eps) = (config.hidden_size, config.rms_norm_eps);
        let (q, kv) = (config.num_attention_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim);
        let keys_values = if layer.kv_shared {
            None
        } else {
            Some(KeysValues {
                k_proj: loader.linear(&format!("{name}k_proj.weight"), kv, hidden)?,
                v_proj: match layer.k_eq_v {
                    true => None,
                    false => Some(loader.linear(&format!("{name}v_proj.weight"), kv, hidden)?),
                },
                k_norm: loader.norm(&format!("{name}k_norm.weight"), layer.head_dim, eps)?,
                v_norm: RmsNorm::weightless(layer.head_dim, eps, loader.isa()),
            })
        };
        Ok(Self {
            attention: layer.attention,
            q_proj: loader.linear(&format!("{name}q_proj.weight"), q, hidden)?,
            q_norm: loader.norm(&format!("{name}q_norm.weight"), layer.head_dim, eps)?,
            kv: keys_values,
            o_proj: loader.linear(&format!("{name}o_proj.weight"), hidden, q)?,
        })
    }

    /// The key norm's weight if K = V: K is V, normed with it and rotated.
    pub(super) fn k_eq_v_weight(&self) -> Option<&[f32]> {
        self.kv.as_ref().filter(|own| own.v_proj.is_none()).and_then(|own| own.k_norm.weight())
    }

    pub(super) fn upload<U: Upload>(&self, to: &U) -> Result<Attention<U::Ops>> {
        let kv = self.kv.as_ref().map(|own| -> Result<_> {
            Ok(KeysValues {
                k_proj: to.linear(&own.k_proj)?,
                v_proj: own.v_proj.as_ref().map(|v_proj| to.linear(v_proj)).transpose()?,
                k_norm: to.norm(&own.k_norm)?,
                v_norm: to.norm(&own.v_norm)?,
            })
        });
        Ok(Attention {
            attention: self.attention,
            q_proj: to.linear(&self.q_proj)?,
            q_norm: to.norm(&self.q_norm)?,
            kv: kv.transpose()?,
            o_proj: to.linear(&self.o_proj)?,
        })
    }
}

impl<O: Ops> Attention<O> {
    /// `x` `(rows, hidden)` to `(rows, hidden)`. `index` is the layer's index.
    pub(super) fn forward(
        &self,
        ops: &O,
        x: &O::Tensor,
        angles: &PassAngles<O>,
        kv: &mut O::Kv<'_>,
        index: usize,
    ) -> Result<O::Tensor> {
        let angles = Some(angles.of(self.attention)?);
        let q = match &self.kv {
            None => ops.linear(&self.q_proj, x)?,
            Some(own) => {
                let (q, k, v) = match &own.v_proj {
                    Some(v_proj) => {
                        let [q, k, v] = ops.project([&self.q_proj, &own.k_proj, v_proj], x)?;
                        (q, k, Some(v))
                    }
                    None => {
                        let [q, k] = ops.project([&self.q_proj, &own.k_proj], x)?;
                        (q, k, None)
                    }
                };
                let values = Heads { x: v.as_ref().unwrap_or(&k), norm: &own.v_norm, angles: None };
                ops.append(kv, index, Heads { x: &k, norm: &own.k_norm, angles }, values)?;
                q
            }
        };
        let attended = ops.attend(kv, index, Heads { x: &q, norm: &self.q_norm, angles })?;
        ops.linear(&self.o_proj, &attended)
    }
}
