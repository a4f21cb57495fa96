//! Sequences that share a device's passes write what each writes alone on the CPU, whichever joins,
//! leaves, forks, is cancelled or fails.

use std::collections::HashMap;
use std::sync::Arc;

use foretoken::kv::{CodeFormat, ExactZones, KvOptions};
use foretoken::speculative::{BlockSize, Cancel, DraftSampling, DrafterOptions, Drafters};
use foretoken::{
    DraftPipeline, ElementType, Engine, EngineOptions, Error, FinishReason, GenerateOptions, LogitsProcessor,
    PrefixCacheOptions, Sampling, Scheduler, SchedulerOptions, SequenceId, Session, SessionOptions, Speculation,
    SpeculationOptions,
};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::cases::{self, plain};
use crate::on_device::pair::{NARROW, Pair, damaged, exact, load, mtp, pair, run};
use crate::on_device::poison::poison;
use crate::on_device::widened::{Heads, Widths, widen};
use crate::text;

/// A generation.
#[derive(Clone)]
struct Job {
    prompt: Vec<u32>,
    session: SessionOptions,
    options: GenerateOptions,
}

fn drafting(drafters: &str, block: usize, drafts: DraftSampling) -> Speculation {
    Speculation::With(SpeculationOptions {
        drafters: drafters.parse().expect("drafters"),
        block: BlockSize::Fixed(block),
        drafts,
        ..SpeculationOptions::default()
    })
}

fn job(engine: &Engine, rng: &mut StdRng) -> Job {
    // With delta nets, prompts of more rows than are logged as well.
    let has_delta_nets = engine.assistant().is_none();
    let (longest, vocab) = (if has_delta_nets { 40 } else { 16 }, engine.target().vocab_size() as u32);
    let prompt = (0..rng.random_range(1..longest)).map(|_| rng.random_range(3..vocab)).collect();
    // Page tables of two layouts: some sequences cannot share passes.
    let max_round_rows = *[48, 48, 48, 20].choose(rng).expect("a number");
    let session = SessionOptions { kv: KvOptions { max_round_rows, ..exact(ElementType::F32).kv } };
    let speculation = match rng.random_range(0..4) {
        0 => Speculation::Off,
        1 => drafting("ngram-map-k:n=2:m=8:hits=1", 4, DraftSampling::Greedy),
        2 if has_delta_nets => drafting("ngram-map-k:n=1:m=4:hits=1,mtp", 5, DraftSampling::Greedy),
        _ => {
            let drafts = *[DraftSampling::Greedy, DraftSampling::Sampled].choose(rng).expect("one");
            drafting("mtp", rng.random_range(2..=5), drafts)
        }
    };
    let temperature = *[0.0, 0.0, 0.8].choose(rng).expect("a temperature");
    let sampling = Sampling { temperature, top_k: Some(50), ..Sampling::default() };
    let options = GenerateOptions { sampling, seed: rng.random(), speculation, ..plain(rng.random_range(1..10)) };
    Job { prompt, session, options }
}

/// Two to four sequences that join, fork and are cancelled at random passes.
fn check(cpu: &Engine, device: &Engine, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let jobs: Vec<Job> = (0..rng.random_range(2..=4)).map(|_| job(device, &mut rng)).collect();
    let want: Vec<_> = jobs.iter().map(|job| run(cpu, &job.session, &job.prompt, &job.options).0).collect();
    let max_rows = *[7, 64].choose(&mut rng).expect("a size");
    // A bound that no measured time reaches: what a pass reads depends on none.
    let options = SchedulerOptions { max_rows, prompt_slowdown: 1e18, prefix_cache: None };
    let mut scheduler = Scheduler::new(device, options);
    let mut running: HashMap<SequenceId, (usize, Vec<u32>)> = HashMap::new();
    let mut cancels = Vec::new();
    let mut waiting: Vec<usize> = (0..jobs.len()).rev().collect();
    while !waiting.is_empty() || scheduler.is_active() {
        if let Some(i) = waiting.pop_if(|_| rng.random_bool(0.6)) {
            let session = device.session(&jobs[i].session).expect("a session");
            let options = GenerateOptions { cancel: Cancel::default(), ..jobs[i].options.clone() };
            cancels.push(options.cancel.clone());
            let id = scheduler.add(session, &jobs[i].prompt, &options).expect("added");
            running.insert(id, (i, Vec::new()));
        }
        for event in scheduler.step() {
            let (i, ids) = running.get_mut(&event.id).expect("a sequence that was added");
            ids.extend(event.piece.expect("a piece").tokens);
            assert_eq!(&want[*i][..ids.len()], ids, "seed {seed}, sequence {i}");
            match event.finish_reason {
                Some(FinishReason::Cancelled) | None => {}
                Some(_) => assert_eq!(ids.len(), want[*i].len(), "seed {seed}, sequence {i}"),
            }
        }
        if rng.random_bool(0.05)
            && let Some(cancel) = cancels.choose(&mut rng)
        {
            cancel.cancel();
        }
    }
}

/// Full and sliding layers; K = V; a head over all tokens.
#[test]
fn texts_are_those_of_each_alone() {
    let pair = pair("nested", NARROW, None);
    (0..6).for_each(|seed| check(&pair.cpu, &pair.device, seed));
}

/// Layers that share K and V, so that rows without outputs are dropped between others; per-layer embeddings; centroids.
#[test]
fn texts_with_dropped_rows_are_those_of_each_alone() {
    let pair = pair("edge", NARROW, None);
    (10..13).for_each(|seed| check(&pair.cpu, &pair.device, seed));
}

/// Experts, which are routed for the rows of all sequences together.
#[test]
fn texts_of_experts_are_those_of_each_alone() {
    let pair = pair("moe", NARROW, None);
    check(&pair.cpu, &pair.device, 20);
}

/// Delta nets, some of whose rounds are logged and some not; their states are forked with the sequences.
#[test]
fn texts_of_delta_nets_are_those_of_each_alone() {
    let pair = pair("qwen35-moe", NARROW, None);
    (30..34).for_each(|seed| check(&pair.cpu, &pair.device, seed));
    fork_and_go_on(&pair, 40);
}

/// A prompt's fork continues from the state that was kept before its last token.
#[test]
fn prompts_of_delta_nets_are_forked() {
    let pair = pair("qwen35-nested", NARROW, None);
    let vocab = pair.cpu.target().vocab_size() as u32;
    let prompt = Vec::from_iter(text(40).into_iter().map(|id| id % vocab));
    let options = GenerateOptions { speculation: drafting("mtp", 4, DraftSampling::Greedy), ..plain(12) };
    let (want, statistics) = run(&pair.cpu, &exact(ElementType::F32), &prompt, &options);
    let mut scheduler = Scheduler::new(&pair.device, SchedulerOptions::default());
    let session = scheduler.session(&exact(ElementType::F32)).expect("a session");
    let first = scheduler.add(session, &prompt, &options).expect("added");
    scheduler.keep_prompt(first).expect("an unread prompt");
    let mut texts: HashMap<SequenceId, Vec<u32>> = HashMap::new();
    let mut ids = vec![first];
    while scheduler.is_active() {
        for event in scheduler.step() {
            texts.entry(event.id).or_default().extend(event.piece.expect("a piece").tokens);
        }
        if ids.len() == 1 && !texts.is_empty() {
            ids.push(scheduler.fork_prompt(first, &options).expect("a fork"));
        }
    }
    for id in ids {
        let of = scheduler.statistics(id).expect("a sequence");
        assert_eq!((&texts[&id], of.drafted, of.accepted), (&want, statistics.drafted, statistics.accepted));
    }
}

/// Of eight passes of three sequences with these options: sequences that wrote something, launches, and waits. The
/// first passes read prompts, allocate and record.
fn rounds(pair: &Pair, options: &GenerateOptions) -> Vec<(usize, [usize; 3], usize)> {
    let mut scheduler = Scheduler::new(&pair.device, SchedulerOptions::default());
    for first in [3, 4, 5] {
        let session = pair.device.session(&exact(ElementType::F32)).expect("a session");
        scheduler.add(session, &[first, 9, 10, 11], options).expect("added");
    }
    let pass = |_| {
        let before = (pair.machine.launches(), pair.machine.waits());
        let events = scheduler.step();
        let after = (pair.machine.launches(), pair.machine.waits());
        let written = events.iter().filter(|event| event.piece.as_ref().is_ok_and(|piece| !piece.tokens.is_empty()));
        (written.count(), std::array::from_fn(|i| after.0[i] - before.0[i]), after.1 - before.1)
    };
    (0..8).map(pass).collect()
}

/// The draft steps, the verification and the acceptance of all sequences are one replay each, and the host waits once.
#[test]
fn a_round_of_many_is_that_of_one() {
    let options = GenerateOptions { speculation: drafting("mtp", 4, DraftSampling::Greedy), ..plain(40) };
    let rounds = rounds(&pair("nested", NARROW, None), &options);
    assert!(rounds[4..].iter().all(|round| *round == (3, [0, 0, 5], 1)), "{rounds:?}");
}

/// So are those with a NextN head, whose steps are a pass and a choice each. The states of a step and of a round are
/// copied for each sequence; five launches write lists of rows.
#[test]
fn a_round_with_a_nextn_head_is_that_of_one() {
    let options = GenerateOptions { speculation: drafting("mtp", 4, DraftSampling::Greedy), ..plain(40) };
    let rounds = rounds(&pair("qwen35-nested", NARROW, None), &options);
    assert!(rounds[4..].iter().all(|round| *round == (3, [17, 0, 8], 1)), "{rounds:?}");
}

/// A sequence for whose context less memory is left shares passes with the others.
#[test]
fn sequences_of_any_context_share_passes() {
    let pair = pair("nested", NARROW, None);
    let session = SessionOptions { kv: KvOptions { max_context: None, ..exact(ElementType::F32).kv } };
    let first = pair.device.session(&session).expect("a session");
    let taken = pair.machine.fill(4 << 20);
    let second = pair.device.session(&session).expect("a session");
    pair.machine.empty(taken);
    let contexts = [&first, &second].map(|session| session.kv().max_context());
    assert!(contexts[0] > contexts[1], "{contexts:?}");
    let mut scheduler = Scheduler::new(&pair.device, SchedulerOptions::default());
    for session in [first, second] {
        scheduler.add(session, &[3, 9, 10, 11], &plain(40)).expect("added");
    }
    (0..4).for_each(|_| drop(scheduler.step()));
    let before = pair.machine.launches();
    scheduler.step();
    let after = pair.machine.launches();
    assert_eq!(std::array::from_fn(|i| after[i] - before[i]), [0, 0, 2]);
}

/// Above temperature 0 the host draws from the largest logits, which it reads once for all
/// sequences, as it does the drafts.
#[test]
fn a_drawn_round_of_many_is_that_of_one() {
    let sampling = Sampling { temperature: 0.8, top_k: Some(64), top_p: 0.95, ..Sampling::default() };
    let speculation = drafting("mtp", 4, DraftSampling::Greedy);
    let rounds = rounds(&pair("nested", NARROW, None), &GenerateOptions { sampling, speculation, ..plain(40) });
    // Three draft steps, verification, the largest logits; then each sequence's state.
    assert!(rounds[4..].iter().all(|round| *round == (3, [3, 0, 5], 2)), "{rounds:?}");
}

/// Simulated acceptance, beside a sequence whose drafts the device accepts by itself.
#[test]
fn simulated_acceptance_is_that_of_each_alone() {
    let pair = pair("nested", NARROW, None);
    let speculation = drafting("mtp", 4, DraftSampling::Greedy);
    let simulated = GenerateOptions { speculation, simulate_acceptance: vec![1.0], ..plain(20) };
    let [alone, beside] = [false, true].map(|has_other| {
        let mut scheduler = Scheduler::new(&pair.device, SchedulerOptions::default());
        let jobs = [(3, simulated.clone()), (4, plain(8))];
        let added = jobs.into_iter().take(1 + usize::from(has_other)).map(|(first, options)| {
            let session = pair.device.session(&exact(ElementType::F32)).expect("a session");
            scheduler.add(session, &[first, 9, 10, 11], &options).expect("added")
        });
        let added: Vec<_> = added.collect();
        cases::texts(&mut scheduler).remove(&added[0]).expect("a text")
    });
    assert_eq!(beside, alone);
}

/// Sessions that take turns, each with a draft that is made ahead, do not disturb each other's.
#[test]
fn drafts_made_ahead_are_kept() {
    take_turns(&pair("nested", NARROW, None));
    take_turns(&pair("qwen35-nested", NARROW, None));
}

fn take_turns(pair: &Pair) {
    let speculation = Speculation::With(SpeculationOptions {
        drafters: Drafters::Priority(vec![DrafterOptions::Mtp]),
        block: BlockSize::Fixed(4),
        pipeline: DraftPipeline::Ahead,
        ..SpeculationOptions::default()
    });
    let options = GenerateOptions { speculation, ..plain(16) };
    let prompts = [[3, 9, 10], [4, 9, 11]];
    let want = prompts.map(|prompt| run(&pair.cpu, &exact(ElementType::F32), &prompt, &options).0);
    let [mut first, mut second] = prompts.map(|_| pair.device.session(&exact(ElementType::F32)).expect("a session"));
    let mut generations = [first.generate(&prompts[0], &options), second.generate(&prompts[1], &options)]
        .map(|of| of.expect("a generation"));
    let mut ids = [Vec::new(), Vec::new()];
    while ids.iter().map(Vec::len).sum::<usize>() < 32 {
        for (generation, ids) in generations.iter_mut().zip(&mut ids) {
            if let Some(piece) = generation.next() {
                ids.extend(piece.expect("a piece").tokens);
            }
        }
    }
    assert_eq!(ids, want);
}

/// A fork continues beside its origin. It takes no pages until one of them writes.
#[test]
fn forks_share_pages_and_passes() {
    let pair = pair("nested", NARROW, None);
    let [before, after] = fork_and_go_on(&pair, 150);
    // The page of all positions is copied, and rings; not the one before.
    assert!(before < after && after < 2 * before, "{before} bytes before, {after} after");
    assert_eq!(pair.device.pages().held(), 0, "pages are left");
}

/// A sequence of a prompt of `len` tokens and its fork continue like on the CPU. Returns the bytes
/// of the pages before, and when both are done.
fn fork_and_go_on(pair: &Pair, len: usize) -> [u64; 2] {
    let drafts = if pair.device.has_mtp() { "mtp" } else { "ngram-map-k:n=1:m=4:hits=1" };
    let options = GenerateOptions { speculation: drafting(drafts, 3, DraftSampling::Greedy), ..plain(4) };
    let prompt: Vec<_> = text(len).iter().map(|id| id % pair.cpu.target().vocab_size() as u32).collect();
    let go_on = |engine: &Engine| {
        let mut origin = engine.session(&exact(ElementType::F32)).expect("a session");
        let pieces = origin.generate(&prompt, &options).expect("a generation");
        pieces.for_each(|piece| drop(piece.expect("a piece")));
        let before = engine.pages().held();
        let fork = origin.fork().expect("a fork");
        assert_eq!(engine.pages().held(), before);
        let mut scheduler = Scheduler::new(engine, SchedulerOptions::default());
        let ids = [(origin, [20, 21]), (fork, [30, 31])]
            .map(|(session, prompt)| scheduler.add(session, &prompt, &options).expect("added"));
        let mut texts = cases::texts(&mut scheduler);
        let drafts = ids.map(|id| scheduler.statistics(id).map(|s| (s.drafted_at.clone(), s.accepted_at.clone())));
        (ids.map(|id| texts.remove(&id)), drafts, [before, engine.pages().held()])
    };
    let (ids, drafts, bytes) = go_on(&pair.device);
    let on_cpu = go_on(&pair.cpu);
    assert_eq!((ids, drafts), (on_cpu.0, on_cpu.1));
    bytes
}

/// Their page tables are shared as well: a fork waits for nothing.
#[test]
fn forks_share_page_tables() {
    let pair = pair("nested", NARROW, None);
    let open = || pair.device.session(&exact(ElementType::F32)).expect("a session");
    let mut origin = open();
    origin.generate(&text(150), &plain(2)).expect("a generation").for_each(|piece| drop(piece.expect("a piece")));
    let taken = |new: &mut dyn FnMut() -> Session| {
        let (used, waits) = (pair.machine.used(), pair.machine.waits());
        let session = new();
        (pair.machine.used() - used, pair.machine.waits() - waits, session)
    };
    let (of_new, ..) = taken(&mut || open());
    let (of_fork, waits, _fork) = taken(&mut || origin.fork().expect("a fork"));
    assert!(of_fork < of_new, "{of_fork} of {of_new} bytes");
    assert_eq!(waits, 0);
}

/// Where memory ends while shared pages are copied, later drafts do not read those that are freed since: the fork's,
/// which is removed, while another sequence goes on.
#[test]
fn drafts_do_not_read_freed_pages() {
    let (pair, session) = (pair("nested", NARROW, None), exact(ElementType::F32));
    // Too little for a whole chunk, so that pages are allocated and freed one by one.
    pair.machine.fill(20 << 20);
    let (prompt, options) = (text(140), mtp(3, &plain(12)));
    let want = run(&pair.cpu, &session, &prompt, &options).0;
    // Also so that the passes below take no more memory for activations.
    for options in [&options, &plain(4)] {
        assert!(want.starts_with(&run(&pair.device, &session, &prompt, options).0));
    }
    // From less than a page to more than all.
    for left in (0..10).map(|i| 20_000 + 65_536 * i) {
        let mut scheduler = Scheduler::new(&pair.device, SchedulerOptions::default());
        let mut add = |prompt: &[u32], options: &GenerateOptions| {
            let session = scheduler.session(&session).expect("a session");
            scheduler.add(session, prompt, options).expect("added")
        };
        let (origin, _) = (add(&prompt, &options), add(&text(3), &plain(100)));
        let mut ids = Vec::new();
        let mut step = |scheduler: &mut Scheduler| {
            for event in scheduler.step() {
                let tokens = event.piece.expect("a piece").tokens;
                ids.extend(tokens.into_iter().filter(|_| event.id == origin));
            }
            ids.len()
        };
        while step(&mut scheduler) == 0 {}
        let fork = scheduler.fork_prompt(origin, &options).expect("a fork");
        let taken = pair.machine.fill(left);
        step(&mut scheduler);
        drop(scheduler.remove(fork));
        while step(&mut scheduler) < want.len() {}
        assert_eq!(ids, want, "{left} bytes left");
        pair.machine.empty(taken);
    }
}

/// Prompts continue from cached prefixes, also after quantized pages, and nothing of them is left.
#[test]
fn prefixes_are_kept() {
    let widths = Widths { full: Heads { width: 128, pairs: 8 }, ..NARROW };
    let zones = ExactZones { head: 20, tail: 10, ..ExactZones::default() };
    let codes = KvOptions {
        key: CodeFormat::Tqc5.into(),
        value: CodeFormat::Tqc4.into(),
        exact: zones,
        ..exact(ElementType::F16).kv
    };
    let pair = pair("nested", widths, None);
    keep_prefixes(&pair, exact(ElementType::F32).kv);
    keep_prefixes(&pair, codes);
}

/// So do those of delta nets.
#[test]
fn prefixes_of_delta_nets_are_kept() {
    keep_prefixes(&pair("qwen35-nested", NARROW, None), exact(ElementType::F32).kv);
}

fn keep_prefixes(pair: &Pair, kv: KvOptions) {
    let prefix_cache = Some(PrefixCacheOptions { interval: 64, ..PrefixCacheOptions::default() });
    let (session, vocab) = (SessionOptions { kv }, pair.cpu.target().vocab_size() as u32);
    let options = SchedulerOptions { prefix_cache, ..SchedulerOptions::default() };
    let mut scheduler = Scheduler::new(&pair.device, options);
    let mut computed = Vec::new();
    for (shared, own) in [(150, 0), (150, 10), (140, 10)] {
        let prompt: Vec<_> = text(shared).into_iter().chain(300..300 + own).map(|id| id % vocab).collect();
        let new = scheduler.session(&session).expect("a session");
        let id = scheduler.add(new, &prompt, &plain(4)).expect("added");
        assert_eq!(cases::texts(&mut scheduler)[&id], run(&pair.cpu, &session, &prompt, &plain(4)).0);
        let statistics = scheduler.statistics(id).expect("a sequence");
        computed.push(statistics.prompt_tokens - statistics.cached_tokens);
        drop(scheduler.remove(id));
    }
    assert!(computed[0] == 150 && computed[1] < 60 && computed[2] < 100, "{computed:?} tokens of prompts are computed");
    drop(scheduler);
    assert_eq!(pair.device.pages().held(), 0, "pages are left");
}

/// A sequence for which the device has no memory gets that of cached prefixes, also while another one goes on.
#[test]
fn a_sequence_without_memory_gets_that_of_prefixes() {
    let pair = pair("nested", NARROW, None);
    let vocab = pair.cpu.target().vocab_size() as u32;
    // Without room for a chunk of pages, each has memory of its own.
    pair.machine.fill(24 << 20);
    let prefix_cache = Some(PrefixCacheOptions { interval: 64, ..PrefixCacheOptions::default() });
    let mut scheduler =
        Scheduler::new(&pair.device, SchedulerOptions { prefix_cache, prompt_slowdown: f64::INFINITY, max_rows: 512 });
    let session = exact(ElementType::F32);
    let prompts = [[200, 7], [100, 11], [3, 13]]
        .map(|[len, step]| -> Vec<u32> { (0..len).map(|i| 3 + (i * i + i * step) % (vocab - 3)).collect() });
    let add = |scheduler: &mut Scheduler, prompt: &[u32], max_tokens: usize| {
        let session = scheduler.session(&session).expect("a session");
        scheduler.add(session, prompt, &plain(max_tokens)).expect("added")
    };
    // Two prompts whose states are cached; the passes allocate what the later ones need as well.
    for prompt in &prompts[..2] {
        let [first, second] = [prompt, &prompts[2]].map(|prompt| add(&mut scheduler, prompt, 4));
        drop(cases::texts(&mut scheduler));
        [first, second].into_iter().for_each(|id| drop(scheduler.remove(id)));
    }
    let long = add(&mut scheduler, &prompts[2], 100);
    (0..2).for_each(|_| drop(scheduler.step()));
    let other: Vec<u32> = prompts[0][..40].iter().rev().copied().collect();
    let waiting = add(&mut scheduler, &other, 4);
    pair.machine.fill(0);
    let mut ids = Vec::new();
    while scheduler.is_active() && ids.len() < 4 {
        for event in scheduler.step() {
            let piece = event.piece.expect("a piece");
            ids.extend(piece.tokens.into_iter().filter(|_| event.id == waiting));
            assert!(event.id != long || event.finish_reason.is_none(), "the other one waited for its end");
        }
    }
    assert_eq!(ids, run(&pair.cpu, &session, &other, &plain(4)).0);
}

/// A prompt of several passes waits if there is no memory for the state before it, and is read once there is.
#[test]
fn a_prompt_whose_state_cannot_be_kept_waits() {
    for name in ["nested", "qwen35-nested"] {
        let pair = pair(name, NARROW, None);
        let vocab = pair.cpu.target().vocab_size() as u32;
        let prompts = [0, 1].map(|step| Vec::from_iter(text(40).into_iter().map(|id| (id + step) % vocab)));
        let session = exact(ElementType::F32);
        let options = SchedulerOptions { max_rows: 16, prompt_slowdown: f64::INFINITY, prefix_cache: None };
        let mut scheduler = Scheduler::new(&pair.device, options);
        let add = |scheduler: &mut Scheduler, prompt: &[u32], max_tokens: usize| {
            let session = scheduler.session(&session).expect("a session");
            scheduler.add(session, prompt, &plain(max_tokens)).expect("added")
        };
        let step = |scheduler: &mut Scheduler| {
            let events = scheduler.step().into_iter();
            events.map(|event| (event.id, event.piece.expect("a piece").tokens)).collect::<Vec<_>>()
        };
        // The passes below take no more memory than these.
        let ids = prompts.each_ref().map(|prompt| add(&mut scheduler, prompt, 8));
        drop(cases::texts(&mut scheduler));
        ids.into_iter().for_each(|id| drop(scheduler.remove(id)));

        let running = add(&mut scheduler, &prompts[0], 60);
        while step(&mut scheduler).is_empty() {}
        (0..2).for_each(|_| drop(step(&mut scheduler)));
        let waiting = add(&mut scheduler, &prompts[1], 4);
        let taken = pair.machine.fill(0);
        for _ in 0..4 {
            let written = step(&mut scheduler);
            assert!(written.len() == 1 && written[0].0 == running, "{name}: {written:?}");
        }
        pair.machine.empty(taken);
        drop(scheduler.remove(running));
        let mut ids = Vec::new();
        while scheduler.is_active() {
            ids.extend(step(&mut scheduler).into_iter().filter(|(id, _)| *id == waiting).flat_map(|(_, ids)| ids));
        }
        assert_eq!(ids, run(&pair.cpu, &session, &prompts[1], &plain(4)).0, "{name}");
    }
}

/// A pair whose pages take at most half as much again as those of a session with these options.
fn with_little_memory(session: &SessionOptions) -> Pair {
    let files = tempfile::tempdir().expect("a folder");
    let target = widen(&cases::named("nested").path.join("target"), &files.path().join("target"), NARROW);
    let little = SessionOptions { kv: KvOptions { memory: Some(1), ..session.kv.clone() } };
    let refused = pair("nested", NARROW, None).device.session(&little);
    let Err(Error::Memory { needed: Some(one), .. }) = refused else { panic!("a session without memory") };
    load(EngineOptions { kv_memory: Some(one * 3 / 2), ..EngineOptions::new(target) }, Vec::new(), files)
}

/// A scheduler's automatic context is what the limit of pages holds, whatever others hold of it.
#[test]
fn an_automatic_context_is_that_of_all_pages() {
    let pair = with_little_memory(&exact(ElementType::F32));
    let kv = KvOptions { max_context: None, max_round_rows: 512, ..exact(ElementType::F32).kv };
    let session = SessionOptions { kv };
    let mut scheduler = Scheduler::new(&pair.device, SchedulerOptions::default());
    let write = |scheduler: &mut Scheduler, session: Session, prompt: &[u32]| {
        let id = scheduler.add(session, prompt, &plain(2)).expect("added");
        (id, cases::texts(scheduler).remove(&id).expect("a text"))
    };
    let alone = scheduler.session(&session).expect("a session").kv().max_context();
    let mut others = Vec::new();
    // The last one leaves pages of fewer positions than a pass may have rows.
    while pair.device.session(&session).expect("a session").kv().max_context() > 128 {
        let other = scheduler.session(&session).expect("a session");
        others.push(write(&mut scheduler, other, &text(100)).0);
    }
    let beside = scheduler.session(&session).expect("a session");
    assert_eq!(beside.kv().max_context(), alone);
    others.into_iter().for_each(|id| drop(scheduler.remove(id)));
    let (prompt, options) = (text(300), plain(2));
    assert_eq!(write(&mut scheduler, beside, &prompt).1, run(&pair.cpu, &session, &prompt, &options).0);
}

/// Memory that is allocated for pages, and that no page has, is free for a context.
#[test]
fn a_context_fits_the_rest_of_a_chunk_of_pages() {
    let (pair, session) = (pair("nested", NARROW, None), exact(ElementType::F32));
    let write = |session: &mut Session| {
        let pieces = session.generate(&pair.prompt, &plain(3)).expect("a generation");
        pieces.flat_map(|piece| piece.expect("a piece").tokens).collect::<Vec<_>>()
    };
    let mut first = pair.device.session(&session).expect("a session");
    let want = write(&mut first);
    pair.machine.fill(1 << 20);
    let mut second = pair.device.session(&session).expect("a session");
    assert_eq!(write(&mut second), want);
}

/// Cached prefixes stay if a context does not fit beside a running sequence without them either.
#[test]
fn a_context_that_does_not_fit_beside_others_drops_no_prefix() {
    let session = exact(ElementType::F32);
    let pair = with_little_memory(&session);
    let vocab = pair.cpu.target().vocab_size() as u32;
    let prompt = |len: usize, step: u32| Vec::from_iter(text(len).into_iter().map(|id| (id + step) % vocab));

    // States after the prompts, and after the texts.
    let prefix_cache =
        Some(PrefixCacheOptions { interval: 4096, max_bytes: Some(u64::MAX), ..PrefixCacheOptions::default() });
    let mut scheduler = Scheduler::new(&pair.device, SchedulerOptions { prefix_cache, ..SchedulerOptions::default() });
    let [first, running, later] = [(); 3].map(|()| scheduler.session(&session).expect("a session"));
    let mut write = |session: Session, prompt: &[u32]| {
        let id = scheduler.add(session, prompt, &plain(2)).expect("added");
        drop(cases::texts(&mut scheduler));
        id
    };
    let first = write(first, &prompt(100, 0));
    let running = write(running, &prompt(600, 1));
    drop(scheduler.remove(first));
    assert!(matches!(scheduler.session(&session), Err(Error::Memory { .. })));
    drop(scheduler.remove(running));
    let id = scheduler.add(later, &prompt(110, 0), &plain(2)).expect("added");
    assert_eq!(scheduler.statistics(id).expect("a sequence").cached_tokens, 100);
}

/// A failed prompt leaves a NextN head's rows of the text before it, and so the next drafts.
#[test]
fn a_failed_prompt_leaves_the_drafter_as_it_was() {
    let pair = pair("qwen35-dense", NARROW, None);
    let vocab = pair.device.target().vocab_size() as u32;
    let text: Vec<_> = text(200).into_iter().map(|id| id % vocab).collect();
    for seed in 0..3 {
        let sampling = Sampling { temperature: 0.8, ..Sampling::default() };
        let options = GenerateOptions { sampling, seed, ..mtp(4, &plain(12)) };
        let failing = GenerateOptions { logits_processor: Some(Arc::new(Failing)), ..options.clone() };
        let written = [false, true].map(|is_disturbed| {
            let mut session = pair.device.session(&exact(ElementType::F32)).expect("a session");
            let mut write = |prompt: &[u32], options: &GenerateOptions| {
                let generation = session.generate(prompt, options)?;
                generation.map(|piece| piece.map(|piece| piece.tokens)).collect::<foretoken::Result<Vec<_>>>()
            };
            write(&text[..60], &options).expect("a text");
            for len in if is_disturbed { &[1, 5, 110][..] } else { &[] } {
                write(&text[60..60 + len], &failing).expect_err("a defect");
            }
            write(&text[180..], &options).expect("a text")
        });
        assert_eq!(written[0], written[1], "seed {seed}");
    }
}

/// Fails after every prompt.
#[derive(Debug)]
struct Failing;

impl LogitsProcessor for Failing {
    fn process(&self, _: &[u32], _: &mut [f32]) -> foretoken::Result<()> {
        Err(Error::Tokenizer("the processor's".into()))
    }
}

/// The page tables of a cached prefix hold the context that it was read with: a sequence with a
/// longer one reads it again.
#[test]
fn a_prefix_with_a_shorter_context_is_read_again() {
    let pair = pair("nested", NARROW, None);
    let prefix_cache = Some(PrefixCacheOptions::default());
    let mut scheduler = Scheduler::new(&pair.device, SchedulerOptions { prefix_cache, ..SchedulerOptions::default() });
    let prompt: Vec<_> = text(250).into_iter().map(|id| id % pair.cpu.target().vocab_size() as u32).collect();
    for (context, len, tokens) in [(256, 240, 2), (384, 250, 10)] {
        let prompt = &prompt[..len];
        let kv = KvOptions { max_context: Some(context), ..exact(ElementType::F32).kv };
        let session = scheduler.session(&SessionOptions { kv: kv.clone() }).expect("a session");
        let id = scheduler.add(session, prompt, &plain(tokens)).expect("added");
        let ids = cases::texts(&mut scheduler).remove(&id).expect("a text");
        assert_eq!(ids, run(&pair.cpu, &SessionOptions { kv }, prompt, &plain(tokens)).0, "{context}");
        assert_eq!(scheduler.statistics(id).expect("a sequence").cached_tokens, 0);
        drop(scheduler.remove(id));
    }
}

/// It is not dropped, and a shorter prefix with a longer context is found in its place.
#[test]
fn a_prefix_with_a_shorter_context_is_passed_over() {
    let pair = pair("nested", NARROW, None);
    let prefix_cache = Some(PrefixCacheOptions { interval: 64, ..PrefixCacheOptions::default() });
    let mut scheduler = Scheduler::new(&pair.device, SchedulerOptions { prefix_cache, ..SchedulerOptions::default() });
    let vocab = pair.cpu.target().vocab_size() as u32;
    let common: Vec<_> = text(200).into_iter().map(|id| id % vocab).collect();
    for (context, shared, own, cached) in
        [(256, 200, 0, 0), (384, 100, 40, 0), (384, 200, 41, 100), (256, 200, 42, 200)]
    {
        let prompt: Vec<_> = common[..shared].iter().copied().chain((0..own).map(|i| (i * 5 + own) % vocab)).collect();
        let kv = KvOptions { max_context: Some(context), ..exact(ElementType::F32).kv };
        let session = scheduler.session(&SessionOptions { kv: kv.clone() }).expect("a session");
        let id = scheduler.add(session, &prompt, &plain(2)).expect("added");
        let mut ids = Vec::new();
        while scheduler.is_active() {
            ids.extend(scheduler.step().into_iter().flat_map(|event| event.piece.expect("a piece").tokens));
        }
        assert_eq!(ids, run(&pair.cpu, &SessionOptions { kv }, &prompt, &plain(2)).0, "{own}");
        assert_eq!(scheduler.statistics(id).expect("a sequence").cached_tokens, cached, "{own}");
        drop(scheduler.remove(id));
    }
}

/// NaN in the K of one sequence is that sequence's error.
#[test]
fn a_failure_is_the_failing_sequences_alone() {
    fail_alone("edge", "K of layer 1 at position ", |last| vec![3, 9, last], mtp(3, &plain(5)));
}

/// So it is with delta nets, where the other sequences' rows of the failed pass are dropped: of prompts, and of rounds
/// after some whose accepted rows are not in the matrices yet.
#[test]
fn a_failure_leaves_the_states_of_other_sequences() {
    let speculation = drafting("ngram-map-k:n=1:m=4:hits=1", 4, DraftSampling::Greedy);
    let prompt = |last| [text(25).iter().map(|id| id % 77).collect(), vec![last]].concat();
    let options = GenerateOptions { speculation, ..plain(12) };
    fail_alone("qwen35-dense", "K of layer 3 at position ", prompt, options);
    // With states of a NextN head.
    fail_alone("qwen35-dense", "K of layer 3 at position ", prompt, mtp(3, &plain(6)));
}

/// Two sequences fail, the second one when a third has several rounds, and others are not
/// disturbed. Prompts end with a token.
fn fail_alone(name: &str, problem: &str, prompt: impl Fn(u32) -> Vec<u32>, options: GenerateOptions) {
    let bad = 77;
    let pair = damaged(name, NARROW, None, |target| poison(target, bad));
    let want = |prompt: &[u32]| run(&pair.cpu, &exact(ElementType::F32), prompt, &options).0;
    let mut scheduler = Scheduler::new(&pair.device, SchedulerOptions::default());
    let (mut texts, mut errors) = (HashMap::<SequenceId, Vec<u32>>::new(), Vec::new());
    let (mut good, mut failing) = (Vec::new(), Vec::new());
    // From the last one on.
    let (mut later, mut steps) = (vec![bad, 12, 10, bad, 11], 0);
    while scheduler.is_active() || !later.is_empty() {
        // Three at first, the others after some rounds.
        while later.len() > 2 || steps > 3 && !later.is_empty() {
            let last = later.pop().expect("one");
            let session = pair.device.session(&exact(ElementType::F32)).expect("a session");
            let id = scheduler.add(session, &prompt(last), &options).expect("added");
            if last == bad { failing.push(id) } else { good.push((id, last)) }
        }
        steps += 1;
        for event in scheduler.step() {
            match event.piece {
                Ok(piece) => texts.entry(event.id).or_default().extend(piece.tokens),
                Err(error) => errors.push((event.id, error.to_string())),
            }
        }
    }
    assert_eq!(errors.iter().map(|(id, _)| *id).collect::<Vec<_>>(), failing);
    assert!(errors.iter().all(|(_, error)| error.starts_with(problem)), "{errors:?}");
    for (id, last) in good {
        assert_eq!(texts[&id], want(&prompt(last)));
    }
}
