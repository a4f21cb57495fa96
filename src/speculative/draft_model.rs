//! `draft-model`: a smaller Gemma 4 with a cache of its own.

use std::sync::Arc;

use candle_core::Tensor;
use rand::rngs::StdRng;

use super::{Confidence, Context, Draft, DraftCost, DraftSampling, Drafter, DrafterKind, Observed};
use crate::gemma4::Target;
use crate::gemma4::on_device::{Judge, Models, Sequence};
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

/// [`DraftModel`] on the target's device.
///
/// Its sequence is told where a pass begins, so that it can go back: rows of a draft stay, and accepted ones need
/// not be made again. The host learns every token as it is drafted, because the target's sequence is another one.
pub(super) struct DeviceDraftModel {
    sequence: Sequence,
    max_context: usize,
    max_round_rows: usize,
    read: Vec<u32>, // the tokens whose rows the device has
    sure: usize,    // as many of them are known to be the text's
}

/// Tokens that are read one by one, in passes that were recorded: what a round of full acceptance adds.
const FEW: usize = 2;

impl DeviceDraftModel {
    /// A drafter whose cache is empty; see [`DraftModel::new`]. `models` has `model` on the device.
    ///
    /// # Errors
    /// If an option of the cache is out of its range, or memory does not reach.
    pub(super) fn new(models: &Arc<Models>, model: &Target, kv: &KvOptions) -> Result<Self> {
        let default = model.config().max_position_embeddings;
        let (sequence, max_context) = models.sequence(&model.kv_layout(), kv, default)?;
        let max_round_rows = kv.max_round_rows.min(max_context);
        Ok(Self { sequence, max_context, max_round_rows, read: Vec::new(), sure: 0 })
    }

    /// Forgets the rows that are not `text`'s, and that of its newest token: the scores behind that one are wanted.
    fn go_back(&mut self, text: &[u32]) {
        let (read, text_behind) = (&self.read[self.sure..], &text[self.sure..]);
        let same = self.sure + read.iter().zip(text_behind).take_while(|(a, b)| a == b).count();
        self.sure = same.min(text.len().saturating_sub(1));
        // A ring has what a round that is dropped leaves, and nothing older.
        if self.read.len() - self.sure > self.max_round_rows {
            self.sure = 0;
        }
        self.read.truncate(self.sure);
    }

    /// Reads `tokens` behind those that were read. The scores behind the newest stay on the device.
    fn pass(&mut self, tokens: &[u32]) -> Result<()> {
        let rows = if tokens.len() <= FEW { 1 } else { self.max_round_rows };
        let mut chunks = tokens.chunks(rows).peekable();
        while let Some(chunk) = chunks.next() {
            let wanted = match chunks.peek() {
                _ if rows == 1 => OutputRows::All,
                Some(_) => OutputRows::None,
                None => OutputRows::Last,
            };
            self.sequence.forward(chunk, self.read.len(), wanted)?;
            self.read.extend(chunk);
        }
        Ok(())
    }
}

impl Drafter for DeviceDraftModel {
    fn kind(&self) -> DrafterKind {
        DrafterKind::DraftModel
    }

    fn cost(&self) -> DraftCost {
        DraftCost::PerToken
    }

    fn begin(&mut self, _: &[u32]) {
        self.sure = 0;
    }

    fn draft(&mut self, context: &Context<'_>, most: usize, draft: &mut Draft, rng: &mut StdRng) -> Result<()> {
        let room = self.max_context.saturating_sub(context.tokens.len());
        let most = most.min(room).min(self.max_round_rows);
        let chosen_there = context.drafts == DraftSampling::Greedy && context.confidence == Confidence::Omit;
        while draft.tokens.len() < most {
            match draft.tokens.last() {
                None => {
                    self.go_back(context.tokens);
                    self.pass(&context.tokens[self.sure..])?;
                }
                Some(newest) => self.pass(&[*newest])?,
            }
            if chosen_there {
                // A verdict over no drafts is the model's own choice.
                let (_, token) = self.sequence.judge(&mut [], Judge::Target)?;
                draft.tokens.push(token);
            } else {
                draft.push(context, None, &self.sequence.logits(1)?, rng)?;
            }
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
    target: (&Target, Option<&Tokenizer>),
    draft: (&Target, Option<&Tokenizer>),
) -> Result<()> {
    let refuse = |problem: String| Err(Error::DraftModel { problem });
    let (of_target, of_draft) = (target.0.config().vocab_size, draft.0.config().vocab_size);
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
    for id in 0..draft.0.config().vocab_size as u32 {
        let (target, draft) = (of_target.token(id), of_draft.token(id));
        if target != draft {
            let name = |token: Option<String>| token.map_or("missing".into(), |token| format!("{token:?}"));
            return refuse(format!("token {id} is {} to it, {} to the target", name(draft), name(target)));
        }
    }
    Ok(())
}
