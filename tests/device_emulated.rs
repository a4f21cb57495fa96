//! The engine on a device computes what it computes on the CPU: the whole round, on the machine that the kernels' tests emulate.
//!
//! It needs a C++ compiler: `c++`, `g++` or `clang++`.

mod cases;
#[path = "../kernels/tests/emulated/device.rs"]
#[allow(dead_code)]
mod device;
#[path = "../kernels/tests/emulated/machine.rs"]
#[allow(dead_code)]
mod machine;
mod on_device;

use std::path::Path;
use std::sync::Arc;

use foretoken::kv::KvOptions;
use foretoken::{
    DeviceChoice, ElementType, EndOfGeneration, Engine, EngineOptions, GenerateOptions, MtpOptions, SessionOptions,
    Speculation, Statistics, Stop, WeightType,
};
use on_device::machine::Emulated;
use on_device::widened::{Heads, Widths, widen};

/// More than any of these models needs.
const MEMORY: usize = 1 << 30;

const NARROW: Widths = Widths { sliding: Heads { width: 64, pairs: 32 }, full: Heads { width: 64, pairs: 8 } };

/// A pair on the CPU and on an emulated device.
struct Pair {
    cpu: Engine,
    device: Engine,
    machine: Arc<Emulated>,
    prompt: Vec<u32>,
    _files: tempfile::TempDir,
}

/// The fixture `name` with heads of `widths`.
fn pair(name: &str, widths: Widths, quantize: Option<WeightType>) -> Pair {
    let case = cases::all().into_iter().find(|case| case.name == name).expect("a fixture");
    let files = tempfile::tempdir().expect("a folder");
    let part = |part: &str| widen(&case.path.join(part), &files.path().join(part), widths);
    let options = EngineOptions::new(part("target")).with_assistant(part("assistant"));
    let options = EngineOptions { threads: Some(1), quantize, ..options };
    let machine = Emulated::new(MEMORY);
    let device = EngineOptions { device: DeviceChoice::Given(machine.clone()), ..options.clone() };
    Pair {
        cpu: Engine::load(&options).expect("an engine"),
        device: Engine::load(&device).expect("an engine on a device"),
        machine,
        prompt: case.ids("input_ids"),
        _files: files,
    }
}

fn exact(element: ElementType) -> SessionOptions {
    let kv = KvOptions { key: element.into(), value: element.into(), max_round_rows: 8, ..KvOptions::default() };
    SessionOptions { kv: KvOptions { max_context: Some(1024), ..kv } }
}

fn plain(max_tokens: usize) -> GenerateOptions {
    let stop = Stop { end_of_generation: EndOfGeneration::Ignored, ..Stop::default() };
    GenerateOptions { max_tokens, speculation: Speculation::Off, stop, ..GenerateOptions::default() }
}

fn mtp(block_size: usize, options: &GenerateOptions) -> GenerateOptions {
    let speculation = Speculation::Mtp(MtpOptions { block_size, ..MtpOptions::default() });
    GenerateOptions { speculation, ..options.clone() }
}

fn run(engine: &Engine, session: &SessionOptions, prompt: &[u32], options: &GenerateOptions) -> (Vec<u32>, Statistics) {
    let mut session = engine.session(session).expect("a session");
    let mut generation = session.generate(prompt, options).expect("a generation");
    let pieces: Vec<_> = generation.by_ref().map(|piece| piece.expect("a piece")).collect();
    (pieces.into_iter().flat_map(|piece| piece.tokens).collect(), generation.statistics().clone())
}

#[test]
fn greedy_ids_are_the_cpus() {
    for name in ["dense", "edge", "moe", "nested"] {
        let pair = pair(name, NARROW, None);
        let options = plain(12);
        let session = exact(ElementType::F32);
        let want = run(&pair.cpu, &session, &pair.prompt, &options).0;
        assert_eq!(run(&pair.device, &session, &pair.prompt, &options).0, want, "{name}: plain");
        for block_size in [2, 4] {
            let (ids, statistics) = run(&pair.device, &session, &pair.prompt, &mtp(block_size, &options));
            assert_eq!(ids, want, "{name}: B = {block_size}");
            let (_, on_cpu) = run(&pair.cpu, &session, &pair.prompt, &mtp(block_size, &options));
            assert_eq!((statistics.drafted, statistics.accepted), (on_cpu.drafted, on_cpu.accepted), "{name}");
        }
        println!("{name}: {} launches, {} waits", pair.machine.launches(), pair.machine.waits());
    }
    let _ = Path::new("");
}
