//! What the tests of the engine on a device share.

pub mod machine;
pub mod widened;
