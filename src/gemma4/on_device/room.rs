//! The rooms that layers work in, one sequence's: every layer uses the same.

use crate::Result;
use crate::device::{Buffer, Device, Quants, Room};
use crate::gemma4::TextConfig;
use foretoken_kernels::gpu::experts::MOST;

/// Rooms for passes of up to `rows` rows.
pub(super) struct LayerRoom {
    pub(super) rows: usize,
    pub(super) normed: Buffer<f32>,   // (rows, hidden)
    pub(super) branch: Buffer<f32>,   // (rows, hidden): what a branch ends with
    pub(super) q: Buffer<f32>,        // (rows, heads * head_dim)
    pub(super) k: Buffer<f32>,        // (rows, num_kv_heads * head_dim)
    pub(super) v: Buffer<f32>,        // the same
    pub(super) attended: Buffer<f32>, // as q
    pub(super) gate: Buffer<f32>,     // (rows, intermediate)
    pub(super) up: Buffer<f32>,       // the same
    pub(super) gated: Buffer<f32>,    // the same
    pub(super) attention: Room,
    pub(super) quants: Quants,
    pub(super) experts: Option<ExpertsRoom>,
}

/// Rooms of the experts, for at most 16 rows at a time but for the first two.
pub(super) struct ExpertsRoom {
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

impl LayerRoom {
    /// For products of inputs up to the layers' widest, and of `widest`.
    pub(super) fn new(device: &dyn Device, config: &TextConfig, rows: usize, widest: usize) -> Result<Self> {
        let most = |of: &dyn Fn(&crate::gemma4::LayerConfig) -> usize| config.layers.iter().map(of).max().unwrap_or(0);
        let hidden = config.hidden_size;
        let q = most(&|layer| config.num_attention_heads * layer.head_dim);
        let kv = most(&|layer| layer.num_kv_heads * layer.head_dim);
        let ffn = most(&|layer| layer.intermediate_size);
        let room = |width: usize| Buffer::new(device, rows * width);
        let experts = config.moe.as_ref().map(|moe| -> Result<_> {
            let entries = MOST.0 * moe.top_k_experts;
            Ok(ExpertsRoom {
                dense: room(hidden)?,
                mixed: room(hidden)?,
                scores: Buffer::new(device, MOST.0 * moe.num_experts)?,
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
        // Inputs of experts have entries for rows. Eight rows more fill up any input's last tile.
        let (entries, expert) =
            config.moe.as_ref().map_or((0, 0), |moe| (MOST.0 * moe.top_k_experts, moe.intermediate_size));
        let widest = [hidden, q, ffn, expert, widest].into_iter().max().unwrap_or(0);
        let quantized_rows = rows.max((entries * expert).div_ceil(widest.max(1))) + 8;
        Ok(Self {
            rows,
            normed: room(hidden)?,
            branch: room(hidden)?,
            q: room(q)?,
            k: room(kv)?,
            v: room(kv)?,
            attended: room(q)?,
            gate: room(ffn)?,
            up: room(ffn)?,
            gated: room(ffn)?,
            attention: Room::new(device, rows * q)?,
            quants: Quants::new(device, quantized_rows, widest)?,
            experts: experts.transpose()?,
        })
    }
}
