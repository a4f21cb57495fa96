//! Routed experts: see [`crate::nn::Experts`].

use foretoken_gpu::plan::experts::{MAX_ROUTE, Route, SharedExpert, mix, route};
use foretoken_gpu::plan::matmul::Buckets;
use foretoken_gpu::plan::pointwise::{self, Strided};

use super::buffer::{Buffer, subslice};
use super::matrix::{Input, Matrices};
use super::queue::{DeviceTensor, Queue};
use crate::Result;
use crate::nn::Gate;

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
        for first in (0..x.rows).step_by(MAX_ROUTE.0) {
            let rows = MAX_ROUTE.0.min(x.rows - first);
            let of = |x: &DeviceTensor| x.some_rows(first, rows);
            let shared = shared.map(|SharedExpert { x: all, gate }| SharedExpert {
                x: subslice(all, first * x.width, rows * x.width),
                gate: subslice(gate, first, rows),
            });
            self.choose_and_mix(queue, &of(scores), (&of(x), shared), &of(&y))?;
        }
        Ok(y)
    }

    /// Routes at most `MAX_ROUTE.0` rows and writes the sum of their experts to `y`.
    fn choose_and_mix(
        &self,
        queue: &Queue,
        scores: &DeviceTensor,
        (x, shared): (&DeviceTensor, Option<SharedExpert>),
        y: &DeviceTensor,
    ) -> Result<()> {
        let (experts, width, entries) = (scores.width, self.down_proj.inputs(), x.rows * self.top_k);
        let list = |len: usize| queue.temporaries.take::<i32>(len);
        let (matrices, starts, count) = (list(entries)?, list(entries + 1)?, list(1)?);
        let (rows_of, entries_of, weights) = (list(entries)?, list(entries)?, queue.temporaries.take::<f32>(entries)?);
        let buckets = Buckets {
            largest: x.rows, // every row chooses an expert once
            matrices: matrices.slice(),
            starts: starts.slice(),
            count: count.slice(),
            rows: Some(rows_of.slice()),
        };
        let chosen = Route { buckets, entries: entries_of.slice(), weights: weights.slice() };
        let size = (x.rows, experts, self.top_k);
        queue.launcher.run(route(scores.slice, self.per_expert_scale.slice(), size, &chosen))?;

        let gate_up = queue.new_tensor(entries, 2 * width)?;
        self.gate_up_proj.multiply_buckets(&Input::new(queue, x), &buckets, (entries, entries), gate_up.slice)?;
        let gate = gate_up.strided();
        let up = Strided { slice: subslice(gate.slice, width, gate.slice.len()), ..gate };
        let gated = queue.new_tensor(entries, width)?;
        queue.launcher.run(pointwise::gate(gate_function(self.gate), gate, up, (entries, width), gated.slice))?;
        // Rows of this product are entries (row, expert), already in bucket order.
        let entry_buckets = Buckets { rows: None, ..buckets };
        let parts = queue.new_tensor(entries, x.width)?;
        self.down_proj.multiply_buckets(&Input::new(queue, &gated), &entry_buckets, (entries, entries), parts.slice)?;
        queue.launcher.run(mix(parts.slice, &chosen, (x.rows, self.top_k, x.width), shared, y.slice))
    }
}

/// The kernels' gate.
pub(super) fn gate_function(gate: Gate) -> pointwise::Gate {
    match gate {
        Gate::GeluTanh => pointwise::Gate::GeluTanh,
        Gate::Silu => pointwise::Gate::Silu,
        Gate::Sigmoid => pointwise::Gate::Sigmoid,
    }
}
