//! The integer vector operations of attention over quantized pages, on top of [`Lanes`] and [`Words`].

use crate::simd::float::Lanes;
use crate::simd::words::Words;

/// An operation written once for all level lanes; `dispatch.rs` evaluates it inside the instruction set's features.
pub(crate) trait LevelOp {
    /// Must be `#[inline(always)]`, so that the intrinsics are compiled with the features.
    fn eval<L: LevelLanes>(self, lanes: L);
}

/// Operations of attention over quantized pages. Every method is `#[inline(always)]`.
///
/// # Safety
/// As [`Words`].
pub(crate) trait LevelLanes: Lanes + Words {
    /// Queries whose sums the registers hold: 4 or 8.
    const QUERIES: usize;
    /// Added to levels: 128 where the dot product takes one operand unsigned, else 0. The caller subtracts `BIAS` times
    /// the sum of the other operand.
    const BIAS: u8;
    /// A lookup table of 64 bytes.
    type Table: Copy;
    /// Levels prepared for [`LevelLanes::dot_key`], once for several queries.
    type Key: Copy;
    /// Levels prepared for [`LevelLanes::dot_value`], once for several queries.
    type Value: Copy;

    /// Bitwise `a ^ b`.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn xor(self, a: Self::I, b: Self::I) -> Self::I;
    /// Shifts words right by `by` in -31..=31. The bits shifted in are unspecified.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn shift_right(self, a: Self::I, by: i32) -> Self::I;
    /// Bits of `a` where `mask` is one, of `b` where it is zero.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn select(self, mask: Self::I, a: Self::I, b: Self::I) -> Self::I;

    /// Prepares a table for [`LevelLanes::lookup`].
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn table(self, bytes: &[u8; 64]) -> Self::Table;
    /// Replaces bytes by the table entries at their lower six bits, of which only the lower `BITS` select distinct
    /// entries.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn lookup<const BITS: usize>(self, table: Self::Table, index: Self::I) -> Self::I;

    /// Prepares levels plus `BIAS`.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn key(self, levels: Self::I) -> Self::Key;
    /// Adds to each word the dot product of its four levels and the four signed bytes of word `v` (0 to 3) at `query`.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn dot_key(self, sum: Self::I, key: Self::Key, query: *const i32, v: usize) -> Self::I;
    /// Prepares levels plus `BIAS`.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn value(self, levels: Self::I) -> Self::Value;
    /// Adds to each word's sum, kept in two parts, the dot product of its four levels and the weights of four tokens:
    /// pair `v` of the four pairs of words at `weights`.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn dot_value(self, sums: [Self::I; 2], value: Self::Value, weights: *const i32, v: usize) -> [Self::I; 2];
    /// The sums: what [`LevelLanes::dot_value`] added, plus `offset`.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn join(self, sums: [Self::I; 2], offset: i32) -> Self::I;
    /// Writes `LANES` weights within `WEIGHT_MAX`, rounded to nearest, ties to even, two words per four of them;
    /// returns the integers.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn store_weights(self, to: *mut i32, weights: Self::V) -> Self::I;
    /// The sum of the words.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn sum_words(self, a: Self::I) -> i32;

    /// Transposes four vectors of 16 channels by four tokens each into four vectors of 16 tokens by four channels each.
    /// If a vector has 8 lanes, each comes in two halves; else the second half is ignored.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn transpose(self, vectors: [[Self::I; 4]; 2]) -> [[Self::I; 2]; 4];
}
