//! Activations as 8-bit blocks, quantized once per input and shared by every matrix that reads it.
//!
//! Rows are cut into tiles of at most [`TILE_ROWS`] rows, as equal as possible. A tile is one run of blocks; inside a block
//! every array is `[index][row of the tile]`, so that a kernel reads the rows it works on from consecutive words:
//!
//! | words per row | block of 256 ([`ActivationType::Q8_K`]) | block of 32 ([`ActivationType::Q8_1`]) |
//! |---|---|---|
//! | quants, four `i8` each | 64 | 8 |
//! | offsets | 16: -32 times the sum of 16 quants | 1: -128 times the sum of 32 |
//! | pairs of `i16` sums | 4: sums of 32, see [`PAIRS`]; 8: of 16 | |
//! | scale, `f32` bits | 1 | 1 |
//! | scale times the sum of the quants, `f32` bits | | 1 |
//!
//! The offsets are what an accumulator starts from when its weights are stored unsigned, `w + 32` or `w + 128`; formats
//! with a smaller offset shift them right.

use super::lanes::{ByteLanes, PanelOp};
use crate::Isa;
use half::f16;

/// Rows per tile at most: eight accumulators and eight sums are half of AVX-512's registers.
pub(super) const TILE_ROWS: usize = 8;

/// The order of the sums in their pairs, within 8 sums of 32 or within each 8 sums of 16: the order that masking the bytes
/// of a word by `0x00ff00ff`, before and after a shift by 8, gives the weights' minima.
pub(super) const PAIRS: [(usize, usize); 4] = [(0, 2), (1, 3), (4, 6), (5, 7)];

/// Word offsets of the arrays in a block of 256, to be multiplied by the tile's rows.
pub(super) mod q8k {
    pub const OFFSETS: usize = 64;
    pub const PAIRS_OF_32: usize = 80;
    pub const PAIRS_OF_16: usize = 84;
    pub const SCALE: usize = 92;
    pub const WORDS: usize = 93;
}

/// Word offsets of the arrays in a block of 32, to be multiplied by the tile's rows.
pub(super) mod q8_1 {
    pub const OFFSETS: usize = 8;
    pub const SCALE: usize = 9;
    pub const SUM: usize = 10;
    pub const WORDS: usize = 11;
}

/// How activations are quantized: what llama.cpp's dot product of the weight type does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)]
pub enum ActivationType {
    /// Blocks of 32: `f16` scale `max |x| / 127`, and for formats with minima the `f16` product of scale and sum.
    Q8_1,
    /// Blocks of 256: `f32` scale `-max / 127` with the sign of the largest, and the quants' sums.
    Q8_K,
}

impl ActivationType {
    /// Inputs per block.
    pub const fn block_len(self) -> usize {
        match self {
            Self::Q8_1 => 32,
            Self::Q8_K => 256,
        }
    }

    const fn block_words(self) -> usize {
        match self {
            Self::Q8_1 => q8_1::WORDS,
            Self::Q8_K => q8k::WORDS,
        }
    }

    /// Words of scratch that [`Activations::quantize`] needs for `rows` rows of `inputs`; `None` if the rows are not
    /// whole blocks or the product overflows.
    pub const fn scratch_len(self, rows: usize, inputs: usize) -> Option<usize> {
        if !inputs.is_multiple_of(self.block_len()) {
            return None;
        }
        match (inputs / self.block_len()).checked_mul(self.block_words()) {
            Some(row) => row.checked_mul(rows),
            None => None,
        }
    }
}

/// Quantized rows in a caller's scratch.
#[derive(Clone, Copy, Debug)]
pub struct Activations<'a> {
    words: &'a [i32],
    activation_type: ActivationType,
    rows: usize,
    inputs: usize,
}

impl<'a> Activations<'a> {
    /// Quantizes `x`, `(rows, inputs)` row-major, into `scratch`. Rounding is to nearest, ties to even, on every ISA, so
    /// the result does not depend on it; nor does a row's on the other rows.
    ///
    /// # Panics
    /// If the rows are not whole blocks, or `scratch` is not at least [`ActivationType::scratch_len`] long.
    pub fn quantize(
        isa: Isa,
        activation_type: ActivationType,
        x: &[f32],
        inputs: usize,
        scratch: &'a mut [i32],
    ) -> Activations<'a> {
        let rows = x.len().checked_div(inputs).unwrap_or(0);
        assert_eq!(x.len(), rows * inputs, "activations: x is not whole rows");
        let len = activation_type.scratch_len(rows, inputs).expect("activations: rows are not whole blocks");
        assert!(len <= scratch.len(), "activations: the scratch is too short");
        let words = &mut scratch[..len];
        let op = Quantize { x, inputs, rows, activation_type, words: &mut *words };
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(isa) => isa.run_panels(op),
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni(isa) => isa.run_panels(op),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(isa) => isa.run_panels(op),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx(isa) => isa.run_panels(op),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon(isa) => isa.run_panels(op),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot(isa) => isa.run_panels(op),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm(isa) => isa.run_panels(op),
            Isa::Scalar => op.run(Plain),
        }
        Activations { words, activation_type, rows, inputs }
    }

    /// Takes what [`Activations::quantize`] wrote, for a caller who keeps the words.
    ///
    /// # Panics
    /// If `words` is not [`ActivationType::scratch_len`] long.
    pub fn from_words(activation_type: ActivationType, words: &'a [i32], rows: usize, inputs: usize) -> Self {
        let len = activation_type.scratch_len(rows, inputs);
        assert_eq!(len, Some(words.len()), "activations: not the words of this shape");
        Self { words, activation_type, rows, inputs }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the matrices that these rows can meet.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// The block type.
    pub fn activation_type(&self) -> ActivationType {
        self.activation_type
    }

    /// The tiles.
    pub(super) fn tiles(&self) -> Tiles {
        Tiles::new(self.rows)
    }

    /// The words of a tile's blocks from `block` on.
    pub(super) fn tile(&self, tile: Tile, block: usize) -> &'a [i32] {
        let blocks = self.inputs / self.activation_type.block_len();
        &self.words[(tile.first * blocks + tile.rows * block) * self.activation_type.block_words()..]
    }
}

/// Rows `first..first + rows`, which are laid out together.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub first: usize,
    pub rows: usize,
}

/// How rows are cut into tiles: as few as possible, and of sizes that differ by at most one, because a tile of one row
/// costs nearly what a tile of four does.
#[derive(Clone, Copy)]
pub(super) struct Tiles {
    pub count: usize,
    rows: usize,
}

impl Tiles {
    fn new(rows: usize) -> Self {
        Self { count: rows.div_ceil(TILE_ROWS), rows }
    }

    pub fn get(self, index: usize) -> Tile {
        let (size, larger) = (self.rows / self.count, self.rows % self.count);
        Tile { first: index * size + index.min(larger), rows: size + usize::from(index < larger) }
    }
}

struct Quantize<'a> {
    x: &'a [f32],
    inputs: usize,
    rows: usize,
    activation_type: ActivationType,
    words: &'a mut [i32],
}

impl Quantize<'_> {
    #[inline(always)]
    fn run(self, loops: impl Loops) {
        let block_len = self.activation_type.block_len();
        let block_words = self.activation_type.block_words();
        let blocks = self.inputs / block_len;
        let tiles = Tiles::new(self.rows);
        for tile in (0..tiles.count).map(|t| tiles.get(t)) {
            for r in 0..tile.rows {
                let x = &self.x[(tile.first + r) * self.inputs..][..self.inputs];
                let words = &mut self.words[tile.first * blocks * block_words..][..tile.rows * blocks * block_words];
                for (x, words) in x.chunks_exact(block_len).zip(words.chunks_exact_mut(tile.rows * block_words)) {
                    match self.activation_type {
                        ActivationType::Q8_K => {
                            let mut block = [0; q8k::WORDS];
                            q8k_block(loops, x, &mut block);
                            scatter(&block, words, tile.rows, r);
                        }
                        ActivationType::Q8_1 => {
                            let mut block = [0; q8_1::WORDS];
                            q8_1_block(loops, x, &mut block);
                            scatter(&block, words, tile.rows, r);
                        }
                    }
                }
            }
        }
    }
}

/// Puts one row's words between those of the tile's other rows.
#[inline(always)]
fn scatter<const N: usize>(block: &[i32; N], words: &mut [i32], rows: usize, row: usize) {
    if rows == 1 {
        words.copy_from_slice(block);
    } else {
        for (words, word) in words.chunks_exact_mut(rows).zip(block) {
            words[row] = *word;
        }
    }
}

impl PanelOp for Quantize<'_> {
    #[inline(always)]
    fn eval<L: ByteLanes>(self, l: L) {
        self.run(Vector(l));
    }
}

/// The loops over a block's elements.
trait Loops: Copy {
    /// The bits of the largest magnitude, compared as integers: magnitudes order the same, and a NaN is largest, so that
    /// it reaches the scale.
    fn largest(self, x: &[f32]) -> u32;
    /// The first element of that magnitude.
    fn first(self, x: &[f32], largest: u32) -> f32;
    /// The nearest integers to `inverse * x`, ties to even, within -127..=127. -128 would break the kernels' bounds: the
    /// products reach 127.00001 by rounding, and the inverse of a subnormal scale is infinite.
    fn round(self, x: &[f32], inverse: f32, out: &mut [u8]);
}

#[derive(Clone, Copy)]
struct Plain;

impl Loops for Plain {
    fn largest(self, x: &[f32]) -> u32 {
        x.iter().fold(0, |a, x| a.max(x.abs().to_bits()))
    }
    fn first(self, x: &[f32], largest: u32) -> f32 {
        x.iter().copied().find(|x| x.abs().to_bits() == largest).unwrap_or(0.0)
    }
    fn round(self, x: &[f32], inverse: f32, out: &mut [u8]) {
        for (q, x) in out.iter_mut().zip(x) {
            *q = (inverse * x).round_ties_even().clamp(-127.0, 127.0) as i8 as u8;
        }
    }
}

/// Written out, because the compiler turned the plain loops into gathers and single lanes (1.1 ns per element for 0.2).
#[derive(Clone, Copy)]
struct Vector<L>(L);

impl<L: ByteLanes> Loops for Vector<L> {
    #[inline(always)]
    fn largest(self, x: &[f32]) -> u32 {
        // SAFETY: `run_panels` entered the features; blocks are whole vectors.
        unsafe { self.0.largest_magnitude(x) }
    }
    #[inline(always)]
    fn first(self, x: &[f32], largest: u32) -> f32 {
        // SAFETY: as above.
        unsafe { x[self.0.first_of_magnitude(x, largest)] }
    }
    #[inline(always)]
    fn round(self, x: &[f32], inverse: f32, out: &mut [u8]) {
        // SAFETY: as above.
        unsafe { self.0.round_to_bytes(x, inverse, out) }
    }
}

/// The sum of 16 signed bytes, eight at a time in one integer: the fields of 16 bits stay below 2^11.
#[inline(always)]
fn sum_of_16(bytes: &[u8; 16]) -> i32 {
    let word = |half: usize| u64::from_le_bytes(bytes.as_chunks::<8>().0[half]) ^ 0x8080_8080_8080_8080;
    let pairs = |word: u64| (word & 0x00ff_00ff_00ff_00ff) + (word >> 8 & 0x00ff_00ff_00ff_00ff);
    ((pairs(word(0)) + pairs(word(1))).wrapping_mul(0x0001_0001_0001_0001) >> 48) as i32 - 16 * 128
}

#[inline(always)]
fn q8k_block(loops: impl Loops, x: &[f32], block: &mut [i32; q8k::WORDS]) {
    let largest = loops.largest(x);
    let mut quants = [0; 256];
    let mut scale = 0.0;
    if largest != 0 {
        // The first element of that size decides the sign, as in llama.cpp.
        let inverse = -127.0 / loops.first(x, largest);
        loops.round(x, inverse, &mut quants);
        scale = 1.0 / inverse;
    }
    for (word, quants) in block.iter_mut().zip(quants.as_chunks::<4>().0) {
        *word = i32::from_le_bytes(*quants);
    }
    let mut sums = [0i32; 16];
    for (s, quants) in quants.as_chunks::<16>().0.iter().enumerate() {
        sums[s] = sum_of_16(quants);
        block[q8k::OFFSETS + s] = -32 * sums[s];
    }
    let pair = |a: i32, b: i32| a & 0xffff | b << 16;
    let sum_of_32 = |s: usize| sums[2 * s] + sums[2 * s + 1];
    for (p, (a, b)) in PAIRS.into_iter().enumerate() {
        block[q8k::PAIRS_OF_32 + p] = pair(sum_of_32(a), sum_of_32(b));
        block[q8k::PAIRS_OF_16 + p] = pair(sums[a], sums[b]);
        block[q8k::PAIRS_OF_16 + 4 + p] = pair(sums[8 + a], sums[8 + b]);
    }
    block[q8k::SCALE] = scale.to_bits() as i32;
}

#[inline(always)]
fn q8_1_block(loops: impl Loops, x: &[f32], block: &mut [i32; q8_1::WORDS]) {
    let mut quants = [0; 32];
    let scale = f32::from_bits(loops.largest(x)) / 127.0;
    loops.round(x, if scale != 0.0 { 1.0 / scale } else { 0.0 }, &mut quants);
    for (word, quants) in block.iter_mut().zip(quants.as_chunks::<4>().0) {
        *word = i32::from_le_bytes(*quants);
    }
    let sum: i32 = quants.as_chunks::<16>().0.iter().map(sum_of_16).sum();
    block[q8_1::OFFSETS] = -128 * sum;
    block[q8_1::SCALE] = f16::from_f32(scale).to_f32().to_bits() as i32;
    block[q8_1::SUM] = f16::from_f32(sum as f32 * scale).to_f32().to_bits() as i32;
}
