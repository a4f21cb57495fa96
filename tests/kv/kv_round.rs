//! Rounds of the KV cache: a committed round leaves the state of plain decoding of the committed rows, a dropped one
//! leaves none, and its queries read the rows that they would read in plain decoding.

use candle_core::Tensor;
use foretoken::kv::{
    Batch, CodeFormat, ExactZones, KvAccess, KvCache, KvFormat, KvLayout, KvOptions, LayerFormat, StoreLayout,
};
use foretoken::nn::{F32View, tensor};
use foretoken::{ElementType, Error, Isa};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::cases::on_every_isa;

/// Positions per page: what `bytes` is counted in.
const PAGE: usize = 128;

const F32: KvFormat = KvFormat::Exact(ElementType::F32);
const F16: KvFormat = KvFormat::Exact(ElementType::F16);
const BF16: KvFormat = KvFormat::Exact(ElementType::Bf16);

/// The tested types of keys and values: exact ones and mixtures, and every quantized format on either side.
fn types() -> Vec<(KvFormat, KvFormat)> {
    let mut types = vec![(F32, F32), (F16, F16), (BF16, BF16), (F16, F32), (F32, BF16)];
    types.extend(CodeFormat::ALL.map(|format| (format.into(), CodeFormat::Tqc4.into())));
    types.extend([(F16, CodeFormat::Turbo3.into()), (CodeFormat::Tqc5.into(), F32)]);
    types
}

/// Bytes per element, if whole.
fn size(format: KvFormat) -> Option<usize> {
    match format {
        KvFormat::Exact(element) => Some(element.size()),
        _ => None,
    }
}

/// Two query heads share a K/V head.
const GROUP: usize = 2;

/// Full and sliding stores of every kind, the last two layers reading the stores of others.
fn layout() -> KvLayout {
    let store = |num_kv_heads, head_dim, window| StoreLayout { num_kv_heads, head_dim, window, k_eq_v: None };
    KvLayout {
        stores: vec![
            store(1, 64, None),
            store(2, 32, Some(1)),
            store(3, 32, Some(8)),
            store(1, 64, Some(128)),
            store(4, 32, None),
        ],
        store_of_layer: vec![0, 1, 2, 3, 4, 3, 0],
        inverse_frequencies: Vec::new(),
    }
}

/// Sliding layers are quantized too, and exact zones are small, so that pages soon leave them.
fn cache(isa: Isa, (key, value): (KvFormat, KvFormat), max_round_rows: usize, max_context: usize) -> KvCache {
    let layers = (0..layout().stores.len()).map(|layer| LayerFormat { layer, key, value }).collect();
    let exact = ExactZones { head: 20, tail: 40, element: ElementType::F16 };
    let options = KvOptions { key, value, exact, layers, max_round_rows, ..KvOptions::default() };
    KvCache::new(layout(), &options, max_context, isa).expect("a cache")
}

/// One position's inputs for every layer: its own K and V if the layer has a store, and its queries.
struct Position {
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
    queries: Vec<Vec<f32>>,
}

impl Position {
    fn random(rng: &mut StdRng) -> Self {
        let layout = layout();
        let mut floats = |len: usize| (0..len).map(|_| rng.random_range(-1.0..1.0)).collect::<Vec<f32>>();
        let widths: Vec<_> = layout.stores.iter().map(|store| store.num_kv_heads * store.head_dim).collect();
        Self {
            keys: widths.iter().map(|width| floats(*width)).collect(),
            values: widths.iter().map(|width| floats(*width)).collect(),
            queries: layout.store_of_layer.iter().map(|store| floats(GROUP * widths[*store])).collect(),
        }
    }
}

/// The rows of `positions`, one after the other, as a tensor `(rows, heads, head_dim)`.
fn rows<'p>(rows: impl Iterator<Item = &'p Vec<f32>>, head_dim: usize) -> Tensor {
    let rows: Vec<_> = rows.collect();
    let heads = rows[0].len() / head_dim;
    tensor(rows.iter().flat_map(|row| row.iter().copied()).collect(), (rows.len(), heads, head_dim)).expect("a tensor")
}

/// Attention outputs: for each layer, for each row, its bits.
type Attended = Vec<Vec<Vec<u32>>>;

/// Stages `positions` in one round, attends in every layer, and commits the first `keep`, or drops the round.
fn round(cache: &mut KvCache, positions: &[Position], keep: Option<usize>) -> Attended {
    let layout = layout();
    let mut round = cache.begin_round(positions.len()).expect("a round");
    let mut attended = Vec::new();
    for (layer, store) in layout.store_of_layer.iter().enumerate() {
        let head_dim = layout.stores[*store].head_dim;
        if layer == *store {
            let k = rows(positions.iter().map(|position| &position.keys[layer]), head_dim);
            let v = rows(positions.iter().map(|position| &position.values[layer]), head_dim);
            round.append(layer, &k, &v).expect("rows of the store's shape");
        }
        let q = rows(positions.iter().map(|position| &position.queries[layer]), head_dim);
        attended.push(bits(&round.attend(layer, &q).expect("queries of the store's shape"), positions.len()));
    }
    if let Some(keep) = keep {
        round.commit(keep);
    }
    attended
}

fn bits(tensor: &Tensor, rows: usize) -> Vec<Vec<u32>> {
    let values = F32View::new(tensor).expect("an f32 tensor");
    assert!(values.iter().all(|x| x.is_finite()), "attention gave {values:?}", values = &values[..8]);
    values.chunks_exact(values.len() / rows).map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
}

/// Checks row `row` of a round against a plain step at the same position.
fn assert_same_row(round: &Attended, row: usize, step: &Attended, what: &str) {
    for (layer, (round, step)) in round.iter().zip(step).enumerate() {
        assert_eq!(round[row], step[0], "{what}: row {row}, layer {layer}");
    }
}

/// A drafter's view: queries after the last committed row.
fn drafter_view(cache: &KvCache, queries: &Position) -> Vec<Vec<Vec<u32>>> {
    let layout = layout();
    let attend = |(layer, store): (usize, &usize)| {
        let q = rows(std::iter::once(&queries.queries[layer]), layout.stores[*store].head_dim);
        bits(&cache.committed().attend(layer, &q).expect("queries of the store's shape"), 1)
    };
    layout.store_of_layer.iter().enumerate().map(attend).collect()
}

/// Bytes of a cache of exact rows that staged rows up to `end`.
fn bytes((key, value): (KvFormat, KvFormat), max_round_rows: usize, end: usize) -> Option<usize> {
    let element = size(key)? + size(value)?;
    let of = |store: &StoreLayout| {
        let ring = store.window.map(|window| (window - 1 + max_round_rows).div_ceil(PAGE));
        let pages = ring.unwrap_or(usize::MAX).min(end.div_ceil(PAGE));
        pages * PAGE * store.num_kv_heads * store.head_dim * element
    };
    Some(layout().stores.iter().map(of).sum())
}

/// Rounds of 1 to 20 rows, of which any number is committed, against a cache that saw the committed rows one by one.
/// Rejected rows differ from those written at their positions later, so a row that survives a rollback is detected. 80
/// rounds write some 400 positions: three pages, and twice around the ring of the widest window.
#[test]
fn rounds_leave_what_single_steps_leave() {
    on_every_isa(rounds_are_single_steps);
}

fn rounds_are_single_steps(isa: Isa) {
    const MAX_ROUND_ROWS: usize = 20;
    // Every third on narrower instruction sets, which are slower.
    let stride = if isa == Isa::best() { 1 } else { 3 };
    for (types, seed) in types().into_iter().zip([1, 2].into_iter().cycle()).step_by(stride) {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut rounds = cache(isa, types, MAX_ROUND_ROWS, 4096);
        // Its rings have another size, so equal rows are not in equal slots by chance.
        let mut steps = cache(isa, types, 1, 4096);
        let mut staged_end = 0;
        for n in 0..80 {
            let positions: Vec<_> =
                (0..rng.random_range(1..=MAX_ROUND_ROWS)).map(|_| Position::random(&mut rng)).collect();
            let dropped = rng.random_range(0..8) == 0;
            let keep = if dropped { 0 } else { rng.random_range(0..=positions.len()) };
            let what = format!("{types:?}, seed {seed}, round {n}: {keep} of {} rows", positions.len());
            staged_end = staged_end.max(rounds.len() + positions.len());
            let attended = round(&mut rounds, &positions, (!dropped).then_some(keep));
            for (row, position) in positions.iter().take(keep + 1).enumerate() {
                // The first rejected row saw the committed ones, so it also has its plain step,
                // which is dropped as well.
                let step = round(&mut steps, std::slice::from_ref(position), (row < keep).then_some(1));
                assert_same_row(&attended, row, &step, &what);
            }
            assert_eq!(rounds.len(), steps.len(), "{what}");
            assert!(rounds.same_rows(&steps), "{what}: rows differ");
            assert_eq!(rounds.bytes(), rounds.bytes_at(staged_end), "{what}");
            if let Some(of_elements) = bytes(types, MAX_ROUND_ROWS, staged_end) {
                assert_eq!(rounds.bytes(), of_elements, "{what}");
            }
            let queries = Position::random(&mut rng);
            assert_eq!(drafter_view(&rounds, &queries), drafter_view(&steps, &queries), "{what}: the drafter's view");
        }
        assert!(rounds.len() > 2 * PAGE + 20, "{} positions do not wrap the ring", rounds.len());
    }
}

/// Every row of a round, committed or not, at lengths around the windows and the pages.
#[test]
fn every_row_of_a_round_sees_what_single_steps_see() {
    on_every_isa(rows_are_single_steps);
}

fn rows_are_single_steps(isa: Isa) {
    for types in [(F32, F32), (F16, BF16), (CodeFormat::Tqc5.into(), CodeFormat::Tqc4.into())] {
        for len in [0, 1, 6, 7, 8, 120, 127, 128, 250, 256, 300] {
            let mut rng = StdRng::seed_from_u64(len as u64);
            let before: Vec<_> = (0..len).map(|_| Position::random(&mut rng)).collect();
            let staged: Vec<_> = (0..20).map(|_| Position::random(&mut rng)).collect();
            let (mut rounds, mut steps) = (cache(isa, types, 20, 4096), cache(isa, types, 20, 4096));
            for before in before.chunks(20) {
                round(&mut rounds, before, Some(before.len()));
                round(&mut steps, before, Some(before.len()));
            }
            let step = |position| round(&mut steps, std::slice::from_ref(position), Some(1));
            let want: Vec<Attended> = staged.iter().map(step).collect();
            for count in [1, 2, 7, 20] {
                // Dropped: each is at the same position.
                let attended = round(&mut rounds, &staged[..count], None);
                for (row, step) in want[..count].iter().enumerate() {
                    assert_same_row(&attended, row, step, &format!("{types:?}, {count} rows after {len}"));
                }
            }
        }
    }
}

/// Attention over the rows in a window, straight from the definition and in f64.
fn attention(history: &[Position], layer: usize, query: &Position) -> Vec<f64> {
    let layout = layout();
    let index = layout.store_of_layer[layer];
    let StoreLayout { num_kv_heads, head_dim, window, .. } = layout.stores[index];
    let first = window.map_or(0, |window| history.len().saturating_sub(window));
    let mut y = Vec::new();
    for head in 0..num_kv_heads * GROUP {
        let (kv_head, of) = (head / GROUP, |head: usize| head * head_dim..(head + 1) * head_dim);
        let q = &query.queries[layer][of(head)];
        let weight = |position: &Position| {
            let k = &position.keys[index][of(kv_head)];
            q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>().exp()
        };
        let weights: Vec<f64> = history[first..].iter().map(weight).collect();
        let total: f64 = weights.iter().sum();
        y.extend((0..head_dim).map(|i| {
            let value = |position: &Position| f64::from(position.values[index][kv_head * head_dim + i]);
            history[first..]
                .iter()
                .zip(&weights)
                .map(|(position, weight)| weight / total * value(position))
                .sum::<f64>()
        }));
    }
    y
}

/// Equality is not correctness: the last row also agrees with the definition.
#[test]
fn attention_is_over_the_window() {
    on_every_isa(attention_is_the_definition);
}

fn attention_is_the_definition(isa: Isa) {
    let mut rng = StdRng::seed_from_u64(3);
    let mut cache = cache(isa, (F32, F32), 20, 4096);
    let mut history = Vec::new();
    let step = |cache: &mut KvCache, history: &mut Vec<Position>, rng: &mut StdRng, rows: usize| {
        let positions: Vec<_> = (0..rows).map(|_| Position::random(rng)).collect();
        let attended = round(cache, &positions, Some(rows));
        history.extend(positions);
        attended
    };
    let check = |history: &[Position], attended: &Attended| {
        for (layer, attended) in attended.iter().enumerate() {
            let want = attention(history, layer, history.last().expect("a position"));
            let got = attended.last().expect("a row").iter().map(|bits| f64::from(f32::from_bits(*bits)));
            let error = got.zip(want).map(|(got, want)| (got - want).abs()).fold(0.0, f64::max);
            assert!(error < 1e-5, "layer {layer} at {}: {error}", history.len());
        }
    };
    while history.len() < 400 {
        let rows = rng.random_range(1..=20);
        let attended = step(&mut cache, &mut history, &mut rng, rows);
        check(&history, &attended);
    }
    // Beyond 1024 positions the keys are in two splits, on any instruction set; those of the widest window as well.
    if isa != Isa::best() {
        return;
    }
    while history.len() < 1060 {
        step(&mut cache, &mut history, &mut rng, 20);
    }
    for rows in [20, 3] {
        let attended = step(&mut cache, &mut history, &mut rng, rows);
        check(&history, &attended);
    }
}

/// What does not fit is rejected before anything is written.
#[test]
fn a_refused_round_changes_nothing() {
    let mut rng = StdRng::seed_from_u64(4);
    let positions: Vec<_> = (0..30).map(|_| Position::random(&mut rng)).collect();
    let (mut tried, mut twin) = (cache(Isa::best(), (F16, F16), 20, 30), cache(Isa::best(), (F16, F16), 20, 30));
    for cache in [&mut tried, &mut twin] {
        round(cache, &positions[..20], Some(18));
    }
    for (rows, context) in [(0, false), (21, false), (usize::MAX, false), (13, true), (20, true)] {
        match tried.begin_round(rows).err() {
            Some(Error::Context { needed, limit }) if context => assert_eq!((needed, limit), (18 + rows, 30)),
            Some(Error::Argument { name: "rows", problem }) if !context => {
                assert!(problem.contains(&rows.to_string()) && problem.contains("20"), "{problem}");
            }
            other => panic!("a round of {rows} rows: {other:?}"),
        }
        assert!(tried.same_rows(&twin) && tried.bytes() == twin.bytes(), "a round of {rows} rows");
    }
    // The last positions are usable.
    for cache in [&mut tried, &mut twin] {
        round(cache, &positions[18..], Some(12));
    }
    assert_eq!((tried.len(), tried.max_context()), (30, 30));
    assert!(matches!(tried.begin_round(1).err(), Some(Error::Context { needed: 31, limit: 30 })));
    assert!(tried.same_rows(&twin));
}

/// What a page cannot hold is refused by position, on one thread and on several; the rotation of quantized formats can
/// make it of values that f16 holds. The dropped round leaves nothing.
#[test]
fn rows_that_pages_cannot_hold_are_refused() {
    const ROWS: usize = 300; // enough for several threads
    let mut rng = StdRng::seed_from_u64(5);
    let positions: Vec<_> = (0..20).map(|_| Position::random(&mut rng)).collect();
    let good: Vec<f32> = (0..ROWS * 128).map(|_| rng.random_range(-1.0..1.0)).collect();
    let large: Vec<f32> = (0..128).map(|_| if rng.random() { 6e4 } else { -6e4 }).collect();
    let staged = |rows: &[f32]| tensor(rows.to_vec(), (ROWS, 4, 32)).expect("a tensor");
    for (threads, (key, value)) in
        [1, 2].into_iter().flat_map(|threads| types().into_iter().map(move |of| (threads, of)))
    {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        let [mut tried, mut twin] = [(); 2].map(|()| cache(Isa::best(), (key, value), ROWS, 400));
        [&mut tried, &mut twin].into_iter().for_each(|cache| drop(round(cache, &positions[..10], Some(10))));
        for (bad, name, format) in [(f32::NAN, "K", F16), (-7e4, "V", F16), (0.0, "K", key), (0.0, "V", value)] {
            let mut rows = good.clone();
            // The later one first, in memory order of heads.
            for position in [290, 77] {
                let row = &mut rows[position * 128..][..128];
                if bad == 0.0 { row.copy_from_slice(&large) } else { row[if position == 77 { 100 } else { 3 }] = bad }
            }
            let (k, v) = if name == "K" { (&rows, &good) } else { (&good, &rows) };
            let mut round = tried.begin_round(ROWS).expect("a round");
            let refused = pool.install(|| round.append(4, &staged(k), &staged(v))).err();
            drop(round);
            match refused {
                Some(Error::NotFinite { what, layer: Some(4), position: Some(87), found: Some(_) }) => {
                    assert_eq!(what, name);
                    assert!(bad != 0.0 || size(format).is_none(), "{key} {value}: {name} of 6e4 in {format}");
                }
                None => assert!(bad == 0.0 && size(format).is_some() || bad == -7e4 && size(value).is_none()),
                other => panic!("{key} {value}: {bad} in {name}: {other:?}"),
            }
            assert!(tried.same_rows(&twin), "{key} {value}: {bad} in {name}");
        }
        let next = [&mut tried, &mut twin].map(|cache| round(cache, &positions[10..], Some(10)));
        assert!(next[0] == next[1] && tried.same_rows(&twin), "{key} {value}");
    }
}

/// Tensors of the wrong shape are rejected by name, and their round can only be dropped.
#[test]
fn misshapen_rows_are_refused() {
    let mut cache = cache(Isa::best(), (F32, F32), 20, 30);
    let zeros = |shape: (usize, usize, usize)| tensor(vec![0.0; shape.0 * shape.1 * shape.2], shape).expect("a tensor");
    let mut staged = cache.begin_round(2).expect("a round");
    let right = zeros((2, 2, 32));
    for wrong in [(1, 2, 32), (3, 2, 32), (2, 1, 32), (2, 2, 64), (2, 1, 64)] {
        for (k, v, name) in [(&zeros(wrong), &right, "K of layer 1"), (&right, &zeros(wrong), "V of layer 1")] {
            let problem = staged.append(1, k, v).expect_err("a wrong shape").to_string();
            assert!(problem.contains(name) && problem.contains("[2, 2, 32]"), "{problem}");
        }
    }
    assert!(staged.attend(1, &zeros((2, 3, 32))).is_err(), "three query heads over two K/V heads");
    assert!(staged.attend(1, &zeros((2, 2, 64))).is_err(), "queries that are wider than the keys");
    for rows in [1, 3] {
        let problem = staged.attend(1, &zeros((rows, 4, 32))).expect_err("a wrong number of queries").to_string();
        assert!(problem.contains(&format!("[{rows}, 4, 32] of 2 rows")), "{problem}");
    }
    assert!(matches!(staged.attend(7, &right), Err(Error::Argument { name: "layer", .. })), "no such layer");
    drop(staged);
    assert!(cache.is_empty());
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("a pool");
    let none = pool.install(|| cache.committed().attend(1, &zeros((0, 4, 32)))).expect("no queries");
    assert_eq!(none.dims(), [0, 128]);
}

#[test]
fn rows_that_a_batch_lacks_are_refused() {
    let mut caches = [(); 2].map(|()| cache(Isa::best(), (F32, F32), 20, 30));
    let zeros = |rows: usize| tensor(vec![0.0; rows * 64], (rows, 2, 32)).expect("a tensor");
    let mut batch = Batch::new();
    for cache in &mut caches {
        batch.push(&[1, 2], cache.begin_round(2).expect("a round")).expect("a segment");
    }
    let mut kv = batch.kv();
    for (k, v) in [(3, 4), (4, 5)] {
        let problem = kv.append(1, &zeros(k), &zeros(v)).expect_err("other rows").to_string();
        assert!(problem.contains("the batch has 4 rows"), "{problem}");
    }
    kv.append(1, &zeros(4), &zeros(4)).expect("rows of both");
    for rows in [&[3, 0][..], &[1, 1], &[0, 4]] {
        assert!(matches!(kv.narrow(rows), Err(Error::Argument { name: "rows", .. })), "{rows:?}");
    }
    kv.narrow(&[0, 3]).expect("ascending rows");
    assert_eq!(kv.attend(1, &zeros(2)).expect("two queries").dims(), [2, 64]);
}

#[test]
#[should_panic = "commit: 3 of 2 rows"]
fn more_than_was_staged_cannot_be_kept() {
    let mut cache = cache(Isa::best(), (F32, F32), 20, 30);
    cache.begin_round(2).expect("a round").commit(3);
}

#[test]
fn bytes_per_token_are_those_of_the_full_layers() {
    for (key, value) in types() {
        let cache = cache(Isa::best(), (key, value), 20, 30);
        if let (Some(key), Some(value)) = (size(key), size(value)) {
            assert_eq!(cache.bytes_per_token(), (64 + 4 * 32) * (key + value));
        }
        assert_eq!(cache.bytes(), 0, "nothing is allocated before it is needed");
    }
}

/// Limits of any size are accepted without memory for them; limits of 0 are rejected.
#[test]
fn limits_are_checked() {
    let new = |max_context, max_round_rows| {
        let (max_context, memory) = (Some(max_context), Some(u64::MAX));
        let options = KvOptions { max_context, max_round_rows, memory, ..KvOptions::default() };
        KvCache::new(layout(), &options, 4096, Isa::best())
    };
    for (context, rows) in [(0, 20), (30, 0)] {
        let problem = new(context, rows).expect_err("an empty cache").to_string();
        assert!(problem.contains("at least 1"), "{problem}");
    }
    assert_eq!(new(usize::MAX, usize::MAX).expect("a cache").bytes(), 0);
    let mut one = cache(Isa::best(), (F32, F32), usize::MAX, 30);
    round(&mut one, &[Position::random(&mut StdRng::seed_from_u64(1))], Some(1));
    assert!(matches!(one.begin_round(usize::MAX), Err(Error::Context { limit: 30, .. })));
    type Change = fn(&mut StoreLayout);
    let changes: [(Change, &str); 4] = [
        (|store| store.window = Some(0), "window: of a layer is 0, must be at least 1"),
        (|store| store.num_kv_heads = 0, "has 0 K/V heads"),
        (|store| store.head_dim = 0, "of 0 channels"),
        (|store| store.k_eq_v = Some(vec![1.0; 3]), "has 3 key weights"),
    ];
    for (change, want) in changes {
        let mut layout = layout();
        change(&mut layout.stores[2]);
        let refused = KvCache::new(layout, &KvOptions::default(), 30, Isa::best()).expect_err("a refusal");
        assert!(refused.to_string().contains(want), "{refused}");
    }
}

/// A layer without K and V of its own or a donor's is refused by name.
#[test]
fn a_layer_without_a_store_is_refused() {
    let layout = KvLayout { store_of_layer: vec![0, KvLayout::NO_STORE], ..layout() };
    let mut cache = KvCache::new(layout, &KvOptions::default(), 30, Isa::best()).expect("a cache");
    let row = tensor(vec![0.0; 64], (1, 1, 64)).expect("a tensor");
    let mut staged = cache.begin_round(1).expect("a round");
    let refused = |result: foretoken::Result<()>| {
        assert!(matches!(result, Err(Error::Argument { name: "layer", .. })), "{result:?}");
    };
    refused(staged.append(1, &row, &row));
    refused(staged.attend(1, &row).map(drop));
    staged.append(0, &row, &row).expect("a row");
    staged.commit(1);
    refused(cache.committed().attend(1, &row).map(drop));
}

/// Rows or pages in memory: `pinned` in places of their own, the others in a ring.
struct Places {
    pinned: usize,
    ring: usize,
    last: Vec<Option<usize>>, // for each place, the one last written there
}

impl Places {
    fn new(pinned: usize, ring: usize) -> Self {
        Self { pinned, ring, last: Vec::new() }
    }

    fn place(&self, at: usize) -> usize {
        at.checked_sub(self.pinned).map_or(at, |after| self.pinned + after % self.ring)
    }

    fn write(&mut self, at: usize) {
        let place = self.place(at);
        self.last.resize(self.last.len().max(place + 1), None);
        self.last[place] = Some(at);
    }

    fn holds(&self, at: usize) -> bool {
        self.last.get(self.place(at)).copied().flatten() == Some(at)
    }
}

/// A store of which nothing is known but what each place was last written with.
struct Model {
    window: usize,
    tail: Option<usize>, // if quantized
    rows: Places,
    pages: Places,
    quantized: usize,
}

impl Model {
    fn new(window: Option<usize>, zones: Option<ExactZones>, max_round_rows: usize) -> Self {
        let ring = window.map(|window| (window - 1 + max_round_rows).div_ceil(PAGE));
        let (pinned, newest) = match zones {
            None => (0, ring.unwrap_or(1 << 20)),
            Some(zones) => (zones.head.div_ceil(PAGE), (zones.tail + PAGE - 1 + max_round_rows).div_ceil(PAGE)),
        };
        Self {
            window: window.unwrap_or(usize::MAX),
            tail: zones.map(|zones| zones.tail),
            rows: Places::new(pinned * PAGE, newest * PAGE),
            pages: Places::new(0, ring.unwrap_or(1 << 20)),
            quantized: 0,
        }
    }

    fn first_exact_page(&self, position: usize) -> usize {
        self.tail.map_or(0, |tail| position.saturating_sub(tail) / PAGE)
    }

    fn write(&mut self, positions: std::ops::Range<usize>) {
        let (first, end) = (positions.start, self.first_exact_page(positions.end));
        positions.for_each(|position| self.rows.write(position));
        (self.quantized.min(first / PAGE)..end).for_each(|page| self.pages.write(page));
        self.quantized = end;
    }

    /// Whether everything is there that queries from position `len` on read.
    fn can_rewind_to(&self, len: usize) -> bool {
        let (visible, exact) = ((len + 1).saturating_sub(self.window)..len, self.first_exact_page(len));
        match self.tail {
            None => visible.clone().all(|position| self.rows.holds(position)),
            // Pages are quantized as a whole, after `len` as well.
            Some(_) => (visible.start / PAGE..len.div_ceil(PAGE)).all(|page| match page < exact {
                true => self.pages.holds(page),
                false => (page * PAGE..len.min((page + 1) * PAGE)).all(|position| self.rows.holds(position)),
            }),
        }
    }
}

/// Rewinding is refused exactly where something that the next query reads was overwritten, by a dropped row or another.
#[test]
fn a_cache_is_rewound_as_far_as_its_rows_last() {
    let exact = [(1, 1), (2, 130), (8, 20), (128, 128), (129, 128), (130, 127), (512, 512)];
    let zones = |head, tail| Some(ExactZones { head, tail, element: ElementType::F16 });
    let quantized = [
        (None, zones(64, 512), 512),
        (None, zones(0, 40), 20),
        (None, zones(128, 100), 300),
        (Some(8), zones(64, 300), 64),
        (Some(128), zones(20, 40), 20),
        (Some(300), zones(20, 40), 128),
    ];
    let mut rng = StdRng::seed_from_u64(10);
    let exact = exact.map(|(window, rows)| (Some(window), None, rows));
    for (window, zones, max_round_rows) in exact.into_iter().chain(quantized) {
        let format = zones.map_or(F16, |_| CodeFormat::Tqc4.into());
        let layers = vec![LayerFormat { layer: 0, key: format, value: format }];
        let (memory, exact) = (Some(u64::MAX), zones.unwrap_or_default());
        let options = KvOptions { exact, layers, max_round_rows, memory, ..KvOptions::default() };
        let stores = vec![StoreLayout { num_kv_heads: 1, head_dim: 16, window, k_eq_v: None }];
        let layout = KvLayout { stores, store_of_layer: vec![0], inverse_frequencies: Vec::new() };
        let mut cache = KvCache::new(layout, &options, 1 << 20, Isa::best()).expect("a cache");
        let mut model = Model::new(window, zones, max_round_rows);
        let end = 3 * PAGE + 2 * (window.unwrap_or(0) + max_round_rows + zones.map_or(0, |zones| zones.tail));
        while cache.len() < end {
            let rows = rng.random_range(1..=max_round_rows);
            model.write(cache.len()..cache.len() + rows);
            // Without rows: only the positions count.
            cache.begin_round(rows).expect("a round").commit(rng.random_range(0..=rows));
            for len in 0..=cache.len() {
                let (rewound, possible) = (cache.fork().rewind(len).is_ok(), model.can_rewind_to(len));
                let what = format!("window {window:?}, {zones:?}, rounds of {max_round_rows}");
                assert_eq!(rewound, possible, "{what}: {} positions to {len}", cache.len());
            }
        }
    }
}

/// Behind the beginning nothing is left of what was written: a short text can be gone back in as in an empty cache.
#[test]
fn an_emptied_cache_forgets_how_far_it_was_written() {
    let mut rng = StdRng::seed_from_u64(9);
    let positions: Vec<_> = (0..400).map(|_| Position::random(&mut rng)).collect();
    for types in [(F16, F16), (CodeFormat::Tqc4.into(), CodeFormat::Tqc4.into())] {
        let (mut emptied, mut fresh) = (cache(Isa::best(), types, 20, 600), cache(Isa::best(), types, 20, 600));
        for chunk in positions.chunks(20) {
            round(&mut emptied, chunk, Some(chunk.len()));
        }
        emptied.rewind(0).expect("an empty sequence reads nothing");
        for cache in [&mut emptied, &mut fresh] {
            round(cache, &positions[100..115], Some(15));
            cache.rewind(4).expect("no row is gone");
        }
        let next = &positions[200..203];
        assert_eq!(round(&mut emptied, next, Some(3)), round(&mut fresh, next, Some(3)));
        assert!(emptied.same_rows(&fresh));
    }
}
