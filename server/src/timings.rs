//! llama.cpp's timings in responses.

use foretoken::Statistics;
use serde_json::{Value, json};

/// Counts and times under llama.cpp's names; times are in milliseconds.
pub(crate) fn timings(statistics: &Statistics) -> Value {
    let ms = |time: std::time::Duration| 1e3 * time.as_secs_f64();
    let per = |time: f64, count: usize| if count > 0 { time / count as f64 } else { 0.0 };
    let (prompt_ms, predicted_ms) = (ms(statistics.prefill), ms(statistics.decode));
    let computed = statistics.prompt_tokens - statistics.cached_tokens;
    json!({
        "cache_n": statistics.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": per(prompt_ms, computed),
        "prompt_per_second": statistics.prefill_tokens_per_second(),
        "predicted_n": statistics.generated_tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": per(predicted_ms, statistics.generated_tokens.saturating_sub(1)),
        "predicted_per_second": statistics.decode_tokens_per_second(),
        "draft_n": statistics.drafted,
        "draft_n_accepted": statistics.accepted,
    })
}
