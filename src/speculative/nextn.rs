//! `mtp` of a target with a NextN head: the head chained with itself.

use std::sync::Arc;

use candle_core::Tensor;
use rand::rngs::StdRng;

use super::{Context, Draft, DraftCost, Drafter, DrafterKind, Observed, Reads};
use crate::Result;
use crate::kv::{Batch, KvCache, KvOptions, PagePool};
use crate::model::NextnHead;
use crate::nn::F32View;

/// Hidden rows of rounds that are kept for the next draft, which reads them in one pass; more are read at once.
const MOST_UNREAD: usize = 64;

/// Chains the head from the newest token. Its K and V have a row for every pair of a hidden state of the trunk and the
/// token behind it; those of a chain, whose hidden states are the head's own, are taken back.
pub(super) struct NextN {
    head: Arc<dyn NextnHead>,
    cache: KvCache,
    first: usize,           // the position of the cache's first row
    rows: usize,            // rows from the trunk's states; those behind them are a chain's
    unread: Vec<Tensor>,    // (rows, hidden) each: the trunk's states behind them
    behind: Option<Tensor>, // (1, hidden): the head's state behind the rows
    chain: Option<Tensor>,  // (1, hidden): the same behind the chain
}

impl NextN {
    /// The drafter of an empty sequence, whose cache is made as `options` say.
    ///
    /// # Errors
    /// If an option is out of its range, or the context does not fit memory.
    pub fn new(head: Arc<dyn NextnHead>, options: &KvOptions, pages: &PagePool) -> Result<Self> {
        let cache = head.nextn_cache(options, pages)?;
        Ok(Self { head, cache, first: 0, rows: 0, unread: Vec::new(), behind: None, chain: None })
    }

    /// The position of the first state that is neither read nor unread.
    fn end(&self) -> usize {
        self.first + self.rows + self.unread.iter().map(|states| states.dims()[0]).sum::<usize>()
    }

    /// Forgets everything: the next state is that of position `first`.
    fn restart(&mut self, first: usize) -> Result<()> {
        self.unread.clear();
        self.forget_rows(first)
    }

    /// Begins anew with the state of position `first`, that of the first unread one if there is one.
    fn forget_rows(&mut self, first: usize) -> Result<()> {
        (self.first, self.rows, self.behind, self.chain) = (first, 0, None, None);
        self.cache.rewind(0)
    }

    /// Takes the rows of a chain back.
    fn drop_chain(&mut self) -> Result<()> {
        self.chain = None;
        match self.cache.rewind(self.rows) {
            Ok(()) => Ok(()),
            // Pages that were quantized with rows of the chain.
            Err(_) => self.forget_rows(self.first + self.rows),
        }
    }

    /// Reads the unread states whose next token is known: state `p` beside `tokens[p + 1]`.
    fn read(&mut self, tokens: &[u32]) -> Result<()> {
        self.drop_chain()?;
        let next = self.first + self.rows;
        let known = (self.end() - next).min(tokens.len().saturating_sub(next + 1));
        if known == 0 {
            return Ok(());
        }
        if self.rows + known > self.cache.max_context() {
            self.forget_rows(next)?;
        }
        let states = Tensor::cat(&std::mem::take(&mut self.unread), 0)?;
        let most = self.cache.max_round_rows();
        let mut read = 0;
        while read < known {
            let rows = (known - read).min(most);
            let ids = &tokens[self.first + self.rows + 1..][..rows];
            self.behind = Some(self.pass(ids, &states.narrow(0, read, rows)?)?);
            (self.rows, read) = (self.rows + rows, read + rows);
        }
        if known < states.dims()[0] {
            self.unread.push(states.narrow(0, known, states.dims()[0] - known)?);
        }
        Ok(())
    }

    /// One pass of the head; the state behind the newest row.
    fn pass(&mut self, ids: &[u32], states: &Tensor) -> Result<Tensor> {
        let mut batch = Batch::of(ids, self.cache.begin_round(ids.len())?)?;
        let hidden = self.head.nextn_rows(&mut batch, states)?;
        batch.into_rounds().into_iter().for_each(|round| round.commit(ids.len()));
        Ok(hidden.narrow(0, ids.len() - 1, 1)?)
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

    fn begin(&mut self, _: &[u32]) {}

    fn draft(&mut self, context: &Context<'_>, most: usize, draft: &mut Draft, rng: &mut StdRng) -> Result<()> {
        if draft.tokens.is_empty() {
            // A drafter that saw nothing, as in a fork, begins with the state that every sequence has.
            let newest = context.tokens.len().saturating_sub(2);
            if self.end() != newest + 1 || (self.unread.is_empty() && self.behind.is_none()) {
                self.restart(newest)?;
                self.unread.push(context.hidden.clone());
            }
            self.read(context.tokens)?;
            self.chain = self.behind.clone();
        }
        while draft.tokens.len() < most {
            if let Some(token) = draft.tokens.last() {
                if self.cache.len() == self.cache.max_context() {
                    break;
                }
                let Some(hidden) = self.chain.take() else { break };
                self.chain = Some(self.pass(&[*token], &hidden)?);
            }
            let Some(hidden) = &self.chain else { break };
            let logits = self.head.nextn_logits(hidden)?;
            draft.push(context, None, &F32View::new(&logits)?, rng)?;
        }
        Ok(())
    }

    fn fork(&self) -> Option<Box<dyn Drafter>> {
        Some(Box::new(Self {
            head: self.head.clone(),
            cache: self.cache.fork(),
            first: self.first,
            rows: self.rows,
            unread: self.unread.clone(),
            behind: self.behind.clone(),
            chain: self.chain.clone(),
        }))
    }

    fn observe(&mut self, seen: &Observed<'_>) -> Result<()> {
        let Some(hidden) = seen.hidden else { return Ok(()) };
        if self.end() != seen.first {
            self.restart(seen.first)?;
        }
        self.unread.push(hidden.clone());
        let behind_prompt = seen.tokens.len() == self.end();
        if behind_prompt || self.end() - self.first - self.rows > MOST_UNREAD { self.read(seen.tokens) } else { Ok(()) }
    }
}
