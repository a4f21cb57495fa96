//! Q, K and V projections in one tensor, as written by `convert_hf_to_gguf.py --fuse-qkv`: the rows of
//! `blk.i.attn_qkv.weight` become `attn_q`, `attn_k` and `attn_v`, at their places in the file.

use super::file::Gguf;
use super::header::TensorInfo;
use super::names::layer;
use crate::checkpoint::architecture::Architecture;

const PARTS: [&str; 3] = ["attn_q.weight", "attn_k.weight", "attn_v.weight"];

impl Gguf {
    /// Splits the fused projections of attention layers. (Those of delta nets, which have no `attn_output`, are one
    /// matrix.)
    pub(super) fn split_qkv(mut self) -> Self {
        let architecture = self.metadata("general.architecture").and_then(|value| value.as_str()).unwrap_or_default();
        let per_query = Architecture::of(architecture).rows_per_query();
        let split = |tensor: &TensorInfo| self.qkv(tensor, per_query).map_or_else(|| vec![tensor.clone()], Vec::from);
        self.tensors = self.tensors.iter().flat_map(split).collect();
        self.index = self.tensors.iter().enumerate().map(|(i, tensor)| (tensor.name.clone(), i)).collect();
        self
    }

    /// The parts of a fused tensor, with `per_query` rows of Q per query channel; `None` for any other, and if the rows
    /// do not add up.
    fn qkv(&self, fused: &TensorInfo, per_query: usize) -> Option<[TensorInfo; 3]> {
        let (block, _) = layer(&fused.name, "blk.").filter(|(_, rest)| *rest == "attn_qkv.weight")?;
        let names = PARTS.map(|part| format!("blk.{block}.{part}"));
        let (&[_, queries], &[rows, inputs]) =
            (self.info(&format!("blk.{block}.attn_output.weight"))?.shape(), &fused.shape[..])
        else {
            return None;
        };
        let q = queries.checked_mul(per_query)?;
        // K and V have equally many.
        let kv = rows.checked_sub(q).filter(|both| *both > 0 && both.is_multiple_of(2))? / 2;
        if names.iter().any(|name| self.info(name).is_some()) {
            return None;
        }
        let row = fused.len? / rows;
        let part = |name: &str, first: usize, rows: usize| TensorInfo {
            name: name.to_owned(),
            shape: vec![rows, inputs],
            start: fused.start + first * row,
            len: Some(rows * row),
            ..fused.clone()
        };
        Some([part(&names[0], 0, q), part(&names[1], q, kv), part(&names[2], q + kv, kv)])
    }
}
