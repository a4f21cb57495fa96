//! Rotary position embedding, half-split ("NeoX") form: element `i` turns with element `i + head_dim / 2`.

use crate::Isa;
use crate::lanes::{Lanes, Op};

/// Rotates each `head_dim`-long head of `x` in place.
///
/// `cos` and `sin` have one entry per rotating pair, for one position; pairs beyond them stay as they are (Gemma 4's
/// full-attention layers rotate the first quarter of the pairs).
///
/// # Panics
/// If `x` is not whole heads, or there are more angles than pairs.
pub fn rotate(isa: Isa, x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) {
    assert!(head_dim > 0 && x.len().is_multiple_of(head_dim), "rope: x is not whole heads");
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
