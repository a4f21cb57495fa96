//! The scores that the host reads of a draft step.

use super::device_pass::DeviceOutput;
use super::outputs::IdsAndScores;
use super::sequence::DRAFTED;
use crate::Result;
use crate::model::DraftStep;
use crate::nn::{Scores, tensor};
use crate::speculative::{Confidence, Context, DraftSampling};

/// The scores that a draft step returns.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum StepScores {
    /// None: the most probable token is chosen on the device, without host synchronisation.
    None,
    /// At least this many of the largest.
    Largest(usize),
    All,
}

impl StepScores {
    /// What `context` chooses a draft from.
    pub fn by(context: &Context<'_>) -> Self {
        match (context.confidence, context.drafts) {
            (Confidence::Report, _) => Self::All,
            (Confidence::Omit, DraftSampling::Greedy) => Self::None,
            (Confidence::Omit, DraftSampling::Sampled) => {
                context.sampler.largest_logits().map_or(Self::All, Self::Largest)
            }
        }
    }

    /// The scores after the last row of a pass.
    ///
    /// # Errors
    /// As [`DeviceOutput::wait`].
    pub fn read(self, output: &mut DeviceOutput<'_>) -> Result<IdsAndScores> {
        match self {
            Self::None => Ok(drafted()),
            Self::Largest(count) => match output.largest_logits(1, count)? {
                Some([row]) => Ok((Some(row.ids.clone()), row.logits.clone())),
                _ => Ok((None, output.logits(1)?)),
            },
            Self::All => Ok((None, output.logits(1)?)),
        }
    }
}

/// The only candidate: what the device chose.
pub(super) fn drafted() -> IdsAndScores {
    (Some(vec![DRAFTED]), vec![0.0])
}

/// The steps of all `rows`, in their order. `scores_of` runs one step for rows that `shares` allows to be together.
pub(super) fn grouped_steps<R>(
    rows: &[&R],
    shares: impl Fn(&R, &R) -> bool,
    mut scores_of: impl FnMut(&[&R]) -> Result<Vec<IdsAndScores>>,
) -> Result<Vec<DraftStep>> {
    let mut steps: Vec<Option<DraftStep>> = rows.iter().map(|_| None).collect();
    while let Some(first) = steps.iter().position(Option::is_none) {
        let together: Vec<usize> = (first..rows.len()).filter(|i| shares(rows[*i], rows[first])).collect();
        let group: Vec<&R> = together.iter().map(|i| rows[*i]).collect();
        for (i, scores) in together.into_iter().zip(scores_of(&group)?) {
            steps[i] = Some(draft_step(scores)?);
        }
    }
    Ok(steps.into_iter().flatten().collect())
}

/// The result of a step with these scores, whose hidden state stays on the device.
fn draft_step((ids, logits): IdsAndScores) -> Result<DraftStep> {
    let shape = (1, logits.len());
    Ok(DraftStep { scores: Scores { ids, logits: tensor(logits, shape)? }, hidden: tensor(Vec::new(), (1, 0))? })
}
