//! Defaults of what requests omit.

use std::sync::Arc;

use foretoken::chat::{Json, Thinking};
use foretoken::sampler::{Dry, LogitsProcessor};
use foretoken::{Engine, GenerateOptions, Sampling, Speculation};
use foretoken_tools::sampling::{BREAKERS, breakers};

/// Defaults of what requests omit.
#[derive(Clone, Debug, Default)]
pub struct GenerateDefaults {
    /// Sampling parameters of prompts that are not chats. A multiplier of DRY and a probability of XTC of 0 are off;
    /// the other parameters of both are those of requests that turn them on. Default: greedy.
    pub sampling: Sampling,
    /// Sampling parameters of chats. Default: the checkpoint's, else greedy.
    pub chat_sampling: Option<Sampling>,
    /// Whether chats begin with reasoning. Default: they do not.
    pub thinking: Thinking,
    /// Variables of the chat template, as in [`ChatOptions`](foretoken::chat::ChatOptions), none of them with an option
    /// of its own there; a request may have others of the same names. Default: none.
    pub variables: Vec<(String, Json)>,
    /// Default: random for every request.
    pub seed: Option<u64>,
    /// Default: up to the context's end.
    pub max_tokens: Option<usize>,
    /// Default: where possible.
    pub speculation: Speculation,
    /// Modifies the logits of every request, before the request's own biases. Default: none.
    pub logits_processor: Option<Arc<dyn LogitsProcessor>>,
}

impl GenerateDefaults {
    /// With the checkpoint's parameters of chats, and tokens of llama.cpp's sequence breakers, where there are none.
    pub(crate) fn of_checkpoint(self, engine: &Engine) -> Self {
        let with_dry = |sampling: Sampling| {
            let breakers = || engine.tokenizer().map(|tokenizer| breakers(tokenizer, BREAKERS)).unwrap_or_default();
            let off = || Dry { multiplier: 0.0, breakers: breakers(), ..Dry::default() };
            Sampling { dry: Some(sampling.dry.unwrap_or_else(off)), ..sampling }
        };
        let of_chats = self.chat_sampling.or_else(|| engine.sampling_defaults().cloned()).unwrap_or_default();
        Self { sampling: with_dry(self.sampling), chat_sampling: Some(with_dry(of_chats)), ..self }
    }

    /// The options of a request that sets none, for a prompt that is not a chat. The seed is not among them.
    pub(crate) fn options(&self) -> GenerateOptions {
        GenerateOptions {
            max_tokens: self.max_tokens.unwrap_or(usize::MAX),
            sampling: self.sampling.clone(),
            speculation: self.speculation.clone(),
            logits_processor: self.logits_processor.clone(),
            ..GenerateOptions::default()
        }
    }

    /// The sampling parameters of chats.
    pub(crate) fn of_chats(&self) -> &Sampling {
        self.chat_sampling.as_ref().unwrap_or(&self.sampling)
    }
}
