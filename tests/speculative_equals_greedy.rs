//! Speculation changes the speed and never the text: greedy ids, and those sampled with a seed, are the same with drafts
//! and without, whatever ends the text, at any position of the sliding windows and in every cache format.

mod cases;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use cases::{on_every_isa, plain};
use foretoken::checkpoint::Checkpoint;
use foretoken::kv::KvOptions;
use foretoken::speculative::{BlockSize, DraftSampling, DrafterKind, Drafters, MtpPreset};
use foretoken::{
    DraftPipeline, ElementType, Engine, EngineOptions, FinishReason, GenerateOptions, Isa, Piece, Sampling, Scheduler,
    SchedulerOptions, Session, SessionOptions, Speculation, SpeculationOptions, Statistics,
};

/// Draft block sizes that are compared with plain decoding: all on the widest instruction set.
fn block_sizes(isa: Isa) -> &'static [usize] {
    if isa == Isa::best() { &[1, 2, 3, 4, 5, 6, 7, 8] } else { &[2, 5, 8] }
}

/// A target with its assistant, a prompt, and the instruction set of their engines.
struct Pair {
    name: String,
    isa: Isa,
    model: PathBuf,
    assistant: Option<PathBuf>,
    prompt: Vec<u32>,
}

impl Pair {
    fn engine(&self, threads: usize) -> Engine {
        // The target is its own draft model: the only one with the same vocabulary here.
        let draft_model = Some(self.model.clone());
        let (assistant, threads, isa) = (self.assistant.clone(), Some(threads), Some(self.isa));
        let options = EngineOptions { threads, isa, assistant, draft_model, ..EngineOptions::new(&self.model) };
        Engine::load(&options).expect("an engine")
    }
}

/// Every fixture case that has an assistant or a NextN head, of every family.
fn fixtures(isa: Isa) -> Vec<Pair> {
    let pair = |case: cases::Case| Pair {
        name: case.name.clone(),
        isa,
        model: case.path.join("target"),
        assistant: case.assistant_path(),
        prompt: case.ids("input_ids"),
    };
    let cases = cases::all().into_iter().chain(cases::of(cases::QWEN35));
    let pairs: Vec<_> = cases.filter(cases::Case::drafts).map(pair).collect();
    assert!(pairs.iter().any(|pair| pair.assistant.is_some()), "no fixture has an assistant");
    pairs
}

fn demo_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo")
}

fn demo_prompts() -> Vec<String> {
    let text = std::fs::read_to_string(demo_path().join("prompts.json")).expect("prompts.json");
    serde_json::from_str(&text).expect("a list of prompts")
}

/// The demo pair, whose drafts are mostly accepted; the fixtures' random weights mostly reject.
fn demo(prompt: &str, isa: Isa) -> Pair {
    let (model, assistant) = (demo_path().join("target"), Some(demo_path().join("assistant")));
    let tokenizer = Checkpoint::open(&model).and_then(|checkpoint| checkpoint.tokenizer(4096));
    let prompt = tokenizer.expect("readable").expect("a tokenizer").encode(prompt).expect("tokens");
    Pair { name: "demo".into(), isa, model, assistant, prompt }
}

/// The demo pair on the narrowest and the widest vectors: its texts take long, and the fixtures' run on every instruction
/// set.
fn demo_at_the_ends(prompt: &str, isa: Isa) -> Option<Pair> {
    let narrowest = Isa::available().find(|isa| *isa != Isa::Scalar);
    (narrowest == Some(isa) || isa == Isa::best()).then(|| demo(prompt, isa))
}

/// The fixtures, and the demo pair after `tokens` of `prompt`, on the widest instruction set: for
/// ends of texts, which do not depend on arithmetic.
fn widest(prompt: &str, tokens: usize) -> Vec<Pair> {
    let isa = Isa::best();
    let mut demo = demo(prompt, isa);
    demo.prompt.truncate(tokens);
    fixtures(isa).into_iter().chain([demo]).collect()
}

/// A cache of `rows` with minimum ring sizes, so that they wrap early.
fn session_options(rows: ElementType) -> SessionOptions {
    let mut options = SessionOptions::default();
    (options.kv.key, options.kv.value, options.kv.max_round_rows) = (rows.into(), rows.into(), 8);
    options
}

fn speculative(block_size: usize, options: &GenerateOptions) -> GenerateOptions {
    let speculation = Speculation::With(SpeculationOptions::mtp(block_size));
    GenerateOptions { speculation, ..options.clone() }
}

/// Output of a generation.
struct Run {
    ids: Vec<u32>,
    text: String,
    finish: Option<FinishReason>,
    statistics: Statistics,
}

/// Generates on `session`, and drops the generation after `pieces` pieces.
fn run_pieces(session: &mut Session, prompt: &[u32], options: &GenerateOptions, pieces: usize) -> Run {
    let mut generation = session.generate(prompt, options).expect("a generation");
    let pieces: Vec<Piece> = generation.by_ref().take(pieces).map(|piece| piece.expect("a piece")).collect();
    if options.logprobs.is_some() {
        let of_piece = |piece: &Piece| piece.logprobs.iter().map(|of| of.token).collect::<Vec<_>>();
        assert!(pieces.iter().all(|piece| of_piece(piece) == piece.tokens), "log-probabilities of other tokens");
    }
    Run {
        ids: pieces.iter().flat_map(|piece| piece.tokens.clone()).collect(),
        text: pieces.iter().map(|piece| piece.text.as_str()).collect(),
        finish: generation.finish_reason(),
        statistics: generation.statistics().clone(),
    }
}

fn run(engine: &Engine, rows: ElementType, prompt: &[u32], options: &GenerateOptions) -> Run {
    let mut session = engine.session(&session_options(rows)).expect("a session");
    run_pieces(&mut session, prompt, options, usize::MAX)
}

/// The greedy text with every block size, for a cache's element type, threads and tokens of each case.
fn same_ids(pair: &Pair, cases: &[(ElementType, usize, usize)]) {
    let engines = [1, 2].map(|threads| pair.engine(threads));
    for &(rows, threads, tokens) in cases {
        let options = plain(tokens);
        // The reference is always the simplest: one thread.
        let want = run(&engines[0], rows, &pair.prompt, &options);
        assert_eq!((want.ids.len(), want.finish), (tokens, Some(FinishReason::MaxTokens)), "{}", pair.name);
        assert_eq!(want.statistics.drafted, 0, "plain decoding drafts nothing");
        for &block_size in block_sizes(pair.isa) {
            let got = run(&engines[threads - 1], rows, &pair.prompt, &speculative(block_size, &options));
            let what = format!("{}: B = {block_size}, {rows:?}, {threads} threads", pair.name);
            assert_eq!(got.ids, want.ids, "{what}");
            assert_eq!(got.finish, want.finish, "{what}");
            assert_eq!(got.text, want.text, "{what}");
            assert_eq!(got.statistics.drafted > 0, block_size > 1, "{what}: {:?}", got.statistics);
        }
    }
}

/// 120 tokens after 24 to 40 of a prompt: fifteen windows of 8, and more positions than a ring's single page has.
#[test]
fn fixtures_across_the_windows_wrap() {
    on_every_isa(|isa| {
        // Where a ring wraps does not depend on the instruction set.
        let f16_tokens = if isa == Isa::best() { 120 } else { 40 };
        let cases = [(ElementType::F32, 2, 120), (ElementType::F16, 1, f16_tokens), (ElementType::Bf16, 2, 40)];
        fixtures(isa).iter().for_each(|pair| same_ids(pair, &cases));
    });
}

/// More than two windows of 128 beyond a prompt that fills one, on a ring of two pages.
#[test]
fn demo_across_the_windows_wrap() {
    on_every_isa(|isa| {
        if let Some(pair) = demo_at_the_ends(&demo_prompts()[0], isa) {
            same_ids(&pair, &[(ElementType::F16, 2, 300)]);
        }
    });
}

/// Keys and values may be of different types, and drafts drawn at temperature 0 are the greedy ones.
#[test]
fn demo_with_mixed_types_and_drawn_drafts() {
    on_every_isa(mixed_types_and_drawn_drafts);
}

fn mixed_types_and_drawn_drafts(isa: Isa) {
    let Some(pair) = demo_at_the_ends(&demo_prompts()[2], isa) else { return };
    let engine = pair.engine(2);
    let mut mixed = session_options(ElementType::F32);
    mixed.kv.value = ElementType::Bf16.into();
    let mut session = engine.session(&mixed).expect("a session");
    let want = run_pieces(&mut session, &pair.prompt, &plain(40), usize::MAX);
    for drafts in [DraftSampling::Greedy, DraftSampling::Sampled] {
        let speculation = Speculation::With(SpeculationOptions { drafts, ..SpeculationOptions::mtp(5) });
        let options = GenerateOptions { speculation, ..plain(40) };
        let mut session = engine.session(&mixed).expect("a session");
        let got = run_pieces(&mut session, &pair.prompt, &options, usize::MAX);
        assert_eq!(got.ids, want.ids, "{drafts:?}");
        assert!(got.statistics.accepted > 0, "{drafts:?}: {:?}", got.statistics);
    }
}

/// Every drafter alone, and mixtures, with keys short enough to match.
const DRAFTERS: [&str; 11] = [
    "mtp",
    "draft-model",
    "ngram-simple:n=2:m=6",
    "ngram-map-k:n=2:m=6",
    "ngram-map-k4v:n=2:m=3",
    "ngram-mod:n=2:min=1",
    "ngram-cache",
    "ngram-mod:n=2:min=1,mtp",
    "ngram-map-k4v:n=2:m=2,ngram-simple:n=1:m=7,draft-model",
    "mtp,ngram-map-k:n=1",
    "auto",
];

/// Every way to draft: lists or best of several drafters, block sizes, planners, and pipelines.
fn ways() -> Vec<(String, SpeculationOptions)> {
    let blocks = [
        BlockSize::Measured,
        BlockSize::Fixed(1),
        BlockSize::Fixed(3),
        BlockSize::Fixed(8),
        BlockSize::Preset(MtpPreset::Throughput),
    ];
    let mut ways = Vec::new();
    for text in DRAFTERS {
        let listed: Drafters = text.parse().expect("drafters");
        let mut orders = vec![listed.clone()];
        if let Drafters::Priority(list) = &listed
            && list.len() > 1
        {
            orders.push(Drafters::Best(list.clone()));
        }
        for (drafters, block) in orders.iter().flat_map(|drafters| blocks.map(|block| (drafters, block))) {
            for (pipeline, skip_streak) in
                [(DraftPipeline::InTurn, None), (DraftPipeline::Ahead, None), (DraftPipeline::Ahead, Some(2))]
            {
                let options = SpeculationOptions {
                    drafters: drafters.clone(),
                    block,
                    pipeline,
                    skip_streak,
                    ..Default::default()
                };
                ways.push((format!("{text}, {block:?}, {pipeline:?}, streak {skip_streak:?}"), options));
            }
        }
    }
    ways
}

/// The greedy text or that of a seed, in turn, in every `stride`th way from `first` on. A list has fifteen ways: block
/// sizes by pipelines. With a stride that shares no factor with them, all of these and all lists occur.
fn same_ids_in_every_way(pair: &Pair, tokens: usize, first: usize, stride: usize) {
    let engine = pair.engine(2);
    let sampling = Sampling { temperature: 0.7, top_k: Some(40), ..Sampling::default() };
    let texts = [plain(tokens), GenerateOptions { sampling, seed: 3, ..plain(tokens) }].map(|options| {
        let want = run(&engine, ElementType::F16, &pair.prompt, &options);
        (options, want)
    });
    assert_ne!(texts[0].1.ids, texts[1].1.ids, "{}: the sampled text is the greedy one", pair.name);
    let mut accepted = std::collections::BTreeMap::new();
    let ways = ways().into_iter().skip(first).step_by(stride);
    for ((way, speculation), (options, want)) in ways.zip(texts.iter().cycle()) {
        let options = GenerateOptions { speculation: Speculation::With(speculation), ..options.clone() };
        let got = run(&engine, ElementType::F16, &pair.prompt, &options);
        assert_eq!(got.ids, want.ids, "{}: {way}", pair.name);
        assert_eq!(got.text, want.text, "{}: {way}", pair.name);
        assert_eq!(got.finish, want.finish, "{}: {way}", pair.name);
        let s = &got.statistics.speculation;
        assert_eq!(s.drafters.iter().map(|d| d.accepted).sum::<usize>(), got.statistics.accepted, "{way}");
        assert_eq!(s.rows.iter().sum::<usize>(), got.statistics.rounds, "{way}");
        assert_eq!(s.passes_saved + got.statistics.rounds + 1, tokens, "{way}");
        for drafter in &s.drafters {
            // The target as its own drafter is always right, if its drafter cache is correct.
            let infallible = drafter.kind == Some(DrafterKind::DraftModel) && options.sampling.temperature == 0.0;
            assert!(!infallible || drafter.accepted == drafter.drafted, "{}: {way}: {drafter:?}", pair.name);
            *accepted.entry(drafter.kind).or_insert(0) += drafter.accepted;
        }
    }
    println!("{}: {accepted:?} accepted", pair.name);
    // A drafter that never drafted would prove nothing.
    assert!(pair.name != "demo" || accepted.len() == 7 && accepted.values().all(|n| *n > 0), "{accepted:?}");
}

/// On the widest instruction set, every way with one of four successive fixtures.
#[test]
fn fixtures_in_every_way() {
    on_every_isa(|isa| {
        let stride = if isa == Isa::best() { 4 } else { 14 };
        fixtures(isa).iter().enumerate().for_each(|(first, pair)| same_ids_in_every_way(pair, 40, first, stride));
    });
}

/// Repetitive code, so that prompt lookup finds drafts.
#[test]
fn demo_in_every_way() {
    on_every_isa(|isa| {
        if let Some(pair) = demo_at_the_ends(&demo_prompts()[1], isa) {
            same_ids_in_every_way(&pair, 64, 0, if isa == Isa::best() { 4 } else { 7 });
        }
    });
}

/// Qwen3.5's demo pair after held-out prompts: the tokenizer's ids and the greedy text are the reference's, up to the
/// first indecisive margin; speculation writes the same text, and most drafts with two per round are accepted.
#[test]
fn qwen_demo_is_the_references() {
    const TOKENS: usize = 64;
    on_every_isa(|isa| {
        // Two on narrower instruction sets, which are slower.
        let prompts = if isa == Isa::best() { 6 } else { 2 };
        let case = cases::demo_qwen();
        let model = case.path.clone();
        let mut pair = Pair { name: case.name.clone(), isa, model, assistant: None, prompt: Vec::new() };
        let engine = pair.engine(1);
        let (mut decided, mut drafted, mut accepted) = (0, 0, 0);
        for (n, prompt) in demo_prompts().iter().take(prompts).enumerate() {
            pair.prompt = engine.tokenizer().expect("a tokenizer").encode(prompt).expect("ids");
            assert_eq!(pair.prompt, case.ids(&format!("input_ids.{n}")), "prompt {n}");
            let plain = run(&engine, ElementType::F32, &pair.prompt, &plain(TOKENS));
            let want = case.ids(&format!("greedy_ids.{n}"));
            let margins = case.floats(&format!("margins.{n}"));
            for (i, ((got, want), margin)) in plain.ids.iter().zip(want).zip(margins).enumerate() {
                if !cases::same_id(*got, want, margin, 1e-3, &format!("prompt {n}, token {i}")) {
                    break; // another token from here on is another text
                }
                decided += 1;
            }
            let got = run(&engine, ElementType::F32, &pair.prompt, &speculative(3, &self::plain(TOKENS)));
            assert_eq!(got.ids, plain.ids, "prompt {n}");
            (drafted, accepted) = (drafted + got.statistics.drafted, accepted + got.statistics.accepted);
        }
        println!("{decided} tokens decided, {accepted} of {drafted} drafts accepted");
        assert!(decided * 10 > prompts * TOKENS * 9, "{decided} of {} tokens decided", prompts * TOKENS);
        assert!(isa != Isa::best() || accepted * 2 > drafted, "{accepted} of {drafted}");
    });
}

/// A simulated acceptance has its configured rates, and its text is not the target's.
#[test]
fn acceptance_can_be_simulated() {
    let pair = demo(&demo_prompts()[0], Isa::best());
    let engine = pair.engine(2);
    let want = run(&engine, ElementType::F16, &pair.prompt, &plain(300));
    for chance in [0.0, 0.5, 0.8, 1.0] {
        let options = GenerateOptions { simulate_acceptance: vec![chance], ..speculative(2, &plain(300)) };
        let got = run(&engine, ElementType::F16, &pair.prompt, &options);
        let rate = got.statistics.acceptance_rate();
        assert!((rate - chance).abs() < 0.1, "{rate} accepted at {chance}");
        // A position where no draft is accepted is counted as well.
        let at = [&got.statistics.accepted_at, &got.statistics.speculation.drafters[0].accepted_at];
        assert!(at.iter().all(|at| at.len() == 1), "{at:?} accepted at {chance}");
        assert!(got.statistics.simulated && (chance == 0.0 || got.ids != want.ids));
        if chance == 0.5 {
            let again = run(&engine, ElementType::F16, &pair.prompt, &options);
            assert_eq!(again.ids, got.ids, "the draws have a seed");
        }
    }
    // By position: of 200 rounds, 0.12 is more than three deviations. The last quotient, 0.5, also
    // holds for the third draft.
    let options = GenerateOptions { simulate_acceptance: vec![0.8, 0.4], ..speculative(4, &plain(500)) };
    let s = run(&engine, ElementType::F16, &pair.prompt, &options).statistics;
    let rates: Vec<f64> = s.accepted_at.iter().zip(&s.drafted_at).map(|(a, n)| *a as f64 / *n as f64).collect();
    assert!(rates.iter().zip([0.8, 0.4, 0.2]).all(|(rate, want)| (rate - want).abs() < 0.12), "{rates:?}");
    assert!(s.rounds > 150 && rates.len() == 3, "{rates:?} in {} rounds", s.rounds);
}

/// While a model is paused, the next drafter of the list drafts.
#[test]
fn prompt_lookup_drafts_while_a_model_is_paused() {
    let pair = demo(&demo_prompts()[1], Isa::best());
    let drafters = "mtp,ngram-simple:n=1:m=2".parse().expect("drafters");
    let (block, skip_streak) = (BlockSize::Fixed(3), Some(1));
    let speculation = Speculation::With(SpeculationOptions { drafters, block, skip_streak, ..Default::default() });
    // No draft is accepted, so that each pause of the model is longer than the one before.
    let options = GenerateOptions { speculation, simulate_acceptance: vec![0.0], ..plain(100) };
    let s = run(&pair.engine(2), ElementType::F16, &pair.prompt, &options).statistics.speculation;
    let [model, lookup] = s.drafters.iter().map(|drafter| drafter.drafts).collect::<Vec<_>>()[..] else {
        panic!("{s:?}")
    };
    assert!((1..10).contains(&model) && lookup > model, "{model} drafts of the model, {lookup} of prompt lookup");
}

/// Stops on each of several tokens of the greedy text: the result is the text up to the token's first occurrence.
fn stops_at_tokens(pair: &Pair) {
    let engine = pair.engine(2);
    let greedy = run(&engine, ElementType::F16, &pair.prompt, &plain(48)).ids;
    let mut inside_a_block = 0;
    for (n, stop) in greedy.iter().enumerate().take(12) {
        let end = greedy.iter().position(|id| id == stop).expect("it comes from there") + 1;
        if end <= n {
            continue; // the same stop as an earlier one
        }
        let mut options = GenerateOptions { logprobs: Some(1), ..plain(48) };
        options.stop.tokens = vec![*stop];
        for &block_size in block_sizes(pair.isa) {
            let got = run(&engine, ElementType::F16, &pair.prompt, &speculative(block_size, &options));
            let what = format!("{}: B = {block_size}, stop at token {stop}", pair.name);
            assert_eq!(got.ids, greedy[..end], "{what}");
            assert_eq!(got.finish, Some(FinishReason::EndOfText), "{what}");
            // Only a round that is cut at a draft emits no token of the target's own, and its later drafts do not count.
            let without_own = got.statistics.accepted + got.statistics.rounds + 1 - got.ids.len();
            assert!(without_own <= 1, "{what}: {:?}", got.statistics);
            inside_a_block += without_own;
        }
    }
    println!("{}: {inside_a_block} blocks were cut before their end", pair.name);
    // Without a cut inside a block this test would prove nothing about them.
    assert!(pair.name != "demo" || inside_a_block > 0);
}

#[test]
fn stop_tokens_cut_a_block() {
    widest(&demo_prompts()[3], usize::MAX).iter().for_each(stops_at_tokens);
}

/// Strings cut out of the greedy text, at any token boundary: the text ends right before them, and
/// the ids with the token that completes them.
#[test]
fn stop_strings_cut_a_block() {
    let pair = demo(&demo_prompts()[4], Isa::best());
    let engine = pair.engine(2);
    let tokenizer = engine.tokenizer().expect("a tokenizer");
    let greedy = run(&engine, ElementType::F16, &pair.prompt, &plain(64));
    let starts: Vec<usize> = greedy.text.char_indices().map(|(at, _)| at).collect();
    assert!(starts.len() > 60, "the text is too short for this test: {:?}", greedy.text);
    let stops = (0..10).map(|i| {
        let from = i * (starts.len() - 8) / 10;
        let to = starts[from + 1 + i % 7];
        &greedy.text[starts[from]..to]
    });
    for stop in stops {
        let at = greedy.text.find(stop).expect("it comes from there");
        let contains = |n: &usize| tokenizer.decode(&greedy.ids[..*n]).expect("text").contains(stop);
        let end = (1..=greedy.ids.len()).find(contains).expect("the whole text contains it");
        let mut options = plain(64);
        // A string that never occurs must not disturb one that does.
        options.stop.strings = vec!["\u{1F980} never written".into(), stop.into()];
        for speculation in std::iter::once(None).chain(block_sizes(pair.isa).iter().copied().map(Some)) {
            let options = speculation.map_or(options.clone(), |block_size| speculative(block_size, &options));
            let got = run(&engine, ElementType::F16, &pair.prompt, &options);
            let what = format!("stop at {stop:?}, B = {speculation:?}");
            assert_eq!(got.ids, greedy.ids[..end], "{what}");
            assert_eq!(got.text, greedy.text[..at], "{what}");
            assert_eq!(got.finish, Some(FinishReason::StopString), "{what}");
        }
    }
}

/// Exactly `max_tokens`, even if that is inside a block: at every token of the first blocks, and in a later one.
fn counts(pair: &Pair) {
    let engine = pair.engine(2);
    let greedy = run(&engine, ElementType::F16, &pair.prompt, &plain(20)).ids;
    for max_tokens in (0..=10).chain([20]) {
        for &block_size in block_sizes(pair.isa) {
            let options = speculative(block_size, &plain(max_tokens));
            let got = run(&engine, ElementType::F16, &pair.prompt, &options);
            let what = format!("{}: B = {block_size}, {max_tokens} tokens", pair.name);
            assert_eq!(got.ids, greedy[..max_tokens], "{what}");
            assert_eq!(got.finish, Some(FinishReason::MaxTokens), "{what}");
            assert_eq!(got.statistics.generated_tokens, max_tokens, "{what}");
        }
    }
}

#[test]
fn max_tokens_is_exact() {
    widest(&demo_prompts()[5], 32).iter().for_each(counts);
}

/// Memory for the target's K and V alone: models draft until they need more, and the text is that without drafts.
#[test]
fn memory_for_the_text_is_enough() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("models");
    let mut kv = session_options(ElementType::F16);
    kv.kv.max_context = Some(512);
    for (model, drafters) in [("demo/target", "draft-model"), ("demo-qwen", "mtp")] {
        let load = |kv_memory| {
            let (model, draft_model) = (models.join(model), Some(models.join("demo/target")));
            let draft_model = draft_model.filter(|_| drafters == "draft-model");
            let options = EngineOptions { threads: Some(1), kv_memory, draft_model, ..EngineOptions::new(&model) };
            Engine::load(&options).expect("an engine")
        };
        let of_text = load(None).session(&kv).expect("a session").kv().bytes_at(512) as u64;
        let prompt: Vec<u32> = (0..300).map(|i| 10 + i * 7919 % 3000).collect();
        let write = |speculation: Speculation| {
            let options = |tokens| GenerateOptions { speculation: speculation.clone(), ..plain(tokens) };
            let mut session = load(Some(of_text)).session(&kv).expect("a session");
            let first = run_pieces(&mut session, &prompt, &options(200), usize::MAX);
            // The drafter, which had given up its memory, finds none for its next generation.
            let second = run_pieces(&mut session, &prompt[..4], &options(6), usize::MAX);
            assert_eq!(second.ids.len(), 6, "{model}");
            Run { ids: [first.ids, second.ids].concat(), ..first }
        };
        let speculation = SpeculationOptions {
            drafters: drafters.parse().expect("drafters"),
            block: BlockSize::Fixed(4),
            ..SpeculationOptions::default()
        };
        let (want, got) = (write(Speculation::Off), write(Speculation::With(speculation)));
        assert_eq!((want.ids.len(), want.finish), (206, Some(FinishReason::MaxTokens)), "{model}");
        assert_eq!((got.ids, got.finish), (want.ids, want.finish), "{model}");
    }
}

/// The head's context is what memory another sequence leaves when the generation begins: less than
/// a pass over the prompt.
#[test]
fn a_nextn_head_reads_prompts_longer_than_its_context() {
    let model = cases::demo_qwen().path;
    let load = |kv_memory| {
        Engine::load(&EngineOptions { threads: Some(1), kv_memory, ..EngineOptions::new(&model) }).expect("an engine")
    };
    let kv = KvOptions { max_context: Some(1024), ..KvOptions::default() };
    let memory = load(None).session(&SessionOptions { kv }).expect("a session").kv().bytes_at(1024) as u64;
    let prompt: Vec<u32> = (0..500).map(|i| 10 + i * 7919 % 3000).collect();
    let mtp = Speculation::With(SpeculationOptions::mtp(3));
    let write = |speculation| {
        let engine = load(Some(memory));
        let open = || engine.session(&SessionOptions::default()).expect("a session");
        let (session, mut other) = (open(), open());
        let text = [&prompt[..], &prompt[..300]].concat();
        assert_eq!(run_pieces(&mut other, &text, &plain(1), usize::MAX).ids.len(), 1);
        let options = GenerateOptions { speculation, ..plain(100) };
        let mut scheduler = Scheduler::new(&engine, SchedulerOptions::default());
        let id = scheduler.add(session, &prompt, &options).expect("added");
        drop(other);
        cases::texts(&mut scheduler).remove(&id).expect("a text")
    };
    assert_eq!(write(mtp), write(Speculation::Off));
}

/// The context is used to its last position, and no further.
fn fills_the_context(pair: &Pair) {
    let engine = pair.engine(2);
    let greedy = run(&engine, ElementType::F16, &pair.prompt, &plain(20)).ids;
    for room in [0, 1, 2, 5, 12] {
        let mut options = session_options(ElementType::F16);
        options.kv.max_context = Some(pair.prompt.len() + room);
        for &block_size in block_sizes(pair.isa) {
            let mut session = engine.session(&options).expect("a session");
            let got = run_pieces(&mut session, &pair.prompt, &speculative(block_size, &plain(100)), usize::MAX);
            let what = format!("{}: B = {block_size}, room for {room}", pair.name);
            // The last token has no row yet, so one more is written than fits.
            assert_eq!(got.ids, greedy[..room + 1], "{what}");
            assert_eq!(got.finish, Some(FinishReason::Context), "{what}");
            assert_eq!(session.kv().len(), pair.prompt.len() + room, "{what}");
        }
    }
}

#[test]
fn the_context_limit_is_exact() {
    widest(&demo_prompts()[6], 32).iter().for_each(fills_the_context);
}

/// How a first generation ends before the session continues.
#[derive(Clone, Copy, Debug)]
enum Cut {
    Tokens(usize),
    Pieces(usize),
    StopToken(usize),
}

/// A session that continues after a truncated generation equals one that read all of it as one prompt.
fn continues(pair: &Pair) {
    let engine = pair.engine(2);
    let rows = ElementType::F16;
    let greedy = run(&engine, rows, &pair.prompt, &plain(32)).ids;
    let second = &pair.prompt[1..9];
    let cuts = [Cut::Tokens(0), Cut::Tokens(1), Cut::Tokens(6), Cut::Tokens(17), Cut::Pieces(0), Cut::Pieces(1)];
    let cuts = cuts.into_iter().chain([Cut::Pieces(4), Cut::StopToken(3), Cut::StopToken(10)]);
    // Of every text that was read as one prompt, the ids that follow and the session.
    let mut wanted: HashMap<Vec<u32>, (Vec<u32>, Session)> = HashMap::new();
    for (cut, block_size) in cuts.flat_map(|cut| [1, 4, 8].map(|block_size| (cut, block_size))) {
        let what = format!("{}: {cut:?}, B = {block_size}", pair.name);
        let mut options = speculative(block_size, &plain(32));
        let mut pieces = usize::MAX;
        match cut {
            Cut::Tokens(tokens) => options.max_tokens = tokens,
            Cut::Pieces(first) => pieces = first,
            Cut::StopToken(at) => options.stop.tokens = vec![greedy[at]],
        }
        let mut session = engine.session(&session_options(rows)).expect("a session");
        let first = run_pieces(&mut session, &pair.prompt, &options, pieces);
        assert!(greedy.starts_with(&first.ids), "{what}");
        let continued = run_pieces(&mut session, second, &speculative(block_size, &plain(24)), usize::MAX);

        let whole = [&pair.prompt[..], &first.ids, second].concat();
        let (want, fresh) = wanted.entry(whole.clone()).or_insert_with(|| {
            let mut fresh = engine.session(&session_options(rows)).expect("a session");
            (run_pieces(&mut fresh, &whole, &plain(24), usize::MAX).ids, fresh)
        });
        assert_eq!(continued.ids, *want, "{what}");
        assert!(session.kv().same_rows(fresh.kv()), "{what}: the caches differ");
    }
}

#[test]
fn a_session_continues_after_a_cut() {
    widest(&demo_prompts()[7], 48).iter().for_each(continues);
}

/// A wrong drafter does not change the text; only the acceptance rate shows it.
#[test]
fn drafts_are_mostly_accepted() {
    on_every_isa(most_drafts_are_accepted);
}

fn most_drafts_are_accepted(isa: Isa) {
    let (mut drafted, mut accepted) = (0, 0);
    let prompts = demo_prompts();
    let engine = demo(&prompts[0], isa).engine(2);
    // Two on the scalar reference, for its time.
    let count = if isa == Isa::Scalar { 2 } else { usize::MAX };
    for prompt in prompts.iter().take(count) {
        let prompt = engine.tokenizer().expect("a tokenizer").encode(prompt).expect("tokens");
        let options = speculative(4, &GenerateOptions { max_tokens: 128, ..GenerateOptions::default() });
        let got = run(&engine, ElementType::F16, &prompt, &options);
        println!("{} tokens, {:.2} accepted", got.ids.len(), got.statistics.acceptance_rate());
        drafted += got.statistics.drafted;
        accepted += got.statistics.accepted;
    }
    let rate = accepted as f64 / drafted as f64;
    println!("{accepted} of {drafted} drafts accepted: {rate:.3}");
    assert!(rate >= 0.6, "{accepted} of {drafted} drafts accepted");
}

/// A round drafts what a fresh session drafts that read the same text as its prompt: whatever was
/// rejected before, it starts from the state that predicted the last token and from committed rows.
/// The acceptance rate drops too little to show it.
#[test]
fn rounds_draft_as_a_fresh_session_does() {
    let pair = demo(&demo_prompts()[0], Isa::best());
    let engine = pair.engine(2);
    let options = speculative(4, &plain(96));
    let rounds = |prompt: &[u32], pieces: usize| -> Vec<Vec<u32>> {
        let mut session = engine.session(&session_options(ElementType::F16)).expect("a session");
        let generation = session.generate(prompt, &options).expect("a generation");
        generation.take(pieces).map(|piece| piece.expect("a piece").tokens).collect()
    };
    let all = rounds(&pair.prompt, usize::MAX);
    let (mut text, mut after_rejection) = (pair.prompt.clone(), 0);
    // The last rounds are cut by `max_tokens`.
    for i in 0..all.len() - 3 {
        let (last, earlier) = all[i].split_last().expect("a round emits a token");
        text.extend(earlier);
        assert_eq!(rounds(&text, 2), [vec![*last], all[i + 1].clone()], "round {i}");
        text.push(*last);
        after_rejection += usize::from(i > 0 && all[i].len() < 4);
    }
    assert!(after_rejection >= 5, "{after_rejection} rounds followed a rejected draft");
}
