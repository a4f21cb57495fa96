//! Microseconds of a parallel region of four tasks per thread after a stretch of one thread's work: by rayon's fork and
//! join, and by threads that poll a counter. `[dependencies] rayon = "1.12"`; `cargo run --release -- THREADS`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rayon::prelude::*;

const REGIONS: usize = 300;
const REPEATS: usize = 10;

fn work(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// What a region's tasks do.
type Task<'a> = &'a (dyn Fn() + Sync);

#[derive(Default)]
struct Team {
    left: AtomicUsize,
    done: AtomicUsize,
    task: AtomicPtr<Task<'static>>,
    ended: AtomicBool,
}

impl Team {
    fn region(&self, tasks: usize, task: Task<'_>) {
        self.task.store(std::ptr::from_ref(&task).cast::<Task<'static>>().cast_mut(), Ordering::Relaxed);
        self.done.store(0, Ordering::Relaxed);
        self.left.store(tasks, Ordering::Release);
        self.take();
        while self.done.load(Ordering::Acquire) < tasks {
            std::hint::spin_loop();
        }
    }

    fn take(&self) {
        loop {
            let left = self.left.load(Ordering::Relaxed);
            if left == 0 {
                return;
            }
            if self.left.compare_exchange_weak(left, left - 1, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                // SAFETY: the leader waits until `done` counts the task.
                unsafe { (*self.task.load(Ordering::Relaxed))() };
                self.done.fetch_add(1, Ordering::Release);
            }
        }
    }

    fn follow(&self) {
        while !self.ended.load(Ordering::Relaxed) {
            self.take();
            std::hint::spin_loop();
        }
    }
}

/// Median microseconds of a region.
fn measure(mut region: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..REPEATS)
        .map(|_| {
            let start = Instant::now();
            (0..REGIONS).for_each(|_| region());
            start.elapsed().as_secs_f64() * 1e6 / REGIONS as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[REPEATS / 2]
}

fn main() {
    let threads: usize = std::env::args().nth(1).map_or(2, |n| n.parse().expect("a number"));
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
    let tasks = 4 * threads;
    println!("one thread's work, a task: one thread, that divided, rayon, team (microseconds)");
    for (before, task) in [0, 2, 20, 100].into_iter().flat_map(|before| [1, 5, 20].map(|task| (before, task))) {
        let (before, task) = (Duration::from_micros(before), Duration::from_micros(task));
        pool.install(|| {
            let one = measure(|| {
                work(before);
                (0..tasks).for_each(|_| work(task));
            });
            let divided = before.as_secs_f64() * 1e6 + (one - before.as_secs_f64() * 1e6) / threads as f64;
            let rayon = measure(|| {
                work(before);
                (0..tasks).into_par_iter().with_max_len(1).for_each(|_| work(task));
            });
            let team = Arc::new(Team::default());
            let (leader, joined) = (rayon::current_thread_index(), team.clone());
            rayon::spawn_broadcast(move |context| {
                if Some(context.index()) != leader {
                    joined.follow();
                }
            });
            let by_team = measure(|| {
                work(before);
                team.region(tasks, &|| work(task));
            });
            team.ended.store(true, Ordering::Relaxed);
            println!("{before:>6.0?} {task:>5.0?}: {one:7.1} {divided:7.1} {rayon:7.1} {by_team:7.1}");
        });
    }
}
