//! The integer vector operations of attention over codes, on top of [`crate::lanes::Lanes`].

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

use crate::lanes::Lanes;

/// An operation written once for all code lanes; [`crate::Isa`]'s tokens evaluate it inside their features.
pub(crate) trait CodeOp {
    /// Must be `#[inline(always)]`, so that the intrinsics are compiled with the features.
    fn eval<L: CodeLanes>(self, lanes: L);
}

/// A vector of `LANES` words of 32 bits, each an `i32`, two `i16` or four bytes. Every method is `#[inline(always)]`.
///
/// # Safety
/// As [`Lanes`]: the code must run inside a function that has the features; pointers must be valid for what is named.
pub(crate) trait CodeLanes: Lanes {
    /// Queries whose sums the registers hold.
    const QUERIES: usize;
    /// What is added to levels, so that dot products take them; that times the other side's sum is left in the results.
    const BIAS: u8;
    type I: Copy;
    /// 64 bytes to look up.
    type Table: Copy;
    /// Levels ready to meet several queries.
    type Key: Copy;
    /// Levels ready to meet several queries' weights.
    type Value: Copy;

    unsafe fn splat_word(self, x: i32) -> Self::I;
    /// Reads `LANES` words.
    unsafe fn load_words(self, from: *const u8) -> Self::I;
    unsafe fn add_words(self, a: Self::I, b: Self::I) -> Self::I;
    unsafe fn to_float(self, a: Self::I) -> Self::V;
    unsafe fn xor(self, a: Self::I, b: Self::I) -> Self::I;
    /// Moves bits of words right by `by` in -31..=31. What enters from the other end is unspecified.
    unsafe fn shift_right(self, a: Self::I, by: i32) -> Self::I;
    /// Bits of `a` where `mask` is one, of `b` where it is zero.
    unsafe fn select(self, mask: Self::I, a: Self::I, b: Self::I) -> Self::I;

    unsafe fn table(self, bytes: &[u8; 64]) -> Self::Table;
    /// Replaces bytes by the table's at their lower six bits. Only `BITS` of these tell entries apart.
    unsafe fn lookup<const BITS: usize>(self, table: Self::Table, index: Self::I) -> Self::I;

    /// Makes levels plus `BIAS` ready.
    unsafe fn key(self, levels: Self::I) -> Self::Key;
    /// Adds to each word the dot product of its four levels and the four signed bytes of word `v` of the four at `query`.
    unsafe fn dot_key(self, sum: Self::I, key: Self::Key, query: *const i32, v: usize) -> Self::I;
    /// Makes levels plus `BIAS` ready.
    unsafe fn value(self, levels: Self::I) -> Self::Value;
    /// Adds to the two parts of each word's sum the dot product of its four levels and the weights of four tokens: pair `v`
    /// of the four pairs at `weights`.
    unsafe fn dot_value(self, sums: [Self::I; 2], value: Self::Value, weights: *const i32, v: usize) -> [Self::I; 2];
    /// The sums: what [`CodeLanes::dot_value`] added, plus `offset`.
    unsafe fn join(self, sums: [Self::I; 2], offset: i32) -> Self::I;
    /// Writes the nearest integers, ties to even, of `LANES` weights within `WEIGHT_MAX`, two words per four of them; the
    /// integers.
    unsafe fn store_weights(self, to: *mut i32, weights: Self::V) -> Self::I;
    /// The sum of the words.
    unsafe fn sum_words(self, a: Self::I) -> i32;

    /// Turns four vectors of 16 channels (two halves of them, if a vector has 8 lanes; else the second is not looked at) of
    /// four tokens each into four vectors of 16 tokens (halves, again) of four channels each.
    unsafe fn turn(self, vectors: [[Self::I; 4]; 2]) -> [[Self::I; 2]; 4];

    /// The bits of the largest magnitude among `x` (whole vectors), as an unsigned integer: a NaN is largest.
    unsafe fn largest_magnitude(self, x: &[f32]) -> u32;
}
