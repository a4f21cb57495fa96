//! Measured round costs on this machine.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::tuning::Tuning;
use crate::checkpoint::{Partial, regular_file};
use crate::speculative::DrafterKind;
use crate::{Error, Result};

/// Contexts below this many positions share one cost; above, every octave has its own. Reading the `f16` K and V of so
/// many takes 2 to 5 % of the bytes of a step of the published Gemma 4 models with four-bit weights.
const SHORT: usize = 512;

/// Valid measurements in milliseconds: their sums and ratios are finite.
const MEASURED: RangeInclusive<f64> = 1e-9..=1e9;

/// A cost in milliseconds: the median of the first measurements, which are often outliers, then a running mean.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Measured {
    ms: f64,
    samples: usize,
    #[serde(skip)]
    first: Vec<f64>,
}

impl Measured {
    /// Records `ms`; `difference` is its log difference from the mean, once that is known.
    fn add(&mut self, ms: f64, difference: f64, tuning: &Tuning) {
        self.samples = self.samples.saturating_add(1);
        if self.samples <= tuning.median {
            // Of those in a file, only the median is known.
            self.first.resize(self.samples - 1, self.ms);
            self.first.push(ms);
            self.ms = median(self.first.iter().copied()).unwrap_or(ms);
        } else {
            self.shift(difference, tuning);
        }
    }

    /// Moves the mean by its newest measurement's share of a log difference.
    fn shift(&mut self, difference: f64, tuning: &Tuning) {
        self.ms *= (difference / (self.samples as f64).min(tuning.window).max(1.0)).exp();
    }
}

/// The lower median; `None` if there are no values.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied()
}

/// A log difference, clipped to exclude outliers.
fn clip(difference: f64, tuning: &Tuning) -> f64 {
    let most = tuning.outlier * tuning.unmeasured;
    difference.clamp(-most, most)
}

/// Where the costs are valid: those of another machine or model would mislead the planner.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// The instruction set of the CPU, or the name of the device that runs the models; `isa` in a file.
    #[serde(rename = "isa")]
    pub processor: String,
    /// Number of threads.
    pub threads: usize,
    /// Bytes of weights read per step of the target.
    pub step_bytes: usize,
    /// Multiply-adds per step of the target.
    pub step_multiply_adds: usize,
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { processor, threads, step_bytes, step_multiply_adds } = self;
        write!(
            f,
            "{processor} (threads: {threads}; bytes per step: {step_bytes}; multiply-adds per step: {step_multiply_adds})"
        )
    }
}

/// Measured costs: v(B) of verifying B rows, by context length, and of a step of each drafter. All are multiplied by
/// one speed factor, because other processes slow all of them down alike.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    machine: Machine,
    verify: BTreeMap<usize, BTreeMap<usize, Measured>>, // context octave, rows
    draft: BTreeMap<DrafterKind, Measured>,             // per token
    #[serde(skip)]
    rounds: usize,                    // of this text
    #[serde(skip)]
    recent: Vec<(usize, f64)>,        // last rounds, latest first: rows, and the log of measured over known cost
    #[serde(skip)]
    tuning: Tuning,
}

impl Costs {
    /// Costs of `machine`, nothing measured yet.
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

    /// Begins a text: the machine's current speed is unknown.
    pub(super) fn begin(&mut self) {
        self.recent.clear();
        self.rounds = 0;
    }

    /// Takes over what was measured since a copy was made of these: of each cost the one with more measurements.
    pub(crate) fn merge(&mut self, measured: Self) {
        let newer = |own: &mut Measured, measured: Measured| {
            if measured.samples >= own.samples {
                *own = measured;
            }
        };
        for (octave, rows) in measured.verify {
            let own = self.verify.entry(octave).or_default();
            rows.into_iter().for_each(|(rows, measured)| newer(own.entry(rows).or_default(), measured));
        }
        let steps = measured.draft.into_iter();
        steps.for_each(|(drafter, measured)| newer(self.draft.entry(drafter).or_default(), measured));
    }

    /// The machine and model that the costs are valid for.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// The log of how much slower the machine is now than when the costs were measured.
    fn speed(&self) -> f64 {
        let none = self.tuning.median.saturating_sub(self.recent.len());
        let residuals = self.recent.iter().map(|(_, residual)| *residual);
        median(residuals.chain(std::iter::repeat_n(0.0, none))).unwrap_or(0.0)
    }

    /// Records a verification of `rows` rows after `context` committed positions.
    pub fn verified(&mut self, context: usize, rows: usize, ms: f64) {
        if !MEASURED.contains(&ms) || rows == 0 {
            return;
        }
        let (tuning, speed) = (self.tuning, self.speed());
        let here = self.verify.entry(octave(context)).or_default();
        // The first rounds after a prompt are slower: the CPU caches have its data, not the weights.
        self.rounds += 1;
        if self.rounds <= tuning.median && here.get(&1).is_some_and(|plain| plain.samples >= tuning.median) {
            return;
        }
        let measured = here.entry(rows).or_default();
        if measured.samples < 2 {
            return measured.add(ms / speed.exp(), 0.0, &tuning);
        }
        let residual = (ms / measured.ms).ln();
        // Only rounds with other rows inform about cost ratios; a common slowdown belongs to the speed factor.
        let others: Vec<(usize, f64)> = self.recent.iter().copied().filter(|(other, _)| *other != rows).collect();
        if measured.samples < tuning.median {
            measured.add(ms / speed.exp(), 0.0, &tuning);
        } else if 2 * others.len() > tuning.median {
            let against = median(others.iter().map(|(_, residual)| *residual)).unwrap_or(speed);
            let difference = clip(residual - against, &tuning);
            measured.add(ms, difference, &tuning);
            // The difference may be due to the other cost.
            if let Some(other) = here.get_mut(&others[0].0) {
                other.shift(-difference, &tuning);
            }
        }
        self.recent.insert(0, (rows, residual));
        self.recent.truncate(tuning.median);
    }

    /// Records `tokens` draft steps that took `ms` together.
    pub fn drafted(&mut self, drafter: DrafterKind, tokens: usize, ms: f64) {
        if tokens > 0 && MEASURED.contains(&ms) {
            let ms = ms / tokens as f64 / self.speed().exp();
            let measured = self.draft.entry(drafter).or_default();
            let difference = if measured.samples > 0 { clip((ms / measured.ms).ln(), &self.tuning) } else { 0.0 };
            measured.add(ms, difference, &self.tuning);
        }
    }

    /// Estimated milliseconds of a step of `drafter`.
    pub fn step(&self, drafter: DrafterKind, context: usize) -> f64 {
        let assumed = || self.tuning.row_cost * self.verify(context, 1)[0].ms;
        match (self.known_step(drafter), self.draft.get(&drafter)) {
            (Some(ms), Some(measured)) if measured.samples > 1 => ms,
            // A single measurement may be an outlier, such as a cold start: unbounded, it could prevent a second one.
            (Some(ms), _) => ms.min(assumed() * (2.0 * self.tuning.unmeasured).exp()),
            (None, _) => assumed(),
        }
    }

    /// Milliseconds of a step of `drafter`, if one was measured.
    pub fn known_step(&self, drafter: DrafterKind) -> Option<f64> {
        self.draft.get(&drafter).map(|measured| measured.ms * self.speed().exp())
    }

    /// Estimates of verifying 1 to `most` rows after `context` committed positions.
    pub fn verify(&self, context: usize, most: usize) -> Vec<Estimate> {
        self.verify_rows(context, 1..=most)
    }

    /// Estimates of verifying each of `rows`. A lower bound is at least those of fewer rows of these.
    pub(super) fn verify_rows(&self, context: usize, rows: RangeInclusive<usize>) -> Vec<Estimate> {
        let [here, other] = self.nearest(context);
        let points = self.points(here, other);
        let (factor, mut least) = (self.speed().exp(), 0.0_f64);
        let estimate = |rows: usize| {
            let ms = factor * self.interpolate(&points, rows as f64);
            let samples = here.get(&rows).map_or(0, |measured| measured.samples);
            let error = self.tuning.unmeasured / (1.0 + (samples as f64).min(self.tuning.window)).sqrt();
            least = least.max(ms * (-self.tuning.confidence * error).exp());
            Estimate { ms, least_ms: least, samples }
        };
        rows.map(estimate).collect()
    }

    /// The most rows measured at this context, or at the nearest measured one.
    pub(super) fn measured_rows(&self, context: usize) -> usize {
        let last = self.nearest(context).into_iter().filter_map(|costs| costs.keys().next_back().copied());
        last.max().unwrap_or(1)
    }

    /// Measurements at this context, and at the nearest other.
    fn nearest(&self, context: usize) -> [&BTreeMap<usize, Measured>; 2] {
        static NONE: BTreeMap<usize, Measured> = BTreeMap::new();
        let octave = octave(context);
        let others = self.verify.iter().filter(|(other, _)| **other != octave);
        let other = others.min_by_key(|(other, _)| other.abs_diff(octave)).map(|(_, costs)| costs);
        [self.verify.get(&octave).unwrap_or(&NONE), other.unwrap_or(&NONE)]
    }

    /// Known points of v(B): rows, from 1 on, and non-decreasing milliseconds; better known points bound the rest.
    fn points(&self, here: &BTreeMap<usize, Measured>, other: &BTreeMap<usize, Measured>) -> Vec<(f64, f64)> {
        let mut points: Vec<(f64, f64)> = Vec::new();
        let insert = |points: &mut Vec<(f64, f64)>, rows: usize, ms: f64| {
            let at = points.partition_point(|(other, _)| *other < rows as f64);
            let least = at.checked_sub(1).map_or(0.0, |before| points[before].1);
            let most = points.get(at).map_or(f64::INFINITY, |(_, ms)| *ms);
            points.insert(at, (rows as f64, ms.max(least).min(most)));
        };
        let (firm, once): (Vec<_>, Vec<_>) = here.range(1..).partition(|(rows, of)| **rows == 1 || of.samples > 1);
        // Row counts not measured here: the cost at the nearest context times the median ratio of the two.
        let ratios = here.iter().filter_map(|(rows, here)| Some(here.ms / other.get(rows)?.ms));
        let ratio = median(ratios).unwrap_or(1.0);
        let elsewhere = other.range(1..).filter(|(rows, _)| !here.contains_key(rows));
        let elsewhere = elsewhere.map(|(rows, measured)| (rows, ratio * measured.ms));
        // From the most rows on, a point costs at most what the one after it does.
        for (rows, measured) in firm.iter().rev() {
            let most = points.last().map_or(f64::INFINITY, |(_, ms)| *ms);
            points.push((**rows as f64, measured.ms.min(most)));
        }
        points.reverse();
        for (rows, ms) in elsewhere {
            insert(&mut points, *rows, ms);
        }
        // In plain steps before the first measurement: any unit will do.
        let (rows, ms) = points.first().copied().unwrap_or((1.0, 1.0));
        if rows > 1.0 || points.is_empty() {
            insert(&mut points, 1, ms / (1.0 + self.tuning.row_cost * (rows - 1.0)));
        }
        // A single measurement may be an outlier, which is too high, not too low.
        for (rows, measured) in once {
            let most_ms = self.interpolate(&points, *rows as f64) * (2.0 * self.tuning.unmeasured).exp();
            insert(&mut points, *rows, measured.ms.min(most_ms));
        }
        points
    }

    /// Linear interpolation of the points (rows, ms), extrapolated after the last one.
    fn interpolate(&self, points: &[(f64, f64)], rows: f64) -> f64 {
        let after = points.partition_point(|(at, _)| *at <= rows);
        let (before, before_ms) = points[after - 1];
        let slope = match points.get(after) {
            Some((next, ms)) => (ms - before_ms) / (next - before),
            None if after == 1 => self.tuning.row_cost * before_ms,
            // The slope of the last half of the points, which approximates the next step.
            None => {
                let half = (0.5 * before).max(1.0);
                (before_ms - self.interpolate(points, half)) / (before - half)
            }
        };
        before_ms + slope * (rows - before)
    }

    /// Writes the costs as JSON.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let text = serde_json::to_string_pretty(self).map_err(|e| Error::file(path, e.to_string()))?;
        let mut file = Partial::create(path)?;
        file.put(text.as_bytes())?;
        file.publish()
    }

    /// Reads costs saved by [`Costs::save`], for use on `machine`.
    ///
    /// # Errors
    /// If the file is missing or malformed, or its costs were measured on another machine.
    pub fn load(path: impl AsRef<Path>, machine: &Machine) -> Result<Self> {
        let path = path.as_ref();
        regular_file(path, "a cost table")?;
        let bytes = std::fs::read(path).map_err(Error::io(path))?;
        let again = "; delete it to measure again";
        let costs: Self = serde_json::from_slice(&bytes)
            .map_err(|e| Error::file(path, format!("is not a cost table: {e}{again}")))?;
        if costs.machine != *machine {
            return Err(Error::file(path, format!("was measured on {}, this is {machine}{again}", costs.machine)));
        }
        let rows = costs.verify.iter().flat_map(|(octave, all)| {
            all.iter().map(move |(rows, measured)| (format!("verify.{octave}.{rows}.ms"), measured.ms))
        });
        let steps = costs.draft.iter().map(|(drafter, measured)| (format!("draft.{drafter}.ms"), measured.ms));
        if let Some((field, ms)) = rows.chain(steps).find(|(_, ms)| !MEASURED.contains(ms)) {
            return Err(Error::file(path, format!("{field}: {ms:e} ms is not from 1e-9 to 1e9{again}")));
        }
        Ok(costs)
    }
}

/// Estimated cost of verifying a number of rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Milliseconds, measured or interpolated.
    pub ms: f64,
    /// Lower confidence bound.
    pub least_ms: f64,
    /// Measurements at this context and row count.
    pub samples: usize,
}

fn octave(context: usize) -> usize {
    (context / SHORT).checked_ilog2().map_or(0, |octave| 1 + octave as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_slow_step_is_bounded() {
        let mut costs = Costs::default();
        (0..4).for_each(|_| costs.verified(0, 1, 10.0));
        costs.drafted(DrafterKind::DraftModel, 1, 1000.0);
        let first = costs.step(DrafterKind::DraftModel, 0);
        assert!(first < 10.0, "{first} ms");
        costs.drafted(DrafterKind::DraftModel, 1, 2.0);
        assert_eq!(costs.step(DrafterKind::DraftModel, 0), 2.0);
    }

    /// Of two texts that were written at once, neither loses what the other measured.
    #[test]
    fn costs_of_concurrent_texts_are_merged() {
        let mut engine = Costs::default();
        engine.verified(0, 1, 10.0);
        let (mut first, mut second) = (engine.clone(), engine.clone());
        (0..3).for_each(|_| first.verified(0, 1, 10.0));
        first.verified(2000, 4, 30.0);
        first.drafted(DrafterKind::Mtp, 2, 4.0);
        second.verified(0, 1, 10.0);
        second.verified(0, 2, 12.0);
        engine.merge(first);
        engine.merge(second);
        let samples = |context: usize, rows: usize| engine.verify(context, rows)[rows - 1].samples;
        assert_eq!([samples(0, 1), samples(0, 2), samples(2000, 4)], [4, 1, 1]);
        assert_eq!(engine.known_step(DrafterKind::Mtp), Some(2.0));
    }
}
