//! `mtp` of a target with a NextN head: the head, run autoregressively.

use std::sync::Arc;

use candle_core::Tensor;

use crate::Result;
use crate::kv::{Batch, HeldPage, KvCache, KvOptions, PagePool};
use crate::model::{ChainModel, DraftKv, DraftRows, DraftStep, NextnHead};
use crate::speculative::{ChainStep, Context, Draft, DraftChain, DraftCost, Drafter, DrafterKind, Observed, Reads};

/// Hidden rows of rounds that are buffered for the next draft, which reads them in one pass; more are read at once.
pub(crate) const MAX_UNREAD: usize = 64;

/// Runs the head autoregressively from the last token. Its K and V have a row for every pair of a trunk hidden state
/// and the token after it; the rows of a chain, whose hidden states are the head's own, are rolled back. The first step
/// of a chain reads the states that were not read yet.
pub struct NextN {
    head: Arc<dyn NextnHead>,
    cache: KvCache,
    first: usize,                 // the position of the cache's first row
    rows: usize,                  // rows from the trunk's states; those after them are a chain's
    unread: Vec<Tensor>,          // (rows, hidden) each: the trunk's states after them
    last_step: Option<DraftStep>, // of the last row, if all states are read
    chain: Option<Tensor>,        // (1, hidden): the head's state after the chain, if one has begun
}

impl NextN {
    /// The drafter of an empty sequence, with a cache made from `options`.
    ///
    /// # Errors
    /// If an option is out of its range, or the context does not fit memory.
    pub fn new(head: Arc<dyn NextnHead>, options: &KvOptions, pages: &PagePool) -> Result<Self> {
        let cache = head.nextn_cache(options, pages)?;
        Ok(Self { head, cache, first: 0, rows: 0, unread: Vec::new(), last_step: None, chain: None })
    }

    fn num_unread(&self) -> usize {
        self.unread.iter().map(|states| states.dims()[0]).sum()
    }

    /// The position after the last state that was received, read or not.
    fn end(&self) -> usize {
        self.first + self.rows + self.num_unread()
    }

    /// Clears everything: the next state is that of position `first`.
    fn restart(&mut self, first: usize) -> Result<()> {
        self.unread.clear();
        self.restart_cache(first)
    }

    /// Drops the rows from position `rows` on, and what is not read if there are states from position `states` on.
    fn drop_from(&mut self, rows: usize, states: usize) -> Result<()> {
        let is_read = self.first + self.rows > rows;
        if is_read || self.end() > states {
            self.unread.clear();
        }
        if !is_read {
            return Ok(());
        }
        self.first = self.first.min(rows);
        (self.rows, self.last_step) = (rows - self.first, None);
        self.drop_chain()
    }

    /// Restarts the cache at position `first`, that of the first unread state if there is one.
    fn restart_cache(&mut self, first: usize) -> Result<()> {
        (self.first, self.rows, self.last_step, self.chain) = (first, 0, None, None);
        self.cache.rewind(0)
    }

    /// Rolls back the rows of a chain.
    fn drop_chain(&mut self) -> Result<()> {
        self.chain = None;
        // A failed pass may have written rows, which need no rewind.
        if self.cache.len() == self.rows {
            return Ok(());
        }
        match self.cache.rewind(self.rows) {
            Ok(()) => Ok(()),
            // Pages that were quantized with dropped rows.
            Err(_) => self.restart_cache(self.first + self.rows),
        }
    }

    /// States per pass, at most. Less memory may have been left for the head's context than for a round.
    fn max_rows(&self) -> usize {
        self.cache.max_round_rows().min(self.cache.max_context())
    }

    /// The first `rows` unread states, and the token after each: `tokens[p + 1]` for state `p`. If the context
    /// has no room for them, it restarts with them.
    fn next_rows(&mut self, tokens: &[u32], rows: usize) -> Result<(Vec<u32>, Tensor)> {
        if self.rows + rows > self.cache.max_context() {
            self.restart_cache(self.first + self.rows)?;
        }
        let states = Tensor::cat(&self.unread, 0)?;
        self.unread = vec![states.clone()];
        let next = self.first + self.rows + 1;
        Ok((tokens[next..next + rows].to_vec(), states.narrow(0, 0, rows)?))
    }

    /// Copies the newest unread states, a view that keeps those of a whole pass in memory.
    fn own_newest(&mut self) -> Result<()> {
        if let Some(newest) = self.unread.last_mut() {
            *newest = newest.force_contiguous()?;
        }
        Ok(())
    }

    /// Reads the first `rows` unread states in passes of their own.
    fn read(&mut self, tokens: &[u32], rows: usize) -> Result<()> {
        let most = self.max_rows();
        for begin in (0..rows).step_by(most) {
            let rows = most.min(rows - begin);
            let (ids, states) = self.next_rows(tokens, rows)?;
            let left = self.num_unread() - rows;
            let rest = if left > 0 { vec![self.unread[0].narrow(0, rows, left)?] } else { Vec::new() };
            let mut batch = Batch::of(&ids, self.cache.begin_round(rows)?)?;
            self.head.nextn_append(&mut batch, &states)?;
            batch.into_rounds().into_iter().for_each(|round| round.commit(rows));
            (self.rows, self.unread) = (self.rows + rows, rest);
        }
        Ok(())
    }

    /// The step after the last token, which reads the states that were not read yet.
    fn first_step(&mut self, context: &Context<'_>) -> Result<ChainStep<'_>> {
        // A drafter that observed nothing, as in a loaded session, begins with the state that every sequence has.
        let newest = context.tokens.len().saturating_sub(2);
        if self.end() != newest + 1 || (self.unread.is_empty() && self.last_step.is_none()) {
            self.restart(newest)?;
            self.unread.push(context.hidden.clone());
        }
        let rows = self.num_unread();
        self.drop_chain()?;
        if rows == 0 {
            self.chain = self.last_step.as_ref().map(|step| step.hidden.clone());
            return Ok(self.last_step.as_ref().map_or(ChainStep::End, |step| ChainStep::Known(step.scores.clone())));
        }
        let keep = rows.min(self.max_rows());
        self.read(context.tokens, rows - keep)?;
        let (ids, states) = self.next_rows(context.tokens, keep)?;
        let kv = DraftKv::Own { round: self.cache.begin_round(keep)?, keep };
        Ok(ChainStep::Pass(DraftRows { ids, hidden: Some(states), kv }))
    }
}

impl Drafter for NextN {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Mtp
    }

    fn cost(&self) -> DraftCost {
        DraftCost::PerToken
    }

    fn reads(&self) -> Reads {
        Reads { hidden: true, taps: Vec::new() }
    }

    fn chain(&mut self) -> Option<&mut dyn DraftChain> {
        Some(self)
    }

    /// Drafts for sequences of up to `positions` tokens, however little memory was free when the cache was made.
    fn set_max_context(&mut self, positions: usize) {
        self.cache.set_max_context(positions);
    }

    fn fork(&self) -> Option<Box<dyn Drafter>> {
        Some(Box::new(Self {
            head: self.head.clone(),
            cache: self.cache.fork(),
            first: self.first,
            rows: self.rows,
            unread: self.unread.clone(),
            last_step: self.last_step.clone(),
            chain: self.chain.clone(),
        }))
    }

    fn truncate(&mut self, len: usize) {
        // The row of the last token's state is of the token after it.
        if let Err(error) = self.drop_from(len.saturating_sub(1), len) {
            tracing::warn!(%error, "a NextN head's rows were not truncated");
        }
    }

    fn holds_pages(&self) -> bool {
        true
    }

    fn held_pages(&self) -> Vec<HeldPage> {
        self.cache.held_pages().collect()
    }

    fn page_bytes(&self, end: usize) -> usize {
        self.cache.bytes_of_round(end.saturating_sub(self.first + self.rows))
    }

    fn observe(&mut self, seen: &Observed<'_>) -> Result<()> {
        let Some(hidden) = seen.hidden else { return Ok(()) };
        self.drop_from(seen.first, seen.first)?;
        if self.end() != seen.first {
            self.restart(seen.first)?;
        }
        self.unread.push(hidden.clone());
        self.last_step = None;
        let after_prompt = seen.tokens.len() == self.end();
        if after_prompt || self.num_unread() > MAX_UNREAD {
            // After a prompt the token after the last state is unknown; otherwise the next draft reads it.
            let rows = self.num_unread().saturating_sub(1);
            self.drop_chain()?;
            self.read(seen.tokens, rows)?;
        }
        self.own_newest()
    }
}

impl DraftChain for NextN {
    fn model(&self) -> Arc<dyn ChainModel> {
        self.head.clone()
    }

    fn next<'a>(&'a mut self, context: &Context<'a>, draft: &Draft) -> Result<ChainStep<'a>> {
        let Some(token) = draft.tokens.last() else { return self.first_step(context) };
        let hidden = self.chain.clone().filter(|_| self.cache.len() < self.cache.max_context());
        if hidden.is_none() {
            return Ok(ChainStep::End);
        }
        let kv = DraftKv::Own { round: self.cache.begin_round(1)?, keep: 1 };
        Ok(ChainStep::Pass(DraftRows { ids: vec![*token], hidden, kv }))
    }

    fn advance(&mut self, step: &DraftStep) {
        if self.chain.is_none() {
            // All that was unread.
            self.rows = self.cache.len();
            self.unread.clear();
            self.last_step = Some(step.clone());
        }
        self.chain = Some(step.hidden.clone());
    }
}
