//! `draft-model`: a smaller model with its own KV cache.

use std::sync::Arc;

use crate::kv::{HeldPage, KvOptions, PagePool, SequenceState};
use crate::model::{ChainModel, DraftKv, DraftRows, DraftStep, Model, OutputRows, Request};
use crate::nn::Scores;
use crate::speculative::{ChainStep, Context, Draft, DraftChain, DraftCost, Drafter, DrafterKind, Observed};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Runs the model over emitted tokens, whose rows it keeps, and over its own draft, whose rows it drops.
///
/// The draft is recomputed for every token added to it, staged and dropped: rows of a batch cost little compared to
/// reading the weights, which happens once either way. Committing the draft's rows would need [`SequenceState::rewind`]
/// after every rejected draft: a recurrent state cannot be rewound, and a sliding window only by the rows of one round.
pub struct DraftModel {
    model: Arc<ChainedModel>,
    state: SequenceState,
    kv: KvOptions,
    pages: PagePool,
    read: Vec<u32>,              // tokens whose rows are in the cache
    reading: Vec<u32>,           // those of a step that may be run
    last_scores: Option<Scores>, // after the last token, if all are read
}

/// An autoregressive draft model. Drafters of the same one share its passes.
pub struct ChainedModel(
    /// The model.
    pub Arc<dyn Model>,
);

impl ChainModel for ChainedModel {
    fn step(&self, sequences: &mut [DraftRows<'_>]) -> Result<Vec<DraftStep>> {
        let mut batch = DraftRows::batch(sequences)?;
        let request = Request::of(&batch, OutputRows::Last);
        let output = self.0.forward(&mut batch, &request)?;
        DraftStep::of_rows(&output.logits, &output.hidden)
    }
}

impl DraftModel {
    /// A drafter with an empty cache, whose pages come from `pages`. Its context is the model's own
    /// unless `kv` sets a lower limit.
    ///
    /// # Errors
    /// If an option of the cache is out of its range.
    pub fn new(model: Arc<ChainedModel>, kv: &KvOptions, pages: &PagePool) -> Result<Self> {
        let max_context = kv.max_context.map(|most| most.min(model.0.max_position_embeddings()));
        let kv = KvOptions { max_context, ..kv.clone() };
        let state = model.0.new_state(&kv, pages)?;
        let (read, reading) = (Vec::new(), Vec::new());
        Ok(Self { model, state, kv, pages: pages.clone(), read, reading, last_scores: None })
    }

    /// Reads `tokens`, which begin with those already read, in passes without output, until at most `left` are left.
    fn catch_up(&mut self, tokens: &[u32], left: usize) -> Result<()> {
        while tokens.len() - self.read.len() > left {
            let rows = self.state.kv().max_round_rows().min(tokens.len() - self.read.len());
            let chunk = &tokens[self.read.len()..][..rows];
            self.last_scores = None;
            self.model.0.forward_one(chunk, self.state.begin_whole_round(rows)?, OutputRows::None, rows)?;
            self.read.extend(chunk);
        }
        Ok(())
    }

    /// Whether the cache has the rows of the tokens read: otherwise there was no memory for a new state.
    fn is_intact(&self) -> bool {
        self.state.len() == self.read.len()
    }
}

impl Drafter for DraftModel {
    fn kind(&self) -> DrafterKind {
        DrafterKind::DraftModel
    }

    fn cost(&self) -> DraftCost {
        DraftCost::PerToken
    }

    fn read_prompt(&mut self, tokens: &[u32]) -> Result<()> {
        self.begin(tokens);
        // Past the end of its context it drafts nothing.
        match self.is_intact() && tokens.len() <= self.state.kv().max_context() {
            true => self.catch_up(tokens, 0),
            false => Ok(()),
        }
    }

    fn begin(&mut self, tokens: &[u32]) {
        if tokens.starts_with(&self.read) && self.is_intact() {
            return;
        }
        // The last token is left to read: its scores are needed.
        let common =
            self.read.iter().zip(tokens).take_while(|(a, b)| a == b).count().min(tokens.len().saturating_sub(1));
        self.last_scores = None;
        if self.state.rewind(common).is_ok() {
            self.read.truncate(common);
            return;
        }
        self.read.clear();
        if self.state.rewind(0).is_err() {
            // A recurrent state cannot be rewound. The options were valid when the drafter was made.
            let context = self.max_context();
            match self.model.0.new_state(&self.kv, &self.pages) {
                Ok(state) => {
                    self.state = state;
                    self.set_max_context(context);
                }
                Err(error) => tracing::warn!(%error, "no memory for a new state of the draft model; it drafts nothing"),
            }
        }
    }

    /// If rows that it needs are gone, they are read again once the text is known.
    fn truncate(&mut self, len: usize) {
        if len < self.read.len() && self.state.rewind(len).is_ok() {
            self.state.kv_mut().trim();
            self.read.truncate(len);
            self.last_scores = None;
        }
    }

    fn chain(&mut self) -> Option<&mut dyn DraftChain> {
        Some(self)
    }

    fn max_context(&self) -> usize {
        self.state.kv().max_context()
    }

    /// As long as the model's own context allows, drafts for sequences of up to `positions` tokens, however little
    /// memory was free when the cache was made.
    fn set_max_context(&mut self, positions: usize) {
        self.state.kv_mut().set_max_context(positions.min(self.model.0.max_position_embeddings()));
    }

    /// `None` with a recurrent state, of which every fork would hold a copy.
    fn fork(&self) -> Option<Box<dyn Drafter>> {
        let forks = self.state.recurrent_bytes() == 0;
        forks.then(|| -> Box<dyn Drafter> {
            Box::new(Self {
                model: self.model.clone(),
                state: self.state.fork(),
                kv: self.kv.clone(),
                pages: self.pages.clone(),
                read: self.read.clone(),
                reading: Vec::new(),
                last_scores: self.last_scores.clone(),
            })
        })
    }

    fn holds_pages(&self) -> bool {
        true
    }

    fn held_pages(&self) -> Vec<HeldPage> {
        self.state.kv().held_pages().collect()
    }

    fn page_bytes(&self, end: usize) -> usize {
        self.state.kv().bytes_of_round(end.saturating_sub(self.read.len()))
    }

    fn observe(&mut self, _: &Observed<'_>) -> Result<()> {
        // There is a token to read now.
        self.last_scores = None;
        Ok(())
    }
}

impl DraftChain for DraftModel {
    fn model(&self) -> Arc<dyn ChainModel> {
        self.model.clone()
    }

    fn next<'a>(&'a mut self, context: &Context<'a>, draft: &Draft) -> Result<ChainStep<'a>> {
        // A model with a shorter context than the target's stops drafting at its end.
        let left = self.state.kv().max_context().saturating_sub(context.tokens.len());
        if !self.is_intact() || draft.tokens.len() >= left.min(self.state.kv().max_round_rows()) {
            return Ok(ChainStep::End);
        }
        self.reading.clear();
        if !draft.tokens.is_empty() {
            let ids = draft.tokens.clone();
            let kv = DraftKv::Own { round: self.state.begin_round(ids.len())?, keep: 0 };
            return Ok(ChainStep::Pass(DraftRows { ids, hidden: None, kv }));
        }
        self.catch_up(context.tokens, self.state.kv().max_round_rows())?;
        self.reading = context.tokens[self.read.len()..].to_vec();
        if self.reading.is_empty() {
            return Ok(self.last_scores.clone().map_or(ChainStep::End, ChainStep::Known));
        }
        let (ids, keep) = (self.reading.clone(), self.reading.len());
        let kv = DraftKv::Own { round: self.state.begin_whole_round(keep)?, keep };
        Ok(ChainStep::Pass(DraftRows { ids, hidden: None, kv }))
    }

    fn advance(&mut self, step: &DraftStep) {
        if !self.reading.is_empty() {
            self.read.append(&mut self.reading);
            self.last_scores = Some(step.scores.clone());
        }
    }
}

/// Checks that the draft model's tokens are the target's.
///
/// # Errors
/// With the first token that differs.
pub(crate) fn check_vocabulary(
    target: (&dyn Model, Option<&Tokenizer>),
    draft: (&dyn Model, Option<&Tokenizer>),
) -> Result<()> {
    let refuse = |problem: String| Err(Error::DraftModelMismatch { problem });
    let (of_target, of_draft) = (target.0.vocab_size(), draft.0.vocab_size());
    if of_target != of_draft {
        return refuse(format!("its vocab_size is {of_draft}, the target's is {of_target}"));
    }
    let (of_target, of_draft) = match (target.1, draft.1) {
        (Some(target), Some(draft)) => (target, draft),
        (None, None) => {
            tracing::warn!(
                "neither the target nor the draft model has a tokenizer: their tokens are assumed to be the same"
            );
            return Ok(());
        }
        (Some(_), None) => return refuse("it has no tokenizer to compare with the target's".into()),
        (None, Some(_)) => return refuse("the target has no tokenizer to compare with its own".into()),
    };
    for id in 0..draft.0.vocab_size() as u32 {
        let (target, draft) = (of_target.token(id), of_draft.token(id));
        if target != draft {
            let name = |token: Option<String>| token.map_or("missing".into(), |token| format!("{token:?}"));
            return refuse(format!("token {id} is {}, the target's is {}", name(draft), name(target)));
        }
    }
    Ok(())
}
