//! Activations in 8-bit blocks, quantized once per input and shared by every matrix that reads it. Layout: `layout.rs`.

use crate::isa::Isa;
use crate::quant::layout::{PAIRS, ROW_BLOCK, q8_1, q8k};
use crate::quant::weight_type::ActivationType;
use crate::simd::bytes::{ByteLanes, PanelOp};
use half::f16;
use std::mem::MaybeUninit;

/// Quantized rows, in words that the caller owns.
#[derive(Clone, Copy, Debug)]
pub struct Activations<'a> {
    words: &'a [i32],
    activation_type: ActivationType,
    rows: usize,
    inputs: usize,
    row_blocks: RowBlocks,
}

impl<'a> Activations<'a> {
    /// Quantizes `x`, `(rows, inputs)` row-major, into `scratch`. Rounds to nearest, ties to even: a row's result does
    /// not depend on the other rows nor, if the row is finite, on the ISA.
    ///
    /// # Panics
    /// If the rows are not whole blocks, or `scratch` is shorter than [`ActivationType::scratch_len`].
    pub fn quantize(
        isa: Isa,
        activation_type: ActivationType,
        x: &[f32],
        inputs: usize,
        scratch: &'a mut [i32],
    ) -> Activations<'a> {
        let rows = x.len().checked_div(inputs).unwrap_or(0);
        let (words, count) = (scratch.as_mut_ptr().cast(), scratch.len());
        // SAFETY: the same memory, borrowed for as long; parts write initialised words only.
        let words = unsafe { std::slice::from_raw_parts_mut(words, count) };
        Self::parts(activation_type, x, inputs, words, usize::MAX).for_each(|part| part.quantize(isa));
        let len = activation_type.scratch_len(rows, inputs).expect("whole blocks, as `parts` checked");
        Activations { words: &scratch[..len], activation_type, rows, inputs, row_blocks: RowBlocks::new(rows) }
    }

    /// Divides what [`Activations::quantize`] does: once every part is quantized, `scratch` is as after it. A part has
    /// as many activation blocks of a row block as have at most `values` values, but at least one.
    ///
    /// # Panics
    /// As [`Activations::quantize`].
    pub fn parts<'s>(
        activation_type: ActivationType,
        x: &'s [f32],
        inputs: usize,
        scratch: &'s mut [MaybeUninit<i32>],
        values: usize,
    ) -> impl Iterator<Item = ActivationsPart<'s>> {
        let rows = x.len().checked_div(inputs).unwrap_or(0);
        assert_eq!(x.len(), rows * inputs, "activations: x is not (rows, inputs)");
        let len = activation_type.scratch_len(rows, inputs).expect("activations: rows are not whole blocks");
        assert!(len <= scratch.len(), "activations: scratch too short");
        let (block_len, block_words) = (activation_type.block_len(), activation_type.block_words());
        let blocks = inputs / block_len;
        let (row_blocks, mut words) = (RowBlocks::new(rows), &mut scratch[..len]);
        let parts = (0..row_blocks.count).map(move |index| row_blocks.get(index)).flat_map(move |rows| {
            let of_part = (values / (rows.rows * block_len)).max(1);
            (0..blocks).step_by(of_part).map(move |block| (rows, block, of_part.min(blocks - block)))
        });
        parts.map(move |(RowBlock { first, rows }, block, count)| {
            let (of_part, rest) = std::mem::take(&mut words).split_at_mut(rows * count * block_words);
            words = rest;
            let x = &x[first * inputs + block * block_len..(first + rows) * inputs];
            ActivationsPart { x, inputs, rows, width: count * block_len, activation_type, words: of_part }
        })
    }

    /// Reads what [`Activations::quantize`] wrote into `words` earlier.
    ///
    /// # Panics
    /// If `words` is not [`ActivationType::scratch_len`] long.
    pub fn from_words(activation_type: ActivationType, words: &'a [i32], rows: usize, inputs: usize) -> Self {
        let len = activation_type.scratch_len(rows, inputs);
        assert_eq!(len, Some(words.len()), "activations: wrong number of words for this shape");
        Self { words, activation_type, rows, inputs, row_blocks: RowBlocks::new(rows) }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row: the columns of a matching matrix.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// The block type.
    pub fn activation_type(&self) -> ActivationType {
        self.activation_type
    }

    /// The row blocks.
    pub(super) fn row_blocks(&self) -> RowBlocks {
        self.row_blocks
    }

    /// The words of a row block's activation blocks from `block` on.
    pub(super) fn words(&self, rows: RowBlock, block: usize) -> &'a [i32] {
        let blocks = self.inputs / self.activation_type.block_len();
        &self.words[(rows.first * blocks + rows.rows * block) * self.activation_type.block_words()..]
    }
}

/// Rows `first..first + rows`, whose words are interleaved.
#[derive(Clone, Copy)]
pub(super) struct RowBlock {
    pub first: usize,
    pub rows: usize,
}

/// The division of rows into row blocks: as few as possible, of sizes that differ by at most one, because a block of
/// one row costs nearly what a block of four does.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowBlocks {
    pub count: usize,
    size: usize,
    /// How many blocks, from the first on, have `size + 1` rows.
    larger: usize,
}

impl RowBlocks {
    fn new(rows: usize) -> Self {
        let count = rows.div_ceil(ROW_BLOCK);
        let of = count.max(1);
        Self { count, size: rows / of, larger: rows % of }
    }

    pub fn get(self, index: usize) -> RowBlock {
        let first = index * self.size + index.min(self.larger);
        RowBlock { first, rows: self.size + usize::from(index < self.larger) }
    }
}

/// Some activation blocks of a row block: what one thread quantizes.
pub struct ActivationsPart<'a> {
    x: &'a [f32], // `width` of every `inputs` values belong to the part
    inputs: usize,
    rows: usize,
    width: usize,
    activation_type: ActivationType,
    words: &'a mut [MaybeUninit<i32>],
}

impl ActivationsPart<'_> {
    /// Quantizes the part's values. Its words are then initialised.
    pub fn quantize(self, isa: Isa) {
        match isa.vectors() {
            Some(isa) => isa.run_panels(self),
            None => self.run(ScalarLoops),
        }
    }

    #[inline(always)]
    fn run(self, loops: impl Loops) {
        let (block_len, block_words) = (self.activation_type.block_len(), self.activation_type.block_words());
        for row in 0..self.rows {
            let x = &self.x[row * self.inputs..][..self.width];
            for (x, words) in x.chunks_exact(block_len).zip(self.words.chunks_exact_mut(self.rows * block_words)) {
                match self.activation_type {
                    ActivationType::Q8_K => {
                        let mut block = [0; q8k::WORDS];
                        q8k_block(loops, x, &mut block);
                        scatter(&block, words, self.rows, row);
                    }
                    ActivationType::Q8_1 => {
                        let mut block = [0; q8_1::WORDS];
                        q8_1_block(loops, x, &mut block);
                        scatter(&block, words, self.rows, row);
                    }
                }
            }
        }
    }
}

/// Interleaves one row's words with those of the row block's other rows.
#[inline(always)]
fn scatter<const N: usize>(block: &[i32; N], words: &mut [MaybeUninit<i32>], rows: usize, row: usize) {
    if rows == 1 {
        assert_eq!(words.len(), N);
        words.iter_mut().zip(block).for_each(|(to, word)| *to = MaybeUninit::new(*word));
    } else {
        for (words, word) in words.chunks_exact_mut(rows).zip(block) {
            words[row].write(*word);
        }
    }
}

impl PanelOp for ActivationsPart<'_> {
    #[inline(always)]
    fn eval<L: ByteLanes>(self, l: L) {
        self.run(VectorLoops(l));
    }
}

/// The loops over a block's elements.
trait Loops: Copy {
    /// The bits of the largest magnitude. Compared as integers, which order like magnitudes except that a NaN is the
    /// largest, so that the scale becomes NaN as well.
    fn largest(self, x: &[f32]) -> u32;
    /// The first element of that magnitude.
    fn first(self, x: &[f32], largest: u32) -> f32;
    /// The nearest integers to `inverse * x`, ties to even, clamped to -127..=127: rounding makes products up to
    /// 127.00001, the inverse of a subnormal scale is infinite, and -128 would overflow the kernels' 16-bit sums.
    fn round(self, x: &[f32], inverse: f32, out: &mut [u8]);
}

#[derive(Clone, Copy)]
struct ScalarLoops;

impl Loops for ScalarLoops {
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

/// Explicit vectors: the compiler vectorizes the scalar loops into gathers and single lanes (1.1 ns per element instead
/// of 0.2).
#[derive(Clone, Copy)]
struct VectorLoops<L>(L);

impl<L: ByteLanes> Loops for VectorLoops<L> {
    #[inline(always)]
    fn largest(self, x: &[f32]) -> u32 {
        // SAFETY: `run_panels` entered the features; blocks are whole vectors.
        unsafe { self.0.largest_magnitude(x) }
    }
    #[inline(always)]
    fn first(self, x: &[f32], largest: u32) -> f32 {
        // SAFETY: `run_panels` entered the features; `x` is whole vectors and has an element of that magnitude.
        unsafe { x[self.0.first_of_magnitude(x, largest)] }
    }
    #[inline(always)]
    fn round(self, x: &[f32], inverse: f32, out: &mut [u8]) {
        // SAFETY: `run_panels` entered the features; `x` is whole vectors, and `out` as long.
        unsafe { self.0.round_to_bytes(x, inverse, out) }
    }
}

/// The sums of the first two of every four of 16 signed bytes, and of the others, eight bytes at a time in a
/// `u64` (SWAR): its 16-bit fields stay below 2^11.
#[inline(always)]
fn sums_of_pairs(bytes: &[u8; 16]) -> [i32; 2] {
    let word = |half: usize| u64::from_le_bytes(bytes.as_chunks::<8>().0[half]) ^ 0x8080_8080_8080_8080;
    let pairs = |word: u64| (word & 0x00ff_00ff_00ff_00ff) + (word >> 8 & 0x00ff_00ff_00ff_00ff);
    let sums = pairs(word(0)) + pairs(word(1));
    let sums = sums + (sums >> 32);
    [(sums & 0xffff) as i32 - 8 * 128, (sums >> 16 & 0xffff) as i32 - 8 * 128]
}

#[inline(always)]
fn sum_of_16(bytes: &[u8; 16]) -> i32 {
    let [a, b] = sums_of_pairs(bytes);
    a + b
}

#[inline(always)]
fn q8k_block(loops: impl Loops, x: &[f32], block: &mut [i32; q8k::WORDS]) {
    let largest = loops.largest(x);
    let mut quants = [0; 256];
    let mut scale = 0.0;
    if largest != 0 {
        // The first element of that magnitude decides the sign, as in llama.cpp.
        let inverse = -127.0 / loops.first(x, largest);
        loops.round(x, inverse, &mut quants);
        scale = 1.0 / inverse;
    }
    for (word, quants) in block.iter_mut().zip(quants.as_chunks::<4>().0) {
        *word = i32::from_le_bytes(*quants);
    }
    let pair = |a: i32, b: i32| a & 0xffff | b << 16;
    let mut sums = [0i32; 16];
    for (s, quants) in quants.as_chunks::<16>().0.iter().enumerate() {
        let [a, b] = sums_of_pairs(quants);
        sums[s] = a + b;
        block[q8k::OFFSETS + s] = -32 * sums[s];
        block[q8k::PAIR_OFFSETS + s] = pair(-32 * a, -32 * b);
    }
    let sum_of_32 = |s: usize| sums[2 * s] + sums[2 * s + 1];
    for (p, (a, b)) in PAIRS.into_iter().enumerate() {
        block[q8k::BSUMS_OF_32 + p] = pair(sum_of_32(a), sum_of_32(b));
        block[q8k::BSUMS_OF_16 + p] = pair(sums[a], sums[b]);
        block[q8k::BSUMS_OF_16 + 4 + p] = pair(sums[8 + a], sums[8 + b]);
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
    let [first, second] = [0, 1].map(|half| sum_of_16(&quants.as_chunks::<16>().0[half]));
    let sum = first + second;
    block[q8_1::OFFSETS] = -128 * sum;
    block[q8_1::OFFSET_OF_16] = -128 * first;
    block[q8_1::SCALE] = f16::from_f32(scale).to_f32().to_bits() as i32;
    block[q8_1::SUM] = f16::from_f32(sum as f32 * scale).to_f32().to_bits() as i32;
}
