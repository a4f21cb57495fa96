//! The CPU kernels' tests with inaccessible memory directly after every slice. A fault ends the process with a signal;
//! `cargo test --release -p foretoken-kernels --test guarded_ends -- --test-threads 1` names the test.
#![cfg(unix)]

mod delta_net;
mod guarded;
mod kernels;
mod quant;
mod turbo;
mod turbo_golden;

use guarded::{At, Guarded};

#[global_allocator]
static ALLOCATOR: Guarded = Guarded(At::End);

#[test]
fn memory_after_a_slice_is_inaccessible() {
    guarded::check(At::End);
}
