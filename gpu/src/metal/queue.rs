//! The batches of a stream: encoding and submission.

use std::mem::MaybeUninit;
use std::sync::Mutex;

use super::error::MetalError;
use super::memory::{Memories, lock};
use super::system::{Batch, Pipeline, Queue, Submitted};
use crate::in_flight::{Failure, InFlight, Running};

/// Launches per batch: the device runs a batch while the next one is encoded.
const BATCH: usize = 64;

/// Submitted batches; a queue takes 64 at most.
const MAX_SUBMITTED: usize = 32;

pub(super) struct StreamState {
    queue: Queue,
    batch: Option<Open>,
    in_flight: InFlight<Submitted>,
}

/// A batch that is being encoded.
struct Open {
    batch: Batch,
    launches: usize,
    /// [`Memories::generation`] of the resident memory.
    generation: u64,
}

/// A launch with its pipeline.
pub(super) struct Recorded {
    pub(super) pipeline: Pipeline,
    pub(super) grid: [u32; 3],
    pub(super) threads: u32,
    /// Padding bytes are uninitialised.
    pub(super) params: Vec<MaybeUninit<u8>>,
}

impl StreamState {
    /// A stream that fails if a batch of any stream with the same `failure` has failed.
    pub(super) fn new(queue: Queue, failure: Failure) -> Self {
        Self { queue, batch: None, in_flight: InFlight::new(failure) }
    }

    /// # Safety
    /// As [`super::Stream::launch`].
    pub(super) unsafe fn launch(&mut self, memories: &Mutex<Memories>, launch: &Recorded) -> Result<(), MetalError> {
        self.in_flight.check().map_err(poisoned)?;
        let memories = lock(memories);
        let open = match &mut self.batch {
            Some(open) => open,
            none => {
                let batch = self.queue.begin();
                let failed = || MetalError::System { call: "commandBuffer", problem: "none available".into() };
                // A generation that never occurs: everything is made resident below.
                none.insert(Open { batch: batch.ok_or_else(failed)?, launches: 0, generation: u64::MAX })
            }
        };
        if open.generation != memories.generation {
            memories.live.values().for_each(|memory| open.batch.make_resident(memory));
            open.generation = memories.generation;
        }
        // SAFETY: `Params` is the kernel's structure; all memory is resident, and the caller guarantees that it lives.
        unsafe { open.batch.launch(&launch.pipeline, launch.grid, launch.threads, &launch.params) };
        open.launches += 1;
        if open.launches < BATCH { Ok(()) } else { self.submit() }
    }

    /// Launches a whole recording: if it fails after the first launch, so do all later calls of the device.
    ///
    /// # Safety
    /// As [`super::Stream::replay`].
    pub(super) unsafe fn replay(
        &mut self,
        memories: &Mutex<Memories>,
        launches: &[Recorded],
    ) -> Result<(), MetalError> {
        launches.iter().enumerate().try_for_each(|(i, launch)| {
            // SAFETY: the caller guarantees each launch's memory, and that accesses do not conflict, until it ends.
            let launched = unsafe { self.launch(memories, launch) };
            launched.inspect_err(|error| {
                if i > 0 {
                    self.in_flight.fail(format!("a recording was launched in part: {error}"));
                }
            })
        })
    }

    /// Submits the open batch.
    fn submit(&mut self) -> Result<(), MetalError> {
        let submitted = self.batch.take().map(|open| open.batch.commit());
        let pushed = submitted.map_or(Ok(()), |batch| self.in_flight.push(batch, MAX_SUBMITTED));
        pushed.map_err(poisoned)
    }

    /// Waits for all batches, also if one failed.
    pub(super) fn wait(&mut self) -> Result<(), MetalError> {
        let submitted = self.submit();
        self.in_flight.wait().map_err(poisoned).and(submitted)
    }
}

impl Running for Submitted {
    fn finish(self) -> Result<(), String> {
        self.wait()
    }
}

/// The error of a failed batch.
pub(super) fn poisoned(problem: String) -> MetalError {
    MetalError::Poisoned { problem }
}

impl Drop for StreamState {
    /// An encoder must not be dropped open, and readers of buffers wait for live streams only. The device keeps a
    /// failure.
    fn drop(&mut self) {
        let _ = self.wait();
    }
}
