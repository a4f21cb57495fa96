//! Memory for packed weights and K/V pages: a few large mappings in huge pages, from which allocations are cut.
//!
//! Each decode step streams all weights once; with 4 KiB pages a virtual machine spends a good part of that time on
//! page table walks. Huge pages (2 MiB) need aligned 2 MiB ranges, which separately mapped small matrices do not have.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use memmap2::{MmapMut, MmapRaw};

/// Bytes mapped at a time; untouched pages take no memory.
const CHUNK: usize = 256 << 20;

/// Bytes of a huge page.
const HUGE_PAGE: usize = 2 << 20;

/// Alignment of allocations: a cache line and a 512-bit vector.
const ALIGN: usize = 64;

/// Allocates zeroed memory, always the first free range that is long enough: memory in use stays at the front, and what
/// was once touched is used again before more is.
#[derive(Default)]
pub struct Arena {
    chunks: Vec<Chunk>,
}

struct Chunk {
    map: Arc<MmapRaw>,
    free: BTreeMap<usize, usize>, // start to end of the free ranges; no two are adjacent
    whole: Range<usize>,
    written: usize, // from here on all bytes are still zero
}

/// An exclusive range of an arena's bytes.
pub struct Allocation {
    map: Arc<MmapRaw>,
    range: Range<usize>,
}

impl Arena {
    /// `len` zeroed bytes, aligned to a cache line; `None` if the system is out of memory.
    pub fn allocate(&mut self, len: usize) -> Option<Allocation> {
        if let Some(allocation) = self.chunks.iter_mut().find_map(|chunk| chunk.allocate(len)) {
            return Some(allocation);
        }
        self.chunks.push(Chunk::new(len)?);
        self.chunks.last_mut()?.allocate(len)
    }

    /// Free bytes that were allocated before, and so take memory.
    pub(crate) fn touched_free(&self) -> usize {
        let free = |chunk: &Chunk| -> usize {
            chunk.free.iter().map(|(start, end)| chunk.written.min(*end).saturating_sub(*start)).sum()
        };
        self.chunks.iter().map(free).sum()
    }

    /// Frees an allocation of this arena. A chunk without allocations is unmapped.
    ///
    /// The range of an allocation that is dropped instead is never used again; its chunk is unmapped once the arena and
    /// the chunk's other allocations are dropped.
    pub fn free(&mut self, allocation: Allocation) {
        let Some(at) = self.chunks.iter().position(|chunk| Arc::ptr_eq(&chunk.map, &allocation.map)) else { return };
        let chunk = &mut self.chunks[at];
        chunk.insert_free(padded(&allocation.range));
        if chunk.free.get(&chunk.whole.start) == Some(&chunk.whole.end) {
            self.chunks.swap_remove(at);
        }
    }
}

impl Chunk {
    /// At least `len` bytes.
    fn new(len: usize) -> Option<Self> {
        let len = len.checked_next_multiple_of(ALIGN)?.max(CHUNK);
        let map = MmapRaw::from(MmapMut::map_anon(len.checked_add(HUGE_PAGE)?).ok()?);
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage); // advisory: without huge pages decoding is slower
        let start = map.as_ptr().align_offset(HUGE_PAGE);
        let whole = start..start + len;
        Some(Self { map: Arc::new(map), free: BTreeMap::from([(start, whole.end)]), written: start, whole })
    }

    fn allocate(&mut self, len: usize) -> Option<Allocation> {
        let (start, end) =
            self.free.iter().map(|(start, end)| (*start, *end)).find(|(start, end)| end - start >= len.max(1))?;
        let range = start..start + len;
        self.free.remove(&start);
        let rest = padded(&range).end..end;
        if !rest.is_empty() {
            self.free.insert(rest.start, rest.end);
        }
        let mut allocation = Allocation { map: self.map.clone(), range: range.clone() };
        let used_before = self.written.clamp(range.start, range.end) - range.start;
        allocation.as_mut_slice()[..used_before].fill(0);
        self.written = self.written.max(range.end);
        Some(allocation)
    }

    fn insert_free(&mut self, mut range: Range<usize>) {
        if let Some((start, _)) = self.free.range(..range.start).next_back().filter(|(_, end)| **end == range.start) {
            range.start = *start;
        }
        if let Some(end) = self.free.remove(&range.end) {
            range.end = end;
        }
        self.free.insert(range.start, range.end);
    }
}

/// The bytes that an allocation occupies: at least one, in multiples of the alignment.
fn padded(range: &Range<usize>) -> Range<usize> {
    range.start..range.start + range.len().max(1).next_multiple_of(ALIGN)
}

impl Allocation {
    /// Whether both are in one mapping, which is unmapped once both are dropped.
    #[cfg(test)]
    pub(crate) fn is_beside(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.map, &other.map)
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the range is in the mapping, which lives as long as `self`; no other allocation has a byte of it
        // until this one is given back, so writing it requires `&mut self`.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(self.range.start), self.range.len()) }
    }

    /// The bytes, writable.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(self.range.start), self.range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocations_are_aligned_and_disjoint() {
        let mut arena = Arena::default();
        let lens = [1, 64, 65, 4096, CHUNK + 1, CHUNK, 3, 0];
        let mut allocations: Vec<_> = lens.iter().map(|len| arena.allocate(*len).expect("memory")).collect();
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

    #[test]
    fn memory_given_back_is_used_again_before_more_is_touched() {
        let mut arena = Arena::default();
        let mut allocations = Vec::new();
        let mut random = 1u64;
        for round in 0..4000 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let len = [1, 64, 100, 4096, 70_000][(random >> 33) as usize % 5];
            let mut taken = arena.allocate(len).expect("memory");
            assert!(taken.as_slice().iter().all(|byte| *byte == 0), "round {round}");
            taken.as_mut_slice().fill(7);
            allocations.push(taken);
            if allocations.len() > 40 {
                arena.free(allocations.swap_remove((random >> 40) as usize % 40));
            }
        }
        let chunk = &arena.chunks[0];
        let in_use: usize = allocations.iter().map(|allocation| padded(&allocation.range).len()).sum();
        // Up to the padding of the last one.
        let touched = arena.touched_free() + in_use - (chunk.written - chunk.whole.start);
        assert!(touched < ALIGN, "{touched}");
        let most = 41 * 70_000;
        assert!(
            arena.chunks.len() == 1 && chunk.written - chunk.whole.start < most,
            "{}",
            chunk.written - chunk.whole.start
        );
        allocations.drain(..).for_each(|allocation| arena.free(allocation));
        assert!(arena.chunks.is_empty());
    }
}
