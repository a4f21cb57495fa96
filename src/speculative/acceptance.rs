//! How often drafts stand, as observed lately.

/// Weight of what is believed before anything is observed, in observations.
const PRIOR: f64 = 2.0;

/// Observations that count lately, and those that count to notice a change.
const SLOW: f64 = 96.0;
const FAST: f64 = 16.0;

/// Standard deviations between the two that are no chance.
const CHANGE: f64 = 2.5;

/// What is left of a count after a round in which it was not added to: what was not tried for long is worth a try.
const FADE: f64 = 1.0 - 1.0 / 256.0;

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    hits: f64,
    trials: f64,
}

impl Counts {
    fn add(&mut self, hit: f64, window: f64) {
        let keep = 1.0 - 1.0 / window;
        (self.hits, self.trials) = (self.hits * keep + hit, self.trials * keep + 1.0);
    }
}

/// The chance that a draft at one place stands if those before it do.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Chance {
    slow: Counts,
    fast: Counts,
}

/// Whether a chance is as before, or another one now.
#[derive(PartialEq, Eq)]
enum News {
    Same,
    Changed,
}

impl Chance {
    pub(super) fn add(&mut self, hit: bool) {
        let _ = self.observe(hit);
    }

    fn observe(&mut self, hit: bool) -> News {
        let hit = f64::from(u8::from(hit));
        self.slow.add(hit, SLOW);
        self.fast.add(hit, FAST);
        let mean = |counts: Counts| (counts.hits + 0.5) / (counts.trials + 1.0);
        let (slow, fast) = (mean(self.slow), mean(self.fast));
        let spread = (slow * (1.0 - slow) * (1.0 / self.fast.trials + 1.0 / self.slow.trials)).sqrt();
        if self.fast.trials >= 6.0 && (fast - slow).abs() > CHANGE * spread {
            // Begins again from a little of what is new.
            let share = PRIOR / self.fast.trials;
            self.slow = Counts { hits: self.fast.hits * share, trials: PRIOR };
            return News::Changed;
        }
        News::Same
    }

    pub(super) fn fade(&mut self) {
        self.slow.hits *= FADE;
        self.slow.trials *= FADE;
    }

    /// The chance, where `prior` is what one would expect.
    pub(super) fn mean(&self, prior: f64) -> f64 {
        (self.slow.hits + PRIOR * prior) / (self.slow.trials + PRIOR)
    }

    /// The chance if we were unlucky so far.
    fn high(&self, prior: f64) -> f64 {
        let mean = self.mean(prior);
        (mean + (mean * (1.0 - mean) / (self.slow.trials + PRIOR)).sqrt()).min(1.0)
    }
}

/// The chances along a draft of one drafter.
#[derive(Clone, Debug)]
pub(super) struct Acceptance {
    prior: f64, // of the first token
    places: [Chance; PLACES],
}

const PLACES: usize = 13;

/// Deep places share their counts: few drafts get there.
fn place(position: usize) -> usize {
    match position {
        0..8 => position,
        8..12 => 8,
        12..16 => 9,
        16..24 => 10,
        24..32 => 11,
        _ => 12,
    }
}

impl Acceptance {
    pub(super) fn new(prior: f64) -> Self {
        Self { prior, places: [Chance::default(); PLACES] }
    }

    /// A draft of which `accepted` of `drafted` tokens stood.
    pub(super) fn observe(&mut self, drafted: usize, accepted: usize) {
        for position in 0..drafted.min(accepted + 1) {
            let at = place(position);
            if self.places[at].observe(position < accepted) == News::Changed {
                // What is known about the places behind is as old as what just turned out to be wrong.
                self.places[at + 1..].iter_mut().for_each(|chance| *chance = Chance::default());
            }
        }
    }

    pub(super) fn fade(&mut self) {
        self.places.iter_mut().for_each(Chance::fade);
    }

    /// Expected tokens of a round that verifies 0 to `most` drafts, the target's own included: as far as is known, and
    /// if we were unlucky so far.
    pub(super) fn tokens(&self, most: usize) -> Vec<(f64, f64)> {
        let (mut prior, mut sum, mut stand) = (self.prior, (1.0, 1.0), (1.0, 1.0));
        let mut tokens = Vec::with_capacity(most + 1);
        tokens.push(sum);
        for position in 0..most {
            let chance = &self.places[place(position)];
            stand = (stand.0 * chance.mean(prior), stand.1 * chance.high(prior));
            sum = (sum.0 + stand.0, sum.1 + stand.1);
            tokens.push(sum);
            // Before a place is seen it is taken to be as the one before it.
            prior = chance.mean(prior);
        }
        tokens
    }
}
