//! How surprised a target is by a text, windowed as llama.cpp does it, so that the figures compare.
//!
//! The tokens are cut into windows that do not overlap. Each is read from an empty cache, its first token replaced by the
//! one that begins a text; predictions in its second half, which have at least half a window before them, are scored.

use crate::gemma4::Wanted;
use crate::kv::KvOptions;
use crate::options::SessionOptions;
use crate::speculative::Speculator;
use crate::{Engine, Error, Result};

/// Rows whose logits are in memory at once: 32 MiB of a vocabulary of 262144.
const ROWS: usize = 32;

/// How a text is read.
#[derive(Clone, Debug)]
pub struct PerplexityOptions {
    /// Tokens per window. Default: 512.
    pub window: usize,
    /// Windows at most. Default: all that are full.
    pub max_windows: Option<usize>,
    /// How K and V are kept.
    pub kv: KvOptions,
}

impl Default for PerplexityOptions {
    fn default() -> Self {
        Self { window: 512, max_windows: None, kv: KvOptions::default() }
    }
}

/// What was measured so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Perplexity {
    /// Windows read.
    pub windows: usize,
    /// Tokens scored.
    pub tokens: usize,
    sum: f64,     // of negative log likelihoods
    squares: f64, // of them squared
}

impl Perplexity {
    /// The exponential of the mean negative log likelihood.
    pub fn value(&self) -> f64 {
        self.mean().exp()
    }

    /// The standard error of [`Perplexity::value`], taking tokens as independent.
    pub fn error(&self) -> f64 {
        let variance = (self.squares / self.tokens as f64 - self.mean().powi(2)).max(0.0);
        self.value() * (variance / (self.tokens as f64 - 1.0).max(1.0)).sqrt()
    }

    fn mean(&self) -> f64 {
        self.sum / self.tokens as f64
    }

    fn add(&mut self, logits: &[f32], token: u32) {
        let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - largest).exp()).sum();
        let surprise = sum.ln() - (f64::from(logits[token as usize]) - largest);
        self.tokens += 1;
        self.sum += surprise;
        self.squares += surprise * surprise;
    }
}

/// Measures the engine's target over `tokens`; `progress` is told after each window.
///
/// # Errors
/// If there is no full window, a window is shorter than 4 tokens or longer than the model's context, a token is outside
/// the vocabulary, or the model's output is not finite.
pub fn perplexity(
    engine: &Engine,
    tokens: &[u32],
    options: &PerplexityOptions,
    mut progress: impl FnMut(&Perplexity) + Send,
) -> Result<Perplexity> {
    let (window, target) = (options.window, engine.target());
    if window < 4 {
        return Err(Error::Input(format!("a window of {window} tokens is too short; give at least 4")));
    }
    if tokens.len() < window {
        let problem = format!("the text has {} tokens, a window {window}", tokens.len());
        return Err(Error::Input(format!("{problem}; give a longer text or a shorter window")));
    }
    let limit = target.config().max_position_embeddings;
    if window > limit {
        return Err(Error::Context { needed: window, limit });
    }
    let first = window / 2;
    let mut result = Perplexity::default();
    for text in tokens.chunks_exact(window).take(options.max_windows.unwrap_or(usize::MAX)) {
        let mut ids = text.to_vec();
        if let Some(bos) = target.config().bos_token_id {
            ids[0] = bos;
        }
        let context = options.kv.max_context.unwrap_or(window);
        let kv = KvOptions { max_context: Some(context), ..options.kv.clone() };
        let mut session = engine.session(&SessionOptions { kv })?;
        let Speculator { passes, kv, .. } = session.speculator().0;
        engine.run(|| {
            for chunk in ids[..first].chunks(kv.max_round_rows()) {
                let mut round = kv.begin_round(chunk.len())?;
                passes.run(chunk, &mut round, Wanted::Nothing)?;
                round.commit(chunk.len());
            }
            // The last token is predicted, not read.
            for start in (first..window - 1).step_by(ROWS) {
                let end = (start + ROWS).min(window - 1);
                let mut round = kv.begin_round(end - start)?;
                let passed = passes.run(&ids[start..end], &mut round, Wanted::All)?;
                round.commit(end - start);
                let Some(passed) = passed else { continue };
                let logits = passed.logits(end - start)?;
                let rows = logits.chunks_exact(target.config().vocab_size);
                rows.zip(&ids[start + 1..=end]).for_each(|(row, next)| result.add(row, *next));
            }
            Ok::<_, Error>(())
        })?;
        result.windows += 1;
        if !result.sum.is_finite() {
            return Err(Error::Input("the model's output is not finite; verify the checkpoint".into()));
        }
        progress(&result);
    }
    Ok(result)
}
