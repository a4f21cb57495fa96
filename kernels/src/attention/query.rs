//! Inputs of attention: a block of keys and values, and the queries that share a KV head.

use std::ops::Range;

use crate::attention::online_softmax::OnlineSoftmax;
use crate::attention::turboquant::page::Page;
use crate::attention::turboquant::query::QuantizedQuery;
use crate::attention::turboquant::side::PAGE_TOKENS;
use crate::element::Elements;

/// Queries that are computed together: they share loads of keys and values.
pub(crate) const QUERY_BLOCK: usize = 32;

/// Keys or values of one KV head.
#[derive(Clone, Copy, Debug)]
pub enum KvRows<'a> {
    /// `(len, head_dim)`, not quantized.
    Exact(Elements<'a>),
    /// A page of 128 quantized rows. Its queries, outputs, and the exact rows of the same store are rotated as well.
    Quantized(Page<'a>),
    /// Keys only, of a layer whose K and V are one vector (`attention_k_eq_v`): the rotary channels from a page
    /// of keys, the others from the page of values.
    KEqV {
        /// Keys of the rotary channels, the first `rotary.layout().head_dim()` ones.
        rotary: Page<'a>,
        /// Values of all channels.
        values: Page<'a>,
    },
}

impl<'a> From<Elements<'a>> for KvRows<'a> {
    fn from(rows: Elements<'a>) -> Self {
        Self::Exact(rows)
    }
}

impl KvRows<'_> {
    pub(super) fn count(&self, head_dim: usize) -> usize {
        match self {
            KvRows::Exact(rows) => {
                assert!(rows.len().is_multiple_of(head_dim), "attend: rows are not (len, head_dim)");
                rows.len() / head_dim
            }
            KvRows::Quantized(_) | KvRows::KEqV { .. } => PAGE_TOKENS,
        }
    }
}

/// Consecutive keys and values of one KV head, equally many; exact keys may have quantized values and vice versa.
#[derive(Clone, Copy, Debug)]
pub struct KvBlock<'a> {
    /// Keys after norm and rotary embedding.
    pub keys: KvRows<'a>,
    /// Values, all finite: a query may multiply those that it does not see by a weight of 0.
    pub values: KvRows<'a>,
    /// Width of a row.
    pub head_dim: usize,
}

/// A query row: the keys of the block that it sees, and its partial result.
pub struct Query<'a> {
    /// `(head_dim)`; scores are plain dot products (Gemma 4's attention scale is 1).
    pub query: &'a [f32],
    /// The same row in 8 bits, for quantized keys; `None` if all keys are exact.
    pub quantized: Option<QuantizedQuery<'a>>,
    /// The keys of the block that this row attends.
    pub visible: Range<usize>,
    /// Maximum and sum over the keys seen so far.
    pub softmax: &'a mut OnlineSoftmax,
    /// `(head_dim)`: the weighted sum over the keys seen so far, not normalised.
    pub output: &'a mut [f32],
}

/// Scratch memory of one call of [`super::attend_block`]: at least [`Scratch::len`] entries each; previous contents are
/// ignored.
pub struct Scratch<'a> {
    /// `(QUERY_BLOCK, len)` scores.
    pub scores: &'a mut [f64],
    /// `(QUERY_BLOCK, len)` softmax weights.
    pub weights: &'a mut [f32],
}

impl Scratch<'_> {
    /// Entries needed for blocks of `len` keys.
    pub const fn len(len: usize) -> usize {
        QUERY_BLOCK * len
    }
}
