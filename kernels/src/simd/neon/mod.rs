//! NEON: four words in a register, eight in a pair of registers for integer kernels.

mod bytes;
pub(crate) mod float;
mod levels;
pub(crate) mod pair;
