//! The quantized kernels against the scalar reference (bit for bit), against `f64` arithmetic over dequantized weights,
//! and against dequantized values that llama.cpp's own Python package produced.
//!
//! Every slice that a kernel gets is a separate allocation, as in `kernels.rs`.

use std::io::Write;
use std::mem::MaybeUninit;

use foretoken_kernels::quant::{
    ActivationFormat, ActivationLayout, ActivationType, Activations, PANEL_ROWS, PackedMatrix, WeightType,
    dequantize_packed_row, dequantize_row, matmul, pack, quantize_row, quantize_row_by_importance,
};
use foretoken_kernels::{ColumnsMut, Isa};
use half::f16;

/// A small deterministic generator (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Uniform in -1..1.
    fn symmetric(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// Roughly normal with occasional outliers, like activations.
    fn activation(&mut self) -> f32 {
        let x = (0..4).map(|_| self.symmetric()).sum::<f32>();
        if self.next().is_multiple_of(61) { 12.0 * x } else { x }
    }
}

/// Byte offsets of a block's `f16` scales.
fn scale_offsets(weight_type: WeightType) -> &'static [usize] {
    match weight_type {
        WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4_K | WeightType::Q5_K => &[0, 2],
        WeightType::Q2_K => &[80, 82],
        WeightType::Q3_K => &[108],
        WeightType::Q6_K => &[208],
        WeightType::TQ1_0 => &[52],
        WeightType::TQ2_0 => &[64],
        WeightType::MXFP4 | WeightType::NVFP4 | WeightType::IQ1_M => &[],
        _ => &[0],
    }
}

/// Rows of random blocks: any bytes with finite scales are a valid block.
fn random_rows(weight_type: WeightType, outputs: usize, inputs: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        (0..weight_type.bytes_for(outputs, inputs).unwrap()).map(|_| random.next() as u8).collect();
    for block in bytes.chunks_exact_mut(weight_type.block_bytes()) {
        for at in scale_offsets(weight_type) {
            let scale = f16::from_f32(0.01 * random.symmetric());
            block[*at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
        match weight_type {
            WeightType::MXFP4 => block[0] = 110 + block[0] % 20,
            // The scale is in the upper nibbles of four 16-bit units.
            WeightType::IQ1_M => {
                let scale = f16::from_f32(0.01 * random.symmetric()).to_bits();
                for (k, byte) in [49, 51, 53, 55].into_iter().enumerate() {
                    block[byte] = block[byte] & 15 | (scale >> (4 * k) << 4) as u8;
                }
            }
            _ => {}
        }
    }
    bytes
}

fn random_activations(rows: usize, inputs: usize, random: &mut Random) -> Vec<f32> {
    (0..rows * inputs).map(|_| random.activation()).collect()
}

fn packed(weight_type: WeightType, inputs: usize, rows: &[u8]) -> Vec<u8> {
    let mut packed = vec![0; rows.len() / weight_type.block_bytes() * weight_type.packed_block_bytes()];
    pack(weight_type, inputs, rows, &mut packed);
    packed
}

fn product(isa: Isa, matrix: &PackedMatrix<'_>, x: &[f32]) -> Vec<f32> {
    product_of(isa, matrix, x, ActivationFormat::new(isa, matrix.weight_type(), x.len() / matrix.inputs()))
}

fn product_of(isa: Isa, matrix: &PackedMatrix<'_>, x: &[f32], format: ActivationFormat) -> Vec<f32> {
    let rows = x.len() / matrix.inputs();
    let mut scratch = vec![0; format.scratch_len(rows, matrix.inputs()).unwrap()];
    multiplied(isa, matrix, &Activations::quantize(isa, format, x, matrix.inputs(), &mut scratch))
}

fn multiplied(isa: Isa, matrix: &PackedMatrix<'_>, x: &Activations<'_>) -> Vec<f32> {
    let mut y = vec![f32::NAN; x.rows() * matrix.outputs()];
    matmul(isa, matrix, x, ColumnsMut::new(&mut y, x.rows(), matrix.outputs()));
    y
}

fn assert_same_bits(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(got.to_bits() == want.to_bits(), "{what}: element {i} is {got}, not {want}");
    }
}

fn lengths(weight_type: WeightType) -> Vec<usize> {
    match weight_type.block_len() {
        256 => vec![256, 512, 768],
        64 => (64..=320).step_by(64).collect(),
        _ => (32..=288).step_by(32).collect(),
    }
}

#[test]
fn every_isa_has_the_bits_of_the_reference() {
    let mut random = Random(1);
    for weight_type in WeightType::ALL {
        for inputs in lengths(weight_type) {
            // Less than a panel, one, a row more, and many; all others are below, for one length.
            for outputs in [1, 16, 17, 100] {
                let rows = random_rows(weight_type, outputs, inputs, &mut random);
                let bytes = packed(weight_type, inputs, &rows);
                let matrix = PackedMatrix::new(weight_type, outputs, inputs, &bytes);
                let x = random_activations(13, inputs, &mut random);
                let want = product(Isa::Scalar, &matrix, &x);
                for batch in [1, 2, 3, 8, 13] {
                    let (x, want) = (x[..batch * inputs].to_vec(), &want[..batch * outputs]);
                    for isa in Isa::available().skip(1) {
                        let what = format!("{weight_type:?} {} {batch} x {inputs} x {outputs}", isa.name());
                        assert_same_bits(&product(isa, &matrix, &x), want, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn all_row_counts_and_widths_agree_with_the_reference() {
    let mut random = Random(2);
    for weight_type in WeightType::ALL {
        let inputs = if weight_type.block_len() == 256 { 512 } else { 3 * weight_type.block_len() };
        // At most three whole panels and a partial one: four that are read side by side.
        let (most, row_bytes) = (63, weight_type.row_bytes(inputs).unwrap());
        let rows = random_rows(weight_type, most, inputs, &mut random);
        let x = random_activations(40, inputs, &mut random);
        let bytes = packed(weight_type, inputs, &rows);
        let all = product(Isa::Scalar, &PackedMatrix::new(weight_type, most, inputs, &bytes), &x);
        // The first rows of the matrix, and the first columns of the reference.
        let widths = (1..=17).chain([32, 33, most]).map(|outputs| {
            let want: Vec<f32> = all.chunks_exact(most).flat_map(|y| &y[..outputs]).copied().collect();
            (outputs, packed(weight_type, inputs, &rows[..outputs * row_bytes]), want)
        });
        let widths: Vec<_> = widths.collect();
        for (isa, batch) in Isa::available().skip(1).flat_map(|isa| (1..=17).chain([40]).map(move |batch| (isa, batch)))
        {
            let format = ActivationFormat::new(isa, weight_type, batch);
            let mut scratch = vec![0; format.scratch_len(batch, inputs).unwrap()];
            let x = Activations::quantize(isa, format, &x[..batch * inputs], inputs, &mut scratch);
            for (outputs, bytes, want) in &widths {
                let matrix = PackedMatrix::new(weight_type, *outputs, inputs, bytes);
                let what = format!("{weight_type:?} {} {batch} x {inputs} x {outputs}", isa.name());
                assert_same_bits(&multiplied(isa, &matrix, &x), &want[..batch * outputs], &what);
            }
        }
    }
}

/// More rows than share an unpacked block, and a last group of short blocks that is not 256 long. For tile registers,
/// also more inputs than the 12 spans of 256 that are multiplied at once for 150 rows.
#[test]
fn many_long_rows_agree_with_the_reference() {
    let mut random = Random(8);
    let whole = if Isa::available().any(|isa| isa.name() == "amx") { 12 * 256 } else { 2 * 256 };
    for weight_type in WeightType::ALL {
        let (inputs, outputs) = (whole + if weight_type.block_len() == 256 { 256 } else { 128 }, 85);
        let rows = random_rows(weight_type, outputs, inputs, &mut random);
        let bytes = packed(weight_type, inputs, &rows);
        let matrix = PackedMatrix::new(weight_type, outputs, inputs, &bytes);
        let x = random_activations(150, inputs, &mut random);
        let want = product(Isa::Scalar, &matrix, &x);
        for isa in Isa::available().skip(1) {
            for batch in [25, 128, 150] {
                let what = format!("{weight_type:?} {} {batch} x {inputs} x {outputs}", isa.name());
                assert_same_bits(&product(isa, &matrix, &x[..batch * inputs]), &want[..batch * outputs], &what);
            }
        }
    }
}

/// The largest sums: weights and activations all at either end of their ranges, where 16-bit sums
/// of pairs would saturate first.
#[test]
fn extreme_rows_agree_with_the_reference() {
    let (outputs, inputs) = (16, 512);
    for weight_type in WeightType::ALL {
        for byte in [0x00, 0x7f, 0x80, 0xff] {
            let mut rows = random_rows(weight_type, outputs, inputs, &mut Random(7));
            for block in rows.chunks_exact_mut(weight_type.block_bytes()) {
                let scales: Vec<usize> = scale_offsets(weight_type).iter().flat_map(|at| [*at, *at + 1]).collect();
                let kept = |at: &usize| scales.contains(at) || weight_type == WeightType::MXFP4 && *at == 0;
                let ends = (0..block.len()).filter(|at| !kept(at));
                ends.for_each(|at| block[at] = byte);
                // The scale of IQ1_M is in other fields' bits: one that is finite.
                if weight_type == WeightType::IQ1_M {
                    block[55] &= 0x3f;
                }
            }
            let bytes = packed(weight_type, inputs, &rows);
            let matrix = PackedMatrix::new(weight_type, outputs, inputs, &bytes);
            for signs in [[1.0f32, 1.0], [-1.0, -1.0], [1.0, -1.0]] {
                let row = signs.repeat(inputs / 2);
                let of_row = product(Isa::Scalar, &matrix, &row);
                assert!(of_row.iter().all(|y| y.is_finite()), "{weight_type:?} {byte}");
                for batch in [1, 2, 4, 9, 33] {
                    let (x, want) = (row.repeat(batch), of_row.repeat(batch));
                    for isa in Isa::available().skip(1) {
                        let what = format!("{weight_type:?} {} {batch} rows of {byte:#x}", isa.name());
                        assert_same_bits(&product(isa, &matrix, &x), &want, &what);
                    }
                }
            }
        }
    }
}

/// Where a block's sum is zero, a `dmin` of zero decides its sign, and after a first block whose product underflows
/// to -0.0 that is the sign of the result.
#[test]
fn a_dmin_of_zero_has_the_sign_of_the_reference() {
    let (outputs, inputs) = (17, 512);
    let mut x = vec![0.0; inputs];
    (x[0], x[1]) = (1e-36, -1e-36 / 127.0);
    (x[256], x[257], x[258]) = (-1.0, 1.0, 1.0);
    // Byte offsets of the scale, of the first sub-block's scale and min (and a min of 1), and of the weights.
    for (weight_type, d, scale, (min, one), weights) in [
        (WeightType::Q2_K, 80, 0, (0, 0x10), 16),
        (WeightType::Q4_K, 0, 4, (8, 1), 16),
        (WeightType::Q5_K, 0, 4, (8, 1), 48),
    ] {
        let mut row = vec![0u8; 2 * weight_type.block_bytes()];
        let (first, second) = row.split_at_mut(weight_type.block_bytes());
        (first[d], first[scale], first[weights + 1]) = (1, 1, 1);
        (second[scale], second[weights]) = (1, 1);
        second[min] |= one;
        let bytes = packed(weight_type, inputs, &row.repeat(outputs));
        let matrix = PackedMatrix::new(weight_type, outputs, inputs, &bytes);
        for batch in [1, 5, 8, 33] {
            let want = vec![-0.0; batch * outputs];
            for isa in Isa::available() {
                let what = format!("{weight_type:?} {} {batch} rows", isa.name());
                assert_same_bits(&product(isa, &matrix, &x.repeat(batch)), &want, &what);
            }
        }
    }
}

/// Exponents 0 and 1 are scales that are subnormal.
#[test]
fn every_exponent_of_mxfp4_agrees_with_the_reference() {
    let mut random = Random(10);
    let (outputs, inputs) = (256, 32);
    let mut rows = random_rows(WeightType::MXFP4, outputs, inputs, &mut random);
    for (exponent, block) in (0..=255).zip(rows.chunks_exact_mut(WeightType::MXFP4.block_bytes())) {
        block[0] = exponent;
    }
    let bytes = packed(WeightType::MXFP4, inputs, &rows);
    let matrix = PackedMatrix::new(WeightType::MXFP4, outputs, inputs, &bytes);
    let x = random_activations(16, inputs, &mut random);
    let want = product(Isa::Scalar, &matrix, &x);
    for isa in Isa::available().skip(1) {
        for batch in [1, 2, 16] {
            let what = format!("{} {batch} rows", isa.name());
            assert_same_bits(&product(isa, &matrix, &x[..batch * inputs]), &want[..batch * outputs], &what);
        }
    }
}

#[test]
fn rows_do_not_depend_on_the_batch_or_the_column_split() {
    let mut random = Random(3);
    let (inputs, outputs, batch) = (512, 100, 70);
    for weight_type in WeightType::ALL {
        let rows = random_rows(weight_type, outputs, inputs, &mut random);
        let bytes = packed(weight_type, inputs, &rows);
        let matrix = PackedMatrix::new(weight_type, outputs, inputs, &bytes);
        let x = random_activations(batch, inputs, &mut random);
        for isa in Isa::available().skip(1) {
            let alone: Vec<f32> = x.chunks_exact(inputs).flat_map(|x| product(isa, &matrix, x)).collect();
            assert_same_bits(&product(isa, &matrix, &x), &alone, &format!("{weight_type:?} {}", isa.name()));

            let format = ActivationFormat::new(isa, weight_type, batch);
            let mut scratch = vec![0; format.scratch_len(batch, inputs).unwrap()];
            let x = Activations::quantize(isa, format, &x, inputs, &mut scratch);
            let mut y = vec![f32::NAN; batch * outputs];
            let mut rest = ColumnsMut::new(&mut y, batch, outputs);
            for cut in [5, 5, 16, 47, 48, 96] {
                let part;
                (part, rest) = rest.split_at(cut);
                matmul(isa, &matrix, &x, part);
            }
            matmul(isa, &matrix, &x, rest);
            assert_same_bits(&y, &alone, &format!("{weight_type:?} {} in columns", isa.name()));
        }
    }
}

#[test]
fn parts_are_quantized_as_the_whole() {
    let mut random = Random(5);
    for (format, rows) in formats().flat_map(|format| [1, 7, 8, 9, 17, 300].map(|rows| (format, rows))) {
        let tiles = format.layout == ActivationLayout::Tiles;
        // A last span of three blocks of 32.
        let inputs = if tiles && format.blocks.block_len() == 32 { 864 } else { 1024 };
        let x = random_activations(rows, inputs, &mut random);
        let len = format.scratch_len(rows, inputs).unwrap();
        for isa in Isa::available() {
            let mut whole = vec![-2; len];
            Activations::quantize(isa, format, &x, inputs, &mut whole);
            for values in [0, 100, 600, 2048, 5000, usize::MAX] {
                let mut words = vec![MaybeUninit::new(-1); len];
                let parts: Vec<_> = Activations::parts(format, &x, inputs, &mut words, values).collect();
                let (all, whole_rows) = match tiles {
                    true => (rows.div_ceil(256), values == usize::MAX), // passes
                    false => (rows.div_ceil(8), values >= rows.min(8) * inputs),
                };
                assert_eq!(parts.len() > all, !whole_rows, "{format:?} {rows} rows, {values} values");
                parts.into_iter().rev().for_each(|part| part.quantize(isa));
                // SAFETY: initialised above.
                let words: Vec<i32> = words.into_iter().map(|word| unsafe { word.assume_init() }).collect();
                assert_eq!(words, whole, "{format:?} {} {rows} rows, {values} values", isa.name());
            }
        }
    }
}

/// All formats of activations.
fn formats() -> impl Iterator<Item = ActivationFormat> {
    let layouts = [ActivationLayout::RowBlocks, ActivationLayout::Tiles];
    let types = [ActivationType::Q8_1, ActivationType::Q8_K];
    types.into_iter().flat_map(move |blocks| layouts.map(|layout| ActivationFormat { blocks, layout }))
}

#[test]
fn few_rows_in_tiles_have_the_bits_of_the_reference() {
    let mut random = Random(8);
    let Some(isa) = Isa::available().find(|isa| isa.name() == "amx") else {
        let line = b"skipped: isa amx: few rows in tiles: not this processor\n";
        return std::io::stderr().write_all(line).expect("stderr"); // the harness captures `println!`
    };
    for weight_type in WeightType::ALL.into_iter().filter(|of| of.block_len() == of.activation_type().block_len()) {
        let inputs = if weight_type.block_len() == 256 { 768 } else { 352 };
        let rows = random_rows(weight_type, 37, inputs, &mut random);
        let bytes = packed(weight_type, inputs, &rows);
        let matrix = PackedMatrix::new(weight_type, 37, inputs, &bytes);
        for batch in 1..=24 {
            let x = random_activations(batch, inputs, &mut random);
            let format = ActivationFormat { blocks: weight_type.activation_type(), layout: ActivationLayout::Tiles };
            let what = format!("{weight_type:?} {batch} rows");
            assert_same_bits(&product_of(isa, &matrix, &x, format), &product(Isa::Scalar, &matrix, &x), &what);
        }
    }
}

/// The error of a product is at most what rounding the activations does: half a step each (half a step more for the
/// `f16` scale of blocks of 32), times the weight.
#[test]
fn products_are_within_the_activations_rounding() {
    let mut random = Random(5);
    let (inputs, outputs, batch) = (768, 20, 5);
    for weight_type in WeightType::ALL {
        let rows = random_rows(weight_type, outputs, inputs, &mut random);
        let bytes = packed(weight_type, inputs, &rows);
        let matrix = PackedMatrix::new(weight_type, outputs, inputs, &bytes);
        let x = random_activations(batch, inputs, &mut random);
        let block_len = weight_type.activation_type().block_len();
        // Of every product, what it is in `f64`, and the bound.
        let mut exact = vec![(0.0, 1e-5); batch * outputs];
        for (j, row) in rows.chunks_exact(rows.len() / outputs).enumerate() {
            let mut weights = vec![0.0; inputs];
            dequantize_row(weight_type, row, &mut weights);
            for (r, x) in x.chunks_exact(inputs).enumerate() {
                let (want, bound) = &mut exact[r * outputs + j];
                for (x, w) in x.chunks_exact(block_len).zip(weights.chunks_exact(block_len)) {
                    let step = f64::from(x.iter().fold(0.0f32, |a, x| a.max(x.abs()))) / 127.0;
                    for (x, w) in x.iter().zip(w) {
                        let slack = 0.5 * step + f64::from(x.abs()) * 1e-3;
                        *want += f64::from(*x) * f64::from(*w);
                        *bound += f64::from(w.abs()) * slack;
                    }
                    // A min multiplies the sum, which was rounded to `f16` separately.
                    *bound += 32.0 * 0.02 * step * 127.0 * 2f64.powi(-10);
                }
            }
        }
        for isa in Isa::available() {
            for (y, (want, bound)) in product(isa, &matrix, &x).iter().zip(&exact) {
                let error = (f64::from(*y) - want).abs();
                assert!(error <= *bound, "{weight_type:?} {}: off by {error}, bound {bound}", isa.name());
            }
        }
    }
}

#[test]
fn packed_rows_dequantize_to_the_values_of_the_file() {
    let mut random = Random(6);
    for weight_type in WeightType::ALL {
        let (inputs, outputs) = (512, 2 * PANEL_ROWS + 5);
        let rows = random_rows(weight_type, outputs, inputs, &mut random);
        let row_bytes = weight_type.row_bytes(inputs).unwrap();
        // In two ranges of panels, as threads would.
        let packed_row_bytes = weight_type.packed_row_bytes(inputs).unwrap();
        let mut bytes = vec![0; outputs * packed_row_bytes];
        let (first, rest) = bytes.split_at_mut(PANEL_ROWS * packed_row_bytes);
        let (first_rows, other_rows) = rows.split_at(PANEL_ROWS * row_bytes);
        pack(weight_type, inputs, first_rows, first);
        pack(weight_type, inputs, other_rows, rest);
        assert_eq!(bytes, packed(weight_type, inputs, &rows));
        let matrix = PackedMatrix::new(weight_type, outputs, inputs, &bytes);
        let (mut got, mut want) = (vec![0.0; inputs], vec![0.0; inputs]);
        for (row, bytes) in rows.chunks_exact(row_bytes).enumerate() {
            dequantize_packed_row(&matrix, row, &mut got);
            dequantize_row(weight_type, bytes, &mut want);
            assert_same_bits(&got, &want, &format!("{weight_type:?} row {row}"));
        }
    }
}

#[test]
fn activations_do_not_depend_on_the_isa() {
    let mut random = Random(7);
    let mut x = random_activations(11, 512, &mut random);
    // 127 divided by the largest of these is infinite.
    x[..512].iter_mut().zip([1e-38, 0.0, -2e-38].into_iter().cycle()).for_each(|(x, tiny)| *x = tiny);
    for format in formats() {
        let quantize = |isa| {
            let mut scratch = vec![0; format.scratch_len(11, 512).unwrap()];
            Activations::quantize(isa, format, &x, 512, &mut scratch);
            scratch
        };
        let want = quantize(Isa::Scalar);
        for isa in Isa::available().skip(1) {
            assert_eq!(quantize(isa), want, "{format:?} {}", isa.name());
        }
    }
}

#[test]
#[should_panic(expected = "matmul: scalar has no tiles")]
fn tiles_without_their_registers_are_refused() {
    let matrix = PackedMatrix::new(WeightType::Q8_0, 1, 32, &[0; 34]);
    let format = ActivationFormat { blocks: ActivationType::Q8_1, layout: ActivationLayout::Tiles };
    product_of(Isa::Scalar, &matrix, &[0.0; 32], format);
}

#[test]
fn sizes_are_checked() {
    for format in formats() {
        let block_len = format.blocks.block_len();
        assert_eq!(format.scratch_len(3, block_len + 1), None);
        assert_eq!(format.scratch_len(usize::MAX, 4 * block_len), None);
        assert_eq!(format.scratch_len(3, 0), Some(0));
    }
    assert_eq!(WeightType::Q4_K.bytes_for(12288, 1536), Some(12288 * 6 * 144));
    assert_eq!(WeightType::Q4_K.bytes_for(12288, 1537), None);
    assert_eq!(WeightType::Q8_0.bytes_for(usize::MAX, 64), None);
    assert_eq!(WeightType::IQ3_XXS.bytes_for(48, 512), Some(48 * 2 * 98));
    assert_eq!(WeightType::IQ3_XXS.packed_bytes_for(48, 512), Some(48 * 2 * 136));
    assert_eq!(WeightType::IQ3_XXS.packed_bytes_for(48, 500), None);
    assert_eq!(WeightType::IQ1_S.packed_bytes_for(usize::MAX, 256), None);
    for weight_type in WeightType::ALL {
        let same = weight_type.packed_block_bytes() == weight_type.block_bytes();
        let grown = ["tq1_0", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"];
        assert_eq!(same, !grown.contains(&weight_type.name()), "{weight_type:?}");
    }
    assert_eq!(WeightType::from_ggml_id(14), Some(WeightType::Q6_K));
    assert_eq!(WeightType::from_ggml_id(0), None);
}

/// `quant_vectors.bin`: per type, two blocks of random bytes and their values as the `gguf` 0.19.0 Python package of
/// llama.cpp expands them (numpy generator 7, scales uniform in -0.02..0.02).
#[test]
fn dequantization_agrees_with_llama_cpp() {
    let mut rest = include_bytes!("quant_vectors.bin").as_slice();
    for weight_type in WeightType::ALL {
        let (blocks, values);
        (blocks, rest) = rest.split_at(2 * weight_type.block_bytes());
        (values, rest) = rest.split_at(2 * weight_type.block_len() * 4);
        let want: Vec<f32> = values.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let mut got = vec![0.0; want.len()];
        dequantize_row(weight_type, blocks, &mut got);
        for (got, want) in got.iter().zip(&want) {
            // Equal except for the sign of zero.
            assert!(got == want, "{weight_type:?}: {got}, not {want}");
        }
    }
    assert!(rest.is_empty());
}

fn written() -> impl Iterator<Item = WeightType> {
    WeightType::ALL.into_iter().filter(|weight_type| weight_type.is_written())
}

#[test]
#[should_panic(expected = "nvfp4 is read only")]
fn types_that_are_read_only_are_not_written() {
    quantize_row(Isa::best(), WeightType::NVFP4, &[0.0; 64], &mut [0; 36]);
}

/// Root mean square error relative to that of the weights.
fn quantization_error(weight_type: WeightType, x: &[f32]) -> f64 {
    let mut bytes = vec![0; weight_type.row_bytes(x.len()).unwrap()];
    quantize_row(Isa::Scalar, weight_type, x, &mut bytes);
    for isa in Isa::available().skip(1) {
        let mut same = vec![0; bytes.len()];
        quantize_row(isa, weight_type, x, &mut same);
        assert!(same == bytes, "{weight_type:?} {}", isa.name());
    }
    let mut back = vec![0.0; x.len()];
    dequantize_row(weight_type, &bytes, &mut back);
    let square = |x: f32| f64::from(x) * f64::from(x);
    let error: f64 = x.iter().zip(&back).map(|(x, y)| square(x - y)).sum();
    (error / x.iter().map(|x| square(*x)).sum::<f64>()).sqrt()
}

#[test]
fn quantization_errors_are_as_expected() {
    let mut random = Random(8);
    // Nearly normal weights.
    let x: Vec<f32> = (0..64 * 256).map(|_| 0.02 * (0..8).map(|_| random.symmetric()).sum::<f32>()).collect();
    for (weight_type, bound) in [
        // llama.cpp's own on the same weights: 0.0835, 0.0766, 0.0413, 0.0370, 0.00518 with equal bytes, 0.2905,
        // 0.1479, 0.0702, 0.0355, 0.01730, 0.0747.
        (WeightType::Q4_0, 0.0790),
        (WeightType::Q4_1, 0.0690),
        (WeightType::Q5_0, 0.0393),
        (WeightType::Q5_1, 0.0334),
        (WeightType::Q8_0, 0.0052),
        (WeightType::Q2_K, 0.279),
        (WeightType::Q3_K, 0.1435),
        (WeightType::Q4_K, 0.0690),
        (WeightType::Q5_K, 0.0343),
        (WeightType::Q6_K, 0.01730),
        (WeightType::IQ4_NL, 0.0730),
        (WeightType::IQ4_XS, 0.0740),
        (WeightType::MXFP4, 0.12),
    ] {
        let error = quantization_error(weight_type, &x);
        assert!(error < bound, "{weight_type:?}: {error}");
    }
}

#[test]
fn special_rows_are_quantized() {
    let mut random = Random(9);
    for weight_type in written() {
        let constant = [0.75f32; 256];
        let mut bytes = vec![0; weight_type.row_bytes(256).unwrap()];
        let mut back = [1.0; 256];
        for (x, tolerance) in [([0.0; 256], 0.0), (constant, 0.05), (constant.map(|x| -x), 0.05)] {
            quantize_row(Isa::best(), weight_type, &x, &mut bytes);
            dequantize_row(weight_type, &bytes, &mut back);
            for (x, back) in x.iter().zip(back) {
                assert!((x - back).abs() <= tolerance, "{weight_type:?}: {x} became {back}");
            }
        }
        // Values that the format represents exactly: quantizing them again changes little.
        let x: Vec<f32> = (0..256).map(|_| random.symmetric()).collect();
        quantize_row(Isa::best(), weight_type, &x, &mut bytes);
        dequantize_row(weight_type, &bytes, &mut back);
        let again = quantization_error(weight_type, &back);
        assert!(again < 0.02, "{weight_type:?}: {again}");
    }
}

/// The squares of their rounding errors overflow.
#[test]
fn mxfp4_represents_weights_near_the_limit_of_floats() {
    let x = [1e21f32; 32];
    let (mut bytes, mut back) = (vec![0; WeightType::MXFP4.row_bytes(32).unwrap()], [0.0; 32]);
    quantize_row(Isa::best(), WeightType::MXFP4, &x, &mut bytes);
    dequantize_row(WeightType::MXFP4, &bytes, &mut back);
    assert!(x.iter().zip(back).all(|(x, back)| (back / x - 1.0).abs() < 0.2), "{back:?}");
}

/// Importance reduces the weighted squared error, for every type that fits scales.
#[test]
fn importance_reduces_the_weighted_error() {
    let mut random = Random(10);
    let x: Vec<f32> = (0..16 * 256).map(|_| (0..4).map(|_| random.symmetric()).sum()).collect();
    let importance: Vec<f32> = (0..x.len()).map(|_| random.symmetric().powi(4)).collect();
    for weight_type in written() {
        let mut bytes = vec![0; weight_type.row_bytes(x.len()).unwrap()];
        let mut back = vec![0.0; x.len()];
        let mut error = |quantize: &dyn Fn(&mut [u8]), importance: &[f32]| -> f32 {
            quantize(&mut bytes);
            dequantize_row(weight_type, &bytes, &mut back);
            x.iter().zip(&back).zip(importance).map(|((x, y), w)| w * (x - y).powi(2)).sum()
        };
        let plain = error(&|out| quantize_row(Isa::best(), weight_type, &x, out), &importance);
        let by = |importance: &[f32], out: &mut [u8]| {
            quantize_row_by_importance(Isa::best(), weight_type, &x, importance, out);
            let mut same = vec![0; out.len()];
            quantize_row_by_importance(Isa::Scalar, weight_type, &x, importance, &mut same);
            assert!(same == out, "{weight_type:?}");
        };
        let weighted = error(&|out| by(&importance, out), &importance);
        match weight_type {
            WeightType::Q8_0 => assert_eq!(weighted, plain),
            // There are only three exponents to choose from.
            WeightType::MXFP4 => assert!(weighted < plain, "{weight_type:?}: {weighted} of {plain}"),
            _ => assert!(weighted < 0.9 * plain, "{weight_type:?}: {weighted} of {plain}"),
        }
        // All-zero importance is treated as no importance.
        let none = vec![0.0; x.len()];
        let mut same = vec![0; weight_type.row_bytes(x.len()).unwrap()];
        quantize_row(Isa::best(), weight_type, &x, &mut same);
        let mut got = vec![0; same.len()];
        by(&none, &mut got);
        assert!(got == same, "{weight_type:?}");
    }
}
