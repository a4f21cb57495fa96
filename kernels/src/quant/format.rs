//! The packed formats over byte lanes: how each gives its weights as unsigned bytes, and its scales as vectors.
//!
//! Offsets are those of [`super::pack`]: a GGUF field at byte `o` starts at `16 o`. `lane` is the first of the panel's
//! rows that the vectors hold: always 0 with 16 lanes, 0 or 8 with 8.

use super::WeightType;
use super::block::IQ4_NL_LEVELS;
use super::lanes::{ByteLanes, Bytes};
use half::f16;

/// Bytes of a packed group of four inputs.
pub(super) const GROUP_BYTES: usize = 64;

/// A block's scales, for the rows that one vector holds.
pub(super) struct Header<L: ByteLanes> {
    /// Per group of weights: block scale times group scale, and what [`Format::weights`] leaves to be divided by.
    pub scales: [L::V; 16],
    /// The groups' minima as pairs of `i16`, in the order of the activations' pairs.
    pub minima: [L::I; 8],
    /// What multiplies the minima's part: minus `dmin`, or `m`.
    pub minimum: L::V,
}

impl<L: ByteLanes> Header<L> {
    /// One to be filled, block by block, by [`Format::header`].
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features.
    #[inline(always)]
    pub unsafe fn empty(l: L) -> Self {
        // SAFETY: as the caller's.
        unsafe { Self { scales: [l.splat(0.0); 16], minima: [l.zero(); 8], minimum: l.splat(0.0) } }
    }
}

/// A packed format. `SCALED` is the number of inputs that share a scale, in groups of four: 8 or 4.
///
/// # Safety
/// All functions are unsafe for one reason: they must run inside the features' function, with `block` pointing at a
/// packed block of this format.
pub(super) trait Format {
    const TYPE: WeightType;
    /// Groups of four inputs per scale.
    const SCALED: usize;
    /// By how much to shift the activations' offsets for the weights' own; `None` for unsigned weights.
    const OFFSET: Option<u32>;
    /// What [`Format::weights`] gives.
    const BYTES: Bytes;
    /// Scales in a block: 1, 8 or 16.
    const SCALES: usize = Self::TYPE.block_len() / 4 / Self::SCALED;
    /// Number of pairs of minima.
    const PAIRS: usize = 0;
    /// Whether blocks of 32 have a minimum.
    const MINIMUM: bool = false;
    /// Where scale `s` finds its weights.
    type Cursor<L: ByteLanes>: Copy;

    unsafe fn header<L: ByteLanes>(l: L, block: *const u8, lane: usize, header: &mut Header<L>);
    unsafe fn cursor<L: ByteLanes>(l: L, block: *const u8, lane: usize, s: usize) -> Self::Cursor<L>;
    /// Group `g` of scale `s`: four unsigned bytes per lane.
    unsafe fn weights<L: ByteLanes>(l: L, cursor: Self::Cursor<L>, g: usize) -> L::I;
}

/// # Safety
/// The caller is inside a function with `L`'s features; `block` is a packed block with `f16` scales at byte `offset` of a row,
/// `lane` one of its rows.
#[inline(always)]
unsafe fn halves<L: ByteLanes>(l: L, block: *const u8, offset: usize, lane: usize) -> L::V {
    // SAFETY: the caller names a field of `f16` scales; byte lanes are vectors, which load from any address.
    unsafe { l.load_f16(block.add(16 * offset + 2 * lane).cast::<f16>()) }
}

/// # Safety
/// The caller is inside a function with `L`'s features; `block` is a packed block with units of 4 bytes at byte `offset` of a
/// row, `lane` one of its rows.
#[inline(always)]
unsafe fn words<L: ByteLanes>(l: L, block: *const u8, offset: usize, lane: usize) -> L::I {
    // SAFETY: the caller names a field of words.
    unsafe { l.load_words(block.add(16 * offset + 4 * lane)) }
}

/// Bits `mask` of bytes, that lie `up` bits higher, in one plane of weights.
///
/// Where the dot product takes all bytes they stay where they are and the scale is divided by `2^up`, which is exact and
/// saves the shift.
#[derive(Clone, Copy)]
pub(super) struct Plane<L: ByteLanes> {
    from: *const u8,
    mask: L::I,
    up: i32,
}

impl<L: ByteLanes> Plane<L> {
    /// # Safety
    /// The caller is inside a function with `L`'s features.
    #[inline(always)]
    unsafe fn new(l: L, from: *const u8, mask: i32, up: i32) -> Self {
        // SAFETY: as the caller's.
        unsafe { Self { from, mask: l.splat_word(if L::ALL_BYTES { mask << up } else { mask }), up } }
    }

    /// What the scale of such weights is multiplied by.
    #[inline(always)]
    fn factor(up: usize) -> f32 {
        if L::ALL_BYTES { 1.0 / (1u32 << up) as f32 } else { 1.0 }
    }

    /// # Safety
    /// The caller is inside a function with `L`'s features; the plane has a group `g`.
    #[inline(always)]
    unsafe fn weights(self, l: L, g: usize) -> L::I {
        // SAFETY: the plane has a group `g`.
        unsafe {
            let bytes = l.load_words(self.from.add(g * GROUP_BYTES));
            l.and(if L::ALL_BYTES { bytes } else { l.shift_bytes(bytes, -self.up) }, self.mask)
        }
    }
}

/// Weights in two planes: `(low >> down) & low_mask | shift(high, high_up) & high_mask`.
#[derive(Clone, Copy)]
pub(super) struct Planes<L: ByteLanes> {
    low: *const u8,
    low_mask: L::I,
    down: i32,
    high: *const u8,
    high_mask: L::I,
    high_up: i32,
}

impl<L: ByteLanes> Planes<L> {
    /// # Safety
    /// The caller is inside a function with `L`'s features; the planes have a group `g`.
    #[inline(always)]
    unsafe fn weights(self, l: L, g: usize) -> L::I {
        // SAFETY: the planes have a group `g`.
        unsafe {
            let low = l.load_words(self.low.add(g * GROUP_BYTES));
            let high = l.load_words(self.high.add(g * GROUP_BYTES));
            let low = l.and(l.shift_bytes(low, -self.down), self.low_mask);
            l.or(low, l.and(l.shift_bytes(high, self.high_up), self.high_mask))
        }
    }
}

/// The 6-bit scales and minima of Q4_K and Q5_K, four to a word; see `block.rs` for their places.
///
/// # Safety
/// As [`Format::header`], of Q4_K or Q5_K.
#[inline(always)]
unsafe fn six_bit_header<L: ByteLanes>(l: L, block: *const u8, lane: usize, odd_factor: f32, header: &mut Header<L>) {
    // SAFETY: as the caller's; both formats begin with two scales and twelve bytes.
    unsafe {
        let d = halves(l, block, 0, lane);
        let odd = l.mul(d, l.splat(odd_factor));
        let [a, b, c] = [words(l, block, 4, lane), words(l, block, 8, lane), words(l, block, 12, lane)];
        let (six, four, two) = (l.splat_word(0x3f3f_3f3f), l.splat_word(0x0f0f_0f0f), l.splat_word(0x3030_3030));
        let scales = [l.and(a, six), l.or(l.and(c, four), l.and(l.shift(a, -2), two))];
        let minima = [l.and(b, six), l.or(l.and(l.shift(c, -4), four), l.and(l.shift(b, -2), two))];
        let byte = l.splat_word(0xff);
        for s in 0..8 {
            let scale = l.and(l.shift(scales[s / 4], -8 * (s as i32 % 4)), byte);
            header.scales[s] = l.mul(l.to_float(scale), if s % 2 == 0 { d } else { odd });
        }
        let even = l.splat_word(0x00ff_00ff);
        for (w, minima) in minima.into_iter().enumerate() {
            header.minima[2 * w] = l.and(minima, even);
            header.minima[2 * w + 1] = l.and(l.shift(minima, -8), even);
        }
        header.minimum = l.sub(l.splat(0.0), halves(l, block, 2, lane));
    }
}

pub(super) struct Q4K;

impl Format for Q4K {
    const TYPE: WeightType = WeightType::Q4_K;
    const SCALED: usize = 8;
    const OFFSET: Option<u32> = None;
    const BYTES: Bytes = Bytes::Unsigned(15);
    const PAIRS: usize = 4;
    type Cursor<L: ByteLanes> = Plane<L>;

    #[inline(always)]
    unsafe fn header<L: ByteLanes>(l: L, block: *const u8, lane: usize, header: &mut Header<L>) {
        // SAFETY: as the caller's.
        unsafe { six_bit_header(l, block, lane, Plane::<L>::factor(4), header) }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(l: L, block: *const u8, lane: usize, s: usize) -> Plane<L> {
        // SAFETY: as the caller's.
        unsafe { Plane::new(l, block.add(16 * (16 + s / 2 * 32) + 4 * lane), 0x0f0f_0f0f, s as i32 % 2 * 4) }
    }
    #[inline(always)]
    unsafe fn weights<L: ByteLanes>(l: L, cursor: Plane<L>, g: usize) -> L::I {
        // SAFETY: as the caller's.
        unsafe { cursor.weights(l, g) }
    }
}

pub(super) struct Q5K;

impl Format for Q5K {
    const TYPE: WeightType = WeightType::Q5_K;
    const SCALED: usize = 8;
    const OFFSET: Option<u32> = None;
    const BYTES: Bytes = Bytes::Unsigned(31);
    const PAIRS: usize = 4;
    type Cursor<L: ByteLanes> = Planes<L>;

    #[inline(always)]
    unsafe fn header<L: ByteLanes>(l: L, block: *const u8, lane: usize, header: &mut Header<L>) {
        // SAFETY: as the caller's.
        unsafe { six_bit_header(l, block, lane, 1.0, header) }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(l: L, block: *const u8, lane: usize, s: usize) -> Planes<L> {
        // SAFETY: as the caller's.
        unsafe {
            Planes {
                low: block.add(16 * (48 + s / 2 * 32) + 4 * lane),
                low_mask: l.splat_word(0x0f0f_0f0f),
                down: s as i32 % 2 * 4,
                high: block.add(16 * 16 + 4 * lane),
                high_mask: l.splat_word(0x1010_1010),
                high_up: 4 - s as i32,
            }
        }
    }
    #[inline(always)]
    unsafe fn weights<L: ByteLanes>(l: L, cursor: Planes<L>, g: usize) -> L::I {
        // SAFETY: as the caller's.
        unsafe { cursor.weights(l, g) }
    }
}

pub(super) struct Q6K;

impl Format for Q6K {
    const TYPE: WeightType = WeightType::Q6_K;
    const SCALED: usize = 4;
    const OFFSET: Option<u32> = Some(0);
    const BYTES: Bytes = Bytes::Unsigned(63);
    type Cursor<L: ByteLanes> = Planes<L>;

    #[inline(always)]
    unsafe fn header<L: ByteLanes>(l: L, block: *const u8, lane: usize, header: &mut Header<L>) {
        // SAFETY: as the caller's; byte `s` of lane `n` is at `16 s + n` of the scales.
        unsafe {
            let d = halves(l, block, 208, lane);
            for s in 0..16 {
                let scale = l.load_signed_bytes(block.add(16 * (192 + s) + lane));
                header.scales[s] = l.mul(l.to_float(scale), d);
            }
        }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(l: L, block: *const u8, lane: usize, s: usize) -> Planes<L> {
        // SAFETY: as the caller's.
        unsafe {
            let (half, quarter, start) = (s / 8, s % 8 / 2, s % 2 * 16);
            Planes {
                low: block.add(16 * (half * 64 + quarter % 2 * 32 + start) + 4 * lane),
                low_mask: l.splat_word(0x0f0f_0f0f),
                down: quarter as i32 / 2 * 4,
                high: block.add(16 * (128 + half * 32 + start) + 4 * lane),
                high_mask: l.splat_word(0x3030_3030),
                high_up: 4 - 2 * quarter as i32,
            }
        }
    }
    #[inline(always)]
    unsafe fn weights<L: ByteLanes>(l: L, cursor: Planes<L>, g: usize) -> L::I {
        // SAFETY: as the caller's.
        unsafe { cursor.weights(l, g) }
    }
}

pub(super) struct Q2K;

impl Format for Q2K {
    const TYPE: WeightType = WeightType::Q2_K;
    const SCALED: usize = 4;
    const OFFSET: Option<u32> = None;
    const BYTES: Bytes = Bytes::Unsigned(3);
    const PAIRS: usize = 8;
    type Cursor<L: ByteLanes> = Plane<L>;

    #[inline(always)]
    unsafe fn header<L: ByteLanes>(l: L, block: *const u8, lane: usize, header: &mut Header<L>) {
        // SAFETY: as the caller's.
        unsafe {
            let d = halves(l, block, 80, lane);
            let (nibble, even) = (l.splat_word(15), l.splat_word(0x000f_000f));
            for w in 0..4 {
                let word = words(l, block, 4 * w, lane);
                for b in 0..4 {
                    let s = 4 * w + b;
                    let d = l.mul(d, l.splat(Plane::<L>::factor(s % 8 / 2 * 2)));
                    header.scales[s] = l.mul(l.to_float(l.and(l.shift(word, -8 * b as i32), nibble)), d);
                }
                header.minima[2 * w] = l.and(l.shift(word, -4), even);
                header.minima[2 * w + 1] = l.and(l.shift(word, -12), even);
            }
            header.minimum = l.sub(l.splat(0.0), halves(l, block, 82, lane));
        }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(l: L, block: *const u8, lane: usize, s: usize) -> Plane<L> {
        // SAFETY: as the caller's.
        unsafe {
            let from = block.add(16 * (16 + s / 8 * 32 + s % 2 * 16) + 4 * lane);
            Plane::new(l, from, 0x0303_0303, s as i32 % 8 / 2 * 2)
        }
    }
    #[inline(always)]
    unsafe fn weights<L: ByteLanes>(l: L, cursor: Plane<L>, g: usize) -> L::I {
        // SAFETY: as the caller's.
        unsafe { cursor.weights(l, g) }
    }
}

pub(super) struct Q3K;

impl Format for Q3K {
    const TYPE: WeightType = WeightType::Q3_K;
    const SCALED: usize = 4;
    const OFFSET: Option<u32> = Some(3);
    const BYTES: Bytes = Bytes::Unsigned(7);
    type Cursor<L: ByteLanes> = Planes<L>;

    #[inline(always)]
    unsafe fn header<L: ByteLanes>(l: L, block: *const u8, lane: usize, header: &mut Header<L>) {
        // SAFETY: as the caller's; the 6 bits of a scale are a nibble of the first two words and a pair of the third's.
        unsafe {
            let d = halves(l, block, 108, lane);
            let low = [words(l, block, 96, lane), words(l, block, 100, lane)];
            let high = words(l, block, 104, lane);
            for w in 0..4 {
                let nibbles = l.and(l.shift(low[w % 2], -(w as i32 / 2 * 4)), l.splat_word(0x0f0f_0f0f));
                let pairs = l.and(l.shift(high, 4 - 2 * w as i32), l.splat_word(0x3030_3030));
                let word = l.or(nibbles, pairs);
                for b in 0..4 {
                    let scale = l.to_float(l.and(l.shift(word, -8 * b as i32), l.splat_word(0xff)));
                    header.scales[4 * w + b] = l.mul(l.sub(scale, l.splat(32.0)), d);
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(l: L, block: *const u8, lane: usize, s: usize) -> Planes<L> {
        // SAFETY: as the caller's.
        unsafe {
            let start = s % 2 * 16;
            Planes {
                low: block.add(16 * (32 + s / 8 * 32 + start) + 4 * lane),
                low_mask: l.splat_word(0x0303_0303),
                down: s as i32 % 8 / 2 * 2,
                high: block.add(16 * start + 4 * lane),
                high_mask: l.splat_word(0x0404_0404),
                high_up: 2 - s as i32 / 2,
            }
        }
    }
    #[inline(always)]
    unsafe fn weights<L: ByteLanes>(l: L, cursor: Planes<L>, g: usize) -> L::I {
        // SAFETY: as the caller's.
        unsafe { cursor.weights(l, g) }
    }
}

/// The first half of a block of 32 is its low nibbles, the second its high ones.
///
/// # Safety
/// The caller is inside a function with `L`'s features; from `from` on there are four groups of bytes.
#[inline(always)]
unsafe fn nibbles<L: ByteLanes>(l: L, from: *const u8, g: usize) -> L::I {
    // SAFETY: as the caller's; there are four groups of bytes.
    unsafe {
        let bytes = l.load_words(from.add(g % 4 * GROUP_BYTES));
        l.and(l.shift_bytes(bytes, -(g as i32 / 4 * 4)), l.splat_word(0x0f0f_0f0f))
    }
}

/// A format with blocks of 32: `$scale_bytes` of scales (2, or 4 with a minimum), then the weights.
macro_rules! blocks_of_32 {
    ($name:ident, $type:ident, $minimum:literal, $offset:expr, $bytes:expr, |$l:ident, $from:ident, $g:ident| $weights:expr) => {
        pub(super) struct $name;

        impl Format for $name {
            const TYPE: WeightType = WeightType::$type;
            const SCALED: usize = 8;
            const OFFSET: Option<u32> = $offset;
            const BYTES: Bytes = $bytes;
            const MINIMUM: bool = $minimum;
            type Cursor<L: ByteLanes> = *const u8;

            #[inline(always)]
            unsafe fn header<L: ByteLanes>(l: L, block: *const u8, lane: usize, header: &mut Header<L>) {
                // SAFETY: as the caller's; the block begins with its scales.
                unsafe {
                    header.scales[0] = halves(l, block, 0, lane);
                    if $minimum {
                        header.minimum = halves(l, block, 2, lane);
                    }
                }
            }
            #[inline(always)]
            unsafe fn cursor<L: ByteLanes>(_: L, block: *const u8, lane: usize, _: usize) -> *const u8 {
                // SAFETY: as the caller's.
                unsafe { block.add(16 * if $minimum { 4 } else { 2 } + 4 * lane) }
            }
            #[inline(always)]
            unsafe fn weights<L: ByteLanes>($l: L, $from: *const u8, $g: usize) -> L::I {
                // SAFETY: as the caller's.
                unsafe { $weights }
            }
        }
    };
}

/// IQ4_NL's levels plus 128.
const BIASED_LEVELS: [u8; 16] = {
    let mut levels = [0; 16];
    let mut i = 0;
    while i < 16 {
        levels[i] = IQ4_NL_LEVELS[i] as u8 ^ 0x80;
        i += 1;
    }
    levels
};

/// As [`nibbles`], after the transposed fifth bits.
///
/// # Safety
/// The caller is inside a function with `L`'s features; from `from` on there are a group of fifth bits and four of nibbles.
#[inline(always)]
unsafe fn nibbles_and_bits<L: ByteLanes>(l: L, from: *const u8, g: usize) -> L::I {
    // SAFETY: as the caller's.
    unsafe {
        let high = l.shift_bytes(l.load_words(from), 4 - g as i32);
        l.or(nibbles(l, from.add(GROUP_BYTES), g), l.and(high, l.splat_word(0x1010_1010)))
    }
}

blocks_of_32!(Q40, Q4_0, false, Some(4), Bytes::Unsigned(15), |l, from, g| nibbles(l, from, g));
blocks_of_32!(Q41, Q4_1, true, None, Bytes::Unsigned(15), |l, from, g| nibbles(l, from, g));
blocks_of_32!(Q50, Q5_0, false, Some(3), Bytes::Unsigned(31), |l, from, g| nibbles_and_bits(l, from, g));
blocks_of_32!(Q51, Q5_1, true, None, Bytes::Unsigned(31), |l, from, g| nibbles_and_bits(l, from, g));
blocks_of_32!(Q80, Q8_0, false, Some(0), Bytes::Biased, |l, from, g| l.load_words(from.add(g * GROUP_BYTES)));
blocks_of_32!(Iq4Nl, IQ4_NL, false, Some(0), Bytes::Biased, |l, from, g| l.lookup(&BIASED_LEVELS, nibbles(l, from, g)));
