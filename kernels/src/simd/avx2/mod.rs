//! AVX2, and AVX-VNNI: eight words in a ymm register.

mod bytes;
pub(crate) mod float;
pub(crate) mod levels;
pub(crate) mod products;
