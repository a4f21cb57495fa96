//! Rotary position embedding, half-split ("NeoX") form: elements `i` and `i + head_dim / 2` are a pair.

use crate::element::Elements;
use crate::isa::Isa;
use crate::simd::float::{Element, Lanes, Op};

/// Which channels of a head form rotary pair `i`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// `i` and `i + head_dim / 2`.
    Head,
    /// `i` and `i + pairs`: the leading channels rotate like a head of their own.
    Leading,
}

/// Rotates each `head_dim`-long head of `x` in place.
///
/// `cos` and `sin` have one entry per rotary pair, for one position; further pairs are not rotated (Gemma 4's
/// full-attention layers rotate the first quarter of the pairs).
///
/// # Panics
/// If `x` is not `(heads, head_dim)`, or there are more angles than pairs.
pub fn rotate(isa: Isa, x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) {
    assert!(head_dim > 0 && x.len().is_multiple_of(head_dim), "rope: x is not (heads, head_dim)");
    assert!(cos.len() == sin.len() && cos.len() <= head_dim / 2, "rope: more angles than pairs");
    isa.run(Rotate { x, head_dim, cos, sin });
}

struct Rotate<'a> {
    x: &'a mut [f32],
    head_dim: usize,
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Op for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<L: Lanes>(self, l: L) {
        let pairs = self.cos.len();
        let whole = pairs - pairs % L::LANES;
        for head in self.x.chunks_exact_mut(self.head_dim) {
            let (low, high) = head.split_at_mut(self.head_dim / 2);
            for i in (0..whole).step_by(L::LANES) {
                // SAFETY: `run` entered the features; `i + LANES <= pairs <= head_dim / 2`.
                unsafe {
                    let (a, b) = (l.load(low.as_ptr().add(i)), l.load(high.as_ptr().add(i)));
                    let (cos, sin) = (l.load(self.cos.as_ptr().add(i)), l.load(self.sin.as_ptr().add(i)));
                    l.store(low.as_mut_ptr().add(i), l.sub(l.mul(a, cos), l.mul(b, sin)));
                    l.store(high.as_mut_ptr().add(i), l.add(l.mul(b, cos), l.mul(a, sin)));
                }
            }
            for i in whole..pairs {
                let (a, b) = (low[i], high[i]);
                low[i] = a * self.cos[i] - b * self.sin[i];
                high[i] = b * self.cos[i] + a * self.sin[i];
            }
        }
    }
}

/// `keys = rotate(values * weight)` row by row: the keys of a layer whose K and V are one vector (`attention_k_eq_v`).
///
/// * `values`, `keys`: `(rows, head_dim)`; `weight`: `(head_dim)`.
/// * `cos`, `sin`: `(rows, pairs)`, as [`rotate`] takes them for a row.
///
/// # Panics
/// If a length differs.
pub fn k_eq_v(isa: Isa, values: Elements<'_>, weight: &[f32], cos: &[f32], sin: &[f32], keys: &mut [f32]) {
    let head_dim = weight.len();
    assert!(head_dim > 0 && keys.len().is_multiple_of(head_dim), "k_eq_v: keys are not (rows, head_dim)");
    let pairs = cos.len() / (keys.len() / head_dim).max(1);
    assert_eq!(
        (values.len(), cos.len(), sin.len()),
        (keys.len(), pairs * keys.len() / head_dim, cos.len()),
        "k_eq_v: lengths differ"
    );
    match values {
        Elements::F32(values) => isa.run(MulWeight { values, weight, keys }),
        Elements::F16(values) => isa.run(MulWeight { values, weight, keys }),
        Elements::Bf16(values) => isa.run(MulWeight { values, weight, keys }),
    }
    for (row, key) in keys.chunks_exact_mut(head_dim).enumerate() {
        let at = row * pairs..(row + 1) * pairs;
        rotate(isa, key, head_dim, &cos[at.clone()], &sin[at]);
    }
}

struct MulWeight<'a, V> {
    values: &'a [V],
    weight: &'a [f32],
    keys: &'a mut [f32],
}

impl<V: Element> Op for MulWeight<'_, V> {
    type Output = ();

    #[inline(always)]
    fn eval<L: Lanes>(self, l: L) {
        let head_dim = self.weight.len();
        let whole = head_dim - head_dim % L::LANES;
        for (value, key) in self.values.chunks_exact(head_dim).zip(self.keys.chunks_exact_mut(head_dim)) {
            for i in (0..whole).step_by(L::LANES) {
                // SAFETY: `run` entered the features; the three rows are `head_dim` long.
                unsafe {
                    let weight = l.load(self.weight.as_ptr().add(i));
                    l.store(key.as_mut_ptr().add(i), l.mul(V::load(l, value.as_ptr().add(i)), weight));
                }
            }
            for i in whole..head_dim {
                key[i] = value[i].widen() * self.weight[i];
            }
        }
    }
}
