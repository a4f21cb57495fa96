//! Prompts that begin alike and are added together: only one sequence reads what they share. The others wait for it,
//! and continue from the prefix that is cached there.

use std::cmp::Reverse;

use super::prefix_cache::{MIN_SAVED_TOKENS, PrefixCache};
use super::slot::{Awaited, Event, Slot};
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
    let formats = session.kv_options().without_limits();
    let least = session.tokens().len() + MIN_SAVED_TOKENS;
    let readers = earlier.iter_mut().filter(|slot| slot.run.is_reading()).filter_map(|slot| {
        // At least one token is left to read.
        let len = slot.run.shared(&slot.session, prompt).min(prompt.len() - 1);
        let is_cached = !slot.run.cuts.is_empty() && slot.session.kv_options().without_limits() == formats;
        (len >= least && is_cached && slot.will_read(len)).then_some((len, slot))
    });
    let (len, reader) = readers.max_by_key(|(len, slot)| (*len, Reverse(slot.id)))?;
    reader.run.cuts.push(len);
    Some(Awaited { reader: reader.id, len, prompt: prompt.to_vec(), options: options.clone() })
}

/// Lets sequences begin whose reader is cached, or will not be: it ended, or waits for memory. One that cannot continue
/// from a cached prefix ends.
pub(super) fn begin_awaiting(slots: &mut [Slot], prefixes: &mut PrefixCache, events: &mut Vec<Event>) {
    for at in 0..slots.len() {
        let (earlier, slots) = slots.split_at_mut(at);
        let slot = &mut slots[0];
        let is_over = |awaited: &mut Awaited| {
            !earlier.iter().any(|slot| slot.id == awaited.reader && slot.will_read(awaited.len))
        };
        let Some(Awaited { prompt, options, .. }) = slot.awaited.take_if(is_over) else { continue };
        if slot.run.finish_reason().is_some() {
            continue;
        }
        let found = prefixes.find(&slot.session, &prompt);
        if let Some(found) = found.filter(|found| found.tokens().len() > slot.session.tokens().len()) {
            if let Err(error) = slot.run.continue_from(&mut slot.session, found, &options) {
                events.push(slot.fail(error));
                continue;
            }
            slot.run.cuts = prefixes.cuts(&prompt, slot.session.tokens().len());
            slot.keep_before_last();
        }
        slot.awaited = await_reader(earlier, &slot.session, &prompt, &options);
    }
}
