//! Attention over a store.
//!
//! A query's keys are walked in pages, and pages are grouped in splits of [`SPLIT_PAGES`]; every split is summed on its
//! own and the splits are merged first to last. Both boundaries are fixed in the sequence, so a row's bits depend on its
//! own keys only: not on the rows that ride with it, on chunking, or on the number of threads that share the splits.

use std::ops::Range;

use candle_core::Tensor;
use foretoken_kernels::Isa;
use foretoken_kernels::attend::{Query, Running, Scratch, attend_tile, finish, merge};
use foretoken_kernels::turbo::{PreparedQuery, rotate, rotate_back};
use rayon::prelude::*;

use super::store::{Reading, Store};
use super::{KvCache, PAGE};
use crate::Result;
use crate::nn::{Aligned, F32View, tensor};

/// Pages per split: 1024 positions, a few hundred KiB of K and V, which outlasts handing the piece to a thread.
const SPLIT_PAGES: usize = 8;

/// Query rows that share a pass over the keys. More would read them less often but spill the cache with results.
const TILE_ROWS: usize = 16;

/// The queries of one call.
struct Queries<'a> {
    rows: Aligned<f32>, // (rows, heads, head_dim), rotated where the keys are
    words: Vec<i32>,    // (rows, heads, words) for coded keys
    positions: &'a (dyn Fn(usize) -> Range<usize> + Sync),
    heads: usize,
    group: usize, // query heads per K/V head
}

/// One piece of work: some query rows of one KV head, against one split of its keys.
struct Piece<'a> {
    rows: Range<usize>,
    kv_head: usize,
    split: usize,
    running: &'a mut [Running], // (rows, group)
    output: &'a mut [f32],      // (rows, group, head_dim)
}

/// Attends `q` `(rows, heads, head_dim)`. `at(row)` is `position..end`: where the query stands, and the first position
/// that it must not see (its own is seen if `end` is beyond it).
pub(super) fn attend(
    cache: &KvCache,
    store: &Store,
    q: &Tensor,
    at: impl Fn(usize) -> Range<usize> + Sync,
) -> Result<Tensor> {
    let isa = cache.isa;
    let (rows, heads, head_dim) = q.dims3()?;
    let kv_heads = store.layout.num_kv_heads;
    if head_dim != store.layout.head_dim || !heads.is_multiple_of(kv_heads) {
        let held = (kv_heads, store.layout.head_dim);
        let problem = format!("attend: {heads} query heads of {head_dim} over (K/V heads, width) = {held:?}");
        return Err(candle_core::Error::Msg(problem).into());
    }
    let view = F32View::new(q)?;
    let queries = Queries::new(isa, store, &view, &at, heads);
    let mut y = vec![0.0; view.len()];
    // Tiles of rows one after the other where that is all the work there is; the pieces of a tile run side by side.
    let tile = |first: usize, y: &mut [f32]| {
        let tile_rows = first..first + y.len() / (heads * head_dim);
        let keys = tile_rows.clone().map(|row| store.seen(at(row))).filter(|keys| !keys.is_empty());
        let Some(keys) = keys.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)) else { return };
        let splits = keys.start / (SPLIT_PAGES * PAGE)..keys.end.div_ceil(SPLIT_PAGES * PAGE);

        let per_piece = tile_rows.len() * queries.group;
        let mut running = vec![Running::EMPTY; splits.len() * kv_heads * per_piece];
        let mut output = vec![0.0; running.len() * head_dim];
        let pieces = running.chunks_mut(per_piece).zip(output.chunks_mut(per_piece * head_dim));
        let pieces = pieces.enumerate().map(|(i, (running, output))| Piece {
            rows: tile_rows.clone(),
            kv_head: i % kv_heads,
            split: splits.start + i / kv_heads,
            running,
            output,
        });
        let run = |piece: Piece<'_>| attend_split(cache, store, &queries, piece);
        if rayon::current_num_threads() == 1 {
            pieces.for_each(run);
        } else {
            pieces.collect::<Vec<_>>().into_par_iter().with_max_len(1).for_each(run);
        }

        for (row, y) in y.chunks_exact_mut(heads * head_dim).enumerate() {
            for (head, y) in y.chunks_exact_mut(head_dim).enumerate() {
                let mut total = Running::EMPTY;
                for split in 0..splits.len() {
                    let (kv_head, member) = (head / queries.group, head % queries.group);
                    let i = (split * kv_heads + kv_head) * per_piece + row * queries.group + member;
                    merge(isa, (&mut total, y), (running[i], &output[i * head_dim..(i + 1) * head_dim]));
                }
                finish(isa, total, y);
            }
        }
        if let Some((_, groups)) = store.value_codes() {
            rotate_back(isa, y, groups);
        }
        if let Some(sharing) = store.sharing() {
            sharing.restore(y);
        }
    };
    let tile_len = TILE_ROWS * heads * head_dim;
    if rows <= TILE_ROWS || rayon::current_num_threads() == 1 {
        y.chunks_mut(tile_len).enumerate().for_each(|(i, y)| tile(i * TILE_ROWS, y));
    } else {
        y.par_chunks_mut(tile_len).enumerate().for_each(|(i, y)| tile(i * TILE_ROWS, y));
    }
    tensor(y, (rows, heads * head_dim))
}

impl<'a> Queries<'a> {
    fn new(
        isa: Isa,
        store: &Store,
        rows: &[f32],
        positions: &'a (dyn Fn(usize) -> Range<usize> + Sync),
        heads: usize,
    ) -> Self {
        let group = heads / store.layout.num_kv_heads;
        let Some((format, groups)) = store.key_codes() else {
            return Self { rows: Aligned::copy(rows), words: Vec::new(), positions, heads, group };
        };
        let width = store.layout.head_dim;
        let mut rows = store.sharing().map_or_else(|| rows.to_vec(), |sharing| sharing.weighted(rows));
        let values = store.sharing().and(store.value_codes());
        rotate(isa, &mut rows, values.map_or(groups, |(_, groups)| groups));
        let mut words = vec![0; rows.len() / width * words_per_query(store)];
        for (row, words) in rows.chunks_exact(width).zip(words.chunks_exact_mut(words_per_query(store))) {
            let (own, others) = words.split_at_mut(PreparedQuery::words(format, groups));
            PreparedQuery::prepare(format, groups, &row[..groups.head_dim()], own);
            if let Some((format, groups)) = values {
                PreparedQuery::prepare(format, groups, row, others);
            }
        }
        Self { rows: Aligned::copy(&rows), words, positions, heads, group }
    }

    /// Query `index` of `(rows, heads)`, for coded keys.
    fn prepared(&self, store: &Store, index: usize) -> Option<PreparedQuery<'_>> {
        let (format, groups) = store.key_codes()?;
        let len = words_per_query(store);
        let (own, others) = self.words[index * len..(index + 1) * len].split_at(PreparedQuery::words(format, groups));
        let own = PreparedQuery::from_words(format, groups, own);
        Some(match store.sharing().and(store.value_codes()) {
            Some((format, groups)) => own.with_values(PreparedQuery::from_words(format, groups, others)),
            None => own,
        })
    }
}

/// Words of a prepared query: for keys of their own, and where the codes of values serve as keys, for those.
fn words_per_query(store: &Store) -> usize {
    let words = |codes: Option<_>| codes.map_or(0, |(format, groups)| PreparedQuery::words(format, groups));
    words(store.key_codes()) + words(store.sharing().and(store.value_codes()))
}

fn attend_split(cache: &KvCache, store: &Store, all: &Queries<'_>, piece: Piece<'_>) {
    let head_dim = store.layout.head_dim;
    let (mut scores, mut weights) = (vec![0.0; Scratch::len(PAGE)], vec![0.0; Scratch::len(PAGE)]);
    let mut scratch = Scratch { scores: &mut scores, weights: &mut weights };
    let mut made = vec![0.0; if store.makes_keys() { PAGE * head_dim } else { 0 }];
    let row_of = |i: usize| piece.rows.start + i / all.group;
    let mut queries: Vec<_> = (piece.running.iter_mut().zip(piece.output.chunks_exact_mut(head_dim)))
        .enumerate()
        .map(|(i, (running, output))| {
            let index = row_of(i) * all.heads + piece.kv_head * all.group + i % all.group;
            let query = &all.rows[index * head_dim..(index + 1) * head_dim];
            Query { query, prepared: all.prepared(store, index), visible: 0..0, running, output }
        })
        .collect();
    for page in piece.split * SPLIT_PAGES..(piece.split + 1) * SPLIT_PAGES {
        for &reading in store.readings() {
            let mut len = 0;
            for (i, query) in queries.iter_mut().enumerate() {
                let at = (all.positions)(row_of(i));
                let position = at.start;
                let seen = store.seen(at);
                let start = seen.start.clamp(page * PAGE, (page + 1) * PAGE) - page * PAGE;
                let end = seen.end.clamp(page * PAGE, (page + 1) * PAGE) - page * PAGE;
                query.visible = store.part(reading, page, position, start..end.max(start));
                if !query.visible.is_empty() {
                    len = len.max(query.visible.end);
                }
            }
            if len > 0 {
                // Codes are of whole pages, and exact rows beside them then too.
                let len = if reading == Reading::Coded { PAGE } else { len };
                let tile = store.tile(reading, (page, piece.kv_head, len), &cache.angles, &mut made);
                attend_tile(cache.isa, tile, &mut queries, &mut scratch);
            }
        }
    }
}
