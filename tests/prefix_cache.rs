//! Prompts continue from cached prefixes of earlier ones, and write what they write alone and without a cache.

mod cases;
mod warnings;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use foretoken::kv::{KvOptions, KvPreset};
use foretoken::speculative::{BlockSize, Cancel, Trace};
use foretoken::{
    EndOfGeneration, Engine, EngineOptions, Error, FinishReason, GenerateOptions, LogitsProcessor, PrefixCacheOptions,
    Sampling, Scheduler, SchedulerOptions, SequenceId, Session, SessionOptions, Speculation, SpeculationOptions, Stop,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::Value;

use warnings::warnings;

const INTERVAL: usize = 128;

/// Greedy, `max_tokens` tokens.
fn options(max_tokens: usize, engine: &Engine) -> GenerateOptions {
    let speculation = match engine.has_mtp() {
        true => Speculation::With(SpeculationOptions { block: BlockSize::Fixed(3), ..SpeculationOptions::default() }),
        false => Speculation::Off,
    };
    let stop = Stop { end_of_generation: EndOfGeneration::Ignored, ..Stop::default() };
    GenerateOptions { max_tokens, stop, speculation, ..GenerateOptions::default() }
}

/// The prompt's continuation in a session of its own.
fn cold(engine: &Engine, session: &SessionOptions, prompt: &[u32], options: &GenerateOptions) -> Vec<u32> {
    let mut session = engine.session(session).expect("a session");
    let generation = session.generate(prompt, options).expect("a generation");
    generation.flat_map(|piece| piece.expect("a piece").tokens).collect()
}

fn scheduler(engine: &Engine, max_bytes: Option<u64>) -> Scheduler {
    let prefix_cache = Some(PrefixCacheOptions { interval: INTERVAL, max_bytes, ..PrefixCacheOptions::default() });
    Scheduler::new(engine, SchedulerOptions { prefix_cache, ..SchedulerOptions::default() })
}

/// Adds the prompts, runs them together to their ends, and removes them; returns each one's output,
/// and the number of computed tokens of its prompt.
fn run(
    scheduler: &mut Scheduler,
    session: &SessionOptions,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
) -> Vec<(Vec<u32>, usize)> {
    let mut written: HashMap<SequenceId, Vec<u32>> = HashMap::new();
    let ids: Vec<_> = prompts
        .iter()
        .map(|prompt| {
            let session = scheduler.session(session).expect("a session");
            scheduler.add(session, prompt, options).expect("added")
        })
        .collect();
    while scheduler.is_active() {
        for event in scheduler.step() {
            written.entry(event.id).or_default().extend(event.piece.expect("a piece").tokens);
            assert!(event.finish_reason.is_none_or(|finish| finish == FinishReason::MaxTokens));
        }
    }
    let result = ids.iter().map(|id| {
        let statistics = scheduler.statistics(*id).expect("a sequence");
        let computed = statistics.prompt_tokens - statistics.cached_tokens;
        (written.remove(id).unwrap_or_default(), computed)
    });
    let result = result.collect();
    ids.into_iter().for_each(|id| drop(scheduler.remove(id)));
    result
}

fn text(rng: &mut StdRng, len: usize, vocab: u32) -> Vec<u32> {
    (0..len).map(|_| rng.random_range(3..vocab)).collect()
}

/// Tokens of the prompts, with shared prefixes counted once.
fn unique(prompts: &[Vec<u32>]) -> usize {
    let mut prompts = prompts.to_vec();
    prompts.sort();
    let shared = |a: &[u32], b: &[u32]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let common: usize = prompts.windows(2).map(|pair| shared(&pair[0], &pair[1])).sum();
    prompts.iter().map(Vec::len).sum::<usize>() - common
}

/// Agent conversations: they begin with the same instructions, every turn's prompt contains the ones before it and
/// the answers, and some turns branch off earlier.
fn trace(engine: &Engine, session: &SessionOptions, vocab: u32, (instructions, turns): (usize, usize), name: &str) {
    let (mut rng, options) = (StdRng::seed_from_u64(5), options(12, engine));
    let mut scheduler = scheduler(engine, Some(u64::MAX));
    let instructions = text(&mut rng, instructions, vocab);
    let (mut conversations, mut prompts, mut computed) = (vec![instructions.clone()], Vec::new(), 0);
    for turn in 0..turns {
        // Every third turn starts another conversation; each has different text.
        if turn % 3 == 1 {
            conversations.push(instructions.clone());
        }
        for conversation in &mut conversations {
            conversation.extend(text(&mut rng, 40, vocab));
        }
        let results = run(&mut scheduler, session, &conversations, &options);
        prompts.extend(conversations.clone());
        for (conversation, (written, rows)) in conversations.iter_mut().zip(results) {
            assert_eq!(written, cold(engine, session, conversation, &options), "{name}, turn {turn}");
            computed += rows;
            conversation.extend(written);
        }
    }
    let unique = unique(&prompts);
    println!("{name}: {computed} tokens of prompts computed, {unique} different ones");
    assert!(computed as f64 <= 1.05 * unique as f64, "{name}: {computed} of {unique}");
    drop(scheduler);
    assert_eq!(engine.pages().held(), 0, "{name}: pages are left");
}

fn demo() -> Engine {
    let demo = cases::demo();
    let options = EngineOptions::new(demo.path.join("target")).with_assistant(demo.path.join("assistant"));
    Engine::load(&EngineOptions { threads: Some(2), ..options }).expect("the demo pair")
}

fn demo_qwen() -> Engine {
    with_memory(&cases::demo_qwen().path, None)
}

/// A target alone, with a limit on the memory of K and V.
fn with_memory(target: &Path, kv_memory: Option<u64>) -> Engine {
    Engine::load(&EngineOptions { kv_memory, threads: Some(2), ..EngineOptions::new(target) }).expect("the demo")
}

#[test]
fn an_agents_turns_compute_what_is_new() {
    let engine = demo();
    for preset in [KvPreset::Exact, KvPreset::Balanced] {
        let session = SessionOptions { kv: preset.into() };
        // Pages of the instructions are quantized.
        trace(&engine, &session, 4000, (904, 5), &format!("demo, {preset:?}"));
    }
}

/// Windows that wrap within the prompts, and recurrent states.
#[test]
fn fixtures_of_every_family() {
    let cases = cases::all().into_iter().chain(cases::of(cases::QWEN35));
    for case in cases.filter(cases::Case::drafts) {
        let options = EngineOptions { threads: Some(1), ..EngineOptions::new(case.path.join("target")) };
        let options = EngineOptions { assistant: case.assistant_path(), ..options };
        let engine = Engine::load(&options).expect("a fixture");
        let vocab = engine.target().num_readable_tokens() as u32;
        let kv = KvOptions { max_round_rows: 64, ..KvOptions::default() };
        trace(&engine, &SessionOptions { kv }, vocab, (150, 2), &case.name);
    }
}

/// A sampled text depends on the drafts: the NextN head's state is cached, and passed to forks of forks.
#[test]
fn sampled_drafts_are_those_of_a_fresh_session() {
    let engine = demo_qwen();
    let text = engine.tokenizer().and_then(|t| t.encode(include_str!("prefix_cache.rs"))).expect("tokens");
    let (prompt, session) = (text[..300].to_vec(), SessionOptions::default());
    for seed in 0..3 {
        let options = GenerateOptions {
            sampling: Sampling { temperature: 0.8, ..Sampling::default() },
            seed,
            speculation: Speculation::With(SpeculationOptions::mtp(4)),
            ..options(40, &engine)
        };
        let ids = |session: &mut Session, prompt: &[u32], options: &GenerateOptions| -> Vec<u32> {
            let generation = session.generate(prompt, options).expect("a generation");
            generation.flat_map(|piece| piece.expect("a piece").tokens).collect()
        };
        let mut scheduler = scheduler(&engine, Some(u64::MAX));
        let want = cold(&engine, &session, &prompt, &options);
        for computed in [300, 4] {
            let results = run(&mut scheduler, &session, std::slice::from_ref(&prompt), &options);
            assert_eq!(results, [(want.clone(), computed)], "seed {seed}");
        }

        let mut first = engine.session(&session).expect("a session");
        let written = ids(&mut first, &prompt, &GenerateOptions { max_tokens: 5, ..options.clone() });
        let mut second = first.fork().expect("a fork");
        let mut third = second.fork().expect("a fork");
        let want = cold(&engine, &session, &[&prompt[..], &written, &[7, 8, 9]].concat(), &options);
        for (name, session) in [("third", &mut third), ("second", &mut second), ("first", &mut first)] {
            assert_eq!(ids(session, &[7, 8, 9], &options), want, "{name}, seed {seed}");
        }
    }
}

/// Cancelled before and while it is read, removed, or failed at its end: nothing of the prompt is left, nor of the
/// cached prefix that it continued from.
#[test]
fn a_prompt_that_is_not_read_leaves_its_session_empty() {
    let fails: Arc<dyn LogitsProcessor> = Arc::new(Fails);
    for engine in [demo(), demo_qwen()] {
        let (mut rng, session, options) = (StdRng::seed_from_u64(14), SessionOptions::default(), options(4, &engine));
        let prefix = text(&mut rng, 2 * INTERVAL, 4000);
        let mut scheduler = scheduler(&engine, Some(u64::MAX));
        run(&mut scheduler, &session, &[[&prefix[..], &text(&mut rng, 100, 4000)].concat()], &options);
        for (steps, cancels, logits_processor) in
            [(0, true, None), (1, true, None), (0, false, None), (1, false, None), (9, false, Some(fails.clone()))]
        {
            let prompt = [&prefix[..], &text(&mut rng, 2 * INTERVAL, 4000)].concat();
            let disturbed = GenerateOptions { logits_processor, cancel: Cancel::default(), ..options.clone() };
            let added = scheduler.session(&session).expect("a session");
            let id = scheduler.add(added, &prompt, &disturbed).expect("added");
            assert_eq!(scheduler.statistics(id).expect("a sequence").cached_tokens, prefix.len());
            (0..steps).for_each(|_| drop(scheduler.step()));
            if cancels {
                disturbed.cancel.cancel();
                scheduler.step();
            }
            let removed = scheduler.remove(id).expect("its session");
            assert!(removed.tokens().is_empty() && removed.kv().is_empty(), "after {steps} steps");

            let id = scheduler.add(removed, &prompt, &options).expect("added");
            let written = cases::texts(&mut scheduler).remove(&id).expect("a text");
            assert_eq!(written, cold(&engine, &session, &prompt, &options), "after {steps} steps");
            let removed = scheduler.remove(id).expect("its session");
            assert_eq!(removed.tokens(), [prompt, written].concat());
        }
    }
}

/// Fails after every prompt.
#[derive(Debug)]
struct Fails;

impl LogitsProcessor for Fails {
    fn process(&self, _: &[u32], _: &mut [f32]) -> foretoken::Result<()> {
        Err(Error::Tokenizer("the processor's".into()))
    }
}

/// The third prompt that diverges at one place computes nothing before it. Nor does the second if the first one's state
/// can be truncated to that place: sliding windows can, a recurrent state cannot.
#[test]
fn a_place_where_prompts_part_is_kept() {
    for (engine, second) in [(demo(), 100), (demo_qwen(), 400 - 2 * INTERVAL)] {
        let mut rng = StdRng::seed_from_u64(6);
        let common = text(&mut rng, 300, 4000);
        let (session, options) = (SessionOptions::default(), options(4, &engine));
        let mut scheduler = scheduler(&engine, Some(u64::MAX));
        let computed: Vec<usize> = (0..3)
            .map(|_| {
                let prompt = [&common[..], &text(&mut rng, 100, 4000)].concat();
                let results = run(&mut scheduler, &session, std::slice::from_ref(&prompt), &options);
                assert_eq!(results[0].0, cold(&engine, &session, &prompt, &options));
                results[0].1
            })
            .collect();
        assert_eq!(computed, [400, second, 100]);
    }
}

/// The next turn of a chat whose template omits the reasoning of earlier turns; the same prompt again, for another
/// answer; and an edited earlier message.
#[test]
fn turns_of_a_chat_compute_only_new_tokens() {
    let part = |first: u32, len: u32| (first..first + len).collect::<Vec<u32>>();
    let (history, reasoning) = (part(10, 200), part(300, 4));
    let next = [&history[..], &part(400, 50), &reasoning].concat();
    let edited = [&history[..150], &part(500, 60)].concat();
    let prompts = [[history, reasoning].concat(), next.clone(), next, edited];
    // A recurrent state is cached before the reasoning and at intervals.
    for (engine, want) in [(demo(), [204, 54, 1, 60]), (demo_qwen(), [204, 54, 4, 210 - INTERVAL])] {
        let session = SessionOptions::default();
        let (mut scheduler, options) = (scheduler(&engine, Some(u64::MAX)), options(4, &engine));
        let computed = prompts.each_ref().map(|prompt| {
            let (written, computed) = run(&mut scheduler, &session, std::slice::from_ref(prompt), &options).remove(0);
            assert_eq!(written, cold(&engine, &session, prompt, &options));
            computed
        });
        assert_eq!(computed, want);
    }
}

/// Prompts in other formats do not use what is cached, nor do contexts that are too short for the prompt.
#[test]
fn other_formats_and_contexts_are_not_continued() {
    let engine = demo();
    let prompts = [text(&mut StdRng::seed_from_u64(6), 400, 4000)];
    let (session, options) = (SessionOptions::default(), options(4, &engine));
    let mut scheduler = scheduler(&engine, Some(u64::MAX));
    run(&mut scheduler, &session, &prompts, &options);
    let other = SessionOptions { kv: KvPreset::Balanced.into() };
    assert_eq!(run(&mut scheduler, &other, &prompts, &options)[0].1, 400);
    let short = SessionOptions { kv: KvOptions { max_context: Some(200), ..KvOptions::default() } };
    let short = scheduler.session(&short).expect("a session");
    let refused = scheduler.add(short, &prompts[0], &options).expect_err("a prompt of 400 tokens");
    assert!(matches!(refused.error, Error::Context { needed: 400, limit: 200 }), "{}", refused.error);
    assert!(refused.session.tokens().is_empty());
}

/// What prompts share that are added together is computed once, also if the sequence that computes it is removed.
#[test]
fn prompts_that_are_added_together_share_their_beginning() {
    // A recurrent state is cached a few tokens before the end.
    for (engine, again) in [(demo(), 1), (demo_qwen(), 4)] {
        let (mut rng, session, options) = (StdRng::seed_from_u64(20), SessionOptions::default(), options(4, &engine));
        let common = text(&mut rng, 300, 4000);
        let [long, short] = [100, 60].map(|len| [&common[..], &text(&mut rng, len, 4000)].concat());
        let branch = [&short[..340], &text(&mut rng, 20, 4000)].concat();
        let prompts = [long.clone(), short, long, branch];
        let want = prompts.each_ref().map(|prompt| cold(&engine, &session, prompt, &options));
        let results = run(&mut scheduler(&engine, Some(u64::MAX)), &session, &prompts, &options);
        assert_eq!(results, Vec::from_iter(want.clone().into_iter().zip([400, 60, again, 20])));

        let mut scheduler = scheduler(&engine, Some(u64::MAX));
        let [first, others @ ..] = prompts.each_ref().map(|prompt| {
            let session = scheduler.session(&session).expect("a session");
            scheduler.add(session, prompt, &options).expect("added")
        });
        scheduler.step();
        drop(scheduler.remove(first));
        let mut texts = cases::texts(&mut scheduler);
        let cached = others.map(|id| scheduler.statistics(id).expect("a sequence").cached_tokens);
        assert_eq!(cached, [INTERVAL, 300, 340]);
        assert_eq!(others.map(|id| texts.remove(&id).expect("a text")), want[1..]);
    }
}

/// Beside a sequence that decodes, a pass reads 8 rows: of the oldest prompt and of the shortest in turn. One that is
/// awaited is as short as what is left of the prompt that awaits it, whatever both had read when that was added.
#[test]
fn a_prompt_that_is_awaited_counts_the_rows_that_are_left() {
    let engine = demo();
    let prefix_cache = Some(PrefixCacheOptions { interval: INTERVAL, ..PrefixCacheOptions::default() });
    let mut scheduler =
        Scheduler::new(&engine, SchedulerOptions { prompt_slowdown: 1.0, prefix_cache, ..SchedulerOptions::default() });
    let (mut rng, options) = (StdRng::seed_from_u64(21), options(1000, &engine));
    let add = |scheduler: &mut Scheduler, prompt: &[u32]| {
        let session = scheduler.session(&SessionOptions::default()).expect("a session");
        scheduler.add(session, prompt, &options).expect("added")
    };
    let [first, long, other] = [8, 400, 150].map(|len| text(&mut rng, len, 4000));
    let awaiting = [&long[..260], &text(&mut rng, 40, 4000)].concat();
    add(&mut scheduler, &first);
    drop(scheduler.step());
    add(&mut scheduler, &long);
    (0..200 / 8).for_each(|_| drop(scheduler.step()));
    let [awaiting, _] = [awaiting, other].map(|prompt| add(&mut scheduler, &prompt));
    let mut passes = 0;
    while scheduler.statistics(awaiting).expect("a sequence").generated_tokens == 0 {
        scheduler.step().into_iter().for_each(|event| drop(event.piece.expect("a piece")));
        passes += 1;
    }
    // All passes read the long prompt from 200 to 256; then every second one the 44 tokens after that.
    assert_eq!(passes, 56 / 8 + 2 * 6 - 1);
    assert_eq!(scheduler.statistics(awaiting).expect("a sequence").cached_tokens, 256);
}

/// The least recently used is dropped first, and running sequences get the memory they need.
#[test]
fn what_is_kept_makes_room() {
    let demo = cases::demo().path.join("target");
    let mut rng = StdRng::seed_from_u64(7);
    let load = |kv_memory| with_memory(&demo, kv_memory);
    let prompts: Vec<_> = (0..12).map(|_| text(&mut rng, 600, 4000)).collect();
    let session = SessionOptions { kv: KvOptions { max_context: Some(1024), ..KvOptions::default() } };

    // The memory of one sequence and some more.
    let engine = load(None);
    let one = engine.session(&session).expect("a session").kv().bytes_at(1024) as u64;
    let engine = load(Some(one * 3 / 2));
    let options = options(8, &engine);
    let mut all = scheduler(&engine, Some(u64::MAX));
    for prompt in &prompts {
        let results = run(&mut all, &session, std::slice::from_ref(prompt), &options);
        assert_eq!(results[0].0, cold(&load(None), &session, prompt, &options));
    }
    assert!(engine.pages().held() <= one * 3 / 2);

    let engine = load(None);
    let mut little = scheduler(&engine, Some(one));
    for prompt in &prompts {
        run(&mut little, &session, std::slice::from_ref(prompt), &options);
        assert!(engine.pages().held() <= one, "{} of {one}", engine.pages().held());
    }
    let computed = |scheduler: &mut Scheduler, prompt: &Vec<u32>| {
        run(scheduler, &session, std::slice::from_ref(prompt), &options)[0].1
    };
    assert!(computed(&mut little, &prompts[11]) < 600, "the last one is cached");
    assert_eq!(computed(&mut little, &prompts[0]), 600, "the oldest is not");
}

/// Sequences that hold most of the memory leave the rest to cached prefixes.
#[test]
fn what_is_kept_may_take_the_free_memory() {
    let demo = cases::demo().path.join("target");
    let mut rng = StdRng::seed_from_u64(21);
    let [others @ .., prompt] = [900, 900, 900, 600].map(|len| text(&mut rng, len, 4000));
    let session = SessionOptions { kv: KvOptions { max_context: Some(1024), ..KvOptions::default() } };
    let used = |kv_memory| {
        let engine = with_memory(&demo, kv_memory);
        let (mut scheduler, options) = (scheduler(&engine, None), options(4, &engine));
        for other in &others {
            let session = scheduler.session(&session).expect("a session");
            scheduler.add(session, other, &options).expect("added");
        }
        cases::texts(&mut scheduler);
        let held = engine.pages().held();
        let twice = [(); 2].map(|()| run(&mut scheduler, &session, std::slice::from_ref(&prompt), &options)[0].1);
        (held, twice)
    };
    let (held, _) = used(None);
    assert_eq!(used(Some(held * 3 / 2)).1, [600, 1]);
}

/// A state's tokens are, which the cache and its session have.
#[test]
fn the_tokens_of_what_is_kept_are_counted() {
    let demo = cases::demo().path.join("target");
    let mut rng = StdRng::seed_from_u64(19);
    let (prompt, more) = (text(&mut rng, 100, 4000), text(&mut rng, 10, 4000));
    let kv = KvOptions { max_context: Some(1024), max_round_rows: 16, ..KvOptions::default() };
    let session = SessionOptions { kv };
    let used = |max_bytes| {
        let engine = with_memory(&demo, None);
        // A text so long that the state after it cannot be truncated to the prompt.
        let (mut scheduler, options) = (scheduler(&engine, Some(max_bytes)), options(200, &engine));
        run(&mut scheduler, &session, std::slice::from_ref(&prompt), &options);
        let held = engine.pages().held();
        (held, run(&mut scheduler, &session, &[[&prompt[..], &more].concat()], &options)[0].1)
    };
    let (held, computed) = used(u64::MAX);
    assert_eq!(computed, 10);
    // States after the prompt, and after all of the text but its last token.
    let all = held + 8 * (100 + 299);
    assert_eq!([all, all - 1].map(|max_bytes| used(max_bytes).1), [10, 110]);
}

/// So do drafters with K and V of their own: they draft as much as if nothing were kept.
#[test]
fn what_is_kept_makes_room_for_drafts() {
    let (demo, qwen) = (cases::demo().path.join("target"), cases::demo_qwen().path);
    let mut rng = StdRng::seed_from_u64(13);
    let drafters = [("mtp", None, &qwen), ("draft-model", Some(demo.clone()), &demo)];
    for ((kind, draft_model, target), max_context) in
        drafters.into_iter().flat_map(|drafter| [None, Some(1024)].map(|context| (drafter.clone(), context)))
    {
        let load = |kv_memory| {
            let options = EngineOptions { kv_memory, draft_model: draft_model.clone(), ..EngineOptions::new(target) };
            Engine::load(&EngineOptions { threads: Some(2), ..options }).expect("the demo pair")
        };
        let drafters = kind.parse().expect("a drafter");
        let speculation = SpeculationOptions { block: BlockSize::Fixed(3), drafters, ..SpeculationOptions::default() };
        let engine = load(None);
        let options = GenerateOptions { speculation: Speculation::With(speculation), ..options(24, &engine) };
        let kv = KvOptions { max_context, ..KvOptions::default() };
        let session = SessionOptions { kv };
        let prompts: Vec<_> = (0..4).map(|_| text(&mut rng, 500, 4000)).collect();
        let alone = prompts.iter().map(|prompt| {
            let mut session = engine.session(&session).expect("a session");
            let mut generation = session.generate(prompt, &options).expect("a generation");
            generation.by_ref().for_each(|piece| drop(piece.expect("a piece")));
            let (drafted, accepted) = (generation.statistics().drafted, generation.statistics().accepted);
            drop(generation);
            (drafted, accepted, engine.pages().held())
        });
        let alone: Vec<_> = alone.collect();
        let one = alone.iter().map(|(_, _, held)| *held).max().expect("prompts");

        let engine = load(Some(one * 5 / 4));
        let mut scheduler = scheduler(&engine, Some(u64::MAX));
        for (prompt, (drafted, accepted, _)) in prompts.iter().zip(alone) {
            let session = scheduler.session(&session).expect("a session");
            let id = scheduler.add(session, prompt, &options).expect("added");
            drop(cases::texts(&mut scheduler));
            let statistics = scheduler.statistics(id).expect("a sequence");
            assert!(drafted > 0);
            assert_eq!((statistics.drafted, statistics.accepted), (drafted, accepted), "{kind}, {max_context:?}");
            drop(scheduler.remove(id));
        }
    }
}

/// Drafters go on with the K and V that they have of a prefix, also if it was cached in a shorter context.
#[test]
fn drafters_of_a_shorter_context_go_on_in_a_longer_one() {
    let (demo, qwen) = (cases::demo().path.join("target"), cases::demo_qwen().path);
    for (kind, draft_model, target) in [("mtp", None, &qwen), ("draft-model", Some(demo.clone()), &demo)] {
        let load = EngineOptions { threads: Some(2), draft_model, ..EngineOptions::new(target) };
        let engine = Engine::load(&load).expect("the demo pair");
        let drafters = kind.parse().expect("a drafter");
        let speculation = SpeculationOptions { block: BlockSize::Fixed(3), drafters, ..SpeculationOptions::default() };
        let options = GenerateOptions { speculation: Speculation::With(speculation), ..options(8, &engine) };
        let session = |max_context: usize| SessionOptions {
            kv: KvOptions { max_context: Some(max_context), ..KvOptions::default() },
        };
        // A text in a context of that length, then a longer one in a context of 1000.
        let after = |first: usize| {
            let mut rng = StdRng::seed_from_u64(27);
            let prompt = text(&mut rng, 500, 4000);
            let longer = [&prompt[..], &text(&mut rng, 30, 4000)].concat();
            let mut scheduler = scheduler(&engine, Some(u64::MAX));
            run(&mut scheduler, &session(first), &[prompt], &options);
            let own = scheduler.session(&session(1000)).expect("a session");
            let id = scheduler.add(own, &longer, &options).expect("added");
            drop(cases::texts(&mut scheduler));
            let statistics = scheduler.statistics(id).expect("a sequence");
            let counts = [statistics.cached_tokens, statistics.drafted, statistics.accepted];
            drop(scheduler.remove(id));
            (counts, engine.pages().held())
        };
        let want = after(1000);
        assert!(want.0[0] > 400 && want.0[1] > 0, "{kind}: {want:?}");
        // What a drafter reads again takes other pages.
        assert_eq!(after(520), want, "{kind}");
    }
}

/// The memory of cached prefixes is free for the context of new sequences, and that of running ones will be.
#[test]
fn a_context_does_not_depend_on_what_is_kept() {
    let demo = cases::demo().path.join("target");
    let load = |kv_memory| with_memory(&demo, kv_memory);
    let (mut rng, session) = (StdRng::seed_from_u64(9), SessionOptions::default());
    let memory = load(None).session(&session).expect("a session").kv().bytes_at(1500) as u64;
    let engine = load(Some(memory));
    let empty = engine.session(&session).expect("a session").kv().max_context();
    let options = options(4, &engine);
    let mut scheduler = scheduler(&engine, Some(u64::MAX));
    for len in [500, 1400] {
        let prompt = text(&mut rng, len, 4000);
        let results = run(&mut scheduler, &session, std::slice::from_ref(&prompt), &options);
        assert_eq!(results, [(cold(&load(None), &session, &prompt, &options), len)]);
        assert!(engine.pages().held() > 0 && engine.pages().held() <= memory);
        assert_eq!(scheduler.session(&session).expect("a session").kv().max_context(), empty, "{len}");
    }
    let running = scheduler.session(&session).expect("a session");
    scheduler.add(running, &text(&mut rng, 500, 4000), &options).expect("added");
    while scheduler.is_active() {
        scheduler.step();
    }
    assert_eq!(scheduler.session(&session).expect("a session").kv().max_context(), empty);
}

/// One that is shorter than the model's, as memory has no room for more, is warned of once: not for every sequence, and
/// not for drafters, whose contexts are those of their sequences.
#[test]
fn a_context_that_does_not_fit_memory_is_warned_of_once() {
    let (demo, session) = (cases::demo().path.join("target"), SessionOptions::default());
    let memory = with_memory(&demo, None).session(&session).expect("a session").kv().bytes_at(1024) as u64;
    let load = EngineOptions { kv_memory: Some(memory), threads: Some(2), ..EngineOptions::new(&demo) };
    let engine = Engine::load(&EngineOptions { draft_model: Some(demo), ..load }).expect("the demo pair");
    let drafters = "draft-model".parse().expect("a drafter");
    let speculation = SpeculationOptions { block: BlockSize::Fixed(3), drafters, ..SpeculationOptions::default() };
    let options = GenerateOptions { speculation: Speculation::With(speculation), ..options(4, &engine) };
    let (mut rng, mut scheduler) = (StdRng::seed_from_u64(29), scheduler(&engine, Some(u64::MAX)));
    let ((), lines) = warnings(|| {
        for _ in 0..2 {
            run(&mut scheduler, &session, &[text(&mut rng, 20, 4000)], &options);
        }
    });
    let is_expected = |line: &String| line.contains("does not fit memory") && line.contains("fits=1024 ");
    assert!(lines.len() == 1 && lines.iter().all(is_expected), "{lines:?}");
}

/// The model's whole context fits without what is cached of an earlier text, and is used: there is nothing to warn of.
#[test]
fn a_context_that_fits_without_cached_prefixes_is_not_warned_of() {
    let (demo, session) = (cases::demo().path.join("target"), SessionOptions::default());
    let whole = with_memory(&demo, None).session(&session).expect("a session");
    let context = whole.kv().max_context();
    let engine = with_memory(&demo, Some(whole.kv().bytes_at(context) as u64));
    let (mut rng, mut scheduler) = (StdRng::seed_from_u64(30), scheduler(&engine, Some(u64::MAX)));
    run(&mut scheduler, &session, &[text(&mut rng, 20, 4000)], &options(4, &engine));
    assert!(engine.pages().held() > 0);
    let (next, lines) = warnings(|| scheduler.session(&session).expect("a session"));
    assert_eq!((next.kv().max_context(), lines), (context, Vec::new()));
}

/// A cached prefix stays if a sequence for which there is no memory cannot have that of prefixes: a context that does
/// not fit beside a running sequence.
#[test]
fn a_context_that_does_not_fit_beside_others_drops_nothing() {
    drops_nothing(&cases::demo().path.join("target"), (300, 300), 12);
    // The pages of the NextN head count.
    drops_nothing(&cases::demo_qwen().path, (100, 96), 15);
}

/// With a prompt of `len` tokens, a cached prefix of `cached` of them, and memory for `eighths` of a context.
fn drops_nothing(target: &Path, (len, cached): (usize, usize), eighths: u64) {
    let load = |kv_memory| with_memory(target, kv_memory);
    let mut rng = StdRng::seed_from_u64(21);
    let session = SessionOptions { kv: KvOptions { max_context: Some(1024), ..KvOptions::default() } };
    let one = load(None).session(&session).expect("a session").kv().bytes_at(1024) as u64;
    let engine = load(Some(one * eighths / 8));
    let options = options(4, &engine);
    // States after the prompts, and after the texts.
    let prefix_cache = Some(PrefixCacheOptions { interval: 4096, max_bytes: Some(u64::MAX), ..Default::default() });
    let mut scheduler = Scheduler::new(&engine, SchedulerOptions { prefix_cache, ..SchedulerOptions::default() });
    let prompt = text(&mut rng, len, 4000);
    // Opened while nothing is cached: their contexts do not fit beside the states of the first text.
    let [later, running] = [(); 2].map(|()| scheduler.session(&session).expect("a session"));
    run(&mut scheduler, &session, std::slice::from_ref(&prompt), &options);
    let running = scheduler.add(running, &text(&mut rng, 500, 4000), &options).expect("added");
    drop(cases::texts(&mut scheduler));
    assert!(matches!(scheduler.session(&session), Err(Error::Memory { .. })));
    drop(scheduler.remove(running));
    let id = scheduler.add(later, &[&prompt[..], &text(&mut rng, 10, 4000)].concat(), &options).expect("added");
    assert_eq!(scheduler.statistics(id).expect("a sequence").cached_tokens, cached);
}

/// So do prefixes all of whose pages a running sequence has.
#[test]
fn prefixes_that_share_their_pages_stay() {
    let demo = cases::demo().path.join("target");
    let load = |kv_memory| with_memory(&demo, kv_memory);
    let mut rng = StdRng::seed_from_u64(22);
    let session = SessionOptions { kv: KvOptions { max_context: Some(512), ..KvOptions::default() } };
    let four_pages = load(None).session(&session).expect("a session").kv().bytes_at(4 * INTERVAL) as u64;
    let engine = load(Some(four_pages));
    let mut scheduler = scheduler(&engine, Some(u64::MAX));
    // Three pages whose states share them, as it goes on in the fourth.
    let prompt = text(&mut rng, 3 * INTERVAL, 4000);
    let [later, first, second] = [(); 3].map(|()| scheduler.session(&session).expect("a session"));
    let first = scheduler.add(first, &prompt, &options(100, &engine)).expect("added");
    let step = |scheduler: &mut Scheduler| {
        let events = scheduler.step();
        events.into_iter().map(|event| (event.id, event.piece.expect("a piece").tokens.len())).collect::<Vec<_>>()
    };
    while step(&mut scheduler).is_empty() {}
    let second = scheduler.add(second, &text(&mut rng, 100, 4000), &options(4, &engine)).expect("added");
    for _ in 0..4 {
        assert_eq!(step(&mut scheduler), [(first, 1)], "the second one waits");
    }
    [second, first].into_iter().for_each(|id| drop(scheduler.remove(id)));
    let id = scheduler.add(later, &[&prompt[..], &[3, 4, 5]].concat(), &options(4, &engine)).expect("added");
    assert_eq!(scheduler.statistics(id).expect("a sequence").cached_tokens, prompt.len());
}

/// Unless nothing goes on with them: a sequence that has all memory shares its last page with a prefix, and there is no
/// page for the copy that it writes to.
#[test]
fn a_sequence_does_not_end_for_the_copy_of_a_page() {
    let demo = cases::demo().path.join("target");
    let load = |kv_memory| with_memory(&demo, kv_memory);
    let mut rng = StdRng::seed_from_u64(23);
    let session = SessionOptions { kv: KvOptions { max_context: Some(4 * INTERVAL), ..KvOptions::default() } };
    let free = load(None);
    let four_pages = free.session(&session).expect("a session").kv().bytes_at(4 * INTERVAL) as u64;
    let engine = load(Some(four_pages));
    let (mut scheduler, options) = (scheduler(&engine, Some(u64::MAX)), options(8, &engine));
    let prompt = text(&mut rng, 4 * INTERVAL - 12, 4000);
    let want = cold(&free, &session, &prompt, &options);
    assert_eq!(run(&mut scheduler, &session, std::slice::from_ref(&prompt), &options), [(want, prompt.len())]);
}

/// A sequence that waits for the copy of a page is retried when the prefixes that share the page are dropped, not only
/// when another one is removed.
#[test]
fn a_sequence_that_waits_is_retried_without_a_prefix() {
    let demo = cases::demo().path.join("target");
    let load = |kv_memory| with_memory(&demo, kv_memory);
    let mut rng = StdRng::seed_from_u64(24);
    let session = SessionOptions { kv: KvOptions { max_context: Some(4 * INTERVAL), ..KvOptions::default() } };
    let four_pages = load(None).session(&session).expect("a session").kv().bytes_at(4 * INTERVAL) as u64;
    let engine = load(Some(four_pages));
    let prefix_cache = Some(PrefixCacheOptions { interval: INTERVAL, max_bytes: Some(u64::MAX), ..Default::default() });
    // Passes that do not depend on measured times.
    let options_of_all =
        SchedulerOptions { prefix_cache, prompt_slowdown: f64::INFINITY, ..SchedulerOptions::default() };
    let mut scheduler = Scheduler::new(&engine, options_of_all);
    let step = |scheduler: &mut Scheduler| {
        let events = scheduler.step();
        events.into_iter().map(|event| (event.id, event.piece.expect("a piece").tokens.len())).collect::<Vec<_>>()
    };
    let [first, second] = [(); 2].map(|()| scheduler.session(&session).expect("a session"));
    // A page of its own, and three that are shared with prefixes.
    let first = scheduler.add(first, &text(&mut rng, 100, 4000), &options(20, &engine)).expect("added");
    (0..2).for_each(|_| assert_eq!(step(&mut scheduler), [(first, 1)]));
    let second = scheduler.add(second, &text(&mut rng, 380, 4000), &options(4, &engine)).expect("added");
    (0..2).for_each(|_| assert_eq!(step(&mut scheduler), [(first, 1)], "the prompt is read"));
    assert_eq!(step(&mut scheduler), [(first, 1), (second, 1)]);
    (0..2).for_each(|_| assert_eq!(step(&mut scheduler), [(first, 1)], "the second one waits"));
    while scheduler.drop_prefix() {}
    assert_eq!(step(&mut scheduler), [(first, 1), (second, 1)]);
}

/// A sequence that waits for memory is also retried when cached prefixes are dropped for a new prefix of another
/// sequence: the cache limits all pages of the engine.
#[test]
fn a_sequence_that_waits_is_retried_when_a_prefix_makes_room_for_another() {
    let demo = cases::demo().path.join("target");
    let load = |kv_memory| with_memory(&demo, kv_memory);
    let mut rng = StdRng::seed_from_u64(25);
    let session = SessionOptions { kv: KvOptions { max_context: Some(4 * INTERVAL), ..KvOptions::default() } };
    let page = load(None).session(&session).expect("a session").kv().bytes_at(INTERVAL) as u64;
    let engine = load(Some(5 * page));
    let prefix_cache = Some(PrefixCacheOptions { interval: INTERVAL, ..PrefixCacheOptions::default() });
    // Passes that do not depend on measured times.
    let options_of_all =
        SchedulerOptions { prefix_cache, prompt_slowdown: f64::INFINITY, ..SchedulerOptions::default() };
    let mut scheduler = Scheduler::new(&engine, options_of_all);
    let step = |scheduler: &mut Scheduler| {
        let events = scheduler.step();
        events.into_iter().map(|event| (event.id, event.piece.expect("a piece").tokens.len())).collect::<Vec<_>>()
    };
    let [first, second, third] = [(); 3].map(|()| scheduler.session(&session).expect("a session"));
    let first = scheduler.add(first, &text(&mut rng, 100, 4000), &options(20, &engine)).expect("added");
    (0..2).for_each(|_| assert_eq!(step(&mut scheduler), [(first, 1)]));
    // Three passes for three pages, and five for one: 32 rows of it at most, and its last row apart.
    let second = scheduler.add(second, &text(&mut rng, 380, 4000), &options(4, &engine)).expect("added");
    let scored = GenerateOptions { prompt_logprobs: Some(0), ..options(4, &engine) };
    let third = scheduler.add(third, &text(&mut rng, 100, 4000), &scored).expect("added");
    (0..2).for_each(|_| assert_eq!(step(&mut scheduler), [(first, 1)], "the prompts are read"));
    assert_eq!(step(&mut scheduler), [(first, 1), (second, 1)]);
    assert_eq!(step(&mut scheduler), [(first, 1)], "the second one waits for the copy of a page");
    assert_eq!(step(&mut scheduler), [(first, 1), (third, 1)], "the third one is cached");
    assert_eq!(step(&mut scheduler), [(first, 1), (second, 1)], "the third one waits for the copy of its page");
}

/// Conversations that do not fit memory are saved to files, read back, and leave none behind.
#[test]
fn what_memory_does_not_hold_goes_to_files() {
    let engine = demo();
    let directory = tempfile::tempdir().expect("a folder");
    let files = || std::fs::read_dir(directory.path()).expect("the folder").count();
    let keeping = with_files(directory.path(), 0);
    // Two share the directory.
    let mut schedulers = [(); 2].map(|()| Scheduler::new(&engine, keeping.clone()));
    let (mut rng, session) = (StdRng::seed_from_u64(8), SessionOptions::default());
    let options = options(8, &engine);
    let mut conversations: Vec<_> = (0..4).map(|_| text(&mut rng, 200, 4000)).collect();
    for turn in 0..3 {
        for (i, conversation) in conversations.iter_mut().enumerate() {
            let scheduler = &mut schedulers[i % 2];
            let before = conversation.len();
            conversation.extend(text(&mut rng, 20, 4000));
            let (written, computed) = run(scheduler, &session, std::slice::from_ref(conversation), &options).remove(0);
            assert_eq!(written, cold(&engine, &session, conversation, &options), "turn {turn}");
            // The last token of the text was not read yet.
            assert_eq!(computed, if turn == 0 { before + 20 } else { 21 }, "turn {turn}");
            conversation.extend(written);
        }
        assert!(files() >= 4, "{} files", files());
    }
    // A file that another session has replaced is not continued from.
    let paths = std::fs::read_dir(directory.path()).expect("the folder").map(|entry| entry.expect("an entry").path());
    let paths: Vec<_> = paths.filter(|path| path.extension().is_some_and(|of| of == "session")).collect();
    let contents: Vec<_> = paths.iter().map(|path| std::fs::read(path).expect("a file")).collect();
    for (path, content) in paths.iter().zip(contents.iter().cycle().skip(1)) {
        std::fs::write(path, content).expect("a file");
    }
    conversations[0].extend(text(&mut rng, 20, 4000));
    let (written, computed) = run(&mut schedulers[0], &session, &conversations[..1], &options).remove(0);
    assert_eq!(written, cold(&engine, &session, &conversations[0], &options));
    assert_eq!(computed, conversations[0].len());
    drop(schedulers);
    assert_eq!(files(), 0);
}

/// One that is larger than all files may be together takes the place of none.
#[test]
fn a_prefix_that_is_too_large_for_a_file_leaves_the_others() {
    let (engine, session, mut rng) = (demo(), SessionOptions::default(), StdRng::seed_from_u64(28));
    let one_page = engine.session(&session).expect("a session").kv().bytes_at(INTERVAL) as u64;
    let directory = tempfile::tempdir().expect("a folder");
    let mut keeping = with_files(directory.path(), 0);
    keeping.prefix_cache.iter_mut().for_each(|cache| cache.max_file_bytes = 2 * one_page);
    let mut scheduler = Scheduler::new(&engine, keeping);
    let options = options(4, &engine);
    let mut conversation = text(&mut rng, 100, 4000);
    conversation.extend(run(&mut scheduler, &session, std::slice::from_ref(&conversation), &options).remove(0).0);
    // Five pages.
    run(&mut scheduler, &session, &[text(&mut rng, 600, 4000)], &options);
    conversation.extend(text(&mut rng, 20, 4000));
    let computed = run(&mut scheduler, &session, std::slice::from_ref(&conversation), &options)[0].1;
    // The last token of the text was not read yet.
    assert_eq!(computed, 21);
}

/// Prefixes that exceed `max_bytes` go to files in `directory`.
fn with_files(directory: &Path, max_bytes: u64) -> SchedulerOptions {
    let prefix_cache = PrefixCacheOptions {
        interval: INTERVAL,
        max_bytes: Some(max_bytes),
        directory: Some(directory.into()),
        ..PrefixCacheOptions::default()
    };
    SchedulerOptions { prefix_cache: Some(prefix_cache), ..SchedulerOptions::default() }
}

/// A conversation in a file is truncated to what its next turn has of it, as one in memory.
#[test]
fn a_chat_goes_on_from_a_file() {
    let part = |first: u32, len: u32| (first..first + len).collect::<Vec<u32>>();
    let (history, reasoning) = (part(10, 200), part(300, 4));
    let next = [&history[..], &part(400, 50)].concat();
    let (engine, session) = (demo(), SessionOptions::default());
    let directory = tempfile::tempdir().expect("a folder");
    let mut scheduler = Scheduler::new(&engine, with_files(directory.path(), 0));
    let options = options(4, &engine);
    for (prompt, want) in [([history, reasoning].concat(), 204), (next, 50)] {
        let (written, computed) = run(&mut scheduler, &session, std::slice::from_ref(&prompt), &options).remove(0);
        assert_eq!((&written, computed), (&cold(&engine, &session, &prompt, &options), want));
    }
}

/// They have the texts of requests.
#[cfg(unix)]
#[test]
fn files_can_be_read_by_their_owner_alone() {
    use std::os::unix::fs::PermissionsExt;

    let (engine, session) = (demo(), SessionOptions::default());
    let directory = tempfile::tempdir().expect("a folder");
    let mut scheduler = Scheduler::new(&engine, with_files(directory.path(), u64::MAX));
    let prompt: Vec<u32> = (10..210).collect();
    run(&mut scheduler, &session, &[prompt], &options(4, &engine));
    while scheduler.drop_prefix() {}
    let entries = std::fs::read_dir(directory.path()).expect("the folder").map(|entry| entry.expect("an entry"));
    let sessions = entries.filter(|entry| entry.path().extension().is_some_and(|of| of == "session"));
    let modes: Vec<_> = sessions.map(|entry| entry.metadata().expect("a file").permissions().mode() & 0o777).collect();
    assert_eq!(modes, [0o600], "the text");
}

/// Memory has no room for the context that a prefix had beside others when it is read back: its forks have another.
#[test]
fn the_context_of_a_prefix_in_a_file_is_not_warned_of() {
    let (demo, session) = (cases::demo().path.join("target"), SessionOptions::default());
    let whole = with_memory(&demo, None).session(&session).expect("a session");
    let context = whole.kv().max_context();
    let engine = with_memory(&demo, Some(whole.kv().bytes_at(context) as u64));
    let (mut rng, directory) = (StdRng::seed_from_u64(31), tempfile::tempdir().expect("a folder"));
    let mut scheduler = Scheduler::new(&engine, with_files(directory.path(), u64::MAX));
    let options = options(4, &engine);
    let mut conversation = text(&mut rng, 100, 4000);
    conversation.extend(run(&mut scheduler, &session, std::slice::from_ref(&conversation), &options).remove(0).0);
    while scheduler.drop_prefix() {}
    run(&mut scheduler, &session, &[text(&mut rng, 20, 4000)], &options);
    assert!(engine.pages().held() > 0);
    conversation.extend(text(&mut rng, 20, 4000));
    let (results, lines) = warnings(|| run(&mut scheduler, &session, std::slice::from_ref(&conversation), &options));
    // The last token of the text was not read yet.
    assert_eq!((results[0].1, lines), (21, Vec::new()));
}

/// A file is not read for what a prefix in memory has as well.
#[test]
fn a_prefix_in_memory_is_used_before_one_in_a_file() {
    let part = |first: u32, len: u32| (first..first + len).collect::<Vec<u32>>();
    let prompt = |own: u32| [part(10, 200), part(own, 50)].concat();
    let (engine, session) = (demo(), SessionOptions::default());
    let directory = tempfile::tempdir().expect("a folder");
    let mut scheduler = Scheduler::new(&engine, with_files(directory.path(), u64::MAX));
    let options = options(4, &engine);
    let files = || {
        let paths =
            std::fs::read_dir(directory.path()).expect("the folder").map(|entry| entry.expect("an entry").path());
        paths.filter(|path| path.extension().is_some_and(|of| of == "session")).count()
    };
    run(&mut scheduler, &session, &[prompt(400)], &options);
    // It continues from the state after the first prompt, which is used later than that after the first text.
    run(&mut scheduler, &session, &[prompt(300)], &options);
    (0..3).for_each(|_| assert!(scheduler.drop_prefix()));
    assert_eq!(files(), 1, "the first text");
    // Its neighbours in the cache are the second text and the first.
    let between = prompt(350);
    let (written, computed) = run(&mut scheduler, &session, std::slice::from_ref(&between), &options).remove(0);
    assert_eq!((&written, computed), (&cold(&engine, &session, &between, &options), 50));
    assert_eq!(files(), 1, "the file was read");
}

/// One in a file takes the memory of older ones, and stays in its file while running sequences have that.
#[test]
fn a_prefix_in_a_file_is_read_back_once_there_is_memory() {
    let demo = cases::demo().path.join("target");
    let load = |kv_memory| with_memory(&demo, kv_memory);
    let (mut rng, session, free) = (StdRng::seed_from_u64(16), SessionOptions::default(), load(None));
    // One conversation of 600 tokens, not two.
    let engine = load(Some(free.session(&session).expect("a session").kv().bytes_at(1024) as u64));
    let directory = tempfile::tempdir().expect("a folder");
    let mut scheduler = Scheduler::new(&engine, with_files(directory.path(), u64::MAX));
    let options = options(4, &engine);
    let mut prompt = text(&mut rng, 600, 4000);
    prompt.extend(run(&mut scheduler, &session, std::slice::from_ref(&prompt), &options).remove(0).0);
    run(&mut scheduler, &session, &[text(&mut rng, 600, 4000)], &options);
    prompt.extend(text(&mut rng, 20, 4000));
    let (written, computed) = run(&mut scheduler, &session, std::slice::from_ref(&prompt), &options).remove(0);
    // The last token of the text was not read yet.
    assert_eq!((&written, computed), (&cold(&free, &session, &prompt, &options), 21));

    prompt.extend(written);
    let known = prompt.len() - 1;
    prompt.extend(text(&mut rng, 20, 4000));
    let waiting = scheduler.session(&session).expect("a session");
    let other = scheduler.session(&session).expect("a session");
    let other = scheduler.add(other, &text(&mut rng, 600, 4000), &options).expect("added");
    while scheduler.is_active() {
        scheduler.step();
    }
    let cached = |scheduler: &mut Scheduler, session| {
        let id = scheduler.add(session, &prompt, &options).expect("added");
        let cached = scheduler.statistics(id).expect("a sequence").cached_tokens;
        (cached, scheduler.remove(id).expect("its session"))
    };
    let (none, waiting) = cached(&mut scheduler, waiting);
    assert_eq!(none, 0);
    drop(scheduler.remove(other));
    assert_eq!(cached(&mut scheduler, waiting).0, known);
}

/// A trace has the size of the whole prompt, as the statistics do.
#[test]
fn a_trace_counts_cached_tokens() {
    let (engine, file) = (demo(), tempfile::NamedTempFile::new().expect("a file"));
    let trace = Some(Trace::file(file.path()).expect("a trace"));
    let options = GenerateOptions { trace, ..options(4, &engine) };
    let (mut scheduler, session) = (scheduler(&engine, Some(u64::MAX)), SessionOptions::default());
    let prompts = [text(&mut StdRng::seed_from_u64(6), 100, 4000)];
    let computed: Vec<usize> =
        (0..2).flat_map(|_| run(&mut scheduler, &session, &prompts, &options)).map(|(_, computed)| computed).collect();
    assert!(computed[0] == 100 && computed[1] < 100, "{computed:?}");
    let lines = std::fs::read_to_string(file.path()).expect("a trace");
    let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let begins: Vec<_> = lines.filter(|line| line["event"] == "begin").collect();
    assert_eq!(begins.iter().map(|line| line["prompt_tokens"].as_u64()).collect::<Vec<_>>(), [Some(100); 2]);
}

/// An interval of nothing is refused before any prompt is looked at, and the session comes back.
#[test]
fn an_interval_of_nothing_is_refused() {
    let engine = demo();
    let prefix_cache = Some(PrefixCacheOptions { interval: 0, ..PrefixCacheOptions::default() });
    let mut scheduler = Scheduler::new(&engine, SchedulerOptions { prefix_cache, ..SchedulerOptions::default() });
    let session = scheduler.session(&SessionOptions::default()).expect("a session");
    let refused = scheduler.add(session, &[2, 3, 4], &options(4, &engine)).expect_err("no interval");
    assert!(
        refused.error.to_string().contains("interval") && refused.error.to_string().contains("at least 1"),
        "{}",
        refused.error
    );
    assert!(refused.session.tokens().is_empty() && scheduler.ids().count() == 0);
}
