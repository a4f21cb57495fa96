//! The engine on a CUDA device writes the CPU's text. Without a device it is skipped, and the errors say so.

#![cfg(any(feature = "cuda", feature = "cuda-prebuilt"))]

#[path = "../gpu/tests/cuda_device/mod.rs"]
mod cuda_device;
#[path = "../kernels/tests/skipped/mod.rs"]
mod skipped;

use std::path::Path;

use foretoken::kv::KvPreset;
use foretoken::perplexity::{PerplexityOptions, perplexity};
use foretoken::{
    DeviceChoice, ElementType, EndOfGeneration, Engine, EngineOptions, GenerateOptions, MtpOptions, SessionOptions,
    Speculation, Stop, WeightType,
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

const PROMPT: &str = "impl Iterator for Counter {\n    type Item = u32;\n";

#[test]
fn the_text_is_the_cpus() {
    let Some(engine) = on_device(None) else { return };
    let cpu = demo(DeviceChoice::Cpu, None).expect("an engine");
    let f32s = || SessionOptions {
        kv: foretoken::kv::KvOptions {
            key: ElementType::F32.into(),
            value: ElementType::F32.into(),
            ..Default::default()
        },
    };
    let want = generate(&cpu, &f32s(), PROMPT, Speculation::Off).0;
    assert_eq!(generate(&engine, &f32s(), PROMPT, Speculation::Off).0, want);
    for block_size in 2..=8 {
        let mtp = Speculation::Mtp(MtpOptions { block_size, ..MtpOptions::default() });
        let (ids, rate) = generate(&engine, &f32s(), PROMPT, mtp);
        assert_eq!(ids, want, "B = {block_size}");
        assert!(rate > 0.2, "B = {block_size}: {rate} of the drafts stand");
    }
}

#[test]
fn logits_of_quantized_weights_are_the_cpus() {
    for quantize in [WeightType::Q8_0, WeightType::Q4_0, WeightType::Q4_K] {
        let Some(engine) = on_device(Some(quantize)) else { return };
        let cpu = demo(DeviceChoice::Cpu, Some(quantize)).expect("an engine");
        let text: Vec<u32> = (0..512).map(|i| 300 + i * 37 % 3000).collect();
        let options = PerplexityOptions { kv: KvPreset::Exact.into(), ..PerplexityOptions::default() };
        let of = |engine| perplexity(engine, &text, &options, |_| {}).expect("a perplexity").value();
        let (device, cpu) = (of(&engine), of(&cpu));
        assert!((device / cpu - 1.0).abs() < 1e-3, "{}: {device}, and {cpu} on the CPU", quantize.name());
    }
}

#[test]
fn auto_computes_somewhere() {
    let engine = demo(DeviceChoice::Auto, None).expect("an engine");
    let ids = generate(&engine, &SessionOptions::default(), PROMPT, Speculation::WherePossible).0;
    assert_eq!(ids.len(), 96, "on {:?}", engine.device());
    assert_eq!(engine.device().is_some(), cuda_device::open().is_some(), "on {:?}", engine.device());
}

#[test]
fn a_device_that_is_not_there_is_an_error() {
    let error = demo(DeviceChoice::Cuda(usize::MAX), None).err().expect("no such device").to_string();
    assert!(error.starts_with("CUDA: "), "{error}");
    assert!(["no driver", "no device", "the driver"].iter().any(|part| error.contains(part)), "{error}");
}
