//! The fixture cases: checkpoints with the outputs that transformers computes for them.

// Every test binary compiles this file and uses its own part of it.
#![allow(dead_code)]

use std::path::{Path, PathBuf};

use foretoken::checkpoint::Checkpoint;
use foretoken::gemma4::{Assistant, Output, Target, Wanted};
use foretoken::kv::{KvCache, KvOptions};
use foretoken::nn::F32View;
use foretoken::{ElementType, Isa};
use safetensors::SafeTensors;

/// A directory with a target, perhaps an assistant, and what is expected of them.
pub struct Case {
    pub name: String,
    pub path: PathBuf,
    expected: Vec<u8>,
}

/// Every case under `tests/fixtures/`, and every directory under those that `$FORETOKEN_FIXTURES` lists.
pub fn all() -> Vec<Case> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let others = std::env::var("FORETOKEN_FIXTURES").unwrap_or_default();
    let roots = std::iter::once(own).chain(others.split(':').filter(|root| !root.is_empty()).map(PathBuf::from));
    let mut cases: Vec<_> = roots
        .flat_map(|root| std::fs::read_dir(&root).unwrap_or_else(|e| panic!("{}: {e}", root.display())))
        .map(|entry| entry.expect("a directory entry").path())
        .filter(|path| path.join("expected.safetensors").exists())
        .map(|path| Case {
            name: path.file_name().expect("a name").to_string_lossy().into_owned(),
            expected: std::fs::read(path.join("expected.safetensors")).expect("expected.safetensors"),
            path,
        })
        .collect();
    cases.sort_by(|a, b| a.path.cmp(&b.path));
    assert!(!cases.is_empty(), "no fixture case was found");
    cases
}

/// The demo pair, with what transformers writes after its held-out prompts (`scripts/demo_reference.py`).
pub fn demo() -> Case {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    Case {
        name: "demo".into(),
        path: root.join("models/demo"),
        expected: std::fs::read(root.join("tests/demo/greedy.safetensors")).expect("greedy.safetensors"),
    }
}

impl Case {
    pub fn target(&self) -> Target {
        let checkpoint = Checkpoint::open(self.path.join("target")).expect("the target's checkpoint");
        Target::load(&checkpoint, Isa::best()).expect("the target")
    }

    pub fn assistant_path(&self) -> Option<PathBuf> {
        Some(self.path.join("assistant")).filter(|path| path.join("config.json").exists())
    }

    pub fn assistant(&self, target: &Target) -> Option<Assistant> {
        let checkpoint = Checkpoint::open(self.assistant_path()?).expect("the assistant's checkpoint");
        Some(Assistant::load(&checkpoint, target, Isa::best()).expect("the assistant"))
    }

    /// An expected tensor of floats; empty if the case has none of this name.
    pub fn floats(&self, name: &str) -> Vec<f32> {
        let bytes = self.bytes(name);
        bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect()
    }

    /// An expected tensor of token ids; empty if the case has none of this name.
    pub fn ids(&self, name: &str) -> Vec<u32> {
        let bytes = self.bytes(name);
        bytes.as_chunks().0.iter().map(|x| u32::try_from(i64::from_le_bytes(*x)).expect("a token id")).collect()
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        let expected = SafeTensors::deserialize(&self.expected).expect("expected.safetensors");
        expected.tensor(name).map(|tensor| tensor.data().to_vec()).unwrap_or_default()
    }
}

/// An empty cache of exact rows.
pub fn cache(target: &Target, rows: ElementType) -> KvCache {
    let options = KvOptions { key: rows.into(), value: rows.into(), ..KvOptions::default() };
    KvCache::new(target.kv_layout(), &options, target.config().max_position_embeddings, Isa::best()).expect("a cache")
}

/// Runs `ids` as one committed round.
pub fn pass(target: &Target, kv: &mut KvCache, ids: &[u32], wanted: Wanted) -> Option<Output> {
    let mut round = kv.begin_round(ids.len()).expect("a round");
    let output = target.forward(ids, &mut round, wanted).expect("a forward pass");
    round.commit(ids.len());
    output
}

/// A tensor's elements.
pub fn values(tensor: &candle_core::Tensor) -> Vec<f32> {
    F32View::new(tensor).expect("an f32 tensor").to_vec()
}

/// The largest difference between two runs of floats; infinite if one of them is no number.
pub fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "lengths differ");
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |max, d| if d.is_nan() { f32::INFINITY } else { max.max(d) })
}

/// Index of the largest entry, the first of equals.
pub fn argmax(row: &[f32]) -> u32 {
    (0..row.len()).rev().max_by(|a, b| row[*a].total_cmp(&row[*b])).expect("a row") as u32
}
