//! Pages of K and V: page tables, and the arena that pages are allocated from.

use std::sync::Arc;

use foretoken_gpu::plan::pages::Pages;

use super::Device;
use super::buffer::Buffer;
use crate::kv::{PAGE, Retention, SMALLER};
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

/// Allocates pages from large buffers.
pub(super) struct Arena {
    pub(super) device: Arc<dyn Device>,
    pub(super) chunks: Vec<Buffer<u8>>,
    pub(super) used: usize, // bytes of the newest chunk
}

impl Table {
    pub(super) fn pages(&self) -> Pages {
        match self.retention.ring() {
            Some((pinned, newest)) => Pages::ring(self.start, pinned, newest),
            None => Pages::all(self.start),
        }
    }
}

/// Bytes per chunk.
const CHUNK: usize = 32 << 20;

/// Alignment of pages.
const ALIGN: usize = 256;

impl Arena {
    pub(super) fn take(&mut self, bytes: usize) -> Result<u64> {
        let bytes = bytes.next_multiple_of(ALIGN);
        if self.chunks.last().is_none_or(|chunk| chunk.len() - self.used < bytes) {
            // If no whole chunk is left, a single page may still fit.
            let chunk = Buffer::new(&*self.device, bytes.max(CHUNK)).or_else(|_| Buffer::new(&*self.device, bytes))?;
            self.chunks.push(chunk);
            self.used = 0;
        }
        let chunk = self.chunks.last().map_or(0, |chunk| chunk.slice().address());
        let address = chunk + self.used as u64;
        self.used += bytes;
        Ok(address)
    }

    /// Reads the page at `address`, `bytes` long.
    pub(super) fn read(&self, address: u64, bytes: usize) -> Result<Vec<u8>> {
        let (chunk, at) = self.place(address);
        chunk.read(at, bytes)
    }

    /// Overwrites the page at `address`.
    pub(super) fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        let (chunk, at) = self.place(address);
        chunk.write(at, bytes)
    }

    fn place(&self, address: u64) -> (&Buffer<u8>, usize) {
        let at = |chunk: &Buffer<u8>| address.checked_sub(chunk.slice().address()).map(|at| at as usize);
        let found = self.chunks.iter().find_map(|chunk| Some((chunk, at(chunk).filter(|at| *at < chunk.len())?)));
        found.expect("every page is in a chunk")
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
            remedy: SMALLER.into(),
        },
        other => other,
    }
}
