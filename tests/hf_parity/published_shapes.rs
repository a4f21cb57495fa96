//! Parity with transformers on twins of the published variants: every field of their config.json, layer patterns, head
//! ratios, K = V, shared layers, experts (scripts/published_shapes.py).

use std::path::{Path, PathBuf};

use foretoken::gemma4::{AttentionType, Target, TextConfig};
use foretoken::{ElementType, OutputRows};

use crate::cases::{self, Case, cache, max_difference, on_every_isa, pass, values};

fn shapes() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/shapes")
}

fn variants() -> Vec<Case> {
    let cases = cases::under(&shapes()).expect("the twins");
    assert_eq!(cases.iter().map(|case| &case.name[..]).collect::<Vec<_>>(), ["12B", "26B-A4B", "31B", "E2B", "E4B"]);
    cases
}

#[test]
fn every_variant_computes_the_references() {
    on_every_isa(|isa| {
        for case in variants() {
            let target: Target = case.target(isa);
            let mut kv = cache(&target, ElementType::F32, isa);
            let output = pass(&target, &mut kv, &case.ids("input_ids"), OutputRows::All);
            let logits = max_difference(&values(&output.logits), &case.floats("logits"));
            let hidden = max_difference(&values(&output.hidden), &case.floats("hidden"));
            println!("{}: logits {logits:.1e}, hidden {hidden:.1e}", case.name);
            // The tolerance is 1e-4: a reference with more than half of that as rounding error would weaken it.
            assert!(case.floats("reference_rounding").iter().all(|rounding| *rounding < 5e-5), "{}", case.name);
            assert!(logits <= 1e-4 && hidden <= 1e-4, "{}: logits {logits}, hidden {hidden}", case.name);
        }
    });
}

/// The published values: full layers, those that share K and V, K = V, wide MLPs, experts.
#[test]
fn every_variant_has_its_shape() {
    for (case, want) in variants().iter().zip(SHAPES) {
        let checkpoint = foretoken::checkpoint::Checkpoint::open(case.path.join("target")).expect("a checkpoint");
        let config: TextConfig = checkpoint.target_config().expect("a configuration");
        let count =
            |of: fn(&foretoken::gemma4::LayerConfig) -> bool| config.layers.iter().filter(|layer| of(layer)).count();
        let wider = config.layers.iter().filter(|layer| layer.intermediate_size > config.layers[0].intermediate_size);
        let got = (
            count(|layer| layer.attention == AttentionType::Full),
            config.num_own_kv_layers(),
            count(|layer| layer.k_eq_v),
            wider.count(),
            config.moe.as_ref().map_or(0, |moe| moe.num_experts),
        );
        assert_eq!(got, want, "{}", case.name);
        assert_eq!(config.eos_token_ids, [1, 106], "{}", case.name);
    }
}

/// Full layers, layers with their own K and V, with K = V, with a wider MLP, experts.
const SHAPES: [(usize, usize, usize, usize, usize); 5] =
    [(2, 12, 2, 0, 0), (2, 12, 2, 0, 16), (1, 6, 1, 0, 0), (7, 15, 0, 20, 0), (7, 24, 0, 0, 0)];

/// With the other fixtures of Gemma.
#[test]
fn the_twins_are_small() {
    fn bytes(path: &Path) -> u64 {
        let entries = || std::fs::read_dir(path).expect("a directory").map(|entry| entry.expect("an entry").path());
        if path.is_dir() { entries().map(|path| bytes(&path)).sum() } else { path.metadata().expect("a file").len() }
    }
    let fixtures = std::fs::read_dir(shapes().with_file_name("fixtures")).expect("a directory");
    let fixtures = fixtures.map(|entry| entry.expect("an entry").path());
    let own = fixtures.filter(|path| !path.to_string_lossy().contains("qwen35"));
    assert!(bytes(&shapes()) + own.map(|path| bytes(&path)).sum::<u64>() < 20 << 20);
}
