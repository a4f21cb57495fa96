//! The prompts.

use std::path::Path;

use anyhow::{Result, ensure};
use foretoken::Engine;
use foretoken_tools::{demo, input, measure, report};

use crate::matrix::Prompt;

/// The text that prompts are cut from: a file, or the demo pair's held-out prompts and then this project's sources.
pub fn text(path: Option<&Path>) -> Result<String> {
    if let Some(path) = path {
        return Ok(input::text(path)?);
    }
    Ok(input::prompts(&demo("prompts.json"))?.concat() + &input::sources()?)
}

/// The first `count` prompts of a length: consecutive pieces of the text, each after a BOS token. For a
/// checkpoint without a tokenizer: arbitrary ids.
pub fn prompts(engine: &Engine, text: &str, prompt: Prompt, count: usize) -> Result<Vec<Vec<u32>>> {
    let own = prompt.0 - 1;
    let ids = match engine.tokenizer() {
        Ok(tokenizer) => tokenizer.encode(text)?,
        Err(_) => measure::ids(engine, 1 + count * own),
    };
    let needs = 1 + count * own;
    let has = report::count(ids.len(), "token");
    ensure!(ids.len() >= needs, "the text has {has}, {count} of {prompt} need {needs}; use a longer --text");
    Ok(ids[1..].chunks_exact(own).take(count).map(|piece| [&ids[..1], piece].concat()).collect())
}
