//! Gated attention: QK-norm, rotation of the first channels, grouped queries, a sigmoid gate per output channel.

use candle_core::Tensor;

use super::config::TextConfig;
use super::norm::zero_centred;
use crate::Result;
use crate::checkpoint::Loader;
use crate::kv::KvAccess;
use crate::nn::{Angles, F32View, Linear, RmsNorm, linear, project, sigmoid_gate, tensor};

/// `self_attn` of a decoder layer.
pub(super) struct Attention {
    q_proj: Linear, // (heads * 2 * head_dim, hidden): each head's query, then its gate
    k_proj: Linear, // (num_kv_heads * head_dim, hidden)
    v_proj: Linear,
    q_norm: RmsNorm, // times head_dim^-0.5, the scale of the scores
    k_norm: RmsNorm,
    o_proj: Linear, // (hidden, heads * head_dim)
}

impl Attention {
    pub(super) fn load(loader: &mut Loader, name: &str, config: &TextConfig) -> Result<Self> {
        let (hidden, head_dim) = (config.hidden_size, config.head_dim);
        let (q, kv) = (config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim);
        let scale = (head_dim as f32).powf(-0.5);
        Ok(Self {
            q_proj: loader.linear(&format!("{name}q_proj.weight"), 2 * q, hidden)?,
            k_proj: loader.linear(&format!("{name}k_proj.weight"), kv, hidden)?,
            v_proj: loader.linear(&format!("{name}v_proj.weight"), kv, hidden)?,
            q_norm: zero_centred(loader, &format!("{name}q_norm.weight"), head_dim, config, scale)?,
            k_norm: zero_centred(loader, &format!("{name}k_norm.weight"), head_dim, config, 1.0)?,
            o_proj: loader.linear(&format!("{name}o_proj.weight"), hidden, q)?,
        })
    }

    /// `x` `(rows, hidden)` to `(rows, hidden)`; `layer` is the layer's index in `kv`.
    pub(super) fn forward(&self, x: &Tensor, angles: &Angles, kv: &mut dyn KvAccess, layer: usize) -> Result<Tensor> {
        let head_dim = self.k_norm.width();
        let [queries, k, v] = project([&self.q_proj, &self.k_proj, &self.v_proj], x)?;
        let (q, gate) = split_heads(&queries, head_dim)?;
        let (rows, width) = v.dims2()?;
        let v = v.reshape((rows, width / head_dim, head_dim))?;
        kv.append(layer, &angles.norm_and_rotate(&self.k_norm, &k)?, &v)?;
        let attended = kv.attend(layer, &angles.norm_and_rotate(&self.q_norm, &q)?)?;
        linear(&self.o_proj, &sigmoid_gate(&gate, &attended, self.q_norm.isa())?)
    }
}

/// `(rows, heads * 2 * head_dim)` to the heads' first halves and their second halves, `(rows, heads * head_dim)` each.
fn split_heads(x: &Tensor, head_dim: usize) -> Result<(Tensor, Tensor)> {
    let (rows, width) = x.dims2()?;
    let view = F32View::new(x)?;
    let (mut first, mut second) = (Vec::with_capacity(view.len() / 2), Vec::with_capacity(view.len() / 2));
    for head in view.chunks_exact(2 * head_dim) {
        first.extend_from_slice(&head[..head_dim]);
        second.extend_from_slice(&head[head_dim..]);
    }
    Ok((tensor(first, (rows, width / 2))?, tensor(second, (rows, width / 2))?))
}
