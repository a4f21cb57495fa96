//! The bits of a row of logits are a function of its sequence alone: not of the rows that ride with it, of chunking, of
//! the number of threads, or (for one instruction set) of anything else; for every weight type.

mod cases;

use std::path::Path;

use foretoken::checkpoint::{Checkpoint, LoadOptions};
use foretoken::gemma4::{Target, Wanted};
use foretoken::kv::{ExactZones, KvCache, KvFormat, KvOptions};
use foretoken::nn::F32View;
use foretoken::{ElementType, Isa, WeightType};

/// The demo target has everything: both layer types, shared K/V, per-layer embeddings, a wrapped window.
fn demo(isa: Isa, quantize: Option<WeightType>) -> Target {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target");
    let checkpoint = Checkpoint::open(path).expect("the demo target");
    Target::load(&checkpoint, LoadOptions { quantize, ..LoadOptions::from(isa) }).expect("the demo target")
}

const F32: KvFormat = KvFormat::Exact(ElementType::F32);
const F16: KvFormat = KvFormat::Exact(ElementType::F16);

const BATCH: usize = 16;

/// Tokens before the batch: past the demo's window of 128 on the widest instruction set, a few on the slow ones.
fn prompt(isa: Isa) -> usize {
    if isa == Isa::best() { 150 } else { 10 }
}

fn ids(isa: Isa) -> Vec<u32> {
    (0..(prompt(isa) + BATCH) as u32).map(|i| 300 + i * 7919 % 3700).collect()
}

fn on_threads<R: Send>(threads: usize, work: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads").install(work)
}

/// The logits of the newest rows of `ids`, which are run in rounds of the given sizes, the last of them `rows` long.
fn logits(target: &Target, isa: Isa, kv: KvFormat, ids: &[u32], chunk: usize, rows: usize) -> Vec<f32> {
    // Pages leave the exact zones early, so that the prompt has some in codes.
    let exact = ExactZones { head: 8, tail: 16, element: ElementType::F16 };
    let options = KvOptions { key: kv, value: kv, exact, ..KvOptions::default() };
    let mut cache = KvCache::new(target.kv_layout(), &options, 4096, isa).expect("a cache");
    let (prompt, batch) = ids.split_at(ids.len() - rows);
    for chunk in prompt.chunks(chunk) {
        let mut round = cache.begin_round(chunk.len()).expect("a round");
        target.forward(chunk, &mut round, Wanted::Nothing).expect("a pass");
        round.commit(chunk.len());
    }
    let mut round = cache.begin_round(rows).expect("a round");
    let output = target.forward(batch, &mut round, Wanted::All).expect("a pass").expect("rows");
    F32View::new(&output.logits).expect("floats").to_vec()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Numbers of rows that ride together.
const ROWS: [usize; 9] = [1, 2, 3, 4, 5, 7, 8, 11, 16];

fn check(target: &Target, isa: Isa, kv: KvFormat, name: &str) {
    check_rows(target, isa, kv, name, &ROWS);
}

fn check_rows(target: &Target, isa: Isa, kv: KvFormat, name: &str, counts: &[usize]) {
    let ids = ids(isa);
    // One row at a time, on one thread: what plain decoding computes.
    let all = ids.len();
    let want = on_threads(1, || {
        let ends = all - BATCH + 1..=all;
        ends.flat_map(|end| logits(target, isa, kv, &ids[..end], all, 1)).collect::<Vec<_>>()
    });
    let vocab = want.len() / BATCH;
    for &rows in counts {
        for (threads, chunk) in [(1, 1), (2, 7), (3, all), (4, 64)] {
            let got = on_threads(threads, || logits(target, isa, kv, &ids, chunk, rows));
            let what = format!("{name}, {rows} rows, {threads} threads, chunks of {chunk}");
            assert!(bits(&got) == bits(&want[(BATCH - rows) * vocab..]), "{what}: the bits differ");
        }
    }
}

#[test]
fn every_isa_gives_a_row_its_own_bits() {
    for isa in Isa::available() {
        check(&demo(isa, None), isa, F16, &format!("bf16 weights on {}", isa.name()));
        check(&demo(isa, Some(WeightType::Q8_0)), isa, F16, &format!("q8_0 on {}", isa.name()));
        check(&demo(isa, Some(WeightType::Q4_K)), isa, F16, &format!("q4_K on {}", isa.name()));
    }
}

#[test]
fn every_weight_type_gives_a_row_its_own_bits() {
    for weight_type in WeightType::ALL {
        check(&demo(Isa::best(), Some(weight_type)), Isa::best(), F16, weight_type.name());
    }
}

#[test]
fn every_row_type_of_the_cache_gives_a_row_its_own_bits() {
    for kv in KvFormat::all() {
        check_rows(&demo(Isa::best(), None), Isa::best(), kv, &format!("{kv} K/V"), &[1, 4, 16]);
    }
}

/// Experts and K = V layers, in f32 and f16 weights as the fixtures have them.
#[test]
fn the_fixtures_give_a_row_its_own_bits() {
    for case in cases::all() {
        let target = case.target();
        let ids = case.ids("input_ids");
        let rows = 8.min(ids.len() - 1);
        let isa = Isa::best();
        let want = on_threads(1, || {
            (0..rows)
                .rev()
                .flat_map(|later| logits(&target, isa, F32, &ids[..ids.len() - later], 1, 1))
                .collect::<Vec<_>>()
        });
        for threads in [1, 2, 4] {
            let got = on_threads(threads, || logits(&target, isa, F32, &ids, 5, rows));
            assert!(bits(&got) == bits(&want), "{}: {threads} threads", case.name);
        }
    }
}
