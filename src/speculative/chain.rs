//! Draft steps of a model that is chained with itself: one pass for a row of each of several sequences.

use std::slice;
use std::sync::Arc;

use parking_lot::Mutex;
use rand::rngs::StdRng;

use super::{Context, Draft, DraftChain};
use crate::constraint::ConstraintState;
use crate::model::{ChainModel, DraftStep};
use crate::{Error, Result};

/// A sequence's draft, to be lengthened by a token.
pub(super) struct Link<'a> {
    pub model: Arc<dyn ChainModel>,
    pub chain: &'a mut dyn DraftChain,
    pub context: Context<'a>,
    pub constraint: Option<&'a Mutex<ConstraintState>>,
    pub draft: &'a mut Draft,
    pub rng: &'a mut StdRng,
}

impl Link<'_> {
    /// Whether one pass can take both.
    pub fn shares_model(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.model, &other.model)
    }

    fn take(&mut self, step: DraftStep) -> Result<()> {
        self.draft.push(&self.context, step.scores.ids.as_deref(), &step.scores.logits, self.rng)?;
        self.chain.advance(step.hidden);
        if let Some(constraint) = self.constraint {
            self.draft.refuse(constraint.lock().valid(&self.draft.tokens));
        }
        Ok(())
    }
}

/// Lengthens every draft by a token, in one pass of the model, which is the same for all. An error or a panic is that of the
/// sequence whose row or draft it was.
pub(super) fn lengthen(links: &mut [Link<'_>]) -> Vec<Result<()>> {
    match Error::catch(|| step(links)) {
        Ok(done) => done,
        Err(error) if links.len() == 1 => vec![Err(error)],
        // Rows have the same bits in a pass of their own, so whose fault it was is found by asking each.
        Err(error) => {
            tracing::debug!(%error, "a draft step of several sequences failed; each runs alone");
            links.iter_mut().flat_map(|link| lengthen(slice::from_mut(link))).collect()
        }
    }
}

/// One pass.
///
/// # Errors
/// If it failed; no draft is longer then.
fn step(links: &mut [Link<'_>]) -> Result<Vec<Result<()>>> {
    let rows: Vec<_> = links.iter().map(|link| link.chain.row(&link.context, link.draft)).collect();
    let Some(model) = links.first().map(|link| &link.model) else { return Ok(Vec::new()) };
    let steps = model.step(&rows)?;
    if steps.len() != rows.len() {
        return Err(Error::argument("rows", format!("are {}, the model made {} steps", rows.len(), steps.len())));
    }
    drop(rows);
    // From here on no error is the whole pass's.
    Ok(links.iter_mut().zip(steps).map(|(link, step)| Error::catch(|| link.take(step))).collect())
}

/// Lengthens `draft` to `most` tokens: [`Drafter::draft`](super::Drafter::draft) of a drafter that is a chain.
///
/// # Errors
/// The model's, or if its logits are not finite.
pub fn draft_chain(
    chain: &mut dyn DraftChain,
    context: &Context<'_>,
    most: usize,
    draft: &mut Draft,
    rng: &mut StdRng,
) -> Result<()> {
    while draft.tokens.len() < most {
        let model = chain.model();
        let mut link = Link { model, chain: &mut *chain, context: *context, constraint: None, draft, rng };
        step(slice::from_mut(&mut link))?.into_iter().collect::<Result<()>>()?;
    }
    Ok(())
}
