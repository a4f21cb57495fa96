//! A device and its compiled kernels.

use std::collections::HashMap;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, Weak};

use super::error::MetalError;
use super::info::DeviceInfo;
use super::memory::{Memories, lock};
use super::queue::{StreamState, poisoned};
use super::sources::SOURCES;
use super::system::{Gpu, Library, Pipeline};
use crate::in_flight::{self, Failure};

/// An open device. Clones are the same device.
#[derive(Clone)]
pub struct Device(pub(super) Arc<Opened>);

pub(super) struct Opened {
    pub(super) gpu: Gpu,
    libraries: Vec<Library>,
    pipelines: Mutex<HashMap<&'static str, Pipeline>>,
    pub(super) memories: Mutex<Memories>,
    /// All streams: they are waited for before the CPU accesses memory.
    pub(super) streams: Mutex<Vec<Weak<Mutex<StreamState>>>>,
    /// Of all streams, also of dropped ones.
    pub(super) failure: Failure,
    info: DeviceInfo,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Device").field(&self.0.info.name).finish()
    }
}

impl Device {
    /// Opens device `index` and compiles the kernels; the system caches them.
    ///
    /// # Errors
    /// If this system has no Metal, no such device, or one that is too old, or a source does not compile.
    pub fn open(index: usize) -> Result<Self, MetalError> {
        let (gpu, info) = Gpu::open(index)?;
        let compile = |(source, text): &(&'static str, &str)| {
            gpu.compile(text).map_err(|problem| MetalError::BadSource { source, problem })
        };
        let libraries = std::thread::scope(|scope| {
            let jobs: Vec<_> = SOURCES.iter().map(|source| scope.spawn(|| compile(source))).collect();
            jobs.into_iter()
                .map(|job| job.join().unwrap_or_else(|panic| resume_unwind(panic)))
                .collect::<Result<_, _>>()
        })?;
        let (pipelines, memories, streams, failure) = Default::default();
        Ok(Self(Arc::new(Opened { gpu, libraries, pipelines, memories, streams, failure, info })))
    }

    /// Its properties.
    pub fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    /// Bytes free, and bytes of the device, as the system recommends.
    ///
    /// # Errors
    /// None; the signature is that of `cuda`.
    pub fn memory(&self) -> Result<(usize, usize), MetalError> {
        let total = self.0.info.memory;
        Ok((total.saturating_sub(self.0.gpu.allocated()), total))
    }

    /// Allocates memory; returns its address on the device and for the CPU.
    pub(super) fn allocate(&self, bytes: usize) -> Result<(u64, *mut u8), MetalError> {
        let (free, total) = self.memory()?;
        let largest = self.0.info.largest_buffer;
        if bytes <= free && bytes > largest {
            return Err(MetalError::BufferTooLarge { requested: bytes, largest });
        }
        // Zero bytes cannot be allocated: an empty buffer has one.
        let memory = (bytes <= free).then(|| self.0.gpu.allocate(bytes.max(1))).flatten();
        let memory = memory.ok_or(MetalError::OutOfMemory { requested: bytes, free, total })?;
        let place = (memory.address(), memory.bytes());
        let mut memories = lock(&self.0.memories);
        memories.live.insert(place.0, memory);
        memories.generation += 1;
        Ok(place)
    }
}

impl Opened {
    /// Waits for all streams; an error if any launch since the device was opened failed.
    pub(super) fn wait(&self) -> Result<(), MetalError> {
        let streams: Vec<_> = lock(&self.streams).iter().filter_map(Weak::upgrade).collect();
        let waited = streams.iter().map(|stream| lock(stream).wait()).fold(Ok(()), Result::and);
        waited.and(in_flight::check(&self.failure).map_err(poisoned))
    }

    /// The kernel `name`, created once.
    pub(super) fn pipeline(&self, name: &'static str) -> Result<Pipeline, MetalError> {
        let mut pipelines = lock(&self.pipelines);
        if let Some(pipeline) = pipelines.get(name) {
            return Ok(pipeline.clone());
        }
        let made = self.libraries.iter().find_map(|library| self.gpu.pipeline(library, name));
        let made = made.ok_or(MetalError::NoKernel(name))?;
        let made = made.map_err(|problem| MetalError::BadSource { source: name, problem })?;
        pipelines.insert(name, made.clone());
        Ok(made)
    }
}
