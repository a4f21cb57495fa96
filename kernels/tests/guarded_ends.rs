//! The CPU kernels' tests with inaccessible memory directly after every slice. A fault ends the process with a signal;
//! `cargo test --release -p foretoken-kernels --test guarded_ends -- --test-threads 1` names the test. Without Unix, or
//! where the system refuses the addresses, they run in its own memory.

mod delta_net;
#[cfg(unix)]
mod guarded;
mod kernels;
mod quant;
#[cfg(unix)]
mod skipped;
mod turbo;
mod turbo_golden;

#[cfg(unix)]
use guarded::{At, Guarded};

#[cfg(unix)]
#[global_allocator]
static ALLOCATOR: Guarded = Guarded(At::End);

#[cfg(unix)]
#[test]
fn memory_after_a_slice_is_inaccessible() {
    guarded::check(At::End);
}
