//! `draft-model`: a smaller model with a cache of its own.

use std::sync::Arc;

use candle_core::Tensor;
use rand::rngs::StdRng;

use super::{Context, Draft, DraftCost, Drafter, DrafterKind, Observed};
use crate::kv::{KvOptions, PagePool, SequenceState};
use crate::model::{Model, OutputRows};
use crate::nn::F32View;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Runs the model over what was emitted, which it keeps, and over its own draft, which it does not.
///
/// A draft is run through again for every token that is added to it, staged and dropped: rows of a batch cost little
/// beside the weights, which are read once either way. The other way, keeping draft rows and taking them back, would need a
/// cache that can go back behind a commit.
pub struct DraftModel {
    model: Arc<dyn Model>,
    state: SequenceState,
    kv: KvOptions,
    pages: PagePool,
    read: Vec<u32>,         // the tokens whose rows the cache has
    behind: Option<Tensor>, // (1, vocab): the logits behind the newest of them
}

impl DraftModel {
    /// A drafter whose cache is empty; its pages come from `pages`. Its context is the model's own, as far as `kv` sets no
    /// lower limit.
    ///
    /// # Errors
    /// If an option of the cache is out of its range.
    pub fn new(model: Arc<dyn Model>, kv: &KvOptions, pages: &PagePool) -> Result<Self> {
        let state = model.new_state(kv, pages)?;
        Ok(Self { model, state, kv: kv.clone(), pages: pages.clone(), read: Vec::new(), behind: None })
    }

    /// One pass over `ids`, of which `keep` rows stay; the logits behind the last one if they are wanted.
    fn pass(&mut self, ids: &[u32], keep: usize, wanted: OutputRows) -> Result<Option<Tensor>> {
        let output = self.model.forward_one(ids, self.state.begin_round(ids.len())?, wanted, keep)?;
        self.read.extend(&ids[..keep]);
        Ok((wanted != OutputRows::None).then_some(output.logits))
    }

    /// Reads the tokens that the cache lacks.
    fn catch_up(&mut self, tokens: &[u32]) -> Result<()> {
        let known = self.read.len();
        let mut chunks = tokens[known..].chunks(self.state.kv().max_round_rows()).peekable();
        while let Some(chunk) = chunks.next() {
            let wanted = if chunks.peek().is_none() { OutputRows::Last } else { OutputRows::None };
            self.behind = self.pass(chunk, chunk.len(), wanted)?;
        }
        Ok(())
    }
}

impl Drafter for DraftModel {
    fn kind(&self) -> DrafterKind {
        DrafterKind::DraftModel
    }

    fn cost(&self) -> DraftCost {
        DraftCost::PerToken
    }

    fn begin(&mut self, tokens: &[u32]) {
        if !tokens.starts_with(&self.read) {
            // The options were good when the drafter was made.
            if let Ok(state) = self.model.new_state(&self.kv, &self.pages) {
                (self.state, self.read, self.behind) = (state, Vec::new(), None);
            }
        }
    }

    fn draft(&mut self, context: &Context<'_>, most: usize, draft: &mut Draft, rng: &mut StdRng) -> Result<()> {
        // A model with a shorter context than the target's has nothing to say beyond it.
        let room = self.state.kv().max_context().saturating_sub(context.tokens.len());
        let most = most.min(room).min(self.state.kv().max_round_rows());
        while draft.tokens.len() < most {
            let logits = if draft.tokens.is_empty() {
                self.catch_up(context.tokens)?;
                self.behind.clone()
            } else {
                self.pass(&draft.tokens, 0, OutputRows::Last)?
            };
            let Some(logits) = logits else { break };
            draft.push(context, None, &F32View::new(&logits)?, rng)?;
        }
        Ok(())
    }

    fn observe(&mut self, _: &Observed<'_>) -> Result<()> {
        Ok(())
    }
}

/// Whether every token of the draft model means what it means to the target.
///
/// # Errors
/// With the first token that differs.
pub(crate) fn check_vocabulary(
    target: (&dyn Model, Option<&Tokenizer>),
    draft: (&dyn Model, Option<&Tokenizer>),
) -> Result<()> {
    let refuse = |problem: String| Err(Error::DraftModel { problem });
    let (of_target, of_draft) = (target.0.vocab_size(), draft.0.vocab_size());
    if of_target != of_draft {
        return refuse(format!("its vocab_size is {of_draft}, the target's is {of_target}"));
    }
    let (of_target, of_draft) = match (target.1, draft.1) {
        (Some(target), Some(draft)) => (target, draft),
        (None, None) => {
            tracing::warn!(
                "neither the target nor the draft model has a tokenizer: their tokens are taken to be the same"
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
            return refuse(format!("token {id} is {} to it, {} to the target", name(draft), name(target)));
        }
    }
    Ok(())
}
