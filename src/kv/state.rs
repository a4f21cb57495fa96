//! The state of a sequence that a round can roll back.

use std::any::Any;

use super::cache::KvCache;
use super::recurrent::Recurrent;
use super::round::Round;
use crate::{Error, Result};

/// The state of one sequence: K and V of its committed rows, and the model's recurrent state. It changes by [`Round`]s:
/// begun, staged by a forward pass, committed in part or dropped.
pub struct SequenceState {
    kv: KvCache,
    recurrent: Option<Box<dyn Recurrent>>,
}

impl SequenceState {
    /// The state of a model with only K and V.
    pub fn new(kv: KvCache) -> Self {
        Self { kv, recurrent: None }
    }

    /// The state of a model with a recurrent state; `kv` counts the positions, even if it has no stores.
    pub fn with_recurrent(kv: KvCache, recurrent: Box<dyn Recurrent>) -> Self {
        Self { kv, recurrent: Some(recurrent) }
    }

    /// K and V.
    pub fn kv(&self) -> &KvCache {
        &self.kv
    }

    pub(crate) fn kv_mut(&mut self) -> &mut KvCache {
        &mut self.kv
    }

    /// The recurrent state, if it is one of this type.
    pub fn recurrent<R: Recurrent>(&self) -> Option<&R> {
        let recurrent: &dyn Any = self.recurrent.as_deref()?;
        recurrent.downcast_ref()
    }

    /// Whether there is a recurrent state, which cannot be truncated.
    pub(crate) fn has_recurrent(&self) -> bool {
        self.recurrent.is_some()
    }

    /// The recurrent state as values; empty if there is no such state.
    ///
    /// # Errors
    /// If it cannot be saved.
    pub(crate) fn save_recurrent(&self) -> Result<Vec<f32>> {
        let unsupported = || Error::Unsupported {
            path: None,
            what: "session file".into(),
            problem: "the model's recurrent state cannot be saved; keep the session, or its tokens".into(),
        };
        self.recurrent.as_ref().map_or(Ok(Vec::new()), |recurrent| recurrent.save().ok_or_else(unsupported))
    }

    /// Fills an empty state from the values of [`SequenceState::save_recurrent`]. Returns whether they fit.
    pub(crate) fn load_recurrent(&mut self, values: &[f32]) -> bool {
        self.recurrent.as_mut().map_or(values.is_empty(), |recurrent| recurrent.load(values))
    }

    /// Committed positions.
    pub fn len(&self) -> usize {
        self.kv.len()
    }

    /// Whether nothing is committed.
    pub fn is_empty(&self) -> bool {
        self.kv.is_empty()
    }

    /// Positions left in the context.
    pub fn remaining(&self) -> usize {
        self.kv.max_context() - self.kv.len()
    }

    /// Bytes allocated; pages shared with a fork count for each.
    pub fn bytes(&self) -> usize {
        self.kv.bytes() + self.recurrent_bytes()
    }

    /// Bytes of the recurrent state, which are not in the page pool.
    pub(crate) fn recurrent_bytes(&self) -> usize {
        self.recurrent.as_ref().map_or(0, |recurrent| recurrent.bytes())
    }

    /// Begins a round of `rows` new positions.
    ///
    /// # Errors
    /// As [`KvCache::begin_round`].
    pub fn begin_round(&mut self, rows: usize) -> Result<Round<'_>> {
        let mut round = self.kv.begin_round(rows)?;
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.begin(rows);
            round.recurrent = Some(recurrent.as_mut());
        }
        Ok(round)
    }

    /// Begins a round of `rows` new positions that is committed whole or not at all.
    ///
    /// # Errors
    /// As [`KvCache::begin_round`].
    pub fn begin_whole_round(&mut self, rows: usize) -> Result<Round<'_>> {
        let mut round = self.kv.begin_round(rows)?;
        round.is_whole = true;
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.begin_whole(rows);
            round.recurrent = Some(recurrent.as_mut());
        }
        Ok(round)
    }

    /// A copy of the committed state: see [`KvCache::fork`].
    pub fn fork(&self) -> Self {
        Self { kv: self.kv.fork(), recurrent: self.recurrent.as_ref().map(|recurrent| recurrent.fork()) }
    }

    /// Truncates to the first `len` positions.
    ///
    /// # Errors
    /// As [`KvCache::rewind`]; a recurrent state cannot be truncated.
    pub fn rewind(&mut self, len: usize) -> Result<()> {
        if self.recurrent.is_some() && len != self.kv.len() {
            let problem = format!("{} positions cannot be truncated to {len}", self.kv.len());
            return Err(Error::argument(
                "len",
                format!("{problem}: the model has a recurrent state; fork the session earlier"),
            ));
        }
        self.kv.rewind(len)
    }

    /// Whether [`SequenceState::rewind`] to `len` positions is possible.
    pub(crate) fn can_rewind(&self, len: usize) -> bool {
        (self.recurrent.is_none() || len == self.kv.len()) && self.kv.can_rewind(len)
    }
}
