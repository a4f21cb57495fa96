//! Perplexity of a target on a text, windowed as in llama.cpp, so that values are comparable.
//!
//! Windows do not overlap. Each starts from an empty cache; if the tokenizer begins every text with BOS, that replaces
//! the first token. Predictions in the second half are scored, so each has at least half a window of context.

use crate::kv::{KvOptions, SequenceState};
use crate::model::OutputRows;
use crate::nn::map;
use crate::options::SessionOptions;
use crate::speculative::SpeculativeDecoder;
use crate::{Engine, Error, Result};

/// Rows per batch of logits: 32 MiB at a vocabulary of 262144.
const ROWS: usize = 32;

/// Options of a measurement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PerplexityOptions {
    /// Tokens per window. Default: 512.
    pub window: usize,
    /// Maximum number of windows, at least 1. Default: all full ones.
    pub max_windows: Option<usize>,
    /// K/V cache options.
    pub kv: KvOptions,
}

impl Default for PerplexityOptions {
    fn default() -> Self {
        Self { window: 512, max_windows: None, kv: KvOptions::default() }
    }
}

/// The measurement so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Perplexity {
    /// Windows processed.
    pub windows: usize,
    /// Tokens scored.
    pub tokens: usize,
    sum: f64,     // of negative log likelihoods
    squares: f64, // sum of squared negative log likelihoods
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

    /// Scores the second half of `ids`, which an empty sequence reads.
    fn add_window(&mut self, decoder: &mut SpeculativeDecoder, ids: &[u32], vocab_size: usize) -> Result<()> {
        let (first, last) = (ids.len() / 2, ids.len() - 1);
        let max_rows = decoder.state.kv().max_round_rows();
        ids[..first].chunks(max_rows).try_for_each(|chunk| decoder.read(chunk))?;
        let rows = ROWS.min(max_rows);
        // The last token is predicted only.
        for start in (first..last).step_by(rows) {
            let end = (start + rows).min(last);
            decoder.forward(&ids[start..end], SequenceState::begin_whole_round, OutputRows::All, |output| {
                let logits = output.logits(end - start)?;
                let rows = logits.chunks_exact(vocab_size).zip(&ids[start + 1..=end]);
                let surprisals = map(rows, logits.len(), |(row, next)| surprisal(row, *next));
                surprisals.into_iter().for_each(|surprisal| self.add(surprisal));
                Ok(end - start)
            })?;
        }
        Ok(())
    }

    fn add(&mut self, surprisal: f64) {
        self.tokens += 1;
        self.sum += surprisal;
        self.squares += surprisal * surprisal;
    }
}

/// The negative log likelihood of `token` under a row of logits.
fn surprisal(logits: &[f32], token: u32) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - largest).exp()).sum();
    sum.ln() - (f64::from(logits[token as usize]) - largest)
}

/// Measures the engine's target over `tokens`; `progress` is called after each window.
///
/// # Errors
/// If there is no full window, `max_windows` is 0, a window is shorter than 4 tokens or longer than the model's
/// context, a token is outside the vocabulary, or the model's output is not finite.
pub fn perplexity(
    engine: &Engine,
    tokens: &[u32],
    options: &PerplexityOptions,
    mut progress: impl FnMut(&Perplexity) + Send,
) -> Result<Perplexity> {
    check(engine, tokens, options)?;
    let (window, target) = (options.window, engine.target());
    let bos = match engine.tokenizer() {
        Ok(tokenizer) => tokenizer.bos(),
        Err(_) => target.bos_token_id(),
    };
    let mut result = Perplexity::default();
    for text in tokens.chunks_exact(window).take(options.max_windows.unwrap_or(usize::MAX)) {
        let mut ids = text.to_vec();
        ids[0] = bos.unwrap_or(ids[0]);
        let context = options.kv.max_context.unwrap_or(window);
        let kv = KvOptions { max_context: Some(context), ..options.kv.clone() };
        let mut session = engine.session(&SessionOptions { kv })?;
        let decoder = session.decoder();
        engine.run(|| result.add_window(decoder, &ids, target.vocab_size()))?;
        result.windows += 1;
        if !result.sum.is_finite() {
            return Err(Error::logits(None));
        }
        progress(&result);
    }
    Ok(result)
}

/// # Errors
/// As [`perplexity`], except those of the model's output.
fn check(engine: &Engine, tokens: &[u32], options: &PerplexityOptions) -> Result<()> {
    let (window, target) = (options.window, engine.target());
    if window < 4 {
        return Err(Error::argument("window", format!("is {window}, must be at least 4 tokens")));
    }
    if options.max_windows == Some(0) {
        return Err(Error::argument("max_windows", "is 0, must be at least 1; omit it to read the whole text"));
    }
    if tokens.len() < window {
        let problem = format!("are {}, fewer than a window of {window}", tokens.len());
        return Err(Error::argument("tokens", format!("{problem}; use a longer text or a shorter window")));
    }
    if let Some(id) = tokens.iter().find(|id| **id as usize >= target.vocab_size()) {
        let problem = format!("token id {id} is outside the vocabulary of {}", target.vocab_size());
        return Err(Error::argument("tokens", problem));
    }
    let limit = target.max_position_embeddings();
    if window > limit {
        let problem = format!("is {window} tokens, which do not fit the context of {limit}; use a shorter window");
        return Err(Error::argument("window", problem));
    }
    Ok(())
}
