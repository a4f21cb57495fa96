//! K = V: storing only V gives the same result as storing both, exactly in f32, within the format's error otherwise.

use foretoken::OutputRows;
use foretoken::kv::{
    CodeFormat, ExactZones, KEqV, KvAccess, KvCache, KvFormat, KvLayout, KvOptions, KvPreset, StoreLayout,
};
use foretoken::nn::{F32View, RmsNorm, Rotary, tensor};
use foretoken::{ElementType, Isa};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::cases::{self, bits, max_difference, on_every_isa, pass, values};

fn options(format: KvFormat, k_eq_v: KEqV) -> KvOptions {
    let exact = ExactZones { head: 20, tail: 100, ..ExactZones::default() };
    KvOptions { key: format, value: format, exact, k_eq_v, ..KvOptions::default() }
}

#[test]
fn logits_are_those_of_stored_keys() {
    on_every_isa(recomputed_keys_are_stored_keys);
}

fn recomputed_keys_are_stored_keys(isa: Isa) {
    let mut tried = 0;
    for case in cases::all() {
        let target = case.target(isa);
        if target.kv_layout().stores.iter().all(|store| store.k_eq_v.is_none()) {
            continue;
        }
        tried += 1;
        let ids = case.ids("input_ids");
        let logits = |element: ElementType, k_eq_v| {
            let options = options(element.into(), k_eq_v);
            let mut kv = KvCache::new(target.kv_layout(), &options, 4096, isa).expect("a cache");
            let output = pass(&target, &mut kv, &ids, OutputRows::All);
            (values(&output.logits), kv.bytes_per_token())
        };
        let (recomputed, small) = logits(ElementType::F32, KEqV::Recomputed);
        let (stored, large) = logits(ElementType::F32, KEqV::Stored);
        assert!(bits(&recomputed) == bits(&stored), "{}: the bits differ in f32", case.name);
        // The table of angles is as large as the K of one head if all of it rotates.
        assert!(small < large || !case.ships(), "{}: {small} of {large} bytes per token", case.name);
        // K computed from rounded V has the error of rounded K.
        for (element, rounding) in [(ElementType::F16, 1.0), (ElementType::Bf16, 8.0)] {
            let recomputed = max_difference(&logits(element, KEqV::Recomputed).0, &stored);
            let twice = max_difference(&logits(element, KEqV::Stored).0, &stored);
            let bound = (4.0 * twice).max(2e-3 * rounding);
            assert!(recomputed <= bound, "{}: {element:?}: {recomputed} against {twice}", case.name);
        }
    }
    assert!(tried >= 2, "two fixtures have such layers");
}

/// One K/V head of the published width, of which a quarter rotates, read by eight query heads.
const WIDTH: usize = 512;
const PAIRS: usize = 64;
const HEADS: usize = 8;

struct Model {
    isa: Isa,
    layout: KvLayout,
    rotary: Rotary,
    norm: RmsNorm,
}

impl Model {
    fn new(isa: Isa) -> Self {
        let inverse_frequencies: Vec<f32> = (0..PAIRS).map(|i| 1e6f32.powf(-(2.0 * i as f32) / WIDTH as f32)).collect();
        let weight: Vec<f32> = (0..WIDTH).map(|i| 0.02 + 0.001 * (i % 13) as f32).collect();
        let rotary = Rotary::new(inverse_frequencies.clone(), isa);
        let norm = RmsNorm::new(weight.clone(), 1e-6, isa);
        let store = StoreLayout { num_kv_heads: 1, head_dim: WIDTH, window: None, k_eq_v: Some(weight) };
        let layout = KvLayout { stores: vec![store], store_of_layer: vec![0], inverse_frequencies };
        Self { isa, layout, rotary, norm }
    }

    /// A layer's operations: rows of one projection become K and V, and queries attend. Rounds of the given lengths.
    fn attend(&self, options: &KvOptions, rounds: &[usize]) -> (Vec<Vec<f32>>, usize) {
        let mut cache = KvCache::new(self.layout.clone(), options, 8192, self.isa).expect("a cache");
        let mut rng = StdRng::seed_from_u64(5);
        let mut attended = Vec::new();
        for rows in rounds {
            let mut floats = |n: usize| (0..n).map(|_| rng.random_range(-1.0f32..1.0)).collect::<Vec<_>>();
            let x: Vec<(Vec<f32>, Vec<f32>)> = (0..*rows).map(|_| (floats(WIDTH), floats(HEADS * WIDTH))).collect();
            let mut round = cache.begin_round(*rows).expect("a round");
            let projected: Vec<f32> = x.iter().flat_map(|(x, _)| x.iter().copied()).collect();
            let projected = tensor(projected, (*rows, WIDTH)).expect("rows");
            let angles = self.rotary.angles((round.position()..).take(*rows));
            let k = angles.norm_and_rotate(&self.norm, &projected).expect("keys");
            let v = RmsNorm::weightless(WIDTH, 1e-6, self.isa).forward(&projected).expect("values");
            round.append(0, &k, &v.reshape((*rows, 1, WIDTH)).expect("values")).expect("an append");
            let q: Vec<f32> = x.iter().flat_map(|(_, q)| q.iter().copied()).collect();
            let q = tensor(q, (*rows, HEADS, WIDTH)).expect("queries");
            let y = round.attend(0, &q).expect("attention");
            attended.extend(F32View::new(&y).expect("floats").chunks_exact(HEADS * WIDTH).map(<[f32]>::to_vec));
            round.commit(*rows);
        }
        (attended, cache.bytes_per_token())
    }
}

fn relative_error(got: &[Vec<f32>], want: &[Vec<f32>]) -> f64 {
    let pairs = || got.iter().flatten().zip(want.iter().flatten()).map(|(a, b)| (f64::from(*a), f64::from(*b)));
    (pairs().map(|(a, b)| (a - b).powi(2)).sum::<f64>() / pairs().map(|(_, b)| b * b).sum::<f64>()).sqrt()
}

#[test]
fn quantized_values_serve_as_keys() {
    on_every_isa(quantized_values_serve_as_both);
}

fn quantized_values_serve_as_both(isa: Isa) {
    let model = Model::new(isa);
    // Page 1 is quantized as well. Every format on the widest instruction set, one with a mean and one without on the
    // others, whose attention to codes has the same bits.
    let rounds = [300, 1, 7, 100];
    let stride = if isa == Isa::best() { 1 } else { 6 };
    let f32 = options(ElementType::F32.into(), KEqV::Stored);
    let (exact, _) = model.attend(&f32, &rounds);
    for format in CodeFormat::ALL.map(KvFormat::from).into_iter().step_by(stride) {
        let run = |k_eq_v| model.attend(&options(format, k_eq_v), &rounds);
        let ((once, small), (twice, large)) = (run(KEqV::Recomputed), run(KEqV::Stored));
        let (once, twice) = (relative_error(&once, &exact), relative_error(&twice, &exact));
        println!("{format}: {small} of {large} bytes per token, errors {once:.1e} and {twice:.1e}");
        assert!(once < 1.3 * twice + 1e-3, "{format}: error {once} with shared codes, {twice} with two sets");
        assert!(8 * small < 6 * large, "{format}: {small} of {large} bytes per token");
    }
}

/// A row's bits depend only on its own keys, also with K = V.
#[test]
fn chunks_do_not_change_bits() {
    on_every_isa(bits_are_of_own_keys);
}

fn bits_are_of_own_keys(isa: Isa) {
    let model = Model::new(isa);
    for format in [KvFormat::Quantized(CodeFormat::Tqc5), KvFormat::Exact(ElementType::F16)] {
        let recomputed = options(format, KEqV::Recomputed);
        let (whole, _) = model.attend(&recomputed, &[300, 100]);
        let (chunks, _) = model.attend(&recomputed, &[100, 100, 99, 1, 1, 16, 7, 76]);
        assert!(bits(&whole.concat()) == bits(&chunks.concat()), "{format}: the bits differ");
    }
    // Angles are in pages as well: in f32 the keys of the second page are the stored ones, too.
    let [computed, stored] = [KEqV::Recomputed, KEqV::Stored]
        .map(|k_eq_v| model.attend(&options(ElementType::F32.into(), k_eq_v), &[120, 20, 1]).0);
    assert!(bits(&computed.concat()) == bits(&stored.concat()), "the keys of the second page");
}

/// 31B: ten full layers of four K/V heads of 512; 128 K tokens of `balanced` stay under 2.3 GiB.
#[test]
fn a_long_context_of_the_largest_variant_fits() {
    let mut layout = Model::new(Isa::best()).layout;
    layout.stores[0].num_kv_heads = 4;
    layout.stores = vec![layout.stores[0].clone(); 10];
    layout.store_of_layer = (0..10).collect();
    let bytes_at = |options: KvOptions| {
        let memory = Some(u64::MAX);
        let cache = KvCache::new(layout.clone(), &KvOptions { memory, ..options }, 1 << 17, Isa::best());
        cache.expect("a cache").bytes_at(1 << 17)
    };
    let balanced = bytes_at(KvPreset::Balanced.into());
    assert!(balanced * 10 < 23 << 30, "{balanced} bytes");
    let stored = bytes_at(KvOptions { k_eq_v: KEqV::Stored, ..KvPreset::Exact.into() });
    assert_eq!(stored, 10 << 30);
}
