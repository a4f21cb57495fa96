//! A sequence on a device: its K and V, and its state between passes.

use std::io::{self, Read, Write};
use std::sync::Arc;

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::accept::{State, set_state};
use foretoken_gpu::plan::segments::{ON_DEVICE, Segment};

use super::Device;
use super::buffer::Buffer;
use super::kv::{DeviceKv, KvPlan};
use super::launcher::Launcher;
use super::pages::PageMemory;
use super::recurrent::RecurrentState;
use crate::Result;
use crate::kv::HeldPage;

/// Placeholder for a drafted token whose id the host has not read yet.
pub(crate) const DRAFTED: u32 = ON_DEVICE;

/// A sequence.
pub(crate) struct Sequence {
    kv: DeviceKv,
    state: Arc<Buffer<u32>>,           // see `Segment::state`
    hidden: Buffer<f32>,               // (hidden): predicted the token after the committed positions
    known: Option<(usize, u32)>,       // the state's length and token
    recurrent: Option<RecurrentState>, // if the model has delta nets
}

impl Sequence {
    /// An empty sequence of models whose hidden states have `hidden` channels.
    ///
    /// # Errors
    /// If the device is out of memory.
    pub(super) fn new(
        memory: &Arc<PageMemory>,
        plan: Arc<KvPlan>,
        hidden: usize,
        recurrent: Option<RecurrentState>,
    ) -> Result<Self> {
        Self::of(&**memory.device(), DeviceKv::new(memory.clone(), plan)?, hidden, recurrent)
    }

    fn of(device: &dyn Device, kv: DeviceKv, hidden: usize, recurrent: Option<RecurrentState>) -> Result<Self> {
        let (state, hidden) = (Buffer::new(device, 1 + kv.plan().max_rows())?, Buffer::new(device, hidden)?);
        let state = Arc::new(state);
        Ok(Self { kv, state, hidden, known: None, recurrent })
    }

    /// A sequence that continues independently. Pages are shared until either writes them. The
    /// committed rows are in the matrices of delta nets.
    ///
    /// # Errors
    /// If the device is out of memory, or the driver fails.
    pub(super) fn fork(&self, launcher: &Launcher) -> Result<Self> {
        let recurrent = self.recurrent.as_ref().map(|state| state.fork(launcher)).transpose()?;
        let mut fork = Self::of(launcher.device(), self.kv.fork(), self.hidden.len(), recurrent)?;
        fork.set(launcher, self.known.unwrap_or_default(), Some(self.hidden.slice()))?;
        Ok(fork)
    }

    /// How K and V are stored. Sequences of the same plan share passes.
    pub fn plan(&self) -> &Arc<KvPlan> {
        self.kv.plan()
    }

    /// Bytes allocated for K and V.
    pub fn kv_bytes(&self) -> usize {
        self.kv.bytes()
    }

    /// Its pages, including those shared with forks.
    pub fn held_pages(&self) -> impl Iterator<Item = HeldPage> {
        self.kv.held_pages()
    }

    /// An upper bound of the page bytes that `rows` positions after the first `len` take.
    pub fn bytes_of_round(&self, len: usize, rows: usize) -> usize {
        if rows > 0 { self.kv.bytes_to_reserve(len, len + rows) } else { 0 }
    }

    /// Frees the pages that only positions from `len` on took.
    pub fn trim(&mut self, len: usize) {
        self.kv.trim(len);
    }

    /// Bytes allocated for the recurrent state.
    pub fn recurrent_bytes(&self) -> usize {
        self.recurrent.as_ref().map_or(0, RecurrentState::bytes)
    }

    pub(super) fn recurrent_mut(&mut self) -> Option<&mut RecurrentState> {
        self.recurrent.as_mut()
    }

    /// The address of its state, which no other existing sequence has.
    pub(super) fn id(&self) -> u64 {
        self.state.slice().address()
    }

    pub(super) fn kv(&self) -> &DeviceKv {
        &self.kv
    }

    pub(super) fn kv_mut(&mut self) -> &mut DeviceKv {
        &mut self.kv
    }

    /// Its segment, of `rows` rows from `first` on, without a recurrent state.
    pub(super) fn segment(&self, first: usize, rows: usize) -> Segment {
        Segment {
            tables: self.kv.tables().address(),
            state: self.state.slice().address(),
            hidden: self.hidden.slice().address(),
            recurrent: 0,
            first: first as i32,
            rows: rows as i32,
            source: first as i32,
            skipped: 0,
        }
    }

    /// Records that launches change the state to this; `None` if only the device knows it.
    pub(super) fn set_known(&mut self, known: Option<(usize, u32)>) {
        self.known = known;
    }

    /// Sets the state to `position` committed positions and the token after them, if it differs. The hidden state
    /// becomes `hidden`, or stays; a stale one affects only the acceptance of a draft.
    ///
    /// # Errors
    /// If the driver fails.
    pub(super) fn set(
        &mut self,
        launcher: &Launcher,
        (position, newest): (usize, u32),
        hidden: Option<DeviceSlice<f32>>,
    ) -> Result<()> {
        if self.known == Some((position, newest)) {
            return Ok(());
        }
        let state = State { length: position, newest, hidden };
        launcher.run(set_state(self.state.slice(), self.hidden.slice(), &state))?;
        self.known = Some((position, newest));
        Ok(())
    }

    /// Whether the host knows that the state has this length and token.
    pub(super) fn is_at(&self, state: (usize, u32)) -> bool {
        self.known == Some(state)
    }

    /// See [`Segment::state`].
    pub(super) fn state(&self) -> &Arc<Buffer<u32>> {
        &self.state
    }

    /// See [`Segment::hidden`].
    pub(super) fn hidden(&self) -> DeviceSlice<f32> {
        self.hidden.slice()
    }

    /// The hidden state that predicted the token after the committed positions: `(hidden)`.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn newest_state(&self) -> Result<Vec<f32>> {
        self.hidden.read(0, self.hidden.len())
    }

    /// Writes the K and V of the first `len` positions: see [`DeviceKv::write_to`].
    ///
    /// # Errors
    /// Those of `to`, or the driver's inside an `io::Error`.
    pub fn write_to(&self, len: usize, to: &mut impl Write) -> io::Result<()> {
        self.kv.write_to(len, to)
    }

    /// Fills an empty sequence with the K and V of `len` positions, and `hidden`: the state that predicted the token
    /// after them, if there is one.
    ///
    /// # Errors
    /// If the device is out of memory or the driver fails, inside an `io::Error`; or those of `from`.
    pub fn read_from(&mut self, len: usize, hidden: Option<&[f32]>, from: &mut impl Read) -> io::Result<()> {
        self.kv.read_from(len, from)?;
        if let Some(hidden) = hidden {
            self.hidden.write(0, hidden).map_err(io::Error::other)?;
        }
        self.known = None;
        Ok(())
    }
}
