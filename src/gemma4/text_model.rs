//! The text model: embeddings, decoder layers, final norm and output head.

use super::config::TextConfig;
use super::layer::DecoderLayer;
use super::per_layer::PerLayerEmbeddings;
use super::rope::Rotations;
use crate::Result;
use crate::kv::KvLayout;
use crate::model::{Request, indices_of};
use crate::ops::{Ops, PassOutput};

/// Weights of a target on backend `O`.
pub(crate) struct TextModel<O: Ops> {
    pub(super) config: TextConfig,
    pub(super) embed_tokens: O::Embedding,
    pub(super) per_layer: Option<PerLayerEmbeddings<O>>,
    pub(super) layers: Vec<DecoderLayer<O>>,
    pub(super) norm: O::Norm,
    pub(super) lm_head: O::Linear, // (vocab, hidden)
    pub(super) rotations: Rotations<O>,
}

impl<O: Ops> TextModel<O> {
    /// The K/V layout, with the weights of K = V.
    pub(crate) fn kv_layout(&self) -> KvLayout {
        let mut layout = self.config.kv_layout();
        for (store, layer) in layout.stores.iter_mut().zip(&self.layers) {
            store.k_eq_v = layer.k_eq_v_weight().map(<[f32]>::to_vec);
        }
        layout
    }

    /// One pass over `rows` rows, whose K and V are staged in `kv`.
    ///
    /// # Errors
    /// If an id is outside the vocabulary, the request has rows that do not ascend or are beyond the pass, the model
    /// produced NaN or infinity, or memory is exhausted.
    pub(crate) fn forward(
        &self,
        ops: &O,
        ids: O::Ids<'_>,
        rows: usize,
        kv: &mut O::Kv<'_>,
        request: &Request,
    ) -> Result<PassOutput<O>> {
        let needed = request.rows_of(rows)?;
        let mut rows = Vec::from_iter(0..rows); // the rows in `h`
        // The last layer that computes K and V: rows without outputs are needed for these only, and are dropped there.
        let narrows_at = self.config.num_own_kv_layers().checked_sub(1).filter(|_| needed.len() < rows.len());
        let narrowed = narrows_at.map(|layer| (layer, &needed[..]));
        let mut h = ops.embed(&self.embed_tokens, ids)?;
        let inputs = self.per_layer.as_ref().map(|per_layer| per_layer.forward(ops, ids, &h, narrowed));
        let mut inputs = inputs.transpose()?;
        let mut angles = self.rotations.angles(ops, kv)?;
        let mut taps = Vec::with_capacity(request.taps.len());
        for (i, layer) in self.layers.iter().enumerate() {
            let narrows = narrows_at == Some(i);
            if narrows {
                layer.append(ops, &h, &angles, kv, i)?;
                if needed.is_empty() {
                    break;
                }
                h = ops.rows(&h, &needed)?;
                ops.narrow(kv, &needed)?;
                angles = self.rotations.angles(ops, kv)?;
                inputs = inputs.map(|inputs| ops.rows(&inputs, &needed)).transpose()?;
                rows.clone_from(&needed);
            }
            let input = match (&self.per_layer, &inputs) {
                (Some(per_layer), Some(inputs)) => Some(per_layer.input(ops, inputs, i)?),
                _ => None,
            };
            h = layer.forward(ops, &h, input.as_ref(), |self_attn, x| match narrows {
                true => self_attn.attend(ops, x, &angles, kv, i), // over what `append` stored
                false => self_attn.forward(ops, x, &angles, kv, i),
            })?;
            if request.taps.contains(&i) {
                taps.push(ops.rows(&h, &indices_of(&request.hidden, &rows))?);
            }
        }
        if needed.is_empty() {
            return Ok(PassOutput { rows: None, taps });
        }
        let normed = ops.final_norm(&self.norm, &ops.rows(&h, &indices_of(&needed, &rows))?)?;
        let soft_cap = self.config.final_logit_softcapping.map(|cap| cap as f32);
        let logits = ops.logits(&self.lm_head, &ops.rows(&normed, &indices_of(&request.logits, &needed))?, soft_cap)?;
        Ok(PassOutput { rows: Some((logits, ops.rows(&normed, &indices_of(&request.hidden, &needed))?)), taps })
    }
}
