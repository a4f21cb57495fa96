//! Norm, activation, lookup, floating-point products, argmax, top-k, experts, acceptance.

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::accept::{AcceptOutput, accept_greedy};
use foretoken_gpu::plan::experts::{Route, mix, route};
use foretoken_gpu::plan::matmul::Buckets;
use foretoken_gpu::plan::matmul_float::{FloatMatrix, matmul, matmul_buckets};
use foretoken_gpu::plan::pointwise::{Strided, TableType, embed, gelu_gate, rms_norm};
use foretoken_gpu::plan::positions::{Placement, angles, place};
use foretoken_gpu::plan::read::read_all;
use foretoken_gpu::plan::rows::Rotary;
use foretoken_gpu::plan::vocabulary::{Grouped, NO_ID, Scores, argmax, argmax_parts, top_k};
use foretoken_kernels::norm::{self, AfterNorm};
use foretoken_kernels::quant::{WeightType, dequantize_row};
use foretoken_kernels::{ColumnsMut, ElementType, Elements, Isa, activation, gemm as cpu, vocabulary};
use half::{bf16, f16};

use super::cases::{Case, Numbers, close, same, same_bits};
use super::matmul::{file_rows, packed};

const ISA: Isa = Isa::Scalar;

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

fn gate_case(rows: usize, width: usize) -> Case {
    Case::new(format!("gate {rows} by {width}"), &["norm.cpp", "quantize.h"], move |device| {
        let mut numbers = Numbers::new(width as u64);
        let x: Vec<f32> = numbers.normals(rows * 2 * width).iter().map(|x| x * 3.0).collect();
        let mut want = Vec::new();
        for row in x.chunks_exact(2 * width) {
            let mut gate = row[..width].to_vec();
            activation::gelu_gate(ISA, &mut gate, &row[width..]);
            want.extend(gate);
        }
        let (x, y) = (device.of(&x), device.poisoned(rows * width));
        let up = DeviceSlice::new(x.address() + 4 * width as u64, x.len() - width);
        let stride = 2 * width;
        device.run(gelu_gate(Strided { slice: x, stride }, Strided { slice: up, stride }, (rows, width), y))?;
        close("y", &device.read(y), &want, 1e-6)
    })
}

fn narrow(element: ElementType, x: &[f32]) -> Vec<u8> {
    match element {
        ElementType::F32 => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
        ElementType::F16 => x.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        ElementType::Bf16 => x.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
    }
}

fn embed_case(table_type: TableType, rows: usize, inputs: usize) -> Case {
    let sources: &[_] = match table_type {
        TableType::Quantized(_) => &["embed.cpp", "formats.h", "formats_256.h"],
        TableType::Float(_) => &["embed.cpp"],
    };
    Case::new(format!("embed {table_type:?} {rows} by {inputs}"), sources, move |device| {
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
        let mut want: Vec<f32> =
            ids[..4].iter().flat_map(|id| table[*id as usize * inputs..][..inputs].iter().map(|x| x * 1.5)).collect();
        want.extend(vec![f32::from_bits(0x7fc0_0000); inputs]);
        let y: DeviceSlice<f32> = device.poisoned(ids.len() * inputs);
        let (table, ids_of) = (device.of(&bytes), device.of(&ids));
        device.run(embed(table_type, table, (rows, inputs), (ids_of, ids.len()), 1.5, y))?;
        same_bits("y", &device.read(y), &want)
    })
}

fn float_case(element: ElementType, rows: usize, outputs: usize, inputs: usize) -> Case {
    let name = format!("matmul {element:?} {rows} rows, {outputs} by {inputs}");
    Case::new(name, &["matmul_float.cpp"], move |device| {
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
        device.run(matmul(&weights, (x_of, rows), y))?;
        let got = device.read(y);
        close("y", &got, &want, 1e-5)?;
        // A row computed alone has the same bits.
        let (last, alone) = (device.of(&x[(rows - 1) * inputs..]), device.poisoned(outputs));
        device.run(matmul(&weights, (last, 1), alone))?;
        same_bits("a row alone", &device.read(alone), &got[(rows - 1) * outputs..])
    })
}

/// The centroid head of an assistant: centroid scores, top-k, the scores of their tokens, argmax.
fn centroid_case(element: ElementType, count: usize, group: usize, best: usize) -> Case {
    let name = format!("centroid head {element:?}, {best} of {count} groups of {group}");
    Case::new(name, &["matmul_float.cpp", "vocabulary.cpp"], move |device| {
        let (mut numbers, hidden) = (Numbers::new(count as u64), 132);
        // Small integers: sums are exact in any order, and some are equal.
        let mut integers =
            |len: usize| -> Vec<f32> { numbers.normals(len).iter().map(|x| (2.0 * x).round()).collect() };
        let (centroids, table, state) = (integers(count * hidden), integers(count * group * hidden), integers(hidden));
        let ordering: Vec<u32> = (0..(count * group) as u32).map(|i| i ^ 3).collect();
        let scores = |rows: &[f32]| -> Vec<f32> {
            rows.chunks_exact(hidden).map(|row| row.iter().zip(&state).map(|(a, b)| a * b).sum()).collect()
        };
        let (mut groups, mut want) = (Vec::new(), (f32::NEG_INFINITY, NO_ID));
        vocabulary::top_k(&scores(&centroids), best, &mut groups);
        for at in &groups {
            let rows = *at as usize * group..(*at as usize + 1) * group;
            for (score, id) in scores(&table[rows.start * hidden..rows.end * hidden]).into_iter().zip(&ordering[rows]) {
                if score > want.0 || (score == want.0 && *id < want.1) {
                    want = (score, *id);
                }
            }
        }

        let matrix = |count, outputs, span| FloatMatrix::new(element, (count, outputs, hidden), span);
        let (centroids, table) = (device.of(&narrow(element, &centroids)), device.of(&narrow(element, &table)));
        let centroids = matrix(1, count, centroids).map_err(|error| error.to_string())?;
        let table = matrix(count, group, table).map_err(|error| error.to_string())?;
        let (x, ranks) = (device.of(&state), device.poisoned(count));
        let (chosen, y) = (device.poisoned(best), device.poisoned(best * group));
        device.run(matmul(&centroids, (x, 1), ranks))?;
        device.run(top_k((ranks, count), (chosen, best)))?;
        let lists = Buckets {
            largest: 1,
            matrices: chosen,
            starts: device.of(&(0..=best as i32).collect::<Vec<_>>()),
            count: device.of(&[best as i32]),
            rows: Some(device.of(&vec![0; best])),
        };
        device.run(matmul_buckets(&table, (x, 1), &lists, (best, best), y))?;
        let scores = Scores {
            x: y,
            rows: 1,
            n: best * group,
            stride: best * group,
            cap: None,
            suppressed: None,
            grouped: Some(Grouped { groups: chosen, ordering: device.of(&ordering), len: group }),
        };
        let (partial, ids) = (device.poisoned(Scores::partial_len(1, best * group)), device.poisoned(1));
        device.run(argmax_parts(&scores, partial, ids))?;
        device.run(argmax(&scores, partial, ids))?;
        same("the token", &device.read(ids), &[want.1])?;
        let got = device.read(y);
        same("its score", &[got.iter().copied().fold(f32::NEG_INFINITY, f32::max)], &[want.0])
    })
}

fn top_case(n: usize, k: usize) -> Case {
    Case::new(format!("top {k} of {n}"), &["vocabulary.cpp"], move |device| {
        let mut numbers = Numbers::new(n as u64);
        // Many equal values, and both zeros.
        let mut x: Vec<f32> = numbers.normals(n).iter().map(|x| (x * 20.0).round() / 20.0).collect();
        x[n / 2] = -0.0;
        let mut want = Vec::new();
        vocabulary::top_k(&x, k, &mut want);
        let (x, indices) = (device.of(&x), device.poisoned(k));
        device.run(top_k((x, n), (indices, k)))?;
        let want: Vec<i32> = want.iter().map(|i| *i as i32).collect();
        same("indices", &device.read(indices), &want)
    })
}

fn argmax_case(rows: usize, n: usize, cap: Option<f32>, grouped: bool) -> Case {
    let name = format!("argmax of {rows} rows of {n}, cap {cap:?}, grouped {grouped}");
    Case::new(name, &["vocabulary.cpp"], move |device| {
        let (mut numbers, stride, len) = (Numbers::new(n as u64), n + 4, 16);
        let mut x = vec![0.0; rows * stride];
        for (row, x) in x.chunks_exact_mut(stride).enumerate() {
            x.copy_from_slice(&numbers.normals(stride));
            // Equal values far apart; a larger value outside the row; NaN.
            (x[n - 1], x[n / 3], x[n - 2 - row], x[1]) = (9.0, 9.0, 9.0, f32::NAN);
            x[n..].fill(99.0);
            x[n / 2] = 20.0;
        }
        x[(rows - 1) * stride..][..n].fill(f32::NEG_INFINITY);
        let groups: Vec<i32> = (0..n.div_ceil(len)).rev().map(|i| i as i32).collect();
        let ordering: Vec<u32> = (0..(groups.len() * len) as u32).map(|i| i ^ 5).collect();
        let id = |i: usize| match grouped {
            true => ordering[groups[i / len] as usize * len + i % len],
            false => i as u32,
        };
        let suppressed = [id(n / 2), 7];
        let mut want = Vec::new();
        for row in x.chunks_exact(stride) {
            let mut row = row[..n].to_vec();
            if let Some(cap) = cap {
                activation::soft_cap(ISA, &mut row, cap);
            }
            let mut best = (f32::NEG_INFINITY, NO_ID);
            for (i, x) in row.into_iter().enumerate() {
                let better = x > best.0 || (x == best.0 && x > f32::NEG_INFINITY && id(i) < best.1);
                if better && !suppressed.contains(&id(i)) {
                    best = (x, id(i));
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
            suppressed: Some((device.of(&suppressed), 2)),
            grouped: grouped.then(|| Grouped { groups: device.of(&groups), ordering: device.of(&ordering), len }),
        };
        let (partial, ids) = (device.poisoned(Scores::partial_len(rows, n)), device.poisoned(rows));
        device.run(argmax_parts(&scores, partial, ids))?;
        device.run(argmax(&scores, partial, ids))?;
        same("ids", &device.read(ids), &want)
    })
}

fn experts_case(rows: usize, experts: usize, chosen: usize) -> Case {
    Case::new(format!("experts: {chosen} of {experts} for {rows} rows"), &["experts.cpp"], move |device| {
        let (mut numbers, width, entries) = (Numbers::new((rows * experts) as u64), 300, rows * chosen);
        let mut scores: Vec<f32> = numbers.normals(rows * experts).iter().map(|x| (x * 8.0).round() / 8.0).collect();
        scores[experts / 2] = 5.0;
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
        let (mut matrices, mut starts) = (Vec::new(), Vec::new());
        for (entry, (expert, _, _)) in sorted.iter().enumerate() {
            if matrices.last() != Some(expert) {
                matrices.push(*expert);
                starts.push(entry as i32);
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

        let lists = Route {
            buckets: Buckets {
                largest: rows,
                matrices: device.poisoned(entries),
                starts: device.poisoned(entries + 1),
                count: device.poisoned(1),
                rows: Some(device.poisoned(entries)),
            },
            entries: device.poisoned(entries),
            weights: device.poisoned(entries),
        };
        let (scores, scale) = (device.of(&scores), device.of(&scale));
        device.run(route(scores, scale, (rows, experts, chosen), &lists))?;
        let (parts, y) = (device.of(&parts), device.poisoned(rows * width));
        device.run(mix(parts, &lists, (rows, chosen, width), y))?;

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

fn accept_case(drafts: &'static [u32], chosen: &'static [u32], stops: &'static [u32]) -> Case {
    Case::new(format!("accept {drafts:?} of {chosen:?}, stops {stops:?}"), &["accept.cpp"], move |device| {
        let width = 300;
        let hidden = Numbers::new(3).normals(chosen.len() * width);
        let accepted = drafts.iter().zip(chosen).take_while(|(a, b)| a == b).count();
        let mut emitted = chosen[..=accepted].to_vec();
        if let Some(stop) = emitted.iter().position(|token| stops.contains(token)) {
            emitted.truncate(stop + 1);
        }
        let last = emitted[emitted.len() - 1];
        let want = [accepted as u32, chosen[accepted], emitted.len() as u32, last];
        let out = AcceptOutput {
            counts: device.poisoned(4),
            tokens: device.poisoned(chosen.len()),
            hidden: device.poisoned(width),
        };
        let (hidden_of, stops_of) = ((device.of(&hidden), width), (device.of(stops), stops.len()));
        let (drafts_of, chosen_of) = ((device.of(drafts), drafts.len()), device.of(chosen));
        device.run(accept_greedy(drafts_of, chosen_of, stops_of, hidden_of, &out))?;
        same("counts", &device.read(out.counts), &want)?;
        same("tokens", &device.read(out.tokens)[..emitted.len()], &emitted)?;
        same_bits("hidden", &device.read(out.hidden), &hidden[(emitted.len() - 1) * width..][..width])
    })
}

fn positions_case(rows: usize, placement: Placement, emitted: Option<u32>) -> Case {
    let name = format!("positions of {rows} rows {placement:?}, {emitted:?} emitted");
    Case::new(name, &["positions.cpp"], move |device| {
        let (pairs, before) = (130, 70_000);
        let length = before + emitted.unwrap_or(0) as i32;
        let want: Vec<[i32; 2]> = (length..length + rows as i32)
            .map(|position| if placement == Placement::Consecutive { [position, position + 1] } else { [length; 2] })
            .collect();
        let frequencies: Vec<f32> = (0..pairs).map(|i| 1e4f32.powf(-(i as f32) / pairs as f32)).collect();
        let (length_of, at) = (device.of(&[before]), device.poisoned(rows));
        // The third word of the counts.
        let counts = emitted.map(|emitted| device.of(&[0, 0, emitted, 0]));
        let emitted_of = counts.map(|counts| DeviceSlice::new(counts.address() + 8, 1));
        device.run(place(length_of, emitted_of, (at, rows), placement))?;
        same("length", &device.read(length_of), &[length])?;
        same("positions", &device.read(at), &want)?;
        let out = Rotary { cos: device.poisoned(rows * pairs), sin: device.poisoned(rows * pairs), pairs };
        let frequencies_of = device.of(&frequencies);
        device.run(angles((at, rows), frequencies_of, &out))?;
        let angle = |[position, _]: &[i32; 2]| frequencies.iter().map(|f| f * *position as f32).collect::<Vec<_>>();
        let (cos, sin): (Vec<f32>, Vec<f32>) = want.iter().flat_map(angle).map(|a| (a.cos(), a.sin())).unzip();
        close("cosines", &device.read(out.cos), &cos, 1e-6)?;
        close("sines", &device.read(out.sin), &sin, 1e-6)
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

const QUANTIZED: [WeightType; 13] = [
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
const ELEMENTS: [ElementType; 3] = [ElementType::F32, ElementType::F16, ElementType::Bf16];

pub fn all() -> Vec<Case> {
    let mut cases = small();
    cases.extend([norm_case(16, 512, true, true), norm_case(1, 4, false, false), norm_case(2, 2816, true, false)]);
    cases.extend([gate_case(16, 64), gate_case(1, 2112)]);
    for element in ELEMENTS {
        cases.extend((1..=16).map(|rows| float_case(element, rows, 40, 132)));
        cases.push(float_case(element, 21, 4, 260));
    }
    cases.extend([top_case(2048, 32), top_case(1, 1), top_case(4096, 100)]);
    cases.extend([argmax_case(3, 9000, None, false), argmax_case(2, 4096, Some(30.0), false)]);
    cases.extend((1..=16).map(|rows| experts_case(rows, 128, 8)));
    cases.extend([experts_case(3, 6, 2), experts_case(2, 256, 16)]);
    let chosen: &[u32] = &[5, 6, 7, 8];
    cases.extend([&[5, 6, 7][..], &[5, 9, 7], &[9, 6, 7]].map(|drafts| accept_case(drafts, chosen, &[])));
    cases.push(accept_case(&[], &[4], &[4]));
    cases.push(read_case(300, 3));
    cases.extend([positions_case(1, Placement::Constant, None), positions_case(40, Placement::Consecutive, Some(1))]);
    cases.extend([ElementType::F32, ElementType::Bf16].map(|element| centroid_case(element, 256, 16, 32)));
    cases
}

pub fn small() -> Vec<Case> {
    let mut cases = vec![norm_case(3, 1000, true, true), norm_case(2, 300, true, false), gate_case(3, 1028)];
    cases.extend(QUANTIZED.map(|weight_type| embed_case(TableType::Quantized(weight_type), 20, 512)));
    cases.extend(ELEMENTS.map(|element| embed_case(TableType::Float(element), 20, 300)));
    cases.extend([float_case(ElementType::Bf16, 3, 37, 260), top_case(100, 10)]);
    cases.extend([argmax_case(3, 4500, Some(30.0), false), argmax_case(3, 512, None, true)]);
    cases.push(positions_case(5, Placement::Consecutive, Some(3)));
    cases.push(experts_case(5, 40, 3));
    cases.push(read_case(6002, 2));
    cases.push(centroid_case(ElementType::F16, 20, 6, 5));
    cases.extend([accept_case(&[5, 6, 7], &[5, 6, 8, 9], &[6, 1]), accept_case(&[5, 6, 7], &[5, 6, 8, 9], &[1])]);
    cases
}
