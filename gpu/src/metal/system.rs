//! Calls of the Metal API.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::NonNull;

use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_foundation::{NSError, NSString};
use objc2_metal::{
    MTLBarrierScope, MTLBuffer, MTLCommandBuffer, MTLCommandBufferStatus, MTLCommandEncoder, MTLCommandQueue,
    MTLCompileOptions, MTLComputeCommandEncoder, MTLComputePipelineState, MTLCopyAllDevices, MTLDevice,
    MTLDispatchType, MTLGPUFamily, MTLLanguageVersion, MTLLibrary, MTLResourceOptions, MTLResourceUsage, MTLSize,
};

use super::error::MetalError;
use super::info::DeviceInfo;

/// Threads of a simdgroup, as the kernels assume.
const LANES: usize = 32;

pub(super) struct Gpu(Retained<ProtocolObject<dyn MTLDevice>>);
pub(super) struct Memory(Retained<ProtocolObject<dyn MTLBuffer>>);
pub(super) struct Library(Retained<ProtocolObject<dyn MTLLibrary>>);
#[derive(Clone)]
pub(super) struct Pipeline(Retained<ProtocolObject<dyn MTLComputePipelineState>>);
pub(super) struct Queue(Retained<ProtocolObject<dyn MTLCommandQueue>>);

/// A command buffer that is being encoded.
pub(super) struct Batch {
    buffer: Retained<ProtocolObject<dyn MTLCommandBuffer>>,
    encoder: Retained<ProtocolObject<dyn MTLComputeCommandEncoder>>,
}

/// A committed command buffer.
pub(super) struct Submitted(Retained<ProtocolObject<dyn MTLCommandBuffer>>);

// SAFETY: Metal's devices are thread-safe: any thread may use one.
unsafe impl Send for Gpu {}
// SAFETY: Metal's devices are thread-safe: several threads may use one at once.
unsafe impl Sync for Gpu {}
// SAFETY: an `MTLBuffer` may be used and released on any thread; `Buffer` synchronizes accesses to the contents.
unsafe impl Send for Memory {}
// SAFETY: an `MTLLibrary` may be used and released on any thread.
unsafe impl Send for Library {}
// SAFETY: an `MTLLibrary` does not change after it is compiled, so several threads may look up functions at once.
unsafe impl Sync for Library {}
// SAFETY: an `MTLComputePipelineState` may be used and released on any thread.
unsafe impl Send for Pipeline {}
// SAFETY: an `MTLComputePipelineState` does not change after it is made, so several threads may encode it at once.
unsafe impl Sync for Pipeline {}
// SAFETY: Metal's command queues are thread-safe: any thread may use one.
unsafe impl Send for Queue {}
// SAFETY: an encoder may be used from any thread, one at a time: its stream's lock protects it.
unsafe impl Send for Batch {}
// SAFETY: a committed command buffer may be waited for on any thread, one at a time: its stream's lock protects it.
unsafe impl Send for Submitted {}

fn text(error: &NSError) -> String {
    error.localizedDescription().to_string()
}

impl Gpu {
    pub(super) fn open(index: usize) -> Result<(Self, DeviceInfo), MetalError> {
        let devices = MTLCopyAllDevices();
        if index >= devices.count() {
            return Err(MetalError::NoDevice { index, count: devices.count() });
        }
        let device = devices.objectAtIndex(index);
        let name = device.name().to_string();
        if !device.supportsFamily(MTLGPUFamily::Metal3) || !device.supportsFamily(MTLGPUFamily::Apple7) {
            return Err(MetalError::Unsupported { name });
        }
        let memory = usize::try_from(device.recommendedMaxWorkingSetSize()).unwrap_or(usize::MAX);
        let info = DeviceInfo { name, memory, largest_buffer: device.maxBufferLength() };
        Ok((Self(device), info))
    }

    pub(super) fn allocated(&self) -> usize {
        self.0.currentAllocatedSize()
    }

    /// Zeroed memory that the CPU can access.
    pub(super) fn allocate(&self, bytes: usize) -> Option<Memory> {
        self.0.newBufferWithLength_options(bytes, MTLResourceOptions::StorageModeShared).map(Memory)
    }

    pub(super) fn compile(&self, source: &str) -> Result<Library, String> {
        let options = MTLCompileOptions::new();
        options.setLanguageVersion(MTLLanguageVersion::Version3_0);
        // Deprecated in favour of `mathMode`, which needs macOS 15; this works on all systems.
        #[allow(deprecated)]
        options.setFastMathEnabled(false);
        let library = self.0.newLibraryWithSource_options_error(&NSString::from_str(source), Some(&options));
        library.map(Library).map_err(|error| text(&error))
    }

    /// The kernel `name`, if the library has it.
    pub(super) fn pipeline(&self, library: &Library, name: &str) -> Option<Result<Pipeline, String>> {
        let function = library.0.newFunctionWithName(&NSString::from_str(name))?;
        let made = self.0.newComputePipelineStateWithFunction_error(&function).map_err(|error| text(&error));
        Some(made.and_then(|pipeline| match pipeline.threadExecutionWidth() {
            LANES => Ok(Pipeline(pipeline)),
            lanes => Err(format!("simdgroups have {lanes} threads, but {LANES} are required")),
        }))
    }

    pub(super) fn queue(&self) -> Option<Queue> {
        self.0.newCommandQueue().map(Queue)
    }
}

impl Memory {
    pub(super) fn address(&self) -> u64 {
        self.0.gpuAddress()
    }

    pub(super) fn bytes(&self) -> *mut u8 {
        self.0.contents().as_ptr().cast()
    }
}

impl Queue {
    pub(super) fn begin(&self) -> Option<Batch> {
        autoreleasepool(|_| {
            let buffer = self.0.commandBuffer()?;
            // Launches are ordered by the barriers below: a serial encoder orders accesses to bound buffers only.
            let encoder = buffer.computeCommandEncoderWithDispatchType(MTLDispatchType::Concurrent)?;
            Some(Batch { buffer, encoder })
        })
    }
}

impl Batch {
    /// Makes memory accessible to kernels by address.
    pub(super) fn make_resident(&self, memory: &Memory) {
        let usage = MTLResourceUsage::Read | MTLResourceUsage::Write;
        self.encoder.useResource_usage(ProtocolObject::from_ref(&*memory.0), usage);
    }

    /// # Safety
    /// `params` is the kernel's structure, and the memory that it points to is resident until the batch has finished.
    pub(super) unsafe fn launch(&self, pipeline: &Pipeline, grid: [u32; 3], threads: u32, params: &[MaybeUninit<u8>]) {
        let size = |[width, height, depth]: [u32; 3]| MTLSize {
            width: width as usize,
            height: height as usize,
            depth: depth as usize,
        };
        self.encoder.setComputePipelineState(&pipeline.0);
        // SAFETY: the system copies the bytes, and the kernel reads fields only. Parameters are
        // shorter than the limit of 4096 bytes.
        unsafe {
            let bytes = NonNull::from(params).cast::<c_void>();
            self.encoder.setBytes_length_atIndex(bytes, params.len(), 0);
        }
        self.encoder.dispatchThreadgroups_threadsPerThreadgroup(size(grid), size([threads, 1, 1]));
        self.encoder.memoryBarrierWithScope(MTLBarrierScope::Buffers);
    }

    pub(super) fn commit(self) -> Submitted {
        self.encoder.endEncoding();
        self.buffer.commit();
        Submitted(self.buffer)
    }
}

impl Submitted {
    pub(super) fn wait(self) -> Result<(), String> {
        self.0.waitUntilCompleted();
        if self.0.status() == MTLCommandBufferStatus::Completed {
            return Ok(());
        }
        Err(self.0.error().map_or_else(|| "the launches failed".into(), |error| text(&error)))
    }
}
