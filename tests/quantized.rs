//! Quantized weights: the reference's text where the type is fine enough, and logits within the type's own error.

mod cases;

use std::path::Path;

use cases::{argmax, cache, pass, values};
use foretoken::checkpoint::{Checkpoint, LoadOptions};
use foretoken::gemma4::{Target, Wanted};
use foretoken::{ElementType, Isa, WeightType};

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
