//! How often drafts stand, as observed lately.

use std::collections::VecDeque;

/// Weight of what is believed after a change, in observations, and that of the place before.
const AGAIN: f64 = 1.5;
const LIKE: f64 = 6.0;

/// Observations that count lately.
const WINDOW: f64 = 192.0;

/// Rounds in which the beginning of a change is looked for.
const MEMORY: usize = 64;

/// By how many nats a change must explain the last rounds better than chance to be as likely as none, and the share of the
/// observations that must be older.
const CHANGE: f64 = 6.5;
const OLDER: f64 = 0.3;

/// The chance of a change at which what was before is forgotten.
const CERTAIN: f64 = 0.99;

/// What is left of a count after a round in which it was not added to: what was not tried for long is worth a try.
const FADE: f64 = 1.0 - 1.0 / 256.0;

/// How often something was so.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Chance {
    hits: f64,
    trials: f64,
}

impl Chance {
    pub(super) fn add(&mut self, hit: bool) {
        let keep = 1.0 - 1.0 / WINDOW;
        (self.hits, self.trials) = (self.hits * keep + f64::from(u8::from(hit)), self.trials * keep + 1.0);
    }

    fn fade(&mut self) {
        (self.hits, self.trials) = (self.hits * FADE, self.trials * FADE);
    }

    /// The chance, where `prior` is what one would expect.
    pub(super) fn mean(&self, prior: f64) -> f64 {
        self.blend(prior, AGAIN)
    }

    /// The same, where that weighs as much as so many observations.
    fn blend(&self, prior: f64, weight: f64) -> f64 {
        (self.hits + weight * prior) / (self.trials + weight)
    }
}

/// The chances along a draft of one drafter: of every place, that its token stands if those before it do.
#[derive(Clone, Debug)]
pub(super) struct Acceptance {
    prior: (f64, f64), // of the first token, and its weight in observations
    all: Places,
    since: Places,                    // the same if something has changed lately
    changed: f64,                     // the chance of that
    recent: VecDeque<(usize, usize)>, // drafted and accepted tokens of the last rounds
}

#[derive(Clone, Copy, Debug, Default)]
struct Places([Chance; PLACES]);

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

impl Places {
    fn count(&mut self, drafted: usize, accepted: usize) {
        for position in 0..drafted.min(accepted + 1) {
            self.0[place(position)].add(position < accepted);
        }
    }

    /// Expected tokens of a round that verifies 0 to `most` drafts, the target's own included.
    fn tokens(&self, (mut prior, mut weight): (f64, f64), most: usize) -> Vec<Expected> {
        let one = Expected { mean: 1.0, low: 1.0, high: 1.0 };
        let (mut sum, mut stand) = (one, one);
        let mut tokens = Vec::with_capacity(most + 1);
        tokens.push(sum);
        for position in 0..most {
            let chance = &self.0[place(position)];
            let mean = chance.blend(prior, weight);
            let deviation = (mean * (1.0 - mean) / (chance.trials + weight)).sqrt();
            stand.mean *= mean;
            stand.low *= (mean - deviation).max(0.0);
            stand.high *= (mean + deviation).min(1.0);
            sum = Expected { mean: sum.mean + stand.mean, low: sum.low + stand.low, high: sum.high + stand.high };
            tokens.push(sum);
            // A place is taken to be about as the one before it.
            (prior, weight) = (mean, LIKE);
        }
        tokens
    }
}

/// Expected tokens: as far as is known, if we were lucky so far, and if we were unlucky.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    pub mean: f64,
    pub low: f64,
    pub high: f64,
}

impl Acceptance {
    /// What is believed of the first token before anything is observed, and its weight in observations.
    pub(super) fn new(prior: (f64, f64)) -> Self {
        let (all, since) = (Places::default(), Places::default());
        Self { prior, all, since, changed: 0.0, recent: VecDeque::new() }
    }

    /// A draft of which `accepted` of `drafted` tokens stood.
    pub(super) fn observe(&mut self, drafted: usize, accepted: usize) {
        self.all.count(drafted, accepted);
        self.recent.push_back((drafted, accepted));
        if self.recent.len() > MEMORY {
            self.recent.pop_front();
        }
        let (since, nats) = self.change();
        self.since = Places::default();
        self.recent.range(since..).for_each(|(drafted, accepted)| self.since.count(*drafted, *accepted));
        let odds = (nats - CHANGE).exp();
        self.changed = odds / (1.0 + odds);
        if self.changed > CERTAIN {
            // What was before says nothing any more.
            self.recent.drain(..since);
            (self.all, self.changed, self.prior.1) = (self.since, 0.0, AGAIN);
        }
    }

    /// The round since which drafts most likely stand more often or less often than before, and by how many nats that
    /// explains them better than chance does: the likelihood ratio of all places together.
    fn change(&self) -> (usize, f64) {
        let mut chances = [0.0; PLACES];
        let (mut prior, mut weight) = self.prior;
        for (chance, place) in chances.iter_mut().zip(&self.all.0) {
            prior = place.blend(prior, weight);
            weight = LIKE;
            *chance = prior;
        }
        let all: f64 = self.all.0.iter().map(|place| place.trials).sum();
        let (mut trials, mut hits, mut expected) = (0.0, 0.0, 0.0);
        let mut best = (self.recent.len(), 0.0);
        for (since, (drafted, accepted)) in self.recent.iter().enumerate().rev() {
            for position in 0..*drafted.min(&(accepted + 1)) {
                (trials, expected) = (trials + 1.0, expected + chances[place(position)]);
            }
            hits += *accepted as f64;
            // The chances were taken from all rounds; those before the change were further away.
            let before = 1.0 - trials / all;
            if before < OLDER {
                break;
            }
            let nats = trials * divergence(hits / trials, expected / trials) / before;
            if nats > best.1 {
                best = (since, nats);
            }
        }
        best
    }

    pub(super) fn fade(&mut self) {
        self.all.0.iter_mut().for_each(Chance::fade);
    }

    /// Expected tokens of a round that verifies 0 to `most` drafts, the target's own included.
    pub(super) fn tokens(&self, most: usize) -> Vec<Expected> {
        let mut tokens = self.all.tokens(self.prior, most);
        if self.changed > 0.0 {
            let mix = |all: &mut f64, since: f64| *all += self.changed * (since - *all);
            for (all, since) in tokens.iter_mut().zip(self.since.tokens((self.prior.0, AGAIN), most)) {
                mix(&mut all.mean, since.mean);
                mix(&mut all.low, since.low);
                mix(&mut all.high, since.high);
            }
        }
        tokens
    }
}

/// Relative entropy of two coins, in nats.
fn divergence(of: f64, from: f64) -> f64 {
    let part = |a: f64, b: f64| if a > 0.0 { a * (a / b).ln() } else { 0.0 };
    part(of, from) + part(1.0 - of, 1.0 - from)
}
