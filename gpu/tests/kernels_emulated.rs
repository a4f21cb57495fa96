//! The GPU kernels' sources, compiled as C++ in either dialect and run on the CPU, against the CPU
//! kernels: every kernel, format and shape.
//!
//! `emulator/` implements threads, barriers, shuffles and tensor-core products with fibers; `emulator/machine.h` says
//! what it detects. It does not detect races that no order of its threads shows, nor errors of the compiler or the
//! driver.
//!
//! Needs a C++ compiler: `c++`, `g++` or `clang++`; skipped without one.

mod emulated;
#[path = "../../kernels/tests/skipped/mod.rs"]
mod skipped;

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};

use emulated::cases;
use emulated::device::Device;
use emulated::machine::{Dialect, Machine, compiler};
use foretoken_gpu::plan::accept::{Accepting, Verified, accept};
use foretoken_gpu::plan::delta_net::{
    Committed, HeadOrder, Layer, Projected, Shape, Weights, commit, delta_rule, inputs,
};
use foretoken_gpu::plan::matmul::{Activations, MatMulParams, Matrix, matmul};
use foretoken_gpu::plan::matmul_float::{self, FloatMatrix};
use foretoken_gpu::plan::pages::Pages;
use foretoken_gpu::plan::pointwise::{Gate, GateNorm, Strided, normed_silu_gate};
use foretoken_gpu::plan::rows::{Domain, Heads, Order, Pairing, Results, Rotary, Steps, rows};
use foretoken_gpu::plan::segments::Segments;
use foretoken_gpu::plan::turboquant::encode;
use foretoken_gpu::plan::vocabulary::{Chosen, Grouped, Scores, argmax_parts};
use foretoken_gpu::{DeviceSlice, Launch, Params};
use foretoken_kernels::attention::turboquant::{CodeFormat, PageLayout, RotationGroups, Side};
use foretoken_kernels::quant::{ActivationType, WeightType};
use foretoken_kernels::{ElementType, Isa};
use skipped::skipped;

/// The machine; `None` without a C++ compiler: the test is skipped.
fn machine() -> Option<&'static Machine> {
    compiler().map_err(|none| skipped("emulated GPU", none)).is_ok().then(|| Machine::get(&Dialect::ALL))
}

#[test]
fn cuda_kernels_agree_with_the_cpu() {
    agree_with_the_cpu(Dialect::Cuda);
}

#[test]
fn metal_kernels_agree_with_the_cpu() {
    agree_with_the_cpu(Dialect::Metal);
}

fn agree_with_the_cpu(dialect: Dialect) {
    let Some(machine) = machine() else { return };
    // Between barriers, threads run in ascending or descending order: all cases in one of them, alternately; the
    // small cases, which reach every line, in both.
    let (all, small) = (cases::all(), cases::small());
    let turns = all.iter().enumerate().map(|(n, case)| (case, n % 2 == 1));
    let both = [false, true].into_iter().flat_map(|backwards| small.iter().map(move |case| (case, backwards)));
    let runs: Vec<_> = turns.chain(both).collect();
    let failed: Vec<_> = in_parallel(&runs, |(case, backwards)| {
        let error = (case.run)(&mut machine.session(dialect, *backwards)).err()?;
        Some(format!("{}, backwards {backwards}: {error}", case.name))
    });
    assert!(failed.is_empty(), "{} cases fail:\n{}", failed.len(), failed.join("\n"));
}

#[test]
fn launches_that_no_driver_runs_are_errors() {
    let Some(machine) = machine() else { return };
    let mut session = machine.session(Dialect::Cuda, false);
    let params = vec![MaybeUninit::<u8>::zeroed(); size_of::<MatMulParams>()];
    let launch = Launch { kernel: "matmul_q4_0_8", grid: [1, 1, 1], threads: 32, shared: 0, params: () };
    let mut error = |launch| session.launch(launch, &params).expect_err("an error");
    assert!(error(launch).contains("bytes of shared memory"));
    assert!(error(Launch { grid: [0, 1, 1], ..launch }).contains("no thread"));
}

#[test]
fn an_index_off_by_one_is_noticed_in_cuda() {
    an_index_off_by_one_is_noticed(Dialect::Cuda);
}

#[test]
fn an_index_off_by_one_is_noticed_in_metal() {
    an_index_off_by_one_is_noticed(Dialect::Metal);
}

/// Mutation test: each index marked with `AT` is made too large by one, one at a time; some case must fail.
fn an_index_off_by_one_is_noticed(dialect: Dialect) {
    let Some(machine) = machine() else { return };
    let cases = cases::small();
    let sites = machine.sites(dialect);
    assert!(sites.len() > 50, "only {} marked indices", sites.len());
    let last = AtomicUsize::new(0);
    let survivors = in_parallel(&sites, |site| {
        let mut order: Vec<_> = (0..cases.len()).filter(|i| cases[*i].reads(&site.file)).collect();
        // Second, the case that noticed an index before this one: it often reaches this one as well.
        let before = last.load(Ordering::Relaxed);
        if let Some(at) = order.iter().skip(1).position(|i| *i == before) {
            order[1..=at + 1].rotate_right(1);
        }
        let noticed = order.into_iter().find(|i| {
            let mut session = machine.session(dialect, false);
            session.mutate(site);
            (cases[*i].run)(&mut session).is_err()
        });
        if let Some(i) = noticed {
            last.store(i, Ordering::Relaxed);
        }
        noticed.is_none().then(|| format!("{}:{}, index {}", site.file, site.line, site.nth))
    });
    assert!(survivors.is_empty(), "{} of {} are not noticed:\n{}", survivors.len(), sites.len(), survivors.join("\n"));
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Faulty {
    x: u64,
    fault: i32,
}

// SAFETY: the `Params` of faults.cpp.
unsafe impl Params for Faulty {}

/// The machine reports the faults of `emulator/faults.cpp`.
#[test]
fn faults_are_reported() {
    let Some(machine) = machine() else { return };
    Dialect::ALL.into_iter().for_each(|dialect| faults(machine, dialect));
}

fn faults(machine: &Machine, dialect: Dialect) {
    let run_of = |fault: i32, len: usize| {
        let mut session = machine.session(dialect, false);
        let device: &mut dyn Device = &mut session;
        let x: Vec<f32> = (0..len).map(|i| i as f32).collect();
        let span = device.of(&x);
        let params = Faulty { x: span.address(), fault };
        device
            .run(Ok(Launch { kernel: "faulty", grid: [1; 3], threads: 64, shared: 0, params }))
            .map(|()| device.read(span))
    };
    let run = |fault| run_of(fault, 64);
    let right: Vec<f32> = (0..64).map(|i| ((i + 1) % 64) as f32).collect();
    assert_eq!(run(0), Ok(right.clone()));
    assert!(run(1).is_ok_and(|x| x != right), "a missing barrier shows in the result");
    assert_eq!(run(12), Ok(right.clone()));
    // Metal has no asynchronous copies.
    assert!(dialect == Dialect::Metal || run(11).is_ok_and(|x| x != right), "a copy that is not waited for shows");
    for (fault, part) in [
        (2, "not reached by all"),
        (3, "byte 256 of buffer 0, which has 256"),
        (4, "misaligned"),
        (5, "before its beginning"),
        (6, "not reached by all"),
        (7, "beyond an array"),
        (8, "of shared memory"),
        (9, "while others are at"),
        (10, "misaligned"),
    ] {
        let error = run(fault).expect_err("a fault");
        assert!(error.contains(part), "fault {fault}: {error}");
    }
    // Of whole pages: no bytes are compared.
    let error = run_of(5, 1 << 14).expect_err("a fault");
    assert!(error.contains("byte -4 of buffer 0, which has 65536"), "{error}");
    // Later launches are not affected.
    assert_eq!(run(0), Ok(right));
}

#[test]
fn weights_without_kernels_are_refused_by_name() {
    for weight_type in WeightType::ALL {
        let bytes = Matrix::bytes(weight_type, 16, 512).expect("whole blocks");
        let matrix = Matrix::new(weight_type, (1, 16, 512), DeviceSlice::new(0, bytes));
        assert_eq!(matrix.is_ok(), Matrix::supports(weight_type), "{}", weight_type.name());
        let Err(error) = matrix else { continue };
        assert!(error.to_string().contains(&format!("no kernels for {}", weight_type.name())), "{error}");
    }
    assert_eq!(WeightType::ALL.into_iter().filter(|weight_type| Matrix::supports(*weight_type)).count(), 13);
}

/// Many rows are multiplied in tiles, if these fill a device: 264 tiles of 32 rows and 8 panels.
#[test]
fn many_rows_are_multiplied_in_tiles() {
    let kernel = |rows: usize, panels: usize| {
        let slice = DeviceSlice::<u8>::new(0, usize::MAX / 8);
        let memory = (slice.cast(), slice.cast(), slice.cast());
        let x = Activations::new(ActivationType::Q8_K, (rows, 512), memory).expect("whole blocks");
        let w = Matrix::new(WeightType::Q4_K, (1, 16 * panels, 512), slice).expect("whole blocks");
        matmul(&w, &x, slice.cast()).expect("a launch").kernel
    };
    for (rows, panels, want) in [
        (64, 8 * 1000, "matmul_q4_k_32"),
        (65, 8 * 87 + 1, "matmul_q4_k_tiles"),
        (96, 8 * 87, "matmul_q4_k_32"),
        (512, 8 * 16 + 1, "matmul_q4_k_tiles"),
        (512, 8 * 16, "matmul_q4_k_32"),
    ] {
        assert_eq!(kernel(rows, panels), want, "{rows} rows, {panels} panels");
    }
    let of_bf16 = |rows: usize, outputs: usize| {
        let slice = DeviceSlice::<u8>::new(0, usize::MAX / 8);
        let w = FloatMatrix::new(ElementType::Bf16, (1, outputs, 64), slice).expect("a shape");
        matmul_float::matmul(&w, (slice.cast(), rows), slice.cast()).expect("a launch").kernel
    };
    assert_eq!([64, 65].map(|rows| of_bf16(rows, 4096)), ["matmul_bf16_32"; 2]);
    assert_eq!([63, 8].map(|rows| of_bf16(rows, 4096)), ["matmul_bf16_8"; 2]);
    assert_eq!(of_bf16(8, 40_000), "matmul_bf16_8_wide");
}

/// A gated delta net that the kernels support.
const SUPPORTED: Shape = Shape {
    key_heads: 2,
    value_heads: 4,
    key_dim: 128,
    value_dim: 128,
    order: HeadOrder::Grouped,
    taps: 4,
    log_rows: 3,
};

/// Shapes that a kernel's registers or lanes do not fit.
#[test]
fn shapes_without_kernels_are_refused() {
    let slice = DeviceSlice::new(0, 1 << 20);
    let segments = Segments { slice: DeviceSlice::new(0, 1), count: 1, longest: 1 };
    let net =
        |shape| delta_rule(&Layer { shape, index: 0, layers: 1, segments, rows: 1, inputs: None }, slice).map(drop);
    assert_eq!(net(SUPPORTED), Ok(()));
    for shape in [
        Shape { key_dim: 132, ..SUPPORTED },
        Shape { key_dim: 6, ..SUPPORTED },
        Shape { value_dim: 6, ..SUPPORTED },
        Shape { value_heads: 3, ..SUPPORTED },
        Shape { key_heads: 0, ..SUPPORTED },
        Shape { taps: 5, ..SUPPORTED },
    ] {
        assert!(net(shape).is_err(), "{shape:?}");
    }
    let heads = |head_dim, stride, pairs| {
        let rotary = Some(Rotary { cos: slice, sin: slice, pairs, pairing: Pairing::Leading });
        let steps = Steps { norm: None, rotary, order: Order::Model, weight: None, domain: Domain::Unrotated };
        let results = Results { channels: head_dim, rows: Some(slice), quantized: None, store: None };
        rows(&Heads { x: slice, rows: 1, heads: 1, head_dim, stride }, &steps, &results).map(drop)
    };
    assert_eq!(heads(256, 512, 32), Ok(()));
    for (head_dim, stride, pairs) in [(256, 255, 32), (256, 256, 6), (256, 256, 68), (64, 64, 36)] {
        assert!(heads(head_dim, stride, pairs).is_err(), "{head_dim}, {stride} apart, {pairs} pairs");
    }
    let gate = |head| {
        let of = Strided { slice, stride: 512 };
        normed_silu_gate(&GateNorm { weight: slice, head, eps: 0.0 }, of, of, (1, 512), slice).map(drop)
    };
    assert_eq!(gate(256), Ok(()));
    assert!([4, 24, 512].into_iter().all(|head| gate(head).is_err()));
}

/// Matrices, segments and pages that there are not: kernels would read past the end of those that there are.
#[test]
fn what_does_not_exist_is_refused() {
    let slice = DeviceSlice::<u8>::new(0, 1 << 20);
    for (count, exists) in [(1, true), (0, false)] {
        assert_eq!(Matrix::new(WeightType::Q4_K, (count, 16, 256), slice).is_ok(), exists, "{count} matrices");
        assert_eq!(FloatMatrix::new(ElementType::F32, (count, 16, 256), slice).is_ok(), exists, "{count} matrices");
    }
    let segments = Segments { slice: DeviceSlice::new(0, 2), count: 2, longest: 2 };
    let verified = Verified { ids: slice.cast(), chosen: slice.cast(), hidden: slice.cast(), width: 64 };
    for (segment, exists) in [(0, true), (1, true), (2, false), (usize::MAX, false)] {
        let accepted = accept(&segments, &verified, Accepting::Count { segment, drafts: 1 }, slice.cast());
        assert_eq!(accepted.is_ok(), exists, "accepted of segment {segment}");
        let committed = commit(&SUPPORTED, 1, &segments, &Committed::Rows { segment, rows: 1 });
        assert_eq!(committed.is_ok(), exists, "committed of segment {segment}");
    }
    for (drafts, exist) in [(1, true), (2, false), (usize::MAX, false)] {
        let accepted = accept(&segments, &verified, Accepting::Count { segment: 0, drafts }, slice.cast());
        assert_eq!(accepted.is_ok(), exist, "{drafts} accepted drafts");
    }
    let one_row = |name: &str, verified: Verified| {
        let error = accept(&segments, &verified, Accepting::Argmax, slice.cast()).expect_err("one row of two segments");
        assert!(error.to_string().contains(name), "{error}");
    };
    one_row("the ids", Verified { ids: DeviceSlice::new(0, 1), ..verified });
    one_row("the target's choices", Verified { chosen: DeviceSlice::new(0, 1), ..verified });
    one_row("the hidden rows", Verified { hidden: DeviceSlice::new(0, 127), ..verified });
    for (index, exists) in [(0, true), (2, true), (3, false), (usize::MAX, false)] {
        let layer = Layer { shape: SUPPORTED, index, layers: 3, segments, rows: 1, inputs: None };
        assert_eq!(delta_rule(&layer, slice.cast()).is_ok(), exists, "delta net {index} of 3");
        let weights = Weights { conv: slice.cast(), dt_bias: slice.cast(), rate: slice.cast() };
        let projected = Projected { qkv: slice.cast(), a: slice.cast(), b: slice.cast() };
        let inputs = inputs(&layer, slice.cast(), &weights, &projected);
        assert_eq!(inputs.is_ok(), exists, "inputs of delta net {index} of 3");
    }
    let groups = RotationGroups::of(128).expect("a multiple of 16");
    let (layout, pages) = (PageLayout::new(CodeFormat::Q4_0, Side::Keys, groups), Pages::all(0));
    let encoded = |of| encode(layout, slice.cast(), (&pages, ElementType::F16), &pages, of, 1).map(drop);
    assert_eq!(encoded(7..8), Ok(()));
    assert!(encoded(usize::MAX - 1..usize::MAX).is_err());
    // Tables of four entries.
    let encoded =
        |codes: Pages, of| encode(layout, DeviceSlice::new(0, 4), (&pages, ElementType::F16), &codes, of, 1).map(drop);
    for (codes, of, exist) in [
        (Pages::all(2), 0..2, true),
        (Pages::all(2), 1..3, false),
        (Pages::ring(1, 1, 2), 2..4, true),
        (Pages::ring(2, 1, 2), 1..2, true),
        (Pages::ring(2, 1, 2), 2..3, false),
        (Pages::all(1), 3..4, false),
    ] {
        assert_eq!(encoded(codes, of.clone()).is_ok(), exist, "pages {of:?} of {codes:?}");
    }
    // Scores of two groups.
    for (ids, exist) in [(32, true), (31, false), (16, false)] {
        let grouped = Some(Grouped { groups: slice.cast(), ordering: DeviceSlice::new(0, ids), len: 16 });
        let scores = Scores { x: slice.cast(), rows: 1, n: 32, stride: 32, cap: None, suppressed: None, grouped };
        let chosen = argmax_parts(&scores, slice.cast(), &Chosen::Ids(slice.cast()));
        assert_eq!(chosen.is_ok(), exist, "{ids} ids in groups of 16");
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Exponents {
    x: u64,
}

// SAFETY: the `Params` of exponential.cpp.
unsafe impl Params for Exponents {}

/// Bit-exact comparison of 1 / (1 + e^x), the only public use of the CPU's e^x; and zero and NaN, which it does not
/// show.
#[test]
fn the_exponential_has_the_bits_of_the_cpu() {
    let Some(machine) = machine() else { return };
    let mut x: Vec<f32> = (-2_000..2_000).map(|i| i as f32 * 0.044_7).collect();
    x.extend([-1e30, -88.1, -88.0, -87.5, -87.336_54, 0.0, 88.376_26, 1e30]);
    x.resize(x.len().next_multiple_of(32), f32::NAN);
    for dialect in Dialect::ALL {
        let mut session = machine.session(dialect, false);
        let device: &mut dyn Device = &mut session;
        let mut powers = Vec::new();
        for x in x.chunks(32) {
            let span = device.of(x);
            let params = Exponents { x: span.address() };
            device
                .run(Ok(Launch { kernel: "exponentials", grid: [1; 3], threads: 32, shared: 0, params }))
                .expect("a launch");
            powers.extend(device.read(span));
        }
        let mut sigmoids: Vec<f32> = x.iter().map(|x| -x).collect();
        let ones = vec![1.0; sigmoids.len()];
        Gate::Sigmoid.apply(Isa::best(), &mut sigmoids, &ones);
        for ((x, power), sigmoid) in x.iter().zip(powers).zip(sigmoids) {
            assert_eq!(power.is_nan(), x.is_nan(), "{dialect:?}: e^{x} = {power}");
            if x.is_nan() {
                continue;
            }
            assert_eq!((1.0 / (1.0 + power)).to_bits(), sigmoid.to_bits(), "{dialect:?}: x = {x}");
            assert!(*x > -88.0 || power == 0.0, "{dialect:?}: e^{x} = {power}");
            // Below the second, results are subnormal: zeros on Apple's GPUs.
            let zero = if dialect == Dialect::Cuda { -87.6 } else { -87.3 };
            assert!(*x < zero || power != 0.0, "{dialect:?}: e^{x} = {power}");
            let exact = f64::from(*x).exp();
            if (-87.0..88.0).contains(x) {
                assert!((f64::from(power) - exact).abs() <= 3e-7 * exact, "{dialect:?}: e^{x} = {power}, not {exact}");
            }
        }
    }
}

/// The results of `f`, in order, on two threads.
fn in_parallel<T: Sync, R: Send>(items: &[T], f: impl Fn(&T) -> Option<R> + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let mut found: Vec<(usize, R)> = std::thread::scope(|scope| {
        let work = || {
            let mut found = Vec::new();
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                let Some(item) = items.get(i) else { return found };
                found.extend(f(item).map(|r| (i, r)));
            }
        };
        let threads: Vec<_> = (0..2).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
    });
    found.sort_by_key(|(i, _)| *i);
    found.into_iter().map(|(_, r)| r).collect()
}
