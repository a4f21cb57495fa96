//! Qwen3.5 against transformers, and against itself: a dropped round leaves no trace, and rows do
//! not depend on their batch.

#[path = "../cases/mod.rs"]
mod cases;
#[path = "../gguf_writer/mod.rs"]
mod gguf_writer;
mod qwen35_files;

use std::sync::Arc;

use candle_core::Tensor;
use cases::{Case, argmax, bits, max_difference, on_every_isa, same_id, values};
use foretoken::checkpoint::{Checkpoint, LoadOptions};
use foretoken::kv::{Batch, KvCache, KvOptions, PagePool, SequenceState};
use foretoken::nn::tensor;
use foretoken::qwen35::{LayerType, Target};
use foretoken::sampler::Sampler;
use foretoken::speculative::{Confidence, Context, Draft, DraftSampling, Drafter, NextN, Observed};
use foretoken::{ElementType, Isa, Model, NextnHead, Output, OutputRows, Request, Sampling, WeightType};
use rand::SeedableRng;
use rand::rngs::StdRng;

fn for_each_case(check: impl Fn(&Case, &Target)) {
    let cases = cases::of(cases::QWEN35);
    on_every_isa(|isa| {
        for case in &cases {
            println!("case {}", case.path.display());
            check(case, &target(case, isa));
        }
    });
}

fn target(case: &Case, options: impl Into<LoadOptions>) -> Target {
    let checkpoint = Checkpoint::open(case.path.join("target")).expect("the target's checkpoint");
    Target::load(&checkpoint, options).expect("the target")
}

fn options() -> KvOptions {
    // A case's prompt is read in one pass.
    let (key, value) = (ElementType::F32.into(), ElementType::F32.into());
    KvOptions { key, value, max_round_rows: 4096, ..KvOptions::default() }
}

fn state(target: &Target) -> SequenceState {
    target.new_state(&options(), &PagePool::new(None)).expect("a state")
}

/// One pass over `ids`, of which `keep` rows are committed.
fn pass(target: &Target, state: &mut SequenceState, ids: &[u32], outputs: OutputRows, keep: usize) -> Output {
    let round = state.begin_round(ids.len()).expect("a round");
    target.forward_one(ids, round, outputs, keep).expect("a pass")
}

/// A pass in chunks; the logits and hidden states of all rows.
fn in_chunks(target: &Target, state: &mut SequenceState, ids: &[u32], chunk: usize) -> (Vec<f32>, Vec<f32>) {
    let (mut logits, mut hidden) = (Vec::new(), Vec::new());
    for ids in ids.chunks(chunk) {
        let output = pass(target, state, ids, OutputRows::All, ids.len());
        logits.extend(values(&output.logits));
        hidden.extend(values(&output.hidden));
    }
    (logits, hidden)
}

/// Everything in a state is equal, and so is what follows from it.
fn same_state(target: &Target, a: &SequenceState, b: &SequenceState, what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    assert!(a.kv().same_rows(b.kv()), "{what}: K and V differ");
    let (nets, others) = (target.delta_nets(a).expect("its own"), target.delta_nets(b).expect("its own"));
    for (i, (a, b)) in nets.iter().zip(&others).enumerate() {
        assert!(bits(&a.matrices) == bits(&b.matrices), "{what}: the matrices of delta net {i} differ");
        assert!(bits(&a.window) == bits(&b.window), "{what}: the window of delta net {i} differs");
    }
    let next = |state: &SequenceState| values(&pass(target, &mut state.fork(), &[7, 8], OutputRows::All, 0).logits);
    assert!(bits(&next(a)) == bits(&next(b)), "{what}: the next logits differ");
}

#[test]
fn logits_hidden_and_states_are_the_references() {
    for_each_case(|case, target| {
        let mut state = state(target);
        let ids = case.ids("input_ids");
        let (logits, hidden) = in_chunks(target, &mut state, &ids, ids.len());
        let (logits, hidden) =
            (max_difference(&logits, &case.floats("logits")), max_difference(&hidden, &case.floats("hidden")));
        let nets = target.delta_nets(&state).expect("its own");
        let linear = target.config().layers.iter().filter(|layer| **layer == LayerType::Linear).count();
        assert_eq!(nets.len(), linear);
        println!("  logits {logits:.1e}, hidden {hidden:.1e}");
        let (of_logits, of_hidden) = case.tolerances();
        assert!(logits <= of_logits, "{}: logits {logits}, tolerance {of_logits}", case.name);
        assert!(hidden <= of_hidden, "{}: hidden {hidden}, tolerance {of_hidden}", case.name);
        let Some((recurrent, inputs)) = case.own_floats("recurrent").zip(case.own_floats("convolution")) else {
            return;
        };
        let matrices: Vec<f32> = nets.iter().flat_map(|net| net.matrices.clone()).collect();
        let matrices = max_difference(&matrices, &recurrent);
        // The reference has channels first.
        let taps = target.config().delta_net.conv_kernel_dim - 1;
        let by_channel = |window: &[f32]| -> Vec<f32> {
            let channels = window.len() / taps;
            (0..channels).flat_map(|c| window.iter().skip(c).step_by(channels)).copied().collect()
        };
        let window: Vec<f32> = nets.iter().flat_map(|net| by_channel(&net.window)).collect();
        let window = max_difference(&window, &inputs);
        println!("  matrices {matrices:.1e}, window {window:.1e}");
        assert!(matrices <= of_hidden && window <= of_hidden, "{}: matrices {matrices}, window {window}", case.name);
    });
}

#[test]
fn greedy_ids_are_the_references() {
    for_each_case(|case, target| {
        let mut state = state(target);
        let (want, margins) = (case.ids("greedy_ids"), case.floats("greedy_margins"));
        let prompt = case.ids("input_ids");
        let mut output = pass(target, &mut state, &prompt, OutputRows::Last, prompt.len());
        let mut decided = 0;
        for (i, (id, margin)) in want.iter().zip(margins).enumerate() {
            let got = argmax(&values(&output.logits));
            let what = format!("{}: token {i}", case.name);
            decided += usize::from(same_id(got, *id, margin, case.tolerances().0, &what));
            output = pass(target, &mut state, &[*id], OutputRows::Last, 1);
        }
        assert!(decided > 0, "{}: no margin decides", case.name);
    });
}

/// The head's rows over the prompt, in one pass and in several.
#[test]
fn the_head_reads_prompts_as_the_reference_does() {
    for_each_case(|case, target| {
        let ids = case.ids("input_ids");
        let hidden = in_chunks(target, &mut state(target), &ids, ids.len()).1;
        let width = target.hidden_size();
        let mut whole = None;
        for chunk in [ids.len(), 64, 7, 1] {
            let mut cache = head_cache(target);
            let mut rows = Vec::new();
            for (ids, hidden) in ids[1..].chunks(chunk).zip(hidden.chunks(chunk * width)) {
                rows.extend(head_pass(target, &mut cache, ids, &hidden[..ids.len() * width]));
            }
            let error = case.own_floats("nextn_hidden").map_or(0.0, |want| max_difference(&rows, &want));
            assert!(error <= case.tolerances().1, "{}: chunks of {chunk}: {error}", case.name);
            let whole = whole.get_or_insert_with(|| bits(&rows));
            assert!(bits(&rows) == *whole, "{}: chunks of {chunk}: the bits differ", case.name);
        }
    });
}

/// Every link of the draft chain, from the token and the state of the reference's previous link.
#[test]
fn draft_links_are_the_references() {
    for_each_case(|case, target| {
        let (ids, width) = (case.ids("input_ids"), target.hidden_size());
        let hidden = in_chunks(target, &mut state(target), &ids, ids.len()).1;
        let mut cache = head_cache(target);
        // After a single token the head has read nothing.
        if ids.len() > 1 {
            head_pass(target, &mut cache, &ids[1..], &hidden[..(ids.len() - 1) * width]);
        }
        let (drafts, margins) = (case.ids("draft_ids"), case.floats("draft_margins"));
        let (states, logits) = (case.floats("draft_hidden"), case.floats("draft_logits"));
        let (of_logits, of_hidden) = case.tolerances();
        for k in 0..drafts.len() {
            let (token, given) = match k {
                0 => (case.ids("first_id")[0], &case.floats("hidden")[(ids.len() - 1) * width..]),
                _ => (drafts[k - 1], &states[(k - 1) * width..k * width]),
            };
            let got = head_pass(target, &mut cache, &[token], given);
            let own = target.logits(&tensor(got.clone(), (1, width)).expect("a state")).expect("logits");
            let vocab = target.vocab_size();
            let of_state = max_difference(&got, &states[k * width..(k + 1) * width]);
            let error = max_difference(&values(&own), &logits[k * vocab..(k + 1) * vocab]);
            println!("  draft {k}: logits {error:.1e}, hidden {of_state:.1e}");
            assert!(error <= of_logits && of_state <= of_hidden, "{}: draft {k}: {error}, {of_state}", case.name);
            let what = format!("{}: draft {k}", case.name);
            same_id(argmax(&values(&own)), drafts[k], margins[k], of_logits, &what);
        }
    });
}

fn head_cache(target: &Target) -> KvCache {
    target.nextn_cache(&options(), &PagePool::new(None)).expect("a cache")
}

fn head_pass(target: &Target, cache: &mut KvCache, ids: &[u32], hidden: &[f32]) -> Vec<f32> {
    let hidden = tensor(hidden.to_vec(), (ids.len(), target.hidden_size())).expect("states");
    let mut batch = Batch::of(ids, cache.begin_round(ids.len()).expect("a round")).expect("a batch");
    let rows = target.nextn_rows(&mut batch, &hidden).expect("a pass");
    batch.into_rounds().into_iter().for_each(|round| round.commit(ids.len()));
    values(&rows)
}

/// The case's prompt, repeated if it is shorter than `len`.
fn at_least(len: usize, case: &Case) -> Vec<u32> {
    let ids = case.ids("input_ids");
    ids.iter().copied().cycle().take(ids.len().max(len)).collect()
}

/// After a round with any number of committed rows, the state is that of a sequence that only ever had those rows.
#[test]
fn rejected_rows_leave_no_trace() {
    for_each_case(|case, target| {
        let ids = at_least(24, case);
        let (prompt, rows) = ids.split_at(ids.len() - 6);
        let mut before = state(target);
        in_chunks(target, &mut before, prompt, prompt.len());
        for rows in [rows, &rows[..1]] {
            for keep in 0..=rows.len() {
                let (mut disturbed, mut fresh) = (before.fork(), state(target));
                disturbed.begin_round(5).map(drop).expect("a round that is dropped");
                pass(target, &mut disturbed, &[1, 2, 3], OutputRows::None, 0);
                pass(target, &mut disturbed, rows, OutputRows::All, keep);
                let seen = [prompt, &rows[..keep]].concat();
                in_chunks(target, &mut fresh, &seen, 1);
                let what = format!("{}: {keep} of {} rows", case.name, rows.len());
                same_state(target, &disturbed, &fresh, &what);
                same_state(target, &disturbed.fork(), &fresh, &format!("{what}: the fork"));
                // The next round begins with rows that are not in the matrices yet.
                pass(target, &mut disturbed, &[4, 5, 6, 7], OutputRows::All, 2);
                in_chunks(target, &mut fresh, &[4, 5], 1);
                same_state(target, &disturbed, &fresh, &format!("{what}: the round behind"));
            }
        }
        same_state(target, &before, &before.fork(), "the state before");
    });
}

/// A round of all rows or none, with more rows than are logged, after rows that are not in the matrices yet.
#[test]
fn prompts_are_committed_whole() {
    for_each_case(|case, target| {
        let ids: Vec<u32> = case.ids("input_ids").into_iter().cycle().take(84).collect();
        let (mut whole, mut fresh) = (state(target), state(target));
        pass(target, &mut whole, &ids[..6], OutputRows::All, 4);
        in_chunks(target, &mut fresh, &ids[..4], 1);
        for keep in [0, 80] {
            let round = whole.begin_whole_round(80).expect("a round");
            let output = target.forward_one(&ids[4..], round, OutputRows::All, keep).expect("a pass");
            let what = format!("{}: {keep} of 80 rows", case.name);
            if keep > 0 {
                let (logits, _) = in_chunks(target, &mut fresh, &ids[4..], 1);
                assert!(bits(&values(&output.logits)) == bits(&logits), "{what}: the bits differ");
            }
            same_state(target, &whole, &fresh, &what);
        }
    });
}

/// The bits of a row do not depend on chunks, on other sequences of its batch, or on threads.
#[test]
fn rows_have_their_own_bits() {
    for_each_case(|case, target| {
        let ids = case.ids("input_ids");
        let on_threads = |threads: usize, chunk: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            pool.install(|| {
                let mut state = state(target);
                (in_chunks(target, &mut state, &ids, chunk), state)
            })
        };
        let (want, single) = on_threads(1, 1);
        for (threads, chunk) in [(1, 3), (3, 17), (2, 65), (3, ids.len())] {
            let (got, state) = on_threads(threads, chunk);
            let what = format!("{}: chunks of {chunk} on {threads} threads", case.name);
            assert!(bits(&got.0) == bits(&want.0) && bits(&got.1) == bits(&want.1), "{what}: the bits differ");
            same_state(target, &state, &single, &what);
        }
    });
}

/// Two sequences in one pass, of which one keeps all rows and the other some.
#[test]
fn sequences_share_a_pass() {
    for_each_case(|case, target| {
        let ids = at_least(24, case);
        let (mut a, mut b) = (state(target), state(target));
        in_chunks(target, &mut a, &ids[..8], 8);
        in_chunks(target, &mut b, &ids[12..17], 5);
        let (mut alone_a, mut alone_b) = (a.fork(), b.fork());
        let mut batch = Batch::new();
        batch.push(&ids[8..13], a.begin_round(5).expect("a round")).expect("rows");
        batch.push(&ids[17..20], b.begin_round(3).expect("a round")).expect("rows");
        let request = Request::of(&batch, OutputRows::All);
        let output = target.forward(&mut batch, &request).expect("a pass");
        let mut rounds = batch.into_rounds().into_iter();
        rounds.next().expect("a round").commit(5);
        rounds.next().expect("a round").commit(1);
        drop(rounds);
        let of_a = pass(target, &mut alone_a, &ids[8..13], OutputRows::All, 5);
        let of_b = pass(target, &mut alone_b, &ids[17..20], OutputRows::All, 1);
        let want = [values(&of_a.logits), values(&of_b.logits)].concat();
        assert!(bits(&values(&output.logits)) == bits(&want), "{}: the bits differ", case.name);
        same_state(target, &a, &alone_a, &case.name);
        same_state(target, &b, &alone_b, &case.name);
    });
}

/// A text, and the trunk's states of all its tokens but the last.
struct Text {
    ids: Vec<u32>,
    hidden: Tensor,
    state: SequenceState,
}

impl Text {
    /// The drafter observes the rows of `first..end`: of a prompt, or of a round after which the next token is known.
    fn show(&self, drafter: &mut dyn Drafter, first: usize, end: usize, known: usize) {
        let hidden = self.hidden.narrow(0, first, end - first).expect("rows");
        let (tokens, hidden) = (&self.ids[..known], Some(&hidden));
        drafter.observe(&Observed { tokens, first, hidden, on_device: None, taps: &[], own: None }).expect("observed");
    }

    /// Drafts after the first `len` tokens, and the bits of their probabilities.
    fn drafts(&self, drafter: &mut dyn Drafter, len: usize, most: usize) -> (Vec<u32>, Vec<u32>) {
        let context = Context {
            tokens: &self.ids[..len],
            hidden: &self.hidden.narrow(0, len - 2, 1).expect("a row"),
            forced: &[],
            kv: self.state.kv().committed(),
            sampler: &Sampler::new(Isa::best(), Sampling::default(), Vec::new()).expect("a sampler"),
            drafts: DraftSampling::Greedy,
            confidence: Confidence::Report,
        };
        let (mut draft, mut rng) = (Draft::default(), StdRng::seed_from_u64(0));
        drafter.draft(&context, most, &mut draft, &mut rng).expect("drafts");
        (draft.tokens, bits(&draft.confidence))
    }
}

/// The head's drafts are a function of the text: not of when states are read, in how many passes,
/// of unverified drafts, or of a fork.
#[test]
fn drafts_are_those_of_the_text() {
    const ROWS: usize = 99;
    for case in cases::of(cases::QWEN35) {
        let target = Arc::new(target(&case, Isa::best()));
        let ids: Vec<u32> = case.ids("input_ids").into_iter().cycle().take(ROWS + 1).collect();
        let mut state = state(&target);
        let (_, hidden) = in_chunks(&target, &mut state, &ids[..ROWS], 33);
        let text = Text { ids, hidden: tensor(hidden, (ROWS, target.hidden_size())).expect("states"), state };
        let drafter = |max_round_rows| {
            let options = KvOptions { max_round_rows, ..options() };
            NextN::new(target.clone(), &options, &PagePool::new(None)).expect("a drafter")
        };
        let mut whole = drafter(512);
        text.show(&mut whole, 0, ROWS, ROWS);
        let want = text.drafts(&mut whole, ROWS + 1, 3);
        assert_eq!(want.0.len(), 3, "{}", case.name);
        for most in [1, 3, 2, 3] {
            let again = text.drafts(&mut whole, ROWS + 1, most);
            assert_eq!((&again.0[..], &again.1[..]), (&want.0[..most], &want.1[..most]), "{}: again", case.name);
        }

        for (max_round_rows, prompt, rows, most) in [(512, 10, 1, 0), (4, 90, 9, 0), (4, 10, 1, 3), (16, 50, 7, 5)] {
            let mut pieces = drafter(max_round_rows);
            (0..prompt).step_by(5).for_each(|first| text.show(&mut pieces, first, first + 5, first + 5));
            for first in (prompt..ROWS).step_by(rows) {
                text.drafts(&mut pieces, first + 1, most);
                let end = ROWS.min(first + rows);
                text.show(&mut pieces, first, end, end + 1);
            }
            let what = format!("{}: rounds of {rows} rows and {most} drafts", case.name);
            let mut fork = pieces.fork().expect("a fork");
            assert_eq!(text.drafts(&mut pieces, ROWS + 1, 3), want, "{what}");
            assert_eq!(text.drafts(&mut *fork, ROWS + 1, 3), want, "{what}: the fork");
        }
    }
}

/// A prompt that was read in part and taken back leaves the head's rows of the text before it, and no others.
#[test]
fn a_truncated_head_drafts_as_if_nothing_had_followed() {
    const ROWS: usize = 99;
    const KEPT: usize = 60; // with states; the token after them is the last one
    for case in cases::of(cases::QWEN35) {
        let target = Arc::new(target(&case, Isa::best()));
        let vocab = target.vocab_size() as u32;
        let texts = [0, 1].map(|change| {
            let ids = case.ids("input_ids").into_iter().cycle().take(ROWS + 1).enumerate();
            let ids: Vec<u32> = ids.map(|(at, id)| if at > KEPT { (id + change) % vocab } else { id }).collect();
            let mut state = state(&target);
            let (_, hidden) = in_chunks(&target, &mut state, &ids[..ROWS], 33);
            Text { ids, hidden: tensor(hidden, (ROWS, target.hidden_size())).expect("states"), state }
        });
        let [text, other] = &texts;
        for (max_round_rows, rows, most, chunks) in
            [(512, 1, 3, &[1][..]), (512, 3, 0, &[39]), (4, 2, 2, &[9, 1, 20]), (64, 20, 3, &[2])]
        {
            let options = KvOptions { max_round_rows, ..options() };
            let new = || NextN::new(target.clone(), &options, &PagePool::new(None)).expect("a drafter");
            let write = |drafter: &mut NextN| {
                text.show(drafter, 0, 20, 20);
                for first in (20..KEPT).step_by(rows) {
                    text.drafts(drafter, first + 1, most);
                    let end = KEPT.min(first + rows);
                    text.show(drafter, first, end, end + 1);
                }
                text.drafts(drafter, KEPT + 1, most);
            };
            let go_on = |drafter: &mut NextN| {
                text.show(drafter, KEPT, 80, 80);
                text.show(drafter, 80, ROWS, ROWS);
                text.drafts(drafter, ROWS + 1, 3)
            };
            let (mut disturbed, mut undisturbed) = (new(), new());
            write(&mut disturbed);
            write(&mut undisturbed);
            let mut first = KEPT;
            for rows in chunks {
                other.show(&mut disturbed, first, first + rows, first + rows);
                first += rows;
            }
            disturbed.truncate(KEPT + 1);
            assert_eq!(go_on(&mut disturbed), go_on(&mut undisturbed), "{}: {chunks:?}", case.name);
        }
    }
}

/// An earlier chunk of a prompt: a NextN head reads its states, nobody its logits.
#[test]
fn states_without_logits_are_those_with() {
    for case in cases::of(cases::QWEN35) {
        for quantize in [None, Some(WeightType::Q8_0)] {
            let target = target(&case, LoadOptions { quantize, ..LoadOptions::from(Isa::best()) });
            let ids = case.ids("input_ids");
            let want = pass(&target, &mut state(&target), &ids, OutputRows::All, ids.len());
            let mut state = state(&target);
            let mut batch = Batch::of(&ids, state.begin_round(ids.len()).expect("a round")).expect("a batch");
            let request = Request { hidden: Vec::from_iter(0..ids.len()), ..Request::default() };
            let output = target.forward(&mut batch, &request).expect("a pass");
            assert_eq!(output.logits.dims(), [0, target.vocab_size()], "{}", case.name);
            assert_eq!(values(&output.hidden), values(&want.hidden), "{}", case.name);
        }
    }
}
