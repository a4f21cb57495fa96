//! vLLM's `min_tokens`: the tokens that end a text are excluded before it has that many.

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
    /// Takes `min_tokens`, for the stop tokens in `options`. `None` if nothing has to be excluded.
    ///
    /// # Errors
    /// If it is more than the maximum, or stop strings or a constraint could end the text earlier.
    pub fn of_request(
        fields: &mut Fields,
        engine: &Engine,
        options: &GenerateOptions,
        structured: &Structured,
    ) -> Result<Option<Self>, ApiError> {
        let tokens = fields.count("min_tokens", 0..=usize::MAX)?.unwrap_or(0);
        if tokens > options.max_tokens {
            let problem = format!("is {tokens}, must be at most the maximum of tokens, {}", options.max_tokens);
            return Err(fields.error("min_tokens", problem));
        }
        let stop = &options.stop;
        if tokens > 0 && !(stop.strings.is_empty() && matches!(structured, Structured::Text)) {
            let problem = "is supported only without stop strings, formats, and forced or strict tool calls; omit it";
            return Err(fields.error("min_tokens", problem).with_code("unsupported_parameter"));
        }
        let mut ends = stop.tokens.clone();
        if stop.end_of_generation == EndOfGeneration::Stops {
            ends.extend(engine.end_of_generation());
        }
        Ok(Some(Self { tokens, ends }).filter(|least| least.tokens > 0 && !least.ends.is_empty()))
    }

    /// Applies it to a generation from so many tokens.
    pub fn apply(&self, options: &mut GenerateOptions, prompt_tokens: usize) {
        let until = prompt_tokens.saturating_add(self.tokens);
        add_processor(options, ExcludedEnds { until, ends: self.ends.clone() });
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
