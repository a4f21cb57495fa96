//! The fuzz targets on their seeds and on mutated ones, without instrumentation: the same inputs at
//! every run. `scripts/fuzz.sh` searches for new ones.

#[path = "../fuzz/src/lib.rs"]
mod targets;

use std::ops::Range;
use std::panic::catch_unwind;
use std::path::Path;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Boundary values for lengths and counts.
const EDGES: [u8; 6] = [0, 1, 0x7f, 0x80, 0xfe, 0xff];

/// A seed with up to four mutations: bytes replaced, a piece removed, repeated, or taken from another seed.
fn changed(seeds: &[Vec<u8>], rng: &mut StdRng) -> Vec<u8> {
    let mut data = seeds[rng.random_range(0..seeds.len())].clone();
    for _ in 0..rng.random_range(1..=4) {
        let at = piece(data.len(), rng);
        match rng.random_range(0..6) {
            0 => data[at].fill_with(|| rng.random()),
            1 => data[at].fill(EDGES[rng.random_range(0..EDGES.len())]),
            2 => drop(data.drain(at)),
            3 => data.truncate(at.end),
            4 => data.extend_from_within(at),
            _ => {
                let other = &seeds[rng.random_range(0..seeds.len())];
                data.splice(at, other[piece(other.len(), rng)].iter().copied());
            }
        }
    }
    data
}

/// Some of `len` bytes, mostly few.
fn piece(len: usize, rng: &mut StdRng) -> Range<usize> {
    let start = rng.random_range(0..=len);
    start..len.min(start + (1 << rng.random_range(0..8)))
}

fn seeds(target: &str) -> Vec<Vec<u8>> {
    let entries = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(target));
    let mut paths: Vec<_> = entries.expect("the seeds").map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).expect("a seed")).collect()
}

/// Reads every seed of the target and `count` mutated ones.
fn smoke(target: &str, count: usize, read: fn(&[u8])) {
    let seeds = seeds(target);
    assert!(!seeds.is_empty(), "{target} has no seeds");
    seeds.iter().for_each(|seed| read(seed));
    let mut rng = StdRng::seed_from_u64(1);
    for case in 0..count {
        let data = changed(&seeds, &mut rng);
        if catch_unwind(|| read(&data)).is_err() {
            let path = std::env::temp_dir().join(format!("foretoken-{target}-{case}"));
            std::fs::write(&path, data).expect("the input");
            panic!("case {case} of {target}: a panic; the input is {}", path.display());
        }
    }
}

#[test]
fn chat_templates() {
    smoke("chat_template", 16000, targets::chat_template::read);
}

#[test]
fn configurations() {
    smoke("config", 80000, targets::config::read);
}

/// Without the feature, only the refusal is tested.
#[test]
fn constraints() {
    for seed in seeds("constraint") {
        let accepted = targets::constraint::is_accepted(&seed);
        assert_eq!(accepted, cfg!(feature = "constraint"), "{}", String::from_utf8_lossy(&seed));
    }
    smoke("constraint", 1000, targets::constraint::read);
}

#[test]
fn gguf_files() {
    smoke("gguf", 8000, targets::gguf::read);
}

#[test]
fn safetensors_files() {
    smoke("safetensors", 8000, targets::safetensors::read);
}

#[test]
fn session_files() {
    smoke("session_file", 8000, targets::session_file::read);
}

#[test]
fn tokenizers() {
    smoke("tokenizer", 8000, targets::tokenizer::read);
}
