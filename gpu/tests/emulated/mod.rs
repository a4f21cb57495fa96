//! The suite: `cases` are run on a `Device`; `machine` is the emulated one.

mod attention;
pub mod cases;
mod delta_net;
pub mod device;
pub mod gpu;
pub mod machine;
mod matmul;
mod merge;
mod steps;
