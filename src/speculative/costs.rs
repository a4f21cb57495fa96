//! What rounds cost on this machine, as measured.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::DrafterKind;
use crate::{Error, Result};

/// A verification of one more row is taken to cost this share of a plain step until two row counts are measured.
const ROW: f64 = 0.08;

/// A draft step is taken to cost this share of a plain step until one is measured.
const STEP: f64 = 0.08;

/// Relative error of what was never measured, about, and standard deviations within which a figure is taken to be.
const UNKNOWN: f64 = 0.2;
const DEVIATIONS: f64 = 1.5;

/// Samples of which the median counts, before an average takes over: a first sample is often an outlier.
const FIRST: usize = 5;

/// Samples that an average goes back to at most.
const MOST: usize = 64;

/// Samples that are no accident.
const FIRM: usize = 2;

/// Relative error of one sample until it is known better, and the least that is believed.
const NOISE: f64 = 0.06;
const LEAST_NOISE: f64 = 0.02;

/// Standard deviation by which the machine's speed, which all costs share, drifts from one round to the next: others
/// compute on the same processors, and the costs' ratios do not change.
const DRIFT: f64 = 0.01;

/// The same from one text to the next: nobody measured in between.
const JUMP: f64 = 0.2;

/// Rounds behind a prompt that say nothing about what is known: the prompt's pass leaves the caches to them cold. On the
/// demo pair the first costs a millisecond more, the fourth a tenth of that; of rows that are seldom verified otherwise,
/// the figure would take most of it.
const COLD: usize = 4;

/// Rounds behind a prompt in which only the pace follows what is seen, once a figure has so many samples. A text that begins
/// slowly and gains speed would else leave a share of the gain in the figures of what it verifies: with every such text
/// they became cheaper, the machine slower, and row counts that were seldom verified stayed dear.
const SETTLED: usize = 64;
const MATURE: usize = 16;

/// The same of one cost for itself: what was measured long ago is worth a try.
const STALE: f64 = 0.003;

/// Standard deviations behind which a sample is an accident; twice in a row, it is the machine's speed that jumped.
const OUTLIER: f64 = 2.5;

/// Contexts below this many positions cost the same; from there on every octave is measured for itself.
const SHORT: usize = 512;

/// Milliseconds that something took, averaged.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Measured {
    ms: f64,
    samples: usize,
    #[serde(skip)]
    first: Vec<f64>,
    #[serde(default)]
    seen: usize, // the pace's count of samples when this was last measured
}

impl Measured {
    /// Takes in one of the first samples, or the share of a later one's difference that is the figure's, in logarithms.
    fn add(&mut self, ms: f64, difference: f64) {
        if self.samples < FIRST {
            self.first.push(ms);
            self.first.sort_by(f64::total_cmp);
            self.ms = self.first[(self.first.len() - 1) / 2];
        } else {
            self.ms *= difference.exp();
        }
        self.samples += 1;
    }

    /// Variance of the logarithm.
    fn variance(&self, pace: &Pace) -> f64 {
        pace.noise / self.samples.clamp(1, MOST) as f64
            + STALE.powi(2) * (pace.samples.saturating_sub(self.seen)) as f64
    }
}

/// How fast the machine is now: a Kalman filter on the logarithms of times. A sample's surprise is shared between the pace
/// and the figure by how uncertain each of them is.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Pace {
    #[serde(skip)]
    log: f64, // of how much slower the machine is than when the figures were taken
    #[serde(skip)]
    variance: f64, // of that
    noise: f64, // variance of a sample
    samples: usize,
    #[serde(skip)]
    last: f64, // by how many standard deviations the last sample differed
    #[serde(skip)]
    rounds: usize, // behind the prompt
}

impl Default for Pace {
    fn default() -> Self {
        Self { log: 0.0, variance: 0.0, noise: NOISE * NOISE, samples: 0, last: 0.0, rounds: SETTLED }
    }
}

impl Pace {
    fn factor(&self) -> f64 {
        self.log.exp()
    }

    /// Takes in a sample of something that is known to cost `measured` at the pace of the figures.
    fn observe(&mut self, measured: &mut Measured, ms: f64) {
        self.rounds += 1;
        if self.rounds <= COLD && measured.samples >= FIRST {
            return;
        }
        self.variance += DRIFT * DRIFT;
        self.samples += 1;
        if measured.samples < FIRST {
            measured.add(ms / self.factor(), 0.0);
            measured.seen = self.samples;
            return;
        }
        let settling = self.rounds <= SETTLED && measured.samples >= MATURE;
        let own = if settling { 0.0 } else { measured.variance(self) };
        let difference = (ms / measured.ms).ln() - self.log;
        let deviations = difference / (own + self.variance + self.noise).sqrt();
        if deviations.abs().min(self.last.abs()) > OUTLIER && deviations * self.last > 0.0 {
            // No accident but a jump: the pace may be anything now.
            self.variance += difference * difference;
        }
        self.last = deviations;
        let all = own + self.variance + self.noise;
        let difference = difference.clamp(-OUTLIER * all.sqrt(), OUTLIER * all.sqrt());
        self.noise += 0.02 * (difference * difference * self.noise / all - self.noise);
        self.noise = self.noise.max(LEAST_NOISE * LEAST_NOISE);
        measured.add(ms, difference * own / all);
        measured.seen = self.samples;
        self.log += difference * self.variance / all;
        self.variance *= 1.0 - self.variance / all;
    }
}

/// What the figures hold for: costs of another machine or model would mislead the planner.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Instruction set.
    pub isa: String,
    /// Threads that compute.
    pub threads: usize,
    /// Bytes of weights that a step of the target reads.
    pub step_bytes: usize,
    /// Multiply-adds of a step of the target.
    pub step_multiply_adds: usize,
}

/// Measured costs: of verifying B rows at contexts of some length, v(B), and of a step of each drafter.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    machine: Machine,
    verify: BTreeMap<usize, BTreeMap<usize, Measured>>, // context octave, rows
    draft: BTreeMap<DrafterKind, Measured>,             // per token
    #[serde(default)] // not in older files
    pace: Pace,
}

impl Costs {
    /// Nothing known about `machine` yet.
    pub fn new(machine: Machine) -> Self {
        Self { machine, ..Self::default() }
    }

    /// A text begins, behind its prompt.
    pub(super) fn begin(&mut self) {
        if self.pace.samples > 0 {
            self.pace.rounds = 0;
            self.pace.variance = self.pace.variance.max(JUMP * JUMP);
        }
    }

    /// What the figures hold for.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Takes in a verification of `rows` rows behind `context` committed positions.
    pub fn verified(&mut self, context: usize, rows: usize, ms: f64) {
        if !(ms > 0.0 && ms.is_finite()) || rows == 0 {
            return;
        }
        let measured = self.verify.entry(octave(context)).or_default().entry(rows).or_default();
        self.pace.observe(measured, ms);
    }

    /// Takes in `tokens` draft steps that took `ms` together.
    pub fn drafted(&mut self, drafter: DrafterKind, tokens: usize, ms: f64) {
        if tokens > 0 && ms > 0.0 && ms.is_finite() {
            let (measured, ms) = (self.draft.entry(drafter).or_default(), ms / tokens as f64 / self.pace.factor());
            let most = OUTLIER * self.pace.noise.sqrt();
            let difference = if measured.samples > 0 { (ms / measured.ms).ln().clamp(-most, most) } else { 0.0 };
            measured.add(ms, difference / measured.samples.clamp(1, MOST) as f64);
        }
    }

    /// Whether the last sample of something known was about what it should be: if not, the machine's speed may have jumped.
    pub fn are_settled(&self) -> bool {
        self.pace.last.abs() <= OUTLIER
    }

    /// Estimated milliseconds of a step of `drafter`.
    pub fn step(&self, drafter: DrafterKind, context: usize) -> f64 {
        self.known_step(drafter).unwrap_or_else(|| STEP * self.verify(context, 1)[0].ms)
    }

    /// Milliseconds of a step of `drafter`, if one was measured.
    pub fn known_step(&self, drafter: DrafterKind) -> Option<f64> {
        self.draft.get(&drafter).map(|measured| measured.ms * self.pace.factor())
    }

    /// Estimates of verifying 1 to `most` rows behind `context` committed positions.
    pub fn verify(&self, context: usize, most: usize) -> Vec<Estimate> {
        let octave = octave(context);
        let none = BTreeMap::new();
        let here = self.verify.get(&octave).unwrap_or(&none);
        // Row counts that were not measured here cost what they cost in the nearest octave, times what the others cost
        // more here.
        let others = self.verify.iter().filter(|(other, _)| **other != octave);
        let other = others.min_by_key(|(other, _)| other.abs_diff(octave)).map_or(&none, |(_, table)| table);
        let ratios = here.iter().filter_map(|(rows, here)| Some(here.ms / other.get(rows)?.ms));
        let (sum, count) = ratios.fold((0.0, 0.0), |(sum, count), ratio| (sum + ratio, count + 1.0));
        let ratio = if count > 0.0 { sum / count } else { 1.0 };
        let mut points: BTreeMap<usize, (f64, f64)> = BTreeMap::new();
        if count > 0.0 || here.is_empty() {
            points.extend(other.iter().map(|(rows, measured)| (*rows, (measured.ms * ratio, 1.0))));
        }
        let firm = here.iter().filter(|(_, measured)| measured.samples >= FIRM);
        points.extend(firm.map(|(rows, measured)| (*rows, (measured.ms, measured.samples as f64))));
        if !points.is_empty() {
            // What was measured once costs no more than it should by much: accidents make it dearer, not cheaper.
            let firm = ascending(points.clone());
            for (rows, measured) in here.iter().filter(|(_, measured)| measured.samples < FIRM) {
                let (ms, unknown) = (interpolate(&firm, *rows as f64), DEVIATIONS * UNKNOWN);
                let ms = measured.ms.min(ms * unknown.exp());
                points.insert(*rows, (ms, measured.samples as f64));
            }
        } else {
            points.extend(here.iter().map(|(rows, measured)| (*rows, (measured.ms, 1.0))));
        }
        let points = ascending(points);
        let speed = self.pace.factor();
        let plain_ms = speed * interpolate(&points, 1.0);
        let (mut least, mut paid) = (plain_ms, 0.0_f64);
        let estimate = |rows| {
            let ms = speed * interpolate(&points, rows as f64);
            let measured = here.get(&rows);
            let known = measured.is_some() || other.contains_key(&rows);
            let samples = measured.map_or(0, |measured| measured.samples);
            let error = match measured {
                Some(measured) if samples >= FIRM => measured.variance(&self.pace).sqrt(),
                _ => UNKNOWN,
            };
            let error = DEVIATIONS * error;
            let least_ms = (ms * (-error).exp()).max(least);
            if samples >= FIRM {
                least = least_ms;
            }
            paid = measured.map_or(ms, |measured| ms.max(speed * measured.ms)).max(paid);
            let paid_ms = if rows > 1 && samples >= FIRM { ms } else { paid };
            Estimate { ms, least_ms, most_ms: ms * error.exp(), paid_ms, samples, known }
        };
        (1..=most).map(estimate).collect()
    }

    /// Writes the figures as JSON.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).map_err(|e| Error::file(path, e.to_string()))?;
        std::fs::write(path, text).map_err(Error::io(path))
    }

    /// Reads what [`Costs::save`] wrote, for use on `machine`.
    ///
    /// # Errors
    /// If the file is missing or malformed, or its figures are another machine's.
    pub fn load(path: &Path, machine: &Machine) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(Error::io(path))?;
        let again = "; delete it to measure again";
        let costs: Self =
            serde_json::from_str(&text).map_err(|e| Error::file(path, format!("is no table of costs: {e}{again}")))?;
        if costs.machine != *machine {
            let problem = format!("has the costs of {:?}, this is {machine:?}{again}", costs.machine);
            return Err(Error::file(path, problem));
        }
        let all = costs.verify.values().flat_map(BTreeMap::values).chain(costs.draft.values());
        if all.into_iter().any(|measured| !(measured.ms > 0.0 && measured.ms.is_finite())) {
            return Err(Error::file(path, format!("has a cost that is not above 0{again}")));
        }
        if !(costs.pace.noise > 0.0 && costs.pace.noise.is_finite()) {
            return Err(Error::file(path, format!("has a pace whose noise is not above 0{again}")));
        }
        Ok(costs)
    }
}

/// What verifying some number of rows costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Milliseconds, measured or interpolated.
    pub ms: f64,
    /// If it is as cheap as the measurements of it, or of fewer rows, allow.
    pub least_ms: f64,
    /// If it is as dear as they allow.
    pub most_ms: f64,
    /// What it cost where it was done, be that an accident or not.
    pub paid_ms: f64,
    /// Measurements at this context and row count.
    pub samples: usize,
    /// Whether this row count was measured at this or a neighbouring context.
    pub known: bool,
}

pub(super) fn octave(context: usize) -> usize {
    (context / SHORT).checked_ilog2().map_or(0, |octave| 1 + octave as usize)
}

/// More rows cost no less, whatever the noise says: neighbours that are out of order share their mean, weighted by their
/// samples (the pool-adjacent-violators algorithm). From rows to (ms, weight); to (rows, ms).
fn ascending(points: BTreeMap<usize, (f64, f64)>) -> Vec<(f64, f64)> {
    let mut pools: Vec<(f64, f64, Vec<usize>)> = Vec::new();
    for (rows, (mut ms, mut weight)) in points {
        let mut members = vec![rows];
        while let Some((below, of, _)) = pools.last().filter(|(below, ..)| *below > ms) {
            (ms, weight) = ((ms * weight + below * of) / (weight + of), weight + of);
            members.splice(0..0, pools.pop().map(|(.., members)| members).unwrap_or_default());
        }
        pools.push((ms, weight, members));
    }
    let flat = pools.into_iter().flat_map(|(ms, _, members)| members.into_iter().map(move |rows| (rows as f64, ms)));
    flat.collect()
}

/// Straight lines between the points (rows, ms), and on beyond the last one.
fn interpolate(points: &[(f64, f64)], rows: f64) -> f64 {
    let (Some((first, first_ms)), Some((last, last_ms))) = (points.first().copied(), points.last().copied()) else {
        return 1.0 + ROW * (rows - 1.0); // in plain steps: any unit will do before the first measurement
    };
    if rows <= first {
        return first_ms * (1.0 + ROW * (rows - 1.0)) / (1.0 + ROW * (first - 1.0));
    }
    let after = points.partition_point(|(at, _)| *at < rows);
    if let Some((at, ms)) = points.get(after) {
        let (before, before_ms) = points[after - 1];
        return before_ms + (ms - before_ms) * (rows - before) / (at - before);
    }
    let plain = first_ms / (1.0 + ROW * (first - 1.0));
    let slope = if last > first { (last_ms - first_ms) / (last - first) } else { ROW * plain };
    last_ms + 0.5 * (ROW * plain + slope) * (rows - last)
}
