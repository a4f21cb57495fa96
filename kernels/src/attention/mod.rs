//! Attention over blocks of keys and values of one KV head, for the query rows that share it.
//!
//! The caller walks a query's keys in fixed blocks and accumulates them in an [`OnlineSoftmax`] (Milakov and
//! Gimelshein, 2018), so that a row's bits depend only on its own keys and the block boundaries.
//!
//! Scores are `f64`: lanes accumulate in `f32` and are summed in `f64`. Gemma 4 does not scale its dot products, so
//! scores reach the hundreds, where half an ulp of an `f32` is an error of 1e-5 in every weight, which
//! the layers that follow amplify. The wider sum has no measurable cost.

mod block;
mod exact;
mod online_softmax;
mod query;
mod softmax_weights;
pub mod turboquant;

pub use block::attend_block;
pub use online_softmax::{OnlineSoftmax, finish, merge};
pub use query::{KvBlock, KvRows, Query, Scratch};
