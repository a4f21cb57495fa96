//! Drops 200 generations that draft ahead on four threads. Alone in its process, because it counts threads.

mod demo_pair;
#[path = "../kernels/tests/skipped/mod.rs"]
mod skipped;

use std::sync::Barrier;
use std::time::Duration;

use demo_pair::{demo, ids, options, plain};
use foretoken::speculative::BlockSize;
use foretoken::{DraftPipeline, SessionOptions};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Threads of this process, if the system reports them.
fn threads() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    status.lines().find_map(|line| line.strip_prefix("Threads:"))?.trim().parse().ok()
}

/// Drops 200 generations on four threads of one engine at some point, with or without a draft being made; the next one
/// on the same session writes what a session without drafts writes.
#[test]
fn dropped_generations_leave_nothing_behind() {
    const WORKERS: u64 = 4;
    let engine = demo(2);
    let prompts: Vec<Vec<u32>> = ["impl Iterator for Counter {\n", "/// Returns the", "fn main() {\n    let"]
        .map(|text| engine.tokenizer().and_then(|t| t.encode(text)).expect("tokens"))
        .into();
    let lists = ["mtp", "auto", "ngram-mod:n=3:min=1,mtp", "ngram-map-k:n=3,mtp", "ngram-cache"];
    let before = threads();
    let start = Barrier::new(WORKERS as usize);
    std::thread::scope(|scope| {
        for worker in 0..WORKERS {
            let (engine, prompts, start) = (&engine, &prompts, &start);
            scope.spawn(move || {
                let mut rng = StdRng::seed_from_u64(worker);
                start.wait();
                for turn in 0..50 {
                    let prompt = &prompts[rng.random_range(0..prompts.len())];
                    let list = lists[rng.random_range(0..lists.len())];
                    let block =
                        if rng.random() { BlockSize::Measured } else { BlockSize::Fixed(rng.random_range(1..6)) };
                    let mut session = engine.session(&SessionOptions::default()).expect("a session");
                    let mut written = Vec::new();
                    {
                        let ahead = options(list, block, DraftPipeline::Ahead, 24);
                        let mut generation = session.generate(prompt, &ahead).expect("a generation");
                        for piece in generation.by_ref().take(rng.random_range(0..7)) {
                            written.extend(piece.expect("a piece").tokens);
                            if rng.random_range(0..3) == 0 {
                                std::thread::sleep(Duration::from_micros(rng.random_range(0..3000)));
                            }
                        }
                        // A stop, a new prompt or the drop of the session during a draft.
                        if rng.random_range(0..8) == 0 {
                            std::mem::forget(generation);
                        }
                    }
                    if rng.random_range(0..10) == 0 {
                        continue; // the session is dropped as it is
                    }
                    let second = &prompts[rng.random_range(0..prompts.len())][..2];
                    let got = ids(&mut session, second, &options(list, block, DraftPipeline::Ahead, 8));
                    let mut fresh = engine.session(&SessionOptions::default()).expect("a session");
                    let whole = [&prompt[..], &written, second].concat();
                    let want = ids(&mut fresh, &whole, &plain(8));
                    assert_eq!(got, want, "worker {worker}, turn {turn}: {list}, {block:?}, {} tokens", written.len());
                    assert!(session.kv().same_rows(fresh.kv()), "worker {worker}, turn {turn}: the caches differ");
                }
            });
        }
    });
    if before.is_none() {
        return skipped::skipped("threads of dropped generations", "this system has no /proc/self/status");
    }
    // A thread is counted until the system has removed it.
    let patience = std::time::Instant::now() + std::time::Duration::from_secs(5);
    while threads() != before && std::time::Instant::now() < patience {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert_eq!(threads(), before, "threads leaked");
}
