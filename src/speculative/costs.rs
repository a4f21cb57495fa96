//! What rounds cost on this machine, as measured.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{DrafterKind, Tuning};
use crate::{Error, Result};

/// Contexts below this many positions cost the same; from there on every octave is measured for itself.
const SHORT: usize = 512;

/// Milliseconds that something takes: the median of the first measurements, because the first ones are often outliers,
/// then a running mean.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Measured {
    ms: f64,
    samples: usize,
    #[serde(skip)]
    first: Vec<f64>,
}

impl Measured {
    /// Takes in `ms`, which is `difference` from the mean in logarithms once that is known.
    fn add(&mut self, ms: f64, difference: f64, tuning: &Tuning) {
        self.samples += 1;
        if self.samples <= tuning.median {
            self.first.push(ms);
            self.first.sort_by(f64::total_cmp);
            self.ms = self.first[(self.first.len() - 1) / 2];
        } else {
            self.ms *= (difference / self.samples.min(tuning.history) as f64).exp();
        }
    }
}

/// The lower median; 0 of nothing.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

/// What the costs hold for: those of another machine or model would mislead the planner.
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

/// Measured costs: of verifying B rows at contexts of some length, v(B), and of a step of each drafter. All of them are
/// multiplied by one speed factor, because other processes slow all of them down alike.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    machine: Machine,
    verify: BTreeMap<usize, BTreeMap<usize, Measured>>, // context octave, rows
    draft: BTreeMap<DrafterKind, Measured>,             // per token
    #[serde(default)]
    variance: Option<f64>,         // of the logarithm of one measurement
    #[serde(skip)]
    rounds: usize,                    // of this text
    #[serde(skip)]
    recent: VecDeque<(usize, f64)>,   // rows, and the logarithm of measured over known cost, of the newest rounds
    #[serde(skip)]
    tuning: Tuning,
}

impl Costs {
    /// Nothing known about `machine` yet.
    pub fn new(machine: Machine) -> Self {
        Self { machine, ..Self::default() }
    }

    /// With other constants.
    #[doc(hidden)]
    pub fn tuned(tuning: Tuning) -> Self {
        Self { tuning, ..Self::default() }
    }

    pub(super) fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// A text begins: how fast the machine is now is not known.
    pub(super) fn begin(&mut self) {
        self.recent.clear();
        self.rounds = 0;
    }

    /// What the costs hold for.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    fn variance(&self) -> f64 {
        self.variance.unwrap_or(self.tuning.unmeasured.powi(2))
    }

    /// The logarithm of how much slower the machine is now than when the costs were measured.
    fn speed(&self) -> f64 {
        let none = self.tuning.median.saturating_sub(self.recent.len());
        median(self.recent.iter().map(|(_, residual)| *residual).chain(std::iter::repeat_n(0.0, none)))
    }

    /// How many times slower the machine is now than when the costs were measured.
    pub(super) fn speed_factor(&self) -> f64 {
        self.speed().exp()
    }

    /// Takes in a verification of `rows` rows behind `context` committed positions.
    pub fn verified(&mut self, context: usize, rows: usize, ms: f64) {
        if !(ms > 0.0 && ms.is_finite()) || rows == 0 {
            return;
        }
        let (tuning, speed) = (self.tuning, self.speed());
        let octave = octave(context);
        // The first rounds behind a prompt find its data in the caches, and are slower.
        self.rounds += 1;
        let here = self.verify.get(&octave);
        let known = here.and_then(|here| here.get(&1)).is_some_and(|plain| plain.samples >= tuning.median);
        if self.rounds <= tuning.median && known {
            return;
        }
        let samples = here.and_then(|here| here.get(&rows)).map_or(0, |measured| measured.samples);
        let here = self.verify.entry(octave).or_default();
        // A single plain step that took longer than more rows was an accident.
        if here.get(&1).is_some_and(|plain| {
            rows > 1 && plain.samples == 1 && plain.ms > (2.0 * tuning.unmeasured).exp() * ms / speed.exp()
        }) {
            here.remove(&1);
        }
        let measured = here.entry(rows).or_default();
        if samples < 2 {
            return measured.add(ms / speed.exp(), 0.0, &tuning);
        }
        let residual = (ms / measured.ms).ln();
        // Only rounds of other rows say something about ratios of costs: how slow all are is the speed factor's.
        let others: Vec<(usize, f64)> = self.recent.iter().copied().filter(|(other, _)| *other != rows).collect();
        let compared = self.rounds > 2 * tuning.median && 2 * others.len() > tuning.median;
        let variance = self.variance.get_or_insert(tuning.unmeasured.powi(2));
        let most = tuning.outlier * variance.sqrt();
        let against = if compared { median(others.iter().map(|(_, residual)| *residual)) } else { speed };
        let difference = (residual - against).clamp(-most, most);
        if samples < tuning.median {
            measured.add(ms / speed.exp(), 0.0, &tuning);
        } else if compared {
            measured.add(ms, difference, &tuning);
            // The difference may be the other cost's as well.
            if let Some(other) = here.get_mut(&others[others.len() - 1].0) {
                other.ms *= (-difference / other.samples.min(tuning.history) as f64).exp();
            }
        }
        if self.rounds > 2 * tuning.median {
            *variance += (difference * difference - *variance) / tuning.history as f64;
        }
        self.recent.push_back((rows, residual));
        if self.recent.len() > tuning.median {
            self.recent.pop_front();
        }
    }

    /// Takes in `tokens` draft steps that took `ms` together.
    pub fn drafted(&mut self, drafter: DrafterKind, tokens: usize, ms: f64) {
        if tokens > 0 && ms > 0.0 && ms.is_finite() {
            let ms = ms / tokens as f64 / self.speed().exp();
            let most = self.tuning.outlier * self.variance().sqrt();
            let measured = self.draft.entry(drafter).or_default();
            let difference = if measured.samples > 0 { (ms / measured.ms).ln().clamp(-most, most) } else { 0.0 };
            measured.add(ms, difference, &self.tuning);
        }
    }

    /// Estimated milliseconds of a step of `drafter`.
    pub fn step(&self, drafter: DrafterKind, context: usize) -> f64 {
        self.known_step(drafter).unwrap_or_else(|| self.tuning.row_cost * self.verify(context, 1)[0].ms)
    }

    /// Milliseconds of a step of `drafter`, if one was measured.
    pub fn known_step(&self, drafter: DrafterKind) -> Option<f64> {
        self.draft.get(&drafter).map(|measured| measured.ms * self.speed().exp())
    }

    /// Estimates of verifying 1 to `most` rows behind `context` committed positions. More rows cost no less: what
    /// was measured of more rows bounds the cost of fewer.
    pub fn verify(&self, context: usize, most: usize) -> Vec<Estimate> {
        let octave = octave(context);
        let none = BTreeMap::new();
        let here = self.verify.get(&octave).unwrap_or(&none);
        let firm = here.iter().filter(|(rows, measured)| **rows == 1 || measured.samples > 1);
        let mut points: Vec<(f64, f64)> = firm.map(|(rows, measured)| (*rows as f64, measured.ms)).collect();
        for i in (1..points.len()).rev() {
            points[i - 1].1 = points[i - 1].1.min(points[i].1);
        }
        // What was not measured here costs what it costs at the nearest context, times what the rest costs more here.
        let others = self.verify.iter().filter(|(other, _)| **other != octave);
        let other = others.min_by_key(|(other, _)| other.abs_diff(octave)).map_or(&none, |(_, costs)| costs);
        let ratios = here.iter().filter_map(|(rows, here)| Some(here.ms / other.get(rows)?.ms));
        let (sum, count) = ratios.fold((0.0, 0), |(sum, count), ratio| (sum + ratio, count + 1));
        let ratio = if count > 0 { sum / f64::from(count) } else { 1.0 };
        let insert = |points: &mut Vec<(f64, f64)>, rows: usize, ms: f64| {
            let at = points.partition_point(|(other, _)| *other < rows as f64);
            let least = at.checked_sub(1).map_or(0.0, |before| points[before].1);
            let most = points.get(at).map_or(f64::INFINITY, |(_, ms)| *ms);
            points.insert(at, (rows as f64, ms.clamp(least, most)));
        };
        for (rows, measured) in other.iter().filter(|(rows, _)| !here.contains_key(rows)) {
            insert(&mut points, *rows, ratio * measured.ms);
        }
        // A single measurement may be an accident, which makes it dearer, not cheaper.
        for (rows, measured) in here.iter().filter(|(rows, measured)| **rows != 1 && measured.samples == 1) {
            let most_ms = self.interpolate(&points, *rows as f64) * (2.0 * self.tuning.unmeasured).exp();
            insert(&mut points, *rows, measured.ms.min(most_ms));
        }
        let (factor, variance) = (self.speed().exp(), self.variance());
        let mut least = 0.0_f64;
        let estimate = |rows: usize| {
            let ms = factor * self.interpolate(&points, rows as f64);
            let samples = here.get(&rows).map_or(0, |measured| measured.samples);
            let precision = self.tuning.unmeasured.powi(-2) + samples.min(self.tuning.history) as f64 / variance;
            let error = precision.sqrt().recip();
            let low = (ms * (-self.tuning.confidence * error).exp()).max(least);
            least = low;
            let most_ms = ms * (self.tuning.confidence * error).exp();
            let known = samples > 0 || other.contains_key(&rows);
            Estimate { ms, least_ms: low, most_ms, error, samples, known }
        };
        (1..=most).map(estimate).collect()
    }

    /// Straight lines between the points (rows, ms), and on beyond the last one.
    fn interpolate(&self, points: &[(f64, f64)], rows: f64) -> f64 {
        let row_cost = self.tuning.row_cost;
        let (Some((first, first_ms)), Some((last, last_ms))) = (points.first().copied(), points.last().copied()) else {
            return 1.0 + row_cost * (rows - 1.0); // in plain steps: any unit will do before the first measurement
        };
        let plain_ms = first_ms / (1.0 + row_cost * (first - 1.0));
        if rows <= first {
            return plain_ms * (1.0 + row_cost * (rows - 1.0));
        }
        let after = points.partition_point(|(at, _)| *at < rows);
        if let Some((at, ms)) = points.get(after) {
            let (before, before_ms) = points[after - 1];
            return before_ms + (ms - before_ms) * (rows - before) / (at - before);
        }
        // The slope of the last half of what was measured, which is about the next stair's.
        let half = (0.5 * last).max(first);
        let slope =
            if last > first { (last_ms - self.interpolate(points, half)) / (last - half) } else { row_cost * plain_ms };
        last_ms + slope * (rows - last)
    }

    /// Writes the costs as JSON.
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
    /// If the file is missing or malformed, or its costs are another machine's.
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
        if costs.variance.is_some_and(|variance| !(variance > 0.0 && variance.is_finite())) {
            return Err(Error::file(path, format!("has a variance that is not above 0{again}")));
        }
        Ok(costs)
    }
}

/// What verifying some number of rows costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Milliseconds, measured or interpolated.
    pub ms: f64,
    /// Lower confidence bound.
    pub least_ms: f64,
    /// Upper confidence bound.
    pub most_ms: f64,
    /// Relative standard error.
    pub error: f64,
    /// Measurements at this context and row count.
    pub samples: usize,
    /// Whether this row count was measured, here or at the nearest context.
    pub known: bool,
}

pub(super) fn octave(context: usize) -> usize {
    (context / SHORT).checked_ilog2().map_or(0, |octave| 1 + octave as usize)
}
