//! Plans: functions that check shapes and lengths and return a [`Launch`](crate::Launch).
//!
//! **Batch invariance.** As on the CPU, the bits of a row do not depend on the rows computed with it: how the inputs of
//! a sum are divided follows from the shape of the weight, or from positions in the sequence.

pub mod accept;
pub mod attention;
pub mod attention_mixed;
pub mod delta_net;
pub mod experts;
pub mod matmul;
pub mod matmul_float;
pub mod merge;
pub mod pages;
pub mod pointwise;
pub mod positions;
pub mod read;
pub mod rows;
pub mod segments;
pub mod turboquant;
pub mod vocabulary;
pub mod words;

/// Blocks of threads that fill an H200: two on each of its 132 multiprocessors. Fewer leave some without work.
const H200_BLOCKS: usize = 2 * 132;
