//! Drafters that a fork of a session continues with.

use super::{Drafter, DrafterOptions};
use crate::Result;

/// Copies of the drafters of the session that was forked, until the fork makes its own.
#[derive(Default)]
pub(super) struct ForkedDrafters(Vec<(DrafterOptions, Box<dyn Drafter>)>);

impl ForkedDrafters {
    /// Copies of `drafters` and `forked` with their state, where they can be copied.
    pub fn of<'a>(drafters: impl Iterator<Item = (&'a DrafterOptions, &'a dyn Drafter)>, forked: &'a Self) -> Self {
        let all = drafters.chain(forked.0.iter().map(|(options, drafter)| (options, &**drafter)));
        Self(all.filter_map(|(options, drafter)| Some((options.clone(), drafter.fork()?))).collect())
    }

    /// The copy with these options, or else a new drafter, for a sequence of at most `max_context` tokens.
    ///
    /// # Errors
    /// Those of `new`.
    pub fn take_or(
        &mut self,
        options: &DrafterOptions,
        max_context: usize,
        new: impl Fn(&DrafterOptions) -> Result<Box<dyn Drafter>>,
    ) -> Result<Box<dyn Drafter>> {
        let Some(index) = self.0.iter().position(|(of, _)| of == options) else { return new(options) };
        let forked = self.0.swap_remove(index).1;
        if forked.max_context() >= max_context {
            return Ok(forked);
        }
        // The sequence that it was forked from may have been shorter.
        let longer = new(options).ok().filter(|new| new.max_context() > forked.max_context());
        Ok(longer.unwrap_or(forked))
    }

    /// The sequence was truncated to its first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        self.0.iter_mut().for_each(|(_, drafter)| drafter.truncate(len));
    }

    /// Drops them.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}
