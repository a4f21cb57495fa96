//! What a drafter is.

use std::sync::Arc;

use candle_core::Tensor;
use rand::rngs::StdRng;

use super::{Draft, DraftSampling, DrafterKind, NgramCache};
use crate::Result;
use crate::kv::Committed;
use crate::model::{ChainModel, DraftRows, DraftStep};
use crate::nn::Scores;
use crate::sampler::Sampler;

/// What a drafter may read: the sequence between two rounds.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// All tokens, the newest included, which the target has not read yet.
    pub tokens: &'a [u32],
    /// `(1, hidden)`: the target's state, after the final norm, that predicted the newest token.
    pub hidden: &'a Tensor,
    /// Tokens that a constraint leaves no choice about, behind the newest one; none without a constraint.
    pub forced: &'a [u32],
    /// The target's K and V of all tokens but the newest.
    pub kv: Committed<'a>,
    /// How the request chooses tokens.
    pub sampler: &'a Sampler,
    /// How drafts are chosen by drafters that have a distribution.
    pub drafts: DraftSampling,
    /// Whether the drafts' probabilities are wanted (a trace shows them).
    pub confidence: Confidence,
}

/// Whether a draft reports its drafter's probabilities of its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Confidence {
    /// No: nobody looks at it.
    #[default]
    Omit,
    /// Yes, in [`Draft::confidence`].
    Report,
}

/// What a drafter reads of the target's passes besides their tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    /// The hidden states of all committed rows, prompts' included, in [`Observed::hidden`].
    pub hidden: bool,
    /// Layers, ascending, whose outputs come with the hidden states, in [`Observed::taps`].
    pub taps: Vec<usize>,
}

impl Reads {
    /// What either reads.
    pub(crate) fn and(mut self, other: Self) -> Self {
        self.hidden |= other.hidden || !other.taps.is_empty();
        self.taps.extend(other.taps);
        self.taps.sort_unstable();
        self.taps.dedup();
        self
    }
}

/// What was committed since a drafter last looked.
#[derive(Clone, Copy)]
pub struct Observed<'a> {
    /// The sequence. Behind a round it has the newest token, which the target has not read; behind a chunk of a prompt it
    /// does not.
    pub tokens: &'a [u32],
    /// Position of the first committed row.
    pub first: usize,
    /// `(rows, hidden)` of the committed rows, after the final norm; only where [`Reads::hidden`] asked for it.
    pub hidden: Option<&'a Tensor>,
    /// `(rows, hidden)` of the same rows for each of the layers that any drafter of the sequence reads, ascending.
    pub taps: &'a [Tensor],
    /// The verdict, if the draft of the round was this drafter's.
    pub own: Option<Verdict>,
}

/// The result of a verification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Tokens that were verified.
    pub drafted: usize,
    /// Leading tokens of those that were accepted.
    pub accepted: usize,
}

/// How the price of a draft grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftCost {
    /// A step of a model for every token: the planner decides how many before they are drafted.
    PerToken,
    /// Next to nothing, whatever its length: it is drafted first, and the planner decides how much of it is verified.
    Once,
    /// Nothing, and it is certain to be accepted.
    Forced,
}

/// Proposes tokens. Whatever it proposes, the text stays the target's; only the speed is at stake.
///
/// A caller's own comes in with [`Drafters::Custom`](super::Drafters::Custom):
///
/// ```
/// use foretoken::speculative::{Context, CustomDrafter, Draft, DraftCost, Drafter, DrafterKind, Drafters, Observed};
///
/// /// Proposes the newest token again.
/// struct Repeat;
///
/// impl Drafter for Repeat {
///     fn kind(&self) -> DrafterKind {
///         DrafterKind::Custom
///     }
///     fn cost(&self) -> DraftCost {
///         DraftCost::Once
///     }
///     fn begin(&mut self, _: &[u32]) {}
///     fn draft(&mut self, context: &Context<'_>, most: usize, draft: &mut Draft, _: &mut rand::rngs::StdRng) -> foretoken::Result<()> {
///         draft.tokens.resize(most, context.tokens[context.tokens.len() - 1]);
///         Ok(())
///     }
///     fn observe(&mut self, _: &Observed<'_>) -> foretoken::Result<()> {
///         Ok(())
///     }
/// }
///
/// let drafters = Drafters::Custom(CustomDrafter::new("repeat", || Box::new(Repeat)));
/// # let _ = drafters;
/// ```
pub trait Drafter: Send {
    /// Which one it is; a caller's own says [`DrafterKind::Custom`].
    fn kind(&self) -> DrafterKind;

    /// How the price of its drafts grows.
    fn cost(&self) -> DraftCost;

    /// What it reads of the target's passes besides their tokens. Default: nothing.
    fn reads(&self) -> Reads {
        Reads::default()
    }

    /// A generation begins after `tokens`: the sequence of the last generation, or longer.
    fn begin(&mut self, tokens: &[u32]);

    /// Lengthens `draft`, which is empty or its own of this round, to at most `most` tokens.
    ///
    /// # Errors
    /// If a model's numbers are not finite.
    fn draft(&mut self, context: &Context<'_>, most: usize, draft: &mut Draft, rng: &mut StdRng) -> Result<()>;

    /// Itself, if it is a chain whose steps can share passes of its model with other sequences'. Rounds are then drafted step by
    /// step, and [`Drafter::draft`] is not called for them. Default: `None`.
    fn chain(&mut self) -> Option<&mut dyn DraftChain> {
        None
    }

    /// Rows were committed: by a round, or, if it [reads](Drafter::reads) hidden states, by a chunk of a prompt.
    ///
    /// # Errors
    /// If a model's numbers are not finite. Behind a round, the next one reports it.
    fn observe(&mut self, seen: &Observed<'_>) -> Result<()>;

    /// The sequence has only its first `len` tokens any more. Default: nothing to forget.
    fn truncate(&mut self, len: usize) {
        let _ = len;
    }

    /// A copy for a fork of the sequence. Default: `None`, the fork's begins with its text.
    fn fork(&self) -> Option<Box<dyn Drafter>> {
        None
    }

    /// What it has learnt that may serve other sequences.
    fn learnt(&self) -> Option<NgramCache> {
        None
    }
}

/// A drafter that chains steps of a model: what a step drafts is read by the next one.
pub trait DraftChain: Send {
    /// The model. Chains of one model share its passes.
    fn model(&self) -> Arc<dyn ChainModel>;

    /// The step that lengthens `draft`, which is empty or its own of this round. It is asked for again where a pass of several
    /// sequences failed.
    ///
    /// # Errors
    /// If a model's numbers are not finite, or memory is exhausted.
    fn next<'a>(&'a mut self, context: &Context<'a>, draft: &Draft) -> Result<ChainStep<'a>>;

    /// A pass took the step, and the rows that were to be kept are committed.
    fn advance(&mut self, step: &DraftStep);
}

/// What lengthens a chain's draft by a token.
pub enum ChainStep<'a> {
    /// A pass over these rows.
    Pass(DraftRows<'a>),
    /// Scores of an earlier pass over the same rows, whose draft was not verified.
    Known(Scores),
    /// Nothing: the chain's context is full.
    End,
}
