//! Gated attention: QK-norm, rotation of the first channels, grouped queries, a sigmoid gate per output channel.

use super::config::TextConfig;
use super::norm::zero_centred;
use crate::Result;
use crate::checkpoint::Loader;
use crate::ops::{Destination, Heads, Ops};

/// `self_attn` of a decoder layer.
pub(super) struct Attention<O: Ops> {
    head_dim: usize,
    q_proj: O::Linear, // (heads * 2 * head_dim, hidden): each head's query, then its gate
    k_proj: O::Linear, // (num_kv_heads * head_dim, hidden)
    v_proj: O::Linear,
    q_norm: O::Norm, // times head_dim^-0.5, the scale of the scores
    k_norm: O::Norm,
    o_proj: O::Linear, // (hidden, heads * head_dim)
}

impl<O: Ops> Attention<O> {
    pub(super) fn load(
        loader: &mut Loader,
        to: &impl Destination<Ops = O>,
        name: &str,
        config: &TextConfig,
    ) -> Result<Self> {
        let (hidden, head_dim) = (config.hidden_size, config.head_dim);
        let (q, kv) = (config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim);
        let scale = (head_dim as f32).powf(-0.5);
        let linear = |loader: &mut Loader, part: &str, outputs, inputs| {
            to.linear(loader.linear(&format!("{name}{part}.weight"), outputs, inputs)?)
        };
        Ok(Self {
            head_dim,
            q_proj: linear(loader, "q_proj", 2 * q, hidden)?,
            k_proj: linear(loader, "k_proj", kv, hidden)?,
            v_proj: linear(loader, "v_proj", kv, hidden)?,
            q_norm: to.norm(zero_centred(loader, &format!("{name}q_norm.weight"), head_dim, config, scale)?)?,
            k_norm: to.norm(zero_centred(loader, &format!("{name}k_norm.weight"), head_dim, config, 1.0)?)?,
            o_proj: linear(loader, "o_proj", hidden, q)?,
        })
    }

    /// `x` `(rows, hidden)` to `(rows, hidden)`; `layer` is the layer's index in `kv`.
    pub(super) fn forward(
        &self,
        ops: &O,
        x: &O::Tensor,
        angles: &O::Angles,
        kv: &mut O::Kv<'_>,
        layer: usize,
    ) -> Result<O::Tensor> {
        let [queries, k, v] = ops.project([&self.q_proj, &self.k_proj, &self.v_proj], x)?;
        self.store(ops, &k, &v, angles, kv, layer)?;
        self.attend_projected(ops, &queries, angles, kv, layer)
    }

    /// The part of [`Attention::forward`] that later rows need: K and V.
    pub(super) fn append(
        &self,
        ops: &O,
        x: &O::Tensor,
        angles: &O::Angles,
        kv: &mut O::Kv<'_>,
        layer: usize,
    ) -> Result<()> {
        let [k, v] = ops.project([&self.k_proj, &self.v_proj], x)?;
        self.store(ops, &k, &v, angles, kv, layer)
    }

    /// The rest of `forward`, over K and V that `append` stored.
    pub(super) fn attend(
        &self,
        ops: &O,
        x: &O::Tensor,
        angles: &O::Angles,
        kv: &O::Kv<'_>,
        layer: usize,
    ) -> Result<O::Tensor> {
        self.attend_projected(ops, &ops.linear(&self.q_proj, x)?, angles, kv, layer)
    }

    fn store(
        &self,
        ops: &O,
        k: &O::Tensor,
        v: &O::Tensor,
        angles: &O::Angles,
        kv: &mut O::Kv<'_>,
        layer: usize,
    ) -> Result<()> {
        let head_dim = self.head_dim;
        let values = Heads { x: v, head_dim, stride: head_dim, norm: None, angles: None };
        ops.append(kv, layer, Heads::new(k, head_dim, &self.k_norm, Some(angles)), values)
    }

    fn attend_projected(
        &self,
        ops: &O,
        queries: &O::Tensor,
        angles: &O::Angles,
        kv: &O::Kv<'_>,
        layer: usize,
    ) -> Result<O::Tensor> {
        let head_dim = self.head_dim;
        let q = Heads { stride: 2 * head_dim, ..Heads::new(queries, head_dim, &self.q_norm, Some(angles)) };
        let attended = ops.attend(kv, layer, q)?;
        ops.linear(&self.o_proj, &ops.head_gate(queries, &attended, head_dim)?)
    }
}
