//! Attention over quantized pages: every instruction set against the scalar reference bit for bit, the reference
//! against `f64` attention over decoded pages, and one query alone against the same query among others.
//!
//! Every slice that a kernel gets is a separate allocation, as in `kernels.rs`.

use foretoken_kernels::attention::turboquant::{
    CodeFormat, PAGE_TOKENS, Page, PageLayout, PageMut, QuantizedQuery, RotationGroups, Side, decode_page, encode_page,
    rotate, rotate_back,
};
use foretoken_kernels::attention::{KvBlock, KvRows, OnlineSoftmax, Query, Scratch, attend_block, finish};
use foretoken_kernels::{Elements, Isa};
use half::f16;
use std::ops::Range;

const HEAD_DIMS: [usize; 9] = [16, 32, 64, 80, 96, 128, 192, 256, 512];

/// A small deterministic generator (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// A normal deviate (Box and Muller).
    fn normal(&mut self) -> f32 {
        let uniform = |bits: u64| ((bits >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        let (a, b) = (uniform(self.next()), uniform(self.next()));
        ((-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()) as f32
    }

    fn normals(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.normal()).collect()
    }
}

/// A page with its memory.
struct Owned {
    layout: PageLayout,
    codes: Vec<u8>,
    scales: Vec<f16>,
    mean: Vec<f16>,
}

impl Owned {
    fn encode(isa: Isa, format: CodeFormat, side: Side, head_dim: usize, rows: &[f32]) -> Self {
        let layout = PageLayout::new(format, side, RotationGroups::of(head_dim).unwrap());
        // The memory's previous content must not matter.
        let mut page = Self {
            layout,
            codes: vec![0xa5; layout.code_bytes()],
            scales: vec![f16::NAN; layout.scales()],
            mean: vec![f16::NAN; layout.mean()],
        };
        let memory = PageMut { codes: &mut page.codes, scales: &mut page.scales, mean: &mut page.mean };
        encode_page(isa, layout, rows, memory).unwrap();
        page
    }

    fn page(&self) -> Page<'_> {
        Page::new(self.layout, &self.codes, &self.scales, &self.mean)
    }

    fn decode(&self) -> Decoded {
        let mut rows = vec![f32::NAN; PAGE_TOKENS * self.layout.head_dim()];
        decode_page(&self.page(), &mut rows);
        Decoded { rows, mean: self.mean.clone() }
    }
}

/// A page's decoded rows, and its mean.
#[derive(Clone)]
struct Decoded {
    rows: Vec<f32>,
    mean: Vec<f16>,
}

/// One query: its row, and the visible range of each block.
#[derive(Clone)]
struct QueryCase {
    row: Vec<f32>,
    visible: Vec<Range<usize>>,
}

/// Attends the blocks; returns the finished outputs and the softmaxes.
fn attend(
    isa: Isa,
    head_dim: usize,
    key_format: Option<CodeFormat>,
    tiles: &[(KvRows<'_>, KvRows<'_>)],
    query_cases: &[QueryCase],
) -> (Vec<Vec<f32>>, Vec<OnlineSoftmax>) {
    let groups = RotationGroups::of(head_dim).unwrap();
    let words = key_format.map_or(0, |format| QuantizedQuery::word_count(format, groups));
    let mut words = vec![vec![0x55; words]; query_cases.len()];
    let prepared: Vec<_> = (words.iter_mut().zip(query_cases))
        .map(|(words, query_case)| {
            key_format.map(|format| QuantizedQuery::quantize(format, groups, &query_case.row, words))
        })
        .collect();
    attend_prepared(isa, head_dim, &prepared, tiles, query_cases)
}

fn attend_prepared(
    isa: Isa,
    head_dim: usize,
    prepared: &[Option<QuantizedQuery<'_>>],
    tiles: &[(KvRows<'_>, KvRows<'_>)],
    query_cases: &[QueryCase],
) -> (Vec<Vec<f32>>, Vec<OnlineSoftmax>) {
    let mut running = vec![OnlineSoftmax::EMPTY; query_cases.len()];
    let mut outputs = vec![vec![0.0; head_dim]; query_cases.len()];
    let (mut scores, mut weights) =
        (vec![f64::NAN; Scratch::len(PAGE_TOKENS)], vec![f32::NAN; Scratch::len(PAGE_TOKENS)]);
    for (t, (keys, values)) in tiles.iter().enumerate() {
        let mut queries: Vec<_> = (query_cases.iter().zip(prepared).zip(&mut running).zip(&mut outputs))
            .map(|(((query_case, prepared), running), output)| Query {
                query: &query_case.row,
                quantized: *prepared,
                visible: query_case.visible[t].clone(),
                softmax: running,
                output,
            })
            .collect();
        let mut scratch = Scratch { scores: &mut scores, weights: &mut weights };
        attend_block(isa, KvBlock { keys: *keys, values: *values, head_dim }, &mut queries, &mut scratch);
    }
    for (running, output) in running.iter().zip(&mut outputs) {
        finish(isa, *running, output);
    }
    (outputs, running)
}

fn bits(outputs: &[Vec<f32>]) -> Vec<u32> {
    outputs.iter().flatten().map(|x| x.to_bits()).collect()
}

/// Ranges of every kind: all, a beginning, an end, a middle, one token, none.
fn visible(random: &mut Random, query: usize) -> Range<usize> {
    let (a, b) = (random.next() as usize % PAGE_TOKENS, random.next() as usize % PAGE_TOKENS);
    match query % 6 {
        0 => 0..PAGE_TOKENS,
        1 => 0..a + 1,
        2 => a..PAGE_TOKENS,
        3 => a.min(b)..a.max(b) + 1,
        4 => a..a + 1,
        _ => a..a,
    }
}

fn query_cases(random: &mut Random, count: usize, head_dim: usize, tiles: usize) -> Vec<QueryCase> {
    (0..count)
        .map(|query| QueryCase {
            row: random.normals(head_dim).iter().map(|x| x * 0.5).collect(),
            visible: (0..tiles).map(|tile| visible(random, query + tile)).collect(),
        })
        .collect()
}

#[test]
fn rotation_is_its_matrix_and_invertible() {
    for width in 0..=512 {
        assert_eq!(RotationGroups::of(width).is_some(), width > 0 && width % 16 == 0, "{width}");
    }
    let (before, after) = (0x49f250a9a4c63bbb42f85949e46a0359u128, 0xbea56562b7a5357a3f628fdc16acee90u128);
    let sign = |mask: u128, i: usize| if mask >> i & 1 == 1 { -1.0 } else { 1.0 };
    let splits: [(usize, &[usize]); 6] =
        [(16, &[16]), (32, &[32]), (80, &[64, 16]), (96, &[64, 32]), (192, &[128, 64]), (512, &[128; 4])];
    for (head_dim, split) in splits {
        let groups = RotationGroups::of(head_dim).unwrap();
        let rows = Random(head_dim as u64).normals(3 * head_dim);
        let mut want = Vec::new();
        for row in rows.chunks(head_dim) {
            let mut first = 0;
            for len in split {
                want.extend((0..*len).map(|i| {
                    let sum: f64 = (0..*len)
                        .map(|j| {
                            let hadamard = if (i & j).count_ones() % 2 == 0 { 1.0 } else { -1.0 };
                            hadamard * sign(before, j) * f64::from(row[first + j])
                        })
                        .sum();
                    sign(after, i) * sum / (*len as f64).sqrt()
                }));
                first += len;
            }
        }
        let mut scalar = rows.clone();
        rotate(Isa::Scalar, &mut scalar, groups);
        for (got, want) in scalar.iter().zip(&want) {
            assert!((f64::from(*got) - want).abs() < 2e-6, "{head_dim}: {got}, not {want}");
        }
        for isa in Isa::available() {
            let mut rotated = rows.clone();
            rotate(isa, &mut rotated, groups);
            assert_eq!(rotated, scalar, "{} {head_dim}", isa.name());
            rotate_back(isa, &mut rotated, groups);
            for (back, row) in rotated.iter().zip(&rows) {
                assert!((back - row).abs() < 2e-6, "{} {head_dim}", isa.name());
            }
        }
    }
}

#[test]
fn pages_are_the_same_on_every_isa_and_decode_close_to_their_rows() {
    for head_dim in HEAD_DIMS {
        let rows = Random(head_dim as u64).normals(PAGE_TOKENS * head_dim);
        for format in CodeFormat::ALL {
            for side in [Side::Keys, Side::Values, Side::KEqV] {
                let scalar = Owned::encode(Isa::Scalar, format, side, head_dim, &rows);
                assert_eq!(scalar.mean.is_empty(), !format.centred(side));
                for isa in Isa::available().skip(1) {
                    let page = Owned::encode(isa, format, side, head_dim, &rows);
                    assert_eq!(page.codes, scalar.codes, "{} {format:?} {side:?} {head_dim}", isa.name());
                    assert_eq!(page.scales, scalar.scales, "{} {format:?} {side:?} {head_dim}", isa.name());
                    assert_eq!(page.mean, scalar.mean, "{} {format:?} {side:?} {head_dim}", isa.name());
                }
                let decoded = scalar.decode().rows;
                let error: f64 =
                    rows.iter().zip(&decoded).map(|(x, y)| f64::from(x - y).powi(2)).sum::<f64>() / rows.len() as f64;
                let bound = [0.13, 0.13, 0.13, 0.04, 0.0105, 0.003, 0.0009, 0.0, 4e-5][format.bits()];
                assert!(error < bound, "{format:?} {side:?} {head_dim}: {error}");
            }
        }
    }
}

#[test]
fn zeros_quantize_to_zeros_and_non_finite_values_are_errors() {
    for format in CodeFormat::ALL {
        for side in [Side::Keys, Side::Values, Side::KEqV] {
            let mut rows = vec![0.0; PAGE_TOKENS * 64];
            assert!(Owned::encode(Isa::best(), format, side, 64, &rows).decode().rows.iter().all(|x| *x == 0.0));
            for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                rows[70 * 64 + 3] = poison;
                let layout = PageLayout::new(format, side, RotationGroups::of(64).unwrap());
                let (mut codes, mut scales) = (vec![0; layout.code_bytes()], vec![f16::ZERO; layout.scales()]);
                let mut mean = vec![f16::ZERO; layout.mean()];
                let memory = PageMut { codes: &mut codes, scales: &mut scales, mean: &mut mean };
                let error = encode_page(Isa::best(), layout, &rows, memory).unwrap_err();
                assert_eq!((error.row, error.channel), (70, 3));
            }
            // The largest and the smallest floats stay finite.
            for size in [f32::MAX / 1e3, 1e-20, f32::MIN_POSITIVE, 1e-45] {
                let rows: Vec<f32> = Random(7).normals(PAGE_TOKENS * 64).iter().map(|x| x * size).collect();
                let decoded = Owned::encode(Isa::best(), format, side, 64, &rows).decode().rows;
                assert!(decoded.iter().all(|x| x.is_finite()), "{format:?} {size}");
            }
        }
    }
}

/// Attention over decoded rows in `f64`. With a `quantum`, of a query in 8 bits per that many channels;
/// its dot products with the pages' means are exact.
fn expected(keys: &[Decoded], values: &[Decoded], query_case: &QueryCase, quantum: Option<usize>) -> Vec<f64> {
    let head_dim = query_case.row.len();
    let exact: Vec<f64> = query_case.row.iter().map(|x| f64::from(*x)).collect();
    let mut row = exact.clone();
    if let Some(quantum) = quantum {
        let mut first = 0;
        while first < head_dim {
            let left = head_dim - first;
            let len = if left >= 128 { 128 } else { 1 << left.ilog2() };
            let len = len.min(quantum);
            let largest = row[first..first + len].iter().fold(0.0f64, |a, x| a.max(x.abs()));
            row[first..first + len].iter_mut().for_each(|x| *x = (*x * 127.0 / largest).round() * largest / 127.0);
            first += len;
        }
    }
    let seen: Vec<(usize, usize)> =
        query_case.visible.iter().enumerate().flat_map(|(tile, range)| range.clone().map(move |t| (tile, t))).collect();
    let score = |(tile, t): &(usize, usize)| -> f64 {
        let Decoded { rows, mean } = &keys[*tile];
        let key = |i: usize| f64::from(rows[t * head_dim + i]);
        let mean = |i: usize| mean.get(i).map_or(0.0, |mean| f64::from(mean.to_f32()));
        (0..head_dim).map(|i| row[i] * (key(i) - mean(i)) + exact[i] * mean(i)).sum()
    };
    let scores: Vec<f64> = seen.iter().map(score).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
    let total: f64 = weights.iter().sum();
    (0..head_dim)
        .map(|i| {
            let value = |(tile, t): &(usize, usize)| f64::from(values[*tile].rows[t * head_dim + i]);
            let sum: f64 = weights.iter().zip(&seen).map(|(weight, at)| weight * value(at)).sum();
            sum / total.max(1e-300)
        })
        .collect()
}

#[test]
fn attention_over_pages_is_attention_over_decoded_rows() {
    let mut random = Random(11);
    let tiles = 3;
    for head_dim in HEAD_DIMS {
        for format in CodeFormat::ALL {
            // Keys around a mean, which must be part of the scores. Half of `1 / sqrt(head_dim)` keeps scores near 1.
            let size = 2.0 / (head_dim as f32).sqrt();
            let mean: Vec<f32> = random.normals(head_dim).iter().map(|x| 2.0 * size * x).collect();
            let (mut keys, mut values) = (Vec::new(), Vec::new());
            for _ in 0..tiles {
                let rows: Vec<f32> = random.normals(PAGE_TOKENS * head_dim);
                let rows: Vec<f32> = rows.iter().enumerate().map(|(i, x)| size * x + mean[i % head_dim]).collect();
                keys.push(Owned::encode(Isa::Scalar, format, Side::Keys, head_dim, &rows));
                let rows = random.normals(PAGE_TOKENS * head_dim);
                values.push(Owned::encode(Isa::Scalar, format, Side::Values, head_dim, &rows));
            }
            let quantized: Vec<_> = keys
                .iter()
                .zip(&values)
                .map(|(k, v)| (KvRows::Quantized(k.page()), KvRows::Quantized(v.page())))
                .collect();
            let query_cases = query_cases(&mut random, 6, head_dim, tiles);
            let (outputs, _) = attend(Isa::Scalar, head_dim, Some(format), &quantized, &query_cases);
            let quantum = if matches!(format, CodeFormat::Q4_0 | CodeFormat::Q8_0) { 32 } else { 128 };
            let decoded: (Vec<_>, Vec<_>) =
                (keys.iter().map(Owned::decode).collect(), values.iter().map(Owned::decode).collect());
            for (query_case, output) in query_cases.iter().zip(&outputs) {
                // The remaining error, in addition to the query's 8 bits, is that of weights in 15 bits: half of
                // 1/32767 for each of 128 values. The 8 bits of the query cost a hundred times that.
                for (quantum, tolerance) in [(Some(quantum), 4e-4), (None, 4e-2)] {
                    let want = expected(&decoded.0, &decoded.1, query_case, quantum);
                    for (got, want) in output.iter().zip(&want) {
                        let error = (f64::from(*got) - want).abs();
                        assert!(error < tolerance, "{format:?} {head_dim}: {got}, not {want} ({quantum:?})");
                    }
                }
            }
        }
    }
}

#[test]
fn every_isa_has_the_bits_of_the_reference_for_any_number_of_queries() {
    let mut random = Random(12);
    // Numbers of queries around the 16 rows of a tile and the 32 queries of a block: all for one
    // head dimension per format, some for the others.
    let all_counts: Vec<usize> = (1..=17).chain([31, 32, 33, 40]).collect();
    let some_counts = [1, 3, 6, 16, 33];
    for (h, head_dim) in HEAD_DIMS.into_iter().enumerate() {
        let [key_rows, value_rows] = std::array::from_fn(|_| random.normals(PAGE_TOKENS * head_dim));
        for (i, format) in CodeFormat::ALL.into_iter().enumerate() {
            let counts = if i % HEAD_DIMS.len() == h { &all_counts[..] } else { &some_counts[..] };
            let value_format = CodeFormat::ALL[(i + 3) % CodeFormat::ALL.len()];
            let keys = Owned::encode(Isa::Scalar, format, Side::Keys, head_dim, &key_rows);
            let values = Owned::encode(Isa::Scalar, value_format, Side::Values, head_dim, &value_rows);
            // The same page twice: the second updates a softmax with keys.
            let tiles = [(KvRows::Quantized(keys.page()), KvRows::Quantized(values.page())); 2];
            let all = query_cases(&mut random, 40, head_dim, 2);
            let (reference, reference_running) = attend(Isa::Scalar, head_dim, Some(format), &tiles, &all);
            for isa in Isa::available() {
                let what = format!("{} {format:?} {value_format:?} {head_dim}", isa.name());
                for &count in counts {
                    let (outputs, running) = attend(isa, head_dim, Some(format), &tiles, &all[..count]);
                    assert_eq!(running, reference_running[..count], "{what} {count}");
                    assert_eq!(bits(&outputs), bits(&reference[..count]), "{what} {count}");
                    if isa == Isa::Scalar {
                        break;
                    }
                }
                // Besides the first, which is alone above.
                for n in [5, 10, 15] {
                    let (outputs, _) = attend(isa, head_dim, Some(format), &tiles, &all[n..=n]);
                    assert_eq!(bits(&outputs), bits(&reference[n..=n]), "{what}, query {n} alone");
                }
            }
        }
    }
}

#[test]
fn k_eq_v_keys_are_read_from_the_page_of_values() {
    let mut random = Random(15);
    for (head_dim, own) in [(512, 128), (512, 256), (192, 128), (96, 64), (80, 64), (256, 128)] {
        for (i, format) in CodeFormat::ALL.into_iter().enumerate() {
            let own_format = CodeFormat::ALL[(i + 7) % CodeFormat::ALL.len()];
            let (groups, own_groups) = (RotationGroups::of(head_dim).unwrap(), RotationGroups::of(own).unwrap());
            let size = 2.0 / (head_dim as f32).sqrt();
            let mean = random.normals(head_dim);
            let rows: Vec<f32> = random.normals(PAGE_TOKENS * head_dim);
            let rows: Vec<f32> = rows.iter().enumerate().map(|(i, x)| size * (x + mean[i % head_dim])).collect();
            let values = Owned::encode(Isa::Scalar, format, Side::KEqV, head_dim, &rows);
            let rows: Vec<f32> = random.normals(PAGE_TOKENS * own).iter().map(|x| size * x).collect();
            let keys = Owned::encode(Isa::Scalar, own_format, Side::Keys, own, &rows);
            let shared = KvRows::KEqV { rotary: keys.page(), values: values.page() };
            let tiles = [(shared, KvRows::Quantized(values.page())); 2];
            let query_cases = query_cases(&mut random, 11, head_dim, 2);
            let run = |isa: Isa, query_cases: &[QueryCase]| {
                let mut words: Vec<_> = (query_cases.iter())
                    .map(|_| {
                        let own = vec![0; QuantizedQuery::word_count(own_format, own_groups)];
                        (own, vec![0; QuantizedQuery::word_count(format, groups)])
                    })
                    .collect();
                let prepared: Vec<_> = (words.iter_mut().zip(query_cases))
                    .map(|((own_words, words), query_case)| {
                        let all = QuantizedQuery::quantize(format, groups, &query_case.row, words);
                        let first = QuantizedQuery::quantize(own_format, own_groups, &query_case.row[..own], own_words);
                        Some(first.with_values(all))
                    })
                    .collect();
                attend_prepared(isa, head_dim, &prepared, &tiles, query_cases)
            };
            let (reference, reference_running) = run(Isa::Scalar, &query_cases);
            let decoded = (keys.decode(), values.decode());
            let mut joined = decoded.1.clone();
            for (joined, keys) in joined.rows.chunks_mut(head_dim).zip(decoded.0.rows.chunks(own)) {
                joined[..own].copy_from_slice(keys);
            }
            for (query_case, output) in query_cases.iter().zip(&reference) {
                let want = expected(
                    &[joined.clone(), joined.clone()],
                    &[decoded.1.clone(), decoded.1.clone()],
                    query_case,
                    None,
                );
                for (got, want) in output.iter().zip(want) {
                    let error = (f64::from(*got) - want).abs();
                    assert!(error < 4e-2 * f64::from(size), "{format:?} {head_dim}: {got}, not {want}");
                }
            }
            for isa in Isa::available().skip(1) {
                let (outputs, running) = run(isa, &query_cases);
                let what = format!("{} {own_format:?} {format:?} {head_dim}", isa.name());
                assert_eq!(running, reference_running, "{what}");
                assert_eq!(bits(&outputs), bits(&reference), "{what}");
                for (n, alone) in query_cases.iter().enumerate().step_by(3) {
                    let (outputs, _) = run(isa, std::slice::from_ref(alone));
                    assert_eq!(bits(&outputs), bits(&reference[n..=n]), "{what}, query {n} alone");
                }
            }
        }
    }
}

#[test]
fn exact_and_quantized_rows_share_a_softmax() {
    let mut random = Random(13);
    let head_dim = 96;
    let (k, v) = (random.normals(PAGE_TOKENS * head_dim), random.normals(PAGE_TOKENS * head_dim));
    let k: Vec<f32> = k.iter().map(|x| 0.3 * x).collect();
    let (format, side) = (CodeFormat::Q8_0, Side::Keys);
    let keys = Owned::encode(Isa::Scalar, format, side, head_dim, &k);
    let values = Owned::encode(Isa::Scalar, format, Side::Values, head_dim, &v);
    // The tail of a store: exact, shorter than a page.
    let tail = 37 * head_dim;
    let tail_keys = k[..tail].to_vec();
    let halves: Vec<f16> = v[..tail].iter().map(|x| f16::from_f32(*x)).collect();
    let tiles: [(KvRows<'_>, KvRows<'_>); 4] = [
        (KvRows::Quantized(keys.page()), KvRows::Quantized(values.page())),
        (KvRows::Quantized(keys.page()), Elements::F32(&v).into()),
        (Elements::F32(&k).into(), KvRows::Quantized(values.page())),
        (Elements::F32(&tail_keys).into(), Elements::F16(&halves).into()),
    ];
    let mut query_cases = query_cases(&mut random, 9, head_dim, 4);
    for query_case in &mut query_cases {
        query_case.visible[3] = 0..query_case.visible[3].end.min(37);
    }
    let exact = |rows: &[f32]| Decoded { rows: rows.to_vec(), mean: Vec::new() };
    let (coded_keys, coded_values) = (keys.decode(), values.decode());
    let keys = [coded_keys.clone(), coded_keys, exact(&k), exact(&k)];
    let values = [coded_values.clone(), exact(&v), coded_values, exact(&v)];
    for isa in Isa::available() {
        let (outputs, _) = attend(isa, head_dim, Some(format), &tiles, &query_cases);
        for (query_case, output) in query_cases.iter().zip(&outputs) {
            for (got, want) in output.iter().zip(expected(&keys, &values, query_case, None)) {
                assert!((f64::from(*got) - want).abs() < 1e-2, "{}: {got}, not {want}", isa.name());
            }
        }
        for (n, alone) in query_cases.iter().enumerate() {
            let (output, _) = attend(isa, head_dim, Some(format), &tiles, std::slice::from_ref(alone));
            assert_eq!(bits(&output), bits(&outputs[n..=n]), "{}, query {n} alone", isa.name());
        }
    }
}

#[test]
fn nan_in_a_query_reaches_the_output() {
    let head_dim = 64;
    let rows = Random(14).normals(PAGE_TOKENS * head_dim);
    let keys = Owned::encode(Isa::Scalar, CodeFormat::Tqc5, Side::Keys, head_dim, &rows);
    let values = Owned::encode(Isa::Scalar, CodeFormat::Tqc4, Side::Values, head_dim, &rows);
    let tiles = [(KvRows::Quantized(keys.page()), KvRows::Quantized(values.page()))];
    for isa in Isa::available() {
        for poison in [f32::NAN, f32::INFINITY] {
            let mut row = rows[..head_dim].to_vec();
            row[5] = poison;
            let query_cases = [QueryCase { row, visible: std::iter::once(0..PAGE_TOKENS).collect() }];
            let (outputs, _) = attend(isa, head_dim, Some(CodeFormat::Tqc5), &tiles, &query_cases);
            assert!(outputs[0].iter().all(|x| x.is_nan()), "{}", isa.name());
        }
    }
}
