//! One sequence on a device: its K and V, the rooms of its passes, and what a round leaves there.
//!
//! A greedy round needs the host once: drafts go from step to step and into the verification where they lie, the verdict is
//! made there, and the host reads it. What it reads is one run of memory,
//!
//! ```text
//! faults of K and V ..., stand, next, emitted, newest, draft 1, draft 2, ...
//! ```
//!
//! so that what a verdict calls the newest token is the first row of the next round's verification.
//!
//! Rounds are recorded, one time for each number of rows, and replayed. Whatever changes from round to round lies on the
//! device, but for three things. Splits of attention are as many as positions up to a horizon need; the text reaches it now
//! and then, and everything is recorded anew. So it is when a room must grow. And rounds that code pages, one in some tens,
//! are launched directly.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::sync::Arc;

use foretoken_kernels::gpu::Span;
use foretoken_kernels::gpu::accept::{Verdict, accept_greedy};
use foretoken_kernels::gpu::vocabulary::{NO_ID, Scores, argmax, argmax_parts};

use super::Models;
use super::assistant::{AssistantRoom, DeviceAssistant};
use super::standing::At;
use super::target::{Begin, TargetRoom};
use crate::device::{Buffer, Device, DeviceKv, NO_FAULT, Recording, Work, part};
use crate::gemma4::Wanted;
use crate::kv::{KvLayout, KvOptions};
use crate::{Error, Result};

/// A drafted token whose id the device has and the host has not read yet.
pub(crate) const DRAFTED: u32 = NO_ID - 1;

/// Words of a verdict, the newest token being the last.
const VERDICT: usize = 4;

/// Room for results that is made at once: verifications grow no room in the middle of a text.
const FEWEST_WANTED: usize = 16;

/// Positions between two horizons, at least: a split of attention.
const LEAST_HORIZON: usize = 512;

/// What is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Part {
    /// A pass over so many rows, all of them wanted.
    Verify { rows: usize, begins: Begins },
    /// The verdict over so many drafts, which is the target's or stands before it is asked.
    Verdict { drafts: usize, verdict: Judge },
    /// A link of a chain of drafts.
    Link { link: usize, begins: Begins, chooser: Chooser },
}

/// What the length is when a pass begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Begins {
    /// What the device has.
    There,
    /// What the last verdict emitted is to be added.
    Behind,
}

/// Who says which drafts stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Judge {
    /// The target.
    Target,
    /// A coin has said it: all of them.
    Coin,
}

/// Who chooses a draft from its scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Chooser {
    /// The device takes the best, and the host does not wait for it.
    Device,
    /// The host, by [`Sequence::put_draft`].
    Host,
}

/// Recordings, and what they hold for.
#[derive(Default)]
struct Recordings {
    made: HashMap<Part, Box<dyn Recording>>,
    horizon: usize,
    grown: usize,
}

/// A sequence.
pub(crate) struct Sequence {
    models: Arc<Models>,
    work: Work,
    kv: DeviceKv,
    room: TargetRoom,
    assistant: Option<AssistantRoom>,
    ids: Ids,
    tokens: Buffer<u32>, // what a verdict emits
    state: Buffer<f32>,  // the newest token's, where no assistant has a room for it
    /// `(length, -, -, -, newest)`: where passes begin.
    lengths: Buffer<i32>,
    length: usize,          // what the device has there
    emitted: Option<usize>, // what the last verdict will add to it
    newest: Option<u32>,    // the token there, if it is known and its state beside it
    recordings: Recordings,
}

impl Sequence {
    /// An empty sequence whose K and V are kept as `options` say; `context` positions fit.
    ///
    /// # Errors
    /// If the kernels do not read a format, or memory does not reach; nothing stays allocated then.
    pub(super) fn new(models: Arc<Models>, layout: &KvLayout, options: &KvOptions, context: usize) -> Result<Self> {
        let device = models.device.clone();
        let on = &*device;
        let ids = Ids::new(on, DeviceKv::faults(layout), options.max_round_rows)?;
        let kv = DeviceKv::new(device.clone(), layout, options, context, ids.faults())?;
        let room = models.target.room(on, FEWEST_WANTED, FEWEST_WANTED)?;
        let assistant = models.assistant.as_ref().map(|assistant| assistant.room(on)).transpose()?;
        let hidden = models.target.config().hidden_size;
        Ok(Self {
            kv,
            room,
            ids,
            tokens: Buffer::new(on, options.max_round_rows)?,
            state: Buffer::new(on, hidden)?,
            lengths: Buffer::of(on, &[0; 8])?,
            assistant,
            length: 0,
            emitted: None,
            newest: None,
            recordings: Recordings::default(),
            work: Work::new(device),
            models,
        })
    }

    /// Bytes of K and V that are allocated.
    pub fn kv_bytes(&self) -> usize {
        self.kv.bytes()
    }

    /// One pass over `ids`, whose K and V are staged from `position` on: logits and states of the wanted rows stay on the
    /// device. Ids that are [`DRAFTED`] are those that a chain left there, at the same places.
    ///
    /// # Errors
    /// If memory does not reach, or the driver fails.
    pub fn forward(&mut self, ids: &[u32], position: usize, wanted: Wanted) -> Result<()> {
        let verifies = wanted == Wanted::All;
        let (rows, wanted) = match wanted {
            Wanted::All => (ids.len(), ids.len()),
            Wanted::Last => (ids.len(), 1),
            Wanted::Nothing => (ids.len(), 0),
        };
        self.grow(rows, wanted)?;
        self.kv.reserve(position + rows)?;
        let known = ids.iter().take_while(|id| **id != DRAFTED).count();
        let there = usize::from(self.newest.is_some() && self.newest == ids.first().copied());
        if known > there {
            self.ids.write(there, &ids[there..known])?;
        }
        let ids = self.ids.from(0, rows);
        let begin = self.begin(position)?;
        if wanted > 0 && wanted < rows {
            self.lengths.write(4, &[(position + rows - wanted) as i32])?;
        }
        self.newest = None;
        let end = position + rows;
        if !verifies || rows > FEWEST_WANTED || self.kv.codes_pages(position, end) {
            self.models.target.forward(&self.work, &self.room, &self.kv, (ids, rows, wanted), &begin)?;
            // What is committed without a verdict, too, has numbers.
            return self.wait();
        }
        let begin = Begin { at: self.at(position, end), ..begin };
        self.replay(Part::Verify { rows, begins: begin.begins() }, |sequence, work| {
            sequence.models.target.forward(work, &sequence.room, &sequence.kv, (ids, rows, rows), &begin)
        })
    }

    /// `position`, for what is replayed up to a horizon beyond `end`. Where the last one does not reach, the next is an eighth
    /// of the text further: recording takes about as long as a few rounds.
    fn at(&mut self, position: usize, end: usize) -> At {
        if end > self.recordings.horizon {
            let step = (end.next_power_of_two() / 8).max(LEAST_HORIZON);
            self.recordings = Recordings { horizon: end.next_multiple_of(step), ..Recordings::default() };
        }
        At { position, horizon: Some(self.recordings.horizon) }
    }

    /// Runs what `launches` launches, which is recorded the first time.
    fn replay(&mut self, part: Part, launches: impl Fn(&Self, &Work) -> Result<()>) -> Result<()> {
        let grown =
            |sequence: &Self| sequence.room.grown() + sequence.assistant.as_ref().map_or(0, |room| room.grown());
        loop {
            // Memory is not allocated while launches are run, but it may be while they are listed: then some of them, and
            // whatever was recorded before, name memory that is gone.
            let now = grown(self);
            if now != self.recordings.grown {
                self.recordings.made.clear();
                self.recordings.grown = now;
            }
            if let Some(recording) = self.recordings.made.get(&part) {
                // SAFETY: the models, the sequence's rooms and its pages live, and are freed by the device only, which waits;
                // recordings go with the rooms that they name, and tables of pages are written before the rows they are for.
                return unsafe { recording.replay() };
            }
            let work = Work::keeping(self.models.device.clone());
            launches(self, &work)?;
            if grown(self) == now {
                self.recordings.made.insert(part, work.recording()?);
            }
        }
    }

    /// Where a pass from `position` on begins. The device's length is corrected if it is another one.
    fn begin(&mut self, position: usize) -> Result<Begin> {
        let (length, newest) = (part(self.lengths.span(), 0, 1), part(self.lengths.span(), 4, 1));
        let emitted = self.emitted.take().filter(|emitted| self.length + emitted == position);
        if emitted.is_none() && self.length != position {
            self.lengths.write(0, &[position as i32])?;
        }
        self.length = position;
        let emitted = emitted.map(|_| part(self.ids.verdict(), 2, 1));
        Ok(Begin { length, newest, emitted, at: At { position, horizon: None } })
    }

    /// Makes rooms that are too small anew.
    fn grow(&mut self, rows: usize, wanted: usize) -> Result<()> {
        let device = self.models.device.clone();
        if !self.room.fits(rows, wanted) {
            let (had, had_wanted) = self.room.size();
            // Passes take rows in few sizes: chunks of prompts, and verifications.
            self.recordings = Recordings::default();
            self.room = self.models.target.room(&*device, rows.max(had), wanted.max(had_wanted))?;
        }
        Ok(())
    }

    /// Chooses a token for every one of the `drafted + 1` rows of the last pass, and compares: how many drafts stand, and what
    /// follows them. `drafts` are given back as the ids that they are. Where a coin has said how many stand, those are what
    /// is judged, and the tokens in their place are the target's.
    ///
    /// # Errors
    /// If the scores are no numbers, or the driver fails.
    pub fn judge(&mut self, drafts: &mut [u32], verdict: Judge) -> Result<(usize, u32)> {
        let drafted = drafts.len();
        self.replay(Part::Verdict { drafts: drafted, verdict }, |sequence, work| {
            sequence.choose(work, drafted + 1)?;
            sequence.accept(work, (drafted, verdict), 0)
        })?;
        let (verdict, drafted) = self.ids.read(drafts.len(), &self.kv)?;
        drafts.copy_from_slice(&drafted);
        let (stand, next, emitted) = (verdict[0] as usize, verdict[1], verdict[2] as usize);
        if next == NO_ID {
            return Err(not_numbers());
        }
        (self.emitted, self.newest) = (Some(emitted), Some(next));
        Ok((stand, next))
    }

    /// The target's own token behind each of the last pass's first `rows` rows.
    fn choose(&self, work: &Work, rows: usize) -> Result<()> {
        let (room, config) = (&self.room, self.models.target.config());
        let scores = Scores {
            x: room.logits.span(),
            rows,
            n: config.vocab_size,
            stride: config.vocab_size,
            cap: config.final_logit_softcapping.map(|cap| cap as f32),
            suppressed: self.models.suppressed(),
            grouped: None,
        };
        work.run(argmax_parts(&scores, room.partial.span(), room.chosen.span()))?;
        work.run(argmax(&scores, room.partial.span(), room.chosen.span()))
    }

    /// The verdict over `count` drafts, of the last pass's rows from `first` on.
    fn accept(&self, work: &Work, (count, verdict): (usize, Judge), first: usize) -> Result<()> {
        let hidden = self.models.target.config().hidden_size;
        let (newest, at) = self.newest();
        let newest = part(newest.span(), at, hidden);
        let out = Verdict { verdict: self.ids.verdict(), tokens: self.tokens.span(), newest };
        let states = part(self.room.hidden.span(), first * hidden, (count + 1) * hidden);
        let (chosen, none) = (self.room.chosen.span(), (Span::new(0, 0), 0));
        let drafts = match verdict {
            Judge::Target => self.ids.from(1, count),
            Judge::Coin => chosen,
        };
        work.run(accept_greedy((drafts, count), chosen, none, (states, hidden), &out))
    }

    /// The sequence goes on behind row `row` of the last pass with `token`. After a verdict that says the same this is known.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn settle(&mut self, row: usize, token: u32) -> Result<()> {
        if self.emitted == Some(row + 1) && self.newest == Some(token) {
            return Ok(());
        }
        // A verdict over no drafts moves a state and its token to where the next round looks for them.
        self.room.chosen.write(0, &[token])?;
        self.accept(&self.work, (0, Judge::Target), row)?;
        (self.emitted, self.newest) = (None, Some(token));
        Ok(())
    }

    /// Where the state that predicted the newest token lies, `(hidden)`: a buffer, and where it begins there.
    fn newest(&self) -> (&Buffer<f32>, usize) {
        self.assistant.as_ref().map_or((&self.state, 0), AssistantRoom::state)
    }

    /// The state that predicted the newest token: `(hidden)`.
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
    /// Those of `to`, or the driver's in one of them.
    pub fn write_to(&self, len: usize, to: &mut impl Write) -> io::Result<()> {
        self.kv.write_to(len, to)
    }

    /// Fills an empty sequence with what was written at `len` positions. The `newest` token is the one behind them, if there
    /// is one, with the state that predicted it.
    ///
    /// # Errors
    /// If memory does not reach or the driver fails, in one of `io`'s; or those of `from`.
    pub fn read_from(&mut self, len: usize, newest: Option<(u32, &[f32])>, from: &mut impl Read) -> io::Result<()> {
        self.kv.read_from(len, from)?;
        if let Some((token, state)) = newest {
            let (buffer, at) = self.newest();
            buffer.write(at, state).and_then(|()| self.ids.write(0, &[token])).map_err(io::Error::other)?;
            self.newest = Some(token);
        }
        Ok(())
    }

    /// Waits for everything that was launched.
    ///
    /// # Errors
    /// If K or V of a pass were no numbers, or the driver fails.
    pub fn wait(&self) -> Result<()> {
        self.ids.read(0, &self.kv).map(drop)
    }

    /// The logits of the last pass's first `rows` wanted rows, after the soft cap: `(rows, vocab)`.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn logits(&self, rows: usize) -> Result<Vec<f32>> {
        let config = self.models.target.config();
        self.wait()?;
        let mut logits = self.room.logits.read(0, rows * config.vocab_size)?;
        if let Some(cap) = config.final_logit_softcapping {
            foretoken_kernels::activation::soft_cap(foretoken_kernels::Isa::best(), &mut logits, cap as f32);
        }
        Ok(logits)
    }

    /// The state of wanted row `row` of the last pass: `(hidden)`.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn state(&self, row: usize) -> Result<Vec<f32>> {
        let hidden = self.models.target.config().hidden_size;
        self.room.hidden.read(row * hidden, hidden)
    }

    /// The ids of drafts that only the device knows.
    ///
    /// # Errors
    /// If the driver fails, or a draft's scores were no numbers.
    pub fn resolve(&self, drafts: &mut [u32]) -> Result<()> {
        if drafts.contains(&DRAFTED) {
            let (_, ids) = self.ids.read(drafts.len(), &self.kv)?;
            drafts.iter_mut().zip(ids).filter(|(draft, _)| **draft == DRAFTED).for_each(|(draft, id)| *draft = id);
        }
        if drafts.contains(&NO_ID) { Err(not_numbers()) } else { Ok(()) }
    }

    /// Link `link` of a chain of drafts behind `position` committed positions, of which `last` is the next: the scores of the
    /// next token stay on the device, and the best of them is the link's draft unless the host is its chooser. Links count
    /// from 0, and each token is chosen before the next link.
    ///
    /// # Errors
    /// If the models have no assistant, or the driver fails.
    pub fn draft(&mut self, last: u32, position: usize, link: usize, chooser: Chooser) -> Result<()> {
        self.grow(link + 1, 0)?;
        if link == 0 && self.newest != Some(last) {
            // Its state is not there either: after a round that failed. That costs a draft.
            self.ids.write(0, &[last])?;
            self.newest = Some(last);
        }
        let begin = if link == 0 { Some(self.begin(position)?) } else { None };
        let begins = begin.as_ref().map_or(Begins::There, Begin::begins);
        let at = self.at(position, position);
        self.replay(Part::Link { link, begins, chooser }, |sequence, work| {
            let (assistant, room) = drafting(&sequence.models, &sequence.assistant)?;
            let placed = assistant.place(work, room, at, begin.as_ref())?;
            let token = (sequence.ids.from(link, 1), link);
            assistant.step(work, (room, &placed), &sequence.models.target, &sequence.kv, token)?;
            match chooser {
                Chooser::Host => Ok(()),
                Chooser::Device => {
                    assistant.choose(work, room, sequence.models.suppressed(), sequence.ids.from(link + 1, 1))
                }
            }
        })
    }

    /// What the newest link scored, and of which ids; no ids means all, in order.
    ///
    /// # Errors
    /// As [`Sequence::draft`].
    pub fn draft_scores(&self) -> Result<(Option<Vec<u32>>, Vec<f32>)> {
        let (assistant, room) = drafting(&self.models, &self.assistant)?;
        assistant.scores(room)
    }

    /// The host's choice is the draft of link `link`.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn put_draft(&self, link: usize, token: u32) -> Result<()> {
        self.ids.write(link + 1, &[token])
    }
}

/// What the host reads of a round. Tokens count from the newest, 0, to the drafts behind it.
struct Ids {
    words: Buffer<u32>,
    faults: usize,
    verdict: usize, // where it begins: at 16 bytes
}

impl Ids {
    fn new(device: &dyn Device, faults: usize, most_rows: usize) -> Result<Self> {
        let verdict = faults.next_multiple_of(4);
        let words = Buffer::new(device, verdict + VERDICT + most_rows)?;
        words.write(0, &vec![NO_FAULT; faults])?;
        Ok(Self { words, faults, verdict })
    }

    fn faults(&self) -> Span<u32> {
        part(self.words.span(), 0, self.faults)
    }

    fn verdict(&self) -> Span<u32> {
        part(self.words.span(), self.verdict, VERDICT)
    }

    /// `count` tokens, the first of which is number `token`.
    fn from(&self, token: usize, count: usize) -> Span<u32> {
        part(self.words.span(), self.verdict + VERDICT - 1 + token, count)
    }

    fn write(&self, token: usize, tokens: &[u32]) -> Result<()> {
        self.words.write(self.verdict + VERDICT - 1 + token, tokens)
    }

    /// The verdict, and the first `count` drafts.
    ///
    /// # Errors
    /// If K or V of a pass before were no numbers; or the driver fails.
    fn read(&self, count: usize, kv: &DeviceKv) -> Result<([u32; VERDICT], Vec<u32>)> {
        let words = self.words.read(0, self.verdict + VERDICT + count)?;
        if let Err(error) = kv.check(&words[..self.faults]) {
            // It is said once: the rows are not kept.
            self.words.write(0, &vec![NO_FAULT; self.faults])?;
            return Err(error);
        }
        let (verdict, drafts) = words[self.verdict..].split_at(VERDICT);
        Ok((std::array::from_fn(|i| verdict[i]), drafts.to_vec()))
    }
}

impl Begin {
    fn begins(&self) -> Begins {
        if self.emitted.is_some() { Begins::Behind } else { Begins::There }
    }
}

fn drafting<'a>(
    models: &'a Models,
    room: &'a Option<AssistantRoom>,
) -> Result<(&'a DeviceAssistant, &'a AssistantRoom)> {
    let missing = || Error::Input("speculation needs an assistant; load one, or turn speculation off".into());
    models.assistant.as_ref().zip(room.as_ref()).ok_or_else(missing)
}

fn not_numbers() -> Error {
    Error::Input("the model's scores are no numbers: the checkpoint is damaged".into())
}
