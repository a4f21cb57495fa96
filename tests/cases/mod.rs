//! The fixture cases: checkpoints with the outputs that transformers computes for them.

// Every test binary compiles this file and uses its own part of it.
#![allow(dead_code)]

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use candle_core::Tensor;
use foretoken::checkpoint::Checkpoint;
use foretoken::gemma4::{Assistant, Target};
use foretoken::kv::{KvCache, KvOptions};
use foretoken::nn::F32View;
use foretoken::{ChainModel, DraftKv, DraftRows, DraftStep, Model, Output, OutputRows};
use foretoken::{ElementType, EndOfGeneration, GenerateOptions, Isa, Scheduler, SequenceId, Speculation, Stop};
use safetensors::{Dtype, SafeTensors};

/// A directory with a target, optionally an assistant, and `expected.safetensors`.
pub struct Case {
    pub name: String,
    pub path: PathBuf,
    expected: Vec<u8>,
}

/// Model type prefixes of the case families.
pub const GEMMA4: &str = "gemma4";
pub const QWEN35: &str = "qwen3_5";

/// Every Gemma 4 case under `tests/fixtures/`, then under the directories in `$FORETOKEN_FIXTURES`.
pub fn all() -> Vec<Case> {
    of(GEMMA4)
}

/// The same for another family; at least one.
pub fn of(family: &str) -> Vec<Case> {
    let cases: Vec<_> = every().into_iter().filter(|case| case.model_type().starts_with(family)).collect();
    assert!(!cases.is_empty(), "no case of {family}");
    cases
}

/// This repository's case `name`, of any family.
pub fn named(name: &str) -> Case {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    let expected = path.join(EXPECTED);
    Case::open(path, expected).expect("a fixture")
}

/// Every case of every family.
fn every() -> Vec<Case> {
    let listed = std::env::var_os("FORETOKEN_FIXTURES").unwrap_or_default();
    let listed = std::env::split_paths(&listed).filter(|root| !root.as_os_str().is_empty());
    let roots = std::iter::once(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")).chain(listed);
    let cases: Result<Vec<_>, String> = roots.map(|root| under(&root)).collect();
    cases.unwrap_or_else(|problem| panic!("{problem}")).into_iter().flatten().collect()
}

/// The cases directly under a directory, by name; at least one.
pub fn under(root: &Path) -> Result<Vec<Case>, String> {
    let failed = |problem: &str| Err(format!("fixtures {}: {problem}", root.display()));
    if root.join(EXPECTED).exists() {
        return failed("is itself a case; name the directory that holds it");
    }
    let entries = match std::fs::read_dir(root).and_then(Iterator::collect::<Result<Vec<_>, _>>) {
        Ok(entries) => entries,
        Err(error) => return failed(&error.to_string()),
    };
    let mut paths: Vec<_> = entries.into_iter().map(|entry| entry.path()).collect();
    // A target without expected tensors is an incomplete case, which `Case::open` rejects.
    paths.retain(|path| path.join(EXPECTED).exists() || path.join("target").exists());
    paths.sort();
    if paths.is_empty() {
        return failed("holds no case: no NAME/expected.safetensors");
    }
    paths.into_iter().map(|path| Case::open(path.clone(), path.join(EXPECTED))).collect()
}

const EXPECTED: &str = "expected.safetensors";

/// The demo pair, with transformers' output after its held-out prompts (`scripts/demo_reference.py`).
pub fn demo() -> Case {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    Case::open(root.join("models/demo"), root.join("tests/demo/greedy.safetensors")).expect("the demo pair")
}

/// The same for Qwen3.5's demo pair, whose head is in its target's file.
pub fn demo_qwen() -> Case {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    Case::open(root.join("models/demo-qwen"), root.join("tests/demo_qwen/greedy.safetensors")).expect("the demo pair")
}

/// One draft step of one sequence, from `token` and the state that predicted it.
pub fn draft_step(assistant: &Assistant, token: u32, hidden: &Tensor, kv: &KvCache) -> DraftStep {
    let rows = DraftRows { ids: vec![token], hidden: Some(hidden.clone()), kv: DraftKv::Target(kv.committed()) };
    assistant.step(&mut [rows]).expect("a step").pop().expect("the row's")
}

/// Runs `check` on every instruction set of this processor, and names those on which it failed.
pub fn on_every_isa(check: impl Fn(Isa)) {
    let fails = |isa: &Isa| {
        println!("on {}", isa.name());
        catch_unwind(AssertUnwindSafe(|| check(*isa))).is_err()
    };
    let failed: Vec<_> = Isa::available().filter(fails).map(Isa::name).collect();
    assert!(failed.is_empty(), "failed on {}", failed.join(", "));
}

impl Case {
    /// The case in the directory `path`, whose expected tensors are in the file `expected`.
    pub fn open(path: PathBuf, expected: PathBuf) -> Result<Self, String> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let bytes = std::fs::read(&expected).map_err(|error| format!("{}: {error}", expected.display()))?;
        Ok(Case { name, path, expected: bytes })
    }

    /// Whether it is one of this repository's.
    pub fn ships(&self) -> bool {
        self.path.starts_with(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures"))
    }

    /// Its model type in config.json.
    pub fn model_type(&self) -> String {
        let checkpoint = Checkpoint::open(self.path.join("target")).expect("the target's checkpoint");
        checkpoint.model_type().expect("a config.json")
    }

    pub fn target(&self, isa: Isa) -> Target {
        let checkpoint = Checkpoint::open(self.path.join("target")).expect("the target's checkpoint");
        Target::load(&checkpoint, isa).expect("the target")
    }

    pub fn assistant_path(&self) -> Option<PathBuf> {
        Some(self.path.join("assistant")).filter(|path| path.exists())
    }

    /// Whether it has a drafter: an assistant, or a head in the target's file.
    pub fn drafts(&self) -> bool {
        self.assistant_path().is_some() || self.model_type().starts_with(QWEN35)
    }

    pub fn assistant(&self, target: &Target, isa: Isa) -> Option<Assistant> {
        let checkpoint = Checkpoint::open(self.assistant_path()?).expect("the assistant's checkpoint");
        Some(Assistant::load(&checkpoint, target, isa).expect("the assistant"))
    }

    /// An expected tensor of floats.
    pub fn floats(&self, name: &str) -> Vec<f32> {
        let bytes = self.tensor(name, Dtype::F32).unwrap_or_else(|problem| panic!("{problem}"));
        bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect()
    }

    /// An expected tensor of floats that only this repository's cases must have.
    pub fn own_floats(&self, name: &str) -> Option<Vec<f32>> {
        (self.ships() || self.tensor(name, Dtype::F32).is_ok()).then(|| self.floats(name))
    }

    /// An expected tensor of token ids.
    pub fn ids(&self, name: &str) -> Vec<u32> {
        let bytes = self.tensor(name, Dtype::I64).unwrap_or_else(|problem| panic!("{problem}"));
        bytes.as_chunks().0.iter().map(|x| u32::try_from(i64::from_le_bytes(*x)).expect("a token id")).collect()
    }

    /// The bytes of an expected tensor, little-endian.
    pub fn tensor(&self, name: &str, dtype: Dtype) -> Result<Vec<u8>, String> {
        let problem = |what: &str| format!("case {}: expected tensor {name}: {what}", self.path.display());
        let expected = SafeTensors::deserialize(&self.expected).map_err(|error| problem(&error.to_string()))?;
        let tensor = expected.tensor(name).map_err(|_| problem("is missing"))?;
        if tensor.dtype() != dtype || tensor.data().is_empty() {
            return Err(problem(&format!("is {:?} {:?}, must be {dtype:?}", tensor.dtype(), tensor.shape())));
        }
        Ok(tensor.data().to_vec())
    }

    /// The required agreement with the reference for `(logits, hidden)` in f32, as the largest difference: 1e-4, or
    /// twice the difference between the reference's f32 and f64, whichever is larger.
    pub fn tolerances(&self) -> (f32, f32) {
        let rounding = self.floats("reference_rounding");
        (1e-4f32.max(2.0 * rounding[0]), 1e-4f32.max(2.0 * rounding[1]))
    }
}

/// An empty cache of exact rows.
pub fn cache(target: &Target, rows: ElementType, isa: Isa) -> KvCache {
    // A case's prompt is read in one pass.
    let options = KvOptions { key: rows.into(), value: rows.into(), max_round_rows: 4096, ..KvOptions::default() };
    KvCache::new(target.kv_layout(), &options, target.config().max_position_embeddings, isa).expect("a cache")
}

/// Runs `ids` as one committed round.
pub fn pass(target: &Target, kv: &mut KvCache, ids: &[u32], outputs: OutputRows) -> Output {
    let round = kv.begin_round(ids.len()).expect("a round");
    target.forward_one(ids, round, outputs, ids.len()).expect("a forward pass")
}

/// So many tokens, whichever they are, without drafts.
pub fn plain(max_tokens: usize) -> GenerateOptions {
    let stop = Stop { end_of_generation: EndOfGeneration::Ignored, ..Stop::default() };
    GenerateOptions { max_tokens, speculation: Speculation::Off, stop, ..GenerateOptions::default() }
}

/// Steps until no sequence is active: the tokens of each one that wrote any.
pub fn texts(scheduler: &mut Scheduler) -> HashMap<SequenceId, Vec<u32>> {
    let mut texts: HashMap<SequenceId, Vec<u32>> = HashMap::new();
    while scheduler.is_active() {
        for event in scheduler.step() {
            texts.entry(event.id).or_default().extend(event.piece.expect("a piece").tokens);
        }
    }
    texts
}

/// A tensor's elements.
pub fn values(tensor: &candle_core::Tensor) -> Vec<f32> {
    F32View::new(tensor).expect("an f32 tensor").to_vec()
}

/// The bits of floats: equal ones are the same numbers, and NaN equals itself.
pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// The largest difference between two runs of floats; infinite if one of them is NaN.
pub fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "lengths differ");
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |max, d| if d.is_nan() { f32::INFINITY } else { max.max(d) })
}

/// Index of the largest entry, the first of equals.
pub fn argmax(row: &[f32]) -> u32 {
    (0..row.len()).rev().max_by(|a, b| row[*a].total_cmp(&row[*b])).expect("a row") as u32
}

/// Compares an id if the reference's best two logits differ by more than twice the possible error
/// of each; returns whether it did.
pub fn same_id(got: u32, want: u32, margin: f32, error: f32, what: &str) -> bool {
    let decided = margin > 2.0 * error;
    assert!(!decided || got == want, "{what}: {got} instead of {want}, whose margin is {margin} and error {error:.1e}");
    decided
}
