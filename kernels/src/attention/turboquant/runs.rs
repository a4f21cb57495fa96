//! Runs of levels as the kernels read them: unpacked at each use, or once for several parts of the queries.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::layout::Run;
use super::page::Page;
use super::unpack::{CHUNK, Unpacker};
use crate::simd::levels::LevelLanes;

/// Vectors of the longest run: of a scale group of 128 channels, or of a page's 128 tokens.
pub(super) const MAX_RUN: usize = 32;

/// What levels plus `BIAS` are prepared for.
pub(super) trait Operand<L: LevelLanes> {
    type Vector: Copy;

    /// Prepares a vector of levels.
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features.
    unsafe fn prepare(l: L, levels: L::I) -> Self::Vector;
}

/// For [`LevelLanes::dot_key`].
pub(super) struct Keys;

/// For [`LevelLanes::dot_value`].
pub(super) struct Values;

impl<L: LevelLanes> Operand<L> for Keys {
    type Vector = L::Key;

    #[inline(always)]
    unsafe fn prepare(l: L, levels: L::I) -> L::Key {
        // SAFETY: the caller entered the features.
        unsafe { l.key(levels) }
    }
}

impl<L: LevelLanes> Operand<L> for Values {
    type Vector = L::Value;

    #[inline(always)]
    unsafe fn prepare(l: L, levels: L::I) -> L::Value {
        // SAFETY: the caller entered the features.
        unsafe { l.value(levels) }
    }
}

/// The vectors of a run, four at a time.
pub(super) trait Vectors<L: LevelLanes, O: Operand<L>> {
    /// Vectors `4 * chunk..`.
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features; the run has this chunk.
    unsafe fn chunk(&self, chunk: usize) -> [O::Vector; CHUNK];
}

/// A run that is unpacked each time it is read.
pub(super) struct PackedRun<'a, L: LevelLanes, const UPPER: usize, const LOWER: usize> {
    unpacker: &'a Unpacker<L, UPPER, LOWER>,
    upper: *const u8,
    lower: *const u8,
}

impl<'a, L: LevelLanes, const UPPER: usize, const LOWER: usize> PackedRun<'a, L, UPPER, LOWER> {
    /// The run of a `strip`, counted from the first one, whose run is `first`, from lane `half * LANES` on.
    ///
    /// # Safety
    /// The page's planes have these bits, and the run exists; `strip_bytes` lie from one strip's run to the next.
    #[inline(always)]
    pub unsafe fn new(
        unpacker: &'a Unpacker<L, UPPER, LOWER>,
        page: &Page<'_>,
        (first, strip_bytes): (Run, (usize, usize)),
        (strip, half): (usize, usize),
    ) -> Self {
        let half = half * 4 * L::LANES;
        // SAFETY: the caller says that the page has this run.
        let upper = unsafe { page.codes.as_ptr().add(first.upper + strip * strip_bytes.0 + half) };
        // Without a lower plane, this may lie outside of the page, and is not read.
        let lower = page.codes.as_ptr().wrapping_add(first.lower + strip * strip_bytes.1 + half);
        Self { unpacker, upper, lower }
    }

    /// The levels of vectors `4 * chunk..`.
    ///
    /// # Safety
    /// As [`Vectors::chunk`].
    #[inline(always)]
    pub unsafe fn levels(&self, chunk: usize) -> [L::I; CHUNK] {
        // SAFETY: the caller entered the features, and the run has this chunk.
        unsafe { self.unpacker.chunk(self.upper, self.lower, chunk) }
    }
}

impl<L: LevelLanes, O: Operand<L>, const UPPER: usize, const LOWER: usize> Vectors<L, O>
    for PackedRun<'_, L, UPPER, LOWER>
{
    #[inline(always)]
    unsafe fn chunk(&self, chunk: usize) -> [O::Vector; CHUNK] {
        // SAFETY: as this function's.
        unsafe {
            let (l, [a, b, c, d]) = (self.unpacker.lanes, self.levels(chunk));
            [O::prepare(l, a), O::prepare(l, b), O::prepare(l, c), O::prepare(l, d)]
        }
    }
}

/// A run that is unpacked once for all parts of the queries. With AVX2, whose parts are four queries, unpacking was
/// 40 % of the instructions: four rows of E2B after 32768 positions take 203 ms instead of 235 (record:
/// `2026-11-29-epyc-zen5-avx2-2vcpu/runs-and-prompts.txt`). AVX-512, with parts of eight, neither gains nor loses, nor
/// do 8 bits, which need no unpacking.
pub(super) struct UnpackedRun<L: LevelLanes, O: Operand<L>>([[MaybeUninit<O::Vector>; CHUNK]; MAX_RUN / CHUNK]);

impl<L: LevelLanes, O: Operand<L>> UnpackedRun<L, O> {
    /// An uninitialized run.
    pub const UNINIT: Self = Self([[MaybeUninit::uninit(); CHUNK]; MAX_RUN / CHUNK]);

    /// Unpacks `chunks` of `run`.
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features; the run has these chunks.
    #[inline(always)]
    pub unsafe fn unpack(&mut self, run: &impl Vectors<L, O>, chunks: Range<usize>) {
        for chunk in chunks {
            // SAFETY: as this function's.
            self.set(chunk, unsafe { run.chunk(chunk) });
        }
    }

    /// Sets vectors `4 * chunk..`.
    #[inline(always)]
    pub fn set(&mut self, chunk: usize, [a, b, c, d]: [O::Vector; CHUNK]) {
        self.0[chunk] = [MaybeUninit::new(a), MaybeUninit::new(b), MaybeUninit::new(c), MaybeUninit::new(d)];
    }
}

impl<L: LevelLanes, O: Operand<L>> Vectors<L, O> for UnpackedRun<L, O> {
    #[inline(always)]
    unsafe fn chunk(&self, chunk: usize) -> [O::Vector; CHUNK] {
        let [a, b, c, d] = self.0[chunk];
        // SAFETY: the caller says that the run has this chunk: it was set.
        unsafe { [a.assume_init(), b.assume_init(), c.assume_init(), d.assume_init()] }
    }
}
