//! vLLM's `min_tokens`: the tokens that end a text are excluded before it has that many, and stop strings are text.

use foretoken::sampler::LogitsProcessor;
use foretoken::{EndOfGeneration, Engine, GenerateOptions, Result};

use crate::api_error::ApiError;
use crate::fields::Fields;
use crate::processors::add_processor;
use crate::structured::Structured;

/// The minimum of a request.
#[derive(Debug)]
pub(crate) struct MinTokens {
    tokens: usize,
    /// What is excluded until then.
    ends: Vec<u32>,
}

impl MinTokens {
    /// Takes `min_tokens`, for the stop conditions in `options`. `None` if it is 0.
    ///
    /// # Errors
    /// If it is more than the maximum, or a constraint could end the text earlier.
    pub fn of_request(
        fields: &mut Fields,
        engine: &Engine,
        options: &mut GenerateOptions,
        structured: Option<&Structured>,
    ) -> Result<Option<Self>, ApiError> {
        let tokens = fields.count("min_tokens", 0..=usize::MAX)?.unwrap_or(0);
        if tokens > options.max_tokens {
            let problem = format!("is {tokens}, must be at most the maximum of tokens, {}", options.max_tokens);
            return Err(fields.error("min_tokens", problem));
        }
        if tokens > 0 && structured.is_some() {
            let problem = "is supported only without formats, and forced or strict tool calls; omit it";
            return Err(fields.error("min_tokens", problem).with_code("unsupported_parameter"));
        }
        let stop = &mut options.stop;
        stop.min_tokens = tokens;
        let mut ends = stop.tokens.clone();
        if stop.end_of_generation == EndOfGeneration::Stops {
            ends.extend(engine.end_of_generation());
        }
        Ok((tokens > 0).then_some(Self { tokens, ends }))
    }

    /// # Errors
    /// If the context has no room for it after a prompt of `prompt_tokens` tokens.
    pub fn check(&self, prompt_tokens: usize, context: usize) -> Result<(), ApiError> {
        // The last token of a text has no place in the context.
        let room = context.saturating_sub(prompt_tokens) + 1;
        if self.tokens <= room {
            return Ok(());
        }
        let problem = format!("is {}, but the context of {context} has room for {room} after the prompt", self.tokens);
        Err(ApiError::field("min_tokens", problem + "; lower it, or raise the server's --context"))
    }

    /// Applies it to a generation from a prompt of `prompt_tokens` tokens.
    pub fn apply(&self, options: &mut GenerateOptions, prompt_tokens: usize) {
        if !self.ends.is_empty() {
            let until = prompt_tokens.saturating_add(self.tokens);
            add_processor(options, ExcludedEnds { until, ends: self.ends.clone() });
        }
    }
}

/// Excludes tokens while the prompt and the text have fewer than `until` tokens.
#[derive(Debug)]
struct ExcludedEnds {
    until: usize,
    ends: Vec<u32>,
}

impl LogitsProcessor for ExcludedEnds {
    fn process(&self, tokens: &[u32], logits: &mut [f32]) -> Result<()> {
        if tokens.len() < self.until {
            for end in &self.ends {
                if let Some(logit) = logits.get_mut(*end as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        Ok(())
    }
}
