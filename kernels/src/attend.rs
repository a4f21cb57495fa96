//! One tile of attention: a run of keys and values of one KV head, against the query rows that share it.
//!
//! The caller walks a query's keys in fixed tiles and merges them with the running softmax of [`Running`] (Milakov and
//! Gimelshein, 2018), so that a row's bits depend on its own keys and on where the tiles lie, and on nothing else.
//!
//! Scores are `f64`: lanes accumulate in `f32`, and are added up in `f64`. Gemma 4 does not scale its dot products, so
//! scores reach the hundreds, where half a unit in an `f32`'s last place is an error of 1e-5 in every weight, which
//! the layers that follow amplify. The wider sum costs nothing that can be measured.

use std::ops::Range;

use crate::lanes::{Element, Lanes, Op, prefetch};
use crate::softmax::Softmax;
use crate::turbo::{self, PAGE_TOKENS, Page, PreparedQuery};
use crate::{Elements, Isa};

pub use crate::softmax::{Running, finish, merge};

/// Keys or values of one KV head.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// `(len, head_dim)`, as they are.
    Exact(Elements<'a>),
    /// 128 rows in codes. Everything of such a store is rotated: queries, outputs, and the exact rows beside it.
    Coded(Page<'a>),
    /// Keys only: the first channels from keys of their own, the others from a page of values.
    Shared {
        /// Keys of the first channels, as many as they are wide.
        own: Page<'a>,
        /// Values of all channels.
        values: Page<'a>,
    },
}

impl<'a> From<Elements<'a>> for Rows<'a> {
    fn from(rows: Elements<'a>) -> Self {
        Self::Exact(rows)
    }
}

impl Rows<'_> {
    fn count(&self, head_dim: usize) -> usize {
        match self {
            Rows::Exact(rows) => {
                assert!(rows.len().is_multiple_of(head_dim), "attend: not whole rows");
                rows.len() / head_dim
            }
            Rows::Coded(_) | Rows::Shared { .. } => PAGE_TOKENS,
        }
    }
}

/// A run of keys and values of one KV head, as many of each; exact and coded rows go together.
#[derive(Clone, Copy, Debug)]
pub struct KvTile<'a> {
    /// Keys after norm and rotary embedding.
    pub keys: Rows<'a>,
    /// Values.
    pub values: Rows<'a>,
    /// Width of a row.
    pub head_dim: usize,
}

/// A query row's state: which keys of the tile it sees, and where its result is built.
pub struct Query<'a> {
    /// `(head_dim)`; scores are plain dot products (Gemma 4's attention scale is 1).
    pub query: &'a [f32],
    /// The same row for coded keys; exact ones do without.
    pub prepared: Option<PreparedQuery<'a>>,
    /// The keys of the tile that this row attends.
    pub visible: Range<usize>,
    /// Its softmax.
    pub running: &'a mut Running,
    /// `(head_dim)`: its unnormalised result.
    pub output: &'a mut [f32],
}

/// Room for one call of [`attend_tile`]: at least [`Scratch::len`] entries each, of any value.
pub struct Scratch<'a> {
    /// Scores of the queries that share a pass.
    pub scores: &'a mut [f64],
    /// Their weights.
    pub weights: &'a mut [f32],
}

impl Scratch<'_> {
    /// Entries needed for tiles of `len` keys.
    pub const fn len(len: usize) -> usize {
        SHARE * len
    }
}

/// Adds a tile's keys to every query's running attention.
///
/// # Panics
/// If a length does not fit, a query sees keys outside the tile, or is not prepared for coded keys.
pub fn attend_tile(isa: Isa, tile: KvTile<'_>, queries: &mut [Query<'_>], scratch: &mut Scratch<'_>) {
    let KvTile { keys, values, head_dim } = tile;
    let len = keys.count(head_dim);
    assert_eq!(len, values.count(head_dim), "attend: keys and values differ in length");
    let Scratch { scores, weights } = scratch;
    assert!(scores.len().min(weights.len()) >= Scratch::len(len), "attend: too little scratch");
    for q in queries.iter() {
        assert!(q.query.len() == head_dim && q.output.len() == head_dim, "attend: not (head_dim)");
        assert!(q.visible.end <= len, "attend: a query sees keys outside the tile");
    }
    match &keys {
        Rows::Exact(_) => {}
        Rows::Coded(page) => turbo::check_keys(page, head_dim, queries),
        Rows::Shared { own, values } => turbo::check_shared(own, values, head_dim, queries),
    }
    match &values {
        Rows::Exact(_) => {}
        Rows::Coded(page) => turbo::check_values(page, head_dim),
        Rows::Shared { .. } => panic!("attend: shared rows are keys"),
    }
    for queries in queries.chunks_mut(SHARE) {
        let (mut first, mut last) = (len, 0);
        for query in queries.iter().filter(|query| !query.visible.is_empty()) {
            first = first.min(query.visible.start);
            last = last.max(query.visible.end);
        }
        if first >= last {
            continue;
        }
        let range = first..last;
        match keys {
            Rows::Coded(page) => turbo::key_scores(isa, &page, queries, range.clone(), scores),
            Rows::Shared { own, values } => {
                turbo::key_scores(isa, &own, queries, range.clone(), scores);
                turbo::add_key_scores(isa, &values, own.layout().head_dim(), queries, range.clone(), scores);
            }
            Rows::Exact(Elements::F32(k)) => isa.run(Scores { k, head_dim, queries, range: range.clone(), scores }),
            Rows::Exact(Elements::F16(k)) => isa.run(Scores { k, head_dim, queries, range: range.clone(), scores }),
            Rows::Exact(Elements::Bf16(k)) => isa.run(Scores { k, head_dim, queries, range: range.clone(), scores }),
        }
        // Values in codes meet the weights of whole pages.
        let weighed = if matches!(values, Rows::Coded(_)) { 0..len } else { range.clone() };
        isa.run(Softmax { len, queries, range: weighed, scores, weights });
        match values {
            Rows::Coded(page) => turbo::add_values(isa, &page, queries, range, weights),
            Rows::Shared { .. } => {}
            Rows::Exact(Elements::F32(v)) => isa.run(Values { v, head_dim, queries, range, weights }),
            Rows::Exact(Elements::F16(v)) => isa.run(Values { v, head_dim, queries, range, weights }),
            Rows::Exact(Elements::Bf16(v)) => isa.run(Values { v, head_dim, queries, range, weights }),
        }
    }
}

/// Queries that share a softmax pass, and a coded key or value.
pub(crate) const SHARE: usize = 32;

/// How many keys (values) ahead of the ones in use the next are asked for. Without it one row at 32768 positions of E2B, f16,
/// took 202 ms instead of 182.
const AHEAD: usize = 8;

struct Scores<'a, 'q, K> {
    k: &'a [K],
    head_dim: usize,
    queries: &'a [Query<'q>],
    range: Range<usize>,
    scores: &'a mut [f64],
}

impl<K: Element> Op for Scores<'_, '_, K> {
    type Output = ();

    #[inline(always)]
    fn eval<L: Lanes>(self, l: L) {
        let Self { k, head_dim, queries, range, scores } = self;
        let len = k.len() / head_dim;
        let mut done = 0;
        while done < queries.len() {
            let (queries, scores) = (&queries[done..], &mut scores[done * len..]);
            let keys = Keys { k, head_dim, range: range.clone() };
            // SAFETY: `run` entered the features; `attend_tile` checked every length and range.
            done += unsafe {
                match queries.len() {
                    8.. if L::LANES == 16 => keys.score::<L, 8, 2>(l, queries, scores),
                    // With 16 registers, four queries by two keys leave room for operands.
                    4.. if L::LANES == 8 => keys.score::<L, 4, 2>(l, queries, scores),
                    4.. => keys.score::<L, 4, 4>(l, queries, scores),
                    _ => keys.score::<L, 1, 4>(l, queries, scores),
                }
            };
        }
    }
}

struct Values<'a, 'q, V> {
    v: &'a [V],
    head_dim: usize,
    queries: &'a mut [Query<'q>],
    range: Range<usize>,
    weights: &'a [f32],
}

impl<V: Element> Op for Values<'_, '_, V> {
    type Output = ();

    #[inline(always)]
    fn eval<L: Lanes>(self, l: L) {
        let Self { v, head_dim, queries, range, weights } = self;
        let len = v.len() / head_dim;
        let mut done = 0;
        while done < queries.len() {
            let (queries, weights) = (&mut queries[done..], &weights[done * len..]);
            let values = Summands { v, head_dim, range: range.clone() };
            // SAFETY: `run` entered the features; `attend_tile` checked every length and range.
            done += unsafe {
                match queries.len() {
                    8.. if L::LANES == 16 => values.add::<L, 8, 2>(l, queries, weights),
                    4.. if L::LANES == 8 => values.add::<L, 4, 2>(l, queries, weights),
                    4.. => values.add::<L, 4, 4>(l, queries, weights),
                    _ => values.add::<L, 1, 4>(l, queries, weights),
                }
            };
        }
    }
}

/// The keys of a tile that some query sees.
struct Keys<'a, K> {
    k: &'a [K],
    head_dim: usize,
    range: Range<usize>,
}

impl<K: Element> Keys<'_, K> {
    /// `scores[n][j] = q[n] . k[j]` for the first `N` queries, `J` keys at a time: `N * J` sums run side by side. Returns `N`.
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features; the first `N` queries are `head_dim` long, and `range` lies in the
    /// tile.
    #[inline(always)]
    unsafe fn score<L: Lanes, const N: usize, const J: usize>(
        &self,
        l: L,
        queries: &[Query<'_>],
        scores: &mut [f64],
    ) -> usize {
        let mut q = [std::ptr::null(); N];
        for (q, query) in q.iter_mut().zip(queries) {
            *q = query.query.as_ptr();
        }
        let mut j = self.range.start;
        // SAFETY: as the caller's.
        unsafe {
            while j + J <= self.range.end {
                self.score_some::<L, N, J>(l, q, j, scores);
                j += J;
            }
            while j < self.range.end {
                self.score_some::<L, N, 1>(l, q, j, scores);
                j += 1;
            }
        }
        N
    }

    /// The scores of the `J` keys from `first` on.
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features; `q` are `N` queries, `head_dim` long, and there are `J` keys from
    /// `first` on.
    #[inline(always)]
    unsafe fn score_some<L: Lanes, const N: usize, const J: usize>(
        &self,
        l: L,
        q: [*const f32; N],
        first: usize,
        scores: &mut [f64],
    ) {
        let (head_dim, len) = (self.head_dim, self.k.len() / self.head_dim);
        let whole = head_dim - head_dim % L::LANES;
        // SAFETY: the queries are `head_dim` long, and so are `J` keys from `first` on.
        unsafe {
            let k = self.k.as_ptr().add(first * head_dim);
            let mut acc = [[l.splat(0.0); J]; N];
            let mut keys = [l.splat(0.0); J];
            for i in (0..whole).step_by(L::LANES) {
                for (j, key) in keys.iter_mut().enumerate() {
                    let at = k.add(j * head_dim + i);
                    prefetch(at.wrapping_add(AHEAD * head_dim).cast());
                    *key = K::load(l, at);
                }
                for (acc, q) in acc.iter_mut().zip(q) {
                    let q = l.load(q.add(i));
                    for (acc, key) in acc.iter_mut().zip(keys) {
                        *acc = l.fma(q, key, *acc);
                    }
                }
            }
            let tail = head_dim - whole;
            if tail > 0 {
                for (j, key) in keys.iter_mut().enumerate() {
                    *key = K::load_part(l, k.add(j * head_dim + whole), tail);
                }
                for (acc, q) in acc.iter_mut().zip(q) {
                    let q = l.load_part(q.add(whole), tail);
                    for (acc, key) in acc.iter_mut().zip(keys) {
                        *acc = l.fma(q, key, *acc);
                    }
                }
            }
            for (n, acc) in acc.into_iter().enumerate() {
                for (j, acc) in acc.into_iter().enumerate() {
                    scores[n * len + first + j] = l.sum_f64(acc);
                }
            }
        }
    }
}

/// The values of a tile that some query sees.
struct Summands<'a, V> {
    v: &'a [V],
    head_dim: usize,
    range: Range<usize>,
}

impl<V: Element> Summands<'_, V> {
    /// `output[n] += sum_j weights[n][j] * v[j]` for the first `N` queries, in strips of `S` vectors: `N * S` accumulators
    /// stay in registers over all keys of the tile. Returns `N`.
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features; the outputs of the first `N` queries are `head_dim` long, and
    /// `range` lies in the tile.
    #[inline(always)]
    unsafe fn add<L: Lanes, const N: usize, const S: usize>(
        &self,
        l: L,
        queries: &mut [Query<'_>],
        weights: &[f32],
    ) -> usize {
        let (head_dim, len) = (self.head_dim, self.v.len() / self.head_dim);
        assert!(weights.len() >= N * len, "attend: too few weights");
        let mut out = [std::ptr::null_mut(); N];
        for (out, query) in out.iter_mut().zip(queries) {
            *out = query.output.as_mut_ptr();
        }
        let whole = head_dim - head_dim % L::LANES;
        let (v, weights) = (self.v.as_ptr(), weights.as_ptr());
        let mut i = 0;
        // SAFETY: the outputs are `head_dim` long, `range` is inside the tile, and there are weights of `N` queries.
        unsafe {
            while i + S * L::LANES <= whole {
                let mut acc = [[l.splat(0.0); S]; N];
                for (acc, out) in acc.iter_mut().zip(out) {
                    for (s, acc) in acc.iter_mut().enumerate() {
                        *acc = l.load(out.add(i + s * L::LANES));
                    }
                }
                let mut values = [l.splat(0.0); S];
                for j in self.range.clone() {
                    for (s, value) in values.iter_mut().enumerate() {
                        let at = v.add(j * head_dim + i + s * L::LANES);
                        prefetch(at.wrapping_add(AHEAD * head_dim).cast());
                        *value = V::load(l, at);
                    }
                    for (n, acc) in acc.iter_mut().enumerate() {
                        let weight = l.splat(*weights.add(n * len + j));
                        for (acc, v) in acc.iter_mut().zip(values) {
                            *acc = l.fma(weight, v, *acc);
                        }
                    }
                }
                for (out, acc) in out.into_iter().zip(acc) {
                    for (s, acc) in acc.into_iter().enumerate() {
                        l.store(out.add(i + s * L::LANES), acc);
                    }
                }
                i += S * L::LANES;
            }
            while i < head_dim {
                let width = L::LANES.min(head_dim - i);
                let part = width < L::LANES;
                for (n, out) in out.into_iter().enumerate() {
                    let mut acc = if part { l.load_part(out.add(i), width) } else { l.load(out.add(i)) };
                    for j in self.range.clone() {
                        let at = v.add(j * head_dim + i);
                        let v = if part { V::load_part(l, at, width) } else { V::load(l, at) };
                        acc = l.fma(l.splat(*weights.add(n * len + j)), v, acc);
                    }
                    if part {
                        l.store_part(out.add(i), acc, width);
                    } else {
                        l.store(out.add(i), acc);
                    }
                }
                i += width;
            }
        }
        N
    }
}
