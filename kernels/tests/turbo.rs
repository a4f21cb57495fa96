//! Attention over coded pages: every instruction set against the scalar reference bit for bit, the reference against `f64`
//! attention over decoded pages, and one query alone against the same query among others.
//!
//! What a kernel gets is an allocation of its own, as in `kernels.rs`.

use foretoken_kernels::attend::{KvTile, Query, Rows, Running, Scratch, attend_tile, finish};
use foretoken_kernels::turbo::{
    CodeFormat, Groups, PAGE_TOKENS, Page, PageLayout, PageMut, PreparedQuery, Side, decode_page, encode_page, rotate,
    rotate_back,
};
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

    /// Normal, by Box and Muller.
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
        let layout = PageLayout::new(format, side, Groups::of(head_dim).unwrap());
        // Whatever was there before must not matter.
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

/// What a page expands to, and its mean.
#[derive(Clone)]
struct Decoded {
    rows: Vec<f32>,
    mean: Vec<f16>,
}

/// One query's inputs: its row, and what it sees of each tile.
#[derive(Clone)]
struct Asked {
    row: Vec<f32>,
    visible: Vec<Range<usize>>,
}

/// Runs the queries over the tiles; the finished outputs and softmax states.
fn attend(
    isa: Isa,
    head_dim: usize,
    key_format: Option<CodeFormat>,
    tiles: &[(Rows<'_>, Rows<'_>)],
    asked: &[Asked],
) -> (Vec<Vec<f32>>, Vec<Running>) {
    let groups = Groups::of(head_dim).unwrap();
    let words = key_format.map_or(0, |format| PreparedQuery::words(format, groups));
    let mut words = vec![vec![0x55; words]; asked.len()];
    let prepared: Vec<_> = (words.iter_mut().zip(asked))
        .map(|(words, asked)| key_format.map(|format| PreparedQuery::prepare(format, groups, &asked.row, words)))
        .collect();
    attend_prepared(isa, head_dim, &prepared, tiles, asked)
}

fn attend_prepared(
    isa: Isa,
    head_dim: usize,
    prepared: &[Option<PreparedQuery<'_>>],
    tiles: &[(Rows<'_>, Rows<'_>)],
    asked: &[Asked],
) -> (Vec<Vec<f32>>, Vec<Running>) {
    let mut running = vec![Running::EMPTY; asked.len()];
    let mut outputs = vec![vec![0.0; head_dim]; asked.len()];
    let (mut scores, mut weights) =
        (vec![f64::NAN; Scratch::len(PAGE_TOKENS)], vec![f32::NAN; Scratch::len(PAGE_TOKENS)]);
    for (t, (keys, values)) in tiles.iter().enumerate() {
        let mut queries: Vec<_> = (asked.iter().zip(prepared).zip(&mut running).zip(&mut outputs))
            .map(|(((asked, prepared), running), output)| Query {
                query: &asked.row,
                prepared: *prepared,
                visible: asked.visible[t].clone(),
                running,
                output,
            })
            .collect();
        let mut scratch = Scratch { scores: &mut scores, weights: &mut weights };
        attend_tile(isa, KvTile { keys: *keys, values: *values, head_dim }, &mut queries, &mut scratch);
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

fn asked(random: &mut Random, count: usize, head_dim: usize, tiles: usize) -> Vec<Asked> {
    (0..count)
        .map(|query| Asked {
            row: random.normals(head_dim).iter().map(|x| x * 0.5).collect(),
            visible: (0..tiles).map(|tile| visible(random, query + tile)).collect(),
        })
        .collect()
}

#[test]
fn rotation_is_the_matrix_it_claims_and_comes_back() {
    for width in 0..=512 {
        assert_eq!(Groups::of(width).is_some(), width > 0 && width % 16 == 0, "{width}");
    }
    let (before, after) = (0x49f250a9a4c63bbb42f85949e46a0359u128, 0xbea56562b7a5357a3f628fdc16acee90u128);
    let sign = |mask: u128, i: usize| if mask >> i & 1 == 1 { -1.0 } else { 1.0 };
    let splits: [(usize, &[usize]); 6] =
        [(16, &[16]), (32, &[32]), (80, &[64, 16]), (96, &[64, 32]), (192, &[128, 64]), (512, &[128; 4])];
    for (head_dim, split) in splits {
        let groups = Groups::of(head_dim).unwrap();
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
fn pages_are_the_same_on_every_isa_and_decode_near_their_rows() {
    for head_dim in HEAD_DIMS {
        let rows = Random(head_dim as u64).normals(PAGE_TOKENS * head_dim);
        for format in CodeFormat::ALL {
            for side in [Side::Keys, Side::Values, Side::Shared] {
                let scalar = Owned::encode(Isa::Scalar, format, side, head_dim, &rows);
                assert_eq!(scalar.mean.is_empty(), !format.centred(side));
                for isa in Isa::available() {
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
fn zeros_code_as_zeros_and_what_is_no_number_is_named() {
    for format in CodeFormat::ALL {
        for side in [Side::Keys, Side::Values, Side::Shared] {
            let mut rows = vec![0.0; PAGE_TOKENS * 64];
            assert!(Owned::encode(Isa::best(), format, side, 64, &rows).decode().rows.iter().all(|x| *x == 0.0));
            for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                rows[70 * 64 + 3] = poison;
                let layout = PageLayout::new(format, side, Groups::of(64).unwrap());
                let (mut codes, mut scales) = (vec![0; layout.code_bytes()], vec![f16::ZERO; layout.scales()]);
                let mut mean = vec![f16::ZERO; layout.mean()];
                let memory = PageMut { codes: &mut codes, scales: &mut scales, mean: &mut mean };
                let error = encode_page(Isa::best(), layout, &rows, memory).unwrap_err();
                assert_eq!((error.row, error.channel), (70, 3));
            }
            // The largest and the smallest numbers stay numbers.
            for size in [f32::MAX / 1e3, 1e-20, f32::MIN_POSITIVE, 1e-45] {
                let rows: Vec<f32> = Random(7).normals(PAGE_TOKENS * 64).iter().map(|x| x * size).collect();
                let decoded = Owned::encode(Isa::best(), format, side, 64, &rows).decode().rows;
                assert!(decoded.iter().all(|x| x.is_finite()), "{format:?} {size}");
            }
        }
    }
}

/// Attention over decoded rows in `f64`. With a `quantum`, of a query in 8 bits per that many channels; its dot products
/// with the pages' means are exact.
fn expected(keys: &[Decoded], values: &[Decoded], asked: &Asked, quantum: Option<usize>) -> Vec<f64> {
    let head_dim = asked.row.len();
    let exact: Vec<f64> = asked.row.iter().map(|x| f64::from(*x)).collect();
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
        asked.visible.iter().enumerate().flat_map(|(tile, range)| range.clone().map(move |t| (tile, t))).collect();
    let score = |(tile, t): &(usize, usize)| -> f64 {
        let Decoded { rows, mean } = &keys[*tile];
        let key = |i: usize| f64::from(rows[t * head_dim + i]);
        let mean = |i: usize| mean.get(i).map_or(0.0, |mean| f64::from(mean.to_f32()));
        (0..head_dim).map(|i| row[i] * (key(i) - mean(i)) + exact[i] * mean(i)).sum()
    };
    let scores: Vec<f64> = seen.iter().map(score).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = scores.iter().map(|score| (score - max).exp()).sum();
    (0..head_dim)
        .map(|i| {
            let terms = scores.iter().zip(&seen);
            terms
                .map(|(score, (tile, t))| (score - max).exp() * f64::from(values[*tile].rows[t * head_dim + i]))
                .sum::<f64>()
                / total.max(1e-300)
        })
        .collect()
}

#[test]
fn attention_over_pages_is_attention_over_what_they_decode_to() {
    let mut random = Random(11);
    let tiles = 3;
    for head_dim in HEAD_DIMS {
        for format in CodeFormat::ALL {
            // Keys around a mean: it must reach the scores. Half of `1 / sqrt(head_dim)` keeps scores near 1.
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
            let coded: Vec<_> =
                keys.iter().zip(&values).map(|(k, v)| (Rows::Coded(k.page()), Rows::Coded(v.page()))).collect();
            let asked = asked(&mut random, 6, head_dim, tiles);
            let (outputs, _) = attend(Isa::Scalar, head_dim, Some(format), &coded, &asked);
            let quantum = if matches!(format, CodeFormat::Q4_0 | CodeFormat::Q8_0) { 32 } else { 128 };
            let decoded: (Vec<_>, Vec<_>) =
                (keys.iter().map(Owned::decode).collect(), values.iter().map(Owned::decode).collect());
            for (asked, output) in asked.iter().zip(&outputs) {
                // Beside the query's 8 bits, what is left is the 15 bits of the weights: half of 1/32767 for each of 128
                // values. The 8 bits of the query cost a hundred times that.
                for (quantum, tolerance) in [(Some(quantum), 4e-4), (None, 4e-2)] {
                    let want = expected(&decoded.0, &decoded.1, asked, quantum);
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
fn every_isa_gives_the_bits_of_the_reference_however_many_queries_ride_along() {
    let mut random = Random(12);
    for head_dim in HEAD_DIMS {
        for (i, format) in CodeFormat::ALL.into_iter().enumerate() {
            let value_format = CodeFormat::ALL[(i + 3) % CodeFormat::ALL.len()];
            let rows = random.normals(PAGE_TOKENS * head_dim);
            let keys = Owned::encode(Isa::Scalar, format, Side::Keys, head_dim, &rows);
            let rows = random.normals(PAGE_TOKENS * head_dim);
            let values = Owned::encode(Isa::Scalar, value_format, Side::Values, head_dim, &rows);
            // Twice the same page: the second meets a softmax that is under way.
            let tiles = [(Rows::Coded(keys.page()), Rows::Coded(values.page())); 2];
            let all = asked(&mut random, 40, head_dim, 2);
            let (reference, reference_running) = attend(Isa::Scalar, head_dim, Some(format), &tiles, &all);
            for isa in Isa::available() {
                let what = format!("{} {format:?} {value_format:?} {head_dim}", isa.name());
                // Around the sixteen of a matrix and the thirty-two of a pass.
                for count in (1..=17).chain([31, 32, 33, 40]) {
                    let (outputs, running) = attend(isa, head_dim, Some(format), &tiles, &all[..count]);
                    assert_eq!(running, reference_running[..count], "{what} {count}");
                    assert_eq!(bits(&outputs), bits(&reference[..count]), "{what} {count}");
                    if isa == Isa::Scalar {
                        break;
                    }
                }
                for (n, alone) in all[..17].iter().enumerate() {
                    let (outputs, _) = attend(isa, head_dim, Some(format), &tiles, std::slice::from_ref(alone));
                    assert_eq!(bits(&outputs), bits(&reference[n..=n]), "{what}, query {n} alone");
                }
            }
        }
    }
}

#[test]
fn keys_may_lie_in_the_page_of_the_values() {
    let mut random = Random(15);
    for (head_dim, own) in [(512, 128), (512, 256), (192, 128), (96, 64), (80, 64), (256, 128)] {
        for (i, format) in CodeFormat::ALL.into_iter().enumerate() {
            let own_format = CodeFormat::ALL[(i + 7) % CodeFormat::ALL.len()];
            let (groups, own_groups) = (Groups::of(head_dim).unwrap(), Groups::of(own).unwrap());
            let size = 2.0 / (head_dim as f32).sqrt();
            let mean = random.normals(head_dim);
            let rows: Vec<f32> = random.normals(PAGE_TOKENS * head_dim);
            let rows: Vec<f32> = rows.iter().enumerate().map(|(i, x)| size * (x + mean[i % head_dim])).collect();
            let values = Owned::encode(Isa::Scalar, format, Side::Shared, head_dim, &rows);
            let rows: Vec<f32> = random.normals(PAGE_TOKENS * own).iter().map(|x| size * x).collect();
            let keys = Owned::encode(Isa::Scalar, own_format, Side::Keys, own, &rows);
            let shared = Rows::Shared { own: keys.page(), values: values.page() };
            let tiles = [(shared, Rows::Coded(values.page())); 2];
            let asked = asked(&mut random, 11, head_dim, 2);
            let run = |isa: Isa, asked: &[Asked]| {
                let mut words: Vec<_> = (asked.iter())
                    .map(|_| {
                        let own = vec![0; PreparedQuery::words(own_format, own_groups)];
                        (own, vec![0; PreparedQuery::words(format, groups)])
                    })
                    .collect();
                let prepared: Vec<_> = (words.iter_mut().zip(asked))
                    .map(|((own_words, words), asked)| {
                        let all = PreparedQuery::prepare(format, groups, &asked.row, words);
                        let first = PreparedQuery::prepare(own_format, own_groups, &asked.row[..own], own_words);
                        Some(first.with_values(all))
                    })
                    .collect();
                attend_prepared(isa, head_dim, &prepared, &tiles, asked)
            };
            let (reference, reference_running) = run(Isa::Scalar, &asked);
            let decoded = (keys.decode(), values.decode());
            let mut joined = decoded.1.clone();
            for (joined, keys) in joined.rows.chunks_mut(head_dim).zip(decoded.0.rows.chunks(own)) {
                joined[..own].copy_from_slice(keys);
            }
            for (asked, output) in asked.iter().zip(&reference) {
                let want =
                    expected(&[joined.clone(), joined.clone()], &[decoded.1.clone(), decoded.1.clone()], asked, None);
                for (got, want) in output.iter().zip(want) {
                    let error = (f64::from(*got) - want).abs();
                    assert!(error < 4e-2 * f64::from(size), "{format:?} {head_dim}: {got}, not {want}");
                }
            }
            for isa in Isa::available() {
                let (outputs, running) = run(isa, &asked);
                let what = format!("{} {own_format:?} {format:?} {head_dim}", isa.name());
                assert_eq!(running, reference_running, "{what}");
                assert_eq!(bits(&outputs), bits(&reference), "{what}");
                for (n, alone) in asked.iter().enumerate() {
                    let (outputs, _) = run(isa, std::slice::from_ref(alone));
                    assert_eq!(bits(&outputs), bits(&reference[n..=n]), "{what}, query {n} alone");
                }
            }
        }
    }
}

#[test]
fn exact_and_coded_rows_share_a_softmax() {
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
    let tiles: [(Rows<'_>, Rows<'_>); 4] = [
        (Rows::Coded(keys.page()), Rows::Coded(values.page())),
        (Rows::Coded(keys.page()), Elements::F32(&v).into()),
        (Elements::F32(&k).into(), Rows::Coded(values.page())),
        (Elements::F32(&tail_keys).into(), Elements::F16(&halves).into()),
    ];
    let mut asked = asked(&mut random, 9, head_dim, 4);
    for asked in &mut asked {
        asked.visible[3] = 0..asked.visible[3].end.min(37);
    }
    let exact = |rows: &[f32]| Decoded { rows: rows.to_vec(), mean: Vec::new() };
    let (coded_keys, coded_values) = (keys.decode(), values.decode());
    let keys = [coded_keys.clone(), coded_keys, exact(&k), exact(&k)];
    let values = [coded_values.clone(), exact(&v), coded_values, exact(&v)];
    for isa in Isa::available() {
        let (outputs, _) = attend(isa, head_dim, Some(format), &tiles, &asked);
        for (asked, output) in asked.iter().zip(&outputs) {
            for (got, want) in output.iter().zip(expected(&keys, &values, asked, None)) {
                assert!((f64::from(*got) - want).abs() < 1e-2, "{}: {got}, not {want}", isa.name());
            }
        }
        for (n, alone) in asked.iter().enumerate() {
            let (output, _) = attend(isa, head_dim, Some(format), &tiles, std::slice::from_ref(alone));
            assert_eq!(bits(&output), bits(&outputs[n..=n]), "{}, query {n} alone", isa.name());
        }
    }
}

#[test]
fn what_is_no_number_in_a_query_reaches_the_output() {
    let head_dim = 64;
    let rows = Random(14).normals(PAGE_TOKENS * head_dim);
    let keys = Owned::encode(Isa::Scalar, CodeFormat::Tqc5, Side::Keys, head_dim, &rows);
    let values = Owned::encode(Isa::Scalar, CodeFormat::Tqc4, Side::Values, head_dim, &rows);
    let tiles = [(Rows::Coded(keys.page()), Rows::Coded(values.page()))];
    for isa in Isa::available() {
        for poison in [f32::NAN, f32::INFINITY] {
            let mut row = rows[..head_dim].to_vec();
            row[5] = poison;
            let asked = [Asked { row, visible: std::iter::once(0..PAGE_TOKENS).collect() }];
            let (outputs, _) = attend(isa, head_dim, Some(CodeFormat::Tqc5), &tiles, &asked);
            assert!(outputs[0].iter().all(|x| x.is_nan()), "{}", isa.name());
        }
    }
}
