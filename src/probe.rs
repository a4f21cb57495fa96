//! What passes cost: benchmarks are made of it.

use std::time::{Duration, Instant};

use candle_core::Tensor;
use foretoken_kernels::gpu::read::read_all;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::device::{Buffer, Work};
use crate::engine::Engine;
use crate::gemma4::Wanted;
use crate::gemma4::on_device::Chooser;
use crate::kv::{KvAccess, KvLayout, Round};
use crate::nn::tensor;
use crate::options::SessionOptions;
use crate::session::Session;
use crate::speculative::{Passed, Passes};
use crate::{Error, Result};

/// Bytes that a device reads to say how fast it does, if it has four times as many: more than any cache holds.
const READ: usize = 1 << 30;

/// Blocks of threads that read them, and how often they do while the host waits once.
const READERS: usize = 4096;
const TIMES: usize = 8;

/// Gigabytes per second that the engine's device reads at best; `None` on the CPU.
///
/// # Errors
/// If the device has no memory left to read.
pub fn device_bandwidth(engine: &Engine) -> Result<Option<f64>> {
    let Some(models) = &engine.parts.models else { return Ok(None) };
    let device = models.device();
    let words = READ.min(device.memory()?.0 / 4) / 4;
    let (x, y) = (Buffer::<u32>::new(&**device, words)?, Buffer::<u32>::new(&**device, READERS * 8)?);
    let work = Work::new(device.clone());
    let mut best = f64::INFINITY;
    for _ in 0..4 {
        let start = Instant::now();
        for _ in 0..TIMES {
            work.run(read_all(x.span(), READERS, y.span()))?;
        }
        y.read(0, 1)?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(Some((TIMES * 4 * words) as f64 / 1e9 / best))
}

/// A sequence whose passes are timed, on the CPU or a device: nothing that is measured is kept, so that all of it is measured
/// at one depth.
pub struct Probe {
    session: Session,
    hidden: Option<Tensor>, // a state for drafts to begin with, on the CPU
    rng: StdRng,
}

impl Probe {
    /// An empty sequence.
    ///
    /// # Errors
    /// As [`Engine::session`].
    pub fn new(engine: &Engine, options: &SessionOptions) -> Result<Self> {
        Ok(Self { session: engine.session(options)?, hidden: None, rng: StdRng::seed_from_u64(1) })
    }

    /// Positions that passes are behind.
    pub fn depth(&self) -> usize {
        self.session.kv().len()
    }

    /// Bytes of K and V held.
    pub fn kv_bytes(&self) -> usize {
        self.session.kv_bytes()
    }

    /// Reads a prompt. Returns the time that it took.
    ///
    /// # Errors
    /// If it does not fit the context, or the model's numbers are none.
    pub fn read(&mut self, ids: &[u32]) -> Result<Duration> {
        let engine = self.session.engine.clone();
        let (speculator, _) = self.session.speculator();
        let passes = speculator.passes.clone();
        engine.run(|| {
            let start = Instant::now();
            for chunk in ids.chunks(speculator.kv.max_round_rows()) {
                let mut round = speculator.kv.begin_round(chunk.len())?;
                passes.run(chunk, &mut round, Wanted::Nothing)?;
                round.commit(chunk.len());
            }
            Ok(start.elapsed())
        })
    }

    /// Goes on at position `depth` as if a prompt had been read, in no time beside that: what a pass costs does not depend on
    /// what K and V say. On the CPU they are noise, on a device what was in its memory.
    ///
    /// # Errors
    /// If that many positions do not fit the context.
    pub fn skip_to(&mut self, depth: usize) -> Result<()> {
        let layout = self.session.engine().target().kv_layout();
        let rng = &mut self.rng;
        let (speculator, _) = self.session.speculator();
        let on_device = speculator.passes.device.is_some();
        while speculator.kv.len() < depth {
            let rows = speculator.kv.max_round_rows().min(depth - speculator.kv.len());
            let mut round = speculator.kv.begin_round(rows)?;
            if !on_device {
                noise(&layout, &mut round, rows, rng)?;
            }
            round.commit(rows);
        }
        Ok(())
    }

    /// Verifies `ids` in one pass, of which nothing is kept. Returns the time until its results are there.
    ///
    /// # Errors
    /// If they do not fit the context or a round, or the model's numbers are none.
    pub fn verify(&mut self, ids: &[u32]) -> Result<Duration> {
        let engine = self.session.engine.clone();
        let (speculator, _) = self.session.speculator();
        let passes = speculator.passes.clone();
        let (time, hidden) = engine.run(|| -> Result<_> {
            let start = Instant::now();
            let mut round = speculator.kv.begin_round(ids.len())?;
            let passed = passes.run(ids, &mut round, Wanted::All)?;
            let hidden = match passed {
                Some(Passed::OnDevice(sequence)) => {
                    sequence.wait()?;
                    None
                }
                Some(Passed::Here(output)) => Some(output.hidden),
                None => None,
            };
            let time = start.elapsed();
            Ok((time, hidden.map(|hidden| hidden.narrow(0, 0, 1)?.contiguous()).transpose()?))
        })?;
        self.hidden = hidden;
        Ok(time)
    }

    /// The logits behind each of `ids`, in one pass of which nothing is kept: `(ids, vocab)`, after the soft cap.
    ///
    /// # Errors
    /// As [`Probe::verify`].
    pub fn logits(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        let engine = self.session.engine.clone();
        let (speculator, _) = self.session.speculator();
        let passes = speculator.passes.clone();
        engine.run(|| {
            let mut round = speculator.kv.begin_round(ids.len())?;
            let passed = passes.run(ids, &mut round, Wanted::All)?;
            passed.map_or(Ok(Vec::new()), |passed| Ok(passed.logits(ids.len())?.to_vec()))
        })
    }

    /// Drafts `tokens` tokens behind `last` with the assistant. A verification goes before: drafts begin with its state.
    ///
    /// # Errors
    /// If there is no assistant, or its numbers are none.
    pub fn draft(&mut self, last: u32, tokens: usize) -> Result<Duration> {
        let engine = self.session.engine.clone();
        let no_assistant = || Error::Input("drafts need an assistant; load one".into());
        let assistant = engine.assistant().ok_or_else(no_assistant)?;
        let hidden = self.hidden.clone();
        let (speculator, _) = self.session.speculator();
        let Passes { target, device } = &speculator.passes;
        let committed = speculator.kv.committed();
        engine.run(|| {
            let start = Instant::now();
            match device {
                Some(sequence) => {
                    let mut sequence = sequence.lock();
                    for link in 0..tokens {
                        sequence.draft(last, committed.position(), link, Chooser::Device)?;
                    }
                    sequence.wait()?;
                }
                None => {
                    let missing = || Error::Input("drafts begin with a verification's state; verify something".into());
                    let mut hidden = hidden.ok_or_else(missing)?;
                    for _ in 0..tokens {
                        hidden = assistant.step(target, last, &hidden, committed)?.hidden;
                    }
                }
            }
            Ok(start.elapsed())
        })
    }
}

/// Rows as large as normed ones are: elements of variance 1.
fn noise(layout: &KvLayout, round: &mut Round<'_>, rows: usize, rng: &mut StdRng) -> Result<()> {
    for (index, store) in layout.stores.iter().enumerate() {
        // Every store is some layer's.
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
