//! The integer vector operations of the quantized kernels, on top of [`crate::lanes::Lanes`].

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

use crate::lanes::Lanes;

/// An operation written once for all byte lanes; [`crate::Isa`]'s tokens evaluate it inside their features.
pub(crate) trait PanelOp {
    /// Must be `#[inline(always)]`, so that the intrinsics are compiled with the features.
    fn eval<L: ByteLanes>(self, lanes: L);
}

/// A vector of `LANES` words of 32 bits, each an `i32`, two `i16` or four bytes. Every method is `#[inline(always)]`.
///
/// # Safety
/// As [`Lanes`]: the code must run inside a function that has the features; pointers must be valid for what is named.
pub(crate) trait ByteLanes: Lanes {
    /// Whether [`ByteLanes::dot`] is exact for all unsigned bytes. If not, only up to 128.
    const ALL_BYTES: bool;
    /// Rows that the registers hold: an accumulator and a sum each.
    const TILE_ROWS: usize;
    type I: Copy;

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
    /// Replaces bytes below 16 by the table's.
    unsafe fn lookup(self, table: &[u8; 16], a: Self::I) -> Self::I;
    unsafe fn to_float(self, a: Self::I) -> Self::V;

    /// Adds to each word the dot product of its four unsigned bytes in `weights` and the four signed ones of `x`.
    unsafe fn dot(self, acc: Self::I, weights: Self::I, x: i32) -> Self::I;
    /// As `dot`, for weights stored plus 128. If `ALL_BYTES`, that 128 stays in the sum and the caller starts from
    /// -128 times the sum of `x`; otherwise it is taken off here.
    unsafe fn dot_biased(self, acc: Self::I, weights: Self::I, x: i32) -> Self::I;
    /// Adds to each word the dot product of its two `i16` in `pairs` and the two of `x`.
    unsafe fn dot_pairs(self, acc: Self::I, pairs: Self::I, x: i32) -> Self::I;
    /// Asks for the cache line at `at`, which need not be readable.
    unsafe fn prefetch(self, at: *const u8);

    /// The bits of the largest magnitude, as an unsigned integer. Here and below, `x` is whole vectors of 32 elements.
    unsafe fn largest_magnitude(self, x: &[f32]) -> u32;
    /// The index of the first element with that magnitude, which must be there.
    unsafe fn first_of_magnitude(self, x: &[f32], largest: u32) -> usize;
    /// The nearest integers to `scale * x`, ties to even, within -127..=127.
    unsafe fn round_to_bytes(self, x: &[f32], scale: f32, out: &mut [u8]);
}
