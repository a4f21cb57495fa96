//! Queries, keys and values between projection and attention: norm, rotary embedding, rotation, storage. `rows.cpp`.

use super::pages::{Pages, PagesParams, element_number, of_head_dim};
use super::segments::{Place, Segments};
use super::turboquant;
use crate::launch::{DeviceSlice, Launch, LaunchError, Params, blocks, dimension, optional};
use foretoken_kernels::ElementType;
use foretoken_kernels::attention::turboquant::{CodeFormat, PageLayout, RotationGroups, Side};
pub use foretoken_kernels::rope::Pairing;

/// Heads to process: `x` is `(rows, heads, stride)`, of which the first `head_dim` are read.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// The projection's result.
    pub x: DeviceSlice<f32>,
    /// Rows.
    pub rows: usize,
    /// Heads of a row.
    pub heads: usize,
    /// Width: 32, 64, 128, 256 or 512.
    pub head_dim: usize,
    /// Elements from one head to the next: `head_dim`, or more where a projection interleaves heads
    /// with something else.
    pub stride: usize,
}

/// RMS norm of every head.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorm {
    /// `(head_dim)`; `None` for no weight.
    pub weight: Option<DeviceSlice<f32>>,
    /// Added to the mean square.
    pub eps: f32,
}

/// Rotary embedding: see [`foretoken_kernels::rope`].
#[derive(Clone, Copy, Debug)]
pub struct Rotary {
    /// `(rows, pairs)`.
    pub cos: DeviceSlice<f32>,
    /// `(rows, pairs)`.
    pub sin: DeviceSlice<f32>,
    /// Rotary pairs.
    pub pairs: usize,
    /// Which channels form a pair.
    pub pairing: Pairing,
}

/// Whether there is a kernel for `pairs` pairs: at most 64 of leading channels, a multiple of 4.
pub fn has_pairing(pairing: Pairing, pairs: usize) -> bool {
    pairing == Pairing::Head || pairs <= 64 && pairs.is_multiple_of(4)
}

impl Rotary {
    /// Channels from the first of a pair to the second.
    fn stride(&self, head_dim: usize) -> Result<usize, LaunchError> {
        let Self { pairs, pairing, .. } = *self;
        if pairs > head_dim / 2 {
            let most = "at most head_dim / 2 are possible";
            return Err(LaunchError(format!("{pairs} rotary pairs in a head of {head_dim}; {most}")));
        }
        match pairing {
            Pairing::Head => Ok(head_dim / 2),
            Pairing::Leading if has_pairing(pairing, pairs) => Ok(pairs),
            Pairing::Leading => {
                Err(LaunchError(format!("{pairs} leading rotary pairs; supported are multiples of 4 up to 64")))
            }
        }
    }
}

/// The order of a head's channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The model's.
    Model,
    /// For `attention_k_eq_v`: the channels of this many rotary pairs first.
    RotaryFirst(usize),
}

impl Order {
    pub(super) fn pairs(self, head_dim: usize) -> Result<i32, LaunchError> {
        match self {
            Self::Model => Ok(0),
            Self::RotaryFirst(pairs) if pairs > 0 && 2 * pairs < head_dim => Ok(pairs as i32),
            Self::RotaryFirst(pairs) => Err(LaunchError(format!(
                "{pairs} rotary pairs first in a head of {head_dim}; supported: 1 to head_dim / 2 - 1"
            ))),
        }
    }
}

/// The domain of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Domain {
    /// Not rotated.
    Unrotated,
    /// Rotated by [`foretoken_kernels::attention::turboquant::rotate`].
    Rotated,
}

/// The steps, in this order; `None` skips a step.
#[derive(Clone, Copy, Debug)]
pub struct Steps {
    /// 1.
    pub norm: Option<HeadNorm>,
    /// 2.
    pub rotary: Option<Rotary>,
    /// 3.
    pub order: Order,
    /// 4. `(head_dim)` in that order: multiplies every row.
    pub weight: Option<DeviceSlice<f32>>,
    /// 5.
    pub domain: Domain,
}

/// Queries in 8 bits, for quantized keys.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedQueries {
    /// The keys' format.
    pub format: CodeFormat,
    /// `(rows, heads, head_dim / 4)`.
    pub words: DeviceSlice<u32>,
    /// `(rows, heads, scale groups)`: one per 128 channels or per narrower head, one per 32 for `q4_0` and `q8_0`.
    pub scales: DeviceSlice<f32>,
}

impl QuantizedQueries {
    /// The layout of keys of the queries' width.
    fn layout(&self, head_dim: usize) -> Result<PageLayout, LaunchError> {
        let groups = RotationGroups::of(head_dim);
        let groups = groups.ok_or_else(|| LaunchError(format!("8-bit queries of {head_dim} channels")))?;
        Ok(PageLayout::new(self.format, Side::Keys, groups))
    }
}

/// The pages that K or V is stored to.
#[derive(Clone, Copy, Debug)]
pub struct KvDestination {
    /// Exact pages.
    pub pages: Pages,
    /// Their element type.
    pub element: ElementType,
    /// `(rows)`.
    pub places: DeviceSlice<Place>,
    /// The sequences that own the pages.
    pub segments: Segments,
    /// `(1)`: atomicMin with the positions of rows that, as stored, have a NaN, an infinity, or a magnitude above f16's
    /// largest, 65504.
    pub fault: DeviceSlice<u32>,
}

/// The results.
#[derive(Clone, Copy, Debug)]
pub struct Results {
    /// Channels that are stored, the first ones.
    pub channels: usize,
    /// `(rows, heads, channels)`.
    pub rows: Option<DeviceSlice<f32>>,
    /// Queries in 8 bits, of all channels.
    pub quantized: Option<QuantizedQueries>,
    /// Pages `(heads, 128, channels)`.
    pub store: Option<KvDestination>,
}

/// Projections of one launch, at most.
pub(super) const MAX_PROJECTIONS: usize = 3;

/// Parameters of the kernel: up to three projections with the same rows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RowsParams {
    pub(super) of: [HeadsParams; MAX_PROJECTIONS],
}

// SAFETY: the `Params` of rows.cpp.
unsafe impl Params for RowsParams {}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct HeadsParams {
    x: u64,
    weight: u64,
    cos: u64,
    sin: u64,
    after: u64,
    y: u64,
    words: u64,
    word_scales: u64,
    places: u64,
    segments: u64,
    fault: u64,
    pages: PagesParams,
    heads: i32,
    stride: i32,
    channels: i32,
    normalize: i32,
    pairs: i32,
    pair_stride: i32,
    k_eq_v_pairs: i32,
    rotates: i32,
    element: i32,
    scale_shift: i32,
    eps: f32,
    unit: f32,
}

/// Norm, rotary embedding, order, weight, rotation; then writes the given results.
///
/// # Errors
/// If there is no kernel for the width, or a slice is too short.
pub fn rows(heads: &Heads, steps: &Steps, results: &Results) -> Result<Launch<RowsParams>, LaunchError> {
    let Heads { x, rows, heads, head_dim, stride } = *heads;
    let kernel = of_head_dim!("rows", head_dim)?;
    if results.channels == 0 || results.channels > head_dim {
        return Err(LaunchError(format!("cannot store {} of {head_dim} channels", results.channels)));
    }
    if results.quantized.is_some() && steps.domain == Domain::Unrotated {
        return Err(LaunchError("8-bit queries require rotated rows".into()));
    }
    let keys = results.quantized.map(|queries| queries.layout(head_dim)).transpose()?;
    let pairs = steps.rotary.map_or(0, |rotary| rotary.pairs);
    let pair_stride = steps.rotary.map_or(Ok(0), |rotary| rotary.stride(head_dim))?;
    if stride < head_dim {
        return Err(LaunchError(format!("heads of {head_dim} that are {stride} apart")));
    }
    let all = rows * heads;
    dimension("the rows' size", all * stride)?;
    let params = HeadsParams {
        x: x.checked("x", all.saturating_sub(1) * stride + head_dim)?,
        weight: optional(steps.norm.and_then(|norm| norm.weight), "the norm's weight", head_dim)?,
        cos: optional(steps.rotary.map(|rotary| rotary.cos), "the cosines", rows * pairs)?,
        sin: optional(steps.rotary.map(|rotary| rotary.sin), "the sines", rows * pairs)?,
        after: optional(steps.weight, "the weight", head_dim)?,
        y: optional(results.rows, "the rows", all * results.channels)?,
        words: optional(results.quantized.map(|queries| queries.words), "the quantized queries", all * head_dim / 4)?,
        word_scales: optional(
            results.quantized.map(|queries| queries.scales),
            "the quantized queries' scales",
            keys.map_or(0, |keys| all * head_dim / turboquant::scale_group(keys)),
        )?,
        places: optional(results.store.map(|store| store.places), "the places", rows)?,
        segments: results.store.map_or(Ok(0), |store| store.segments.address())?,
        fault: results.store.map_or(Ok(0), |store| store.fault.checked_unaligned("the fault", 1))?,
        pages: results.store.map_or(Ok(PagesParams::NONE), |store| store.pages.params())?,
        heads: heads as i32,
        stride: stride as i32,
        channels: results.channels as i32,
        normalize: steps.norm.is_some().into(),
        pairs: pairs as i32,
        pair_stride: pair_stride as i32,
        k_eq_v_pairs: steps.order.pairs(head_dim)?,
        rotates: (steps.domain == Domain::Rotated).into(),
        element: results.store.map_or(0, |store| element_number(store.element)),
        scale_shift: keys.map_or(0, turboquant::scale_shift),
        eps: steps.norm.map_or(0.0, |norm| norm.eps),
        unit: results.quantized.map_or(0.0, |queries| queries.format.unit()),
    };
    Ok(Launch {
        kernel,
        grid: [blocks("heads", heads.div_ceil(4))?, blocks("rows", rows)?, 1],
        threads: 128,
        shared: 0,
        params: RowsParams { of: [params; MAX_PROJECTIONS] },
    })
}
