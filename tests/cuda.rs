//! The engine on a CUDA device writes the CPU's text. Without a device it is skipped, and the errors say so.

#![cfg(any(feature = "cuda", feature = "cuda-prebuilt"))]

#[path = "../gpu/tests/cuda_device/mod.rs"]
mod cuda_device;
#[path = "../kernels/tests/skipped/mod.rs"]
mod skipped;

use std::collections::HashMap;
use std::path::Path;

use foretoken::kv::KvOptions;
use foretoken::{
    DeviceChoice, ElementType, EndOfGeneration, Engine, EngineOptions, GenerateOptions, Probe, Scheduler,
    SchedulerOptions, SequenceId, SessionOptions, Speculation, SpeculationOptions, Stop, WeightType,
};

fn demo(device: DeviceChoice, quantize: Option<WeightType>) -> foretoken::Result<Engine> {
    // Relative to the directory that tests run in: this one may run on another machine than the one that built it.
    let models = Path::new("models/demo");
    let options = EngineOptions::new(models.join("target")).with_assistant(models.join("assistant"));
    Engine::load(&EngineOptions { device, quantize, ..options })
}

/// The demo pair on a device, or `None` where there is none: the test is skipped.
fn on_device(quantize: Option<WeightType>) -> Option<Engine> {
    cuda_device::open()?;
    Some(demo(DeviceChoice::Cuda(0), quantize).expect("an engine on a device"))
}

fn generate(engine: &Engine, session: &SessionOptions, prompt: &str, speculation: Speculation) -> (Vec<u32>, f64) {
    let prompt = engine.tokenizer().expect("a tokenizer").encode(prompt).expect("tokens");
    let stop = Stop { end_of_generation: EndOfGeneration::Ignored, ..Stop::default() };
    let options = GenerateOptions { max_tokens: 96, speculation, stop, ..GenerateOptions::default() };
    let mut session = engine.session(session).expect("a session");
    let mut generation = session.generate(&prompt, &options).expect("a generation");
    let ids = generation.by_ref().flat_map(|piece| piece.expect("a piece").tokens).collect();
    (ids, generation.statistics().acceptance_rate())
}

fn f32s() -> SessionOptions {
    let kv = KvOptions { key: ElementType::F32.into(), value: ElementType::F32.into(), ..KvOptions::default() };
    SessionOptions { kv }
}

const PROMPT: &str = "impl Iterator for Counter {\n    type Item = u32;\n";

#[test]
fn the_text_is_the_cpus() {
    let Some(engine) = on_device(None) else { return };
    let cpu = demo(DeviceChoice::Cpu, None).expect("an engine");
    let want = generate(&cpu, &f32s(), PROMPT, Speculation::Off).0;
    assert_eq!(generate(&engine, &f32s(), PROMPT, Speculation::Off).0, want);
    for block_size in 2..=8 {
        let mtp = Speculation::With(SpeculationOptions::mtp(block_size));
        let (ids, rate) = generate(&engine, &f32s(), PROMPT, mtp);
        assert_eq!(ids, want, "B = {block_size}");
        assert!(rate > 0.2, "B = {block_size}: {rate} of the drafts stand");
    }
}

/// Sequences that share passes write what each writes alone on the CPU.
#[test]
fn the_texts_of_many_are_the_cpus() {
    let Some(engine) = on_device(None) else { return };
    let cpu = demo(DeviceChoice::Cpu, None).expect("an engine");
    let mut scheduler = Scheduler::new(&engine, SchedulerOptions::default());
    let stop = Stop { end_of_generation: EndOfGeneration::Ignored, ..Stop::default() };
    let jobs = [2, 3, 4, 6].map(|block_size| {
        let prompt = &PROMPT[..PROMPT.len() / block_size];
        let speculation = Speculation::With(SpeculationOptions::mtp(block_size));
        let ids = engine.tokenizer().expect("a tokenizer").encode(prompt).expect("tokens");
        let options = GenerateOptions { max_tokens: 96, speculation, stop: stop.clone(), ..GenerateOptions::default() };
        let session = engine.session(&f32s()).expect("a session");
        (scheduler.add(session, &ids, &options).expect("added"), prompt)
    });
    let mut texts: HashMap<SequenceId, Vec<u32>> = HashMap::new();
    while scheduler.is_active() {
        for event in scheduler.step() {
            texts.entry(event.id).or_default().extend(event.piece.expect("a piece").tokens);
        }
    }
    for (id, prompt) in jobs {
        assert_eq!(texts[&id], generate(&cpu, &f32s(), prompt, Speculation::Off).0, "{prompt:?}");
    }
}

/// The Kullback-Leibler divergence of every row of `q` from the same row of `p`, both logits `(rows, vocab)`, in nats.
fn divergences(p: &[f32], q: &[f32], vocab: usize) -> Vec<f64> {
    let log_softmax = |row: &[f32]| -> Vec<f64> {
        let max = row.iter().fold(f32::NEG_INFINITY, |max, x| max.max(*x));
        let sum: f64 = row.iter().map(|x| f64::from(x - max).exp()).sum();
        row.iter().map(|x| f64::from(x - max) - sum.ln()).collect()
    };
    let of = |(p, q): (&[f32], &[f32])| log_softmax(p).iter().zip(log_softmax(q)).map(|(p, q)| p.exp() * (p - q)).sum();
    p.chunks_exact(vocab).zip(q.chunks_exact(vocab)).map(of).collect()
}

/// Products have the CPU's bits, but the last bit of a norm can decide how an activation is rounded
/// to 8 bits, as between the CPU's instruction sets: the bound is their largest median divergence
/// here (scalar and AVX-512, Q8_0: 4.6e-4 nats).
#[test]
fn logits_of_quantized_weights_are_the_cpus() {
    for quantize in [WeightType::Q8_0, WeightType::Q4_0, WeightType::Q4_K] {
        let Some(engine) = on_device(Some(quantize)) else { return };
        let cpu = demo(DeviceChoice::Cpu, Some(quantize)).expect("an engine");
        let ids = engine.tokenizer().expect("a tokenizer").encode(include_str!("cuda.rs")).expect("tokens");
        let logits = |engine: &Engine| -> Vec<f32> {
            let mut probe = Probe::new(engine, &SessionOptions::default()).expect("a sequence");
            ids[..512].chunks(16).flat_map(|ids| probe.logits(ids).expect("logits")).collect()
        };
        let mut rows = divergences(&logits(&cpu), &logits(&engine), engine.target().vocab_size());
        rows.sort_by(f64::total_cmp);
        let (median, most) = (rows[rows.len() / 2], rows[rows.len() - 1]);
        println!("{}: median divergence {median:.2e} nats, at most {most:.2e}", quantize.name());
        assert!(median < 5e-4, "{}: {median} nats", quantize.name());
    }
}

#[test]
fn auto_computes_somewhere() {
    let engine = demo(DeviceChoice::Auto, None).expect("an engine");
    let ids = generate(&engine, &SessionOptions::default(), PROMPT, Speculation::Auto).0;
    assert_eq!(ids.len(), 96, "on {:?}", engine.device());
    assert_eq!(engine.device().is_some(), cuda_device::open().is_some(), "on {:?}", engine.device());
}

#[test]
fn a_device_that_is_not_there_is_an_error() {
    let error = demo(DeviceChoice::Cuda(usize::MAX), None).expect_err("no such device").to_string();
    assert!(error.starts_with("CUDA: "), "{error}");
    assert!(["no driver", "no device", "the driver"].iter().any(|part| error.contains(part)), "{error}");
}
