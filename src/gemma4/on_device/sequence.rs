//! One sequence on a device: its K and V, its workspaces, and the results of a round.
//!
//! A greedy round has one host synchronisation: drafts stay in device memory from step to step and into verification,
//! drafts are accepted on the device, and the host reads the result, one contiguous range of words:
//!
//! ```text
//! faults of K and V ..., accepted, next, emitted, newest, draft 1, draft 2, ...
//! ```
//!
//! The newest token is stored where the next round's verification reads its first row.
//!
//! Passes are recorded once per number of rows and replayed: their parameters are constant, what changes lies in device
//! memory. Exceptions: the number of attention splits covers positions up to a horizon, beyond which everything is
//! recorded again; so it is after a workspace grew; and passes that quantize pages (one in tens) are launched directly.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::sync::Arc;

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::accept::{AcceptOutput, accept_greedy};
use foretoken_gpu::plan::vocabulary::{NO_ID, Scores, argmax, argmax_parts};

use super::Models;
use super::assistant::{AssistantWorkspace, DeviceAssistant};
use super::positions::HostPosition;
use super::target::{PassStart, TargetWorkspace};
use crate::device::{Buffer, Device, DeviceKv, Launcher, NO_FAULT, Recording, subslice};
use crate::kv::{KvLayout, KvOptions};
use crate::model::OutputRows;
use crate::{Error, Result};

/// Stands for a drafted token whose id the host has not read yet.
pub(crate) const DRAFTED: u32 = NO_ID - 1;

/// Words of an accept result: accepted, next, emitted, newest token.
const ACCEPT_WORDS: usize = 4;

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
    Accept { drafts: usize, judge: Judge },
    /// Step `link` of a draft chain.
    Draft { link: usize, start: StartLength, chooser: Chooser },
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
pub(crate) enum Judge {
    /// A draft is accepted if it is the target's argmax.
    Target,
    /// All given drafts are accepted: the host simulates acceptance, to measure speed.
    Coin,
}

/// Where a draft is chosen from its scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Chooser {
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
    grown: usize,
}

/// A sequence.
pub(crate) struct Sequence {
    models: Arc<Models>,
    launcher: Launcher,
    kv: DeviceKv,
    workspace: TargetWorkspace,
    assistant: Option<AssistantWorkspace>,
    ids: Ids,
    tokens: Buffer<u32>, // emitted by the last accept
    state: Buffer<f32>,  // hidden state that predicted the newest token, if there is no assistant
    /// `(length, -, -, -, position of the first output row)`, aligned to 16 bytes each.
    lengths: Buffer<i32>,
    length: usize,          // the host's copy of it
    emitted: Option<usize>, // tokens that the next pass adds to it on the device
    newest: Option<u32>,    // the newest token on the device, if known and its hidden state is there too
    recordings: Recordings,
}

impl Sequence {
    /// An empty sequence of at most `context` positions, with K and V as in `options`.
    ///
    /// # Errors
    /// If no kernel reads a K/V format, or the device is out of memory; nothing stays allocated then.
    pub(super) fn new(models: Arc<Models>, layout: &KvLayout, options: &KvOptions, context: usize) -> Result<Self> {
        let device = models.device.clone();
        let on = &*device;
        let ids = Ids::new(on, DeviceKv::faults(layout), options.max_round_rows)?;
        let kv = DeviceKv::new(device.clone(), layout, options, context, ids.faults())?;
        let workspace = models.target.workspace(on, MIN_OUTPUT_ROWS, MIN_OUTPUT_ROWS)?;
        let assistant = models.assistant.as_ref().map(|assistant| assistant.workspace(on)).transpose()?;
        let hidden = models.target.config().hidden_size;
        Ok(Self {
            kv,
            workspace,
            ids,
            tokens: Buffer::new(on, options.max_round_rows)?,
            state: Buffer::new(on, hidden)?,
            lengths: Buffer::of(on, &[0; 8])?,
            assistant,
            length: 0,
            emitted: None,
            newest: None,
            recordings: Recordings::default(),
            launcher: Launcher::new(device),
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
        let verifies = outputs == OutputRows::All;
        let (rows, outputs) = match outputs {
            OutputRows::All => (ids.len(), ids.len()),
            OutputRows::Last => (ids.len(), 1),
            OutputRows::None => (ids.len(), 0),
        };
        self.grow(rows, outputs)?;
        self.kv.reserve(position + rows)?;
        let known = ids.iter().take_while(|id| **id != DRAFTED).count();
        let there = usize::from(self.newest.is_some() && self.newest == ids.first().copied());
        if known > there {
            self.ids.write(there, &ids[there..known])?;
        }
        let ids = self.ids.from(0, rows);
        let begin = self.begin(position)?;
        if outputs > 0 && outputs < rows {
            self.lengths.write(4, &[(position + rows - outputs) as i32])?;
        }
        self.newest = None;
        let end = position + rows;
        if !verifies || rows > MIN_OUTPUT_ROWS || self.kv.quantizes_pages(position, end) {
            self.models.target.forward(&self.launcher, &self.workspace, &self.kv, (ids, rows, outputs), &begin)?;
            // Rows committed without accept are checked to be finite here.
            return self.wait();
        }
        let begin = PassStart { at: self.at(position, end), ..begin };
        self.replay(RecordedPass::Verify { rows, start: begin.start_length() }, |sequence, launcher| {
            sequence.models.target.forward(launcher, &sequence.workspace, &sequence.kv, (ids, rows, rows), &begin)
        })
    }

    /// `position` with the current horizon. If `end` is beyond it, the horizon moves by 1/8 of `end` and all recordings
    /// are dropped: recording takes about as long as a few rounds.
    fn at(&mut self, position: usize, end: usize) -> HostPosition {
        if end > self.recordings.horizon {
            let step = (end.next_power_of_two() / 8).max(MIN_HORIZON);
            self.recordings = Recordings { horizon: end.next_multiple_of(step), ..Recordings::default() };
        }
        HostPosition { position, horizon: Some(self.recordings.horizon) }
    }

    /// Replays `pass`, recording what `launches` launches if there is no recording.
    fn replay(&mut self, pass: RecordedPass, launches: impl Fn(&Self, &Launcher) -> Result<()>) -> Result<()> {
        let grown = |sequence: &Self| {
            sequence.workspace.grown() + sequence.assistant.as_ref().map_or(0, |workspace| workspace.grown())
        };
        loop {
            // Listing launches may reallocate a workspace; then this recording and earlier ones refer to freed memory.
            let now = grown(self);
            if now != self.recordings.grown {
                self.recordings.made.clear();
                self.recordings.grown = now;
            }
            if let Some(recording) = self.recordings.made.get(&pass) {
                // SAFETY: models, workspaces and pages are alive and are freed through the device, which waits for
                // kernels. Recordings are dropped with the workspaces that they refer to. Page tables are written
                // before the rows that use them.
                return unsafe { recording.replay() };
            }
            let launcher = Launcher::recorder(self.models.device.clone());
            launches(self, &launcher)?;
            if grown(self) == now {
                self.recordings.made.insert(pass, launcher.finish()?);
            }
        }
    }

    /// Start of a pass at `position`; corrects the length in device memory if it differs.
    fn begin(&mut self, position: usize) -> Result<PassStart> {
        let (length, newest) = (subslice(self.lengths.slice(), 0, 1), subslice(self.lengths.slice(), 4, 1));
        let emitted = self.emitted.take().filter(|emitted| self.length + emitted == position);
        if emitted.is_none() && self.length != position {
            self.lengths.write(0, &[position as i32])?;
        }
        self.length = position;
        let emitted = emitted.map(|_| subslice(self.ids.accept(), 2, 1));
        Ok(PassStart { length, newest, emitted, at: HostPosition { position, horizon: None } })
    }

    /// Reallocates workspaces that are too small.
    fn grow(&mut self, rows: usize, outputs: usize) -> Result<()> {
        let device = self.models.device.clone();
        if !self.workspace.fits(rows, outputs) {
            let (had, had_outputs) = self.workspace.size();
            // Passes have few sizes: prefill chunks and verify batches.
            self.recordings = Recordings::default();
            self.workspace = self.models.target.workspace(&*device, rows.max(had), outputs.max(had_outputs))?;
        }
        Ok(())
    }

    /// Chooses the target's token for the `drafts.len() + 1` rows of the last pass and accepts drafts as `judge` says:
    /// how many, and the token after them. [`DRAFTED`] ids in `drafts` are replaced by the real ones.
    ///
    /// # Errors
    /// If the scores are not finite, or the driver fails.
    pub fn judge(&mut self, drafts: &mut [u32], judge: Judge) -> Result<(usize, u32)> {
        let drafted = drafts.len();
        self.replay(RecordedPass::Accept { drafts: drafted, judge }, |sequence, launcher| {
            sequence.choose(launcher, drafted + 1)?;
            sequence.accept(launcher, (drafted, judge), 0)
        })?;
        let (result, drafted) = self.ids.read(drafts.len(), &self.kv)?;
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
        let (workspace, config) = (&self.workspace, self.models.target.config());
        let scores = Scores {
            x: workspace.logits.slice(),
            rows,
            n: config.vocab_size,
            stride: config.vocab_size,
            cap: config.final_logit_softcapping.map(|cap| cap as f32),
            suppressed: self.models.suppressed(),
            grouped: None,
        };
        launcher.run(argmax_parts(&scores, workspace.partial.slice(), workspace.chosen.slice()))?;
        launcher.run(argmax(&scores, workspace.partial.slice(), workspace.chosen.slice()))
    }

    /// Accepts among `count` drafts, from row `first` of the last pass on.
    fn accept(&self, launcher: &Launcher, (count, judge): (usize, Judge), first: usize) -> Result<()> {
        let hidden = self.models.target.config().hidden_size;
        let (newest, at) = self.newest();
        let newest = subslice(newest.slice(), at, hidden);
        let out = AcceptOutput { counts: self.ids.accept(), tokens: self.tokens.slice(), hidden: newest };
        let states = subslice(self.workspace.hidden.slice(), first * hidden, (count + 1) * hidden);
        let (chosen, none) = (self.workspace.chosen.slice(), (DeviceSlice::new(0, 0), 0));
        let drafts = match judge {
            Judge::Target => self.ids.from(1, count),
            Judge::Coin => chosen,
        };
        launcher.run(accept_greedy((drafts, count), chosen, none, (states, hidden), &out))
    }

    /// Advances the sequence to `token` after row `row` of the last pass. No launch if the last accept had the same
    /// result.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn settle(&mut self, row: usize, token: u32) -> Result<()> {
        if self.emitted == Some(row + 1) && self.newest == Some(token) {
            return Ok(());
        }
        // Run accept with zero drafts to copy the hidden state and the token.
        self.workspace.chosen.write(0, &[token])?;
        self.accept(&self.launcher, (0, Judge::Target), row)?;
        (self.emitted, self.newest) = (None, Some(token));
        Ok(())
    }

    /// The hidden state `(hidden)` that predicted the newest token: buffer and offset.
    fn newest(&self) -> (&Buffer<f32>, usize) {
        self.assistant.as_ref().map_or((&self.state, 0), AssistantWorkspace::state)
    }

    /// The hidden state that predicted the newest token: `(hidden)`.
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
            buffer.write(at, state).and_then(|()| self.ids.write(0, &[token])).map_err(io::Error::other)?;
            self.newest = Some(token);
        }
        Ok(())
    }

    /// Waits for all launches.
    ///
    /// # Errors
    /// If K or V of a pass were not finite, or the driver fails.
    pub fn wait(&self) -> Result<()> {
        self.ids.read(0, &self.kv).map(drop)
    }

    /// Logits of the first `rows` output rows of the last pass, after the soft cap: `(rows, vocab)`.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn logits(&self, rows: usize) -> Result<Vec<f32>> {
        let config = self.models.target.config();
        self.wait()?;
        let mut logits = self.workspace.logits.read(0, rows * config.vocab_size)?;
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
        self.workspace.hidden.read(row * hidden, hidden)
    }

    /// Replaces [`DRAFTED`] ids by the ids in device memory.
    ///
    /// # Errors
    /// If the driver fails, or a draft's scores were not finite.
    pub fn resolve(&self, drafts: &mut [u32]) -> Result<()> {
        if drafts.contains(&DRAFTED) {
            let (_, ids) = self.ids.read(drafts.len(), &self.kv)?;
            drafts.iter_mut().zip(ids).filter(|(draft, _)| **draft == DRAFTED).for_each(|(draft, id)| *draft = id);
        }
        if drafts.contains(&NO_ID) { Err(Error::logits(None).of_draft()) } else { Ok(()) }
    }

    /// Step `link` (from 0) of a draft chain after `position` committed positions and the token `last`. The scores stay
    /// on the device; with [`Chooser::Device`] their argmax becomes the draft, with [`Chooser::Host`] the caller puts
    /// one before the next step.
    ///
    /// # Errors
    /// If the models have no assistant, or the driver fails.
    pub fn draft(&mut self, last: u32, position: usize, link: usize, chooser: Chooser) -> Result<()> {
        self.grow(link + 1, 0)?;
        if link == 0 && self.newest != Some(last) {
            // After a failed round. The hidden state is stale too, which costs acceptance of this draft only.
            self.ids.write(0, &[last])?;
            self.newest = Some(last);
        }
        let begin = if link == 0 { Some(self.begin(position)?) } else { None };
        let start = begin.as_ref().map_or(StartLength::Current, PassStart::start_length);
        let at = self.at(position, position);
        self.replay(RecordedPass::Draft { link, start, chooser }, |sequence, launcher| {
            let (assistant, workspace) = drafting(&sequence.models, &sequence.assistant)?;
            let placed = assistant.place(launcher, workspace, at, begin.as_ref())?;
            let token = (sequence.ids.from(link, 1), link);
            assistant.step(launcher, (workspace, &placed), &sequence.models.target, &sequence.kv, token)?;
            match chooser {
                Chooser::Host => Ok(()),
                Chooser::Device => {
                    assistant.choose(launcher, workspace, sequence.models.suppressed(), sequence.ids.from(link + 1, 1))
                }
            }
        })
    }

    /// The last step's scores, and their ids (`None`: all, in order).
    ///
    /// # Errors
    /// As [`Sequence::draft`].
    pub fn draft_scores(&self) -> Result<(Option<Vec<u32>>, Vec<f32>)> {
        let (assistant, workspace) = drafting(&self.models, &self.assistant)?;
        assistant.scores(workspace)
    }

    /// Sets the draft of step `link`.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn put_draft(&self, link: usize, token: u32) -> Result<()> {
        self.ids.write(link + 1, &[token])
    }
}

/// The words that the host reads after a round: see the module. Token 0 is the newest, token `i` draft `i`.
struct Ids {
    words: Buffer<u32>,
    faults: usize,
    accept: usize, // offset of the accept result, a multiple of 4 words
}

impl Ids {
    fn new(device: &dyn Device, faults: usize, most_rows: usize) -> Result<Self> {
        let accept = faults.next_multiple_of(4);
        let words = Buffer::new(device, accept + ACCEPT_WORDS + most_rows)?;
        words.write(0, &vec![NO_FAULT; faults])?;
        Ok(Self { words, faults, accept })
    }

    fn faults(&self) -> DeviceSlice<u32> {
        subslice(self.words.slice(), 0, self.faults)
    }

    fn accept(&self) -> DeviceSlice<u32> {
        subslice(self.words.slice(), self.accept, ACCEPT_WORDS)
    }

    /// `count` tokens from `token` on.
    fn from(&self, token: usize, count: usize) -> DeviceSlice<u32> {
        subslice(self.words.slice(), self.accept + ACCEPT_WORDS - 1 + token, count)
    }

    fn write(&self, token: usize, tokens: &[u32]) -> Result<()> {
        self.words.write(self.accept + ACCEPT_WORDS - 1 + token, tokens)
    }

    /// The accept result, and the first `count` drafts.
    ///
    /// # Errors
    /// If K or V of an earlier pass were not finite, or the driver fails.
    fn read(&self, count: usize, kv: &DeviceKv) -> Result<([u32; ACCEPT_WORDS], Vec<u32>)> {
        let words = self.words.read(0, self.accept + ACCEPT_WORDS + count)?;
        if let Err(error) = kv.check(&words[..self.faults]) {
            // Reported once: the caller drops the rows.
            self.words.write(0, &vec![NO_FAULT; self.faults])?;
            return Err(error);
        }
        let (result, drafts) = words[self.accept..].split_at(ACCEPT_WORDS);
        Ok((std::array::from_fn(|i| result[i]), drafts.to_vec()))
    }
}

impl PassStart {
    fn start_length(&self) -> StartLength {
        if self.emitted.is_some() { StartLength::AfterAccept } else { StartLength::Current }
    }
}

fn drafting<'a>(
    models: &'a Models,
    workspace: &'a Option<AssistantWorkspace>,
) -> Result<(&'a DeviceAssistant, &'a AssistantWorkspace)> {
    let missing = || Error::argument("speculation", "needs an assistant; load one, or turn speculation off");
    models.assistant.as_ref().zip(workspace.as_ref()).ok_or_else(missing)
}
