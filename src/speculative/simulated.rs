//! Simulated acceptance, to measure speed at a published acceptance rate.

use rand::Rng;

use crate::{Error, Result};

/// The probability that a draft is accepted given that all before it in its chain were: one per
/// position, the last one for all deeper positions.
#[derive(Clone, Debug)]
pub(crate) struct SimulatedAcceptance(Vec<f64>);

impl SimulatedAcceptance {
    /// From acceptance rates by position: shares of rounds, as in statistics and publications. `None` if empty.
    ///
    /// # Errors
    /// If a rate is not from 0 to 1, or higher than the one before it.
    pub fn new(rates: &[f64]) -> Result<Option<Self>> {
        let mut before = 1.0;
        let mut chances = Vec::with_capacity(rates.len());
        for (position, rate) in (1..).zip(rates) {
            if !(0.0..=1.0).contains(rate) {
                return Err(Error::argument("simulate_acceptance", format!("is {rate}, must be from 0 to 1")));
            }
            if *rate > before {
                let rule = "use the share of rounds that accept the draft at each position, which cannot increase";
                let problem = format!("is {rate} at position {position}, {before} before it; {rule}");
                return Err(Error::argument("simulate_acceptance", problem));
            }
            chances.push(if before > 0.0 { rate / before } else { 0.0 });
            before = *rate;
        }
        Ok((!chances.is_empty()).then_some(Self(chances)))
    }

    /// The number of accepted drafts of `drafts`: one draw for each until the first rejected.
    pub fn count(&self, drafts: usize, rng: &mut impl Rng) -> usize {
        let chance = |position: usize| self.0.get(position).or(self.0.last()).copied().unwrap_or(0.0);
        (0..drafts).take_while(|position| rng.random::<f64>() < chance(*position)).count()
    }
}
