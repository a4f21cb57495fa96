//! The memory of a scheduler's sequences: what a new one may take, and what frees memory when it is exhausted.

use super::prefix_cache::PrefixCache;
use super::slot::Slot;
use super::{Event, Scheduler};
use crate::options::SessionOptions;
use crate::session::Session;
use crate::speculative::{SpeculativeDecoder, Work};
use crate::{Error, Result};

impl Scheduler {
    /// As [`Engine::session`](crate::Engine::session); cached prefixes are dropped if a given context does not fit
    /// beside them and fits without them. An automatic context is the largest that fits the limit of the engine's pages
    /// alone: a sequence waits for what others hold, and cached prefixes are dropped once it needs their memory.
    /// Without a limit, which a device always has, it is the largest that fits beside others without cached prefixes.
    ///
    /// # Errors
    /// As [`Engine::session`](crate::Engine::session).
    pub fn session(&mut self, options: &SessionOptions) -> Result<Session> {
        let session = self.extended_session(options)?;
        self.engine.parts.warn_of_short_context(&options.kv, session.kv().max_context());
        Ok(session)
    }

    /// See [`Scheduler::session`].
    fn extended_session(&mut self, options: &SessionOptions) -> Result<Session> {
        let mut session = loop {
            match Session::new(self.engine.clone(), options) {
                Err(Error::Memory { needed, .. })
                    if self.prefixes.as_mut().is_some_and(|all| all.drop_for_session(&options.kv, needed)) => {}
                session => break session?,
            }
        };
        if options.kv.max_context.is_some() {
            return Ok(session);
        }
        let pages = self.engine.pages();
        if let Some(limit) = pages.limit() {
            session.extend_context(limit)?;
            return Ok(session);
        }
        // The limit is the system's memory, and pages that other sequences free may not return to the system.
        let is_longest = session.kv().max_context() >= self.engine.target().max_position_embeddings();
        let more = if is_longest { 0 } else { self.reclaimable() };
        // With nothing to reclaim, the context that the engine chose is the largest.
        if more > 0 {
            let own = session.recurrent_bytes() as u64; // zeroed pages, not in memory before they are written
            let free = pages.available_memory().map_or(u64::MAX, |free| (free + more).saturating_sub(own));
            session.extend_context(free)?;
        }
        Ok(session)
    }

    /// Drops the least recently used cached prefix; `false` if there is none. Sequences that wait for memory are
    /// retried in the next step.
    pub fn drop_prefix(&mut self) -> bool {
        self.prefixes.as_mut().is_some_and(PrefixCache::drop_oldest)
    }

    /// Lets those that wait for memory take part in the next pass.
    pub(super) fn retry_waiting(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.waits = false);
    }

    /// Bytes of the pages that only cached prefixes hold. Takes time for every page of them: with tens of gigabytes a
    /// good part of a pass.
    fn reclaimable(&self) -> u64 {
        self.prefixes.as_ref().map_or(0, PrefixCache::reclaimable)
    }

    /// Checks that `rows` rows of a prompt fit the limit of the engine's pages, beside those that other sequences hold
    /// and what is unread of their prompts. What they generate is not counted, and alone every prompt is tried.
    ///
    /// # Errors
    /// If they do not fit.
    pub(super) fn check_memory(&mut self, session: &mut Session, rows: usize) -> Result<()> {
        let Some(available) = self.engine.pages().available().filter(|_| !self.slots.is_empty()) else { return Ok(()) };
        let promised: u64 = self.slots.iter_mut().map(|slot| page_bytes(&mut slot.session, slot.run.unread())).sum();
        let needed = page_bytes(session, rows);
        if needed.saturating_add(promised) <= available {
            return Ok(());
        }
        let free = (available + self.reclaimable()).saturating_sub(promised);
        if needed <= free {
            return Ok(());
        }
        Err(Error::Memory {
            what: format!("K and V of {rows} tokens of a prompt beside other sequences"),
            needed: Some(needed),
            available: Some(free),
            fits: None,
            remedy: "remove another sequence first".into(),
        })
    }

    /// If all wait for memory: drops a cached prefix, whose pages they share and would copy before they write to them,
    /// else states that were kept for forks, else the drafts of a pass, else the pages of a sequence's drafters, else
    /// ends the newest generation: the others continue when it is removed.
    pub(super) fn free_memory(&mut self, error: Error) -> Option<Event> {
        self.retry_waiting();
        if self.drop_prefix() {
            return None;
        }
        let kept = self.slots.iter_mut().filter_map(|slot| slot.kept.take());
        if kept.count() > 0 || !std::mem::replace(&mut self.plain, true) {
            return None;
        }
        let running = |slot: &&mut Slot| slot.run.finish_reason().is_none();
        let release = |slot: &mut Slot| slot.session.decoder().drafting.drafters.release();
        if self.slots.iter_mut().rev().filter(running).any(release) {
            return None;
        }
        // One that awaits another's prompt has no pages of its own.
        let newest = self.slots.iter_mut().rev().find(|slot| running(slot) && slot.awaited.is_none())?;
        Some(newest.fail(error))
    }

    /// Drops cached prefixes, if the pass or its drafts could exceed a memory limit.
    pub(super) fn drop_prefixes(&mut self) {
        let Some(prefixes) = &mut self.prefixes else { return };
        let rows = |planned: &Option<Work>| planned.as_ref().map_or(0, Work::num_rows);
        let needs = self.slots.iter_mut().map(|slot| page_bytes(&mut slot.session, rows(&slot.planned)));
        prefixes.drop_until_available(needs.sum());
    }
}

/// An upper bound of the page bytes that the next `rows` rows take, of the target and of the drafters.
fn page_bytes(session: &mut Session, rows: usize) -> u64 {
    let SpeculativeDecoder { backend, state, drafting } = session.decoder();
    let of_drafters = if rows > 0 { drafting.drafters.page_bytes(state.len() + rows) } else { 0 };
    (backend.bytes_of_round(state, rows) + of_drafters) as u64
}
