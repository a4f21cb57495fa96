//! The memory of a scheduler's sequences: what a new one may take, and what frees memory when it is exhausted.

use super::prefix_cache::PrefixCache;
use super::slot::Slot;
use super::{Event, Scheduler};
use crate::kv::KvOptions;
use crate::options::SessionOptions;
use crate::session::Session;
use crate::speculative::{SpeculativeDecoder, Work};
use crate::{Error, Result};

impl Scheduler {
    /// As [`Engine::session`](crate::Engine::session); cached prefixes are dropped if a given context does not fit
    /// beside them and fits without them. An automatic context counts the memory of cached prefixes as free: they are
    /// dropped once a sequence needs it.
    ///
    /// # Errors
    /// As [`Engine::session`](crate::Engine::session).
    pub fn session(&mut self, options: &SessionOptions) -> Result<Session> {
        let mut session = loop {
            match self.engine.session(options) {
                Err(Error::Memory { needed, .. }) if self.drop_for_session(&options.kv, needed) => {}
                session => break session?,
            }
        };
        let available = || self.engine.pages().available_memory();
        if let (None, Some(prefixes), Some(available)) = (options.kv.max_context, &self.prefixes, available()) {
            session.extend_context(|| available + prefixes.reclaimable())?;
        }
        Ok(session)
    }

    /// Drops the least recently used cached prefix; `false` if there is none. On a device, an automatic context is what
    /// cached prefixes leave.
    pub fn drop_prefix(&mut self) -> bool {
        self.prefixes.as_mut().is_some_and(PrefixCache::drop_oldest)
    }

    fn drop_for_session(&mut self, options: &KvOptions, needed: Option<u64>) -> bool {
        self.prefixes.as_mut().is_some_and(|prefixes| prefixes.drop_for_session(options, needed))
    }

    /// Drops a cached prefix if that may free memory for those that wait, which are retried then; returns whether it
    /// did.
    pub(super) fn drop_for_waiting(&mut self) -> bool {
        let dropped = self.prefixes.as_mut().is_some_and(PrefixCache::drop_for_memory);
        if dropped {
            self.slots.iter_mut().for_each(|slot| slot.waits = false);
        }
        dropped
    }

    /// If all wait for memory, drops the drafts of a pass, else the pages of a sequence's drafters, else a cached
    /// prefix if its drafters have pages, which are not counted, else ends the newest generation: the others continue
    /// when it is removed.
    pub(super) fn free_memory(&mut self, error: Error) -> Option<Event> {
        self.slots.iter_mut().for_each(|slot| slot.waits = false);
        if !std::mem::replace(&mut self.plain, true) {
            return None;
        }
        let running = |slot: &&mut Slot| slot.run.finish_reason().is_none();
        if self.slots.iter_mut().rev().filter(running).any(|slot| slot.session.decoder().0.drafting.release()) {
            return None;
        }
        let sources = &self.engine.parts.sources;
        let has_uncounted = sources.has_nextn() || sources.draft_model.is_some();
        if has_uncounted && self.drop_prefix() {
            return None;
        }
        let newest = self.slots.iter_mut().rev().find(running)?;
        Some(newest.fail(error))
    }

    /// Drops cached prefixes, if the pass or its drafts could exceed a memory limit.
    pub(super) fn drop_prefixes(&mut self) {
        let Some(prefixes) = &mut self.prefixes else { return };
        let needs = self.slots.iter_mut().map(|Slot { session, planned, .. }| {
            let rows = planned.as_ref().map_or(0, Work::num_rows);
            let SpeculativeDecoder { backend, state, drafting } = session.decoder().0;
            let of_drafters = if rows > 0 { drafting.page_bytes(state.len() + rows) } else { 0 };
            (backend.bytes_of_round(state, rows) + of_drafters) as u64
        });
        prefixes.drop_until_available(needs.sum());
    }
}
