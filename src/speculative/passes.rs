//! Where the target's passes run: the one place where rounds know of devices.

use std::io::{self, Read, Write};
use std::ops::Deref;
use std::sync::Arc;

use candle_core::Tensor;
use parking_lot::{Mutex, MutexGuard};
use rand::Rng;

use super::{Accepted, Confidence, Draft, Frontier, SimulatedAcceptance, accept};
use crate::Result;
use crate::gemma4::on_device::{Judge, Sequence};
use crate::gemma4::{Output, Target, Wanted};
use crate::kv::{KvCache, Round};
use crate::nn::{F32View, tensor};
use crate::sampler::Sampler;

/// A target, and the sequence's part of a device if it runs on one. Lengths, limits and rollback are the cache's in either case:
/// on a device, the cache on the host holds no rows.
#[derive(Clone)]
pub(crate) struct Passes {
    pub target: Arc<Target>,
    pub device: Option<Arc<Mutex<Sequence>>>,
}

/// What a pass left.
pub(crate) enum Passed<'a> {
    Here(Output),
    OnDevice(MutexGuard<'a, Sequence>),
}

/// Rows of logits where they are, or read from a device.
pub(crate) enum Logits<'a> {
    Here(F32View<'a>),
    Read(Vec<f32>),
}

impl Deref for Logits<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Logits::Here(view) => view,
            Logits::Read(logits) => logits,
        }
    }
}

impl Passes {
    /// One pass over `ids`, staged in `round`; `None` if [`Wanted::Nothing`] is.
    ///
    /// # Errors
    /// As [`Target::forward`], or the device's.
    pub fn run(&self, ids: &[u32], round: &mut Round<'_>, wanted: Wanted) -> Result<Option<Passed<'_>>> {
        match &self.device {
            None => Ok(self.target.forward(ids, round, wanted)?.map(Passed::Here)),
            Some(sequence) => {
                let mut sequence = sequence.lock();
                sequence.forward(ids, round.position(), wanted)?;
                Ok((wanted != Wanted::Nothing).then_some(Passed::OnDevice(sequence)))
            }
        }
    }

    /// The state that predicted `frontier`'s token, wherever it is: `(hidden)`.
    ///
    /// # Errors
    /// The device's.
    pub fn state(&self, frontier: &Frontier) -> Result<Vec<f32>> {
        match &self.device {
            None => Ok(F32View::new(&frontier.hidden)?.to_vec()),
            Some(sequence) => sequence.lock().newest_state(),
        }
    }

    /// Writes the K and V of `kv`'s positions; their bytes are as many as [`KvCache::written_bytes`] says, wherever they are.
    ///
    /// # Errors
    /// Those of `to`, or the device's in one of them.
    pub fn write_to(&self, kv: &KvCache, to: &mut impl Write) -> io::Result<()> {
        match &self.device {
            None => kv.write_to(to),
            Some(sequence) => sequence.lock().write_to(kv.len(), to),
        }
    }

    /// Fills an empty sequence with what was written at `len` positions, which `frontier` follows.
    ///
    /// # Errors
    /// If memory does not reach, or the device's, in one of `io`'s; or those of `from`.
    pub fn read_from(
        &self,
        kv: &mut KvCache,
        len: usize,
        frontier: Option<&Frontier>,
        from: &mut impl Read,
    ) -> io::Result<()> {
        let Some(sequence) = &self.device else { return kv.read_from(len, from) };
        let state = frontier.map(|frontier| F32View::new(&frontier.hidden)).transpose().map_err(io::Error::other)?;
        let newest = frontier.zip(state.as_deref()).map(|(frontier, state)| (frontier.last, state));
        sequence.lock().read_from(len, newest, from)?;
        kv.count(len);
        Ok(())
    }

    /// The ids of drafts that the host has not read yet.
    ///
    /// # Errors
    /// The device's.
    pub fn resolve(&self, drafts: &mut [u32]) -> Result<()> {
        self.device.as_ref().map_or(Ok(()), |sequence| sequence.lock().resolve(drafts))
    }
}

impl Passed<'_> {
    /// What the target says of `draft`, of which the rows of this pass are one more. `simulated` accepts in the target's
    /// place.
    ///
    /// # Errors
    /// If the checkpoint's numbers are none, or the device's.
    pub fn judge(
        &mut self,
        draft: &mut Draft,
        (sampler, simulated): (&Sampler, Option<&SimulatedAcceptance>),
        rng: &mut impl Rng,
    ) -> Result<Accepted> {
        let stand = simulated.map(|simulated| simulated.count(draft.tokens.len(), rng));
        if let Passed::OnDevice(sequence) = self {
            if sampler.is_greedy() {
                let (count, next) = match stand {
                    None => sequence.judge(&mut draft.tokens, Judge::Target)?,
                    Some(stand) => sequence.judge(&mut draft.tokens[..stand], Judge::Coin)?,
                };
                return Ok(Accepted { count, next });
            }
            sequence.resolve(&mut draft.tokens)?;
        }
        let rows = draft.tokens.len() + 1;
        let logits = self.logits(rows)?;
        let target_probs: Result<Vec<_>> =
            logits.chunks_exact(logits.len() / rows).map(|logits| sampler.distribution(None, logits)).collect();
        match stand {
            None => Ok(accept(draft, &target_probs?, rng)),
            Some(count) => Ok(Accepted { count, next: target_probs?[count].sample(rng) }),
        }
    }

    /// The logits of the first `rows` wanted rows, after the soft cap: `(rows, vocab)`.
    ///
    /// # Errors
    /// The device's.
    pub fn logits(&self, rows: usize) -> Result<Logits<'_>> {
        match self {
            Passed::Here(output) => Ok(Logits::Here(F32View::new(&output.logits)?)),
            Passed::OnDevice(sequence) => Ok(Logits::Read(sequence.logits(rows)?)),
        }
    }

    /// The sequence goes on with `token`, which row `row` predicted. Returns that row's state `(1, hidden)`: on a device, where
    /// it stays, only if `confidence` will look at it; else an empty one.
    ///
    /// # Errors
    /// The device's.
    pub fn settle(&mut self, row: usize, token: u32, confidence: Confidence) -> Result<Tensor> {
        match self {
            Passed::Here(output) => Ok(output.hidden.narrow(0, row, 1)?.contiguous()?),
            Passed::OnDevice(sequence) => {
                sequence.settle(row, token)?;
                let state = if confidence == Confidence::Said { sequence.state(row)? } else { Vec::new() };
                let width = state.len();
                tensor(state, (1, width))
            }
        }
    }
}
