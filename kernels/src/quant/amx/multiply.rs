//! The tile products and their epilogue.
//!
//! One tile product per scale. Vector code applies the scale, so C is stored and read back per scale. Those stores are
//! the bound: a store takes as long as a product, and the two do not overlap. Meanwhile, vector code runs the epilogue
//! of the previous products.
//!
//! Outer loop over K, inner over panels: a range of blocks is short enough for its A tiles to stay in the L2 cache, and
//! `y` holds the partial results between ranges.

use std::arch::asm;
use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::operands::{
    A_BYTES, K_SPAN, PackedActivations, ROWS, UnpackedWeights, bsum_words, depth, scales, span_blocks,
};
use crate::columns::ColumnsMut;
use crate::isa::Amx;
use crate::quant::activations::Activations;
use crate::quant::layout::{PANEL_ROWS, QUAD_BYTES, ROW_BLOCK};
use crate::quant::output::store_panel;
use crate::quant::packed_matrix::{PackedBlock, PackedMatrix, Panel, tail_block};
use crate::quant::unpack::{Format, with_format};
use crate::quant::weight_type::WeightType;
use crate::simd::amx::{AmxOp, TileRegisters, TileShape};
use crate::simd::avx512::float::Avx512Lanes;
use crate::simd::bytes::ByteLanes;
use crate::simd::float::Floats;
use crate::simd::prefetch::prefetch;

/// Rows that share unpacked weights.
const PASS_ROWS: usize = 128;
/// Panels whose results are stored together, row by row. Rows of `y` are often a multiple of 4 KiB apart, which is one
/// set of the L1 cache: stored panel by panel they would evict each other.
const PANEL_GROUP: usize = 4;
/// Tile products that are computed while the epilogue of the previous batch runs.
const BATCH: usize = 8;
/// Vectors are faster for fewer rows.
const MIN_ROWS: usize = 25;

/// Whether [`matmul`] handles a product with `rows` rows. It does not support several activation blocks per block of
/// weights, as in NVFP4; vector code handles these.
pub(in crate::quant) const fn multiplies(weight_type: WeightType, rows: usize) -> bool {
    rows >= MIN_ROWS && weight_type.block_len() == weight_type.activation_type().block_len()
}

/// As [`crate::quant::matmul`].
pub(in crate::quant) fn matmul(isa: Amx, weights: &PackedMatrix<'_>, x: &Activations<'_>, y: ColumnsMut<'_>) {
    with_format!(weights.weight_type(), |F| isa.run_tiles(MatMul::<F> { weights, x, y, format: PhantomData }));
}

struct MatMul<'a, F> {
    weights: &'a PackedMatrix<'a>,
    x: &'a Activations<'a>,
    y: ColumnsMut<'a>,
    format: PhantomData<F>,
}

impl<F: Format> AmxOp for MatMul<'_, F> {
    #[inline(always)]
    fn eval(mut self, l: Avx512Lanes) {
        if const { !multiplies(F::TYPE, MIN_ROWS) } {
            unreachable!("`multiplies` excludes it");
        }
        let row_blocks = self.x.row_blocks();
        let range = self.y.range();
        let panels = range.start / PANEL_ROWS..range.end.div_ceil(PANEL_ROWS);
        let a = TileShape { rows: ROWS, bytes: depth::<F>() };
        let b = TileShape { rows: F::QUADS_PER_SCALE, bytes: QUAD_BYTES };
        let c = TileShape { rows: ROWS, bytes: 4 * PANEL_ROWS };
        // SAFETY: an `Amx` proves that tile registers are available, and operations are not nested.
        let _registers = unsafe { TileRegisters::new([a, a, b, b, c, c, c, c]) };
        let mut x = PackedActivations::EMPTY;
        // The scalar products of the tests also read the rows that `pack` adds and leaves uninitialised.
        #[cfg(test)]
        x.a.0.fill(MaybeUninit::new(0));
        let mut results: Results = [[[0.0; PANEL_ROWS]; PASS_ROWS]; PANEL_GROUP];
        let pass_blocks = row_blocks.count.div_ceil(row_blocks.count.div_ceil(PASS_ROWS / ROW_BLOCK));
        for first in (0..row_blocks.count).step_by(pass_blocks) {
            let pass = first..(first + pass_blocks).min(row_blocks.count);
            let (first_row, last) = (row_blocks.get(first).first, row_blocks.get(pass.end - 1));
            let rows = last.first + last.rows - first_row;
            let blocks = A_BYTES / (rows.next_multiple_of(ROWS) * K_SPAN) * span_blocks::<F>();
            for block in (0..self.weights.blocks()).step_by(blocks) {
                x.pack::<F>(self.x, pass.clone(), block..(block + blocks).min(self.weights.blocks()));
                for group in panels.clone().step_by(PANEL_GROUP).map(|p| p..(p + PANEL_GROUP).min(panels.end)) {
                    for (panel, results) in group.clone().zip(&mut results) {
                        if block == 0 {
                            results[..x.rows].fill([0.0; PANEL_ROWS]);
                        } else {
                            // SAFETY: the previous range of blocks stored these rows.
                            unsafe { load_panel(&mut self.y, panel, first_row, &mut results[..rows]) };
                        }
                    }
                    // SAFETY: `run_tiles` entered the features; the shapes were checked by `super::matmul`.
                    unsafe { add_blocks::<F>(l, self.weights, group.clone(), &x, &mut results) };
                    for row in 0..rows {
                        for (panel, results) in group.clone().zip(&results) {
                            store_panel(&mut self.y, panel, first_row + row, &results[row..row + 1]);
                        }
                    }
                }
            }
        }
    }
}

/// Results of a group of panels: `(panels, rows, outputs)`.
type Results = [[[f32; PANEL_ROWS]; PASS_ROWS]; PANEL_GROUP];

/// Reads back what [`store_panel`] wrote.
///
/// # Safety
/// [`store_panel`] has stored these rows.
#[inline(always)]
unsafe fn load_panel(y: &mut ColumnsMut<'_>, panel: usize, first_row: usize, results: &mut [[f32; PANEL_ROWS]]) {
    let range = y.range();
    let (start, stop) = ((panel * PANEL_ROWS).max(range.start), ((panel + 1) * PANEL_ROWS).min(range.end));
    for (row, result) in results.iter_mut().enumerate() {
        let y = &y.row_mut(first_row + row)[start - range.start..stop - range.start];
        // SAFETY: the caller has stored them.
        unsafe {
            if let Some(y) = y.first_chunk::<PANEL_ROWS>() {
                *result = std::mem::transmute_copy(y);
            } else {
                for (result, y) in result[start - panel * PANEL_ROWS..].iter_mut().zip(y) {
                    *result = y.assume_init();
                }
            }
        }
    }
}

/// A stored C tile: `(16 rows, 16 outputs)`.
#[repr(C, align(64))]
struct CTile([MaybeUninit<i32>; ROWS * PANEL_ROWS]);

/// The tile products of up to [`BATCH`] scales of 16 rows and a panel.
#[derive(Clone, Copy)]
struct Batch {
    /// The panel, in the group.
    panel: usize,
    /// The 16 rows.
    row_tile: usize,
    /// The K span's first block, in the range.
    block: usize,
    /// The first scale in the K span, and how many.
    scale: usize,
    count: usize,
    /// Which of the two buffers has the K span's weights.
    buffer: usize,
}

/// Adds the products of a range of blocks to the results of a group of panels.
///
/// Tile registers and vectors alternate: between the tile products of a batch, the epilogue of the previous batch runs.
/// Weights are unpacked into two buffers in turn, because the last epilogue of a K span overlaps with the first
/// products of the next.
///
/// # Safety
/// The caller is inside a function with AVX-512's features, and the tile registers are configured as in
/// [`MatMul::eval`]. The matrix has the panels of `group`, and `x` was packed for blocks that it has.
#[inline(always)]
unsafe fn add_blocks<F: Format>(
    l: Avx512Lanes,
    weights: &PackedMatrix<'_>,
    group: Range<usize>,
    x: &PackedActivations,
    results: &mut Results,
) {
    let block_bytes = PANEL_ROWS * F::TYPE.packed_block_bytes();
    let row_tiles = x.rows / ROWS;
    let mut tail = PackedBlock::new();
    let mut products = [const { [const { CTile([MaybeUninit::uninit(); _]) }; BATCH] }; 2];
    // An empty batch precedes the first.
    let mut before = Batch { panel: 0, row_tile: 0, block: 0, scale: 0, count: 0, buffer: 1 };
    // SAFETY: as the caller's; the panels have these blocks, and `x` was packed for them.
    unsafe {
        let mut buffers = [UnpackedWeights::new(l), UnpackedWeights::new(l)];
        let mut epilogue = Epilogue { l, x, results };
        let mut sums = [l.zero(); ROWS];
        let (mut batches, mut spans) = (0, 0);
        for (p, panel) in group.enumerate() {
            for first in (0..x.blocks.len()).step_by(span_blocks::<F>()) {
                let blocks = span_blocks::<F>().min(x.blocks.len() - first);
                let buffer = spans % 2;
                spans += 1;
                let mut prefetcher = Prefetcher::NONE;
                for i in 0..blocks {
                    let b = x.blocks.start + first + i;
                    let block = match weights.panel(panel) {
                        Panel::Packed(panel) => panel.as_ptr().add(b * block_bytes),
                        Panel::Rows(rows) => {
                            tail_block(F::TYPE, rows, weights.row_bytes(), b, &mut tail);
                            tail.0.as_ptr()
                        }
                    };
                    if i == 0 {
                        // The same K span of the next panel.
                        let from = block.wrapping_add(weights.blocks() * block_bytes);
                        prefetcher = Prefetcher::new(from, blocks * block_bytes, blocks * scales::<F>() * row_tiles);
                    }
                    buffers[buffer].unpack::<F>(l, block, i);
                }
                let count = blocks * scales::<F>();
                for row_tile in 0..row_tiles {
                    for scale in (0..count).step_by(BATCH) {
                        let batch =
                            Batch { panel: p, row_tile, block: first, scale, count: BATCH.min(count - scale), buffer };
                        let a = x.a.0[x.at::<F>(first, scale, row_tile)..].as_ptr();
                        let b = buffers[buffer].b.as_ptr().add(scale * F::QUADS_PER_SCALE * QUAD_BYTES);
                        let [even, odd] = &mut products;
                        let (products, done) = if batches % 2 == 0 { (even, odd) } else { (odd, even) };
                        batches += 1;
                        let weights_before = &buffers[before.buffer];
                        epilogue.begin::<F>(before, &mut sums);
                        for s in 0..batch.count.max(before.count) {
                            if s < batch.count {
                                prefetcher.step();
                                let a = a.add(s * ROWS * depth::<F>());
                                multiply::<F>(a, b.add(s * F::QUADS_PER_SCALE * QUAD_BYTES), &mut products[s]);
                            }
                            if s < before.count {
                                epilogue.add::<F>(before, weights_before, &done[s], s, &mut sums);
                            }
                        }
                        epilogue.end::<F>(before, weights_before, &sums);
                        before = batch;
                    }
                }
            }
        }
        epilogue.begin::<F>(before, &mut sums);
        for (s, product) in products[(batches + 1) % 2][..before.count].iter().enumerate() {
            epilogue.add::<F>(before, &buffers[before.buffer], product, s, &mut sums);
        }
        epilogue.end::<F>(before, &buffers[before.buffer], &sums);
    }
}

/// Prefetches a range of memory, a few cache lines per tile product.
struct Prefetcher {
    from: *const u8,
    end: *const u8,
    step: usize,
}

impl Prefetcher {
    const NONE: Self = Self { from: std::ptr::null(), end: std::ptr::null(), step: 0 };

    /// `bytes` from `from` on, spread over `products` steps.
    #[inline(always)]
    fn new(from: *const u8, bytes: usize, products: usize) -> Self {
        Self { from, end: from.wrapping_add(bytes), step: bytes.div_ceil(LINE * products) * LINE }
    }

    #[inline(always)]
    fn step(&mut self) {
        if self.from < self.end {
            for line in (0..self.step).step_by(LINE) {
                prefetch(self.from.wrapping_add(line));
            }
            self.from = self.from.wrapping_add(self.step);
        }
    }
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Rows whose sums and products with mins fit in the vector registers.
const HALF: usize = 8;

/// The operations on stored C tiles, those of `microkernel.rs`. `sums` are 16 rows' integer sums over a block of 256; for
/// blocks of 32, the bits of the results themselves.
struct Epilogue<'a> {
    l: Avx512Lanes,
    x: &'a PackedActivations,
    results: &'a mut Results,
}

impl Epilogue<'_> {
    /// The [`bsum_words`] of the batch's rows for its block `i`: word by word, `x.rows` apart.
    ///
    /// # Safety
    /// The batch and its block `i` are within `x`.
    #[inline(always)]
    unsafe fn bsums<F: Format>(&self, batch: Batch, i: usize) -> *const i32 {
        let at = (batch.block + i) * bsum_words::<F>().len() * self.x.rows + batch.row_tile * ROWS;
        // SAFETY: as the caller's.
        unsafe { self.x.bsums.as_ptr().add(at) }
    }

    #[inline(always)]
    fn results(&mut self, batch: Batch) -> &mut [[f32; PANEL_ROWS]; ROWS] {
        &mut self.results[batch.panel].as_chunks_mut().0[batch.row_tile]
    }

    /// # Safety
    /// The caller is inside a function with AVX-512's features.
    #[inline(always)]
    unsafe fn begin<F: Format>(&mut self, batch: Batch, sums: &mut [__m512i; ROWS]) {
        let l = self.l;
        let results = self.results(batch);
        // SAFETY: as the caller's.
        unsafe {
            for (sum, result) in sums.iter_mut().zip(results) {
                if F::TYPE.block_len() == 32 {
                    *sum = _mm512_castps_si512(l.load(result.as_ptr()));
                } else if batch.scale == 0 {
                    *sum = l.zero();
                }
            }
        }
    }

    /// # Safety
    /// The caller is inside a function with AVX-512's features; the batch is within `x`, `s` one of its scales, and
    /// `product` was stored.
    #[inline(always)]
    unsafe fn add<F: Format>(
        &self,
        batch: Batch,
        weights: &UnpackedWeights,
        product: &CTile,
        s: usize,
        sums: &mut [__m512i; ROWS],
    ) {
        let l = self.l;
        // SAFETY: as the caller's.
        unsafe {
            let dot = |r: usize| _mm512_load_si512(product.0.as_ptr().add(r * PANEL_ROWS).cast());
            if F::TYPE.block_len() == 256 {
                let scale = *weights.scales.scales.get_unchecked(batch.scale + s);
                for (r, sum) in sums.iter_mut().enumerate() {
                    *sum = _mm512_add_epi32(*sum, _mm512_mullo_epi32(dot(r), scale));
                }
                return;
            }
            let d = *weights.d.get_unchecked(batch.scale + s);
            let bsums = self.bsums::<F>(batch, s);
            let float = |word: usize, r: usize| l.splat(f32::from_bits(*bsums.add(word * self.x.rows + r) as u32));
            for (r, sum) in sums.iter_mut().enumerate() {
                let scaled = l.mul(l.to_float(dot(r)), float(0, r));
                let mut y = l.fma(scaled, d, _mm512_castsi512_ps(*sum));
                if F::HAS_MIN {
                    y = l.fma(*weights.mins.get_unchecked(s), float(1, r), y);
                }
                *sum = _mm512_castps_si512(y);
            }
        }
    }

    /// # Safety
    /// The caller is inside a function with AVX-512's features; the batch is within `x`.
    #[inline(always)]
    unsafe fn end<F: Format>(&mut self, batch: Batch, weights: &UnpackedWeights, sums: &[__m512i; ROWS]) {
        let l = self.l;
        // SAFETY: as the caller's.
        unsafe {
            if F::TYPE.block_len() == 32 {
                for (result, sum) in self.results(batch).iter_mut().zip(sums) {
                    l.store(result.as_mut_ptr(), _mm512_castsi512_ps(*sum));
                }
            } else if batch.scale + batch.count == scales::<F>() {
                self.end_half::<F, 0>(batch, weights, sums);
                self.end_half::<F, HALF>(batch, weights, sums);
            }
        }
    }

    /// Ends a block of 256 for the rows from `FIRST` on: the mins, and the activations' scale.
    ///
    /// # Safety
    /// The caller is inside a function with AVX-512's features; the batch is within `x`, and ends a block of 256.
    #[inline(always)]
    unsafe fn end_half<F: Format, const FIRST: usize>(
        &mut self,
        batch: Batch,
        weights: &UnpackedWeights,
        sums: &[__m512i; ROWS],
    ) {
        let l = self.l;
        // SAFETY: as the caller's.
        unsafe {
            let bsums = self.bsums::<F>(batch, 0).add(FIRST);
            let mut totals = [l.zero(); HALF];
            for p in 0..F::MIN_PAIRS {
                l.add_pairs(&mut totals, weights.scales.mins[p], bsums.add((1 + p) * self.x.rows));
            }
            let results = self.results(batch);
            for r in 0..HALF {
                let mut sum = l.mul(l.to_float(sums[FIRST + r]), weights.scales.d[0]);
                if F::MIN_PAIRS > 0 {
                    sum = l.fma(l.to_float(totals[r]), weights.scales.dmin, sum);
                }
                let result = results[FIRST + r].as_mut_ptr();
                l.store(result, l.fma(sum, l.splat(f32::from_bits(*bsums.add(r) as u32)), l.load(result)));
            }
        }
    }
}

/// `c = a * b` over the inputs of a scale.
///
/// # Safety
/// The tile registers are configured as in [`MatMul::eval`] for `F`; `a` and `b` are tiles of these shapes.
#[inline(always)]
unsafe fn multiply<F: Format>(a: *const MaybeUninit<u8>, b: *const MaybeUninit<u8>, c: &mut CTile) {
    #[cfg(test)]
    if !crate::simd::amx::has_tiles() {
        // SAFETY: as the caller's.
        return unsafe { tests::multiply::<F>(a, b, c) };
    }
    macro_rules! multiply {
        ($product:literal) => {
            asm!(
                "tilezero tmm4",
                "tileloadd tmm0, [{a} + {depth}*1]",
                "tileloadd tmm2, [{b} + {line}*1]",
                concat!($product, " tmm4, tmm0, tmm2"),
                "tilestored [{c} + {line}*1], tmm4",
                a = in(reg) a,
                b = in(reg) b,
                c = in(reg) &raw mut c.0,
                depth = in(reg) depth::<F>(),
                line = in(reg) QUAD_BYTES,
                out("tmm0") _,
                out("tmm2") _,
                out("tmm4") _,
                options(nostack, preserves_flags),
            )
        };
    }
    // SAFETY: `MatMul::eval` configured the registers for these shapes; `a`, `b` and `c` are tiles of them. The registers
    // that are written are declared.
    unsafe {
        if F::ZERO_POINT.is_some() {
            multiply!("tdpbssd");
        } else {
            multiply!("tdpbsud");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::quant::weight_type::WeightType;
    use crate::quant::{pack, quantize_row, scalar};
    use crate::simd::entry;

    /// [`super::multiply`] in scalar code.
    ///
    /// # Safety
    /// `a` and `b` are tiles of the shapes of `F`.
    pub unsafe fn multiply<F: Format>(a: *const MaybeUninit<u8>, b: *const MaybeUninit<u8>, c: &mut CTile) {
        for m in 0..ROWS {
            for n in 0..PANEL_ROWS {
                let dot = (0..depth::<F>()).map(|k| {
                    // SAFETY: `a` is `(ROWS, depth)`, `b` is `(depth / 4, PANEL_ROWS, 4)`, both initialised.
                    let (x, w) = unsafe {
                        let w = (*b.add(k / 4 * QUAD_BYTES + 4 * n + k % 4)).assume_init();
                        ((*a.add(m * depth::<F>() + k)).assume_init() as i8, w)
                    };
                    i32::from(x) * if F::ZERO_POINT.is_some() { i32::from(w as i8) } else { i32::from(w) }
                });
                c.0[m * PANEL_ROWS + n].write(dot.sum());
            }
        }
    }

    #[test]
    fn epilogues_have_the_bits_of_the_reference() {
        // The features of `entry::amx`: those of AVX-512 with VBMI.
        if !Isa::available().any(|isa| matches!(isa, Isa::Avx512(isa) if isa.has_vbmi())) {
            println!("skipped: epilogues of tile products: this processor has no AVX-512 VBMI");
            return;
        }
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        for weight_type in WeightType::ALL.into_iter().filter(|of| of.is_written() && multiplies(*of, MIN_ROWS)) {
            let (outputs, inputs, rows) = (40, 512, 41);
            let mut source = vec![0; weight_type.bytes_for(outputs, inputs).unwrap()];
            for row_bytes in source.chunks_exact_mut(weight_type.row_bytes(inputs).unwrap()) {
                let row: Vec<f32> = (0..inputs).map(|_| random()).collect();
                quantize_row(Isa::Scalar, weight_type, &row, row_bytes);
            }
            let mut bytes = vec![0; source.len()];
            pack(weight_type, inputs, &source, &mut bytes);
            let weights = PackedMatrix::new(weight_type, outputs, inputs, &bytes);
            let x: Vec<f32> = (0..rows * inputs).map(|_| random()).collect();
            let activation_type = weight_type.activation_type();
            let mut scratch = vec![0; activation_type.scratch_len(rows, inputs).unwrap()];
            let x = Activations::quantize(Isa::Scalar, activation_type, &x, inputs, &mut scratch);
            let (mut y, mut want) = (vec![0.0; rows * outputs], vec![0.0; rows * outputs]);
            scalar::matmul(&weights, &x, ColumnsMut::new(&mut want, rows, outputs));
            let (weights, x) = (&weights, &x);
            with_format!(weight_type, |F| {
                let y = ColumnsMut::new(&mut y, rows, outputs);
                // SAFETY: the features were found.
                unsafe { entry::amx::eval(MatMul::<F> { weights, x, y, format: PhantomData }) }
            });
            assert!(y.iter().zip(&want).all(|(y, want)| y.to_bits() == want.to_bits()), "{weight_type:?}");
        }
    }
}
