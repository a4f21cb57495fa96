//! The memory of a device.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::system::Memory;

/// All memory of a device. Parameters and tables hold addresses, so every allocation is made resident for every batch.
#[derive(Default)]
pub(super) struct Memories {
    pub(super) live: HashMap<u64, Memory>,
    /// Number of allocations so far.
    pub(super) generation: u64,
}

/// Locks, ignoring poisoning: every user keeps the data consistent between statements.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
