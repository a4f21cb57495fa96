//! Penalties and DRY: their effect on a row, and that drafts do not change a text under them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use foretoken::sampler::{Dry, Penalties, Sampler, Xtc};
use foretoken::speculative::{BlockSize, Drafters};
use foretoken::tokenizer::Tokenizer;
use foretoken::{
    DraftPipeline, Engine, EngineOptions, GenerateOptions, Isa, LogitsProcessor, Result, Sampling, SessionOptions,
    Speculation, SpeculationOptions,
};

use crate::cases;

fn penalties(repeat: f32, frequency: f32, presence: f32, last_n: Option<usize>) -> Sampling {
    Sampling { penalties: Penalties { repeat, frequency, presence, last_n }, ..Sampling::default() }
}

fn dry(allowed_length: usize, last_n: Option<usize>, breakers: &[u32]) -> Sampling {
    let breakers = breakers.iter().copied().collect();
    let dry = Dry { multiplier: 1.0, base: 2.0, allowed_length, last_n, breakers };
    Sampling { dry: Some(dry), ..Sampling::default() }
}

/// The row of ten logits after `tokens`.
fn row(sampling: &Sampling, tokens: &[u32], logits: [f32; 10]) -> [f32; 10] {
    let mut row = logits;
    let sampler = Sampler::new(Isa::best(), sampling.clone(), Vec::new()).expect("parameters in range");
    sampler.penalize(tokens, &mut row).expect("no error");
    row
}

#[test]
fn penalties_are_the_definitions() {
    let logits: [f32; 10] = [4.0, -4.0, 0.0, 2.0, -1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
    let tokens = [9, 0, 1, 0, 2];
    let with = |changed: &[(usize, f32)]| {
        let mut row = logits;
        changed.iter().for_each(|(i, logit)| row[*i] = *logit);
        row
    };
    for (sampling, want) in [
        (penalties(1.0, 0.0, 0.0, None), with(&[])),
        (penalties(2.0, 0.0, 0.0, None), with(&[(0, 2.0), (1, -8.0), (2, 0.0), (9, 0.5)])),
        (penalties(2.0, 0.0, 0.0, Some(4)), with(&[(0, 2.0), (1, -8.0), (2, 0.0)])),
        (penalties(2.0, 0.0, 0.0, Some(0)), with(&[])),
        (penalties(1.0, 0.5, 0.0, None), with(&[(0, 3.0), (1, -4.5), (2, -0.5), (9, 0.5)])),
        (penalties(1.0, 0.0, 0.5, None), with(&[(0, 3.5), (1, -4.5), (2, -0.5), (9, 0.5)])),
        (penalties(2.0, 0.5, 0.25, Some(4)), with(&[(0, 0.75), (1, -8.75), (2, -0.75)])),
        (penalties(1.0, -1.0, 0.0, Some(1)), with(&[(2, 1.0)])),
    ] {
        assert_eq!(row(&sampling, &tokens, logits), want, "{:?}", sampling.penalties);
        assert_eq!(row(&sampling, &[], logits), logits, "nothing was there before");
    }
    // A history that is too long to be sorted.
    let long = [&tokens.repeat(400)[..], &[99]].concat();
    let want = with(&[(0, 2.0 - 400.25), (1, -8.0 - 200.25), (2, -200.25), (9, 0.5 - 200.25)]);
    assert_eq!(row(&penalties(2.0, 0.5, 0.25, None), &long, logits), want);
    // Tokens of another vocabulary have no effect, and excluded ones stay excluded.
    let mut excluded = logits;
    excluded[0] = f32::NEG_INFINITY;
    assert_eq!(row(&penalties(2.0, 1.0, 1.0, None), &[0, 99], excluded), excluded);
}

/// Brute force over every occurrence and every length.
fn dry_by_definition(dry: &Dry, tokens: &[u32]) -> BTreeMap<u32, f32> {
    let tokens = &tokens[tokens.len().saturating_sub(dry.last_n.unwrap_or(usize::MAX))..];
    let mut lost = BTreeMap::new();
    for next in (1..tokens.len()).filter(|next| !dry.breakers.ids().contains(&tokens[*next])) {
        for length in dry.allowed_length..=next {
            let (suffix, earlier) = (&tokens[tokens.len() - length..], &tokens[next - length..next]);
            if suffix == earlier && !suffix.iter().any(|token| dry.breakers.ids().contains(token)) {
                let penalty = dry.multiplier * dry.base.powi((length - dry.allowed_length) as i32);
                let own: &mut f32 = lost.entry(tokens[next]).or_default();
                *own = own.max(penalty);
            }
        }
    }
    lost
}

#[test]
fn dry_is_the_definition() {
    // After "1 2 3 4 1 2 3" a 4 would be the fourth token of a repetition.
    assert_eq!(row(&dry(2, None, &[]), &[1, 2, 3, 4, 1, 2, 3], [0.0; 10])[4], -2.0);
    assert_eq!(row(&dry(3, None, &[]), &[1, 2, 3, 4, 1, 2, 3], [0.0; 10])[4], -1.0);
    assert_eq!(row(&dry(4, None, &[]), &[1, 2, 3, 4, 1, 2, 3], [0.0; 10]), [0.0; 10]);
    assert_eq!(row(&dry(2, Some(6), &[]), &[1, 2, 3, 4, 1, 2, 3], [0.0; 10])[4], -1.0);
    assert_eq!(row(&dry(2, None, &[1]), &[1, 2, 3, 4, 1, 2, 3], [0.0; 10])[4], -1.0);
    assert_eq!(row(&dry(2, None, &[2]), &[1, 2, 3, 4, 1, 2, 3], [0.0; 10]), [0.0; 10]);
    // A breaker extends no repetition.
    assert_eq!(row(&dry(2, None, &[4]), &[1, 2, 3, 4, 1, 2, 3], [0.0; 10]), [0.0; 10]);
    let mut state = 1_u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut penalized = 0;
    for case in 0..2000 {
        let (length, alphabet) = (random(40) as usize, 1 + random(4));
        let tokens: Vec<u32> = (0..length).map(|_| random(alphabet) as u32).collect();
        let last_n = (random(2) == 0).then(|| random(30) as usize);
        // None, one or two, in any order.
        let breakers: Vec<u32> = (0..random(3)).map(|_| random(6) as u32).collect();
        let sampling = dry(1 + random(4) as usize, last_n, &breakers);
        let got = row(&sampling, &tokens, [0.0; 10]);
        let want = dry_by_definition(sampling.dry.as_ref().expect("DRY"), &tokens);
        for (token, logit) in (0..).zip(got) {
            let lost = want.get(&token).copied().unwrap_or_default();
            assert_eq!(logit, -lost, "case {case}: {sampling:?} after {tokens:?}: token {token}");
            penalized += usize::from(lost > 0.0);
        }
    }
    assert!(penalized > 1000, "{penalized} tokens were penalized");
    // A repetition of any length gives a finite logit.
    let row = row(&dry(1, None, &[]), &[7; 5000], [0.0; 10]);
    assert!(row[7] < -1e29 && row[7].is_finite(), "{row:?}");
}

#[test]
fn parameters_out_of_range_are_refused() {
    let default = Sampling::default;
    let with_dry = |change: &dyn Fn(&mut Dry)| {
        let mut dry = Dry::default();
        change(&mut dry);
        Sampling { dry: Some(dry), ..default() }
    };
    for (sampling, about) in [
        (penalties(0.0, 0.0, 0.0, None), "penalties.repeat"),
        (penalties(f32::NAN, 0.0, 0.0, None), "penalties.repeat"),
        (penalties(1.0, f32::INFINITY, 0.0, None), "penalties.frequency"),
        (penalties(1.0, 0.0, -101.0, None), "penalties.presence"),
        (with_dry(&|dry| dry.multiplier = -1.0), "dry.multiplier"),
        (with_dry(&|dry| dry.base = 0.5), "dry.base"),
        (with_dry(&|dry| dry.base = f32::NAN), "dry.base"),
        (with_dry(&|dry| dry.allowed_length = 0), "dry.allowed_length"),
        (Sampling { top_n_sigma: Some(0.0), ..default() }, "top_n_sigma"),
        (Sampling { top_n_sigma: Some(f32::NAN), ..default() }, "top_n_sigma"),
        (Sampling { top_n_sigma: Some(f32::INFINITY), ..default() }, "top_n_sigma"),
        (Sampling { typical_p: 0.0, ..default() }, "typical_p"),
        (Sampling { typical_p: 1.5, ..default() }, "typical_p"),
        (Sampling { xtc: Some(Xtc { probability: 1.1, ..Xtc::default() }), ..default() }, "xtc.probability"),
        (Sampling { xtc: Some(Xtc { threshold: 0.6, ..Xtc::default() }), ..default() }, "xtc.threshold"),
        (Sampling { xtc: Some(Xtc { threshold: f32::NAN, ..Xtc::default() }), ..default() }, "xtc.threshold"),
    ] {
        let error = Sampler::new(Isa::best(), sampling, Vec::new()).expect_err(about).to_string();
        assert!(error.starts_with(about) && error.lines().count() == 1, "{error:?} is not about {about}");
    }
}

/// The ends of ranges are in them, and what is right behind is not.
#[test]
fn parameters_at_the_ends_of_their_ranges_are_accepted() {
    let dry = |multiplier, base| Sampling {
        dry: Some(Dry { multiplier, base, allowed_length: 1, ..Dry::default() }),
        ..Sampling::default()
    };
    let filters = |top_p, min_p, typical_p, xtc: [f32; 2]| Sampling {
        top_k: Some(1),
        typical_p,
        top_p,
        min_p,
        xtc: Some(Xtc { probability: xtc[0], threshold: xtc[1] }),
        ..Sampling::default()
    };
    for (sampling, is_accepted) in [
        (penalties(0.1, 100.0, -100.0, None), true),
        (penalties(10.0, -100.0, 100.0, Some(0)), true),
        (penalties(0.099, 0.0, 0.0, None), false),
        (penalties(10.01, 0.0, 0.0, None), false),
        (penalties(1.0, 100.1, 0.0, None), false),
        (penalties(1.0, 0.0, 100.1, None), false),
        (dry(0.0, 1.0), true),
        (dry(100.0, 16.0), true),
        (dry(100.1, 2.0), false),
        (dry(1.0, 16.01), false),
        (dry(1.0, 0.999), false),
        (filters(1.0, 0.0, 1.0, [0.0, 0.0]), true),
        (filters(f32::MIN_POSITIVE, 1.0, f32::MIN_POSITIVE, [1.0, 0.5]), true),
        (filters(0.0, 0.0, 1.0, [0.0, 0.0]), false),
        (filters(1.0, 1.001, 1.0, [0.0, 0.0]), false),
        (filters(1.0, 0.0, 1.0, [1.001, 0.0]), false),
        (filters(1.0, 0.0, 1.0, [0.0, 0.501]), false),
    ] {
        assert_eq!(sampling.check().is_ok(), is_accepted, "{sampling:?}");
    }
}

/// All drafters, alone and together.
const DRAFTERS: [&str; 9] = [
    "mtp",
    "draft-model",
    "ngram-simple:n=2:m=6",
    "ngram-map-k:n=2:m=6",
    "ngram-map-k4v:n=2:m=3",
    "ngram-mod:n=2:min=1",
    "ngram-cache",
    "ngram-map-k4v:n=2:m=2,ngram-simple:n=1:m=7,mtp",
    "auto",
];

struct Pair {
    name: String,
    engine: Engine,
    prompt: Vec<u32>,
}

fn pairs() -> Vec<Pair> {
    let pair = |name: String, model: PathBuf, assistant: PathBuf, prompt: Option<Vec<u32>>| {
        let draft_model = Some(model.clone());
        let options = EngineOptions { draft_model, threads: Some(1), ..EngineOptions::new(model) };
        let engine = Engine::load(&options.with_assistant(assistant)).expect("a pair");
        // A repetitive prompt, so that prompt lookup drafts.
        let prompt = prompt.unwrap_or_else(|| {
            let tokenizer = engine.tokenizer().expect("a tokenizer");
            tokenizer.encode("fn a() -> u32 { 1 }\nfn b() -> u32 { 1 }\nfn c() ->").expect("tokens")
        });
        Pair { name, engine, prompt }
    };
    let fixtures = cases::all().into_iter().filter_map(|case| {
        let prompt = case.ids("input_ids").repeat(2);
        Some(pair(case.name.clone(), case.path.join("target"), case.assistant_path()?, Some(prompt)))
    });
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo");
    fixtures.chain([pair("demo".into(), demo.join("target"), demo.join("assistant"), None)]).collect()
}

fn samplings() -> [Sampling; 5] {
    let dry = Dry { multiplier: 2.0, allowed_length: 1, ..Dry::default() };
    [
        penalties(1.3, 0.0, 0.0, Some(64)),
        penalties(1.0, 0.7, 0.4, None),
        penalties(1.3, 0.5, 0.2, Some(16)),
        Sampling { dry: Some(dry.clone()), ..Sampling::default() },
        Sampling { dry: Some(Dry { last_n: Some(24), ..dry }), ..penalties(1.2, 0.1, 0.0, Some(16)) },
    ]
}

fn run(pair: &Pair, options: &GenerateOptions) -> (Vec<u32>, usize) {
    let mut session = pair.engine.session(&SessionOptions::default()).expect("a session");
    let mut generation = session.generate(&pair.prompt, options).expect("a generation");
    let ids = generation.by_ref().flat_map(|piece| piece.expect("a piece").tokens).collect();
    (ids, generation.statistics().drafted)
}

fn options(sampling: &Sampling, speculation: Speculation) -> GenerateOptions {
    GenerateOptions { sampling: sampling.clone(), speculation, ..cases::plain(40) }
}

/// Greedy ids under penalties are those without drafts, with any drafter: row `i` of a verification
/// sees the drafts before it.
#[test]
fn drafts_do_not_change_penalized_texts() {
    for pair in pairs() {
        let (free, _) = run(&pair, &options(&Sampling::default(), Speculation::Off));
        let mut drafted = [0; DRAFTERS.len()];
        for sampling in samplings() {
            let (want, _) = run(&pair, &options(&sampling, Speculation::Off));
            assert_ne!(want, free, "{}: {sampling:?} changes nothing", pair.name);
            for (of, drafters) in DRAFTERS.iter().enumerate() {
                let drafters: Drafters = drafters.parse().expect("drafters");
                let with = SpeculationOptions {
                    block: BlockSize::Fixed(4),
                    pipeline: if of % 2 == 0 { DraftPipeline::InTurn } else { DraftPipeline::Ahead },
                    drafters,
                    ..SpeculationOptions::default()
                };
                let (got, count) = run(&pair, &options(&sampling, Speculation::With(with)));
                assert_eq!(got, want, "{}: {sampling:?}, {}", pair.name, DRAFTERS[of]);
                drafted[of] += count;
            }
        }
        println!("{}: drafted {drafted:?}", pair.name);
        // Prompt lookup finds little in texts that may not repeat.
        assert!(drafted[0] > 0 && drafted[1] > 0, "{}: {drafted:?}", pair.name);
    }
}

/// The same penalties, written as a processor.
#[derive(Debug)]
struct Own(Penalties);

impl LogitsProcessor for Own {
    fn process(&self, tokens: &[u32], logits: &mut [f32]) -> Result<()> {
        let first = tokens.len().saturating_sub(self.0.last_n.unwrap_or(usize::MAX));
        for (id, logit) in (0..).zip(logits) {
            let count = tokens[first..].iter().filter(|token| **token == id).count();
            if count > 0 {
                *logit = if *logit > 0.0 { *logit / self.0.repeat } else { *logit * self.0.repeat };
                *logit -= count as f32 * self.0.frequency + self.0.presence;
            }
        }
        Ok(())
    }
}

/// The history is prompt, text and drafts: a processor that receives all of them computes the same text.
#[test]
fn the_history_is_the_whole_sequence() {
    for pair in pairs() {
        for sampling in &samplings()[..3] {
            let (got, _) = run(&pair, &options(sampling, Speculation::Auto));
            let own = Arc::new(Own(sampling.penalties)) as Arc<dyn LogitsProcessor>;
            let plain = options(&Sampling::default(), Speculation::Off);
            let (want, _) = run(&pair, &GenerateOptions { logits_processor: Some(own), ..plain });
            assert_eq!(got, want, "{}: {sampling:?}", pair.name);
        }
    }
}

/// Breakers are found by the text of tokens.
#[test]
fn tokens_with_a_string() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target/tokenizer.json");
    let tokenizer = Tokenizer::read(path, 4096).expect("the demo's");
    // "A" is in the names of byte tokens (`<0x0A>`), and not in their text.
    for part in ["\n", ":", " fn", "\"", " ", "A"] {
        let ids = tokenizer.ids_with(part);
        let spells = |id: u32| tokenizer.token_bytes(id).windows(part.len()).any(|bytes| bytes == part.as_bytes());
        assert!(!ids.is_empty() && ids.is_sorted(), "{part:?}");
        assert_eq!(ids, (0..4096).filter(|id| spells(*id)).collect::<Vec<_>>(), "{part:?}");
    }
    let [line_end, half] = ["<0x0A>", "<0xE2>"].map(|token| tokenizer.id(token).expect("a byte token"));
    assert!(tokenizer.ids_with("\n").contains(&line_end) && !tokenizer.ids_with("E").contains(&half));
    assert!(tokenizer.ids_with("").is_empty());
}
