//! Times single passes at any depth, for benchmarks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::Tensor;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::device::{DeviceNextN, DeviceNextnHead, draft_greedily, read_bandwidth};
use crate::engine::Engine;
use crate::gemma4::Assistant;
use crate::kv::{Batch, KvAccess, KvCache, KvLayout, Round, SequenceState};
use crate::model::{ChainModel, DraftKv, DraftRows, NextnHead, OutputRows};
use crate::nn::tensor;
use crate::options::SessionOptions;
use crate::session::Session;
use crate::speculative::{DeviceSequence, ForwardOutput};
use crate::{Error, Result};

/// Peak read bandwidth of the engine's device in GB/s; `None` on the CPU.
///
/// # Errors
/// If the device is out of memory.
pub fn device_bandwidth(engine: &Engine) -> Result<Option<f64>> {
    engine.parts.models.as_ref().map(|models| read_bandwidth(models.device())).transpose()
}

/// A sequence whose passes are timed, on the CPU or a device. Measured passes are rolled back, so
/// that all have the same depth.
pub struct Probe {
    session: Session,
    hidden: Option<Tensor>, // the hidden state that drafts start from, on the CPU
    head: Option<KvCache>,  // of a NextN head, as deep as the sequence when it first drafted
    head_on_device: Option<DeviceNextN>,
    rng: StdRng,
}

impl Probe {
    /// An empty sequence.
    ///
    /// # Errors
    /// As [`Engine::session`].
    pub fn new(engine: &Engine, options: &SessionOptions) -> Result<Self> {
        let (session, rng) = (engine.session(options)?, StdRng::seed_from_u64(1));
        Ok(Self { session, hidden: None, head: None, head_on_device: None, rng })
    }

    /// Committed positions.
    pub fn depth(&self) -> usize {
        self.session.kv().len()
    }

    /// Bytes allocated for K and V.
    pub fn kv_bytes(&self) -> usize {
        self.session.kv_bytes()
    }

    /// Bytes of the recurrent state and of the rows that it has to replay; 0 if the model has none.
    pub fn recurrent_bytes(&self) -> usize {
        self.session.recurrent_bytes()
    }

    /// Prefills a prompt. Returns the duration.
    ///
    /// # Errors
    /// If it does not fit the context, or the output is not finite.
    pub fn read(&mut self, ids: &[u32]) -> Result<Duration> {
        let engine = self.session.engine.clone();
        let decoder = self.session.decoder();
        engine.run(|| {
            let start = Instant::now();
            ids.chunks(decoder.state.kv().max_round_rows()).try_for_each(|chunk| decoder.read(chunk))?;
            Ok(start.elapsed())
        })
    }

    /// Extends the sequence to `depth` positions without computing them: the cost of a pass does
    /// not depend on the values of K and V, or of a recurrent state, which is unchanged. On the CPU
    /// they are random, on a device uninitialised.
    ///
    /// # Errors
    /// If that many positions do not fit the context.
    pub fn skip_to(&mut self, depth: usize) -> Result<()> {
        let (engine, rng) = (self.session.engine.clone(), &mut self.rng);
        let decoder = self.session.decoder();
        let layout = decoder.backend.device.is_none().then(|| decoder.state.kv().layout().clone());
        engine.run(|| {
            while decoder.state.len() < depth {
                let rows = decoder.state.kv().max_round_rows().min(depth - decoder.state.len());
                let mut round = decoder.state.begin_round(rows)?;
                if let Some(layout) = &layout {
                    noise(layout, &mut round, rows, rng)?;
                }
                round.commit(rows);
            }
            Ok(())
        })
    }

    /// Verifies `ids` in one pass, which is rolled back. Returns the duration, including the results.
    ///
    /// # Errors
    /// If they do not fit the context or a round, or the output is not finite.
    pub fn verify(&mut self, ids: &[u32]) -> Result<Duration> {
        Ok(self.round(ids, 0)?.verify)
    }

    /// Verifies `ids` in one pass, of which the first `keep` rows are committed.
    ///
    /// # Errors
    /// As [`Probe::verify`]; nothing is committed then.
    ///
    /// # Panics
    /// If `keep` is more than there are ids.
    pub fn round(&mut self, ids: &[u32], keep: usize) -> Result<RoundTimes> {
        let engine = self.session.engine.clone();
        let decoder = self.session.decoder();
        let (mut verify, mut hidden) = (Duration::ZERO, None);
        let whole = engine.run(|| {
            let start = Instant::now();
            decoder.forward(ids, SequenceState::begin_round, OutputRows::All, |output| {
                match output {
                    ForwardOutput::Device(output) => output.wait()?,
                    ForwardOutput::Cpu(output) => hidden = Some(output.hidden.narrow(0, 0, 1)?.contiguous()?),
                }
                verify = start.elapsed();
                Ok(keep)
            })?;
            Ok::<_, Error>(start.elapsed())
        })?;
        self.hidden = hidden;
        Ok(RoundTimes { verify, commit: whole - verify })
    }

    /// Logits after each of `ids`, from one pass, which is rolled back: `(ids, vocab)`, with the soft cap.
    ///
    /// # Errors
    /// As [`Probe::verify`].
    pub fn logits(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        let engine = self.session.engine.clone();
        let decoder = self.session.decoder();
        let mut logits = Vec::new();
        engine.run(|| {
            decoder.forward(ids, SequenceState::begin_round, OutputRows::All, |output| {
                logits = output.logits(ids.len())?.to_vec();
                Ok(0)
            })
        })?;
        Ok(logits)
    }

    /// Drafts `tokens` tokens after `last` with the assistant or the NextN head, from the hidden state of the last
    /// [`Probe::verify`], which is required.
    ///
    /// # Errors
    /// If there is neither, or its output is not finite.
    pub fn draft(&mut self, last: u32, tokens: usize) -> Result<Duration> {
        let engine = self.session.engine.clone();
        if let Some(head) = &engine.parts.sources.nextn {
            return engine.run(|| self.chain_head(&**head, last, tokens));
        }
        if let Some(head) = &engine.parts.sources.device_nextn {
            return engine.run(|| self.chain_head_on_device(head, last, tokens));
        }
        let no_assistant =
            || Error::argument("assistant", "is not loaded, and the model has no NextN head; load an assistant");
        let assistant = engine.assistant().ok_or_else(no_assistant)?;
        engine.run(|| self.chain_assistant(assistant, last, tokens))
    }

    /// [`Probe::draft`] with the assistant.
    fn chain_assistant(&mut self, assistant: &Assistant, last: u32, tokens: usize) -> Result<Duration> {
        let decoder = self.session.decoder();
        let committed = decoder.state.kv().committed();
        let start = Instant::now();
        if let Some(DeviceSequence { models, sequence }) = &decoder.backend.device {
            draft_greedily(models, sequence, last, committed.position(), tokens)?;
            return Ok(start.elapsed());
        }
        let mut hidden = self.hidden.clone().ok_or_else(no_state)?;
        for _ in 0..tokens {
            let kv = DraftKv::Target(committed);
            let steps = assistant.step(&mut [DraftRows { ids: vec![last], hidden: Some(hidden.clone()), kv }])?;
            hidden = steps.into_iter().next().map_or(hidden, |step| step.hidden);
        }
        Ok(start.elapsed())
    }

    /// [`Probe::draft`] with a NextN head on a device, where the rows before the draft are uninitialised.
    fn chain_head_on_device(&mut self, head: &Arc<DeviceNextnHead>, last: u32, tokens: usize) -> Result<Duration> {
        let depth = self.depth();
        let drafter = match &mut self.head_on_device {
            Some(drafter) => drafter,
            none => {
                let (kv, context) = (self.session.kv_options(), self.session.kv().max_context());
                none.insert(DeviceNextN::new(head.clone(), kv, context)?)
            }
        };
        let start = Instant::now();
        drafter.chain_at(depth, last, tokens)?;
        Ok(start.elapsed())
    }

    /// [`Probe::draft`] with a NextN head. The drafts' rows are rolled back, except those in quantized pages.
    fn chain_head(&mut self, head: &dyn NextnHead, last: u32, tokens: usize) -> Result<Duration> {
        let mut hidden = self.hidden.clone().ok_or_else(no_state)?;
        if self.head.is_none() {
            let mut cache = head.nextn_cache(self.session.kv_options(), self.session.engine.pages())?;
            while cache.len() < self.depth() {
                let (layout, rows) = (cache.layout().clone(), cache.max_round_rows().min(self.depth() - cache.len()));
                let mut round = cache.begin_round(rows)?;
                noise(&layout, &mut round, rows, &mut self.rng)?;
                round.commit(rows);
            }
            self.head = Some(cache);
        }
        let Some(cache) = &mut self.head else { return Err(no_state()) };
        let (start, depth) = (Instant::now(), cache.len());
        for _ in 0..tokens {
            let mut batch = Batch::of(&[last], cache.begin_round(1)?)?;
            hidden = head.nextn_rows(&mut batch, &hidden)?;
            batch.into_rounds().into_iter().for_each(|round| round.commit(1));
            head.nextn_logits(&hidden)?;
        }
        let time = start.elapsed();
        if let Err(error) = cache.rewind(depth) {
            tracing::debug!(%error, "the rows of a draft could not be rolled back");
        }
        Ok(time)
    }
}

/// Times of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundTimes {
    /// The pass, including results and the previous round's rows that a recurrent state replays.
    pub verify: Duration,
    /// The commit.
    pub commit: Duration,
}

fn no_state() -> Error {
    Error::argument("last", "has no hidden state; call verify first")
}

/// Stages random rows of variance 1, like normed ones.
fn noise(layout: &KvLayout, round: &mut Round<'_>, rows: usize, rng: &mut StdRng) -> Result<()> {
    for (index, store) in layout.stores.iter().enumerate() {
        // Every store belongs to a layer.
        let layer = layout.store_of_layer.iter().position(|of| *of == index).unwrap_or(index);
        let mut noise = || {
            let count = rows * store.num_kv_heads * store.head_dim;
            let noise = (0..count).map(|_| rng.random_range(-1.7f32..1.7)).collect();
            tensor(noise, (rows, store.num_kv_heads, store.head_dim))
        };
        round.append(layer, &noise()?, &noise()?)?;
    }
    Ok(())
}
