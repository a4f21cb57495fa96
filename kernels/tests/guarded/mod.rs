//! An allocator with inaccessible pages before and after every allocation.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use crate::skipped::skipped;

/// The side on which an allocation borders an inaccessible page; its unused bytes are on the other side.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code)] // every test binary has one of them
pub enum At {
    /// It ends where the next page begins, or less than its alignment before.
    End,
    /// It begins where the previous page ends.
    Start,
}

/// Gives every allocation its own pages, at addresses that are never reused: accesses outside it, or after it is freed,
/// fault. A panicking thread uses the system allocator, because a backtrace has more allocations
/// than a process may have mappings; so do all if the system refuses the addresses.
pub struct Guarded(pub At);

/// Bytes of addresses.
const SPACE: usize = 1 << 38;

/// The addresses, reserved and inaccessible; null if the system refuses.
fn space() -> *mut u8 {
    static START: AtomicPtr<u8> = AtomicPtr::new(null_mut());
    let start = START.load(Ordering::Acquire);
    if !start.is_null() {
        return start;
    }
    // SAFETY: a new mapping does not affect others; nothing refers to the one that is unmapped.
    unsafe {
        let new = libc::mmap(null_mut(), SPACE, libc::PROT_NONE, RESERVED, -1, 0);
        if new == libc::MAP_FAILED {
            return null_mut();
        }
        match START.compare_exchange(null_mut(), new.cast(), Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => new.cast(),
            Err(other) => {
                libc::munmap(new, SPACE);
                other
            }
        }
    }
}

const RESERVED: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANON | libc::MAP_NORESERVE;

/// Bytes of a page.
fn page() -> usize {
    // SAFETY: an integer argument and result.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// Bytes of the pages that hold an allocation.
fn held(layout: Layout) -> usize {
    layout.size().next_multiple_of(page())
}

// SAFETY: an allocation has pages of its own, of at least its size, until `dealloc` takes them; what lies outside the
// space is the system allocator's.
unsafe impl GlobalAlloc for Guarded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let (page, held) = (page(), held(layout));
        let space = space();
        if space.is_null() || std::thread::panicking() || layout.align() > page {
            // SAFETY: the caller's contract is that of `System`.
            return unsafe { System.alloc(layout) };
        }
        let at = NEXT.fetch_add(page + held, Ordering::Relaxed);
        if at + held + 2 * page > SPACE {
            return null_mut();
        }
        // SAFETY: within the space, between this allocation's leading guard page and the next allocation's.
        unsafe {
            let start = space.add(at + page);
            if libc::mprotect(start.cast(), held, libc::PROT_READ | libc::PROT_WRITE) != 0 {
                return null_mut();
            }
            match self.0 {
                At::Start => start,
                At::End => start.add((held - layout.size()) / layout.align() * layout.align()),
            }
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller's; the bytes are the allocation's.
        unsafe {
            let at = self.alloc(layout);
            // New pages are zeros.
            if !at.is_null() && !is_guarded(at) {
                at.write_bytes(0, layout.size());
            }
            at
        }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as the caller's; the pages are those that `alloc` gave this allocation, which begins on the first.
        unsafe {
            if !is_guarded(at) {
                return System.dealloc(at, layout);
            }
            let start = at.sub(at.addr() % page());
            libc::mmap(start.cast(), held(layout), libc::PROT_NONE, RESERVED | libc::MAP_FIXED, -1, 0);
        }
    }
}

fn is_guarded(at: *const u8) -> bool {
    let space = space();
    !space.is_null() && at.addr().wrapping_sub(space.addr()) < SPACE
}

/// The signal that ends a process which reads the byte at `at`; `None` if it can be read.
fn signal_of_reading(at: *const u8) -> Option<i32> {
    let mut status = 0;
    // SAFETY: the child calls async-signal-safe functions only. Its read is volatile, so it
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

/// Asserts that the allocator guards as the tests assume.
pub fn check(at: At) {
    if space().is_null() {
        return skipped("guard pages", "the system refuses 256 GiB of addresses");
    }
    for len in [1, 3, 16, 100, 1023, 1024, 1025, 5000] {
        // Elements of four bytes: the alignment leaves no gap.
        let x = vec![1.0f32; len];
        let bytes = x.as_ptr_range();
        let (first, after) = (bytes.start.cast::<u8>(), bytes.end.cast::<u8>());
        for inside in [first, after.wrapping_sub(1)] {
            assert_eq!(signal_of_reading(inside), None, "{len} elements, guarded at the {at:?}");
        }
        let outside = match at {
            At::End => after,
            At::Start => first.wrapping_sub(1),
        };
        let signal = signal_of_reading(outside);
        let fault = [Some(libc::SIGSEGV), Some(libc::SIGBUS)].contains(&signal);
        assert!(fault, "{len} elements, guarded at the {at:?}: {signal:?}");
    }
}
