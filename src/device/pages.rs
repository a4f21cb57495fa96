//! Pages of K and V: page tables, and the memory that pages are allocated from.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::pages::Pages;
use foretoken_gpu::plan::words::copy_words;
use parking_lot::Mutex;

use super::Device;
use super::buffer::Buffer;
use super::launcher::Launcher;
use crate::kv::{Counted, MEMORY_REMEDY, PAGE, PagePool, Retention};
use crate::{Error, Result};

/// The entries of one page table.
pub(super) struct Table {
    pub(super) index: usize,
    pub(super) start: usize, // first entry in the array of addresses
    pub(super) slots: usize,
    pub(super) retention: Retention,
    pub(super) page_bytes: usize,
}

/// The number of tables made, and their entries.
#[derive(Default)]
pub(super) struct Tables {
    pub(super) count: usize,
    pub(super) entries: usize,
}

impl Tables {
    /// The next table.
    pub(super) fn add(&mut self, slots: usize, retention: Retention, page_bytes: usize) -> Table {
        let table = Table { index: self.count, start: self.entries, slots, retention, page_bytes };
        self.count += 1;
        self.entries += slots;
        table
    }
}

impl Table {
    pub(super) fn pages(&self) -> Pages {
        match self.retention.ring() {
            Some((pinned, newest)) => Pages::ring(self.start, pinned, newest),
            None => Pages::all(self.start),
        }
    }
}

/// Bytes per chunk, unless less is left.
const CHUNK: usize = 32 << 20;

/// Alignment of pages.
const ALIGN: usize = 256;

/// Memory for the pages of all sequences of a model: chunks of pages of one size, each freed with
/// the last of its pages.
pub(super) struct PageMemory {
    device: Arc<dyn Device>,
    pool: PagePool,                                  // counts the pages in use
    chunks: Mutex<HashMap<usize, Vec<Weak<Chunk>>>>, // by bytes of a page
}

struct Chunk {
    buffer: Buffer<u8>,
    stride: usize,
    slots: Mutex<Slots>,
}

struct Slots {
    dropped: Vec<usize>,
    unused: std::ops::Range<usize>, // as the device allocated them
}

/// A page: shared by forks, and copied before it is written.
pub(super) struct Page {
    chunk: Arc<Chunk>,
    slot: usize,
    bytes: usize,
    _counted: Counted,
}

/// Initial contents of a page.
pub(super) enum Contents<'a> {
    /// No other sequence's rows: zeros, or what the device allocated.
    Fresh,
    CopyOf(&'a Page),
}

impl PageMemory {
    /// Memory on `device`, counted by `pool`.
    pub fn new(device: Arc<dyn Device>, pool: PagePool) -> Self {
        Self { device, pool, chunks: Mutex::default() }
    }

    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    pub fn pool(&self) -> &PagePool {
        &self.pool
    }

    /// Bytes allocated that no page has: free for pages of the sizes that there are.
    pub fn unused(&self) -> usize {
        let unused = |chunk: Arc<Chunk>| {
            let slots = chunk.slots.lock();
            (slots.dropped.len() + slots.unused.len()) * chunk.stride
        };
        self.chunks.lock().values().flatten().filter_map(Weak::upgrade).map(unused).sum()
    }

    /// A page of `bytes` bytes, a multiple of 4.
    ///
    /// # Errors
    /// If the pool's limit is reached, or the device is out of memory or fails.
    pub fn take(&self, launcher: &Launcher, bytes: usize, contents: Contents<'_>) -> Result<Arc<Page>> {
        let limit = || Error::Memory {
            what: "a page of K and V".into(),
            needed: Some(bytes as u64),
            available: self.pool.available(),
            fits: None,
            remedy: MEMORY_REMEDY.into(),
        };
        let counted = self.pool.count(bytes as u64).ok_or_else(limit)?;
        let (chunk, slot, is_unused) = self.slot(bytes.next_multiple_of(ALIGN))?;
        let page = Page { chunk, slot, bytes, _counted: counted };
        match contents {
            Contents::Fresh if is_unused => {}
            Contents::Fresh => launcher.run(copy_words(page.words(), None))?,
            Contents::CopyOf(other) => launcher.run(copy_words(page.words(), Some(other.words())))?,
        }
        Ok(Arc::new(page))
    }

    /// A slot of a chunk, and whether no page had it.
    fn slot(&self, stride: usize) -> Result<(Arc<Chunk>, usize, bool)> {
        let mut chunks = self.chunks.lock();
        let of_size = chunks.entry(stride).or_default();
        of_size.retain(|chunk| chunk.strong_count() > 0);
        for chunk in of_size.iter().filter_map(Weak::upgrade) {
            let taken = chunk.slots.lock().take();
            if let Some((slot, is_unused)) = taken {
                return Ok((chunk, slot, is_unused));
            }
        }
        // If no whole chunk is left, a single page may still fit.
        let new = |count: usize| Ok::<_, Error>((Buffer::new(&*self.device, count * stride)?, count));
        let (buffer, count) = new((CHUNK / stride).max(1)).or_else(|_| new(1))?;
        let slots = Mutex::new(Slots { dropped: Vec::new(), unused: 1..count });
        let chunk = Arc::new(Chunk { buffer, stride, slots });
        of_size.push(Arc::downgrade(&chunk));
        Ok((chunk, 0, true))
    }
}

impl Slots {
    fn take(&mut self) -> Option<(usize, bool)> {
        self.dropped.pop().map(|slot| (slot, false)).or_else(|| self.unused.next().map(|slot| (slot, true)))
    }
}

impl Page {
    pub fn address(&self) -> u64 {
        self.chunk.buffer.slice().address() + self.at() as u64
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The page's bytes.
    pub fn read(&self) -> Result<Vec<u8>> {
        self.chunk.buffer.read(self.at(), self.bytes)
    }

    /// Overwrites the page.
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        self.chunk.buffer.write(self.at(), bytes)
    }

    fn at(&self) -> usize {
        self.slot * self.chunk.stride
    }

    fn words(&self) -> DeviceSlice<u32> {
        DeviceSlice::new(self.address(), self.bytes / 4)
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.chunk.slots.lock().dropped.push(self.slot);
    }
}

/// `error` of allocating pages up to `end`, with the `reserved` positions that fit.
pub(super) fn page_memory_error(error: Error, device: &dyn Device, end: usize, reserved: usize) -> Error {
    match error {
        Error::Memory { available, .. } => Error::Memory {
            what: format!("K and V of {end} positions on {}", device.name()),
            needed: None,
            available,
            fits: Some(reserved.next_multiple_of(PAGE)),
            remedy: MEMORY_REMEDY.into(),
        },
        other => other,
    }
}
