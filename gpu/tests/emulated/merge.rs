//! Merged launches have the results of the separate ones.

use foretoken_gpu::plan::attention::{Queries, SplitPartials, combine};
use foretoken_gpu::plan::matmul::{Activations, Matrix, matmul, matmul_tiles, quantize};
use foretoken_gpu::plan::matmul_float::{self, FloatMatrix};
use foretoken_gpu::plan::merge::Mergeable;
use foretoken_gpu::plan::pages::{Pages, exact_page_bytes};
use foretoken_gpu::plan::pointwise::{self, Gate, GateNorm, Strided, normed_silu_gate, rms_norm};
use foretoken_gpu::plan::rows::{Domain, HeadNorm, Heads, KvDestination, Order, Results, Steps, rows};
use foretoken_gpu::plan::segments::{Segment, Segments};
use foretoken_gpu::{DeviceSlice, Launch, LaunchError, Params};
use foretoken_kernels::ElementType;
use foretoken_kernels::quant::{ActivationType, WeightType};

use super::cases::{Case, Numbers, same};
use super::device::Device;
use super::matmul::{Plan, file_rows, packed, quantized};
use super::steps::{narrow, product_sources};

/// Launches, and the memory that they write.
#[derive(Default)]
struct Sequence {
    launches: Vec<Mergeable>,
    results: Vec<DeviceSlice<u8>>,
}

impl Sequence {
    fn push<P: Params>(&mut self, plan: Result<Launch<P>, LaunchError>) -> Result<(), String> {
        let launch = plan.map_err(|error| error.to_string())?;
        self.launches.push(Mergeable::of(&launch).ok_or("not a launch that can be merged")?);
        Ok(())
    }

    fn result<T>(&mut self, slice: DeviceSlice<T>) -> DeviceSlice<T> {
        self.results.push(slice.cast());
        slice
    }
}

fn run(device: &mut dyn Device, launch: &Mergeable) -> Result<(), String> {
    match *launch {
        Mergeable::Norm(launch) => device.run(Ok(launch)),
        Mergeable::Gate(launch) => device.run(Ok(launch)),
        Mergeable::Quantize(launch) => device.run(Ok(launch)),
        Mergeable::Combine(launch) => device.run(Ok(launch)),
        Mergeable::Rows(launch) => device.run(Ok(launch)),
        Mergeable::MatMul(launch) => device.run(Ok(launch)),
        Mergeable::MatMulFloat(launch) => device.run(Ok(launch)),
    }
}

/// A sequence that becomes one launch. `build` makes it, with memory of its own each time.
fn case(
    name: String,
    sources: &'static [&'static str],
    build: impl Fn(&mut dyn Device) -> Result<Sequence, String> + Send + Sync + 'static,
) -> Case {
    Case::new(name, sources, move |device| {
        let separate = build(device)?;
        separate.launches.iter().try_for_each(|launch| run(device, launch))?;
        let together = build(device)?;
        let mut launches = together.launches.iter().copied();
        let first = launches.next().ok_or("no launches")?;
        let one = launches.try_fold(first, |merged, next| merged.merged(&next)).ok_or("not one launch")?;
        run(device, &one)?;
        for (i, (a, b)) in separate.results.iter().zip(&together.results).enumerate() {
            same(&format!("result {i}"), &device.read(*b), &device.read(*a))?;
        }
        Ok(())
    })
}

fn activations(
    device: &mut dyn Device,
    sequence: &mut Sequence,
    kind: ActivationType,
    (rows, inputs): (usize, usize),
) -> Result<Activations, String> {
    // Zeros: quants have rows that no kernel writes.
    let quants = sequence.result(device.of(&vec![0u32; Activations::quants_len(rows, inputs)]));
    let scales = sequence.result(device.poisoned(Activations::scales_len(kind, rows, inputs)));
    let sums = sequence.result(device.poisoned(Activations::sums_len(rows, inputs)));
    Activations::new(kind, (rows, inputs), (quants, scales, sums)).map_err(|error| error.to_string())
}

fn norms(rows: usize, width: usize, kind: ActivationType) -> Case {
    let name = format!("merged norms {rows} by {width}, {kind:?}");
    case(name, &["norm.cpp", "quantize.h"], move |device| {
        let (mut numbers, mut sequence) = (Numbers::new(width as u64), Sequence::default());
        let x = device.of(&numbers.normals(rows * width));
        let residual = device.of(&numbers.normals(rows * width));
        let [first, second] = [0; 2].map(|_| device.of(&numbers.normals(width)));
        let y: DeviceSlice<f32> = sequence.result(device.poisoned(rows * width));
        let z: DeviceSlice<f32> = sequence.result(device.poisoned(rows * width));
        sequence.push(rms_norm(x, (rows, width), Some(first), 1e-6, Some((residual, 0.7)), y))?;
        sequence.push(rms_norm(y, (rows, width), Some(second), 1e-6, None, z))?;
        let out = activations(device, &mut sequence, kind, (rows, width))?;
        sequence.push(quantize(z, &out))?;
        Ok(sequence)
    })
}

/// A sum, and the norm of it.
fn sum_and_norm(rows: usize, width: usize, kind: ActivationType) -> Case {
    case(format!("merged sum and norm {rows} by {width}"), &["norm.cpp", "quantize.h"], move |device| {
        let (mut numbers, mut sequence) = (Numbers::new(width as u64), Sequence::default());
        let [residual, x] = [0; 2].map(|_| device.of(&numbers.normals(rows * width)));
        let weight = device.of(&numbers.normals(width));
        let [y, z]: [DeviceSlice<f32>; 2] = [0; 2].map(|_| sequence.result(device.poisoned(rows * width)));
        sequence.push(pointwise::add(residual, x, (rows, width), y))?;
        sequence.push(rms_norm(y, (rows, width), Some(weight), 1e-6, None, z))?;
        let out = activations(device, &mut sequence, kind, (rows, width))?;
        sequence.push(quantize(z, &out))?;
        Ok(sequence)
    })
}

fn gate(function: Gate, rows: usize, width: usize, kind: ActivationType) -> Case {
    case(format!("merged {function:?} gate {rows} by {width}, {kind:?}"), &["norm.cpp", "quantize.h"], move |device| {
        let (mut numbers, mut sequence) = (Numbers::new(width as u64), Sequence::default());
        let [gate, up] = [0; 2].map(|_| Strided { slice: device.of(&numbers.normals(rows * width)), stride: width });
        let y: DeviceSlice<f32> = sequence.result(device.poisoned(rows * width));
        sequence.push(pointwise::gate(function, gate, up, (rows, width), y))?;
        let out = activations(device, &mut sequence, kind, (rows, width))?;
        sequence.push(quantize(y, &out))?;
        Ok(sequence)
    })
}

fn normed_gate(rows: usize, heads: usize, kind: ActivationType) -> Case {
    case(format!("merged normed gate {rows} by {heads}, {kind:?}"), &["norm.cpp", "quantize.h"], move |device| {
        let (head, mut numbers, mut sequence) = (128, Numbers::new(heads as u64), Sequence::default());
        let width = heads * head;
        let [gate, up] = [0; 2].map(|_| Strided { slice: device.of(&numbers.normals(rows * width)), stride: width });
        let norm = GateNorm { weight: device.of(&numbers.normals(head)), head, eps: 1e-6 };
        let y: DeviceSlice<f32> = sequence.result(device.poisoned(rows * width));
        sequence.push(normed_silu_gate(&norm, gate, up, (rows, width), y))?;
        let out = activations(device, &mut sequence, kind, (rows, width))?;
        sequence.push(quantize(y, &out))?;
        Ok(sequence)
    })
}

fn products(plan: Plan, weight_type: WeightType, rows: usize) -> Case {
    let name = format!("merged products {} {rows} rows", weight_type.name());
    case(name, &["matmul.cpp", "matmul_tiles.cpp"], move |device| {
        let (mut numbers, mut sequence, inputs) = (Numbers::new(3), Sequence::default(), 512);
        let x = quantized(device, weight_type, &numbers.normals(rows * inputs), inputs)?;
        // In tiles, a group of panels ends with its product.
        for outputs in [48, 144, 32] {
            let file = file_rows(weight_type, outputs, inputs, &mut numbers);
            let weights = device.of(&packed(weight_type, outputs, inputs, &file));
            let weights = Matrix::new(weight_type, (1, outputs, inputs), weights).map_err(|error| error.to_string())?;
            let y: DeviceSlice<f32> = sequence.result(device.poisoned(rows * outputs));
            sequence.push(plan(&weights, &x, y))?;
        }
        Ok(sequence)
    })
}

fn float_products(element: ElementType, rows: usize) -> Case {
    case(format!("merged products {element:?} {rows} rows"), product_sources(element), move |device| {
        let (mut numbers, mut sequence, inputs) = (Numbers::new(4), Sequence::default(), 260);
        let x = device.of(&numbers.normals(rows * inputs));
        for outputs in [40, 4, 33] {
            let weights = device.of(&narrow(element, &numbers.normals(outputs * inputs)));
            let weights = FloatMatrix::new(element, (1, outputs, inputs), weights);
            let y: DeviceSlice<f32> = sequence.result(device.poisoned(rows * outputs));
            sequence.push(matmul_float::matmul(&weights.map_err(|error| error.to_string())?, (x, rows), y))?;
        }
        Ok(sequence)
    })
}

/// Splits of attention, of which some have no visible keys, of `count` rows.
fn combined((count, heads, head_dim): (usize, usize, usize), order: Order, kind: ActivationType) -> Case {
    let name = format!("merged splits {count} by {heads} by {head_dim}, {order:?}, {kind:?}");
    case(name, &["combine.cpp", "quantize.h", "rotate.h", "attend.h"], move |device| {
        let (mut numbers, mut sequence, splits) = (Numbers::new(6), Sequence::default(), 3);
        let slots = splits * count * heads;
        let softmax: Vec<_> =
            (0..slots).map(|i| if i % 5 == 3 { [f32::NEG_INFINITY, 0.0] } else { [numbers.normal(), 1.5] }).collect();
        let partials = SplitPartials {
            softmax: device.of(&softmax),
            output: device.of(&numbers.normals(slots * head_dim)),
            splits,
        };
        let segment = Segment { rows: count as i32, ..Segment::default() };
        let queries = Queries {
            rows: device.of(&vec![0.0; count * heads * head_dim]),
            places: device.of(&vec![[0, 1, 0, 0]; count]),
            segments: Segments { slice: device.of(&[segment]), count: 1, longest: count },
            first: 0,
            count,
            heads,
            kv_heads: 1,
            head_dim,
            window: None,
            zones: None,
            split_pages: 1,
        };
        let y: DeviceSlice<f32> = sequence.result(device.poisoned(count * heads * head_dim));
        sequence.push(combine(&queries, &partials, Domain::Rotated, order, y))?;
        let out = activations(device, &mut sequence, kind, (count, heads * head_dim))?;
        sequence.push(quantize(y, &out))?;
        Ok(sequence)
    })
}

/// Queries, and keys and values that are stored to pages of two sequences.
fn projections(width: usize) -> Case {
    case(format!("merged rows of {width}"), &["rows.cpp", "pages.h"], move |device| {
        let (mut numbers, mut sequence, count) = (Numbers::new(5), Sequence::default(), 3);
        let element = ElementType::F16;
        // Of each sequence a page of keys and one of values.
        let mut segments = [(0, 2), (2, 1)].map(|(first, rows)| Segment { first, rows, ..Segment::default() });
        for segment in &mut segments {
            let pages = [1, 2].map(|heads| -> DeviceSlice<u8> {
                sequence.result(device.poisoned(exact_page_bytes(element, heads, width)))
            });
            segment.tables = device.of(&pages.map(DeviceSlice::address)).address();
        }
        let segments = Segments { slice: device.of(&segments), count: 2, longest: 2 };
        let places = device.of(&[[7, 8, 0, 0], [8, 9, 0, 0], [7, 8, 1, 0]]);
        for (heads, start) in [(5, None), (1, Some(0)), (2, Some(1))] {
            let x = device.of(&numbers.normals(count * heads * width));
            let norm = Some(HeadNorm { weight: Some(device.of(&numbers.normals(width))), eps: 1e-6 });
            let steps = Steps { norm, rotary: None, order: Order::Model, weight: None, domain: Domain::Unrotated };
            let y: DeviceSlice<f32> = sequence.result(device.poisoned(count * heads * width));
            let fault = sequence.result(device.of(&[u32::MAX]));
            let store = start.map(|start| KvDestination { pages: Pages::all(start), element, places, segments, fault });
            let results = Results { channels: width, rows: Some(y), quantized: None, store };
            sequence.push(rows(&Heads { x, rows: count, heads, head_dim: width, stride: width }, &steps, &results))?;
        }
        Ok(sequence)
    })
}

pub fn all() -> Vec<Case> {
    let mut cases = vec![norms(1, 5376, ActivationType::Q8_K), norms(17, 4128, ActivationType::Q8_1)];
    cases
        .extend([gate(Gate::GeluTanh, 1, 2112, ActivationType::Q8_1), gate(Gate::Silu, 9, 1280, ActivationType::Q8_K)]);
    cases.extend([normed_gate(2, 6, ActivationType::Q8_K), normed_gate(3, 5, ActivationType::Q8_1)]);
    cases.extend([products(matmul, WeightType::Q8_0, 11), products(matmul, WeightType::Q6_K, 1)]);
    cases.push(products(matmul_tiles, WeightType::Q8_0, 33));
    cases.extend([1, 16].map(|rows| float_products(ElementType::F32, rows)));
    cases.extend([1, 9].map(|rows| float_products(ElementType::Bf16, rows)));
    cases.extend([projections(64), projections(512)]);
    cases.push(combined((3, 2, 512), Order::RotaryFirst(64), ActivationType::Q8_K));
    cases.push(combined((9, 3, 256), Order::Model, ActivationType::Q8_K));
    cases
}

pub fn small() -> Vec<Case> {
    vec![
        norms(2, 1536, ActivationType::Q8_K),
        norms(3, 96, ActivationType::Q8_1),
        sum_and_norm(3, 544, ActivationType::Q8_1),
        gate(Gate::GeluTanh, 2, 512, ActivationType::Q8_K),
        products(matmul, WeightType::Q4_K, 3),
        products(matmul_tiles, WeightType::Q4_K, 3),
        float_products(ElementType::F32, 3),
        projections(256),
        combined((2, 2, 256), Order::Model, ActivationType::Q8_1),
    ]
}
