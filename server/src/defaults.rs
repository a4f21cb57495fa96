//! Defaults of what requests omit.

use std::sync::Arc;

use foretoken::Speculation;
use foretoken::sampler::LogitsProcessor;

/// Defaults of what requests omit.
#[derive(Clone, Debug, Default)]
pub struct GenerateDefaults {
    /// Default: 0; for chats, the checkpoint's. The same holds for the next three.
    pub temperature: Option<f32>,
    /// 0: all tokens, whatever the checkpoint's. Default: all tokens.
    pub top_k: Option<usize>,
    /// Default: 1.
    pub top_p: Option<f32>,
    /// Default: 0.
    pub min_p: Option<f32>,
    /// Default: random for every request.
    pub seed: Option<u64>,
    /// Default: up to the context's end.
    pub max_tokens: Option<usize>,
    /// Default: where possible.
    pub speculation: Speculation,
    /// Modifies the logits of every request, before the request's own biases. Default: none.
    pub logits_processor: Option<Arc<dyn LogitsProcessor>>,
}
