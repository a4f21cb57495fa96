//! Self-attention: QK-norm, weightless V-norm, scale 1, grouped queries.

use candle_core::Tensor;
use candle_nn::Module;

use super::config::{AttentionType, LayerConfig, TextConfig};
use super::rope::PassAngles;
use crate::Result;
use crate::checkpoint::Loader;
use crate::kv::KvAccess;
use crate::nn::{Linear, RmsNorm, project};

/// `self_attn` of a decoder layer. KV-shared layers, and all layers of an assistant, have queries only.
pub(super) struct Attention {
    pub(super) attention: AttentionType,
    pub(super) q_proj: Linear, // (heads * head_dim, hidden)
    pub(super) q_norm: RmsNorm,
    pub(super) kv: Option<KeysValues>,
    pub(super) o_proj: Linear, // (hidden, heads * head_dim)
}

pub(super) struct KeysValues {
    pub(super) k_proj: Linear,         // (num_kv_heads * head_dim, hidden)
    pub(super) v_proj: Option<Linear>, // the same; `None` if K = V
    pub(super) k_norm: RmsNorm,
    pub(super) v_norm: RmsNorm, // weightless
    pub(super) num_kv_heads: usize,
}

impl Attention {
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
                num_kv_heads: layer.num_kv_heads,
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

    /// `x` `(rows, hidden)` to `(rows, hidden)`. `index` is the layer's index.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        angles: &PassAngles,
        kv: &mut impl KvAccess,
        index: usize,
    ) -> Result<Tensor> {
        let angles = angles.of(self.attention)?;
        let q = match &self.kv {
            None => self.q_proj.forward(x)?,
            Some(own) => {
                let (q, k, v) = match &own.v_proj {
                    Some(v_proj) => {
                        let [q, k, v] = project([&self.q_proj, &own.k_proj, v_proj], x)?;
                        (q, k, v)
                    }
                    None => {
                        let [q, k] = project([&self.q_proj, &own.k_proj], x)?;
                        let v = k.clone();
                        (q, k, v)
                    }
                };
                let v = own.v_norm.forward(&v)?.reshape((x.dim(0)?, own.num_kv_heads, own.v_norm.width()))?;
                kv.append(index, &angles.norm_and_rotate(&own.k_norm, &k)?, &v)?;
                q
            }
        };
        let q = angles.norm_and_rotate(&self.q_norm, &q)?;
        Ok(self.o_proj.forward(&kv.attend(index, &q)?)?)
    }
}
