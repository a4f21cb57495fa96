//! Parallel regions whose threads poll between them instead of sleeping.
//!
//! A step of E2B has some 250 regions, with a few to a hundred microseconds of one thread's work between two. In a
//! fork-join pool the threads sleep there, and waking them takes ten to thirty microseconds (record:
//! `2026-11-29-xeon-2vcpu/regions.txt`). [`with_team`] keeps the pool's threads polling for the time of a pass, so a
//! region begins with one store. They take tasks one at a time, so a thread that arrives late or is preempted
//! delays the others by at most its current task.
//!
//! Within a pass, rayon's own functions run on the leader alone until the others have left the team ([`IDLE_LIMIT`]).

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rayon::prelude::*;

/// Polls before a waiting thread yields its processor at each further poll: beside other load, a row of E2B took 74 ms
/// with none, 62 with 2^10, 60 with 2^12 (same record).
const SPINS: u32 = 1 << 12;

/// How long a thread polls for tasks before it leaves the team, until the next broadcast: twenty times the longest
/// stretch between two regions of a step. After this time, the pool's threads run the pass's other rayon work, and that
/// of other users of the pool.
const IDLE_LIMIT: Duration = Duration::from_millis(2);

/// What a region calls with every index.
type Work<'a> = &'a (dyn Fn(usize) + Sync);

/// The regions of one thread, its leader, and their state.
#[derive(Default)]
struct Team {
    tasks: AtomicU64, // of the current region: upper 32 bits their number, lower how many were taken, or more
    work: AtomicPtr<Work<'static>>,
    done: AtomicUsize, // tasks of the current region
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    incomplete: AtomicBool, // a thread has left, or was busy at the last broadcast
    broadcasts: AtomicUsize,
    ended: AtomicBool,
}

/// The role of a thread in parallel regions.
enum Role {
    /// In no team: its regions run on rayon.
    Free,
    /// The leader of a team, outside of its regions.
    Leader(Arc<Team>),
    /// In a task, or waiting for one: regions within a task are sequential loops.
    InTask,
}

thread_local! {
    static ROLE: RefCell<Role> = const { RefCell::new(Role::Free) };
}

/// Runs `pass` with the threads of the current pool in a team that the calling thread leads. Threads busy with
/// something else join when they are done with it.
pub(crate) fn with_team<R>(pass: impl FnOnce() -> R) -> R {
    /// Ends the team, also after a panic.
    struct Leading(Arc<Team>);
    impl Drop for Leading {
        fn drop(&mut self) {
            self.0.ended.store(true, Ordering::Relaxed);
            ROLE.set(Role::Free);
        }
    }
    if rayon::current_thread_index().is_none() || threads() == 1 || !is_free() {
        return pass();
    }
    let team = Arc::new(Team { incomplete: true.into(), ..Team::default() });
    ROLE.set(Role::Leader(team.clone()));
    let _leading = Leading(team);
    pass()
}

fn is_free() -> bool {
    ROLE.with_borrow(|role| matches!(role, Role::Free))
}

/// Number of threads that a region of this thread runs on.
pub(crate) fn threads() -> usize {
    ROLE.with_borrow(|role| match role {
        Role::InTask => 1,
        Role::Free | Role::Leader(_) => rayon::current_num_threads(),
    })
}

/// Calls `work` with every task, on the threads of the team, or of the pool if there is no team.
pub(crate) fn for_each<T: Send>(tasks: impl Iterator<Item = T>, work: impl Fn(T) + Sync) {
    if threads() == 1 {
        return tasks.for_each(work);
    }
    let tasks: Vec<_> = tasks.map(|task| Mutex::new(Some(task))).collect();
    if tasks.len() < 2 {
        // Not a region, so that regions within the task can be parallel.
        return tasks.into_iter().filter_map(|task| task.into_inner().ok()?).for_each(work);
    }
    for_each_index(tasks.len(), &|index| {
        let task = tasks[index].lock().unwrap_or_else(PoisonError::into_inner).take();
        task.into_iter().for_each(&work);
    });
}

/// [`for_each`] of the indices below `count`, compiled once.
fn for_each_index(count: usize, work: Work<'_>) {
    match ROLE.replace(Role::InTask) {
        Role::Leader(team) => {
            let panic = team.region(count, work);
            ROLE.set(Role::Leader(team));
            if let Some(panic) = panic {
                resume_unwind(panic);
            }
        }
        role => {
            ROLE.set(role);
            (0..count).into_par_iter().with_max_len(1).for_each(work);
        }
    }
}

impl Team {
    /// Calls `work` with every index below `count`, and returns the first panic. Only the leader calls this, and not
    /// within `work`.
    fn region(self: &Arc<Self>, count: usize, work: Work<'_>) -> Option<Box<dyn Any + Send>> {
        if self.incomplete.swap(false, Ordering::Relaxed) {
            self.broadcast();
        }
        let erased = std::ptr::from_ref(&work).cast::<Work<'static>>().cast_mut();
        self.work.store(erased, Ordering::Relaxed);
        self.done.store(0, Ordering::Relaxed);
        self.tasks.store((count as u64) << 32, Ordering::Release);
        self.take_tasks();
        let mut polls = 0;
        while self.done.load(Ordering::Acquire) < count {
            pause(&mut polls);
        }
        self.panic.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Queues a job on every thread of the pool that joins the team.
    fn broadcast(self: &Arc<Self>) {
        let (team, number) = (self.clone(), self.broadcasts.fetch_add(1, Ordering::Relaxed) + 1);
        rayon::spawn_broadcast(move |_| {
            // A thread that stayed in the team finds the jobs of several broadcasts when it leaves: only the last
            // counts.
            let is_latest = number == team.broadcasts.load(Ordering::Relaxed);
            if is_latest && is_free() {
                ROLE.set(Role::InTask);
                team.follow();
                ROLE.set(Role::Free);
            } else if is_latest && !team.is_led_by_this_thread() {
                // This thread waits for rayon within another pass, to which it would not return before this pass
                // ends: the next region broadcasts again.
                team.incomplete.store(true, Ordering::Relaxed);
            }
        });
    }

    fn is_led_by_this_thread(self: &Arc<Self>) -> bool {
        ROLE.with_borrow(|role| matches!(role, Role::Leader(team) if Arc::ptr_eq(team, self)))
    }

    /// Takes tasks of the leader's regions until the team ends, or no region began for [`IDLE_LIMIT`].
    fn follow(&self) {
        let (mut polls, mut since, mut seen) = (0, Instant::now(), 0);
        while !self.ended.load(Ordering::Relaxed) {
            // Before tasks are taken: a thread that has seen a region does not leave without having tried.
            let tasks = self.tasks.load(Ordering::Relaxed);
            let any = self.take_tasks();
            // Regions of equally many tasks may look the same.
            if any || tasks != seen {
                (since, seen) = (Instant::now(), tasks);
            }
            // The first region follows the broadcast, however late: only then the limit applies.
            let begun = tasks > 0;
            if any {
                polls = 0;
            } else if pause(&mut polls) && begun && since.elapsed() > IDLE_LIMIT {
                return self.incomplete.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Runs tasks until none is left; whether there were any.
    fn take_tasks(&self) -> bool {
        let mut any = false;
        loop {
            let is_open = |tasks: u64| tasks & u64::from(u32::MAX) < tasks >> 32;
            if !is_open(self.tasks.load(Ordering::Relaxed)) {
                return any;
            }
            // Acquires `work` of the region that the task is of, even if the load was of an earlier one.
            let tasks = self.tasks.fetch_add(1, Ordering::Acquire);
            if !is_open(tasks) {
                return any;
            }
            // SAFETY: this thread has taken a task of the current region, which the leader does not leave before
            // `done` counts it: until then `work` is that region's, and alive with all it borrows.
            let work: Work<'_> = unsafe { *self.work.load(Ordering::Relaxed) };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| work((tasks & u64::from(u32::MAX)) as usize))) {
                let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
                match *first {
                    None => *first = Some(panic),
                    // Dropping it could panic.
                    Some(_) => std::mem::forget(panic),
                }
            }
            self.done.fetch_add(1, Ordering::Release);
            any = true;
        }
    }
}

/// Spins once, or yields the processor from poll [`SPINS`] on; returns whether it yielded.
fn pause(polls: &mut u32) -> bool {
    let yields = *polls >= SPINS;
    if yields {
        std::thread::yield_now();
    } else {
        *polls += 1;
        std::hint::spin_loop();
    }
    yields
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Barrier;

    use super::*;

    fn pool(threads: usize) -> rayon::ThreadPool {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool")
    }

    /// Regions of every size, one after the other, and within each other.
    #[test]
    fn every_task_is_done_once() {
        for threads in [1, 2, 3, 8] {
            let mut counts = vec![0; 3000];
            pool(threads).install(|| {
                with_team(|| {
                    for region in (0..300).map(|region| region % 17) {
                        for_each(counts[..region].iter_mut(), |count| *count += 1);
                    }
                    for_each(counts.chunks_mut(100), |counts| {
                        assert_eq!(super::threads(), 1);
                        for_each(counts.iter_mut(), |count| *count += 1);
                    });
                    assert_eq!(super::threads(), threads);
                });
            });
            let regions = |index| (0..300).filter(|region| region % 17 > index).count();
            assert!(counts.iter().enumerate().all(|(index, count)| *count == 1 + regions(index)), "{threads} threads");
        }
    }

    /// Runs regions until `threads` threads have taken tasks: a thread that does not come in time takes none of a
    /// region's.
    fn run_on_all(threads: usize) {
        let taken = Mutex::new(HashSet::new());
        while taken.lock().expect("no panic").len() < threads {
            for_each(0..threads, |_| {
                taken.lock().expect("no panic").insert(std::thread::current().id());
                std::thread::yield_now();
            });
        }
    }

    #[test]
    fn all_threads_of_the_pool_take_tasks() {
        pool(3).install(|| with_team(|| run_on_all(3)));
    }

    #[test]
    fn a_panic_ends_the_region_and_not_the_team() {
        let done = AtomicUsize::new(0);
        pool(2).install(|| {
            with_team(|| {
                let panicking = || for_each(0..10, |task| if task == 3 { panic!("task {task}") } else { count(&done) });
                let panic = catch_unwind(AssertUnwindSafe(panicking)).expect_err("a panic");
                assert_eq!(panic.downcast_ref::<String>().map(String::as_str), Some("task 3"));
                for_each(0..10, |_| count(&done));
            });
        });
        assert_eq!(done.into_inner(), 9 + 10);
    }

    #[test]
    fn a_panic_before_the_region_ends_the_pass_and_not_the_pool() {
        let pool = pool(2);
        let pass = || with_team(|| for_each((0..10).inspect(|task| assert_ne!(*task, 3)), |_| ()));
        pool.install(|| catch_unwind(pass)).expect_err("a panic");
        pool.install(|| with_team(|| run_on_all(2)));
    }

    /// In a pass, once the others have waited for tasks, and after it.
    #[test]
    fn the_pools_threads_are_rayons_again() {
        let (done, meeting) = (AtomicUsize::new(0), Barrier::new(2));
        let meet = || rayon::join(|| meeting.wait(), || meeting.wait());
        pool(2).install(|| {
            with_team(|| {
                for _ in 0..3 {
                    for_each(0..10, |_| count(&done));
                    meet();
                }
                with_team(|| for_each(0..10, |_| count(&done)));
            });
            meet();
        });
        assert_eq!(done.into_inner(), 40);
    }

    /// The other thread of the pool waits for the leader's work, outside.
    #[test]
    fn a_region_waits_for_no_busy_thread() {
        let (pool, done) = (pool(2), AtomicUsize::new(0));
        let (started, ended) = (Barrier::new(2), Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| pool.install(|| (started.wait(), ended.wait())));
            started.wait();
            pool.install(|| with_team(|| for_each(0..10, |_| count(&done))));
            ended.wait();
        });
        assert_eq!(done.into_inner(), 10);
    }

    fn count(done: &AtomicUsize) {
        done.fetch_add(1, Ordering::Relaxed);
    }
}
