//! Multiply-adds per second of products whose weights and activations stay in the L2 cache: the compute limit of an
//! instruction set. One thread, the best of many runs. Types are those of quantized weights, f32, f16 and bf16.
//!
//! `cargo run --release -p foretoken-kernels --example cached -- [ISA,..|all] [TYPE,..|all]`

use std::time::{Duration, Instant};

use foretoken_kernels::gemm::{self, PreparedRows};
use foretoken_kernels::quant::{ActivationFormat, Activations, PackedMatrix, WeightType, matmul};
use foretoken_kernels::{ColumnsMut, Elements, Isa};
use half::{bf16, f16};

const OUTPUTS: usize = 256;
const INPUTS: usize = 1536;
const ROWS: [usize; 10] = [1, 2, 3, 4, 5, 6, 8, 12, 16, 64];

fn inputs(rows: usize) -> Vec<f32> {
    (0..rows * INPUTS).map(|i| (i as f32 * 0.37).sin()).collect()
}

/// Giga multiply-adds per second with `rows` rows.
fn speed(rows: usize, mut multiply: impl FnMut(ColumnsMut<'_>)) -> f64 {
    let mut y = vec![0.0; rows * OUTPUTS];
    let (mut best, begin) = (f64::MAX, Instant::now());
    while begin.elapsed() < Duration::from_millis(150) {
        let start = Instant::now();
        multiply(ColumnsMut::new(&mut y, rows, OUTPUTS));
        best = best.min(start.elapsed().as_secs_f64());
    }
    (rows * OUTPUTS * INPUTS) as f64 / best / 1e9
}

fn quantized(isa: Isa, matrix: &PackedMatrix<'_>, rows: usize) -> f64 {
    let format = ActivationFormat::new(isa, matrix.weight_type(), rows);
    let mut scratch = vec![0; format.scratch_len(rows, INPUTS).expect("whole blocks") + 64 / size_of::<i32>()];
    let start = scratch.as_ptr().align_offset(64);
    let x = Activations::quantize(isa, format, &inputs(rows), INPUTS, &mut scratch[start..]);
    speed(rows, |y| {
        matmul(isa, matrix, &x, y);
    })
}

fn float(isa: Isa, weight: Elements<'_>, rows: usize) -> f64 {
    let (element, x) = (weight.element_type(), inputs(rows));
    let mut scratch = vec![0; PreparedRows::scratch_len(isa, element, rows, INPUTS)];
    let x = PreparedRows::new(isa, element, &x, INPUTS, &mut scratch);
    speed(rows, |y| {
        gemm::matmul(isa, x, weight, y);
    })
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let asked = |index: usize, name: &str| {
        arguments
            .get(index)
            .is_none_or(|names| names == "all" || names.split(',').any(|n| n.eq_ignore_ascii_case(name)))
    };
    println!("G multiply-adds/s, {OUTPUTS} x {INPUTS}, rows {ROWS:?}");
    let print = |name: &str, of: &dyn Fn(Isa, usize) -> f64| {
        for isa in Isa::available().filter(|isa| asked(0, isa.name())) {
            let speeds = ROWS.map(|rows| format!("{:4.0}", of(isa, rows)));
            println!("{:12} {name:7} {}", isa.name(), speeds.join(" "));
        }
    };
    let floats = vec![0.37f32; OUTPUTS * INPUTS];
    let (halves, bf16s): (Vec<_>, Vec<_>) = floats.iter().map(|x| (f16::from_f32(*x), bf16::from_f32(*x))).unzip();
    let elements = [Elements::F32(&floats), Elements::F16(&halves), Elements::Bf16(&bf16s)];
    for (name, weight) in ["f32", "f16", "bf16"].into_iter().zip(elements).filter(|(name, _)| asked(1, name)) {
        print(name, &|isa, rows| float(isa, weight, rows));
    }
    for weight_type in WeightType::ALL.into_iter().filter(|weight_type| asked(1, weight_type.name())) {
        // Any bytes are weights of every type, but zeros are subnormal scales of MXFP4, which are slow to multiply.
        let len = weight_type.packed_bytes_for(OUTPUTS, INPUTS).expect("whole blocks");
        let bytes = vec![0x30; len + 64];
        let start = bytes.as_ptr().align_offset(64);
        let matrix = PackedMatrix::new(weight_type, OUTPUTS, INPUTS, &bytes[start..][..len]);
        print(weight_type.name(), &|isa, rows| quantized(isa, &matrix, rows));
    }
}
