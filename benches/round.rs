//! A decode step and a speculative round on the demo pair: `cargo bench --bench round`.

use std::time::Instant;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use foretoken::OutputRows;
use foretoken::kv::KvOptions;
use foretoken::{Engine, EngineOptions, GenerateOptions, SessionOptions, Speculation, SpeculationOptions};
use foretoken_tools::demo;

fn engine() -> Engine {
    let options = EngineOptions::new(demo("target")).with_assistant(demo("assistant"));
    Engine::load(&EngineOptions { threads: Some(1), ..options }).expect("the demo pair")
}

/// One forward pass of the target over 1 to 16 rows after 256 committed positions; throughput is in bytes of weights.
fn pass(criterion: &mut Criterion) {
    let engine = engine();
    let target = engine.target();
    let ids: Vec<u32> = (0..256).map(|i| 300 + i * 13 % 3000).collect();
    let mut state = target.new_state(&KvOptions::default(), engine.pages()).expect("a state");
    let round = state.begin_round(ids.len()).expect("a round");
    target.forward_one(&ids, round, OutputRows::None, ids.len()).expect("a pass");
    let mut group = criterion.benchmark_group("pass");
    group.throughput(Throughput::Bytes(target.step_cost().bytes as u64));
    for rows in [1, 2, 4, 8, 16] {
        let mut passes = |count: u64| {
            let start = Instant::now();
            for _ in 0..count {
                let round = state.begin_round(rows).expect("a round");
                target.forward_one(&ids[..rows], round, OutputRows::All, 0).expect("a pass");
            }
            start.elapsed()
        };
        group.bench_function(format!("{rows} rows"), |bencher| {
            bencher.iter_custom(|count| engine.run(|| passes(count)))
        });
    }
}

/// 64 tokens with and without speculation.
fn generation(criterion: &mut Criterion) {
    let engine = engine();
    let prompt = engine.tokenizer().and_then(|t| t.encode("impl Iterator for Counter {\n")).expect("a prompt");
    let mut group = criterion.benchmark_group("64 tokens");
    for (name, speculation) in
        [("off", Speculation::Off), ("mtp", Speculation::With(SpeculationOptions::mtp(4))), ("auto", Speculation::Auto)]
    {
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let mut session = engine.session(&SessionOptions::default()).expect("a session");
                let speculation = speculation.clone();
                let options = GenerateOptions { max_tokens: 64, speculation, ..GenerateOptions::default() };
                session
                    .generate(&prompt, &options)
                    .expect("a generation")
                    .inspect(|piece| assert!(piece.is_ok()))
                    .count()
            })
        });
    }
}

criterion_group!(benches, pass, generation);
criterion_main!(benches);
