//! foretoken's CPU kernels: slices in, slices out. No candle, no I/O, no threads; products and attention allocate
//! nothing.
//!
//! * [`Isa`] proves that the processor supports the instructions; every kernel takes one by value. Tests iterate
//!   [`Isa::available`], the engine calls [`Isa::best`] once.
//! * Kernels over `f32` lanes are written once, generic over the crate-private `Lanes` trait; its scalar implementation
//!   is the specification, the fallback and the test oracle.
//! * **Batch invariance**: for one ISA, the bits of an output row are a function of that row's inputs alone. No kernel
//!   chooses an order of summation from the number of rows, of columns in the call, or of threads.
//! * The caller divides the work: kernels with a wide output write to a [`ColumnsMut`], a column range of it.

// Weights in files and packed blocks are little-endian and read in place, and sizes are multiplied as `usize` after
// checks that each is below 2^31.
#[cfg(not(all(target_endian = "little", target_pointer_width = "64")))]
compile_error!("foretoken needs a little-endian target with 64-bit pointers");

pub mod attention;
mod columns;
mod element;
pub mod gemm;
mod isa;
pub mod measure;
mod ops;
mod pod;
pub mod quant;
mod simd;
mod unknown_name;

pub use columns::{ColumnsMut, WrittenColumns};
pub use element::{ElementType, Elements};
pub use isa::Isa;
pub use ops::{activation, delta_net, norm, rope, vocabulary};
pub use pod::Pod;
pub use unknown_name::UnknownName;

// Compiles its example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
