//! The CPU kernels' tests with inaccessible memory directly before every slice. A fault ends the process with a signal;
//! `cargo test --release -p foretoken-kernels --test guarded_starts -- --test-threads 1` names the test.
#![cfg(unix)]

mod delta_net;
mod guarded;
mod kernels;
mod quant;
mod skipped;
mod turbo;
mod turbo_golden;

use guarded::{At, Guarded};

#[global_allocator]
static ALLOCATOR: Guarded = Guarded(At::Start);

#[test]
fn memory_before_a_slice_is_inaccessible() {
    guarded::check(At::Start);
}
