//! The mixture of experts: see `gemma4::moe`.

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::experts::{MAX_ROUTE, Route, mix, route};
use foretoken_gpu::plan::matmul::Buckets;
use foretoken_gpu::plan::pointwise::{Strided, gelu_gate};

use super::workspace::ExpertsWorkspace;
use super::workspace::Pass;
use super::{Norm, linear};
use crate::device::{Buffer, Device, Input, Matrices, subslice};
use crate::gemma4::moe::Moe;
use crate::{Error, Result};

pub(super) struct DeviceMoe {
    router_norm: Norm,
    router_proj: Matrices,
    per_expert_scale: Buffer<f32>,
    top_k: usize,
    gate_up_proj: Matrices, // (experts, 2 * intermediate, hidden): gate rows, then up rows
    down_proj: Matrices,    // (experts, hidden, intermediate)
    post_feedforward_layernorm_1: Norm,
    pre_feedforward_layernorm_2: Norm,
    post_feedforward_layernorm_2: Norm,
}

impl DeviceMoe {
    pub(super) fn upload(device: &dyn Device, name: &str, from: &Moe) -> Result<Self> {
        let (router, experts) = (&from.router, &from.experts);
        let (count, top_k) = (router.per_expert_scale.len(), router.top_k);
        if count > MAX_ROUTE.1 || top_k > MAX_ROUTE.2 {
            let problem =
                format!("{top_k} of {count} experts; the kernels choose at most {} of {}", MAX_ROUTE.2, MAX_ROUTE.1);
            return Err(Error::Device { device: device.name(), problem: format!("{problem}; use the CPU") });
        }
        Ok(Self {
            router_norm: Norm::upload(device, &router.norm)?,
            router_proj: linear(device, &format!("{name}router.proj"), &router.proj)?,
            per_expert_scale: Buffer::of(device, &router.per_expert_scale)?,
            top_k,
            gate_up_proj: Matrices::upload(device, &format!("{name}experts.gate_up_proj"), &experts.gate_up_proj)?,
            down_proj: Matrices::upload(device, &format!("{name}experts.down_proj"), &experts.down_proj)?,
            post_feedforward_layernorm_1: Norm::upload(device, &from.post_feedforward_layernorm_1)?,
            pre_feedforward_layernorm_2: Norm::upload(device, &from.pre_feedforward_layernorm_2)?,
            post_feedforward_layernorm_2: Norm::upload(device, &from.post_feedforward_layernorm_2)?,
        })
    }

    /// Adds the experts' output to `branch`, which holds the dense MLP's. `h` is the residual stream before both.
    pub(super) fn forward(&self, pass: &Pass<'_>, h: DeviceSlice<f32>) -> Result<()> {
        let Pass { launcher, workspace, placed } = *pass;
        let Some(buffers) = &workspace.experts else { return Ok(()) };
        let (rows, hidden) = (placed.positions.rows, self.router_proj.inputs());
        let (dense, mixed, normed) = (buffers.dense.slice(), buffers.mixed.slice(), workspace.normed.slice());
        self.post_feedforward_layernorm_1.write(launcher, workspace.branch.slice(), rows, dense)?;
        for first in (0..rows).step_by(MAX_ROUTE.0) {
            let rows = MAX_ROUTE.0.min(rows - first);
            let of = |slice| subslice(slice, first * hidden, rows * hidden);
            self.choose_and_mix(pass, buffers, (of(h), of(normed), rows), of(mixed))?;
        }
        // `branch = dense + norm(mixed)`.
        let norm = &self.post_feedforward_layernorm_2;
        let add_to = Some((dense, 1.0));
        launcher.run(foretoken_gpu::plan::pointwise::rms_norm(
            mixed,
            (rows, hidden),
            norm.weight(),
            norm.eps,
            add_to,
            workspace.branch.slice(),
        ))
    }

    /// Routes at most `MAX_ROUTE.0` rows and writes the sum of their experts to `mixed`.
    fn choose_and_mix(
        &self,
        pass: &Pass<'_>,
        buffers: &ExpertsWorkspace,
        (h, normed, rows): (DeviceSlice<f32>, DeviceSlice<f32>, usize),
        mixed: DeviceSlice<f32>,
    ) -> Result<()> {
        let Pass { launcher, workspace, .. } = *pass;
        let (hidden, experts, width) = (self.router_proj.inputs(), self.router_proj.outputs(), self.down_proj.inputs());
        let entries = rows * self.top_k;
        self.router_norm.write(launcher, h, rows, normed)?;
        let x = Input::new(&workspace.quants, normed, (rows, hidden));
        self.router_proj.multiply(launcher, &x, buffers.scores.slice())?;
        let buckets = Buckets {
            matrices: buffers.matrices.slice(),
            starts: buffers.starts.slice(),
            count: buffers.count.slice(),
            rows: Some(buffers.rows_of.slice()),
        };
        let chosen = Route { buckets, entries: buffers.entries.slice(), weights: buffers.weights.slice() };
        let size = (rows, experts, self.top_k);
        launcher.run(route(buffers.scores.slice(), self.per_expert_scale.slice(), size, &chosen))?;

        self.pre_feedforward_layernorm_2.write(launcher, h, rows, normed)?;
        let x = Input::new(&workspace.quants, normed, (rows, hidden));
        let gate_up = buffers.gate_up.slice();
        self.gate_up_proj.multiply_buckets(launcher, &x, &buckets, (entries, entries), gate_up)?;
        let gate = Strided { slice: gate_up, stride: 2 * width };
        let up = Strided { slice: subslice(gate_up, width, gate_up.len() - width), ..gate };
        launcher.run(gelu_gate(gate, up, (entries, width), buffers.gated.slice()))?;
        // Rows of this product are entries (row, expert), already in bucket order.
        let entry_buckets = Buckets { rows: None, ..buckets };
        let gated = Input::new(&workspace.quants, buffers.gated.slice(), (entries, width));
        self.down_proj.multiply_buckets(launcher, &gated, &entry_buckets, (entries, entries), buffers.parts.slice())?;
        launcher.run(mix(buffers.parts.slice(), &chosen, (rows, self.top_k, hidden), mixed))
    }
}
