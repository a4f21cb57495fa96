//! Routed experts: each row is computed by a few of many gated MLPs.

use candle_core::Tensor;
use foretoken_kernels::{Isa, vocabulary};

use super::parallel::map;
use super::{F32View, Gate, Input, Job, Weight, for_row_blocks, multiply, tensor};
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
    /// The function of the gates.
    pub gate: Gate,
    /// The instruction set.
    pub isa: Isa,
}

/// Rows from which experts are not computed together with further ones, so that groups reuse the memory of their
/// activations and results (record: `2026-11-25-epyc-zen4-avx2-2vcpu/prompts-with-experts.txt`).
const ROWS_TOGETHER: usize = 512;

/// An expert that a row is routed to, and its weight.
struct Choice {
    row: usize,
    expert: usize,
    weight: f32,
}

impl Experts {
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
        let (mut buckets, mut rows) = (Vec::new(), 0);
        for bucket in choices.chunk_by(|a, b| a.expert == b.expert) {
            rows += bucket.len();
            buckets.push(bucket);
            if rows >= ROWS_TOGETHER {
                self.add(&buckets, &x, &mut sum);
                (buckets, rows) = (Vec::new(), 0);
            }
        }
        if !buckets.is_empty() {
            self.add(&buckets, &x, &mut sum);
        }
        tensor(sum, (x.len() / hidden, hidden))
    }

    /// Adds the weighted outputs of the experts of `buckets`, each for its rows of `x` `(rows, hidden)`, to `sum`
    /// `(rows, hidden)`.
    fn add(&self, buckets: &[&[Choice]], x: &[f32], sum: &mut [f32]) {
        let (hidden, intermediate) = (self.down_proj.outputs(), self.down_proj.inputs());
        let num_rows: usize = buckets.iter().map(|bucket| bucket.len()).sum();
        let matrices: Vec<_> = (buckets.iter().map(|bucket| bucket[0].expert))
            .map(|expert| (self.gate_up_proj.matrix(expert), self.down_proj.matrix(expert)))
            .collect();

        let buckets: Vec<_> = buckets.iter().zip(&matrices).collect();
        let inputs = map(buckets.iter(), num_rows * hidden, |(bucket, (gate_up, _))| {
            let mut rows = Vec::with_capacity(bucket.len() * hidden);
            bucket.iter().for_each(|c| rows.extend_from_slice(&x[c.row * hidden..(c.row + 1) * hidden]));
            Input::new(rows, (bucket.len(), hidden)).prepared_for(self.isa, gate_up)
        });
        let jobs = matrices.iter().zip(&inputs);
        let jobs = jobs.map(|((gate_up, _), input)| Job::gated(self.gate, *gate_up, *gate_up, intermediate, input));
        let gated = multiply(self.isa, &jobs.collect::<Vec<_>>());

        let gated: Vec<_> = buckets.iter().zip(gated).collect();
        let inputs = map(gated.iter(), num_rows * intermediate, |((bucket, (_, down)), rows)| {
            Input::new(&rows[..], (bucket.len(), intermediate)).prepared_for(self.isa, down)
        });
        let jobs = matrices.iter().zip(&inputs).map(|((_, down), input)| Job::product(*down, input));
        let outputs = multiply(self.isa, &jobs.collect::<Vec<_>>());

        let parts = buckets.iter().zip(&outputs).flat_map(|((bucket, _), y)| bucket.iter().zip(y.chunks_exact(hidden)));
        let mut parts: Vec<(&Choice, &[f32])> = parts.collect();
        parts.sort_by_key(|(choice, _)| choice.row); // stable: a row's experts stay in order
        for_row_blocks(sum, hidden, |first, sum| {
            let end = first + sum.len() / hidden;
            let start = parts.partition_point(|(choice, _)| choice.row < first);
            for (choice, y) in parts[start..].iter().take_while(|(choice, _)| choice.row < end) {
                let sum = &mut sum[(choice.row - first) * hidden..][..hidden];
                sum.iter_mut().zip(*y).for_each(|(sum, y)| *sum += choice.weight * y);
            }
        });
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
}
