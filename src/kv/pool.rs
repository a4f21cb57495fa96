//! Pages of K and V: memory shared by the sequences of an engine, under one limit.
//!
//! Pages are reference-counted and copied on write ([`PagePool::make_unique`]). A page returns to the pool when its
//! last reference is dropped, and is zeroed when it is reused. Pages on a device are only counted.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::available_memory::available_memory;
use crate::nn::{Allocation, Arena};

/// The allocator of pages. Clones share memory and limit.
#[derive(Clone)]
pub struct PagePool {
    shared: Arc<Mutex<Shared>>,
}

struct Shared {
    limit: Option<u64>,
    held: u64, // bytes of pages in use
    arena: Arena,
}

/// A reference-counted page.
pub(super) type SharedPage = Arc<Page>;

/// Bytes that return to their pool on drop.
pub(super) struct Page {
    memory: Option<Allocation>, // `None` only during `drop`
    counted: Counted,
}

impl PagePool {
    /// A pool of at most `limit` bytes; `None` leaves the limit to the system.
    pub fn new(limit: Option<u64>) -> Self {
        Self { shared: Arc::new(Mutex::new(Shared { limit, held: 0, arena: Arena::default() })) }
    }

    /// Maximum bytes of pages in use; `None` leaves it to the system.
    pub fn limit(&self) -> Option<u64> {
        self.shared.lock().limit
    }

    /// Bytes of the pages in use; a page shared by forks counts once.
    pub fn held(&self) -> u64 {
        self.shared.lock().held
    }

    /// Bytes available under the limit; `None` without one.
    pub fn available(&self) -> Option<u64> {
        let shared = self.shared.lock();
        shared.limit.map(|limit| limit.saturating_sub(shared.held))
    }

    /// Bytes available under the limit; without one, those of the system's memory and of dropped pages. `None` if the
    /// system does not report its memory.
    pub(crate) fn available_memory(&self) -> Option<u64> {
        let dropped = |system| system + self.shared.lock().arena.touched_free() as u64;
        self.available().or_else(|| available_memory().map(dropped))
    }

    /// As [`PagePool::available`], or the system's memory if there is no limit, less the `other` bytes that a sequence
    /// takes beside its pages: these do not count against a limit.
    pub(crate) fn available_beside(&self, other: u64) -> Option<u64> {
        self.available().or_else(|| self.available_memory().map(|memory| memory.saturating_sub(other)))
    }

    /// Counts `bytes` of a page, here or on a device, as in use until the result is dropped; `None` if the limit is
    /// reached.
    pub(crate) fn count(&self, bytes: u64) -> Option<Counted> {
        let mut shared = self.shared.lock();
        let held = shared.held + bytes;
        if shared.limit.is_some_and(|limit| held > limit) {
            return None;
        }
        shared.held = held;
        Some(Counted { bytes, pool: self.clone() })
    }

    /// A page of `len` zeroed bytes; `None` if the limit is reached or the system is out of memory.
    pub(super) fn take(&self, len: usize) -> Option<SharedPage> {
        let counted = self.count(len as u64)?;
        let memory = self.shared.lock().arena.allocate(len);
        Some(Arc::new(Page { memory: Some(memory?), counted }))
    }

    /// Replaces `page` by a copy if it is shared (copy on write). `None` as for [`PagePool::take`].
    pub(super) fn make_unique(&self, page: &mut SharedPage) -> Option<()> {
        if is_shared(page) {
            let mut copy = self.take(page.as_slice().len())?;
            page_mut(&mut copy).copy_from_slice(page.as_slice());
            *page = copy;
        }
        Some(())
    }
}

/// A page of a cache, on the host or a device.
pub struct HeldPage {
    address: usize, // of its reference count, which identifies it
    holders: usize,
    bytes: usize,
}

impl HeldPage {
    pub(crate) fn of<P>(page: &Arc<P>, bytes: usize) -> Self {
        Self { address: Arc::as_ptr(page).addr(), holders: Arc::strong_count(page), bytes }
    }
}

/// Bytes of the pages that no cache holds except those that `pages` come from.
pub(crate) fn exclusive_bytes(pages: impl Iterator<Item = HeldPage>) -> u64 {
    let mut found: HashMap<usize, (HeldPage, usize)> = HashMap::new();
    for page in pages {
        found.entry(page.address).or_insert((page, 0)).1 += 1;
    }
    let only = found.into_values().filter(|(page, times)| page.holders == *times);
    only.map(|(page, _)| page.bytes as u64).sum()
}

/// Whether a write would copy the page.
pub(super) fn is_shared(page: &SharedPage) -> bool {
    Arc::strong_count(page) > 1
}

/// The bytes of a page after [`PagePool::make_unique`].
///
/// # Panics
/// If it is shared.
pub(super) fn page_mut(page: &mut SharedPage) -> &mut [u8] {
    let page = Arc::get_mut(page).expect("a page is made unique before it is written");
    page.memory.as_mut().map_or(&mut [], Allocation::as_mut_slice)
}

impl Page {
    pub(super) fn as_slice(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], Allocation::as_slice)
    }
}

/// Bytes that a [`PagePool`] counts.
pub(crate) struct Counted {
    bytes: u64,
    pool: PagePool,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.pool.shared.lock().held -= self.bytes;
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.counted.pool.shared.lock().arena.free(memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_shared_until_they_are_written_and_counted_once() {
        let pool = PagePool::new(Some(3 * 4096));
        let mut first = pool.take(4096).expect("a page");
        page_mut(&mut first)[7] = 7;
        let mut fork = first.clone();
        assert_eq!(pool.held(), 4096);
        pool.make_unique(&mut fork).expect("a copy");
        page_mut(&mut fork)[7] = 8;
        assert_eq!((first.as_slice()[7], fork.as_slice()[7], pool.available()), (7, 8, Some(4096)));

        let third = pool.take(4096).expect("a page");
        assert!(pool.take(1).is_none() && pool.make_unique(&mut third.clone()).is_none());
        drop(first);
        let reused = pool.take(4096).expect("the returned page");
        assert!(reused.as_slice().iter().all(|byte| *byte == 0));
        // Bytes beside the pages are subtracted only from the system's memory.
        assert_eq!(pool.available_beside(u64::MAX), pool.available());
        assert!(PagePool::new(None).available_beside(u64::MAX).is_none_or(|left| left == 0));
        drop((fork, third, reused));
        assert_eq!((pool.held(), pool.available()), (0, Some(3 * 4096)));
    }
}
