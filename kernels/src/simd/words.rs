//! Vectors of words: the integer operations that byte lanes and level lanes share, on top of [`Floats`].

use crate::simd::float::Floats;

/// A vector of `LANES` words of 32 bits, each an `i32`, two `i16` or four bytes. Every method is `#[inline(always)]`.
///
/// # Safety
/// As [`Floats`]: the code must run inside a function that has the features; pointers must be valid for the accesses
/// described.
pub(crate) trait Words: Floats {
    type I: Copy;

    /// `x` in every word.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn splat_word(self, x: i32) -> Self::I;
    /// Reads `LANES` words.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn load_words(self, from: *const u8) -> Self::I;
    /// Wrapping sums of words.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn add_words(self, a: Self::I, b: Self::I) -> Self::I;
    /// The words as floats, rounded to nearest.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn to_float(self, a: Self::I) -> Self::V;

    /// The bits of the largest magnitude among `x` (whole vectors), as an unsigned integer; a NaN is the largest.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn largest_magnitude(self, x: &[f32]) -> u32;
}
