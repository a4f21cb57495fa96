//! Attention of one KV head over a long context: keys per second and bytes of K and V per second, for exact rows in f16
//! and for every quantized format, with 1, 8 and 32 queries, on every instruction set.
//!
//! `cargo bench --bench attend -- avx2` for one of them. The pages are distinct and together larger
//! than an L2 cache.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use foretoken_kernels::attention::turboquant::{
    CodeFormat, PAGE_TOKENS, Page, PageLayout, PageMut, QuantizedQuery, RotationGroups, Side, encode_page,
};
use foretoken_kernels::attention::{KvBlock, KvRows, OnlineSoftmax, Query, Scratch, attend_block};
use foretoken_kernels::{Elements, Isa};
use half::f16;

const HEAD_DIM: usize = 512;
const PAGES: usize = 32;
const GROUPS: RotationGroups = RotationGroups::of(HEAD_DIM).expect("a multiple of 16");

/// Keys and values of a page.
enum Memory {
    Exact(Vec<f16>),
    Coded { layout: PageLayout, codes: Vec<u8>, scales: Vec<f16>, mean: Vec<f16> },
}

impl Memory {
    fn coded(format: CodeFormat, side: Side, rows: &[f32]) -> Self {
        let layout = PageLayout::new(format, side, GROUPS);
        let (mut codes, mut scales) = (vec![0; layout.code_bytes() + 63], vec![f16::ZERO; layout.scales()]);
        let (mut mean, at) = (vec![f16::ZERO; layout.mean()], codes.as_ptr().align_offset(64));
        let memory = PageMut { codes: &mut codes[at..][..layout.code_bytes()], scales: &mut scales, mean: &mut mean };
        encode_page(Isa::best(), layout, rows, memory).expect("finite rows");
        Self::Coded { layout, codes, scales, mean }
    }

    fn rows(&self) -> KvRows<'_> {
        match self {
            Self::Exact(rows) => Elements::F16(rows).into(),
            Self::Coded { layout, codes, scales, mean } => {
                let at = codes.as_ptr().align_offset(64);
                KvRows::Quantized(Page::new(*layout, &codes[at..][..layout.code_bytes()], scales, mean))
            }
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Exact(rows) => 2 * rows.len(),
            Self::Coded { layout, .. } => layout.bytes(),
        }
    }
}

/// Pseudo-random values around zero.
fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..len).map(|_| 0.1 * (next() + next() + next())).collect()
}

fn attend(criterion: &mut Criterion) {
    Isa::available().filter(|isa| *isa != Isa::Scalar).for_each(|isa| attend_with(criterion, isa));
}

fn attend_with(criterion: &mut Criterion, isa: Isa) {
    let rows = noise(PAGE_TOKENS * HEAD_DIM, 1);
    let mut formats: Vec<(String, Option<(CodeFormat, CodeFormat)>)> =
        vec![("f16".into(), None), ("tqc5+tqc4".into(), Some((CodeFormat::Tqc5, CodeFormat::Tqc4)))];
    formats.extend(CodeFormat::ALL.map(|format| (format.name().into(), Some((format, format)))));
    for queries in [1, 8, 32] {
        let q = noise(queries * HEAD_DIM, 2);
        for (name, format) in &formats {
            let keys_and_values = || match format {
                None => {
                    let halves: Vec<_> = rows.iter().map(|x| f16::from_f32(*x)).collect();
                    (Memory::Exact(halves.clone()), Memory::Exact(halves))
                }
                Some((key, value)) => {
                    (Memory::coded(*key, Side::Keys, &rows), Memory::coded(*value, Side::Values, &rows))
                }
            };
            let pages: Vec<_> = (0..PAGES).map(|_| keys_and_values()).collect();
            let bytes = pages.iter().map(|(keys, values)| keys.bytes() + values.bytes()).sum::<usize>();
            let mut words: Vec<_> = (0..queries)
                .map(|_| vec![0; format.map_or(0, |(key, _)| QuantizedQuery::word_count(key, GROUPS))])
                .collect();
            let (mut scores, mut weights) =
                (vec![0.0; Scratch::len(PAGE_TOKENS)], vec![0.0; Scratch::len(PAGE_TOKENS)]);
            let mut run = || {
                let mut running = vec![OnlineSoftmax::EMPTY; queries];
                let mut output = vec![0.0; queries * HEAD_DIM];
                let rows = q.chunks(HEAD_DIM).zip(&mut words).zip(&mut running).zip(output.chunks_mut(HEAD_DIM));
                let mut query_cases: Vec<_> = rows
                    .map(|(((query, words), running), output)| Query {
                        query,
                        quantized: format.map(|(key, _)| QuantizedQuery::quantize(key, GROUPS, query, words)),
                        visible: 0..PAGE_TOKENS,
                        softmax: running,
                        output,
                    })
                    .collect();
                for (keys, values) in &pages {
                    let tile = KvBlock { keys: keys.rows(), values: values.rows(), head_dim: HEAD_DIM };
                    let mut scratch = Scratch { scores: &mut scores, weights: &mut weights };
                    attend_block(isa, tile, &mut query_cases, &mut scratch);
                }
                output
            };
            for (unit, throughput) in [
                ("keys", Throughput::Elements((PAGES * PAGE_TOKENS) as u64)),
                ("bytes", Throughput::Bytes(bytes as u64)),
            ] {
                let mut group = criterion.benchmark_group(format!("attend {} {queries} queries, {unit}", isa.name()));
                group.throughput(throughput);
                group.bench_function(BenchmarkId::from_parameter(name), |bencher| bencher.iter(&mut run));
                group.finish();
            }
        }
    }
}

criterion_group!(benches, attend);
criterion_main!(benches);
