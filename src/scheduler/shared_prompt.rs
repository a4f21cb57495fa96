//! Prompts that begin alike and are added together: only one sequence reads what they share. The others wait for it,
//! and continue from the prefix that is cached there.

use std::cmp::Reverse;
use std::collections::HashMap;

use super::prefix_cache::{MIN_SAVED_TOKENS, PrefixCache, shared};
use super::slot::{Awaited, SequenceId, Slot};
use crate::Error;
use crate::options::GenerateOptions;
use crate::session::Session;

/// What a sequence waits for that would read `prompt` from the end of `session` on: of the `earlier` sequences, the one
/// whose prompt shares the most tokens that it has not read yet. That one is cached after them.
pub(super) fn await_reader(
    earlier: &mut [Slot],
    session: &Session,
    prompt: &[u32],
    options: &GenerateOptions,
) -> Option<Awaited> {
    let least = session.tokens().len() + MIN_SAVED_TOKENS;
    let readers = earlier.iter_mut().filter(|slot| is_cached_for(slot, session)).filter_map(|slot| {
        // At least one token is left to read.
        let len = shared_tokens(slot, prompt).min(prompt.len() - 1);
        (len >= least && slot.will_read(len)).then_some((len, slot))
    });
    let (len, reader) = readers.max_by_key(|(len, slot)| (*len, Reverse(slot.id)))?;
    let (read, cuts) = (reader.run.read(), &mut reader.run.cuts);
    let near = cuts.iter().filter(|cut| **cut > read && (len.saturating_sub(MIN_SAVED_TOKENS) + 1..=len).contains(cut));
    let len = near.max().copied().unwrap_or_else(|| {
        cuts.push(len);
        len
    });
    Some(Awaited { reader: reader.id, len, options: options.clone() })
}

/// Whether the sequence is reading a prompt, in passes of any length, whose cached prefixes `session` can continue from.
fn is_cached_for(slot: &Slot, session: &Session) -> bool {
    slot.run.is_reading()
        && !slot.run.scores_prompt()
        && !slot.run.cuts.is_empty()
        && slot.session.max_fork_context() >= session.kv().max_context()
        && slot.session.kv_options().without_limits() == session.kv_options().without_limits()
}

/// How many tokens of `prompt` a sequence begins with that is reading its own.
fn shared_tokens(slot: &Slot, prompt: &[u32]) -> usize {
    let read = &slot.session.tokens()[..slot.run.read()];
    match shared(read, prompt) {
        all if all == read.len() => all + shared(slot.run.unread_tokens(), &prompt[all..]),
        part => part,
    }
}

/// Lets sequences begin whose reader is cached, or will not be: it ended, or waits for memory.
pub(super) fn begin_awaiting(slots: &mut [Slot], prefixes: &mut PrefixCache) {
    for at in 0..slots.len() {
        let (earlier, slots) = slots.split_at_mut(at);
        let slot = &mut slots[0];
        let is_over = |awaited: &mut Awaited| {
            !earlier.iter().any(|slot| slot.id == awaited.reader && slot.will_read(awaited.len))
        };
        let Some(Awaited { options, .. }) = slot.awaited.take_if(is_over) else { continue };
        if slot.run.finish_reason().is_some() {
            continue;
        }
        let prompt = [slot.session.tokens(), slot.run.unread_tokens()].concat();
        let found = prefixes.find(&slot.session, &prompt);
        if let Some(found) = found.filter(|found| found.tokens().len() > slot.session.tokens().len()) {
            let Slot { session, run, .. } = slot;
            match Error::catch(|| run.continue_from(session, found, &options)) {
                Ok(()) => slot.keep_before_last(),
                Err(error) => tracing::warn!(%error, "a cached prefix cannot be used"),
            }
        }
        slot.awaited = await_reader(earlier, &slot.session, &prompt, &options);
    }
}

/// Rows that are to be read until each sequence's prompt, or one that awaits it, is read.
pub(super) fn least_unread(slots: &[Slot]) -> HashMap<SequenceId, usize> {
    let mut ends: HashMap<_, _> = slots.iter().map(|slot| (slot.id, slot.run.prompt_end)).collect();
    // Readers precede the sequences that await them. Ends are compared, not unread rows: an awaiting sequence has none
    // of the rows that its reader has read since.
    for slot in slots.iter().rev().filter(|slot| slot.run.finish_reason().is_none()) {
        if let Some(Awaited { reader, .. }) = slot.awaited
            && let Some(of_reader) = ends.get(&reader)
        {
            ends.insert(reader, ends[&slot.id].min(*of_reader));
        }
    }
    slots.iter().map(|slot| (slot.id, ends[&slot.id].saturating_sub(slot.run.read()))).collect()
}
