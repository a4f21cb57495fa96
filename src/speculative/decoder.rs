//! A sequence being decoded, and the passes that advance any number of them: propose each, draft
//! together, one batched forward, finish each.

use std::ops::{Add, Range};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;

use super::chain::{ChainDraft, extend_drafts};
use super::decode_state::FirstToken;
use super::proposal::{Call, count_call};
use super::round_result::PassTiming;
use super::work::{Work, WorkRows};
use super::{
    Backend, Cancel, DeviceSequence, Drafting, ForwardOutput, OtherSequences, Proposal, RoundResult, Settings,
};
use crate::device::{DRAFTED, DevicePass, Sequence};
use crate::kv::{Batch, Round, SequenceState};
use crate::model::{Output, OutputRows, Request};
use crate::nn::for_each;
use crate::sampler::{Sampler, TokenLogprobs};
use crate::{Error, Result};

/// One sequence, which can be moved to the thread that drafts.
pub(crate) struct SpeculativeDecoder {
    pub backend: Backend,
    pub state: SequenceState,
    pub drafting: Drafting,
}

/// A sequence's cache at some time.
pub(crate) struct Snapshot {
    state: SequenceState,
    device: Option<Sequence>,
}

/// Receives an emitted token, and returns whether the text ends with it.
pub(crate) type Ends<'s> = Box<dyn FnMut(u32) -> Result<bool> + Send + 's>;

/// A sequence's part of a pass.
pub(crate) struct Step<'s> {
    pub decoder: &'s mut SpeculativeDecoder,
    pub work: Option<Work>, // taken once the pass has run
    /// For the target's draws.
    pub rng: &'s mut StdRng,
    /// Whether the text ends with a token; called for every emitted one in order.
    pub ends: Ends<'s>,
}

impl Step<'_> {
    /// Whether the step may succeed without its draft, with the same output: a text depends on its drafts only if both
    /// are sampled. Such a text waits for memory and keeps its draft. A row that is not finite may be one of the
    /// draft.
    fn fails_for_draft(&self, error: &Error) -> bool {
        let Some(Work::Verify(proposal)) = &self.work else { return false };
        let is_independent = self.decoder.drafting.settings.sampler.is_greedy() || proposal.draft.probs.is_none();
        match error {
            Error::Memory { .. } => is_independent,
            // A drafter's own scores that are not finite are an error: its file is damaged. On a device, its drafts
            // stay there.
            Error::NotFinite { .. } => is_independent && !error.is_of_draft(),
            _ => false,
        }
    }

    /// Frees the pages that a failed pass took, which other sequences may need.
    fn free_uncommitted(&mut self) {
        let SpeculativeDecoder { backend, state, .. } = &mut *self.decoder;
        backend.trim(state);
    }

    /// Drops up to `most` of the draft's last tokens. Returns whether there were any.
    fn shorten_draft(&mut self, most: usize) -> bool {
        let Some(Work::Verify(proposal)) = &mut self.work else { return false };
        let kept = proposal.draft.tokens.len().saturating_sub(most);
        proposal.shorten(kept)
    }

    /// Frees memory: shortens the draft or, if there is none, drops the drafters' pages. Returns whether there was
    /// either.
    pub fn give_up_drafts(&mut self) -> bool {
        self.shorten_draft(1) || self.decoder.drafting.drafters.release()
    }
}

/// Result of a step.
pub(crate) enum Done {
    /// Tokens of a prompt were read; after the last ones, the next token is known.
    Prompt(Option<FirstToken>),
    /// Tokens of a prompt were read; those after them have these log-probabilities.
    Scored(Vec<TokenLogprobs>),
    /// A round is complete.
    Round(Box<RoundResult>),
}

impl SpeculativeDecoder {
    /// An empty sequence without drafters.
    pub fn new(backend: Backend, state: SequenceState, sampler: Sampler) -> Self {
        Self { backend, state, drafting: Drafting::new(sampler) }
    }

    /// See [`Drafting::propose`].
    ///
    /// # Errors
    /// As [`Drafting::propose`].
    pub fn propose(&mut self, max_rows: usize, others: OtherSequences) -> Result<Proposal> {
        self.drafting.propose(&self.state, max_rows, others)
    }

    /// Completes a proposal: see [`complete`].
    ///
    /// # Errors
    /// The drafter's.
    pub fn complete(&mut self, proposal: &mut Proposal, cancel: &Cancel) -> Result<()> {
        complete(&mut [Proposing { decoder: self, proposal, cancel }]).pop().unwrap_or(Ok(()))
    }

    /// The sequence as it is, to be restored. Pages are shared until they are written.
    ///
    /// # Errors
    /// The device's.
    pub fn snapshot(&self) -> Result<Snapshot> {
        let device = self.backend.device.as_ref();
        let len = self.state.len();
        let device = device.map(|device| device.models.fork(&mut device.sequence.lock(), len)).transpose()?;
        Ok(Snapshot { state: self.state.fork(), device })
    }

    /// Returns to a snapshot.
    pub fn restore(&mut self, snapshot: Snapshot) {
        self.state = snapshot.state;
        if let Some((DeviceSequence { sequence, .. }, before)) = self.backend.device.as_ref().zip(snapshot.device) {
            *sequence.lock() = before;
        }
    }

    /// One pass over `ids`: all rows are kept, no outputs requested.
    ///
    /// # Errors
    /// The pass's; nothing is kept then.
    pub fn read(&mut self, ids: &[u32]) -> Result<()> {
        self.forward(ids, SequenceState::begin_whole_round, OutputRows::None, |_| Ok(ids.len()))
    }

    /// One pass over `ids` outside any generation, in a round that `begin` begins. `keep` returns the number of rows to
    /// commit, from the requested outputs.
    ///
    /// # Errors
    /// The pass's, or those of `keep`; nothing is kept then.
    pub fn forward(
        &mut self,
        ids: &[u32],
        begin: for<'s> fn(&'s mut SequenceState, usize) -> Result<Round<'s>>,
        outputs: OutputRows,
        keep: impl FnOnce(&mut ForwardOutput<'_>) -> Result<usize>,
    ) -> Result<()> {
        let round = begin(&mut self.state, ids.len())?;
        if let Some(device) = &self.backend.device {
            let mut pass = device.pass(ids, &round, outputs)?;
            round.commit(keep(&mut ForwardOutput::Device(pass.output(0)))?);
            return Ok(());
        }
        let mut batch = Batch::of(ids, round)?;
        let request = Request::of(&batch, outputs);
        let output = self.backend.model.forward(&mut batch, &request)?;
        let keep = keep(&mut ForwardOutput::Cpu(output))?;
        batch.into_rounds().into_iter().for_each(|round| round.commit(keep));
        Ok(())
    }
}

/// A sequence whose proposal may need a model to complete it.
pub(crate) struct Proposing<'a> {
    pub decoder: &'a mut SpeculativeDecoder,
    pub proposal: &'a mut Proposal,
    pub cancel: &'a Cancel,
}

impl Proposing<'_> {
    fn chain_draft(&mut self) -> Option<ChainDraft<'_>> {
        self.decoder.drafting.chain_draft(&self.decoder.state, self.proposal, self.cancel)
    }

    fn draft_alone(&mut self) -> Result<()> {
        self.decoder.drafting.draft_alone(&self.decoder.state, self.proposal, self.cancel)
    }

    /// If memory is exhausted, frees that of the draft models and ends the draft where it is.
    fn handle_out_of_memory<T>(&mut self, result: Result<T>) -> Result<()> {
        match result {
            Err(Error::Memory { .. }) => {
                self.decoder.drafting.drafters.release();
                self.proposal.planned_len = self.proposal.draft.tokens.len();
                Ok(())
            }
            other => other.map(drop),
        }
    }

    /// Truncates the draft before the first token that the target cannot read. Drafts that stay on
    /// the device are not checked: it chose them.
    fn drop_unreadable(&mut self) {
        let backend = &self.decoder.backend;
        let vocab = backend.model.num_readable_tokens();
        let unreadable = |token: u32| token as usize >= vocab && (backend.device.is_none() || token != DRAFTED);
        let draft = &mut self.proposal.draft;
        if let Some(readable) = draft.tokens.iter().position(|token| unreadable(*token)) {
            draft.drop_from(readable);
            self.proposal.planned_len = readable;
        }
    }
}

/// Makes the planned drafts of models: for every draft position, one pass of each model over the rows of the sequences
/// that draft there. An error or a panic is that of the sequence that caused it.
pub(crate) fn complete(proposing: &mut [Proposing<'_>]) -> Vec<Result<()>> {
    let draft_alone = |one: &mut Proposing<'_>| {
        let drafted = Error::catch(|| one.draft_alone());
        one.handle_out_of_memory(drafted)
    };
    let mut done: Vec<_> = proposing.iter_mut().map(draft_alone).collect();
    loop {
        proposing.iter_mut().for_each(Proposing::drop_unreadable);
        let before: Vec<_> = proposing.iter().map(|one| one.proposal.draft.tokens.len()).collect();
        let mut open = Vec::new();
        for (i, (one, done)) in proposing.iter_mut().zip(&mut done).enumerate().filter(|(_, (_, done))| done.is_ok()) {
            match Error::catch(move || Ok(one.chain_draft())) {
                Ok(draft) => open.extend(draft.map(|draft| (i, draft))),
                Err(error) => *done = Err(error),
            }
        }
        if open.is_empty() {
            return done;
        }
        for (i, result, time) in step_chains(open) {
            let proposal = &mut *proposing[i].proposal;
            if let Some(drafter) = proposal.decision.plan.drafter() {
                let tokens = *result.as_ref().unwrap_or(&0);
                count_call(&mut proposal.calls, Call { drafter, tokens, time });
            }
            proposal.record_step(before[i], time);
            done[i] = proposing[i].handle_out_of_memory(result);
        }
    }
}

/// One step of every chain, those of one model in one pass: the drafted tokens, and each one's share of the time.
fn step_chains(mut open: Vec<(usize, ChainDraft<'_>)>) -> Vec<(usize, Result<usize>, Duration)> {
    let mut stepped = Vec::with_capacity(open.len());
    while let Some(first) = open.pop() {
        let (same, others): (Vec<_>, Vec<_>) = open.into_iter().partition(|(_, draft)| draft.shares_model(&first.1));
        open = others;
        let (sequences, mut drafts): (Vec<_>, Vec<_>) = std::iter::once(first).chain(same).unzip();
        let start = Instant::now();
        let results = extend_drafts(&mut drafts);
        let share = start.elapsed() / drafts.len() as u32;
        stepped.extend(sequences.into_iter().zip(results).map(|(i, result)| (i, result, share)));
    }
    stepped
}

/// Runs every sequence's step in one pass of the model. A step's result does not depend on the others; if it fails, its
/// sequence is unchanged except for earlier chunks of a prompt. A panic is an error of the sequence that caused it.
pub(crate) fn run_pass(steps: &mut [Step<'_>]) -> Vec<Result<Done>> {
    let run: fn(&mut [Step<'_>]) -> Result<Vec<Result<Done>>> = match steps.first() {
        Some(first) if first.decoder.backend.device.is_some() => device_pass,
        _ => cpu_pass,
    };
    if one_pass(steps) {
        match Error::catch(|| run(steps)) {
            Ok(done) => {
                let steps = steps.iter_mut().zip(&done);
                steps.filter(|(_, done)| done.is_err()).for_each(|(step, _)| step.free_uncommitted());
                return done;
            }
            Err(error) => {
                steps.iter_mut().for_each(Step::free_uncommitted);
                if steps.len() == 1 && !steps[0].fails_for_draft(&error) {
                    return vec![Err(error)];
                }
                // Rows have the same bits in a batch of their own, so running each alone finds the sequence at fault.
                tracing::debug!(%error, "a pass failed; each of its sequences runs alone");
            }
        }
    }
    let alone = |step: &mut Step<'_>| run(std::slice::from_mut(step))?.pop().unwrap_or_else(|| Ok(Done::Prompt(None)));
    let with_retry = |step: &mut Step<'_>| {
        let done = match Error::catch(|| alone(step)) {
            Err(error) if step.fails_for_draft(&error) && step.shorten_draft(usize::MAX) => {
                Error::catch(|| alone(step))
            }
            done => done,
        };
        if done.is_err() {
            step.free_uncommitted();
        }
        done
    };
    steps.iter_mut().map(with_retry).collect()
}

/// Whether the sequences can be in one pass: on a device, they store K and V in the same way.
fn one_pass(steps: &[Step<'_>]) -> bool {
    let mut devices = steps.iter().map(|step| step.decoder.backend.device.as_ref());
    let Some(first) = devices.next() else { return true };
    devices.all(|device| match (first, device) {
        (None, None) => true,
        (Some(first), Some(device)) => first.shares_passes(device),
        _ => false,
    })
}

/// A step whose rows are in a pass. `R`: which of them have outputs, or the outputs' indices in [`Output`].
struct Unfinished<'p, 's, R> {
    drafting: &'p mut Drafting,
    work: &'p mut Option<Work>,
    rng: &'p mut StdRng,
    ends: &'p mut Ends<'s>,
    counts: OtherSequences,
    logits: R,
    hidden: R,
}

impl<R> Unfinished<'_, '_, R> {
    /// Finishes the step after its pass, which took `verify` for the rows of `all`, and commits those of its `round`
    /// that it keeps.
    ///
    /// # Errors
    /// Those of the step, and its panic; no rows are committed then.
    fn finish(
        self,
        output: Option<ForwardOutput<'_>>,
        round: Round<'_>,
        verify: Duration,
        all: OtherSequences,
    ) -> Result<Done> {
        let Self { drafting, work, rng, ends, counts, .. } = self;
        let timing = PassTiming { position: round.position(), verify, others: all.without(counts) };
        let (keep, done) = Error::catch(|| finish(drafting, work.take(), output, rng, ends, timing))?;
        round.commit(keep);
        Ok(done)
    }
}

impl Unfinished<'_, '_, Range<usize>> {
    /// Accepts the draft of a round from its rows of a pass. This reads whole rows of logits, and nothing of
    /// other sequences, so the sequences of a pass do it in parallel.
    fn accept(&mut self, output: Option<&Output>) {
        let (Some(Work::Verify(proposal)), Some(output)) = (&mut *self.work, output) else { return };
        let Proposal { draft, verified, .. } = &mut **proposal;
        let mut output = ForwardOutput::Cpu(output.clone());
        *verified = Some(Error::catch(|| self.drafting.accept(draft, &mut output, self.rng)));
    }
}

/// One pass of the model over the rows of all steps.
///
/// # Errors
/// If the pass failed; all rounds are dropped then, and no step's work is taken.
fn cpu_pass(steps: &mut [Step<'_>]) -> Result<Vec<Result<Done>>> {
    let (mut batch, mut request, mut unfinished) = (Batch::new(), Request::default(), Vec::with_capacity(steps.len()));
    let Some(model) = steps.first().map(|step| step.decoder.backend.model.clone()) else { return Ok(Vec::new()) };
    for Step { decoder, work, rng, ends } in steps.iter_mut() {
        let SpeculativeDecoder { state, drafting, .. } = &mut **decoder;
        let Some(planned) = &*work else { continue };
        let counts = planned.counts();
        let WorkRows { ids, logits, hidden } = planned.rows(drafting);
        let first = batch.rows();
        let round = planned.begin_round(state, ids.len())?;
        batch.push(&ids, round)?;
        let logits = logits.add_to(&mut request.logits, first, ids.len());
        let hidden = hidden.add_to(&mut request.hidden, first, ids.len());
        request.taps.extend(drafting.drafters.reads().taps);
        unfinished.push(Unfinished { drafting, work, rng, ends, counts, logits, hidden });
    }
    request.taps.sort_unstable();
    request.taps.dedup();
    let all = unfinished.iter().map(|step| step.counts).fold(OtherSequences::default(), OtherSequences::add);
    let start = Instant::now();
    let output = model.forward(&mut batch, &request)?;
    let verify = start.elapsed();
    // Before the first step is finished: after that no error concerns the whole pass.
    let outputs = unfinished.iter().map(|Unfinished { drafting, logits, hidden, .. }| -> Result<_> {
        let rows = Output {
            logits: output.logits.narrow(0, logits.start, logits.len())?,
            hidden: output.hidden.narrow(0, hidden.start, hidden.len())?,
            taps: drafting.drafters.reads().taps_of(&request.taps, &output.taps, hidden.clone())?,
        };
        Ok((!hidden.is_empty()).then_some(rows))
    });
    let outputs = outputs.collect::<Result<Vec<_>>>()?;
    for_each(unfinished.iter_mut().zip(&outputs), |(step, output)| step.accept(output.as_ref()));
    let steps = unfinished.into_iter().zip(outputs).zip(batch.into_rounds());
    Ok(steps.map(|((step, output), round)| step.finish(output.map(ForwardOutput::Cpu), round, verify, all)).collect())
}

/// One pass on a device over the rows of all steps, whose sequences share passes.
///
/// # Errors
/// If the pass failed; all rounds are dropped then, and no step's work is taken.
fn device_pass(steps: &mut [Step<'_>]) -> Result<Vec<Result<Done>>> {
    let (mut parts, mut unfinished, mut models) =
        (Vec::with_capacity(steps.len()), Vec::with_capacity(steps.len()), None);
    for Step { decoder, work, rng, ends } in steps.iter_mut() {
        let SpeculativeDecoder { backend, state, drafting } = &mut **decoder;
        let (Some(device), Some(planned)) = (&backend.device, &*work) else { continue };
        models = Some(&device.models);
        let counts = planned.counts();
        let WorkRows { ids, logits, hidden } = planned.rows(drafting);
        let round = planned.begin_round(state, ids.len())?;
        parts.push(device.part(ids, &round, logits, hidden));
        unfinished.push((Unfinished { drafting, work, rng, ends, counts, logits, hidden }, round));
    }
    let Some(models) = models else { return Ok(Vec::new()) };
    let all = unfinished.iter().map(|(step, ..)| step.counts).fold(OtherSequences::default(), OtherSequences::add);
    let start = Instant::now();
    let mut pass = DevicePass::run(models, parts)?;
    // Before the first step is finished: after that no error concerns the whole pass.
    let with_logits = unfinished.iter().filter(|(step, _)| step.logits != OutputRows::None);
    let with_logits = with_logits.map(|(step, _)| &step.drafting.settings);
    if with_logits.clone().any(Settings::accepts_on_device) {
        pass.accept()?;
    } else if with_logits.clone().next().is_some() {
        pass.wait(with_logits.filter_map(Settings::largest_logits).min())?;
    }
    let verify = start.elapsed();
    let steps = unfinished.into_iter().enumerate().map(|(i, (step, round))| {
        // Rows with logits have hidden states.
        let output = (step.hidden != OutputRows::None).then(|| ForwardOutput::Device(pass.output(i)));
        step.finish(output, round, verify, all)
    });
    Ok(steps.collect())
}

/// Finishes a sequence's step, and returns the number of rows to keep.
fn finish(
    drafting: &mut Drafting,
    work: Option<Work>,
    output: Option<ForwardOutput<'_>>,
    rng: &mut StdRng,
    ends: &mut Ends<'_>,
    timing: PassTiming,
) -> Result<(usize, Done)> {
    match (work, output) {
        (Some(Work::Prompt { ids, is_last, scored }), mut output) => {
            let next = drafting.read_prompt(&ids, is_last, output.as_mut(), rng)?;
            let done = match scored.zip(output) {
                Some((scored, mut output)) => Done::Scored(drafting.score(&scored, &mut output)?),
                None => Done::Prompt(next),
            };
            Ok((ids.len(), done))
        }
        (Some(Work::Verify(proposal)), Some(output)) => {
            let round = drafting.verify(*proposal, output, ends, rng, timing)?;
            Ok((round.tokens.len(), Done::Round(Box::new(round))))
        }
        (Some(Work::Verify(_)) | None, _) => Ok((0, Done::Prompt(None))),
    }
}
