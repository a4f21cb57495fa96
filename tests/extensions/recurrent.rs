//! A model with a recurrent state runs through the same rounds: a dropped round leaves no trace.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use foretoken::checkpoint::StepCost;
use foretoken::kv::{Batch, KvAccess, KvCache, KvLayout, KvOptions, PagePool, Recurrent, SequenceState};
use foretoken::speculative::{
    BlockSize, Context, CustomDrafter, Draft, DraftCost, Drafter, DrafterKind, DrafterOptions, Drafters,
};
use foretoken::{
    Engine, Error, GenerateOptions, Isa, Model, ModelOptions, Output, OutputRows, Request, Scheduler, SchedulerOptions,
    Session, SessionOptions, Speculation, SpeculationOptions,
};
use rand::Rng;
use rand::rngs::StdRng;

const VOCAB: usize = 31;

/// A decaying sum: `s = s / 2 + embedding(token)`, whose staged rows are logged and replayed.
#[derive(Clone, Default)]
struct DecayingSum {
    committed: [f32; 4],
    staged: Vec<[f32; 4]>, // inputs
}

impl Recurrent for DecayingSum {
    fn begin(&mut self, _: usize) {
        self.staged.clear();
    }
    fn commit(&mut self, keep: usize) {
        self.committed = self.staged[..keep].iter().fold(self.committed, step);
    }
    fn fork(&self) -> Box<dyn Recurrent> {
        Box::new(Self { committed: self.committed, staged: Vec::new() })
    }
    fn bytes(&self) -> usize {
        size_of_val(&self.committed)
    }
    fn save(&self) -> Option<Vec<f32>> {
        Some(self.committed.to_vec())
    }
    fn load(&mut self, values: &[f32]) -> bool {
        let fits = values.len() == self.committed.len();
        if fits {
            self.committed.copy_from_slice(values);
        }
        fits
    }
}

fn step(sum: [f32; 4], x: &[f32; 4]) -> [f32; 4] {
    std::array::from_fn(|i| 0.5 * sum[i] + x[i])
}

fn embedding(token: u32) -> [f32; 4] {
    std::array::from_fn(|i| ((token as usize * 37 + i * 11) % 23) as f32 / 8.0 - 1.4)
}

struct Toy;

impl Model for Toy {
    fn vocab_size(&self) -> usize {
        VOCAB
    }
    fn hidden_size(&self) -> usize {
        4
    }
    fn max_position_embeddings(&self) -> usize {
        256
    }
    fn step_cost(&self) -> StepCost {
        StepCost { bytes: 64, multiply_adds: 64 }
    }
    fn fingerprint(&self) -> foretoken::Result<u64> {
        Ok(1)
    }
    fn new_state(&self, options: &KvOptions, pool: &PagePool) -> foretoken::Result<SequenceState> {
        let layout = KvLayout { stores: Vec::new(), store_of_layer: Vec::new(), inverse_frequencies: Vec::new() };
        let kv = KvCache::in_pool(layout, options, self.max_position_embeddings(), Isa::best(), pool)?;
        Ok(SequenceState::with_recurrent(kv, Box::new(DecayingSum::default())))
    }
    fn forward(&self, batch: &mut Batch<'_>, request: &Request) -> foretoken::Result<Output> {
        let (ids, mut hidden, mut first) = (batch.ids().to_vec(), Vec::new(), 0);
        batch.kv().for_rounds(&mut |round| {
            let rows = round.rows();
            let state = round.recurrent_mut::<DecayingSum>().expect("its own state");
            let mut sum = state.committed;
            for token in &ids[first..first + rows] {
                let x = embedding(*token);
                state.staged.push(x);
                sum = step(sum, &x);
                hidden.push(sum);
            }
            first += rows;
            Ok(())
        })?;
        let logit = |sum: &[f32; 4], token: usize| -> f32 {
            embedding(token as u32 + 5).iter().zip(sum).map(|(a, b)| a * b).sum::<f32>() + (token as f32 * 0.01).sin()
        };
        let logits = request.logits.iter().flat_map(|row| (0..VOCAB).map(|token| logit(&hidden[*row], token)));
        let of = |rows: Vec<f32>, width| Tensor::from_vec(rows.clone(), (rows.len() / width, width), &Device::Cpu);
        let states = request.hidden.iter().flat_map(|row| hidden[*row]).collect();
        Ok(Output { logits: of(logits.collect(), VOCAB)?, hidden: of(states, 4)?, taps: Vec::new() })
    }
}

/// Drafts the known text, with an occasional wrong token.
struct Guess(Arc<Vec<u32>>);

impl Drafter for Guess {
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
        rng: &mut StdRng,
    ) -> foretoken::Result<()> {
        let known = self.0.iter().skip(context.tokens.len()).take(most);
        draft.tokens.extend(known.map(|token| if rng.random_bool(0.2) { (token + 1) % VOCAB as u32 } else { *token }));
        Ok(())
    }
}

fn engine() -> Engine {
    let options = ModelOptions { threads: Some(1), ..ModelOptions::default() };
    Engine::from_model(Arc::new(Toy), options).expect("an engine")
}

fn write(session: &mut Session, prompt: &[u32], options: &GenerateOptions) -> Vec<u32> {
    let generation = session.generate(prompt, options).expect("a generation");
    generation.flat_map(|piece| piece.expect("a piece").tokens).collect()
}

fn plain(max_tokens: usize) -> GenerateOptions {
    GenerateOptions { max_tokens, speculation: Speculation::Off, ..GenerateOptions::default() }
}

/// After a round with any number of committed rows, the state is that of a sequence that only ever had those rows.
#[test]
fn rejected_rows_leave_no_trace() {
    let pool = PagePool::new(None);
    let new = || Toy.new_state(&KvOptions::default(), &pool).expect("a state");
    let ids = [3, 1, 4, 1, 5, 9, 2, 6];
    for keep in 0..=ids.len() {
        let (mut disturbed, mut fresh) = (new(), new());
        disturbed.begin_round(5).map(drop).expect("a round that is dropped");
        for (state, rows) in [(&mut disturbed, &ids[..]), (&mut fresh, &ids[..keep])] {
            if !rows.is_empty() {
                let round = state.begin_round(rows.len()).expect("a round");
                Toy.forward_one(rows, round, OutputRows::None, keep).expect("a pass");
            }
            assert_eq!(state.len(), keep);
        }
        let next = |state: &mut SequenceState| -> Vec<Vec<f32>> {
            let round = state.begin_round(2).expect("a round");
            Toy.forward_one(&[7, 8], round, OutputRows::All, 0).expect("a pass").logits.to_vec2().expect("rows")
        };
        assert_eq!(next(&mut disturbed), next(&mut fresh), "{keep} rows kept");
        assert_eq!(next(&mut disturbed.fork()), next(&mut fresh), "{keep} rows kept: the fork");
    }
}

/// Greedy text with a guessing drafter is the text without, alone and in a batch, and needs fewer passes.
#[test]
fn speculation_and_batches_write_the_same_text() {
    let engine = engine();
    let prompt = [2, 3, 5];
    let session = || engine.session(&SessionOptions::default()).expect("a session");
    let want = write(&mut session(), &prompt, &plain(60));
    let whole = Arc::new([&prompt[..], &want].concat());
    let custom = CustomDrafter::new("guess", move || Box::new(Guess(whole.clone())));
    let speculation = |rows| {
        let drafters = Drafters::Priority(vec![DrafterOptions::Custom(custom.clone())]);
        let block = BlockSize::Fixed(rows);
        Speculation::With(SpeculationOptions { drafters, block, ..SpeculationOptions::default() })
    };
    for rows in 1..=8 {
        let options = GenerateOptions { speculation: speculation(rows), ..plain(60) };
        let mut speculative = session();
        let mut generation = speculative.generate(&prompt, &options).expect("a generation");
        let got: Vec<u32> = generation.by_ref().flat_map(|piece| piece.expect("a piece").tokens).collect();
        let rounds = generation.statistics().rounds;
        assert_eq!(got, want, "B = {rows}");
        assert!(rows == 1 || rounds < 45, "B = {rows}: {rounds} rounds");
    }
    let mut scheduler = Scheduler::new(&engine, SchedulerOptions { max_rows: 2, ..SchedulerOptions::default() });
    for rows in 1..=8 {
        let options = GenerateOptions { speculation: speculation(rows), ..plain(60) };
        scheduler.add(session(), &prompt, &options).expect("added");
    }
    let ids: Vec<_> = scheduler.ids().collect();
    while scheduler.is_active() {
        assert!(scheduler.step().iter().all(|event| event.piece.is_ok()));
    }
    for id in ids {
        assert_eq!(scheduler.remove(id).expect("a session").tokens()[3..], want);
    }
}

/// A fork continues alone; a rewind is rejected, because a recurrence cannot be rewound.
#[test]
fn forks_go_on_and_rewinding_is_refused() {
    let engine = engine();
    let mut session = engine.session(&SessionOptions::default()).expect("a session");
    write(&mut session, &[2, 3, 5], &plain(10));
    let mut fork = session.fork().expect("a fork");
    assert_eq!(write(&mut fork, &[7], &plain(10)), write(&mut session, &[7], &plain(10)));
    assert!(matches!(session.rewind(3), Err(Error::Argument { name: "len", .. })));
    assert_eq!(fork.tokens(), session.tokens());
}

/// A model without K and V has a context of any length, and so can a damaged file.
#[test]
fn session_files_of_impossible_lengths_are_refused() {
    let engine = engine();
    let mut session = engine.session(&SessionOptions::default()).expect("a session");
    write(&mut session, &[2, 3, 5], &plain(10));
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("session");
    session.save(&path).expect("saved");
    let mut loaded = engine.load_session(&path).expect("the session");
    assert_eq!(write(&mut loaded, &[7], &plain(10)), write(&mut session, &[7], &plain(10)));

    let file = std::fs::read(&path).expect("a file");
    let begins = file.iter().position(|byte| *byte == b'{').expect("a header") - 4;
    let (magic, rest) = file.split_at(begins);
    let (len, rest) = rest.split_first_chunk().expect("a length");
    let (header, rest) = rest.split_at(u32::from_le_bytes(*len) as usize);
    let mut header: serde_json::Value = serde_json::from_slice(header).expect("JSON");
    header["max_context"] = usize::MAX.into();
    for len in [1 << (usize::BITS - 2), usize::MAX] {
        (header["len"], header["written"]) = (len.into(), len.into());
        let header = header.to_string();
        let damaged = [magic, &(header.len() as u32).to_le_bytes(), header.as_bytes(), rest].concat();
        std::fs::write(&path, damaged).expect("a file");
        let error = engine.load_session(&path).expect_err("an error").to_string();
        assert!(error.ends_with("it is damaged or truncated"), "{error}");
    }
}
