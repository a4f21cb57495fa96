//! Drafters that run on the target's device.

use std::sync::Arc;

use parking_lot::Mutex;
use rand::rngs::StdRng;

use super::models::Models;
use super::sequence::{AcceptRule, DRAFTED, DraftChoice, Sequence};
use crate::Result;
use crate::gemma4::Target;
use crate::kv::KvOptions;
use crate::model::OutputRows;
use crate::speculative::{Confidence, Context, Draft, DraftCost, DraftSampling, Drafter, DrafterKind, Observed};

/// [`Mtp`](crate::speculative::Mtp) on a device. Greedy drafts stay there: the host has placeholders until the target's accept
/// result.
pub(crate) struct DeviceMtp {
    sequence: Arc<Mutex<Sequence>>,
}

impl DeviceMtp {
    /// The drafter of a sequence whose models have an assistant.
    pub fn new(sequence: Arc<Mutex<Sequence>>) -> Self {
        Self { sequence }
    }
}

impl Drafter for DeviceMtp {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Mtp
    }

    fn cost(&self) -> DraftCost {
        DraftCost::PerToken
    }

    fn begin(&mut self, _: &[u32]) {}

    fn draft(&mut self, context: &Context<'_>, most: usize, draft: &mut Draft, rng: &mut StdRng) -> Result<()> {
        let mut sequence = self.sequence.lock();
        let Some(last) = context.tokens.last() else { return Ok(()) };
        let stays = context.drafts == DraftSampling::Greedy && context.confidence == Confidence::Omit;
        let choice = if stays { DraftChoice::Device } else { DraftChoice::Host };
        for link in draft.tokens.len()..most {
            sequence.draft(*last, context.kv.position(), link, choice)?;
            if stays {
                draft.tokens.push(DRAFTED);
            } else {
                let (ids, scores) = sequence.draft_scores()?;
                context.draft_token(draft, ids.as_deref(), &scores, rng)?;
                sequence.put_draft(link, draft.tokens[link])?;
            }
        }
        Ok(())
    }

    fn observe(&mut self, _: &Observed<'_>) -> Result<()> {
        Ok(())
    }
}

/// [`DraftModel`](crate::speculative::DraftModel) on the target's device.
///
/// Its sequence receives the start of each pass, so that it can be truncated: rows of a draft stay, and accepted ones are not
/// recomputed. The host learns every token as it is drafted, because the target's sequence is a different one.
pub(crate) struct DeviceDraftModel {
    sequence: Sequence,
    max_context: usize,
    max_round_rows: usize,
    read: Vec<u32>, // tokens whose rows are on the device
    sure: usize,    // number of them known to match the text
}

/// Maximum tokens read one by one, in recorded passes: what a fully accepted round adds.
const FEW: usize = 2;

impl DeviceDraftModel {
    /// A drafter with an empty cache; see [`DraftModel::new`](crate::speculative::DraftModel::new). `models` has `model` on the
    /// device.
    ///
    /// # Errors
    /// If an option of the cache is out of its range, or memory is exhausted.
    pub fn new(models: &Arc<Models>, model: &Target, kv: &KvOptions) -> Result<Self> {
        let default = model.config().max_position_embeddings;
        let (sequence, max_context) = Sequence::new(models, &model.kv_layout(), kv, default)?;
        let max_round_rows = kv.max_round_rows.min(max_context);
        Ok(Self { sequence, max_context, max_round_rows, read: Vec::new(), sure: 0 })
    }

    /// Drops the rows that do not match `text`, and that of its last token, whose scores are needed.
    fn go_back(&mut self, text: &[u32]) {
        let (read, text_behind) = (&self.read[self.sure..], &text[self.sure..]);
        let same = self.sure + read.iter().zip(text_behind).take_while(|(a, b)| a == b).count();
        self.sure = same.min(text.len().saturating_sub(1));
        // A ring retains one dropped round, and nothing older.
        if self.read.len() - self.sure > self.max_round_rows {
            self.sure = 0;
        }
        self.read.truncate(self.sure);
    }

    /// Reads `tokens` after those already read. The scores after the last stay on the device.
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
                // Accept with zero drafts gives the model's own choice.
                let (_, token) = self.sequence.accept(&mut [], AcceptRule::Argmax)?;
                draft.tokens.push(token);
            } else {
                context.draft_token(draft, None, &self.sequence.logits(1)?, rng)?;
            }
        }
        Ok(())
    }

    fn observe(&mut self, _: &Observed<'_>) -> Result<()> {
        Ok(())
    }
}
