//! Vector operations: what the kernels are written in, once for every instruction set.
//!
//! | file | operations | used by |
//! |---|---|---|
//! | `float.rs` | `f32` vectors | everything |
//! | `words.rs` | vectors of 32-bit words | `bytes.rs`, `levels.rs` |
//! | `bytes.rs` | int8 products of activations and packed weights | `quant` |
//! | `levels.rs` | int8 products of queries and levels from lookup tables | `attention::turboquant` |
//! | `amx.rs` | configuration of the tile registers | `gemm::amx`, `quant::amx`, `attention::turboquant::amx` |
//!
//! `scalar.rs`, `avx2/`, `avx512/` and `neon/` implement them; `dispatch.rs` selects by [`crate::isa::Isa`] and
//! `entry.rs` has the `#[target_feature]` functions.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) mod both;
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
pub(crate) mod bytes;
pub(crate) mod dispatch;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) mod entry;
pub(crate) mod float;
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
pub(crate) mod levels;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
pub(crate) mod opaque;
pub(crate) mod prefetch;
mod scalar;
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
pub(crate) mod words;
