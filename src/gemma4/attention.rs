//! Self-attention: QK-norm, weightless V-norm, scale 1, grouped queries.

use super::config::{AttentionType, LayerConfig, TextConfig};
use super::rope::PassAngles;
use crate::Result;
use crate::checkpoint::Loader;
use crate::nn::RmsNorm;
use crate::ops::{Destination, Heads, Ops};

/// `self_attn` of a decoder layer. KV-shared layers, and all layers of an assistant, have only queries.
pub(super) struct Attention<O: Ops> {
    attention: AttentionType,
    head_dim: usize,
    q_proj: O::Linear, // (heads * head_dim, hidden)
    q_norm: O::Norm,
    kv: Option<KeysValues<O>>,
    o_proj: O::Linear, // (hidden, heads * head_dim)
}

struct KeysValues<O: Ops> {
    head_dim: usize,
    k_proj: O::Linear,         // (num_kv_heads * head_dim, hidden)
    v_proj: Option<O::Linear>, // the same; `None` if K = V
    k_norm: O::Norm,
    v_norm: O::Norm,          // weightless
    k_eq_v: Option<Vec<f32>>, // the weight of `k_norm` if K = V
}

impl<O: Ops> Attention<O> {
    pub(super) fn load(
        loader: &mut Loader,
        to: &impl Destination<Ops = O>,
        name: &str,
        config: &TextConfig,
        layer: &LayerConfig,
    ) -> Result<Self> {
        let (hidden, eps) = (config.hidden_size, config.rms_norm_eps);
        let (q, kv) = (config.num_attention_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim);
        let linear = |loader: &mut Loader, part: &str, outputs, inputs| {
            to.linear(loader.linear(&format!("{name}{part}.weight"), outputs, inputs)?)
        };
        let keys_values = if layer.kv_shared {
            None
        } else {
            let k_proj = linear(loader, "k_proj", kv, hidden)?;
            let v_proj = (!layer.k_eq_v).then(|| linear(loader, "v_proj", kv, hidden)).transpose()?;
            let k_norm = loader.norm(&format!("{name}k_norm.weight"), layer.head_dim, eps)?;
            Some(KeysValues {
                head_dim: layer.head_dim,
                k_proj,
                v_proj,
                k_eq_v: k_norm.weight().filter(|_| layer.k_eq_v).map(<[f32]>::to_vec),
                k_norm: to.norm(k_norm)?,
                v_norm: to.norm(RmsNorm::weightless(layer.head_dim, eps, loader.isa()))?,
            })
        };
        Ok(Self {
            attention: layer.attention,
            head_dim: layer.head_dim,
            q_proj: linear(loader, "q_proj", q, hidden)?,
            q_norm: to.norm(loader.norm(&format!("{name}q_norm.weight"), layer.head_dim, eps)?)?,
            kv: keys_values,
            o_proj: linear(loader, "o_proj", hidden, q)?,
        })
    }

    /// The key norm's weight if K = V: K is V, normed with it and rotated.
    pub(super) fn k_eq_v_weight(&self) -> Option<&[f32]> {
        self.kv.as_ref().and_then(|own| own.k_eq_v.as_deref())
    }

    /// `x` `(rows, hidden)` to `(rows, hidden)`. `index` is the layer's index.
    pub(super) fn forward(
        &self,
        ops: &O,
        x: &O::Tensor,
        angles: &PassAngles<O>,
        kv: &mut O::Kv<'_>,
        index: usize,
    ) -> Result<O::Tensor> {
        let Some(own) = &self.kv else { return self.attend(ops, x, angles, kv, index) };
        let angles = angles.of(self.attention)?;
        let q = match &own.v_proj {
            Some(v_proj) => {
                let [q, k, v] = ops.project([&self.q_proj, &own.k_proj, v_proj], x)?;
                own.store(ops, &k, &v, angles, kv, index)?;
                q
            }
            None => {
                let [q, k] = ops.project([&self.q_proj, &own.k_proj], x)?;
                own.store(ops, &k, &k, angles, kv, index)?;
                q
            }
        };
        self.attend_projected(ops, &q, angles, kv, index)
    }

    /// The part of [`Attention::forward`] that later rows need: K and V.
    pub(super) fn append(
        &self,
        ops: &O,
        x: &O::Tensor,
        angles: &PassAngles<O>,
        kv: &mut O::Kv<'_>,
        index: usize,
    ) -> Result<()> {
        let Some(own) = &self.kv else { return Ok(()) };
        let angles = angles.of(self.attention)?;
        match &own.v_proj {
            Some(v_proj) => {
                let [k, v] = ops.project([&own.k_proj, v_proj], x)?;
                own.store(ops, &k, &v, angles, kv, index)
            }
            None => {
                let k = ops.linear(&own.k_proj, x)?;
                own.store(ops, &k, &k, angles, kv, index)
            }
        }
    }

    /// The rest of `forward`, over K and V that `append` stored.
    pub(super) fn attend(
        &self,
        ops: &O,
        x: &O::Tensor,
        angles: &PassAngles<O>,
        kv: &mut O::Kv<'_>,
        index: usize,
    ) -> Result<O::Tensor> {
        self.attend_projected(ops, &ops.linear(&self.q_proj, x)?, angles.of(self.attention)?, kv, index)
    }

    fn attend_projected(
        &self,
        ops: &O,
        q: &O::Tensor,
        angles: &O::Angles,
        kv: &mut O::Kv<'_>,
        index: usize,
    ) -> Result<O::Tensor> {
        let attended = ops.attend(kv, index, Heads::new(q, self.head_dim, &self.q_norm, Some(angles)))?;
        ops.linear(&self.o_proj, &attended)
    }
}

impl<O: Ops> KeysValues<O> {
    fn store(
        &self,
        ops: &O,
        k: &O::Tensor,
        v: &O::Tensor,
        angles: &O::Angles,
        kv: &mut O::Kv<'_>,
        index: usize,
    ) -> Result<()> {
        let keys = Heads::new(k, self.head_dim, &self.k_norm, Some(angles));
        ops.append(kv, index, keys, Heads::new(v, self.head_dim, &self.v_norm, None))
    }
}
