//! AVX-512: sixteen words in a zmm register.

mod bytes;
pub(crate) mod float;
mod levels;
