//! An allocator that puts inaccessible pages before and behind every allocation.

use std::alloc::{GlobalAlloc, Layout};

/// Where an allocation lies between its two inaccessible pages; what is left of its own pages is on the other side.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code)] // every test binary has one of them
pub enum At {
    /// It ends where the page behind begins, or less than its alignment before.
    End,
    /// It begins where the page before ends.
    Start,
}

/// Maps every allocation by itself: what is read or written outside, or after it was freed, is a fault.
pub struct Guarded(pub At);

/// Bytes of a page.
fn page() -> usize {
    // SAFETY: takes a number and returns one.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// Bytes of the pages that hold an allocation.
fn held(layout: Layout) -> usize {
    layout.size().next_multiple_of(page())
}

// SAFETY: an allocation is a mapping of its own, of at least its size; `dealloc` finds the same mapping from the same layout.
unsafe impl GlobalAlloc for Guarded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let (page, held) = (page(), held(layout));
        if layout.align() > page {
            return std::ptr::null_mut();
        }
        // SAFETY: a new mapping touches no other; the pages inside it, and addresses in them, are its own.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANON;
            let map = libc::mmap(std::ptr::null_mut(), held + 2 * page, libc::PROT_NONE, flags, -1, 0);
            if map == libc::MAP_FAILED {
                return std::ptr::null_mut();
            }
            let start = map.cast::<u8>().add(page);
            if libc::mprotect(start.cast(), held, libc::PROT_READ | libc::PROT_WRITE) != 0 {
                return std::ptr::null_mut();
            }
            match self.0 {
                At::Start => start,
                At::End => start.add((held - layout.size()) / layout.align() * layout.align()),
            }
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller's. New pages are zeros.
        unsafe { self.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        let page = page();
        // SAFETY: the mapping that `alloc` made for this layout: in both cases the allocation begins on its first own page.
        unsafe {
            let start = at.sub(at.addr() % page);
            libc::munmap(start.sub(page).cast(), held(layout) + 2 * page);
        }
    }
}

/// The signal that ends a process which reads the byte at `at`; `None` if it can be read.
fn signal_of_reading(at: *const u8) -> Option<i32> {
    let mut status = 0;
    // SAFETY: the child calls nothing that a process with one thread of several must not. Its read is volatile, so it
    // happens, and is of a byte of an allocation or of an inaccessible page.
    unsafe {
        let child = libc::fork();
        assert!(child >= 0, "fork");
        if child == 0 {
            at.read_volatile();
            libc::_exit(0);
        }
        assert_eq!(libc::waitpid(child, &mut status, 0), child, "waitpid");
    }
    libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status))
}

/// What the tests here rely on, of the allocator that they run with.
pub fn check(at: At) {
    for len in [1, 3, 16, 100, 1023, 1024, 1025, 5000] {
        // Elements of four bytes: the alignment leaves no gap.
        let x = vec![1.0f32; len];
        let bytes = x.as_ptr_range();
        let (first, behind) = (bytes.start.cast::<u8>(), bytes.end.cast::<u8>());
        for inside in [first, behind.wrapping_sub(1)] {
            assert_eq!(signal_of_reading(inside), None, "{len} elements, guarded at the {at:?}");
        }
        let outside = match at {
            At::End => behind,
            At::Start => first.wrapping_sub(1),
        };
        let signal = signal_of_reading(outside);
        let fault = [Some(libc::SIGSEGV), Some(libc::SIGBUS)].contains(&signal);
        assert!(fault, "{len} elements, guarded at the {at:?}: {signal:?}");
    }
}
