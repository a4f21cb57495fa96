//! The GGUF reader: written files are read back, and no file, however wrong, causes more than an error.

mod gguf_rs;
#[path = "../gguf_writer/mod.rs"]
mod gguf_writer;
#[path = "../../kernels/tests/skipped/mod.rs"]
mod skipped;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::{Path, PathBuf};

use foretoken::Error;
use foretoken::checkpoint::Checkpoint;
use foretoken::checkpoint::gguf::{self, GgmlType, Gguf, Value, ValueType, gguf_names, hugging_face_name};
use foretoken::gemma4::{AttentionType, TextConfig};
use foretoken::tokenizer::Tokenizer;
use gguf_writer::*;

/// Counts the bytes that a thread allocates, to test that no unchecked length is allocated.
struct Counting;

thread_local! {
    static ALLOCATED: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: all calls are forwarded to `System`; the counter is a constant-initialized thread-local without destructor,
// which does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.set(ALLOCATED.get().saturating_add(layout.size()));
        // SAFETY: the caller's contract is that of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is that of `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs `f` and returns the total bytes it allocated.
fn allocated<T>(f: impl FnOnce() -> T) -> (T, usize) {
    let before = ALLOCATED.get();
    let result = f();
    (result, ALLOCATED.get() - before)
}

/// Every metadata type, arrays, nested arrays, tensors of several types and dimensions.
fn sample() -> GgufFile {
    let nested = array(&[array(&[u32_value(1), u32_value(2)]), array(&[u32_value(3)])]);
    GgufFile::new()
        .key("general.architecture", str_value("test"))
        .key("u8", Raw(0, vec![200]))
        .key("i8", Raw(1, vec![0xfe]))
        .key("u16", Raw(2, 60_000u16.to_le_bytes().to_vec()))
        .key("i16", Raw(3, (-3i16).to_le_bytes().to_vec()))
        .key("u32", u32_value(4_000_000_000))
        .key("i32", Raw(5, (-5i32).to_le_bytes().to_vec()))
        .key("f32", f32_value(1e-6))
        .key("bool", bool_value(true))
        .key("string", str_value("größe"))
        .key("strings", strings(["a", "", "▁bc"]))
        .key("bools", array(&[bool_value(true), bool_value(false)]))
        .key("nested", nested)
        .key("empty", raw_array(8, 0, &[]))
        .key("u64", Raw(10, u64::MAX.to_le_bytes().to_vec()))
        .key("i64", Raw(11, i64::MIN.to_le_bytes().to_vec()))
        .key("f64", Raw(12, 0.1f64.to_le_bytes().to_vec()))
        .floats("vector", &[3], &[1.0, 2.0, 3.0])
        .tensor("q8_0", &[2, 64], 8, (0..136).collect())
        .tensor("q4_k", &[1, 2, 3, 256], 12, vec![7; 6 * 144])
        .tensor("bf16", &[5], 30, (0..10).collect())
}

/// Reads everything that can be read.
fn touch(gguf: &Gguf) -> usize {
    fn walk(value: Value<'_>) -> usize {
        value.as_array().map_or(1, |array| array.iter().map(walk).sum::<usize>() + 1)
    }
    let metadata: usize = gguf.keys().filter_map(|key| gguf.metadata(key)).map(walk).sum();
    let tensors = gguf.tensors().filter_map(|info| gguf.tensor(info.name()).ok().flatten());
    metadata + tensors.map(|tensor| tensor.bytes.as_slice().iter().filter(|byte| **byte > 0).count()).sum::<usize>()
}

#[test]
fn what_is_written_is_read() {
    for version in [2, 3] {
        let mut file = sample();
        file.version = version;
        let gguf = Gguf::from_bytes(file.bytes()).expect("a valid file");
        assert_eq!(gguf.version(), version);
        let get = |key| gguf.metadata(key).unwrap_or_else(|| panic!("{key} is missing"));
        assert_eq!(get("u8"), Value::U8(200));
        assert_eq!(get("i8"), Value::I8(-2));
        assert_eq!(get("u16"), Value::U16(60_000));
        assert_eq!(get("i16"), Value::I16(-3));
        assert_eq!(get("u32").as_u64(), Some(4_000_000_000));
        assert_eq!((get("i32"), get("i32").as_u64()), (Value::I32(-5), None));
        assert_eq!(get("f32").as_f64(), Some(1e-6));
        assert_eq!(get("bool").as_bool(), Some(true));
        assert_eq!(get("string").as_str(), Some("größe"));
        assert_eq!(get("u64").as_u64(), Some(u64::MAX));
        assert_eq!(get("i64"), Value::I64(i64::MIN));
        assert_eq!(get("f64").as_f64(), Some(0.1));
        assert_eq!(gguf.metadata("absent"), None);
        let strings = get("strings").as_array().expect("an array");
        assert_eq!((strings.element(), strings.len()), (ValueType::String, 3));
        assert_eq!(strings.strings().expect("of strings").collect::<Vec<_>>(), ["a", "", "▁bc"]);
        let bools = get("bools").as_array().expect("an array");
        assert!(bools.strings().is_none());
        assert_eq!(bools.iter().filter_map(Value::as_bool).collect::<Vec<_>>(), [true, false]);
        assert!(get("empty").as_array().expect("an array").is_empty());
        let nested = get("nested").as_array().expect("an array").iter().filter_map(Value::as_array);
        let nested: Vec<Vec<_>> = nested.map(|inner| inner.iter().filter_map(Value::as_u64).collect()).collect();
        assert_eq!(nested, [vec![1, 2], vec![3]]);

        assert_eq!(gguf.tensors().len(), file.tensors.len());
        for (written, info) in file.tensors.iter().zip(gguf.tensors()) {
            let tensor = gguf.tensor(info.name()).expect("a readable tensor").expect("the tensor");
            assert_eq!(tensor.shape.iter().map(|size| *size as u64).collect::<Vec<_>>(), written.shape);
            assert_eq!((tensor.type_id, tensor.bytes.as_slice()), (written.type_id, &written.bytes[..]));
        }
        assert!(gguf.tensor("absent").expect("no error").is_none());
    }
}

#[test]
fn another_alignment_is_honoured() {
    let mut file = sample().key("general.alignment", u32_value(128));
    file.alignment = 128;
    let gguf = Gguf::from_bytes(file.bytes()).expect("a valid file");
    let tensor = gguf.tensor("bf16").expect("readable").expect("there");
    assert_eq!(tensor.bytes.as_slice(), (0..10).collect::<Vec<u8>>());
}

#[test]
fn published_types_have_their_sizes() {
    // Elements and bytes per block, from ggml-common.h.
    let known =
        [(0, 1, 4), (8, 32, 34), (9, 32, 36), (12, 256, 144), (14, 256, 210), (30, 1, 2), (39, 32, 17), (40, 64, 36)];
    for (id, block_len, block_bytes) in known {
        let known = GgmlType::from_id(id).expect("a known type");
        assert_eq!((known.block_len, known.block_bytes), (block_len, block_bytes), "{}", known.name);
    }
    assert_eq!((0..1000).filter(|id| GgmlType::from_id(*id).is_some()).count(), 34);
    for taken_back in [4, 5, 31, 36, 37] {
        assert!(GgmlType::from_id(taken_back).is_none());
    }
}

/// Checks for a one-line error that contains `what`.
#[track_caller]
fn refused(bytes: Vec<u8>, what: &str) {
    let len = bytes.len();
    let (result, allocated) = allocated(|| Gguf::from_bytes(bytes).err());
    let message = result.unwrap_or_else(|| panic!("accepted; {what:?} was expected")).to_string();
    assert!(message.contains(what), "{message:?} does not say {what:?}");
    assert!(!message.contains('\n') && message.len() < 600, "{message:?} is not one line");
    assert!(allocated < 64 * len + 4096, "{allocated} bytes allocated for a file of {len}");
}

#[test]
fn a_file_cut_short_anywhere_is_an_error() {
    let bytes = sample().bytes();
    for len in 0..bytes.len() {
        refused(bytes[..len].to_vec(), "");
    }
}

/// Changes every byte of the header: an error or another valid file, but no panic and no large allocation.
#[test]
fn a_flipped_byte_does_no_harm() {
    let file = sample();
    let (bytes, header) = (file.bytes(), file.header().len());
    for at in 0..header {
        for mask in [0x01, 0x04, 0x10, 0x40, 0x80, 0xff] {
            let mut bytes = bytes.clone();
            bytes[at] ^= mask;
            let limit = 64 * bytes.len();
            let (_, allocated) = allocated(|| Gguf::from_bytes(bytes).map(|gguf| touch(&gguf)));
            assert!(allocated < limit, "byte {at} ^ {mask:#x}: {allocated} bytes allocated");
        }
    }
}

/// Every eight bytes of the header become a huge number.
#[test]
fn a_length_that_overflows_does_no_harm() {
    let file = sample();
    let (bytes, header) = (file.bytes(), file.header().len());
    for at in 0..header - 8 {
        for huge in [u64::MAX, u64::MAX - 31, 1 << 63, 1 << 62, 1 << 40, (u32::MAX as u64) << 32, bytes.len() as u64] {
            let mut bytes = bytes.clone();
            bytes[at..at + 8].copy_from_slice(&huge.to_le_bytes());
            let limit = 64 * bytes.len();
            let (_, allocated) = allocated(|| Gguf::from_bytes(bytes).map(|gguf| touch(&gguf)));
            assert!(allocated < limit, "{huge:#x} at byte {at}: {allocated} bytes allocated");
        }
    }
}

#[test]
fn bad_preambles_are_refused() {
    let with = |at: usize, new: &[u8]| {
        let mut bytes = sample().bytes();
        bytes[at..at + new.len()].copy_from_slice(new);
        bytes
    };
    refused(with(0, b"GGML"), "not a GGUF file (it does not begin with \"GGUF\"); download it again");
    refused(with(0, b"FUGG"), "big-endian");
    refused(with(4, &3u32.to_be_bytes()), "big-endian");
    refused(with(4, &1u32.to_le_bytes()), "version 1");
    refused(with(4, &4u32.to_le_bytes()), "version 4");
    refused(with(8, &u64::MAX.to_le_bytes()), "entries");
    refused(with(16, &u64::MAX.to_le_bytes()), "entries");
    refused(with(16, &100_000u64.to_le_bytes()), "entries");
}

#[test]
fn bad_metadata_are_refused() {
    let key = |key: &[u8], value: Raw| GgufFile::new().key(key, value).bytes();
    refused(GgufFile::new().key("a", u32_value(1)).key("a", u32_value(1)).bytes(), "a: occurs twice");
    refused(key(b"k\xff", u32_value(1)), "is not UTF-8");
    refused(key(b"key", Raw(8, string_bytes(b"v\xff"))), "key: is not UTF-8");
    refused(key(b"key", strings([&b"v"[..], b"\xc3"])), "key: is not UTF-8");
    refused(key(b"key", Raw(13, vec![0; 8])), "unknown type 13");
    refused(key(b"key", raw_array(13, 1, &[0; 8])), "unknown type 13");
    refused(key(b"key", Raw(7, vec![2])), "neither 0 nor 1");
    refused(key(b"key", raw_array(7, 2, &[1, 7])), "neither 0 nor 1");
    refused(key(b"key", Raw(8, u64::MAX.to_le_bytes().to_vec())), "entries");
    for element in 0..13 {
        refused(key(b"key", raw_array(element, u64::MAX, &[0; 64])), "entries");
        refused(key(b"key", raw_array(element, 1 << 61, &[0; 64])), "entries");
    }
    let nested = (0..100_000).fold(raw_array(0, 0, &[]), |inner, _| match inner.1.len() > 4000 {
        true => inner,
        false => array(&[inner]),
    });
    refused(key(b"key", nested), "nested");
    let levels = |count: usize| (1..count).fold(raw_array(0, 0, &[]), |inner, _| array(&[inner]));
    assert!(Gguf::from_bytes(sample().key("levels", levels(4)).bytes()).is_ok());
    refused(key(b"key", levels(5)), "nested more than 4 deep");
    let long = "k".repeat(70_000);
    refused(key(long.as_bytes(), u32_value(1)), "key of 70000 bytes");
    for alignment in
        [u32_value(0), u32_value(3), u32_value(48), str_value("32"), Raw(10, vec![32, 0, 0, 0, 0, 0, 0, 0])]
    {
        refused(key(b"general.alignment", alignment), "general.alignment: is ");
    }
}

#[test]
fn bad_tensors_are_refused() {
    let change = |change: fn(&mut Vec<Written>)| {
        let mut file = sample();
        change(&mut file.tensors);
        file.bytes()
    };
    refused(change(|t| t[1].name = b"vector".to_vec()), "tensor vector: occurs twice");
    refused(change(|t| t[1].name = vec![0xc0]), "is not UTF-8");
    refused(change(|t| t[1].name = vec![b'n'; 70_000]), "name of 70000 bytes");
    refused(change(|t| t[0].shape = vec![1; 5]), "5 dimensions");
    refused(change(|t| t[0].shape = vec![0]), "a dimension of 0");
    refused(change(|t| t[0].shape = vec![3, 0]), "a dimension of 0");
    refused(change(|t| t[0].shape = vec![1 << 32, 1 << 32]), "overflows");
    refused(change(|t| t[0].shape = vec![u64::MAX]), "overflows");
    refused(change(|t| t[0].shape = vec![1 << 61]), "does not end inside");
    refused(change(|t| t[1].shape = vec![2, 63]), "needs a multiple of 32; download or convert the file again");
    refused(change(|t| t[2].shape = vec![6, 128]), "needs a multiple of 256");
    refused(change(|t| t[3].offset = Some(1 << 40)), "does not end inside");
    refused(change(|t| t[3].offset = Some(u64::MAX - 31)), "does not end inside");
    refused(change(|t| t[3].offset = Some(1)), "not a multiple of the alignment 32; download the file again");
    refused(change(|t| t[3].offset = Some(0)), "overlaps tensor");
    refused(change(|t| t[1].shape = vec![3, 64]), "overlaps tensor q8_0");
    refused(change(|t| t[0].type_id = 8), "needs a multiple of 32");
    // An overlap with a tensor of unknown size.
    refused(change(|t| (t[1].type_id, t[1].offset) = (77, Some(0))), "overlaps tensor");
    refused(change(|t| (t[3].type_id, t[3].offset) = (77, Some(1 << 20))), "does not end inside");
}

#[test]
fn an_unknown_type_is_an_error_only_when_the_tensor_is_used() {
    let mut file = sample();
    file.tensors[1].type_id = 77;
    let gguf = Gguf::from_bytes(file.bytes()).expect("a valid file");
    let message = gguf.tensor("q8_0").err().expect("an error").to_string();
    assert!(message.contains("q8_0") && message.contains("type 77"), "{message}");
    assert_eq!(gguf.info("q8_0").and_then(|info| info.len_bytes()), None);
    assert!(gguf.tensor("q4_k").is_ok());
}

#[test]
fn arrays_cost_no_memory() {
    let file = sample()
        .key("tokens", strings((0..300_000).map(|i| format!("token {i}"))))
        .key("kinds", array(&vec![u32_value(1); 300_000]));
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("tokens.gguf");
    std::fs::write(&path, file.bytes()).expect("written");
    let (gguf, opened) = allocated(|| Gguf::open(&path).expect("a valid file"));
    let (count, walked) = allocated(|| touch(&gguf));
    assert!(count > 600_000);
    assert!(opened < 64 << 10 && walked < 64 << 10, "{opened} bytes to open, {walked} to walk");
}

fn split(count: usize, change: impl Fn(usize, GgufFile) -> GgufFile) -> (tempfile::TempDir, Vec<PathBuf>) {
    let directory = tempfile::tempdir().expect("a directory");
    let paths = (0..count).map(|i| {
        let file = GgufFile::new()
            .key("split.no", Raw(2, (i as u16).to_le_bytes().to_vec()))
            .key("split.count", Raw(2, (count as u16).to_le_bytes().to_vec()))
            .key("split.tensors.count", Raw(5, (count as i32).to_le_bytes().to_vec()))
            .floats(&format!("tensor.{i}"), &[2], &[i as f32, 0.5]);
        let file = if i == 0 { file.key("general.architecture", str_value("first")) } else { file };
        let path = directory.path().join(format!("model-{:05}-of-{count:05}.gguf", i + 1));
        std::fs::write(&path, change(i, file).bytes()).expect("written");
        path
    });
    let paths = paths.collect();
    (directory, paths)
}

#[test]
fn split_files_open_from_any_of_them() {
    let (_directory, paths) = split(3, |_, file| file);
    for path in &paths {
        let gguf = Gguf::open(path).expect("a valid checkpoint");
        assert_eq!(gguf.path(), paths[0]);
        assert_eq!(gguf.metadata("general.architecture").and_then(Value::as_str), Some("first"));
        assert_eq!(gguf.tensors().len(), 3);
        for i in 0..3 {
            let tensor = gguf.tensor(&format!("tensor.{i}")).expect("readable").expect("there");
            assert_eq!(tensor.bytes.as_slice()[..4], (i as f32).to_le_bytes());
        }
    }
}

#[test]
fn bad_splits_are_refused() {
    let message = |paths: &[PathBuf]| Gguf::open(&paths[1]).expect_err("an error").to_string();
    let changed = |change: fn(usize, GgufFile) -> GgufFile| {
        let (_directory, paths) = split(3, change);
        message(&paths)
    };
    let (_directory, paths) = split(3, |_, file| file);
    std::fs::remove_file(&paths[2]).expect("removed");
    assert!(message(&paths).contains("model-00003-of-00003.gguf"));
    let renamed = paths[0].with_file_name("renamed.gguf");
    std::fs::rename(&paths[0], &renamed).expect("renamed");
    assert!(message(&[paths[0].clone(), renamed]).contains("NAME-00001-of-00003.gguf"));

    let no = |i: u32| Raw(4, i.to_le_bytes().to_vec());
    // In the files from this one on, a key gets another value.
    let cases = [
        (2, "split.no", no(1), "split.no: is not 2, as the file's name says; restore its name, or download it again"),
        (
            2,
            "split.count",
            no(4),
            "split.count: is not 3, as in the other files of the checkpoint; download the files again",
        ),
        (0, "split.tensors.count", no(4), "split.tensors.count: is 4"),
        (0, "split.count", Raw(10, vec![255; 8]), "split.count: is 1844"),
    ];
    for (from, key, value, what) in cases {
        let (_directory, paths) = split(3, |i, mut file| {
            let keys = file.keys.iter_mut().filter(|(name, _)| i >= from && name == key.as_bytes());
            keys.for_each(|(_, old)| *old = value.clone());
            file
        });
        let message = message(&paths);
        assert!(message.contains(what), "{message:?} does not say {what:?}");
    }
    let repeated = changed(|_, mut file| {
        file.tensors[0].name = b"same".to_vec();
        file
    });
    assert!(repeated.contains("tensor same: is also in another file"), "{repeated}");
    let (_directory, paths) = split(2, |_, file| file);
    let bytes = std::fs::read(&paths[0]).expect("read");
    assert!(Gguf::from_bytes(bytes).expect_err("an error").to_string().contains("one of 2 files"));
}

#[test]
fn what_is_no_file_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let message = |path: &Path| Gguf::open(path).expect_err("an error").to_string();
    assert!(message(directory.path()).contains("is a directory"));
    assert!(message(&directory.path().join("absent.gguf")).contains("check the path"));
    let path = directory.path().join("empty.gguf");
    std::fs::write(&path, []).expect("written");
    assert!(message(&path).contains("too short"));
    assert!(message(Path::new("/dev/null")).contains("not a regular file"));
}

#[test]
fn a_file_that_shrinks_is_noticed() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("model.gguf");
    let bytes = sample().bytes();
    std::fs::write(&path, &bytes).expect("written");
    let gguf = Gguf::open(&path).expect("a valid file");
    assert!(gguf.tensor("vector").is_ok());
    let file = std::fs::OpenOptions::new().write(true).open(&path).expect("opened");
    file.set_len(bytes.len() as u64 / 2).expect("truncated");
    let message = gguf.tensor("vector").err().expect("an error").to_string();
    assert!(message.contains("shrank"), "{message}");
}

#[test]
fn experts_that_lie_apart_come_together() {
    let bytes = |from: u8| (from..from + 2 * 3 * 4).collect::<Vec<u8>>();
    let file = |up_type, up_shape: &[usize]| {
        let file = GgufFile::new().tensor("blk.2.ffn_gate_exps.weight", &[2, 3, 4], 24, bytes(0));
        Gguf::from_bytes(file.tensor("blk.2.ffn_up_exps.weight", up_shape, up_type, bytes(100)).bytes()).expect("valid")
    };
    let gguf = file(24, &[2, 3, 4]);
    let name = "layers.2.experts.gate_up_proj";
    assert!(gguf.has_weight(name) && !gguf.has_weight("layers.1.experts.gate_up_proj"));
    let joined = gguf.weight(name).expect("readable").expect("there");
    assert_eq!(joined.shape, [2, 6, 4]);
    let want: Vec<u8> = [0..12, 100..112, 12..24, 112..124].into_iter().flatten().collect();
    assert_eq!(joined.bytes.as_slice(), want);
    assert!(file(24, &[2, 4, 3]).weight(name).is_err());
    assert!(file(39, &[1, 1, 32]).weight(name).is_err());
}

#[test]
fn experts_that_lie_apart_have_a_length_before_they_are_joined() {
    let part = |file: GgufFile, name: &str| file.tensor(name, &[2, 3, 4], 24, vec![0; 24]);
    let file = part(part(GgufFile::new(), "blk.2.ffn_gate_exps.weight"), "blk.2.ffn_up_exps.weight");
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("model.gguf");
    std::fs::write(&path, part(file, "blk.2.ffn_down_exps.weight").bytes()).expect("written");
    let checkpoint = Checkpoint::open(&path).expect("a valid file");
    for (name, len) in [("layers.2.experts.gate_up_proj", 48), ("layers.2.experts.down_proj", 24)] {
        let read = checkpoint.get(name).expect("readable").expect("there");
        assert_eq!((checkpoint.len_bytes(name), read.bytes.as_slice().len()), (Some(len), len), "{name}");
    }
    assert_eq!(checkpoint.len_bytes("layers.1.experts.down_proj"), None);
}

/// The shape of a tensor of an unknown type may be of any size: its bytes are not counted.
#[test]
fn experts_of_an_unknown_type_and_any_size_have_a_shape() {
    let part = |file: GgufFile, name: &str| file.tensor(name, &[1, usize::MAX, 1], 77, vec![0]);
    let file = part(GgufFile::new(), "blk.2.ffn_gate_exps.weight");
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("model.gguf");
    std::fs::write(&path, part(file, "blk.2.ffn_up_exps.weight").bytes()).expect("written");
    let checkpoint = Checkpoint::open(&path).expect("a valid file");
    let name = "layers.2.experts.gate_up_proj";
    assert_eq!(checkpoint.type_and_shape(name).map(|(_, shape)| shape), Some(vec![1, usize::MAX, 1]));
    assert_eq!(checkpoint.len_bytes(name), None);
    assert!(checkpoint.get(name).is_err());
}

// ---- configurations and weights: every fixture, written as GGUF, reads back unchanged ----

fn fixtures() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let mut paths: Vec<_> =
        std::fs::read_dir(root).expect("fixtures").map(|entry| entry.expect("an entry").path()).collect();
    paths.retain(|path| path.join("assistant").exists()); // Gemma 4's
    paths.sort();
    paths
}

fn sizes(sizes: impl Iterator<Item = usize>) -> Raw {
    let sizes: Vec<_> = sizes.collect();
    match sizes.iter().all(|size| *size == sizes[0]) {
        true => u32_value(sizes[0]),
        false => array(&sizes.into_iter().map(u32_value).collect::<Vec<_>>()),
    }
}

/// The metadata of a text model, as written by a converter.
fn text_keys(mut file: GgufFile, arch: &str, config: &TextConfig) -> GgufFile {
    let layers = || config.layers.iter();
    let of = |attention| layers().find(|layer| layer.attention == attention).map_or(2, |layer| layer.head_dim);
    let shared = layers().filter(|layer| layer.kv_shared).count();
    let sliding = layers().map(|layer| bool_value(layer.attention == AttentionType::Sliding)).collect::<Vec<_>>();
    let (full_dim, sliding_dim) = (of(AttentionType::Full), of(AttentionType::Sliding));
    let keys = [
        ("context_length", u32_value(config.max_position_embeddings)),
        ("embedding_length", u32_value(config.hidden_size)),
        ("block_count", u32_value(config.layers.len())),
        ("feed_forward_length", sizes(layers().map(|layer| layer.intermediate_size))),
        ("attention.head_count", u32_value(config.num_attention_heads)),
        ("attention.head_count_kv", sizes(layers().map(|layer| layer.num_kv_heads))),
        ("attention.layer_norm_rms_epsilon", f32_value(config.rms_norm_eps)),
        ("attention.key_length", u32_value(full_dim)),
        ("attention.value_length", u32_value(full_dim)),
        ("attention.key_length_swa", u32_value(sliding_dim)),
        ("attention.value_length_swa", u32_value(sliding_dim)),
        ("attention.sliding_window", u32_value(config.sliding_window)),
        ("attention.sliding_window_pattern", array(&sliding)),
        ("attention.shared_kv_layers", u32_value(shared)),
        ("embedding_length_per_layer_input", u32_value(config.hidden_size_per_layer_input)),
        ("rope.freq_base", f32_value(config.rope_full.theta)),
        ("rope.freq_base_swa", f32_value(config.rope_sliding.theta)),
        ("rope.dimension_count", u32_value(full_dim)),
        ("rope.dimension_count_swa", u32_value(sliding_dim)),
    ];
    file = file.key("general.architecture", str_value(arch));
    for (key, value) in keys {
        file = file.key(format!("{arch}.{key}"), value);
    }
    if let Some(cap) = config.final_logit_softcapping {
        file = file.key(format!("{arch}.final_logit_softcapping"), f32_value(cap));
    }
    if let Some(moe) = &config.moe {
        file = file
            .key(format!("{arch}.expert_count"), u32_value(moe.num_experts))
            .key(format!("{arch}.expert_used_count"), u32_value(moe.top_k_experts))
            .key(format!("{arch}.expert_feed_forward_length"), u32_value(moe.intermediate_size));
    }
    if let Some(id) = config.bos_token_id {
        file = file.key("tokenizer.ggml.bos_token_id", u32_value(id as usize));
    }
    if let Some(id) = config.eos_token_ids.first() {
        file = file.key("tokenizer.ggml.eos_token_id", u32_value(*id as usize));
    }
    let turning = (config.rope_full.partial_rotary_factor * full_dim as f64 / 2.0) as usize;
    let divisors: Vec<f32> = (0..full_dim / 2).map(|i| if i < turning { 1.0 } else { 1e30 }).collect();
    file.floats("rope_freqs.weight", &[full_dim / 2], &divisors)
}

/// The checkpoint's tensors, all f32, with GGUF names, where there are several those of llama.cpp
/// or of an older layout.
fn weights(mut file: GgufFile, checkpoint: &Checkpoint, older: bool) -> GgufFile {
    for name in checkpoint.names().iter().filter(|name| !is_tower(name)) {
        let tensor = checkpoint.get(name).expect("readable").expect("the tensor");
        let names = gguf_names(strip(name));
        let named = names.iter().find(|name| older && name.starts_with("mtp.")).or(names.first());
        let gguf = named.unwrap_or_else(|| panic!("no name for {name}"));
        let bytes = tensor.bytes.as_slice();
        file = match name.ends_with("token_ordering") {
            true => file.tensor(
                gguf,
                &tensor.shape,
                I32,
                bytes.as_chunks::<8>().0.iter().flat_map(|x| x[..4].to_vec()).collect(),
            ),
            false => file.tensor(gguf, &tensor.shape, F32, bytes.to_vec()),
        };
    }
    file
}

/// Image and audio towers, which some converters include in the file.
fn is_tower(name: &str) -> bool {
    name.contains("vision") || name.contains("audio")
}

fn strip(name: &str) -> &str {
    let prefixes = ["model.language_model.", "language_model.model.", "model."];
    prefixes.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name)
}

fn same_weights(gguf: &Gguf, checkpoint: &Checkpoint) {
    for name in checkpoint.names().iter().filter(|name| !is_tower(name)) {
        let want = checkpoint.get(name).expect("readable").expect("the tensor");
        let got = gguf.weight(strip(name)).expect("readable").unwrap_or_else(|| panic!("{name} is missing"));
        assert_eq!(got.shape, want.shape, "{name}");
        if !name.ends_with("token_ordering") {
            assert!(got.bytes.as_slice() == want.bytes.as_slice(), "{name} differs");
        }
    }
    let unnamed: Vec<_> = gguf.tensors().filter(|info| hugging_face_name(info.name()).is_none()).collect();
    assert_eq!(unnamed.len(), 1, "only rope_freqs.weight has no name at Hugging Face: {unnamed:?}");
}

/// Fields that do not affect the computation: V of layers without it, a vocabulary of absent per-layer embeddings.
fn normalized(mut config: TextConfig) -> TextConfig {
    config.layers.iter_mut().filter(|layer| layer.kv_shared).for_each(|layer| layer.k_eq_v = false);
    if config.hidden_size_per_layer_input == 0 {
        config.vocab_size_per_layer_input = 0;
    }
    config
}

#[test]
fn a_target_is_the_same_from_gguf() {
    for fixture in fixtures() {
        let checkpoint = Checkpoint::open(fixture.join("target")).expect("the fixture");
        let want = checkpoint.target_config().expect("a target");
        let file = weights(text_keys(GgufFile::new(), "gemma4", &want), &checkpoint, false);
        let gguf = Gguf::from_bytes(file.bytes()).expect("a valid file");
        let got = gguf::target_config(&gguf).expect("a target");
        assert_eq!(normalized(got), normalized(want), "{}", fixture.display());
        same_weights(&gguf, &checkpoint);
        assert!(gguf::assistant_config(&gguf).is_err());
    }
}

#[test]
fn an_assistant_is_the_same_from_either_layout() {
    for fixture in fixtures() {
        let checkpoint = Checkpoint::open(fixture.join("assistant")).expect("the fixture");
        let want = checkpoint.assistant_config().expect("an assistant");
        let backbone = u32_value(want.backbone_hidden_size);
        for arch in ["gemma4-assistant", "gemma4_assistant"] {
            let older = arch == "gemma4_assistant";
            let mut file = text_keys(GgufFile::new(), arch, &want.text);
            file = match older {
                true => file.key("gemma4_assistant.n_embd_backbone", backbone.clone()),
                false => file.key("gemma4-assistant.embedding_length_out", backbone.clone()),
            };
            if let Some(centroids) = &want.centroids {
                file = file.key(format!("{arch}.centroid_top_k"), u32_value(centroids.top_k));
                if older {
                    file = file
                        .key("gemma4_assistant.n_centroids", u32_value(centroids.num_centroids))
                        .key("gemma4_assistant.use_ordered_embeddings", bool_value(true));
                }
            }
            let gguf = Gguf::from_bytes(weights(file, &checkpoint, older).bytes()).expect("a valid file");
            let got = gguf::assistant_config(&gguf).expect("an assistant");
            assert_eq!(got.backbone_hidden_size, want.backbone_hidden_size);
            assert_eq!(got.centroids, want.centroids);
            assert_eq!(normalized(got.text), normalized(want.text.clone()), "{} {arch}", fixture.display());
            same_weights(&gguf, &checkpoint);
            let error = gguf::target_config(&gguf).expect_err("not a target").to_string();
            assert!(error.contains("is an assistant's"), "{error}");
        }
    }
}

#[test]
fn a_configuration_is_honoured_or_refused_by_name() {
    let checkpoint = Checkpoint::open(fixtures()[0].join("target")).expect("the fixture");
    let config = checkpoint.target_config().expect("a target");
    let file = || weights(text_keys(GgufFile::new(), "gemma4", &config), &checkpoint, false);
    let layers = config.layers.len();
    let cases = [
        ("general.architecture", Some(str_value("llama")), "\"llama\" is Llama"),
        ("gemma4.block_count", Some(u32_value(1 << 20)), "at most 1024"),
        ("gemma4.block_count", Some(u32_value(1 << 31)), "must be an integer"),
        ("gemma4.block_count", None, "is missing"),
        ("gemma4.embedding_length", Some(u32_value(0)), "is 0"),
        ("gemma4.attention.head_count", Some(f32_value(4.0)), "must be a positive integer"),
        ("gemma4.attention.head_count_kv", Some(u32_value(3)), "do not divide"),
        ("gemma4.attention.head_count_kv", Some(array(&[u32_value(1), u32_value(1)])), "must be a positive integer or"),
        ("gemma4.attention.shared_kv_layers", Some(u32_value(99)), "is 99 of"),
        ("gemma4.attention.sliding_window_pattern", Some(u32_value(6)), "array of"),
        ("gemma4.attention.sliding_window_pattern", Some(array(&vec![bool_value(true); layers])), "last layer"),
        ("gemma4.attention.value_length", Some(u32_value(2)), "not implemented"),
        ("gemma4.attention.key_length_swa", Some(u32_value(33)), "must be even"),
        ("gemma4.attention.key_length_swa", Some(u32_value(2_147_483_646)), "at most 8192"),
        ("gemma4.attention.head_count", Some(u32_value(2048)), "at most 1024"),
        ("gemma4.attention.layer_norm_rms_epsilon", Some(f32_value(f64::NAN)), "must be a positive number"),
        ("gemma4.final_logit_softcapping", Some(f32_value(-1.0)), "must be a positive number"),
        ("gemma4.attention.scale", Some(f32_value(0.5)), "anything but 1 is not implemented"),
        ("gemma4.rope.freq_base", Some(f32_value(0.0)), "must be a positive number"),
        ("gemma4.rope.scaling.type", Some(str_value("yarn")), "\"yarn\" is not implemented"),
        ("gemma4.rope.scaling.factor", Some(f32_value(2.0)), "anything but 1 is not implemented"),
        ("gemma4.rope.scale_linear", Some(f32_value(8.0)), "anything but 1 is not implemented"),
        ("gemma4.rope.scaling.attn_factor", Some(f32_value(2.0)), "anything but 1 is not implemented"),
    ];
    for (key, value, what) in cases {
        let mut file = file();
        file.keys.retain(|(name, _)| name != key.as_bytes());
        if let Some(value) = value {
            file = file.key(key, value);
        }
        let gguf = Gguf::from_bytes(file.bytes()).expect("a valid file");
        let message = gguf::target_config(&gguf).expect_err(key).to_string();
        assert!(message.contains(key) && message.contains(what), "{message:?} does not say {what:?}");
    }
    for divisors in [vec![1.0f32; 4], vec![1.0, 1e30, 1.0], vec![f32::NAN; 3], vec![0.0; 3]] {
        let mut file = file();
        let full = config.layers[layers - 1].head_dim / 2;
        let filled: Vec<f32> =
            divisors.iter().copied().cycle().take(if divisors.len() == 4 { 4 } else { full }).collect();
        file.tensors.retain(|tensor| tensor.name != b"rope_freqs.weight");
        let gguf = Gguf::from_bytes(file.floats("rope_freqs.weight", &[filled.len()], &filled).bytes()).expect("valid");
        let error = gguf::target_config(&gguf).expect_err("another rotation");
        assert!(matches!(&error, Error::Tensor { tensor, .. } if tensor == "rope_freqs.weight"), "{error}");
    }
    // Linear scaling by 1 is none.
    let scaled = file().key("gemma4.rope.scaling.type", str_value("linear"));
    let [plain, scaled] = [file(), scaled.key("gemma4.rope.scaling.factor", f32_value(1.0))].map(|file| {
        let gguf = Gguf::from_bytes(file.bytes()).expect("valid");
        gguf::target_config(&gguf).expect("a target")
    });
    assert_eq!(plain, scaled);
    // No pair rotates: only that differs.
    let mut file = file();
    let full = config.layers[layers - 1].head_dim / 2;
    file.tensors.retain(|tensor| tensor.name != b"rope_freqs.weight");
    let gguf = Gguf::from_bytes(file.floats("rope_freqs.weight", &[full], &vec![1e30; full]).bytes()).expect("valid");
    let still = gguf::target_config(&gguf).expect("a target").rope_full;
    assert_eq!((still.partial_rotary_factor, still.factor), (0.0, 1.0));
}

#[test]
fn suppressed_tokens_are_read() {
    let ids = array(&[u32_value(258_883), u32_value(258_882)]);
    let gguf = Gguf::from_bytes(GgufFile::new().key("tokenizer.ggml.suppress_tokens", ids).bytes()).expect("valid");
    assert_eq!(gguf::suppressed_tokens(&gguf).expect("ids"), [258_883, 258_882]);
    let none = Gguf::from_bytes(GgufFile::new().bytes()).expect("valid");
    assert!(gguf::suppressed_tokens(&none).expect("ids").is_empty());
}

/// Small valid files as seeds for fuzz/, besides the models of tests/fuzz_seeds.rs.
#[test]
#[ignore = "writes to fuzz/seeds"]
fn write_fuzz_seeds() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds/gguf");
    std::fs::create_dir_all(&directory).expect("a directory");
    let write = |name: &str, bytes: Vec<u8>| std::fs::write(directory.join(name), bytes).expect("written");
    write("sample", sample().bytes());
    for fixture in fixtures() {
        let name = fixture.file_name().expect("a name").to_string_lossy().into_owned();
        let checkpoint = Checkpoint::open(fixture.join("target")).expect("the fixture");
        let target = checkpoint.target_config().expect("a target");
        let table = |file: GgufFile, name: &str| file.floats(name, &[4, 1], &[1.0; 4]);
        let mut file = table(text_keys(GgufFile::new(), "gemma4", &target), "token_embd.weight");
        file = table(table(file, "per_layer_token_embd.weight"), "blk.0.attn_v.weight");
        write(&format!("{name}-target"), file.bytes());
        for (arch, section) in [("gemma4-assistant", "nextn"), ("gemma4_assistant", "mtp")] {
            let mut file = table(text_keys(GgufFile::new(), arch, &target), "token_embd.weight");
            file = file.floats(&format!("{section}.pre_projection.weight"), &[1, 4], &[1.0; 4]);
            file = table(file, "mtp.centroids.weight").tensor("mtp.token_ordering.weight", &[4], I32, vec![0; 16]);
            write(&format!("{name}-{arch}"), file.bytes());
        }
    }
    let tokens: Vec<String> = ["<pad>", "<eos>", "<bos>", "<unk>", "a", "b", "ab", "▁"].map(str::to_owned).into();
    let kinds = [3, 3, 3, 2, 1, 1, 1, 1].map(u32_value);
    let merges = tokenizer_file("gemma4", &tokens, &kinds).key("tokenizer.ggml.merges", strings(["a b"]));
    write("merges", merges.bytes());
    let scores = tokenizer_file("llama", &tokens, &kinds).key("tokenizer.ggml.scores", array(&vec![f32_value(0.5); 8]));
    write("scores", scores.bytes());
}

// ---- tokenizers ----

fn demo_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target/tokenizer.json")
}

/// The demo's tokenizer.json as the `tokenizers` crate reads it, and its lists: tokens, kinds, merges.
fn demo() -> (tokenizers::Tokenizer, Vec<String>, Vec<Raw>, Vec<String>) {
    let text = std::fs::read_to_string(demo_path()).expect("the demo");
    let json: serde_json::Value = text.parse().expect("JSON");
    let vocabulary = json["model"]["vocab"].as_object().expect("a vocabulary");
    let mut tokens = vec![String::new(); vocabulary.len()];
    vocabulary.iter().for_each(|(token, id)| tokens[id.as_u64().expect("an id") as usize] = token.clone());
    let kind = |token: &String| match token {
        byte if byte.starts_with("<0x") => 6,
        _ if json["added_tokens"].as_array().expect("a list").iter().any(|added| added["content"] == **token) => 3,
        _ => 1,
    };
    let kinds = tokens.iter().map(|token| Raw(5, i32::to_le_bytes(kind(token)).to_vec())).collect();
    let merges = json["model"]["merges"].as_array().expect("merges").iter();
    let merges = merges.map(|pair| format!("{} {}", pair[0].as_str().expect("left"), pair[1].as_str().expect("right")));
    (text.parse().expect("a tokenizer"), tokens, kinds, merges.collect())
}

fn tokenizer_file(model: &str, tokens: &[String], kinds: &[Raw]) -> GgufFile {
    GgufFile::new()
        .key("tokenizer.ggml.model", str_value(model))
        .key("tokenizer.ggml.tokens", strings(tokens))
        .key("tokenizer.ggml.token_type", array(kinds))
        .key("tokenizer.ggml.bos_token_id", u32_value(2))
        .key("tokenizer.ggml.unknown_token_id", u32_value(3))
}

const TEXTS: [&str; 6] = [
    "fn main() {\n    println!(\"{}\", 1 + 2);\n}\n",
    "  two spaces,\ttab\r\n\n\nthree lines  ",
    "größe, 東京, 🦀 and a\u{0}null",
    "<|turn>user\nhi<turn|>\n<bos><unk>",
    " ",
    "▁already",
];

#[test]
fn a_tokenizer_is_the_same_from_gguf() {
    let (json, tokens, kinds, merges) = demo();
    let read = Tokenizer::read(demo_path(), 4096).expect("a tokenizer");
    for model in ["gemma4", "llama"] {
        let file = tokenizer_file(model, &tokens, &kinds).key("tokenizer.ggml.merges", strings(&merges));
        let gguf = Gguf::from_bytes(file.bytes()).expect("a valid file");
        let own = gguf::tokenizer(&gguf).expect("a tokenizer").expect("one is there");
        gguf::check_tokenizer(&gguf, &read).expect("the same tokens");
        for text in TEXTS {
            for special in [true, false] {
                let (want, got) = (json.encode(text, special).expect("ids"), own.encode(text, special).expect("ids"));
                assert_eq!(got.get_ids(), want.get_ids(), "{text:?}");
                for skip in [true, false] {
                    let want = json.decode(got.get_ids(), skip).expect("text");
                    assert_eq!(own.decode(got.get_ids(), skip).expect("text"), want, "{text:?}");
                }
            }
        }
    }
}

/// The ids order the merges here: a SentencePiece model that gives each merged token its rank as its score.
#[test]
fn scores_give_the_merges() {
    let (json, tokens, kinds, merges) = demo();
    let rank = |token: &String| merges.iter().position(|merge| merge.replacen(' ', "", 1) == **token);
    let scores = tokens.iter().map(|token| f32_value(-(rank(token).unwrap_or(0) as f64))).collect::<Vec<_>>();
    let file = tokenizer_file("llama", &tokens, &kinds).key("tokenizer.ggml.scores", array(&scores));
    let gguf = Gguf::from_bytes(file.bytes()).expect("a valid file");
    let own = gguf::tokenizer(&gguf).expect("a tokenizer").expect("one is there");
    for text in TEXTS {
        let (want, got) = (json.encode(text, true).expect("ids"), own.encode(text, true).expect("ids"));
        assert_eq!(got.get_ids(), want.get_ids(), "{text:?}");
    }
}

#[test]
fn bad_tokenizers_are_refused() {
    let (json, tokens, kinds, merges) = demo();
    let refused = |file: GgufFile, what: &str| {
        let gguf = Gguf::from_bytes(file.bytes()).expect("a valid file");
        let message = gguf::tokenizer(&gguf).err().unwrap_or_else(|| panic!("accepted; {what:?}")).to_string();
        assert!(message.contains(what) && !message.contains('\n'), "{message:?} does not say {what:?}");
    };
    let long = "x".repeat(10_000);
    let merges_of =
        |merges: &[&str]| tokenizer_file("gemma4", &tokens, &kinds).key("tokenizer.ggml.merges", strings(merges));
    refused(tokenizer_file("bert", &tokens, &kinds), "\"bert\" is not implemented");
    refused(tokenizer_file("gpt2", &tokens, &kinds), "merges: is missing");
    refused(tokenizer_file("gemma4", &tokens, &kinds), "merges: is missing");
    refused(tokenizer_file("llama", &tokens, &kinds), "scores: is missing");
    refused(tokenizer_file("gemma4", &tokens, &kinds[1..]), "one for each token");
    refused(tokenizer_file("gemma4", &[], &[]), "has 0 tokens");
    refused(merges_of(&["ab"]), "entry 0 is not a pair");
    refused(merges_of(&[" a"]), "entry 0 is not a pair");
    refused(merges_of(&[&format!("{long} {long}")]), "entry 0 is not a pair");
    refused(merges_of(&["\u{1} \u{2}"]), "entry 0 is not a pair");
    let mut empty = tokens.clone();
    empty[300].clear();
    for merge in [" a", "a "] {
        let file = tokenizer_file("gemma4", &empty, &kinds).key("tokenizer.ggml.merges", strings([merge]));
        refused(file, "entry 0 is not a pair");
    }
    let mut twice = tokens.clone();
    twice[300] = twice[299].clone();
    refused(tokenizer_file("gemma4", &twice, &kinds), "ids 299 and 300 are both");
    let narrow = tokenizer_file("gemma4", &tokens, &kinds).floats("token_embd.weight", &[2, 1], &[0.0; 2]);
    refused(narrow, "only 2 rows");
    // Prompts for continuation do not end in such a token, whatever a file says.
    let list: Vec<&str> = merges.iter().map(String::as_str).collect();
    let eos = merges_of(&list).key("tokenizer.ggml.add_eos_token", bool_value(true));
    let eos = gguf::tokenizer(&Gguf::from_bytes(eos.bytes()).expect("a valid file")).expect("read").expect("one");
    assert_eq!(eos.encode("fn", true).expect("ids").get_ids(), json.encode("fn", true).expect("ids").get_ids());

    let mut other = tokens.clone();
    other[1000] = "another token".into();
    let file = tokenizer_file("gemma4", &other, &kinds).key("tokenizer.ggml.merges", strings(&merges));
    let gguf = Gguf::from_bytes(file.bytes()).expect("a valid file");
    let read = Tokenizer::read(demo_path(), 4096).expect("a tokenizer");
    let message = gguf::check_tokenizer(&gguf, &read).expect_err("another token").to_string();
    assert!(message.contains("id 1000"), "{message}");
    let short = tokenizer_file("gemma4", &tokens[..4000], &kinds[..4000]);
    let gguf = Gguf::from_bytes(short.bytes()).expect("a valid file");
    assert!(gguf::check_tokenizer(&gguf, &read).is_err());
}
