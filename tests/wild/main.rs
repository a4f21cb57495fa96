//! Checkpoints in circulation: twins of published files load and compute what the reference
//! computes, or are rejected by name with an alternative.

mod assistants;
#[path = "../cases/mod.rs"]
mod cases;
mod compressed;
mod containers;
mod gguf_files;
#[path = "../gguf_writer/mod.rs"]
mod gguf_writer;
mod per_layer_config;
#[path = "../twins/published.rs"]
mod published;
#[path = "../refusal/mod.rs"]
mod refusal;
mod sampling;
mod tokenizers;
#[path = "../twins/mod.rs"]
mod twins;
mod unsupported;
#[path = "../warnings/mod.rs"]
mod warnings;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use cases::{Case, cache, max_difference, named as case, pass, values};
use foretoken::checkpoint::convert::{ToGgufOptions, ToHuggingFaceOptions, Unknown, to_gguf, to_hugging_face};
use foretoken::checkpoint::{Checkpoint, Progress, find_assistants};
use foretoken::gemma4::{Assistant, Target};
use foretoken::nn::tensor;
use foretoken::verify::{Outcome, VerifyOptions, verify};
use foretoken::{
    ElementType, Engine, EngineOptions, GenerateOptions, Isa, Model, OutputRows, Result, SessionOptions, WeightType,
};
use foretoken_kernels::quant::{dequantize_row, quantize_row};
use gguf_writer::*;
use published::BF16;
use refusal::refused;
use safetensors::Dtype;
use serde_json::{Value, json};
use twins::{Change, STRIKE_END, Tensors, Twin, Vocabulary};
use warnings::warnings;

const WEIGHTS: &str = "target/model.safetensors";
const CONFIG: &str = "target/config.json";

fn target(path: &Path) -> Result<Target> {
    Target::load(&Checkpoint::open(path)?, Isa::best())
}

fn assistant(path: &Path, target: &Target) -> Result<Assistant> {
    Assistant::load(&Checkpoint::open(path)?, target, Isa::best())
}

fn engine(model: &Path, assistant: Option<&Path>) -> Result<Engine> {
    let assistant = assistant.map(Path::to_owned);
    Engine::load(&EngineOptions { assistant, threads: Some(1), ..EngineOptions::new(model) })
}

/// Logits of every row of `ids`.
fn logits(target: &Target, ids: &[u32]) -> Vec<f32> {
    let mut kv = cache(target, ElementType::F32, Isa::best());
    values(&pass(target, &mut kv, ids, OutputRows::All).logits)
}

/// Checks that the target has the reference's logits.
#[track_caller]
fn computes_the_references(case: &Case, target: &Target) {
    let error = max_difference(&logits(target, &case.ids("input_ids")), &case.floats("logits"));
    assert!(error <= case.tolerances().0, "{}: off by {error}", case.name);
}

/// Checks that every link of the reference's draft chain is the assistant's; returns how many ids a link scores.
#[track_caller]
fn drafts_the_references(case: &Case, target: &Target, assistant: &Assistant) -> usize {
    let mut kv = cache(target, ElementType::F32, Isa::best());
    pass(target, &mut kv, &case.ids("input_ids"), OutputRows::None);
    let (ids, all) = (case.ids("draft_ids"), case.floats("draft_logits"));
    let (prompt, drafted) = (case.floats("hidden"), case.floats("draft_hidden"));
    let (width, vocab) = (drafted.len() / ids.len(), all.len() / ids.len());
    let (mut token, mut hidden) = (case.ids("first_id")[0], prompt[prompt.len() - width..].to_vec());
    let mut scored = 0;
    for (k, id) in ids.iter().enumerate() {
        let state = tensor(hidden, (1, width)).expect("a state");
        let step = cases::draft_step(assistant, token, &state, &kv);
        let row = &all[k * vocab..(k + 1) * vocab];
        let want = match &step.scores.ids {
            None => row.to_vec(),
            Some(ids) => ids.iter().map(|id| row[*id as usize]).collect(),
        };
        // A dense head scores more ids than the reference, whose others are infinite or its minimum.
        let pairs: Vec<(f32, f32)> = (values(&step.scores.logits).into_iter().zip(want))
            .filter(|(_, want)| want.is_finite() && step.scores.ids.is_some() || *want > least(row))
            .collect();
        let (got, want): (Vec<f32>, Vec<f32>) = pairs.into_iter().unzip();
        let error = max_difference(&got, &want);
        assert!(!got.is_empty() && error <= case.tolerances().0, "{}: draft {k} is off by {error}", case.name);
        scored = step.scores.logits.elem_count();
        (token, hidden) = (*id, drafted[k * width..(k + 1) * width].to_vec());
    }
    scored
}

/// The reference's score of the ids that a centroid head omits: one below its minimum, the same for all.
fn least(row: &[f32]) -> f32 {
    let least = row.iter().copied().fold(f32::INFINITY, f32::min);
    if row.iter().filter(|x| **x == least).count() > 1 { least } else { f32::NEG_INFINITY }
}

/// The norm of the differences relative to that of `want`.
fn relative_error(got: &[f32], want: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let of = |squares: f64| squares.sqrt();
    let differences = got.iter().zip(want).map(|(got, want)| square(got - want)).sum();
    of(differences) / of(want.iter().map(|x| square(*x)).sum())
}

/// The matrices of the layers, as in compressed checkpoints: embeddings and norms are unchanged.
fn matrices(tensors: &Tensors) -> Vec<String> {
    let is_matrix = |name: &&String| name.ends_with("_proj.weight") || name.ends_with("per_layer_input_gate.weight");
    tensors.keys().filter(is_matrix).cloned().collect()
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect()
}

fn f32_bytes(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

/// ggml's number for 16-bit floats.
const F16: u32 = 1;

/// Rows of `inputs` floats in ggml's type of this number: their bytes, and the values that they have then.
fn stored(floats: &[f32], inputs: usize, type_id: u32) -> (Vec<u8>, Vec<f32>) {
    let halves = |of: fn(f32) -> ([u8; 2], f32)| {
        let (bytes, values): (Vec<_>, Vec<_>) = floats.iter().map(|x| of(*x)).unzip();
        (bytes.concat(), values)
    };
    match type_id {
        F16 => halves(|x| (half::f16::from_f32(x).to_le_bytes(), half::f16::from_f32(x).to_f32())),
        BF16 => halves(|x| (half::bf16::from_f32(x).to_le_bytes(), half::bf16::from_f32(x).to_f32())),
        _ => {
            let of = WeightType::ALL.into_iter().find(|of| of.ggml_id() == type_id).expect("a type of weights");
            let row_bytes = of.row_bytes(inputs).expect("whole blocks");
            let (mut bytes, mut values) = (vec![0; floats.len() / inputs * row_bytes], vec![0.0; floats.len()]);
            let rows = bytes.chunks_mut(row_bytes).zip(floats.chunks(inputs));
            for ((bytes, row), values) in rows.zip(values.chunks_mut(inputs)) {
                quantize_row(Isa::best(), of, row, bytes);
                dequantize_row(of, bytes, values);
            }
            (bytes, values)
        }
    }
}

/// docs/checkpoints.md names every test of this directory, and no test or file of tests that was removed.
#[test]
fn the_tables_in_the_docs_are_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &Path| std::fs::read_to_string(path).expect("a file");
    let entries_in = |directory: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(directory).expect("a directory");
        entries.map(|entry| entry.expect("an entry").path()).collect()
    };
    let is_source = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "rs");
    let own = entries_in(&root.join("tests/wild"));
    let mut entries = [entries_in(&root.join("tests")), entries_in(&root.join("tools/tests"))].concat();
    let directories: Vec<_> = entries.iter().filter(|path| path.is_dir()).cloned().collect();
    entries.extend(directories.iter().flat_map(|directory| entries_in(directory)));
    let tests_in = |text: &str| -> Vec<String> {
        let after = text.split("#[test]\nfn ").skip(1);
        after.filter_map(|rest| Some(rest.split_once('(')?.0.to_owned())).collect()
    };
    let mut known: Vec<String> =
        entries.iter().filter(|path| is_source(path)).flat_map(|path| tests_in(&read(path))).collect();
    known.extend(entries.iter().filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned())));
    let docs = read(&root.join("docs/checkpoints.md"));
    // The last column of a table.
    let columns = docs.lines().filter(|line| line.starts_with('|')).filter_map(|line| line.rsplit('|').nth(1));
    for name in columns.flat_map(|column| column.split('`').skip(1).step_by(2)) {
        assert!(known.iter().any(|test| test == name), "docs/checkpoints.md: no test {name}");
    }
    for test in own.iter().flat_map(|path| tests_in(&read(path))) {
        let is_own = test == "the_tables_in_the_docs_are_current";
        assert!(is_own || docs.contains(&format!("`{test}`")), "docs/checkpoints.md has no row of {test}");
    }
}
