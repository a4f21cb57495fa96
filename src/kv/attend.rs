//! Attention over a store.
//!
//! Split-KV attention: keys are read page by page, [`SPLIT_PAGES`] pages form a split, each split has its own online
//! softmax, and splits are merged first to last. Page and split boundaries are fixed in the sequence, so a row's bits
//! do not depend on the other rows of the batch, on prefill chunks, or on the number of threads.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use candle_core::Tensor;
use foretoken_kernels::attention::turboquant::{QuantizedQuery, rotate, rotate_back};
use foretoken_kernels::attention::{OnlineSoftmax, Query, Scratch, attend_block, finish, merge};

use super::cache::KvCache;
use super::layout::PAGE;
use super::store::{Reading, Store};
use crate::Result;
use crate::nn::{Aligned, F32View, blocks, divides, for_each, tensor, threads};

/// Pages per split: 1024 positions, a few hundred KiB of K and V, so that the work per task outweighs its scheduling.
const SPLIT_PAGES: usize = 8;

/// Tasks per wave, in multiples of [`Queries::min_tasks`]. The splits of a wave are computed in parallel, and merged
/// before the next wave. More waves mean more waiting at their ends, fewer need more memory.
const WAVE: usize = 4;

/// Query rows that share one read of the keys. More rows would read the keys less often, but their outputs would not
/// fit the cache.
const QUERY_BLOCK: usize = 16;

/// The queries of a block of rows, and the store of the cache that they read.
struct Queries<'a> {
    cache: &'a KvCache,
    store: &'a Store,
    rows: Aligned<f32>, // (rows, heads, head_dim), rotated where the keys are
    words: Vec<i32>,    // (rows, heads, words): quantized queries, for quantized keys
    positions: &'a (dyn Fn(usize) -> Range<usize> + Sync), // of a row: see `attend`
    heads: usize,
    group: usize,       // query heads per K/V head
    per_kv_head: usize, // queries: (rows, group)
    min_tasks: usize,   // among which they are divided; 1 if other blocks occupy the threads
}

/// Queries of one K/V head, over one split of its keys.
struct SplitTask<'a> {
    first: usize, // of the head's queries in the block, (rows, group)
    kv_head: usize,
    split: usize,
    softmax: &'a mut [OnlineSoftmax], // (queries)
    output: &'a mut [f32],            // (queries, head_dim)
}

/// The attention over each split of a wave.
struct SplitPartials {
    softmax: Vec<OnlineSoftmax>, // (splits, kv_heads, rows, group)
    output: Vec<f32>,            // (splits, kv_heads, rows, group, head_dim)
}

/// The attention of `q` `(rows, heads, head_dim)`: `(rows, heads * head_dim)`. `at(row)` is `position..end`: the
/// query's position, and the first masked one (its own is visible if `end` is after it).
pub(super) fn attend(
    cache: &KvCache,
    store: &Store,
    q: &Tensor,
    at: impl Fn(usize) -> Range<usize> + Sync,
) -> Result<Tensor> {
    let (rows, heads, head_dim) = q.dims3()?;
    let kv_heads = store.layout.num_kv_heads;
    if head_dim != store.layout.head_dim || !heads.is_multiple_of(kv_heads) {
        let stored = (kv_heads, store.layout.head_dim);
        let problem = format!("attend: {heads} query heads of {head_dim} over (K/V heads, width) = {stored:?}");
        return Err(candle_core::Error::Msg(problem).into());
    }
    let view = F32View::new(q)?;
    // The largest multiple of the number of threads: that many blocks are one task each; the others are divided.
    let threads = threads();
    let at_once = rows.div_ceil(QUERY_BLOCK) / threads * threads;
    let block_len = QUERY_BLOCK * heads * head_dim;
    let y = blocks(view.len(), block_len, at_once, |i, y| {
        let at = |row: usize| at(i * QUERY_BLOCK + row);
        let min_tasks = if i < at_once { 1 } else { 2 * threads };
        let queries = Queries::new(cache, store, &view[i * block_len..][..y.len()], &at, heads, min_tasks);
        attend_rows(&queries, y);
    });
    tensor(y, (rows, heads * head_dim))
}

/// `attend` of every sequence, `(rows, heads * head_dim)` together. `keys` estimates its work: queries times keys that
/// they read. The longest sequences are divided among all threads, one after the other, as many as [`divided`] says;
/// then each other is one task.
///
/// # Errors
/// The first of `attend`.
pub(super) fn attend_sequences<T: Sync>(
    sequences: &[T],
    keys: impl Fn(&T) -> usize,
    attend: impl Fn(&T) -> Result<Tensor> + Sync,
) -> Result<Tensor> {
    let mut attended: Vec<_> = sequences.iter().map(|_| None).collect();
    let tasks = attended.iter_mut().zip(sequences);
    let mut tasks: Vec<_> = tasks.map(|(attended, sequence)| (keys(sequence), attended, sequence)).collect();
    tasks.sort_by_key(|(keys, ..)| Reverse(*keys));
    let work: Vec<usize> = tasks.iter().map(|(keys, ..)| *keys).collect();
    let alone = tasks.split_off(divided(&work, threads()));
    tasks.into_iter().for_each(|(_, attended, sequence)| *attended = Some(attend(sequence)));
    for_each(alone.into_iter(), |(_, attended, sequence)| *attended = Some(attend(sequence)));
    let attended: Result<Vec<_>> = attended.into_iter().flatten().collect();
    Ok(Tensor::cat(&attended?, 0)?)
}

/// How many of the sequences with these amounts of `work`, longest first, are divided among `threads`: as few as leave
/// idle at most a quarter of the whole work if each other is one task, for the thread with the least work so far.
fn divided(work: &[usize], threads: usize) -> usize {
    let whole: usize = work.iter().sum();
    let idle = |alone: &[usize]| {
        let mut threads = BinaryHeap::from(vec![Reverse(0usize); threads]);
        for work in alone {
            if let Some(mut least) = threads.peek_mut() {
                least.0 += work;
            }
        }
        let last = threads.iter().map(|Reverse(work)| *work).max().unwrap_or(0);
        last * threads.len() - alone.iter().sum::<usize>()
    };
    (0..work.len()).find(|first| 4 * idle(&work[*first..]) <= whole).unwrap_or(work.len())
}

/// Computes the attention of the queries: `y` is `(rows, heads, head_dim)`.
fn attend_rows(queries: &Queries<'_>, y: &mut [f32]) {
    let (isa, store, heads) = (queries.cache.isa, queries.store, queries.heads);
    let (kv_heads, head_dim) = (store.layout.num_kv_heads, store.layout.head_dim);
    let rows = y.len() / (heads * head_dim);
    let keys = (0..rows).map(|row| store.visible((queries.positions)(row))).filter(|keys| !keys.is_empty());
    let Some(keys) = keys.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)) else { return };
    let splits = keys.start / (SPLIT_PAGES * PAGE)..keys.end.div_ceil(SPLIT_PAGES * PAGE);

    let per_task = queries.per_task(splits.len() * kv_heads);
    let per_wave = match queries.min_tasks {
        1 => 1,
        least => (WAVE * least).div_ceil(kv_heads * queries.per_kv_head.div_ceil(per_task)).min(splits.len()),
    };
    let mut totals = vec![OnlineSoftmax::EMPTY; rows * heads];
    let len = per_wave * kv_heads * queries.per_kv_head;
    let mut partials = SplitPartials { softmax: vec![OnlineSoftmax::EMPTY; len], output: vec![0.0; len * head_dim] };
    for first in splits.clone().step_by(per_wave) {
        let wave = first..splits.end.min(first + per_wave);
        attend_wave(queries, wave.clone(), per_task, &mut partials);
        merge_wave(queries, wave.len(), &partials, &mut totals, y);
    }
    for (total, y) in totals.into_iter().zip(y.chunks_exact_mut(head_dim)) {
        finish(isa, total, y);
    }
    if let Some((_, groups)) = store.value_quantization() {
        rotate_back(isa, y, groups);
    }
    if let Some(rotary_first) = store.rotary_first() {
        rotary_first.restore(y);
    }
}

/// Computes the attention over every split of a wave.
fn attend_wave(queries: &Queries<'_>, wave: Range<usize>, per_task: usize, partials: &mut SplitPartials) {
    let layout = &queries.store.layout;
    let (kv_heads, head_dim, len) = (layout.num_kv_heads, layout.head_dim, queries.per_kv_head);
    let of_splits = partials.softmax.chunks_mut(len).zip(partials.output.chunks_mut(len * head_dim));
    let tasks = of_splits.take(wave.len() * kv_heads).enumerate().flat_map(|(i, (softmax, output))| {
        let (kv_head, split) = (i % kv_heads, wave.start + i / kv_heads);
        let parts = softmax.chunks_mut(per_task).zip(output.chunks_mut(per_task * head_dim));
        let firsts = (0..).step_by(per_task);
        firsts.zip(parts).map(move |(first, (softmax, output))| SplitTask { first, kv_head, split, softmax, output })
    });
    let run = |task: SplitTask<'_>| {
        task.softmax.fill(OnlineSoftmax::EMPTY);
        task.output.fill(0.0);
        attend_split(queries, task);
    };
    match queries.min_tasks {
        1 => tasks.for_each(run),
        _ => for_each(tasks, run),
    }
}

/// Merges the splits of a wave, first to last, into `totals` `(rows, heads)` and `y` `(rows, heads, head_dim)`.
fn merge_wave(
    queries: &Queries<'_>,
    splits: usize,
    partials: &SplitPartials,
    totals: &mut [OnlineSoftmax],
    y: &mut [f32],
) {
    let (isa, heads, group) = (queries.cache.isa, queries.heads, queries.group);
    let head_dim = y.len() / totals.len();
    let merge_queries = |(first, (totals, y)): (usize, (&mut [OnlineSoftmax], &mut [f32]))| {
        for (query, (total, y)) in (first..).zip(totals.iter_mut().zip(y.chunks_exact_mut(head_dim))) {
            let (row, kv_head, member) = (query / heads, query % heads / group, query % group);
            for split in 0..splits {
                let i = (split * (heads / group) + kv_head) * queries.per_kv_head + row * group + member;
                merge(isa, total, y, partials.softmax[i], &partials.output[i * head_dim..(i + 1) * head_dim]);
            }
        }
    };
    let divided = queries.min_tasks > 1 && divides(splits * y.len());
    let per_task = if divided { totals.len().div_ceil(2 * threads()) } else { totals.len() }.max(1);
    let tasks = totals.chunks_mut(per_task).zip(y.chunks_mut(per_task * head_dim));
    for_each((0..).step_by(per_task).zip(tasks), merge_queries);
}

impl<'a> Queries<'a> {
    fn new(
        cache: &'a KvCache,
        store: &'a Store,
        rows: &[f32],
        positions: &'a (dyn Fn(usize) -> Range<usize> + Sync),
        heads: usize,
        min_tasks: usize,
    ) -> Self {
        let group = heads / store.layout.num_kv_heads;
        let per_kv_head = rows.len() / (heads * store.layout.head_dim) * group;
        let (rows, words) = match store.key_quantization() {
            None => (Aligned::copy(rows), Vec::new()),
            Some((format, groups)) => {
                let width = store.layout.head_dim;
                let mut rows = store.rotary_first().map_or_else(|| rows.to_vec(), |order| order.reorder_queries(rows));
                let values = store.values_as_keys();
                rotate(cache.isa, &mut rows, values.map_or(groups, |(_, groups)| groups));
                let mut words = vec![0; rows.len() / width * words_per_query(store)];
                for (row, words) in rows.chunks_exact(width).zip(words.chunks_exact_mut(words_per_query(store))) {
                    let (keys, as_keys) = words.split_at_mut(QuantizedQuery::word_count(format, groups));
                    QuantizedQuery::quantize(format, groups, &row[..groups.head_dim()], keys);
                    if let Some((format, groups)) = values {
                        QuantizedQuery::quantize(format, groups, row, as_keys);
                    }
                }
                (Aligned::copy(&rows), words)
            }
        };
        Self { cache, store, rows, words, positions, heads, group, per_kv_head, min_tasks }
    }

    /// Queries per task: fewer than those of a K/V head if `tasks` tasks would leave threads without work. Every task
    /// reads the keys. (A minimum of work per task gains nothing.)
    fn per_task(&self, tasks: usize) -> usize {
        self.per_kv_head.div_ceil(self.min_tasks.div_ceil(tasks))
    }

    /// Quantized query `index` of `(rows, heads)`, if keys are quantized.
    fn quantized(&self, index: usize) -> Option<QuantizedQuery<'_>> {
        let (format, groups) = self.store.key_quantization()?;
        let len = words_per_query(self.store);
        let (keys, as_keys) =
            self.words[index * len..(index + 1) * len].split_at(QuantizedQuery::word_count(format, groups));
        let query = QuantizedQuery::from_words(format, groups, keys);
        Some(match self.store.values_as_keys() {
            Some((format, groups)) => query.with_values(QuantizedQuery::from_words(format, groups, as_keys)),
            None => query,
        })
    }
}

/// Words of a quantized query: those for stored keys, then those for quantized V serving as K (K = V).
fn words_per_query(store: &Store) -> usize {
    let words =
        |quantization: Option<_>| quantization.map_or(0, |(format, groups)| QuantizedQuery::word_count(format, groups));
    words(store.key_quantization()) + words(store.values_as_keys())
}

fn attend_split(all: &Queries<'_>, task: SplitTask<'_>) {
    let (cache, store) = (all.cache, all.store);
    let head_dim = store.layout.head_dim;
    let (mut scores, mut weights) = (vec![0.0; Scratch::len(PAGE)], vec![0.0; Scratch::len(PAGE)]);
    let mut scratch = Scratch { scores: &mut scores, weights: &mut weights };
    let mut assembled = vec![0.0; if store.assembles_keys() { PAGE * head_dim } else { 0 }];
    let row_of = |i: usize| (task.first + i) / all.group;
    let mut queries: Vec<_> = (task.softmax.iter_mut().zip(task.output.chunks_exact_mut(head_dim)))
        .enumerate()
        .map(|(i, (softmax, output))| {
            let index = row_of(i) * all.heads + task.kv_head * all.group + (task.first + i) % all.group;
            let query = &all.rows[index * head_dim..(index + 1) * head_dim];
            Query { query, quantized: all.quantized(index), visible: 0..0, softmax, output }
        })
        .collect();
    for page in task.split * SPLIT_PAGES..(task.split + 1) * SPLIT_PAGES {
        for &reading in store.readings() {
            for (i, query) in queries.iter_mut().enumerate() {
                query.visible = store.visible_in_page(reading, page, (all.positions)(row_of(i)));
            }
            let visible = queries.iter().map(|query| &query.visible).filter(|visible| !visible.is_empty());
            if let Some(len) = visible.map(|visible| visible.end).max() {
                // Quantized K or V is read in whole pages; the other side must match.
                let len = if reading == Reading::Quantized { PAGE } else { len };
                let block = store.block(reading, (page, task.kv_head, len), &cache.angles, &mut assembled);
                attend_block(cache.isa, block, &mut queries, &mut scratch);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sequences_that_would_end_last_are_divided() {
        for (work, threads, want) in [
            (vec![9, 9], 1, 0),
            (vec![9, 9], 2, 0),
            (vec![9, 9, 9], 2, 1),
            (vec![9, 9, 9], 4, 3),
            (vec![1000, 1, 1, 1], 2, 1),
            (vec![5; 31], 16, 0),
            (vec![5; 17], 16, 1),
            (vec![5; 24], 16, 8),
            (vec![8, 4, 2, 1, 1], 2, 0),
            (vec![0, 0], 2, 0),
            (vec![], 2, 0),
        ] {
            assert_eq!(divided(&work, threads), want, "{work:?} on {threads} threads");
        }
    }
}
