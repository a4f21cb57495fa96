//! Per-sequence speculation: tokens, drafters and planner. Proposes a draft before the pass and verifies it after.

use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand::rngs::StdRng;

use super::chain::ChainDraft;
use super::drafter_list::DrafterList;
use super::drafting_context::DraftingContext;
use super::proposal::{Call, Verified, outcomes};
use super::round_result::PassTiming;
use super::{
    AcceptResult, Accepted, AvailableDrafter, BlockSize, Cancel, Confidence, Context, Costs, DecisionInput,
    DecodeState, Draft, DraftCost, DraftOutcome, FirstToken, ForwardOutput, ModelSteps, Observation, Order,
    OtherSequences, Plan, Planner, Proposal, RoundResult, Settings, States,
};
use crate::kv::SequenceState;
use crate::nn::{F32View, map};
use crate::sampler::{Sampler, TokenLogprobs};
use crate::{Error, Result};

/// Tokens of a prompt whose log-probabilities are reported.
pub(crate) struct Scored {
    /// The token after each row.
    pub tokens: Vec<u32>,
    /// Number of most probable tokens to report with each.
    pub top: usize,
}

/// One sequence's tokens, drafters and planner.
pub(crate) struct Drafting {
    /// The tokens whose rows are in the state, followed by the last token, if there is one.
    pub tokens: Vec<u32>,
    pub newest: Option<DecodeState>,
    pub drafters: DrafterList,
    planner: Planner,
    pub(super) settings: Settings,
    rng: StdRng, // for drafts; the target's draws have their own, independent of the drafters
}

impl Drafting {
    /// An empty sequence without drafters.
    pub fn new(sampler: Sampler) -> Self {
        Self {
            tokens: Vec::new(),
            newest: None,
            drafters: DrafterList::default(),
            planner: Planner::new(BlockSize::default(), None, &[], Costs::default()),
            settings: Settings::plain(sampler),
            rng: StdRng::seed_from_u64(0),
        }
    }

    /// Applies a generation's settings.
    pub fn configure(&mut self, settings: Settings, planner: Planner, rng: StdRng) {
        (self.settings, self.planner, self.rng) = (settings, planner, rng);
    }

    pub fn costs(&self) -> &Costs {
        self.planner.costs()
    }

    /// Whether the constraint allows nothing after the last token.
    pub fn is_complete(&self) -> bool {
        self.settings.constraint.as_ref().is_some_and(|constraint| constraint.lock().is_complete())
    }

    /// Time spent in the constraint since the generation began.
    pub fn constraint_time(&self) -> Duration {
        self.settings.constraint.as_ref().map_or(Duration::ZERO, |constraint| constraint.lock().time())
    }

    /// Whether the planner chooses the rows.
    pub fn chooses(&self) -> bool {
        self.planner.chooses()
    }

    /// Continues a generation after `newest`. Returns the time that the drafters took; the next round reports their
    /// panics.
    pub fn begin(&mut self, newest: DecodeState) -> Duration {
        self.tokens.push(newest.last);
        self.newest = Some(newest);
        let start = Instant::now();
        self.drafters.begin(&self.tokens);
        start.elapsed()
    }

    /// Truncates to the first `len` tokens, all of them in the state, and `newest`, which followed them before.
    pub fn truncate(&mut self, len: usize, newest: Option<DecodeState>) {
        self.tokens.truncate(len);
        self.tokens.extend(newest.iter().map(|newest| newest.last));
        self.newest = newest;
        self.drafters.truncate(self.tokens.len());
    }

    /// Takes back a proposal that was not verified: the next one is drawn from the same random numbers.
    pub fn take_back(&mut self, proposal: Proposal) {
        self.rng = proposal.rng;
    }

    /// Records prompt rows `ids`. At the end of the prompt, `output` has the last row's results,
    /// and the next token is drawn.
    ///
    /// # Errors
    /// If a logit is NaN or infinite, or the device's.
    pub fn read_prompt(
        &mut self,
        ids: &[u32],
        draws: bool,
        output: Option<&mut ForwardOutput<'_>>,
        rng: &mut StdRng,
    ) -> Result<Option<FirstToken>> {
        // The last token's row is now in the state.
        if self.newest.take().is_some() {
            self.tokens.pop();
        }
        let first = self.tokens.len();
        self.tokens.extend(ids);
        self.drafters.for_each(|_, drafter| drafter.read_prompt(&self.tokens))?;
        let Some(output) = output else { return Ok(None) };
        if self.drafters.reads().hidden {
            let states = output.states(ids.len())?;
            let seen = states.observed(&self.tokens, first, None);
            self.drafters.for_each(|_, drafter| drafter.observe(&seen))?;
        }
        if !draws {
            return Ok(None);
        }
        let (Accepted { next: last, .. }, logprobs) =
            output.verify(&mut Draft::default(), &self.settings, &self.tokens, rng)?;
        self.settings.read(&[last])?;
        self.settings.commit();
        let hidden = output.advance(output.last_row()?, last, Confidence::Report)?;
        Ok(Some(FirstToken { state: DecodeState { last, hidden }, logprobs }))
    }

    /// The target's log-probabilities of the tokens after the rows of `output`, all of which have logits. The sequence
    /// continues with the last of them.
    ///
    /// # Errors
    /// If a logit is NaN or infinite, or the device's.
    pub fn score(&self, scored: &Scored, output: &mut ForwardOutput<'_>) -> Result<Vec<TokenLogprobs>> {
        let isa = self.settings.sampler.isa();
        let logprobs = {
            let logits = output.logits(scored.tokens.len())?;
            let rows = logits.chunks_exact(logits.len() / scored.tokens.len()).zip(&scored.tokens);
            map(rows, logits.len(), |(row, token)| TokenLogprobs::of(isa, row, *token, scored.top))
        };
        if let Some(of) = logprobs.iter().find(|of| of.logprob.is_nan()) {
            return Err(Error::logits(of.logprob));
        }
        if let Some(token) = scored.tokens.last() {
            // A device may have accepted drafts in this pass, and have taken the rows for some.
            output.advance(output.last_row()?, *token, Confidence::Omit)?;
        }
        Ok(logprobs)
    }

    /// Plans a draft for a round of up to `max_rows` rows besides those of `others`. A prompt lookup draft is already
    /// made, a model's is still empty. It has no visible effect before it is verified, and may be discarded.
    ///
    /// # Errors
    /// A drafter's, including from observing the last round.
    pub fn propose(&mut self, state: &SequenceState, max_rows: usize, others: OtherSequences) -> Result<Proposal> {
        self.drafters.check()?;
        let (start, rng) = (Instant::now(), self.rng.clone());
        let max_rows = max_rows.clamp(1, state.kv().max_round_rows());
        let most = max_rows - 1;
        let constraint = self.settings.constraint.as_ref().filter(|_| self.drafters.offers_forced());
        let forced = constraint.map_or_else(Vec::new, |constraint| constraint.lock().forced(most));
        let (order, pauses_models) = (self.settings.order, self.planner.pauses_models());
        let Some(mut drafting) = self.drafting_context(state, &forced) else { return Ok(Proposal::nothing(rng)) };
        let (mut offered, mut found, mut calls) = (Vec::new(), Vec::new(), Vec::new());
        for i in 0..drafting.drafters.len() {
            let (kind, cost) = (drafting.drafters[i].kind(), drafting.drafters[i].cost());
            let mut draft = Draft::default();
            let tokens = match cost {
                _ if most == 0 => 0,
                DraftCost::PerToken if pauses_models => 0,
                // A model drafts only within its context; past it, other drafters do.
                DraftCost::PerToken => most.min(drafting.left(i)),
                DraftCost::Once | DraftCost::Forced => drafting.look_up(i, most, &mut draft, &mut calls)?,
            };
            found.push(draft);
            if tokens > 0 {
                offered.push(AvailableDrafter { drafter: i, kind, cost, tokens });
                if order == Order::Priority {
                    break;
                }
            }
        }
        let offer = DecisionInput { context: state.len(), max_rows, drafters: &offered, others };
        let decision = self.planner.decide(&offer);
        let (draft, planned_len) = match decision.plan {
            Plan::Plain => (Draft::default(), 0),
            Plan::Draft { drafter, tokens } => {
                let mut draft = found[drafter].clone();
                draft.truncate(tokens);
                (draft, tokens)
            }
        };
        let (time, plain) = (start.elapsed(), Proposal::nothing(rng));
        Ok(Proposal { draft, planned_len, decision, calls, found, forced, time, ..plain })
    }

    /// The drafters with their context; `None` if there is no last token to draft after.
    fn drafting_context<'a>(&'a mut self, state: &'a SequenceState, forced: &'a [u32]) -> Option<DraftingContext<'a>> {
        let context = Context {
            tokens: &self.tokens,
            hidden: &self.newest.as_ref()?.hidden,
            forced,
            kv: state.kv().committed(),
            sampler: &self.settings.sampler,
            drafts: self.settings.drafts,
            confidence: self.settings.confidence,
        };
        let constraint = self.settings.constraint.as_ref();
        Some(DraftingContext { context, drafters: &mut self.drafters.all, constraint, rng: &mut self.rng })
    }

    /// The next draft step, if other sequences can share it; `None` if the draft is complete, or
    /// its drafter is not a chain.
    pub(super) fn chain_draft<'a>(
        &'a mut self,
        state: &'a SequenceState,
        proposal: &'a mut Proposal,
        cancel: &Cancel,
    ) -> Option<ChainDraft<'a>> {
        let drafter = proposal.incomplete(cancel)?;
        let DraftingContext { context, drafters, constraint, rng } = self.drafting_context(state, &proposal.forced)?;
        let chain = drafters[drafter].chain()?;
        Some(ChainDraft { model: chain.model(), chain, context, constraint, draft: &mut proposal.draft, rng })
    }

    /// Completes a draft whose drafter is not a chain, token by token because it may be cancelled.
    ///
    /// # Errors
    /// The drafter's.
    pub(super) fn draft_alone(
        &mut self,
        state: &SequenceState,
        proposal: &mut Proposal,
        cancel: &Cancel,
    ) -> Result<()> {
        while let Some(drafter) = proposal.incomplete(cancel)
            && self.drafters.all[drafter].chain().is_none()
        {
            let start = Instant::now();
            let Proposal { draft, calls, forced, .. } = &mut *proposal;
            let Some(mut drafting) = self.drafting_context(state, forced) else { break };
            let before = draft.tokens.len();
            drafting.draft(drafter, before + 1, draft, calls)?;
            proposal.record_step(before, start.elapsed());
        }
        Ok(())
    }

    /// The tokens of a proposal's rows.
    pub fn rows(&self, proposal: &Proposal) -> Vec<u32> {
        self.newest.iter().map(|newest| newest.last).chain(proposal.draft.tokens.iter().copied()).collect()
    }

    /// Accepts a draft after its pass, and draws the target's next token.
    ///
    /// # Errors
    /// If a logit is NaN or infinite, or those of the logits processor or the constraint.
    pub fn accept(&self, draft: &mut Draft, output: &mut ForwardOutput<'_>, rng: &mut StdRng) -> Result<Verified> {
        let start = Instant::now();
        let (accepted, logprobs) = output.verify(draft, &self.settings, &self.tokens, rng)?;
        Ok(Verified { accepted, logprobs, time: start.elapsed() })
    }

    /// Completes a round after its pass, of a proposal whose draft may be [accepted](Drafting::accept) already.
    /// `ends(token)` is called for every emitted token in order; the round is cut after the first for which it returns
    /// true. The caller commits as many rows as tokens were emitted. On an error the tokens are unchanged, but not the
    /// constraint and the text decoder.
    ///
    /// # Errors
    /// If a logit is NaN or infinite, or those of `ends`.
    pub fn verify(
        &mut self,
        mut proposal: Proposal,
        mut output: ForwardOutput<'_>,
        ends: &mut dyn FnMut(u32) -> Result<bool>,
        rng: &mut StdRng,
        timing: PassTiming,
    ) -> Result<RoundResult> {
        let (draft, verified) = (&mut proposal.draft, proposal.verified.take());
        let drafted = draft.tokens.len();
        let verified = verified.unwrap_or_else(|| self.accept(draft, &mut output, rng));
        let Verified { accepted: Accepted { count, next }, mut logprobs, time: read_time } = verified?;
        let start = Instant::now();
        let mut tokens = proposal.draft.tokens[..count].to_vec();
        tokens.push(next);
        let emitted = self.emitted(&tokens, ends)?;
        tokens.truncate(emitted);
        logprobs.truncate(emitted);

        let hidden_l2 = self.hidden_l2()?;
        // The rows of the previous last token and of all emitted ones but the last, whose state is
        // the row that predicted it.
        let last_token = tokens[emitted - 1];
        let hidden = output.advance(emitted - 1, last_token, self.settings.confidence)?;
        let states = if self.drafters.reads().hidden { output.states(emitted)? } else { States::default() };
        drop(output);
        let last = self.newest.replace(DecodeState { last: last_token, hidden }).map_or(next, |newest| newest.last);
        self.tokens.extend(&tokens);
        let accepted = count.min(emitted);
        let drafter = proposal.decision.plan.drafter().filter(|_| drafted > 0);
        let result = drafter.map(|drafter| (drafter, AcceptResult { drafted, accepted }));
        self.drafters.observe(&self.tokens, timing.position, &states, result);
        let accept_time = read_time + start.elapsed();
        let round = RoundResult { proposal, timing, tokens, logprobs, accepted, last, hidden_l2, accept_time };
        self.report(&round);
        Ok(round)
    }

    /// L2 norm of the hidden state that predicted the last token; 0 unless confidence is reported.
    fn hidden_l2(&self) -> Result<f64> {
        match (self.settings.confidence, &self.newest) {
            (Confidence::Report, Some(newest)) => {
                Ok(F32View::new(&newest.hidden)?.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt())
            }
            _ => Ok(0.0),
        }
    }

    /// Passes a round's tokens to the constraint and `ends`, up to one that ends the text; returns their number. If the
    /// constraint fails at a token after the first, the round ends before it: it fails again as the next round's first.
    fn emitted(&mut self, tokens: &[u32], ends: &mut dyn FnMut(u32) -> Result<bool>) -> Result<usize> {
        let mut emitted = 0;
        for token in tokens {
            let complete = match self.settings.read(&tokens[..=emitted]) {
                Err(_) if emitted > 0 => break,
                complete => complete?,
            };
            emitted += 1;
            if ends(*token)? || complete {
                break;
            }
        }
        self.settings.commit();
        Ok(emitted)
    }

    /// Tells the planner what a round cost and achieved.
    fn report(&mut self, round: &RoundResult) {
        let RoundResult { proposal, timing, accepted, .. } = round;
        let (drafter, drafted, accepted) = (proposal.decision.plan.drafter(), proposal.draft.tokens.len(), *accepted);
        // Only the planned drafter's model drafts.
        let steps = proposal.calls.iter().find(|call| self.drafters.is_model(call.drafter));
        let of_model = steps.filter(|_| !proposal.is_shortened).map_or(0, |call| call.tokens);
        // If a constraint rejected the model's next token before the pass, it counts as rejected here.
        let dropped = usize::from(accepted == drafted && of_model > drafted);
        let milliseconds = |time: Duration| 1e3 * time.as_secs_f64();
        let kind = |call: &Call| self.drafters.all[call.drafter].kind();
        self.planner.observe(&Observation {
            context: timing.position,
            rows: drafted + 1,
            others: timing.others,
            verify_ms: milliseconds(timing.verify + round.accept_time),
            steps: steps.map(|call| ModelSteps { kind: kind(call), tokens: call.tokens, ms: milliseconds(call.time) }),
            verified: drafter.map(|drafter| DraftOutcome { drafter, drafted: drafted + dropped, accepted }),
            found: &outcomes(&proposal.found, &round.tokens),
            emitted: round.tokens.len(),
        });
    }
}
