//! Sequences that share passes write what each writes alone, byte for byte: whichever joins, leaves,
//! forks, is cancelled or fails in the same batch.

mod cases;
mod changed_model;

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

use foretoken::checkpoint::Checkpoint;
use foretoken::gemma4::Target;
use foretoken::kv::{Batch, ExactZones, KvFormat, KvOptions, KvPreset};
use foretoken::nn::tensor;
use foretoken::speculative::{
    BlockSize, Cancel, ChainStep, ChainedModel, Context, Costs, CustomDrafter, Draft, DraftChain, DraftCost,
    DraftModel, DraftSampling, Drafter, DrafterKind, DrafterOptions, Drafters, Mtp, NextN, Observed, Reads,
};
use foretoken::{
    ChainModel, DraftKv, DraftRows, DraftStep, ElementType, EndOfGeneration, Engine, EngineOptions, Error,
    FinishReason, GenerateOptions, Isa, LogitsProcessor, Model, ModelOptions, Output, Request, Sampling, Scheduler,
    SchedulerOptions, SequenceId, SessionOptions, Speculation, SpeculationOptions, Stop, qwen35,
};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use changed_model::ChangedModel;

/// Options of one sequence.
#[derive(Clone)]
struct Job {
    prompt: Vec<u32>,
    session: SessionOptions,
    options: GenerateOptions,
}

/// A generation's output, and why it ended.
#[derive(Clone, Debug, Default, PartialEq)]
struct Written {
    ids: Vec<u32>,
    finish: Option<FinishReason>,
}

/// Of up to some tens of tokens.
const SHORT: Range<usize> = 1..40;
/// That end near the end of a page.
const PAGE: Range<usize> = 110..150;

fn job(rng: &mut StdRng, vocab: u32, engine: &Engine, prompts: Range<usize>) -> Job {
    let limit = if prompts == SHORT { 60 } else { 160 };
    let prompt = (0..rng.random_range(prompts)).map(|_| rng.random_range(3..vocab)).collect();
    let quantized = "turbo4".parse().expect("a format");
    let formats: [KvOptions; 5] = [
        KvPreset::Exact.into(),
        KvPreset::Balanced.into(),
        KvOptions {
            key: "f32".parse().expect("a format"),
            value: "bf16".parse().expect("a format"),
            ..KvOptions::default()
        },
        KvOptions { max_round_rows: 16, ..KvOptions::default() },
        KvOptions {
            key: quantized,
            value: quantized,
            exact: ExactZones { head: 8, tail: 16, element: ElementType::F16 },
            ..KvOptions::default()
        },
    ];
    // Rotations are of 16 channels; heads of other widths cannot be quantized.
    let fits = |kv: &KvOptions| match engine.session(&SessionOptions { kv: kv.clone() }) {
        Ok(_) => true,
        Err(error) => {
            assert!(error.to_string().contains("not a multiple of 16"), "{error}");
            false
        }
    };
    let formats: Vec<KvOptions> = formats.into_iter().filter(fits).collect();
    let mut kv = formats.choose(rng).expect("a format").clone();
    if rng.random_bool(0.2) {
        kv.max_context = Some(limit);
    }
    let drafters = match rng.random_range(0..6) {
        0 => None,
        1 | 2 if engine.has_mtp() => Some("mtp"),
        3 if engine.has_mtp() => Some("ngram-simple:n=2,mtp"),
        4 if engine.draft_model().is_some() => Some("draft-model"),
        _ => Some("ngram-map-k:n=2:m=8:hits=1"),
    };
    let speculation = drafters.map_or(Speculation::Off, |drafters| {
        Speculation::With(SpeculationOptions {
            drafters: drafters.parse::<Drafters>().expect("drafters"),
            block: BlockSize::Fixed(rng.random_range(1..=8)),
            drafts: *[DraftSampling::Greedy, DraftSampling::Sampled].choose(rng).expect("one"),
            ..SpeculationOptions::default()
        })
    });
    let temperature = *[0.0, 0.0, 0.8].choose(rng).expect("a temperature");
    let options = GenerateOptions {
        max_tokens: rng.random_range(1..32),
        sampling: Sampling { temperature, top_k: Some(50), ..Sampling::default() },
        seed: rng.random(),
        speculation,
        stop: Stop { end_of_generation: EndOfGeneration::Ignored, ..Stop::default() },
        cancel: Cancel::default(),
        ..GenerateOptions::default()
    };
    Job { prompt, session: SessionOptions { kv }, options }
}

/// Options of a text of so many tokens, whichever they are.
fn of_length(max_tokens: usize) -> GenerateOptions {
    let stop = Stop { end_of_generation: EndOfGeneration::Ignored, ..Stop::default() };
    GenerateOptions { max_tokens, stop, ..GenerateOptions::default() }
}

/// A prompt of `len` tokens.
fn prompt(len: u32) -> Vec<u32> {
    (0..len).map(|i| 10 + i * 7919 % 3000).collect()
}

/// A job's output when run alone.
fn alone(engine: &Engine, job: &Job) -> Written {
    let mut session = engine.session(&job.session).expect("a session");
    let mut generation = session.generate(&job.prompt, &job.options).expect("a generation");
    let ids = generation.by_ref().flat_map(|piece| piece.expect("a piece").tokens).collect();
    Written { ids, finish: generation.finish_reason() }
}

/// 1 to 8 sequences with different prompts, block sizes and K/V formats, which join, leave, fork
/// and are cancelled at random rounds. Returns how many were cancelled.
fn check(engine: &Engine, vocab: u32, seed: u64, name: &str, prompts: Range<usize>) -> usize {
    let mut rng = StdRng::seed_from_u64(seed);
    let jobs: Vec<Job> = (0..rng.random_range(1..=8)).map(|_| job(&mut rng, vocab, engine, prompts.clone())).collect();
    let want: Vec<_> = jobs.iter().map(|job| alone(engine, job)).collect();
    let max_rows = *[1, 7, 64, 512].choose(&mut rng).expect("a size");
    // Without a bound, with one that no measured time reaches, so that passes without prompts are measured, and with one
    // that allows nothing: what a pass reads, and so which sequences are where, does not depend on measured times.
    let prompt_slowdown = *[0.0, 1e18, f64::INFINITY].choose(&mut rng).expect("a slowdown");
    let options = SchedulerOptions { max_rows, prompt_slowdown, ..SchedulerOptions::default() };
    let mut scheduler = Scheduler::new(engine, options);
    let mut running: HashMap<SequenceId, (usize, Written)> = HashMap::new();
    let (mut cancels, mut cancelled): (HashMap<SequenceId, Cancel>, HashSet<SequenceId>) = Default::default();
    let cancellable = |i: usize| GenerateOptions { cancel: Cancel::default(), ..jobs[i].options.clone() };
    let mut waiting: Vec<usize> = (0..jobs.len()).rev().collect();
    let (mut forks, mut num_cancelled) = (0, 0);
    while !waiting.is_empty() || scheduler.is_active() {
        if let Some(i) = waiting.pop_if(|_| rng.random_bool(0.4)) {
            let session = engine.session(&jobs[i].session).expect("a session");
            let options = cancellable(i);
            let id = scheduler.add(session, &jobs[i].prompt, &options).expect("added");
            scheduler.keep_prompt(id).expect("an unread prompt");
            cancels.insert(id, options.cancel);
            running.insert(id, (i, Written::default()));
        }
        for event in scheduler.step() {
            let (i, written) = running.get_mut(&event.id).expect("a sequence that was added");
            written.ids.extend(event.piece.expect("a piece").tokens);
            written.finish = event.finish_reason;
            let ends = cancelled.remove(&event.id);
            assert_eq!(ends, written.finish == Some(FinishReason::Cancelled), "{name}, seed {seed}, sequence {i}");
        }
        assert!(cancelled.is_empty(), "{name}, seed {seed}: cancelled sequences go on");
        let ids: Vec<_> = scheduler.ids().collect();
        let Some(id) = ids.choose(&mut rng).copied() else { continue };
        let (i, written) = running[&id].clone();
        let what = format!("{name}, seed {seed}, sequence {i}");
        match rng.random_range(0..20) {
            // It leaves: its output is a prefix of the whole, and its session continues alone.
            0 => {
                let mut session = scheduler.remove(id).expect("a session");
                running.remove(&id);
                assert!(want[i].ids.starts_with(&written.ids), "{what}");
                if session.kv().max_context() - session.kv().len() > 8 {
                    assert_eq!(session.generate(&[5, 6], &of_length(2)).expect("a generation").count(), 2, "{what}");
                }
            }
            // A fork of it writes what a fresh session writes after the same tokens.
            1 if forks < 3 && !written.ids.is_empty() => {
                forks += 1;
                let Ok(fork) = scheduler.fork(id, &[7, 8, 9], &jobs[i].options) else { continue };
                let tokens = [&jobs[i].prompt[..], &written.ids, &[7, 8, 9]].concat();
                let fresh = alone(engine, &Job { prompt: tokens, ..jobs[i].clone() });
                let mut got = Written::default();
                while got.finish.is_none() {
                    for event in scheduler.step() {
                        let of = running.get_mut(&event.id).map_or(&mut got, |(_, written)| written);
                        of.ids.extend(event.piece.expect("a piece").tokens);
                        of.finish = event.finish_reason;
                    }
                }
                assert_eq!(got, fresh, "{what}: the fork");
                scheduler.remove(fork);
            }
            // A second one with its prompt writes the same, if it is not too far behind.
            2..=4 if forks < 6 && !written.ids.is_empty() => {
                forks += 1;
                let options = cancellable(i);
                let fork = scheduler.fork_prompt(id, &options);
                // That of a recurrent model is kept until the next step.
                let is_gone = engine.gemma4().is_none() && written.finish.is_some();
                assert!(fork.is_ok() || written.ids.len() > 1 || is_gone, "{what}: {fork:?}");
                if let Ok(fork) = fork {
                    scheduler.keep_prompt(fork).expect("an unread prompt");
                    cancels.insert(fork, options.cancel);
                    running.insert(fork, (i, Written::default()));
                }
            }
            // It ends in the next step.
            5 | 6 if written.finish.is_none() => {
                cancels[&id].cancel();
                cancelled.insert(id);
                num_cancelled += 1;
            }
            _ => {}
        }
    }
    for (i, written) in running.values() {
        let what = format!("{name}, seed {seed}, sequence {i}");
        match written.finish {
            Some(FinishReason::Cancelled) => assert!(want[*i].ids.starts_with(&written.ids), "{what}"),
            _ => assert_eq!(*written, want[*i], "{what}"),
        }
    }
    drop(scheduler);
    assert_eq!(engine.pages().held(), 0, "{name}: pages of sequences that are gone");
    num_cancelled
}

#[test]
fn texts_are_those_of_each_alone() {
    cases::on_every_isa(|isa| {
        for case in cases::all().into_iter().chain(cases::of(cases::QWEN35)) {
            let target = case.path.join("target");
            let options = EngineOptions { threads: Some(2), isa: Some(isa), ..EngineOptions::new(&target) };
            // The target is its own draft model: the only one with the same vocabulary here.
            let (assistant, draft_model) = (case.assistant_path(), Some(target));
            let engine = Engine::load(&EngineOptions { assistant, draft_model, ..options }).expect("an engine");
            let vocab = engine.target().num_readable_tokens() as u32;
            let check = |seed, prompts: Range<usize>| check(&engine, vocab, seed, &case.name, prompts);
            let mut cancelled: usize = (0..6).map(|seed| check(seed, SHORT)).sum();
            if isa == Isa::best() {
                cancelled += (20..24).map(|seed| check(seed, PAGE)).sum::<usize>();
            }
            assert!(cancelled > 0, "{}: no sequence was cancelled", case.name);
        }
    });
}

#[test]
fn texts_of_the_demo_pairs_are_those_of_each_alone() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("models");
    let gemma = EngineOptions::new(models.join("demo/target")).with_assistant(models.join("demo/assistant"));
    for (options, name) in [(gemma, "demo"), (EngineOptions::new(models.join("demo-qwen")), "demo-qwen")] {
        let engine = Engine::load(&options).expect("a demo pair");
        let cancelled: usize = (10..16).map(|seed| check(&engine, 4000, seed, name, SHORT)).sum();
        let of_pages: usize = (16..20).map(|seed| check(&engine, 4000, seed, name, PAGE)).sum();
        assert!(cancelled + of_pages > 0, "{name}: no sequence was cancelled");
    }
}

/// While a sequence decodes, a prompt is read in chunks, the shortest if no slowdown is allowed. Every pass emits one
/// token of the sequence: nothing is drafted in a pass with a chunk, whatever was measured.
#[test]
fn nothing_is_drafted_beside_a_prompts_chunk() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo");
    let options = EngineOptions::new(demo.join("target")).with_assistant(demo.join("assistant"));
    let engine = Engine::load(&options).expect("the demo pair");
    // Drafts cost next to nothing, so that the first round has one.
    let mut costs = Costs::new(engine.costs().machine().clone());
    for rows in (1..=16).cycle().take(16 * 16) {
        costs.verified(0, rows, 10.0 + 0.01 * rows as f64);
        costs.drafted(DrafterKind::Mtp, 1, 0.01);
    }
    engine.set_costs(costs).expect("this machine's");
    let mut scheduler =
        Scheduler::new(&engine, SchedulerOptions { prompt_slowdown: 1.0, ..SchedulerOptions::default() });
    let options = of_length(1000);
    let add = |scheduler: &mut Scheduler, prompt: Vec<u32>| {
        let session = engine.session(&SessionOptions::default()).expect("a session");
        scheduler.add(session, &prompt, &options).expect("added")
    };
    let writing = add(&mut scheduler, (300..320).collect());
    let drafted = |scheduler: &Scheduler| scheduler.statistics(writing).expect("a sequence").drafted;
    // Its prompt, and a round that drafts.
    (0..2).for_each(|_| drop(scheduler.step()));
    let before = drafted(&scheduler);
    assert!(before > 0, "alone it does not draft");
    let reading = add(&mut scheduler, (0..1000).map(|i| 300 + i % 700).collect());
    let mut passes = 0;
    while scheduler.statistics(reading).expect("a sequence").generated_tokens == 0 {
        let events = scheduler.step();
        let written = events.into_iter().find(|event| event.id == writing).expect("a piece");
        assert_eq!(written.piece.expect("a piece").tokens.len(), 1);
        passes += 1;
    }
    assert_eq!((passes, drafted(&scheduler)), (1000 / 8, before));
}

/// Beside a sequence that decodes, a pass reads 8 rows: of the long prompt and of the short one in turn.
#[test]
fn a_short_prompt_gets_every_second_pass() {
    let engine = with_memory(None);
    let mut scheduler =
        Scheduler::new(&engine, SchedulerOptions { prompt_slowdown: 1.0, ..SchedulerOptions::default() });
    let options = GenerateOptions { speculation: Speculation::Off, ..of_length(1000) };
    let add = |scheduler: &mut Scheduler, len: u32| {
        let session = engine.session(&SessionOptions::default()).expect("a session");
        let prompt = Vec::from_iter((0..len).map(|i| 300 + i % 700));
        scheduler.add(session, &prompt, &options).expect("added")
    };
    add(&mut scheduler, 8);
    drop(scheduler.step());
    let read = [400, 16].map(|len| add(&mut scheduler, len));
    let passes = [1, 0].map(|at| {
        let generated = |scheduler: &Scheduler| scheduler.statistics(read[at]).expect("a sequence").generated_tokens;
        let mut passes = 0;
        while generated(&scheduler) == 0 {
            scheduler.step().into_iter().for_each(|event| drop(event.piece.expect("a piece")));
            passes += 1;
        }
        passes
    });
    assert_eq!(passes, [2 * 16 / 8, (400 - 16) / 8]);
}

/// A pass with poison tokens: rows after [`NAN`] are NaN, the pass of [`POISON`] fails, that of [`PANIC`] panics.
fn poisoned_pass(target: &Target, batch: &mut Batch<'_>, request: &Request) -> foretoken::Result<Output> {
    let ids = batch.ids().to_vec();
    if ids.contains(&POISON) {
        return Err(candle_core::Error::Msg("poison".into()).into());
    }
    assert!(!ids.contains(&PANIC), "poison");
    let output = target.forward(batch, request)?;
    let mut logits: Vec<Vec<f32>> = output.logits.to_vec2()?;
    for (row, logits) in request.logits.iter().zip(&mut logits) {
        if ids[*row] == NAN {
            logits.fill(f32::NAN);
        }
    }
    let shape = (request.logits.len(), target.vocab_size());
    let logits = candle_core::Tensor::from_vec(logits.concat(), shape, output.logits.device())?;
    Ok(Output { logits, ..output })
}

const NAN: u32 = 500;
const POISON: u32 = 501;
const PANIC: u32 = 502;
const DEFECT: u32 = 10; // first in the prompt whose logits processor panics

fn poisoned() -> Engine {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/dense/target");
    let target = Target::load(&Checkpoint::open(&path).expect("a checkpoint"), Isa::best()).expect("a target");
    Engine::from_model(
        Arc::new(ChangedModel { target, forward: poisoned_pass }),
        ModelOptions { threads: Some(1), ..ModelOptions::default() },
    )
    .expect("an engine")
}

/// Panics at the second token.
#[derive(Debug)]
struct Panicking;

impl LogitsProcessor for Panicking {
    fn process(&self, tokens: &[u32], _: &mut [f32]) -> foretoken::Result<()> {
        assert!(tokens.len() < 4, "a defect");
        Ok(())
    }
}

/// NaN, a failing or panicking pass, a panicking logits processor and a full context in one
/// sequence do not affect the others.
#[test]
fn a_failure_is_the_failing_sequences_alone() {
    let engine = poisoned();
    let options = GenerateOptions { max_tokens: 12, ..GenerateOptions::default() };
    let full = SessionOptions { kv: KvOptions { max_context: Some(9), ..KvOptions::default() } };
    let panicking = GenerateOptions { logits_processor: Some(Arc::new(Panicking)), ..options.clone() };
    let jobs = [
        (vec![3, 4, 5, 6], SessionOptions::default(), FinishReason::MaxTokens),
        (vec![3, PANIC, 7], SessionOptions::default(), FinishReason::Error),
        (vec![DEFECT, 4, 5], SessionOptions::default(), FinishReason::Error),
        (vec![3, 4, NAN], SessionOptions::default(), FinishReason::Error),
        (vec![9, 8, 7, 6, 5], SessionOptions::default(), FinishReason::MaxTokens),
        (vec![3, POISON, 9], SessionOptions::default(), FinishReason::Error),
        (vec![11, 12, 13, 14], full, FinishReason::Context),
    ];
    let mut scheduler = Scheduler::new(&engine, SchedulerOptions::default());
    let mut running = HashMap::new();
    for (prompt, session, finish) in &jobs {
        let session = engine.session(session).expect("a session");
        let options = if prompt[0] == DEFECT { &panicking } else { &options };
        let id = scheduler.add(session, prompt, options).expect("added");
        running.insert(id, (prompt, *finish, Vec::new(), None));
    }
    while scheduler.is_active() {
        for event in scheduler.step() {
            let (prompt, finish, ids, seen) = running.get_mut(&event.id).expect("a sequence");
            match event.piece {
                Ok(piece) => ids.extend(piece.tokens),
                Err(Error::NotFinite { .. }) => assert!(prompt.contains(&NAN), "{prompt:?}"),
                Err(Error::Candle(_)) => assert!(prompt.contains(&POISON), "{prompt:?}"),
                Err(Error::Panic(message)) if prompt[0] == DEFECT => assert_eq!(message, "a defect"),
                Err(Error::Panic(message)) => assert!(message == "poison" && prompt.contains(&PANIC), "{prompt:?}"),
                Err(other) => panic!("{prompt:?}: {other}"),
            }
            assert!(seen.is_none(), "{prompt:?}: an event after its last");
            *seen = event.finish_reason;
            assert!(seen.is_none_or(|seen| seen == *finish), "{prompt:?}: {seen:?}");
        }
    }
    for (id, (prompt, finish, ids, seen)) in running {
        assert_eq!(seen, Some(finish), "{prompt:?}");
        let session = scheduler.remove(id).expect("a session");
        if prompt[0] == DEFECT {
            assert_eq!(ids.len(), 1, "the token before the panic");
        } else if finish == FinishReason::Error {
            assert!(session.kv().is_empty() && session.tokens().is_empty(), "{prompt:?}: something of it was kept");
        } else {
            let context = session.kv().max_context();
            let kv = KvOptions { max_context: Some(context), ..KvOptions::default() };
            let mut session = engine.session(&SessionOptions { kv }).expect("a session");
            let alone = session.generate(prompt, &options).expect("a generation");
            assert_eq!(alone.flat_map(|piece| piece.expect("a piece").tokens).collect::<Vec<_>>(), ids, "{prompt:?}");
        }
    }
}

/// Of a sequence whose error follows text that was held back, the last event alone says that it has ended.
#[test]
fn an_error_after_held_back_text_ends_the_sequence() {
    let engine = with_memory(None);
    let prompt = engine.tokenizer().and_then(|tokenizer| tokenizer.encode("fn main() {")).expect("a prompt");
    let plain = GenerateOptions { max_tokens: 6, ..GenerateOptions::default() };
    let mut session = engine.session(&SessionOptions::default()).expect("a session");
    let pieces: Vec<_> =
        session.generate(&prompt, &plain).expect("a generation").collect::<Result<_, _>>().expect("all");
    let text: String = pieces.iter().map(|piece| piece.text.as_str()).collect();
    /// Panics with the fifth token.
    #[derive(Debug)]
    struct Late(usize);
    impl LogitsProcessor for Late {
        fn process(&self, tokens: &[u32], _: &mut [f32]) -> foretoken::Result<()> {
            assert!(tokens.len() < self.0 + 4, "a defect");
            Ok(())
        }
    }
    // All of it may be the beginning of the stop string.
    let stop = Stop { strings: vec![format!("{text} and more")], ..Stop::default() };
    let options = GenerateOptions { stop, logits_processor: Some(Arc::new(Late(prompt.len()))), ..plain };
    let mut scheduler = Scheduler::new(&engine, SchedulerOptions::default());
    let session = engine.session(&SessionOptions::default()).expect("a session");
    let id = scheduler.add(session, &prompt, &options).expect("added");
    let mut events = Vec::new();
    while scheduler.is_active() {
        events.extend(scheduler.step());
    }
    let [.., held, last] = &events[..] else { panic!("{events:?}") };
    assert!(held.piece.as_ref().is_ok_and(|piece| !piece.text.is_empty() && text.starts_with(&piece.text)), "{held:?}");
    assert!(matches!(&last.piece, Err(Error::Panic(message)) if message == "a defect"), "{last:?}");
    assert!(
        events.iter().all(|event| event.id == id && event.finish_reason.is_some() == std::ptr::eq(event, last)),
        "{events:?}"
    );
    assert_eq!(last.finish_reason, Some(FinishReason::Error));
}

/// With nothing to generate a prompt is read and the generation ended, as a session alone does it.
#[test]
fn a_prompt_is_read_even_if_nothing_is_generated() {
    let engine = poisoned();
    let options = GenerateOptions { max_tokens: 0, ..GenerateOptions::default() };
    let prompt: Vec<u32> = (20..60).collect();
    let kv = KvOptions { max_round_rows: 16, ..KvOptions::default() };
    let open = || engine.session(&SessionOptions { kv: kv.clone() }).expect("a session");
    let mut alone = open();
    assert_eq!(alone.generate(&prompt, &options).expect("a generation").count(), 0);
    let mut scheduler = Scheduler::new(&engine, SchedulerOptions::default());
    let id = scheduler.add(open(), &prompt, &options).expect("added");
    let mut events = Vec::new();
    for _ in 0..prompt.len() {
        assert_eq!(scheduler.is_active(), events.is_empty());
        events.extend(scheduler.step());
    }
    assert!(matches!(&events[..], [event] if event.finish_reason == Some(FinishReason::MaxTokens)), "{events:?}");
    assert!(events.into_iter().all(|event| event.piece.expect("a piece").tokens.is_empty()));
    let session = scheduler.remove(id).expect("a session");
    assert_eq!((session.tokens(), alone.tokens()), (&prompt[..], &prompt[..]));
    assert!(session.kv().same_rows(alone.kv()));
}

/// An error in a later chunk rolls back the whole prompt: the session continues as if it had not been passed.
#[test]
fn a_prompt_is_atomic() {
    let engine = poisoned();
    for key in ["f16", "turbo4"] {
        let key: KvFormat = key.parse().expect("a format");
        let kv = KvOptions { key, value: key, max_round_rows: 4, ..KvOptions::default() };
        let session = || engine.session(&SessionOptions { kv: kv.clone() }).expect("a session");
        let options = GenerateOptions { max_tokens: 8, ..GenerateOptions::default() };
        let write = |session: &mut foretoken::Session, prompt: &[u32]| -> Vec<u32> {
            let generation = session.generate(prompt, &options).expect("a generation");
            generation.flat_map(|piece| piece.expect("a piece").tokens).collect()
        };
        let first: Vec<u32> = (20..50).collect();
        let (mut disturbed, mut undisturbed) = (session(), session());
        assert_eq!(write(&mut disturbed, &first), write(&mut undisturbed, &first));
        for bad in [NAN, POISON] {
            let (tokens, len) = (disturbed.tokens().to_vec(), disturbed.kv().len());
            // The sliding window of 8 moves far past before the last chunk fails.
            let mut prompt: Vec<u32> = (60..90).collect();
            prompt.push(bad);
            let error = disturbed.generate(&prompt, &options).map(drop).expect_err("a poisoned prompt");
            assert_eq!(bad == NAN, matches!(error, Error::NotFinite { .. }), "{error}");
            assert_eq!((disturbed.tokens(), disturbed.kv().len()), (&tokens[..], len));
            assert!(disturbed.kv().same_rows(undisturbed.kv()), "{key}: rows of the failed prompt are left");
        }
        assert_eq!(
            write(&mut disturbed, &[91, 92, 93, 94, 95, 96]),
            write(&mut undisturbed, &[91, 92, 93, 94, 95, 96])
        );
    }
}

/// The demo of Qwen3.5 on one thread, and the tokens of a text.
fn demo_qwen() -> (Engine, Vec<u32>) {
    let load = EngineOptions { threads: Some(1), ..EngineOptions::new(cases::demo_qwen().path) };
    let engine = Engine::load(&load).expect("the demo");
    let text = engine.tokenizer().and_then(|t| t.encode(include_str!("many_sequences.rs"))).expect("tokens");
    (engine, text)
}

/// So it is for a NextN head, on whose drafts a sampled text depends: its rows of the text before the prompt are left.
#[test]
fn a_prompt_is_atomic_for_a_head() {
    let (engine, text) = demo_qwen();
    let kv = KvOptions { max_round_rows: 16, ..KvOptions::default() };
    for seed in 0..3 {
        let options = GenerateOptions {
            sampling: Sampling { temperature: 0.8, ..Sampling::default() },
            seed,
            speculation: Speculation::With(SpeculationOptions::mtp(4)),
            ..of_length(30)
        };
        let written = [false, true].map(|is_disturbed| {
            let mut session = engine.session(&SessionOptions { kv: kv.clone() }).expect("a session");
            let mut write = |prompt: &[u32], options: &GenerateOptions| -> foretoken::Result<Vec<u32>> {
                let pieces: Vec<_> = session.generate(prompt, options)?.collect::<Result<_, _>>()?;
                Ok(pieces.into_iter().flat_map(|piece| piece.tokens).collect())
            };
            write(&text[..200], &options).expect("a text");
            let failing = GenerateOptions { logits_processor: Some(Arc::new(Panicking)), ..options.clone() };
            // In one pass of the model and in several.
            for len in if is_disturbed { &[1, 10, 100][..] } else { &[] } {
                write(&text[300..300 + len], &failing).expect_err("a defect");
            }
            write(&text[500..510], &options).expect("a text")
        });
        assert_eq!(written[0], written[1], "seed {seed}");
    }
}

/// Neither a recurrent state nor a head is behind in a fork at the prompt: it drafts as a sequence of its own does.
#[test]
fn forks_of_a_prompt_draft_as_if_alone() {
    let (engine, text) = demo_qwen();
    let options = GenerateOptions {
        sampling: Sampling { temperature: 0.8, ..Sampling::default() },
        seed: 3,
        speculation: Speculation::With(SpeculationOptions::mtp(4)),
        ..of_length(30)
    };
    for len in [1, 2, 150] {
        let prompt = &text[..len];
        let mut scheduler = Scheduler::new(&engine, SchedulerOptions { max_rows: 64, ..SchedulerOptions::default() });
        let session = engine.session(&SessionOptions::default()).expect("a session");
        let first = scheduler.add(session, prompt, &options).expect("added");
        scheduler.keep_prompt(first).expect("an unread prompt");
        let mut texts: HashMap<SequenceId, Vec<u32>> = HashMap::new();
        let mut step = |scheduler: &mut Scheduler| {
            for event in scheduler.step() {
                texts.entry(event.id).or_default().extend(event.piece.expect("a piece").tokens);
            }
            texts.len()
        };
        while step(&mut scheduler) == 0 {}
        let fork = scheduler.fork_prompt(first, &options).expect("a fork");
        while scheduler.is_active() {
            step(&mut scheduler);
        }
        let counts = [first, fork].map(|id| {
            let statistics = scheduler.statistics(id).expect("a sequence");
            (statistics.drafted, statistics.accepted)
        });
        assert!(texts[&first] == texts[&fork] && counts[0] == counts[1] && counts[0].0 > 0, "{len}: {counts:?}");
        assert!(scheduler.fork_prompt(first, &options).is_err(), "it is not kept any longer");
    }
}

/// Cancelled before, while and after its prompt is read.
#[test]
fn a_cancelled_generation_keeps_what_it_gave() {
    let engine = poisoned();
    let options = || GenerateOptions { max_tokens: 20, ..GenerateOptions::default() };
    let mut session = engine.session(&SessionOptions::default()).expect("a session");
    let cancelled = options();
    cancelled.cancel.cancel();
    let mut generation = session.generate(&[3, 4, 5], &cancelled).expect("a generation");
    assert!(generation.next().is_none() && generation.finish_reason() == Some(FinishReason::Cancelled));
    drop(generation);
    assert!(session.tokens().is_empty() && session.kv().is_empty());

    let options = options();
    let mut generation = session.into_generation(&[3, 4, 5], &options).expect("one");
    let handle = generation.cancel_handle();
    let mut ids = Vec::new();
    let worker = std::thread::spawn(move || {
        for piece in generation.by_ref() {
            ids.extend(piece.expect("a piece").tokens);
            if ids.len() == 5 {
                handle.cancel();
            }
        }
        assert_eq!(generation.finish_reason(), Some(FinishReason::Cancelled));
        (ids, generation.into_session())
    });
    let (ids, session) = worker.join().expect("the worker");
    assert_eq!((ids.len(), &session.tokens()[3..]), (5, &ids[..]));
}

/// Sessions of one engine share its memory; one that exhausts it fails alone, and its memory is reused.
#[test]
fn memory_is_one_limit_for_all() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/dense/target");
    let engine = Engine::load(&EngineOptions { threads: Some(1), ..EngineOptions::new(&path) }).expect("an engine");
    let kv = KvOptions { max_context: Some(512), ..KvOptions::default() };
    let session = |engine: &Engine| engine.session(&SessionOptions { kv: kv.clone() });
    let prompt: Vec<u32> = (3..200).collect();
    let options = GenerateOptions { max_tokens: 2, ..GenerateOptions::default() };
    let mut first = session(&engine).expect("a session");
    assert_eq!(first.generate(&prompt, &options).expect("a generation").count(), 2);
    let (one, fork_bytes) = (engine.pages().held(), {
        let before = engine.pages().held();
        let mut fork = first.fork().expect("a fork");
        assert_eq!(engine.pages().held(), before, "a fork copies nothing before it writes");
        assert_eq!(fork.generate(&[5], &options).expect("a generation").count(), 2);
        engine.pages().held() - before
    });
    assert!(fork_bytes > 0 && fork_bytes < one, "{fork_bytes} of {one}");
    assert_eq!(engine.pages().held(), one, "the fork's pages came back");

    let limited = EngineOptions { threads: Some(1), kv_memory: Some(one + one / 2), ..EngineOptions::new(&path) };
    let engine = Engine::load(&limited).expect("an engine");
    let short = KvOptions { max_context: Some(200), ..KvOptions::default() };
    let open = || engine.session(&SessionOptions { kv: short.clone() }).expect("a session");
    let (mut a, mut b) = (open(), open());
    let text = |session: &mut foretoken::Session| -> foretoken::Result<Vec<u32>> {
        let pieces: foretoken::Result<Vec<_>> = session.generate(&prompt, &options)?.collect();
        Ok(pieces?.into_iter().flat_map(|piece| piece.tokens).collect())
    };
    let want = text(&mut a).expect("memory for one");
    let held = engine.pages().held();
    assert!(matches!(text(&mut b).expect_err("no memory for two"), Error::Memory { .. }));
    assert!(b.kv().is_empty());
    assert_eq!(engine.pages().held(), held, "pages of rows that were not committed");
    drop(a);
    assert_eq!(text(&mut b).expect("memory that came back"), want);
}

/// The demo target on one thread, with a limit on the memory of K and V.
fn with_memory(kv_memory: Option<u64>) -> Engine {
    let path = cases::demo().path.join("target");
    Engine::load(&EngineOptions { threads: Some(1), kv_memory, ..EngineOptions::new(path) }).expect("an engine")
}

/// Sequences that together do not fit memory: those that find none go on when another one ends, with the
/// same text, whether they read a prompt or decode.
#[test]
fn sequences_wait_for_memory() {
    let session = SessionOptions { kv: KvOptions { max_context: Some(512), ..KvOptions::default() } };
    let open = |engine: &Engine| engine.session(&session).expect("a session");
    let jobs = [(100, 200), (100, 380), (250, 40)].map(|(len, max_tokens)| Job {
        prompt: prompt(len),
        session: session.clone(),
        options: of_length(max_tokens),
    });
    let engine = with_memory(None);
    let alone = jobs.each_ref().map(|job| alone(&engine, job).ids);
    let [three_pages, four_pages] = [384, 512].map(|end| open(&engine).kv().bytes_at(end) as u64);
    for (memory, all_end) in [(2 * three_pages, true), (four_pages, false)] {
        let engine = with_memory(Some(memory));
        // Chunks that do not depend on measured times.
        let options = SchedulerOptions { max_rows: 70, prompt_slowdown: f64::INFINITY, ..SchedulerOptions::default() };
        let mut scheduler = Scheduler::new(&engine, options);
        let sessions = jobs.each_ref().map(|_| open(&engine));
        let add = |(session, job): (_, &Job)| scheduler.add(session, &job.prompt, &job.options).expect("added");
        let ids: Vec<_> = sessions.into_iter().zip(&jobs).map(add).collect();
        let (mut texts, mut cut, mut paused) = (vec![Vec::new(); 3], Vec::new(), 0);
        while scheduler.is_active() {
            let events = scheduler.step();
            let decoding =
                ids.iter().zip(&texts).filter(|(id, text)| scheduler.ids().any(|of| of == **id) && !text.is_empty());
            paused += usize::from(events.len() < decoding.count());
            for event in events {
                let at = ids.iter().position(|id| *id == event.id).expect("a sequence");
                match event.piece {
                    Ok(piece) => texts[at].extend(piece.tokens),
                    Err(Error::Memory { .. }) => cut.push(at),
                    Err(error) => panic!("{error}"),
                }
                if event.finish_reason.is_some() || cut.contains(&at) {
                    drop(scheduler.remove(event.id));
                }
            }
        }
        let whole: Vec<_> = (0..3).filter(|at| !cut.contains(at)).collect();
        assert!(whole.iter().all(|at| texts[*at] == alone[*at]));
        assert!(cut.iter().all(|at| alone[*at].starts_with(&texts[*at])));
        assert!(paused > 0 && whole[0] == 0, "{paused} steps paused, {cut:?} are cut");
        assert_eq!(cut.is_empty(), all_end, "{cut:?}");
        assert_eq!(engine.pages().held(), 0);
    }
}

/// A sequence exhausts memory in a pass without rows of a prompt, which measures the baseline: the prompt, which needs
/// no more memory, is read while it waits.
#[test]
fn a_prompt_without_rows_in_a_pass_is_not_ended_for_memory() {
    let session = SessionOptions { kv: KvOptions { max_context: Some(256), ..KvOptions::default() } };
    let open = |engine: &Engine| engine.session(&session).expect("a session");
    let jobs = [(104, 40), (120, 4)].map(|(len, max_tokens)| Job {
        prompt: prompt(len),
        session: session.clone(),
        options: GenerateOptions { speculation: Speculation::Off, ..of_length(max_tokens) },
    });
    let unlimited = with_memory(None);
    let alone = jobs.each_ref().map(|job| alone(&unlimited, job).ids);
    let two_pages = open(&unlimited).kv().bytes_at(256) as u64;
    let engine = with_memory(Some(two_pages));
    // Beside a token of the first sequence, 7 rows of the second's prompt: after 16 such passes, the 17th has none. The
    // first has 128 rows then, a full page.
    let mut scheduler = Scheduler::new(&engine, SchedulerOptions { max_rows: 8, ..SchedulerOptions::default() });
    let [first, second] = [open(&engine), open(&engine)];
    let mut ids = vec![scheduler.add(first, &jobs[0].prompt, &jobs[0].options).expect("added")];
    let (mut second, mut texts, mut paused) = (Some(second), [Vec::new(), Vec::new()], 0);
    while scheduler.is_active() {
        if let Some(session) = second.take_if(|_| texts[0].len() == 9) {
            ids.push(scheduler.add(session, &jobs[1].prompt, &jobs[1].options).expect("added"));
        }
        let events = scheduler.step();
        paused += usize::from(!texts[0].is_empty() && events.is_empty());
        for event in events {
            let at = ids.iter().position(|id| *id == event.id).expect("a sequence");
            texts[at].extend(event.piece.expect("a piece").tokens);
            if event.finish_reason.is_some() {
                drop(scheduler.remove(event.id));
            }
        }
    }
    assert_eq!(texts, alone);
    assert_eq!(paused, 1, "the first sequence waits once, while no prompt has rows");
}

/// Two sequences that need a page more in the same pass, and memory for one: the first goes on, the second waits.
#[test]
fn a_failed_pass_leaves_memory_for_the_first_sequence() {
    let session = SessionOptions { kv: KvOptions { max_context: Some(256), ..KvOptions::default() } };
    let open = |engine: &Engine| engine.session(&session).expect("a session");
    let jobs = [1, 3].map(|step: u32| Job {
        prompt: (0..104).map(|i| 10 + i * step * 7919 % 3000).collect(),
        session: session.clone(),
        options: GenerateOptions { speculation: Speculation::Off, ..of_length(60) },
    });
    let unlimited = with_memory(None);
    let alone = jobs.each_ref().map(|job| alone(&unlimited, job).ids);
    let three_pages = open(&unlimited).kv().bytes_at(384) as u64;
    let engine = with_memory(Some(three_pages));
    let options = SchedulerOptions { prompt_slowdown: f64::INFINITY, ..SchedulerOptions::default() };
    let mut scheduler = Scheduler::new(&engine, options);
    let add = |job: &Job| scheduler.add(open(&engine), &job.prompt, &job.options).expect("added");
    let ids = jobs.each_ref().map(add);
    let (mut texts, mut ends) = ([Vec::new(), Vec::new()], Vec::new());
    while scheduler.is_active() {
        for event in scheduler.step() {
            let at = ids.iter().position(|id| *id == event.id).expect("a sequence");
            texts[at].extend(event.piece.expect("a piece").tokens);
            if event.finish_reason.is_some() {
                ends.push(texts.each_ref().map(Vec::len));
                drop(scheduler.remove(event.id));
            }
        }
    }
    assert_eq!(texts, alone);
    // The second waits with 128 rows: those of its prompt and of 24 tokens. One more has no row yet.
    assert_eq!(ends, [[60, 25], [60, 60]]);
    assert_eq!(engine.pages().held(), 0);
}

/// A prompt is admitted if it fits memory beside what others hold and have not read yet.
#[test]
fn a_prompt_is_admitted_beside_the_prompts_of_others() {
    let session = SessionOptions { kv: KvOptions { max_context: Some(512), ..KvOptions::default() } };
    let open = with_memory(None).session(&session).expect("a session");
    let [one_page, four_pages] = [128, 512].map(|end| open.kv().bytes_at(end) as u64);
    let engine = with_memory(Some(four_pages + one_page));
    let mut scheduler = Scheduler::new(&engine, SchedulerOptions::default());
    let options = GenerateOptions { max_tokens: 2, speculation: Speculation::Off, ..GenerateOptions::default() };
    // Each of which fits alone.
    let mut sessions = Vec::from([(); 6].map(|()| scheduler.session(&session).expect("a session")));
    let mut add = |scheduler: &mut Scheduler, len| {
        let session = sessions.pop().expect("a session");
        scheduler.add_if_fits(session, &prompt(len), &options)
    };
    let first = add(&mut scheduler, 400).expect("added");
    assert_eq!(engine.pages().held(), 0, "nothing is read yet");
    let refused = add(&mut scheduler, 200).expect_err("two pages do not fit");
    assert!(matches!(refused.error, Error::Memory { .. }) && refused.session.tokens().is_empty(), "{refused}");
    // One that does not fit the context is refused for that.
    let refused = add(&mut scheduler, 600).expect_err("more than the context");
    assert!(matches!(refused.error, Error::Context { .. }), "{refused}");
    add(&mut scheduler, 100).expect("one page fits");
    drop(cases::texts(&mut scheduler));
    // What is held counts as what was unread.
    add(&mut scheduler, 200).expect_err("two pages do not fit");
    drop(scheduler.remove(first));
    add(&mut scheduler, 200).expect("there is room now");
}

/// Effect of a draft step on a sequence of [`FAULTY`] or more committed rows.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    Nan,
    Error,
    Panic,
}

const FAULTY: usize = 60;

/// A model that records the sequences of its passes.
struct Watched {
    model: Arc<dyn ChainModel>,
    passes: Mutex<Vec<usize>>,
    fault: Fault,
}

impl ChainModel for Watched {
    fn step(&self, sequences: &mut [DraftRows<'_>]) -> foretoken::Result<Vec<DraftStep>> {
        self.passes.lock().expect("the passes").push(sequences.len());
        let position = |rows: &DraftRows<'_>| match &rows.kv {
            DraftKv::Target(committed) => committed.position(),
            DraftKv::Own { round, .. } => round.position(),
            DraftKv::Model(_) => unreachable!("the models are on the host"),
        };
        // After the pass: rows are staged.
        let mut steps = self.model.step(sequences)?;
        for (_, step) in sequences.iter().zip(&mut steps).filter(|(rows, _)| position(rows) >= FAULTY) {
            let scored = step.scores.logits.elem_count();
            match self.fault {
                Fault::None => {}
                Fault::Nan => step.scores.logits = tensor(vec![f32::NAN; scored], (1, scored))?,
                Fault::Error => return Err(candle_core::Error::Msg("poison".into()).into()),
                Fault::Panic => panic!("poison"),
            }
        }
        Ok(steps)
    }
}

/// A drafter with `inner`'s chain, but such a model.
struct Chained {
    inner: Box<dyn Drafter>,
    model: Arc<Watched>,
}

impl Drafter for Chained {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Custom
    }
    fn cost(&self) -> DraftCost {
        DraftCost::PerToken
    }
    fn reads(&self) -> Reads {
        self.inner.reads()
    }
    fn begin(&mut self, tokens: &[u32]) {
        self.inner.begin(tokens);
    }
    fn draft(&mut self, _: &Context<'_>, _: usize, _: &mut Draft, _: &mut StdRng) -> foretoken::Result<()> {
        panic!("rounds are drafted step by step");
    }
    fn chain(&mut self) -> Option<&mut dyn DraftChain> {
        Some(self)
    }
    fn observe(&mut self, seen: &Observed<'_>) -> foretoken::Result<()> {
        self.inner.observe(seen)
    }
}

impl DraftChain for Chained {
    fn model(&self) -> Arc<dyn ChainModel> {
        self.model.clone()
    }
    fn next<'a>(&'a mut self, context: &Context<'a>, draft: &Draft) -> foretoken::Result<ChainStep<'a>> {
        self.inner.chain().expect("a chain").next(context, draft)
    }
    fn advance(&mut self, step: &DraftStep) {
        self.inner.chain().expect("a chain").advance(step);
    }
}

/// Fixtures and their drafters: heads that score every id, and with centroids; heads with K and V of
/// their own; targets that are their own draft models.
const CHAINS: [(&str, &str); 7] = [
    ("dense", "mtp"),
    ("edge", "mtp"),
    ("qwen35-dense", "mtp"),
    ("qwen35-moe", "mtp"),
    ("qwen35-nested", "mtp"),
    ("dense", "draft-model"),
    ("qwen35-dense", "draft-model"),
];

/// An engine, its draft model, and options with rounds of four rows.
fn watched((name, drafts): (&str, &str), fault: Fault, max_tokens: usize) -> (Engine, Arc<Watched>, GenerateOptions) {
    type Make = Box<dyn Fn() -> foretoken::Result<Box<dyn Drafter>> + Send + Sync>;
    let case = cases::named(name);
    let options = EngineOptions { threads: Some(1), ..EngineOptions::new(case.path.join("target")) };
    let engine = Engine::load(&options).expect("an engine");
    let checkpoint = || Checkpoint::open(case.path.join("target")).expect("a checkpoint");
    let (kv, pages) = (KvOptions::default(), engine.pages().clone());
    let (model, make): (Arc<dyn ChainModel>, Make) = match (drafts, engine.gemma4()) {
        ("mtp", Some(target)) => {
            let assistant = Arc::new(case.assistant(target, Isa::best()).expect("an assistant"));
            (assistant.clone(), Box::new(move || Ok(Box::new(Mtp::new(assistant.clone())))))
        }
        ("mtp", None) => {
            let head = Arc::new(qwen35::Target::load(&checkpoint(), Isa::best()).expect("a target"));
            (head.clone(), Box::new(move || Ok(Box::new(NextN::new(head.clone(), &kv, &pages)?))))
        }
        (_, gemma4) => {
            let target: Arc<dyn Model> = match gemma4 {
                Some(_) => Arc::new(Target::load(&checkpoint(), Isa::best()).expect("a target")),
                None => Arc::new(qwen35::Target::load(&checkpoint(), Isa::best()).expect("a target")),
            };
            let model = Arc::new(ChainedModel(target));
            (model.clone(), Box::new(move || Ok(Box::new(DraftModel::new(model.clone(), &kv, &pages)?))))
        }
    };
    let watched = Arc::new(Watched { model, passes: Mutex::default(), fault });
    let model = watched.clone();
    let drafter = CustomDrafter::new("watched", move || {
        Box::new(Chained { inner: make().expect("a drafter"), model: model.clone() })
    });
    let (drafters, block) = (Drafters::Priority(vec![DrafterOptions::Custom(drafter)]), BlockSize::Fixed(4));
    let speculation = Speculation::With(SpeculationOptions { drafters, block, ..SpeculationOptions::default() });
    (engine, watched, GenerateOptions { speculation, ..of_length(max_tokens) })
}

/// For every draft position of a batch, the model has one pass, over rows of each sequence that drafts there.
#[test]
fn a_place_is_drafted_in_one_pass() {
    for chain in CHAINS {
        let (engine, model, options) = watched(chain, Fault::None, 17);
        let mut scheduler = Scheduler::new(&engine, SchedulerOptions::default());
        let mut written: HashMap<SequenceId, (Job, Vec<u32>)> = HashMap::new();
        for i in 0..5 {
            let options = GenerateOptions { max_tokens: options.max_tokens - i as usize, ..options.clone() };
            let job = Job { prompt: (3 + i..9 + 2 * i).collect(), session: SessionOptions::default(), options };
            let session = engine.session(&job.session).expect("a session");
            let id = scheduler.add(session, &job.prompt, &job.options).expect("added");
            written.insert(id, (job, Vec::new()));
        }
        while scheduler.is_active() {
            model.passes.lock().expect("the passes").clear();
            let left = written.values().map(|(job, ids)| (ids.len(), job.options.max_tokens - ids.len()));
            let drafted: Vec<usize> =
                left.filter(|(len, left)| *len > 0 && *left > 0).map(|(_, left)| left.min(4) - 1).collect();
            let want: Vec<usize> =
                (0..3).map(|place| drafted.iter().filter(|drafted| **drafted > place).count()).collect();
            for event in scheduler.step() {
                let (_, ids) = written.get_mut(&event.id).expect("a sequence that was added");
                ids.extend(event.piece.expect("a piece").tokens);
            }
            let passes = model.passes.lock().expect("the passes").clone();
            assert_eq!(passes, Vec::from_iter(want.into_iter().filter(|rows| *rows > 0)), "{chain:?}");
        }
        for (job, ids) in written.into_values() {
            let off = GenerateOptions { speculation: Speculation::Off, ..job.options.clone() };
            assert_eq!(alone(&engine, &Job { options: off, ..job.clone() }).ids, ids, "{chain:?}: {:?}", job.prompt);
        }
    }
}

/// NaN, an error or a panic in one sequence's draft ends that sequence; the others draft and write as before.
#[test]
fn a_failing_draft_is_the_failing_sequences_alone() {
    let faults = [Fault::Nan, Fault::Error, Fault::Panic];
    for (chain, fault) in CHAINS.into_iter().flat_map(|chain| faults.map(|fault| (chain, fault))) {
        let (engine, model, options) = watched(chain, fault, 9);
        let mut scheduler = Scheduler::new(&engine, SchedulerOptions::default());
        let mut running = HashMap::new();
        for len in [4, FAULTY as u32 + 1, 7, 5] {
            let prompt = Vec::from_iter(3..3 + len);
            let session = engine.session(&SessionOptions::default()).expect("a session");
            let id = scheduler.add(session, &prompt, &options).expect("added");
            running.insert(id, (prompt, Vec::new(), None));
        }
        while scheduler.is_active() {
            for event in scheduler.step() {
                let (prompt, ids, finish) = running.get_mut(&event.id).expect("a sequence");
                match event.piece {
                    Ok(piece) => ids.extend(piece.tokens),
                    Err(error) => {
                        assert!(prompt.len() > FAULTY, "{chain:?}, {fault:?}: {error}");
                        assert!(match fault {
                            Fault::Nan => matches!(error, Error::NotFinite { .. }),
                            Fault::Error => matches!(error, Error::Candle(_)),
                            Fault::Panic => matches!(error, Error::Panic(_)),
                            Fault::None => false,
                        });
                    }
                }
                *finish = event.finish_reason;
            }
        }
        let steps: usize = model.passes.lock().expect("the passes").iter().sum();
        for (prompt, ids, finish) in running.into_values() {
            let off = GenerateOptions { speculation: Speculation::Off, ..options.clone() };
            let job = Job { prompt, session: SessionOptions::default(), options: off };
            let want = alone(&engine, &job).ids;
            if job.prompt.len() > FAULTY {
                assert_eq!((&ids[..], finish), (&want[..1], Some(FinishReason::Error)), "{chain:?}, {fault:?}");
            } else {
                assert_eq!((ids, finish), (want, Some(FinishReason::MaxTokens)), "{chain:?}, {fault:?}");
            }
        }
        assert!(steps > 3 * 3, "{chain:?}, {fault:?}: {steps} steps");
    }
}
