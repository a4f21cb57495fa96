//! Quantized weights: the reference's text where the type is fine enough, and logits within the type's own error.

mod cases;

use std::path::Path;

use cases::{argmax, cache, pass, values};
use foretoken::checkpoint::convert::{Outtype, ToGguf, to_gguf};
use foretoken::checkpoint::gguf::{Gguf, GgufWriter};
use foretoken::checkpoint::quantize::{Importance, Mix, QuantizeOptions, quantize};
use foretoken::checkpoint::{Checkpoint, LoadOptions};
use foretoken::gemma4::{Target, Wanted};
use foretoken::{ElementType, Isa, WeightType};
use foretoken_kernels::quant::dequantize_row;

/// Held-out prompts of the demo, and its vocabulary.
const PROMPTS: usize = 12;
const VOCABULARY: usize = 4096;

fn load(path: &Path, quantize: Option<WeightType>) -> Target {
    let checkpoint = Checkpoint::open(path).expect("a checkpoint");
    Target::load(&checkpoint, LoadOptions { quantize, ..LoadOptions::from(Isa::best()) }).expect("a target")
}

/// Greedy continuation, by single steps.
fn greedy(target: &Target, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut kv = cache(target, ElementType::F32);
    let mut output = pass(target, &mut kv, prompt, Wanted::Last);
    let mut ids = Vec::new();
    while ids.len() < count {
        ids.push(argmax(&values(&output.expect("a row").logits)));
        output = pass(target, &mut kv, &ids[ids.len() - 1..], Wanted::Last);
    }
    ids
}

/// The demo pair's text: what the model learned survives eight bits.
#[test]
fn eight_bits_keep_the_text() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target");
    let tokenizer = Checkpoint::open(&path).and_then(|c| c.tokenizer(4096)).expect("readable").expect("a tokenizer");
    let prompt = tokenizer.encode("impl Iterator for Counter {\n    type Item = u32;\n").expect("tokens");
    let exact = greedy(&load(&path, None), &prompt, 32);
    assert_eq!(greedy(&load(&path, Some(WeightType::Q8_0)), &prompt, 32), exact);
}

/// Root-mean-square error of the logits, in units of their own spread; fewer bits, more error, and never more than the
/// type's share. Random fixtures are no help here: their attention amplifies any difference a hundredfold.
#[test]
fn errors_are_the_types_own() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target");
    let prompt: Vec<u32> = (0..48).map(|i| 300 + i * 37 % 3000).collect();
    let logits = |quantize| {
        let target = load(&path, quantize);
        values(&pass(&target, &mut cache(&target, ElementType::F32), &prompt, Wanted::All).expect("rows").logits)
    };
    let exact = logits(None);
    let mean = exact.iter().sum::<f32>() / exact.len() as f32;
    let spread = exact.iter().map(|x| (x - mean).powi(2)).sum::<f32>();
    let error = |weight_type| {
        let difference = logits(Some(weight_type)).iter().zip(&exact).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
        (difference / spread).sqrt()
    };
    use WeightType::*;
    for (weight_type, bound) in [
        (Q8_0, 0.03),
        (Q6_K, 0.08),
        (Q5_K, 0.12),
        (Q5_1, 0.12),
        (Q5_0, 0.15),
        (Q4_K, 0.25),
        (Q4_1, 0.25),
        (Q4_0, 0.3),
        (IQ4_NL, 0.25),
        (Q3_K, 0.7),
        (Q2_K, 1.1),
    ] {
        let error = error(weight_type);
        println!("{:7} {error:.4}", weight_type.name());
        assert!(error < bound, "{}: {error}", weight_type.name());
    }
}

/// Writes the weights of a quantized file as the numbers that they stand for.
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

/// GGUF files by our own tools: with any mix, logits whose error is that of the weights, not of how they are multiplied; and
/// with eight bits the ids of the demo, which was trained. The random fixtures' ids survive eight bits neither here nor in
/// llama.cpp: their attention amplifies any difference a hundredfold. Their rows are no whole blocks of 256, so that Q4_K
/// falls back to Q5_0; the demo's are.
#[test]
fn files_keep_what_their_types_can() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target");
    let fixtures = cases::all().into_iter().map(|case| {
        let (path, ids, greedy) = (case.path.join("target"), case.ids("input_ids"), case.ids("greedy_ids"));
        (case.name, path, ids, greedy)
    });
    let ids: Vec<u32> = (0..48).map(|i| 300 + i * 37 % 3000).collect();
    let demo_greedy = greedy(&load(&demo, None), &ids, 24);
    for (name, path, ids, want) in fixtures.chain([("demo".into(), demo, ids, demo_greedy)]) {
        let source = Checkpoint::open(&path).expect("a checkpoint");
        to_gguf(&source, &at("f32.gguf"), &ToGguf { outtype: Outtype::F32, ..ToGguf::default() }).expect("a file");
        let source = Checkpoint::open(at("f32.gguf")).expect("a file");
        let logits = |path: &Path| {
            let target = load(path, None);
            values(&pass(&target, &mut cache(&target, ElementType::F32), &ids, Wanted::All).expect("rows").logits)
        };
        let exact = logits(&at("f32.gguf"));
        let error = |got: &[f32]| got.iter().zip(&exact).map(|(a, b)| (a - b).powi(2)).sum::<f32>().sqrt();
        for mix in [Mix::Q8_0, Mix::Q4_K_M] {
            quantize(&source, &at("quantized.gguf"), &QuantizeOptions::new(mix)).expect("a file");
            if mix == Mix::Q8_0 && name == "demo" {
                assert_eq!(greedy(&load(&at("quantized.gguf"), None), &ids, want.len()), want, "{name}");
            }
            dequantize(&at("quantized.gguf"), &at("numbers.gguf"));
            let (own, of_weights) = (error(&logits(&at("quantized.gguf"))), error(&logits(&at("numbers.gguf"))));
            println!("{name:8} {:8} {own:.3}, of the weights alone {of_weights:.3}", mix.name());
            assert!(own < 2.0 * of_weights, "{name} {}: {own} > 2 * {of_weights}", mix.name());
        }
    }
}

/// A trained checkpoint against transformers, in f32, after all twelve of the demo's held-out prompts, 64 tokens each. Eight
/// bits choose what the reference chooses, except where its best two logits are nearly tied: where they differ by less than
/// four times the error that the weights have for being of eight bits. There no arithmetic can keep the text: the weights
/// alone, multiplied in f32, change one prompt of the twelve. And the logits of either file are as near to the reference's as
/// its weights are.
#[test]
fn held_out_prompts_are_the_references() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let demo = cases::demo();
    let source = Checkpoint::open(demo.path.join("target")).expect("the demo");
    to_gguf(&source, &at("f32.gguf"), &ToGguf { outtype: Outtype::F32, ..ToGguf::default() }).expect("a file");
    let source = Checkpoint::open(at("f32.gguf")).expect("a file");

    let of_prompt = |name: &str, n: usize| format!("{name}.{n}");
    // For each prompt the logits of the rows that chose the reference's tokens: (64, vocabulary).
    let logits = |path: &Path| -> Vec<Vec<f32>> {
        let target = load(path, None);
        let rows = |n| {
            let (prompt, chosen) = (demo.ids(&of_prompt("input_ids", n)), demo.ids(&of_prompt("greedy_ids", n)));
            let ids = [&prompt[..], &chosen[..chosen.len() - 1]].concat();
            let output = pass(&target, &mut cache(&target, ElementType::F32), &ids, Wanted::All).expect("rows");
            values(&output.logits).split_off((prompt.len() - 1) * VOCABULARY)
        };
        (0..PROMPTS).map(rows).collect()
    };
    let rms = |a: &[Vec<f32>], b: &[Vec<f32>]| {
        let squares = a.iter().flatten().zip(b.iter().flatten()).map(|(a, b)| f64::from(a - b).powi(2));
        (squares.sum::<f64>() / a.iter().map(Vec::len).sum::<usize>() as f64).sqrt() as f32
    };
    let exact = logits(&at("f32.gguf"));
    for (n, rows) in exact.iter().enumerate() {
        let chosen: Vec<_> = rows.chunks_exact(VOCABULARY).map(argmax).collect();
        assert_eq!(chosen, demo.ids(&of_prompt("greedy_ids", n)), "prompt {n}");
        let difference = cases::max_difference(&rows[..VOCABULARY], &demo.floats(&of_prompt("logits", n)));
        assert!(difference < 1e-3, "prompt {n}: {difference}");
    }

    for mix in [Mix::Q8_0, Mix::Q4_K_M] {
        quantize(&source, &at("quantized.gguf"), &QuantizeOptions::new(mix)).expect("a file");
        dequantize(&at("quantized.gguf"), &at("numbers.gguf"));
        let got = logits(&at("quantized.gguf"));
        let (own, of_weights) = (rms(&got, &exact), rms(&logits(&at("numbers.gguf")), &exact));
        println!("{:8} error {own:.4}, of the weights alone {of_weights:.4}", mix.name());
        assert!(own < 1.5 * of_weights, "{}: {own} > 1.5 * {of_weights}", mix.name());
        if mix != Mix::Q8_0 {
            continue;
        }
        let (mut places, mut ties, mut others) = (0, 0, 0);
        for (n, rows) in got.iter().enumerate() {
            let (want, margins) = (demo.ids(&of_prompt("greedy_ids", n)), demo.floats(&of_prompt("margins", n)));
            for (i, row) in rows.chunks_exact(VOCABULARY).enumerate() {
                let tied = margins[i] < 4.0 * of_weights;
                (places, ties) = (places + 1, ties + usize::from(tied));
                if argmax(row) != want[i] {
                    println!("prompt {n}, token {i}: another, where the margin is {:.4}", margins[i]);
                    assert!(tied, "prompt {n}, token {i}: not the reference's, whose margin is {}", margins[i]);
                    others += 1;
                }
            }
        }
        println!("{others} of {places} tokens are others, {ties} nearly tied");
        assert!(ties * 10 < places && others * 100 < places, "{others} of {places} tokens are others, {ties} tied");
    }
}

/// Types as llama.cpp's llama-quantize chooses them for the same file (`benches/record/2026-11-21-gguf` says how they were compared).
#[test]
fn a_mix_is_llama_cpps() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target");
    let source = Checkpoint::open(&demo).expect("the demo");
    to_gguf(&source, &at("f16.gguf"), &ToGguf::default()).expect("a file");
    let source = Checkpoint::open(at("f16.gguf")).expect("a file");
    let report = quantize(&source, &at("mix.gguf"), &QuantizeOptions::new(Mix::Q4_K_M)).expect("a file");
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
        quantize(&Checkpoint::open(at("mix.gguf")).expect("a file"), &at("x.gguf"), &QuantizeOptions::new(Mix::Q8_0));
    let error = again.expect_err("quantized twice").to_string();
    assert!(error.contains("already; quantize the file that it came from"), "{error}");
    let onto_itself =
        quantize(&source, &at("f16.gguf"), &QuantizeOptions::new(Mix::Q8_0)).expect_err("itself").to_string();
    assert!(onto_itself.contains("is the source itself"), "{onto_itself}");
}

/// Importances, in both of llama-imatrix's formats, make errors smaller where it matters.
#[test]
fn importance_is_accepted() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target");
    to_gguf(&Checkpoint::open(&demo).expect("the demo"), &at("f16.gguf"), &ToGguf::default()).expect("a file");
    let source = Checkpoint::open(at("f16.gguf")).expect("a file");
    let name = "blk.2.attn_q.weight"; // (256, 256)
    let mean_squares: Vec<f32> = (0..256).map(|i| if i % 16 == 3 { 40.0 } else { 1.0 }).collect();

    let mut file = GgufWriter::create(at("imatrix.gguf")).expect("a writer");
    file.value("general.type", "imatrix").expect("a key");
    file.tensor(&format!("{name}.in_sum2"), 0, &[256]).expect("a tensor");
    file.tensor(&format!("{name}.counts"), 0, &[1]).expect("a tensor");
    let mut file = file.begin().expect("the tensors");
    let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>();
    let sums: Vec<f32> = mean_squares.iter().map(|x| 8.0 * x).collect();
    file.write(&format!("{name}.in_sum2"), &bytes(&sums)).expect("written");
    file.write(&format!("{name}.counts"), &bytes(&[8.0])).expect("written");
    file.finish().expect("a file");

    let int = |x: usize| (x as i32).to_le_bytes().to_vec();
    let older = [int(1), int(name.len()), name.as_bytes().to_vec(), int(8), int(256), bytes(&sums)].concat();
    std::fs::write(at("imatrix.dat"), &older).expect("written");

    let tensor = |path: &Path| Gguf::open(path).expect("a file").tensor(name).expect("readable").expect("there");
    let mut want = vec![0.0; 256 * 256];
    let halves = tensor(&at("f16.gguf")).bytes.as_slice().to_vec();
    want.iter_mut().zip(halves.as_chunks().0).for_each(|(x, half)| *x = half::f16::from_le_bytes(*half).to_f32());
    let weighted_error = |importance: Option<Importance>| {
        let options = QuantizeOptions { importance, ..QuantizeOptions::new(Mix::Q4_K_M) };
        let report = quantize(&source, &at("q.gguf"), &options).expect("a file");
        assert_eq!(
            report.iter().filter(|tensor| tensor.by_importance).count(),
            usize::from(options.importance.is_some())
        );
        let mut got = vec![0.0; want.len()];
        dequantize_row(WeightType::Q4_K, tensor(&at("q.gguf")).bytes.as_slice(), &mut got);
        let errors = got.iter().zip(&want).zip(mean_squares.iter().cycle());
        errors.map(|((a, b), weight)| weight * (a - b).powi(2)).sum::<f32>()
    };
    let without = weighted_error(None);
    for file in ["imatrix.gguf", "imatrix.dat"] {
        let with = weighted_error(Some(Importance::read(&at(file)).expect("importances")));
        assert!(with < 0.9 * without, "{file}: {with} of {without}");
    }

    // Of another model, negative, or no importance matrix at all.
    let refused = |bytes: &[u8], what: &str| {
        std::fs::write(at("bad.dat"), bytes).expect("written");
        let message = match Importance::read(&at("bad.dat")) {
            Err(error) => error.to_string(),
            Ok(importance) => {
                let options = QuantizeOptions { importance: Some(importance), ..QuantizeOptions::new(Mix::Q4_K_M) };
                quantize(&source, &at("q.gguf"), &options).expect_err(what).to_string()
            }
        };
        assert!(message.contains(what), "{message:?} does not say {what:?}");
    };
    let with = |len: usize, values: &[f32]| {
        [int(1), int(name.len()), name.as_bytes().to_vec(), int(8), int(len), bytes(values)].concat()
    };
    refused(&with(128, &sums[..128]), "has 128 importances, but 1 x 256 inputs");
    refused(&with(256, &[-1.0; 256]), "negative or not finite");
    refused(&older[..older.len() - 1], "is no importance matrix");
    refused(&with(usize::MAX, &[]), "is no importance matrix");
    refused(b"a text", "is no importance matrix");
}
