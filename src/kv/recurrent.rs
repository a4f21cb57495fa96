//! State of a model besides K and V that a round can roll back.

use std::any::Any;

/// State that a model updates row by row, instead of or besides K and V: a recurrence, a convolution's window.
///
/// A staged row must not destroy the committed state, because most rounds reject some: implementations log the staged
/// rows' inputs and replay the accepted ones, or store a state per row.
pub trait Recurrent: Any + Send + Sync {
    /// Begins a round of `rows` rows after the committed ones; uncommitted rows of earlier rounds are discarded.
    fn begin(&mut self, rows: usize);

    /// Begins a round that is committed whole or not at all, such as a prompt's: its rows need no log. Default:
    /// [`Recurrent::begin`].
    fn begin_whole(&mut self, rows: usize) {
        self.begin(rows);
    }

    /// Commits the first `keep` staged rows.
    fn commit(&mut self, keep: usize);

    /// A copy of the committed state.
    fn fork(&self) -> Box<dyn Recurrent>;

    /// Bytes allocated.
    fn bytes(&self) -> usize;

    /// The committed state as values, for a session file. Default: `None`, it cannot be saved.
    fn save(&self) -> Option<Vec<f32>> {
        None
    }

    /// Fills an empty state from the values of [`Recurrent::save`]. Returns whether they fit.
    fn load(&mut self, values: &[f32]) -> bool {
        let _ = values;
        false
    }
}
