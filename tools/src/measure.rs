//! What passes of a target cost here, and what the machine can do at best.

use std::time::Instant;

use anyhow::Result;
use foretoken::nn::Arena;
use foretoken::{Engine, Isa, Probe, SessionOptions};
use foretoken_kernels::measure;

/// Milliseconds, a value for each measurement.
pub struct Curve {
    /// Of verifying so many rows at once.
    pub verify: Vec<(usize, Vec<f64>)>,
    /// Of a draft step; empty without an assistant.
    pub draft: Vec<f64>,
}

/// Measures verifications of each of `rows` behind `depth` positions, in turn, `repeats` times over, and draft steps.
pub fn curve(engine: &Engine, depth: usize, rows: &[usize], repeats: usize) -> Result<Curve> {
    let most = rows.iter().copied().max().unwrap_or(1);
    let ids = ids(engine, depth.max(most));
    let mut probe = Probe::new(engine, &SessionOptions::default())?;
    probe.read(&ids[..depth])?;
    let mut verify: Vec<_> = rows.iter().map(|rows| (*rows, Vec::new())).collect();
    let mut draft = Vec::new();
    for repeat in 0..=repeats {
        for (rows, times) in &mut verify {
            let time = probe.verify(&ids[..*rows])?;
            // The first turn only warms up.
            times.extend((repeat > 0).then_some(1e3 * time.as_secs_f64()));
        }
        if engine.assistant().is_some() {
            let time = probe.draft(ids[0], DRAFTED)?;
            draft.extend((repeat > 0).then(|| 1e3 * time.as_secs_f64() / DRAFTED as f64));
        }
    }
    Ok(Curve { verify, draft })
}

/// Tokens of a draft: the host does not wait between them where a device drafts.
const DRAFTED: usize = 3;

/// Ids that are no text. The first 300 of a vocabulary are control tokens and bytes.
pub fn ids(engine: &Engine, count: usize) -> Vec<u32> {
    let vocab = engine.target().vocab_size() as u32;
    let first = 300.min(vocab / 2);
    (0..count as u32).map(|i| first + i.wrapping_mul(7919) % (vocab - first)).collect()
}

/// The middle one, or the mean of the middle two; no number if there are none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.get(values.len().wrapping_sub(1) / 2..=values.len() / 2) {
        Some(middle) => middle.iter().sum::<f64>() / middle.len() as f64,
        None => f64::NAN,
    }
}

/// GB/s at which the device that computes reads at best; `None` if there is no memory to measure with.
pub fn read_bandwidth(engine: &Engine) -> Option<f64> {
    match foretoken::device_bandwidth(engine) {
        Ok(None) => processor_bandwidth(engine.isa(), engine.threads()),
        Ok(read) => read,
        Err(_) => None,
    }
}

/// GB/s: the best of three passes over more memory than any cache holds, all threads at once; `None` without that memory.
pub fn processor_bandwidth(isa: Isa, threads: usize) -> Option<f64> {
    const BYTES: usize = 1 << 30;
    // The memory that packed weights lie in: with small pages, reading is slower.
    let mut piece = Arena::default().take(BYTES)?;
    piece.as_mut_slice().fill(1);
    let data = piece.as_slice();
    let pass = || {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for part in data.chunks(data.len() / threads) {
                scope.spawn(move || std::hint::black_box(measure::read_all(isa, part)));
            }
        });
        BYTES as f64 / 1e9 / start.elapsed().as_secs_f64()
    };
    Some((0..3).map(|_| pass()).fold(0.0, f64::max))
}
