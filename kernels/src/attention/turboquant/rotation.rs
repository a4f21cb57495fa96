//! The rotation: random signs, a Walsh-Hadamard transform, random signs again. Rotated channels are nearly Gaussian for
//! any row.

use crate::isa::Isa;
use crate::simd::float::{Lanes, Op};

/// Signs before the transform: element `i` of a group is negated where bit `i` is set. Shorter groups use the low bits.
const SIGNS_BEFORE: u128 = 0x49f2_50a9_a4c6_3bbb_42f8_5949_e46a_0359;
/// Signs after it.
const SIGNS_AFTER: u128 = 0xbea5_6562_b7a5_357a_3f62_8fdc_16ac_ee90;

/// The longest and the shortest group.
const LONGEST: usize = 128;
const SHORTEST: usize = 16;

/// The division of a row into groups that are rotated separately: the largest powers of two first, 128 at most and 16
/// at least (512 is four of 128, 192 is 128 + 64).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RotationGroups {
    head_dim: usize,
}

impl RotationGroups {
    /// The groups of rows of `head_dim`; `None` if it is zero or not a multiple of 16.
    pub const fn of(head_dim: usize) -> Option<Self> {
        if head_dim > 0 && head_dim.is_multiple_of(SHORTEST) { Some(Self { head_dim }) } else { None }
    }

    /// Width of a row.
    pub const fn head_dim(self) -> usize {
        self.head_dim
    }

    /// The length of the group that begins at channel `at`.
    #[inline(always)]
    pub(super) const fn len_at(self, at: usize) -> usize {
        let left = self.head_dim - at;
        if left >= LONGEST { LONGEST } else { 1 << left.ilog2() }
    }
}

/// Rotates every row: `y = D(after) H D(before) x / sqrt(g)` per group of `g`. Norms and dot products are preserved.
///
/// * `rows`: `(n, head_dim)`.
///
/// # Panics
/// If `rows` is not `(n, head_dim)`.
pub fn rotate(isa: Isa, rows: &mut [f32], groups: RotationGroups) {
    assert!(rows.len().is_multiple_of(groups.head_dim), "rotate: rows are not (n, head_dim)");
    isa.run(Rotate { rows, groups, before: SIGNS_BEFORE, after: SIGNS_AFTER });
}

/// Undoes [`rotate`], up to rounding.
///
/// # Panics
/// As [`rotate`].
pub fn rotate_back(isa: Isa, rows: &mut [f32], groups: RotationGroups) {
    assert!(rows.len().is_multiple_of(groups.head_dim), "rotate: rows are not (n, head_dim)");
    isa.run(Rotate { rows, groups, before: SIGNS_AFTER, after: SIGNS_BEFORE });
}

struct Rotate<'a> {
    rows: &'a mut [f32],
    groups: RotationGroups,
    before: u128,
    after: u128,
}

/// Plain Rust, compiled once for each ISA's registers; sums of two have one order, so every ISA gives the same bits.
impl Op for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<L: Lanes>(self, _: L) {
        let (before, after) = (signs(self.before), signs(self.after));
        for row in self.rows.chunks_exact_mut(self.groups.head_dim) {
            let mut rest = row;
            while !rest.is_empty() {
                let len = RotationGroups { head_dim: rest.len() }.len_at(0);
                let (group, tail) = rest.split_at_mut(len);
                match <&mut [f32; LONGEST]>::try_from(&mut *group) {
                    Ok(group) => transform(group, &before, &after),
                    Err(_) => transform(group, &before, &after),
                }
                rest = tail;
            }
        }
    }
}

/// The sign masks as factors.
#[inline(always)]
fn signs(mask: u128) -> [f32; LONGEST] {
    let mut signs = [1.0; LONGEST];
    for (i, sign) in signs.iter_mut().enumerate() {
        if mask >> i & 1 == 1 {
            *sign = -1.0;
        }
    }
    signs
}

#[inline(always)]
fn transform<G: AsMut<[f32]> + ?Sized>(group: &mut G, before: &[f32; LONGEST], after: &[f32; LONGEST]) {
    let group = group.as_mut();
    for (x, sign) in group.iter_mut().zip(before) {
        *x *= sign;
    }
    let mut half = 1;
    while half < group.len() {
        for pair in group.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
    let norm = 1.0 / (group.len() as f32).sqrt();
    for (x, sign) in group.iter_mut().zip(after) {
        *x *= norm * sign;
    }
}
