//! OpenAI's frequency and presence penalties, which count generated tokens only. The library's own, as
//! llama.cpp's, count the last tokens of the prompt as well.

use foretoken::sampler::{LogitsProcessor, Penalties};
use foretoken::{GenerateOptions, Result};

use crate::processors::add_processor;

/// The library's penalties of the tokens after the prompt.
#[derive(Debug)]
struct OutputPenalties {
    prompt_tokens: usize,
    penalties: Penalties,
}

impl LogitsProcessor for OutputPenalties {
    fn process(&self, tokens: &[u32], logits: &mut [f32]) -> Result<()> {
        self.penalties.process(tokens.get(self.prompt_tokens..).unwrap_or_default(), logits)
    }
}

/// `options` with penalties that count generated tokens only.
pub(crate) fn apply(mut options: GenerateOptions, prompt_tokens: usize) -> GenerateOptions {
    let penalties = &mut options.sampling.penalties;
    let (frequency, presence) = (std::mem::take(&mut penalties.frequency), std::mem::take(&mut penalties.presence));
    if frequency != 0.0 || presence != 0.0 {
        let penalties = Penalties { frequency, presence, last_n: None, ..Penalties::default() };
        add_processor(&mut options, OutputPenalties { prompt_tokens, penalties });
    }
    options
}

#[cfg(test)]
mod tests {
    use foretoken::Sampling;

    use super::*;

    #[test]
    fn generated_tokens_count() {
        let penalties = Penalties { frequency: 0.5, presence: 0.25, ..Penalties::default() };
        let options = GenerateOptions { sampling: Sampling { penalties, ..Sampling::default() }, ..Default::default() };
        let options = apply(options, 2);
        assert_eq!(options.sampling.penalties, Penalties::default());
        let mut logits = [1.0; 4];
        let processor = options.logits_processor.expect("a processor");
        processor.process(&[0, 1, 1, 2, 2], &mut logits).expect("penalties");
        assert_eq!(logits, [1.0, 0.25, -0.25, 1.0]);
        assert!(apply(GenerateOptions::default(), 2).logits_processor.is_none());
    }
}
