//! Measurements: cost of a target's forward passes, whole generations, and the best read bandwidth of the machine.

use std::time::{Duration, Instant};

use anyhow::Result;
use foretoken::nn::Arena;
use foretoken::{Engine, GenerateOptions, Isa, Probe, Session, SessionOptions, Statistics};
use foretoken_kernels::measure;

/// Medians in milliseconds.
pub struct Curve {
    /// Verifying this many rows in one pass.
    pub verify: Vec<(usize, f64)>,
    /// A draft step; `None` without an assistant or a NextN head.
    pub draft: Option<f64>,
}

/// Measures verifications of each of `rows` after `depth` positions, and draft steps, interleaved, `repeats` times.
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
            // The first turn is a warm-up.
            times.extend((repeat > 0).then_some(1e3 * time.as_secs_f64()));
        }
        if engine.has_mtp() {
            let time = probe.draft(ids[0], DRAFTED)?;
            draft.extend((repeat > 0).then(|| 1e3 * time.as_secs_f64() / DRAFTED as f64));
        }
    }
    let verify = verify.into_iter().map(|(rows, times)| (rows, median(times))).collect();
    Ok(Curve { verify, draft: engine.has_mtp().then(|| median(draft)) })
}

/// Cost of rolling back rejected rows, in milliseconds.
pub struct Rollback {
    /// Rows of the round.
    pub rows: usize,
    /// Rows of them that are committed.
    pub keep: usize,
    /// The pass without drafting, with nothing to replay.
    pub verify: f64,
    /// The commit, and the time that replaying its rows adds to the next pass.
    pub rollback: f64,
}

/// Measures rounds of the given rows after `depth` positions that commit some of them for the next
/// pass to replay, interleaved with passes that have nothing to replay: medians of `repeats` pairs.
/// Empty for models without a recurrent state.
pub fn rollback(engine: &Engine, depth: usize, rounds: &[(usize, usize)], repeats: usize) -> Result<Vec<Rollback>> {
    let most = rounds.iter().map(|(rows, _)| *rows).max().unwrap_or(1);
    let ids = ids(engine, depth.max(most));
    let mut probe = Probe::new(engine, &SessionOptions::default())?;
    if probe.recurrent_bytes() == 0 {
        return Ok(Vec::new());
    }
    probe.read(&ids[..depth])?;
    // The pass after a prompt replays its last rows.
    probe.verify(&ids[..most])?;
    let mut times = vec![[const { Vec::new() }; 3]; rounds.len()];
    for _ in 0..repeats {
        for ((rows, keep), [verify, commit, replay]) in rounds.iter().zip(&mut times) {
            let committed = probe.round(&ids[..*rows], *keep)?;
            let replayed = probe.round(&ids[..*rows], 0)?;
            let ms = |time: Duration| 1e3 * time.as_secs_f64();
            verify.push(ms(committed.verify));
            commit.push(ms(committed.commit));
            replay.push(ms(replayed.verify) - ms(committed.verify));
        }
    }
    let results = rounds.iter().zip(times).map(|((rows, keep), [verify, commit, replay])| Rollback {
        rows: *rows,
        keep: *keep,
        verify: median(verify),
        rollback: median(commit) + median(replay),
    });
    Ok(results.collect())
}

/// The tokens and the statistics of a whole generation.
///
/// # Errors
/// As [`foretoken::Session::generate`], or if the generation fails.
pub fn generate(session: &mut Session, prompt: &[u32], options: &GenerateOptions) -> Result<(Vec<u32>, Statistics)> {
    let mut generation = session.generate(prompt, options)?;
    let mut ids = Vec::new();
    for piece in generation.by_ref() {
        ids.extend(piece?.tokens);
    }
    Ok((ids, generation.statistics().clone()))
}

/// Tokens per draft: on a device, the host does not wait between them.
const DRAFTED: usize = 3;

/// Arbitrary ids. The first 300 of a vocabulary are control tokens and bytes.
pub fn ids(engine: &Engine, count: usize) -> Vec<u32> {
    let vocab = engine.target().vocab_size() as u32;
    let first = 300.min(vocab / 2);
    (0..count).map(|i| first + (i as u32).wrapping_mul(7919) % (vocab - first)).collect()
}

/// The median; NaN if there are no values.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.get(values.len().wrapping_sub(1) / 2..=values.len() / 2) {
        Some(middle) => middle.iter().sum::<f64>() / middle.len() as f64,
        None => f64::NAN,
    }
}

/// Best read bandwidth of the compute device in GB/s; `None` if there is not enough memory to measure.
pub fn read_bandwidth(engine: &Engine) -> Option<f64> {
    match foretoken::device_bandwidth(engine) {
        Ok(None) => processor_bandwidth(engine.isa(), engine.threads()),
        Ok(read) => read,
        Err(_) => None,
    }
}

/// Best of three passes over more memory than any cache holds, on all threads, in GB/s; `None` without that memory.
pub fn processor_bandwidth(isa: Isa, threads: usize) -> Option<f64> {
    const BYTES: usize = 1 << 30;
    // What is mapped and does not fit would end the process.
    if foretoken::kv::available_memory().is_some_and(|available| available < (BYTES + BYTES / 4) as u64) {
        return None;
    }
    // The same kind of memory as packed weights: with small pages, reading is slower.
    let mut piece = Arena::default().allocate(BYTES)?;
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
