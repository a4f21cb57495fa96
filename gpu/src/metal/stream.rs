//! Streams of launches, and recordings of them.

use std::sync::{Arc, Mutex};

use super::device::Device;
use super::error::MetalError;
use super::memory::lock;
use super::queue::{Recorded, StreamState};
use crate::launch::{Launch, Params};

/// A sequence of launches on a device.
pub struct Stream {
    device: Device,
    state: Arc<Mutex<StreamState>>,
}

/// Recorded launches. Their parameters are fixed: what changes from round to round (ids, positions,
/// tables) is in device memory. A replay encodes them again, microseconds each; indirect command
/// buffers would not save the barriers between them.
pub struct Graph {
    launches: Vec<Recorded>,
}

/// Collects launches for a [`Graph`], in sequence.
#[derive(Debug)]
pub struct Recorder {
    device: Device,
    graph: Graph,
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
    /// Launches a plan after the stream's earlier launches.
    ///
    /// # Errors
    /// If there is no such kernel, or the system fails; [`MetalError::Poisoned`] if an earlier launch failed.
    ///
    /// # Safety
    /// The launch is as its plan returned it: the kernel reads parameters of its own length. Until it has finished, the
    /// buffers of the plan's slices live, nothing else writes what it reads, and nothing else reads or writes what it
    /// writes. Tables and lists in device memory are as the plan's documentation requires.
    pub unsafe fn launch<P: Params>(&self, launch: &Launch<P>) -> Result<(), MetalError> {
        let launch = recorded(&self.device, launch)?;
        // SAFETY: the caller guarantees the plan's memory, and that accesses do not conflict, until the launch ends.
        unsafe { lock(&self.state).launch(&self.device.0.memories, &launch) }
    }

    /// Waits until all launches on this stream have finished.
    ///
    /// # Errors
    /// [`MetalError::Poisoned`] if a launch failed, now or before.
    pub fn synchronize(&self) -> Result<(), MetalError> {
        lock(&self.state).wait()
    }

    /// Records the launches that `launches` adds to the recorder, without running them.
    ///
    /// # Errors
    /// If `launches` fails.
    pub fn record(&self, launches: impl FnOnce(&mut Recorder) -> Result<(), MetalError>) -> Result<Graph, MetalError> {
        let mut recorder = Recorder { device: self.device.clone(), graph: Graph { launches: Vec::new() } };
        launches(&mut recorder)?;
        Ok(recorder.graph)
    }

    /// Replays a graph after the stream's earlier launches.
    ///
    /// # Errors
    /// If the system fails; [`MetalError::Poisoned`] if an earlier launch failed. If some of the graph's launches were
    /// made, all later calls of the device fail.
    ///
    /// # Safety
    /// As [`Stream::launch`], for every recorded launch.
    pub unsafe fn replay(&self, graph: &Graph) -> Result<(), MetalError> {
        // SAFETY: the caller guarantees each launch's memory, and that accesses do not conflict, until it ends.
        unsafe { lock(&self.state).replay(&self.device.0.memories, &graph.launches) }
    }
}

impl Recorder {
    /// Adds a launch after those added before.
    ///
    /// # Errors
    /// If there is no such kernel.
    ///
    /// # Safety
    /// The launch is as its plan returned it, or `P` has room for any kernel's parameters: the kernel reads as many
    /// bytes as it has.
    pub unsafe fn launch<P: Params>(&mut self, launch: &Launch<P>) -> Result<(), MetalError> {
        self.graph.launches.push(recorded(&self.device, launch)?);
        Ok(())
    }
}

/// Looks up the pipeline and copies the parameters.
fn recorded<P: Params>(device: &Device, launch: &Launch<P>) -> Result<Recorded, MetalError> {
    let Launch { kernel, grid, threads, params, .. } = *launch;
    let pipeline = device.0.pipeline(kernel)?;
    // SAFETY: the bytes of a value, as `MaybeUninit`: padding bytes are uninitialised.
    let params = unsafe { std::slice::from_raw_parts((&raw const params).cast(), size_of::<P>()) };
    Ok(Recorded { pipeline, grid, threads, params: params.to_vec() })
}

impl Device {
    /// A new stream.
    ///
    /// # Errors
    /// If the system has no more command queues.
    pub fn stream(&self) -> Result<Stream, MetalError> {
        let queue = self.0.gpu.queue();
        let queue = queue.ok_or(MetalError::System { call: "newCommandQueue", problem: "none available".into() })?;
        let state = Arc::new(Mutex::new(StreamState::new(queue, self.0.failure.clone())));
        let mut streams = lock(&self.0.streams);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(Arc::downgrade(&state));
        Ok(Stream { device: self.clone(), state })
    }
}
