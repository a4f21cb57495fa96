//! Model interfaces: a target (a state per sequence, and a forward pass over a batch of rows), and
//! models that draft for it step by step.

use std::any::Any;
use std::ops::Range;

use candle_core::Tensor;

use crate::checkpoint::StepCost;
use crate::kv::{Batch, Committed, KvCache, KvOptions, PagePool, Round, SequenceState};
use crate::nn::{F32View, Scores, tensor};
use crate::{Error, Result};

/// A target. The bits of a row must not depend on the rest of the batch: that makes speculation and batching lossless.
pub trait Model: Send + Sync {
    /// Number of logits per row.
    fn vocab_size(&self) -> usize;

    /// Input ids are below this number.
    fn num_readable_tokens(&self) -> usize {
        self.vocab_size()
    }

    /// Width of a hidden state.
    fn hidden_size(&self) -> usize;

    /// Maximum context in positions.
    fn max_position_embeddings(&self) -> usize;

    /// The token that every text of the family begins with, if any. A checkpoint's tokenizer takes precedence.
    fn bos_token_id(&self) -> Option<u32> {
        None
    }

    /// Cost of the weights in a pass.
    fn step_cost(&self) -> StepCost;

    /// A fingerprint of the model, stored in session files.
    ///
    /// # Errors
    /// If a weight cannot be read.
    fn fingerprint(&self) -> Result<u64>;

    /// The state of an empty sequence; its pages come from `pool`.
    ///
    /// # Errors
    /// If an option is out of its range, or the context does not fit memory.
    fn new_state(&self, options: &KvOptions, pool: &PagePool) -> Result<SequenceState>;

    /// One pass over the rows of `batch`, staged in its rounds.
    ///
    /// # Errors
    /// If an id is outside the vocabulary, the request has rows that do not ascend or that the batch lacks, the model
    /// produced NaN or infinity, or memory is exhausted. The caller drops the rounds then.
    fn forward(&self, batch: &mut Batch<'_>, request: &Request) -> Result<Output>;

    /// One pass over the rows of one sequence, of which the first `keep` are committed; returns logits and hidden
    /// states of the `outputs` rows.
    ///
    /// # Errors
    /// As [`Model::forward`]; nothing is committed then.
    ///
    /// # Panics
    /// If `keep` is more than there are rows.
    fn forward_one(&self, ids: &[u32], round: Round<'_>, outputs: OutputRows, keep: usize) -> Result<Output> {
        let mut batch = Batch::of(ids, round)?;
        let request = Request::of(&batch, outputs);
        let output = self.forward(&mut batch, &request)?;
        batch.into_rounds().into_iter().for_each(|round| round.commit(keep));
        Ok(output)
    }
}

/// A model that is run autoregressively: each step drafts a token for any number of sequences. The
/// bits of a row must not depend on the others.
pub trait ChainModel: Send + Sync {
    /// One pass over the rows of each sequence; returns the results of each one's last row. The
    /// caller commits or drops the rounds.
    ///
    /// # Errors
    /// If the rows are of another kind of model, a shape does not fit, an id is outside the vocabulary, the model
    /// produced NaN or infinity, or memory is exhausted. The caller drops the rounds then.
    fn step(&self, sequences: &mut [DraftRows<'_>]) -> Result<Vec<DraftStep>>;
}

/// A sequence's rows of a draft step.
pub struct DraftRows<'a> {
    /// The last token, drafted or not; for a drafter with its own K and V, tokens before it as well.
    pub ids: Vec<u32>,
    /// `(rows, hidden)`: the states that predicted them, the target's or the last step's; `None`
    /// for a model that reads only tokens.
    pub hidden: Option<Tensor>,
    /// The K and V that the rows attend to.
    pub kv: DraftKv<'a>,
}

/// The K and V of a draft step.
pub enum DraftKv<'a> {
    /// The target's committed K and V, for one row. All steps of a chain have the same position: the one after them.
    Target(Committed<'a>),
    /// The drafter's own.
    Own {
        /// The rows are staged in this round.
        round: Round<'a>,
        /// Leading rows that are committed.
        keep: usize,
    },
    /// On a device, in memory that only the model knows.
    Model(Box<dyn Any + Send>),
}

/// The results of a draft step.
#[derive(Clone, Debug)]
pub struct DraftStep {
    /// Scores of the next token.
    pub scores: Scores,
    /// `(1, hidden)`: replaces the target's hidden state in the next step.
    pub hidden: Tensor,
}

impl<'a> DraftRows<'a> {
    /// The states of all sequences' rows: `(rows, hidden)`.
    ///
    /// # Errors
    /// If a sequence has none, or their widths differ.
    pub fn states(sequences: &[Self]) -> Result<Tensor> {
        let missing = || Error::argument("hidden", "is missing, but the model reads hidden states");
        let states = sequences.iter().map(|rows| rows.hidden.as_ref().ok_or_else(missing));
        Ok(Tensor::cat(&states.collect::<Result<Vec<_>>>()?, 0)?)
    }

    /// The target's K and V of each sequence.
    ///
    /// # Errors
    /// If a sequence's K and V are the drafter's own, or it does not have exactly one row.
    pub fn committed(sequences: &[Self]) -> Result<Vec<Committed<'a>>> {
        let committed = sequences.iter().map(|rows| match &rows.kv {
            DraftKv::Target(committed) if rows.ids.len() == 1 => Ok(*committed),
            DraftKv::Target(_) => Err(Error::argument("ids", format!("must be one, not {}", rows.ids.len()))),
            DraftKv::Own { .. } => Err(Error::argument("kv", "is the drafter's own, but the model reads the target's")),
            DraftKv::Model(_) => Err(Error::argument("kv", "is not on the host, where the model reads the target's")),
        });
        committed.collect()
    }

    /// What only the model knows of each sequence's K and V.
    ///
    /// # Errors
    /// If a sequence's K and V are on the host, or another model's.
    pub(crate) fn of_model<T: 'static>(sequences: &[Self]) -> Result<Vec<&T>> {
        let on_host = || Error::argument("kv", "is on the host, but the model reads a device's");
        let known = sequences.iter().map(|rows| match &rows.kv {
            DraftKv::Model(known) => known.downcast_ref::<T>().ok_or_else(on_host),
            DraftKv::Target(_) | DraftKv::Own { .. } => Err(on_host()),
        });
        known.collect()
    }

    /// All sequences' rows, to be staged in their rounds.
    ///
    /// # Errors
    /// If a sequence's K and V are the target's, its ids and its round's rows differ in number, or `keep` exceeds them.
    pub fn batch(sequences: &mut [Self]) -> Result<Batch<'_>> {
        let mut batch = Batch::new();
        for rows in sequences {
            let DraftKv::Own { round, keep } = &mut rows.kv else {
                return Err(Error::argument("kv", "is the target's, but the model stages rows in its own"));
            };
            if !round.can_commit(*keep) {
                return Err(Error::argument("keep", format!("is {keep}, but there are {} rows", round.rows())));
            }
            batch.push(&rows.ids, round.reborrow())?;
        }
        Ok(batch)
    }

    /// Commits the leading `keep` rows.
    pub(crate) fn commit(self) {
        if let DraftKv::Own { round, keep } = self.kv {
            round.commit(keep);
        }
    }
}

impl DraftStep {
    /// The steps of a pass, row by row from `logits` `(rows, vocab)` and `hidden` `(rows, hidden)`.
    ///
    /// # Errors
    /// If the numbers of rows differ.
    pub fn of_rows(logits: &Tensor, hidden: &Tensor) -> Result<Vec<Self>> {
        let step = |row| -> Result<_> {
            let scores = Scores { ids: None, logits: logits.narrow(0, row, 1)? };
            Ok(Self { scores, hidden: hidden.narrow(0, row, 1)? })
        };
        (0..logits.dim(0)?).map(step).collect()
    }
}

/// A NextN head: it predicts the token after the next from a target's hidden state and the next token, and has its own
/// K and V. The bits of a row must not depend on the others. As a [`ChainModel`], a step is one pass over the rows and
/// one product of the last ones with the output head.
pub trait NextnHead: ChainModel {
    /// The cache of an empty sequence; its pages come from `pool`.
    ///
    /// # Errors
    /// If an option is out of its range, or the context does not fit memory.
    fn nextn_cache(&self, options: &KvOptions, pool: &PagePool) -> Result<KvCache>;

    /// One pass over the rows of `batch`, staged in its rounds: row `p` is the token at `p + 1`, and in `hidden`
    /// `(rows, hidden)` the target's or the head's state of position `p`. Returns the head's states, `(rows, hidden)`.
    ///
    /// # Errors
    /// If a shape does not fit, an id is outside the vocabulary, the model produced NaN or
    /// infinity, or memory is exhausted.
    fn nextn_rows(&self, batch: &mut Batch<'_>, hidden: &Tensor) -> Result<Tensor>;

    /// As [`NextnHead::nextn_rows`], for rows whose states are not needed: only their K and V are computed.
    ///
    /// # Errors
    /// As [`NextnHead::nextn_rows`].
    fn nextn_append(&self, batch: &mut Batch<'_>, hidden: &Tensor) -> Result<()>;

    /// Logits of the tokens at `p + 2`, of the head's states of positions `p`: `(rows, vocab)`.
    ///
    /// # Errors
    /// If the shape does not fit.
    fn nextn_logits(&self, hidden: &Tensor) -> Result<Tensor>;
}

impl<H: NextnHead> ChainModel for H {
    fn step(&self, sequences: &mut [DraftRows<'_>]) -> Result<Vec<DraftStep>> {
        let states = DraftRows::states(sequences)?;
        let mut batch = DraftRows::batch(sequences)?;
        let newest = Request::of(&batch, OutputRows::Last).hidden;
        let hidden = select_rows(&self.nextn_rows(&mut batch, &states)?, &newest)?;
        DraftStep::of_rows(&self.nextn_logits(&hidden)?, &hidden)
    }
}

/// The error for using weights on the CPU that are on a device.
pub(crate) fn weights_on_device(model: &str) -> Error {
    let problem = format!("has the {model}'s weights; for passes on the CPU, load it without a device");
    Error::argument("device", problem)
}

/// Requested outputs of a pass. Row indices are in the batch, ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// Rows with logits.
    pub logits: Vec<usize>,
    /// Rows with hidden states.
    pub hidden: Vec<usize>,
    /// Layers, ascending, whose outputs are returned for the rows in `hidden`.
    pub taps: Vec<usize>,
}

/// The output rows of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputRows {
    /// Every row (verification).
    All,
    /// The last row (the end of a prompt, a decode step).
    Last,
    /// None: K and V only (the earlier chunks of a prompt).
    None,
}

/// The outputs of a pass.
#[derive(Clone, Debug)]
pub struct Output {
    /// `(rows, vocab)`, after a soft cap if the model has one.
    pub logits: Tensor,
    /// `(rows, hidden)`, after the final norm.
    pub hidden: Tensor,
    /// `(rows, hidden)` for each of [`Request::taps`]: the layer's output.
    pub taps: Vec<Tensor>,
}

impl Request {
    /// Logits and hidden states of the `outputs` rows of every segment.
    pub fn of(batch: &Batch<'_>, outputs: OutputRows) -> Self {
        let mut request = Self::default();
        let mut first = 0;
        for round in batch.rounds() {
            outputs.add_to(&mut request.logits, first, round.rows());
            outputs.add_to(&mut request.hidden, first, round.rows());
            first += round.rows();
        }
        request
    }

    /// All output rows.
    pub fn rows(&self) -> Vec<usize> {
        if self.logits == self.hidden {
            return self.logits.clone();
        }
        let mut rows = [&self.logits[..], &self.hidden].concat();
        rows.sort_unstable();
        rows.dedup();
        rows
    }

    /// As [`Request::rows`], of a batch of `rows` rows.
    ///
    /// # Errors
    /// If indices do not ascend, or the batch has no such row.
    pub(crate) fn rows_of(&self, rows: usize) -> Result<Vec<usize>> {
        let are_of_batch = |of: &[usize]| of.is_sorted_by(|a, b| a < b) && of.last().is_none_or(|last| *last < rows);
        if !are_of_batch(&self.logits) || !are_of_batch(&self.hidden) {
            return Err(Error::argument("request", format!("must have ascending rows below {rows}, the batch's rows")));
        }
        Ok(self.rows())
    }
}

impl OutputRows {
    /// The number of output rows of a segment of `rows` rows: its last ones.
    pub fn of(self, rows: usize) -> usize {
        match self {
            Self::All => rows,
            Self::Last => rows.min(1),
            Self::None => 0,
        }
    }

    /// Adds the output rows of a segment of `rows` rows from `first` on to those of a [`Request`]; returns their rows
    /// in the [`Output`].
    pub(crate) fn add_to(self, requested: &mut Vec<usize>, first: usize, rows: usize) -> Range<usize> {
        let before = requested.len();
        requested.extend(first + rows - self.of(rows)..first + rows);
        before..requested.len()
    }
}

impl Output {
    /// The output of a pass of `model` without output rows.
    pub(crate) fn empty(model: &dyn Model, taps: Vec<Tensor>) -> Result<Self> {
        let no_rows = |width| tensor(Vec::new(), (0, width));
        Ok(Self { logits: no_rows(model.vocab_size())?, hidden: no_rows(model.hidden_size())?, taps })
    }
}

/// Indices of `rows` in `held`, a superset; both ascend.
pub(crate) fn indices_of(rows: &[usize], held: &[usize]) -> Vec<usize> {
    rows.iter().filter_map(|row| held.binary_search(row).ok()).collect()
}

/// Rows of `x` `(rows, width)`, ascending; no copy if they are contiguous.
pub(crate) fn select_rows(x: &Tensor, rows: &[usize]) -> Result<Tensor> {
    let (held, width) = x.dims2()?;
    let first = rows.first().copied().unwrap_or(0);
    if rows.iter().copied().eq(first..first + rows.len()) {
        return if rows.len() == held { Ok(x.clone()) } else { Ok(x.narrow(0, first, rows.len())?) };
    }
    let view = F32View::new(x)?;
    let selected = rows.iter().flat_map(|row| &view[row * width..(row + 1) * width]).copied().collect();
    tensor(selected, (rows.len(), width))
}
