//! The integer vector operations of the quantized kernels, on top of [`crate::lanes::Lanes`].

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

use crate::lanes::Lanes;

/// An operation written once for all byte lanes; [`crate::Isa`]'s tokens evaluate it inside their features.
pub(crate) trait PanelOp {
    /// Must be `#[inline(always)]`, so that the intrinsics are compiled with the features.
    fn eval<L: ByteLanes>(self, lanes: L);
}

/// What weights' bytes are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bytes {
    /// The weights plus an offset, at most this; where [`ByteLanes::ALL_BYTES`] possibly shifted up.
    Unsigned(u8),
    /// The weights plus 128.
    Biased,
}

/// A vector of `LANES` words of 32 bits, each an `i32`, two `i16` or four bytes. Every method is `#[inline(always)]`.
///
/// # Safety
/// As [`Lanes`]: the code must run inside a function that has the features; pointers must be valid for what is named.
pub(crate) trait ByteLanes: Lanes {
    /// Whether products with all unsigned bytes are exact. If so, the 128 of [`Bytes::Biased`] stays in the sums, which
    /// begin at -128 times the sum of `x`; if not, it is taken off with the products.
    const ALL_BYTES: bool;
    /// Rows that the registers hold: an accumulator and a sum each.
    const TILE_ROWS: usize;
    /// Whether [`ByteLanes::add_products`] and [`ByteLanes::barrier`] are compiler barriers. Without, loops stay short: a
    /// block's scales written out would overflow registers and take the compiler minutes.
    const BARRIERS: bool = false;
    type I: Copy;
    /// A row's sums while they grow, in an order of their own.
    type Sum: Copy;

    /// Evaluates an operation in a function of its own.
    unsafe fn call<O: PanelOp>(self, op: O);

    unsafe fn zero(self) -> Self::I;
    unsafe fn splat_word(self, x: i32) -> Self::I;
    /// Reads `LANES` words.
    unsafe fn load_words(self, from: *const u8) -> Self::I;
    /// Writes `LANES` words.
    unsafe fn store_words(self, to: *mut u8, v: Self::I);
    /// Reads `LANES` signed bytes, one per word.
    unsafe fn load_signed_bytes(self, from: *const u8) -> Self::I;

    unsafe fn and(self, a: Self::I, b: Self::I) -> Self::I;
    unsafe fn or(self, a: Self::I, b: Self::I) -> Self::I;
    /// Moves bits of words left by `by` in -31..=31. What enters from the other end is unspecified: mask it.
    unsafe fn shift(self, a: Self::I, by: i32) -> Self::I;
    /// Moves bits of bytes left by `by` in -7..=7. What enters from the other end is unspecified: mask it.
    #[inline(always)]
    unsafe fn shift_bytes(self, a: Self::I, by: i32) -> Self::I {
        // SAFETY: as the caller's.
        unsafe { self.shift(a, by) }
    }
    /// Replaces bytes below 16 by the table's.
    unsafe fn lookup(self, table: &[u8; 16], a: Self::I) -> Self::I;
    unsafe fn to_float(self, a: Self::I) -> Self::V;
    /// Compiler barrier: keeps `x` and what it depends on in program order. Left free, the compiler mixes the products of
    /// many scales until registers overflow, and issues the prefetches in bursts.
    #[inline(always)]
    unsafe fn barrier(self, x: Self::V) -> Self::V {
        x
    }

    /// Sums of `R` rows that start from a number each.
    unsafe fn begin<const R: usize>(self, from: [i32; R]) -> [Self::Sum; R];
    /// With `group` = `(g, groups)`, adds groups `g` and `g + 1` of the `groups` that share a scale: for each word and row `r`, the dot product of the
    /// word's four bytes in `weights[i]` and the four signed ones of the word `x[i][r]`. Calls come in the order of `g`.
    /// Here and below, words of `x` can be read up to the next multiple of four rows, where `R` is more than one.
    unsafe fn add_products<const R: usize>(
        self,
        sums: &mut [Self::Sum; R],
        bytes: Bytes,
        group: (usize, usize),
        weights: [Self::I; 2],
        x: [*const i32; 2],
    );
    unsafe fn end<const R: usize>(self, sums: [Self::Sum; R]) -> [Self::I; R];
    /// Adds to each word, for row `r`, the dot product of its two `i16` in `pairs` and the two of the word `x[r]`.
    unsafe fn add_pairs<const R: usize>(self, totals: &mut [Self::I; R], pairs: Self::I, x: *const i32);

    /// The bits of the largest magnitude, as an unsigned integer. Here and below, `x` is whole vectors of 32 elements.
    unsafe fn largest_magnitude(self, x: &[f32]) -> u32;
    /// The index of the first element with that magnitude, which must be there.
    unsafe fn first_of_magnitude(self, x: &[f32], largest: u32) -> usize;
    /// The nearest integers to `scale * x`, ties to even, within -127..=127.
    unsafe fn round_to_bytes(self, x: &[f32], scale: f32, out: &mut [u8]);
}
