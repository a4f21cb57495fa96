//! Logits processors.

use crate::Result;

/// Modifies logits before sampling: a mask, a bias, a penalty.
///
/// Called for every verified row in order, up to the first rejected draft, so that its effect on the text is the same
/// with and without speculation. Several sequences of a [`Scheduler`](crate::Scheduler) may call one at the same time.
/// It runs before the penalties and filters of [`Sampling`](crate::Sampling).
///
/// On a device it is called within the pass whose logits it modifies, so it must not open or run sessions of the same
/// engine: they would wait for that pass forever.
///
/// ```
/// use std::sync::Arc;
///
/// use foretoken::{GenerateOptions, LogitsProcessor, Result};
///
/// /// Excludes the last token.
/// #[derive(Debug)]
/// struct NoRepetition;
///
/// impl LogitsProcessor for NoRepetition {
///     fn process(&self, tokens: &[u32], logits: &mut [f32]) -> Result<()> {
///         if let Some(logit) = tokens.last().and_then(|last| logits.get_mut(*last as usize)) {
///             *logit = f32::NEG_INFINITY;
///         }
///         Ok(())
///     }
/// }
///
/// let options = GenerateOptions { logits_processor: Some(Arc::new(NoRepetition)), ..GenerateOptions::default() };
/// ```
pub trait LogitsProcessor: std::fmt::Debug + Send + Sync {
    /// Modifies `logits` `(vocab)` of the token after `tokens`: prompt, text, and accepted drafts.
    /// `-inf` excludes a token.
    ///
    /// # Errors
    /// The implementation's, such as an [`Error::Argument`](crate::Error::Argument); they end the generation.
    fn process(&self, tokens: &[u32], logits: &mut [f32]) -> Result<()>;
}

/// Adds biases to logits.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogitBias {
    /// Tokens and their biases; `-inf` excludes a token.
    pub biases: Vec<(u32, f32)>,
}

impl LogitsProcessor for LogitBias {
    fn process(&self, _: &[u32], logits: &mut [f32]) -> Result<()> {
        for (id, bias) in &self.biases {
            if let Some(logit) = logits.get_mut(*id as usize) {
                *logit += bias;
            }
        }
        Ok(())
    }
}
