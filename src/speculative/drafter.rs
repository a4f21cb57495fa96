//! The drafter interface.

use std::ops::Range;

use candle_core::Tensor;
use rand::rngs::StdRng;

use super::chain::{DraftChain, draft_chain};
use super::context::Context;
use super::draft::Draft;
use super::drafter_kind::DrafterKind;
use super::drafters::NgramCache;
use crate::Result;
use crate::device::DeviceStates;
use crate::kv::HeldPage;

/// The outputs of the target's passes that a drafter reads besides the tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    /// The hidden states of all committed rows, prompts' included, in [`Observed::hidden`].
    pub hidden: bool,
    /// Layers, ascending, whose outputs come with the hidden states, in [`Observed::taps`].
    pub taps: Vec<usize>,
}

impl Reads {
    /// The union of both.
    pub(crate) fn and(mut self, other: Self) -> Self {
        self.hidden |= other.hidden || !other.taps.is_empty();
        self.taps.extend(other.taps);
        self.taps.sort_unstable();
        self.taps.dedup();
        self
    }

    /// The taps read, for the rows `rows`, from a pass that returned those of `layers`.
    ///
    /// # Errors
    /// Candle's.
    pub(crate) fn taps_of(&self, layers: &[usize], taps: &[Tensor], rows: Range<usize>) -> Result<Vec<Tensor>> {
        let taps = layers.iter().zip(taps).filter(|(layer, _)| self.taps.contains(layer));
        taps.map(|(_, tap)| Ok(tap.narrow(0, rows.start, rows.len())?)).collect()
    }
}

/// Rows committed since the drafter's last observation.
#[derive(Clone, Copy)]
pub struct Observed<'a> {
    /// The sequence. After a round it includes the last token, which the target has not read; after
    /// a chunk of a prompt it does not.
    pub tokens: &'a [u32],
    /// Position of the first committed row.
    pub first: usize,
    /// `(rows, hidden)` of the committed rows, after the final norm; only if [`Reads::hidden`] is set, and on the CPU.
    pub hidden: Option<&'a Tensor>,
    /// The same on a device, for its drafters; `None` on the CPU.
    pub on_device: Option<&'a DeviceStates>,
    /// `(rows, hidden)` of the same rows for each layer that any drafter of the sequence reads, ascending.
    pub taps: &'a [Tensor],
    /// The accept result, if this drafter made the round's draft.
    pub own: Option<AcceptResult>,
}

/// The result of a verification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceptResult {
    /// Tokens that were verified.
    pub drafted: usize,
    /// Leading tokens of those that were accepted.
    pub accepted: usize,
}

/// How a draft's cost scales with its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftCost {
    /// One step of a model per token: the planner sets the length before drafting.
    PerToken,
    /// Negligible at any length (prompt lookup): drafted before planning; the planner truncates it. Tokens must not be
    /// drawn at random: whether a draft is verified would depend on the draw, and bias the text.
    Once,
    /// None, and it is certain to be accepted.
    Forced,
}

/// Proposes tokens. They affect only the speed: the text is always the target's.
///
/// On a device, [`Drafter::read_prompt`] and [`Drafter::observe`] are called within the target's pass, so they must not
/// open or run sessions of the same engine: they would wait for that pass forever.
///
/// With [`DraftPipeline::Ahead`](crate::DraftPipeline::Ahead), [`Drafter::draft`] runs on the engine's threads. While a
/// draft waits for tasks of its own in rayon, its thread may execute a closure that another thread passed to
/// [`Engine::run`](crate::Engine::run). That closure must not advance the same generation: it would wait for the draft
/// forever.
///
/// A custom drafter is listed with [`DrafterOptions::Custom`](super::DrafterOptions::Custom):
///
/// ```
/// use foretoken::rand::rngs::StdRng;
/// use foretoken::speculative::{
///     Context, CustomDrafter, Draft, DraftCost, Drafter, DrafterKind, DrafterOptions, Drafters,
/// };
/// use foretoken::{GenerateOptions, Result, Speculation, SpeculationOptions};
///
/// /// Repeats the last token.
/// struct Repeat;
///
/// impl Drafter for Repeat {
///     fn kind(&self) -> DrafterKind {
///         DrafterKind::Custom
///     }
///     fn cost(&self) -> DraftCost {
///         DraftCost::Once
///     }
///     fn draft(&mut self, context: &Context<'_>, most: usize, draft: &mut Draft, _: &mut StdRng) -> Result<()> {
///         draft.tokens.resize(most, context.tokens[context.tokens.len() - 1]);
///         Ok(())
///     }
/// }
///
/// let repeat = CustomDrafter::new("repeat", || Box::new(Repeat));
/// let drafters = Drafters::Priority(vec![DrafterOptions::Custom(repeat)]);
/// let speculation = Speculation::With(SpeculationOptions { drafters, ..SpeculationOptions::default() });
/// let options = GenerateOptions { speculation, ..GenerateOptions::default() };
/// ```
pub trait Drafter: Send {
    /// Its kind; [`DrafterKind::Custom`] for a custom drafter.
    fn kind(&self) -> DrafterKind;

    /// How a draft's cost scales with its length.
    fn cost(&self) -> DraftCost;

    /// The outputs of the target's passes that it reads besides tokens. Default: none.
    fn reads(&self) -> Reads {
        Reads::default()
    }

    /// Called after a chunk of a prompt was read. `tokens`, the sequence up to its end, extends the last generation's.
    /// Default: nothing to do.
    ///
    /// # Errors
    /// If a model produced NaN or infinity.
    fn read_prompt(&mut self, tokens: &[u32]) -> Result<()> {
        let _ = tokens;
        Ok(())
    }

    /// Starts a generation after `tokens`, which are or extend the last generation's sequence. Default: nothing to do.
    fn begin(&mut self, tokens: &[u32]) {
        let _ = tokens;
    }

    /// Extends `draft`, which is empty or was made by this drafter in this round, to at most `most` tokens. Default: by
    /// steps of the [chain](Drafter::chain); nothing if it is not a chain.
    ///
    /// # Errors
    /// If a model produced NaN or infinity.
    fn draft(&mut self, context: &Context<'_>, most: usize, draft: &mut Draft, rng: &mut StdRng) -> Result<()> {
        self.chain().map_or(Ok(()), |chain| draft_chain(chain, context, most, draft, rng))
    }

    /// Returns itself if it is a chain whose steps can share passes of its model with other sequences'. Rounds are then
    /// drafted step by step, and [`Drafter::draft`] is not called. Default: `None`.
    fn chain(&mut self) -> Option<&mut dyn DraftChain> {
        None
    }

    /// Called after rows are committed: by a round, or, if it [reads](Drafter::reads) hidden
    /// states, by a chunk of a prompt. Default: nothing to do.
    ///
    /// # Errors
    /// If a model produced NaN or infinity. After a round, the next one reports it.
    fn observe(&mut self, seen: &Observed<'_>) -> Result<()> {
        let _ = seen;
        Ok(())
    }

    /// Called after the sequence was truncated to its first `len` tokens, the last of which the target may not have
    /// read. Default: nothing to do.
    fn truncate(&mut self, len: usize) {
        let _ = len;
    }

    /// The longest sequence that it drafts for. Default: any.
    fn max_context(&self) -> usize {
        usize::MAX
    }

    /// Called on a [copy](Drafter::fork) before its first generation: its sequence has at most `positions` tokens,
    /// which may be more or fewer than the original's. Default: nothing to do.
    fn set_max_context(&mut self, positions: usize) {
        let _ = positions;
    }

    /// A copy for a fork of the sequence. Default: `None`, the fork's drafter starts from its text.
    fn fork(&self) -> Option<Box<dyn Drafter>> {
        None
    }

    /// An upper bound of the page bytes that it takes to read the sequence up to position `end`. Default: none.
    fn page_bytes(&self, end: usize) -> usize {
        let _ = end;
        0
    }

    /// Whether it holds pages of K and V, so that dropping it frees memory. Default: no.
    fn holds_pages(&self) -> bool {
        false
    }

    /// Its pages, including those shared with forks.
    #[doc(hidden)]
    fn held_pages(&self) -> Vec<HeldPage> {
        Vec::new()
    }

    /// What it has learnt that other sequences may use: see
    /// [`Session::learnt_ngrams`](crate::Session::learnt_ngrams). Default: nothing.
    fn learnt(&self) -> Option<NgramCache> {
        None
    }
}
