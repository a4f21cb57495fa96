//! One sequence and its rounds: propose, verify, accept, commit.

use std::time::{Duration, Instant};

use candle_core::Tensor;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::{
    Accepted, Cancel, Confidence, Confirmed, Context, Costs, Decision, Draft, DraftCost, DraftSampling, Drafter,
    DrafterKind, DrafterOptions, Found, NgramCache, Observation, Offer, Offered, Passes, Plan, Planner,
    SimulatedAcceptance, Verdict, Verified, Why, confirm,
};
use crate::Result;
use crate::gemma4::Wanted;
use crate::kv::KvCache;
use crate::nn::F32View;
use crate::sampler::Sampler;

/// Where decoding stands between rounds: the cache holds every emitted token except `last`.
#[derive(Clone)]
pub struct Frontier {
    /// The newest token, which the target has not read yet.
    pub last: u32,
    /// `(1, hidden)`: the target's state, after the final norm, that predicted `last`. Where the models run on a device,
    /// which has it, it is empty unless a trace looks at it.
    pub hidden: Tensor,
}

/// Whose draft counts where several have one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// The first in the list that has one.
    Priority,
    /// The best per millisecond.
    Best,
}

/// What a generation asks for.
pub(crate) struct Settings {
    pub sampler: Sampler,
    pub drafts: DraftSampling,
    pub order: Order,
    pub confidence: Confidence,
    /// Accepts drafts by chance instead of by the target.
    pub simulated: Option<SimulatedAcceptance>,
}

/// A sequence with everything that drafting reads or changes, so that it can be moved to where drafts are made.
pub(crate) struct Speculator {
    pub passes: Passes,
    pub kv: KvCache,
    /// The tokens whose rows the cache has, and behind them the frontier's, if there is one.
    pub tokens: Vec<u32>,
    pub frontier: Option<Frontier>,
    drafters: Vec<Box<dyn Drafter>>,
    list: Vec<DrafterOptions>, // what the drafters were made from
    planner: Planner,
    settings: Settings,
    rng: StdRng, // of drafts; the target's draws have their own, so that they do not depend on who drafts when
}

/// What one drafter did in a round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub drafter: usize,
    pub tokens: usize,
    pub time: Duration,
}

/// A draft to be verified.
pub(crate) struct Proposal {
    draft: Draft,
    pub decision: Decision,
    calls: Vec<Call>,
    whose: Option<(usize, bool)>, // the drafter, and whether a model confirmed it
    found: Vec<Draft>,            // of every look-up
    time: Duration,
}

/// What a round did.
pub(crate) struct Round {
    /// The emitted tokens, at least one.
    pub tokens: Vec<u32>,
    pub draft: Draft,
    /// Drafted tokens that were emitted.
    pub accepted: usize,
    pub decision: Decision,
    pub calls: Vec<Call>,
    pub drafter: Option<usize>,
    pub confirmed: bool,
    /// The newest token before the round, and its position.
    pub last: u32,
    pub position: usize,
    /// Length of the hidden state that the drafts started from; 0 unless confidence is said.
    pub hidden_l2: f64,
    pub draft_time: Duration,
    pub verify_time: Duration,
    pub accept_time: Duration,
}

impl Speculator {
    /// An empty sequence without drafters.
    pub fn new(passes: Passes, kv: KvCache, sampler: Sampler) -> Self {
        let settings = Settings {
            sampler,
            drafts: DraftSampling::Greedy,
            order: Order::Priority,
            confidence: Confidence::Unsaid,
            simulated: None,
        };
        let planner = Planner::new(Default::default(), None, &[], Costs::default());
        let (tokens, drafters, list) = (Vec::new(), Vec::new(), Vec::new());
        let rng = StdRng::seed_from_u64(0);
        Self { passes, kv, tokens, frontier: None, drafters, list, planner, settings, rng }
    }

    /// Whether the drafters are those of `list`; if so they keep what they know.
    pub fn has(&self, list: &[DrafterOptions]) -> bool {
        self.list == list
    }

    pub fn set_drafters(&mut self, list: Vec<DrafterOptions>, drafters: Vec<Box<dyn Drafter>>) {
        (self.list, self.drafters) = (list, drafters);
    }

    /// What a generation asks for. `planner` is given what the drafters cost.
    pub fn configure(&mut self, settings: Settings, planner: impl FnOnce(&[DraftCost]) -> Planner, rng: StdRng) {
        let costs: Vec<_> = self.drafters.iter().map(|drafter| drafter.cost()).collect();
        self.planner = planner(&costs);
        self.settings = settings;
        self.rng = rng;
    }

    pub fn kinds(&self) -> Vec<DrafterKind> {
        self.drafters.iter().map(|drafter| drafter.kind()).collect()
    }

    pub fn costs(&self) -> &Costs {
        self.planner.costs()
    }

    /// Whether the planner chooses the rows.
    pub fn chooses(&self) -> bool {
        self.planner.chooses()
    }

    pub fn sampler(&self) -> &Sampler {
        &self.settings.sampler
    }

    pub fn learnt(&self) -> Option<NgramCache> {
        self.drafters.iter().find_map(|drafter| drafter.learnt())
    }

    /// A generation goes on behind `frontier`. Returns the time that the drafters took to take notice.
    pub fn begin(&mut self, frontier: Frontier) -> Duration {
        self.tokens.push(frontier.last);
        self.frontier = Some(frontier);
        let start = Instant::now();
        self.drafters.iter_mut().for_each(|drafter| drafter.begin(&self.tokens));
        start.elapsed()
    }

    /// Drafts for a round of up to `most_rows` rows. Nothing of it is visible before [`Speculator::verify`], and it may be
    /// thrown away.
    ///
    /// # Errors
    /// If a drafter's numbers are none.
    pub fn propose(&mut self, most_rows: usize, cancel: &Cancel) -> Result<Proposal> {
        let start = Instant::now();
        let Some(frontier) = &self.frontier else { return Ok(Proposal::nothing()) };
        let context = Context {
            tokens: &self.tokens,
            hidden: &frontier.hidden,
            kv: self.kv.committed(),
            sampler: &self.settings.sampler,
            drafts: self.settings.drafts,
            confidence: self.settings.confidence,
        };
        let most_rows = most_rows.clamp(1, self.kv.max_round_rows());
        let most = most_rows - 1;
        let mut desk = Desk { context, drafters: &mut self.drafters, rng: &mut self.rng, cancel, calls: Vec::new() };
        let (mut offered, mut found) = (Vec::new(), Vec::new());
        for i in 0..desk.drafters.len() {
            let (kind, cost) = (desk.drafters[i].kind(), desk.drafters[i].cost());
            let mut draft = Draft::default();
            let tokens = match cost {
                _ if most == 0 => 0,
                DraftCost::PerToken => most,
                DraftCost::Once => {
                    desk.draft(i, most, &mut draft)?;
                    draft.tokens.len()
                }
            };
            found.push(draft);
            if tokens > 0 {
                offered.push(Offered { drafter: i, kind, cost, tokens });
                if self.settings.order == Order::Priority {
                    break;
                }
            }
        }
        let offer = Offer { context: self.kv.len(), most_rows, drafters: &offered };
        let decision = self.planner.decide(&offer);
        let (mut draft, mut whose) = (Draft::default(), None);
        match decision.plan {
            Plan::Plain => {}
            Plan::Draft { drafter, tokens } => {
                draft = found[drafter].clone();
                if desk.drafters[drafter].cost() == DraftCost::PerToken {
                    desk.chain(drafter, tokens, &mut draft)?;
                }
                draft.truncate(tokens);
                whose = Some((drafter, false));
            }
            Plan::Confirm { model, look_up, agreed: long, otherwise } => {
                desk.chain(model, 1, &mut draft)?;
                self.passes.resolve(&mut draft.tokens)?;
                match confirm(draft, found[look_up].clone()) {
                    Confirmed::Yes(confirmed) => {
                        draft = confirmed;
                        draft.truncate(long);
                        whose = Some((look_up, true));
                    }
                    Confirmed::No(first) => {
                        draft = first;
                        desk.chain(model, otherwise, &mut draft)?;
                        whose = Some((model, false));
                    }
                }
            }
        }
        let calls = desk.calls;
        Ok(Proposal { draft, decision, calls, whose, found, time: start.elapsed() })
    }

    /// Verifies a proposal in one pass of the target, and keeps what the target would have written. `ends(token)` is asked
    /// for every emitted token in order; the round is cut after the first for which it says yes, before anything is
    /// committed.
    ///
    /// On an error nothing is committed and the sequence is as before.
    ///
    /// # Errors
    /// If the context is full, or the checkpoint's numbers are none.
    pub fn verify(
        &mut self,
        proposal: Proposal,
        mut ends: impl FnMut(u32) -> Result<bool>,
        rng: &mut impl Rng,
    ) -> Result<Option<Round>> {
        let Proposal { mut draft, decision, calls, whose, found, time: draft_time } = proposal;
        let Some(frontier) = self.frontier.as_mut() else { return Ok(None) };
        let start = Instant::now();
        let (position, last) = (self.kv.len(), frontier.last);
        let rows: Vec<u32> = std::iter::once(last).chain(draft.tokens.iter().copied()).collect();
        let mut round = self.kv.begin_round(rows.len())?;
        let Some(mut passed) = self.passes.run(&rows, &mut round, Wanted::All)? else { return Ok(None) };
        let verify_time = start.elapsed();

        let start = Instant::now();
        let rule = (&self.settings.sampler, self.settings.simulated.as_ref());
        let Accepted { count, next } = passed.judge(&mut draft, rule, rng)?;
        let mut tokens = draft.tokens[..count].to_vec();
        tokens.push(next);
        let mut emitted = 0;
        for token in &tokens {
            emitted += 1;
            if ends(*token)? {
                break;
            }
        }
        tokens.truncate(emitted);

        let hidden_l2 = match self.settings.confidence {
            Confidence::Unsaid => 0.0,
            Confidence::Said => {
                F32View::new(&frontier.hidden)?.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt()
            }
        };
        // `last` and all emitted tokens but the newest, whose state is the row that predicted it.
        let last_token = tokens[emitted - 1];
        frontier.hidden = passed.settle(emitted - 1, last_token, self.settings.confidence)?;
        frontier.last = last_token;
        drop(passed);
        round.commit(emitted);
        self.tokens.extend(&tokens);
        let accepted = count.min(emitted);
        let drafted = draft.tokens.len();
        for (i, drafter) in self.drafters.iter_mut().enumerate() {
            let own = whose.filter(|(drafter, _)| *drafter == i && drafted > 0).map(|_| Verdict { drafted, accepted });
            drafter.accept(&self.tokens, own);
        }
        let accept_time = start.elapsed();

        let steps = calls.iter().find(|call| self.drafters[call.drafter].cost() == DraftCost::PerToken);
        let first = draft.tokens.first().filter(|_| steps.is_some());
        let found = found.iter().enumerate().filter(|(_, found)| !found.tokens.is_empty());
        let found: Vec<_> = found
            .map(|(drafter, found)| Found {
                drafter,
                drafted: found.tokens.len().min(emitted),
                accepted: found.tokens.iter().zip(&tokens).take_while(|(found, token)| found == token).count(),
                agreed: first.map(|first| *first == found.tokens[0]),
            })
            .collect();
        self.planner.observe(&Observation {
            context: position,
            rows: rows.len(),
            verify_ms: milliseconds(verify_time + accept_time),
            steps: steps.map(|call| (self.drafters[call.drafter].kind(), call.tokens, milliseconds(call.time))),
            // A draft that was cut by the end of the text says nothing about the drafts behind the cut.
            verified: whose.map(|(drafter, _)| Verified {
                drafter,
                drafted: if accepted < count { accepted } else { drafted },
                accepted,
            }),
            found: &found,
            emitted,
        });
        let (drafter, confirmed) = (whose.map(|(drafter, _)| drafter), whose.is_some_and(|(_, confirmed)| confirmed));
        Ok(Some(Round {
            tokens,
            draft,
            accepted,
            decision,
            calls,
            drafter,
            confirmed,
            last,
            position,
            hidden_l2,
            draft_time,
            verify_time,
            accept_time,
        }))
    }
}

impl Proposal {
    /// A plain step that nobody decided on.
    fn nothing() -> Self {
        let decision =
            Decision { plan: Plan::Plain, why: Why::Nothing, tokens: 1.0, ms: 0.0, plain_ms: 0.0, balance: 0.0 };
        let (draft, calls, time) = (Draft::default(), Vec::new(), Duration::ZERO);
        Self { draft, decision, calls, whose: None, found: Vec::new(), time }
    }

    /// Tokens that it would verify.
    pub fn drafted(&self) -> usize {
        self.draft.tokens.len()
    }
}

/// The drafters at work on one proposal.
struct Desk<'a> {
    context: Context<'a>,
    drafters: &'a mut [Box<dyn Drafter>],
    rng: &'a mut StdRng,
    cancel: &'a Cancel,
    calls: Vec<Call>,
}

impl Desk<'_> {
    fn draft(&mut self, drafter: usize, most: usize, draft: &mut Draft) -> Result<()> {
        let (start, before) = (Instant::now(), draft.tokens.len());
        self.drafters[drafter].draft(&self.context, most, draft, self.rng)?;
        let (tokens, time) = (draft.tokens.len() - before, start.elapsed());
        match self.calls.iter_mut().find(|call| call.drafter == drafter) {
            Some(call) => (call.tokens, call.time) = (call.tokens + tokens, call.time + time),
            None => self.calls.push(Call { drafter, tokens, time }),
        }
        Ok(())
    }

    /// A model's draft, token by token, because it may be cancelled.
    fn chain(&mut self, drafter: usize, tokens: usize, draft: &mut Draft) -> Result<()> {
        for most in draft.tokens.len() + 1..=tokens {
            if self.cancel.is_cancelled() {
                break;
            }
            self.draft(drafter, most, draft)?;
        }
        Ok(())
    }
}

fn milliseconds(time: Duration) -> f64 {
    1e3 * time.as_secs_f64()
}
