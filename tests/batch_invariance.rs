//! The bits of a row's logits and hidden state are a function of its sequence alone: not of the other rows of the batch,
//! of chunking, of the number of threads, or (for one instruction set) of anything else; for every weight type.

mod cases;

use std::path::Path;
use std::sync::{Arc, LazyLock};

use candle_core::Tensor;
use cases::{bits, on_every_isa};
use foretoken::checkpoint::{Checkpoint, LoadOptions};
use foretoken::gemma4::{Assistant, Centroids};
use foretoken::kv::{Batch, ExactZones, KvFormat, KvOptions, PagePool, SequenceState};
use foretoken::nn::{F32View, tensor};
use foretoken::{ChainModel, DraftKv, DraftRows, Engine, Model, ModelOptions, OutputRows, Request};
use foretoken::{ElementType, Isa, WeightType};
use foretoken::{gemma4, qwen35};

/// The demo target has all features: both layer types, shared K/V, per-layer embeddings, a wrapped window.
fn demo(isa: Isa, quantize: Option<WeightType>) -> gemma4::Target {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target");
    let checkpoint = Checkpoint::open(path).expect("the demo target");
    gemma4::Target::load(&checkpoint, LoadOptions { quantize, ..LoadOptions::from(isa) }).expect("the demo target")
}

const F32: KvFormat = KvFormat::Exact(ElementType::F32);
const F16: KvFormat = KvFormat::Exact(ElementType::F16);

const BATCH: usize = 16;

/// Tokens before the batch: past the demo's window of 128; a few on the scalar reference, which is slow.
fn prompt(isa: Isa) -> usize {
    if isa == Isa::Scalar { 10 } else { 150 }
}

fn ids(isa: Isa) -> Vec<u32> {
    (0..(prompt(isa) + BATCH) as u32).map(|i| 300 + i * 7919 % 3700).collect()
}

/// On two or three threads as an engine runs passes, with a team of threads; on others with rayon alone.
fn on_threads<R: Send>(threads: usize, work: impl FnOnce() -> R + Send) -> R {
    static MODEL: LazyLock<Arc<dyn Model>> = LazyLock::new(|| Arc::new(demo(Isa::best(), None)));
    if matches!(threads, 2 | 3) {
        let options = ModelOptions { threads: Some(threads), ..ModelOptions::default() };
        return Engine::from_model(MODEL.clone(), options).expect("threads").run(work);
    }
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads").install(work)
}

/// A state that holds `prompt`, read in chunks.
fn prefilled(target: &dyn Model, kv: KvFormat, prompt: &[u32], chunk: usize) -> SequenceState {
    // Small exact zones, so that some pages of the prompt are quantized.
    let exact = ExactZones { head: 8, tail: 16, element: ElementType::F16 };
    let options = KvOptions { key: kv, value: kv, exact, ..KvOptions::default() };
    let mut state = target.new_state(&options, &PagePool::new(None)).expect("a state");
    for chunk in prompt.chunks(chunk) {
        let round = state.begin_round(chunk.len()).expect("a round");
        target.forward_one(chunk, round, OutputRows::None, chunk.len()).expect("a pass");
    }
    state
}

/// The bits of each row's logits and hidden state in a round of these ids, of which `keep` rows are committed.
fn outputs(target: &dyn Model, state: &mut SequenceState, ids: &[u32], keep: usize) -> Vec<Vec<u32>> {
    let round = state.begin_round(ids.len()).expect("a round");
    let output = target.forward_one(ids, round, OutputRows::All, keep).expect("a pass");
    let [logits, hidden] = [&output.logits, &output.hidden].map(|of| bits(&F32View::new(of).expect("floats")));
    let rows = logits.chunks_exact(logits.len() / ids.len()).zip(hidden.chunks_exact(hidden.len() / ids.len()));
    rows.map(|(logits, hidden)| [logits, hidden].concat()).collect()
}

/// Checks that rounds of these `sizes`, for each of `threads` and chunk, have the bits of plain decoding of the last ids,
/// as many as the last size: one row at a time, on one thread.
fn check(target: &dyn Model, kv: KvFormat, ids: &[u32], sizes: &[usize], threads: &[(usize, usize)], name: &str) {
    let (prompt, batch) = ids.split_at(ids.len() - sizes.last().expect("a size"));
    let want: Vec<Vec<u32>> = on_threads(1, || {
        let mut state = prefilled(target, kv, prompt, prompt.len());
        batch.iter().flat_map(|id| outputs(target, &mut state, &[*id], 1)).collect()
    });
    for &(threads, chunk) in threads {
        on_threads(threads, || {
            let mut state = prefilled(target, kv, prompt, chunk);
            for &rows in sizes {
                let got = outputs(target, &mut state, &batch[..rows], 0);
                let what = format!("{name}, {rows} rows, {threads} threads, chunks of {chunk}");
                assert!(got == want[..rows], "{what}: the bits differ");
            }
        });
    }
}

/// As [`check`], with two of four pairs of threads and chunk: one half for even, the other for odd `turn`.
fn check_demo(isa: Isa, quantize: Option<WeightType>, kv: KvFormat, turn: usize, name: &str) {
    let threads = [[(2, 7), (4, usize::MAX)], [(1, 1), (3, 64)]];
    // Scalar products compute row by row, in blocks of eight.
    let few = isa == Isa::Scalar || quantize.is_some_and(|weight_type| !IN_ALL_SIZES.contains(&weight_type));
    let sizes = if few { vec![1, 3, 9, BATCH] } else { Vec::from_iter(1..=BATCH) };
    check(&demo(isa, quantize), kv, &ids(isa), &sizes, &threads[turn % 2], name);
}

/// The other types run with few sizes, on the widest instruction set: the kernels' tests check for every type, on each
/// instruction set, that the bits are the scalar reference's for every number of rows.
const IN_ALL_SIZES: [WeightType; 2] = [WeightType::Q8_0, WeightType::Q4_K];

/// Types with an encoder.
#[test]
fn every_weight_type_gives_a_row_its_own_bits() {
    on_every_isa(|isa| {
        check_demo(isa, None, F16, 0, "bf16 weights");
        let all = isa == Isa::best();
        let written = WeightType::ALL.into_iter().filter(|weight_type| weight_type.is_written());
        for (turn, weight_type) in written.enumerate() {
            if all || IN_ALL_SIZES.contains(&weight_type) {
                check_demo(isa, Some(weight_type), F16, turn, weight_type.name());
            }
        }
    });
}

#[test]
fn every_row_type_of_the_cache_gives_a_row_its_own_bits() {
    on_every_isa(|isa| {
        // Every third on narrower instruction sets.
        let stride = if isa == Isa::best() { 1 } else { 3 };
        for (turn, kv) in KvFormat::all().step_by(stride).enumerate() {
            check_demo(isa, None, kv, turn, &format!("{kv} K/V"));
        }
    });
}

/// Experts, K = V layers and delta nets, in f32, f16 and bf16 weights as the fixtures have them.
#[test]
fn the_fixtures_give_a_row_its_own_bits() {
    on_every_isa(|isa| {
        let check = |case: &cases::Case, target: &dyn Model| {
            let ids = case.ids("input_ids");
            let sizes = Vec::from_iter(1..=8.min(ids.len() - 1));
            check(target, F32, &ids, &sizes, &[(1, 7), (2, 1), (4, 5)], &case.name);
        };
        cases::all().iter().for_each(|case| check(case, &case.target(isa)));
        for case in cases::of(cases::QWEN35) {
            let checkpoint = Checkpoint::open(case.path.join("target")).expect("the target's checkpoint");
            check(&case, &qwen35::Target::load(&checkpoint, isa).expect("the target"));
        }
    });
}

/// Checks a pass of several sequences against one of each alone: of a round all rows have outputs, of a prompt's chunk
/// the last one or none, so that the last layers compute a part of the batch's rows.
fn check_passes(target: &dyn Model, ids: &[u32], name: &str) {
    // Tokens before the rows, rows, and those with outputs.
    let parts = [(0, 5, OutputRows::None), (3, 4, OutputRows::All), (2, 6, OutputRows::Last), (1, 1, OutputRows::All)];
    let states = || parts.map(|(before, ..)| prefilled(target, F16, &ids[..before], usize::MAX));
    let (mut together, mut alone) = (states(), states());
    let (mut logits, mut hidden) = (Vec::new(), Vec::new());
    for ((before, rows, outputs), state) in parts.into_iter().zip(&mut alone) {
        let round = state.begin_round(rows).expect("a round");
        let output = target.forward_one(&ids[before..before + rows], round, outputs, rows).expect("a pass");
        logits.extend(bits(&F32View::new(&output.logits).expect("floats")));
        hidden.extend(bits(&F32View::new(&output.hidden).expect("floats")));
    }
    let (mut batch, mut request) = (Batch::new(), Request::default());
    for ((before, rows, outputs), state) in parts.into_iter().zip(&mut together) {
        let end = batch.rows() + rows;
        request.logits.extend(end - outputs.of(rows)..end);
        batch.push(&ids[before..before + rows], state.begin_round(rows).expect("a round")).expect("a segment");
    }
    request.hidden.clone_from(&request.logits);
    let output = target.forward(&mut batch, &request).expect("a pass");
    let rounds = batch.into_rounds().into_iter().zip(parts);
    rounds.for_each(|(round, (_, rows, _))| round.commit(rows));
    assert!(bits(&F32View::new(&output.logits).expect("floats")) == logits, "{name}: the bits of logits differ");
    assert!(bits(&F32View::new(&output.hidden).expect("floats")) == hidden, "{name}: the bits of states differ");
    let same = together.iter().zip(&alone).all(|(together, alone)| together.kv().same_rows(alone.kv()));
    assert!(same, "{name}: K and V differ");
}

#[test]
fn passes_of_rounds_and_prompts_give_a_row_its_own_bits() {
    on_every_isa(|isa| {
        let check = |case: &cases::Case, target: &dyn Model| {
            let ids: Vec<u32> = case.ids("input_ids").into_iter().cycle().take(8).collect();
            for threads in [1, 3] {
                on_threads(threads, || check_passes(target, &ids, &format!("{}, {threads} threads", case.name)));
            }
        };
        cases::all().iter().for_each(|case| check(case, &case.target(isa)));
        for case in cases::of(cases::QWEN35) {
            let checkpoint = Checkpoint::open(case.path.join("target")).expect("the target's checkpoint");
            check(&case, &qwen35::Target::load(&checkpoint, isa).expect("the target"));
        }
    });
}

/// A sequence to draft for, after `last`, which `hidden` predicted.
struct Drafting {
    state: SequenceState,
    last: u32,
    hidden: Tensor,
}

/// Results of a draft step: scored ids, bits of their scores, bits of the hidden state.
type StepBits = (Option<Vec<u32>>, Vec<u32>, Vec<u32>);

/// Chain steps of each of `sequences`, in one pass per draft position.
fn chains(assistant: &Assistant, sequences: &[Drafting]) -> Vec<Vec<StepBits>> {
    let mut newest: Vec<_> = sequences.iter().map(|sequence| (sequence.last, sequence.hidden.clone())).collect();
    let mut steps = vec![Vec::new(); sequences.len()];
    for _ in 0..3 {
        let rows = sequences.iter().zip(&newest);
        let mut rows: Vec<_> = rows
            .map(|(Drafting { state, .. }, (token, hidden))| DraftRows {
                ids: vec![*token],
                hidden: Some(hidden.clone()),
                kv: DraftKv::Target(state.kv().committed()),
            })
            .collect();
        let results = assistant.step(&mut rows).expect("a step");
        assert_eq!(results.len(), sequences.len());
        newest.clear();
        for (step, steps) in results.into_iter().zip(&mut steps) {
            let logits = cases::values(&step.scores.logits);
            let best = cases::argmax(&logits);
            let hidden = bits(&F32View::new(&step.hidden).expect("floats"));
            newest.push((step.scores.ids.as_ref().map_or(best, |ids| ids[best as usize]), step.hidden));
            steps.push((step.scores.ids, bits(&logits), hidden));
        }
    }
    steps
}

/// Chains of sequences with different lengths and formats have the bits of each alone, on any number of threads.
fn check_chains(target: &gemma4::Target, assistant: &Assistant, ids: &[u32], name: &str) {
    let formats = [F32, F16, "turbo4".parse().expect("a format")];
    let sequence = |i: usize| {
        let (newest, before) = ids[i..ids.len() - 1 - i % 3].split_last().expect("tokens");
        let mut state = prefilled(target, formats[i % 3], before, usize::MAX);
        let round = state.begin_round(1).expect("a round");
        let hidden = target.forward_one(&[*newest], round, OutputRows::Last, 1).expect("a pass").hidden;
        Drafting { state, last: ids[ids.len() - 1], hidden }
    };
    let sequences: Vec<_> = (0..5).map(sequence).collect();
    let want: Vec<_> = on_threads(1, || sequences.chunks(1).flat_map(|sequence| chains(assistant, sequence)).collect());
    for (threads, count) in [(1, 2), (1, 5), (2, 5), (3, 4), (4, 5)] {
        let got = on_threads(threads, || chains(assistant, &sequences[..count]));
        assert!(got == want[..count], "{name}, {count} sequences, {threads} threads: the bits differ");
    }
}

/// Heads that score every id, and with centroids.
#[test]
fn draft_steps_of_many_sequences_give_each_its_own_bits() {
    on_every_isa(|isa| {
        let all = cases::all();
        let centroid_heads = all.iter().filter(|case| {
            let target = case.target(isa);
            let Some(assistant) = case.assistant(&target, isa) else { return false };
            let ids = case.ids("input_ids");
            check_chains(&target, &assistant, &ids, &case.name);
            let kv = prefilled(&target, F32, &ids, usize::MAX);
            let state = tensor(vec![0.5; target.hidden_size()], (1, target.hidden_size())).expect("a state");
            cases::draft_step(&assistant, ids[0], &state, kv.kv()).scores.ids.is_some()
        });
        let centroid_heads = centroid_heads.count();
        assert!(centroid_heads > 0 && centroid_heads < all.len(), "{centroid_heads} heads have centroids");
        let (target, path) = (demo(isa, None), Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/assistant"));
        let checkpoint = Checkpoint::open(path).expect("the demo assistant");
        for (centroids, name) in [(Centroids::Own, "centroids"), (Centroids::None, "dense")] {
            let options = LoadOptions { centroids, ..LoadOptions::from(isa) };
            let assistant = Assistant::load(&checkpoint, &target, options).expect("the demo assistant");
            check_chains(&target, &assistant, &ids(isa), &format!("demo, {name}"));
        }
    });
}
