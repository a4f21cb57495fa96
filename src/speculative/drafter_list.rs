//! The drafters of a sequence, from one generation to the next.

use super::drafters::OutOfMemory;
use super::{AcceptResult, DraftCost, Drafter, DrafterKind, DrafterOptions, NgramCache, Reads, States};
use crate::kv::HeldPage;
use crate::{Error, Result};

/// A sequence's drafters, which keep their state as long as generations list the same ones.
#[derive(Default)]
pub(crate) struct DrafterList {
    pub(super) all: Vec<Box<dyn Drafter>>,
    /// Their options; `None` if one failed or memory for one was missing: the next generation creates all again.
    options: Option<Vec<DrafterOptions>>,
    /// Copies of the drafters of the sequence that was forked, until the fork's first generation.
    forked: Vec<(DrafterOptions, Box<dyn Drafter>)>,
    failed: Option<Error>, // of one, after a round that succeeded
}

impl DrafterList {
    /// Creates the drafters of `list`, for a sequence of at most `max_context` tokens, unless they are those of the
    /// last generation. A model whose K and V do not fit memory drafts nothing in this generation.
    ///
    /// # Errors
    /// Those of `new`.
    pub fn set(
        &mut self,
        list: Vec<DrafterOptions>,
        max_context: usize,
        new: impl Fn(&DrafterOptions) -> Result<Box<dyn Drafter>>,
    ) -> Result<()> {
        if self.options.as_ref() == Some(&list) {
            return Ok(());
        }
        let mut made = Vec::with_capacity(list.len());
        for options in &list {
            let is_forked = self.forked.iter().any(|(of, _)| of == options);
            // Taken once the others are made: a generation that is refused leaves them.
            made.push(if is_forked { None } else { Some(unless_out_of_memory(options, new(options))?) });
        }
        let (mut drafters, mut complete) = (Vec::with_capacity(list.len()), true);
        for (options, made) in list.iter().zip(made) {
            let forked = || unless_out_of_memory(options, self.forked_or(options, max_context, &new));
            let (drafter, fits) = made.map_or_else(forked, Ok)?;
            drafters.push(drafter);
            complete &= fits;
        }
        (self.options, self.all) = (complete.then_some(list), drafters);
        Ok(())
    }

    /// The forked drafter with these options, or else a new one, for a sequence of at most `max_context` tokens.
    ///
    /// # Errors
    /// Those of `new`.
    fn forked_or(
        &mut self,
        options: &DrafterOptions,
        max_context: usize,
        new: impl Fn(&DrafterOptions) -> Result<Box<dyn Drafter>>,
    ) -> Result<Box<dyn Drafter>> {
        let Some(index) = self.forked.iter().position(|(of, _)| of == options) else { return new(options) };
        let mut forked = self.forked.swap_remove(index).1;
        // The sequence that it was forked from may have been shorter.
        forked.set_max_context(max_context);
        if forked.max_context() >= max_context {
            return Ok(forked);
        }
        let longer = new(options).ok().filter(|new| new.max_context() > forked.max_context());
        Ok(longer.unwrap_or(forked))
    }

    /// The list of a fork: copies of the drafters that can be copied, with their state; also of the forked ones, if no
    /// generation has begun since.
    pub fn fork(&self) -> Self {
        let own = self.options.iter().flatten().zip(&self.all);
        let all = own.chain(self.forked.iter().map(|forked| (&forked.0, &forked.1)));
        let forked = all.filter_map(|(options, drafter)| Some((options.clone(), drafter.fork()?))).collect();
        Self { forked, ..Self::default() }
    }

    /// A generation begins, which forked drafters do not observe. Returns the drafters' costs.
    pub fn configure(&mut self) -> Vec<DraftCost> {
        self.forked.clear();
        self.failed = None;
        self.all.iter().map(|drafter| drafter.cost()).collect()
    }

    pub fn kinds(&self) -> Vec<DrafterKind> {
        self.all.iter().map(|drafter| drafter.kind()).collect()
    }

    pub fn is_model(&self, drafter: usize) -> bool {
        self.all[drafter].cost() == DraftCost::PerToken
    }

    pub fn offers_forced(&self) -> bool {
        self.all.iter().any(|drafter| drafter.cost() == DraftCost::Forced)
    }

    /// An upper bound of the page bytes that they take to read the sequence up to position `end`.
    pub fn page_bytes(&self, end: usize) -> usize {
        self.all.iter().map(|drafter| drafter.page_bytes(end)).sum()
    }

    /// The pages of all, and of forked ones, including those shared with others.
    pub fn held_pages(&self) -> impl Iterator<Item = HeldPage> {
        let forked = self.forked.iter().map(|(_, drafter)| drafter);
        self.all.iter().chain(forked).flat_map(|drafter| drafter.held_pages())
    }

    pub fn learnt(&self) -> Option<NgramCache> {
        self.all.iter().find_map(|drafter| drafter.learnt())
    }

    /// The union of what they read of the target's passes.
    pub fn reads(&self) -> Reads {
        self.all.iter().map(|drafter| drafter.reads()).fold(Reads::default(), Reads::and)
    }

    /// Starts a generation after `tokens`.
    pub fn begin(&mut self, tokens: &[u32]) {
        self.notify(|_, drafter| {
            drafter.begin(tokens);
            Ok(())
        });
    }

    /// Notifies all drafters that the sequence was truncated to its first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        let forked = self.forked.iter_mut().map(|(_, drafter)| drafter);
        self.all.iter_mut().chain(forked).for_each(|drafter| drafter.truncate(len));
    }

    /// Lets all observe a round's committed rows, of positions from `first` on, and the one that made the draft also
    /// the `accepted` result.
    pub fn observe(&mut self, tokens: &[u32], first: usize, states: &States, accepted: Option<(usize, AcceptResult)>) {
        self.notify(|i, drafter| {
            let own = accepted.filter(|(of, _)| *of == i).map(|(_, result)| result);
            drafter.observe(&states.observed(tokens, first, own))
        });
    }

    /// As [`DrafterList::for_each`]; [`DrafterList::check`] reports its error.
    fn notify(&mut self, call: impl FnMut(usize, &mut dyn Drafter) -> Result<()>) {
        if let Err(error) = self.for_each(call) {
            self.failed.get_or_insert(error);
            self.options = None;
        }
    }

    /// Calls `call` with every drafter. If memory is exhausted for one, models draft nothing from then on.
    ///
    /// # Errors
    /// The first other error or panic.
    pub fn for_each(&mut self, mut call: impl FnMut(usize, &mut dyn Drafter) -> Result<()>) -> Result<()> {
        let (mut failed, mut is_out_of_memory) = (None, false);
        for (i, drafter) in self.all.iter_mut().enumerate() {
            match Error::catch(|| call(i, &mut **drafter)) {
                Err(Error::Memory { .. }) => is_out_of_memory = true,
                called => failed = failed.or(called.err()),
            }
        }
        if is_out_of_memory {
            self.release();
        }
        failed.map_or(Ok(()), Err)
    }

    /// # Errors
    /// A drafter's error or panic since the last round.
    pub fn check(&mut self) -> Result<()> {
        self.failed.take().map_or(Ok(()), Err)
    }

    /// Frees the pages of models that draft, which then draft nothing until the next generation: drafts change the
    /// speed, never whether a text fits memory. Returns whether there were any.
    pub fn release(&mut self) -> bool {
        let mut released = false;
        for drafter in self.all.iter_mut().filter(|drafter| drafter.holds_pages()) {
            *drafter = Box::new(OutOfMemory { kind: drafter.kind(), reads: drafter.reads() });
            released = true;
        }
        if released {
            tracing::warn!("memory is exhausted: models no longer draft");
            self.options = None;
        }
        released
    }
}

/// The drafter, and whether its K and V fit memory; else one that drafts nothing.
///
/// # Errors
/// Those of `made`, except of memory.
fn unless_out_of_memory(options: &DrafterOptions, made: Result<Box<dyn Drafter>>) -> Result<(Box<dyn Drafter>, bool)> {
    match made {
        Err(error @ Error::Memory { .. }) => {
            tracing::warn!(%error, drafter = %options.kind(), "drafts nothing");
            Ok((Box::new(OutOfMemory { kind: options.kind(), reads: Reads::default() }), false))
        }
        made => Ok((made?, true)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_generation_leaves_forked_drafters() {
        let forked: Box<dyn Drafter> = Box::new(OutOfMemory { kind: DrafterKind::Mtp, reads: Reads::default() });
        let mut list = DrafterList { forked: vec![(DrafterOptions::Mtp, forked)], ..DrafterList::default() };
        let new = |options: &DrafterOptions| -> Result<Box<dyn Drafter>> {
            Err(Error::argument("drafters", format!("{} is not loaded", options.kind())))
        };
        let refused = list.set(vec![DrafterOptions::Mtp, DrafterOptions::DraftModel], 1, new);
        assert!(matches!(refused, Err(Error::Argument { name: "drafters", .. })));
        list.set(vec![DrafterOptions::Mtp], 1, new).expect("the forked drafter");
        assert_eq!(list.kinds(), [DrafterKind::Mtp]);
    }
}
