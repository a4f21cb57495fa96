//! A device and its kernels.

use std::collections::HashMap;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::sources::SOURCES;
use super::stream::State;
use super::system::{Gpu, Library, Memory, Pipeline};
use super::{Buffer, MetalError, Plain, Stream};

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name.
    pub name: String,
    /// Bytes of memory that the system recommends to use at most.
    pub memory: usize,
    /// Bytes of the largest buffer.
    pub largest_buffer: usize,
}

/// An open device. Clones are the same device.
#[derive(Clone)]
pub struct Device(pub(super) Arc<Opened>);

pub(super) struct Opened {
    gpu: Gpu,
    libraries: Vec<Library>,
    pipelines: Mutex<HashMap<&'static str, Pipeline>>,
    pub(super) memories: Mutex<Memories>,
    /// To be waited for before the processor touches memory.
    streams: Mutex<Vec<Weak<Mutex<State>>>>,
    info: DeviceInfo,
}

/// All memory: what parameters and tables lead to is known to them alone, so that all of it has to be resident.
#[derive(Default)]
pub(super) struct Memories {
    pub(super) live: HashMap<u64, Memory>,
    /// How often memory was added.
    pub(super) generation: u64,
}

/// What a lock guards is whole between its users' statements: a panic elsewhere leaves nothing half done.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Device").field(&self.0.info.name).finish()
    }
}

impl Device {
    /// Opens device `index` and compiles the kernels, which takes a while the first time; the system remembers them.
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
        let (pipelines, memories, streams) = Default::default();
        Ok(Self(Arc::new(Opened { gpu, libraries, pipelines, memories, streams, info })))
    }

    /// What it is.
    pub fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    /// Bytes free, and bytes of the device, as the system recommends.
    ///
    /// # Errors
    /// None: the signature is that of other devices.
    pub fn memory(&self) -> Result<(usize, usize), MetalError> {
        let total = self.0.info.memory;
        Ok((total.saturating_sub(self.0.gpu.allocated()), total))
    }

    /// A new stream.
    ///
    /// # Errors
    /// If the system has none left.
    pub fn stream(&self) -> Result<Stream, MetalError> {
        let queue = self.0.gpu.queue();
        let queue =
            queue.ok_or(MetalError::System { call: "newCommandQueue", problem: "there is none left".into() })?;
        let state = Arc::new(Mutex::new(State::new(queue)));
        let mut streams = lock(&self.0.streams);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(Arc::downgrade(&state));
        Ok(Stream::new(self, state))
    }

    /// Memory for `len` elements, all zero bytes.
    ///
    /// # Errors
    /// If the device has not that much left: the error has the numbers, and nothing stays allocated.
    pub fn zeroed<T: Plain>(&self, len: usize) -> Result<Buffer<T>, MetalError> {
        Buffer::zeroed(self, len)
    }

    /// Memory that holds `elements`.
    ///
    /// # Errors
    /// As [`Device::zeroed`].
    pub fn upload<T: Plain>(&self, elements: &[T]) -> Result<Buffer<T>, MetalError> {
        let mut buffer = self.zeroed(elements.len())?;
        buffer.write(elements)?;
        Ok(buffer)
    }

    /// Takes memory of so many bytes, and returns its address on the device and for the processor.
    pub(super) fn allocate(&self, bytes: usize) -> Result<(u64, *mut u8), MetalError> {
        let (free, total) = self.memory()?;
        // Nothing cannot be allocated: an empty buffer has a byte.
        let memory = (bytes <= free).then(|| self.0.gpu.allocate(bytes.max(1))).flatten();
        let memory = memory.ok_or(MetalError::OutOfMemory { asked: bytes, free, total })?;
        let place = (memory.address(), memory.bytes());
        let mut memories = lock(&self.0.memories);
        memories.live.insert(place.0, memory);
        memories.generation += 1;
        Ok(place)
    }
}

impl Opened {
    /// Waits for all streams.
    pub(super) fn wait(&self) -> Result<(), MetalError> {
        let streams: Vec<_> = lock(&self.streams).iter().filter_map(Weak::upgrade).collect();
        streams.iter().map(|stream| lock(stream).wait()).fold(Ok(()), Result::and)
    }

    /// The kernel of that name.
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
