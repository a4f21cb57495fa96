//! Scores and values of exact rows: `f32`, `f16` or `bf16`, widened in registers.

use std::ops::Range;

use crate::attention::query::Query;
use crate::isa::Isa;
use crate::simd::float::{Element, Lanes, Op};
use crate::simd::prefetch::prefetch;

/// `scores[n * len + j] = query[n] . k[j]` for the keys `j` of `range`; `len` is the number of keys of the block.
pub(super) fn key_scores<K: Element>(
    isa: Isa,
    k: &[K],
    head_dim: usize,
    queries: &[Query<'_>],
    range: Range<usize>,
    scores: &mut [f64],
) {
    isa.run(Scores { keys: ExactRows { elements: k, head_dim, range }, queries, scores });
}

/// `output[n] += sum_j weights[n * len + j] * v[j]` over the values `j` of `range`.
pub(super) fn add_values<V: Element>(
    isa: Isa,
    v: &[V],
    head_dim: usize,
    queries: &mut [Query<'_>],
    range: Range<usize>,
    weights: &[f32],
) {
    isa.run(Values { values: ExactRows { elements: v, head_dim, range }, queries, weights });
}

/// Prefetch distance in keys (values). Without prefetching, one row at 32768 positions of E2B, f16, took 202 ms instead
/// of 182.
const PREFETCH_ROWS: usize = 8;

/// Keys or values of a block, `(len, head_dim)`, and the range of those that some query sees.
struct ExactRows<'a, T> {
    elements: &'a [T],
    head_dim: usize,
    range: Range<usize>,
}

struct Scores<'a, 'q, K> {
    keys: ExactRows<'a, K>,
    queries: &'a [Query<'q>],
    scores: &'a mut [f64],
}

impl<K: Element> Op for Scores<'_, '_, K> {
    type Output = ();

    #[inline(always)]
    fn eval<L: Lanes>(self, l: L) {
        let Self { keys, queries, scores } = self;
        let len = keys.elements.len() / keys.head_dim;
        let mut done = 0;
        while done < queries.len() {
            let (queries, scores) = (&queries[done..], &mut scores[done * len..]);
            // SAFETY: `run` entered the features; `attend_block` checked every length and range.
            done += unsafe {
                match queries.len() {
                    8.. if const { L::LANES == 16 } => keys.score::<L, 8, 2>(l, queries, scores),
                    // With 16 registers: eight accumulators for four queries by two keys, and operands.
                    4.. if const { L::LANES == 8 } => keys.score::<L, 4, 2>(l, queries, scores),
                    4.. => keys.score::<L, 4, 4>(l, queries, scores),
                    _ => keys.score::<L, 1, 4>(l, queries, scores),
                }
            };
        }
    }
}

struct Values<'a, 'q, V> {
    values: ExactRows<'a, V>,
    queries: &'a mut [Query<'q>],
    weights: &'a [f32],
}

impl<V: Element> Op for Values<'_, '_, V> {
    type Output = ();

    #[inline(always)]
    fn eval<L: Lanes>(self, l: L) {
        let Self { values, queries, weights } = self;
        let len = values.elements.len() / values.head_dim;
        let mut done = 0;
        while done < queries.len() {
            let (queries, weights) = (&mut queries[done..], &weights[done * len..]);
            // SAFETY: `run` entered the features; `attend_block` checked every length and range.
            done += unsafe {
                match queries.len() {
                    8.. if const { L::LANES == 16 } => values.add::<L, 8, 2>(l, queries, weights),
                    4.. if const { L::LANES == 8 } => values.add::<L, 4, 2>(l, queries, weights),
                    4.. => values.add::<L, 4, 4>(l, queries, weights),
                    _ => values.add::<L, 1, 4>(l, queries, weights),
                }
            };
        }
    }
}

impl<K: Element> ExactRows<'_, K> {
    /// `scores[n][j] = q[n] . k[j]` for the first `N` queries, `J` keys at a time: `N * J` accumulators. Returns `N`.
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features; the first `N` queries are `head_dim` long, and `range` lies
    /// in the block.
    #[inline(always)]
    unsafe fn score<L: Lanes, const N: usize, const J: usize>(
        &self,
        l: L,
        queries: &[Query<'_>],
        scores: &mut [f64],
    ) -> usize {
        let mut q = [std::ptr::null(); N];
        for (q, query) in q.iter_mut().zip(queries) {
            *q = query.query.as_ptr();
        }
        let mut j = self.range.start;
        // SAFETY: the caller entered the features; `N` queries are `head_dim` long, and `range` lies in the block.
        unsafe {
            while j + J <= self.range.end {
                self.score_some::<L, N, J>(l, q, j, scores);
                j += J;
            }
            while j < self.range.end {
                self.score_some::<L, N, 1>(l, q, j, scores);
                j += 1;
            }
        }
        N
    }

    /// The scores of the `J` keys from `first` on.
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features; `q` are `N` queries, `head_dim` long,
    /// and there are `J` keys from `first` on.
    #[inline(always)]
    unsafe fn score_some<L: Lanes, const N: usize, const J: usize>(
        &self,
        l: L,
        q: [*const f32; N],
        first: usize,
        scores: &mut [f64],
    ) {
        let (head_dim, len) = (self.head_dim, self.elements.len() / self.head_dim);
        let whole = head_dim - head_dim % L::LANES;
        // SAFETY: the queries and the `J` keys from `first` on are `head_dim` long.
        unsafe {
            let k = self.elements.as_ptr().add(first * head_dim);
            let mut acc = [[l.splat(0.0); J]; N];
            let mut keys = [l.splat(0.0); J];
            for i in (0..whole).step_by(L::LANES) {
                for (j, key) in keys.iter_mut().enumerate() {
                    let at = k.add(j * head_dim + i);
                    prefetch(at.wrapping_add(PREFETCH_ROWS * head_dim).cast());
                    *key = K::load(l, at);
                }
                for (acc, q) in acc.iter_mut().zip(q) {
                    let q = l.load(q.add(i));
                    for (acc, key) in acc.iter_mut().zip(keys) {
                        *acc = l.fma(q, key, *acc);
                    }
                }
            }
            let tail = head_dim - whole;
            if tail > 0 {
                for (j, key) in keys.iter_mut().enumerate() {
                    *key = K::load_part(l, k.add(j * head_dim + whole), tail);
                }
                for (acc, q) in acc.iter_mut().zip(q) {
                    let q = l.load_part(q.add(whole), tail);
                    for (acc, key) in acc.iter_mut().zip(keys) {
                        *acc = l.fma(q, key, *acc);
                    }
                }
            }
            for (n, acc) in acc.into_iter().enumerate() {
                for (j, acc) in acc.into_iter().enumerate() {
                    scores[n * len + first + j] = l.sum_f64(acc);
                }
            }
        }
    }
}

impl<V: Element> ExactRows<'_, V> {
    /// `output[n] += sum_j weights[n][j] * v[j]` for the first `N` queries, in strips of `S` vectors: `N * S`
    /// accumulators stay in registers over all keys of the block. Returns `N`.
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features; the outputs of the first `N` queries are
    /// `head_dim` long, and `range` lies in the block.
    #[inline(always)]
    unsafe fn add<L: Lanes, const N: usize, const S: usize>(
        &self,
        l: L,
        queries: &mut [Query<'_>],
        weights: &[f32],
    ) -> usize {
        let (head_dim, len) = (self.head_dim, self.elements.len() / self.head_dim);
        assert!(weights.len() >= N * len, "attend: too few weights");
        let mut out = [std::ptr::null_mut(); N];
        for (out, query) in out.iter_mut().zip(queries) {
            *out = query.output.as_mut_ptr();
        }
        let whole = head_dim - head_dim % L::LANES;
        let (v, weights) = (self.elements.as_ptr(), weights.as_ptr());
        let mut i = 0;
        // SAFETY: the outputs are `head_dim` long, `range` is inside the block, and there are weights of `N` queries.
        unsafe {
            while i + S * L::LANES <= whole {
                let mut acc = [[l.splat(0.0); S]; N];
                for (acc, out) in acc.iter_mut().zip(out) {
                    for (s, acc) in acc.iter_mut().enumerate() {
                        *acc = l.load(out.add(i + s * L::LANES));
                    }
                }
                let mut values = [l.splat(0.0); S];
                for j in self.range.clone() {
                    for (s, value) in values.iter_mut().enumerate() {
                        let at = v.add(j * head_dim + i + s * L::LANES);
                        prefetch(at.wrapping_add(PREFETCH_ROWS * head_dim).cast());
                        *value = V::load(l, at);
                    }
                    for (n, acc) in acc.iter_mut().enumerate() {
                        let weight = l.splat(*weights.add(n * len + j));
                        for (acc, v) in acc.iter_mut().zip(values) {
                            *acc = l.fma(weight, v, *acc);
                        }
                    }
                }
                for (out, acc) in out.into_iter().zip(acc) {
                    for (s, acc) in acc.into_iter().enumerate() {
                        l.store(out.add(i + s * L::LANES), acc);
                    }
                }
                i += S * L::LANES;
            }
            self.add_rest(l, out, weights, i);
        }
        N
    }

    /// [`ExactRows::add`] of the channels from `first` on, one vector at a time.
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features; the outputs are `head_dim` long, `range` lies in the block,
    /// and `weights` has the block's weights of `N` queries.
    #[inline(always)]
    unsafe fn add_rest<L: Lanes, const N: usize>(&self, l: L, out: [*mut f32; N], weights: *const f32, first: usize) {
        let (head_dim, len) = (self.head_dim, self.elements.len() / self.head_dim);
        let (v, mut i) = (self.elements.as_ptr(), first);
        // SAFETY: the outputs are `head_dim` long, `range` is inside the block, and there are weights of `N` queries.
        unsafe {
            while i < head_dim {
                let width = L::LANES.min(head_dim - i);
                for (n, out) in out.into_iter().enumerate() {
                    let mut acc = l.load_first(out.add(i), width);
                    for j in self.range.clone() {
                        let at = v.add(j * head_dim + i);
                        let v = if width < L::LANES { V::load_part(l, at, width) } else { V::load(l, at) };
                        acc = l.fma(l.splat(*weights.add(n * len + j)), v, acc);
                    }
                    l.store_first(out.add(i), acc, width);
                }
                i += width;
            }
        }
    }
}
