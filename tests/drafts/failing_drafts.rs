//! What fails because of a draft does not change the text: memory, rows of rejected tokens, errors
//! behind accepted ones.

use std::sync::{Arc, Mutex};

use foretoken::checkpoint::Checkpoint;
use foretoken::gemma4::Target;
use foretoken::kv::{Batch, KvOptions};
use foretoken::rand::rngs::StdRng;
use foretoken::sampler::Distribution;
use foretoken::speculative::{
    BlockSize, Context, CustomDrafter, Draft, DraftCost, DraftSampling, Drafter, DrafterKind, DrafterOptions, Drafters,
};
use foretoken::{
    Engine, EngineOptions, Error, GenerateOptions, Isa, LogitsProcessor, Model, ModelOptions, Request, Result,
    Sampling, Scheduler, SchedulerOptions, Session, SessionOptions, Speculation, SpeculationOptions,
};

use crate::cases::{self, plain};
use crate::changed_model::ChangedModel;
use crate::given::{given, outcome};

fn engine(kv_memory: Option<u64>) -> Engine {
    let case = cases::named("dense");
    let (assistant, target) = (case.assistant_path(), case.path.join("target"));
    let options = EngineOptions { threads: Some(1), kv_memory, assistant, ..EngineOptions::new(target) };
    Engine::load(&options).expect("an engine")
}

fn alone(engine: &Engine, prompt: &[u32], options: &GenerateOptions) -> (Vec<u32>, Option<String>) {
    outcome(&mut engine.session(&SessionOptions::default()).expect("a session"), prompt, options)
}

#[test]
fn a_drafter_s_error_does_not_end_a_later_text() {
    let engine = engine(None);
    let mut session = engine.session(&SessionOptions::default()).expect("a session");
    let failing = GenerateOptions { speculation: given(3, 8, |_, most| vec![9; most]), ..plain(5) };
    assert_eq!(outcome(&mut session, &[5, 6, 7], &failing).0.len(), 5);
    let (ids, error) = outcome(&mut session, &[8], &plain(5));
    assert_eq!((ids.len(), error), (5, None));
}

#[test]
fn the_first_token_is_kept_if_a_drafter_panics_after_it() {
    let engine = engine(None);
    let text = alone(&engine, &[5, 6, 7], &plain(5)).0;
    let mut session = engine.session(&SessionOptions::default()).expect("a session");
    let panicking = GenerateOptions { speculation: given(3, 4, |_, most| vec![9; most]), ..plain(5) };
    let (ids, error) = outcome(&mut session, &[5, 6, 7], &panicking);
    assert_eq!(ids, text[..1]);
    assert!(error.is_some_and(|error| error.contains("the drafter's")));
    assert_eq!(session.tokens(), [5, 6, 7, text[0]]);
    assert_eq!(outcome(&mut session, &[8], &plain(5)).1, None);
}

/// Fails after a number of tokens: with an error, or a panic.
#[derive(Debug)]
struct Budget {
    tokens: usize,
    panics: bool,
}

impl LogitsProcessor for Budget {
    fn process(&self, tokens: &[u32], _: &mut [f32]) -> Result<()> {
        match tokens.len() >= self.tokens {
            true if self.panics => panic!("the budget"),
            true => Err(Error::Tokenizer("the budget".into())),
            false => Ok(()),
        }
    }
}

#[test]
fn accepted_tokens_before_an_error_are_kept() {
    let engine = engine(None);
    let prompt = [5, 6, 7];
    let text = alone(&engine, &prompt, &plain(30)).0;
    for (tokens, panics) in (8..14).flat_map(|tokens| [(tokens, false), (tokens, true)]) {
        let with = |speculation| {
            let logits_processor: Option<Arc<dyn LogitsProcessor>> = Some(Arc::new(Budget { tokens, panics }));
            GenerateOptions { speculation, logits_processor, ..plain(30) }
        };
        let known = text.clone();
        let right =
            given(6, usize::MAX, move |seen, most| known[seen.len() - 3..].iter().copied().take(most).collect());
        let want = alone(&engine, &prompt, &with(Speculation::Off));
        assert_eq!(want.0.len(), tokens - 3);
        assert_eq!(alone(&engine, &prompt, &with(right)), want, "{tokens} {panics}");
    }
}

#[test]
fn the_row_of_a_rejected_draft_may_fail() {
    let path = cases::named("dense").path.join("target");
    let target =
        Checkpoint::open(&path).and_then(|checkpoint| Target::load(&checkpoint, Isa::best())).expect("a target");
    let forward = |target: &Target, batch: &mut Batch<'_>, request: &Request| match batch.ids().contains(&100) {
        true => Err(Error::NotFinite { what: "K", layer: Some(0), position: None, found: None }),
        false => target.forward(batch, request),
    };
    let engine = Engine::from_model(
        Arc::new(ChangedModel { target, forward }),
        ModelOptions { threads: Some(1), ..ModelOptions::default() },
    )
    .expect("an engine");
    let want = alone(&engine, &[5, 6, 7], &plain(10));
    assert!(want.1.is_none() && !want.0.contains(&100), "{want:?}");
    let wrong = GenerateOptions { speculation: given(3, usize::MAX, |_, most| vec![100; most]), ..plain(10) };
    assert_eq!(alone(&engine, &[5, 6, 7], &wrong), want);
}

/// Records the lengths of the sequences that it reads, or has no memory for them.
struct Reader(Option<Arc<Mutex<Vec<usize>>>>);

impl Drafter for Reader {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Custom
    }

    fn cost(&self) -> DraftCost {
        DraftCost::Once
    }

    fn read_prompt(&mut self, tokens: &[u32]) -> Result<()> {
        let (what, remedy) = ("a drafter".into(), String::new());
        let exhausted = Error::Memory { what, needed: None, available: None, fits: None, remedy };
        self.0.as_ref().ok_or(exhausted)?.lock().expect("no panic").push(tokens.len());
        Ok(())
    }
}

/// A drafter for which memory is exhausted hides no prompt from those after it.
#[test]
fn all_drafters_read_a_prompt() {
    let engine = engine(None);
    let lengths = Arc::new(Mutex::new(Vec::new()));
    let custom = |lengths: Option<Arc<Mutex<Vec<usize>>>>| {
        let new = move || -> Box<dyn Drafter> { Box::new(Reader(lengths.clone())) };
        DrafterOptions::Custom(CustomDrafter::new("reader", new))
    };
    let drafters = Drafters::Priority(vec![custom(None), custom(Some(lengths.clone()))]);
    let speculation = Speculation::With(SpeculationOptions { drafters, ..SpeculationOptions::default() });
    let (ids, error) = alone(&engine, &[5, 6, 7], &GenerateOptions { speculation, ..plain(5) });
    assert_eq!((ids.len(), error), (5, None));
    assert_eq!(*lengths.lock().expect("no panic"), [3]);
}

/// Rounds of 16 rows, in pages of which the pool has few.
fn small_sessions() -> SessionOptions {
    SessionOptions { kv: KvOptions { max_context: Some(256), max_round_rows: 16, ..KvOptions::default() } }
}

/// Runs generations in a scheduler: their tokens, errors and numbers of drafts.
fn run(engine: &Engine, works: Vec<(Session, &[u32], &GenerateOptions)>) -> Vec<(Vec<u32>, Option<String>, usize)> {
    let mut scheduler = Scheduler::new(engine, SchedulerOptions::default());
    let mut done = vec![(Vec::new(), None, 0); works.len()];
    let add = |(session, prompt, options)| scheduler.add(session, prompt, options).expect("a sequence");
    let ids: Vec<_> = works.into_iter().map(add).collect();
    while scheduler.is_active() {
        let events = scheduler.step();
        let mut ended = Vec::new();
        for event in events {
            let at = ids.iter().position(|id| *id == event.id).expect("one of them");
            done[at].2 = scheduler.statistics(event.id).expect("its statistics").drafted;
            match event.piece {
                Ok(piece) => done[at].0.extend(piece.tokens),
                Err(error) => done[at].1 = Some(error.to_string()),
            }
            ended.extend(event.finish_reason.map(|_| event.id));
        }
        ended.into_iter().for_each(|id| drop(scheduler.remove(id)));
    }
    done
}

#[test]
fn memory_for_the_text_alone_is_enough() {
    let prompt: Vec<u32> = (0..120).map(|i| 3 + i * 7 % 50).collect();
    let free = engine(None);
    let mut session = free.session(&small_sessions()).expect("a session");
    let text = outcome(&mut session, &prompt, &plain(8)).0;
    let small = free.pages().held();
    outcome(&mut session, &prompt, &plain(5));
    let limit = free.pages().held().max(2 * small);
    drop(session);
    // The text ends before a second page, into which the rows of drafts reach.
    let end = text[5];
    let want = text[..=text.iter().position(|token| *token == end).expect("its end")].to_vec();
    let lookup = SpeculationOptions {
        drafters: "ngram-simple:n=1:m=15".parse().expect("drafters"),
        block: BlockSize::Fixed(16),
        ..SpeculationOptions::default()
    };
    for speculation in [
        Speculation::Off,
        Speculation::With(SpeculationOptions::mtp(16)),
        given(16, usize::MAX, |_, most| vec![9; most]),
        Speculation::With(lookup),
    ] {
        let mut options = GenerateOptions { speculation, ..plain(64) };
        options.stop.tokens = vec![end];
        let engine = engine(Some(limit));
        let sessions = || {
            let [session, mut other] = [(); 2].map(|()| engine.session(&small_sessions()).expect("a session"));
            outcome(&mut other, &prompt[..100], &plain(1));
            (session, other)
        };
        let (mut session, other) = sessions();
        assert_eq!(outcome(&mut session, &prompt, &options), (want.clone(), None), "{:?}", options.speculation);
        drop((session, other));
        let (session, _other) = sessions();
        let done = run(&engine, vec![(session, &prompt, &options)]);
        assert_eq!((&done[0].0, &done[0].1), (&want, &None), "{:?}, in a scheduler", options.speculation);
    }
}

/// Two sequences and memory for the second page of one: the other waits. Its text and its drafts
/// are those that it has alone.
#[test]
fn a_sequence_that_waits_for_memory_keeps_its_drafts() {
    let prompts: [Vec<u32>; 2] =
        [(0..122).map(|i| 3 + i * 7 % 50).collect(), (0..118).map(|i| 3 + i * 11 % 50).collect()];
    let free = engine(None);
    let mut session = free.session(&small_sessions()).expect("a session");
    outcome(&mut session, &prompts[0][..100], &plain(1));
    let page = free.pages().held();
    outcome(&mut session, &prompts[0][..50], &plain(1));
    let limit = page + free.pages().held();
    drop(session);
    for (temperature, drafts) in
        [(0.0, DraftSampling::Greedy), (0.9, DraftSampling::Greedy), (0.9, DraftSampling::Sampled)]
    {
        for seed in 0..4 {
            let with = |max_tokens| GenerateOptions {
                sampling: Sampling { temperature, ..Sampling::default() },
                seed,
                speculation: Speculation::With(SpeculationOptions { drafts, ..SpeculationOptions::mtp(4) }),
                ..plain(max_tokens)
            };
            let options = [with(20), with(60)];
            let work = |engine: &Engine, i: usize| {
                (engine.session(&small_sessions()).expect("a session"), &*prompts[i], &options[i])
            };
            let want = [0, 1].map(|i| run(&free, vec![work(&free, i)]).remove(0));
            let small = engine(Some(limit));
            let both = run(&small, vec![work(&small, 0), work(&small, 1)]);
            for (got, want) in both.iter().zip(&want) {
                assert_eq!((&got.0, &got.1), (&want.0, &None), "temperature {temperature}, {drafts:?}, seed {seed}");
                assert!(got.2 * 10 >= want.2 * 9, "{} of {} drafts", got.2, want.2);
            }
        }
    }
}

/// After [`FIRST`] the target's distribution is one half of each of [`NEXT`].
#[derive(Debug)]
struct OneOfTwo {
    prompt: usize,
}

const FIRST: u32 = 7;
const NEXT: [u32; 2] = [8, 9];

impl LogitsProcessor for OneOfTwo {
    fn process(&self, tokens: &[u32], logits: &mut [f32]) -> Result<()> {
        logits.fill(f32::NEG_INFINITY);
        let allowed = if tokens.len() == self.prompt { &[FIRST][..] } else { &NEXT };
        allowed.iter().for_each(|token| logits[*token as usize] = 0.0);
        Ok(())
    }
}

/// Draws one of two tokens, of which the target cannot read the second.
struct Draws(Distribution);

impl Drafter for Draws {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Custom
    }

    fn cost(&self) -> DraftCost {
        DraftCost::PerToken
    }

    fn draft(&mut self, _: &Context<'_>, most: usize, draft: &mut Draft, rng: &mut StdRng) -> Result<()> {
        while draft.tokens.len() < most {
            draft.tokens.push(self.0.sample(rng));
            draft.probs.get_or_insert_default().push(self.0.clone());
        }
        Ok(())
    }
}

/// Sampled texts after a prompt of `prompt` tokens: see [`OneOfTwo`]. Rounds have `rows` rows, for drafts drawn from
/// two tokens.
fn drawn_drafts(tokens: [u32; 2], rows: usize, prompt: usize) -> GenerateOptions {
    let distribution = Distribution::new(tokens.map(|token| (token, 0.5)).to_vec());
    let draws = move || -> Box<dyn Drafter> { Box::new(Draws(distribution.clone())) };
    let speculation = SpeculationOptions {
        drafters: Drafters::Priority(vec![DrafterOptions::Custom(CustomDrafter::new("draws", draws))]),
        block: BlockSize::Fixed(rows),
        drafts: DraftSampling::Sampled,
        ..SpeculationOptions::default()
    };
    GenerateOptions {
        sampling: Sampling { temperature: 1.0, ..Sampling::default() },
        speculation: Speculation::With(speculation),
        logits_processor: Some(Arc::new(OneOfTwo { prompt })),
        ..plain(64)
    }
}

/// Only the draft that the target can read needs a row for which there is no memory. It is as probable as without
/// drafts.
#[test]
fn a_draw_without_memory_does_not_bias_a_sampled_text() {
    const TEXTS: u64 = 200;
    let prompt: Vec<u32> = (0..127).map(|i| 3 + i * 7 % 50).collect();
    let free = engine(None);
    let mut session = free.session(&small_sessions()).expect("a session");
    outcome(&mut session, &prompt, &plain(1));
    // Of two sequences, neither has a second page.
    let limit = 2 * free.pages().held();
    drop(session);
    let small = engine(Some(limit));
    let mut sessions: Vec<_> = (0..=TEXTS).map(|_| small.session(&small_sessions()).expect("a session")).collect();
    let mut other = sessions.pop().expect("a session");
    outcome(&mut other, &prompt[..100], &plain(1));
    let unreadable = small.target().num_readable_tokens() as u32;
    let mut options = GenerateOptions { max_tokens: 3, ..drawn_drafts([NEXT[0], unreadable], 2, prompt.len()) };
    options.stop.tokens = NEXT.to_vec();
    let mut drawn = 0;
    for (seed, session) in (0..).zip(sessions) {
        let options = GenerateOptions { seed, ..options.clone() };
        let (ids, error, drafted) = run(&small, vec![(session, &prompt, &options)]).remove(0);
        assert_eq!((ids.len(), ids[0], error, drafted), (2, FIRST, None, 0), "seed {seed}");
        drawn += usize::from(ids[1] == NEXT[0]);
    }
    // Four standard deviations of 200 draws; the seeds are fixed. Drawn anew without its draft, it has one quarter.
    let share = drawn as f64 / TEXTS as f64;
    assert!((share - 0.5).abs() < 0.15, "{share} instead of one half");
}

/// Of a drawn draft, the tokens whose rows have memory are verified, and count as their drafter's.
#[test]
fn a_draft_shortened_for_memory_is_its_drafter_s() {
    let prompt: Vec<u32> = (0..127).map(|i| 3 + i * 7 % 50).collect();
    let free = engine(None);
    let mut session = free.session(&small_sessions()).expect("a session");
    outcome(&mut session, &prompt, &plain(1));
    // Of two sequences, neither has a second page.
    let small = engine(Some(2 * free.pages().held()));
    let [mut session, mut other] = [(); 2].map(|()| small.session(&small_sessions()).expect("a session"));
    outcome(&mut other, &prompt[..100], &plain(1));
    let mut generation = session.generate(&prompt[..120], &drawn_drafts(NEXT, 16, 120)).expect("a generation");
    let error = generation.find_map(|piece| piece.err());
    assert!(matches!(error, Some(Error::Memory { .. })), "{error:?}");
    let statistics = generation.statistics();
    let drafter = &statistics.speculation.drafters[0];
    assert!(statistics.accepted > 0, "{statistics}");
    assert_eq!((drafter.drafted, drafter.accepted), (statistics.drafted, statistics.accepted));
}
