//! The mixture of experts: see `gemma4::moe`.

use foretoken_kernels::gpu::Span;
use foretoken_kernels::gpu::experts::{MOST, Route, mix, route};
use foretoken_kernels::gpu::matmul::Buckets;
use foretoken_kernels::gpu::pointwise::{Strided, gelu_gate};

use super::layer::Pass;
use super::room::ExpertsRoom;
use super::{Norm, linear};
use crate::device::{Buffer, Device, Input, Matrices, part};
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
        if count > MOST.1 || top_k > MOST.2 {
            let problem = format!("{top_k} of {count} experts; the kernels choose at most {} of {}", MOST.2, MOST.1);
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

    /// The room's `branch`, the dense MLP's, becomes the sum of that and the experts'. `h` is the stream before both.
    pub(super) fn forward(&self, pass: &Pass<'_>, h: Span<f32>) -> Result<()> {
        let Pass { work, room, placed } = *pass;
        let Some(own) = &room.experts else { return Ok(()) };
        let (rows, hidden) = (placed.standing.rows, self.router_proj.inputs());
        let (dense, mixed, normed) = (own.dense.span(), own.mixed.span(), room.normed.span());
        self.post_feedforward_layernorm_1.write(work, room.branch.span(), rows, dense)?;
        for first in (0..rows).step_by(MOST.0) {
            let rows = MOST.0.min(rows - first);
            let of = |span| part(span, first * hidden, rows * hidden);
            self.choose_and_mix(pass, own, (of(h), of(normed), rows), of(mixed))?;
        }
        // The sum's place is the dense part's, and then the branch's.
        let norm = &self.post_feedforward_layernorm_2;
        let add_to = Some((dense, 1.0));
        work.run(foretoken_kernels::gpu::pointwise::rms_norm(
            mixed,
            (rows, hidden),
            norm.weight(),
            norm.eps,
            add_to,
            room.branch.span(),
        ))
    }

    /// For as many rows as can be routed at once.
    fn choose_and_mix(
        &self,
        pass: &Pass<'_>,
        own: &ExpertsRoom,
        (h, normed, rows): (Span<f32>, Span<f32>, usize),
        mixed: Span<f32>,
    ) -> Result<()> {
        let Pass { work, room, .. } = *pass;
        let (hidden, experts, width) = (self.router_proj.inputs(), self.router_proj.outputs(), self.down_proj.inputs());
        let entries = rows * self.top_k;
        self.router_norm.write(work, h, rows, normed)?;
        let x = Input::new(&room.quants, normed, (rows, hidden));
        self.router_proj.multiply(work, &x, own.scores.span())?;
        let buckets = Buckets {
            matrices: own.matrices.span(),
            starts: own.starts.span(),
            count: own.count.span(),
            rows: Some(own.rows_of.span()),
        };
        let chosen = Route { buckets, entries: own.entries.span(), weights: own.weights.span() };
        let size = (rows, experts, self.top_k);
        work.run(route(own.scores.span(), self.per_expert_scale.span(), size, &chosen))?;

        self.pre_feedforward_layernorm_2.write(work, h, rows, normed)?;
        let x = Input::new(&room.quants, normed, (rows, hidden));
        let gate_up = own.gate_up.span();
        self.gate_up_proj.multiply_buckets(work, &x, &buckets, (entries, entries), gate_up)?;
        let gate = Strided { span: gate_up, stride: 2 * width };
        let up = Strided { span: part(gate_up, width, gate_up.len() - width), ..gate };
        work.run(gelu_gate(gate, up, (entries, width), own.gated.span()))?;
        // What a bucket multiplies now are entries.
        let entry_buckets = Buckets { rows: None, ..buckets };
        let gated = Input::new(&room.quants, own.gated.span(), (entries, width));
        self.down_proj.multiply_buckets(work, &gated, &entry_buckets, (entries, entries), own.parts.span())?;
        work.run(mix(own.parts.span(), &chosen, (rows, self.top_k, hidden), mixed))
    }
}
