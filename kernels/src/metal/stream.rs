//! Streams of launches, and recordings of them.

use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex};

use super::device::{Opened, lock};
use super::system::{Batch, Pipeline, Queue, Submitted};
use super::{Device, MetalError};
use crate::gpu::{Launch, Params};

/// Launches that are handed over at a time: the device begins with the first while later ones are encoded.
const BATCH: usize = 64;

/// Batches under way, of the 64 that a queue has at most.
const UNDER_WAY: usize = 32;

/// A sequence of launches on a device.
pub struct Stream {
    device: Device,
    state: Arc<Mutex<State>>,
}

/// Launches that were recorded once and are replayed. Their parameters are those of the recording: what changes from round
/// to round (ids, positions, tables) lies in the device's memory. A replay encodes them again, which takes microseconds
/// each; indirect command buffers would not save the barriers between them.
pub struct Graph {
    launches: Vec<Recorded>,
}

/// Takes launches for a [`Graph`], one behind the other.
#[derive(Debug)]
pub struct Recorder {
    device: Device,
    graph: Graph,
}

pub(super) struct State {
    queue: Queue,
    batch: Option<Open>,
    submitted: Vec<Submitted>,
}

struct Open {
    batch: Batch,
    launches: usize,
    /// Of the memory that is resident.
    generation: u64,
}

struct Recorded {
    pipeline: Pipeline,
    grid: [u32; 3],
    block: [u32; 3],
    /// Padding bytes are uninitialised.
    params: Vec<MaybeUninit<u8>>,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Stream").field(&self.device).finish()
    }
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Graph").field("launches", &self.launches.len()).finish()
    }
}

impl Stream {
    pub(super) fn new(device: &Device, state: Arc<Mutex<State>>) -> Self {
        Self { device: device.clone(), state }
    }

    /// Runs a plan after what was launched on this stream before.
    ///
    /// # Errors
    /// If there is no such kernel, or the system fails.
    ///
    /// # Safety
    /// Until the stream has done it, the buffers of the plan's spans live, nobody else writes what it reads, and nobody else
    /// reads or writes what it writes. Tables and lists on the device say what the plan's documentation asks for.
    pub unsafe fn launch<P: Params>(&self, launch: &Launch<P>) -> Result<(), MetalError> {
        let launch = Recorded::new(&self.device, launch)?;
        // SAFETY: the caller's.
        unsafe { lock(&self.state).launch(&self.device.0, &launch) }
    }

    /// Waits until everything launched here is done.
    ///
    /// # Errors
    /// If something went wrong in a kernel.
    pub fn synchronize(&self) -> Result<(), MetalError> {
        lock(&self.state).wait()
    }

    /// Records what `launches` tells the recorder, without running it.
    ///
    /// # Errors
    /// If `launches` fails.
    pub fn record(&self, launches: impl FnOnce(&mut Recorder) -> Result<(), MetalError>) -> Result<Graph, MetalError> {
        let mut recorder = Recorder { device: self.device.clone(), graph: Graph { launches: Vec::new() } };
        launches(&mut recorder)?;
        Ok(recorder.graph)
    }

    /// Replays a recording, after what was launched on this stream before.
    ///
    /// # Errors
    /// If the system fails.
    ///
    /// # Safety
    /// As [`Stream::launch`] for everything that was recorded.
    pub unsafe fn replay(&self, graph: &Graph) -> Result<(), MetalError> {
        let mut state = lock(&self.state);
        // SAFETY: the caller's.
        graph.launches.iter().try_for_each(|launch| unsafe { state.launch(&self.device.0, launch) })
    }
}

impl Recorder {
    /// Adds a plan behind what was added before.
    ///
    /// # Errors
    /// If there is no such kernel.
    pub fn launch<P: Params>(&mut self, launch: &Launch<P>) -> Result<(), MetalError> {
        self.graph.launches.push(Recorded::new(&self.device, launch)?);
        Ok(())
    }
}

impl Recorded {
    fn new<P: Params>(device: &Device, launch: &Launch<P>) -> Result<Self, MetalError> {
        let Launch { kernel, grid, block, params } = *launch;
        let pipeline = device.0.pipeline(kernel)?;
        // SAFETY: the bytes of a value, which may be uninitialised as padding.
        let params = unsafe { std::slice::from_raw_parts((&raw const params).cast(), size_of::<P>()) };
        Ok(Self { pipeline, grid, block, params: params.to_vec() })
    }
}

impl State {
    pub(super) fn new(queue: Queue) -> Self {
        Self { queue, batch: None, submitted: Vec::new() }
    }

    /// # Safety
    /// As [`Stream::launch`].
    unsafe fn launch(&mut self, device: &Opened, launch: &Recorded) -> Result<(), MetalError> {
        let memories = lock(&device.memories);
        let open = match &mut self.batch {
            Some(open) => open,
            none => {
                let batch = self.queue.begin();
                let failed = || MetalError::System { call: "commandBuffer", problem: "there is none left".into() };
                // No generation has this number: everything is made resident below.
                none.insert(Open { batch: batch.ok_or_else(failed)?, launches: 0, generation: u64::MAX })
            }
        };
        if open.generation != memories.generation {
            memories.live.values().for_each(|memory| open.batch.reside(memory));
            open.generation = memories.generation;
        }
        // SAFETY: `Params` is the kernel's structure; all memory is resident, and the caller vouches for its life.
        unsafe { open.batch.launch(&launch.pipeline, launch.grid, launch.block, &launch.params) };
        open.launches += 1;
        if open.launches < BATCH { Ok(()) } else { self.hand_over() }
    }

    /// Lets the device begin.
    fn hand_over(&mut self) -> Result<(), MetalError> {
        self.submitted.extend(self.batch.take().map(|open| open.batch.commit()));
        if self.submitted.len() > UNDER_WAY { done(self.submitted.remove(0)) } else { Ok(()) }
    }

    pub(super) fn wait(&mut self) -> Result<(), MetalError> {
        let handed_over = self.hand_over();
        self.submitted.drain(..).map(done).fold(handed_over, Result::and)
    }
}

fn done(submitted: Submitted) -> Result<(), MetalError> {
    submitted.wait().map_err(|problem| MetalError::System { call: "a launch", problem })
}

impl Drop for State {
    /// An encoder must not be dropped open, and who reads a buffer waits for the streams that there are.
    fn drop(&mut self) {
        let _ = self.wait();
    }
}
