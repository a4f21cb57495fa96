//! A device and its loaded kernels.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{CString, c_int};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use super::driver::{self, check};
use super::error::CudaError;
use super::images;

/// Properties of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (i32, i32),
    /// Multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of memory.
    pub memory: usize,
    /// Whether graphs use programmatic dependent launches: blocks of a kernel may start before the previous kernel
    /// ends, and wait for its end themselves.
    pub early_starts: bool,
    /// Bytes of L2 cache.
    pub cache: usize,
    /// Bytes of shared memory of a block, at most.
    pub shared: i32,
    /// The driver's version: 1000 times major plus 10 times minor.
    pub driver: i32,
}

/// An open device. Clones are the same device.
#[derive(Clone)]
pub struct Device(pub(super) Arc<Opened>);

pub(super) struct Opened {
    device: sys::CUdevice,
    context: sys::CUcontext,
    kernels: Mutex<Kernels>,
    info: DeviceInfo,
}

/// Images loaded so far. Each is loaded at the first launch of a kernel in it, because compiling PTX in the driver
/// takes time.
#[derive(Default)]
struct Kernels {
    modules: HashMap<usize, sys::CUmodule>, // by index of the image
    functions: HashMap<&'static str, sys::CUfunction>,
}

// SAFETY: the driver's handles may be used from any thread; what they name is immutable while `Opened` lives.
unsafe impl Send for Opened {}
// SAFETY: the driver synchronizes calls with the device, context and modules; a lock protects the maps.
unsafe impl Sync for Opened {}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Device").field(&self.0.info.name).finish()
    }
}

impl Device {
    /// Opens device `index` and loads one kernel, to check that images load; the others are loaded at their first
    /// launch.
    ///
    /// # Errors
    /// If there is no driver or device, the driver is too old, the compute capability is below 8.0, or the kernel does
    /// not load.
    pub fn open(index: usize) -> Result<Self, CudaError> {
        let driver = driver::load()?;
        let mut count: c_int = 0;
        // SAFETY: the driver is initialised; the pointer is to an integer.
        check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
        let count = usize::try_from(count).unwrap_or(0);
        let ordinal = c_int::try_from(index).ok().filter(|_| index < count);
        let ordinal = ordinal.ok_or(CudaError::NoDevice { index, count })?;
        let mut device = 0;
        // SAFETY: the driver is initialised; the pointer is to a device handle.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, ordinal) })?;
        let info = info(device, driver)?;
        if info.capability.0 < 8 {
            return Err(CudaError::Unsupported { name: info.name, capability: info.capability });
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: the device exists; `Opened` releases the context.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) })?;
        let mut opened = Opened { device, context, kernels: Mutex::default(), info };
        (_, opened.info.memory) = opened.memory()?;
        // Loads one kernel now, so that unsupported images are an error here and not at the first launch.
        opened.function("read_all")?;
        Ok(Self(Arc::new(opened)))
    }

    /// Its properties.
    pub fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    /// Bytes free, and bytes of the device.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        self.0.memory()
    }
}

impl Opened {
    /// Makes the device's context current on this thread.
    pub(super) fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as `self`.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    pub(super) fn memory(&self) -> Result<(usize, usize), CudaError> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current; the pointers are to integers.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free, total))
    }

    /// The kernel `name`, looked up once, which lives as long as the device. The context is current.
    pub(super) fn function(&self, name: &'static str) -> Result<sys::CUfunction, CudaError> {
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = kernels.functions.get(name) {
            return Ok(*function);
        }
        let symbol = CString::new(name).map_err(|_| CudaError::NoKernel(name))?;
        let entry = format!(".entry {name}(");
        // PTX is text, searched for the kernel's name; any image of machine code may have it.
        let (likely, others): (Vec<_>, Vec<_>) =
            (0..images::IMAGES.len()).partition(|i| contains(images::IMAGES[*i].1, &entry));
        for i in likely.into_iter().chain(others) {
            let module = match kernels.modules.entry(i) {
                Entry::Occupied(module) => *module.get(),
                Entry::Vacant(place) => {
                    let (source, image) = images::IMAGES[i];
                    *place.insert(load(source, image, self.info.driver)?)
                }
            };
            let mut function = std::ptr::null_mut();
            // SAFETY: the module is loaded; the name ends in a zero.
            match unsafe { sys::cuModuleGetFunction(&mut function, module, symbol.as_ptr()) } {
                sys::CUresult::CUDA_ERROR_NOT_FOUND => {}
                result => {
                    check("cuModuleGetFunction", result)?;
                    self.allow_shared_memory(function)?;
                    kernels.functions.insert(name, function);
                    return Ok(function);
                }
            }
        }
        Err(CudaError::NoKernel(name))
    }

    /// Lets launches choose a kernel's shared memory up to the device's limit: without, 48 KiB.
    fn allow_shared_memory(&self, function: sys::CUfunction) -> Result<(), CudaError> {
        use sys::CUfunction_attribute as Attribute;
        let mut own = 0;
        // SAFETY: the function is of a loaded module; the pointer is to an integer.
        check("cuFuncGetAttribute", unsafe {
            sys::cuFuncGetAttribute(&mut own, Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
        })?;
        // SAFETY: the function is of a loaded module.
        check("cuFuncSetAttribute", unsafe {
            let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            sys::cuFuncSetAttribute(function, attribute, self.info.shared - own)
        })
    }
}

fn contains(image: &[u8], text: &str) -> bool {
    std::str::from_utf8(image).is_ok_and(|image| image.contains(text))
}

impl Drop for Opened {
    fn drop(&mut self) {
        let entered = self.enter().is_ok();
        let kernels = self.kernels.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: streams, buffers and graphs hold the device, so none of them is left; `open` retained the context.
        unsafe {
            // Modules are unloaded from the current context. The release needs none.
            for module in kernels.modules.values().filter(|_| entered) {
                let _ = sys::cuModuleUnload(*module);
            }
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

fn info(device: sys::CUdevice, driver: i32) -> Result<DeviceInfo, CudaError> {
    let attribute = |attribute| -> Result<i32, CudaError> {
        let mut value = 0;
        // SAFETY: the device exists; the pointer is to an integer.
        check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) })?;
        Ok(value)
    };
    let mut name = [0u8; 256];
    // SAFETY: the driver writes at most 255 bytes and a zero.
    check("cuDeviceGetName", unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), 255, device) })?;
    let len = name.iter().position(|byte| *byte == 0).unwrap_or(0);
    let capability = (
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    Ok(DeviceInfo {
        name: String::from_utf8_lossy(&name[..len]).into_owned(),
        capability,
        early_starts: capability.0 >= driver::EARLY_STARTS.0 && driver >= driver::EARLY_STARTS.1,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.max(0) as usize,
        memory: 0,
        shared: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        cache: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.max(0) as usize,
        driver,
    })
}

/// Loads one image: machine code if it has some for the device, else its PTX.
fn load(source: &'static str, image: &[u8], driver: i32) -> Result<sys::CUmodule, CudaError> {
    // PTX is text that ends in a zero; other images carry their own length.
    let mut bytes = image.to_vec();
    bytes.push(0);
    let mut module = std::ptr::null_mut();
    // SAFETY: the context is current; the image is whole.
    let result = unsafe { sys::cuModuleLoadData(&mut module, bytes.as_ptr().cast()) };
    match check("cuModuleLoadData", result) {
        Ok(()) => Ok(module),
        Err(error @ (CudaError::OutOfMemory { .. } | CudaError::Poisoned { .. })) => Err(error),
        Err(_) if driver < driver::MIN_IMAGE_VERSION => {
            Err(CudaError::DriverTooOld { found: driver, needed: driver::MIN_IMAGE_VERSION })
        }
        Err(_) => Err(CudaError::BadImage { source, problem: driver::text(result) }),
    }
}
