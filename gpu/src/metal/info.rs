//! Properties of a device.

/// Properties of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name.
    pub name: String,
    /// Bytes of memory that the system recommends to use at most.
    pub memory: usize,
    /// Bytes of the largest buffer.
    pub largest_buffer: usize,
}
