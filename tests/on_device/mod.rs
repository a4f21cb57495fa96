//! Shared code of the device tests.

pub mod machine;
pub mod pair;
pub mod poison;
pub mod widened;
