//! Drafters that run a model autoregressively, and their steps, batched over sequences.

use std::slice;
use std::sync::Arc;

use parking_lot::Mutex;
use rand::rngs::StdRng;

use super::context::Context;
use super::draft::Draft;
use crate::constraint::ConstraintState;
use crate::model::{ChainModel, DraftRows, DraftStep};
use crate::nn::{F32View, Scores};
use crate::{Error, Result};

/// A drafter that runs a model autoregressively: each step reads what the last one drafted.
pub trait DraftChain: Send {
    /// The model. Chains with the same model share its passes.
    fn model(&self) -> Arc<dyn ChainModel>;

    /// The step that extends `draft`, which is empty or was made by this drafter in this round. Called
    /// again if a pass of several sequences failed.
    ///
    /// # Errors
    /// If a model produced NaN or infinity, or memory is exhausted.
    fn next<'a>(&'a mut self, context: &Context<'a>, draft: &Draft) -> Result<ChainStep<'a>>;

    /// Called after the step was run and the rows to keep are committed.
    fn advance(&mut self, step: &DraftStep);
}

/// The next step of a chain.
pub enum ChainStep<'a> {
    /// A pass over these rows.
    Pass(DraftRows<'a>),
    /// Scores of an earlier pass over the same rows, whose draft was not verified.
    Known(Scores),
    /// None: the chain's context is full.
    End,
}

/// A draft to be extended by one token.
pub(super) struct ChainDraft<'a> {
    pub model: Arc<dyn ChainModel>,
    pub chain: &'a mut dyn DraftChain,
    pub context: Context<'a>,
    pub constraint: Option<&'a Mutex<ConstraintState>>,
    pub draft: &'a mut Draft,
    pub rng: &'a mut StdRng,
}

/// The source of a step's scores.
enum Source {
    Pass,
    Known(Scores),
    End,
}

impl ChainDraft<'_> {
    /// Whether both can share a pass.
    pub fn shares_model(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.model, &other.model)
    }

    /// Adds the token chosen from `scores` to the draft, unless a constraint rejects it.
    fn add_token(&mut self, scores: &Scores) -> Result<()> {
        self.context.draft_token(self.draft, scores.ids.as_deref(), &F32View::new(&scores.logits)?, self.rng)?;
        if let Some(constraint) = self.constraint {
            self.draft.drop_from(constraint.lock().valid(&self.draft.tokens));
        }
        Ok(())
    }
}

/// Extends every draft by one token in one pass of the model, the same for all; a chain at its end drafts none. Returns
/// the number of tokens that each drafted. An error or a panic is that of the sequence that caused it.
pub(super) fn extend_drafts(drafts: &mut [ChainDraft<'_>]) -> Vec<Result<usize>> {
    match Error::catch(|| step(drafts)) {
        Ok(done) => done,
        Err(error) if drafts.len() == 1 => vec![Err(error)],
        // Rows have the same bits in a pass of their own, so running each alone finds the sequence at fault.
        Err(error) => {
            tracing::debug!(%error, "a draft step of several sequences failed; each runs alone");
            drafts.iter_mut().flat_map(|draft| extend_drafts(slice::from_mut(draft))).collect()
        }
    }
}

/// One pass.
///
/// # Errors
/// If it failed; no draft is longer then, and no row is committed.
fn step(drafts: &mut [ChainDraft<'_>]) -> Result<Vec<Result<usize>>> {
    let Some(model) = drafts.first().map(|draft| draft.model.clone()) else { return Ok(Vec::new()) };
    let (mut sources, mut sequences) = (Vec::with_capacity(drafts.len()), Vec::with_capacity(drafts.len()));
    for ChainDraft { chain, context, draft, .. } in drafts.iter_mut() {
        sources.push(match chain.next(context, draft)? {
            ChainStep::Pass(rows) => {
                sequences.push(rows);
                Source::Pass
            }
            ChainStep::Known(scores) => Source::Known(scores),
            ChainStep::End => Source::End,
        });
    }
    let mut steps = pass(&*model, sequences)?.into_iter();
    // No error after this point concerns the whole pass.
    let done = drafts.iter_mut().zip(sources).map(|(draft, source)| {
        let step = match source {
            Source::End => return Ok(0),
            Source::Known(scores) => return Error::catch(|| draft.add_token(&scores)).map(|()| 1),
            Source::Pass => steps.next(),
        };
        // `pass` made a step for every sequence.
        let Some(step) = step else { return Ok(0) };
        Error::catch(|| {
            draft.chain.advance(&step);
            draft.add_token(&step.scores)
        })
        .map(|()| 1)
    });
    Ok(done.collect())
}

/// Runs and commits the rows of all sequences.
///
/// # Errors
/// If the pass failed; nothing is committed then.
fn pass(model: &dyn ChainModel, mut sequences: Vec<DraftRows<'_>>) -> Result<Vec<DraftStep>> {
    if sequences.is_empty() {
        return Ok(Vec::new());
    }
    let steps = model.step(&mut sequences)?;
    if steps.len() != sequences.len() {
        let (made, sequences) = (steps.len(), sequences.len());
        return Err(Error::argument(
            "sequences",
            format!("{sequences} sequences, but the model returned {made} steps"),
        ));
    }
    sequences.into_iter().for_each(DraftRows::commit);
    Ok(steps)
}

/// Extends `draft` to `most` tokens, or to the chain's end.
///
/// # Errors
/// The model's, or if its logits are NaN or infinite.
pub(super) fn draft_chain(
    chain: &mut dyn DraftChain,
    context: &Context<'_>,
    most: usize,
    draft: &mut Draft,
    rng: &mut StdRng,
) -> Result<()> {
    while draft.tokens.len() < most {
        let model = chain.model();
        let mut next = ChainDraft { model, chain: &mut *chain, context: *context, constraint: None, draft, rng };
        if step(slice::from_mut(&mut next))?.into_iter().sum::<Result<usize>>()? == 0 {
            break;
        }
    }
    Ok(())
}
