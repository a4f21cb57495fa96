//! Byte lanes: eight words in two NEON registers.
//!
//! A word of weights is four inputs of one output, as `sdot` takes them. `usmmla` takes eight inputs of two outputs,
//! and eight of two rows: two quads zipped (weights), and two rows' words of two quads zipped (activations).

use crate::simd::both::both;
use crate::simd::bytes::{ByteLanes, Bytes, PanelOp, Scale};
use crate::simd::entry;
use crate::simd::neon::pair::{Dot, Matrix, NeonPair, Widen, sdot, usdot, usmmla};
use std::arch::aarch64::*;

/// Sums of `R` rows in one register of four words; the functions are those of [`ByteLanes`].
///
/// # Safety
/// As [`ByteLanes`].
pub(crate) trait ByteProducts: Copy {
    const ALL_BYTES: bool;
    const MAX_ROWS: usize;
    type Sum: Copy;

    /// Evaluates an operation in a separate function.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn call<O: PanelOp>(op: O);
    /// The initial sums.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn begin<const R: usize>(from: [i32; R]) -> [Self::Sum; R];
    /// Adds the dot products of two quads, as [`ByteLanes::add_products`].
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn add<const R: usize>(
        sums: &mut [Self::Sum; R],
        bytes: Bytes,
        weights: [uint8x16_t; 2],
        x: [*const i32; 2],
    );
    /// The sums, one word per lane.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn end<const R: usize>(sums: [Self::Sum; R]) -> [int32x4_t; R];
}

/// Weights as signed bytes.
///
/// # Safety
/// NEON only, which every aarch64 has.
#[inline(always)]
unsafe fn signed(bytes: Bytes, weights: uint8x16_t) -> int8x16_t {
    // SAFETY: NEON instructions only.
    unsafe {
        vreinterpretq_s8_u8(match bytes {
            Bytes::Unsigned(_) => weights,
            Bytes::Biased => veorq_u8(weights, vdupq_n_u8(128)),
            Bytes::Indices(_) => unreachable!("lanes without masks"),
        })
    }
}

// SAFETY of every block below: the caller is inside a function with this instruction set's features and gives pointers
// that are valid for the elements read or written, as `ByteLanes` requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl ByteProducts for Widen {
    const ALL_BYTES: bool = false;
    const MAX_ROWS: usize = 4;
    /// Two partial sums per word: words 0 and 1, then 2 and 3.
    type Sum = [int32x4_t; 2];

    #[inline(always)]
    unsafe fn call<O: PanelOp>(op: O) {
        unsafe { entry::neon_panels::eval(op) }
    }
    #[inline(always)]
    unsafe fn begin<const R: usize>(from: [i32; R]) -> [Self::Sum; R] {
        unsafe {
            let mut sums = [[vdupq_n_s32(0); 2]; R];
            for (sum, from) in sums.iter_mut().zip(from) {
                // One of a word's two partial sums starts from `from`, the other from zero.
                *sum = [vreinterpretq_s32_u64(vdupq_n_u64(u64::from(from as u32))); 2];
            }
            sums
        }
    }
    // The sum of two products fits 16 bits: 2 * 128 * 127 = 32512.
    #[inline(always)]
    unsafe fn add<const R: usize>(
        sums: &mut [Self::Sum; R],
        bytes: Bytes,
        weights: [uint8x16_t; 2],
        x: [*const i32; 2],
    ) {
        unsafe {
            let (a, b) = (signed(bytes, weights[0]), signed(bytes, weights[1]));
            for (r, sum) in sums.iter_mut().enumerate() {
                let xa = vreinterpretq_s8_s32(vdupq_n_s32(*x[0].add(r)));
                let xb = vreinterpretq_s8_s32(vdupq_n_s32(*x[1].add(r)));
                let low = vmull_s8(vget_low_s8(a), vget_low_s8(xa));
                let low = vmlal_s8(low, vget_low_s8(b), vget_low_s8(xb));
                let high = vmlal_high_s8(vmull_high_s8(a, xa), b, xb);
                *sum = [vpadalq_s16(sum[0], low), vpadalq_s16(sum[1], high)];
            }
        }
    }
    #[inline(always)]
    unsafe fn end<const R: usize>(sums: [Self::Sum; R]) -> [int32x4_t; R] {
        unsafe {
            let mut words = [vdupq_n_s32(0); R];
            for r in 0..R {
                words[r] = vpaddq_s32(sums[r][0], sums[r][1]);
            }
            words
        }
    }
}

// SAFETY of every block below: the caller is inside a function with this instruction set's features and gives pointers
// that are valid for the elements read or written, as `ByteLanes` requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl ByteProducts for Dot {
    const ALL_BYTES: bool = false;
    const MAX_ROWS: usize = 8;
    type Sum = int32x4_t;

    #[inline(always)]
    unsafe fn call<O: PanelOp>(op: O) {
        unsafe { entry::neon_dot_panels::eval(op) }
    }
    #[inline(always)]
    unsafe fn begin<const R: usize>(from: [i32; R]) -> [int32x4_t; R] {
        unsafe {
            let mut sums = [vdupq_n_s32(0); R];
            for (sum, from) in sums.iter_mut().zip(from) {
                *sum = vdupq_n_s32(from);
            }
            sums
        }
    }
    #[inline(always)]
    unsafe fn add<const R: usize>(
        sums: &mut [int32x4_t; R],
        bytes: Bytes,
        weights: [uint8x16_t; 2],
        x: [*const i32; 2],
    ) {
        unsafe {
            for g in 0..2 {
                let weights = signed(bytes, weights[g]);
                for first in (0..R).step_by(4) {
                    let x = load_rows::<R>(x[g], first);
                    macro_rules! row {
                        ($lane:literal) => {
                            if first + $lane < R {
                                sums[first + $lane] = sdot::<$lane>(sums[first + $lane], weights, x);
                            }
                        };
                    }
                    row!(0);
                    row!(1);
                    row!(2);
                    row!(3);
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn end<const R: usize>(sums: [int32x4_t; R]) -> [int32x4_t; R] {
        sums
    }
}

/// The words of rows `first..first + 4` of `R`; for a single row only one word, because four might not be readable.
///
/// # Safety
/// `x` has words of `R` rows which, if more than one, can be read up to the next multiple of four rows; `first` is a
/// multiple of four below `R`.
#[inline(always)]
unsafe fn load_rows<const R: usize>(x: *const i32, first: usize) -> int32x4_t {
    // SAFETY: words can be read up to the next multiple of four rows.
    unsafe {
        match R {
            1 => vsetq_lane_s32::<0>(*x, vdupq_n_s32(0)),
            _ => vld1q_s32(x.add(first)),
        }
    }
}

/// From this number of rows on, `usmmla` saves more than zipping costs. Fewer rows, and a last odd one, use [`Dot`]'s
/// products.
const MATRIX_ROWS: usize = 5;

/// Of a pair of rows, the first sum has words `[0, 0, 1, 1]` of rows `[0, 1, 0, 1]`, the second words 2 and 3.
// SAFETY of every block below: the caller is inside a function with this instruction set's features and gives pointers
// that are valid for the elements read or written, as `ByteLanes` requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl ByteProducts for Matrix {
    const ALL_BYTES: bool = true;
    const MAX_ROWS: usize = 8;
    type Sum = int32x4_t;

    #[inline(always)]
    unsafe fn call<O: PanelOp>(op: O) {
        unsafe { entry::neon_i8mm_panels::eval(op) }
    }
    #[inline(always)]
    unsafe fn begin<const R: usize>(from: [i32; R]) -> [int32x4_t; R] {
        unsafe {
            let mut sums = Dot::begin(from);
            if R < MATRIX_ROWS {
                return sums;
            }
            for r in (1..R).step_by(2) {
                let pair = vzip1q_s32(sums[r - 1], sums[r]);
                (sums[r - 1], sums[r]) = (pair, pair);
            }
            sums
        }
    }
    #[inline(always)]
    unsafe fn add<const R: usize>(sums: &mut [int32x4_t; R], _: Bytes, weights: [uint8x16_t; 2], x: [*const i32; 2]) {
        unsafe {
            let (a, b) = (vreinterpretq_u32_u8(weights[0]), vreinterpretq_u32_u8(weights[1]));
            let low = vreinterpretq_u8_u32(vzip1q_u32(a, b));
            let high = vreinterpretq_u8_u32(vzip2q_u32(a, b));
            for first in (0..R).step_by(4) {
                let (xa, xb) = (load_rows::<R>(x[0], first), load_rows::<R>(x[1], first));
                macro_rules! row {
                    ($lane:literal) => {
                        let r = first + $lane;
                        if r < R {
                            sums[r] = usdot::<$lane>(usdot::<$lane>(sums[r], weights[0], xa), weights[1], xb);
                        }
                    };
                }
                macro_rules! pair {
                    ($lane:literal, $next:literal, $zip:ident) => {
                        let r = first + $lane;
                        if R >= MATRIX_ROWS && r + 1 < R {
                            let x = vreinterpretq_s8_s32($zip(xa, xb));
                            sums[r] = usmmla(sums[r], low, x);
                            sums[r + 1] = usmmla(sums[r + 1], high, x);
                        } else {
                            row!($lane);
                            row!($next);
                        }
                    };
                }
                pair!(0, 1, vzip1q_s32);
                pair!(2, 3, vzip2q_s32);
            }
        }
    }
    #[inline(always)]
    unsafe fn end<const R: usize>(mut sums: [int32x4_t; R]) -> [int32x4_t; R] {
        unsafe {
            if R < MATRIX_ROWS {
                return sums;
            }
            for r in (1..R).step_by(2) {
                (sums[r - 1], sums[r]) = (vuzp1q_s32(sums[r - 1], sums[r]), vuzp2q_s32(sums[r - 1], sums[r]));
            }
            sums
        }
    }
}

/// A row's sum over a block, and its dot products over the quads of one scale.
#[derive(Clone, Copy)]
pub(crate) struct ScaledSum<S> {
    total: [int32x4_t; 2],
    dots: [S; 2],
}

// SAFETY of every block below: the caller is inside a function with this instruction set's features and gives pointers
// that are valid for the elements read or written, as `ByteLanes` requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<P: ByteProducts> ByteLanes for NeonPair<P> {
    const ALL_BYTES: bool = P::ALL_BYTES;
    const MAX_ROWS: usize = P::MAX_ROWS;
    type Sum = ScaledSum<P::Sum>;

    #[inline(always)]
    unsafe fn call<O: PanelOp>(self, op: O) {
        unsafe { P::call(op) }
    }
    #[inline(always)]
    unsafe fn zero(self) -> Self::I {
        unsafe { [vdupq_n_u8(0); 2] }
    }
    #[inline(always)]
    unsafe fn store_words(self, to: *mut u8, v: Self::I) {
        unsafe {
            vst1q_u8(to, v[0]);
            vst1q_u8(to.add(16), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn load_signed_bytes(self, from: *const u8) -> Self::I {
        unsafe {
            let halves = vmovl_s8(vld1_s8(from.cast()));
            [vreinterpretq_u8_s32(vmovl_s16(vget_low_s16(halves))), vreinterpretq_u8_s32(vmovl_high_s16(halves))]
        }
    }
    #[inline(always)]
    unsafe fn load_unsigned_bytes(self, from: *const u8) -> Self::I {
        unsafe {
            let halves = vmovl_u8(vld1_u8(from));
            [vreinterpretq_u8_u32(vmovl_u16(vget_low_u16(halves))), vreinterpretq_u8_u32(vmovl_high_u16(halves))]
        }
    }
    #[inline(always)]
    unsafe fn and(self, a: Self::I, b: Self::I) -> Self::I {
        unsafe { both!(|I| vandq_u8(a[I], b[I])) }
    }
    #[inline(always)]
    unsafe fn or(self, a: Self::I, b: Self::I) -> Self::I {
        unsafe { both!(|I| vorrq_u8(a[I], b[I])) }
    }
    #[inline(always)]
    unsafe fn max_words(self, a: Self::I, b: Self::I) -> Self::I {
        unsafe { both!(|I| vreinterpretq_u8_s32(vmaxq_s32(vreinterpretq_s32_u8(a[I]), vreinterpretq_s32_u8(b[I])))) }
    }
    #[inline(always)]
    unsafe fn shift(self, a: Self::I, by: i32) -> Self::I {
        unsafe { both!(|I| vreinterpretq_u8_u32(vshlq_u32(vreinterpretq_u32_u8(a[I]), vdupq_n_s32(by)))) }
    }
    #[inline(always)]
    unsafe fn shift_bytes(self, a: Self::I, by: i32) -> Self::I {
        unsafe { both!(|I| vshlq_u8(a[I], vdupq_n_s8(by as i8))) }
    }
    #[inline(always)]
    unsafe fn lookup(self, table: &[u8; 16], a: Self::I) -> Self::I {
        unsafe { both!(|I| vqtbl1q_u8(vld1q_u8(table.as_ptr()), a[I])) }
    }
    #[inline(always)]
    unsafe fn as_float(self, a: Self::I) -> Self::V {
        unsafe { both!(|I| vreinterpretq_f32_u8(a[I])) }
    }
    #[inline(always)]
    unsafe fn to_scale(self, words: Self::I) -> Self::I {
        words
    }
    #[inline(always)]
    unsafe fn pair_scales(self, a: Self::I, b: Self::I) -> Self::I {
        unsafe {
            both!(|I| vreinterpretq_u8_s32(vsliq_n_s32::<16>(vreinterpretq_s32_u8(a[I]), vreinterpretq_s32_u8(b[I]))))
        }
    }
    #[inline(always)]
    unsafe fn begin<const R: usize>(self, from: [i32; R]) -> [Self::Sum; R] {
        unsafe {
            let dots = P::begin(from);
            // With no rows, when a block is only unpacked, there is no `dots[0]`.
            let mut sums = [ScaledSum { total: [vdupq_n_s32(0); 2], dots: [P::begin([0])[0]; 2] }; R];
            for (sum, dots) in sums.iter_mut().zip(dots) {
                sum.dots = [dots; 2];
            }
            sums
        }
    }
    #[inline(always)]
    unsafe fn add_products<const R: usize>(
        self,
        sums: &mut [Self::Sum; R],
        bytes: Bytes,
        (g, quads): (usize, usize),
        weights: [Self::I; 2],
        x: [*const i32; 2],
        scale: Option<Scale<Self::I>>,
    ) {
        macro_rules! half {
            ($half:literal) => {
                let mut dots = P::begin([0; R]);
                if scale.is_none() || g > 0 {
                    for r in 0..R {
                        dots[r] = sums[r].dots[$half];
                    }
                }
                P::add(&mut dots, bytes, [weights[0][$half], weights[1][$half]], x);
                for r in 0..R {
                    sums[r].dots[$half] = dots[r];
                }
                if g + 2 == quads {
                    let words = P::end(dots);
                    for r in 0..R {
                        let total = &mut sums[r].total[$half];
                        *total = match scale {
                            Some(scale) => vmlaq_s32(*total, words[r], vreinterpretq_s32_u8(scale.by[$half])),
                            None => words[r],
                        };
                    }
                }
            };
        }
        unsafe {
            half!(0);
            half!(1);
        }
    }
    #[inline(always)]
    unsafe fn end<const R: usize>(self, sums: [Self::Sum; R]) -> [Self::I; R] {
        unsafe {
            let mut totals = [self.zero(); R];
            for (total, sum) in totals.iter_mut().zip(sums) {
                *total = both!(|I| vreinterpretq_u8_s32(sum.total[I]));
            }
            totals
        }
    }
    #[inline(always)]
    unsafe fn add_pairs<const R: usize>(self, totals: &mut [Self::I; R], pairs: Self::I, x: *const i32) {
        unsafe {
            let [p, q] = both!(|I| vreinterpretq_s16_u8(pairs[I]));
            // The first `i16` of each of eight words, and the second.
            let (a, b) = (vuzp1q_s16(p, q), vuzp2q_s16(p, q));
            for first in (0..R).step_by(4) {
                let x = vreinterpretq_s16_s32(load_rows::<R>(x, first));
                macro_rules! row {
                    ($row:literal, $a:literal, $b:literal) => {
                        if first + $row < R {
                            let [p, q] = both!(|I| vreinterpretq_s32_u8(totals[first + $row][I]));
                            let p = vmlal_laneq_s16::<$a>(p, vget_low_s16(a), x);
                            let q = vmlal_high_laneq_s16::<$a>(q, a, x);
                            let p = vmlal_laneq_s16::<$b>(p, vget_low_s16(b), x);
                            let q = vmlal_high_laneq_s16::<$b>(q, b, x);
                            totals[first + $row] = [vreinterpretq_u8_s32(p), vreinterpretq_u8_s32(q)];
                        }
                    };
                }
                row!(0, 0, 1);
                row!(1, 2, 3);
                row!(2, 4, 5);
                row!(3, 6, 7);
            }
        }
    }
    #[inline(always)]
    unsafe fn sub_product(self, a: Self::I, b: Self::I, by: i32) -> Self::I {
        unsafe {
            both!(|I| vreinterpretq_u8_s32(vmlsq_n_s32(vreinterpretq_s32_u8(a[I]), vreinterpretq_s32_u8(b[I]), by)))
        }
    }

    #[inline(always)]
    unsafe fn first_of_magnitude(self, x: &[f32], largest: u32) -> usize {
        unsafe {
            let largest = vdupq_n_u32(largest);
            for (i, x) in x.chunks_exact(4).enumerate() {
                // Compared as integers: a NaN equals itself.
                let x = vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(x.as_ptr())));
                let found = vceqq_u32(x, largest);
                // 16 bits per element.
                let found = vget_lane_u64::<0>(vreinterpret_u64_u16(vmovn_u32(found)));
                if found != 0 {
                    return 4 * i + found.trailing_zeros() as usize / 16;
                }
            }
            0
        }
    }
    #[inline(always)]
    unsafe fn round_to_bytes(self, x: &[f32], scale: f32, out: &mut [u8]) {
        unsafe {
            let limit = vdupq_n_s16(127);
            for (x, out) in x.chunks_exact(8).zip(out.chunks_exact_mut(8)) {
                let [a, b] = both!(|I| vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x.as_ptr().add(4 * I)), scale)));
                let x = vqmovn_high_s32(vqmovn_s32(a), b);
                let x = vmaxq_s16(vminq_s16(x, limit), vnegq_s16(limit));
                vst1_s8(out.as_mut_ptr().cast(), vmovn_s16(x));
            }
        }
    }
}
