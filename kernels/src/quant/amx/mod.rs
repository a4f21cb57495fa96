//! The product in AMX tile registers, for many rows.

mod multiply;
mod operands;

pub(super) use multiply::{matmul, multiplies};
