//! Headers as gguf-rs 0.1.8 reads them: names, offsets, shapes, metadata without floats.
//!
//! Only where gguf-rs is sound: it gets the sizes of BF16, IQ4_NL, MXFP4, Q8_1 and the integer types wrong, panics on
//! NVFP4, and cuts arrays to three elements unless told otherwise.
//!
//! `FORETOKEN_GGUF_RS` is the program that `cargo build --manifest-path oracle/Cargo.toml` builds; skipped without it.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::Command;

use foretoken::checkpoint::gguf::Gguf;
use serde_json::Value;

use crate::gguf_writer::*;
use crate::skipped;

fn file(version: u32) -> GgufFile {
    let mut file = GgufFile::new()
        .key("general.architecture", str_value("gemma4"))
        .key("general.name", str_value("größe"))
        .key("u8", Raw(0, vec![200]))
        .key("i16", Raw(3, (-3i16).to_le_bytes().to_vec()))
        .key("u32", u32_value(4_000_000_000))
        .key("bool", bool_value(true))
        .key("u64", Raw(10, (1u64 << 60).to_le_bytes().to_vec()))
        .key("tokens", strings((0..1000).map(|i| format!("token {i}"))))
        .floats("vector", &[3], &[1.0, 2.0, 3.0])
        .tensor("q8_0", &[2, 64], 8, (0..136).collect())
        .tensor("q4_k", &[2, 3, 256], 12, vec![7; 6 * 144])
        .floats("matrix", &[2, 5], &[0.5; 10]);
    file.version = version;
    file
}

/// What gguf-rs reads.
fn header(program: &Path, path: &Path) -> Value {
    let output = Command::new(program).arg(path).output().expect("FORETOKEN_GGUF_RS names the oracle's program");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let headers: Vec<Value> = serde_json::from_slice(&output.stdout).expect("a list of headers");
    headers.into_iter().next().expect("a header")
}

fn compare(program: &Path, path: &Path) {
    let own = Gguf::open(path).expect("a valid file");
    let other = header(program, path);
    let number = |of: &Value, key: &str| of[key].as_u64().unwrap_or_else(|| panic!("{key} of {of}"));
    let tensors = other["tensors"].as_array().expect("tensors");
    assert_eq!(own.tensors().len(), tensors.len());
    let mut file = File::open(path).expect("the file");
    for (info, other_info) in own.tensors().zip(tensors) {
        let (name, kind) = (info.name(), number(other_info, "type"));
        assert_eq!(other_info["name"], *name);
        assert_eq!(u64::from(info.type_id()), kind, "{name}");
        let shape: Vec<_> = info.shape().iter().rev().copied().collect();
        assert_eq!(other_info["shape"], Value::from(shape), "{name}");
        if [0, 8, 12, 14].contains(&kind) {
            assert_eq!(info.len_bytes().map(|len| len as u64), other_info["size"].as_u64(), "{name}");
        }
        if info.len_bytes().is_some() {
            let tensor = own.tensor(name).expect("readable").expect("there");
            let mut bytes = vec![0; tensor.bytes.as_slice().len().min(1 << 16)];
            let at = number(&other, "data_offset") + number(other_info, "offset");
            file.seek(SeekFrom::Start(at)).expect("an offset");
            file.read_exact(&mut bytes).expect("bytes");
            assert!(tensor.bytes.as_slice().starts_with(&bytes), "{name}");
        }
    }
    for (key, value) in other["metadata"].as_object().expect("metadata") {
        let own = own.metadata(key).unwrap_or_else(|| panic!("{key} is missing"));
        match value {
            Value::String(text) => assert_eq!(own.as_str(), Some(&**text), "{key}"),
            Value::Number(number) if number.is_u64() => assert_eq!(own.as_u64(), number.as_u64(), "{key}"),
            Value::Bool(flag) => assert_eq!(own.as_bool(), Some(*flag), "{key}"),
            Value::Array(items) => {
                let own = own.as_array().expect("an array");
                assert_eq!(own.len(), items.len(), "{key}");
                if let Some(strings) = own.strings() {
                    assert!(strings.zip(items).all(|(own, item)| item.as_str() == Some(own)), "{key}");
                }
            }
            _ => {}
        }
    }
}

/// The oracle's program; `None` if there is none: the test is skipped.
fn program() -> Option<PathBuf> {
    let program = std::env::var_os("FORETOKEN_GGUF_RS").map(Into::into);
    if program.is_none() {
        skipped::skipped("gguf-rs", "FORETOKEN_GGUF_RS names no program; build oracle/Cargo.toml");
    }
    program
}

#[test]
fn small_files_read_alike() {
    let Some(program) = program() else { return };
    for version in [2, 3] {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("small.gguf");
        std::fs::write(&path, file(version).bytes()).expect("written");
        compare(&program, &path);
    }
}

/// `FORETOKEN_GGUF=FILE[:FILE...]`: real files.
#[test]
#[ignore = "FORETOKEN_GGUF names the files"]
fn given_files_read_alike() {
    let Some(program) = program() else { return };
    let files = std::env::var_os("FORETOKEN_GGUF").expect("FORETOKEN_GGUF names files");
    std::env::split_paths(&files).for_each(|file| compare(&program, &file));
}
