//! The trunk: embeddings, decoder layers, final norm and output head.

use super::config::TextConfig;
use super::layer::{DecoderLayer, Mixer};
use crate::Result;
use crate::model::{Request, indices_of};
use crate::ops::{Ops, PassOutput};

/// Weights of a target on backend `O`.
pub(crate) struct TextModel<O: Ops> {
    pub(super) config: TextConfig,
    pub(super) embed_tokens: O::Embedding,
    pub(super) layers: Vec<DecoderLayer<O, Mixer<O>>>,
    pub(super) norm: O::Norm,
    pub(super) lm_head: O::Linear, // (vocab, hidden)
    pub(super) rotary: O::Rotary,
}

impl<O: Ops> TextModel<O> {
    /// The delta nets, first to last.
    pub(super) fn delta_nets(&self) -> impl Iterator<Item = &O::DeltaNet> {
        self.layers.iter().filter_map(|layer| match &layer.mixer {
            Mixer::DeltaNet(delta_net) => Some(&delta_net.net),
            Mixer::Attention(_) => None,
        })
    }

    /// One pass over `rows` rows, which are staged in `kv`.
    ///
    /// # Errors
    /// If an id is outside the vocabulary, the request has rows that do not ascend or are beyond the pass, the model
    /// produced NaN or infinity, or memory is exhausted.
    pub(super) fn forward(
        &self,
        ops: &O,
        ids: O::Ids<'_>,
        rows: usize,
        kv: &mut O::Kv<'_>,
        request: &Request,
    ) -> Result<PassOutput<O>> {
        let needed = request.rows_of(rows)?;
        let mut rows = Vec::from_iter(0..rows); // the rows in `h`
        let mut h = ops.embed(&self.embed_tokens, ids)?;
        let mut angles = ops.angles(&self.rotary, kv)?;
        let (mut delta_nets, mut taps) = (0, Vec::with_capacity(request.taps.len()));
        for (i, layer) in self.layers.iter().enumerate() {
            // The last layer: rows without outputs are needed for K and V only, and are dropped here. (The state of a
            // delta net needs all rows.)
            let narrows = i + 1 == self.layers.len() && needed.len() < rows.len();
            if narrows && let Mixer::Attention(attention) = &layer.mixer {
                attention.append(ops, &layer.mixer_input(ops, &h)?, &angles, kv, i)?;
                if needed.is_empty() {
                    break;
                }
                h = ops.rows(&h, &needed)?;
                ops.narrow(kv, &needed)?;
                angles = ops.angles(&self.rotary, kv)?;
                rows.clone_from(&needed);
            }
            h = layer.forward(ops, &h, |mixer, x| match mixer {
                Mixer::Attention(attention) if narrows => attention.attend(ops, x, &angles, kv, i),
                Mixer::Attention(attention) => attention.forward(ops, x, &angles, kv, i),
                Mixer::DeltaNet(delta_net) => {
                    delta_nets += 1;
                    delta_net.forward(ops, x, kv, delta_nets - 1)
                }
            })?;
            if request.taps.contains(&i) {
                taps.push(ops.rows(&h, &indices_of(&request.hidden, &rows))?);
            }
        }
        if needed.is_empty() {
            return Ok(PassOutput { rows: None, taps });
        }
        let hidden = ops.final_norm(&self.norm, &ops.rows(&h, &indices_of(&needed, &rows))?)?;
        let logits = ops.logits(&self.lm_head, &ops.rows(&hidden, &indices_of(&request.logits, &needed))?, None)?;
        Ok(PassOutput { rows: Some((logits, ops.rows(&hidden, &indices_of(&request.hidden, &needed))?)), taps })
    }
}
