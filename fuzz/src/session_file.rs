//! Any bytes at all, with the checksum that they should have, loaded as a session of a small model;
//! what loads is continued.

use std::sync::LazyLock;

use super::{checked, directory, file};
use foretoken::{Engine, EngineOptions, GenerateOptions};

const TARGET: &str = "session_file";

/// The model of the seeds' sessions: a config.json, a NUL, and a model.safetensors.
const MODEL: &[u8] = include_bytes!("../seeds/safetensors/dense");

static ENGINE: LazyLock<Engine> = LazyLock::new(|| {
    let end = MODEL.iter().position(|byte| *byte == 0).expect("two files");
    file(TARGET, "config.json", &MODEL[..end]);
    file(TARGET, "model.safetensors", &MODEL[end + 1..]);
    Engine::load(&EngineOptions { threads: Some(1), ..EngineOptions::new(directory(TARGET)) }).expect("the model")
});

/// Reads `data`.
pub fn read(data: &[u8]) {
    let engine = &*ENGINE;
    let mut bytes = data.to_vec();
    // Otherwise nearly every input would be refused for it, whatever else is wrong.
    if let Some(end) = bytes.len().checked_sub(4) {
        let checksum = crc32fast::hash(&bytes[..end]);
        bytes[end..].copy_from_slice(&checksum.to_le_bytes());
    }
    let Some(mut session) = checked(engine.load_session(file(TARGET, "session", &bytes))) else { return };
    let options = GenerateOptions { max_tokens: 2, ..GenerateOptions::default() };
    let Some(generation) = checked(session.generate(&[1, 2], &options)) else { return };
    generation.for_each(|piece| drop(checked(piece)));
}
