//! One round of speculative decoding, in the order of the papers: draft, verify, accept, commit.

mod accept;
mod mtp;

pub use accept::{Accepted, Draft, accept};
pub use mtp::{DraftSampling, draft};

use std::time::{Duration, Instant};

use candle_core::Tensor;
use rand::Rng;

use crate::Result;
use crate::gemma4::{Assistant, Target, Wanted};
use crate::kv::KvCache;
use crate::nn::F32View;
use crate::sampler::Sampler;

/// Where decoding stands between rounds: the cache holds every emitted token except `last`.
#[derive(Clone)]
pub struct Frontier {
    /// The newest token, which the target has not read yet.
    pub last: u32,
    /// `(1, hidden)`: the target's state, after the final norm, that predicted `last`.
    pub hidden: Tensor,
}

/// What a round is made of; fixed for a generation.
pub struct Speculator<'a> {
    /// Verifies.
    pub target: &'a Target,
    /// Drafts; without one every round is a plain step.
    pub assistant: Option<&'a Assistant>,
    /// Turns logits into the distribution that is wanted.
    pub sampler: &'a Sampler,
    /// How drafts are chosen.
    pub drafts: DraftSampling,
}

/// What a round did.
#[derive(Clone, Debug, Default)]
pub struct Round {
    /// The emitted tokens, at least one.
    pub tokens: Vec<u32>,
    /// Tokens drafted.
    pub drafted: usize,
    /// Drafted tokens that were emitted.
    pub accepted: usize,
    /// Time spent drafting.
    pub draft_time: Duration,
    /// Time spent in the target's pass.
    pub verify_time: Duration,
}

impl Speculator<'_> {
    /// One round: drafts up to `num_drafts` tokens, verifies them in one pass of the target, and keeps what the target
    /// would have written. `ends(token)` is asked for every emitted token in order; the round is cut after the first
    /// for which it says yes, before anything is committed.
    ///
    /// On an error nothing is committed and `frontier` is as before.
    ///
    /// # Errors
    /// If the context is full, or the checkpoint's numbers are none.
    pub fn round(
        &self,
        kv: &mut KvCache,
        frontier: &mut Frontier,
        num_drafts: usize,
        mut ends: impl FnMut(u32) -> Result<bool>,
        rng: &mut impl Rng,
    ) -> Result<Round> {
        let start = Instant::now();
        let draft = match self.assistant {
            Some(assistant) if num_drafts > 0 => draft(assistant, self, frontier, kv.committed(), num_drafts, rng)?,
            _ => Draft::default(),
        };
        let draft_time = start.elapsed();

        let start = Instant::now();
        let rows: Vec<u32> = std::iter::once(frontier.last).chain(draft.tokens.iter().copied()).collect();
        let mut round = kv.begin_round(rows.len())?;
        let Some(output) = self.target.forward(&rows, &mut round, Wanted::All)? else { return Ok(Round::default()) };
        let verify_time = start.elapsed();

        let (_, vocab) = output.logits.dims2()?;
        let logits = F32View::new(&output.logits)?;
        let target_probs: Result<Vec<_>> =
            logits.chunks_exact(vocab).map(|logits| self.sampler.distribution(None, logits)).collect();
        let accepted = accept(&draft, &target_probs?, rng);

        let mut tokens = draft.tokens[..accepted.count].to_vec();
        tokens.push(accepted.next);
        let mut emitted = 0;
        for token in &tokens {
            emitted += 1;
            if ends(*token)? {
                break;
            }
        }
        tokens.truncate(emitted);

        // `last` and all emitted tokens but the newest, whose state is the row that predicted it.
        frontier.hidden = output.hidden.narrow(0, emitted - 1, 1)?.contiguous()?;
        frontier.last = tokens[emitted - 1];
        round.commit(emitted);
        let accepted = accepted.count.min(emitted);
        Ok(Round { tokens, drafted: draft.tokens.len(), accepted, draft_time, verify_time })
    }
}
