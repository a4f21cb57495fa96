//! Quantized products.

use foretoken_gpu::plan::matmul::{
    Activations, Buckets, MatMulParams, Matrix, matmul, matmul_buckets, matmul_tiles, quantize,
};
use foretoken_gpu::{DeviceSlice, Launch, LaunchError};
use foretoken_kernels::quant::{self, ActivationFormat, PANEL_ROWS, PackedMatrix, WeightType, pack, quantize_row};
use foretoken_kernels::{ColumnsMut, Isa};

use super::cases::{Case, Numbers, same_bits};
use super::device::Device;

/// The weight types with GPU kernels.
pub const TYPES: [WeightType; 13] = [
    WeightType::Q4_0,
    WeightType::Q4_1,
    WeightType::Q5_0,
    WeightType::Q5_1,
    WeightType::Q8_0,
    WeightType::Q2_K,
    WeightType::Q3_K,
    WeightType::Q4_K,
    WeightType::Q5_K,
    WeightType::Q6_K,
    WeightType::IQ4_NL,
    WeightType::IQ4_XS,
    WeightType::MXFP4,
];

const SOURCES: &[&str] = &[
    "quantize.cpp",
    "quantize.h",
    "matmul.cpp",
    "matmul_tiles.cpp",
    "matrix.h",
    "products.h",
    "formats.h",
    "formats_256.h",
    "activations.h",
    "device.metal",
];

/// The rows of a matrix in a file's order; on every instruction set the same bytes.
pub fn file_rows(weight_type: WeightType, outputs: usize, inputs: usize, numbers: &mut Numbers) -> Vec<u8> {
    let row_bytes = weight_type.row_bytes(inputs).expect("whole blocks");
    let mut bytes = vec![0; outputs * row_bytes];
    for row in bytes.chunks_exact_mut(row_bytes) {
        quantize_row(Isa::best(), weight_type, &numbers.normals(inputs), row);
    }
    bytes
}

/// Packed, padded with zero rows to whole panels.
pub fn packed(weight_type: WeightType, outputs: usize, inputs: usize, file: &[u8]) -> Vec<u8> {
    let len = Matrix::bytes(weight_type, outputs, inputs).expect("whole blocks");
    let (mut rows, mut packed) = (file.to_vec(), vec![0; len]);
    rows.resize(len, 0);
    pack(weight_type, inputs, &rows, &mut packed);
    packed
}

/// The kernel's result: the CPU's results over every warp's run of inputs, added in order.
pub fn expected(weight_type: WeightType, outputs: usize, inputs: usize, file: &[u8], x: &[f32]) -> Vec<f32> {
    let (block, rows) = (weight_type.block_len(), x.len() / inputs);
    let row_bytes = file.len() / outputs;
    let (per_warp, _) = Matrix::warp_split(weight_type, outputs, inputs);
    let mut sum = vec![0.0; rows * outputs];
    for start in (0..inputs).step_by(per_warp * block) {
        let width = (per_warp * block).min(inputs - start);
        let of = |i: usize| i / block * weight_type.block_bytes();
        let part: Vec<u8> =
            file.chunks_exact(row_bytes).flat_map(|row| &row[of(start)..of(start + width)]).copied().collect();
        let mut bytes = vec![0; part.len()];
        pack(weight_type, width, &part, &mut bytes);
        let x: Vec<f32> = x.chunks_exact(inputs).flat_map(|row| &row[start..start + width]).copied().collect();
        let format = ActivationFormat::new(Isa::Scalar, weight_type, rows);
        let mut scratch = vec![0; format.scratch_len(rows, width).expect("whole blocks")];
        let x = quant::Activations::quantize(Isa::Scalar, format, &x, width, &mut scratch);
        let mut y = vec![0.0; rows * outputs];
        let matrix = PackedMatrix::new(weight_type, outputs, width, &bytes);
        quant::matmul(Isa::Scalar, &matrix, &x, ColumnsMut::new(&mut y, rows, outputs));
        sum.iter_mut().zip(&y).for_each(|(sum, y)| *sum += y);
    }
    sum
}

/// Quantizes on the device.
pub fn quantized(
    device: &mut dyn Device,
    weight_type: WeightType,
    x: &[f32],
    inputs: usize,
) -> Result<Activations, String> {
    let (kind, rows) = (weight_type.activation_type(), x.len() / inputs);
    let memory = (
        device.poisoned(Activations::quants_len(rows, inputs)),
        device.poisoned(Activations::scales_len(kind, rows, inputs)),
        device.poisoned(Activations::sums_len(rows, inputs)),
    );
    let x = device.of(x);
    let activations = Activations::new(kind, (rows, inputs), memory).map_err(|error| error.to_string())?;
    device.run(quantize(x, &activations))?;
    Ok(activations)
}

/// Plans a product.
pub type Plan = fn(&Matrix, &Activations, DeviceSlice<f32>) -> Result<Launch<MatMulParams>, LaunchError>;

fn dense(weight_type: WeightType, rows: usize, outputs: usize, inputs: usize) -> Case {
    product("matmul", matmul, weight_type, (rows, outputs, inputs))
}

fn tiles(weight_type: WeightType, rows: usize, outputs: usize, inputs: usize) -> Case {
    product("matmul in tiles", matmul_tiles, weight_type, (rows, outputs, inputs))
}

fn product(what: &str, plan: Plan, weight_type: WeightType, (rows, outputs, inputs): (usize, usize, usize)) -> Case {
    let name = format!("{what} {} {rows} rows, {outputs} by {inputs}", weight_type.name());
    Case::new(name, SOURCES, move |device| {
        let mut numbers = Numbers::new((rows * 1000 + inputs) as u64);
        let file = file_rows(weight_type, outputs, inputs, &mut numbers);
        let mut x = numbers.normals(rows * inputs);
        x[..inputs.min(256)].iter_mut().for_each(|x| *x *= 30.0);
        x[(rows - 1) * inputs..][..32].fill(0.0);
        let weights = device.of(&packed(weight_type, outputs, inputs, &file));
        let weights = Matrix::new(weight_type, (1, outputs, inputs), weights).map_err(|error| error.to_string())?;
        let padded = outputs.next_multiple_of(PANEL_ROWS);
        let x_of = quantized(device, weight_type, &x, inputs)?;
        let y: DeviceSlice<f32> = device.poisoned(rows * padded);
        device.run(plan(&weights, &x_of, y))?;
        let got: Vec<f32> = device.read(y).chunks_exact(padded).flat_map(|row| row[..outputs].to_vec()).collect();
        same_bits("y", &got, &expected(weight_type, outputs, inputs, &file, &x))
    })
}

/// Buckets: several matrices, each with some of the rows.
fn buckets(weight_type: WeightType, outputs: usize, inputs: usize, largest: usize) -> Case {
    let name = format!("matmul by buckets of {largest} {} {outputs} by {inputs}", weight_type.name());
    Case::new(name, SOURCES, move |device| {
        let mut numbers = Numbers::new(7);
        let files: Vec<_> = (0..4).map(|_| file_rows(weight_type, outputs, inputs, &mut numbers)).collect();
        let weights: Vec<u8> = files.iter().flat_map(|file| packed(weight_type, outputs, inputs, file)).collect();
        let weights = device.of(&weights);
        let weights = Matrix::new(weight_type, (4, outputs, inputs), weights).map_err(|error| error.to_string())?;
        // Two buckets of matrix 0; an unused one.
        let rows_of: Vec<Vec<i32>> = vec![vec![2], (0..largest as i32).collect(), vec![4, 1], vec![0, 3, 5]];
        let (matrices, entries) = ([3, 0, 0, 2, -1], rows_of.concat());
        let (x, full) = (numbers.normals(largest * inputs), largest as i32);
        let lists = Buckets {
            max_buckets: matrices.len(),
            entries: entries.len(),
            largest,
            matrices: device.of(&matrices),
            starts: device.of(&[0, 1, 1 + full, 3 + full, 6 + full, 6 + full]),
            count: device.of(&[4]),
            rows: Some(device.of(&entries)),
        };
        let x_of = quantized(device, weight_type, &x, inputs)?;
        let y: DeviceSlice<f32> = device.poisoned(entries.len() * outputs);
        device.run(matmul_buckets(&weights, &x_of, &lists, y))?;
        let mut want = Vec::new();
        for (rows, matrix) in rows_of.iter().zip(matrices) {
            let x: Vec<f32> = rows.iter().flat_map(|row| &x[*row as usize * inputs..][..inputs]).copied().collect();
            want.extend(expected(weight_type, outputs, inputs, &files[matrix as usize], &x));
        }
        same_bits("y", &device.read(y), &want)
    })
}

pub fn all() -> Vec<Case> {
    // So many panels that their blocks have fewer warps.
    let mut cases = vec![dense(WeightType::Q4_K, 1, 16 * 265, 256 * 9), dense(WeightType::Q8_0, 1, 16 * 265, 32 * 9)];
    for weight_type in TYPES {
        // Which rows are there does not depend on the type: for one of either block length, every number of them.
        let all = [WeightType::Q4_K, WeightType::Q8_0].contains(&weight_type);
        let rows = (1..=16).filter(|rows| all || [1, 6, 8, 9, 16].contains(rows));
        cases.extend(rows.map(|rows| dense(weight_type, rows, 32, 512)));
        // Runs of more than two stages; a partial last panel; more than 16 rows.
        cases.push(dense(weight_type, 3, 20, 256 * 33));
        cases.push(dense(weight_type, 37, 16, 256));
        cases.extend([6, 11, 27].map(|largest| buckets(weight_type, 48, 512, largest)));
        if weight_type.block_len() == 32 {
            cases.push(dense(weight_type, 2, 16, 32 * 22));
            cases.push(dense(weight_type, 9, 16, 32));
        }
        cases.extend(all_tiles(weight_type));
    }
    cases
}

/// Whole and partial tiles of 32 rows, groups of 8 panels, stages of 256 inputs, and runs of weight blocks.
fn all_tiles(weight_type: WeightType) -> Vec<Case> {
    let mut cases = vec![tiles(weight_type, 33, 16, 256), tiles(weight_type, 17, 20, 256 * 17)];
    cases.extend([1, 16, 32, 64, 65].map(|rows| tiles(weight_type, rows, 32, 512)));
    if weight_type.block_len() == 32 {
        cases.extend([1, 7, 21].map(|blocks| tiles(weight_type, 9, 16, 32 * blocks)));
    }
    // The row is alone in its tile, and so is the panel in its group.
    if [WeightType::Q4_K, WeightType::Q6_K, WeightType::Q4_1].contains(&weight_type) {
        cases.push(tiles(weight_type, 130, 16 * 9, 256));
    }
    cases
}

pub fn small() -> Vec<Case> {
    let of = |weight_type| {
        [dense(weight_type, 11, 32, 512), buckets(weight_type, 32, 512, 11), tiles(weight_type, 35, 32, 512)]
    };
    let long = dense(WeightType::Q4_K, 11, 32, 256 * 33);
    let large = [WeightType::Q4_K, WeightType::Q8_0].map(|weight_type| buckets(weight_type, 32, 512, 19));
    TYPES.into_iter().flat_map(of).chain([long]).chain(large).collect()
}
