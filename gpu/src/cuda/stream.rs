//! Streams of launches, and graphs of them.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::device::Device;
use super::driver::check;
use super::error::CudaError;
use crate::launch::{Launch, Params};

/// A sequence of launches on a device.
#[derive(Debug)]
pub struct Stream {
    device: Device,
    stream: sys::CUstream,
}

/// Recorded launches, replayed as one. Their parameters are fixed: what changes from round to round (ids, positions,
/// tables) is in device memory.
#[derive(Debug)]
pub struct Graph {
    device: Device,
    graph: sys::CUgraphExec,
}

/// Collects launches for a [`Graph`], in sequence.
///
/// Each becomes a graph node. Stream capture would do the same, but while a stream captures, no thread of the process
/// may synchronize the device, which other sequences do.
#[derive(Debug)]
pub struct Recorder {
    device: Device,
    graph: sys::CUgraph,
    last: Option<sys::CUgraphNode>,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: an executable graph may be launched and destroyed on any thread; without `Sync`, one at a time uses it.
unsafe impl Send for Graph {}

impl Stream {
    /// Launches a plan after the stream's earlier launches.
    ///
    /// # Errors
    /// If there is no such kernel, or the driver fails.
    ///
    /// # Safety
    /// The launch is as its plan returned it: the driver copies as many bytes of parameters as the kernel has. Until it
    /// has finished, the buffers of the plan's slices live, nothing else writes what it reads, and nothing else reads
    /// or writes what it writes. Tables and lists in device memory are as the plan's documentation requires.
    pub unsafe fn launch<P: Params>(&self, launch: &Launch<P>) -> Result<(), CudaError> {
        let Launch { kernel, grid: [gx, gy, gz], threads, shared, mut params } = *launch;
        self.device.0.enter()?;
        let function = self.device.0.function(kernel)?;
        let mut pointers = [std::ptr::from_mut(&mut params).cast::<c_void>()];
        // SAFETY: `Params` is the kernel's structure, which the driver copies; the caller
        // guarantees the memory it points to.
        check("cuLaunchKernel", unsafe {
            let (params, none) = (pointers.as_mut_ptr(), std::ptr::null_mut());
            sys::cuLaunchKernel(function, gx, gy, gz, threads, 1, 1, shared, self.stream, params, none)
        })
    }

    /// Waits until all launches on this stream have finished.
    ///
    /// # Errors
    /// If the driver fails, or a kernel failed.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.device.0.enter()?;
        // SAFETY: the stream lives.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.stream) })
    }

    /// Records the launches that `launches` adds to the recorder, without running them.
    ///
    /// # Errors
    /// If `launches` fails, or the driver does.
    pub fn record(&self, launches: impl FnOnce(&mut Recorder) -> Result<(), CudaError>) -> Result<Graph, CudaError> {
        self.device.0.enter()?;
        let mut graph = std::ptr::null_mut();
        // SAFETY: the context is current; the graph is destroyed when the recorder is dropped.
        check("cuGraphCreate", unsafe { sys::cuGraphCreate(&mut graph, 0) })?;
        let mut recorder = Recorder { device: self.device.clone(), graph, last: None };
        launches(&mut recorder)?;
        self.device.0.enter()?;
        let mut graph = std::ptr::null_mut();
        // SAFETY: the recorder's graph lives; the instance does not refer to it.
        check("cuGraphInstantiate", unsafe { sys::cuGraphInstantiateWithFlags(&mut graph, recorder.graph, 0) })?;
        Ok(Graph { device: self.device.clone(), graph })
    }

    /// Replays a graph after the stream's earlier launches.
    ///
    /// # Errors
    /// If the driver fails.
    ///
    /// # Safety
    /// As [`Stream::launch`], for every recorded launch.
    pub unsafe fn replay(&self, graph: &Graph) -> Result<(), CudaError> {
        self.device.0.enter()?;
        // SAFETY: graph and stream live; the caller guarantees the launches.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(graph.graph, self.stream) })
    }
}

impl Recorder {
    /// Adds a launch after those added before.
    ///
    /// # Errors
    /// If there is no such kernel, or the driver fails.
    ///
    /// # Safety
    /// The launch is as its plan returned it, or `P` has room for any kernel's parameters: the driver copies as many
    /// bytes as the kernel has.
    pub unsafe fn launch<P: Params>(&mut self, launch: &Launch<P>) -> Result<(), CudaError> {
        let Launch { kernel, grid: [gx, gy, gz], threads, shared, mut params } = *launch;
        self.device.0.enter()?;
        let function = self.device.0.function(kernel)?;
        let mut pointers = [std::ptr::from_mut(&mut params).cast::<c_void>()];
        let node = sys::CUDA_KERNEL_NODE_PARAMS {
            func: function,
            gridDimX: gx,
            gridDimY: gy,
            gridDimZ: gz,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            kernelParams: pointers.as_mut_ptr(),
            extra: std::ptr::null_mut(),
            // Null: the context is the function's.
            kern: std::ptr::null_mut(),
            ctx: std::ptr::null_mut(),
        };
        let early = self.device.info().early_starts;
        let before = if early { &[] } else { self.last.as_slice() };
        let mut added = std::ptr::null_mut();
        // SAFETY: graph and nodes live; the caller guarantees that the driver copies no more bytes than `params` has.
        check("cuGraphAddKernelNode", unsafe {
            sys::cuGraphAddKernelNode_v2(&mut added, self.graph, before.as_ptr(), before.len(), &node)
        })?;
        if let (true, Some(last)) = (early, self.last) {
            self.start_early(last, added)?;
        }
        self.last = Some(added);
        Ok(())
    }

    /// Lets blocks of `after` start before `before` ends; they wait for its end themselves.
    fn start_early(&self, before: sys::CUgraphNode, after: sys::CUgraphNode) -> Result<(), CudaError> {
        let edge = sys::CUgraphEdgeData {
            from_port: sys::CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC as u8,
            to_port: 0,
            type_: sys::CUgraphDependencyType::CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC as u8,
            reserved: [0; 5],
        };
        // SAFETY: graph and nodes live; a driver with early starts has this function.
        check("cuGraphAddDependencies_v2", unsafe {
            sys::cuGraphAddDependencies_v2(self.graph, &before, &after, &edge, 1)
        })
    }
}

impl Device {
    /// A new stream.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn stream(&self) -> Result<Stream, CudaError> {
        self.0.enter()?;
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current; the stream is destroyed when it is dropped.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut stream, flags) })?;
        Ok(Stream { device: self.clone(), stream })
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if self.device.0.enter().is_ok() {
            // SAFETY: the graph is this value's.
            let _ = unsafe { sys::cuGraphDestroy(self.graph) };
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.device.0.enter().is_ok() {
            // SAFETY: the stream is this value's; its running launches finish.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.device.0.enter().is_ok() {
            // SAFETY: the graph is this value's.
            let _ = unsafe { sys::cuGraphExecDestroy(self.graph) };
        }
    }
}
