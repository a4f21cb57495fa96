//! The engine on a device computes what it computes on the CPU: the whole round, on the emulated
//! machine of the kernels' tests.
//!
//! It needs a C++ compiler: `c++`, `g++` or `clang++`.

#[path = "../cases/mod.rs"]
mod cases;
#[path = "../../gpu/tests/emulated/device.rs"]
#[allow(dead_code)]
mod device;
mod device_sequences;
#[path = "../../gpu/tests/emulated/machine.rs"]
#[allow(dead_code)]
mod machine;
#[path = "../on_device/mod.rs"]
mod on_device;

use std::path::Path;
use std::sync::Arc;

use cases::plain;
use foretoken::checkpoint::Checkpoint;
use foretoken::checkpoint::convert::{Outtype, ToGgufOptions, to_gguf};
use foretoken::checkpoint::quantize::{Mix, QuantizeOptions, quantize};
use foretoken::kv::{CodeFormat, ExactZones, KvFormat, KvOptions};
use foretoken::perplexity::{PerplexityOptions, perplexity};
use foretoken::sampler::Penalties;
use foretoken::speculative::{BlockSize, DraftSampling, DrafterOptions, Drafters, Trace};
use foretoken::{
    DeviceChoice, DraftPipeline, ElementType, Engine, EngineOptions, GenerateOptions, Isa, OutputRows, Probe, Sampling,
    Scheduler, SchedulerOptions, Session, SessionOptions, Speculation, SpeculationOptions, Statistics, WeightType,
};
use on_device::machine::Emulated;
use on_device::pair::{MEMORY, NARROW, Pair, damaged, exact, guess, load, mtp, pair, run};
use on_device::poison::{poison, poison_row, poison_tensor};
use on_device::widened::{Heads, Widths, widen};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

/// Greedy ids and drafts, plain and speculative, are the CPU's.
fn same_ids(pair: &Pair, session: &SessionOptions, prompt: &[u32], tokens: usize) {
    let options = plain(tokens);
    let want = run(&pair.cpu, session, prompt, &options).0;
    assert_eq!(run(&pair.device, session, prompt, &options).0, want, "plain");
    // The head of a random model is right by chance alone.
    let guesses = pair.device.assistant().is_none().then(|| guess(4, &[prompt, &want].concat(), &options));
    for options in pair.device.has_mtp().then(|| mtp(3, &options)).into_iter().chain(guesses) {
        let (ids, statistics) = run(&pair.device, session, prompt, &options);
        assert_eq!(ids, want, "speculative");
        let (ids, on_cpu) = run(&pair.cpu, session, prompt, &options);
        assert_eq!(ids, want, "speculative, on the CPU");
        let counts = |s: &Statistics| (s.rounds, s.drafted_at.clone(), s.accepted_at.clone());
        assert_eq!(counts(&statistics), counts(&on_cpu));
    }
}

/// Perplexity of a text; all logits of its second half contribute.
fn same_perplexity(pair: &Pair, session: &SessionOptions, text: &[u32], tolerance: f64) {
    let options = PerplexityOptions { window: text.len(), kv: session.kv.clone(), ..PerplexityOptions::default() };
    let of = |engine| perplexity(engine, text, &options, |_| {}).expect("a perplexity").value().ln();
    let (cpu, device) = (of(&pair.cpu), of(&pair.device));
    println!("{device:.6} nats on the device, {cpu:.6} on the CPU");
    assert!((device - cpu).abs() < tolerance, "{device} nats on the device, {cpu} on the CPU");
}

/// The number of rows of the device's logits, after every token of `texts`, that are within 1e-3 of the same row on
/// one of the CPU's instruction sets, and the total.
fn same_logits(options: &EngineOptions, session: &SessionOptions, texts: &[&[u32]]) -> (usize, usize) {
    let logits = |options: EngineOptions| -> Vec<Vec<f32>> {
        let engine = Engine::load(&EngineOptions { threads: Some(1), ..options }).expect("an engine");
        let vocab = engine.target().vocab_size();
        let mut probe = Probe::new(&engine, session).expect("a sequence");
        let rows = texts.iter().flat_map(|ids| probe.logits(ids).expect("logits"));
        rows.collect::<Vec<_>>().chunks_exact(vocab).map(<[f32]>::to_vec).collect()
    };
    let on_cpu = |isa| logits(EngineOptions { isa: Some(isa), ..options.clone() });
    let device = logits(EngineOptions { device: DeviceChoice::Given(Emulated::new(MEMORY)), ..options.clone() });
    let mut nearest = vec![f32::INFINITY; device.len()];
    let count = |far: &[f32]| far.iter().filter(|far| **far < 1e-3).count();
    for isa in Isa::available() {
        let rows = on_cpu(isa);
        assert_eq!(device.len(), rows.len(), "rows of logits");
        let far: Vec<_> = device.iter().zip(&rows).map(|(a, b)| cases::max_difference(a, b)).collect();
        let most = far.iter().fold(0.0f32, |a, b| a.max(*b));
        println!("  {}: {} of {} rows within 1e-3, the others within {most:.2}", isa.name(), count(&far), far.len());
        nearest.iter_mut().zip(&far).for_each(|(nearest, far)| *nearest = nearest.min(*far));
    }
    (count(&nearest), nearest.len())
}

/// Rows of logits are the CPU's, unless the last bit of a sum decides how an activation is rounded to 8 bits: a step
/// there is 1/127 of its block's largest, and a random model amplifies it. The CPU's own instruction sets, which sum in
/// different orders, differ from each other in the same way.
#[test]
fn logits_of_quantized_weights() {
    let (mut same, mut rows) = (0, 0);
    for (name, quantize) in [
        ("dense", WeightType::Q8_0),
        ("moe", WeightType::Q4_0),
        ("moe", WeightType::Q8_0),
        ("nested", WeightType::Q8_0),
        ("nested", WeightType::Q5_0),
        ("nested", WeightType::Q4_1),
        ("nested", WeightType::MXFP4),
        ("qwen35-nested", WeightType::Q8_0),
    ] {
        let case = cases::named(name);
        let text = text_below(if name.starts_with("qwen35") { 192 } else { 512 }, 48);
        let texts: Vec<_> = text.chunks(4).collect();
        let files = tempfile::tempdir().expect("a folder");
        let target = widen(&case.path.join("target"), &files.path().join("target"), NARROW);
        let options = EngineOptions { quantize: Some(quantize), ..EngineOptions::new(target) };
        println!("{name} in {}", quantize.name());
        let of = same_logits(&options, &exact(ElementType::F32), &texts);
        (same, rows) = (same + of.0, rows + of.1);
    }
    assert!(10 * same >= 9 * rows, "{same} of {rows} rows are the CPU's");
}

fn text(len: usize) -> Vec<u32> {
    text_below(512, len)
}

/// A text of tokens below `vocab`.
fn text_below(vocab: usize, len: usize) -> Vec<u32> {
    (0..len).map(|i| (3 + (i * i * 7 + i * 31) % (vocab - 3)) as u32).collect()
}

/// Quantized K and V with exact zones so short that pages leave them early.
fn quantized(key: CodeFormat, value: CodeFormat) -> SessionOptions {
    let zones = ExactZones { head: 20, tail: 10, ..ExactZones::default() };
    let kv = KvOptions { key: key.into(), value: value.into(), exact: zones, ..exact(ElementType::F16).kv };
    SessionOptions { kv }
}

/// Full and sliding layers, K = V, a head over all tokens.
#[test]
fn dense() {
    let pair = pair("dense", NARROW, None);
    same_ids(&pair, &exact(ElementType::F32), &pair.prompt, 6);
    let of = |engine: &Engine| engine.forward(&pair.prompt, OutputRows::All, &exact(ElementType::F32)).expect("a pass");
    let (got, want) = (of(&pair.device), of(&pair.cpu));
    for (got, want) in [(got.logits, want.logits), (got.hidden, want.hidden)] {
        let far = cases::max_difference(&cases::values(&got), &cases::values(&want));
        assert!(far < 1e-3, "off by {far}");
    }
}

/// Per-layer embeddings, shared K and V, MLPs of two widths, a centroid head. Half of the ids are suppressed.
#[test]
fn edge() {
    let suppressed: Vec<u32> = (0..256).collect();
    let pair = damaged("edge", NARROW, None, |target| {
        let config = json!({"suppress_tokens": suppressed}).to_string();
        std::fs::write(target.join("generation_config.json"), config).expect("a file");
    });
    same_ids(&pair, &exact(ElementType::F32), &pair.prompt, 6);
    let (want, _) = run(&pair.cpu, &exact(ElementType::F32), &pair.prompt, &plain(6));
    assert!(want.iter().all(|id| *id >= 256), "{want:?}");
    // The host needs the logits for log-probabilities.
    let mut session = pair.device.session(&exact(ElementType::F32)).expect("a session");
    let with_logprobs = GenerateOptions { logprobs: Some(1), ..plain(6) };
    let generation = session.generate(&pair.prompt, &with_logprobs).expect("a generation");
    let logprobs = generation.flat_map(|piece| piece.expect("a piece").logprobs);
    assert_eq!(logprobs.map(|of| of.token).collect::<Vec<_>>(), want);
}

/// Log-probabilities of a prompt are the CPU's, beside a sequence whose drafts the device accepts, too.
#[test]
fn log_probabilities_of_prompts() {
    for name in ["dense", "qwen35-dense"] {
        let pair = pair(name, NARROW, None);
        let prompt = pair.prompt.repeat(40 / pair.prompt.len() + 1);
        let scored = GenerateOptions { prompt_logprobs: Some(1), logprobs: Some(1), ..plain(6) };
        let [on_cpu, on_device] = [&pair.cpu, &pair.device].map(|engine| {
            let mut scheduler = Scheduler::new(engine, SchedulerOptions::default());
            let mut add = |prompt: &[u32], options: &GenerateOptions| {
                let session = engine.session(&exact(ElementType::F32)).expect("a session");
                scheduler.add(session, prompt, options).expect("a sequence")
            };
            add(&pair.prompt, &plain(12));
            let id = add(&prompt, &scored);
            let (mut written, mut of_prompt) = (0, Vec::new());
            while written < 6 {
                for event in scheduler.step().into_iter().filter(|event| event.id == id) {
                    let piece = event.piece.expect("a piece");
                    written += piece.tokens.len();
                    of_prompt.extend(piece.prompt_logprobs);
                }
            }
            of_prompt
        });
        assert_eq!(on_device.iter().map(|of| of.token).collect::<Vec<_>>(), prompt[1..], "{name}");
        for (cpu, device) in on_cpu.iter().zip(&on_device) {
            let same = cpu.token == device.token && (cpu.logprob - device.logprob).abs() < 1e-3;
            assert!(same, "{name}: {cpu:?} {device:?}");
        }
    }
}

/// Experts, also of prompts of several blocks of rows; then an expert has several buckets.
#[test]
fn experts() {
    let pair = pair("moe", NARROW, None);
    same_ids(&pair, &exact(ElementType::F32), &pair.prompt, 6);
    same_ids(&pair, &exact(ElementType::F32), &text(45), 3);
}

/// Rows have the same bits in passes of few rows and of many.
#[test]
fn rows_of_experts_are_those_of_each_alone() {
    let session = SessionOptions { kv: KvOptions { max_round_rows: 80, ..exact(ElementType::F32).kv } };
    for (name, vocab, quantize) in [("moe", 512, None), ("moe", 512, Some(WeightType::Q8_0)), ("qwen35-moe", 192, None)]
    {
        let (pair, text) = (pair(name, NARROW, quantize), text_below(vocab, 80));
        let mut probe = Probe::new(&pair.device, &session).expect("a sequence");
        let all = probe.logits(&text).expect("logits");
        for rows in [1, 8, 16, 17, 50] {
            let some = probe.logits(&text[..rows]).expect("logits");
            assert_eq!(some.len() * text.len(), all.len() * rows, "{name} in {quantize:?}: logits of {rows} rows");
            let same = some.iter().zip(&all).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{name} in {quantize:?}: the first {rows} rows");
        }
    }
}

/// Delta nets and gated attention, with prompts of a pass and of several; drafts of which some are rejected.
#[test]
fn delta_nets() {
    let session = |max_round_rows| SessionOptions { kv: KvOptions { max_round_rows, ..exact(ElementType::F32).kv } };
    let pair = pair("qwen35-dense", NARROW, None);
    same_ids(&pair, &session(48), &text_below(192, 10), 12);
    same_ids(&pair, &session(20), &text_below(192, 45), 4);
}

/// The draft and the accepted tokens of every round.
fn traced(engine: &Engine, session: &SessionOptions, prompts: &[&[u32]], options: &GenerateOptions) -> Vec<Value> {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let trace = Trace::file(file.path()).expect("a trace");
    let prompts: Vec<_> =
        prompts.iter().map(|ids| (*ids, GenerateOptions { trace: Some(trace.clone()), ..options.clone() })).collect();
    go_on(engine, session, &prompts);
    let lines = std::fs::read_to_string(file.path()).expect("a trace");
    let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let rounds = lines.filter(|line| line["event"] == "round");
    let ids = |tokens: &Value| -> Value {
        tokens.as_array().expect("tokens").iter().map(|token| token["id"].clone()).collect()
    };
    rounds.map(|round| json!([ids(&round["draft"]), round["accepted"], ids(&round["tokens"])])).collect()
}

/// A trained NextN head drafts what it drafts on the CPU: after prompts of a pass and of several, after drafts of which
/// all, some or none are accepted, in another generation, whether the host chooses or the device.
#[test]
fn nextn_heads() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo-qwen");
    let pair = load(EngineOptions::new(&demo), Vec::new(), tempfile::tempdir().expect("a folder"));
    let ids = pair.cpu.tokenizer().expect("a tokenizer").encode("impl Iterator for Counter {\n").expect("tokens");
    let strange: Vec<_> = ids.iter().rev().take(4).copied().collect();
    let session = exact(ElementType::F32);
    let (prompts, options) = ([&ids[..], &strange], mtp(4, &plain(8)));
    let drafts = traced(&pair.device, &session, &prompts, &options);
    assert_eq!(drafts, traced(&pair.cpu, &session, &prompts, &options));
    let count = |of: &Value| of.as_array().map_or(0, Vec::len) as u64;
    let rejected = |round: &Value| count(&round[0]) - round[1].as_u64().expect("a number");
    assert!(drafts.iter().any(|round| rejected(round) > 0), "{drafts:?}");

    let mut probe = Probe::new(&pair.device, &session).expect("a sequence");
    probe.skip_to(200).and_then(|()| probe.draft(3, 2)).expect("a draft");

    let session = SessionOptions { kv: KvOptions { max_round_rows: 4, ..exact(ElementType::F16).kv } };
    let (on_device, statistics) = run(&pair.device, &session, &ids, &mtp(4, &plain(12)));
    let (on_cpu, want) = run(&pair.cpu, &session, &ids, &mtp(4, &plain(12)));
    assert_eq!(on_device, on_cpu);
    let counts = |s: &Statistics| (s.rounds, s.drafted_at.clone(), s.accepted_at.clone());
    assert_eq!(counts(&statistics), counts(&want));
    assert!(statistics.accepted > 3, "{} of {} are accepted", statistics.accepted, statistics.drafted);
}

/// A head with an embedding and an output head of its own: the target's, with the rows in another order.
#[test]
fn nextn_heads_with_tables() {
    let tables = |target: &Path| {
        let path = target.join("model.safetensors");
        let bytes = std::fs::read(&path).expect("a file");
        let file = SafeTensors::deserialize(&bytes).expect("tensors");
        let mut tensors = file.tensors();
        let table = tensors.iter().find(|(name, _)| name.ends_with("embed_tokens.weight")).expect("a table").1.clone();
        let (shape, row) = (table.shape().to_vec(), table.data().len() / table.shape()[0]);
        let turned = |rows: usize| [&table.data()[rows * row..], &table.data()[..rows * row]].concat();
        let own = [("mtp.embed_tokens.weight", turned(1)), ("mtp.shared_head.head.weight", turned(5))];
        let view = |bytes| TensorView::new(table.dtype(), shape.clone(), bytes).expect("a tensor");
        tensors.extend(own.iter().map(|(name, bytes)| (name.to_string(), view(bytes))));
        safetensors::serialize_to_file(tensors, None, &target.join("with.safetensors")).expect("a file");
        std::fs::rename(target.join("with.safetensors"), path).expect("a file");
    };
    let (session, prompt) = (exact(ElementType::F32), text_below(192, 12));
    let drafts = |engine: &Engine| traced(engine, &session, &[&prompt], &mtp(4, &plain(4)));
    let (own, shared) = (damaged("qwen35-nested", NARROW, None, tables), pair("qwen35-nested", NARROW, None));
    assert_eq!(drafts(&own.device), drafts(&own.cpu));
    assert_ne!(drafts(&own.device), drafts(&shared.device));
}

/// NaN in a head is an error, as it is on the CPU.
#[test]
fn damaged_nextn_heads() {
    let pair = damaged("qwen35-nested", NARROW, None, |target| poison_tensor(target, "mtp.norm.weight"));
    for engine in [&pair.cpu, &pair.device] {
        let mut session = engine.session(&exact(ElementType::F32)).expect("a session");
        let pieces = session.generate(&text_below(192, 10), &mtp(3, &plain(4))).expect("a generation");
        let error = pieces.map(|piece| piece.map(drop)).find_map(Result::err).expect("an error").to_string();
        assert!(error.contains("not finite"), "{error}");
        let pieces = session.generate(&[7], &plain(4)).expect("a generation");
        assert_eq!(pieces.flat_map(|piece| piece.expect("a piece").tokens).count(), 4);
    }
}

/// A head for whose K and V memory is exhausted drafts nothing until the next generation; the text is the same.
#[test]
fn nextn_heads_without_memory() {
    let options = mtp(3, &plain(4));
    // The second one is a pass: with more, the page before it would be copied.
    let prompts = [text_below(192, 96), text_below(192, 47), text_below(192, 8)];
    let generate = |session: &mut Session, prompt: &[u32], options: &GenerateOptions| {
        let mut generation = session.generate(prompt, options).expect("a generation");
        let ids: Vec<_> = generation.by_ref().flat_map(|piece| piece.expect("a piece").tokens).collect();
        (ids, generation.statistics().drafted)
    };
    let all = pair("qwen35-nested", NARROW, None);
    // Any text of up to 128 positions.
    let held = [&plain(4), &options].map(|options| {
        let mut session = all.device.session(&exact(ElementType::F32)).expect("a session");
        generate(&mut session, &prompts[2], options);
        all.device.pages().held()
    });
    let mut session = all.cpu.session(&exact(ElementType::F32)).expect("a session");
    let want = prompts.each_ref().map(|prompt| generate(&mut session, prompt, &plain(4)).0);

    // The target's second page of each side fits, and not the head's.
    let files = tempfile::tempdir().expect("a folder");
    let target = widen(&cases::named("qwen35-nested").path.join("target"), &files.path().join("target"), NARROW);
    let kv_memory = Some(held[0] + held[1]);
    let pair = load(EngineOptions { kv_memory, ..EngineOptions::new(target) }, Vec::new(), files);
    let mut automatic = exact(ElementType::F32);
    automatic.kv.max_context = None;
    let mut session = pair.device.session(&automatic).expect("a session");
    for ((prompt, want), drafts) in prompts.iter().zip(want).zip([true, false, true]) {
        let (ids, drafted) = generate(&mut session, prompt, &options);
        assert_eq!((ids, drafted > 0), (want, drafts));
    }
    drop(session);
    assert_eq!(pair.device.pages().held(), 0, "pages are left");
    let machine = pair.machine.clone();
    drop(pair);
    assert_eq!(machine.used(), 0, "an engine left bytes");
}

/// The head's pages leave the exact tail as well; the last draft before is rolled back.
#[test]
fn nextn_heads_with_quantized_pages() {
    let widths = Widths { full: Heads { width: 128, pairs: 8 }, ..NARROW };
    let pair = pair("qwen35-nested", widths, None);
    let session = quantized(CodeFormat::Tqc5, CodeFormat::Tqc4);
    let prompt = text_below(192, 134);
    let want = run(&pair.cpu, &session, &prompt, &plain(6)).0;
    let (ids, statistics) = run(&pair.device, &session, &prompt, &mtp(4, &plain(6)));
    assert_eq!(ids, want);
    assert!(statistics.drafted > 8, "{} drafts", statistics.drafted);
}

/// Value heads in the order of GGUF files.
#[test]
fn delta_nets_in_gguf_files() {
    let files = tempfile::tempdir().expect("a folder");
    let at = |name: &str| files.path().join(name);
    let source = Checkpoint::open(widen(&cases::named("qwen35-dense").path.join("target"), &at("target"), NARROW));
    let options = ToGgufOptions { outtype: Outtype::F32, ..ToGgufOptions::default() };
    to_gguf(&source.expect("a checkpoint"), at("f32.gguf"), &options).expect("a file");
    let pair = load(EngineOptions::new(at("f32.gguf")), text_below(192, 6), files);
    same_ids(&pair, &exact(ElementType::F16), &pair.prompt, 6);
}

/// States after rounds of which any number of rows is committed; of more rows than are logged at
/// first; after dropped ones.
#[test]
fn states_of_delta_nets() {
    let pair = pair("qwen35-nested", NARROW, None);
    let [cpu, device] = [&pair.cpu, &pair.device].map(|engine| {
        let mut probe = Probe::new(engine, &exact(ElementType::F32)).expect("a sequence");
        let ids = text_below(192, 100);
        probe.read(&ids[..20]).expect("a prompt");
        let mut logits = Vec::new();
        for (first, rows, keep) in [(20, 4, 0), (20, 4, 1), (21, 3, 3), (24, 5, 2), (26, 20, 18), (44, 2, 1)] {
            probe.round(&ids[first..first + rows], keep).expect("a round");
            let next = first + keep;
            logits.extend(probe.logits(&ids[next..next + 2]).expect("logits"));
        }
        probe.read(&ids[45..47]).expect("a prompt");
        logits.extend(probe.logits(&ids[47..50]).expect("logits"));
        logits
    });
    let far = cases::max_difference(&cpu, &device);
    assert!(far < 1e-4, "logits are {far} from the CPU's");
}

/// Prompts that are read in one pass write their matrices to other memory. Of that, one sequence's is kept, for the next.
#[test]
fn matrices_of_delta_nets_are_freed_or_used_again() {
    let pair = pair("qwen35-nested", NARROW, None);
    let open = || pair.device.session(&exact(ElementType::F32)).expect("a session");
    let opened = |count: usize| {
        let before = pair.machine.used();
        let sessions: Vec<_> = (0..count).map(|_| open()).collect();
        (sessions.len(), pair.machine.used() - before).1
    };
    let _plan = open();
    let one = opened(1);
    let mut scheduler = Scheduler::new(&pair.device, SchedulerOptions::default());
    for first in 0..4 {
        scheduler.add(open(), &text_below(192, 40 + first), &plain(4)).expect("added");
    }
    drop(cases::texts(&mut scheduler));
    drop(scheduler);
    // Three layers of four heads.
    let matrices = 4 * 3 * 4 * 16 * 16;
    assert_eq!(opened(4), 4 * one - matrices);
}

/// Their experts, with a shared one.
#[test]
fn delta_nets_and_experts() {
    let pair = pair("qwen35-moe", NARROW, None);
    same_ids(&pair, &exact(ElementType::F32), &text_below(192, 20), 8);
}

/// Other formats of K and V, other widths of heads, on the fixture with the fewest launches.
#[test]
fn exact_formats() {
    let widths = Widths { sliding: Heads { width: 128, pairs: 64 }, full: Heads { width: 256, pairs: 32 } };
    let pair = pair("nested", widths, None);
    same_ids(&pair, &exact(ElementType::F32), &pair.prompt, 4);
    for element in [ElementType::F16, ElementType::Bf16] {
        same_perplexity(&pair, &exact(element), &pair.prompt, 1e-3);
    }
}

/// The sliding layers' ring wraps at position 128, within a text with rolled back drafts.
#[test]
fn rings_wrap() {
    let pair = pair("nested", NARROW, None);
    same_ids(&pair, &exact(ElementType::F32), &text(124), 8);
}

/// Pages leave the exact tail and are read quantized: with K and V both stored, and with K = V.
#[test]
fn quantized_pages() {
    let widths = Widths { full: Heads { width: 128, pairs: 8 }, ..NARROW };
    let own = pair("nested", widths, None);
    let widths = Widths { full: Heads { width: 512, pairs: 64 }, ..NARROW };
    let shared = pair("dense", widths, None);
    // Values stored twice on the device are computed on read on the CPU.
    same_perplexity(&shared, &exact(ElementType::F32), &shared.prompt, 1e-4);
    for (pair, session) in [
        (&own, quantized(CodeFormat::Tqc5, CodeFormat::Tqc4)),
        (&own, quantized(CodeFormat::Turbo3, CodeFormat::Turbo3)),
        (&shared, quantized(CodeFormat::Tqc4, CodeFormat::Tqc4)),
    ] {
        same_perplexity(pair, &session, &text(150), 3e-3);
    }
    // A page is quantized within this text, at 138 positions: before a replay, which is as long as the others.
    let session = quantized(CodeFormat::Tqc5, CodeFormat::Tqc4);
    let options = plain(8);
    let (before, want) = (own.machine.launches(), run(&own.device, &session, &text(133), &options).0);
    let [_, recordings, replays] = std::array::from_fn(|i| own.machine.launches()[i] - before[i]);
    assert!(recordings <= 4 && replays == 2 * want.len() - 1, "{recordings} recordings, {replays} replays");
    assert_eq!(run(&own.device, &session, &text(133), &mtp(3, &options)).0, want, "speculative");
    assert_eq!(run(&own.cpu, &session, &text(133), &options).0, want, "on the CPU");
}

/// K and V in different formats, in integers with a scale per 32 channels, and in heads below 128: pages leave
/// the exact tail of either side alone, and of both.
#[test]
fn any_formats_of_pages() {
    let session = |key: KvFormat, value: KvFormat| {
        let SessionOptions { kv } = quantized(CodeFormat::Tqc4, CodeFormat::Tqc4);
        SessionOptions { kv: KvOptions { key, value, ..kv } }
    };
    let (f32s, f16s) = (KvFormat::from(ElementType::F32), KvFormat::from(ElementType::F16));
    let own = pair("nested", NARROW, None);
    for (key, value) in [
        (f16s, CodeFormat::Turbo4.into()),
        (CodeFormat::Q8_0.into(), f32s),
        (CodeFormat::Tqc5.into(), CodeFormat::Tqc4.into()),
    ] {
        same_perplexity(&own, &session(key, value), &text(150), 3e-3);
    }
    same_perplexity(&own, &session(f32s, ElementType::Bf16.into()), &own.prompt, 1e-3);
    // With drafts of which some are rolled back.
    let (session_of_both, prompt) = (session(CodeFormat::Q8_0.into(), CodeFormat::Turbo3.into()), text(133));
    let want = run(&own.cpu, &session_of_both, &prompt, &plain(8)).0;
    assert_eq!(run(&own.device, &session_of_both, &prompt, &plain(8)).0, want);
    assert_eq!(run(&own.device, &session_of_both, &prompt, &mtp(3, &plain(8))).0, want, "speculative");
    let shared = pair("dense", Widths { full: Heads { width: 512, pairs: 64 }, ..NARROW }, None);
    for (key, value) in [(CodeFormat::Q8_0.into(), CodeFormat::Q8_0.into()), (f16s, CodeFormat::Q8_0.into())] {
        same_perplexity(&shared, &session(key, value), &text(150), 3e-3);
    }
}

/// Heads as narrow as those of the fixtures.
#[test]
fn heads_of_32() {
    let case = cases::named("nested");
    let options = EngineOptions::new(case.path.join("target")).with_assistant(case.path.join("assistant"));
    let pair = load(options, case.ids("input_ids"), tempfile::tempdir().expect("a folder"));
    same_ids(&pair, &exact(ElementType::F32), &pair.prompt, 4);
    same_perplexity(&pair, &quantized(CodeFormat::Tqc5, CodeFormat::Tqc4), &text(150), 3e-3);
}

/// The demo pair, whose rows are whole blocks of 256: its target as a file of mixed types, tables included, its
/// assistant quantized as it is loaded.
#[test]
fn quantized_weights() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo");
    let files = tempfile::tempdir().expect("a folder");
    let at = |name: &str| files.path().join(name);
    let source = Checkpoint::open(demo.join("target")).expect("a checkpoint");
    to_gguf(&source, at("f32.gguf"), &ToGgufOptions { outtype: Outtype::F32, ..ToGgufOptions::default() })
        .expect("a file");
    let source = Checkpoint::open(at("f32.gguf")).expect("a file");
    quantize(&source, at("mixed.gguf"), &QuantizeOptions::new(Mix::Q4_K_M)).expect("a file");
    let options = EngineOptions::new(at("mixed.gguf")).with_assistant(demo.join("assistant"));
    let tokenizer = source.tokenizer(4096).expect("readable").expect("a tokenizer");
    let prompt =
        tokenizer.encode("impl Iterator for Counter {\n    type Item = u32;\n    fn next(&mut self)").expect("tokens");
    let (same, rows) = same_logits(&options, &exact(ElementType::F32), &[&prompt[..4], &prompt[4..8]]);
    assert!(10 * same >= 9 * rows, "{same} of {rows} rows are the CPU's");
    let pair = load(EngineOptions { quantize: Some(WeightType::Q8_0), ..options }, prompt, files);
    // If the last bit of a sum decides how an activation is rounded to 8 bits, everything after it differs: K and V in
    // f16 instead of f32, which is 7e-5 with floating-point weights, changes the CPU's own surprisal here by 8e-3.
    same_perplexity(&pair, &exact(ElementType::F16), &pair.prompt, 2e-2);
    same_ids(&pair, &exact(ElementType::F16), &pair.prompt, 6);
}

/// Expert blocks of 32. A random model amplifies how activations are rounded: the same values in
/// another order of summation.
#[test]
fn quantized_experts() {
    let pair = pair("moe", NARROW, Some(WeightType::Q4_0));
    same_perplexity(&pair, &exact(ElementType::F32), &text(24), 3e-2);
}

/// Above temperature 0 and with penalties the host chooses from the device's logits, of which some filters need all; a
/// session continues where it was.
#[test]
fn drawn_tokens() {
    let pair = pair("nested", NARROW, None);
    let drawn = Sampling { temperature: 0.9, top_k: Some(40), ..Sampling::default() };
    // So large that only tokens of the text are written again.
    let penalties = Penalties { presence: -100.0, ..Penalties::default() };
    for (drafts, sampling) in [
        (DraftSampling::Sampled, Sampling { top_n_sigma: Some(1.0), ..drawn.clone() }),
        (DraftSampling::Greedy, Sampling { penalties, ..drawn }),
        (DraftSampling::Greedy, Sampling { penalties, ..Sampling::default() }),
    ] {
        let is_penalized = sampling.penalties == penalties;
        let speculation = Speculation::With(SpeculationOptions { drafts, ..SpeculationOptions::mtp(3) });
        let options = GenerateOptions { sampling, seed: 5, speculation, ..plain(5) };
        let ids = |engine: &Engine| {
            let mut session = engine.session(&exact(ElementType::F32)).expect("a session");
            let prompts = [&pair.prompt[..], &[7, 8]];
            prompts.map(|prompt| {
                let pieces = session.generate(prompt, &options).expect("a generation");
                pieces.flat_map(|piece| piece.expect("a piece").tokens).collect::<Vec<_>>()
            })
        };
        let want = ids(&pair.cpu);
        assert_eq!(ids(&pair.device), want, "{:?}", options.sampling);
        let is_old = |id: &u32| pair.prompt.contains(id) || [7, 8].contains(id);
        assert!(!is_penalized || want.iter().flatten().all(is_old), "{want:?}");
    }
}

/// Constraints are applied on the host, to the device's logits; drafts stay on the device and are not truncated.
#[cfg(feature = "constraint")]
#[test]
fn constrained_texts() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo");
    let options = EngineOptions::new(demo.join("target")).with_assistant(demo.join("assistant"));
    let pair = load(options, vec![2, 400, 500], tempfile::tempdir().expect("a folder"));
    let constraint = foretoken::Constraint::regex("(x=[0-9]{2};|y)[ab]{2}");
    let options = GenerateOptions { constraint: Some(constraint), ..plain(12) };
    let (want, _) = run(&pair.cpu, &exact(ElementType::F32), &pair.prompt, &options);
    let text = pair.cpu.tokenizer().and_then(|tokenizer| tokenizer.decode(&want)).expect("a text");
    assert!(text.starts_with(['x', 'y']) && text.ends_with(['a', 'b']), "{text:?}");
    for options in [options.clone(), mtp(3, &options)] {
        assert_eq!(run(&pair.device, &exact(ElementType::F32), &pair.prompt, &options).0, want);
    }
}

/// The ids of several generations of one session, continued with `prompts`.
fn go_on(engine: &Engine, session: &SessionOptions, prompts: &[(&[u32], GenerateOptions)]) -> Vec<Vec<u32>> {
    let mut session = engine.session(session).expect("a session");
    let go_on = |(prompt, options): &(&[u32], GenerateOptions)| {
        let pieces = session.generate(prompt, options).expect("a generation");
        pieces.flat_map(|piece| piece.expect("a piece").tokens).collect()
    };
    prompts.iter().map(go_on).collect()
}

/// Recordings refer to workspaces; if more rows grow these, passes are recorded again, and the text is the same.
#[test]
fn recordings_of_all_sizes_go_together() {
    let pair = pair("nested", NARROW, None);
    let session = exact(ElementType::F32);
    let options = plain(4);
    let blocks = [(1, 3), (4, 9), (2, 3), (5, 9), (1, 3), (4, 6)];
    let prompts: Vec<_> = blocks
        .iter()
        .map(|(block, tokens)| {
            let options = GenerateOptions { max_tokens: *tokens, ..options.clone() };
            (&pair.prompt[..3], if *block == 1 { options } else { mtp(*block, &options) })
        })
        .collect();
    let want = go_on(&pair.cpu, &session, &prompts);
    let before = pair.machine.launches();
    assert_eq!(go_on(&pair.device, &session, &prompts), want);
    let [_, recordings, replays] = std::array::from_fn(|i| pair.machine.launches()[i] - before[i]);
    // At most: verify and accept of 1, 2, 4 and 5 rows and of the rest at an end, draft steps of either
    // start length; and all of those again after a workspace has grown.
    assert!(recordings < replays, "{recordings} recordings for {replays} replays");
}

/// Once everything is recorded, rounds are only replays: of the draft steps, verify and accept.
#[test]
fn rounds_are_replays() {
    let pair = pair("nested", NARROW, None);
    let mut session = pair.device.session(&exact(ElementType::F32)).expect("a session");
    let options = mtp(4, &plain(24));
    let mut counts = Vec::new();
    for piece in session.generate(&pair.prompt, &options).expect("a generation") {
        piece.expect("a piece");
        counts.push(pair.machine.launches());
    }
    let rounds: Vec<_> =
        counts.windows(2).map(|pair| std::array::from_fn::<_, 3, _>(|i| pair[1][i] - pair[0][i])).collect();
    assert!(rounds.len() > 6, "{rounds:?}");
    // The last three have fewer rows.
    assert!(rounds[2..rounds.len() - 3].iter().all(|round| *round == [0, 0, 5]), "{rounds:?}");
}

/// Attention splits are recorded for positions below 512; after that, there is one more.
#[test]
fn recordings_reach_a_horizon() {
    let pair = pair("nested", NARROW, None);
    let (before, behind) = (text(504), text(60));
    let [cpu, device] = [&pair.cpu, &pair.device].map(|engine| {
        let mut probe = Probe::new(engine, &exact(ElementType::F32)).expect("a sequence");
        let mut logits = Vec::new();
        for prompt in [&before, &behind] {
            probe.read(prompt).expect("a prompt");
            logits.extend(probe.logits(&text(4)).expect("logits"));
        }
        logits
    });
    let far = cases::max_difference(&cpu, &device);
    assert!(far < 1e-4, "logits are {far} from the CPU's");
}

/// At pipeline depth 2 the next draft is launched while the caller has the last tokens, without a
/// wait: this device runs kernels only at waits.
#[test]
fn drafting_ahead_does_not_wait() {
    let pair = pair("nested", NARROW, None);
    let ahead = |pipeline| {
        let drafters = Drafters::Priority(vec![DrafterOptions::Mtp]);
        let with =
            SpeculationOptions { drafters, block: BlockSize::Fixed(4), pipeline, ..SpeculationOptions::default() };
        GenerateOptions { speculation: Speculation::With(with), ..plain(24) }
    };
    let want = run(&pair.cpu, &exact(ElementType::F32), &pair.prompt, &plain(24)).0;
    for (pipeline, drafted) in [(DraftPipeline::Ahead, 3), (DraftPipeline::InTurn, 0)] {
        let session = pair.device.session(&exact(ElementType::F32)).expect("a session");
        let options = ahead(pipeline);
        let start = pair.machine.launches()[2];
        let mut generation = session.into_generation(&pair.prompt, &options).expect("a generation");
        let (mut ids, mut pieces) = (Vec::new(), 0);
        let (mut replays, mut waits) = (start, 0);
        while let Some(piece) = generation.next() {
            ids.extend(piece.expect("a piece").tokens);
            // Waits until a draft that is being made is launched.
            generation.session();
            if want.len() - ids.len() < 4 {
                continue; // a round of fewer rows
            }
            // The prompt's accept and the draft steps of the next round; then every round's accept, verification and
            // draft steps.
            replays += if pieces == 0 { 1 + drafted } else { 5 };
            assert_eq!(
                pair.machine.launches()[2],
                replays,
                "{pipeline:?}: launched when the caller has piece {pieces}"
            );
            // Buffers that only the first rounds allocate are there.
            if pieces > 2 {
                assert_eq!(pair.machine.waits(), waits + 1, "{pipeline:?}: only the accept result is waited for");
            }
            waits = pair.machine.waits();
            pieces += 1;
        }
        assert_eq!(ids, want, "{pipeline:?}");
        assert!(pieces > 5, "{pipeline:?}: {pieces} pieces");
    }
}

/// NaN or infinity in K and V gives an error with layer and position, as on the CPU; the sequence
/// continues without them.
#[test]
fn keys_that_are_not_finite_are_an_error() {
    let case = cases::named("edge");
    let bad = 77u32;
    let pair = damaged("edge", NARROW, None, |target| poison(target, bad));
    let good = &case.ids("input_ids")[..6];
    assert!(!good.contains(&bad));
    let long: Vec<u32> = good.iter().copied().cycle().take(60).chain([bad]).chain(good.to_vec()).collect();
    let options = plain(4);
    let problem = |engine: &Engine, prompt: &[u32]| {
        let mut session = engine.session(&exact(ElementType::F32)).expect("a session");
        let error = session.generate(prompt, &options).expect_err("an error").to_string();
        assert!(error.contains("checkpoint is damaged"), "{error}");
        let first = session.generate(good, &options).expect("a generation");
        let ids: Vec<u32> = first.flat_map(|piece| piece.expect("a piece").tokens).collect();
        (error.split(": not finite").next().expect("a part").to_owned(), ids)
    };
    for prompt in [&[good, &[bad]].concat()[..], &long, &[bad]] {
        let on_device = problem(&pair.device, prompt);
        assert_eq!(on_device, problem(&pair.cpu, prompt));
        assert!(on_device.0.starts_with("K of layer 1 at position "), "{on_device:?}");
    }
}

/// A failed pass leaves no pages of rows that are not committed: other sequences may need them.
#[test]
fn a_failed_pass_frees_its_pages() {
    let bad = 77u32;
    let pair = damaged("edge", NARROW, None, |target| poison(target, bad));
    let good = |len: usize| (0..len as u32).map(|i| 3 + i % 60);
    let mut session = pair.device.session(&exact(ElementType::F32)).expect("a session");
    let mut generate = |prompt: &[u32]| -> foretoken::Result<()> {
        session.generate(prompt, &plain(1))?.try_for_each(|piece| piece.map(drop))
    };
    // The second prompt ends in another page.
    generate(&good(100).collect::<Vec<_>>()).expect("a text");
    let held = pair.device.pages().held();
    generate(&good(40).chain([bad]).collect::<Vec<_>>()).expect_err("an error");
    assert_eq!(pair.device.pages().held(), held);
    generate(&good(40).collect::<Vec<_>>()).expect("a text");
    assert!(pair.device.pages().held() > held);
}

/// Those of a rejected draft do not change the text.
#[test]
fn keys_of_rejected_drafts_may_not_be_finite() {
    let bad = 77u32;
    let pair = damaged("edge", NARROW, None, |target| poison(target, bad));
    let (session, prompt) = (exact(ElementType::F32), [3, 9, 10]);
    let want = run(&pair.cpu, &session, &prompt, &plain(8)).0;
    assert!(!want.contains(&bad));
    let drafts = guess(3, &[bad; 64], &plain(8));
    assert_eq!(run(&pair.cpu, &session, &prompt, &drafts).0, want);
    assert_eq!(run(&pair.device, &session, &prompt, &drafts).0, want);
}

/// NaN in the queries of a layer that has no K and V of its own, and in the logits of one token, is the CPU's error: no
/// other token is chosen.
#[test]
fn scores_that_are_not_finite_are_an_error() {
    let of_queries = "model.layers.7.self_attn.q_norm.weight";
    for pair in [
        damaged("edge", NARROW, None, |target| poison_tensor(target, of_queries)),
        damaged("qwen35-dense", NARROW, None, |target| poison_row(target, "lm_head.weight", 77)),
    ] {
        for engine in [&pair.cpu, &pair.device] {
            let mut session = engine.session(&exact(ElementType::F32)).expect("a session");
            let pieces = session.generate(&text_below(192, 6), &plain(4));
            let text = pieces.and_then(|mut pieces| pieces.try_for_each(|piece| piece.map(drop)));
            let error = text.expect_err("an error");
            assert!(matches!(error, foretoken::Error::NotFinite { what: "logits", .. }), "{error}");
            assert_eq!(engine.pages().held(), 0, "pages of a failed pass");
        }
    }
}

/// With an assistant, and with a NextN head.
#[test]
fn a_round_waits_for_the_device_once() {
    for name in ["nested", "qwen35-nested"] {
        let pair = pair(name, NARROW, None);
        let mut session = pair.device.session(&exact(ElementType::F32)).expect("a session");
        let options = mtp(4, &plain(10));
        let mut waits = Vec::new();
        for piece in session.generate(&pair.prompt[..20], &options).expect("a generation") {
            piece.expect("a piece");
            waits.push(pair.machine.waits());
        }
        assert!(waits.len() > 4);
        // The first piece is the prompt's; from the third on the workspaces are large enough.
        assert!(waits[2..].windows(2).all(|pair| pair[1] - pair[0] == 1), "{name}: {waits:?}");
    }
}

#[test]
fn what_does_not_fit_is_an_error_and_leaves_nothing() {
    let case = cases::named("nested");
    let load = |options: EngineOptions, machine: &Arc<Emulated>| {
        Engine::load(&EngineOptions { device: DeviceChoice::Given(machine.clone()), threads: Some(1), ..options })
    };
    let problem = |error: Option<foretoken::Error>, parts: &[&str]| {
        let text = error.expect("an error").to_string();
        assert!(text.contains("emulated") || text.starts_with("K and V of a context"), "{text}");
        assert!(parts.iter().all(|part| text.contains(part)) && !text.contains('\n'), "{parts:?}: {text}");
    };
    // Heads that have no kernels; less memory than the weights take.
    let machine = Emulated::new(MEMORY);
    let files = tempfile::tempdir().expect("a folder");
    let odd = Widths { sliding: Heads { width: 48, pairs: 24 }, ..NARROW };
    let odd = load(EngineOptions::new(widen(&case.path.join("target"), files.path(), odd)), &machine);
    problem(odd.err(), &["layers.0.self_attn.q_proj.weight", "heads of 48", "use the CPU"]);
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo");
    let target = || EngineOptions::new(demo.join("target"));
    assert_eq!(machine.used(), 0, "bytes are left");
    let small = Emulated::new(4 << 20);
    problem(load(target(), &small).err(), &["tensor ", " on emulated: needs ", " available", "use the CPU"]);
    assert_eq!(small.used(), 0, "bytes are left");

    let pair = pair("nested", NARROW, None);
    let weights = pair.machine.used();
    let session = |kv: KvOptions| pair.device.session(&SessionOptions { kv });
    let f32s = exact(ElementType::F32).kv;
    problem(
        session(KvOptions { memory: Some(1 << 20), ..f32s.clone() }).err(),
        &["context of 1024", "1.00 MiB available", "positions fit"],
    );
    let opened = session(f32s).expect("a session");
    assert_eq!((pair.cpu.device(), pair.device.device().as_deref()), (None, Some("emulated")));
    drop(opened);
    assert_eq!(pair.machine.used(), weights, "a session left bytes");
    let machine = pair.machine.clone();
    drop(pair);
    assert_eq!(machine.used(), 0, "an engine left bytes");
}

/// A device that runs out of memory within a text: committed rows stay, and the session remains usable.
#[test]
fn memory_that_runs_out_is_an_error_with_the_numbers() {
    let pair = pair("nested", NARROW, None);
    // Too little for a whole chunk, so that pages are allocated one by one.
    pair.machine.fill(20 << 20);
    let mut session = pair.device.session(&exact(ElementType::F32)).expect("a session");
    let ids = |session: &mut foretoken::Session, prompt: &[u32]| -> foretoken::Result<Vec<u32>> {
        let pieces = session.generate(prompt, &plain(3))?.collect::<foretoken::Result<Vec<_>>>()?;
        Ok(pieces.into_iter().flat_map(|piece| piece.tokens).collect())
    };
    ids(&mut session, &text(60)).expect("a text");
    // Less than a page.
    let taken = pair.machine.fill(30_000);
    let error = ids(&mut session, &text(124)).expect_err("no memory").to_string();
    let parts = ["K and V of", "positions on emulated: out of memory", "128 positions fit", "smaller cache type"];
    assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    pair.machine.empty(taken);
    assert_eq!(ids(&mut session, &text(10)).expect("a text").len(), 3);
}

/// A recording that does not fit memory takes the place of those before.
#[test]
fn recordings_that_do_not_fit_replace_others() {
    let pair = pair("nested", NARROW, None);
    let (session, options) = (exact(ElementType::F32), mtp(3, &plain(12)));
    let want = run(&pair.cpu, &session, &text(40), &options).0;
    pair.machine.limit_recordings(1);
    assert_eq!(run(&pair.device, &session, &text(40), &options).0, want);
}

/// A draft model next to its target: the target itself, which is always right, and one that is sometimes wrong. Both
/// sides draft the same, also if the host chooses, and if a draft is discarded with the generation.
#[test]
fn draft_models() {
    let case = cases::named("nested");
    let pair = |damage: f32| {
        let files = tempfile::tempdir().expect("a folder");
        let model = |name: &str| widen(&case.path.join("target"), &files.path().join(name), NARROW);
        let (target, draft) = (model("target"), model("draft"));
        blur(&draft.join("model.safetensors"), damage);
        load(EngineOptions { draft_model: Some(draft), ..EngineOptions::new(target) }, Vec::new(), files)
    };
    let with = |pipeline, drafts, options: &GenerateOptions| {
        let (drafters, block) = (Drafters::Priority(vec![DrafterOptions::DraftModel]), BlockSize::Fixed(4));
        let with = SpeculationOptions { drafters, block, drafts, pipeline, ..SpeculationOptions::default() };
        GenerateOptions { speculation: Speculation::With(with), ..options.clone() }
    };
    // The ids of two generations of a session, and the rounds, drafts and accepted drafts of both.
    let go_on = |engine: &Engine, prompt: &[u32], options: &GenerateOptions| {
        let mut session = engine.session(&exact(ElementType::F32)).expect("a session");
        [prompt, &[9, 10, 11]].map(|prompt| {
            let mut generation = session.generate(prompt, options).expect("a generation");
            let ids: Vec<_> = generation.by_ref().flat_map(|piece| piece.expect("a piece").tokens).collect();
            let statistics = generation.statistics();
            (ids, [statistics.rounds, statistics.drafted, statistics.accepted])
        })
    };
    let same = |pair: &Pair, prompt: &[u32], options: &GenerateOptions| {
        let on_device = go_on(&pair.device, prompt, options);
        assert_eq!(on_device, go_on(&pair.cpu, prompt, options));
        on_device
    };
    let (greedy, short) = (plain(9), &text(6));
    let in_turn = with(DraftPipeline::InTurn, DraftSampling::Greedy, &greedy);
    let infallible = same(&pair(0.0), short, &in_turn);
    assert!(infallible.iter().all(|(_, [_, drafted, accepted])| *drafted > 0 && drafted == accepted), "{infallible:?}");

    let pair = pair(0.05);
    // The draft model's rings wrap as well.
    for prompt in [short, &text(124)] {
        let want = go_on(&pair.cpu, prompt, &greedy).map(|(ids, _)| ids);
        let got = same(&pair, prompt, &in_turn);
        let [drafted, accepted] = [1, 2].map(|i| got.iter().map(|(_, counts)| counts[i]).sum::<usize>());
        assert!(0 < accepted && accepted < drafted, "{accepted} of {drafted} stand");
        assert_eq!(got.map(|(ids, _)| ids), want, "another text than without drafts");
    }
    let ahead = with(DraftPipeline::Ahead, DraftSampling::Greedy, &greedy);
    same(&pair, short, &ahead);
    let sampling = Sampling { temperature: 0.9, top_k: Some(40), ..Sampling::default() };
    same(&pair, short, &with(DraftPipeline::InTurn, DraftSampling::Sampled, &GenerateOptions { sampling, ..plain(6) }));
}

/// A draft model with a shorter window than the target, in a session that is rewound several times, each time by less
/// than a round: rows that were overwritten before the last time are read again, as on the CPU.
#[test]
fn draft_models_of_sessions_that_are_rewound_again() {
    let (case, files) = (cases::named("nested"), tempfile::tempdir().expect("a folder"));
    let [target, draft] =
        ["target", "draft"].map(|name| widen(&case.path.join("target"), &files.path().join(name), NARROW));
    let path = target.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON");
    let of_text = if config.get("text_config").is_some() { &mut config["text_config"] } else { &mut config };
    of_text["sliding_window"] = json!(1024);
    std::fs::write(&path, config.to_string()).expect("a file");
    let pair = load(EngineOptions { draft_model: Some(draft), ..EngineOptions::new(target) }, Vec::new(), files);
    let drafts = |engine: &Engine| {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let trace = Trace::file(file.path()).expect("a trace");
        let generate = |session: &mut Session, prompt: &[u32], tokens| {
            let (drafters, block) = (Drafters::Priority(vec![DrafterOptions::DraftModel]), BlockSize::Fixed(4));
            let pipeline = DraftPipeline::InTurn;
            let with = SpeculationOptions { drafters, block, pipeline, ..SpeculationOptions::default() };
            let (speculation, trace) = (Speculation::With(with), Some(trace.clone()));
            let options = GenerateOptions { speculation, trace, ..plain(tokens) };
            let pieces = session.generate(prompt, &options).expect("a generation");
            pieces.for_each(|piece| drop(piece.expect("a piece")));
        };
        let mut session = engine.session(&exact(ElementType::F32)).expect("a session");
        generate(&mut session, &text(200), 3);
        for len in [168, 135, 102, 69] {
            session.rewind(len).expect("fewer tokens");
            generate(&mut session, &[7], if len > 69 { 2 } else { 12 });
        }
        let lines = std::fs::read_to_string(file.path()).expect("a trace");
        let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
        let rounds = lines.filter(|line| line["event"] == "round");
        let drafted = rounds.flat_map(|line| line["draft"].as_array().expect("a draft").clone());
        let probable = |token: Value| (token["id"].as_u64().expect("an id"), token["p"].as_f64().expect("a number"));
        drafted.map(probable).collect::<Vec<_>>()
    };
    let [on_cpu, on_device] = [&pair.cpu, &pair.device].map(drafts);
    let same = |((id, p), (other, q)): (&(u64, f64), &(u64, f64))| id == other && (p - q).abs() < 1e-2 * p;
    let all_same = on_cpu.len() == on_device.len() && on_cpu.iter().zip(&on_device).all(same);
    assert!(all_same && on_cpu.len() > 8, "{on_device:?} on the device, {on_cpu:?} on the CPU");
}

/// Changes every weight of a file, by up to `part` of it.
fn blur(path: &Path, part: f32) {
    let mut bytes = std::fs::read(path).expect("a file");
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("a length")) as usize;
    for (i, x) in bytes[header..].as_chunks_mut().0.iter_mut().enumerate() {
        let noise = (i * 7919 % 1009) as f32 / 504.0 - 1.0;
        *x = (f32::from_le_bytes(*x) * (1.0 + part * noise)).to_le_bytes();
    }
    std::fs::write(path, bytes).expect("a file");
}

/// Continuation of a session.
fn continued(session: &mut Session) -> Vec<u32> {
    let options = if session.engine().has_mtp() { mtp(3, &plain(5)) } else { plain(5) };
    let generation = session.generate(&[7, 8], &options).expect("a generation");
    generation.flat_map(|piece| piece.expect("a piece").tokens).collect()
}

/// A session saved on either side continues on either side like one that was never saved. A session loaded and saved
/// again gives the same file, so both sides store the same bits.
#[test]
fn sessions_in_files_go_between_the_cpu_and_a_device() {
    let own = pair("nested", Widths { full: Heads { width: 128, pairs: 8 }, ..NARROW }, None);
    let shared = pair("dense", Widths { full: Heads { width: 512, pairs: 64 }, ..NARROW }, None);
    let unshared = pair("dense", NARROW, None);
    let recurrent = pair("qwen35-nested", Widths { full: Heads { width: 128, pairs: 8 }, ..NARROW }, None);
    let narrow = pair("nested", NARROW, None);
    let folder = tempfile::tempdir().expect("a folder");
    let (path, again) = (folder.path().join("session"), folder.path().join("again"));
    let mixed = |key: KvFormat, value: KvFormat| SessionOptions {
        kv: KvOptions { key, value, ..quantized(CodeFormat::Tqc5, CodeFormat::Tqc4).kv },
    };
    for (pair, options, prompt) in [
        // Rings have wrapped, and a page is quantized.
        (&own, quantized(CodeFormat::Tqc5, CodeFormat::Tqc4), text(140)),
        (&shared, quantized(CodeFormat::Tqc4, CodeFormat::Tqc4), text(140)),
        (&narrow, mixed(ElementType::F32.into(), CodeFormat::Q4_0.into()), text(140)),
        (&shared, mixed(CodeFormat::Q8_0.into(), CodeFormat::Q8_0.into()), text(140)),
        // The keys are not in the file.
        (&shared, exact(ElementType::F32), text(20)),
        (&unshared, exact(ElementType::F16), text(20)),
        // Delta nets: some rows are not in the matrices yet.
        (&recurrent, quantized(CodeFormat::Tqc5, CodeFormat::Tqc4), text_below(192, 140)),
    ] {
        for from in [&pair.device, &pair.cpu] {
            let mut kept = from.session(&options).expect("a session");
            let pieces = kept.generate(&prompt, &plain(2)).expect("a generation");
            pieces.for_each(|piece| drop(piece.expect("a piece")));
            kept.save(&path).expect("a file");
            let file = std::fs::read(&path).expect("the file");
            let want = continued(&mut kept);
            for to in [&pair.device, &pair.cpu] {
                let way = format!("from {:?} to {:?}", from.device(), to.device());
                let mut loaded = to.load_session(&path).expect("the session");
                loaded.save(&again).expect("a file");
                assert!(std::fs::read(&again).expect("the file") == file, "{way}: another file");
                assert_eq!(continued(&mut loaded), want, "{way}");
            }
        }
    }
}

/// A file that is invalid or does not fit device memory leaves nothing allocated, and other sessions unchanged.
#[test]
fn a_session_that_cannot_be_loaded_leaves_nothing() {
    let pair = pair("nested", NARROW, None);
    // Without room for a chunk of pages, each has memory of its own.
    pair.machine.fill(24 << 20);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("session");
    let sessions = [&pair.device, &pair.cpu].map(|engine| {
        let mut session = engine.session(&exact(ElementType::F32)).expect("a session");
        session
            .generate(&pair.prompt, &plain(1))
            .expect("a generation")
            .for_each(|piece| drop(piece.expect("a piece")));
        session
    });
    let [mut kept, mut on_cpu] = sessions;
    kept.save(&path).expect("a file");
    let (whole, used) = (std::fs::read(&path).expect("the file"), pair.machine.used());
    let refused = |bytes: &[u8], why: &str| {
        std::fs::write(&path, bytes).expect("a file");
        let error = pair.device.load_session(&path).expect_err("a refusal").to_string();
        assert!(error.contains(why) && !error.contains('\n'), "{error}");
        assert_eq!(pair.machine.used(), used, "bytes are left");
    };
    for len in [10, 30, whole.len() / 2, whole.len() - 1] {
        refused(&whole[..len], "session");
    }
    let mut damaged = whole.clone();
    damaged[whole.len() / 2] ^= 1;
    refused(&damaged, "checksum");
    let header = "\"max_round_rows\":48";
    let at = whole.windows(header.len()).position(|part| part == header.as_bytes()).expect("the rows of a round");
    let claims = "\"max_round_rows\":9999999999999999";
    refused(&[&whole[..at], claims.as_bytes(), &whole[at + header.len()..]].concat(), "session");
    // Memory for a session's workspaces, not for its pages.
    let session_bytes = {
        let before = pair.machine.used();
        let _session = pair.device.session(&exact(ElementType::F32)).expect("a session");
        pair.machine.used() - before
    };
    std::fs::write(&path, &whole).expect("a file");
    let taken = pair.machine.fill(session_bytes + 100_000);
    let error = pair.device.load_session(&path).expect_err("no memory").to_string();
    assert!(error.contains("out of memory") || error.contains(" available"), "{error}");
    pair.machine.empty(taken);
    assert_eq!(pair.machine.used(), used, "bytes are left");
    drop(pair.device.load_session(&path).expect("the session"));
    assert!(kept.save(folder.path()).is_err(), "a folder is no file");
    assert_eq!(continued(&mut kept), continued(&mut on_cpu));
}

/// Page tables have no entries for an exact tail beyond the context.
#[test]
fn an_exact_tail_may_be_longer_than_the_context() {
    let zones = ExactZones { tail: usize::MAX, element: ElementType::F32, ..ExactZones::default() };
    let (key, value) = (CodeFormat::Tqc5.into(), CodeFormat::Tqc4.into());
    let session = SessionOptions { kv: KvOptions { key, value, exact: zones, ..exact(ElementType::F32).kv } };
    let pair = pair("nested", NARROW, None);
    let [on_cpu, on_device] = [&pair.cpu, &pair.device].map(|on| run(on, &session, &pair.prompt, &plain(4)).0);
    assert_eq!(on_device, on_cpu);
}

/// A pass that fails after it has applied accepted rows to the matrices of some delta nets ends their sequence, whose
/// text would be another. The others go on.
#[test]
fn a_pass_that_fails_in_part_ends_the_sequences_that_it_changed() {
    let pair = pair("qwen35-dense", NARROW, None);
    let vocab = pair.cpu.target().vocab_size() as u32;
    let prompts = [5, 7].map(|step| (0..25).map(|i| (3 + i * i * 7 + i * step) % vocab).collect::<Vec<u32>>());
    let (session, options) = (exact(ElementType::F32), plain(12));
    let mut scheduler = Scheduler::new(&pair.device, SchedulerOptions::default());
    let add = |scheduler: &mut Scheduler, prompt: &[u32]| {
        let session = scheduler.session(&session).expect("a session");
        scheduler.add(session, prompt, &options).expect("added")
    };
    let changed = add(&mut scheduler, &prompts[0]);
    (0..4).for_each(|_| drop(scheduler.step()));
    let other = add(&mut scheduler, &prompts[1]);
    // In a pass with rows of a prompt, which is not recorded.
    pair.machine.fail_launch("delta_rule", 1);
    let (mut ids, mut errors) = (Vec::new(), Vec::new());
    while scheduler.is_active() {
        for event in scheduler.step() {
            match event.piece {
                Ok(piece) => ids.extend(piece.tokens.into_iter().filter(|_| event.id == other)),
                Err(error) => errors.push((event.id, error.to_string())),
            }
        }
    }
    assert!(matches!(&errors[..], [(id, error)] if *id == changed && error.contains("lost")), "{errors:?}");
    assert_eq!(ids, run(&pair.cpu, &session, &prompts[1], &options).0);
}

/// A pass of which no launch that reads or writes a state ran leaves the rows that the round before accepted, whichever of
/// its lists could not be written.
#[test]
fn a_pass_that_is_not_launched_leaves_the_states_of_delta_nets() {
    let pair = pair("qwen35-nested", NARROW, None);
    let ids = text_below(192, 26);
    let after = |failing: Option<usize>| {
        let mut probe = Probe::new(&pair.device, &exact(ElementType::F32)).expect("a sequence");
        probe.read(&ids[..20]).expect("a prompt");
        probe.round(&ids[20..24], 3).expect("a round");
        let failed = failing.is_some_and(|before| {
            pair.machine.fail_launch("write_words", before);
            probe.round(&ids[23..26], 0).is_err()
        });
        pair.machine.fail_launch("none", 0);
        (failed, probe.logits(&ids[23..25]).expect("logits"))
    };
    let (_, want) = after(None);
    let mut failed = 0;
    while let (true, logits) = after(Some(failed)) {
        assert_eq!(logits, want, "after {failed} lists");
        failed += 1;
    }
    // Tokens, segments twice, counts of committed rows, records of the states.
    assert!(failed > 3, "{failed}");
}

#[test]
fn devices_have_names() {
    for (name, cpu) in
        [("cpu", true), ("cuda", false), ("cuda:3", false), ("metal", false), ("metal:1", false), ("auto", false)]
    {
        let choice: DeviceChoice = name.parse().expect("a device");
        assert_eq!(matches!(choice, DeviceChoice::Cpu), cpu, "{name}");
    }
    for wrong in ["gpu", "cpu:0", "auto:1", "cuda:", "metal:x", ""] {
        let error = wrong.parse::<DeviceChoice>().expect_err("an error").to_string();
        assert!(error.contains("cpu, cuda, cuda:N, metal, metal:N, auto"), "{error}");
    }
}
