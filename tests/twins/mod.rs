//! Twins of checkpoints in circulation: small, with their keys, names, types and layout, made from the fixtures.

#![allow(dead_code)] // each test binary uses a part

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use foretoken::checkpoint::Checkpoint;
use foretoken::checkpoint::convert::{Outtype, ToGgufOptions, to_gguf};
use foretoken::checkpoint::gguf::{Gguf, Value as GgufValue};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::gguf_writer::*;

/// The tensors of a safetensors file by name.
pub type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// A copy of a fixture's pair, to be changed.
pub struct Twin {
    directory: TempDir,
}

impl Twin {
    pub fn of(fixture: &str) -> Self {
        let case = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(fixture);
        let directory = tempfile::tempdir().expect("a directory");
        for part in ["target", "assistant"] {
            let to = directory.path().join(part);
            std::fs::create_dir(&to).expect("a directory");
            for file in ["config.json", "generation_config.json", "model.safetensors"] {
                std::fs::copy(case.join(part).join(file), to.join(file)).expect("a copy");
            }
        }
        Self { directory }
    }

    pub fn path(&self, file: &str) -> PathBuf {
        self.directory.path().join(file)
    }

    pub fn write(&self, file: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(file);
        std::fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
        std::fs::write(&path, content).expect("a file");
        path
    }

    /// Changes a JSON file.
    pub fn json(&self, file: &str, change: impl FnOnce(&mut Value)) {
        let mut content: Value =
            serde_json::from_slice(&std::fs::read(self.path(file)).expect("a file")).expect("JSON");
        change(&mut content);
        self.write(file, content.to_string());
    }

    /// Changes the tensors of a safetensors file.
    pub fn tensors(&self, file: &str, change: impl FnOnce(&mut Tensors)) {
        let mut tensors = self.read_tensors(file);
        change(&mut tensors);
        self.write_tensors(file, &tensors);
    }

    fn read_tensors(&self, file: &str) -> Tensors {
        let bytes = std::fs::read(self.path(file)).expect("a file");
        let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
        (tensors.tensors().into_iter())
            .map(|(name, tensor)| (name, (tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec())))
            .collect()
    }

    fn write_tensors(&self, file: &str, tensors: &Tensors) {
        let views = tensors.iter().map(|(name, (dtype, shape, data))| {
            (name, TensorView::new(*dtype, shape.clone(), data).expect("a tensor"))
        });
        self.write(file, safetensors::serialize(views, None).expect("safetensors"));
    }

    /// One part as a GGUF file of floats in llama.cpp's layout, to be changed and written.
    pub fn gguf(&self, part: &str) -> GgufFile {
        let path = self.path("converted.gguf");
        let options = ToGgufOptions { outtype: Outtype::F32, ..ToGgufOptions::default() };
        to_gguf(&Checkpoint::open(self.path(part)).expect("the part"), &path, &options).expect("a GGUF file");
        let file = written(&Gguf::open(&path).expect("the file"));
        std::fs::remove_file(path).expect("it was there");
        file
    }
}

/// The file as a writer has it.
pub fn written(gguf: &Gguf) -> GgufFile {
    let mut file = GgufFile::new();
    for key in gguf.keys() {
        file = file.key(key, raw(gguf.metadata(key).expect("a value")));
    }
    for info in gguf.tensors() {
        let tensor = gguf.tensor(info.name()).expect("readable").expect("there");
        file = file.tensor(info.name(), &tensor.shape, tensor.type_id, tensor.bytes.as_slice().to_vec());
    }
    file
}

fn raw(value: GgufValue<'_>) -> Raw {
    match value {
        GgufValue::U32(x) => Raw(4, x.to_le_bytes().to_vec()),
        GgufValue::I32(x) => Raw(5, x.to_le_bytes().to_vec()),
        GgufValue::F32(x) => Raw(6, x.to_le_bytes().to_vec()),
        GgufValue::Bool(x) => bool_value(x),
        GgufValue::String(text) => str_value(text),
        GgufValue::Array(values) => array(&values.iter().map(raw).collect::<Vec<_>>()),
        other => panic!("the converter writes no {other:?}"),
    }
}

/// Changes of a GGUF file.
pub trait Change {
    fn with(self, key: &str, value: Raw) -> Self;
    fn without(self, key: &str) -> Self;
    fn architecture(self, name: &str) -> Self;
    fn renamed(self, from: &str, to: &str) -> Self;
    fn dropped(self, tensor: &str) -> Self;
}

impl Change for GgufFile {
    /// The key with this value.
    fn with(self, key: &str, value: Raw) -> Self {
        self.without(key).key(key, value)
    }

    fn without(mut self, key: &str) -> Self {
        self.keys.retain(|(name, _)| name != key.as_bytes());
        self
    }

    /// The same keys under another architecture.
    fn architecture(mut self, name: &str) -> Self {
        let old = self.keys.iter().find(|(key, _)| key == b"general.architecture").expect("an architecture");
        let old = format!("{}.", std::str::from_utf8(&old.1.1[8..]).expect("a name"));
        for (key, _) in &mut self.keys {
            let text = std::str::from_utf8(key).expect("a key").to_owned();
            if let Some(rest) = text.strip_prefix(&old) {
                *key = format!("{name}.{rest}").into_bytes();
            }
        }
        self.with("general.architecture", str_value(name))
    }

    fn renamed(mut self, from: &str, to: &str) -> Self {
        let found = self.tensors.iter_mut().find(|tensor| tensor.name == from.as_bytes());
        found.unwrap_or_else(|| panic!("no tensor {from}")).name = to.into();
        self
    }

    fn dropped(mut self, tensor: &str) -> Self {
        let before = self.tensors.len();
        self.tensors.retain(|one| one.name != tensor.as_bytes());
        assert_eq!(self.tensors.len() + 1, before, "no tensor {tensor}");
        self
    }
}

/// A vocabulary of 512 tokens with Gemma 4's control tokens, newline runs and `</s>` under their own ids.
pub struct Vocabulary {
    pub tokens: Vec<String>,
    pub merges: Vec<(String, String)>,
}

/// Ids and names of the control tokens.
pub const CONTROL: [(usize, &str); 18] = [
    (0, "<pad>"),
    (1, "<eos>"),
    (2, "<bos>"),
    (3, "<unk>"),
    (4, "<mask>"),
    (46, "<|tool>"),
    (47, "<tool|>"),
    (48, "<|tool_call>"),
    (49, "<tool_call|>"),
    (50, "<|tool_response>"),
    (51, "<tool_response|>"),
    (52, "<|\"|>"),
    (98, "<|think|>"),
    (100, "<|channel>"),
    (101, "<channel|>"),
    (105, "<|turn>"),
    (106, "<turn|>"),
    (500, "<|image|>"),
];

/// The id of `</s>`, of the first newline run and of the token of byte 0.
pub const STRIKE_END: usize = 212;
pub const NEWLINE: usize = 107;
pub const BYTES: usize = 238;

impl Vocabulary {
    pub fn new() -> Self {
        let mut tokens = vec![String::new(); 512];
        CONTROL.iter().for_each(|(id, name)| tokens[*id] = (*name).into());
        (1..=3).for_each(|run| tokens[NEWLINE + run - 1] = "\n".repeat(run));
        tokens[STRIKE_END] = "</s>".into();
        (0..256).for_each(|byte| tokens[BYTES + byte] = format!("<0x{byte:02X}>"));
        let pairs =
            [("t", "h"), ("th", "e"), ("\u{2581}", "the"), ("i", "n"), ("e", "r"), ("\n", "\n"), ("\n\n", "\n")];
        let merges: Vec<_> = pairs.iter().map(|(left, right)| ((*left).to_owned(), (*right).to_owned())).collect();
        let merged = merges.iter().map(|(left, right)| format!("{left}{right}")).filter(|token| !token.contains('\n'));
        let characters = ('!'..='~').chain(['\u{2581}']).map(String::from);
        let mut pieces = characters.chain(merged.collect::<Vec<_>>());
        for (id, token) in tokens.iter_mut().enumerate().filter(|(_, token)| token.is_empty()) {
            *token = pieces.next().unwrap_or_else(|| format!("[PAD{id}]"));
        }
        assert!(pieces.next().is_none(), "too many pieces");
        Self { tokens, merges }
    }

    pub fn id(&self, token: &str) -> u32 {
        self.tokens.iter().position(|other| other == token).unwrap_or_else(|| panic!("no token {token:?}")) as u32
    }

    /// The ids of the characters of `text`, one by one.
    pub fn spelled(&self, text: &str) -> Vec<u32> {
        text.chars().map(|c| self.id(&c.to_string())).collect()
    }

    /// tokenizer.json, with this post-processor.
    pub fn json(&self, post_processor: Value) -> String {
        let added = CONTROL.iter().map(|(id, name)| (*id, *name, true)).chain([(STRIKE_END, "</s>", false)]);
        let added: Vec<_> = added
            .map(|(id, content, special)| {
                json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": special})
            })
            .collect();
        let vocabulary: serde_json::Map<_, _> =
            self.tokens.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect();
        json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"},
            "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
                "invert": false},
            "post_processor": post_processor,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"}]},
            "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
                "vocab": vocabulary, "merges": self.merges},
        })
        .to_string()
    }

    /// The types of the tokens; those in `normal` are marked normal.
    fn kinds(&self, normal: &[usize]) -> Raw {
        let kind = |(id, token): (usize, &String)| match token {
            _ if normal.contains(&id) => 1,
            _ if [49, 51, 52, 100, 101].contains(&id) => 4, // as llama.cpp's converter
            _ if CONTROL.iter().any(|(control, _)| *control == id) => 3,
            _ if id == STRIKE_END => 4,
            token if token.starts_with("[PAD") => 5,
            token if token.starts_with("<0x") => 6,
            _ => 1i32,
        };
        array(&self.tokens.iter().enumerate().map(|at| Raw(5, kind(at).to_le_bytes().to_vec())).collect::<Vec<_>>())
    }

    /// The file with this tokenizer; tokens in `normal` are marked normal.
    pub fn in_gguf(&self, file: GgufFile, model: &str, normal: &[usize]) -> GgufFile {
        let merges = self.merges.iter().map(|(left, right)| format!("{left} {right}"));
        file.with("tokenizer.ggml.model", str_value(model))
            .with("tokenizer.ggml.tokens", strings(&self.tokens))
            .with("tokenizer.ggml.scores", array(&vec![f32_value(-1000.0); self.tokens.len()]))
            .with("tokenizer.ggml.token_type", self.kinds(normal))
            .with("tokenizer.ggml.merges", strings(merges))
            .with("tokenizer.ggml.bos_token_id", u32_value(2))
            .with("tokenizer.ggml.eos_token_id", u32_value(106))
            .with("tokenizer.ggml.unknown_token_id", u32_value(3))
    }
}
