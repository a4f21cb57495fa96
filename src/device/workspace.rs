//! What all passes of a model use: the launch queue, memory of results, and recordings.

use std::sync::Arc;

use super::Device;
use super::device_model::DeviceModel;
use super::launcher::Launcher;
use super::ops::DeviceOps;
use super::outputs::TargetOutputs;
use super::queue::Queue;
use super::readback::Readback;
use super::recordings::{RecordedPass, Recordings};
use super::states::StateInputs;
use super::temporaries::{Temporaries, activation_bytes};
use crate::{Error, Result};

/// Attention's split partials of a few rows take at most 1 / `PARTIALS` of the memory for activations. With sizes
/// rounded up to powers of two, and smaller ones of smaller depths, up to four times as much is allocated.
const PARTIALS: usize = 8;

/// The launch queue, memory of results, and recordings.
pub(super) struct Workspace {
    pub ops: DeviceOps,
    pub readback: Readback,
    recordings: Recordings,
}

impl Workspace {
    /// For passes of `target` of `rows` output rows, on a device that has the weights.
    ///
    /// # Errors
    /// If the device is out of memory, or the driver fails.
    pub fn new(
        device: &Arc<dyn Device>,
        target: &dyn DeviceModel,
        rows: usize,
        inputs: Option<Arc<StateInputs>>,
        readback: Readback,
    ) -> Result<Self> {
        let partial_bytes = activation_bytes(device.free_bytes()?) / PARTIALS;
        let launcher = Launcher::new(Temporaries::new(device.clone()));
        let outputs = Arc::new(TargetOutputs::new(&**device, rows, target.hidden_size(), target.vocab_size())?);
        let ops = DeviceOps {
            queue: Queue { launcher, partial_bytes },
            outputs,
            draft: None,
            output_segments: None,
            all_states: None,
            inputs,
        };
        Ok(Self { ops, readback, recordings: Recordings::default() })
    }

    pub fn launcher(&self) -> &Launcher {
        &self.ops.queue.launcher
    }

    /// Records the launches of `launches`, merged. If memory is too small for their temporaries, records them again
    /// after dropping all recordings and freeing large temporaries of other sizes.
    ///
    /// # Errors
    /// Those of `launches`.
    pub fn record(&mut self, launches: impl Fn(&Self, &DeviceOps) -> Result<()>) -> Result<Launcher> {
        let record = |own: &Self| {
            let ops = own.ops.with(Launcher::recorder(own.launcher().temporaries.clone()));
            launches(own, &ops).map(|()| ops.queue.launcher)
        };
        match record(self) {
            Err(Error::Memory { .. }) => {
                self.drop_recordings();
                record(self)
            }
            recorded => recorded,
        }
    }

    /// The horizon of recordings for positions below `end`. If it changes, what only the old ones refer to is freed.
    pub fn reach(&mut self, end: usize) -> usize {
        let before = self.recordings.horizon();
        let horizon = self.recordings.reach(end);
        if horizon != before {
            self.drop_recordings();
        }
        horizon
    }

    /// Drops all recordings, because memory that they refer to changes, and frees large temporaries, which may have other
    /// sizes from now on.
    pub fn drop_recordings(&mut self) {
        self.recordings.clear();
        self.launcher().temporaries.free_large();
    }

    /// Replays `pass`, first recording the launches of `launches` if there is no recording. If memory is too small for
    /// that, the other recordings are dropped.
    ///
    /// # Errors
    /// Those of `launches`, or the driver's.
    pub fn replay(&mut self, pass: RecordedPass, launches: impl Fn(&Self, &DeviceOps) -> Result<()>) -> Result<()> {
        if self.recordings.get(&pass).is_none() {
            let launcher = self.record(launches)?;
            let recording = launcher.finish().or_else(|error| match error {
                // Its temporaries are in the pool, and must stay there.
                Error::Memory { .. } if !self.recordings.is_empty() => {
                    self.recordings.clear();
                    launcher.finish()
                }
                error => Err(error),
            })?;
            self.recordings.insert(pass, recording);
        }
        let Some(recording) = self.recordings.get(&pass) else { return Ok(()) };
        // SAFETY: models, pages of the sequences in the lists, outputs and temporaries are alive and are freed through
        // the device, which waits for kernels. Recordings are dropped before the outputs and temporaries that they refer
        // to. Page tables are written before the rows that use them.
        unsafe { recording.replay() }
    }

    /// Waits for all launches.
    ///
    /// # Errors
    /// If K or V of a pass were NaN or infinite, or the driver fails.
    pub fn wait(&self) -> Result<()> {
        self.readback.read(0).map(drop)
    }
}
