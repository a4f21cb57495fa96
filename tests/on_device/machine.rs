//! The emulated machine of the kernels' tests as a device of the engine.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

use foretoken::device::{AnyLaunch, Device, Memory, Recording, out_of_memory};
use foretoken::{Error, Result};
use foretoken_gpu::Launch;

use crate::device::Device as _;
use crate::machine::{Dialect, Machine, Session};

enum Job {
    Allocate(usize, Sender<u64>),
    Free(u64),
    /// In sequence.
    Launch(Arc<[Kernel]>),
    Wait(Sender<Result<(), String>>),
}

struct Kernel {
    name: &'static str,
    grid: [u32; 3],
    threads: u32,
    shared: u32,
    params: Vec<MaybeUninit<u8>>,
}

/// A device whose memory is limited and whose events are counted: an emulated one, or what the environment variable
/// `FORETOKEN_TEST_DEVICE` names (`cuda`).
pub struct Emulated {
    device: Arc<dyn Device>,
    total: usize,
    used: Arc<AtomicUsize>,
    counts: Arc<Counts>,
    /// Recordings that exist at once, at most.
    most_recordings: AtomicUsize,
    /// The kernel of which a launch fails, and the launches of it before.
    failing: Mutex<Option<(&'static str, usize)>>,
}

/// A machine with a thread of its own, which owns its memory. A kernel that accesses freed memory fails.
///
/// It is as asynchronous as a device may be: kernels run only at the next wait. So host code between a launch and the
/// next wait runs before the kernel, and errors of a kernel are returned by that wait.
struct Worker {
    jobs: Sender<Job>,
}

/// Event counts.
#[derive(Default)]
struct Counts {
    waits: AtomicUsize,
    launches: AtomicUsize,
    recordings: AtomicUsize,
    held_recordings: AtomicUsize,
    replays: AtomicUsize,
}

struct Piece {
    address: u64,
    len: usize,
    jobs: Sender<Job>,
}

struct Counted<T: ?Sized> {
    counts: Arc<Counts>,
    of: Box<T>,
}

struct HeldRecording(Counted<dyn Recording>);

struct Limited {
    memory: Counted<dyn Memory>,
    len: usize,
    used: Arc<AtomicUsize>,
}

impl Kernel {
    fn new(launch: &AnyLaunch) -> Self {
        // SAFETY: as many bytes as the structure has; padding may be uninitialised.
        let params = unsafe { std::slice::from_raw_parts(launch.params().cast(), launch.len) }.to_vec();
        let Launch { kernel: name, grid, threads, shared, .. } = launch.launch;
        Self { name, grid, threads, shared, params }
    }

    fn run(&self, session: &mut Session<'_>) -> Result<(), String> {
        let Self { name: kernel, grid, threads, shared, .. } = *self;
        let done = session.launch(Launch { kernel, grid, threads, shared, params: () }, &self.params);
        done.map_err(|problem| format!("{}: {problem}", self.name))
    }
}

/// The machine's thread.
fn work(orders: impl Iterator<Item = Job>) {
    let mut session = Machine::get(&[Dialect::Cuda]).session(Dialect::Cuda, false);
    let (mut launched, mut failed) = (Vec::new(), Ok(()));
    let catch_up = |session: &mut Session<'_>, launched: &mut Vec<Arc<[Kernel]>>, failed: &mut Result<(), String>| {
        for kernel in launched.drain(..).flat_map(|kernels| (0..kernels.len()).map(move |i| (kernels.clone(), i))) {
            // Nothing is run after a failure.
            if failed.is_ok() {
                *failed = kernel.0[kernel.1].run(session);
            }
        }
    };
    for job in orders {
        match job {
            Job::Allocate(bytes, done) => drop(done.send(session.allocate(bytes.max(1)))),
            Job::Free(address) => {
                catch_up(&mut session, &mut launched, &mut failed);
                session.free(address);
            }
            Job::Launch(kernels) => launched.push(kernels),
            Job::Wait(done) => {
                catch_up(&mut session, &mut launched, &mut failed);
                drop(done.send(std::mem::replace(&mut failed, Ok(()))));
            }
        }
    }
}

impl Emulated {
    /// A device of `total` bytes.
    pub fn new(total: usize) -> Arc<Self> {
        let device = match std::env::var("FORETOKEN_TEST_DEVICE") {
            Ok(name) => foretoken::device::open(&name.parse().expect("a device's name")).expect("a device"),
            Err(_) => None,
        };
        let device = device.unwrap_or_else(|| {
            let (jobs, orders) = channel();
            std::thread::spawn(move || work(orders.into_iter()));
            Arc::new(Worker { jobs })
        });
        let most_recordings = AtomicUsize::new(usize::MAX);
        let (used, counts, failing) = (Arc::default(), Arc::default(), Mutex::default());
        Arc::new(Self { device, total, used, counts, most_recordings, failing })
    }

    /// Bytes currently allocated.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Allocates all but `left` of the free bytes, and returns how many that were.
    pub fn fill(&self, left: usize) -> usize {
        let taken = self.total - self.used() - left;
        self.used.fetch_add(taken, Ordering::Relaxed);
        taken
    }

    /// Frees what [`Emulated::fill`] allocated.
    pub fn empty(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Memory for so many recordings.
    pub fn limit_recordings(&self, most: usize) {
        self.most_recordings.store(most, Ordering::Relaxed);
    }

    /// Lets one launch of `kernel` fail, after `before` others: the driver has no memory for it.
    pub fn fail_launch(&self, kernel: &'static str, before: usize) {
        *self.failing.lock().expect("a kernel") = Some((kernel, before));
    }

    fn fails(&self, launch: &AnyLaunch) -> bool {
        let mut failing = self.failing.lock().expect("a kernel");
        let left = failing.filter(|(kernel, _)| *kernel == launch.launch.kernel).map(|(_, before)| before);
        if let Some(left) = left {
            *failing = left.checked_sub(1).map(|before| (launch.launch.kernel, before));
        }
        left == Some(0)
    }

    /// Number of waits of the host: for a read or a write.
    pub fn waits(&self) -> usize {
        self.counts.waits.load(Ordering::Relaxed)
    }

    /// Number of single launches, recordings, and replays.
    pub fn launches(&self) -> [usize; 3] {
        let Counts { launches, recordings, replays, .. } = &*self.counts;
        [launches, recordings, replays].map(|count| count.load(Ordering::Relaxed))
    }
}

// SAFETY: memory, launches and recordings are the other device's.
unsafe impl Device for Emulated {
    fn name(&self) -> String {
        "emulated".into()
    }

    fn free_bytes(&self) -> Result<usize> {
        Ok(self.total - self.used())
    }

    fn allocate(&self, bytes: usize) -> Result<Box<dyn Memory>> {
        let free = self.total - self.used();
        if bytes > free {
            return Err(out_of_memory("emulated", bytes, free));
        }
        let memory = Counted { counts: self.counts.clone(), of: self.device.allocate(bytes)? };
        self.used.fetch_add(bytes, Ordering::Relaxed);
        Ok(Box::new(Limited { memory, len: bytes, used: self.used.clone() }))
    }

    unsafe fn launch(&self, launch: &AnyLaunch) -> Result<()> {
        if self.fails(launch) {
            return Err(out_of_memory("emulated", None::<usize>, self.total - self.used()));
        }
        self.counts.launches.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract.
        unsafe { self.device.launch(launch) }
    }

    fn record(&self, launches: &[AnyLaunch]) -> Result<Box<dyn Recording>> {
        if self.counts.held_recordings.load(Ordering::Relaxed) >= self.most_recordings.load(Ordering::Relaxed) {
            return Err(out_of_memory("emulated", None::<usize>, self.total - self.used()));
        }
        let recording = Counted { counts: self.counts.clone(), of: self.device.record(launches)? };
        self.counts.recordings.fetch_add(1, Ordering::Relaxed);
        self.counts.held_recordings.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(HeldRecording(recording)))
    }
}

impl Recording for HeldRecording {
    unsafe fn replay(&self) -> Result<()> {
        self.0.counts.replays.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract.
        unsafe { self.0.of.replay() }
    }
}

impl Drop for HeldRecording {
    fn drop(&mut self) {
        self.0.counts.held_recordings.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Memory for Limited {
    fn address(&self) -> u64 {
        self.memory.of.address()
    }

    fn write(&self, at: usize, bytes: &[u8]) -> Result<()> {
        self.memory.counts.waits.fetch_add(1, Ordering::Relaxed);
        self.memory.of.write(at, bytes)
    }

    fn read(&self, at: usize, bytes: &mut [u8]) -> Result<()> {
        self.memory.counts.waits.fetch_add(1, Ordering::Relaxed);
        self.memory.of.read(at, bytes)
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        self.used.fetch_sub(self.len, Ordering::Relaxed);
    }
}

// SAFETY: an allocation is one of the machine's, freed in sequence with the launches, which run as they are given.
unsafe impl Device for Worker {
    fn name(&self) -> String {
        "emulated".into()
    }

    fn free_bytes(&self) -> Result<usize> {
        unreachable!("the limit is another's")
    }

    fn allocate(&self, bytes: usize) -> Result<Box<dyn Memory>> {
        let (done, address) = channel();
        self.jobs.send(Job::Allocate(bytes, done)).expect("the machine runs");
        let address = address.recv().expect("the machine answers");
        Ok(Box::new(Piece { address, len: bytes, jobs: self.jobs.clone() }))
    }

    unsafe fn launch(&self, launch: &AnyLaunch) -> Result<()> {
        self.jobs.send(Job::Launch([Kernel::new(launch)].into())).expect("the machine runs");
        Ok(())
    }

    fn record(&self, launches: &[AnyLaunch]) -> Result<Box<dyn Recording>> {
        Ok(Box::new(Recorded { kernels: launches.iter().map(Kernel::new).collect(), jobs: self.jobs.clone() }))
    }
}

struct Recorded {
    kernels: Arc<[Kernel]>,
    jobs: Sender<Job>,
}

impl Recording for Recorded {
    unsafe fn replay(&self) -> Result<()> {
        self.jobs.send(Job::Launch(self.kernels.clone())).expect("the machine runs");
        Ok(())
    }
}

impl Piece {
    /// The address, after all earlier launches are done.
    fn reach(&self, at: usize, len: usize) -> Result<*mut u8> {
        assert!(at + len <= self.len, "{len} bytes from {at} on of {}", self.len);
        let (done, result) = channel();
        self.jobs.send(Job::Wait(done)).expect("the machine runs");
        let result = result.recv().expect("the machine answers");
        result.map_err(|problem| Error::Device { device: "emulated".into(), problem })?;
        Ok((self.address + at as u64) as *mut u8)
    }
}

impl Memory for Piece {
    fn address(&self) -> u64 {
        self.address
    }

    fn write(&self, at: usize, bytes: &[u8]) -> Result<()> {
        // SAFETY: the bytes were checked to be in this allocation. Kernels run during waits: earlier ones are done, and
        // by the contract of `launch` no kernel writes what is copied here.
        unsafe { self.reach(at, bytes.len())?.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn read(&self, at: usize, bytes: &mut [u8]) -> Result<()> {
        // SAFETY: as in `write`.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(self.reach(at, bytes.len())?, bytes.len()) };
        Ok(())
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // The machine may have ended with the test.
        let _ = self.jobs.send(Job::Free(self.address));
    }
}
