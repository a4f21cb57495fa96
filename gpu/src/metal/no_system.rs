//! Stubs for systems without Metal: these types have no values.

use std::convert::Infallible;
use std::mem::MaybeUninit;

use super::error::MetalError;
use super::info::DeviceInfo;

pub(super) struct Gpu(Infallible);
pub(super) struct Memory(Infallible);
pub(super) struct Library(Infallible);
#[derive(Clone)]
pub(super) struct Pipeline(Infallible);
pub(super) struct Queue(Infallible);
pub(super) struct Batch(Infallible);
pub(super) struct Submitted(Infallible);

impl Gpu {
    pub(super) fn open(_index: usize) -> Result<(Self, DeviceInfo), MetalError> {
        Err(MetalError::NoMetal)
    }
    pub(super) fn allocated(&self) -> usize {
        match self.0 {}
    }
    pub(super) fn allocate(&self, _bytes: usize) -> Option<Memory> {
        match self.0 {}
    }
    pub(super) fn compile(&self, _text: &str) -> Result<Library, String> {
        match self.0 {}
    }
    pub(super) fn pipeline(&self, _library: &Library, _name: &str) -> Option<Result<Pipeline, String>> {
        match self.0 {}
    }
    pub(super) fn queue(&self) -> Option<Queue> {
        match self.0 {}
    }
}

impl Memory {
    pub(super) fn address(&self) -> u64 {
        match self.0 {}
    }
    pub(super) fn bytes(&self) -> *mut u8 {
        match self.0 {}
    }
}

impl Queue {
    pub(super) fn begin(&self) -> Option<Batch> {
        match self.0 {}
    }
}

impl Batch {
    pub(super) fn make_resident(&self, _memory: &Memory) {
        match self.0 {}
    }
    /// # Safety
    /// None: there is no value of this type.
    pub(super) unsafe fn launch(
        &self,
        _pipeline: &Pipeline,
        _grid: [u32; 3],
        _threads: u32,
        _params: &[MaybeUninit<u8>],
    ) {
        match self.0 {}
    }
    pub(super) fn commit(self) -> Submitted {
        match self.0 {}
    }
}

impl Submitted {
    pub(super) fn wait(self) -> Result<(), String> {
        match self.0 {}
    }
}
