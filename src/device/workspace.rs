//! What all passes of a model use: the launch queue, memory of results, and recordings.

use std::sync::Arc;

use super::Device;
use super::launcher::Launcher;
use super::loaded::LoadedModels;
use super::ops::DeviceOps;
use super::outputs::TargetOutputs;
use super::queue::Queue;
use super::readback::Readback;
use super::recordings::{RecordedPass, Recordings};
use super::states::StateInputs;
use super::temporaries::Temporaries;
use crate::Result;

/// The launch queue, memory of results, and recordings.
pub(super) struct Workspace {
    pub ops: DeviceOps,
    pub readback: Readback,
    pub recordings: Recordings,
}

impl Workspace {
    /// For passes of `rows` output rows.
    ///
    /// # Errors
    /// If the device is out of memory.
    pub fn new(
        device: &Arc<dyn Device>,
        (rows, hidden, vocab): (usize, usize, usize),
        inputs: Option<Arc<StateInputs>>,
        readback: Readback,
    ) -> Result<Self> {
        let temporaries = Temporaries::new(device.clone());
        let launcher = Launcher::new(device.clone(), temporaries.clone());
        let outputs = Arc::new(TargetOutputs::new(&**device, rows, (hidden, vocab))?);
        let ops = DeviceOps {
            queue: Queue { launcher, temporaries },
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

    /// Runs the launches of `launches`, merged, or none of them if it fails.
    ///
    /// # Errors
    /// Those of `launches`, or the driver's.
    pub fn run(&self, models: &LoadedModels, launches: impl FnOnce(&Self, &DeviceOps) -> Result<()>) -> Result<()> {
        let ops = self.recorder(models);
        launches(self, &ops)?;
        ops.queue.launcher.launch()
    }

    fn recorder(&self, models: &LoadedModels) -> DeviceOps {
        self.ops.with(Launcher::recorder(models.device.clone(), self.ops.queue.temporaries.clone()))
    }

    /// Replays `pass`, first recording the launches of `launches` if there is no recording.
    ///
    /// # Errors
    /// Those of `launches`, or the driver's.
    pub fn replay(
        &mut self,
        models: &LoadedModels,
        pass: RecordedPass,
        launches: impl FnOnce(&Self, &DeviceOps) -> Result<()>,
    ) -> Result<()> {
        if self.recordings.get(&pass).is_none() {
            let ops = self.recorder(models);
            launches(self, &ops)?;
            self.recordings.insert(pass, ops.queue.launcher.finish()?);
        }
        let Some(recording) = self.recordings.get(&pass) else { return Ok(()) };
        // SAFETY: models, pages of the sequences in the lists, outputs and temporaries are alive and are freed through
        // the device, which waits for kernels. Recordings are dropped with the outputs that they refer to; temporaries
        // are not freed before the workspace. Page tables are written before the rows that use them.
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
