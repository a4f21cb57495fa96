//! Norm, activation, lookup, floating-point products, argmax, top-k, experts, positions, acceptance, words of the host.

use foretoken_gpu::plan::accept::{Accepting, State, Verified, accept, set_state};
use foretoken_gpu::plan::experts::{BLOCK_ROWS, Route, SharedExpert, max_buckets, mix, route, sort_route};
use foretoken_gpu::plan::matmul::Buckets;
use foretoken_gpu::plan::matmul_float::{FloatMatrix, FloatParams, matmul, matmul_buckets, matmul_tiles};
use foretoken_gpu::plan::pointwise::{self, Gate, GateNorm, Strided, TableType, embed, normed_silu_gate, rms_norm};
use foretoken_gpu::plan::positions::{DraftInput, Tokens, angles, begin_step, keep_rows, place};
use foretoken_gpu::plan::read::read_all;
use foretoken_gpu::plan::rows::{Pairing, Rotary};
use foretoken_gpu::plan::segments::{ON_DEVICE, Place, Segment, Segments};
use foretoken_gpu::plan::vocabulary::{
    Chosen, Grouped, KEPT, Largest, NO_ID, Scores, argmax, argmax_parts, largest, largest_parts, top_k,
};
use foretoken_gpu::plan::words::{MAX_WORDS, copy_words, write_words};
use foretoken_gpu::{DeviceSlice, Launch, LaunchError};
use foretoken_kernels::norm::{self, AfterNorm};
use foretoken_kernels::quant::dequantize_row;
use foretoken_kernels::{ColumnsMut, ElementType, Elements, Isa, activation, gemm as cpu, vocabulary};
use half::{bf16, f16};

use super::cases::{Case, Numbers, close, same, same_bits};
use super::device::Device;
use super::matmul::{TYPES, file_rows, packed};

const ISA: Isa = Isa::Scalar;

/// A word of memory that was not written.
const POISON: u32 = 0xcdcd_cdcd;

fn norm_case(rows: usize, width: usize, weight: bool, residual: bool) -> Case {
    Case::new(
        format!("norm {rows} by {width}, weight {weight}, residual {residual}"),
        &["norm.cpp", "quantize.h"],
        move |device| {
            let mut numbers = Numbers::new(width as u64);
            let (x, w, r) = (numbers.normals(rows * width), numbers.normals(width), numbers.normals(rows * width));
            let mut want = vec![0.0; x.len()];
            let after = if residual { AfterNorm::AddTo { residual: &r, scale: 0.3 } } else { AfterNorm::Write };
            norm::rms_norm(ISA, &x, width, weight.then_some(&w[..]), 1e-6, after, &mut want);
            let y: DeviceSlice<f32> = device.poisoned(x.len());
            let (x, w, r) = (device.of(&x), device.of(&w), device.of(&r));
            let add_to = residual.then_some((r, 0.3));
            device.run(rms_norm(x, (rows, width), weight.then_some(w), 1e-6, add_to, y))?;
            close("y", &device.read(y), &want, 1e-6)
        },
    )
}

fn add_case(rows: usize, width: usize) -> Case {
    Case::new(format!("sum {rows} by {width}"), &["norm.cpp", "quantize.h"], move |device| {
        let mut numbers = Numbers::new(width as u64);
        let (residual, x) = (numbers.normals(rows * width), numbers.normals(rows * width));
        let want: Vec<f32> = residual.iter().zip(&x).map(|(residual, x)| residual + x).collect();
        let y: DeviceSlice<f32> = device.poisoned(x.len());
        let (residual, x) = (device.of(&residual), device.of(&x));
        device.run(pointwise::add(residual, x, (rows, width), y))?;
        same_bits("y", &device.read(y), &want)
    })
}

fn gate_case(function: Gate, rows: usize, width: usize) -> Case {
    let name = format!("{function:?} gate {rows} by {width}");
    Case::new(name, &["norm.cpp", "quantize.h"], move |device| {
        let mut numbers = Numbers::new(width as u64);
        let x: Vec<f32> = numbers.normals(rows * 2 * width).iter().map(|x| x * 3.0).collect();
        let mut want = Vec::new();
        for row in x.chunks_exact(2 * width) {
            let mut gate = row[..width].to_vec();
            function.apply(ISA, &mut gate, &row[width..]);
            want.extend(gate);
        }
        let (x, y) = (device.of(&x), device.poisoned(rows * width));
        let up = DeviceSlice::new(x.address() + 4 * width as u64, x.len() - width);
        let stride = 2 * width;
        let (gate, up) = (Strided { slice: x, stride }, Strided { slice: up, stride });
        device.run(pointwise::gate(function, gate, up, (rows, width), y))?;
        match function {
            Gate::GeluTanh => close("y", &device.read(y), &want, 1e-6),
            Gate::Silu | Gate::Sigmoid => same_bits("y", &device.read(y), &want),
        }
    })
}

/// A gate over normed heads has the bits of a norm and then a gate.
fn normed_gate_case(rows: usize, heads: usize, head: usize) -> Case {
    Case::new(format!("normed gate {rows} by {heads} of {head}"), &["norm.cpp", "quantize.h"], move |device| {
        let (mut numbers, width) = (Numbers::new((heads * head) as u64), heads * head);
        let mut strided = |stride: usize| Strided { slice: device.of(&numbers.normals(rows * stride)), stride };
        let (gate, up) = (strided(width + 4), strided(width));
        let norm = GateNorm { weight: device.of(&numbers.normals(head)), head, eps: 1e-6 };
        let [normed, want, y] = [0; 3].map(|_| device.poisoned(rows * width));
        device.run(rms_norm(up.slice, (rows * heads, head), Some(norm.weight), norm.eps, None, normed))?;
        let normed = Strided { slice: normed, stride: width };
        device.run(pointwise::gate(Gate::Silu, gate, normed, (rows, width), want))?;
        device.run(normed_silu_gate(&norm, gate, up, (rows, width), y))?;
        same_bits("y", &device.read(y), &device.read(want))
    })
}

/// The values' bytes in another element type.
pub fn narrow(element: ElementType, x: &[f32]) -> Vec<u8> {
    match element {
        ElementType::F32 => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
        ElementType::F16 => x.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        ElementType::Bf16 => x.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
    }
}

/// `stride`: elements of the result from row to row.
fn embed_case(table_type: TableType, rows: usize, inputs: usize, stride: usize) -> Case {
    let sources: &[_] = match table_type {
        TableType::Quantized(_) => &["embed.cpp", "formats.h", "formats_256.h"],
        TableType::Float(_) => &["embed.cpp"],
    };
    Case::new(format!("embed {table_type:?} {rows} by {inputs}, stride {stride}"), sources, move |device| {
        let mut numbers = Numbers::new(inputs as u64);
        let mut table = vec![0.0; rows * inputs];
        let bytes = match table_type {
            TableType::Quantized(weight_type) => {
                let file = file_rows(weight_type, rows, inputs, &mut numbers);
                for (row, values) in file.chunks_exact(file.len() / rows).zip(table.chunks_exact_mut(inputs)) {
                    dequantize_row(weight_type, row, values);
                }
                packed(weight_type, rows, inputs, &file)
            }
            TableType::Float(element) => {
                let bytes = narrow(element, &numbers.normals(rows * inputs));
                match element {
                    ElementType::F32 => {
                        table = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
                    }
                    ElementType::F16 => {
                        table = bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
                    }
                    ElementType::Bf16 => {
                        table = bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
                    }
                }
                bytes
            }
        };
        let ids = [rows as u32 - 1, 0, 3, 3, rows as u32];
        let len = (ids.len() - 1) * stride + inputs;
        let mut want = vec![f32::from_bits(POISON); len];
        for (id, want) in ids.iter().zip(want.chunks_mut(stride)) {
            match table.chunks_exact(inputs).nth(*id as usize) {
                Some(row) => want.iter_mut().zip(row).for_each(|(to, x)| *to = x * 1.5),
                None => want[..inputs].fill(f32::from_bits(0x7fc0_0000)),
            }
        }
        let y = Strided { slice: device.poisoned(len), stride };
        let (table, ids_of) = (device.of(&bytes), device.of(&ids));
        device.run(embed(table_type, table, (rows, inputs), (ids_of, ids.len()), 1.5, y))?;
        same_bits("y", &device.read(y.slice), &want)
    })
}

/// The sources of products with weights of this type.
pub const fn product_sources(element: ElementType) -> &'static [&'static str] {
    match element {
        ElementType::Bf16 => &["matmul_bf16.cpp", "float_products.h", "device.metal"],
        ElementType::F32 | ElementType::F16 => &["matmul_float.cpp", "float_products.h"],
    }
}

fn float_case(element: ElementType, rows: usize, outputs: usize, inputs: usize) -> Case {
    float_product("matmul", matmul, element, (rows, outputs, inputs))
}

/// Of bf16, by the kernel for many rows.
fn tiles_case(rows: usize, outputs: usize, inputs: usize) -> Case {
    float_product("matmul in tiles", matmul_tiles, ElementType::Bf16, (rows, outputs, inputs))
}

/// Plans a product.
type Plan = fn(&FloatMatrix, (DeviceSlice<f32>, usize), DeviceSlice<f32>) -> Result<Launch<FloatParams>, LaunchError>;

fn float_product(what: &str, plan: Plan, element: ElementType, (rows, outputs, inputs): (usize, usize, usize)) -> Case {
    let name = format!("{what} {element:?} {rows} rows, {outputs} by {inputs}");
    Case::new(name, product_sources(element), move |device| {
        let mut numbers = Numbers::new((rows + inputs) as u64);
        let (w, x) = (numbers.normals(outputs * inputs), numbers.normals(rows * inputs));
        let (halves, brains): (Vec<f16>, Vec<bf16>) = w.iter().map(|x| (f16::from_f32(*x), bf16::from_f32(*x))).unzip();
        let elements = match element {
            ElementType::F32 => Elements::F32(&w),
            ElementType::F16 => Elements::F16(&halves),
            ElementType::Bf16 => Elements::Bf16(&brains),
        };
        let mut want = vec![0.0; rows * outputs];
        let prepared = cpu::PreparedRows::new(ISA, element, &x, inputs, &mut []);
        cpu::matmul(ISA, prepared, elements, ColumnsMut::new(&mut want, rows, outputs));
        let (bytes, x_of) = (device.of(&narrow(element, &w)), device.of(&x));
        let weights = FloatMatrix::new(element, (1, outputs, inputs), bytes).map_err(|error| error.to_string())?;
        let y: DeviceSlice<f32> = device.poisoned(rows * outputs);
        device.run(plan(&weights, (x_of, rows), y))?;
        let got = device.read(y);
        close("y", &got, &want, 1e-5)?;
        // Rows computed alone, or in other tiles, have the same bits.
        let last = rows - 1;
        for part in [&x[last * inputs..]].into_iter().chain(x.chunks(7 * inputs).filter(|_| rows > 8)) {
            let (count, at) = (part.len() / inputs, (part.as_ptr() as usize - x.as_ptr() as usize) / (4 * inputs));
            let (some, y) = (device.of(part), device.poisoned(count * outputs));
            device.run(matmul(&weights, (some, count), y))?;
            same_bits("some rows", &device.read(y), &got[at * outputs..][..count * outputs])?;
        }
        Ok(())
    })
}

/// Products of one number: the pieces of a float are all of it, and infinities and NaN stay what they are.
fn single_numbers_case() -> Case {
    Case::new("matmul Bf16 of single numbers", product_sources(ElementType::Bf16), |device| {
        let mut numbers =
            vec![f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e-30, 1.0 + f32::EPSILON];
        // A NaN whose upper half is infinity's.
        numbers.push(f32::from_bits(0x7f80_0001));
        numbers.extend(Numbers::new(1).normals(17));
        let (rows, inputs, outputs) = (numbers.len(), 40, 4);
        let mut x = vec![0.0; rows * inputs];
        numbers.iter().enumerate().for_each(|(row, number)| x[row * inputs + (row + 20) % inputs] = *number);
        let weights = device.of(&narrow(ElementType::Bf16, &vec![-0.5; outputs * inputs]));
        let weights =
            FloatMatrix::new(ElementType::Bf16, (1, outputs, inputs), weights).map_err(|error| error.to_string())?;
        let (x, y) = (device.of(&x), device.poisoned(rows * outputs));
        device.run(matmul(&weights, (x, rows), y))?;
        let bits = |x: f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
        let got: Vec<u32> = device.read(y).into_iter().map(bits).collect();
        let want: Vec<u32> = numbers.iter().flat_map(|x| [bits(-0.5 * x); 4]).collect();
        same("y", &got, &want)
    })
}

/// Buckets of 1, 11 and 3 entries have the bits of plain products.
fn float_buckets_case(element: ElementType, outputs: usize, inputs: usize) -> Case {
    let name = format!("matmul by buckets {element:?} {outputs} by {inputs}");
    Case::new(name, product_sources(element), move |device| {
        let mut numbers = Numbers::new(9);
        let rows_of: [Vec<i32>; 3] = [vec![2], (0..11).collect(), vec![0, 3, 5]];
        let (x, entries) = (numbers.normals(11 * inputs), rows_of.concat());
        let w = device.of(&narrow(element, &numbers.normals(4 * outputs * inputs)));
        let lists = Buckets {
            max_buckets: 4,
            entries: 15,
            largest: 11,
            matrices: device.of(&[3, 0, 2, -1]),
            starts: device.of(&[0, 1, 12, 15, 15]),
            count: device.of(&[3]),
            rows: Some(device.of(&entries)),
        };
        let weights = FloatMatrix::new(element, (4, outputs, inputs), w).map_err(|error| error.to_string())?;
        let (x_of, y) = (device.of(&x), device.poisoned(15 * outputs));
        device.run(matmul_buckets(&weights, (x_of, 11), &lists, y))?;
        let mut want = Vec::new();
        for (rows, matrix) in rows_of.iter().zip([3, 0, 2]) {
            let bytes = outputs * inputs * element.size();
            let one = DeviceSlice::new(w.address() + (matrix * bytes) as u64, bytes);
            let one = FloatMatrix::new(element, (1, outputs, inputs), one).map_err(|error| error.to_string())?;
            let x: Vec<f32> = rows.iter().flat_map(|row| &x[*row as usize * inputs..][..inputs]).copied().collect();
            let (x, y) = (device.of(&x), device.poisoned(rows.len() * outputs));
            device.run(matmul(&one, (x, rows.len()), y))?;
            want.extend(device.read(y));
        }
        same_bits("y", &device.read(y), &want)
    })
}

/// Products with bf16 weights: tiles of one, two and more rows and of all outputs, and rows of every remainder.
fn bf16_cases() -> Vec<Case> {
    let case = |rows, outputs, inputs| float_case(ElementType::Bf16, rows, outputs, inputs);
    let mut cases: Vec<Case> = (1..=10).map(|quads| case(2, 20, 4 * quads)).collect();
    for rows in [1, 2, 7, 8, 9, 16, 17, 64, 65] {
        cases.extend([case(rows, 33, 260), case(rows, 40, 264), case(rows, 16, 1288)]);
    }
    cases.extend([case(3, 17, 1284), case(2, 48, 2080)]);
    // Blocks of 32 outputs, and tiles of 32 rows.
    cases.extend([case(9, 8460, 136), case(7, 8460, 44)]);
    cases.extend([tiles_case(64, 260, 36), tiles_case(65, 200, 264), tiles_case(65, 260, 292), tiles_case(17, 320, 8)]);
    cases.push(single_numbers_case());
    cases
}

/// The centroid head of an assistant: centroid scores, top-k, the scores of their tokens, argmax.
fn centroid_case(element: ElementType, rows: usize, count: usize, group: usize, best: usize) -> Case {
    let name = format!("centroid head {element:?}, {rows} rows, {best} of {count} groups of {group}");
    Case::new(name, &["matmul_float.cpp", "float_products.h", "vocabulary.cpp"], move |device| {
        let (mut numbers, hidden) = (Numbers::new(count as u64), 132);
        // Small integers: sums are exact in any order, and some are equal.
        let mut integers =
            |len: usize| -> Vec<f32> { numbers.normals(len).iter().map(|x| (2.0 * x).round()).collect() };
        let (centroids, table) = (integers(count * hidden), integers(count * group * hidden));
        let states = integers(rows * hidden);
        let ordering: Vec<u32> = (0..(count * group) as u32).map(|i| i ^ 3).collect();
        let (mut tokens, mut best_scores) = (Vec::new(), Vec::new());
        for state in states.chunks_exact(hidden) {
            let scores = |rows: &[f32]| -> Vec<f32> {
                rows.chunks_exact(hidden).map(|row| row.iter().zip(state).map(|(a, b)| a * b).sum()).collect()
            };
            let (mut groups, mut want) = (Vec::new(), (f32::NEG_INFINITY, NO_ID));
            vocabulary::top_k(&scores(&centroids), best, &mut groups);
            for at in &groups {
                let rows = *at as usize * group..(*at as usize + 1) * group;
                let scores = scores(&table[rows.start * hidden..rows.end * hidden]);
                for (score, id) in scores.into_iter().zip(&ordering[rows]) {
                    if score > want.0 || (score == want.0 && *id < want.1) {
                        want = (score, *id);
                    }
                }
            }
            best_scores.push(want.0);
            tokens.push(want.1);
        }

        let matrix = |count, outputs, span| FloatMatrix::new(element, (count, outputs, hidden), span);
        let (centroids, table) = (device.of(&narrow(element, &centroids)), device.of(&narrow(element, &table)));
        let centroids = matrix(1, count, centroids).map_err(|error| error.to_string())?;
        let table = matrix(count, group, table).map_err(|error| error.to_string())?;
        let (x, ranks, all) = (device.of(&states), device.poisoned(rows * count), rows * best);
        let (chosen, y) = (device.poisoned(all), device.poisoned(all * group));
        device.run(matmul(&centroids, (x, rows), ranks))?;
        device.run(top_k(ranks, rows, count, chosen, best))?;
        let lists = Buckets {
            max_buckets: all,
            entries: all,
            largest: 1,
            matrices: chosen,
            starts: device.of(&(0..=all as i32).collect::<Vec<_>>()),
            count: device.of(&[all as i32]),
            rows: Some(device.of(&(0..all).map(|i| (i / best) as i32).collect::<Vec<_>>())),
        };
        device.run(matmul_buckets(&table, (x, rows), &lists, y))?;
        let (n, ordering) = (best * group, device.of(&ordering));
        let grouped = Some(Grouped { groups: chosen, ordering, len: group });
        let scores = Scores { x: y, rows, n, stride: n, cap: None, suppressed: None, grouped };
        let (partial, ids) = (device.poisoned(Scores::partial_len(rows, n)), device.poisoned(rows));
        device.run(argmax_parts(&scores, partial, &Chosen::Ids(ids)))?;
        device.run(argmax(&scores, partial, &Chosen::Ids(ids)))?;
        same("the tokens", &device.read(ids), &tokens)?;
        let got = device.read(y);
        let largest = |row: &[f32]| row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        same("their scores", &got.chunks_exact(n).map(largest).collect::<Vec<_>>(), &best_scores)
    })
}

fn top_case(rows: usize, n: usize, k: usize) -> Case {
    Case::new(format!("top {k} of {n}, {rows} rows"), &["vocabulary.cpp"], move |device| {
        let mut numbers = Numbers::new(n as u64);
        // Many equal values, and both zeros.
        let mut x: Vec<f32> = numbers.normals(rows * n).iter().map(|x| (x * 20.0).round() / 20.0).collect();
        x[n / 2] = -0.0;
        let mut want: Vec<i32> = Vec::new();
        for row in x.chunks_exact(n) {
            let mut best = Vec::new();
            vocabulary::top_k(row, k, &mut best);
            want.extend(best.iter().map(|i| *i as i32));
        }
        let (x, indices) = (device.of(&x), device.poisoned(rows * k));
        device.run(top_k(x, rows, n, indices, k))?;
        same("indices", &device.read(indices), &want)
    })
}

/// `draft`: the results are the sequences' drafts of this index.
fn largest_case(rows: usize, n: usize) -> Case {
    Case::new(format!("the largest of {rows} rows of {n}"), &["vocabulary.cpp"], move |device| {
        let (mut numbers, stride) = (Numbers::new(n as u64), n + 4);
        let suppressed = [n as u32 / 2, 7];
        let mut x = numbers.normals(rows * stride);
        for (row, x) in x.chunks_exact_mut(stride).enumerate() {
            // Equal values far apart; a larger value outside the row; NaN of either sign, also of a suppressed id; the
            // largest of a suppressed id.
            (x[n - 1], x[n / 3], x[n - 2 - row], x[1], x[0]) = (9.0, 9.0, 9.0, f32::NAN, -f32::NAN);
            x[n..].fill(99.0);
            x[7] = f32::NAN;
            x[n / 2] = 20.0;
        }
        x[(rows - 1) * stride..][..n].fill(f32::NEG_INFINITY);
        let mut want = Vec::new();
        for x in x.chunks_exact(stride) {
            let kept = |i: &usize| x[*i].is_nan() || !suppressed.contains(&(*i as u32));
            let mut order: Vec<usize> = (0..n).filter(kept).collect();
            // Stable: equal values stay in order of id.
            order.sort_by(|a, b| {
                let [a, b] = [x[*a], x[*b]];
                b.is_nan().cmp(&a.is_nan()).then(b.partial_cmp(&a).unwrap_or(std::cmp::Ordering::Equal))
            });
            let mut best: Vec<_> = order.iter().take(KEPT).map(|i| [x[*i].to_bits(), *i as u32]).collect();
            best.resize(KEPT, [f32::NEG_INFINITY.to_bits(), NO_ID]);
            want.extend(best);
        }
        let scores = Scores {
            x: device.of(&x[..x.len() - 4]),
            rows,
            n,
            stride,
            cap: None,
            suppressed: Some(device.of(&suppressed)),
            grouped: None,
        };
        let largest_of =
            Largest { partial: device.poisoned(Largest::partial_len(rows, n)), best: device.poisoned(rows * KEPT) };
        device.run(largest_parts(&scores, &largest_of))?;
        device.run(largest(&scores, &largest_of))?;
        same("the largest", &device.read(largest_of.best), &want)
    })
}

fn argmax_case(rows: usize, n: usize, cap: Option<f32>, grouped: bool, draft: Option<usize>) -> Case {
    let name = format!("argmax of {rows} rows of {n}, cap {cap:?}, grouped {grouped}, draft {draft:?}");
    Case::new(name, &["vocabulary.cpp"], move |device| {
        let (mut numbers, stride, len) = (Numbers::new(n as u64), n + 4, 16);
        // Each row has all groups, in an order of its own.
        let count = n.div_ceil(len);
        let groups: Vec<i32> =
            (0..rows).flat_map(|row| (0..count).map(move |i| ((count - 1 - i + row) % count) as i32)).collect();
        let ordering: Vec<u32> = (0..(count * len) as u32).map(|i| i ^ 5).collect();
        let id = |row: usize, i: usize| match grouped {
            true => ordering[groups[row * count + i / len] as usize * len + i % len],
            false => i as u32,
        };
        let suppressed = [id(0, n / 2), 7];
        let mut x = vec![0.0; rows * stride];
        for (row, x) in x.chunks_exact_mut(stride).enumerate() {
            x.copy_from_slice(&numbers.normals(stride));
            // Equal values far apart; a larger value outside the row; the largest of a suppressed id.
            (x[n - 1], x[n / 3], x[n - 2 - row]) = (9.0, 9.0, 9.0);
            x[n..].fill(99.0);
            (0..n).filter(|i| id(row, *i) == suppressed[0]).for_each(|i| x[i] = 20.0);
        }
        x[(rows - 1) * stride..][..n].fill(f32::NEG_INFINITY);
        let mut want = Vec::new();
        for (row, x) in x.chunks_exact(stride).enumerate() {
            let mut x = x[..n].to_vec();
            if let Some(cap) = cap {
                activation::soft_cap(ISA, &mut x, cap);
            }
            let mut best = (f32::NEG_INFINITY, NO_ID);
            for (i, x) in x.into_iter().enumerate() {
                let id = id(row, i);
                let better = x > best.0 || (x == best.0 && x > f32::NEG_INFINITY && id < best.1);
                if better && !suppressed.contains(&id) {
                    best = (x, id);
                }
            }
            want.push(best.1);
        }
        let scores = Scores {
            x: device.of(&x[..x.len() - 4]),
            rows,
            n,
            stride,
            cap,
            suppressed: Some(device.of(&suppressed)),
            grouped: grouped.then(|| Grouped { groups: device.of(&groups), ordering: device.of(&ordering), len }),
        };
        let (partial, ids) = (device.poisoned(Scores::partial_len(rows, n)), device.poisoned(rows));
        // Length, newest token, and drafts.
        let mut states = vec![vec![1, 2, 3, 4]; rows];
        let pass = pass(device, &vec![Segment::default(); rows], &states, (&[], 1));
        let chosen = draft.map_or(Chosen::Ids(ids), |index| Chosen::Draft { segments: pass.segments, index });
        device.run(argmax_parts(&scores, partial, &chosen))?;
        device.run(argmax(&scores, partial, &chosen))?;
        let Some(draft) = draft else { return same("ids", &device.read(ids), &want) };
        states.iter_mut().zip(&want).for_each(|(state, id)| state[2 + draft] = *id);
        pass.states.iter().zip(&states).try_for_each(|(state, want)| same("state", &device.read(*state), want))
    })
}

/// Rows with NaN, or whose largest allowed element is infinite, have no id.
fn damaged_argmax_case(n: usize, cap: Option<f32>) -> Case {
    Case::new(format!("argmax of damaged rows of {n}, cap {cap:?}"), &["vocabulary.cpp"], move |device| {
        let (suppressed, largest) = (7, n / 2);
        // Elements of a row, and its id. A cap makes infinity finite.
        let of_infinity = cap.map_or(NO_ID, |_| n as u32 - 2);
        let damaged = [
            (vec![], largest as u32),
            (vec![(1, f32::NAN)], NO_ID),
            (vec![(n - 1, -f32::NAN)], NO_ID),
            (vec![(suppressed, f32::NAN)], NO_ID),
            (vec![(n - 2, f32::INFINITY)], of_infinity),
            (vec![(0, f32::INFINITY), (1, f32::NAN)], NO_ID),
            (vec![(suppressed, f32::INFINITY), (1, f32::NEG_INFINITY)], largest as u32),
        ];
        let mut x = Numbers::new(n as u64).normals(damaged.len() * n);
        for (x, (elements, _)) in x.chunks_exact_mut(n).zip(&damaged) {
            x[largest] = 9.0;
            elements.iter().for_each(|(i, element)| x[*i] = *element);
        }
        let (rows, suppressed) = (damaged.len(), Some(device.of(&[suppressed as u32])));
        let scores = Scores { x: device.of(&x), rows, n, stride: n, cap, suppressed, grouped: None };
        let (partial, ids) = (device.poisoned(Scores::partial_len(rows, n)), device.poisoned(rows));
        device.run(argmax_parts(&scores, partial, &Chosen::Ids(ids)))?;
        device.run(argmax(&scores, partial, &Chosen::Ids(ids)))?;
        same("ids", &device.read(ids), &damaged.map(|(_, id)| id))
    })
}

fn experts_case(rows: usize, experts: usize, chosen: usize, has_shared: bool) -> Case {
    let name = format!("experts: {chosen} of {experts} for {rows} rows, shared {has_shared}");
    Case::new(name, &["experts.cpp"], move |device| {
        let (mut numbers, width, entries) = (Numbers::new((rows * experts) as u64), 300, rows * chosen);
        let mut scores: Vec<f32> = numbers.normals(rows * experts).iter().map(|x| (x * 8.0).round() / 8.0).collect();
        scores[experts / 2] = 5.0;
        // An expert of all rows, which has several buckets.
        let largest = rows.min(16);
        if rows > largest {
            scores.chunks_exact_mut(experts).for_each(|scores| scores[1] = 6.0);
        }
        let (scale, parts) = (numbers.normals(experts), numbers.normals(entries * width));

        // Row by row, like the model's router.
        let (mut best, mut choices) = (Vec::new(), Vec::new());
        for (row, scores) in scores.chunks_exact(experts).enumerate() {
            vocabulary::top_k(scores, chosen, &mut best);
            let largest = scores[best[0] as usize];
            let total: f32 = best.iter().map(|e| (scores[*e as usize] - largest).exp()).sum();
            best.sort_unstable();
            for expert in &best {
                let e = *expert as usize;
                choices.push((e as i32, row as i32, (scores[e] - largest).exp() / total * scale[e]));
            }
        }
        let mut sorted = choices.clone();
        sorted.sort_by_key(|(expert, row, _)| (*expert, *row));
        let (mut matrices, mut starts, mut entry) = (Vec::new(), Vec::new(), 0);
        for of_expert in sorted.chunk_by(|a, b| a.0 == b.0) {
            for bucket in of_expert.chunks(largest) {
                matrices.push(bucket[0].0);
                starts.push(entry);
                entry += bucket.len() as i32;
            }
        }
        starts.push(entries as i32);
        let entry_of = |choice: &(i32, i32, f32)| {
            sorted.iter().position(|(expert, row, _)| (*expert, *row) == (choice.0, choice.1)).expect("an entry")
        };
        let mut want = vec![0.0; rows * width];
        for choice in &choices {
            let part = &parts[entry_of(choice) * width..][..width];
            let y = &mut want[choice.1 as usize * width..][..width];
            y.iter_mut().zip(part).for_each(|(y, x)| *y += choice.2 * x);
        }
        let (gates, shared) = (numbers.normals(rows), numbers.normals(rows * width));
        if has_shared {
            for ((y, x), gate) in want.chunks_exact_mut(width).zip(shared.chunks_exact(width)).zip(&gates) {
                let share = 1.0 / (1.0 + (-gate).exp());
                y.iter_mut().zip(x).for_each(|(y, x)| *y += share * x);
            }
        }

        let most = max_buckets(entries, experts, largest);
        let lists = Route {
            buckets: Buckets {
                max_buckets: most,
                entries,
                largest,
                matrices: device.poisoned(most),
                starts: device.poisoned(most + 1),
                count: device.poisoned(1),
                rows: Some(device.poisoned(entries)),
            },
            entries: device.poisoned(entries),
            weights: device.poisoned(entries),
        };
        let (scores, scale) = (device.of(&scores), device.of(&scale));
        let routed = route(scores, scale, (rows, experts, chosen), &lists);
        let sort = routed.as_ref().ok().and_then(sort_route);
        assert_eq!(sort.is_some(), rows > BLOCK_ROWS);
        device.run(routed)?;
        sort.map_or(Ok(()), |sort| device.run(Ok(sort)))?;
        let (parts, y) = (device.of(&parts), device.poisoned(rows * width));
        let shared = has_shared.then(|| SharedExpert { x: device.of(&shared), gate: device.of(&gates) });
        device.run(mix(parts, &lists, (rows, chosen, width), shared, y))?;

        same("the number of buckets", &device.read(lists.buckets.count), &[matrices.len() as i32])?;
        same("matrices", &device.read(lists.buckets.matrices)[..matrices.len()], &matrices)?;
        same("starts", &device.read(lists.buckets.starts)[..starts.len()], &starts)?;
        let rows_of: Vec<i32> = sorted.iter().map(|(_, row, _)| *row).collect();
        same("rows", &device.read(lists.buckets.rows.expect("rows")), &rows_of)?;
        let entries_of: Vec<i32> = choices.iter().map(|choice| entry_of(choice) as i32).collect();
        same("entries", &device.read(lists.entries), &entries_of)?;
        let weights: Vec<f32> = choices.iter().map(|(_, _, weight)| *weight).collect();
        close("weights", &device.read(lists.weights), &weights, 1e-6)?;
        close("y", &device.read(y), &want, 1e-6)
    })
}

/// The sequences of a pass on a device.
struct Pass {
    segments: Segments,
    /// Of each segment.
    states: Vec<DeviceSlice<u32>>,
    /// Of each segment, `(width)`.
    hidden: Vec<DeviceSlice<f32>>,
}

/// Segments with these states (length, newest token, drafts), and hidden states `(segments, width)` or none.
fn pass(device: &mut dyn Device, segments: &[Segment], states: &[Vec<u32>], (hidden, width): (&[f32], usize)) -> Pass {
    let states: Vec<_> = states.iter().map(|state| device.of(state)).collect();
    let hidden: Vec<_> = hidden.chunks_exact(width).map(|hidden| device.of(hidden)).collect();
    let mut segments = segments.to_vec();
    for (i, segment) in segments.iter_mut().enumerate() {
        segment.state = states[i].address();
        segment.hidden = hidden.get(i).map_or(0, |hidden| hidden.address());
    }
    let longest = segments.iter().map(|segment| segment.rows as usize).max().unwrap_or(0);
    let segments = Segments { slice: device.of(&segments), count: segments.len(), longest };
    Pass { segments, states, hidden }
}

/// Of a sequence: dropped rows before the others, drafts, and the target's tokens.
type Verification = (usize, &'static [u32], &'static [u32]);

fn accept_case(sequences: &'static [Verification], accepting: Accepting) -> Case {
    Case::new(format!("accept {accepting:?} of {sequences:?}"), &["accept.cpp"], move |device| {
        let (mut numbers, width) = (Numbers::new(3), 300);
        let (mut segments, mut ids, mut chosen) = (Vec::new(), Vec::new(), Vec::new());
        for (newest, (skipped, drafts, choices)) in (10..).zip(sequences) {
            // Tokens of dropped rows, then the newest one.
            ids.extend(vec![newest; skipped + 1]);
            segments.push(Segment {
                first: chosen.len() as i32,
                rows: choices.len() as i32,
                source: ids.len() as i32 - 1,
                skipped: *skipped as i32,
                ..Segment::default()
            });
            ids.extend(*drafts);
            chosen.extend(*choices);
        }
        let states: Vec<Vec<u32>> = (0..sequences.len() as u32).map(|i| vec![1000 * i, 10 + i, 6, 7]).collect();
        let before = numbers.normals(sequences.len() * width);
        let hidden = numbers.normals(chosen.len() * width);
        let pass = pass(device, &segments, &states, (&before, width));
        let (verified, results) = (
            Verified { ids: device.of(&ids), chosen: device.of(&chosen), hidden: device.of(&hidden), width },
            device.poisoned(2 * sequences.len()),
        );
        device.run(accept(&pass.segments, &verified, accepting, results))?;

        let results = device.read(results);
        for (i, (skipped, drafts, choices)) in sequences.iter().enumerate() {
            let accepted = match accepting {
                Accepting::Argmax => Some(drafts.iter().zip(*choices).take_while(|(a, b)| a == b).count()),
                Accepting::Count { segment, drafts } => (segment == i).then_some(drafts),
            };
            let (mut result, mut state) = ([POISON; 2], states[i].clone());
            let mut hidden_now = &before[i * width..][..width];
            if let Some(accepted) = accepted {
                result = [accepted as u32, choices[accepted]];
                state[0] += (skipped + accepted) as u32 + 1;
                state[1] = choices[accepted];
                hidden_now = &hidden[(segments[i].first as usize + accepted) * width..][..width];
            }
            same(&format!("result {i}"), &results[2 * i..2 * i + 2], &result)?;
            same(&format!("state {i}"), &device.read(pass.states[i]), &state)?;
            same_bits(&format!("hidden {i}"), &device.read(pass.hidden[i]), hidden_now)?;
        }
        Ok(())
    })
}

fn state_case(with_hidden: bool) -> Case {
    Case::new(format!("set the state, hidden {with_hidden}"), &["accept.cpp"], move |device| {
        let (mut numbers, width) = (Numbers::new(4), 300);
        let (before, rows) = (numbers.normals(width), numbers.normals(1 + width));
        let (state, hidden, rows_of) = (device.of(&[7, 8, 9, 9]), device.of(&before), device.of(&rows));
        let from = with_hidden.then(|| DeviceSlice::new(rows_of.address() + 4, width));
        device.run(set_state(state, hidden, &State { length: 70_000, newest: 5, hidden: from }))?;
        same("state", &device.read(state), &[70_000, 5, 9, 9])?;
        same_bits("hidden", &device.read(hidden), if with_hidden { &rows[1..] } else { &before })
    })
}

fn place_case(with_tokens: bool) -> Case {
    Case::new(format!("places, tokens {with_tokens}"), &["positions.cpp"], move |device| {
        let rows_of = |first, rows| Segment { first, rows, ..Segment::default() };
        // Given tokens; the newest and two drafts; a given token and a draft; drafts after five dropped rows.
        let segments = [rows_of(0, 40), rows_of(40, 3), rows_of(43, 2), Segment { skipped: 5, ..rows_of(45, 2) }];
        let states = [vec![70_000, 1], vec![300, 2, 11, 12], vec![0, 3, 13], vec![20, 4, 14, 15, 16, 17, 18, 19]];
        let mut given: Vec<u32> = (1000..1047).collect();
        given[40..43].fill(ON_DEVICE);
        given[44..].fill(ON_DEVICE);
        let mut want = given.clone();
        want[40..].copy_from_slice(&[2, 11, 12, 1043, 13, 18, 19]);
        let mut want_places: Vec<Place> = Vec::new();
        for (i, (segment, state)) in segments.iter().zip(&states).enumerate() {
            let first = state[0] as i32 + segment.skipped;
            want_places.extend((first..first + segment.rows).map(|position| [position, position + 1, i as i32, 0]));
        }

        let (rows, pass) = (given.len(), pass(device, &segments, &states, (&[], 1)));
        let (places, ids) = (device.poisoned(rows), device.poisoned(rows));
        let tokens = Tokens { given: device.of(&given), ids };
        device.run(place(&pass.segments, (places, rows), with_tokens.then_some(&tokens)))?;
        same("places", &device.read(places), &want_places)?;
        same("ids", &device.read(ids), if with_tokens { &want } else { &[POISON; 47] })
    })
}

fn step_case(step: usize) -> Case {
    Case::new(format!("draft step {step}"), &["positions.cpp"], move |device| {
        let (mut numbers, width, count) = (Numbers::new(5), 300, 3);
        // Length, newest token, and the drafts before this step.
        let states = [[70_000, 1, 11, 21], [0, 2, 12, 22], [300, 3, 13, 23]].map(|state| state[..2 + step].to_vec());
        let (newest_hidden, hidden) = (numbers.normals(count * width), numbers.normals(count * width));
        let segments: Vec<_> = (0..3).map(|first| Segment { first, rows: 1, ..Segment::default() }).collect();
        let pass = pass(device, &segments, &states, (&newest_hidden, width));
        let hidden_of = (step > 0).then(|| device.of(&hidden));
        let (ids, input) = (device.poisoned(count), device.poisoned(2 * count * width));
        let (given, places) = (device.of(&[ON_DEVICE, 77, ON_DEVICE]), device.poisoned(count));
        let from = DraftInput { given, step, hidden: hidden_of, ids, input, width };
        device.run(begin_step(&pass.segments, places, &from))?;
        let want: Vec<Place> = (0..3).map(|i| [states[i][0] as i32, states[i][0] as i32, i as i32, 0]).collect();
        same("places", &device.read(places), &want)?;
        same("ids", &device.read(ids), &[states[0][1 + step], 77, states[2][1 + step]])?;
        let mut want = vec![f32::from_bits(POISON); 2 * count * width];
        let hidden = if step == 0 { newest_hidden } else { hidden };
        for (input, hidden) in want.chunks_exact_mut(2 * width).zip(hidden.chunks_exact(width)) {
            input[width..].copy_from_slice(hidden);
        }
        same_bits("input", &device.read(input), &want)
    })
}

fn angles_case(rows: usize, pairs: usize) -> Case {
    Case::new(format!("angles of {rows} rows, {pairs} pairs"), &["positions.cpp"], move |device| {
        let places: Vec<Place> = (0..rows as i32).map(|row| [70_000 - 1000 * row, -1, -1, 0]).collect();
        let frequencies: Vec<f32> = (0..pairs).map(|i| 1e4f32.powf(-(i as f32) / pairs as f32)).collect();
        let out = Rotary {
            cos: device.poisoned(rows * pairs),
            sin: device.poisoned(rows * pairs),
            pairs,
            pairing: Pairing::Head,
        };
        let (places_of, frequencies_of) = (device.of(&places), device.of(&frequencies));
        device.run(angles((places_of, rows), frequencies_of, &out))?;
        let angle = |place: &Place| frequencies.iter().map(|f| f * place[0] as f32).collect::<Vec<_>>();
        let (cos, sin): (Vec<f32>, Vec<f32>) = places.iter().flat_map(angle).map(|a| (a.cos(), a.sin())).unzip();
        close("cosines", &device.read(out.cos), &cos, 1e-6)?;
        close("sines", &device.read(out.sin), &sin, 1e-6)
    })
}

fn keep_case(width: usize) -> Case {
    Case::new(format!("kept rows of {width}"), &["positions.cpp"], move |device| {
        // First row, rows, first row before; of nine rows.
        let of = [(0, 1, 2), (1, 2, 3), (3, 2, 7)];
        let segments = of.map(|(first, rows, source)| Segment { first, rows, source, ..Segment::default() });
        let x = Numbers::new(6).normals(9 * width);
        let want: Vec<f32> = [2, 3, 4, 7, 8].iter().flat_map(|row| &x[row * width..][..width]).copied().collect();
        let segments = Segments { slice: device.of(&segments), count: 3, longest: 2 };
        let (x, y) = (device.of(&x), device.poisoned(5 * width));
        device.run(keep_rows(&segments, (x, 9), (y, 5), width))?;
        same_bits("y", &device.read(y), &want)
    })
}

fn words_case(count: usize) -> Case {
    Case::new(format!("{count} words of the host"), &["words.cpp"], move |device| {
        let words: Vec<u32> = (1..=count as u32).collect();
        let to = device.of(&vec![POISON; count + 1]);
        device.run(write_words(to, &words))?;
        let mut want = words;
        want.push(POISON);
        same("words", &device.read(to), &want)
    })
}

fn copy_case(count: usize) -> Case {
    Case::new(format!("a copy of {count} words"), &["words.cpp"], move |device| {
        let words: Vec<u32> = (1..=count as u32).collect();
        let (from, to) = (device.of(&words), device.poisoned(count));
        device.run(copy_words(to, Some(from)))?;
        same("the copy", &device.read(to), &words)?;
        device.run(copy_words(to, None))?;
        same("zeros", &device.read(to), &vec![0; count])
    })
}

fn read_case(words: usize, blocks: usize) -> Case {
    Case::new(format!("read {words} words by {blocks} blocks"), &["read.cpp"], move |device| {
        let mut numbers = Numbers::new(words as u64);
        let x: Vec<u32> = (0..words).map(|_| numbers.bits() as u32).collect();
        let mut want = vec![0; blocks * 8];
        for (i, quad) in x.chunks_exact(4).enumerate() {
            want[i / 32 % (blocks * 8)] ^= quad.iter().fold(0, |joined, word| joined ^ word);
        }
        let (x, y) = (device.of(&x), device.poisoned(blocks * 8));
        device.run(read_all(x, blocks, y))?;
        same("what was read", &device.read(y), &want)
    })
}

const ELEMENTS: [ElementType; 3] = [ElementType::F32, ElementType::F16, ElementType::Bf16];

pub fn all() -> Vec<Case> {
    let mut cases =
        vec![norm_case(16, 512, true, true), norm_case(1, 4, false, false), norm_case(2, 2816, true, false)];
    cases.extend([
        gate_case(Gate::Silu, 16, 64),
        gate_case(Gate::GeluTanh, 1, 2112),
        gate_case(Gate::Sigmoid, 5, 256),
        normed_gate_case(5, 9, 128),
        normed_gate_case(1, 5, 256),
    ]);
    for element in ELEMENTS {
        cases.extend((1..=16).map(|rows| float_case(element, rows, 40, 132)));
        cases.push(float_case(element, 21, 4, 260));
        cases.extend([float_buckets_case(element, 40, 132), float_buckets_case(element, 33, 296)]);
    }
    cases.extend(bf16_cases());
    cases.extend([top_case(1, 2048, 32), top_case(3, 1, 1), top_case(2, 4096, 100)]);
    cases.extend([argmax_case(3, 9000, None, false, None), argmax_case(2, 4096, Some(30.0), false, None)]);
    cases.extend([damaged_argmax_case(9000, None), damaged_argmax_case(300, Some(30.0))]);
    cases.extend([(2, 9000), (2, 4096), (3, 4097), (2, 40), (2, 512)].map(|(rows, n)| largest_case(rows, n)));
    cases.extend((1..=16).map(|rows| experts_case(rows, 128, 8, false)));
    cases.extend([experts_case(3, 6, 2, false), experts_case(2, 256, 16, true)]);
    // The last two have as many entries as are sorted at once.
    let many = [(17, 128, 8), (64, 128, 8), (200, 8, 2), (200, 256, 8), (512, 128, 8), (256, 256, 16)];
    cases.extend(many.map(|(rows, experts, chosen)| experts_case(rows, experts, chosen, false)));
    let verifications: [&[Verification]; 3] =
        [&[(0, &[5, 6, 7], &[5, 6, 7, 8])], &[(0, &[5, 9, 7], &[5, 6, 7, 8])], &[(0, &[9, 6, 7], &[5, 6, 7, 8])]];
    cases.extend(verifications.map(|sequences| accept_case(sequences, Accepting::Argmax)));
    cases.push(accept_case(&[(0, &[], &[4])], Accepting::Argmax));
    cases.push(read_case(300, 3));
    cases.extend([angles_case(1, 128), step_case(1), words_case(MAX_WORDS)]);
    cases.extend([ElementType::F32, ElementType::Bf16].map(|element| centroid_case(element, 1, 256, 16, 32)));
    cases.push(centroid_case(ElementType::F16, 4, 256, 16, 32));
    cases
}

pub fn small() -> Vec<Case> {
    let mut cases = vec![
        norm_case(3, 1000, true, true),
        norm_case(2, 300, true, false),
        add_case(3, 1000),
        gate_case(Gate::GeluTanh, 3, 1028),
        normed_gate_case(3, 3, 16),
    ];
    cases.extend(TYPES.map(|weight_type| embed_case(TableType::Quantized(weight_type), 20, 512, 512)));
    cases.extend(ELEMENTS.map(|element| embed_case(TableType::Float(element), 20, 300, 600)));
    cases.extend([float_case(ElementType::F16, 3, 37, 260), top_case(2, 100, 10)]);
    // Of each kernel: rows of whole steps and others.
    let bf16 = |rows, outputs, inputs| float_case(ElementType::Bf16, rows, outputs, inputs);
    cases.extend([bf16(3, 37, 260), bf16(9, 20, 1288), bf16(2, 8460, 8), tiles_case(33, 132, 36)]);
    cases.push(float_buckets_case(ElementType::Bf16, 20, 40));
    cases.extend([argmax_case(3, 4500, Some(30.0), false, None), argmax_case(3, 512, None, true, Some(1))]);
    cases.extend([largest_case(2, 4130), largest_case(3, 40)]);
    cases.extend([place_case(true), place_case(false), step_case(0), step_case(2)]);
    cases.extend([angles_case(5, 130), keep_case(300), words_case(5), copy_case(1030)]);
    cases.extend([experts_case(5, 40, 3, true), experts_case(2, 8, 2, false), experts_case(35, 40, 3, true)]);
    cases.push(read_case(6002, 2));
    cases.push(centroid_case(ElementType::F16, 2, 20, 6, 5));
    // Two of three drafts; no draft, after dropped rows, and before a token that the target chose; all drafts.
    let sequences: &[Verification] = &[(0, &[5, 6, 7], &[5, 6, 8, 9]), (2, &[], &[12]), (0, &[6, 7], &[6, 7, 8])];
    cases.push(accept_case(sequences, Accepting::Argmax));
    cases
        .extend([(0, 3), (2, 1)].map(|(segment, drafts)| accept_case(sequences, Accepting::Count { segment, drafts })));
    cases.extend([state_case(true), state_case(false)]);
    cases
}
