//! The suite: `cases` are run on a `Device`; `machine` is the emulated one.

pub mod cases;
pub mod device;
pub mod machine;
mod matmul;
