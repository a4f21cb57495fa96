//! The product with bf16 weights in tile registers.
//!
//! `tdpbf16ps` multiplies bf16 by bf16, with sixteen times the multiply-adds of a vector instruction. Activations are
//! `f32`; a finite `f32` whose parts are normal numbers is the exact sum of three bf16: its first eight significant
//! bits, the next eight, and the rest. So each weight is multiplied by three parts of each activation. With many rows
//! this is 16/3 times the throughput of vectors; with few rows, sixteen cost as much as one, because memory bandwidth
//! is the bound. M = 1 costs 1-3 % (10 % if the weights are cached), so that a row's bits do not depend on the batch.
//!
//! An output is a sum over the inputs in order, 32 at a time: the products of the third parts, of the second parts, of
//! the first parts. The order within an instruction is defined by the ISA.

mod layout;
mod multiply;
mod split;
mod transpose;

pub(super) use layout::words;
pub(super) use multiply::matmul;
pub(super) use split::split;
