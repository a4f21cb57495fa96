//! The CPU kernels' tests with inaccessible memory right before every slice. Where one faults, the process ends with a signal:
//! `cargo test --release -p foretoken-kernels --test guarded_starts -- --test-threads 1` names it.
#![cfg(unix)]

mod guarded;
mod kernels;
mod quant;
mod turbo;
mod turbo_golden;

use guarded::{At, Guarded};

#[global_allocator]
static ALLOCATOR: Guarded = Guarded(At::Start);

#[test]
fn what_lies_before_a_slice_is_inaccessible() {
    guarded::check(At::Start);
}
