//! An assistant without centroids, and with built ones: the same text, other drafts; built once per cache directory.

use std::path::{Path, PathBuf};

use foretoken::gemma4::{BuildCentroids, CentroidConfig, CentroidUsage, Centroids};
use foretoken::{Engine, EngineOptions, GenerateOptions, SessionOptions, Speculation, SpeculationOptions};
use safetensors::SafeTensors;

fn demo(part: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo").join(part)
}

/// The ids after three of the demo's prompts, and the acceptance rate.
fn written(centroids: Centroids) -> (Vec<u32>, f64) {
    let options = EngineOptions { threads: Some(1), centroids, ..EngineOptions::new(demo("target")) };
    let engine = Engine::load(&options.with_assistant(demo("assistant"))).expect("the demo pair");
    let prompts: Vec<String> =
        serde_json::from_slice(&std::fs::read(demo("prompts.json")).expect("the prompts")).expect("JSON");
    let (mut ids, mut accepted, mut drafted) = (Vec::new(), 0.0, 0.0);
    for prompt in &prompts[..3] {
        let prompt = engine.tokenizer().expect("a tokenizer").encode(prompt).expect("ids");
        let speculation = Speculation::With(SpeculationOptions::mtp(4));
        let options = GenerateOptions { max_tokens: 96, speculation, ..GenerateOptions::default() };
        let mut session = engine.session(&SessionOptions::default()).expect("a session");
        let mut generation = session.generate(&prompt, &options).expect("a generation");
        generation.by_ref().for_each(|piece| ids.extend(piece.expect("a piece").tokens));
        accepted += generation.statistics().accepted as f64;
        drafted += generation.statistics().drafted as f64;
    }
    (ids, accepted / drafted)
}

fn built(num_centroids: usize, top_k: usize, cache: Option<&Path>) -> Centroids {
    let sizes = CentroidConfig { num_centroids, top_k };
    Centroids::Build(BuildCentroids { sizes, cache: cache.map(Path::to_owned), usage: CentroidUsage::Always })
}

#[test]
fn the_text_is_the_same_with_any_centroids() {
    let (text, own) = written(Centroids::Own);
    let mut acceptance = Vec::new();
    for centroids in [Centroids::None, built(64, 8, None), built(64, 64, None), built(256, 16, None), built(1, 1, None)]
    {
        let (ids, rate) = written(centroids.clone());
        assert_eq!(ids, text, "{centroids:?}");
        println!("{centroids:?}: {rate:.3}, {own:.3} with its own");
        acceptance.push(rate);
    }
    // All groups are all ids; an eighth of them loses some drafts, and not most.
    let [none, eighth, all, _, single] = acceptance[..] else { panic!("five") };
    assert_eq!((all, single), (none, none));
    assert!(eighth > 0.8 * none, "{eighth} of {none}");
    // The file's own are the default.
    let faster = |num_centroids: usize| {
        let sizes = CentroidConfig { num_centroids, top_k: 1 };
        Centroids::Build(BuildCentroids { sizes, ..BuildCentroids::default() })
    };
    assert_eq!(written(faster(64)), (text.clone(), own));
    assert_eq!(written(faster(3)), (text, own));
    // Sizes that do not divide the vocabulary are an error if centroids are required.
    let options = EngineOptions { centroids: built(3, 1, None), ..EngineOptions::new(demo("target")) };
    let error = Engine::load(&options.with_assistant(demo("assistant"))).expect_err("a refusal");
    assert!(error.to_string().contains("3, of 4096 tokens"), "{error}");
}

#[test]
fn they_are_built_once_and_kept() {
    let directory = tempfile::tempdir().expect("a directory");
    let cache = directory.path().join("cache/foretoken");
    let first = written(built(64, 8, Some(&cache)));
    let files: Vec<PathBuf> =
        std::fs::read_dir(&cache).expect("made").map(|entry| entry.expect("an entry").path()).collect();
    let [file] = &files[..] else { panic!("{files:?}") };
    let kept = std::fs::read(file).expect("a file");
    // Other centroids in the cache file: they are used.
    let place = |name: &str| {
        let tensors = SafeTensors::deserialize(&kept).expect("safetensors");
        let data = tensors.tensor(&format!("masked_embedding.{name}")).expect("a tensor").data();
        let start = data.as_ptr() as usize - kept.as_ptr() as usize;
        start..start + data.len()
    };
    let mut other = kept.clone();
    other[place("centroids.weight")].fill(0);
    std::fs::write(file, &other).expect("written");
    let zeros = written(built(64, 8, Some(&cache)));
    assert_eq!(zeros.0, first.0);
    assert_eq!(std::fs::read(file).expect("a file"), other, "it was built again");
    // A truncated file, or one without a permutation, is replaced.
    let mut twice = kept.clone();
    let ordering = place("token_ordering").start;
    twice.copy_within(ordering..ordering + 4, ordering + 4);
    for broken in [&kept[..kept.len() / 2], &twice, b"", &[0xFF; 64]] {
        std::fs::write(file, broken).expect("written");
        assert_eq!(written(built(64, 8, Some(&cache))), first);
        assert_eq!(std::fs::read(file).expect("a file"), kept);
    }
    // With an unwritable directory nothing is cached, and the pair works.
    std::fs::write(directory.path().join("plain"), b"").expect("written");
    assert_eq!(written(built(64, 8, Some(&directory.path().join("plain/cache")))), first);
}
