//! The emulated machine of the kernels' tests as a device of the engine's.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

use foretoken::device::{AnyLaunch, Device, Memory};
use foretoken::{Error, Result};

use crate::device::Device as _;
use crate::machine::{Dialect, Machine};

enum Job {
    Allocate(usize, Sender<u64>),
    Free(u64),
    Launch { kernel: &'static str, grid: [u32; 3], block: [u32; 3], params: Vec<u8>, done: Sender<Result<(), String>> },
}

/// A machine with a thread of its own, to which its memory belongs. A kernel that reads or writes what was freed fails.
pub struct Emulated {
    jobs: Sender<Job>,
    total: usize,
    used: Arc<AtomicUsize>,
    waits: Arc<AtomicUsize>,
}

struct Piece {
    address: u64,
    len: usize,
    jobs: Sender<Job>,
    used: Arc<AtomicUsize>,
    waits: Arc<AtomicUsize>,
}

impl Emulated {
    /// A device of `total` bytes.
    pub fn new(total: usize) -> Arc<Self> {
        let (jobs, orders) = channel();
        std::thread::spawn(move || {
            let mut session = Machine::get().session(Dialect::Cuda, false);
            for job in orders {
                match job {
                    Job::Allocate(bytes, done) => drop(done.send(session.upload(&vec![0xcd; bytes.max(1)]))),
                    Job::Free(address) => session.free(address),
                    Job::Launch { kernel, grid, block, params, done } => {
                        drop(done.send(session.launch(kernel, grid, block, &params)));
                    }
                }
            }
        });
        let counter = || Arc::new(AtomicUsize::new(0));
        Arc::new(Self { jobs, total, used: counter(), waits: counter() })
    }

    /// Bytes that are allocated now.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Takes all but `left` bytes of what is free, and says how much that was.
    pub fn fill(&self, left: usize) -> usize {
        let taken = self.total - self.used() - left;
        self.used.fetch_add(taken, Ordering::Relaxed);
        taken
    }

    /// Gives back what [`Emulated::fill`] took.
    pub fn empty(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// How often the host waited so far: for a read or a write.
    pub fn waits(&self) -> usize {
        self.waits.load(Ordering::Relaxed)
    }

    fn error(&self, problem: impl Into<String>) -> Error {
        Error::Device { device: self.name(), problem: problem.into() }
    }
}

impl Device for Emulated {
    fn name(&self) -> String {
        "emulated".into()
    }

    fn memory(&self) -> Result<(usize, usize)> {
        Ok((self.total - self.used(), self.total))
    }

    fn allocate(&self, bytes: usize) -> Result<Box<dyn Memory>> {
        let free = self.total - self.used();
        if bytes > free {
            return Err(self.error(format!("out of memory: {bytes} bytes asked for, {free} of {} free", self.total)));
        }
        let (done, address) = channel();
        self.jobs.send(Job::Allocate(bytes, done)).expect("the machine runs");
        let address = address.recv().expect("the machine answers");
        self.used.fetch_add(bytes, Ordering::Relaxed);
        Ok(Box::new(Piece {
            address,
            len: bytes,
            jobs: self.jobs.clone(),
            used: self.used.clone(),
            waits: self.waits.clone(),
        }))
    }

    unsafe fn launch(&self, launch: &AnyLaunch) -> Result<()> {
        // SAFETY: as many bytes as the structure has; its padding is copied and never looked at.
        let params = unsafe { std::slice::from_raw_parts(launch.params(), launch.len) }.to_vec();
        let (done, result) = channel();
        let (kernel, grid, block) = (launch.launch.kernel, launch.launch.grid, launch.launch.block);
        self.jobs.send(Job::Launch { kernel, grid, block, params, done }).expect("the machine runs");
        let result = result.recv().expect("the machine answers");
        result.map_err(|problem| self.error(format!("{kernel}: {problem}")))
    }
}

impl Piece {
    fn reach(&self, at: usize, len: usize) -> *mut u8 {
        assert!(at + len <= self.len, "{len} bytes from {at} on of {}", self.len);
        self.waits.fetch_add(1, Ordering::Relaxed);
        (self.address + at as u64) as *mut u8
    }
}

impl Memory for Piece {
    fn address(&self) -> u64 {
        self.address
    }

    fn write(&self, at: usize, bytes: &[u8]) -> Result<()> {
        // SAFETY: the bytes were checked to be this piece's, and kernels run to their end before a launch returns.
        unsafe { self.reach(at, bytes.len()).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn read(&self, at: usize, bytes: &mut [u8]) -> Result<()> {
        // SAFETY: as in `write`.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(self.reach(at, bytes.len()), bytes.len()) };
        Ok(())
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.used.fetch_sub(self.len, Ordering::Relaxed);
        // The machine may have ended with the test.
        let _ = self.jobs.send(Job::Free(self.address));
    }
}
