//! Rows, pages, quantization and attention.

use std::ops::Range;
use std::sync::OnceLock;

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::attention::{
    ExactKv, QuantizedKv, Queries, SplitPartials, Zones, combine, exact, has_exact, has_quantized, quantized,
};
use foretoken_gpu::plan::attention_mixed::{KvPages, MixedKv, mixed};
use foretoken_gpu::plan::pages::Pages;
use foretoken_gpu::plan::rows::{
    Domain, HeadNorm, Heads, KvDestination, Order, Pairing, QuantizedQueries, Results, Rotary, Steps, rows,
};
use foretoken_gpu::plan::segments::{Place, Segment, Segments};
use foretoken_gpu::plan::turboquant::encode;
use foretoken_kernels::attention::turboquant::{
    CodeFormat, Page, PageLayout, PageMut, QuantizedQuery, RotationGroups, Side, encode_page, rotate, rotate_back,
};
use foretoken_kernels::attention::{KvBlock, OnlineSoftmax, Query, Scratch, attend_block, finish};
use foretoken_kernels::norm::{AfterNorm, rms_norm};
use foretoken_kernels::{ElementType, Elements, Isa, attention, rope};
use half::{bf16, f16};

use super::cases::{Case, Numbers, close, same, same_bits};
use super::device::Device;
use super::steps::narrow;

const PAGE: usize = 128;
const ISA: Isa = Isa::Scalar;
const ELEMENTS: [ElementType; 3] = [ElementType::F32, ElementType::F16, ElementType::Bf16];
const FORMATS: [CodeFormat; 10] = [
    CodeFormat::Tqc2,
    CodeFormat::Tqc3,
    CodeFormat::Tqc4,
    CodeFormat::Tqc5,
    CodeFormat::Tqc6,
    CodeFormat::Turbo2,
    CodeFormat::Turbo3,
    CodeFormat::Turbo4,
    CodeFormat::Q4_0,
    CodeFormat::Q8_0,
];

/// Values after rounding to the page's element type.
fn rounded(element: ElementType, rows: &mut [f32]) {
    match element {
        ElementType::F32 => {}
        ElementType::F16 => rows.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32()),
        ElementType::Bf16 => rows.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32()),
    }
}

/// The channels in the order of an `attention_k_eq_v` store.
fn shared_order(width: usize, pairs: usize) -> Vec<usize> {
    let (mut first, rest): (Vec<_>, Vec<_>) = (0..width).partition(|channel| channel % (width / 2) < pairs);
    first.extend(rest);
    first
}

fn groups(width: usize) -> RotationGroups {
    RotationGroups::of(width).expect("a width")
}

/// A page's codes, scales and mean as one slice of bytes; on every instruction set the same.
fn encoded(layout: PageLayout, rows: &[f32]) -> Vec<u8> {
    let (mut codes, mut scales) = (vec![0; layout.code_bytes()], vec![f16::ZERO; layout.scales()]);
    let mut mean = vec![f16::ZERO; layout.mean()];
    let page = PageMut { codes: &mut codes, scales: &mut scales, mean: &mut mean };
    encode_page(Isa::best(), layout, rows, page).expect("finite rows");
    codes.extend(scales.iter().chain(&mean).flat_map(|x| x.to_le_bytes()));
    codes
}

/// A page's codes, scales and mean.
type Parts = (Vec<u8>, Vec<f16>, Vec<f16>);

fn parts(layout: PageLayout, bytes: &[u8]) -> Parts {
    let halves: Vec<f16> =
        bytes[layout.code_bytes()..].chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect();
    let (scales, mean) = halves.split_at(layout.scales());
    (bytes[..layout.code_bytes()].to_vec(), scales.to_vec(), mean.to_vec())
}

fn encode_case(format: CodeFormat, side: Side, width: usize, element: ElementType) -> Case {
    let name = format!("encode {} {side:?} {width} from {element:?}", format.name());
    Case::new(name, &["encode.cpp", "pages.h"], move |device| {
        let (layout, kv_heads) = (PageLayout::new(format, side, groups(width)), 2);
        let mut numbers = Numbers::new(width as u64);
        // Pages 1 to 3 of the sequence, in a ring of two slots after one pinned slot.
        let mut wanted = Vec::new();
        let (mut sources, mut targets) = (vec![0; 3], vec![0; 3]);
        for page in 2..4usize {
            let mut heads = Vec::new();
            let mut bytes = Vec::new();
            for _ in 0..kv_heads {
                let mut rows = numbers.normals(PAGE * width);
                rows.iter_mut().enumerate().for_each(|(i, x)| *x += 3.0 * ((i % width) as f32 * 0.7).sin());
                rows[5 * width..6 * width].fill(0.0);
                rows[7 * width..8 * width].iter_mut().for_each(|x| *x *= 1e-3);
                rows[9 * width + 3] = 400.0;
                rounded(element, &mut rows);
                bytes.extend(narrow(element, &rows));
                heads.extend(encoded(layout, &rows));
            }
            let slot = 1 + (page - 1) % 2;
            sources[slot] = device.of(&bytes).address();
            let target: DeviceSlice<u8> = device.poisoned(heads.len());
            targets[slot] = target.address();
            wanted.push((target, heads));
        }
        sources.extend(targets);
        let tables = device.of(&sources);
        let (sources, targets) = (Pages::ring(0, 1, 2), Pages::ring(3, 1, 2));
        device.run(encode(layout, tables, (&sources, element), &targets, 2..4, kv_heads))?;
        wanted.into_iter().try_for_each(|(target, heads)| same("the page", &device.read(target), &heads))
    })
}

/// The steps and results of a case.
#[derive(Clone, Copy)]
struct RowCase {
    width: usize,
    /// Elements from one head to the next.
    stride: usize,
    norm: bool,
    pairs: usize,
    pairing: Pairing,
    shared: bool,
    domain: Domain,
    channels: usize,
    element: ElementType,
    /// Of the keys for which rotated rows are quantized.
    keys: CodeFormat,
    /// The first head of a row that has an invalid value, and the value; all heads after it have it as well.
    fault: Option<(usize, f32)>,
}

/// The value of `fault` without a fault.
const NO_FAULT: u32 = u32::MAX;

fn rows_case(case: RowCase) -> Case {
    let RowCase { width, stride, norm, pairs, pairing, shared, domain, channels, element, keys, fault } = case;
    let name = format!(
        "rows {width} of {stride} norm {norm} {pairing:?} pairs {pairs} shared {shared} {domain:?} channels {channels} {element:?} for {} fault {fault:?}",
        keys.name()
    );
    Case::new(name, &["rows.cpp", "rotate.h", "pages.h"], move |device| {
        let (count, heads, eps) = (3, 5, 1e-6);
        let mut numbers = Numbers::new((width + pairs) as u64);
        let mut x = numbers.normals(count * heads * stride);
        if let Some((head, value)) = fault {
            x.chunks_exact_mut(stride).skip(head).for_each(|row| row[width / 2 + 1] = value);
        }
        let (weight, after) = (numbers.normals(width), numbers.normals(width));
        let angles = numbers.normals(count * pairs);
        let (cos, sin): (Vec<_>, Vec<_>) = angles.iter().map(|a| (a.cos(), a.sin())).unzip();

        // The expected result, on the CPU.
        let mut want: Vec<f32> = x.chunks_exact(stride).flat_map(|head| &head[..width]).copied().collect();
        if norm {
            let x = want.clone();
            rms_norm(ISA, &x, width, Some(&weight), eps, AfterNorm::Write, &mut want);
        }
        for (row, want) in want.chunks_exact_mut(heads * width).enumerate() {
            let at = row * pairs..(row + 1) * pairs;
            let (cos, sin) = (&cos[at.clone()], &sin[at]);
            match pairing {
                Pairing::Head => rope::rotate(ISA, want, width, cos, sin),
                Pairing::Leading => (want.chunks_exact_mut(width))
                    .for_each(|head| rope::rotate(ISA, &mut head[..2 * pairs], 2 * pairs, cos, sin)),
            }
        }
        if shared {
            let order = shared_order(width, pairs);
            for row in want.chunks_exact_mut(width) {
                let model = row.to_vec();
                row.iter_mut().zip(&order).for_each(|(x, channel)| *x = model[*channel]);
            }
        }
        want.chunks_exact_mut(width).for_each(|row| row.iter_mut().zip(&after).for_each(|(x, w)| *x *= w));
        if domain == Domain::Rotated {
            rotate(ISA, &mut want, groups(width));
        }

        // The result on the device.
        let quantized = domain == Domain::Rotated;
        let of_row = prepared(keys, &vec![0.0; width]).1.len();
        let (words, scales) = (device.poisoned(count * heads * width / 4), device.poisoned(count * heads * of_row));
        // The last row is of another sequence. Each has two pages, from its tables' second entry on.
        let places: [Place; 3] = [[127, 128, 0, 0], [128, 129, 0, 0], [130, 131, 1, 0]];
        let page_len = heads * PAGE * channels * element.size();
        let pages: Vec<DeviceSlice<u8>> = (0..4).map(|_| device.poisoned(page_len)).collect();
        let mut segments = [(0, 2), (2, 1)].map(|(first, rows)| Segment { first, rows, ..Segment::default() });
        for (segment, pages) in segments.iter_mut().zip(pages.chunks_exact(2)) {
            segment.tables = device.of(&[0, pages[0].address(), pages[1].address()]).address();
        }
        let steps = Steps {
            norm: norm.then(|| HeadNorm { weight: Some(device.of(&weight)), eps }),
            rotary: (pairs > 0).then(|| Rotary { cos: device.of(&cos), sin: device.of(&sin), pairs, pairing }),
            order: if shared { Order::RotaryFirst(pairs) } else { Order::Model },
            weight: Some(device.of(&after)),
            domain,
        };
        let y: DeviceSlice<f32> = device.poisoned(count * heads * channels);
        let first = device.of(&[NO_FAULT]);
        let results = Results {
            channels,
            rows: Some(y),
            quantized: quantized.then_some(QuantizedQueries { format: keys, words, scales }),
            store: Some(KvDestination {
                pages: Pages::all(1),
                element,
                places: device.of(&places),
                segments: Segments { slice: device.of(&segments), count: 2, longest: 2 },
                fault: first,
            }),
        };
        let x = device.of(&x);
        device.run(rows(&Heads { x, rows: count, heads, head_dim: width, stride }, &steps, &results))?;

        let found = fault.map_or(NO_FAULT, |(head, _)| places[head / heads][0] as u32);
        same("the first fault", &device.read(first), &[found])?;
        if fault.is_some() {
            return Ok(());
        }
        let got = device.read(y);
        let want_stored: Vec<f32> = want.chunks_exact(width).flat_map(|row| &row[..channels]).copied().collect();
        if norm {
            close("rows", &got, &want_stored, 1e-6)?;
        } else {
            same_bits("rows", &got, &want_stored)?;
        }
        // Stored channels are equal; all other bytes are untouched.
        for (p, page) in pages.iter().enumerate() {
            let mut bytes = vec![0xcd; page_len];
            for (i, head) in got.chunks_exact(channels).enumerate() {
                let [position, _, segment, _] = places[i / heads].map(|x| x as usize);
                if 2 * segment + position / PAGE == p {
                    let start = (i % heads * PAGE + position % PAGE) * channels * element.size();
                    bytes[start..start + channels * element.size()].copy_from_slice(&narrow(element, head));
                }
            }
            same("a page", &device.read(*page), &bytes)?;
        }
        if quantized && channels == width {
            let (words, scales) = (device.read(words), device.read(scales));
            for (i, row) in got.chunks_exact(width).enumerate() {
                let (want_words, want_scales) = prepared(keys, row);
                same("words", &words[i * width / 4..(i + 1) * width / 4], &want_words)?;
                same_bits("scales", &scales[i * of_row..(i + 1) * of_row], &want_scales)?;
            }
        }
        Ok(())
    })
}

/// A quantized query's words and scales.
fn prepared(format: CodeFormat, row: &[f32]) -> (Vec<u32>, Vec<f32>) {
    let mut words = vec![0; QuantizedQuery::word_count(format, groups(row.len()))];
    QuantizedQuery::quantize(format, groups(row.len()), row, &mut words);
    let (quads, tail) = words.split_at(row.len() / 4);
    let scales = tail.chunks_exact(2).map(|pair| f32::from_bits(pair[0] as u32)).collect();
    (quads.iter().map(|word| *word as u32).collect(), scales)
}

/// A layer, and the queries of some sequences that attend it.
#[derive(Clone)]
struct Layer {
    width: usize,
    kv_heads: usize,
    group: usize,
    /// Of the exact pages of K and of V.
    elements: [ElementType; 2],
    window: Option<usize>,
    /// Of the quantized pages of K and of V.
    codes: [Option<CodeFormat>; 2],
    shared_pairs: usize,
    zones: Zones,
    /// Of every sequence, position and end of its rows.
    sequences: Vec<Vec<[i32; 2]>>,
    split_pages: usize,
    /// Splits more than needed.
    surplus: usize,
    /// Whether NaN in the first query is tested as well.
    with_nan: bool,
}

impl Layer {
    fn exact(width: usize, element: ElementType, at: Vec<[i32; 2]>) -> Self {
        let zones = Zones { head: 64, tail: 150 };
        Self {
            width,
            kv_heads: 2,
            group: 3,
            elements: [element; 2],
            window: None,
            codes: [None; 2],
            shared_pairs: 0,
            zones,
            sequences: vec![at],
            split_pages: 1,
            surplus: 1,
            with_nan: false,
        }
    }

    fn quantized(width: usize, key: CodeFormat, value: CodeFormat, at: Vec<[i32; 2]>) -> Self {
        Self { codes: [Some(key), Some(value)], ..Self::exact(width, ElementType::F16, at) }
    }

    fn shared(format: CodeFormat, at: Vec<[i32; 2]>) -> Self {
        Self { shared_pairs: 64, ..Self::quantized(512, format, format, at) }
    }

    /// With another sequence.
    fn with(mut self, at: Vec<[i32; 2]>) -> Self {
        self.sequences.push(at);
        self
    }

    /// The rows of a sequence.
    fn rows_of(&self, sequence: usize) -> Range<usize> {
        let first = self.sequences[..sequence].iter().map(Vec::len).sum();
        first..first + self.sequences[sequence].len()
    }

    /// Rows of all sequences.
    fn count(&self) -> usize {
        self.sequences.iter().map(Vec::len).sum()
    }

    fn rotary_channels(&self) -> usize {
        if self.shared_pairs > 0 { 2 * self.shared_pairs } else { self.width }
    }

    /// Channels of K and of V.
    fn channels(&self) -> [usize; 2] {
        [self.rotary_channels(), self.width]
    }

    fn layouts(&self) -> [Option<PageLayout>; 2] {
        let [key, value] = self.codes;
        let side = if self.shared_pairs > 0 { Side::KEqV } else { Side::Values };
        [
            key.map(|key| PageLayout::new(key, Side::Keys, groups(self.rotary_channels()))),
            value.map(|value| PageLayout::new(value, side, groups(self.width))),
        ]
    }

    fn is_quantized(&self) -> bool {
        self.codes.iter().any(Option::is_some)
    }

    /// The keys that a row of this position and end reads exactly or quantized, as the CPU's store decides.
    fn visible(&self, at: [i32; 2], page: usize, quantized: bool) -> Range<usize> {
        let [position, end] = at.map(|x| x as usize);
        let start = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        let clamp = |x: usize| x.clamp(page * PAGE, (page + 1) * PAGE) - page * PAGE;
        let (start, end) = (clamp(start), clamp(end).max(clamp(start)));
        let codes_from = match page {
            _ if !self.is_quantized() || page >= position.saturating_sub(self.zones.tail) / PAGE => PAGE,
            0 => self.zones.head,
            _ => 0,
        };
        match quantized {
            false => start.min(codes_from)..end.min(codes_from),
            true => start.max(codes_from)..end.max(codes_from),
        }
    }

    /// Positions of a sequence.
    fn len(&self, sequence: usize) -> usize {
        self.sequences[sequence].iter().map(|at| at[1] as usize).max().unwrap_or(0)
    }

    /// Entries of each store in the tables of a sequence: pages of the longest one.
    fn entries(&self) -> usize {
        (0..self.sequences.len()).map(|sequence| self.len(sequence)).max().unwrap_or(0).div_ceil(PAGE)
    }

    fn reads(&self, sequence: usize, page: usize, quantized: bool) -> bool {
        self.sequences[sequence].iter().any(|at| !self.visible(*at, page, quantized).is_empty())
    }
}

/// A sequence's keys and values in the layer's domain, `(pages, kv_heads, 128, channels)`.
struct Stored {
    keys: Vec<Vec<f32>>, // one per page and head
    values: Vec<Vec<f32>>,
}

fn stored(layer: &Layer, sequence: usize, numbers: &mut Numbers) -> Stored {
    let mut make = |side: usize, bias: f32| -> Vec<Vec<f32>> {
        let width = layer.channels()[side];
        let mut pages = Vec::new();
        for _ in 0..layer.len(sequence).div_ceil(PAGE) * layer.kv_heads {
            let mut rows = numbers.normals(PAGE * width);
            rows.iter_mut().enumerate().for_each(|(i, x)| *x += bias * ((i % width) as f32).cos());
            if layer.codes[side].is_some() {
                rotate(ISA, &mut rows, groups(width));
            }
            rounded(layer.elements[side], &mut rows);
            pages.push(rows);
        }
        pages
    };
    Stored { keys: make(0, 2.0), values: make(1, 0.5) }
}

/// The CPU's attention of a sequence, in the domain and order of the store.
fn expected(layer: &Layer, sequence: usize, stored: &Stored, queries: &[f32]) -> Vec<f32> {
    let (width, rotary_channels, heads) = (layer.width, layer.rotary_channels(), layer.kv_heads * layer.group);
    let [key, value] = layer.layouts();
    let pages = layer.len(sequence).div_ceil(PAGE);
    let quantized: Vec<[Option<Parts>; 2]> = (0..pages * layer.kv_heads)
        .map(|i| {
            let of = |layout: Option<PageLayout>, rows: &[f32]| {
                let layout = layout.filter(|_| layer.reads(sequence, i / layer.kv_heads, true))?;
                Some(parts(layout, &encoded(layout, rows)))
            };
            [of(key, &stored.keys[i]), of(value, &stored.values[i])]
        })
        .collect();
    let mut y = vec![0.0; queries.len()];
    let (mut scores, mut weights) = (vec![0.0; Scratch::len(PAGE)], vec![0.0; Scratch::len(PAGE)]);
    for (index, (query, output)) in queries.chunks_exact(width).zip(y.chunks_exact_mut(width)).enumerate() {
        let (row, kv_head) = (index / heads, index % heads / layer.group);
        let (mut running, mut words, mut more) = (OnlineSoftmax::EMPTY, Vec::new(), Vec::new());
        let of = |format, query: &[f32], words: &mut Vec<i32>| {
            words.resize(QuantizedQuery::word_count(format, groups(query.len())), 0);
            QuantizedQuery::quantize(format, groups(query.len()), query, words);
        };
        key.inspect(|key| of(key.format(), &query[..rotary_channels], &mut words));
        value.inspect(|value| of(value.format(), query, &mut more));
        for page in 0..pages {
            for is_quantized in [false, true] {
                let visible = layer.visible(layer.sequences[sequence][row], page, is_quantized);
                if visible.is_empty() {
                    continue;
                }
                let i = page * layer.kv_heads + kv_head;
                let page_of = |layout: Option<PageLayout>, side: usize| {
                    let (codes, scales, mean) = quantized[i][side].as_ref().filter(|_| is_quantized)?;
                    Some(Page::new(layout?, codes, scales, mean))
                };
                let (k, v) = (page_of(key, 0), page_of(value, 1));
                let prepared = k.zip(key).map(|(_, key)| {
                    let words = QuantizedQuery::from_words(key.format(), groups(rotary_channels), &words);
                    match value.filter(|_| rotary_channels < width) {
                        Some(value) => {
                            words.with_values(QuantizedQuery::from_words(value.format(), groups(width), &more))
                        }
                        None => words,
                    }
                });
                let mut joined = Vec::new();
                let keys = match (k, v) {
                    (Some(rotary), Some(values)) if rotary_channels < width => {
                        attention::KvRows::KEqV { rotary, values }
                    }
                    (Some(k), _) => attention::KvRows::Quantized(k),
                    (None, _) if rotary_channels == width => Elements::F32(&stored.keys[i]).into(),
                    (None, _) => {
                        joined.clone_from(&stored.values[i]);
                        for (to, from) in
                            joined.chunks_exact_mut(width).zip(stored.keys[i].chunks_exact(rotary_channels))
                        {
                            to[..rotary_channels].copy_from_slice(from);
                        }
                        Elements::F32(&joined).into()
                    }
                };
                let values = v.map_or(Elements::F32(&stored.values[i]).into(), attention::KvRows::Quantized);
                let tile = KvBlock { keys, values, head_dim: width };
                let mut query =
                    [Query { query, quantized: prepared, visible, softmax: &mut running, output: &mut *output }];
                attend_block(ISA, tile, &mut query, &mut Scratch { scores: &mut scores, weights: &mut weights });
            }
        }
        finish(ISA, running, output);
    }
    y
}

fn attend_case(what: &str, layer: Layer) -> Case {
    let (name, sources) = named(what, &layer);
    Case::new(name, sources, move |device| run_attention(&layer, &Inputs::new(&layer), device))
}

/// Keeps its inputs, for many runs.
fn small_case(layer: Layer) -> Case {
    let (name, sources) = named("small", &layer);
    let inputs = OnceLock::new();
    Case::new(name, sources, move |device| run_attention(&layer, inputs.get_or_init(|| Inputs::new(&layer)), device))
}

/// The name of a case, and its sources.
fn named(what: &str, layer: &Layer) -> (String, &'static [&'static str]) {
    let codes = layer.codes.map(|codes| codes.map_or("exact", CodeFormat::name)).join("/");
    let name = format!(
        "attend {what} {codes} {} {:?}, rows {:?}, window {:?}",
        layer.width,
        layer.elements,
        layer.sequences.iter().map(Vec::len).collect::<Vec<_>>(),
        layer.window
    );
    let sources: &[_] = match layer.is_quantized() {
        false => &[
            "attend.h",
            "exact_scores.h",
            "attend_exact.h",
            "attend_exact.cpp",
            "attend_f16.cpp",
            "attend_halves.h",
            "attend_mixed.cpp",
            "combine.cpp",
            "pages.h",
            "rotate.h",
        ],
        true => &[
            "attend.h",
            "exact_scores.h",
            "attend_exact.h",
            "attend_exact.cpp",
            "attend_f16.cpp",
            "attend_halves.h",
            "attend_mixed.cpp",
            "attend_quantized.cpp",
            "planes.h",
            "device.metal",
            "combine.cpp",
            "pages.h",
            "rotate.h",
        ],
    };
    (name, sources)
}

/// What the runs of a case have in common.
struct Inputs {
    stored: Vec<Stored>, // of every sequence
    rows: Vec<f32>,
    expected: OnceLock<Vec<Vec<f32>>>, // of every sequence, the rows of the result
}

impl Inputs {
    fn new(layer: &Layer) -> Self {
        let (width, count) = (layer.width, layer.count());
        let mut numbers = Numbers::new((width + count) as u64);
        let stored = (0..layer.sequences.len()).map(|sequence| stored(layer, sequence, &mut numbers)).collect();
        let mut rows = numbers.normals(count * layer.kv_heads * layer.group * width);
        rows.iter_mut().for_each(|x| *x *= 2.0 / (width as f32).sqrt());
        Self { stored, rows, expected: OnceLock::new() }
    }

    /// In the domain and order of the model.
    fn expected(&self, layer: &Layer) -> &[Vec<f32>] {
        let width = layer.width;
        let of_sequence = |sequence: usize| {
            let of = layer.rows_of(sequence);
            let heads = layer.kv_heads * layer.group;
            let queries = &self.rows[of.start * heads * width..of.end * heads * width];
            let mut want = expected(layer, sequence, &self.stored[sequence], queries);
            if layer.codes[1].is_some() {
                rotate_back(ISA, &mut want, groups(width));
            }
            if layer.shared_pairs > 0 {
                let order = shared_order(width, layer.shared_pairs);
                for row in want.chunks_exact_mut(width) {
                    let shared = row.to_vec();
                    order.iter().zip(&shared).for_each(|(channel, x)| row[*channel] = *x);
                }
            }
            want
        };
        self.expected.get_or_init(|| (0..layer.sequences.len()).map(of_sequence).collect())
    }
}

/// The tables of a sequence: exact keys, exact values, quantized keys, quantized values. Pages that are not read have
/// null addresses, and rows that are not written are NaN.
fn tables(layer: &Layer, sequence: usize, stored: &Stored, device: &mut dyn Device) -> u64 {
    let (entries, len) = (layer.entries(), layer.len(sequence));
    let mut tables = vec![0; 4 * entries];
    for (side, pages) in [&stored.keys, &stored.values].into_iter().enumerate() {
        let (channels, layout) = (layer.channels()[side], layer.layouts()[side]);
        for (page, heads) in pages.chunks_exact(layer.kv_heads).enumerate() {
            let reads = |quantized| layer.reads(sequence, page, quantized);
            if reads(false) || layout.is_none() && reads(true) {
                let mut rows = heads.to_vec();
                for row in len.saturating_sub(page * PAGE)..PAGE {
                    rows.iter_mut().for_each(|head| head[row * channels..(row + 1) * channels].fill(f32::NAN));
                }
                let bytes = narrow(layer.elements[side], &rows.concat());
                tables[side * entries + page] = device.of(&bytes).address();
            }
            if let Some(layout) = layout.filter(|_| reads(true)) {
                let bytes: Vec<u8> = heads.iter().flat_map(|rows| encoded(layout, rows)).collect();
                tables[(2 + side) * entries + page] = device.of(&bytes).address();
            }
        }
    }
    let read = tables.iter().rposition(|address| *address != 0).map_or(0, |last| last + 1);
    device.of(&tables[..read]).address()
}

/// Attends exact pages, then quantized ones, with the kernels that the formats have.
fn launch(
    device: &mut dyn Device,
    layer: &Layer,
    queries: &Queries,
    rows: &[f32],
    partials: &SplitPartials,
) -> Result<(), String> {
    let (entries, [key, value], [key_element, value_element]) = (layer.entries(), layer.layouts(), layer.elements);
    let (keys, values) = (Pages::all(0), Pages::all(entries));
    let words =
        key.into_iter().flat_map(|key| rows.chunks_exact(layer.width).map(move |row| prepared(key.format(), row)));
    let (words, scales): (Vec<_>, Vec<_>) = words.unzip();
    let (query_words, query_scales) = (device.of(&words.concat()), device.of(&scales.concat()));
    let mix = |device: &mut dyn Device, keys, values| {
        device.run(mixed(queries, &MixedKv { keys, values, query_words, query_scales }, partials))
    };
    let exact_pages = (KvPages::Exact(keys, key_element), KvPages::Exact(values, value_element));
    if has_exact(layer.width, key_element, value_element) {
        let kv = ExactKv { keys, values, element: key_element, rotary_channels: layer.rotary_channels() };
        device.run(exact(queries, &kv, partials))?;
    } else {
        mix(device, exact_pages.0, exact_pages.1)?;
    }
    let (keys, values) = (Pages::all(2 * entries), Pages::all(3 * entries));
    match (key, value) {
        (None, None) => Ok(()),
        (Some(key_layout), Some(value_layout)) if has_quantized(key_layout, value_layout) => {
            let kv = QuantizedKv { keys, values, key_layout, value_layout, query_words, query_scales };
            device.run(quantized(queries, &kv, partials))
        }
        (key, value) => mix(
            device,
            key.map_or(exact_pages.0, |layout| KvPages::Quantized(keys, layout)),
            value.map_or(exact_pages.1, |layout| KvPages::Quantized(values, layout)),
        ),
    }
}

fn run_attention(layer: &Layer, inputs: &Inputs, device: &mut dyn Device) -> Result<(), String> {
    let (width, heads) = (layer.width, layer.kv_heads * layer.group);
    let count = layer.count();
    let (all, Inputs { stored, rows, .. }) = (0..layer.sequences.len(), inputs);
    let tables: Vec<_> = all.clone().map(|sequence| tables(layer, sequence, &stored[sequence], device)).collect();

    // The rows `of` in a pass of some of the sequences.
    let attend_rows = |device: &mut dyn Device, sequences: Range<usize>, of: Range<usize>, rows: &[f32]| {
        let start = layer.rows_of(sequences.start).start;
        let (mut segments, mut places, mut ends) = (Vec::new(), Vec::<Place>::new(), Vec::new());
        for sequence in sequences {
            let (own, at) = (layer.rows_of(sequence), &layer.sequences[sequence]);
            places.extend(at.iter().map(|[position, end]| [*position, *end, segments.len() as i32, 0]));
            segments.push(Segment {
                tables: tables[sequence],
                first: (own.start - start) as i32,
                rows: at.len() as i32,
                ..Segment::default()
            });
            let (first, end) = (own.start.max(of.start), own.end.min(of.end));
            if first < end {
                ends.push((at[first - own.start][0] as usize, at[end - 1 - own.start][1] as usize));
            }
        }
        let longest = segments.iter().map(|segment| segment.rows as usize).max().unwrap_or(0);
        let rows = &rows[of.start * heads * width..of.end * heads * width];
        let queries = Queries {
            rows: device.of(rows),
            places: device.of(&places[..of.end - start]),
            segments: Segments { slice: device.of(&segments), count: segments.len(), longest },
            first: of.start - start,
            count: of.len(),
            heads,
            kv_heads: layer.kv_heads,
            head_dim: width,
            window: layer.window,
            zones: layer.is_quantized().then_some(layer.zones),
            split_pages: layer.split_pages,
        };
        let needed = ends.iter().map(|(first, end)| queries.splits(*first, *end)).max().unwrap_or(0);
        let splits = needed + layer.surplus;
        let slots = (1 + usize::from(layer.is_quantized())) * splits * of.len() * heads;
        let partials =
            SplitPartials { softmax: device.poisoned(slots), output: device.poisoned(slots * width), splits };
        launch(device, layer, &queries, rows, &partials)?;
        let y: DeviceSlice<f32> = device.poisoned(of.len() * heads * width);
        let domain = if layer.codes[1].is_some() { Domain::Rotated } else { Domain::Unrotated };
        let order = if layer.shared_pairs > 0 { Order::RotaryFirst(layer.shared_pairs) } else { Order::Model };
        device.run(combine(&queries, &partials, domain, order, y))?;
        Ok::<_, String>(device.read(y))
    };
    let attend = |device: &mut dyn Device, sequences, of| attend_rows(device, sequences, of, rows);
    let got = attend(device, all.clone(), 0..count)?;
    let part = |of: Range<usize>| &got[of.start * heads * width..of.end * heads * width];
    // The last row, computed alone, has the same bits.
    let last = count - 1..count;
    same_bits("a row alone", &attend(device, all.clone(), last.clone())?, part(last))?;
    if layer.with_nan {
        let mut rows = rows.clone();
        rows[width / 2] = f32::NAN;
        let y = attend_rows(device, all.clone(), 0..count, &rows)?;
        let is_nan: Vec<_> = y[..width].iter().map(|x| x.is_nan()).collect();
        same("whether it is NaN", &is_nan, &vec![true; width])?;
        same_bits("other queries", &y[width..], &got[width..])?;
    }
    if all.len() > 1 {
        for sequence in all.clone() {
            let of = layer.rows_of(sequence);
            let alone = attend(device, sequence..sequence + 1, of.clone())?;
            same_bits(&format!("sequence {sequence} alone"), &alone, part(of))?;
        }
        // From within the first sequence to within the last.
        let of = 1..count - 1;
        same_bits("some rows", &attend(device, all.clone(), of.clone())?, part(of))?;
    }

    for (sequence, want) in inputs.expected(layer).iter().enumerate() {
        close(&format!("y of sequence {sequence}"), part(layer.rows_of(sequence)), want, 1e-5)?;
    }
    Ok(())
}

/// More splits than a chunk of the merging kernel, some without visible keys, whose outputs are poison.
fn combine_case(splits: usize, width: usize) -> Case {
    Case::new(format!("combine {splits} splits of {width}"), &["combine.cpp", "rotate.h", "attend.h"], move |device| {
        let mut numbers = Numbers::new(splits as u64);
        let (heads, slots) = (2, 2 * splits * 2);
        let mut running: Vec<[f64; 2]> =
            (0..slots).map(|_| [f64::from(numbers.normal()) * 3.0, 1.0 + f64::from(numbers.uniform().abs())]).collect();
        let mut output = numbers.normals(slots * width);
        for slot in (0..slots).filter(|slot| slot % 5 == 3) {
            running[slot] = [f64::NEG_INFINITY, 0.0];
            output[slot * width..(slot + 1) * width].fill(f32::NAN);
        }
        let mut want = Vec::new();
        for head in 0..heads {
            let seen = |slot: &usize| slot % heads == head && running[*slot][1] > 0.0;
            let max = (0..slots).filter(seen).map(|slot| running[slot][0]).fold(f64::NEG_INFINITY, f64::max);
            let (mut sum, mut total) = (0.0, vec![0.0f64; width]);
            for slot in (0..slots).filter(seen) {
                let weight = (running[slot][0] - max).exp();
                sum += weight * running[slot][1];
                let output = &output[slot * width..(slot + 1) * width];
                total.iter_mut().zip(output).for_each(|(total, x)| *total += weight * f64::from(*x));
            }
            want.extend(total.iter().map(|x| (x / sum) as f32));
        }
        // The first split is the eighth of the sequence.
        let queries = Queries {
            rows: device.of(&vec![0.0; heads * width]),
            places: device.of(&[[1000, 1001, 0, 0]]),
            segments: Segments { slice: device.of(&[Segment { rows: 1, ..Segment::default() }]), count: 1, longest: 1 },
            first: 0,
            count: 1,
            heads,
            kv_heads: 1,
            head_dim: width,
            window: Some(100),
            zones: Some(Zones { head: 0, tail: 0 }),
            split_pages: 1,
        };
        let running: Vec<[f32; 2]> = running.iter().map(|of| of.map(|x| x as f32)).collect();
        // With further splits without visible keys, until one warp cannot have them all, bits stay the same.
        let mut merged = |running: &[[f32; 2]], more: usize| -> Result<Vec<f32>, String> {
            let (mut softmax, mut outputs) = (Vec::new(), Vec::new());
            for store in 0..2 {
                let of = store * splits * heads..(store + 1) * splits * heads;
                softmax.extend_from_slice(&running[of.clone()]);
                softmax.resize(softmax.len() + more * heads, [f32::NEG_INFINITY, 0.0]);
                outputs.extend_from_slice(&output[of.start * width..of.end * width]);
                outputs.resize(outputs.len() + more * heads * width, f32::NAN);
            }
            let (softmax, output) = (device.of(&softmax), device.of(&outputs));
            let y: DeviceSlice<f32> = device.poisoned(heads * width);
            let partials = SplitPartials { softmax, output, splits: splits + more };
            device.run(combine(&queries, &partials, Domain::Unrotated, Order::Model, y))?;
            Ok(device.read(y))
        };
        let got = merged(&running, 0)?;
        same_bits("y with more splits", &merged(&running, 33)?, &got)?;
        close("y", &got, &want, 1e-5)?;
        // NaN scores in one split of a head make its result NaN.
        let mut damaged = running.clone();
        damaged[heads * (splits / 2)][1] = f32::NAN;
        for more in [0, 33] {
            let y = merged(&damaged, more)?;
            let is_nan: Vec<_> = y.iter().map(|x| x.is_nan()).collect();
            same("whether it is NaN", &is_nan, &[vec![true; width], vec![false; width]].concat())?;
            same_bits("the other head", &y[width..], &got[width..])?;
        }
        Ok(())
    })
}

/// `count` rows that end at `end`, each of which sees itself.
fn causal(end: usize, count: usize) -> Vec<[i32; 2]> {
    (end - count..end).map(|position| [position as i32, position as i32 + 1]).collect()
}

fn row_cases() -> Vec<RowCase> {
    let base = RowCase {
        width: 256,
        stride: 256,
        norm: true,
        pairs: 128,
        pairing: Pairing::Head,
        shared: false,
        domain: Domain::Unrotated,
        channels: 256,
        element: ElementType::F16,
        keys: CodeFormat::Tqc5,
        fault: None,
    };
    let narrow = RowCase { width: 64, stride: 64, pairs: 32, channels: 64, domain: Domain::Rotated, ..base };
    let narrowest = RowCase { width: 32, stride: 32, pairs: 16, channels: 32, ..narrow };
    let interleaved = RowCase { stride: 512, pairs: 32, pairing: Pairing::Leading, ..base };
    let full = RowCase { width: 512, stride: 512, pairs: 64, channels: 512, domain: Domain::Rotated, ..base };
    vec![
        base,
        RowCase { norm: false, domain: Domain::Rotated, element: ElementType::Bf16, ..base },
        full,
        RowCase { norm: false, ..full },
        RowCase { shared: true, ..full },
        RowCase { shared: true, norm: false, channels: 128, element: ElementType::F32, ..full },
        RowCase { width: 128, stride: 128, norm: false, pairs: 16, channels: 128, domain: Domain::Rotated, ..base },
        RowCase { width: 128, stride: 128, pairs: 64, channels: 128, ..base },
        RowCase { width: 64, stride: 64, pairs: 32, channels: 64, ..base },
        RowCase { width: 64, stride: 64, norm: false, pairs: 0, channels: 64, element: ElementType::F32, ..base },
        RowCase { fault: Some((7, f32::NAN)), ..base },
        RowCase { fault: Some((14, f32::NEG_INFINITY)), norm: false, ..full },
        RowCase { fault: Some((4, -1e30)), width: 64, stride: 64, norm: false, pairs: 0, channels: 64, ..base },
        interleaved,
        RowCase { norm: false, stride: 384, domain: Domain::Rotated, ..interleaved },
        RowCase { width: 64, stride: 64, pairs: 8, channels: 64, ..interleaved },
        RowCase { width: 128, stride: 128, pairs: 64, channels: 128, ..interleaved },
        RowCase { norm: false, keys: CodeFormat::Q8_0, ..full },
        RowCase { norm: false, ..narrow },
        RowCase { norm: false, keys: CodeFormat::Q4_0, ..narrow },
        narrowest,
        RowCase { norm: false, ..narrowest },
        RowCase { norm: false, pairs: 8, domain: Domain::Unrotated, pairing: Pairing::Leading, ..narrowest },
    ]
}

/// Formats that only the general kernel reads.
fn mixed_cases() -> Vec<Case> {
    use CodeFormat::{Q4_0, Q8_0, Tqc3, Tqc5, Turbo4};
    use ElementType::{Bf16, F16, F32};
    let of = |width, elements, codes, at| Layer { elements, codes, ..Layer::exact(width, F16, at) };
    let mut cases = Vec::new();
    for width in [64, 256] {
        for (elements, codes) in [
            ([F32, F16], [None, Some(Tqc5)]),
            ([F16, Bf16], [Some(Tqc3), None]),
            ([Bf16, F32], [None; 2]),
            ([F16; 2], [Some(Tqc5), Some(Q4_0)]),
        ] {
            cases.push(attend_case("any formats", of(width, elements, codes, causal(430, 2))));
        }
    }
    for width in [32, 64, 128, 256, 512] {
        let several = of(width, [F16; 2], [Some(Q8_0), None], causal(300, 4)).with(causal(20, 1)).with(causal(420, 2));
        cases.push(attend_case("any formats", Layer { window: Some(250), ..several }));
        // A drafter: one position, keys before it only.
        let drafter = of(width, [F16; 2], [None, Some(Q8_0)], vec![[431, 430]]);
        cases.push(attend_case("any formats", Layer { split_pages: 2, group: 8, kv_heads: 1, ..drafter }));
    }
    for element in ELEMENTS {
        let window = Layer { window: Some(100), ..Layer::exact(32, element, causal(300, 4)) };
        cases.extend([Layer::exact(32, element, causal(157, 3)), window].map(|layer| attend_case("narrow", layer)));
    }
    for format in [Tqc3, Tqc5, Turbo4] {
        let layers = [32, 64].map(|width| Layer::quantized(width, format, format, causal(430, 2)));
        cases.extend(layers.map(|layer| attend_case("narrow", layer)));
    }
    cases
}

/// Enough rows and splits of f16 for the kernels with tiles of 32 or 24 columns, the last not full.
fn prompt_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for width in [256, 512] {
        let layer = Layer::exact(width, ElementType::F16, causal(270, 18));
        let layer = Layer { group: 8, kv_heads: 1, surplus: 20, with_nan: true, ..layer };
        cases.push(attend_case("prompt", layer.clone()));
        let several = Layer { window: Some(100), ..layer.clone() }.with(causal(20, 3));
        cases.push(attend_case("prompt", Layer { group: 15, split_pages: 2, ..several }));
    }
    let shared = Layer { shared_pairs: 64, group: 8, ..Layer::exact(512, ElementType::F16, causal(140, 16)) };
    cases.push(attend_case("prompt", Layer { surplus: 20, ..shared }));
    cases
}

pub fn all() -> Vec<Case> {
    let mut cases: Vec<_> = row_cases().into_iter().map(rows_case).collect();
    let merges = [(1100, 128), (513, 256), (32, 256), (29, 512), (3, 64), (9, 32)];
    cases.extend(merges.map(|(splits, width)| combine_case(splits, width)));
    for format in FORMATS {
        cases.push(encode_case(format, Side::Keys, 256, ElementType::F16));
        cases.push(encode_case(format, Side::Values, 256, ElementType::F32));
        cases.push(encode_case(format, Side::KEqV, 128, ElementType::Bf16));
    }
    cases.push(encode_case(CodeFormat::Tqc5, Side::Keys, 512, ElementType::F16));
    cases.push(encode_case(CodeFormat::Tqc4, Side::Values, 512, ElementType::F16));
    for width in [64, 128, 256, 512] {
        for element in ELEMENTS {
            cases.push(attend_case("ragged", Layer::exact(width, element, causal(157, 3))));
        }
        let window = |window, at| Layer { window: Some(window), ..Layer::exact(width, ElementType::F16, at) };
        cases.push(attend_case("window", window(100, causal(300, 4))));
        cases.push(attend_case("window", window(1, causal(129, 2))));
        // A drafter: one position, keys before it only.
        cases.push(attend_case("drafter", Layer::exact(width, ElementType::Bf16, vec![[131, 130]])));
    }
    for rows in 1..=16 {
        cases.push(attend_case("exact rows", Layer::exact(128, ElementType::F16, causal(130, rows))));
        cases.push(attend_case(
            "quantized rows",
            Layer::quantized(128, CodeFormat::Tqc4, CodeFormat::Tqc4, causal(420, rows)),
        ));
    }
    for end in [1, 127, 128, 129, 256, 257] {
        cases.push(attend_case("page ends", Layer::exact(128, ElementType::F16, causal(end, 1))));
    }
    for end in [278, 279, 406, 407] {
        cases.push(attend_case("page ends", Layer::quantized(128, CodeFormat::Tqc5, CodeFormat::Tqc4, causal(end, 2))));
    }
    for width in [32, 64] {
        for (format, side) in
            [(CodeFormat::Tqc3, Side::Keys), (CodeFormat::Tqc5, Side::Values), (CodeFormat::Q8_0, Side::Keys)]
        {
            cases.push(encode_case(format, side, width, ElementType::F16));
        }
    }
    cases.extend(mixed_cases());
    cases.extend(prompt_cases());
    for format in FORMATS {
        cases.push(attend_case("codes", Layer::quantized(256, format, format, causal(430, 2))));
        cases.push(attend_case("one vector", Layer::shared(format, causal(420, 1))));
    }
    let mixed = |width, at| Layer { split_pages: 3, ..Layer::quantized(width, CodeFormat::Tqc5, CodeFormat::Tqc4, at) };
    cases.push(attend_case("mixed", mixed(512, causal(560, 1))));
    cases.push(attend_case("mixed", mixed(512, causal(540, 4))));
    cases.push(attend_case("mixed", Layer { window: Some(300), ..mixed(256, causal(540, 4)) }));
    cases.push(attend_case("one head", Layer { kv_heads: 1, group: 8, ..mixed(256, causal(420, 2)) }));
    cases.push(attend_case("no head zone", Layer { zones: Zones { head: 0, tail: 0 }, ..mixed(128, causal(300, 2)) }));
    cases.push(attend_case("one vector", Layer { group: 8, ..Layer::shared(CodeFormat::Tqc6, causal(420, 2)) }));
    // By every kernel.
    let nan = |layer| attend_case("NaN", Layer { with_nan: true, ..layer });
    let elements = [(64, ElementType::F32), (256, ElementType::F16), (32, ElementType::Bf16)];
    cases.extend(elements.map(|(width, element)| nan(Layer::exact(width, element, causal(131, 2)))));
    cases.push(nan(mixed(128, causal(420, 2))));
    cases.push(nan(Layer::quantized(64, CodeFormat::Q8_0, CodeFormat::Q4_0, causal(420, 2))));
    // Sequences of different lengths, positions and numbers of tiles.
    let several = |layer: Layer| layer.with(causal(300, 1)).with(causal(20, 2));
    for width in [64, 128, 256, 512] {
        let layer = |element| several(Layer::exact(width, element, causal(157, 3)));
        cases.push(attend_case("several", layer(ElementType::F16)));
        cases.push(attend_case("several", Layer { window: Some(100), ..layer(ElementType::Bf16) }));
        cases.push(attend_case("several", Layer { split_pages: 2, group: 8, ..layer(ElementType::F32) }));
        let drafter = Layer::exact(width, ElementType::F16, vec![[131; 2]]).with(vec![[300; 2]]).with(vec![[40; 2]]);
        cases.push(attend_case("drafters", drafter));
    }
    // The order in which splits are merged follows from their positions, which wrap around the eight warps here.
    for layer in [Layer::exact(128, ElementType::F16, causal(157, 3)), mixed(128, causal(420, 3))] {
        // The last row sees one split less than the row before it.
        let layer = layer.with(causal(1100, 2)).with(causal(1040, 2));
        cases.push(attend_case("several", Layer { split_pages: 1, window: Some(400), ..layer }));
    }
    for width in [128, 256, 512] {
        let layer = |end| several(mixed(width, causal(end, 3)).with(causal(700, 2)));
        cases.push(attend_case("several", layer(420)));
        cases.push(attend_case("several", Layer { split_pages: 1, window: Some(300), ..layer(560) }));
        cases.push(attend_case("several", Layer { kv_heads: 1, group: 8, ..layer(430) }));
    }
    let shared = several(Layer::shared(CodeFormat::Tqc5, causal(420, 2)).with(causal(560, 2)));
    cases.push(attend_case("several", Layer { window: Some(350), ..shared.clone() }));
    cases.push(attend_case("several", shared));
    cases
}

pub fn small() -> Vec<Case> {
    let mut cases: Vec<_> = row_cases().into_iter().map(rows_case).collect();
    cases.extend([combine_case(34, 64), combine_case(3, 256)]);
    cases.push(encode_case(CodeFormat::Q4_0, Side::Keys, 256, ElementType::F16));
    cases.push(encode_case(CodeFormat::Tqc5, Side::Keys, 256, ElementType::F16));
    cases.push(encode_case(CodeFormat::Tqc3, Side::Values, 256, ElementType::F32));
    let layer = |layer: Layer| Layer { kv_heads: 2, group: 2, ..layer };
    cases.push(small_case(layer(Layer::exact(64, ElementType::F16, causal(131, 2)))));
    cases.push(small_case(layer(Layer { window: Some(30), ..Layer::exact(128, ElementType::F32, causal(140, 2)) })));
    cases.push(small_case(layer(Layer::exact(256, ElementType::F16, causal(131, 2)).with(causal(20, 1)))));
    let prompt = Layer { kv_heads: 2, group: 16, ..Layer::exact(256, ElementType::F16, causal(131, 8)) };
    cases.push(small_case(prompt.with(causal(20, 1))));
    cases.push(small_case(layer(Layer::quantized(128, CodeFormat::Tqc5, CodeFormat::Tqc3, causal(300, 2)))));
    cases.push(small_case(layer(Layer::shared(CodeFormat::Tqc5, causal(300, 1)))));
    for codes in [
        [Some(CodeFormat::Q8_0), None],
        [None, Some(CodeFormat::Q4_0)],
        [Some(CodeFormat::Tqc5), Some(CodeFormat::Tqc3)],
    ] {
        let at = causal(300, 2);
        cases.push(small_case(layer(Layer { codes, ..Layer::exact(64, ElementType::F16, at) }.with(causal(420, 2)))));
    }
    cases.push(small_case(layer(Layer::shared(CodeFormat::Q8_0, causal(300, 1)))));
    cases.push(small_case(layer(Layer::exact(64, ElementType::F16, causal(131, 2)).with(causal(20, 2)))));
    cases.push(small_case(layer(
        Layer::quantized(128, CodeFormat::Tqc5, CodeFormat::Tqc3, causal(300, 2)).with(causal(420, 2)),
    )));
    cases
}
