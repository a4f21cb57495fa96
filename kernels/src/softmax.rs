//! The running softmax that tiles are merged with (Milakov and Gimelshein, 2018).

use std::ops::Range;

use crate::Isa;
use crate::attend::{Query, SHARE};
use crate::lanes::{Lanes, Op};

/// A softmax-weighted sum that is still being built: `sum = sum_i e^(score_i - max)`, and in the caller's buffer
/// `output = sum_i e^(score_i - max) * value_i`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Running {
    /// The largest score so far.
    pub max: f64,
    /// The sum of the weights so far: it divides every value, so its rounding must not be seen in theirs.
    pub sum: f64,
}

impl Running {
    /// No key seen yet. The output that goes with it is all zeros.
    pub const EMPTY: Self = Self { max: f64::NEG_INFINITY, sum: 0.0 };
}

/// Weights below `e^FLOOR` are zero. They are too small to be seen, and their products would be subnormal numbers, which
/// take processors a hundred cycles each.
const FLOOR: f64 = -64.0;

/// What weights relative to one maximum are worth relative to a larger one.
fn decay(difference: f64) -> f32 {
    if difference < FLOOR { 0.0 } else { (difference as f32).exp() }
}

/// Folds the attention over later keys into the attention over earlier ones.
pub fn merge(isa: Isa, into: (&mut Running, &mut [f32]), later: (Running, &[f32])) {
    let (running, output) = into;
    let (other, other_output) = later;
    assert_eq!(output.len(), other_output.len(), "attend: outputs differ in length");
    if other.sum == 0.0 {
        return;
    }
    let max = running.max.max(other.max);
    // An empty left side has max = -inf, whose weight is e^-inf = 0.
    let (a, b) = (decay(running.max - max), decay(other.max - max));
    *running = Running { max, sum: running.sum * f64::from(a) + other.sum * f64::from(b) };
    isa.run(Blend { output, a, other: other_output, b });
}

/// Divides the unnormalised result by the sum of its weights. A row that saw no key stays zero.
pub fn finish(isa: Isa, running: Running, output: &mut [f32]) {
    if running.sum > 0.0 {
        isa.run(Scale { output, by: (1.0 / running.sum) as f32 });
    }
}

/// Turns every query's visible scores into weights relative to its new maximum, and rescales what was there before; `len` of
/// each per query. Weights of `range` that a query does not see become zero.
///
/// One thing after the other for all queries, so that none waits for a maximum or a sum of its own.
pub(crate) struct Softmax<'a, 'q> {
    pub len: usize,
    pub queries: &'a mut [Query<'q>],
    pub range: Range<usize>,
    pub scores: &'a [f64],
    pub weights: &'a mut [f32],
}

impl Op for Softmax<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn eval<L: Lanes>(self, l: L) {
        let Self { len, queries, range, scores, weights } = self;
        let mut maxima = [f64::NEG_INFINITY; SHARE];
        for ((max, query), scores) in maxima.iter_mut().zip(&*queries).zip(scores.chunks(len)) {
            *max = largest(query.running.max, &scores[query.visible.clone()]);
        }
        for (((max, query), scores), weights) in
            maxima.iter().zip(&*queries).zip(scores.chunks(len)).zip(weights.chunks_mut(len))
        {
            // SAFETY: `run` entered the features.
            unsafe { weigh(l, *max, scores, query.visible.clone(), range.clone(), weights) };
        }
        let mut sums = [0.0; SHARE];
        for ((sum, query), weights) in sums.iter_mut().zip(&*queries).zip(weights.chunks(len)) {
            if !query.visible.is_empty() {
                *sum = total(&weights[blocks(&query.visible, len)]);
            }
        }
        for ((query, max), sum) in queries.iter_mut().zip(maxima).zip(sums) {
            if query.visible.is_empty() {
                continue;
            }
            if query.running.sum > 0.0 && max > query.running.max {
                let scale = decay(query.running.max - max);
                query.running.sum *= f64::from(scale);
                // SAFETY: `run` entered the features.
                unsafe { scale_by(l, query.output, scale) };
            }
            *query.running = Running { max, sum: query.running.sum + sum };
        }
    }
}

/// Strands that a row's maximum and its sum of weights run in: by a key's place in the tile, so that neither where the
/// visible keys begin and end nor the width of the lanes changes how they are added up.
const STRANDS: usize = 16;

/// Whole blocks of strands around the keys that a row sees.
#[inline(always)]
fn blocks(visible: &Range<usize>, len: usize) -> Range<usize> {
    visible.start - visible.start % STRANDS..visible.end.next_multiple_of(STRANDS).min(len)
}

/// The largest of `scores` and `start`. Scores that are no numbers are passed over.
#[inline(always)]
fn largest(start: f64, scores: &[f64]) -> f64 {
    let mut strands = [start; STRANDS];
    let mut blocks = scores.chunks_exact(STRANDS);
    for scores in blocks.by_ref() {
        for (strand, score) in strands.iter_mut().zip(scores) {
            *strand = larger(*strand, *score);
        }
    }
    for (strand, score) in strands.iter_mut().zip(blocks.remainder()) {
        *strand = larger(*strand, *score);
    }
    halved(strands, larger)
}

/// One instruction, which `f64::max` is not.
#[inline(always)]
fn larger(a: f64, b: f64) -> f64 {
    if b > a { b } else { a }
}

/// The weights of the `visible` scores; zero for the others of `range` and of the visible ones' blocks.
///
/// # Safety
/// The caller is inside a function with `L`'s features.
#[inline(always)]
unsafe fn weigh<L: Lanes>(
    l: L,
    max: f64,
    scores: &[f64],
    visible: Range<usize>,
    range: Range<usize>,
    weights: &mut [f32],
) {
    if visible.is_empty() {
        weights[range].fill(0.0);
        return;
    }
    let blocks = blocks(&visible, weights.len());
    weights[blocks.start.min(range.start)..visible.start].fill(0.0);
    weights[visible.end..blocks.end.max(range.end)].fill(0.0);
    for (weight, score) in weights[visible.clone()].iter_mut().zip(&scores[visible.clone()]) {
        let difference = score - max;
        *weight = if difference < FLOOR { f32::NEG_INFINITY } else { difference as f32 };
    }
    for weights in weights[visible].chunks_mut(L::LANES) {
        // SAFETY: the caller entered the features; a chunk is `LANES` long or the shorter tail.
        unsafe {
            if weights.len() == L::LANES {
                l.store(weights.as_mut_ptr(), l.exp(l.load(weights.as_ptr())));
            } else {
                let e = l.exp(l.load_part(weights.as_ptr(), weights.len()));
                l.store_part(weights.as_mut_ptr(), e, weights.len());
            }
        }
    }
}

/// The sum of weights from the first of a block on.
#[inline(always)]
fn total(weights: &[f32]) -> f64 {
    let mut strands = [0.0f64; STRANDS];
    let mut blocks = weights.chunks_exact(STRANDS);
    for weights in blocks.by_ref() {
        for (strand, weight) in strands.iter_mut().zip(weights) {
            *strand += f64::from(*weight);
        }
    }
    for (strand, weight) in strands.iter_mut().zip(blocks.remainder()) {
        *strand += f64::from(*weight);
    }
    halved(strands, |a, b| a + b)
}

/// Strands folded half onto half: four operations wait for one another, not sixteen.
#[inline(always)]
fn halved(mut strands: [f64; STRANDS], fold: impl Fn(f64, f64) -> f64) -> f64 {
    let mut half = STRANDS / 2;
    while half > 0 {
        for i in 0..half {
            strands[i] = fold(strands[i], strands[i + half]);
        }
        half /= 2;
    }
    strands[0]
}

/// # Safety
/// The caller is inside a function with `L`'s features.
#[inline(always)]
unsafe fn scale_by<L: Lanes>(l: L, x: &mut [f32], by: f32) {
    let mut lanes = x.chunks_exact_mut(L::LANES);
    // SAFETY: the caller entered the features; chunks are `LANES` long.
    unsafe {
        for x in lanes.by_ref() {
            l.store(x.as_mut_ptr(), l.mul(l.load(x.as_ptr()), l.splat(by)));
        }
    }
    for x in lanes.into_remainder() {
        *x *= by;
    }
}

struct Scale<'a> {
    output: &'a mut [f32],
    by: f32,
}

impl Op for Scale<'_> {
    type Output = ();
    #[inline(always)]
    fn eval<L: Lanes>(self, l: L) {
        // SAFETY: `run` entered the features.
        unsafe { scale_by(l, self.output, self.by) }
    }
}

/// `output = output * a + other * b`.
struct Blend<'a> {
    output: &'a mut [f32],
    a: f32,
    other: &'a [f32],
    b: f32,
}

impl Op for Blend<'_> {
    type Output = ();
    #[inline(always)]
    fn eval<L: Lanes>(self, l: L) {
        let mut out = self.output.chunks_exact_mut(L::LANES);
        let mut other = self.other.chunks_exact(L::LANES);
        for (out, other) in out.by_ref().zip(other.by_ref()) {
            // SAFETY: `run` entered the features; chunks are `LANES` long.
            unsafe {
                let sum =
                    l.add(l.mul(l.load(out.as_ptr()), l.splat(self.a)), l.mul(l.load(other.as_ptr()), l.splat(self.b)));
                l.store(out.as_mut_ptr(), sum);
            }
        }
        for (out, other) in out.into_remainder().iter_mut().zip(other.remainder()) {
            *out = *out * self.a + other * self.b;
        }
    }
}
