//! Memory for packed weights: few long mappings in large pages, handed out piece by piece.
//!
//! A step of decoding streams through every weight once, and with 4 KiB pages a virtual machine then spends a good part of
//! the time walking page tables. Large pages (2 MiB) need whole aligned stretches, which matrices smaller than that do not
//! have when each is a mapping of its own.

use std::ops::Range;
use std::sync::Arc;

use memmap2::{MmapMut, MmapRaw};

/// Bytes mapped at a time. Only what is touched is held.
const CHUNK: usize = 256 << 20;

/// Bytes of a large page.
const LARGE_PAGE: usize = 2 << 20;

/// Where pieces begin: a cache line, and a vector register.
const ALIGN: usize = 64;

/// Hands out zeroed memory.
#[derive(Default)]
pub struct Arena {
    chunk: Option<Arc<MmapRaw>>,
    free: Range<usize>, // of the chunk
}

/// A run of an arena's bytes that nobody else has.
pub struct Piece {
    map: Arc<MmapRaw>,
    range: Range<usize>,
}

impl Arena {
    /// `len` zeroed bytes on a cache line's boundary; `None` if the system has no such memory.
    pub fn take(&mut self, len: usize) -> Option<Piece> {
        if self.free.len() < len || self.chunk.is_none() {
            let map = MmapRaw::from(MmapMut::map_anon(len.max(CHUNK).checked_add(LARGE_PAGE)?).ok()?);
            #[cfg(target_os = "linux")]
            let _ = map.advise(memmap2::Advice::HugePage); // a wish: without it, decoding is slower
            let start = map.as_ptr().align_offset(LARGE_PAGE);
            self.free = start..map.len();
            self.chunk = Some(Arc::new(map));
        }
        let start = self.free.start;
        self.free.start = (start + len).next_multiple_of(ALIGN).min(self.free.end);
        self.chunk.clone().map(|map| Piece { map, range: start..start + len })
    }
}

impl Piece {
    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the range lies in the mapping, which lives as long as `self`; `take` gives out no byte twice, so whoever
        // writes it holds `&mut self`.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(self.range.start), self.range.len()) }
    }

    /// The bytes, to be filled.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(self.range.start), self.range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_aligned_and_apart() {
        let mut arena = Arena::default();
        let lens = [1, 64, 65, 4096, CHUNK + 1, CHUNK, 3, 0];
        let mut pieces: Vec<_> = lens.iter().map(|len| arena.take(*len).expect("memory")).collect();
        for (i, piece) in pieces.iter_mut().enumerate() {
            assert_eq!(piece.as_slice().len(), lens[i]);
            assert_eq!(piece.as_slice().as_ptr().align_offset(ALIGN), 0);
            if let [first, .., last] = piece.as_mut_slice() {
                assert_eq!((*first, *last), (0, 0));
                (*first, *last) = (i as u8, i as u8);
            }
        }
        for (i, piece) in pieces.iter().enumerate().filter(|(_, piece)| piece.as_slice().len() > 1) {
            assert_eq!([piece.as_slice()[0], piece.as_slice()[lens[i] - 1]], [i as u8; 2]);
        }
    }
}
