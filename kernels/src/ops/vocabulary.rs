//! Reductions over a row of scores or logits: top-k, maximum, softmax.

use crate::isa::Isa;
use crate::simd::float::{Lanes, MAX_LANES, Op};

/// Scores per block: compared with the `k`-th largest so far as a whole.
const BLOCK: usize = 256;

/// Indices of the `k` largest entries, largest first, ties by lower index, into `indices` (cleared first).
pub fn top_k(x: &[f32], k: usize, indices: &mut Vec<u32>) {
    let order = |a: &u32, b: &u32| x[*b as usize].total_cmp(&x[*a as usize]).then(a.cmp(b));
    let select = |indices: &mut Vec<u32>| {
        if k < indices.len() {
            indices.select_nth_unstable_by(k - 1, order);
            indices.truncate(k);
        }
    };
    indices.clear();
    if k == 0 {
        return;
    }
    // The least of the `k` largest so far: later ones must be larger.
    let mut least: Option<f32> = None;
    for (block, first) in x.chunks(BLOCK).zip((0u32..).step_by(BLOCK)) {
        match least {
            None => indices.extend(first..first + block.len() as u32),
            // Without a branch per score: nearly all blocks end here. A NaN is not less than any score.
            Some(least) if block.iter().fold(true, |less, x| less & (*x < least)) => continue,
            Some(least) => {
                let larger = (first..).zip(block).filter(|(_, x)| x.total_cmp(&least).is_gt());
                indices.extend(larger.map(|(i, _)| i));
            }
        }
        if indices.len() >= k.saturating_mul(2).max(BLOCK) {
            select(indices);
            least = Some(x[indices[k - 1] as usize]);
        }
    }
    select(indices);
    indices.sort_unstable_by(order);
}

/// Partial results of a reduction: enough to hide the latency of an addition.
const PARTIALS: usize = 16;

/// The largest entry; NaN are skipped. `-inf` if there is none.
pub fn maximum(x: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut partials = [f32::NEG_INFINITY; PARTIALS];
    for x in x.chunks(PARTIALS) {
        for (partial, x) in partials.iter_mut().zip(x) {
            *partial = larger(*partial, *x);
        }
    }
    partials.into_iter().fold(f32::NEG_INFINITY, larger)
}

/// The sum, of partial sums of every sixteenth entry.
pub fn sum(x: &[f64]) -> f64 {
    let mut partials = [0.0; PARTIALS];
    for x in x.chunks(PARTIALS) {
        for (partial, x) in partials.iter_mut().zip(x) {
            *partial += x;
        }
    }
    partials.into_iter().sum()
}

/// `e^((logit - max) / temperature)` of every logit: a softmax before it is normalised. Zero from about `e^-87.7` down.
pub fn softmax_weights(isa: Isa, logits: &[f32], max: f32, temperature: f32) -> Vec<f64> {
    let mut weights = vec![0.0; logits.len()];
    isa.run(SoftmaxWeights { logits, max, temperature, weights: &mut weights });
    weights
}

struct SoftmaxWeights<'a> {
    logits: &'a [f32],
    max: f32,
    temperature: f32,
    weights: &'a mut [f64],
}

impl Op for SoftmaxWeights<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<L: Lanes>(self, l: L) {
        let Self { logits, max, temperature, weights } = self;
        let mut narrow = [0.0f32; MAX_LANES];
        for (logits, weights) in logits.chunks(L::LANES).zip(weights.chunks_mut(L::LANES)) {
            // SAFETY: `run` entered the features; a chunk is `LANES` long or the shorter tail.
            unsafe {
                let x = l.load_first(logits.as_ptr(), logits.len());
                let x = l.div(l.sub(x, l.splat(max)), l.splat(temperature));
                l.store(narrow.as_mut_ptr(), l.exp(x));
            }
            for (weight, narrow) in weights.iter_mut().zip(&narrow) {
                *weight = f64::from(*narrow);
            }
        }
    }
}
