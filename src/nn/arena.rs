//! Memory for packed weights: a few large mappings in huge pages, from which allocations are cut.
//!
//! Each decode step streams all weights once; with 4 KiB pages a virtual machine spends a good part of that time on page table
//! walks. Huge pages (2 MiB) need aligned 2 MiB ranges, which separately mapped small matrices do not have.

use std::ops::Range;
use std::sync::Arc;

use memmap2::{MmapMut, MmapRaw};

/// Bytes mapped at a time; untouched pages take no memory.
const CHUNK: usize = 256 << 20;

/// Bytes of a huge page.
const HUGE_PAGE: usize = 2 << 20;

/// Alignment of allocations: a cache line and a 512-bit vector.
const ALIGN: usize = 64;

/// Allocates zeroed memory.
#[derive(Default)]
pub struct Arena {
    chunk: Option<Arc<MmapRaw>>,
    free: Range<usize>, // of the chunk
}

/// An exclusive range of an arena's bytes.
pub struct Allocation {
    map: Arc<MmapRaw>,
    range: Range<usize>,
}

impl Arena {
    /// `len` zeroed bytes, aligned to a cache line; `None` if the system is out of memory.
    pub fn take(&mut self, len: usize) -> Option<Allocation> {
        if self.free.len() < len || self.chunk.is_none() {
            let map = MmapRaw::from(MmapMut::map_anon(len.max(CHUNK).checked_add(HUGE_PAGE)?).ok()?);
            #[cfg(target_os = "linux")]
            let _ = map.advise(memmap2::Advice::HugePage); // advisory: without huge pages decoding is slower
            let start = map.as_ptr().align_offset(HUGE_PAGE);
            self.free = start..map.len();
            self.chunk = Some(Arc::new(map));
        }
        let start = self.free.start;
        self.free.start = (start + len).next_multiple_of(ALIGN).min(self.free.end);
        self.chunk.clone().map(|map| Allocation { map, range: start..start + len })
    }
}

impl Allocation {
    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the range is in the mapping, which lives as long as `self`; `take` never returns a byte twice, so writing it
        // requires `&mut self`.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(self.range.start), self.range.len()) }
    }

    /// The bytes, writable.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(self.range.start), self.range.len()) }
    }

    /// Gives the memory back to the system, but for what shares a page with other allocations. Elsewhere than on Unix it stays
    /// until all allocations of its mapping are dropped.
    pub(crate) fn release(self) {
        #[cfg(unix)]
        {
            const PAGE: usize = 4096;
            let (start, end) = (self.range.start.next_multiple_of(PAGE), self.range.end / PAGE * PAGE);
            if start < end {
                // SAFETY: the range lies in the mapping, nobody else has it, and `take` gives it out to nobody again, so no
                // byte of it is read afterwards. Failure means that the pages stay, which is no error.
                let _ =
                    unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, end - start) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocations_are_aligned_and_disjoint() {
        let mut arena = Arena::default();
        let lens = [1, 64, 65, 4096, CHUNK + 1, CHUNK, 3, 0];
        let mut allocations: Vec<_> = lens.iter().map(|len| arena.take(*len).expect("memory")).collect();
        for (i, allocation) in allocations.iter_mut().enumerate() {
            assert_eq!(allocation.as_slice().len(), lens[i]);
            assert_eq!(allocation.as_slice().as_ptr().align_offset(ALIGN), 0);
            if let [first, .., last] = allocation.as_mut_slice() {
                assert_eq!((*first, *last), (0, 0));
                (*first, *last) = (i as u8, i as u8);
            }
        }
        for (i, allocation) in allocations.iter().enumerate().filter(|(_, allocation)| allocation.as_slice().len() > 1)
        {
            assert_eq!([allocation.as_slice()[0], allocation.as_slice()[lens[i] - 1]], [i as u8; 2]);
        }
    }
}
