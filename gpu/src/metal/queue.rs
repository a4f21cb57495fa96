//! The batches of a stream: encoding and submission.

use std::mem::MaybeUninit;
use std::sync::Mutex;

use super::error::MetalError;
use super::memory::{Memories, lock};
use super::system::{Batch, Pipeline, Queue, Submitted};

/// Launches per batch: the device runs a batch while the next one is encoded.
const BATCH: usize = 64;

/// Submitted batches; a queue takes 64 at most.
const MAX_SUBMITTED: usize = 32;

pub(super) struct StreamState {
    queue: Queue,
    batch: Option<Open>,
    submitted: Vec<Submitted>,
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
    pub(super) block: [u32; 3],
    /// Padding bytes are uninitialised.
    pub(super) params: Vec<MaybeUninit<u8>>,
}

impl StreamState {
    pub(super) fn new(queue: Queue) -> Self {
        Self { queue, batch: None, submitted: Vec::new() }
    }

    /// # Safety
    /// As [`super::Stream::launch`].
    pub(super) unsafe fn launch(&mut self, memories: &Mutex<Memories>, launch: &Recorded) -> Result<(), MetalError> {
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
        unsafe { open.batch.launch(&launch.pipeline, launch.grid, launch.block, &launch.params) };
        open.launches += 1;
        if open.launches < BATCH { Ok(()) } else { self.submit() }
    }

    /// Submits the open batch.
    fn submit(&mut self) -> Result<(), MetalError> {
        self.submitted.extend(self.batch.take().map(|open| open.batch.commit()));
        if self.submitted.len() > MAX_SUBMITTED { done(self.submitted.remove(0)) } else { Ok(()) }
    }

    /// Waits for all batches.
    pub(super) fn wait(&mut self) -> Result<(), MetalError> {
        let submitted = self.submit();
        self.submitted.drain(..).map(done).fold(submitted, Result::and)
    }
}

/// Waits for a batch.
fn done(submitted: Submitted) -> Result<(), MetalError> {
    submitted.wait().map_err(|problem| MetalError::System { call: "a launch", problem })
}

impl Drop for StreamState {
    /// An encoder must not be dropped open, and readers of buffers wait for live streams only.
    fn drop(&mut self) {
        let _ = self.wait();
    }
}
