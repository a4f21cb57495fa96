//! Sound checkpoints pass, and each planted defect is found, with the tensor or field and the remedy.

mod cases;

use std::path::{Path, PathBuf};

use foretoken::checkpoint::Checkpoint;
use foretoken::checkpoint::convert::{Outtype, ToGgufOptions, to_gguf};
use foretoken::checkpoint::gguf::{Gguf, GgufWriter};
use foretoken::verify::{Finding, Outcome, Part, VerifyOptions, verify};

/// A pair of GGUF files, to plant defects in.
struct Pair {
    directory: tempfile::TempDir,
}

/// A tensor being copied.
struct Tensor {
    type_id: u32,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Pair {
    fn of(fixture: &str) -> Self {
        let pair = Self { directory: tempfile::tempdir().expect("a directory") };
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(fixture);
        for part in ["target", "assistant"] {
            let source = Checkpoint::open(fixture.join(part)).expect("the fixture");
            let options = ToGgufOptions { outtype: Outtype::F32, ..ToGgufOptions::default() };
            to_gguf(&source, pair.path(part), &options).expect("a file");
        }
        pair
    }

    fn path(&self, part: &str) -> PathBuf {
        self.directory.path().join(format!("{part}.gguf"))
    }

    /// Copies a part, with other keys and with every tensor as changed by `change`.
    fn plant(&self, part: &str, keys: &[(&str, u32)], change: &mut dyn FnMut(&str, &mut Tensor) -> bool) {
        let path = self.path(part);
        let source = Gguf::open(&path).expect("a file");
        let mut file = GgufWriter::create(&path).expect("a writer");
        for key in source.keys() {
            match keys.iter().find(|(other, _)| *other == key) {
                Some((_, value)) => file.value(key, *value).expect("a key"),
                None => file.copy(key, source.metadata(key).expect("a value")).expect("a key"),
            }
        }
        let mut tensors = Vec::new();
        for info in source.tensors() {
            let bytes = source.tensor(info.name()).expect("readable").expect("there").bytes.as_slice().to_vec();
            let mut tensor = Tensor { type_id: info.type_id(), shape: info.shape().to_vec(), bytes };
            if change(info.name(), &mut tensor) {
                file.tensor(info.name(), tensor.type_id, &tensor.shape).expect("a tensor");
                tensors.push((info.name(), tensor));
            }
        }
        let mut file = file.begin().expect("the tensors");
        tensors.iter().for_each(|(name, tensor)| file.write(name, &tensor.bytes).expect("written"));
        file.finish().expect("a file");
    }

    fn verify(&self) -> Vec<Finding> {
        of(&self.path("target"), &self.path("assistant"))
    }
}

fn of(target: &Path, assistant: &Path) -> Vec<Finding> {
    verify(&VerifyOptions {
        target: Some(target.into()),
        assistant: Some(assistant.into()),
        ..VerifyOptions::default()
    })
}

fn failures(findings: &[Finding]) -> Vec<String> {
    let failed = findings.iter().filter(|finding| finding.outcome == Outcome::Failed);
    failed.map(|finding| format!("{:?} {}: {}", finding.part, finding.check, finding.detail)).collect()
}

#[test]
fn what_is_sound_passes() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo");
    let findings = of(&demo.join("target"), &demo.join("assistant"));
    assert_eq!(failures(&findings), [""; 0]);
    let accepted = findings.iter().find(|finding| finding.check == "acceptance").expect("a run with drafts");
    assert_eq!((accepted.part, accepted.outcome), (Part::Pair, Outcome::Passed), "{}", accepted.detail);
    for case in cases::all().iter().filter(|case| case.assistant_path().is_some()) {
        let findings = of(&case.path.join("target"), &case.path.join("assistant"));
        assert_eq!(failures(&findings), [""; 0], "{}", case.name);
        assert!(findings.iter().any(|finding| finding.check == "smoke run"), "{}", case.name);
    }
    assert_eq!(failures(&Pair::of("nested").verify()), [""; 0]);
}

type Defect = (&'static str, fn(&Pair), &'static [&'static str]);

fn keep(_: &str, _: &mut Tensor) -> bool {
    true
}

fn change(pair: &Pair, part: &str, tensor: &'static str, with: fn(&mut Tensor)) {
    let mut found = false;
    pair.plant(part, &[], &mut |name, tensor_of_file| {
        if name == tensor {
            with(tensor_of_file);
            found = true;
        }
        true
    });
    assert!(found, "no tensor {tensor}");
}

const DEFECTS: [Defect; 15] = [
    (
        "a truncated file",
        |pair| {
            let bytes = std::fs::read(pair.path("target")).expect("a file");
            std::fs::write(pair.path("target"), &bytes[..bytes.len() - 4096]).expect("written");
        },
        &["tensor", "does not end inside the file", "download the file again"],
    ),
    (
        "a missing tensor",
        |pair| pair.plant("target", &[], &mut |name, _| name != "blk.1.ffn_up.weight"),
        &["layers.1.mlp.up_proj.weight", "is missing", "convert the checkpoint again"],
    ),
    (
        "a tensor of another shape",
        |pair| {
            change(pair, "target", "blk.0.attn_q.weight", |tensor| {
                tensor.shape[0] /= 2;
                tensor.bytes.truncate(tensor.bytes.len() / 2);
            });
        },
        &["layers.0.self_attn.q_proj.weight", "has shape [64, 64]", "convert the checkpoint again"],
    ),
    (
        "a value that is no number",
        |pair| {
            change(pair, "target", "blk.2.ffn_gate.weight", |tensor| {
                tensor.bytes[400..404].copy_from_slice(&f32::NAN.to_le_bytes());
            });
        },
        &["layers.2.mlp.gate_proj.weight", "NaN or infinity", "download or convert the checkpoint again"],
    ),
    (
        "a norm of zeros",
        |pair| change(pair, "target", "output_norm.weight", |tensor| tensor.bytes.fill(0)),
        &["norm.weight", "is all zeros", "download or convert the checkpoint again"],
    ),
    (
        "a quantized norm",
        |pair| {
            change(pair, "target", "blk.0.attn_norm.weight", |tensor| {
                (tensor.type_id, tensor.bytes) = (8, vec![1; 68]);
            });
        },
        &["layers.0.input_layernorm.weight", "is q8_0, must be floating point", "again"],
    ),
    (
        "another rotation",
        |pair| change(pair, "target", "rope_freqs.weight", |tensor| tensor.bytes.fill(0)),
        &["rope_freqs.weight", "as in Gemma 4", "convert the checkpoint again"],
    ),
    (
        "an ordering of zeros",
        |pair| change(pair, "assistant", "masked_embd_ordering", |tensor| tensor.bytes.fill(0)),
        &["masked_embedding.token_ordering", "is all zeros", "convert the assistant again"],
    ),
    (
        "an ordering that repeats a token",
        |pair| change(pair, "assistant", "masked_embd_ordering", |tensor| tensor.bytes.copy_within(0..4, 8)),
        &["masked_embedding.token_ordering", "is not a permutation", "convert the assistant again"],
    ),
    (
        "an ordering in floating point",
        |pair| change(pair, "assistant", "masked_embd_ordering", |tensor| tensor.type_id = 0),
        &["masked_embedding.token_ordering", "is f32, not I64 or I32", "convert the assistant again"],
    ),
    (
        "another backbone width than the projection's",
        |pair| pair.plant("assistant", &[("gemma4-assistant.embedding_length_out", 32)], &mut keep),
        &["gemma4-assistant.embedding_length_out", "is 32", "not twice that"],
    ),
    (
        "the target's embedding in the assistant",
        |pair| {
            change(pair, "assistant", "token_embd.weight", |tensor| {
                tensor.shape[1] *= 2;
                tensor.bytes = [&tensor.bytes[..], &tensor.bytes].concat();
            });
        },
        &["model.embed_tokens.weight", "a bug of an old converter", "convert the assistant again"],
    ),
    (
        "another vocabulary",
        |pair| {
            pair.plant("assistant", &[], &mut |name, tensor| {
                if name == "token_embd.weight" {
                    tensor.shape[0] /= 2;
                    tensor.bytes.truncate(tensor.bytes.len() / 2);
                }
                !name.starts_with("masked_embd")
            });
        },
        &["its vocab_size is 256, the target's is 512", "load the assistant published for this target"],
    ),
    (
        "another window",
        |pair| pair.plant("assistant", &[("gemma4-assistant.attention.sliding_window", 5)], &mut keep),
        &["its sliding_window is 5, the target's 8", "load the assistant published for this target"],
    ),
    (
        "the assistant of another target",
        |pair| {
            let other = Pair::of("dense");
            std::fs::copy(other.path("assistant"), pair.path("assistant")).expect("copied");
        },
        &["the assistant does not fit the target", "K/V heads", "load the assistant published"],
    ),
];

#[test]
fn every_planted_defect_is_found() {
    for (what, plant, said) in DEFECTS {
        let pair = Pair::of("nested");
        plant(&pair);
        let failures = failures(&pair.verify());
        let found = failures.iter().any(|failure| said.iter().all(|part| failure.contains(part)));
        assert!(found, "{what}: {failures:#?} does not say {said:?}");
        assert!(failures.iter().all(|failure| !failure.contains('\n')), "{what}: {failures:#?}");
    }
}

/// Not that the model itself is not implemented.
#[test]
fn a_family_without_assistants_refuses_one() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("models");
    let failures = failures(&of(&models.join("demo-qwen"), &models.join("demo/assistant")));
    let fit = failures.iter().find(|failure| failure.contains(" fit: ")).expect("a misfit");
    assert!(fit.contains("assistant: is not implemented for qwen3_5_text; omit it"), "{fit}");
}

/// As its loader does: a directory without the head is not sound, whatever other tables it has.
#[test]
fn an_untied_assistant_needs_its_head() {
    let directory = tempfile::tempdir().expect("a directory");
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/nested/assistant");
    std::fs::copy(fixture.join("model.safetensors"), directory.path().join("model.safetensors")).expect("a copy");
    let config = std::fs::read(fixture.join("config.json")).expect("the fixture");
    let mut config: serde_json::Value = serde_json::from_slice(&config).expect("JSON");
    config["tie_word_embeddings"] = false.into();
    std::fs::write(directory.path().join("config.json"), config.to_string()).expect("written");
    let assistant = Some(directory.path().to_owned());
    let failures = failures(&verify(&VerifyOptions { assistant, ..VerifyOptions::default() }));
    let [failure] = &failures[..] else { panic!("{failures:?}") };
    assert!(failure.contains("lm_head.weight") && failure.contains("is missing"), "{failure}");
}

/// All defects are listed, not only the first.
#[test]
fn several_defects_are_all_found() {
    let pair = Pair::of("nested");
    pair.plant("target", &[], &mut |name, _| !["blk.1.ffn_up.weight", "blk.3.attn_q.weight"].contains(&name));
    change(&pair, "assistant", "masked_embd_ordering", |tensor| tensor.bytes.fill(0));
    assert_eq!(failures(&pair.verify()).len(), 3);
}
