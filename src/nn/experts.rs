//! Routed experts: each row is computed by a few of many gated MLPs.

use candle_core::Tensor;
use foretoken_kernels::{Isa, vocabulary};

use super::{F32View, Gate, Input, Weight, multiply, tensor};
use crate::Result;

/// Stacks of gated MLPs, and how rows choose among them.
pub struct Experts {
    /// `(experts, 2 * intermediate, hidden)`: gate rows, then up rows.
    pub gate_up_proj: Weight,
    /// `(experts, hidden, intermediate)`.
    pub down_proj: Weight,
    /// A factor of each expert's weight: `(experts)`.
    pub per_expert_scale: Vec<f32>,
    /// Experts per row.
    pub top_k: usize,
    gate: Gate,
    isa: Isa,
}

/// Rows from which experts are not computed together with further ones.
const ROWS_TOGETHER: usize = 512;

/// An expert that a row is routed to, and its weight.
struct Choice {
    row: usize,
    expert: usize,
    weight: f32,
}

impl Experts {
    /// Experts with [`Gate::GeluTanh`], computed with `isa`.
    pub fn new(gate_up_proj: Weight, down_proj: Weight, per_expert_scale: Vec<f32>, top_k: usize, isa: Isa) -> Self {
        Self { gate_up_proj, down_proj, per_expert_scale, top_k, gate: Gate::GeluTanh, isa }
    }

    /// The same experts with another gate.
    pub fn gated_by(self, gate: Gate) -> Self {
        Self { gate, ..self }
    }

    /// The function of the gates.
    pub(crate) fn gate(&self) -> Gate {
        self.gate
    }

    /// The weighted sum of each row's experts. `scores` `(rows, experts)` are the router's, `x` is `(rows, hidden)`.
    ///
    /// Each chosen expert is read once for all of its rows, all experts in parallel. A row sums its experts in index
    /// order, so that its bits do not depend on the other rows.
    ///
    /// # Errors
    /// Candle's, if a shape does not fit.
    pub fn forward(&self, scores: &Tensor, x: &Tensor) -> Result<Tensor> {
        let hidden = self.down_proj.outputs();
        let mut choices = self.route(scores)?;
        choices.sort_by_key(|choice| choice.expert);
        let x = F32View::new(x)?;
        let mut sum = vec![0.0; x.len()];
        let buckets: Vec<&[Choice]> = choices.chunk_by(|a, b| a.expert == b.expert).collect();
        let mut buckets = &*buckets;
        while !buckets.is_empty() {
            let mut rows = 0;
            let fits = |bucket: &&&[Choice]| {
                let fits = rows < ROWS_TOGETHER;
                rows += bucket.len();
                fits
            };
            let (together, rest) = buckets.split_at(buckets.iter().take_while(fits).count());
            self.add(together, &x, &mut sum);
            buckets = rest;
        }
        tensor(sum, (x.len() / hidden, hidden))
    }

    /// Adds the outputs of some experts, each of its rows of `x` `(rows, hidden)`, to `sum` `(rows, hidden)`.
    fn add(&self, buckets: &[&[Choice]], x: &[f32], sum: &mut [f32]) {
        let (hidden, intermediate) = (self.down_proj.outputs(), self.down_proj.inputs());
        let rows_of = |bucket: &&[Choice]| {
            let mut rows = Vec::with_capacity(bucket.len() * hidden);
            bucket.iter().for_each(|c| rows.extend_from_slice(&x[c.row * hidden..(c.row + 1) * hidden]));
            rows
        };
        let gate_up = self.multiply(&self.gate_up_proj, buckets, buckets.iter().map(rows_of).collect());
        let gated = gate_up.into_iter().map(|gate_up| {
            let mut gated = Vec::with_capacity(gate_up.len() / 2);
            for row in gate_up.chunks_exact(2 * intermediate) {
                let (gate, up) = row.split_at(intermediate);
                let start = gated.len();
                gated.extend_from_slice(gate);
                self.gate.apply(self.isa, &mut gated[start..], up);
            }
            gated
        });
        let down = self.multiply(&self.down_proj, buckets, gated.collect());
        for (choices, down) in buckets.iter().zip(&down) {
            for (choice, y) in choices.iter().zip(down.chunks_exact(hidden)) {
                let sum = &mut sum[choice.row * hidden..(choice.row + 1) * hidden];
                sum.iter_mut().zip(y).for_each(|(sum, y)| *sum += choice.weight * y);
            }
        }
    }

    /// The experts of every row, rows in order and experts in order within a row.
    ///
    /// Softmax over all experts, the best `top_k` renormalised to sum 1, each times its expert's scale.
    fn route(&self, scores: &Tensor) -> Result<Vec<Choice>> {
        let (rows, experts) = scores.dims2()?;
        let mut chosen = Vec::new();
        let mut choices = Vec::with_capacity(rows * self.top_k);
        for (row, scores) in F32View::new(scores)?.chunks_exact(experts).enumerate() {
            let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            vocabulary::top_k(scores, self.top_k, &mut chosen);
            // The softmax denominator cancels in the renormalisation.
            let total: f32 = chosen.iter().map(|e| (scores[*e as usize] - max).exp()).sum();
            chosen.sort_unstable();
            choices.extend(chosen.iter().map(|e| {
                let expert = *e as usize;
                let weight = (scores[expert] - max).exp() / total * self.per_expert_scale[expert];
                Choice { row, expert, weight }
            }));
        }
        Ok(choices)
    }

    /// Each bucket's rows times its expert's matrix.
    fn multiply(&self, weight: &Weight, buckets: &[&[Choice]], rows: Vec<Vec<f32>>) -> Vec<Vec<f32>> {
        let shape = |bucket: &&[Choice]| (bucket.len(), weight.inputs());
        let inputs: Vec<_> = rows.iter().zip(buckets).map(|(x, bucket)| Input::new(x, shape(bucket))).collect();
        let matrices = buckets.iter().map(|bucket| weight.matrix(bucket[0].expert));
        multiply(self.isa, &matrices.zip(&inputs).collect::<Vec<_>>())
    }
}
