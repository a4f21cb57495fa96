//! Coded keys and values: rotated, 2 to 8 bits each, attended without ever being expanded.
//!
//! ```text
//! rows ── rotate ──► 128 rotated rows ── encode_page ──► Page ─┐
//!                                                               ├─ attend::attend_tile ──► output ── rotate_back
//! query ─ rotate ──► PreparedQuery::prepare ───────────────────┘
//! ```
//!
//! * `rotate`: signs and a Walsh-Hadamard transform, after which a row's values look Gaussian. Rotations keep dot products,
//!   so queries are rotated once, and outputs rotated back once; nothing in between leaves the rotated domain.
//! * `format`, `quantizer`: the levels, and the choice of codes and scale. `block`: interchange with llama.cpp's forks.
//! * `layout`, `page`: the memory of 128 tokens, in the order of integer dot products.
//! * `reference`: the scalar arithmetic of attention over pages. `lanes`, `tile`, `values`: the same in vectors; `turned`: for
//!   keys that lie in a page of values; `matrix`: in products of matrices, where the processor has them.
//!
//! **Arithmetic.** Scores: with the query in 8-bit integers per scale group, integer dot products with the levels; then per
//! token, from the first group to the last, `score = fma(dot, scale * query scale, score)`; then the query's dot product
//! with the mean, in `f64`. Values: the softmax weights times the tokens' scales, in 15 bits relative to the page's
//! largest; integer sums over the page's tokens; then `output = fma(sum, unit, output)`.
//!
//! **Bits.** Integers are exact and the operations on floats have one order per output: scores, weights and outputs over
//! pages have the same bits on every ISA, whatever the number of queries in a call.

mod block;
mod format;
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
mod lanes;
mod layout;
#[cfg(target_arch = "x86_64")]
mod matrix;
mod page;
mod quantizer;
mod query;
mod reference;
mod rotate;
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
mod tile;
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
mod turned;
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
mod values;

pub use block::{BLOCK_LEN, BlockError, BlockType, decode_block, encode_block};
pub use format::CodeFormat;
pub(crate) use format::Levels;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) use lanes::CodeOp;
pub use layout::PageLayout;
pub use page::{Page, PageMut, decode_page, encode_page};
pub use query::PreparedQuery;
pub use rotate::{Groups, rotate, rotate_back};

use crate::attend::Query;

/// Tokens of a page.
pub const PAGE_TOKENS: usize = 128;

/// What a page is read as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// Dot products with queries.
    Keys,
    /// Sums over tokens.
    Values,
    /// Both, where keys and values are one vector up to what the queries carry: laid out as values, coded as keys.
    Shared,
}

/// A value that cannot be coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NonFinite {
    /// The row of the first one.
    pub row: usize,
    /// Its channel in the row.
    pub channel: usize,
}

impl NonFinite {
    fn check(rows: &[f32], head_dim: usize) -> Result<(), Self> {
        // An addition of nothing but zeros, and quick: the search comes only after it fails.
        if rows.iter().all(|x| x.is_finite()) {
            return Ok(());
        }
        let at = rows.iter().position(|x| !x.is_finite()).unwrap_or(0);
        Err(Self { row: at / head_dim, channel: at % head_dim })
    }
}

impl std::fmt::Display for NonFinite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "channel {} of row {} is infinite or not a number and cannot be coded", self.channel, self.row)
    }
}

impl std::error::Error for NonFinite {}

/// Panics unless a page can serve as keys for these queries.
pub(crate) fn check_keys(page: &Page<'_>, head_dim: usize, queries: &[Query<'_>]) {
    assert_eq!((page.layout.side(), page.layout.head_dim()), (Side::Keys, head_dim), "attend: no keys of this width");
    let fit = |query: &Query<'_>| query.prepared.is_some_and(|prepared| prepared.own.fits(page.layout));
    assert!(queries.iter().all(fit), "attend: a query is not prepared for these keys");
}

/// Panics unless the first channels of keys can come from `own` and the others from `values`.
pub(crate) fn check_shared(own: &Page<'_>, values: &Page<'_>, head_dim: usize, queries: &[Query<'_>]) {
    check_keys(own, own.layout.head_dim(), queries);
    check_values(values, head_dim);
    let starts_group = values.layout.scale_groups().any(|group| group.first == own.layout.head_dim());
    assert!(starts_group, "attend: the keys of their own do not end where a group of the values begins");
    let fit = |query: &Query<'_>| {
        query.prepared.and_then(|prepared| prepared.values).is_some_and(|values_query| values_query.fits(values.layout))
    };
    assert!(queries.iter().all(fit), "attend: a query is not prepared for these values");
}

/// Panics unless a page can serve as values.
pub(crate) fn check_values(page: &Page<'_>, head_dim: usize) {
    assert_ne!(page.layout.side(), Side::Keys, "attend: a page of keys as values");
    assert_eq!(page.layout.head_dim(), head_dim, "attend: a page of another width");
}

pub(crate) use tile::key_scores;
pub(crate) use turned::add_key_scores;
pub(crate) use values::add_values;
