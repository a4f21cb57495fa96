//! Headers as gguf-rs 0.1.8 reads them: names, offsets, shapes and scalar metadata.
//!
//! Only where gguf-rs is sound: it gets the sizes of BF16, IQ4_NL, MXFP4, Q8_1 and the integer types wrong, panics on
//! NVFP4, and cuts arrays to three elements unless told otherwise.

#[path = "../../tests/gguf_writer/mod.rs"]
mod gguf_writer;

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

use foretoken::checkpoint::gguf::Gguf;
use gguf_writer::*;

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

fn compare(path: &std::path::Path) {
    let own = Gguf::open(path).expect("a valid file");
    let path = path.to_str().expect("a path in UTF-8");
    let other = gguf_rs::get_gguf_container_array_size(path, u64::MAX).expect("a container").decode().expect("a model");
    assert_eq!(own.tensors().len(), other.tensors().len());
    for (info, other) in own.tensors().zip(other.tensors()) {
        assert_eq!(info.name(), other.name);
        assert_eq!(info.type_id(), other.kind);
        let shape: Vec<u64> = info.shape().iter().rev().map(|size| *size as u64).collect();
        assert_eq!(shape, other.shape[..other.n_dimensions as usize]);
        if [0, 8, 12, 14].contains(&other.kind) {
            assert_eq!(info.len_bytes().map(|len| len as u64), Some(other.size), "{}", other.name);
        }
    }
    let data_offset = other.data_offset();
    let mut file = File::open(path).expect("the file");
    for (info, other) in own.tensors().zip(other.tensors()).filter(|(info, _)| info.len_bytes().is_some()) {
        let tensor = own.tensor(info.name()).expect("readable").expect("there");
        let mut bytes = vec![0; tensor.bytes.as_slice().len().min(1 << 16)];
        file.seek(SeekFrom::Start(data_offset + other.offset)).expect("an offset");
        file.read_exact(&mut bytes).expect("bytes");
        assert!(tensor.bytes.as_slice().starts_with(&bytes), "{}", other.name);
    }
    for (key, value) in other.metadata() {
        let own = own.metadata(key).unwrap_or_else(|| panic!("{key} is missing"));
        if let Some(text) = value.as_str() {
            assert_eq!(own.as_str(), Some(text), "{key}");
        } else if let Some(number) = value.as_u64() {
            assert_eq!(own.as_u64(), Some(number), "{key}");
        } else if let Some(flag) = value.as_bool() {
            assert_eq!(own.as_bool(), Some(flag), "{key}");
        } else if let Some(items) = value.as_array() {
            let own = own.as_array().expect("an array");
            assert_eq!(own.len(), items.len(), "{key}");
            if let Some(strings) = own.strings() {
                assert!(strings.zip(items).all(|(own, item)| item.as_str() == Some(own)), "{key}");
            }
        }
    }
}

#[test]
fn small_files_read_alike() {
    for version in [2, 3] {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("small.gguf");
        std::fs::write(&path, file(version).bytes()).expect("written");
        compare(&path);
    }
}

/// `FORETOKEN_GGUF=FILE[:FILE...]`: real files.
#[test]
fn given_files_read_alike() {
    let files = std::env::var("FORETOKEN_GGUF").unwrap_or_default();
    files.split(':').filter(|file| !file.is_empty()).for_each(|file| compare(file.as_ref()));
}
