//! Quantized matmul: bytes of weights per second, per type and number of rows.
//!
//! The matrices of a type are distinct and together larger than the last-level cache, so that one row measures memory.
//! `cargo bench --bench quant -- --cost [pool MiB] [types] [ISA]` skips criterion and prints, interleaved
//! in one run, the plain read bandwidth and what `B` rows cost relative to one: the fastest of nine rounds, in the
//! thread's CPU time where there is such a clock, because machines are shared.

use criterion::{BenchmarkId, Criterion, Throughput};
use foretoken_kernels::quant::{ActivationFormat, Activations, PackedMatrix, WeightType, matmul};
use foretoken_kernels::{ColumnsMut, Isa};
use std::hint::black_box;

/// Seconds of the thread.
#[cfg(unix)]
fn seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is writable.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + 1e-9 * time.tv_nsec as f64
}

/// Seconds since the first call.
#[cfg(not(unix))]
fn seconds() -> f64 {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    START.get_or_init(std::time::Instant::now).elapsed().as_secs_f64()
}

const OUTPUTS: usize = 12288;
const INPUTS: usize = 1536;

/// Asks for the pages that an engine's weights have. With pages of 4 KiB, at whose ends hardware prefetchers stop, a
/// Zen 4 reads 22 instead of 31 GB/s, and other choices of what to prefetch are the fastest.
fn advise_huge_pages<T>(memory: &mut [T]) {
    #[cfg(target_os = "linux")]
    {
        const HUGE_PAGE: usize = 2 << 20;
        let bytes = size_of_val(memory);
        let begin = memory.as_mut_ptr().cast::<u8>();
        let skipped = begin.align_offset(HUGE_PAGE).min(bytes);
        // SAFETY: the range is within the slice; the advice changes no content. It may be refused.
        unsafe { libc::madvise(begin.add(skipped).cast(), bytes - skipped, libc::MADV_HUGEPAGE) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = memory;
}

/// A cache line. Where each load of 64 bytes straddles two, a processor with AVX-512 multiplies up to 1.1 times as long.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([u64; 8]);

/// Distinct matrices of one or more types, in turn, in one aligned allocation of at least `bytes`.
struct Pool {
    memory: Vec<Line>,
    matrices: Vec<(WeightType, usize)>,
}

impl Pool {
    fn new(types: &[WeightType], bytes: usize) -> Self {
        let mut matrices = Vec::new();
        let mut at = 0;
        for weight_type in types.iter().cycle() {
            matrices.push((*weight_type, at));
            at += weight_type.packed_bytes_for(OUTPUTS, INPUTS).unwrap().next_multiple_of(64);
            if at >= bytes {
                break;
            }
        }
        let mut state = 1u64;
        // Random nibbles with every 16-bit unit a small `f16`: any bytes are a valid matrix; these have finite scales,
        // and as bytes of MXFP4 and NVFP4 none that is subnormal, which is slow and rare in files.
        let mut word = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state ^ state >> 29) & 0x9fff_9fff_9fff_9fff | 0x0808_0808_0808_0808
        };
        let mut memory = Vec::with_capacity(at / 64);
        advise_huge_pages(memory.spare_capacity_mut());
        memory.extend((0..at / 64).map(|_| Line(std::array::from_fn(|_| word()))));
        Self { memory, matrices }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the vector has this many elements of 64 bytes, all of them integers.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.memory.len() * 64) }
    }

    fn matrix(&self, index: usize) -> PackedMatrix<'_> {
        let (weight_type, at) = self.matrices[index % self.matrices.len()];
        let len = weight_type.packed_bytes_for(OUTPUTS, INPUTS).unwrap();
        PackedMatrix::new(weight_type, OUTPUTS, INPUTS, &self.bytes()[at..at + len])
    }
}

/// Inputs, and memory for the quantized ones and for the product.
struct Inputs {
    rows: usize,
    words: Vec<Line>,
    x: Vec<f32>,
    y: Vec<f32>,
}

impl Inputs {
    fn new(rows: usize) -> Self {
        let x = (0..rows * INPUTS).map(|i| (i as f32 * 0.37).sin()).collect();
        Self {
            rows,
            words: vec![Line([0; 8]); rows.next_multiple_of(16) * INPUTS / 16],
            x,
            y: vec![0.0; rows * OUTPUTS],
        }
    }

    /// Quantizes, as every layer does, and multiplies.
    fn multiply(&mut self, isa: Isa, matrix: &PackedMatrix<'_>) {
        let format = ActivationFormat::new(isa, matrix.weight_type(), self.rows);
        // SAFETY: the vector has this many words, all of them integers.
        let scratch = unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), 16 * self.words.len()) };
        let x = Activations::quantize(isa, format, &self.x, INPUTS, scratch);
        matmul(isa, matrix, &x, ColumnsMut::new(&mut self.y, self.rows, OUTPUTS));
        black_box(&self.y);
    }
}

/// Sums all words, with enough independent accumulators to be bound by memory.
fn read_all(memory: &[Line]) -> u64 {
    let mut sums = [[0u64; 8]; 4];
    for lines in memory.chunks_exact(4) {
        for (sum, line) in sums.iter_mut().zip(lines) {
            for (sum, word) in sum.iter_mut().zip(line.0) {
                *sum = sum.wrapping_add(word);
            }
        }
    }
    sums.as_flattened().iter().fold(0, |a, b| a.wrapping_add(*b))
}

/// Prints the cost of `B` rows for one mix of types. Each round measures everything once; the fastest are printed.
fn cost(isa: Isa, types: &[WeightType], megabytes: usize) {
    const ROWS: [usize; 9] = [1, 2, 3, 4, 5, 6, 8, 12, 16];
    let pool = Pool::new(types, megabytes << 20);
    let mut inputs: Vec<Inputs> = ROWS.into_iter().map(Inputs::new).collect();
    let mut prefill = Inputs::new(128);
    let rounds = 9;
    let (mut read, mut times, mut prefills) = (vec![], vec![vec![]; ROWS.len()], vec![]);
    for _ in 0..rounds {
        let start = seconds();
        black_box(read_all(&pool.memory));
        read.push(seconds() - start);
        for (inputs, times) in inputs.iter_mut().zip(&mut times) {
            let start = seconds();
            for m in 0..pool.matrices.len() {
                inputs.multiply(isa, &pool.matrix(m));
            }
            times.push(seconds() - start);
        }
        let start = seconds();
        for m in 0..types.len() {
            prefill.multiply(isa, &pool.matrix(m));
        }
        prefills.push(seconds() - start);
    }
    let fastest = |times: &[f64]| times.iter().copied().fold(f64::INFINITY, f64::min);
    let bytes = pool.memory.len() as f64 * 64.0;
    let names: Vec<&str> = types.iter().map(|t| t.name()).collect();
    let read = bytes / fastest(&read) / 1e9;
    let one = fastest(&times[0]);
    let gigabytes = bytes / one / 1e9;
    print!(
        "{:7} {:10} read {read:5.1} GB/s, 1 row {gigabytes:5.1} ({:.2})",
        isa.name(),
        names.join("+"),
        gigabytes / read
    );
    for (rows, times) in ROWS.iter().zip(&times).skip(1) {
        print!(", v({rows}) {:.2}", fastest(times) / one);
    }
    let work = (128 * types.len() * OUTPUTS * INPUTS) as f64;
    println!(", 128 rows {:.0} G/s", work / fastest(&prefills) / 1e9);
}

fn throughput(criterion: &mut Criterion) {
    let isa = Isa::best();
    for weight_type in WeightType::ALL {
        let pool = Pool::new(&[weight_type], 400 << 20);
        let mut group = criterion.benchmark_group(weight_type.name());
        group.sample_size(10);
        for rows in [1, 2, 4, 8, 16, 128] {
            let mut inputs = Inputs::new(rows);
            let mut next = 0;
            group.throughput(Throughput::Bytes(weight_type.packed_bytes_for(OUTPUTS, INPUTS).unwrap() as u64));
            group.bench_function(BenchmarkId::from_parameter(rows), |bencher| {
                bencher.iter(|| {
                    inputs.multiply(isa, &pool.matrix(next));
                    next += 1;
                });
            });
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let Some(at) = arguments.iter().position(|a| a == "--cost") else {
        let mut criterion = Criterion::default().configure_from_args();
        throughput(&mut criterion);
        criterion.final_summary();
        return;
    };
    let megabytes = arguments.get(at + 1).and_then(|a| a.parse().ok()).unwrap_or(800);
    let named = |name: &str| WeightType::ALL.into_iter().find(|t| t.name() == name).expect("a weight type");
    let mixes: Vec<Vec<WeightType>> = match arguments.get(at + 2) {
        Some(mixes) if !mixes.starts_with('-') => {
            mixes.split(',').map(|mix| mix.split('+').map(named).collect()).collect()
        }
        _ => vec![vec![WeightType::Q4_K, WeightType::Q4_K, WeightType::Q6_K]],
    };
    let isas: Vec<Isa> = match arguments.get(at + 3) {
        Some(name) if !name.starts_with('-') => Isa::available().filter(|isa| isa.name() == name).collect(),
        _ => vec![Isa::best()],
    };
    for mix in &mixes {
        for isa in &isas {
            cost(*isa, mix, megabytes);
        }
    }
}
