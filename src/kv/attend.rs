//! Attention over a store.
//!
//! A query's keys are walked in pages, and pages are grouped in splits of [`SPLIT_PAGES`]; every split is summed on its
//! own and the splits are merged first to last. Both boundaries are fixed in the sequence, so a row's bits depend on its
//! own keys only: not on the rows that ride with it, on chunking, or on the number of threads that share the splits.

use std::ops::Range;

use candle_core::Tensor;
use foretoken_kernels::Isa;
use foretoken_kernels::attend::{KvTile, Query, Running, Scratch, attend_tile, finish, merge};
use rayon::prelude::*;

use super::{PAGE, Store};
use crate::Result;
use crate::nn::{F32View, tensor};

/// Pages per split: 1024 positions, a few hundred KiB of K and V, which outlasts handing the piece to a thread.
const SPLIT_PAGES: usize = 8;

/// Query rows that share a pass over the keys. More would read them less often but spill the cache with results.
const TILE_ROWS: usize = 16;

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
pub(super) fn attend(isa: Isa, store: &Store, q: &Tensor, at: impl Fn(usize) -> Range<usize> + Sync) -> Result<Tensor> {
    let (rows, heads, head_dim) = q.dims3()?;
    let kv_heads = store.layout.num_kv_heads;
    if head_dim != store.layout.head_dim || !heads.is_multiple_of(kv_heads) {
        let held = (kv_heads, store.layout.head_dim);
        let problem = format!("attend: {heads} query heads of {head_dim} over (K/V heads, width) = {held:?}");
        return Err(candle_core::Error::Msg(problem).into());
    }
    let group = heads / kv_heads;
    let q = F32View::new(q)?;
    let visible = |row: usize| {
        let Range { start: position, end } = at(row);
        store.layout.window.map_or(0, |window| (position + 1).saturating_sub(window))..end
    };
    let mut y = vec![0.0; q.len()];
    // Tiles of rows one after the other where that is all the work there is; the pieces of a tile run side by side.
    let tile = |first: usize, y: &mut [f32]| {
        let tile_rows = first..first + y.len() / (heads * head_dim);
        let keys = tile_rows.clone().map(&visible).filter(|keys| !keys.is_empty());
        let Some(keys) = keys.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)) else { return };
        let splits = keys.start / (SPLIT_PAGES * PAGE)..keys.end.div_ceil(SPLIT_PAGES * PAGE);

        let queries = tile_rows.len() * group;
        let mut running = vec![Running::EMPTY; splits.len() * kv_heads * queries];
        let mut output = vec![0.0; running.len() * head_dim];
        let pieces = running.chunks_mut(queries).zip(output.chunks_mut(queries * head_dim));
        let pieces = pieces.enumerate().map(|(i, (running, output))| Piece {
            rows: tile_rows.clone(),
            kv_head: i % kv_heads,
            split: splits.start + i / kv_heads,
            running,
            output,
        });
        let run = |piece: Piece<'_>| attend_split(isa, store, &q, (heads, group), &visible, piece);
        if rayon::current_num_threads() == 1 {
            pieces.for_each(run);
        } else {
            pieces.collect::<Vec<_>>().into_par_iter().with_max_len(1).for_each(run);
        }

        for (row, y) in y.chunks_exact_mut(heads * head_dim).enumerate() {
            for (head, y) in y.chunks_exact_mut(head_dim).enumerate() {
                let mut total = Running::EMPTY;
                for split in 0..splits.len() {
                    let i = (split * kv_heads + head / group) * queries + row * group + head % group;
                    merge(isa, (&mut total, y), (running[i], &output[i * head_dim..(i + 1) * head_dim]));
                }
                finish(isa, total, y);
            }
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

fn attend_split(
    isa: Isa,
    store: &Store,
    q: &[f32],
    (heads, group): (usize, usize),
    visible: &impl Fn(usize) -> Range<usize>,
    piece: Piece<'_>,
) {
    let head_dim = store.layout.head_dim;
    let (mut scores, mut weights) = (vec![0.0; Scratch::len(PAGE)], vec![0.0; Scratch::len(PAGE)]);
    let mut scratch = Scratch { scores: &mut scores, weights: &mut weights };
    let mut queries: Vec<_> = (piece.running.iter_mut().zip(piece.output.chunks_exact_mut(head_dim)))
        .enumerate()
        .map(|(i, (running, output))| {
            let (row, head) = (piece.rows.start + i / group, piece.kv_head * group + i % group);
            let at = (row * heads + head) * head_dim;
            Query { query: &q[at..at + head_dim], prepared: None, visible: 0..0, running, output }
        })
        .collect();
    for page in piece.split * SPLIT_PAGES..(piece.split + 1) * SPLIT_PAGES {
        let mut len = 0;
        for (i, query) in queries.iter_mut().enumerate() {
            let keys = visible(piece.rows.start + i / group);
            let start = keys.start.clamp(page * PAGE, (page + 1) * PAGE) - page * PAGE;
            let end = keys.end.clamp(page * PAGE, (page + 1) * PAGE) - page * PAGE;
            query.visible = start..end.max(start);
            if !query.visible.is_empty() {
                len = len.max(query.visible.end);
            }
        }
        if len > 0 {
            let keys = store.keys.tile(page, piece.kv_head, len);
            let values = store.values.tile(page, piece.kv_head, len);
            attend_tile(isa, KvTile { keys: keys.into(), values: values.into(), head_dim }, &mut queries, &mut scratch);
        }
    }
}
