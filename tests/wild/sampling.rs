//! Sampling defaults in files.

use foretoken::sampler::{Penalties, Xtc};
use foretoken::{Sampling, Speculation, SpeculationOptions};

use super::*;

/// The published parameters of Gemma 4.
fn published() -> Sampling {
    Sampling { temperature: 1.0, top_k: Some(64), top_p: 0.95, ..Sampling::default() }
}

#[test]
fn sampling_defaults_are_read_and_not_applied() {
    let twin = Twin::of("edge");
    assert_eq!(engine(&twin.path("target"), None).expect("an engine").sampling_defaults(), None);
    let file = "target/generation_config.json";
    for eos in [json!([1, 106, 50]), json!(106), json!([-1, 106])] {
        let config = json!({"do_sample": true, "temperature": 1.0, "top_k": 64, "top_p": 0.95, "eos_token_id": eos});
        // With a byte-order mark, as Windows editors write.
        twin.write(file, format!("\u{feff}{config}"));
        let engine = engine(&twin.path("target"), None).expect("an engine");
        assert_eq!(engine.sampling_defaults(), Some(&published()));
        assert!(engine.end_of_generation().contains(&106));
        assert_eq!(GenerateOptions::default().sampling, Sampling::default());
    }
    for (config, want) in [
        (json!({"do_sample": false, "temperature": 1.0, "top_k": 64}), None),
        (json!({"temperature": 0.0}), None),
        (json!({"top_k": 0, "top_p": 0.9}), Some(Sampling { top_k: None, top_p: 0.9, ..published() })),
        (json!({"top_k": -1, "top_p": 0.9}), Some(Sampling { top_k: None, top_p: 0.9, ..published() })),
        // Over all tokens, as in transformers; alone it does not imply sampling.
        (
            json!({"temperature": 1.0, "typical_p": 0.9, "repetition_penalty": 1.2}),
            Some(Sampling {
                temperature: 1.0,
                typical_p: 0.9,
                penalties: Penalties { repeat: 1.2, last_n: None, ..Penalties::default() },
                ..Sampling::default()
            }),
        ),
        (json!({"repetition_penalty": 1.2}), None),
        (json!({"do_sample": true}), Some(Sampling { temperature: 1.0, ..Sampling::default() })),
        (json!({"min_p": 0.1}), Some(Sampling { temperature: 1.0, min_p: 0.1, ..Sampling::default() })),
    ] {
        twin.write(file, config.to_string());
        let engine = engine(&twin.path("target"), None).expect("an engine");
        assert_eq!(engine.sampling_defaults(), want.as_ref(), "{config}");
    }
    for (config, about) in [
        (json!({"top_p": 1.5}), "top_p"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"temperature": 1.0, "repetition_penalty": 0.0}), "repetition_penalty"),
    ] {
        twin.write(file, config.to_string());
        refused(engine(&twin.path("target"), None), &["generation_config.json", about]);
    }
}

fn i32_value(x: i32) -> Raw {
    Raw(5, x.to_le_bytes().to_vec())
}

/// The defaults of a GGUF file with these keys of `general.sampling`.
fn defaults_of(twin: &Twin, keys: &[(&str, Raw)]) -> Result<Option<Sampling>> {
    let with =
        |file: GgufFile, (name, value): &(&str, Raw)| file.with(&format!("general.sampling.{name}"), value.clone());
    let file = keys.iter().fold(twin.gguf("target"), with);
    Ok(engine(&twin.write("model.gguf", file.bytes()), None)?.sampling_defaults().cloned())
}

#[test]
fn sampling_defaults_of_a_gguf_file_are_read() {
    let twin = Twin::of("edge");
    let with = |temp: f64, top_k: Raw| {
        defaults_of(&twin, &[("temp", f32_value(temp)), ("top_k", top_k), ("top_p", f32_value(0.95))])
    };
    assert_eq!(with(1.0, i32_value(64)).expect("an engine"), Some(published()));
    for minus_one in [i32_value(-1), Raw(11, (-1i64).to_le_bytes().to_vec())] {
        let all = with(1.0, minus_one).expect("an engine");
        assert_eq!(all, Some(Sampling { top_k: None, ..published() }));
    }
    refused(with(-1.0, i32_value(64)), &["model.gguf", "general.sampling.temp", "0 or more"]);
    // The last number of tokens is llama.cpp's -1 for all, or as given.
    for (n, last_n) in [(-1, None), (32, Some(32))] {
        let keys = [("temp", f32_value(1.0)), ("penalty_repeat", f32_value(1.2)), ("penalty_last_n", i32_value(n))];
        let penalties = Penalties { repeat: 1.2, last_n, ..Penalties::default() };
        let got = defaults_of(&twin, &keys).expect("an engine").expect("parameters");
        assert_eq!(got.penalties, penalties);
    }
    defaults_of(&twin, &[("temp", f32_value(0.8)), ("mirostat", i32_value(0))]).expect("an engine");
}

/// A sequence drops the samplers that it does not name.
#[test]
fn sampling_defaults_are_those_of_the_sequence() {
    let twin = Twin::of("edge");
    let of = |sequence: Option<&str>| {
        let values = [("temp", 0.8), ("xtc_probability", 0.3), ("xtc_threshold", 0.2), ("min_p", 0.05)];
        let mut keys = Vec::from(values.map(|(name, value)| (name, f32_value(value))));
        keys.extend(sequence.map(|names| ("sequence", str_value(names))));
        defaults_of(&twin, &keys).expect("an engine").expect("parameters")
    };
    let all = Sampling {
        temperature: 0.8,
        min_p: 0.05,
        xtc: Some(Xtc { probability: 0.3, threshold: 0.2 }),
        ..Sampling::default()
    };
    assert_eq!(of(None), all);
    assert_eq!(of(Some("penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature")), all);
    assert_eq!(of(Some("min_p;temperature")), Sampling { xtc: None, ..all });
    let long = defaults_of(&twin, &[("sequence", str_value(&"a;".repeat(2049)))]);
    refused(long, &["general.sampling.sequence", "at most 4096 bytes"]);
}

/// Tokens that the publisher suppresses are never written, with and without drafts.
#[test]
fn suppressed_tokens_are_never_written() {
    let (twin, prompt) = (Twin::of("edge"), case("edge").ids("input_ids"));
    let write = |suppressed: &[u32]| {
        twin.write("target/generation_config.json", json!({"suppress_tokens": suppressed}).to_string());
        let engine = engine(&twin.path("target"), Some(&twin.path("assistant"))).expect("an engine");
        [Speculation::Off, Speculation::With(SpeculationOptions::mtp(3))].map(|speculation| {
            let options = GenerateOptions { max_tokens: 8, speculation, ..GenerateOptions::default() };
            let mut session = engine.session(&SessionOptions::default()).expect("a session");
            let generation = session.generate(&prompt, &options).expect("a generation");
            generation.flat_map(|piece| piece.expect("a piece").tokens).collect::<Vec<u32>>()
        })
    };
    let [free, _] = write(&[]);
    let [plain, drafted] = write(&free);
    assert!(!plain.is_empty() && !plain.iter().any(|id| free.contains(id)), "{plain:?} without {free:?}");
    assert_eq!(drafted, plain);
}

/// The defaults of an engine, and the warnings as it loaded.
fn loaded(path: &Path) -> (Option<Sampling>, Vec<String>) {
    let (engine, lines) = warnings(|| engine(path, None).expect("an engine"));
    (engine.sampling_defaults().cloned(), lines)
}

/// Names have llama.cpp's alternative spellings. An unknown name is ignored, as there; with an unsupported
/// order, no parameter is used. One warning says so.
#[test]
fn a_file_with_an_odd_sequence_of_samplers_loads() {
    let twin = Twin::of("edge");
    let of = |sequence: &str| {
        let file = twin
            .gguf("target")
            .with("general.sampling.temp", f32_value(0.8))
            .with("general.sampling.top_k", i32_value(20))
            .with("general.sampling.top_p", f32_value(0.9))
            .with("general.sampling.min_p", f32_value(0.05))
            .with("general.sampling.sequence", str_value(sequence));
        loaded(&twin.write("model.gguf", file.bytes()))
    };
    let all = Sampling { temperature: 0.8, top_k: Some(20), top_p: 0.9, min_p: 0.05, ..Sampling::default() };
    for sequence in
        ["top_k;typ_p;top_p;min_p;temperature", "Top-K;typ;nucleus;minp;temp", "adaptive_p;topk;top-p;MIN_P;temp;"]
    {
        assert_eq!(of(sequence), (Some(all.clone()), Vec::new()), "{sequence}");
    }
    let (defaults, lines) = of("top_k;tfs_z;min_p;smooth\ning;temp");
    assert_eq!(defaults, Some(Sampling { top_p: 1.0, ..all }));
    let [line] = &lines[..] else { panic!("{lines:?}") };
    for part in
        ["model.gguf", "general.sampling.sequence", r#""tfs_z;smooth\ning" is not a llama.cpp sampler"#, "ignored"]
    {
        assert!(line.contains(part) && !line.contains('\n'), "{part}: {line:?}");
    }
    // Longer than any name in a file may be.
    let (defaults, lines) = of(&"top_k;".repeat(20));
    assert_eq!((defaults, lines.len()), (None, 1), "{lines:?}");
    for (sequence, problem) in [
        ("temperature;min_p", "the order penalties;dry;"),
        ("min_p;min_p", "the order penalties;dry;"),
        ("min_p;infill;unknown", "infill is not implemented"),
    ] {
        let (defaults, lines) = of(sequence);
        assert_eq!((defaults, lines.len()), (None, 1), "{sequence}: {lines:?}");
        for part in ["model.gguf", "general.sampling.sequence", sequence, problem, "are not used", "top_p"] {
            assert!(lines[0].contains(part), "{part}: {lines:?}");
        }
    }
}

/// A file with Mirostat loads; its parameters, which mean something else without it, are ignored with one warning.
#[test]
fn a_file_with_mirostat_loads_without_its_parameters() {
    let twin = Twin::of("edge");
    for (version, count) in [(0i32, 0), (1, 1), (2, 1)] {
        let file = twin
            .gguf("target")
            .with("general.sampling.temp", f32_value(0.8))
            .with("general.sampling.mirostat", i32_value(version))
            .with("general.sampling.mirostat_tau", f32_value(5.0));
        let path = twin.write("model.gguf", file.bytes());
        twin.write("target/generation_config.json", json!({"temperature": 0.8, "mirostat": version}).to_string());
        let directory = twin.path("target");
        for (path, name) in [(path, "model.gguf"), (directory, "generation_config.json")] {
            let (defaults, lines) = loaded(&path);
            assert_eq!((defaults.is_some(), lines.len()), (version == 0, count), "{name}: {lines:?}");
            for part in [name, "mirostat is", "Mirostat is not implemented", "are not used", "top_p"] {
                assert!(lines.iter().all(|line| line.contains(part) && !line.contains('\n')), "{part}: {lines:?}");
            }
        }
    }
    twin.write("target/generation_config.json", json!({"mirostat_mode": 2, "temperature": 0.8}).to_string());
    assert_eq!((loaded(&twin.path("target")).0, loaded(&twin.path("target")).1.len()), (None, 1));
}
