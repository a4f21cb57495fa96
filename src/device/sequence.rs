//! One sequence on a device: its K and V, and the results of a round.
//!
//! A greedy round has one host synchronisation: drafts stay in device memory from step to step and into verification,
//! drafts are accepted on the device, and the host reads the result: [`Readback`].
//!
//! Passes are recorded once per number of rows and replayed: their parameters are constant, variable data is in device memory.
//! Exceptions: the number of attention splits covers positions up to a horizon, beyond which everything is recorded again, as it
//! is after the outputs grew; and passes that quantize pages (one in tens) are launched directly.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::sync::Arc;

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::accept::{AcceptOutput, accept_greedy};
use foretoken_gpu::plan::vocabulary::{NO_ID, Scores, argmax, argmax_parts};

use super::Recording;
use super::buffer::{Buffer, subslice};
use super::kv::DeviceKv;
use super::launcher::Launcher;
use super::models::{DeviceAssistant, Models};
use super::ops::DeviceOps;
use super::outputs::{DraftOutputs, TargetOutputs};
use super::positions::{ChainPositions, HostPosition, PassKv, PassStart};
use super::queue::Queue;
use super::readback::Readback;
use super::temporaries::Temporaries;
use crate::kv::{KvLayout, KvOptions};
use crate::model::{OutputRows, Request};
use crate::{Error, Result};

/// Placeholder for a drafted token whose id the host has not read yet.
pub(crate) const DRAFTED: u32 = NO_ID - 1;

/// Output rows allocated initially, so that verification rarely reallocates.
const MIN_OUTPUT_ROWS: usize = 16;

/// Minimum distance of horizons in positions: one attention split.
const MIN_HORIZON: usize = 512;

/// The key of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum RecordedPass {
    /// A target pass over `rows` rows, all of them output rows.
    Verify { rows: usize, start: StartLength },
    /// Accepting `drafts` drafts.
    Accept { drafts: usize, rule: AcceptRule },
    /// Step `link` of a draft chain.
    Draft { link: usize, start: StartLength, choice: DraftChoice },
}

/// The committed length when a pass begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum StartLength {
    /// The length in device memory.
    Current,
    /// That plus the tokens emitted by the last accept.
    AfterAccept,
}

/// How drafts are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum AcceptRule {
    /// A draft is accepted if it is the target's argmax.
    Argmax,
    /// All given drafts are accepted: the host simulates acceptance, to measure speed.
    All,
}

/// Where a draft is chosen from its scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DraftChoice {
    /// On the device (argmax), without host synchronisation.
    Device,
    /// On the host, by [`Sequence::put_draft`].
    Host,
}

/// Recordings, and the state that they are valid for.
#[derive(Default)]
struct Recordings {
    made: HashMap<RecordedPass, Box<dyn Recording>>,
    horizon: usize,
}

/// A sequence.
pub(crate) struct Sequence {
    models: Arc<Models>,
    ops: DeviceOps,
    kv: DeviceKv,
    chain: ChainPositions,
    readback: Readback,
    tokens: Buffer<u32>, // emitted by the last accept
    state: Buffer<f32>,  // hidden state that predicted the last token, if there is no assistant
    /// `(length, -, -, -, position of the first output row)`, aligned to 16 bytes each.
    lengths: Buffer<i32>,
    length: usize,          // the host's copy of it
    emitted: Option<usize>, // tokens that the next pass adds to it on the device
    newest: Option<u32>,    // the last token on the device, if known and its hidden state is there
    recordings: Recordings,
}

impl Sequence {
    /// An empty sequence, and its context: `options.max_context`, or the largest up to `default` that fits memory. 1/16 of the
    /// free memory is left for activations.
    ///
    /// # Errors
    /// If no kernel supports a K/V format, or the device is out of memory; nothing stays allocated then.
    pub fn new(models: &Arc<Models>, layout: &KvLayout, options: &KvOptions, default: usize) -> Result<(Self, usize)> {
        options.check(layout)?;
        let (free, _) = models.device().memory()?;
        let memory = options.memory.unwrap_or((free - free / 16) as u64);
        let bytes_at = DeviceKv::bytes_at(&**models.device(), layout, options)?;
        let context = KvOptions { memory: Some(memory), ..options.clone() }.context(default, bytes_at)?;
        // A session file may request more rows than the context has positions.
        let options = KvOptions { max_round_rows: options.max_round_rows.min(context), ..options.clone() };
        Ok((Self::of_context(models.clone(), layout, &options, context)?, context))
    }

    fn of_context(models: Arc<Models>, layout: &KvLayout, options: &KvOptions, context: usize) -> Result<Self> {
        let device = models.device().clone();
        let on = &*device;
        let readback = Readback::new(on, DeviceKv::faults(layout), options.max_round_rows)?;
        let kv = DeviceKv::new(device.clone(), layout, options, context, readback.faults())?;
        let config = models.target.config();
        let hidden = config.hidden_size;
        let outputs = Arc::new(TargetOutputs::new(on, MIN_OUTPUT_ROWS, (hidden, config.vocab_size))?);
        let draft = models.assistant.as_ref().map(|of| of.outputs(on, hidden)).transpose()?;
        let temporaries = Temporaries::new(device.clone());
        let launcher = Launcher::new(device.clone(), temporaries.clone());
        Ok(Self {
            kv,
            readback,
            tokens: Buffer::new(on, options.max_round_rows)?,
            state: Buffer::new(on, hidden)?,
            lengths: Buffer::of(on, &[0; 8])?,
            chain: ChainPositions::new(on)?,
            ops: DeviceOps { queue: Queue { launcher, temporaries }, outputs, draft: draft.map(Arc::new) },
            length: 0,
            emitted: None,
            newest: None,
            recordings: Recordings::default(),
            models,
        })
    }

    /// Bytes allocated for K and V.
    pub fn kv_bytes(&self) -> usize {
        self.kv.bytes()
    }

    /// One pass over `ids`, whose K and V are staged from `position` on. Logits and hidden states of the output rows
    /// stay on the device. [`DRAFTED`] ids are read from the draft chain on the device.
    ///
    /// # Errors
    /// If the device is out of memory, or the driver fails.
    pub fn forward(&mut self, ids: &[u32], position: usize, outputs: OutputRows) -> Result<()> {
        let (rows, verifies) = (ids.len(), outputs == OutputRows::All);
        let outputs = outputs.of(rows);
        self.grow(outputs)?;
        self.kv.reserve(position + rows)?;
        let known = ids.iter().take_while(|id| **id != DRAFTED).count();
        let there = usize::from(self.newest.is_some() && self.newest == ids.first().copied());
        if known > there {
            self.readback.write(there, &ids[there..known])?;
        }
        let begin = self.begin(position)?;
        if outputs > 0 && outputs < rows {
            self.lengths.write(4, &[(position + rows - outputs) as i32])?;
        }
        self.newest = None;
        let end = position + rows;
        if !verifies || rows > MIN_OUTPUT_ROWS || self.kv.quantizes_pages(position, end) {
            self.pass(&self.ops, begin, (rows, outputs))?;
            // Rows committed without accept are checked for NaN and infinity here.
            return self.wait();
        }
        let begin = PassStart { at: self.at(position, end), ..begin };
        self.replay(RecordedPass::Verify { rows, start: begin.start_length() }, |sequence, ops| {
            sequence.pass(ops, begin, (rows, rows))
        })
    }

    /// Launches the target over `rows` ids; the last `outputs` rows have logits and hidden states.
    fn pass(&self, ops: &DeviceOps, begin: PassStart, (rows, outputs): (usize, usize)) -> Result<()> {
        let newest = Vec::from_iter(rows - outputs..rows);
        let request = Request { logits: newest.clone(), hidden: newest, taps: Vec::new() };
        let mut kv = PassKv::consecutive(&ops.queue, &self.kv, begin, rows)?;
        self.models.target.forward(ops, (self.readback.from(0, rows), rows), &mut kv, &request).map(drop)
    }

    /// `position` with the current horizon. If `end` exceeds it, the horizon grows by 1/8 of `end` and all recordings are
    /// dropped: recording takes about as long as a few rounds.
    fn at(&mut self, position: usize, end: usize) -> HostPosition {
        if end > self.recordings.horizon {
            let step = (end.next_power_of_two() / 8).max(MIN_HORIZON);
            self.recordings = Recordings { horizon: end.next_multiple_of(step), ..Recordings::default() };
        }
        HostPosition { position, horizon: Some(self.recordings.horizon) }
    }

    /// Replays `pass`, first recording the launches of `launches` if there is no recording.
    fn replay(&mut self, pass: RecordedPass, launches: impl Fn(&Self, &DeviceOps) -> Result<()>) -> Result<()> {
        if !self.recordings.made.contains_key(&pass) {
            let temporaries = self.ops.queue.temporaries.clone();
            let ops = self.ops.with(Launcher::recorder(self.models.device().clone(), temporaries));
            launches(self, &ops)?;
            self.recordings.made.insert(pass, ops.queue.launcher.finish()?);
        }
        // SAFETY: models, pages, outputs and temporaries are alive and are freed through the device, which waits for kernels.
        // Recordings are dropped with the outputs that they refer to; temporaries are not freed before the sequence. Page tables
        // are written before the rows that use them.
        unsafe { self.recordings.made[&pass].replay() }
    }

    /// The start of a pass at `position`; corrects the length in device memory if it differs.
    fn begin(&mut self, position: usize) -> Result<PassStart> {
        let (length, newest) = (subslice(self.lengths.slice(), 0, 1), subslice(self.lengths.slice(), 4, 1));
        let emitted = self.emitted.take().filter(|emitted| self.length + emitted == position);
        if emitted.is_none() && self.length != position {
            self.lengths.write(0, &[position as i32])?;
        }
        self.length = position;
        let emitted = emitted.map(|_| subslice(self.readback.accept(), 2, 1));
        Ok(PassStart { length, newest, emitted, at: HostPosition { position, horizon: None } })
    }

    /// Reallocates the outputs if they have fewer than `rows` rows.
    fn grow(&mut self, rows: usize) -> Result<()> {
        if rows > self.ops.outputs.rows {
            let config = self.models.target.config();
            let shape = (config.hidden_size, config.vocab_size);
            self.recordings = Recordings::default();
            self.ops.outputs = Arc::new(TargetOutputs::new(&**self.models.device(), rows, shape)?);
        }
        Ok(())
    }

    /// Chooses the target's token for the `drafts.len() + 1` rows of the last pass and accepts drafts by `rule`: returns how
    /// many, and the token after them. [`DRAFTED`] ids in `drafts` are replaced by the real ones.
    ///
    /// # Errors
    /// If the scores are NaN or infinite, or the driver fails.
    pub fn accept(&mut self, drafts: &mut [u32], rule: AcceptRule) -> Result<(usize, u32)> {
        let drafted = drafts.len();
        self.replay(RecordedPass::Accept { drafts: drafted, rule }, |sequence, ops| {
            sequence.choose(&ops.queue.launcher, drafted + 1)?;
            sequence.launch_accept(&ops.queue.launcher, (drafted, rule), 0)
        })?;
        let (result, drafted) = self.readback.read(drafts.len(), &self.kv)?;
        drafts.copy_from_slice(&drafted);
        let (accepted, next, emitted) = (result[0] as usize, result[1], result[2] as usize);
        if next == NO_ID {
            return Err(Error::logits(None));
        }
        (self.emitted, self.newest) = (Some(emitted), Some(next));
        Ok((accepted, next))
    }

    /// The target's argmax for the first `rows` rows of the last pass.
    fn choose(&self, launcher: &Launcher, rows: usize) -> Result<()> {
        let (outputs, config) = (&self.ops.outputs, self.models.target.config());
        let scores = Scores {
            x: outputs.logits.slice(),
            rows,
            n: config.vocab_size,
            stride: config.vocab_size,
            cap: config.final_logit_softcapping.map(|cap| cap as f32),
            suppressed: self.models.suppressed(),
            grouped: None,
        };
        launcher.run(argmax_parts(&scores, outputs.partial.slice(), outputs.chosen.slice()))?;
        launcher.run(argmax(&scores, outputs.partial.slice(), outputs.chosen.slice()))
    }

    /// Accepts among `count` drafts, from row `first` of the last pass on.
    fn launch_accept(&self, launcher: &Launcher, (count, rule): (usize, AcceptRule), first: usize) -> Result<()> {
        let hidden = self.models.target.config().hidden_size;
        let (newest, at) = self.newest();
        let newest = subslice(newest.slice(), at, hidden);
        let out = AcceptOutput { counts: self.readback.accept(), tokens: self.tokens.slice(), hidden: newest };
        let states = subslice(self.ops.outputs.hidden.slice(), first * hidden, (count + 1) * hidden);
        let (chosen, none) = (self.ops.outputs.chosen.slice(), (DeviceSlice::new(0, 0), 0));
        let drafts = match rule {
            AcceptRule::Argmax => self.readback.from(1, count),
            AcceptRule::All => chosen,
        };
        launcher.run(accept_greedy((drafts, count), chosen, none, (states, hidden), &out))
    }

    /// Advances the sequence to `token` after row `row` of the last pass. No launch if the last accept had the same
    /// result.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn set_newest(&mut self, row: usize, token: u32) -> Result<()> {
        if self.emitted == Some(row + 1) && self.newest == Some(token) {
            return Ok(());
        }
        // Run accept with zero drafts to copy the hidden state and the token.
        self.ops.outputs.chosen.write(0, &[token])?;
        self.launch_accept(&self.ops.queue.launcher, (0, AcceptRule::Argmax), row)?;
        (self.emitted, self.newest) = (None, Some(token));
        Ok(())
    }

    /// The hidden state `(hidden)` that predicted the last token: buffer and offset.
    fn newest(&self) -> (&Buffer<f32>, usize) {
        let state = |draft: &Arc<DraftOutputs>| draft.first.len() / 2;
        self.ops.draft.as_ref().map_or((&self.state, 0), |draft| (&draft.first, state(draft)))
    }

    /// The hidden state that predicted the last token: `(hidden)`.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn newest_state(&self) -> Result<Vec<f32>> {
        let (newest, at) = self.newest();
        newest.read(at, self.models.target.config().hidden_size)
    }

    /// Writes the K and V of the first `len` positions: see [`DeviceKv::write_to`].
    ///
    /// # Errors
    /// Those of `to`, or the driver's inside an `io::Error`.
    pub fn write_to(&self, len: usize, to: &mut impl Write) -> io::Result<()> {
        self.kv.write_to(len, to)
    }

    /// Fills an empty sequence with the K and V of `len` positions, and `newest`: the token after them, if any, and the
    /// hidden state that predicted it.
    ///
    /// # Errors
    /// If the device is out of memory or the driver fails, inside an `io::Error`; or those of `from`.
    pub fn read_from(&mut self, len: usize, newest: Option<(u32, &[f32])>, from: &mut impl Read) -> io::Result<()> {
        self.kv.read_from(len, from)?;
        if let Some((token, state)) = newest {
            let (buffer, at) = self.newest();
            buffer.write(at, state).and_then(|()| self.readback.write(0, &[token])).map_err(io::Error::other)?;
            self.newest = Some(token);
        }
        Ok(())
    }

    /// Waits for all launches.
    ///
    /// # Errors
    /// If K or V of a pass were NaN or infinite, or the driver fails.
    pub fn wait(&self) -> Result<()> {
        self.readback.read(0, &self.kv).map(drop)
    }

    /// Logits of the first `rows` output rows of the last pass, after the soft cap: `(rows, vocab)`.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn logits(&self, rows: usize) -> Result<Vec<f32>> {
        let config = self.models.target.config();
        self.wait()?;
        let mut logits = self.ops.outputs.logits.read(0, rows * config.vocab_size)?;
        if let Some(cap) = config.final_logit_softcapping {
            foretoken_kernels::activation::soft_cap(foretoken_kernels::Isa::best(), &mut logits, cap as f32);
        }
        Ok(logits)
    }

    /// The hidden state of output row `row` of the last pass: `(hidden)`.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn state(&self, row: usize) -> Result<Vec<f32>> {
        let hidden = self.models.target.config().hidden_size;
        self.ops.outputs.hidden.read(row * hidden, hidden)
    }

    /// Replaces [`DRAFTED`] ids by the ids in device memory.
    ///
    /// # Errors
    /// If the driver fails, or a draft's scores were NaN or infinite.
    pub fn resolve(&self, drafts: &mut [u32]) -> Result<()> {
        if drafts.contains(&DRAFTED) {
            let (_, ids) = self.readback.read(drafts.len(), &self.kv)?;
            drafts.iter_mut().zip(ids).filter(|(draft, _)| **draft == DRAFTED).for_each(|(draft, id)| *draft = id);
        }
        if drafts.contains(&NO_ID) { Err(Error::logits(None).of_draft()) } else { Ok(()) }
    }

    /// Step `link` (from 0) of a draft chain after `position` committed positions and the token `last`. The scores stay on the
    /// device; with [`DraftChoice::Device`] their argmax becomes the draft, with [`DraftChoice::Host`] the caller sets one before
    /// the next step.
    /// one before the next step.
    ///
    /// # Errors
    /// If the models have no assistant, or the driver fails.
    pub fn draft(&mut self, last: u32, position: usize, link: usize, choice: DraftChoice) -> Result<()> {
        if link == 0 && self.newest != Some(last) {
            // After a failed round. The hidden state is stale as well, which affects only this draft's acceptance.
            self.readback.write(0, &[last])?;
            self.newest = Some(last);
        }
        let begin = if link == 0 { Some(self.begin(position)?) } else { None };
        let start = begin.as_ref().map_or(StartLength::Current, PassStart::start_length);
        let at = self.at(position, position);
        self.replay(RecordedPass::Draft { link, start, choice }, |sequence, ops| {
            let (DeviceAssistant { model, donors }, outputs) = sequence.drafting()?;
            let mut kv =
                PassKv::chain(&ops.queue, &sequence.kv, (&sequence.chain, donors), (link, begin.as_ref(), at))?;
            let (table, token) = (sequence.models.target.embed_tokens(), sequence.readback.from(link, 1));
            let (scores, _) = model.step(ops, (table, token), &outputs.state(link), &mut kv)?;
            match choice {
                DraftChoice::Host => Ok(()),
                DraftChoice::Device => {
                    let scores = Scores { suppressed: sequence.models.suppressed(), ..scores };
                    let (partial, token) = (outputs.partial.slice(), sequence.readback.from(link + 1, 1));
                    ops.queue.launcher.run(argmax_parts(&scores, partial, token))?;
                    ops.queue.launcher.run(argmax(&scores, partial, token))
                }
            }
        })
    }

    /// The last step's scores, and their ids (`None`: all, in order).
    ///
    /// # Errors
    /// As [`Sequence::draft`].
    pub fn draft_scores(&self) -> Result<(Option<Vec<u32>>, Vec<f32>)> {
        let (assistant, outputs) = self.drafting()?;
        assistant.read_scores(outputs)
    }

    fn drafting(&self) -> Result<(&DeviceAssistant, &DraftOutputs)> {
        let missing = || Error::argument("speculation", "needs an assistant; load one, or turn speculation off");
        self.models.assistant.as_ref().zip(self.ops.draft.as_deref()).ok_or_else(missing)
    }

    /// Sets the draft of step `link`.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn put_draft(&self, link: usize, token: u32) -> Result<()> {
        self.readback.write(link + 1, &[token])
    }
}

impl PassStart {
    fn start_length(&self) -> StartLength {
        if self.emitted.is_some() { StartLength::AfterAccept } else { StartLength::Current }
    }
}
