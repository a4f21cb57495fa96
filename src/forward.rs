//! Logits and hidden states of a text, without generating.

use crate::engine::Engine;
use crate::kv::{KvOptions, SequenceState};
use crate::model::{Output, OutputRows};
use crate::nn::tensor;
use crate::options::SessionOptions;
use crate::speculative::SpeculativeDecoder;
use crate::{Error, Result};

impl Engine {
    /// Logits `(rows, vocab)` and hidden states `(rows, hidden)` of the `outputs` rows of `ids`, read as a sequence of
    /// their own on the CPU or the device; for scores and embeddings. Row `i` has the logits of the token after
    /// `ids[..=i]`. [`OutputRows::All`] keeps `4 * vocab` bytes per id: for the log-probabilities of long texts, or of
    /// many, see [`GenerateOptions::prompt_logprobs`](crate::GenerateOptions::prompt_logprobs).
    ///
    /// ```
    /// # use foretoken::{Engine, EngineOptions, OutputRows, SessionOptions};
    /// # fn main() -> foretoken::Result<()> {
    /// # let models = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo");
    /// let engine = Engine::load(&EngineOptions::new(models.join("target")))?;
    /// let ids = engine.tokenizer()?.encode("impl Iterator for Counter {\n")?;
    /// let output = engine.forward(&ids, OutputRows::Last, &SessionOptions::default())?;
    /// let logits: Vec<f32> = output.logits.squeeze(0)?.to_vec1()?;
    /// let embedding: Vec<f32> = output.hidden.squeeze(0)?.to_vec1()?;
    /// assert_eq!((logits.len(), embedding.len()), (engine.target().vocab_size(), engine.target().hidden_size()));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Engine::session`], or if `ids` is empty, has an id outside the vocabulary or does not fit the context, or K
    /// or V are not finite (which a device does not report with [`OutputRows::None`]). Logits and hidden states are
    /// returned as they are.
    pub fn forward(&self, ids: &[u32], outputs: OutputRows, options: &SessionOptions) -> Result<Output> {
        let target = self.target();
        let (vocab, limit) = (target.num_readable_tokens(), target.max_position_embeddings());
        if ids.is_empty() {
            return Err(Error::argument("ids", "is empty; pass at least one token"));
        }
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
            return Err(Error::argument("ids", format!("token id {id} is outside the vocabulary of {vocab}")));
        }
        let context = options.kv.max_context.unwrap_or(ids.len());
        if ids.len() > limit.min(context) {
            return Err(Error::Context { needed: ids.len(), limit: limit.min(context) });
        }
        let kv = KvOptions { max_context: Some(context), ..options.kv.clone() };
        let mut session = self.session(&SessionOptions { kv })?;
        let decoder = session.decoder();
        self.run(|| read(decoder, ids, outputs, [target.vocab_size(), target.hidden_size()]))
    }
}

/// Reads `ids` in rounds, and collects the `outputs` rows.
fn read(decoder: &mut SpeculativeDecoder, ids: &[u32], outputs: OutputRows, widths: [usize; 2]) -> Result<Output> {
    let (mut logits, mut hidden) = (Vec::new(), Vec::new());
    let mut left = ids.len();
    for chunk in ids.chunks(decoder.state.kv().max_round_rows()) {
        left -= chunk.len();
        let of_chunk = match outputs {
            OutputRows::Last if left > 0 => OutputRows::None,
            outputs => outputs,
        };
        let rows = of_chunk.of(chunk.len());
        decoder.forward(chunk, SequenceState::begin_whole_round, of_chunk, |output| {
            if rows > 0 {
                logits.extend_from_slice(&output.logits(rows)?);
                hidden.extend(output.hidden(rows)?);
            }
            Ok(chunk.len())
        })?;
    }
    let rows = outputs.of(ids.len());
    let [logits, hidden] =
        [(logits, widths[0]), (hidden, widths[1])].map(|(values, width)| tensor(values, (rows, width)));
    Ok(Output { logits: logits?, hidden: hidden?, taps: Vec::new() })
}
