//! foretoken's CPU kernels: slices in, slices out. No candle, no allocation, no I/O, no threads.
//!
//! * [`Isa`] is the proof that the processor has the instructions; every kernel takes one by value. Tests iterate
//!   [`Isa::available`], the engine calls [`Isa::best`] once.
//! * Kernels over `f32` lanes are written once, generic over the crate-private `Lanes` trait; its scalar implementation
//!   is the specification, the fallback and the test oracle.
//! * **Batch invariance**: for one ISA, the bits of an output row are a function of that row's inputs alone. No kernel
//!   chooses an order of summation from the number of rows, of columns in the call, or of threads.
//! * Work is divided by the caller: kernels that fill a wide output take a [`ColumnsMut`], a column range of it.

pub mod activation;
pub mod attend;
mod columns;
#[cfg(any(feature = "cuda", feature = "cuda-prebuilt"))]
pub mod cuda;
mod element;
pub mod gpu;
mod isa;
mod lanes;
pub mod matmul;
pub mod measure;
#[cfg(feature = "metal")]
pub mod metal;
pub mod norm;
pub mod quant;
pub mod rope;
mod softmax;
#[cfg(target_arch = "x86_64")]
mod tile_registers;
pub mod turbo;
pub mod vocabulary;

pub use columns::ColumnsMut;
pub use element::{ElementType, Elements};
pub use isa::Isa;
