//! Quantized weights: the reference's text if the type is fine enough, and logits within the type's own error.

#[path = "../cases/mod.rs"]
mod cases;
#[path = "../../kernels/tests/skipped/mod.rs"]
mod skipped;
mod weight_types;

use std::path::{Path, PathBuf};

use cases::{argmax, cache, on_every_isa, pass, same_id, values};
use foretoken::OutputRows;
use foretoken::checkpoint::convert::{Outtype, ToGgufOptions, to_gguf};
use foretoken::checkpoint::gguf::{Gguf, GgufWriter};
use foretoken::checkpoint::quantize::{Importance, Mix, QuantizeOptions, quantize};
use foretoken::checkpoint::{Checkpoint, LoadOptions};
use foretoken::gemma4::Target;
use foretoken::{ElementType, Isa, WeightType};
use foretoken_kernels::quant::{dequantize_row, quantize_row};

/// Held-out prompts of the demo, and its vocabulary.
const PROMPTS: usize = 12;
const VOCABULARY: usize = 4096;

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target")
}

fn load(path: &Path, quantize: Option<WeightType>, isa: Isa) -> Target {
    let checkpoint = Checkpoint::open(path).expect("a checkpoint");
    Target::load(&checkpoint, LoadOptions { quantize, ..LoadOptions::from(isa) }).expect("a target")
}

/// Logits of all rows of `ids`.
fn logits(target: &Target, ids: &[u32], isa: Isa) -> Vec<f32> {
    values(&pass(target, &mut cache(target, ElementType::F32, isa), ids, OutputRows::All).logits)
}

/// Types by bits per weight, elements per scale, and the zero point.
const GRIDS: [(WeightType, i32, usize, Zero); 12] = {
    use WeightType::*;
    [
        (Q8_0, 8, 32, Zero::Middle),
        (Q6_K, 6, 16, Zero::Middle),
        (Q5_K, 5, 32, Zero::Minimum),
        (Q5_1, 5, 32, Zero::Minimum),
        (Q5_0, 5, 32, Zero::Middle),
        (Q4_K, 4, 32, Zero::Minimum),
        (Q4_1, 4, 32, Zero::Minimum),
        (Q4_0, 4, 32, Zero::Middle),
        (IQ4_NL, 4, 32, Zero::Middle),
        (IQ4_XS, 4, 32, Zero::Middle),
        (Q3_K, 3, 16, Zero::Middle),
        (Q2_K, 2, 16, Zero::Minimum),
    ]
};

#[derive(Clone, Copy)]
enum Zero {
    Middle,
    Minimum,
}

/// The error of the demo's weights in every type, relative to rounding them to as many evenly spaced values as the type
/// has codes, between each block's exact limits. One bit less doubles the latter, which the bound does not allow.
#[test]
fn weights_lose_what_their_types_do() {
    let source = Checkpoint::open(demo()).expect("the demo");
    let mut rows = Vec::new();
    for name in source.names() {
        let tensor = source.get(&name).expect("readable").expect("a tensor");
        if let [_, inputs @ 256] = tensor.shape[..] {
            let elements = tensor.bytes.as_slice().as_chunks().0;
            let floats: Vec<f32> = elements.iter().map(|x| half::bf16::from_le_bytes(*x).to_f32()).collect();
            rows.extend(floats.chunks_exact(inputs).step_by(8).map(<[f32]>::to_vec));
        }
    }
    assert!(rows.len() > 500, "{} rows", rows.len());
    for (weight_type, bits, block, zero) in GRIDS {
        let (mut squares, mut of_grid, mut total) = (0.0, 0.0, 0.0);
        for row in &rows {
            let mut bytes = vec![0; weight_type.row_bytes(row.len()).expect("whole blocks")];
            let mut got = vec![0.0; row.len()];
            quantize_row(Isa::best(), weight_type, row, &mut bytes);
            dequantize_row(weight_type, &bytes, &mut got);
            squares += row.iter().zip(&got).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
            total += row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
            for block in row.chunks_exact(block) {
                let (min, max) = block.iter().fold((0f32, 0f32), |(min, max), x| (min.min(*x), max.max(*x)));
                let step = match zero {
                    Zero::Middle => 2.0 * max.max(-min) / 2f32.powi(bits),
                    Zero::Minimum => (max - min) / (2f32.powi(bits) - 1.0),
                };
                of_grid += f64::from(step).powi(2) / 12.0 * block.len() as f64;
            }
        }
        let (error, of_grid) = ((squares / total).sqrt(), (of_grid / total).sqrt());
        println!("{:7} {error:.4}, of the grid {of_grid:.4}: {:.2}", weight_type.name(), error / of_grid);
        assert!(error > 0.6 * of_grid && error < 1.15 * of_grid, "{}: {error}, grid {of_grid}", weight_type.name());
    }
}

/// Root-mean-square error of the demo's logits, in units of their own standard deviation (1 is the error of predicting
/// their mean), with weights quantized while loading. Every bound is below the error of the type with one bit less.
#[test]
fn errors_are_the_types_own() {
    on_every_isa(logits_errors_are_the_types_own);
}

fn logits_errors_are_the_types_own(isa: Isa) {
    let prompt: Vec<u32> = (0..48).map(|i| 300 + i * 37 % 3000).collect();
    let exact = logits(&load(&demo(), None, isa), &prompt, isa);
    let mean = exact.iter().sum::<f32>() / exact.len() as f32;
    let spread = exact.iter().map(|x| (x - mean).powi(2)).sum::<f32>();
    let error = |weight_type| {
        let got = logits(&load(&demo(), Some(weight_type), isa), &prompt, isa);
        (got.iter().zip(&exact).map(|(a, b)| (a - b).powi(2)).sum::<f32>() / spread).sqrt()
    };
    // One type on narrower instruction sets, whose bytes and products have the same bits: quantizing takes most of the
    // time.
    let stride = if isa == Isa::best() { 1 } else { GRIDS.len() };
    let errors: Vec<_> =
        GRIDS.iter().step_by(stride).map(|(weight_type, ..)| (*weight_type, error(*weight_type))).collect();
    let of = |weight_type| errors.iter().find(|(other, _)| *other == weight_type).map(|(_, error)| *error);
    use WeightType::*;
    for (weight_type, bound, coarser) in [
        (Q8_0, 0.035, Some(Q6_K)),
        (Q6_K, 0.08, Some(Q5_K)),
        (Q5_K, 0.14, Some(Q4_K)),
        (Q5_1, 0.14, Some(Q4_1)),
        (Q5_0, 0.14, Some(Q4_0)),
        (Q4_K, 0.22, Some(Q3_K)),
        (Q4_1, 0.22, Some(Q3_K)),
        (Q4_0, 0.25, Some(Q3_K)),
        (IQ4_NL, 0.25, Some(Q3_K)),
        (IQ4_XS, 0.25, Some(Q3_K)),
        (Q3_K, 0.45, Some(Q2_K)),
        (Q2_K, 0.7, None),
    ] {
        let Some(error) = of(weight_type) else { continue };
        println!("{:7} {error:.4}", weight_type.name());
        assert!(error < bound, "{}: {error}", weight_type.name());
        let coarser = coarser.and_then(of).unwrap_or(1.0);
        assert!(coarser > bound, "{}: one bit less has {coarser}, within {bound}", weight_type.name());
    }
}

/// Writes the dequantized weights of a quantized file.
fn dequantize(source: &Path, destination: &Path) {
    let source = Gguf::open(source).expect("a file");
    let mut file = GgufWriter::create(destination).expect("a writer");
    for key in source.keys() {
        file.copy(key, source.metadata(key).expect("a value")).expect("a key");
    }
    let quantized = |id: u32| WeightType::ALL.into_iter().find(|weight_type| weight_type.ggml_id() == id);
    for info in source.tensors() {
        let id = quantized(info.type_id()).map_or(info.type_id(), |_| 0);
        file.tensor(info.name(), id, info.shape()).expect("a tensor");
    }
    let mut file = file.begin().expect("the tensors");
    for info in source.tensors() {
        let tensor = source.tensor(info.name()).expect("readable").expect("there");
        let bytes = match quantized(info.type_id()) {
            None => tensor.bytes.as_slice().to_vec(),
            Some(weight_type) => {
                let mut values = vec![0.0; tensor.shape.iter().product()];
                dequantize_row(weight_type, tensor.bytes.as_slice(), &mut values);
                values.iter().flat_map(|x| x.to_le_bytes()).collect()
            }
        };
        file.write(info.name(), &bytes).expect("written");
    }
    file.finish().expect("a file");
}

/// Next to `exact`, its weights in one mix, and these dequantized.
fn quantized_files(exact: &Path, mix: Mix) -> [PathBuf; 2] {
    let files = ["quantized.gguf", "numbers.gguf"].map(|name| exact.with_file_name(name));
    let source = Checkpoint::open(exact).expect("a file");
    quantize(&source, &files[0], &QuantizeOptions::new(mix)).expect("a file");
    dequantize(&files[0], &files[1]);
    files
}

/// Writes `f32.gguf` there.
fn f32_file(checkpoint: &Path, directory: &Path) -> PathBuf {
    let (source, path) = (Checkpoint::open(checkpoint).expect("a checkpoint"), directory.join("f32.gguf"));
    to_gguf(&source, &path, &ToGgufOptions { outtype: Outtype::F32, ..ToGgufOptions::default() }).expect("a file");
    path
}

/// Root mean square of the differences.
fn rms(a: &[f32], b: &[f32]) -> f32 {
    let squares = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
    (squares / a.len() as f64).sqrt() as f32
}

/// A product rounds its inputs to eight bits, which adds an error of Q8_0's own size to the error of the weights:
/// sqrt(1 + (e8 / e)^2) times the weights' error, where e is the type's relative error and e8 that of Q8_0 (see
/// `weights_lose_what_their_types_do`). That is 1.41 for Q8_0 and 1.00 for Q4_K_M; inputs of seven bits would
/// make it 2.2 and 1.01. It holds on average: one prompt of a random model amplifies either error by chance, and
/// ratios from 0.9 to 2.0 were measured, so 16 prompts are averaged. Rows of the fixtures are not whole blocks of
/// 256, so that Q4_K falls back to Q5_0; the demo's are.
#[test]
fn files_lose_what_their_types_do() {
    let directory = tempfile::tempdir().expect("a directory");
    // The ratios were measured on these only, and not every case fits a GGUF file.
    let fixtures = cases::all().into_iter().filter(cases::Case::ships);
    let fixtures = fixtures.map(|case| (case.name.clone(), case.path.join("target")));
    for (name, path) in fixtures.chain([("demo".into(), demo())]) {
        let exact = f32_file(&path, directory.path());
        for (mix, bound) in [(Mix::Q8_0, 1.6), (Mix::Q4_K_M, 1.1)] {
            let [quantized, numbers] = quantized_files(&exact, mix);
            on_every_isa(|isa| {
                // On narrower instruction sets, whose quantized products have the same bits, only the bound that the
                // inputs' bits decide; and scalar code, twelve times as slow as the widest, not on the demo.
                if isa != Isa::best() && mix != Mix::Q8_0 || isa == Isa::Scalar && name == "demo" {
                    return;
                }
                let [exact, quantized, numbers] = [&exact, &quantized, &numbers].map(|path| {
                    let target = load(path, None, isa);
                    let vocab = target.config().vocab_size as u32;
                    let prompt =
                        |n: u32| (0..40u32).map(move |i| 3 + (n * 7919 + i * 104_729 + i * i * 31) % (vocab - 3));
                    (0..16).flat_map(|n| logits(&target, &prompt(n).collect::<Vec<_>>(), isa)).collect::<Vec<_>>()
                });
                let (own, of_weights) = (rms(&quantized, &exact), rms(&numbers, &exact));
                println!("{name:8} {:8} {own:.4}, of the weights alone {of_weights:.4}", mix.name());
                assert!(own < bound * of_weights, "{name} {}: {own} > {bound} * {of_weights}", mix.name());
            });
        }
    }
}

/// A trained checkpoint against transformers, in f32, after the demo's held-out prompts, 64 tokens each. Eight bits, of
/// a file or made while loading, choose what the reference chooses, except where its best two logits are nearly tied:
/// where they differ by less than four times the error of eight-bit weights. There no arithmetic can preserve the text:
/// the weights alone, multiplied in f32, change one prompt of the twelve.
#[test]
fn held_out_prompts_are_the_references() {
    let directory = tempfile::tempdir().expect("a directory");
    let exact = f32_file(&demo(), directory.path());
    let [quantized, numbers] = quantized_files(&exact, Mix::Q8_0);
    on_every_isa(|isa| {
        let demo = cases::demo();
        let load = |path, quantize| load(path, quantize, isa);
        // All on the widest instruction set; a short one on the others, which are slower.
        let prompts = if isa == Isa::best() { 0..PROMPTS } else { 1..2 };
        let of_prompt = |name: &str, n: usize| format!("{name}.{n}");
        // The logits of the rows that chose the reference's tokens: (prompts * 64, vocabulary).
        let chosen_from = |target: &Target| -> Vec<f32> {
            let rows = |n| {
                let (prompt, chosen) = (demo.ids(&of_prompt("input_ids", n)), demo.ids(&of_prompt("greedy_ids", n)));
                let ids = [&prompt[..], &chosen[..chosen.len() - 1]].concat();
                logits(target, &ids, isa).split_off((prompt.len() - 1) * VOCABULARY)
            };
            prompts.clone().flat_map(rows).collect()
        };
        let want: Vec<u32> = prompts.clone().flat_map(|n| demo.ids(&of_prompt("greedy_ids", n))).collect();
        let margins: Vec<f32> = prompts.clone().flat_map(|n| demo.floats(&of_prompt("margins", n))).collect();
        // The number of decisive margins between the ids chosen by `rows` and the reference's; all of those are equal.
        let decided = |rows: &[f32], error: f32, what: &str| {
            let places = rows.chunks_exact(VOCABULARY).zip(&want).zip(&margins).enumerate();
            let same = places.filter(|(i, ((row, want), margin))| {
                let (prompt, token) = (prompts.start + i / 64, i % 64);
                same_id(argmax(row), **want, **margin, error, &format!("{what}: prompt {prompt}, token {token}"))
            });
            same.count()
        };

        let exact = chosen_from(&load(&exact, None));
        for (n, rows) in prompts.clone().zip(exact.chunks_exact(64 * VOCABULARY)) {
            let difference = cases::max_difference(&rows[..VOCABULARY], &demo.floats(&of_prompt("logits", n)));
            assert!(difference < 1e-3, "prompt {n}: {difference}");
        }
        assert!(decided(&exact, 1e-3, "f32") * 100 > want.len() * 99);

        let of_weights = rms(&chosen_from(&load(&numbers, None)), &exact);
        let loaded = [
            ("q8_0 of a file", load(&quantized, None)),
            ("q8_0", load(&demo.path.join("target"), Some(WeightType::Q8_0))),
        ];
        for (name, target) in loaded {
            let decided = decided(&chosen_from(&target), 2.0 * of_weights, name);
            println!("{name}: {decided} of {} margins decide, error of the weights {of_weights:.4}", want.len());
            assert!(decided * 5 > want.len() * 4, "{name}: {decided} of {} margins decide", want.len());
        }
    });
}

/// Types as chosen by llama.cpp's llama-quantize for the same file (`benches/record/2026-11-21-gguf` says how they were
/// compared).
#[test]
fn a_mix_is_llama_cpps() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let source = f16_file(directory.path());
    let report = quantize(&source, at("mix.gguf"), &QuantizeOptions::new(Mix::Q4_K_M)).expect("a file");
    let type_of = |name: &str| report.iter().find(|tensor| tensor.name == name).expect("a tensor").to;
    assert_eq!(type_of("token_embd.weight"), "Q6_K");
    assert_eq!(type_of("per_layer_token_embd.weight"), "Q8_0"); // rows of 160
    assert_eq!(type_of("per_layer_model_proj.weight"), "F16");
    assert_eq!(type_of("blk.0.attn_q.weight"), "Q4_K");
    assert_eq!(type_of("blk.0.ffn_down.weight"), "Q8_0"); // more bits, and rows of 576
    assert_eq!(type_of("blk.2.ffn_down.weight"), "Q5_0");
    assert_eq!(type_of("blk.0.proj.weight"), "F16"); // rows of 16
    assert_eq!(type_of("blk.0.attn_norm.weight"), "F32");
    let again =
        quantize(&Checkpoint::open(at("mix.gguf")).expect("a file"), at("x.gguf"), &QuantizeOptions::new(Mix::Q8_0));
    let error = again.expect_err("quantized twice").to_string();
    assert!(error.contains("quantize its source file"), "{error}");
    let onto_itself =
        quantize(&source, at("f16.gguf"), &QuantizeOptions::new(Mix::Q8_0)).expect_err("itself").to_string();
    assert!(onto_itself.contains("is the source itself"), "{onto_itself}");
}

/// Rules compare a layer with the number of layers, which a file may claim to be any.
#[test]
fn claimed_numbers_of_layers_are_limited() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let (name, count) = (format!("blk.{}.ffn_down.weight", u64::MAX / 2), u64::MAX / 2);
    let mut file = GgufWriter::create(at("model.gguf")).expect("a writer");
    file.value("general.architecture", "gemma4").expect("a key");
    file.value("gemma4.block_count", count).expect("a key");
    file.tensor(&name, 0, &[1, 32]).expect("a tensor");
    let mut file = file.begin().expect("the tensors");
    file.write(&name, &[0; 128]).expect("written");
    file.finish().expect("a file");
    let source = Checkpoint::open(at("model.gguf")).expect("a file");
    let error = quantize(&source, at("x.gguf"), &QuantizeOptions::new(Mix::Q4_K_M)).expect_err("a claim").to_string();
    assert!(error.contains("gemma4.block_count: is 9223372036854775807, must be an integer"), "{error}");
}

/// The importances' matrix, `(256, 256)`.
const MATRIX: &str = "blk.2.attn_q.weight";

/// An importance matrix of llama-imatrix's older format: of [`MATRIX`], after `calls` calls, with `len` sums.
fn older_importances(calls: i32, len: usize, sums: &[f32]) -> Vec<u8> {
    let int = |x: usize| (x as i32).to_le_bytes().to_vec();
    let name = [int(1), int(MATRIX.len()), MATRIX.as_bytes().to_vec()].concat();
    [name, calls.to_le_bytes().to_vec(), int(len), bytes(sums)].concat()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Mean squares of the inputs of [`MATRIX`], of which every sixteenth matters.
fn mean_squares() -> Vec<f32> {
    (0..256).map(|i| if i % 16 == 3 { 40.0 } else { 1.0 }).collect()
}

/// The demo as `f16.gguf` in a directory.
fn f16_file(directory: &Path) -> Checkpoint {
    let (source, path) = (Checkpoint::open(demo()).expect("the demo"), directory.join("f16.gguf"));
    to_gguf(&source, &path, &ToGgufOptions::default()).expect("a file");
    Checkpoint::open(path).expect("a file")
}

/// The demo's [`MATRIX`] as `f16.gguf` in a directory, with a matrix of as many inputs that has no importances: to
/// quantize all takes much longer.
fn matrix_file(directory: &Path) -> Checkpoint {
    let whole = tempfile::tempdir().expect("a directory");
    drop(f16_file(whole.path()));
    let source = Gguf::open(whole.path().join("f16.gguf")).expect("a file");
    let mut file = GgufWriter::create(directory.join("f16.gguf")).expect("a writer");
    for key in ["general.architecture", "gemma4.block_count"] {
        file.copy(key, source.metadata(key).expect("a value")).expect("a key");
    }
    let names = [MATRIX, "blk.2.attn_k.weight"];
    for name in names {
        let info = source.info(name).expect("a tensor");
        file.tensor(name, info.type_id(), info.shape()).expect("a tensor");
    }
    let mut file = file.begin().expect("the tensors");
    for name in names {
        let matrix = source.tensor(name).expect("readable").expect("there");
        file.write(name, matrix.bytes.as_slice()).expect("written");
    }
    file.finish().expect("a file");
    Checkpoint::open(directory.join("f16.gguf")).expect("a file")
}

/// The error of [`MATRIX`] in Q4_K_M, weighted with [`mean_squares`]. `source` is in `directory`.
fn weighted_error(source: &Checkpoint, directory: &Path, importance: Option<Importance>) -> f32 {
    let tensor = |name: &str| {
        let file = Gguf::open(directory.join(name)).expect("a file");
        file.tensor(MATRIX).expect("readable").expect("there").bytes.as_slice().to_vec()
    };
    let options = QuantizeOptions { importance, ..QuantizeOptions::new(Mix::Q4_K_M) };
    let report = quantize(source, directory.join("q.gguf"), &options).expect("a file");
    let by_importance = report.iter().filter(|tensor| tensor.by_importance).count();
    assert_eq!(by_importance, usize::from(options.importance.is_some()));
    let want = tensor("f16.gguf");
    let want = want.as_chunks().0.iter().map(|half| half::f16::from_le_bytes(*half).to_f32());
    let mut got = vec![0.0; 256 * 256];
    dequantize_row(WeightType::Q4_K, &tensor("q.gguf"), &mut got);
    let errors = got.iter().zip(want).zip(mean_squares().into_iter().cycle());
    errors.map(|((a, b), weight)| weight * (a - b).powi(2)).sum()
}

/// In both of llama-imatrix's formats.
#[test]
fn importances_make_errors_smaller_where_it_matters() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let source = matrix_file(directory.path());
    let sums: Vec<f32> = mean_squares().iter().map(|x| 8.0 * x).collect();

    let mut file = GgufWriter::create(at("imatrix.gguf")).expect("a writer");
    file.value("general.type", "imatrix").expect("a key");
    file.tensor(&format!("{MATRIX}.in_sum2"), 0, &[256]).expect("a tensor");
    file.tensor(&format!("{MATRIX}.counts"), 0, &[1]).expect("a tensor");
    let mut file = file.begin().expect("the tensors");
    file.write(&format!("{MATRIX}.in_sum2"), &bytes(&sums)).expect("written");
    file.write(&format!("{MATRIX}.counts"), &bytes(&[8.0])).expect("written");
    file.finish().expect("a file");
    std::fs::write(at("imatrix.dat"), older_importances(8, 256, &sums)).expect("written");

    let without = weighted_error(&source, directory.path(), None);
    for file in ["imatrix.gguf", "imatrix.dat"] {
        let importance = Importance::read(at(file)).expect("importances");
        let with = weighted_error(&source, directory.path(), Some(importance));
        assert!(with < 0.9 * without, "{file}: {with} of {without}");
    }
}

/// Only their ratios matter, however small or large the numbers are.
#[test]
fn importances_of_any_magnitude_are_the_same() {
    let directory = tempfile::tempdir().expect("a directory");
    let (source, path) = (matrix_file(directory.path()), directory.path().join("scaled.dat"));
    let error = |factor: f32| {
        let scaled: Vec<f32> = mean_squares().iter().map(|x| factor * x).collect();
        std::fs::write(&path, older_importances(1, 256, &scaled)).expect("written");
        weighted_error(&source, directory.path(), Some(Importance::read(&path).expect("importances")))
    };
    let with = error(1.0);
    for factor in [1e-40, 1e-30, 1e-12, 1e12, 1e30, 3e36] {
        let scaled = error(factor);
        assert!((scaled / with - 1.0).abs() < 0.01, "{factor}: {scaled}, {with}");
    }
}

/// Of another model, negative, or not an importance matrix at all.
#[test]
fn bad_importances_are_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let source = matrix_file(directory.path());
    let refused = |bytes: &[u8], what: &str| {
        std::fs::write(at("bad.dat"), bytes).expect("written");
        let message = match Importance::read(at("bad.dat")) {
            Err(error) => error.to_string(),
            Ok(importance) => {
                let options = QuantizeOptions { importance: Some(importance), ..QuantizeOptions::new(Mix::Q4_K_M) };
                quantize(&source, at("q.gguf"), &options).expect_err(what).to_string()
            }
        };
        assert!(message.contains(what), "{message:?} does not say {what:?}");
    };
    let sums = mean_squares();
    refused(&older_importances(8, 128, &sums[..128]), "has 128 importances, but 1 x 256 inputs");
    refused(&older_importances(8, 256, &[-1.0; 256]), "negative, NaN or infinite");
    let whole = older_importances(8, 256, &sums);
    refused(&whole[..whole.len() - 1], "is not an importance matrix");
    refused(&older_importances(8, usize::MAX, &[]), "is not an importance matrix");
    refused(b"a text", "is not an importance matrix");
    let missing = Importance::read(at("none")).expect_err("no file").to_string();
    assert!(missing.ends_with("; check the path, or download it there"), "it is no checkpoint: {missing}");
    #[cfg(unix)]
    {
        let error = Importance::read("/dev/null").expect_err("a device").to_string();
        assert!(error.contains("is not a regular file"), "{error}");
    }
}
