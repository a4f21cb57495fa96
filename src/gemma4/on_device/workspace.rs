//! Activation buffers of one sequence, shared by all layers of a model.

use super::positions::PassPositions;
use crate::Result;
use crate::device::{AttentionWorkspace, Buffer, Device, Launcher, QuantizedInputs};
use crate::gemma4::TextConfig;
use foretoken_gpu::plan::experts::MAX_ROUTE;

/// What the layers of a pass share.
#[derive(Clone, Copy)]
pub(super) struct Pass<'a> {
    pub(super) launcher: &'a Launcher,
    pub(super) workspace: &'a LayerWorkspace,
    pub(super) placed: &'a PassPositions,
}

/// Buffers for passes of up to `rows` rows.
pub(super) struct LayerWorkspace {
    pub(super) rows: usize,
    pub(super) normed: Buffer<f32>,   // (rows, hidden)
    pub(super) branch: Buffer<f32>,   // (rows, hidden): output of the current branch
    pub(super) q: Buffer<f32>,        // (rows, heads * head_dim)
    pub(super) k: Buffer<f32>,        // (rows, num_kv_heads * head_dim)
    pub(super) v: Buffer<f32>,        // the same
    pub(super) attended: Buffer<f32>, // as q
    pub(super) gate: Buffer<f32>,     // (rows, intermediate)
    pub(super) up: Buffer<f32>,       // the same
    pub(super) gated: Buffer<f32>,    // the same
    pub(super) attention: AttentionWorkspace,
    pub(super) quants: QuantizedInputs,
    pub(super) experts: Option<ExpertsWorkspace>,
}

/// Buffers of the experts: the first two for all rows, the others for 16 rows (`MAX_ROUTE.0`).
pub(super) struct ExpertsWorkspace {
    pub(super) dense: Buffer<f32>,   // (rows, hidden)
    pub(super) mixed: Buffer<f32>,   // (rows, hidden)
    pub(super) scores: Buffer<f32>,  // (16, experts)
    pub(super) gate_up: Buffer<f32>, // (entries, 2 * intermediate)
    pub(super) gated: Buffer<f32>,   // (entries, intermediate)
    pub(super) parts: Buffer<f32>,   // (entries, hidden)
    pub(super) matrices: Buffer<i32>,
    pub(super) starts: Buffer<i32>,
    pub(super) count: Buffer<i32>,
    pub(super) rows_of: Buffer<i32>,
    pub(super) entries: Buffer<i32>,
    pub(super) weights: Buffer<f32>,
}

impl LayerWorkspace {
    /// `widest` is the widest input of the caller's own matrices.
    pub(super) fn new(device: &dyn Device, config: &TextConfig, rows: usize, widest: usize) -> Result<Self> {
        let most = |of: &dyn Fn(&crate::gemma4::LayerConfig) -> usize| config.layers.iter().map(of).max().unwrap_or(0);
        let hidden = config.hidden_size;
        let q = most(&|layer| config.num_attention_heads * layer.head_dim);
        let kv = most(&|layer| layer.num_kv_heads * layer.head_dim);
        let ffn = most(&|layer| layer.intermediate_size);
        let rows_of_width = |width: usize| Buffer::new(device, rows * width);
        let experts = config.moe.as_ref().map(|moe| -> Result<_> {
            let entries = MAX_ROUTE.0 * moe.top_k_experts;
            Ok(ExpertsWorkspace {
                dense: rows_of_width(hidden)?,
                mixed: rows_of_width(hidden)?,
                scores: Buffer::new(device, MAX_ROUTE.0 * moe.num_experts)?,
                gate_up: Buffer::new(device, entries * 2 * moe.intermediate_size)?,
                gated: Buffer::new(device, entries * moe.intermediate_size)?,
                parts: Buffer::new(device, entries * hidden)?,
                matrices: Buffer::new(device, entries)?,
                starts: Buffer::new(device, entries + 1)?,
                count: Buffer::new(device, 1)?,
                rows_of: Buffer::new(device, entries)?,
                entries: Buffer::new(device, entries)?,
                weights: Buffer::new(device, entries)?,
            })
        });
        // Experts' inputs have one row per entry. 8 more rows pad the last tile of any input.
        let (entries, expert) =
            config.moe.as_ref().map_or((0, 0), |moe| (MAX_ROUTE.0 * moe.top_k_experts, moe.intermediate_size));
        let widest = [hidden, q, ffn, expert, widest].into_iter().max().unwrap_or(0);
        let quantized_rows = rows.max((entries * expert).div_ceil(widest.max(1))) + 8;
        Ok(Self {
            rows,
            normed: rows_of_width(hidden)?,
            branch: rows_of_width(hidden)?,
            q: rows_of_width(q)?,
            k: rows_of_width(kv)?,
            v: rows_of_width(kv)?,
            attended: rows_of_width(q)?,
            gate: rows_of_width(ffn)?,
            up: rows_of_width(ffn)?,
            gated: rows_of_width(ffn)?,
            attention: AttentionWorkspace::new(device, rows * q)?,
            quants: QuantizedInputs::new(device, quantized_rows, widest)?,
            experts: experts.transpose()?,
        })
    }
}
