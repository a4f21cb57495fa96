//! What rounds cost on this machine, as measured.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::DrafterKind;
use crate::{Error, Result};

/// A verification of one more row is taken to cost this share of a plain step until two row counts are measured.
const ROW: f64 = 0.1;

/// A draft step is taken to cost this share of a plain step until one is measured.
const STEP: f64 = 0.15;

/// Samples of which the median counts, before an average takes over: a first sample is often an outlier.
const FIRST: usize = 5;

/// Weight of a new sample in the average.
const NEW: f64 = 0.03;

/// Weight of a new sample in the machine's speed, which all costs share: it drifts within seconds where others compute
/// on the same processors, and the costs' ratios do not.
const DRIFT: f64 = 0.1;

/// Samples that are no accident, and the relative error of one, about.
const FIRM: usize = 3;
const NOISE: f64 = 0.05;

/// Contexts below this many positions cost the same; from there on every octave is measured for itself.
const SHORT: usize = 512;

/// Milliseconds that something took, averaged.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Measured {
    ms: f64,
    samples: usize,
    #[serde(skip)]
    first: Vec<f64>,
}

impl Measured {
    fn add(&mut self, ms: f64) {
        if self.samples < FIRST {
            self.first.push(ms);
            self.first.sort_by(f64::total_cmp);
            self.ms = self.first[(self.first.len() - 1) / 2];
        } else {
            // One sample moves the average by a quarter of its weight at most, however long the pause that it fell into.
            let weight = (1.0 / self.samples as f64).max(NEW);
            self.ms *= 1.0 + weight * ((ms / self.ms).clamp(0.75, 1.25) - 1.0);
        }
        self.samples += 1;
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
    #[serde(skip)]
    drift: f64,                       // how much slower the machine is than when the figures were taken, less 1
}

impl Costs {
    /// Nothing known about `machine` yet.
    pub fn new(machine: Machine) -> Self {
        Self { machine, ..Self::default() }
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
        let speed = 1.0 + self.drift;
        let measured = self.verify.entry(octave(context)).or_default().entry(rows).or_default();
        if measured.samples >= FIRST {
            self.drift += DRIFT * speed * ((ms / (measured.ms * speed)).clamp(0.75, 1.25) - 1.0);
        }
        measured.add(ms / speed);
    }

    /// Takes in `tokens` draft steps that took `ms` together.
    pub fn drafted(&mut self, drafter: DrafterKind, tokens: usize, ms: f64) {
        if tokens > 0 && ms > 0.0 && ms.is_finite() {
            self.draft.entry(drafter).or_default().add(ms / tokens as f64 / (1.0 + self.drift));
        }
    }

    /// Estimated milliseconds of a step of `drafter`.
    pub fn step(&self, drafter: DrafterKind, context: usize) -> f64 {
        self.known_step(drafter).unwrap_or_else(|| STEP * self.verify(context, 1)[0].ms)
    }

    /// Milliseconds of a step of `drafter`, if one was measured.
    pub fn known_step(&self, drafter: DrafterKind) -> Option<f64> {
        self.draft.get(&drafter).map(|measured| measured.ms * (1.0 + self.drift))
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
        let points = |least: usize| {
            let mut points: BTreeMap<usize, (f64, f64)> = BTreeMap::new();
            if count > 0.0 || here.is_empty() {
                points.extend(other.iter().map(|(rows, measured)| (*rows, (measured.ms * ratio, 1.0))));
            }
            let own = here.iter().filter(|(_, measured)| measured.samples >= least);
            points.extend(own.map(|(rows, measured)| (*rows, (measured.ms, measured.samples as f64))));
            ascending(points)
        };
        let (all, firm) = (points(1), points(FIRM));
        let firm = if firm.is_empty() { &all } else { &firm };
        let speed = 1.0 + self.drift;
        let mut least = speed * interpolate(firm, 1.0);
        let estimate = |rows| {
            let samples = here.get(&rows).map_or(0, |measured| measured.samples);
            let ms = speed * interpolate(&all, rows as f64);
            let known = samples > 0 || other.contains_key(&rows);
            if samples < FIRM {
                return Estimate {
                    ms,
                    firm_ms: speed * interpolate(firm, rows as f64),
                    least_ms: least,
                    samples,
                    known,
                };
            }
            least = ms;
            Estimate { ms, firm_ms: ms, least_ms: ms * (1.0 - NOISE / (samples as f64).sqrt()), samples, known }
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
        Ok(costs)
    }
}

/// What verifying some number of rows costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Milliseconds, measured or interpolated.
    pub ms: f64,
    /// The same without what was measured so seldom that it may have been an accident.
    pub firm_ms: f64,
    /// Milliseconds if it is as cheap as firm measurements allow.
    pub least_ms: f64,
    /// Measurements at this context and row count.
    pub samples: usize,
    /// Whether this row count was measured at this or a neighbouring context.
    pub known: bool,
}

fn octave(context: usize) -> usize {
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
    last_ms + slope.max(0.01 * plain) * (rows - last)
}
