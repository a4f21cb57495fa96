//! Shared code of the device tests.

pub mod machine;
pub mod widened;
