//! Where a sequence's passes run: on the CPU or on a device, batched with other sequences.

use std::io::{self, Read, Write};
use std::ops::Deref;
use std::sync::Arc;

use candle_core::Tensor;
use parking_lot::Mutex;
use rand::rngs::StdRng;

use super::{AcceptResult, Accepted, Confidence, DecodeState, Draft, Observed, Settings, accept_rows};
use crate::device::{AcceptRule, DeviceOutput, DevicePass, DeviceStates, Models, PassPart, Sequence};
use crate::kv::{HeldPage, KvCache, KvOptions, Round, SequenceState};
use crate::model::{Model, Output, OutputRows};
use crate::nn::{F32View, tensor};
use crate::sampler::{Distribution, TokenLogprobs};
use crate::{Error, Result};

/// A target, and the sequence on a device if it runs on one. Lengths, limits and rollback are in the host's state in
/// either case: for a device, its KV cache only counts rows.
#[derive(Clone)]
pub(crate) struct Backend {
    pub model: Arc<dyn Model>,
    pub device: Option<DeviceSequence>,
}

/// A sequence on a device, and its models there.
#[derive(Clone)]
pub(crate) struct DeviceSequence {
    pub models: Arc<Models>,
    pub sequence: Arc<Mutex<Sequence>>,
}

/// One sequence's results of a pass.
pub(crate) enum ForwardOutput<'a> {
    Cpu(Output),
    Device(DeviceOutput<'a>),
}

/// Rows of logits on the host, or copied from a device.
pub(crate) enum Logits<'a> {
    Cpu(F32View<'a>),
    Read(Vec<f32>),
}

impl Deref for Logits<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Logits::Cpu(view) => view,
            Logits::Read(logits) => logits,
        }
    }
}

impl Backend {
    /// The hidden state that predicted the last token, on the host or a device: `(hidden)`.
    ///
    /// # Errors
    /// The device's.
    pub fn hidden(&self, newest: &DecodeState) -> Result<Vec<f32>> {
        match &self.device {
            None => Ok(F32View::new(&newest.hidden)?.to_vec()),
            Some(device) => device.sequence.lock().newest_state(),
        }
    }

    /// Bytes of the sequence's state, on the host or a device.
    pub fn bytes(&self, state: &SequenceState) -> usize {
        match &self.device {
            None => state.bytes(),
            Some(device) => {
                let sequence = device.sequence.lock();
                sequence.kv_bytes() + sequence.recurrent_bytes()
            }
        }
    }

    /// The pages of the sequence's K and V, including those shared with forks.
    pub fn held_pages(&self, state: &SequenceState) -> Vec<HeldPage> {
        match &self.device {
            None => state.kv().held_pages().collect(),
            Some(device) => device.sequence.lock().held_pages().collect(),
        }
    }

    /// An upper bound of the page bytes that the next `rows` positions take.
    pub fn bytes_of_round(&self, state: &SequenceState, rows: usize) -> usize {
        match &self.device {
            None => state.kv().bytes_of_round(rows),
            Some(device) => device.sequence.lock().bytes_of_round(state.len(), rows),
        }
    }

    /// Frees the pages that only rows after the committed ones took.
    pub fn trim(&self, state: &mut SequenceState) {
        match &self.device {
            None => state.kv_mut().trim(),
            Some(device) => device.sequence.lock().trim(state.len()),
        }
    }

    /// Bytes of the recurrent state and of the rows that it has to replay, which are not in the page pool.
    pub fn recurrent_bytes(&self, state: &SequenceState) -> usize {
        match &self.device {
            None => state.recurrent_bytes(),
            Some(device) => device.sequence.lock().recurrent_bytes(),
        }
    }

    /// The recurrent state as values; empty if there is no such state.
    ///
    /// # Errors
    /// If it cannot be saved, or the device's.
    pub fn save_recurrent(&self, state: &SequenceState) -> Result<Vec<f32>> {
        match &self.device {
            None => state.save_recurrent(),
            Some(DeviceSequence { models, sequence }) => models.read_recurrent(&mut sequence.lock(), state.len()),
        }
    }

    /// Fills an empty state from the values of [`Backend::save_recurrent`]. Returns whether they fit.
    ///
    /// # Errors
    /// The device's.
    pub fn load_recurrent(&self, state: &mut SequenceState, values: &[f32]) -> Result<bool> {
        match &self.device {
            None => Ok(state.load_recurrent(values)),
            Some(DeviceSequence { models, sequence }) => models.write_recurrent(&mut sequence.lock(), values),
        }
    }

    /// Writes the K and V of `kv`'s positions from the host or a device, [`KvCache::written_bytes`] bytes.
    ///
    /// # Errors
    /// `to`'s, or the device's wrapped in one.
    pub fn write_to(&self, kv: &KvCache, to: &mut impl Write) -> io::Result<()> {
        match &self.device {
            None => kv.write_to(to),
            Some(device) => device.sequence.lock().write_to(kv.len(), to),
        }
    }

    /// Fills an empty sequence with the K and V of `len` positions, which the token of `newest` follows;
    /// positions below `written` had been written.
    ///
    /// # Errors
    /// If memory is exhausted, or the device's, wrapped in `io`'s; or `from`'s.
    pub fn read_from(
        &self,
        kv: &mut KvCache,
        len: usize,
        written: usize,
        newest: Option<&DecodeState>,
        from: &mut impl Read,
    ) -> io::Result<()> {
        let Some(DeviceSequence { sequence, .. }) = &self.device else { return kv.read_from(len, written, from) };
        let hidden = newest.map(|newest| F32View::new(&newest.hidden)).transpose().map_err(io::Error::other)?;
        sequence.lock().read_from(len, hidden.as_deref(), from)?;
        kv.set_len(len, written);
        Ok(())
    }
}

impl DeviceSequence {
    /// One pass of this sequence, whose rows are staged in `round`.
    ///
    /// # Errors
    /// The device's.
    pub fn pass(&self, ids: &[u32], round: &Round<'_>, outputs: OutputRows) -> Result<DevicePass<'_>> {
        DevicePass::run(&self.models, vec![self.part(ids.to_vec(), round, outputs, outputs)])
    }

    /// Positions that its page tables hold.
    pub fn context(&self) -> usize {
        self.sequence.lock().plan().context()
    }

    /// The largest context up to `default` that its page tables hold, and memory once no other sequence has pages.
    ///
    /// # Errors
    /// If no position fits, or the device's.
    pub fn longest_context(&self, options: &KvOptions, default: usize) -> Result<usize> {
        Ok(self.models.longest_context(options, default)?.min(self.context()))
    }

    /// A sequence that continues this one, which has `len` positions, independently. Pages are
    /// shared until either writes them.
    ///
    /// # Errors
    /// The device's.
    pub fn fork(&self, len: usize) -> Result<Self> {
        let fork = self.models.fork(&mut self.sequence.lock(), len)?;
        Ok(Self { models: self.models.clone(), sequence: Arc::new(Mutex::new(fork)) })
    }

    /// This sequence's part of a pass, whose rows are staged in `round`; with the rows of logits and of hidden states.
    pub fn part(&self, ids: Vec<u32>, round: &Round<'_>, outputs: OutputRows, hidden: OutputRows) -> PassPart<'_> {
        let (position, is_whole) = (round.position(), round.is_whole());
        PassPart { sequence: &self.sequence, ids, position, states: Vec::new(), outputs, hidden, is_whole }
    }

    /// Whether both can be in one pass.
    pub fn shares_passes(&self, other: &Self) -> bool {
        let plan = |of: &Self| of.sequence.lock().plan().clone();
        Arc::ptr_eq(&self.models, &other.models) && Arc::ptr_eq(&plan(self), &plan(other))
    }
}

impl ForwardOutput<'_> {
    /// Verifies `draft`, which follows `tokens`; this pass has one row more. Also returns the target's
    /// log-probabilities, if requested.
    ///
    /// # Errors
    /// If a logit is NaN or infinite, or the device's.
    pub fn verify(
        &mut self,
        draft: &mut Draft,
        settings: &Settings,
        tokens: &[u32],
        rng: &mut StdRng,
    ) -> Result<(Accepted, Vec<TokenLogprobs>)> {
        let simulated = settings.simulated.as_ref().map(|simulated| simulated.count(draft.tokens.len(), rng));
        if let ForwardOutput::Device(output) = self {
            if settings.decides_on_device() {
                let accepted = match simulated {
                    None => output.accept(&mut draft.tokens, AcceptRule::Argmax)?,
                    Some(count) => output.accept(&mut draft.tokens[..count], AcceptRule::All)?,
                };
                return Ok((accepted, Vec::new()));
            }
            output.resolve(&mut draft.tokens)?;
        }
        let rows = draft.tokens.len() + 1;
        if let (ForwardOutput::Device(output), Some(count)) = (&mut *self, settings.largest_logits())
            && let Some(rows) = output.largest_logits(rows, count)?
        {
            let target_probs = |i: usize| settings.sampler.distribution(Some(&rows[i].ids), &rows[i].logits);
            return Ok((accepted(draft, simulated, target_probs, rng)?, Vec::new()));
        }
        let logits = self.logits(rows)?;
        let vocab = logits.len() / rows;
        let row = |i: usize| &logits[i * vocab..(i + 1) * vocab];
        let history = settings.history(tokens, &draft.tokens);
        let before = history.len() - draft.tokens.len();
        // A processor's panic is an error of its row.
        let distribution = |i: usize| Error::catch(|| settings.distribution(&history[..before + i], i, row(i)));
        let accepted = accepted(draft, simulated, distribution, rng)?;
        let logprobs = settings.logprobs.map(|top| {
            let emitted = draft.tokens[..accepted.count].iter().chain([&accepted.next]).enumerate();
            emitted.map(|(i, token)| TokenLogprobs::of(settings.sampler.isa(), row(i), *token, top)).collect()
        });
        Ok((accepted, logprobs.unwrap_or_default()))
    }

    /// The logits of the first `rows` output rows, after the soft cap: `(rows, vocab)`.
    ///
    /// # Errors
    /// The device's.
    pub fn logits(&self, rows: usize) -> Result<Logits<'_>> {
        match self {
            ForwardOutput::Cpu(output) => Ok(Logits::Cpu(F32View::new(&output.logits)?)),
            ForwardOutput::Device(output) => Ok(Logits::Read(output.logits(rows)?)),
        }
    }

    /// The hidden states of the first `rows` output rows, after the final norm: `(rows, hidden)`.
    ///
    /// # Errors
    /// The device's.
    pub fn hidden(&self, rows: usize) -> Result<Vec<f32>> {
        match self {
            ForwardOutput::Cpu(output) => Ok(F32View::new(&output.hidden)?.to_vec()),
            ForwardOutput::Device(output) => output.hidden(0..rows),
        }
    }

    /// Continues the sequence with `token`, which row `row` predicted. Returns that row's state `(1, hidden)`: on a
    /// device, where it stays, only if `confidence` needs it, else an empty one.
    ///
    /// # Errors
    /// The device's.
    pub fn advance(&mut self, row: usize, token: u32, confidence: Confidence) -> Result<Tensor> {
        match self {
            ForwardOutput::Cpu(output) => Ok(output.hidden.narrow(0, row, 1)?.contiguous()?),
            ForwardOutput::Device(output) => {
                output.set_newest(row, token)?;
                let state = if confidence == Confidence::Report { output.hidden(row..row + 1)? } else { Vec::new() };
                let width = state.len();
                tensor(state, (1, width))
            }
        }
    }

    /// Index of the last row with a hidden state that the host continues from.
    ///
    /// # Errors
    /// Candle's.
    pub fn last_row(&self) -> Result<usize> {
        match self {
            ForwardOutput::Cpu(output) => Ok(output.hidden.dim(0)?.saturating_sub(1)),
            ForwardOutput::Device(output) => Ok(output.last_row()),
        }
    }

    /// What drafters observe of the first `rows` rows; nothing if these have no hidden states.
    ///
    /// # Errors
    /// Candle's.
    pub fn states(&self, rows: usize) -> Result<States> {
        match self {
            ForwardOutput::Cpu(output) if output.hidden.dim(0)? >= rows => {
                let first = |x: &Tensor| x.narrow(0, 0, rows);
                let taps = output.taps.iter().map(first).collect::<candle_core::Result<_>>()?;
                Ok(States { hidden: Some(first(&output.hidden)?), taps, on_device: None })
            }
            ForwardOutput::Cpu(_) => Ok(States::default()),
            ForwardOutput::Device(output) => Ok(States { on_device: Some(output.states(rows)), ..States::default() }),
        }
    }
}

/// What drafters observe of committed rows: see [`Observed`].
#[derive(Default)]
pub(crate) struct States {
    hidden: Option<Tensor>,
    on_device: Option<DeviceStates>,
    taps: Vec<Tensor>,
}

impl States {
    pub fn observed<'a>(&'a self, tokens: &'a [u32], first: usize, own: Option<AcceptResult>) -> Observed<'a> {
        let Self { hidden, on_device, taps } = self;
        Observed { tokens, first, hidden: hidden.as_ref(), on_device: on_device.as_ref(), taps, own }
    }
}

/// Accepts drafts by the target's distribution of each row, or `simulated` many.
fn accepted(
    draft: &Draft,
    simulated: Option<usize>,
    mut target_probs: impl FnMut(usize) -> Result<Distribution>,
    rng: &mut StdRng,
) -> Result<Accepted> {
    match simulated {
        None => accept_rows(draft, target_probs, rng),
        Some(count) => Ok(Accepted { count, next: target_probs(count)?.sample(rng) }),
    }
}
