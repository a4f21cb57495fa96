//! Argmax and top-k over rows of scores.

use crate::isa::Isa;
use crate::simd::float::{Lanes, Op};

/// Index of the largest entry, the first of equals; `None` if `x` is empty or all NaN.
pub fn argmax(isa: Isa, x: &[f32]) -> Option<usize> {
    let max = isa.run(Maximum { x });
    x.iter().position(|v| *v == max)
}

/// Indices of the `k` largest entries, largest first, the lower index first among equals. `indices` is scratch.
pub fn top_k(x: &[f32], k: usize, indices: &mut Vec<u32>) {
    let order = |a: &u32, b: &u32| x[*b as usize].total_cmp(&x[*a as usize]).then(a.cmp(b));
    indices.clear();
    indices.extend(0..x.len() as u32);
    if k < indices.len() {
        if k > 0 {
            indices.select_nth_unstable_by(k - 1, order);
        }
        indices.truncate(k);
    }
    indices.sort_unstable_by(order);
}

struct Maximum<'a> {
    x: &'a [f32],
}

impl Op for Maximum<'_> {
    type Output = f32;

    #[inline(always)]
    fn eval<L: Lanes>(self, l: L) -> f32 {
        let mut lanes = self.x.chunks_exact(L::LANES);
        // SAFETY: `run` entered the features; chunks are `LANES` long.
        let max = unsafe {
            let mut max = l.splat(f32::NEG_INFINITY);
            for x in lanes.by_ref() {
                // The accumulator second: x86's max returns its second operand if either is NaN.
                max = l.max(l.load(x.as_ptr()), max);
            }
            l.maximum(max)
        };
        lanes.remainder().iter().fold(max, |m, x| m.max(*x))
    }
}
