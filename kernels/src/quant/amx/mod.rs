//! The product in tile registers, for more rows than vectors do well.

mod multiply;
mod operands;

pub(super) use multiply::{matmul, multiplies};
