//! Blocks of 256: weights are multiplied by their scales before they are multiplied by activations. Two B tiles hold a
//! product of weight and scale: the two bytes of an `i16`, or, where weights have at most five bits and scales six, the
//! products by the two digits of three bits of the scale, each a byte. So two C tiles hold a block's sums. One product
//! per scale of 16 or 32 weights would need as many products, and four to eight times as many stores of C.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::operands::{CTile, Tiles, depth, products, tile_bytes};
use super::panels::Results;
use super::prefetch::{OutputPrefetcher, Prefetcher};
#[cfg(test)]
use super::scalar;
use crate::quant::activations::{SPAN, TILE_ROWS, tile};
use crate::quant::layout::{PANEL_ROWS, QUAD_BYTES};
use crate::quant::packed_matrix::{PackedMatrix, packed_block};
use crate::quant::unpack::{BlockScales, Format};
use crate::simd::avx512::float::Avx512Lanes;
use crate::simd::bytes::ByteLanes;
use crate::simd::float::Floats;
use crate::simd::words::Words;

/// Row tiles that share loaded B tiles: their A and C tiles and two B tiles fill the tile registers.
const TILES: usize = 2;
/// Rows whose sums and products with mins fit in the vector registers.
const HALF: usize = TILE_ROWS / 2;

/// Row tiles up to which the panels of a group are multiplied in turn, as by vectors: four streams from memory are
/// faster than one (16 rows of Q4_K 1.15 times, 64 rows 1.1). The results of more rows would not stay in the L1 cache.
const IN_TURN: usize = 4;

/// Sums of up to [`TILES`] row tiles over a block: of the products with low bytes, and with high bytes.
type Sums = [[CTile; 2]; TILES];

/// Where [`Sums`] belong.
#[derive(Clone, Copy)]
struct Batch {
    /// The panel, in the group.
    panel: usize,
    /// The first row tile, and how many.
    row_tile: usize,
    tiles: usize,
    /// The block, in the range.
    block: usize,
    /// Which of the [`Factors`] are the block's.
    factors: usize,
}

/// Adds the products of a range of blocks to the results of a group of panels.
///
/// Between tile products, the epilogue of the previous batch runs: an epilogue of its own takes 10
/// % longer in total. A block is unpacked at once: between tile products, its stores delay the
/// loads of tiles, and a prompt takes 20 % longer.
///
/// # Safety
/// The caller is inside a function with the features of `entry::amx`, and the tile registers are configured as in
/// [`MatMul::eval`](super::matmul). The matrix has blocks of 256, the panels of `group` and the blocks of `x`. The
/// results of all rows of `x` are initialised, for as many panels.
#[inline(always)]
pub(super) unsafe fn add_blocks<F: Format>(
    l: Avx512Lanes,
    weights: &PackedMatrix<'_>,
    group: Range<usize>,
    x: &Tiles<'_>,
    mut ahead: OutputPrefetcher,
    results: &mut Results,
) {
    let block_bytes = PANEL_ROWS * F::TYPE.packed_block_bytes();
    let row_tiles = x.count;
    let mut tail = MaybeUninit::uninit();
    let mut sums: [Sums; 2] = [const { [const { [const { CTile::EMPTY }; 2] }; TILES] }; 2];
    // An empty batch precedes the first.
    let mut before = Batch { panel: 0, row_tile: 0, tiles: 0, block: 0, factors: 1 };
    // SAFETY: the caller entered the features, configured the registers and initialised the results; the matrix has the
    // panels and the blocks.
    unsafe {
        let (mut scaled, mut factors) = (ScaledWeights::new(l), [Factors::new(l); 2]);
        let mut epilogue = Epilogue { l, x, results };
        let mut batches = 0;
        let order = Order { panels: group.len(), blocks: x.blocks.len(), in_turn: row_tiles <= IN_TURN };
        for i in 0..order.panels * order.blocks {
            let ((panel, block), current) = (order.get(i), i % 2);
            let from = packed_block::<F>(weights, group.start + panel, x.blocks.start + block, &mut tail);
            let next = from.wrapping_offset(order.next(block, weights.blocks()) * block_bytes as isize);
            let steps = F::SCALES + products::<F>() * row_tiles.div_ceil(TILES);
            let mut prefetcher = Prefetcher::new(next, block_bytes, steps);
            scaled.unpack::<F>(l, from, &mut prefetcher, &mut factors[current]);
            for row_tile in (0..row_tiles).step_by(TILES) {
                let tiles = TILES.min(row_tiles - row_tile);
                let batch = Batch { panel, row_tile, tiles, block, factors: current };
                let a = x.a::<F>(block, row_tile);
                let [even, odd] = &mut sums;
                let (sums, done) = if batches % 2 == 0 { (even, odd) } else { (odd, even) };
                batches += 1;
                clear(sums);
                for k in 0..products::<F>() {
                    prefetcher.step();
                    ahead.step();
                    multiply::<F>(a, &scaled, k, &mut sums[..tiles]);
                    if k < 2 * before.tiles {
                        epilogue.add_half::<F>(before, &factors[before.factors], done, k);
                    }
                }
                store(&mut sums[..tiles]);
                before = batch;
            }
        }
        for half in 0..2 * before.tiles {
            epilogue.add_half::<F>(before, &factors[before.factors], &sums[(batches + 1) % 2], half);
        }
    }
}

/// The order of a group's blocks.
struct Order {
    panels: usize,
    blocks: usize,
    /// A block of each panel in turn; else panel by panel.
    in_turn: bool,
}

impl Order {
    /// Panel and block `i`.
    #[inline(always)]
    fn get(&self, i: usize) -> (usize, usize) {
        if self.in_turn { (i % self.panels, i / self.panels) } else { (i / self.blocks, i % self.blocks) }
    }

    /// Distance in packed blocks from `block` of the range to the block to prefetch; a panel has `of_panel` blocks.
    /// With panels in turn: the panel's next block, at the end of the range its first block in the same panel of the
    /// next group. Else the same block of the next panel.
    #[inline(always)]
    fn next(&self, block: usize, of_panel: usize) -> isize {
        match self.in_turn {
            true if block + 1 < self.blocks => 1,
            true => (self.panels * of_panel) as isize - block as isize,
            false => of_panel as isize,
        }
    }
}

/// The operations on stored C tiles, those of `microkernel.rs`.
struct Epilogue<'a> {
    l: Avx512Lanes,
    x: &'a Tiles<'a>,
    results: &'a mut Results,
}

impl Epilogue<'_> {
    /// Adds the products of [`HALF`] of a row tile's rows to their results.
    ///
    /// # Safety
    /// The caller is inside a function with AVX-512's features; the batch is within `x`, has the rows, whose results are
    /// initialised, and `sums` are its stored sums.
    #[inline(always)]
    unsafe fn add_half<F: Format>(&mut self, batch: Batch, factors: &Factors, sums: &Sums, half: usize) {
        let l = self.l;
        let (of_batch, first) = (half / 2, half % 2 * HALF);
        let row_tile = batch.row_tile + of_batch;
        let pairs = if F::MIN_PAIRS == 4 { tile::q8k::BSUMS_OF_32 } else { tile::q8k::BSUMS_OF_16 };
        // SAFETY: the caller entered the features; the batch is within `x`, has these rows, whose results are
        // initialised, and `sums` are stored.
        unsafe {
            let of_rows = self.x.sums::<F>(batch.block, row_tile).add(first);
            let mut mins = [l.zero(); HALF];
            for (p, pair) in factors.mins[..F::MIN_PAIRS].iter().enumerate() {
                l.add_pairs(&mut mins, *pair, of_rows.add((pairs + p) * TILE_ROWS));
            }
            let [low, high] = sums.get_unchecked(of_batch);
            for (r, mins) in mins.into_iter().enumerate() {
                let load = |c: &CTile| _mm512_load_si512(c.0.as_ptr().add((first + r) * PANEL_ROWS).cast());
                let high = match F::DIGITS {
                    Some(_) => _mm512_slli_epi32::<3>(load(high)),
                    None => _mm512_slli_epi32::<8>(load(high)),
                };
                let sum = _mm512_add_epi32(load(low), high);
                let mut sum = l.mul(l.to_float(sum), factors.d);
                if F::MIN_PAIRS > 0 {
                    sum = l.fma(l.to_float(mins), factors.dmin, sum);
                }
                let row = row_tile * TILE_ROWS + first + r;
                let result = self.results.get_unchecked_mut(batch.panel).get_unchecked_mut(row).as_mut_ptr().cast();
                let scale = f32::from_bits(*of_rows.add(tile::q8k::SCALE * TILE_ROWS + r) as u32);
                l.store(result, l.fma(sum, l.splat(scale), l.load(result)));
            }
        }
    }
}

/// What a block's sums are multiplied by, of [`BlockScales`].
#[derive(Clone, Copy)]
struct Factors {
    d: __m512,
    dmin: __m512,
    mins: [__m512i; 8],
}

impl Factors {
    /// # Safety
    /// The caller is inside a function with AVX-512's features.
    #[inline(always)]
    unsafe fn new(l: Avx512Lanes) -> Self {
        // SAFETY: the caller entered the features.
        unsafe { Self { d: l.splat(0.0), dmin: l.splat(0.0), mins: [l.zero(); 8] } }
    }
}

/// The weights of a panel and a block, multiplied by their scales: `8 high + low` if [`Format::DIGITS`], else `256
/// high + low`.
#[repr(C, align(64))]
struct ScaledWeights {
    /// B tiles `(4, 16, 64)`, unsigned.
    low: [MaybeUninit<u8>; SPAN / 4 * QUAD_BYTES],
    /// B tiles `(4, 16, 64)`; signed if they are upper bytes.
    high: [MaybeUninit<u8>; SPAN / 4 * QUAD_BYTES],
    scales: BlockScales<Avx512Lanes>,
}

impl ScaledWeights {
    /// # Safety
    /// The caller is inside a function with AVX-512's features.
    #[inline(always)]
    unsafe fn new(l: Avx512Lanes) -> Self {
        // SAFETY: the caller entered the features.
        let scales = unsafe { BlockScales::empty(l) };
        Self { low: [MaybeUninit::uninit(); _], high: [MaybeUninit::uninit(); _], scales }
    }

    /// Unpacks a block. With few rows this takes longer than the products, so the next panel is prefetched
    /// meanwhile: up to 32 rows are 1.2 times as fast.
    ///
    /// # Safety
    /// The caller is inside a function with the features of `entry::amx`; `block` is a packed block of format `F`, one of
    /// 256.
    #[inline(always)]
    unsafe fn unpack<F: Format>(
        &mut self,
        l: Avx512Lanes,
        block: *const u8,
        prefetcher: &mut Prefetcher,
        factors: &mut Factors,
    ) {
        // SAFETY: the caller entered the features; `block` is a packed block of this format. Blocks of 256 have an even
        // number of scales.
        unsafe {
            F::load_scales(l, block, 0, &mut self.scales);
            for s in (0..F::SCALES).step_by(2) {
                prefetcher.step();
                self.unpack_scale::<F, 0>(l, block, s);
                prefetcher.step();
                self.unpack_scale::<F, 1>(l, block, s + 1);
            }
            // Weights with digits are not shifted left, for which `d` is smaller by a power of two.
            factors.d = l.mul(self.scales.d[0], l.splat((1 << F::DIGITS.unwrap_or(0)) as f32));
            factors.dmin = self.scales.dmin;
            factors.mins[..F::MIN_PAIRS].copy_from_slice(&self.scales.mins[..F::MIN_PAIRS]);
        }
    }

    /// Unpacks the weights of scale `s`, odd or even.
    ///
    /// # Safety
    /// As [`ScaledWeights::unpack`], with the block's scales loaded; the block has a scale `s`, `s % 2 == ODD`.
    #[inline(always)]
    unsafe fn unpack_scale<F: Format, const ODD: usize>(&mut self, l: Avx512Lanes, block: *const u8, s: usize) {
        // SAFETY: the caller entered the features; `block` is a packed block of this format with a scale `s`.
        unsafe {
            let scale = l.pair_scales(self.scales.scales[s], self.scales.scales[s]);
            let cursor = F::cursor(l, block, 0, s);
            for g in 0..F::QUADS_PER_SCALE {
                let bytes = F::quad(l, cursor, g);
                let [low, high] = match const { (F::DIGITS, ODD) } {
                    (None, _) => bytes_of_products(bytes, scale, F::ZERO_POINT),
                    (Some(0), _) => digits(bytes, scale),
                    (Some(4), 0) => digits(bytes, _mm512_srli_epi16::<4>(scale)),
                    (Some(4), _) => digits(upper_nibbles(bytes), scale),
                    (Some(_), _) => unreachable!("`Format::DIGITS` is 0 or 4"),
                };
                let to = (s * F::QUADS_PER_SCALE + g) * QUAD_BYTES;
                _mm512_store_si512(self.low.as_mut_ptr().add(to).cast(), low);
                _mm512_store_si512(self.high.as_mut_ptr().add(to).cast(), high);
            }
        }
    }
}

/// The products of bytes of at most five bits and the lower and upper three bits of `scale`, 16 pairs of `i16`.
///
/// A product of an `i16` multiplies both of its bytes: neither exceeds 31 * 7.
///
/// # Safety
/// The caller is inside a function with AVX-512's features.
#[inline(always)]
unsafe fn digits(bytes: __m512i, scale: __m512i) -> [__m512i; 2] {
    // SAFETY: the caller entered the features.
    unsafe {
        let [low, high] = [_mm512_and_si512(scale, _mm512_set1_epi16(7)), _mm512_srli_epi16::<3>(scale)];
        [_mm512_mullo_epi16(bytes, low), _mm512_mullo_epi16(bytes, high)]
    }
}

/// The upper four bits of every byte, whose lower ones are zero. Not by a shift, whose port the products occupy.
///
/// # Safety
/// The caller is inside a function with the features of `entry::amx`.
#[inline(always)]
unsafe fn upper_nibbles(bytes: __m512i) -> __m512i {
    // SAFETY: the caller entered the features. Byte `i` of eight becomes bits `8 i + 4..8 i + 12`.
    unsafe { _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x3c34_2c24_1c14_0c04), bytes) }
}

/// The lower and the upper bytes of the products of bytes, less a zero point, and `scale`, 16 pairs of `i16`: at most
/// 128 * 32 in magnitude.
///
/// # Safety
/// The caller is inside a function with AVX-512's features.
#[inline(always)]
unsafe fn bytes_of_products(bytes: __m512i, scale: __m512i, zero_point: Option<u8>) -> [__m512i; 2] {
    // SAFETY: the caller entered the features.
    unsafe {
        let even_bytes = _mm512_set1_epi16(0xff);
        let offset = _mm512_mullo_epi16(scale, _mm512_set1_epi16(zero_point.unwrap_or(0).into()));
        // Modulo 2^16.
        let scaled = |w| {
            let product = _mm512_mullo_epi16(w, scale);
            if zero_point.is_some() { _mm512_sub_epi16(product, offset) } else { product }
        };
        let even = scaled(_mm512_and_si512(bytes, even_bytes));
        let odd = scaled(_mm512_srli_epi16::<8>(bytes));
        // The even bytes of `a`, the odd bytes of `b`.
        let merge = |a, b| _mm512_ternarylogic_epi64::<0xca>(even_bytes, a, b);
        [merge(even, _mm512_slli_epi16::<8>(odd)), merge(_mm512_srli_epi16::<8>(even), odd)]
    }
}

/// Begins the sums of a batch, in tile registers 4 to 7; without such registers, in memory.
///
/// # Safety
/// The tile registers are configured as in [`MatMul::eval`](super::matmul).
#[inline(always)]
#[cfg_attr(not(test), allow(unused_variables))]
unsafe fn clear(sums: &mut Sums) {
    #[cfg(test)]
    if !crate::simd::amx::has_tiles() {
        sums.as_flattened_mut().iter_mut().for_each(|c| c.0.fill(MaybeUninit::new(0)));
        return;
    }
    // SAFETY: the registers are configured; those that are written are declared.
    unsafe {
        asm!(
            "tilezero tmm4", "tilezero tmm5", "tilezero tmm6", "tilezero tmm7",
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nomem, nostack, preserves_flags),
        );
    }
}

/// Adds product `k` of the block for one or two row tiles, whose A tiles begin at `a`, to their `sums`.
///
/// # Safety
/// The tile registers are configured as in [`MatMul::eval`](super::matmul) for `F`; `a` has A tiles of a
/// block for as many row tiles as there are `sums`.
#[inline(always)]
unsafe fn multiply<F: Format>(a: *const u8, weights: &ScaledWeights, k: usize, sums: &mut [[CTile; 2]]) {
    // SAFETY: the block has product `k`; a row tile's A tiles of a span are contiguous.
    let (a, low, high) = unsafe {
        let b = k * depth::<F>() / 4 * QUAD_BYTES;
        (a.add(k * TILE_ROWS * depth::<F>()), weights.low.as_ptr().add(b), weights.high.as_ptr().add(b))
    };
    let next_tile = a.wrapping_add(tile_bytes::<F>());
    #[cfg(test)]
    if !crate::simd::amx::has_tiles() {
        for (a, [of_low, of_high]) in [a, next_tile].into_iter().zip(sums) {
            // SAFETY: the caller gives A and B tiles of this depth; `clear` initialised the sums.
            unsafe {
                scalar::multiply(a, low, scalar::B::Unsigned, depth::<F>(), of_low);
                let bytes = if F::DIGITS.is_some() { scalar::B::Unsigned } else { scalar::B::Signed };
                scalar::multiply(a, high, bytes, depth::<F>(), of_high);
            }
        }
        return;
    }
    macro_rules! multiply {
        ($of_high:literal) => {
            asm!(
                "tileloadd tmm0, [{a} + {line}*1]",
                "tileloadd tmm2, [{low} + {line}*1]",
                "tdpbsud tmm4, tmm0, tmm2",
                "tileloadd tmm3, [{high} + {line}*1]",
                concat!($of_high, " tmm5, tmm0, tmm3"),
                a = in(reg) a,
                low = in(reg) low,
                high = in(reg) high,
                line = in(reg) QUAD_BYTES,
                out("tmm0") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
                options(nostack, preserves_flags),
            );
            if sums.len() == TILES {
                asm!(
                    "tileloadd tmm1, [{a} + {line}*1]",
                    "tdpbsud tmm6, tmm1, tmm2",
                    concat!($of_high, " tmm7, tmm1, tmm3"),
                    a = in(reg) next_tile,
                    line = in(reg) QUAD_BYTES,
                    out("tmm1") _, out("tmm6") _, out("tmm7") _,
                    options(nostack, preserves_flags),
                );
            }
        };
    }
    // SAFETY: the registers are configured for these tiles, which the caller has. The registers that are written are
    // declared; nothing between the two blocks writes them.
    unsafe {
        if const { F::DIGITS.is_some() } {
            multiply!("tdpbsud");
        } else {
            multiply!("tdpbssd");
        }
    }
}

/// Stores the sums of one or two row tiles.
///
/// # Safety
/// The tile registers are configured as in [`MatMul::eval`](super::matmul), and hold the sums.
#[inline(always)]
unsafe fn store(sums: &mut [[CTile; 2]]) {
    #[cfg(test)]
    if !crate::simd::amx::has_tiles() {
        return;
    }
    macro_rules! store {
        ($sums:expr, $low:literal, $high:literal) => {
            asm!(
                concat!("tilestored [{low} + {line}*1], ", $low),
                concat!("tilestored [{high} + {line}*1], ", $high),
                low = in(reg) &raw mut $sums[0],
                high = in(reg) &raw mut $sums[1],
                line = in(reg) QUAD_BYTES,
                options(nostack, preserves_flags),
            )
        };
    }
    // SAFETY: C tiles are `(16, 64)` bytes, as the registers.
    unsafe {
        if let [first, ..] = sums {
            store!(first, "tmm4", "tmm5");
        }
        if let [_, second] = sums {
            store!(second, "tmm6", "tmm7");
        }
    }
}
