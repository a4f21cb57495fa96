//! The memory of attention does not grow with depth.

use std::sync::atomic::Ordering;

use foretoken::kv::{KvAccess, KvCache, KvFormat, KvLayout, KvOptions, StoreLayout};
use foretoken::nn::tensor;
use foretoken::{ElementType, Isa};

use crate::counting::{HELD, PEAK, alone};

const HEADS: usize = 2;
const WIDTH: usize = 64;

/// Blocks of 16 rows, more than twice as many as threads.
const ROWS: usize = 160;

/// A cache with `len` committed positions.
fn cache(len: usize) -> KvCache {
    let layout = KvLayout {
        stores: vec![StoreLayout { num_kv_heads: HEADS, head_dim: WIDTH, window: None, k_eq_v: None }],
        store_of_layer: vec![0],
        inverse_frequencies: Vec::new(),
    };
    let format = KvFormat::Exact(ElementType::F32);
    let options = KvOptions { key: format, value: format, max_round_rows: len, ..KvOptions::default() };
    let mut cache = KvCache::new(layout, &options, len + ROWS, Isa::best()).expect("a cache");
    let rows = tensor((0..len * HEADS * WIDTH).map(|i| (i % 97) as f32 / 97.0).collect(), (len, HEADS, WIDTH));
    let rows = rows.expect("a tensor");
    let mut round = cache.begin_round(len).expect("a round");
    round.append(0, &rows, &rows).expect("rows");
    round.commit(len);
    cache
}

/// The most bytes that the attention of [`ROWS`] queries with 4 heads per K/V head holds.
fn peak(len: usize) -> usize {
    let cache = cache(len);
    let q = tensor(vec![0.5; ROWS * 4 * HEADS * WIDTH], (ROWS, 4 * HEADS, WIDTH)).expect("a tensor");
    let before = HELD.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    cache.committed().attend(0, &q).expect("attention");
    PEAK.load(Ordering::Relaxed) - before
}

#[test]
fn partial_results_of_all_splits_are_never_held() {
    let _alone = alone();
    for threads in [1, 4] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        let [shallow, deep] = pool.install(|| [4096, 32768].map(peak));
        assert!(deep < 2 * shallow, "{threads} threads: {shallow} bytes after 4096 positions, {deep} after 32768");
    }
}
