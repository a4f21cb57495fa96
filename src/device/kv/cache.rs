//! The K and V of a sequence: its pages, and their tables.

use std::sync::Arc;

use foretoken_gpu::DeviceSlice;

use super::KvPlan;
use crate::device::buffer::Buffer;
use crate::device::launcher::Launcher;
use crate::device::pages::{Contents, Page, PageMemory, page_memory_error};
use crate::kv::HeldPage;
use crate::{Error, Result};

/// The K and V of a sequence.
pub(crate) struct DeviceKv {
    pub(super) plan: Arc<KvPlan>,
    pub(super) memory: Arc<PageMemory>,
    pub(super) pages: Vec<Vec<Arc<Page>>>, // of every table, by slot
    /// The pages' addresses; each table is a range of it. Shared with forks until either has other addresses.
    tables: Arc<Buffer<u64>>,
    addresses: Vec<u64>,
    written: bool, // whether `tables` has the addresses of all pages
    reserved: usize,
}

impl DeviceKv {
    /// An empty cache.
    ///
    /// # Errors
    /// If the device is out of memory.
    pub fn new(memory: Arc<PageMemory>, plan: Arc<KvPlan>) -> Result<Self> {
        let tables = Arc::new(Buffer::new(&**memory.device(), plan.tables.entries)?);
        let addresses = vec![0; plan.tables.entries];
        let pages = std::iter::repeat_with(Vec::new).take(plan.tables.count).collect();
        Ok(Self { plan, memory, pages, tables, addresses, written: true, reserved: 0 })
    }

    /// A cache with the same rows; pages are shared until either writes them.
    pub fn fork(&self) -> Self {
        Self {
            plan: self.plan.clone(),
            memory: self.memory.clone(),
            pages: self.pages.clone(),
            tables: self.tables.clone(),
            addresses: self.addresses.clone(),
            ..*self
        }
    }

    /// How it is stored.
    pub fn plan(&self) -> &Arc<KvPlan> {
        &self.plan
    }

    /// The page tables.
    pub fn tables(&self) -> DeviceSlice<u64> {
        self.tables.slice()
    }

    /// Bytes of its pages, including those shared with forks.
    pub fn bytes(&self) -> usize {
        self.pages.iter().flatten().map(|page| page.bytes()).sum()
    }

    /// Its pages, including those shared with forks.
    pub fn held_pages(&self) -> impl Iterator<Item = HeldPage> {
        self.pages.iter().flatten().map(|page| HeldPage::of(page, page.bytes()))
    }

    /// An upper bound of the bytes that [`DeviceKv::reserve`] allocates.
    pub fn bytes_to_reserve(&self, first: usize, end: usize) -> usize {
        let new = self.plan.held(end).map(|(table, held)| {
            held.min(table.slots).saturating_sub(self.pages[table.index].len()) * table.page_bytes
        });
        let copied = self.plan.written(first, end).map(|(table, pages)| {
            let (all, is_shared) = (&self.pages[table.index], |page: &&Arc<Page>| Arc::strong_count(page) > 1);
            let held = pages.filter_map(|page| all.get(table.retention.slot(page)));
            // A prompt may be longer than a ring, which is copied once.
            let most = table.retention.ring().map_or(usize::MAX, |_| all.iter().filter(is_shared).count());
            held.filter(is_shared).count().min(most) * table.page_bytes
        });
        new.chain(copied).sum()
    }

    /// Allocates what a pass over positions `first..end` writes, copies what is shared of it, and
    /// writes the addresses to the tables.
    ///
    /// # Errors
    /// If the tables do not hold so many positions, or the device is out of memory; earlier allocations stay until
    /// [`DeviceKv::trim`].
    pub fn reserve(&mut self, launcher: &Launcher, first: usize, end: usize) -> Result<()> {
        if end > self.plan.context {
            return Err(Error::Context { needed: end, limit: self.plan.context });
        }
        if Arc::strong_count(&self.tables) > 1 && self.bytes_to_reserve(first, end) > 0 {
            let own = Buffer::new(&**self.memory.device(), self.addresses.len())?;
            (self.tables, self.written) = (Arc::new(own), false);
        }
        let allocated = self.allocate(launcher, first, end);
        // Also after an error: drafts read the tables without reserving, and pages that were copied may be freed.
        if !self.written {
            self.tables.write(0, &self.addresses)?;
            self.written = true;
        }
        allocated?;
        self.reserved = self.reserved.max(end);
        Ok(())
    }

    /// Frees the pages that only positions from `end` on took. Their entries in the tables stay, and are not read.
    pub fn trim(&mut self, end: usize) {
        for (table, held) in self.plan.held(end) {
            self.pages[table.index].truncate(held);
        }
        self.reserved = self.reserved.min(end);
    }

    fn allocate(&mut self, launcher: &Launcher, first: usize, end: usize) -> Result<()> {
        let out_of_memory = |error| page_memory_error(error, &**self.memory.device(), end, self.reserved);
        for (table, held) in self.plan.held(end) {
            let pages = &mut self.pages[table.index];
            while pages.len() < held.min(table.slots) {
                let page = self.memory.take(launcher, table.page_bytes, Contents::Fresh).map_err(out_of_memory)?;
                self.addresses[table.start + pages.len()] = page.address();
                self.written = false;
                pages.push(page);
            }
        }
        for (table, pages) in self.plan.written(first, end) {
            for slot in pages.map(|page| table.retention.slot(page)) {
                let page = &mut self.pages[table.index][slot];
                if Arc::strong_count(page) > 1 {
                    let copy = self.memory.take(launcher, table.page_bytes, Contents::CopyOf(page));
                    *page = copy.map_err(out_of_memory)?;
                    self.addresses[table.start + slot] = page.address();
                    self.written = false;
                }
            }
        }
        Ok(())
    }
}
