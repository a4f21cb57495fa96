//! The product in AMX tile registers, for many rows.

mod blocks_256;
mod blocks_32;
mod matmul;
mod operands;
mod panels;
mod prefetch;
#[cfg(test)]
mod scalar;

pub(super) use matmul::matmul;
