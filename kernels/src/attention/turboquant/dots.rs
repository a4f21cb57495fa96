//! Integer dot products of keys with queries, over one scale group.

use std::mem::MaybeUninit;

use super::layout::ScaleGroup;
use super::operands::{ActiveQuery, TokenFloats};
use super::runs::{Keys, Vectors};
use super::side::PAGE_TOKENS;
use super::unpack::{CHUNK, for_chunk, padded};
use crate::attention::query::QUERY_BLOCK;
use crate::simd::levels::LevelLanes;

/// A query's operands of one scale group.
#[derive(Clone, Copy)]
pub(super) struct KeyQuery {
    words: *const i32,
    offset: i32,
    scale: f32,
}

impl KeyQuery {
    /// No query.
    pub const NONE: Self = Self { words: std::ptr::null(), offset: 0, scale: 0.0 };

    #[inline(always)]
    fn new(query: &ActiveQuery<'_>, group: ScaleGroup) -> Self {
        let words = query.words.quads()[group.first / 4..][..group.len / 4].as_ptr();
        Self { words, offset: query.words.offset(group), scale: query.words.scale(group) }
    }

    /// Sets those of the first `count` queries, and of the repeated queries that pad the last part.
    #[inline(always)]
    pub fn set(
        all: &mut [Self; QUERY_BLOCK],
        queries: &[ActiveQuery<'_>; QUERY_BLOCK],
        count: usize,
        group: ScaleGroup,
    ) {
        for (operands, query) in all.iter_mut().zip(&queries[..padded(count)]) {
            *operands = Self::new(query, group);
        }
    }
}

/// One sum per query and token of a page.
pub(super) struct Sums([MaybeUninit<TokenFloats>; QUERY_BLOCK]);

impl Sums {
    /// Uninitialized sums.
    pub const UNINIT: Self = Self([const { MaybeUninit::uninit() }; QUERY_BLOCK]);

    /// Zeros those of `count` queries, and of the repeated queries that pad the last part.
    #[inline(always)]
    pub fn clear(&mut self, count: usize) {
        for row in &mut self.0[..padded(count)] {
            row.write(TokenFloats([0.0; PAGE_TOKENS]));
        }
    }

    /// The sums of query `n` from `token` on.
    #[inline(always)]
    pub fn at(&mut self, n: usize, token: usize) -> *mut f32 {
        self.0[n..].as_mut_ptr().cast::<f32>().wrapping_add(token)
    }

    /// The sums of query `n`.
    ///
    /// # Safety
    /// They were cleared.
    #[inline(always)]
    pub unsafe fn row(&self, n: usize) -> &TokenFloats {
        // SAFETY: the caller says that this row was cleared.
        unsafe { self.0[n].assume_init_ref() }
    }
}

/// Adds a vector of tokens' dot products over a group of `4 * chunks` vectors, times `scale` and the queries' scales,
/// to the queries' sums: one row of `PAGE_TOKENS` per query, the first at `sums`.
///
/// # Safety
/// The caller is inside a function with `L`'s features; `keys` has `chunks` chunks, as do the queries, of which there
/// are `N`; their rows of sums are valid for a vector.
#[inline(always)]
pub(super) unsafe fn add_dots<L: LevelLanes, const N: usize>(
    l: L,
    (keys, chunks): (&impl Vectors<L, Keys>, usize),
    queries: &[KeyQuery],
    scale: L::V,
    sums: *mut f32,
) {
    let queries = &queries[..N];
    // SAFETY: as this function's.
    unsafe {
        // Enough independent sums to hide the latency of a dot product.
        let chains = if N == 1 { 4 } else { 2 };
        let mut dots = [[l.splat_word(0); CHUNK]; N];
        for n in 0..N {
            if L::BIAS != 0 {
                dots[n][0] = l.splat_word(queries[n].offset);
            }
        }
        for chunk in 0..chunks {
            let keys = keys.chunk(chunk);
            for_chunk!(|V| {
                for n in 0..N {
                    let words = queries[n].words.add(chunk * CHUNK);
                    dots[n][V % chains] = l.dot_key(dots[n][V % chains], keys[V], words, V);
                }
            });
        }
        for n in 0..N {
            let mut dot = dots[n][0];
            for other in &dots[n][1..chains] {
                dot = l.add_words(dot, *other);
            }
            let sum = sums.add(n * PAGE_TOKENS);
            l.store(sum, l.fma(l.to_float(dot), l.mul(scale, l.splat(queries[n].scale)), l.load(sum)));
        }
    }
}
