//! The recurrent state of a sequence: for every delta net a matrix per value head, the
//! convolution's last inputs, and a log of the last rows.
//!
//! A pass logs its rows, of which any number from the first on may be committed; the next pass applies the committed
//! ones while it reads the matrices. Longer rounds that are committed whole write the matrices after them to other
//! memory: a failed pass leaves the committed ones.

use std::sync::Arc;

use foretoken_gpu::plan::delta_net::{Shape, Weights};
use foretoken_gpu::plan::segments::Recurrent;
use foretoken_gpu::plan::words::{copy_words, write_words};

use super::Device;
use super::buffer::Buffer;
use super::launcher::Launcher;
use super::states;
use crate::{Error, Result};

/// The delta nets of a model.
#[derive(Clone, Copy)]
pub(crate) struct DeltaNets {
    pub shape: Shape,
    pub layers: usize,
}

/// The weights of a delta net, without its projections.
pub(crate) struct DeviceDeltaNet {
    pub(super) shape: Shape,
    pub(super) conv: Buffer<f32>,
    pub(super) dt_bias: Buffer<f32>,
    pub(super) rate: Buffer<f32>,
}

/// The recurrent state of a sequence.
pub(super) struct RecurrentState {
    nets: DeltaNets,
    matrices: Arc<Buffer<f32>>, // shared with forks until a pass writes them
    window: Buffer<f32>,
    logs: Option<[Buffer<f32>; 2]>, // of the round before, of this round
    accepted: Buffer<u32>,          // rows of the first log that are not in `matrices`
    logged: Logged,
    open: Option<OpenRound>,
}

/// Where the committed rows of the first log are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Logged {
    /// In all matrices.
    Applied,
    /// In none, if there are any.
    Pending,
    /// In some, and not in others: launches that apply them failed.
    Lost,
}

/// A round whose pass was launched.
struct OpenRound {
    position: usize,
    rows: usize,
    whole: Option<Arc<Buffer<f32>>>, // the matrices after all rows, unless the rows are logged
}

impl DeltaNets {
    /// The delta nets of a model, all of one shape; `None` if it has none.
    pub fn of<'a>(nets: impl Iterator<Item = &'a DeviceDeltaNet>) -> Option<Self> {
        let shapes: Vec<_> = nets.map(|net| net.shape).collect();
        shapes.first().map(|shape| Self { shape: *shape, layers: shapes.len() })
    }

    /// The same with logs of `log_rows` rows.
    pub fn with_log_rows(self, log_rows: usize) -> Self {
        Self { shape: Shape { log_rows, ..self.shape }, ..self }
    }

    fn matrices_len(&self) -> usize {
        self.layers * self.shape.matrices_len()
    }

    fn window_len(&self) -> usize {
        self.layers * self.shape.window_len()
    }

    fn log_len(&self) -> usize {
        self.layers * self.shape.log_len()
    }

    /// Memory for a sequence's matrices.
    pub(super) fn new_matrices(&self, device: &dyn Device) -> Result<Arc<Buffer<f32>>> {
        Buffer::new(device, self.matrices_len()).map(Arc::new)
    }

    /// Bytes of a sequence's state.
    pub(super) fn bytes(&self) -> usize {
        4 * (self.matrices_len() + self.window_len() + 2 * self.log_len())
    }
}

impl DeviceDeltaNet {
    pub(super) fn weights(&self) -> Weights {
        Weights { conv: self.conv.slice(), dt_bias: self.dt_bias.slice(), rate: self.rate.slice() }
    }
}

impl RecurrentState {
    /// The state of an empty sequence, with memory for its matrices.
    ///
    /// # Errors
    /// If the device is out of memory, or the driver fails.
    pub fn new(launcher: &Launcher, nets: DeltaNets, matrices: Arc<Buffer<f32>>) -> Result<Self> {
        let state = Self::of(launcher, nets, matrices, Buffer::new(launcher.device(), nets.window_len())?)?;
        for buffer in [&*state.matrices, &state.window].into_iter().filter(|buffer| buffer.len() > 0) {
            launcher.run(copy_words(buffer.slice().cast(), None))?;
        }
        Ok(state)
    }

    fn of(launcher: &Launcher, nets: DeltaNets, matrices: Arc<Buffer<f32>>, window: Buffer<f32>) -> Result<Self> {
        let accepted = Buffer::new(launcher.device(), 1)?;
        launcher.run(write_words(accepted.slice(), &[0]))?;
        Ok(Self { nets, matrices, window, logs: None, accepted, logged: Logged::Applied, open: None })
    }

    /// A copy, once all committed rows are in the matrices.
    ///
    /// # Errors
    /// As [`RecurrentState::new`].
    pub fn fork(&self, launcher: &Launcher) -> Result<Self> {
        let window = copy(launcher, &self.window)?;
        Self::of(launcher, self.nets, self.matrices.clone(), window)
    }

    /// The delta nets, with the rows of its logs.
    pub fn nets(&self) -> DeltaNets {
        self.nets
    }

    /// Bytes allocated, including those shared with forks.
    pub fn bytes(&self) -> usize {
        let logs = self.logs.iter().flatten().map(Buffer::len).sum::<usize>();
        4 * (self.matrices.len() + self.window.len() + logs)
    }

    /// Whether committed rows may be missing in the matrices.
    pub fn replays(&self) -> bool {
        self.logged == Logged::Pending
    }

    /// Whether it has logs of other than `log_rows` rows.
    pub fn has_other_logs(&self, log_rows: usize) -> bool {
        self.logs.is_some() && self.nets.shape.log_rows != log_rows
    }

    /// Allocates logs of `log_rows` rows, unless there are any. Those of other lengths are replaced;
    /// all committed rows are in the matrices then.
    ///
    /// # Errors
    /// If the device is out of memory.
    pub fn reserve_logs(&mut self, device: &dyn Device, log_rows: usize) -> Result<()> {
        if self.logs.is_none() || self.has_other_logs(log_rows) {
            let nets = self.nets.with_log_rows(log_rows);
            let new = || Buffer::new(device, nets.log_len());
            (self.logs, self.nets) = (Some([new()?, new()?]), nets);
        }
        Ok(())
    }

    /// Copies the matrices if they are shared, before a pass that writes them.
    ///
    /// # Errors
    /// If the device is out of memory, or the driver fails.
    pub fn make_unique(&mut self, launcher: &Launcher) -> Result<()> {
        if Arc::strong_count(&self.matrices) > 1 {
            self.matrices = Arc::new(copy(launcher, &self.matrices)?);
        }
        Ok(())
    }

    /// What the kernels of a pass read.
    pub fn record(&self) -> Recurrent {
        let address = |buffer: &Buffer<f32>| buffer.slice().address();
        let [replayed, log] = self.logs.as_ref().map_or([0; 2], |logs| logs.each_ref().map(address));
        let whole = self.open.as_ref().and_then(|open| open.whole.as_deref()).map_or(0, address);
        Recurrent {
            matrices: address(&self.matrices),
            window: address(&self.window),
            replayed,
            log,
            whole,
            accepted: self.accepted.slice().address(),
        }
    }

    /// Begins a round of `rows` rows from `position` on. With memory for the matrices after all
    /// rows, they are committed whole or not at all.
    pub fn begin(&mut self, position: usize, rows: usize, whole: Option<Arc<Buffer<f32>>>) {
        self.open = Some(OpenRound { position, rows, whole });
    }

    /// Drops a round whose pass was not launched.
    pub fn cancel(&mut self) {
        self.open = None;
    }

    /// Notes that launches that apply accepted rows failed, and some may have run. A round that is committed whole
    /// applies them in other memory.
    pub fn lose(&mut self) {
        if self.replays() && self.open.as_ref().is_none_or(|open| open.whole.is_none()) {
            self.logged = Logged::Lost;
        }
    }

    /// Whether accepted rows may be in some of the matrices, and not in others.
    pub fn is_lost(&self) -> bool {
        self.logged == Logged::Lost
    }

    /// The rows of the open round that are to be committed, if there is one and the sequence has `len` positions now. A
    /// whole round that is dropped changed nothing.
    ///
    /// # Errors
    /// If a part of a whole round was committed.
    pub fn committed(&mut self, len: usize) -> Result<Option<usize>> {
        let Some(open) = &self.open else { return Ok(None) };
        // Positions beyond the rows were skipped, for a measurement.
        let rows = len.saturating_sub(open.position).min(open.rows);
        match &open.whole {
            Some(_) if rows == 0 => {
                self.open = None;
                Ok(None)
            }
            Some(_) if rows < open.rows => {
                let problem =
                    format!("{rows} of {} rows cannot be committed: the matrices are those after all", open.rows);
                Err(Error::argument("rows", problem))
            }
            _ => Ok(Some(rows)),
        }
    }

    /// Ends the open round, of which `rows` rows were committed. Returns matrices that nothing refers to any more.
    pub fn end(&mut self, rows: usize) -> Option<Arc<Buffer<f32>>> {
        let open = self.open.take()?;
        let Some(whole) = open.whole else {
            self.logged = if rows > 0 { Logged::Pending } else { Logged::Applied };
            self.logs.iter_mut().filter(|_| rows > 0).for_each(|logs| logs.swap(0, 1));
            return None;
        };
        self.logged = Logged::Applied;
        let before = std::mem::replace(&mut self.matrices, whole);
        (Arc::strong_count(&before) == 1).then_some(before)
    }

    /// Notes that all committed rows are in the matrices.
    pub fn mark_applied(&mut self) {
        self.logged = Logged::Applied;
    }

    /// The matrices and the window of every delta net, once all committed rows are in the matrices.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn read(&self) -> Result<Vec<f32>> {
        let Self { nets: DeltaNets { shape, layers }, matrices, window, .. } = self;
        let of_layer = |buffer: &Buffer<f32>, layer, len| buffer.read(layer * len, len);
        let mut values = Vec::with_capacity(matrices.len() + window.len());
        for layer in 0..*layers {
            values.extend(of_layer(matrices, layer, shape.matrices_len())?);
            values.extend(of_layer(window, layer, shape.window_len())?);
        }
        Ok(values)
    }

    /// Fills the state of an empty sequence from [`RecurrentState::read`]'s values. Returns whether they fit.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn write(&mut self, values: &[f32]) -> Result<bool> {
        let DeltaNets { shape, layers } = self.nets;
        let (matrices, window) = (shape.matrices_len(), shape.window_len());
        if values.len() != layers * (matrices + window) {
            return Ok(false);
        }
        for (layer, values) in values.chunks_exact((matrices + window).max(1)).enumerate() {
            self.matrices.write(layer * matrices, &values[..matrices])?;
            self.window.write(layer * window, &values[matrices..])?;
        }
        Ok(true)
    }
}

fn copy(launcher: &Launcher, of: &Buffer<f32>) -> Result<Buffer<f32>> {
    let new = Buffer::new(launcher.device(), of.len())?;
    if of.len() > 0 {
        states::copy(launcher, of.slice(), new.slice())?;
    }
    Ok(new)
}
