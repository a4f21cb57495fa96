//! Routed experts: see [`crate::nn::Experts`].

use foretoken_gpu::plan::experts::{BLOCK_ROWS, MAX_ENTRIES, Route, SharedExpert, max_buckets, mix, route, sort_route};
use foretoken_gpu::plan::matmul::Buckets;
use foretoken_gpu::plan::pointwise::{self, Strided};

use super::buffer::{Buffer, subslice};
use super::matrix::{Input, Matrices};
use super::queue::{DeviceTensor, Queue};
use crate::Result;
use crate::nn::Gate;

/// Mean number of entries of an expert from which on buckets are as large as possible: half of a tile. At a mean of 32,
/// as in prompts of 26B-A4B, which are 1.5 times as fast as with buckets of 16, lower bounds make no difference.
const MANY_PER_EXPERT: usize = 16;

/// Stacks of gated MLPs.
pub(crate) struct DeviceExperts {
    pub(super) gate_up_proj: Matrices, // (experts, 2 * intermediate, hidden): gate rows, then up rows
    pub(super) down_proj: Matrices,    // (experts, hidden, intermediate)
    pub(super) per_expert_scale: Buffer<f32>,
    pub(super) top_k: usize,
    pub(super) gate: Gate,
}

impl DeviceExperts {
    /// The weighted sum of each row's experts, chosen by `scores` `(rows, experts)`, and of the shared one.
    pub(super) fn forward(
        &self,
        queue: &Queue,
        scores: &DeviceTensor,
        x: &DeviceTensor,
        shared: Option<SharedExpert>,
    ) -> Result<DeviceTensor> {
        let y = queue.new_tensor(x.rows, x.width)?;
        // In parts, so that the memory of entries is bounded: 4096 of 26B-A4B take some 120 MB. With
        // 32 per expert, reading weights is no longer the cost, and more rows would gain little.
        // Parts are multiples of 16 rows: aligned.
        let most = MAX_ENTRIES / self.top_k / BLOCK_ROWS * BLOCK_ROWS;
        for first in (0..x.rows).step_by(most) {
            let rows = most.min(x.rows - first);
            let of = |x: &DeviceTensor| x.some_rows(first, rows);
            let shared = shared.map(|SharedExpert { x: all, gate }| SharedExpert {
                x: subslice(all, first * x.width, rows * x.width),
                gate: subslice(gate, first, rows),
            });
            self.choose_and_mix(queue, &of(scores), &of(x), shared, &of(&y))?;
        }
        Ok(y)
    }

    /// Routes at most [`MAX_ENTRIES`] entries and writes the sum of the rows' experts to `y`.
    fn choose_and_mix(
        &self,
        queue: &Queue,
        scores: &DeviceTensor,
        x: &DeviceTensor,
        shared: Option<SharedExpert>,
        y: &DeviceTensor,
    ) -> Result<()> {
        let (experts, width, entries) = (scores.width, self.down_proj.inputs(), x.rows * self.top_k);
        // An expert of more rows has several buckets. The kernels for large ones share activations between outputs.
        let most = self.gate_up_proj.largest_bucket().min(self.down_proj.largest_bucket());
        let largest = if entries >= MANY_PER_EXPERT * experts { most } else { x.rows.min(16) };
        let max_buckets = max_buckets(entries, experts, largest);
        let list = |len: usize| queue.take::<i32>(len);
        let (matrices, starts, count) = (list(max_buckets)?, list(max_buckets + 1)?, list(1)?);
        let (rows_of, entries_of, weights) = (list(entries)?, list(entries)?, queue.take::<f32>(entries)?);
        let buckets = Buckets {
            max_buckets,
            entries,
            largest,
            matrices: matrices.slice(),
            starts: starts.slice(),
            count: count.slice(),
            rows: Some(rows_of.slice()),
        };
        let chosen = Route { buckets, entries: entries_of.slice(), weights: weights.slice() };
        self.route(queue, scores, &chosen)?;

        let gate_up = queue.new_tensor(entries, 2 * width)?;
        self.gate_up_proj.multiply_buckets(&Input::new(queue, x), &buckets, gate_up.slice)?;
        let gate = gate_up.strided();
        let up = Strided { slice: subslice(gate.slice, width, gate.slice.len()), ..gate };
        let gated = queue.new_tensor(entries, width)?;
        queue.launcher.run(pointwise::gate(self.gate, gate, up, (entries, width), gated.slice))?;
        // Rows of this product are entries (row, expert), already in bucket order.
        let entry_buckets = Buckets { rows: None, ..buckets };
        let parts = queue.new_tensor(entries, x.width)?;
        self.down_proj.multiply_buckets(&Input::new(queue, &gated), &entry_buckets, parts.slice)?;
        queue.launcher.run(mix(parts.slice, &chosen, (x.rows, self.top_k, x.width), shared, y.slice))
    }

    /// Chooses the rows' experts, and sorts them.
    fn route(&self, queue: &Queue, scores: &DeviceTensor, chosen: &Route) -> Result<()> {
        let (size, scale) = ((scores.rows, scores.width, self.top_k), self.per_expert_scale.slice());
        let routed = route(scores.slice, scale, size, chosen);
        let sorted = routed.as_ref().ok().and_then(sort_route);
        queue.launcher.run(routed)?;
        sorted.map_or(Ok(()), |sorted| queue.launcher.run(Ok(sorted)))
    }
}
