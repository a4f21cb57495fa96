//! Block-quantized weights: GGUF's formats, packed for vector registers.
//!
//! ```text
//! GGUF rows ── pack ──► PackedMatrix ─┐
//!                                     ├─ matmul ──► y[r][j] = sum_i x[r][i] w[j][i]
//! f32 rows ─ Activations::quantize ───┘
//! ```
//!
//! | file | content |
//! |---|---|
//! | `layout.rs` | byte layout of packed blocks and quantized activations |
//! | `weight_type.rs` | the types and their sizes |
//! | `ggml.rs` | the meaning of a GGUF block's bytes ([`dequantize_row`]) |
//! | `grids.rs` | the grids of IQ1, IQ2 and IQ3, and the decoding of their blocks |
//! | `recode.rs` | the packed form of grids, ternary blocks and weights of three, five and six bits |
//! | `encode/` | quantization to GGUF blocks ([`quantize_row`]) |
//! | `pack.rs`, `packed_matrix.rs` | the packed order and its inverse |
//! | `activations/` | 8-bit activations, in the blocks of llama.cpp's dot products |
//! | `matmul.rs` | the public products, and kernel selection |
//! | `scalar.rs` | the reference |
//! | `unpack/`, `source.rs`, `microkernel.rs`, `vector/` | the same arithmetic in vectors: weights to bytes, scale, block, loops |
//! | `amx/` | the same in tile registers |
//!
//! **Bits.** Every ISA gives the reference's bits: integer products are exact, and the `f32` operations per output are
//! the same in the same order. So a row of `y` depends on that row of `x` alone, whatever the number of rows, the
//! columns of the call, the instruction set or the threads.

mod activations;
#[cfg(target_arch = "x86_64")]
mod amx;
mod encode;
mod ggml;
mod grids;
mod layout;
mod matmul;
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
mod microkernel;
mod output;
mod pack;
mod packed_matrix;
mod recode;
mod scalar;
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
mod source;
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
mod unpack;
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
mod vector;
mod weight_type;

pub use activations::{ActivationFormat, ActivationLayout, Activations, ActivationsPart};
pub use encode::{quantize_row, quantize_row_by_importance};
pub use ggml::dequantize_row;
pub use layout::{PANEL_ROWS, STREAMS};
pub use matmul::matmul;
pub use pack::pack;
pub use packed_matrix::{PackedMatrix, dequantize_packed_row};
pub use weight_type::{ActivationType, WeightType};
