//! Multiply-adds per second of quantized products whose weights and activations stay in the L2 cache: the compute limit
//! of an instruction set. One thread, the best of many runs.
//!
//! `cargo run --release -p foretoken-kernels --example cached -- [ISA,..|all] [TYPE,..|all]`

use std::time::{Duration, Instant};

use foretoken_kernels::quant::{ActivationFormat, Activations, PackedMatrix, WeightType, matmul};
use foretoken_kernels::{ColumnsMut, Isa};

const OUTPUTS: usize = 256;
const INPUTS: usize = 1536;
const ROWS: [usize; 10] = [1, 2, 3, 4, 5, 6, 8, 12, 16, 64];

/// Giga multiply-adds per second with `rows` rows.
fn measure(isa: Isa, matrix: &PackedMatrix<'_>, rows: usize) -> f64 {
    let x: Vec<f32> = (0..rows * INPUTS).map(|i| (i as f32 * 0.37).sin()).collect();
    let format = ActivationFormat::new(isa, matrix.weight_type(), rows);
    let mut scratch = vec![0; format.scratch_len(rows, INPUTS).expect("whole blocks") + 64 / size_of::<i32>()];
    let start = scratch.as_ptr().align_offset(64);
    let x = Activations::quantize(isa, format, &x, INPUTS, &mut scratch[start..]);
    let mut y = vec![0.0; rows * OUTPUTS];
    let (mut best, begin) = (f64::MAX, Instant::now());
    while begin.elapsed() < Duration::from_millis(150) {
        let start = Instant::now();
        matmul(isa, matrix, &x, ColumnsMut::new(&mut y, rows, OUTPUTS));
        best = best.min(start.elapsed().as_secs_f64());
    }
    (rows * OUTPUTS * INPUTS) as f64 / best / 1e9
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let asked = |index: usize, name: &str| {
        arguments
            .get(index)
            .is_none_or(|names| names == "all" || names.split(',').any(|n| n.eq_ignore_ascii_case(name)))
    };
    println!("G multiply-adds/s, {OUTPUTS} x {INPUTS}, rows {ROWS:?}");
    for weight_type in WeightType::ALL.into_iter().filter(|weight_type| asked(1, weight_type.name())) {
        // Any bytes are weights of every type, but zeros are subnormal scales of MXFP4, which are slow to multiply.
        let len = weight_type.packed_bytes_for(OUTPUTS, INPUTS).expect("whole blocks");
        let bytes = vec![0x30; len + 64];
        let start = bytes.as_ptr().align_offset(64);
        let matrix = PackedMatrix::new(weight_type, OUTPUTS, INPUTS, &bytes[start..][..len]);
        for isa in Isa::available().filter(|isa| asked(0, isa.name())) {
            let speeds = ROWS.map(|rows| format!("{:4.0}", measure(isa, &matrix, rows)));
            println!("{:12} {:7} {}", isa.name(), weight_type.name(), speeds.join(" "));
        }
    }
}
