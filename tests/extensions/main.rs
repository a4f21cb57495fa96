//! Extension points: custom drafters, logits processors, log-probabilities, forks and rewinding. None changes the
//! target's text, except the processor, whose effect is the same with and without speculation.

#[path = "../cases/mod.rs"]
mod cases;
mod recurrent;

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use foretoken::chat::ChatTemplate;
use foretoken::checkpoint::Checkpoint;
use foretoken::gemma4::Target;
use foretoken::kv::{KvFormat, KvOptions, LayerFormat, PagePool, SequenceState};
use foretoken::nn::F32View;
use foretoken::sampler::Distribution;
use foretoken::speculative::{
    BlockSize, ChainedModel, Context, Costs, CustomDrafter, Draft, DraftCost, DraftModel, Drafter, DrafterKind,
    DrafterOptions, Drafters, Machine, NgramSimpleOptions, Observed, Reads,
};
use foretoken::{
    DraftPipeline, ElementType, EndOfGeneration, Engine, EngineOptions, Error, GenerateOptions, Isa, LogitsProcessor,
    Model, ModelOptions, OutputRows, Piece, Request, Sampling, Session, SessionOptions, Speculation,
    SpeculationOptions, Stop,
};
use rand::rngs::StdRng;

fn engine(name: &str) -> (Engine, Vec<u32>) {
    let case = cases::named(name);
    let options = EngineOptions { threads: Some(1), ..EngineOptions::new(case.path.join("target")) };
    let engine = Engine::load(&EngineOptions { assistant: case.assistant_path(), ..options }).expect("an engine");
    (engine, case.ids("input_ids"))
}

fn demo() -> (Engine, Vec<u32>) {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo");
    let options = EngineOptions::new(demo.join("target")).with_assistant(demo.join("assistant"));
    let engine = Engine::load(&options).expect("the demo pair");
    let prompt = engine.tokenizer().and_then(|t| t.encode("impl Iterator for Counter {\n")).expect("a prompt");
    (engine, prompt)
}

fn options(max_tokens: usize, speculation: Speculation) -> GenerateOptions {
    GenerateOptions { max_tokens, speculation, ..GenerateOptions::default() }
}

fn mtp(block_size: usize) -> Speculation {
    Speculation::With(SpeculationOptions::mtp(block_size))
}

fn pieces(session: &mut Session, prompt: &[u32], options: &GenerateOptions) -> Vec<Piece> {
    session.generate(prompt, options).expect("a generation").map(|piece| piece.expect("a piece")).collect()
}

fn ids(pieces: &[Piece]) -> Vec<u32> {
    pieces.iter().flat_map(|piece| piece.tokens.clone()).collect()
}

fn session(engine: &Engine) -> Session {
    engine.session(&SessionOptions::default()).expect("a session")
}

/// Rows observed by a drafter: position, token, hidden state, outputs of the tapped layers.
type Seen = Arc<Mutex<Vec<(usize, Vec<f32>, Vec<Vec<f32>>)>>>;

/// Drafts the last token again, and records its observations.
struct Witness {
    seen: Seen,
    taps: Vec<usize>,
}

impl Drafter for Witness {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Custom
    }
    fn cost(&self) -> DraftCost {
        DraftCost::Once
    }
    fn reads(&self) -> Reads {
        Reads { hidden: true, taps: self.taps.clone() }
    }
    fn draft(
        &mut self,
        context: &Context<'_>,
        most: usize,
        draft: &mut Draft,
        _: &mut StdRng,
    ) -> foretoken::Result<()> {
        draft.tokens.resize(most, context.tokens[context.tokens.len() - 1]);
        Ok(())
    }
    fn observe(&mut self, seen: &Observed<'_>) -> foretoken::Result<()> {
        let rows = seen.hidden.expect("the hidden states that it reads").to_vec2::<f32>()?;
        let taps: Vec<Vec<Vec<f32>>> = seen.taps.iter().map(|tap| tap.to_vec2()).collect::<Result<_, _>>()?;
        let tap_rows = |row: usize| taps.iter().map(|tap| tap[row].clone()).collect();
        let rows = rows.into_iter().enumerate().map(|(row, hidden)| (seen.first + row, hidden, tap_rows(row)));
        self.seen.lock().expect("the list").extend(rows);
        Ok(())
    }
}

/// A custom drafter observes every committed row of prompts and rounds once, in order, with the hidden states and layer
/// outputs of plain passes; the text stays the target's.
#[test]
fn a_custom_drafter_sees_every_committed_row() {
    for name in ["dense", "nested", "edge"] {
        let (engine, prompt) = engine(name);
        let seen = Seen::default();
        let noted = seen.clone();
        let witness =
            CustomDrafter::new("witness", move || Box::new(Witness { seen: noted.clone(), taps: vec![1, 4] }));
        let block = BlockSize::Fixed(3);
        let list = Drafters::Priority(vec![DrafterOptions::Custom(witness)]);
        let with = Speculation::With(SpeculationOptions { drafters: list, block, ..SpeculationOptions::default() });
        let kv = KvOptions { max_round_rows: 5, ..KvOptions::default() };
        let mut speculative = engine.session(&SessionOptions { kv }).expect("a session");
        let want = ids(&pieces(&mut session(&engine), &prompt, &options(20, Speculation::Off)));
        assert_eq!(ids(&pieces(&mut speculative, &prompt, &options(20, with.clone()))), want, "{name}");
        pieces(&mut speculative, &[5, 6, 7], &options(4, with));

        let tokens = speculative.tokens().to_vec();
        let mut state: SequenceState =
            engine.target().new_state(&KvOptions::default(), engine.pages()).expect("a state");
        let seen = seen.lock().expect("the list");
        assert_eq!(seen.len(), tokens.len() - 1, "{name}: all rows but the last token's");
        for (row, (position, hidden, taps)) in seen.iter().enumerate() {
            assert_eq!(*position, row, "{name}");
            let round = state.begin_round(1).expect("a round");
            let mut batch = foretoken::kv::Batch::of(&tokens[row..=row], round).expect("a batch");
            let request = Request { taps: vec![1, 4], ..Request::of(&batch, OutputRows::All) };
            let output = engine.target().forward(&mut batch, &request).expect("a pass");
            batch.into_rounds().into_iter().for_each(|round| round.commit(1));
            assert_eq!(*hidden, F32View::new(&output.hidden).expect("floats").to_vec(), "{name}: position {position}");
            let want: Vec<_> = output.taps.iter().map(|tap| F32View::new(tap).expect("floats").to_vec()).collect();
            assert_eq!(*taps, want, "{name}: taps at position {position}");
        }
    }
}

/// Without per-layer inputs, with them, and with delta nets: fewer rows than the pass has, and as many.
#[test]
fn rows_that_a_pass_lacks_are_refused() {
    for name in ["dense", "edge", "qwen35-dense"] {
        let (engine, prompt) = engine(name);
        let mut state = engine.target().new_state(&KvOptions::default(), engine.pages()).expect("a state");
        let round = state.begin_round(4).expect("a round");
        let mut batch = foretoken::kv::Batch::of(&prompt[..4], round).expect("a batch");
        for rows in [&[0, 5][..], &[3, 0], &[0, 1, 2, 4], &[1, 0, 2, 3]] {
            let logits = Request { logits: rows.to_vec(), ..Request::default() };
            let hidden = Request { hidden: rows.to_vec(), ..Request::default() };
            for request in [logits, hidden] {
                let refused = engine.target().forward(&mut batch, &request);
                assert!(matches!(refused, Err(Error::Argument { name: "request", .. })), "{name}: {request:?}");
            }
        }
    }
}

/// Drafts ids that no vocabulary has between good ones, and panics when it is shown its round `panics`.
struct Careless {
    rounds: usize,
    panics: usize,
    sampled: bool,
}

impl Drafter for Careless {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Custom
    }
    fn cost(&self) -> DraftCost {
        DraftCost::Once
    }
    fn draft(
        &mut self,
        context: &Context<'_>,
        most: usize,
        draft: &mut Draft,
        _: &mut StdRng,
    ) -> foretoken::Result<()> {
        self.rounds += 1;
        let valid = self.rounds % 3;
        draft.tokens = vec![context.tokens[context.tokens.len() - 1]; valid];
        draft.tokens.extend([u32::MAX, 100_000, 5]);
        draft.tokens.truncate(most);
        if self.sampled {
            draft.probs = Some(draft.tokens.iter().map(|token| Distribution::certain(*token)).collect());
        }
        Ok(())
    }
    fn observe(&mut self, _: &Observed<'_>) -> foretoken::Result<()> {
        assert!(self.rounds != self.panics, "a defect");
        Ok(())
    }
}

/// Drafts a token of two, by chance.
struct Drawing;

impl Drafter for Drawing {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Custom
    }
    fn cost(&self) -> DraftCost {
        DraftCost::Once
    }
    fn draft(&mut self, _: &Context<'_>, _: usize, draft: &mut Draft, _: &mut StdRng) -> foretoken::Result<()> {
        draft.tokens = vec![5];
        draft.probs = Some(vec![Distribution::new(vec![(5, 0.5), (6, 0.5)])]);
        Ok(())
    }
}

/// What is verified of a draft that is made at once depends on its tokens, so they must not be drawn.
#[test]
fn drafts_at_once_are_not_drawn() {
    let (engine, prompt) = demo();
    let make = || -> Box<dyn Drafter> { Box::new(Drawing) };
    let list = Drafters::Priority(vec![DrafterOptions::Custom(CustomDrafter::new("drawing", make))]);
    let speculation = Speculation::With(SpeculationOptions { drafters: list, ..SpeculationOptions::default() });
    let mut session = session(&engine);
    let mut generation = session.generate(&prompt, &options(8, speculation)).expect("a generation");
    let error = generation.find_map(Result::err).expect("an error");
    assert!(matches!(&error, Error::Argument { name: "drafters", problem } if problem.contains("PerToken")), "{error}");
}

fn careless(panics: usize, sampled: bool, pipeline: DraftPipeline) -> Speculation {
    let make = move || -> Box<dyn Drafter> { Box::new(Careless { rounds: 0, panics, sampled }) };
    let list = Drafters::Priority(vec![DrafterOptions::Custom(CustomDrafter::new("careless", make))]);
    let block = BlockSize::Fixed(4);
    Speculation::With(SpeculationOptions { drafters: list, block, pipeline, ..SpeculationOptions::default() })
}

/// Whatever a drafter proposes, also what no vocabulary has, the text stays the target's.
#[test]
fn drafts_outside_the_vocabulary_are_dropped() {
    let (engine, prompt) = engine("dense");
    for pipeline in [DraftPipeline::InTurn, DraftPipeline::Ahead] {
        let want = ids(&pieces(&mut session(&engine), &prompt, &options(16, Speculation::Off)));
        for sampled in [false, true] {
            let with = options(16, careless(usize::MAX, sampled, pipeline));
            let mut session = session(&engine);
            let mut generation = session.generate(&prompt, &with).expect("a generation");
            let got: Vec<u32> = generation.by_ref().flat_map(|piece| piece.expect("a piece").tokens).collect();
            assert_eq!(got, want);
            let statistics = generation.statistics();
            // A third of the drafts begin with what cannot be read, a third have one token, a third two.
            assert!(statistics.drafted > 0 && statistics.drafted <= statistics.rounds + 1, "{statistics:?}");
        }
    }
}

/// Drafts the rest of a text at once.
struct Hasty(Vec<u32>);

impl Drafter for Hasty {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Custom
    }
    fn cost(&self) -> DraftCost {
        DraftCost::PerToken
    }
    fn draft(&mut self, context: &Context<'_>, _: usize, draft: &mut Draft, _: &mut StdRng) -> foretoken::Result<()> {
        draft.tokens = self.0.iter().skip(context.tokens.len()).copied().collect();
        Ok(())
    }
}

/// Rounds and texts are as long as requested, also if a drafter drafts more.
#[test]
fn drafts_that_are_too_long_are_truncated() {
    let (engine, prompt) = engine("dense");
    let want = ids(&pieces(&mut session(&engine), &prompt, &options(24, Speculation::Off)));
    let text = [&prompt[..], &want].concat();
    let make = move || -> Box<dyn Drafter> { Box::new(Hasty(text.clone())) };
    let drafters = Drafters::Priority(vec![DrafterOptions::Custom(CustomDrafter::new("hasty", make))]);
    let with = SpeculationOptions { drafters, block: BlockSize::Fixed(4), ..SpeculationOptions::default() };
    for max_tokens in 6..10 {
        let got = pieces(&mut session(&engine), &prompt, &options(max_tokens, Speculation::With(with.clone())));
        assert_eq!(ids(&got), want[..max_tokens.min(want.len())]);
        assert!(got.iter().all(|piece| piece.tokens.len() <= 4), "{max_tokens} tokens");
    }
}

/// Takes longer to start than everything took since it was made.
struct Slow(Instant);

impl Drafter for Slow {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Custom
    }
    fn cost(&self) -> DraftCost {
        DraftCost::Once
    }
    fn begin(&mut self, _: &[u32]) {
        std::thread::sleep(2 * self.0.elapsed());
    }
    fn draft(&mut self, _: &Context<'_>, _: usize, _: &mut Draft, _: &mut StdRng) -> foretoken::Result<()> {
        Ok(())
    }
}

/// The first token is emitted when the drafters have started, so that is part of the prompt's time, as in llama.cpp.
#[test]
fn the_start_of_drafters_is_part_of_the_prompts_time() {
    let (engine, prompt) = engine("dense");
    let make = || -> Box<dyn Drafter> { Box::new(Slow(Instant::now())) };
    let list = Drafters::Priority(vec![DrafterOptions::Custom(CustomDrafter::new("slow", make))]);
    let with = Speculation::With(SpeculationOptions { drafters: list, ..SpeculationOptions::default() });
    let mut session = session(&engine);
    let mut generation = session.generate(&prompt, &options(2, with)).expect("a generation");
    generation.by_ref().for_each(|piece| drop(piece.expect("a piece")));
    let statistics = generation.statistics();
    assert!(statistics.prefill > statistics.speculation.begin, "{statistics:?}");
}

/// A drafter's panic in `observe` ends the generation after the round that it was shown, also when the next draft is
/// overlapped; the session continues from the emitted tokens.
#[test]
fn a_drafters_panic_leaves_the_emitted_tokens() {
    let (engine, prompt) = engine("dense");
    for pipeline in [DraftPipeline::InTurn, DraftPipeline::Ahead] {
        let mut session = session(&engine);
        let with = options(16, careless(3, false, pipeline));
        let mut written = prompt.clone();
        let mut failed = Vec::new();
        for piece in session.generate(&prompt, &with).expect("a generation") {
            match piece {
                Ok(piece) => written.extend(piece.tokens),
                Err(error) => failed.push(error),
            }
        }
        assert!(matches!(&failed[..], [Error::Panic(message)] if message == "a defect"), "{failed:?}");
        assert!(written.len() > prompt.len());
        assert_eq!((session.tokens(), session.kv().len()), (&written[..], written.len() - 1));
        let got = ids(&pieces(&mut session, &[5, 6], &options(8, Speculation::Off)));
        let fresh = [&written[..], &[5, 6]].concat();
        let mut other = engine.session(&SessionOptions::default()).expect("a session");
        assert_eq!(got, ids(&pieces(&mut other, &fresh, &options(8, Speculation::Off))));
    }
}

/// A draft model whose cache leaves no memory for a second one is rewound in place: to the common prefix of both texts,
/// or if its sliding windows have wrapped, to nothing.
#[test]
fn a_draft_model_is_rewound_with_its_session() {
    let case = cases::named("dense");
    let target = case.path.join("target");
    let load = EngineOptions { threads: Some(1), draft_model: Some(target.clone()), ..EngineOptions::new(&target) };
    // As much as two caches of this context take.
    let kv = KvOptions { max_context: Some(1000), memory: None, ..KvOptions::default() };
    let open = Engine::load(&load).expect("an engine");
    let bytes = 2 * open.session(&SessionOptions { kv: kv.clone() }).expect("a session").kv().bytes_at(1000) as u64;
    let engine = Engine::load(&EngineOptions { kv_memory: Some(bytes + (1 << 16)), ..load }).expect("an engine");
    let list = Drafters::Priority(vec![DrafterOptions::DraftModel]);
    let block = BlockSize::Fixed(4);
    let with = Speculation::With(SpeculationOptions { drafters: list, block, ..SpeculationOptions::default() });
    let mut session = engine.session(&SessionOptions { kv: kv.clone() }).expect("a session");
    let long: Vec<u32> = (3..700).map(|i| 3 + i % 400).collect();
    pieces(&mut session, &long, &options(8, with.clone()));
    for len in [695, 0, 3] {
        session.rewind(len).expect("within a round's rows");
        let past = session.tokens().to_vec();
        let mut generation = session.generate(&[9, 8, 7], &options(8, with.clone())).expect("a generation");
        let got: Vec<u32> = generation.by_ref().flat_map(|piece| piece.expect("a piece").tokens).collect();
        // It is the target itself: all that it drafts is accepted.
        let (drafted, accepted) = (generation.statistics().drafted, generation.statistics().accepted);
        assert!(drafted > 0 && accepted == drafted, "{len}: {accepted} of {drafted}");
        drop(generation);
        let mut fresh = open.session(&SessionOptions { kv: kv.clone() }).expect("a session");
        let want = ids(&pieces(&mut fresh, &[&past[..], &[9, 8, 7]].concat(), &options(8, Speculation::Off)));
        assert_eq!(got, want, "{len}");
    }
}

/// The target's formats of layers are not the draft model's, which may have other layers, and a context of the target
/// beyond the draft model's own is not either: behind that it drafts nothing.
#[test]
fn a_draft_model_has_its_own_layers_and_context() {
    let case = |name: &str| cases::named(name).path.join("target");
    let directory = tempfile::tempdir().expect("a directory");
    for file in std::fs::read_dir(case("edge")).expect("a checkpoint").map(|file| file.expect("a file").path()) {
        let to = directory.path().join(file.file_name().expect("a name"));
        std::fs::copy(&file, &to).expect("copied");
        if to.ends_with("config.json") {
            let config = std::fs::read_to_string(&to).expect("a configuration");
            let short = config.replace("\"max_position_embeddings\": 4096", "\"max_position_embeddings\": 64");
            assert_ne!(short, config);
            std::fs::write(&to, short).expect("written");
        }
    }
    let draft_model = Some(directory.path().into());
    let engine = Engine::load(&EngineOptions { threads: Some(1), draft_model, ..EngineOptions::new(case("dense")) });
    let engine = engine.expect("an engine");
    let list = Drafters::Priority(vec![DrafterOptions::DraftModel]);
    let block = BlockSize::Fixed(4);
    let with = Speculation::With(SpeculationOptions { drafters: list, block, ..SpeculationOptions::default() });
    // The draft model's layer 5 reads the K and V of another.
    let format = KvFormat::Exact(ElementType::F32);
    let layers = vec![LayerFormat { layer: 5, key: format, value: format }];
    let kv = KvOptions { layers, max_context: Some(200), ..KvOptions::default() };
    for (len, drafts) in [(20, true), (70, false)] {
        let prompt: Vec<u32> = (0..len).map(|i| 3 + i * 7 % 400).collect();
        let mut session = engine.session(&SessionOptions { kv: kv.clone() }).expect("a session");
        let mut generation = session.generate(&prompt, &options(20, with.clone())).expect("a generation");
        generation.by_ref().for_each(|piece| drop(piece.expect("a piece")));
        assert_eq!(generation.statistics().drafted > 0, drafts, "{len} tokens");
    }
    // Behind that the next drafter of the list has its turn.
    let lookup = DrafterOptions::NgramSimple(NgramSimpleOptions::default());
    let drafters = Drafters::Priority(vec![DrafterOptions::DraftModel, lookup]);
    let with = SpeculationOptions { drafters, block, ..SpeculationOptions::default() };
    for (len, calls) in [(20, false), (70, true)] {
        let prompt: Vec<u32> = (0..len).map(|i| 3 + i * 7 % 400).collect();
        let mut session = engine.session(&SessionOptions { kv: kv.clone() }).expect("a session");
        let stop = Stop { end_of_generation: EndOfGeneration::Ignored, ..Stop::default() };
        let options = GenerateOptions { stop, ..options(20, Speculation::With(with.clone())) };
        let mut generation = session.generate(&prompt, &options).expect("a generation");
        generation.by_ref().for_each(|piece| drop(piece.expect("a piece")));
        assert_eq!(generation.statistics().speculation.drafters[1].calls > 0, calls, "{len} tokens");
    }
}

/// Forbids a token that depends on the text, and records its calls.
#[derive(Debug, Default)]
struct Forbid {
    seen: Mutex<Vec<usize>>,
}

impl LogitsProcessor for Forbid {
    fn process(&self, tokens: &[u32], logits: &mut [f32]) -> foretoken::Result<()> {
        self.seen.lock().expect("the list").push(tokens.len());
        let parity = tokens.iter().sum::<u32>() % 2;
        let allowed = |id: usize| id as u32 % 2 == parity;
        logits.iter_mut().enumerate().filter(|(id, _)| !allowed(*id)).for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
        Ok(())
    }
}

/// Sets all logits to one value.
#[derive(Debug)]
struct Level(f32);

impl LogitsProcessor for Level {
    fn process(&self, _: &[u32], logits: &mut [f32]) -> foretoken::Result<()> {
        logits.fill(self.0);
        Ok(())
    }
}

/// The checkpoint is not called damaged because of a processor.
#[test]
fn a_processor_that_leaves_no_token_is_named() {
    let (engine, prompt) = engine("dense");
    for (value, is_valid) in [(f32::NEG_INFINITY, false), (f32::NAN, false), (f32::INFINITY, false), (0.0, true)] {
        let logits_processor: Option<Arc<dyn LogitsProcessor>> = Some(Arc::new(Level(value)));
        let options = GenerateOptions { logits_processor, ..options(4, Speculation::Off) };
        let mut session = session(&engine);
        let error = session.generate(&prompt, &options).err();
        assert_eq!(error.is_none(), is_valid, "{value}: {error:?}");
        let is_named = |error: Error| matches!(error, Error::Argument { name: "logits_processor", .. });
        assert!(error.is_none_or(is_named), "{value}");
    }
}

/// A processor sees the row after every accepted prefix of a draft, and what it forbids is never written.
#[test]
fn a_processor_means_the_same_with_and_without_speculation() {
    let (engine, prompt) = demo();
    for temperature in [0.0, 0.7] {
        let run = |speculation| {
            let processor = Arc::new(Forbid::default());
            let sampling = Sampling { temperature, ..Sampling::default() };
            let logits_processor = Some(processor.clone() as Arc<dyn LogitsProcessor>);
            let options = GenerateOptions { sampling, logits_processor, ..options(48, speculation) };
            let written = ids(&pieces(&mut session(&engine), &prompt, &options));
            let mut tokens = prompt.clone();
            for id in &written {
                assert_eq!(id % 2, tokens.iter().sum::<u32>() % 2, "a forbidden token was written");
                tokens.push(*id);
            }
            let seen = processor.seen.lock().expect("the list").clone();
            assert!((prompt.len()..prompt.len() + written.len()).all(|len| seen.contains(&len)));
            written
        };
        let want = run(Speculation::Off);
        for rows in [2, 4, 8] {
            let got = run(mtp(rows));
            assert!(temperature > 0.0 || got == want, "B = {rows}: {got:?} instead of {want:?}");
        }
    }
}

/// Log-probabilities are those of the target's logits, one entry per emitted token, the same with speculation.
#[test]
fn log_probabilities_are_the_targets() {
    let (engine, prompt) = demo();
    let run = |speculation| {
        let options = GenerateOptions { logprobs: Some(5), ..options(32, speculation) };
        let pieces = pieces(&mut session(&engine), &prompt, &options);
        assert!(pieces.iter().all(|piece| piece.tokens.len() == piece.logprobs.len()));
        pieces.into_iter().flat_map(|piece| piece.logprobs).collect::<Vec<_>>()
    };
    let plain = run(Speculation::Off);
    assert_eq!(run(mtp(4)), plain);
    assert_eq!(run(Speculation::Auto), plain);
    for entry in &plain {
        assert_eq!(entry.top.len(), 5);
        assert_eq!(entry.top[0], (entry.token, entry.logprob), "greedy text takes the most probable token");
        assert!(entry.top.is_sorted_by(|a, b| a.1 >= b.1) && entry.top.iter().all(|(_, logprob)| *logprob <= 0.0));
    }
    let all = GenerateOptions { logprobs: Some(usize::MAX), ..options(1, Speculation::Off) };
    let first = pieces(&mut session(&engine), &prompt, &all)[0].logprobs[0].clone();
    let total: f64 = first.top.iter().map(|(_, logprob)| f64::from(*logprob).exp()).sum();
    assert!((total - 1.0).abs() < 1e-4, "probabilities sum to {total}");
    assert!((first.logprob - plain[0].logprob).abs() < 1e-6);
}

/// Those of a prompt, which is read in several chunks, are of the logits before each of its tokens.
#[test]
fn log_probabilities_of_prompts() {
    let (engine, prompt) = demo();
    let long = prompt.repeat(16);
    assert!(long.len() > 64, "several chunks");
    let output = engine.forward(&long, OutputRows::All, &SessionOptions::default()).expect("logits");
    let rows = output.logits.to_vec2::<f32>().expect("rows");
    let text = ids(&pieces(&mut session(&engine), &long, &options(4, Speculation::Off)));
    for speculation in [Speculation::Off, mtp(4)] {
        let scored = GenerateOptions { prompt_logprobs: Some(2), ..options(4, speculation) };
        let written = pieces(&mut session(&engine), &long, &scored);
        assert_eq!(ids(&written), text);
        assert!(written[1..].iter().all(|piece| piece.prompt_logprobs.is_empty()));
        let of_prompt = &written[0].prompt_logprobs;
        assert_eq!(of_prompt.iter().map(|of| of.token).collect::<Vec<_>>(), long[1..]);
        for (row, of) in rows.iter().zip(of_prompt) {
            let sum: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
            let want = f64::from(row[of.token as usize]) - sum.ln();
            assert!((f64::from(of.logprob) - want).abs() < 1e-4 && of.top.len() == 2, "{want}: {of:?}");
        }
    }
    // The first token has one as well where others are before it.
    let mut session = session(&engine);
    pieces(&mut session, &prompt, &options(2, Speculation::Off));
    let scored = GenerateOptions { prompt_logprobs: Some(0), ..options(2, Speculation::Off) };
    let scored_tokens = |session: &mut Session| -> Vec<u32> {
        pieces(session, &prompt, &scored)[0].prompt_logprobs.iter().map(|of| of.token).collect()
    };
    assert_eq!(scored_tokens(&mut session), prompt);
    // None where the token before it has been read, whose logits are gone.
    session.rewind(session.tokens().len() - 1).expect("rewound");
    assert_eq!(scored_tokens(&mut session), prompt[1..]);
}

/// A draft model that is truncated counts the pages of the rows that it reads after that, and copies of shared ones.
#[test]
fn a_truncated_draft_model_counts_what_it_reads_again() {
    let checkpoint = Checkpoint::open(cases::named("dense").path.join("target")).expect("a checkpoint");
    let model = Arc::new(ChainedModel(Arc::new(Target::load(&checkpoint, Isa::best()).expect("a target"))));
    let pages = PagePool::new(None);
    let mut original = DraftModel::new(model, &KvOptions::default(), &pages).expect("a draft model");
    let text: Vec<u32> = (3..400).collect();
    original.read_prompt(&text).expect("rows");
    let mut fork = original.fork().expect("a fork");
    fork.truncate(100);
    let edited = [&text[..100], &text[300..]].concat();
    let (most, before) = (fork.page_bytes(edited.len()) as u64, pages.held());
    fork.read_prompt(&edited).expect("rows");
    let taken = pages.held() - before;
    assert!(taken > 0 && taken <= most, "{taken} bytes of {most}");
}

/// A fork continues like its original, and neither disturbs the other, in any K/V format.
#[test]
fn forks_share_the_past_and_nothing_else() {
    let (engine, _) = engine("dense");
    for format in ["f32", "f16", "turbo4"] {
        let format: KvFormat = format.parse().expect("a format");
        let kv = KvOptions { key: format, value: format, ..KvOptions::default() };
        let open = || engine.session(&SessionOptions { kv: kv.clone() }).expect("a session");
        let prompt: Vec<u32> = (3..330).collect();
        let mut original = open();
        pieces(&mut original, &prompt, &options(20, mtp(4)));
        let mut fork = original.fork().expect("a fork");
        let past = original.tokens().to_vec();
        let (a, b) = ([400, 401], [402, 403]);
        let of_fork = ids(&pieces(&mut fork, &a, &options(150, mtp(4))));
        let of_original = ids(&pieces(&mut original, &b, &options(150, mtp(4))));
        for (prompt, got) in [(a, of_fork), (b, of_original)] {
            let fresh = ids(&pieces(&mut open(), &[&past[..], &prompt].concat(), &options(150, Speculation::Off)));
            assert_eq!(got, fresh, "{format}");
        }
    }
}

/// After a rewind a session writes what a fresh one writes after the same tokens; an impossible
/// rewind is rejected, and nothing changes.
#[test]
fn a_session_goes_back_as_far_as_its_rows_last() {
    let (engine, _) = engine("dense");
    let prompt: Vec<u32> = (3..300).collect();
    let kv = KvOptions { max_round_rows: 256, ..KvOptions::default() };
    let open = || engine.session(&SessionOptions { kv: kv.clone() }).expect("a session");
    let mut session = open();
    pieces(&mut session, &prompt, &options(8, Speculation::Off));
    for len in [300, 297, 280] {
        session.rewind(len).expect("within a round's rows");
        assert_eq!((session.tokens().len(), session.kv().len()), (len, len));
        let past = session.tokens().to_vec();
        let got = ids(&pieces(&mut session, &[9, 8], &options(6, mtp(4))));
        let fresh = ids(&pieces(&mut open(), &[&past[..], &[9, 8]].concat(), &options(6, Speculation::Off)));
        assert_eq!(got, fresh, "{len}");
    }
    let tokens = session.tokens().to_vec();
    session.rewind(tokens.len()).expect("nothing to do");
    for len in [tokens.len() + 1, 1000] {
        let error = session.rewind(len).expect_err("more than all tokens");
        let problem = format!("cannot be truncated to {len}");
        assert!(matches!(&error, Error::Argument { name: "len", problem: own } if own.ends_with(&problem)), "{error}");
    }
    assert_eq!(session.tokens(), tokens);
    // The window of 8 retains 263 positions in whole pages of 128.
    let mut long = open();
    pieces(&mut long, &(3..500).chain(3..500).collect::<Vec<_>>(), &options(2, Speculation::Off));
    let tokens = long.tokens().to_vec();
    assert!(matches!(long.rewind(300), Err(Error::Argument { name: "len", .. })));
    assert_eq!(long.tokens(), tokens);
    long.rewind(0).expect("an empty sequence reads nothing");
    assert_eq!(
        ids(&pieces(&mut long, &prompt, &options(6, mtp(3)))),
        ids(&pieces(&mut open(), &prompt, &options(6, mtp(2))))
    );
}

/// A rewound session holds no pages of the tokens that were dropped.
#[test]
fn a_rewound_session_frees_its_pages() {
    let (engine, _) = engine("dense");
    let prompt: Vec<u32> = (3..300).collect();
    let [mut long, mut short] = [(); 2].map(|()| session(&engine));
    pieces(&mut long, &prompt, &options(0, Speculation::Off));
    pieces(&mut short, &prompt[..100], &options(0, Speculation::Off));
    long.rewind(100).expect("within a round's rows");
    assert_eq!(long.kv_bytes(), short.kv_bytes());
}

/// Costs of another machine are refused, in the words of [`Costs::load`].
#[test]
fn costs_of_another_machine_are_refused() {
    let (engine, _) = engine("dense");
    let other = Machine { threads: 64, ..engine.costs().machine().clone() };
    let complaint = engine.set_costs(Costs::new(other)).expect_err("another machine's").to_string();
    assert!(complaint.contains("(threads: 64; ") && complaint.contains("(threads: 1; "), "{complaint}");
}

/// An engine for a caller's model has the options of one that loads it, and writes the same text.
#[test]
fn a_callers_model_has_a_tokenizer_and_options() {
    let (loaded, prompt) = demo();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target");
    let checkpoint = Checkpoint::open(path).expect("a checkpoint");
    let target = Arc::new(Target::load(&checkpoint, Isa::best()).expect("a target"));
    let with = |end_of_generation| {
        let options = ModelOptions {
            threads: Some(1),
            isa: Some(Isa::Scalar),
            kv_memory: Some(1 << 30),
            tokenizer: checkpoint.tokenizer(target.vocab_size()).expect("a tokenizer"),
            chat_template: ChatTemplate::of(&checkpoint).expect("a template"),
            end_of_generation,
        };
        Engine::from_model(target.clone(), options)
    };
    let engine = with(loaded.end_of_generation().to_vec()).expect("an engine");
    assert_eq!((engine.threads(), engine.isa(), engine.pages().limit()), (1, Isa::Scalar, Some(1 << 30)));
    let encoded = engine.tokenizer().and_then(|tokenizer| tokenizer.encode("impl Iterator for Counter {\n"));
    assert_eq!(encoded.expect("a prompt"), prompt);
    assert_eq!(engine.chat_template().is_ok(), loaded.chat_template().is_ok());

    let options = options(16, Speculation::Off);
    let text = |engine: &Engine| pieces(&mut session(engine), &prompt, &options);
    let want = text(&loaded);
    assert_eq!(text(&engine), want);
    let want = ids(&want);
    let end = want[4];
    let whole = want.iter().position(|id| *id == end).expect("the token") + 1;
    assert_eq!(ids(&text(&with(vec![end]).expect("an engine"))), want[..whole]);

    let Err(error) = with(vec![target.vocab_size() as u32]) else { panic!("a token outside the vocabulary") };
    assert!(error.to_string().contains("end_of_generation: token id"), "{error}");

    // There is no checkpoint that could have a file.
    let bare = Engine::from_model(target, ModelOptions { threads: Some(1), ..ModelOptions::default() });
    let bare = bare.expect("an engine");
    let (Err(tokenizer), Err(template)) = (bare.tokenizer(), bare.chat_template()) else { panic!("none was given") };
    for (error, option) in [(tokenizer, "ModelOptions::tokenizer"), (template, "ModelOptions::chat_template")] {
        let error = error.to_string();
        assert!(error.contains(option) && !error.contains("checkpoint"), "{error}");
    }
}
