//! TurboQuant: keys and values rotated and quantized to 2 to 8 bits per channel, attended without being dequantized.
//!
//! ```text
//! rows ── rotate ──► 128 rotated rows ── encode_page ──► Page ─┐
//!                                                               ├─ attend_block ──► output ── rotate_back
//! query ─ rotate ──► QuantizedQuery::quantize ─────────────────┘
//! ```
//!
//! | file | content |
//! |---|---|
//! | `layout.rs` | byte layout of a page; `side.rs`: its role |
//! | `codebook.rs` | the formats: levels, boundaries, units |
//! | `rotation.rs` | signs and a Walsh-Hadamard transform, after which a row's channels are nearly Gaussian |
//! | `quantizer.rs` | the codes and the scale of one group |
//! | `page.rs`, `encode.rs` | a page in memory; writing one |
//! | `query.rs`, `check.rs` | 8-bit queries; compatibility of queries and pages |
//! | `scalar.rs` | the reference of attention over pages |
//! | `unpack.rs`, `runs.rs` | codes to levels in vectors |
//! | `operands.rs`, `dots.rs` | the query operands; dot products over a scale group |
//! | `scores.rs`, `scores_transposed.rs`, `values.rs` | the same arithmetic in vectors |
//! | `amx.rs` | the same in tile registers |
//!
//! A rotation preserves dot products, so queries are rotated once and outputs rotated back once; all arithmetic between
//! is on rotated rows.
//!
//! **Arithmetic.** Scores: with the query in 8-bit integers per scale group, integer dot products with the levels; then
//! per token, from the first group to the last, `score = fma(dot, scale * query scale, score)`; then the query's dot
//! product with the mean, in `f64`. Values: the softmax weights times the tokens' scales, in 15 bits relative to the
//! page's largest; integer sums over the page's tokens; then `output = fma(sum, unit, output)`.
//!
//! **Bits.** Integers are exact and the operations on floats have a fixed order per output: scores, weights and outputs
//! over pages have the same bits on every ISA, whatever the number of queries in a call.

#[cfg(target_arch = "x86_64")]
mod amx;
pub(super) mod check;
mod codebook;
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
mod dots;
mod encode;
mod layout;
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
mod operands;
pub(super) mod page;
mod quantizer;
pub(super) mod query;
mod rotation;
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
mod runs;
mod scalar;
pub(super) mod scores;
pub(super) mod scores_transposed;
pub(super) mod side;
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
mod unpack;
pub(super) mod values;

pub use codebook::{CodeFormat, Codebook, Levels};
pub use encode::{PageMut, encode_page};
pub use layout::PageLayout;
pub use page::{Page, decode_page};
pub use quantizer::NonFinite;
pub use query::QuantizedQuery;
pub use rotation::{RotationGroups, rotate, rotate_back};
pub use side::{PAGE_TOKENS, Side};
