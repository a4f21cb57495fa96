//! The KV cache. It owns all K and V; attention is one of its operations, so no other module depends on the layout.
//!
//! * [`KvCache`] holds the rows of every layer that computes K and V; KV-shared layers and the drafter read a donor's.
//! * [`SequenceState`] is what a round can roll back: the cache, and the recurrent state of a model that has one.
//! * [`Round`] stages new rows; [`Round::commit`] commits the first of them, dropping the round rolls all back.
//! * [`Committed`] is the drafter's read-only view: committed rows, one constant position.
//! * [`Batch`] holds the rounds of several sequences, for one pass of the model.
//! * [`PagePool`] is the memory that the sequences of an engine share.

mod attend;
mod available_memory;
mod batch;
mod cache;
mod delta_net;
mod exact;
mod file;
mod format;
mod k_eq_v;
mod layout;
mod options;
mod pool;
mod quantized;
mod recurrent;
mod ring;
mod round;
mod state;
mod store;

pub use available_memory::available_memory;
pub use batch::{Batch, BatchKv};
pub use cache::{KvCache, StoreReport};
pub use delta_net::DeltaNetMatrices;
pub use foretoken_kernels::attention::turboquant::CodeFormat;
pub use format::{ExactZones, KvFormat, KvPreset};
pub use layout::{KvLayout, StoreLayout};
pub use options::{KEqV, KvOptions, LayerFormat};
#[doc(hidden)]
pub use pool::HeldPage;
pub use pool::PagePool;
pub use recurrent::Recurrent;
pub use round::{Committed, KvAccess, Round};
pub use state::SequenceState;

pub(crate) use delta_net::{DeltaNetState, Inputs};
pub(crate) use exact::not_finite;
pub(crate) use k_eq_v::RotaryFirst;
pub(crate) use layout::PAGE;
pub(crate) use options::MEMORY_REMEDY;
pub(crate) use pool::{Counted, exclusive_bytes};
pub(crate) use ring::{Retention, first_exact_page};
pub(crate) use round::Borrowed;
