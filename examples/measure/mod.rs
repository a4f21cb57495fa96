//! What passes of a target cost here, and what the machine can do at best.

use std::time::Instant;

use anyhow::{Context, Result};
use foretoken::Engine;
use foretoken::gemma4::{Output, Wanted};
use foretoken::kv::{KvCache, KvOptions};
use foretoken::nn::Arena;
use foretoken_kernels::measure;

/// Milliseconds, a value for each measurement.
pub struct Curve {
    /// Of verifying so many rows at once.
    pub verify: Vec<(usize, Vec<f64>)>,
    /// Of a draft step; empty without an assistant.
    pub draft: Vec<f64>,
}

/// Measures verifications of each of `rows` behind `depth` positions, in turn, `repeats` times over, and draft steps. To be
/// called on the engine's threads ([`Engine::run`]).
pub fn curve(engine: &Engine, depth: usize, rows: &[usize], repeats: usize) -> Result<Curve> {
    let most = rows.iter().copied().max().unwrap_or(1);
    let ids = ids(engine, depth.max(most));
    let mut kv = cache(engine)?;
    for chunk in ids[..depth].chunks(kv.max_round_rows()) {
        pass(engine, &mut kv, chunk, Wanted::Nothing, chunk.len())?;
    }
    let hidden = pass(engine, &mut kv, &ids[..1], Wanted::All, 0)?.context("a row")?.hidden;
    let mut verify: Vec<_> = rows.iter().map(|rows| (*rows, Vec::new())).collect();
    let mut draft = Vec::new();
    for repeat in 0..=repeats {
        for (rows, times) in &mut verify {
            let start = Instant::now();
            pass(engine, &mut kv, &ids[..*rows], Wanted::All, 0)?;
            // The first turn only warms up.
            times.extend((repeat > 0).then(|| 1e3 * start.elapsed().as_secs_f64()));
        }
        if let Some(assistant) = engine.assistant() {
            let start = Instant::now();
            assistant.step(engine.target(), ids[0], &hidden, kv.committed())?;
            draft.extend((repeat > 0).then(|| 1e3 * start.elapsed().as_secs_f64()));
        }
    }
    Ok(Curve { verify, draft })
}

/// Ids that are no text. The first 300 of a vocabulary are control tokens and bytes.
pub fn ids(engine: &Engine, count: usize) -> Vec<u32> {
    let vocab = engine.target().config().vocab_size as u32;
    let first = 300.min(vocab / 2);
    (0..count as u32).map(|i| first + i.wrapping_mul(7919) % (vocab - first)).collect()
}

/// An empty cache.
pub fn cache(engine: &Engine) -> Result<KvCache> {
    Ok(KvCache::new(engine.target().kv_layout(), &KvOptions::default(), usize::MAX / 2, engine.isa())?)
}

/// Runs `ids` behind what the cache has, and keeps the first `keep` of them.
pub fn pass(engine: &Engine, kv: &mut KvCache, ids: &[u32], wanted: Wanted, keep: usize) -> Result<Option<Output>> {
    let mut round = kv.begin_round(ids.len())?;
    let output = engine.target().forward(ids, &mut round, wanted).context("a forward pass")?;
    round.commit(keep);
    Ok(output)
}

/// The middle one, or the mean of the middle two; no number if there are none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.get(values.len().wrapping_sub(1) / 2..=values.len() / 2) {
        Some(middle) => middle.iter().sum::<f64>() / middle.len() as f64,
        None => f64::NAN,
    }
}

/// GB/s: the best of three passes over more memory than any cache holds, all threads at once. To be called on the engine's
/// threads; `None` if there is no memory to measure with.
pub fn read_bandwidth(engine: &Engine) -> Option<f64> {
    const BYTES: usize = 1 << 30;
    // The memory that packed weights lie in: with small pages, reading is slower.
    let mut piece = Arena::default().take(BYTES)?;
    piece.as_mut_slice().fill(1);
    let data = piece.as_slice();
    let pass = || {
        let start = Instant::now();
        let part = data.len() / engine.threads();
        rayon::scope(|scope| {
            for part in data.chunks(part) {
                scope.spawn(move |_| {
                    std::hint::black_box(measure::read_all(engine.isa(), part));
                });
            }
        });
        BYTES as f64 / 1e9 / start.elapsed().as_secs_f64()
    };
    Some((0..3).map(|_| pass()).fold(0.0, f64::max))
}
