//! Acceptance by chance instead of by the target, to measure speed at a published acceptance.

use rand::Rng;

use crate::{Error, Result};

/// How probable it is that a draft is accepted, given that all before it in its chain were: one chance per position, the
/// last for every position behind it.
#[derive(Clone, Debug)]
pub(crate) struct SimulatedAcceptance(Vec<f64>);

impl SimulatedAcceptance {
    /// From acceptance rates by position: shares of rounds, as statistics and publications give them. `None` without any.
    ///
    /// # Errors
    /// If a rate is not from 0 to 1, or above the one before it.
    pub fn new(rates: &[f64]) -> Result<Option<Self>> {
        let mut before = 1.0;
        let mut chances = Vec::with_capacity(rates.len());
        for (position, rate) in (1..).zip(rates) {
            if !(0.0..=1.0).contains(rate) {
                return Err(Error::argument("simulate_acceptance", format!("is {rate}, must be from 0 to 1")));
            }
            if *rate > before {
                let rule = "give the share of rounds that accept the draft at each position, which cannot rise";
                let problem = format!("is {rate} at position {position}, {before} before it; {rule}");
                return Err(Error::argument("simulate_acceptance", problem));
            }
            chances.push(if before > 0.0 { rate / before } else { 0.0 });
            before = *rate;
        }
        Ok((!chances.is_empty()).then_some(Self(chances)))
    }

    /// How many of `drafts` drafts are accepted: one draw for each until the first that is not.
    pub fn count(&self, drafts: usize, rng: &mut impl Rng) -> usize {
        let chance = |position: usize| self.0.get(position).or(self.0.last()).copied().unwrap_or(0.0);
        (0..drafts).take_while(|position| rng.random::<f64>() < chance(*position)).count()
    }
}
