//! Pages of K and V: which addresses they have, and the memory that they are cut from.

use std::sync::Arc;

use foretoken_kernels::gpu::pages::Pages;

use super::{Buffer, Device, part};
use crate::kv::{Keep, PAGE};
use crate::{Error, Result};

/// Which addresses a run of pages has.
pub(super) struct Table {
    pub(super) start: usize, // in the addresses
    pub(super) slots: usize,
    pub(super) keep: Keep,
    pub(super) page_bytes: usize,
    pub(super) held: usize,
}

/// Memory in large pieces, handed out page by page.
pub(super) struct Arena {
    pub(super) device: Arc<dyn Device>,
    pub(super) pieces: Vec<Buffer<u8>>,
    pub(super) used: usize, // of the newest
}

impl Table {
    pub(super) fn pages(&self, tables: &Buffer<u64>) -> Pages {
        let table = part(tables.span(), self.start, self.slots);
        match self.keep.ring() {
            Some((pinned, newest)) => Pages::ring(table, pinned, newest),
            None => Pages::all(table),
        }
    }
}

/// Bytes that are allocated at a time.
const PIECE: usize = 32 << 20;

/// Where pages begin.
const ALIGN: usize = 256;

impl Arena {
    pub(super) fn take(&mut self, bytes: usize) -> Result<u64> {
        let bytes = bytes.next_multiple_of(ALIGN);
        if self.pieces.last().is_none_or(|piece| piece.len() - self.used < bytes) {
            // Where a large piece does not fit any more, a page may.
            let piece = Buffer::new(&*self.device, bytes.max(PIECE)).or_else(|_| Buffer::new(&*self.device, bytes))?;
            self.pieces.push(piece);
            self.used = 0;
        }
        let piece = self.pieces.last().map_or(0, |piece| piece.span().address());
        let address = piece + self.used as u64;
        self.used += bytes;
        Ok(address)
    }

    /// What was taken at `address`, `bytes` long.
    pub(super) fn read(&self, address: u64, bytes: usize) -> Result<Vec<u8>> {
        let (piece, at) = self.place(address);
        piece.read(at, bytes)
    }

    /// Overwrites what was taken at `address`.
    pub(super) fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        let (piece, at) = self.place(address);
        piece.write(at, bytes)
    }

    fn place(&self, address: u64) -> (&Buffer<u8>, usize) {
        let at = |piece: &Buffer<u8>| address.checked_sub(piece.span().address()).map(|at| at as usize);
        let found = self.pieces.iter().find_map(|piece| Some((piece, at(piece).filter(|at| *at < piece.len())?)));
        found.expect("pages are cut from pieces")
    }
}

/// The error `error` of a page below `end`, with what fits: `reserved` positions.
pub(super) fn no_room(error: Error, end: usize, reserved: usize) -> Error {
    match error {
        Error::Device { device, problem } => {
            let fits = reserved.next_multiple_of(PAGE);
            let what = format!("the K and V of {end} positions do not fit, those of {fits} do");
            Error::Device { device, problem: format!("{what}; use a smaller cache type or context ({problem})") }
        }
        other => other,
    }
}
