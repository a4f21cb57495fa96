//! The JSON of tokens in responses: with whether they were drafted, or with their log-probabilities.

use foretoken::{Engine, Piece, TokenLogprobs};
use serde_json::{Value, json};

/// The tokens of a piece, each with its text, and whether it was drafted.
pub(crate) fn origins(engine: &Engine, piece: &Piece) -> Value {
    let Ok(tokenizer) = engine.tokenizer() else { return json!([]) };
    let token = |(i, id): (usize, &u32)| {
        let bytes = if tokenizer.is_control(*id) { Vec::new() } else { tokenizer.token_bytes(*id) };
        json!({"id": id, "text": String::from_utf8_lossy(&bytes), "drafted": i < piece.accepted})
    };
    piece.tokens.iter().enumerate().map(token).collect()
}

/// A token with its log-probability: OpenAI's fields, and llama.cpp's `id`.
fn logprob(engine: &Engine, id: u32, logprob: f32) -> Value {
    let bytes = engine.tokenizer().map(|tokenizer| tokenizer.token_bytes(id)).unwrap_or_default();
    json!({"id": id, "token": String::from_utf8_lossy(&bytes), "bytes": bytes, "logprob": logprob})
}

/// Tokens as [`logprob`], each with the most probable ones at its position.
pub(crate) fn logprobs(engine: &Engine, tokens: &[TokenLogprobs]) -> Value {
    let token = |of: &TokenLogprobs| {
        let mut value = logprob(engine, of.token, of.logprob);
        value["top_logprobs"] = of.top.iter().map(|(id, value)| logprob(engine, *id, *value)).collect();
        value
    };
    tokens.iter().map(token).collect()
}
