//! Every K/V format: the same text with speculation, sizes as reported, and errors for unsupported combinations.

use std::path::Path;

use foretoken::kv::{
    CodeFormat, ExactZones, KvAccess, KvCache, KvFormat, KvLayout, KvOptions, KvPreset, LayerFormat, StoreLayout,
};
use foretoken::nn::tensor;
use foretoken::{
    ElementType, Engine, EngineOptions, GenerateOptions, Isa, SessionOptions, Speculation, SpeculationOptions,
};

use crate::cases::{self, on_every_isa, plain};

#[test]
fn text_is_the_same_with_speculation() {
    on_every_isa(speculation_keeps_the_text);
}

fn speculation_keeps_the_text(isa: Isa) {
    let demo = |part: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo").join(part);
    let options = EngineOptions::new(demo("target")).with_assistant(demo("assistant"));
    let engine = Engine::load(&EngineOptions { isa: Some(isa), ..options }).expect("the pair");
    // Every format and block size on the widest instruction set; fewer on the others, which are slower.
    let (max_tokens, block_sizes, stride) = match isa {
        isa if isa == Isa::best() => (150, &[2, 4, 8][..], 1),
        Isa::Scalar => (24, &[4][..], 4),
        _ => (60, &[4][..], 4),
    };
    // The first page is quantized at 148 positions, while the text is generated, and the second at 276.
    let prompt: Vec<u32> = (0..140).map(|i| 300 + i * 7919 % 3700).collect();
    for format in KvFormat::all().step_by(stride) {
        let generate = |block_size: usize| {
            let exact = ExactZones { head: 16, tail: 20, ..ExactZones::default() };
            let kv = KvOptions { key: format, value: format, exact, max_round_rows: 64, ..KvOptions::default() };
            let mut session = engine.session(&SessionOptions { kv }).expect("a session");
            let speculation = match block_size {
                1 => Speculation::Off,
                block_size => Speculation::With(SpeculationOptions::mtp(block_size)),
            };
            let options = GenerateOptions { speculation, ..plain(max_tokens) };
            let mut generation = session.generate(&prompt, &options).expect("a generation");
            let tokens: Vec<u32> = generation.by_ref().flat_map(|piece| piece.expect("a piece").tokens).collect();
            let drafted = generation.statistics().drafted;
            drop(generation);
            let held = session.kv().bytes();
            assert!(held <= session.kv().bytes_at(session.kv().len() + block_size), "{format}: {held} bytes are held");
            (tokens, drafted)
        };
        let (plain, _) = generate(1);
        for &block_size in block_sizes {
            let (tokens, drafted) = generate(block_size);
            assert_eq!(tokens, plain, "{format}, blocks of {block_size}");
            assert!(drafted > 0, "{format}, blocks of {block_size}: nothing is drafted");
        }
    }
}

/// Drafts over quantized K and V are about as often accepted as those over exact ones. (The two texts differ from some
/// token on, which alone changes the rate by a tenth or two.)
#[test]
fn drafts_over_quantized_rows_are_accepted() {
    let case = cases::demo();
    let pair = EngineOptions::new(case.path.join("target")).with_assistant(case.path.join("assistant"));
    let engine = Engine::load(&pair).expect("the pair");
    let text = "impl Iterator for Counter {\n    type Item = u32;\n\n    fn next(&mut self) -> Option<Self::Item> {\n";
    let text = engine.tokenizer().and_then(|tokenizer| tokenizer.encode(text)).expect("tokens");
    // Two pages, which are quantized but for their first 16 positions.
    let prompt = Vec::from_iter(text.iter().copied().cycle().take(276));
    let rate = |preset: KvPreset| {
        let exact = ExactZones { head: 16, tail: 20, ..ExactZones::default() };
        let kv = KvOptions { exact, max_round_rows: 64, ..preset.into() };
        let mut session = engine.session(&SessionOptions { kv }).expect("a session");
        let speculation = Speculation::With(SpeculationOptions::mtp(4));
        let options = GenerateOptions { speculation, ..plain(200) };
        let mut generation = session.generate(&prompt, &options).expect("a generation");
        generation.by_ref().for_each(|piece| drop(piece.expect("a piece")));
        generation.statistics().acceptance_rate()
    };
    let (exact, balanced) = (rate(KvPreset::Exact), rate(KvPreset::Balanced));
    println!("{exact:.3} accepted over f16, {balanced:.3} over 5-bit keys and 4-bit values");
    assert!(exact > 0.2 && balanced >= 0.6 * exact, "{balanced} instead of {exact}");
}

fn layout(head_dim: usize) -> KvLayout {
    let store = StoreLayout { num_kv_heads: 1, head_dim, window: None, k_eq_v: None };
    KvLayout { stores: vec![store], store_of_layer: vec![0], inverse_frequencies: Vec::new() }
}

fn cache(head_dim: usize, options: &KvOptions) -> foretoken::Result<KvCache> {
    KvCache::new(layout(head_dim), options, 4096, Isa::best())
}

#[test]
fn what_is_not_finite_is_named_by_layer_and_position() {
    for format in [KvFormat::Exact(ElementType::F16), CodeFormat::Tqc4.into()] {
        for poison in [f32::NAN, f32::INFINITY, 1e6] {
            let mut cache =
                cache(64, &KvOptions { key: format, value: format, ..KvOptions::default() }).expect("a cache");
            let mut rows = vec![0.5; 3 * 64];
            let good = tensor(rows.clone(), (3, 1, 64)).expect("rows");
            rows[2 * 64 + 7] = poison;
            let bad = tensor(rows, (3, 1, 64)).expect("rows");
            cache.begin_round(3).expect("a round").commit(0);
            let mut round = cache.begin_round(3).expect("a round");
            for (k, v, name) in [(&bad, &good, "K"), (&good, &bad, "V")] {
                let message = round.append(0, k, v).expect_err("no number").to_string();
                assert!(message.contains(&format!("{name} of layer 0 at position 2")), "{message}");
            }
        }
    }
}

#[test]
fn unsupported_formats_are_refused() {
    let coded = KvOptions { key: CodeFormat::Tqc4.into(), ..KvOptions::default() };
    let refusal = |head_dim, options: &KvOptions| cache(head_dim, options).expect_err("a refusal").to_string();
    assert!(refusal(72, &coded).contains("72"), "{}", refusal(72, &coded));
    assert!(cache(72, &KvOptions::default()).is_ok() && cache(48, &coded).is_ok());

    let long = KvOptions { max_context: Some(1 << 20), memory: Some(1 << 20), ..KvOptions::default() };
    let message = refusal(64, &long);
    let fits = (1 << 20) / (64 * 2 * 2);
    assert!(message.contains("1048576") && message.contains(&fits.to_string()), "{message}");
    assert_eq!(
        cache(64, &KvOptions { memory: Some(1 << 18), ..KvOptions::default() }).expect("a cache").max_context(),
        1024
    );

    let exact = ExactZones { head: 129, ..ExactZones::default() };
    assert!(refusal(64, &KvOptions { exact, ..coded.clone() }).contains("129"));
    let layers = vec![LayerFormat { layer: 3, key: ElementType::F16.into(), value: ElementType::F16.into() }];
    assert!(refusal(64, &KvOptions { layers, ..coded }).contains("layer 3"));
}

#[test]
fn names_are_those_of_llama_cpp_and_say_what_is_wrong() {
    for format in KvFormat::all() {
        assert_eq!(format.to_string().to_uppercase().parse::<KvFormat>().expect("a format"), format);
    }
    for (name, format) in [
        ("turbo2_0", CodeFormat::Turbo2),
        ("turbo3_0", CodeFormat::Turbo3),
        ("turbo4_0", CodeFormat::Turbo4),
        ("tbq4", CodeFormat::Turbo4),
        ("tbq4_0", CodeFormat::Turbo4),
    ] {
        assert_eq!(name.parse::<KvFormat>().expect(name), KvFormat::from(format));
    }
    for (name, why) in
        [("tbq3", "turbo3"), ("tbq3_0", "turbo3"), ("turbo4-legacy", "turbo4"), ("q9", "tqc5"), ("", "f16")]
    {
        let message = name.parse::<KvFormat>().expect_err(name).to_string();
        assert!(message.contains(why) && !message.contains('\n'), "{message}");
    }
    assert!("best".parse::<KvPreset>().expect_err("no preset").to_string().contains("balanced"));
}

/// Bytes per position of the full layers of every variant: documented values equal what a cache
/// allocates. DESIGN.md has this table.
#[test]
fn every_variant_holds_what_its_preset_promises() {
    let variants: [(&str, usize, usize, bool, [usize; 4]); 5] = [
        // full layers that compute K and V, their heads of 512, K = V; exact, quality, balanced, compact
        ("E2B", 3, 1, false, [6144, 2184, 1800, 1608]),
        ("E4B", 4, 2, false, [16384, 5824, 4800, 4288]),
        ("12B", 8, 1, true, [8704, 4000, 3360, 2720]),
        ("26B-A4B", 5, 2, true, [10752, 5000, 4200, 3400]),
        ("31B", 10, 4, true, [41472, 20000, 16800, 13600]),
    ];
    let mut noise = (0..).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 8e6 - 1.0);
    for (name, layers, heads, k_eq_v, want) in variants {
        let store =
            StoreLayout { num_kv_heads: heads, head_dim: 512, window: None, k_eq_v: k_eq_v.then(|| vec![1.0; 512]) };
        let inverse_frequencies = if k_eq_v { vec![1.0; 64] } else { Vec::new() };
        for (preset, want) in KvPreset::ALL.into_iter().zip(want) {
            let layout = KvLayout {
                stores: vec![store.clone(); layers],
                store_of_layer: (0..layers).collect(),
                inverse_frequencies: inverse_frequencies.clone(),
            };
            let mut cache = KvCache::new(layout, &preset.into(), 4096, Isa::best()).expect("a cache");
            let mut held = Vec::new();
            // Past the exact zones of every preset.
            for _ in 0..8 {
                let mut round = cache.begin_round(256).expect("a round");
                let rows = tensor(noise.by_ref().take(256 * heads * 512).collect(), (256, heads, 512)).expect("rows");
                for layer in 0..layers {
                    round.append(layer, &rows, &rows).expect("rows that fit");
                }
                round.commit(256);
                held.push(cache.bytes());
            }
            let grown = (held[7] - held[6]) / 256;
            assert_eq!((grown, cache.bytes_per_token()), (want, want), "{name}, {}", preset.name());
        }
    }
}
