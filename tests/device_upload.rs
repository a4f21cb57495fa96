//! Loading to a device leaves no weights on the host, and takes at most one tensor of its memory meanwhile.
//!
//! It needs a C++ compiler: `c++`, `g++` or `clang++`. The emulated device allocates through that compiler's
//! runtime, which the allocator here does not count.

mod cases;
mod counting;
#[path = "../gpu/tests/emulated/device.rs"]
#[allow(dead_code)]
mod device;
#[path = "../gpu/tests/emulated/machine.rs"]
#[allow(dead_code)]
mod machine;
#[allow(dead_code)]
mod on_device;
#[path = "../kernels/tests/skipped/mod.rs"]
mod skipped;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cases::plain;
use counting::{HELD, PEAK, alone};
use foretoken::checkpoint::Checkpoint;
use foretoken::checkpoint::convert::{Outtype, ToGgufOptions, to_gguf};
use foretoken::checkpoint::quantize::{Mix, QuantizeOptions, quantize};
use foretoken::device::{AnyLaunch, Device, Memory, Recording};
use foretoken::{Cancel, DeviceChoice, Engine, EngineOptions, Error, Result, SessionOptions, WeightType};
use on_device::machine::Emulated;
use on_device::pair::{mtp, run};

/// More than the pair needs.
const MEMORY: usize = 1 << 30;

/// Counted bytes besides a tensor: headers, configurations, norms, names.
const ROOM: usize = 1 << 20;

/// Measurements at writes to the device.
#[derive(Default)]
struct Seen {
    writes: AtomicUsize,
    /// Bytes of the largest allocation.
    largest: AtomicUsize,
    /// Peak memory at a write, allocator's and anonymous mapped bytes separately.
    heap: AtomicUsize,
    anonymous: AtomicUsize,
    /// The write that fails, if any.
    fails: usize,
}

/// The emulated device, watched.
struct Watched {
    machine: Arc<Emulated>,
    seen: Arc<Seen>,
}

struct WatchedMemory {
    memory: Box<dyn Memory>,
    machine: Arc<Emulated>,
    seen: Arc<Seen>,
}

// SAFETY: memory, launches and recordings are the machine's.
unsafe impl Device for Watched {
    fn name(&self) -> String {
        self.machine.name()
    }

    fn free_bytes(&self) -> Result<usize> {
        self.machine.free_bytes()
    }

    fn allocate(&self, bytes: usize) -> Result<Box<dyn Memory>> {
        self.seen.largest.fetch_max(bytes, Ordering::Relaxed);
        let (machine, seen) = (self.machine.clone(), self.seen.clone());
        Ok(Box::new(WatchedMemory { memory: self.machine.allocate(bytes)?, machine, seen }))
    }

    unsafe fn launch(&self, launch: &AnyLaunch) -> Result<()> {
        // SAFETY: the caller keeps what `launch` asks for.
        unsafe { self.machine.launch(launch) }
    }

    fn record(&self, launches: &[AnyLaunch]) -> Result<Box<dyn Recording>> {
        self.machine.record(launches)
    }
}

impl Memory for WatchedMemory {
    fn address(&self) -> u64 {
        self.memory.address()
    }

    fn write(&self, at: usize, bytes: &[u8]) -> Result<()> {
        let seen = &self.seen;
        if seen.writes.fetch_add(1, Ordering::Relaxed) + 1 == seen.fails {
            return Err(Error::Device { device: "emulated".into(), problem: "the bus is lost".into() });
        }
        seen.heap.fetch_max(HELD.load(Ordering::Relaxed), Ordering::Relaxed);
        seen.anonymous.fetch_max(anonymous().saturating_sub(self.machine.used()), Ordering::Relaxed);
        self.memory.write(at, bytes)
    }

    fn read(&self, at: usize, bytes: &mut [u8]) -> Result<()> {
        self.memory.read(at, bytes)
    }
}

/// Anonymous bytes of this process; 0 if the system does not report them.
fn anonymous() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<usize>().ok()).unwrap_or(0) << 10
}

fn demo(part: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo").join(part)
}

fn load(options: &EngineOptions, fails: usize) -> (Result<Engine>, Arc<Emulated>, Arc<Seen>) {
    let (machine, seen) = (Emulated::new(MEMORY), Arc::new(Seen { fails, ..Seen::default() }));
    // The kernels are loaded before counting.
    drop(machine.allocate(1));
    let device = DeviceChoice::Given(Arc::new(Watched { machine: machine.clone(), seen: seen.clone() }));
    (Engine::load(&EngineOptions { device, ..options.clone() }), machine, seen)
}

fn ids(engine: &Engine, prompt: &[u32]) -> Vec<u32> {
    run(engine, &SessionOptions::default(), prompt, &mtp(3, &plain(6))).0
}

/// Loads the pair to a device, counts, and compares its text with the CPU's.
fn loads_in_one_tensor(what: &str, options: &EngineOptions) {
    let options = EngineOptions { threads: Some(1), ..options.clone() };
    let tokenizer = {
        let before = HELD.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        let target = Checkpoint::open(&options.model).expect("a checkpoint");
        drop(target.tokenizer(4096).expect("readable").expect("a tokenizer"));
        PEAK.load(Ordering::Relaxed) - before
    };
    let (before, mapped) = (HELD.load(Ordering::Relaxed), anonymous());
    PEAK.store(before, Ordering::Relaxed);
    let (engine, machine, seen) = load(&options, 0);
    let engine = engine.expect("an engine on a device");
    let [peak, held] = [&PEAK, &HELD].map(|count| count.load(Ordering::Relaxed).saturating_sub(before));
    let largest = seen.largest.load(Ordering::Relaxed);
    let writing = seen.heap.load(Ordering::Relaxed).saturating_sub(before);
    let anonymous = seen.anonymous.load(Ordering::Relaxed).saturating_sub(mapped);
    let used = machine.used();
    println!(
        "{what}: {used} bytes on the device, the largest tensor {largest}; of the host's, {peak} at most ({tokenizer} for \
         the tokenizer alone), {writing} at a write ({anonymous} anonymous), {held} afterwards"
    );
    assert!(4 * largest < used, "{what}: one tensor is most of it");
    assert!(peak < largest.max(tokenizer) + ROOM, "{what}: {peak} bytes at most");
    assert!(writing < largest + ROOM, "{what}: {writing} bytes at a write");
    // The allocator above does not see mappings, which would contain packed weights. Freed memory
    // may still be the process's.
    assert!(anonymous < used / 2, "{what}: {anonymous} anonymous bytes at a write");
    if mapped == 0 {
        skipped::skipped("mappings of a load", "this system has no RssAnon in /proc/self/status");
    }
    assert!(held < tokenizer + ROOM, "{what}: {held} bytes stay");

    let cpu = Engine::load(&options).expect("an engine");
    assert_eq!(engine.target().step_cost(), cpu.target().step_cost(), "{what}");
    assert_eq!(engine.target().fingerprint().expect("a sum"), cpu.target().fingerprint().expect("a sum"), "{what}");
    let prompt = cpu.tokenizer().and_then(|tokenizer| tokenizer.encode("fn next(&mut self)")).expect("tokens");
    assert_eq!(ids(&engine, &prompt), ids(&cpu, &prompt), "{what}");
    // Functions that need weights on the host return errors.
    let error = engine.gemma4().expect("a Gemma 4").embed(&[3]).expect_err("an error").to_string();
    assert!(error.contains("device") && error.contains("target") && !error.contains('\n'), "{error}");
}

fn pair() -> EngineOptions {
    EngineOptions::new(demo("target")).with_assistant(demo("assistant"))
}

#[test]
fn weights_are_not_kept_on_the_host() {
    let _alone = alone();
    loads_in_one_tensor("as it lies", &pair());
    loads_in_one_tensor("quantized as it is loaded", &EngineOptions { quantize: Some(WeightType::Q8_0), ..pair() });
    let files = tempfile::tempdir().expect("a folder");
    let at = |name: &str| files.path().join(name);
    let source = Checkpoint::open(demo("target")).expect("a checkpoint");
    to_gguf(&source, at("f32.gguf"), &ToGgufOptions { outtype: Outtype::F32, ..ToGgufOptions::default() })
        .expect("a file");
    let source = Checkpoint::open(at("f32.gguf")).expect("a file");
    quantize(&source, at("mixed.gguf"), &QuantizeOptions::new(Mix::Q4_K_M)).expect("a file");
    drop(source);
    loads_in_one_tensor("a quantized file", &EngineOptions { model: at("mixed.gguf"), ..pair() });
}

/// A load that its caller cancels after the first tensor leaves nothing on the device.
#[test]
fn a_load_that_is_cancelled() {
    let _alone = alone();
    let cancel = Cancel::default();
    let own = cancel.clone();
    let options = EngineOptions { progress: Some(Arc::new(move |_| own.cancel())), cancel, ..pair() };
    let (engine, machine, seen) = load(&options, 0);
    assert!(matches!(engine, Err(Error::Cancelled)), "{engine:?}");
    assert!(seen.largest.load(Ordering::Relaxed) > 0, "nothing was loaded");
    assert_eq!(machine.used(), 0, "bytes are left");
}

/// A device that fails while weights are written: the error names the matrix, and nothing stays allocated.
#[test]
fn a_write_that_fails_is_an_error_with_the_tensor() {
    let _alone = alone();
    for (quantize, write) in [(None, 1), (Some(WeightType::Q8_0), 1), (Some(WeightType::Q8_0), 20)] {
        let (engine, machine, _) = load(&EngineOptions { quantize, threads: Some(1), ..pair() }, write);
        let error = engine.expect_err("an error");
        assert!(matches!(error, Error::Device { .. }), "{error:?}");
        let text = error.to_string();
        assert!(["emulated", "the bus is lost"].iter().all(|part| text.contains(part)), "{text}");
        // The first is the embedding.
        assert!(write > 1 || text.contains("tensor model.embed_tokens.weight"), "{text}");
        assert_eq!(machine.used(), 0, "bytes are left");
    }
}
