//! Queries, keys and values between their projection and attention: `rows.cpp`.

use super::pages::{Pages, PagesParams, element_number};
use super::{Launch, Params, Span, Unfit, blocks, dimension, optional};
use crate::ElementType;
use crate::turbo::CodeFormat;

/// Heads to be worked on: `(rows, heads, head_dim)` in `x`.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// The projection's result.
    pub x: Span<f32>,
    /// Rows.
    pub rows: usize,
    /// Heads of a row.
    pub heads: usize,
    /// Width: 64, 128, 256 or 512.
    pub head_dim: usize,
}

/// A root-mean-square norm of every head.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorm {
    /// `(head_dim)`, or none.
    pub weight: Option<Span<f32>>,
    /// Added to the mean square.
    pub eps: f32,
}

/// Rotary embedding: see [`crate::rope`].
#[derive(Clone, Copy, Debug)]
pub struct Rotary {
    /// `(rows, pairs)`.
    pub cos: Span<f32>,
    /// `(rows, pairs)`.
    pub sin: Span<f32>,
    /// Rotating pairs.
    pub pairs: usize,
}

/// The order of channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The model's.
    Model,
    /// Where K and V share codes: the channels of so many rotating pairs first.
    Shared(usize),
}

impl Order {
    pub(super) fn pairs(self, head_dim: usize) -> Result<i32, Unfit> {
        match self {
            Self::Model => Ok(0),
            Self::Shared(pairs) if pairs > 0 && 2 * pairs < head_dim => Ok(pairs as i32),
            Self::Shared(pairs) => Err(Unfit(format!("{pairs} rotating pairs do not share a head of {head_dim}"))),
        }
    }
}

/// What rows are kept as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Domain {
    /// As they are.
    Plain,
    /// Rotated: see [`crate::turbo::rotate`].
    Rotated,
}

/// What is done, in this order.
#[derive(Clone, Copy, Debug)]
pub struct Steps {
    /// First.
    pub norm: Option<HeadNorm>,
    /// Second.
    pub rotary: Option<Rotary>,
    /// Third.
    pub order: Order,
    /// `(head_dim)` in that order: multiplies every row.
    pub weight: Option<Span<f32>>,
    /// Last.
    pub domain: Domain,
}

/// A query's bytes against coded keys.
#[derive(Clone, Copy, Debug)]
pub struct Words {
    /// Of the keys.
    pub format: CodeFormat,
    /// `(rows, heads, head_dim / 4)`.
    pub words: Span<u32>,
    /// `(rows, heads, head_dim / 128)`.
    pub scales: Span<f32>,
}

/// Where K or V goes.
#[derive(Clone, Copy, Debug)]
pub struct Destination {
    /// Exact pages.
    pub pages: Pages,
    /// Their elements.
    pub element: ElementType,
    /// `(rows)` of position and end, see [`super::attend::Queries::at`].
    pub at: Span<[i32; 2]>,
    /// `(1)`: becomes the least of itself and the positions of rows that are no numbers, or beyond what the smallest format
    /// holds, 65504, before they are rotated.
    pub fault: Span<u32>,
}

/// Where results go.
#[derive(Clone, Copy, Debug)]
pub struct Results {
    /// Channels that are kept, the first ones.
    pub kept: usize,
    /// `(rows, heads, kept)`.
    pub rows: Option<Span<f32>>,
    /// Of all channels.
    pub words: Option<Words>,
    /// `(heads, 128, kept)` pages.
    pub store: Option<Destination>,
}

/// Parameters of the kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RowsParams {
    x: u64,
    weight: u64,
    cos: u64,
    sin: u64,
    after: u64,
    y: u64,
    words: u64,
    word_scales: u64,
    positions: u64,
    fault: u64,
    pages: PagesParams,
    heads: i32,
    kept: i32,
    normalize: i32,
    pairs: i32,
    shared_pairs: i32,
    rotates: i32,
    element: i32,
    eps: f32,
    unit: f32,
}

// SAFETY: the `Params` of rows.cpp.
unsafe impl Params for RowsParams {}

/// Norm, rotary embedding, order, weight, rotation; then rows, bytes and pages, as asked for.
///
/// # Errors
/// If there is no kernel for the width, or a span is too short.
pub fn rows(heads: &Heads, steps: &Steps, results: &Results) -> Result<Launch<RowsParams>, Unfit> {
    let Heads { x, rows, heads, head_dim } = *heads;
    let kernel = match head_dim {
        64 => "rows_64",
        128 => "rows_128",
        256 => "rows_256",
        512 => "rows_512",
        _ => return Err(Unfit(format!("no kernels for heads of {head_dim}; 64, 128, 256 and 512 have some"))),
    };
    if results.kept == 0 || results.kept > head_dim {
        return Err(Unfit(format!("{} of {head_dim} channels to be kept", results.kept)));
    }
    if results.words.is_some() && (head_dim < 128 || steps.domain == Domain::Plain) {
        return Err(Unfit("bytes are of rotated rows of at least 128".into()));
    }
    let pairs = steps.rotary.map_or(0, |rotary| rotary.pairs);
    if pairs > head_dim / 2 {
        return Err(Unfit(format!("{pairs} rotating pairs of a head of {head_dim}")));
    }
    let all = rows * heads;
    dimension("the rows' size", all * head_dim)?;
    let params = RowsParams {
        x: x.holding("x", all * head_dim)?,
        weight: optional(steps.norm.and_then(|norm| norm.weight), "the norm's weight", head_dim)?,
        cos: optional(steps.rotary.map(|rotary| rotary.cos), "the cosines", rows * pairs)?,
        sin: optional(steps.rotary.map(|rotary| rotary.sin), "the sines", rows * pairs)?,
        after: optional(steps.weight, "the weight", head_dim)?,
        y: optional(results.rows, "the rows", all * results.kept)?,
        words: optional(results.words.map(|words| words.words), "the bytes", all * head_dim / 4)?,
        word_scales: optional(results.words.map(|words| words.scales), "the bytes' scales", all * head_dim / 128)?,
        positions: optional(results.store.map(|store| store.at), "the positions", rows)?,
        fault: results.store.map_or(Ok(0), |store| store.fault.holding_single("the fault", 1))?,
        pages: results.store.map_or(Ok(PagesParams::NONE), |store| store.pages.params())?,
        heads: heads as i32,
        kept: results.kept as i32,
        normalize: steps.norm.is_some().into(),
        pairs: pairs as i32,
        shared_pairs: steps.order.pairs(head_dim)?,
        rotates: (steps.domain == Domain::Rotated).into(),
        element: results.store.map_or(0, |store| element_number(store.element)),
        eps: steps.norm.map_or(0.0, |norm| norm.eps),
        unit: results.words.map_or(0.0, |words| words.format.unit()),
    };
    Ok(Launch {
        kernel,
        grid: [blocks("heads", heads.div_ceil(4))?, blocks("rows", rows)?, 1],
        block: [128, 1, 1],
        params,
    })
}
