//! Assistants: of every layout and type, inside their target, and beside it.

use foretoken::{EndOfGeneration, Speculation, SpeculationOptions, Statistics, Stop};

use super::*;

/// The fixture's assistant as a GGUF file in which its own tensors have these names, not those of [`NEXTN`].
fn assistant_file(twin: &Twin, architecture: &str, names: [&str; 4]) -> GgufFile {
    let mut file = twin.gguf("assistant").architecture(architecture);
    for (from, to) in NEXTN.into_iter().zip(names) {
        if file.tensors.iter().any(|tensor| tensor.name == from.as_bytes()) {
            file = file.renamed(from, to);
        }
    }
    file
}

/// The names in llama.cpp's converter.
const NEXTN: [&str; 4] = [
    "nextn.pre_projection.weight",
    "nextn.post_projection.weight",
    "masked_embd_centroids.weight",
    "masked_embd_ordering",
];

const MTP: [&str; 4] =
    ["mtp.pre_projection.weight", "mtp.post_projection.weight", "mtp.centroids.weight", "mtp.token_ordering.weight"];

const MTP_PROJ: [&str; 4] =
    ["mtp_pre_proj.weight", "mtp_post_proj.weight", "mtp_centroids.weight", "mtp_token_ordering.weight"];

const ASSISTANT: [&str; 4] = [
    "assistant.pre_projection.weight",
    "assistant.post_projection.weight",
    "masked_embd_centroids.weight",
    "masked_embd_ordering",
];

/// The four layouts of assistants in circulation: architecture, names, and other differences.
fn layouts(twin: &Twin) -> Vec<(&'static str, GgufFile)> {
    let backbone = u32_value(64);
    let nextn = assistant_file(twin, "gemma4-assistant", NEXTN);
    let mtp = assistant_file(twin, "gemma4_assistant", MTP)
        .without("gemma4_assistant.embedding_length_out")
        .with("gemma4_assistant.n_embd_backbone", backbone.clone());
    // Also contains the target's embedding, and no number of shared layers.
    let embedding = twin.gguf("target").tensors.into_iter().find(|tensor| tensor.name == b"token_embd.weight");
    let mut mtp_proj = assistant_file(twin, "gemma4_mtp", MTP_PROJ).without("gemma4_mtp.attention.shared_kv_layers");
    let embedding = embedding.expect("an embedding");
    mtp_proj = mtp_proj.tensor("mtp_input_embd.weight", &[512, 64], F32, embedding.bytes);
    // Under the target's name, without the divisors of the rotation; scalars without `.weight`.
    let mut target_named = assistant_file(twin, "gemma4", ASSISTANT)
        .dropped("rope_freqs.weight")
        .without("gemma4.embedding_length_out")
        .with("gemma4.assistant.type", str_value("mtp"))
        .with("gemma4.assistant.backbone_hidden_size", backbone);
    for layer in 0..4 {
        let name = format!("blk.{layer}.layer_output_scale");
        target_named = target_named.renamed(&format!("{name}.weight"), &name);
    }
    vec![
        ("gemma4-assistant", nextn),
        ("gemma4_assistant", mtp),
        ("gemma4_mtp", mtp_proj),
        ("gemma4 with assistant.*", target_named),
    ]
}

#[test]
fn assistants_of_every_layout_draft_the_references() {
    for fixture in ["dense", "edge"] {
        let (twin, case) = (Twin::of(fixture), case(fixture));
        let target = target(&twin.path("target")).expect("the target");
        for (layout, file) in layouts(&twin) {
            println!("{fixture}, {layout}");
            let path = twin.write("drafter.gguf", file.bytes());
            let assistant = assistant(&path, &target).unwrap_or_else(|error| panic!("{layout}: {error}"));
            let scored = drafts_the_references(&case, &target, &assistant);
            assert_eq!(scored < 512, fixture == "edge", "{layout}: {scored} ids scored");
            let again = twin.path("again");
            let options = ToHuggingFaceOptions { unknown: Unknown::LeftOut, ..ToHuggingFaceOptions::default() };
            to_hugging_face(&Checkpoint::open(&path).expect("a file"), &again, &options).expect(layout);
            drafts_the_references(&case, &target, &self::assistant(&again, &target).expect(layout));
            std::fs::remove_dir_all(again).expect("the directory");
        }
    }
}

/// llama.cpp's converter drops the centroids: every id is scored then, and those of the centroids as before.
#[test]
fn assistants_without_their_centroids_score_every_id() {
    let (twin, case) = (Twin::of("edge"), case("edge"));
    let target = target(&twin.path("target")).expect("the target");
    for (layout, names) in [("gemma4-assistant", NEXTN), ("gemma4_assistant", MTP), ("gemma4_mtp", MTP_PROJ)] {
        let file = assistant_file(&twin, layout, names).dropped(names[2]).dropped(names[3]);
        let file = file.without(&format!("{layout}.centroid_top_k"));
        let assistant = assistant(&twin.write("drafter.gguf", file.bytes()), &target).expect("an assistant");
        assert_eq!(drafts_the_references(&case, &target, &assistant), 512, "{layout}");
    }
    // Another tensor that is missing is named as in the file.
    let file = twin.gguf("assistant").dropped("blk.1.attn_q_norm.weight");
    let about = ["layers.1.self_attn.q_norm.weight", "is missing (here blk.1.attn_q_norm.weight)"];
    refused(assistant(&twin.write("drafter.gguf", file.bytes()), &target), &about);
}

/// The types of assistants in circulation: each drafts what its dequantized weights draft.
#[test]
fn assistants_of_every_type_draft() {
    let twin = Twin::of("edge");
    let own = target(&twin.path("target")).expect("the target");
    let hidden = tensor(vec![0.25; 64], (1, 64)).expect("a state");
    let mut kv = cache(&own, ElementType::F32, Isa::best());
    pass(&own, &mut kv, &case("edge").ids("input_ids"), OutputRows::None);
    let scores = |file: &GgufFile| {
        let assistant = assistant(&twin.write("drafter.gguf", file.bytes()), &own).expect("an assistant");
        values(&cases::draft_step(&assistant, 7, &hidden, &kv).scores.logits)
    };
    // Every id is scored, so that both score the same.
    let whole = twin.gguf("assistant").dropped(NEXTN[2]).dropped(NEXTN[3]).without("gemma4-assistant.centroid_top_k");
    for (type_id, most) in [(2, 0.1), (8, 0.1), (BF16, 1e-2), (F16, 1e-2)] {
        let (mut typed, mut plain, mut count) = (whole.clone(), whole.clone(), 0);
        for (typed, plain) in typed.tensors.iter_mut().zip(&mut plain.tensors) {
            let inputs = typed.shape.last().copied().unwrap_or(1) as usize;
            if typed.shape.len() != 2 || typed.type_id != F32 || !inputs.is_multiple_of(32) {
                continue;
            }
            let (bytes, values) = stored(&f32s(&typed.bytes), inputs, type_id);
            (typed.type_id, typed.bytes, plain.bytes) = (type_id, bytes, f32_bytes(values));
            count += 1;
        }
        let error = relative_error(&scores(&typed), &scores(&plain));
        println!("type {type_id}, {count} matrices: scores off by {error:.4}");
        assert!(count > 10 && error < most, "type {type_id}: {error}");
    }
}

#[test]
fn parts_given_for_one_another_are_refused_by_name() {
    let twin = Twin::of("edge");
    let target_file = twin.write("target.gguf", twin.gguf("target").bytes());
    for (layout, file) in layouts(&twin) {
        let path = twin.write("drafter.gguf", file.bytes());
        println!("{layout}");
        refused(engine(&path, None), &["drafter.gguf", "general.architecture", "as the assistant and its target as"]);
        engine(&target_file, Some(&path)).expect("a pair");
    }
    refused(engine(&target_file, Some(&target_file)), &["target.gguf", "is a target's", "as the model"]);
    let projector = GgufFile::new()
        .key("general.architecture", str_value("clip"))
        .key("general.type", str_value("mmproj"))
        .key("clip.vision.block_count", u32_value(1))
        .floats("v.blk.0.ln1.weight", &[4], &[1.0; 4]);
    let projector = twin.write("mmproj-F16.gguf", projector.bytes());
    refused(engine(&projector, None), &["mmproj-F16.gguf", "\"clip\"", "projector", "use the model's file"]);
    refused(engine(&target_file, Some(&projector)), &["mmproj-F16.gguf", "projector"]);
    let (target, assistant) = (twin.path("target"), twin.path("assistant"));
    refused(engine(&assistant, None), &["assistant/config.json", "use it as the assistant"]);
    refused(engine(&target, Some(&target)), &["target/config.json", "target's", "use it as the model"]);
}

/// An assistant with an untied output head drafts with that head, dense or by centroids.
#[test]
fn an_untied_assistant_drafts_with_its_head() {
    for fixture in ["dense", "edge", "nested"] {
        let (case, twin) = (case(fixture), Twin::of(fixture));
        let file = "assistant/model.safetensors";
        twin.tensors(file, |tensors| {
            let (dtype, shape, bytes) = tensors.remove("model.embed_tokens.weight").expect("the table");
            let reversed = bytes.rchunks_exact(4).flatten().copied().collect();
            tensors.insert("lm_head.weight".into(), (dtype, shape.clone(), bytes));
            tensors.insert("model.embed_tokens.weight".into(), (dtype, shape, reversed));
        });
        let target = target(&twin.path("target")).expect("a target");
        // Also if the configuration ties it: it differs from the table.
        for tied in [true, false] {
            twin.json("assistant/config.json", |config| config["tie_word_embeddings"] = tied.into());
            let own = assistant(&twin.path("assistant"), &target).expect("an assistant");
            drafts_the_references(&case, &target, &own);
        }
        let path = twin.write("assistant.gguf", twin.gguf("assistant").bytes());
        drafts_the_references(&case, &target, &assistant(&path, &target).expect("an assistant"));
    }
}

/// An assistant merged into its target's directory, as by converters for other engines, drafts.
#[test]
fn an_assistant_inside_its_targets_directory_drafts() {
    let case = case("edge");
    for (prefix, in_text) in [("language_model.mtp.", true), ("model.mtp.", true), ("mtp.", false)] {
        let twin = Twin::of("edge");
        let read = |file: &str| std::fs::read(twin.path(file)).expect("a file");
        let config: Value = serde_json::from_slice(&read("assistant/config.json")).expect("JSON");
        let mut inner = Tensors::new();
        twin.tensors("assistant/model.safetensors", |tensors| inner = tensors.clone());
        twin.tensors(WEIGHTS, |tensors| {
            tensors.extend(inner.into_iter().map(|(name, tensor)| (format!("{prefix}{name}"), tensor)));
        });
        // With tensors but without their configuration, it is a target.
        let path = twin.path("target");
        computes_the_references(&case, &target(&path).expect("a target"));
        assert!(find_assistants(&path).expect("none").fitting.is_empty());
        twin.json(CONFIG, |json| {
            let text = json.clone();
            if in_text {
                *json = json!({"model_type": "gemma4", "text_config": text});
            }
            let place = if in_text { &mut json["text_config"] } else { json };
            place["mtp_assistant_config"] = config;
        });
        let own = target(&path).expect("a target");
        computes_the_references(&case, &own);
        let checkpoint = Checkpoint::open_assistant(&path).expect("the assistant");
        let assistant = Assistant::load(&checkpoint, &own, Isa::best()).expect("the assistant");
        drafts_the_references(&case, &own, &assistant);
        let found = find_assistants(&path).expect("one");
        assert_eq!((found.only(), found.misfits.len()), (Some(path.as_path()), 0), "{prefix}");
        assert!(engine(&path, found.only()).expect("a pair").assistant().is_some());
        let pair =
            VerifyOptions { target: Some(path.clone()), assistant: Some(path.clone()), ..VerifyOptions::default() };
        let findings = verify(&pair);
        assert!(findings.iter().all(|finding| finding.outcome != Outcome::Failed), "{prefix}: {findings:?}");
        assert!(
            findings.iter().any(|finding| finding.part == foretoken::verify::Part::Pair && finding.check == "fit"),
            "{prefix}"
        );
        twin.json(CONFIG, |json| {
            let place = if in_text { &mut json["text_config"] } else { json };
            place["mtp_assistant_config"]["backbone_hidden_size"] = json!(96);
        });
        let found = find_assistants(&path).expect("a misfit");
        assert_eq!((found.only(), found.misfits.len()), (None, 1), "{prefix}");
    }
}

/// An assistant's tensors in its target's file do not make it an assistant.
#[test]
fn a_target_with_its_assistants_tensors_is_a_target() {
    let (twin, case) = (Twin::of("edge"), case("edge"));
    let mut file = twin.gguf("target");
    for tensor in twin.gguf("assistant").tensors {
        let name = String::from_utf8(tensor.name).expect("a name");
        if name.starts_with("nextn.") || name.starts_with("masked_embd") {
            let shape: Vec<usize> = tensor.shape.iter().map(|size| *size as usize).collect();
            file = file.tensor(name, &shape, tensor.type_id, tensor.bytes);
        }
    }
    let path = twin.write("both.gguf", file.bytes());
    computes_the_references(&case, &target(&path).expect("a target"));
    refused(engine(&twin.path("target"), Some(&path)), &["both.gguf", "is a target's"]);
}

#[test]
fn an_assistant_beside_its_target_is_found() {
    let twin = Twin::of("edge");
    let (target, drafter) = (twin.gguf("target").bytes(), twin.gguf("assistant").bytes());
    for place in [
        "mtp-gemma-4-E2B-it.gguf",
        "gemma-4-E2B-it-assistant-Q8_0.gguf",
        "gemma-4-E2B-it-Q4_K_M-assistant.gguf",
        "MTP/gemma-4-E2B-it.gguf",
        "gemma-4-E2B-it-assistant.gguf",
        "gemma-4-E2B-it-mtp.gguf",
        "gemma-4-E2B-it-MTP.gguf",
        "gemma-4-E2B-it-mtp-Q8_0.gguf",
        "assistant.gguf",
        "assistant/model-Q8_0.gguf",
        "gemma-4-E2B-it-assistant/model-Q8_0.gguf",
    ] {
        let directory = tempfile::tempdir().expect("a directory");
        let model = directory.path().join("gemma-4-E2B-it-Q4_K_M.gguf");
        std::fs::write(&model, &target).expect("written");
        std::fs::write(directory.path().join("mmproj-F16.gguf"), b"GGUF").expect("written");
        assert!(find_assistants(&model).expect("none").fitting.is_empty());
        let path = directory.path().join(place);
        std::fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
        std::fs::write(&path, &drafter).expect("written");
        let found = find_assistants(&model).expect("one");
        assert_eq!(found.only(), Some(path.as_path()), "{place}");
        assert!(found.misfits.is_empty(), "{found:?}");
        assert!(engine(&model, found.only()).expect("a pair").assistant().is_some());
    }
    // Directories.
    let directory = tempfile::tempdir().expect("a directory");
    let model = directory.path().join("gemma-4-E2B-it-Q4_K_M.gguf");
    std::fs::write(&model, &target).expect("written");
    let heads = directory.path().join("MTP");
    std::fs::create_dir(&heads).expect("a directory");
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(twin.path("assistant").join(file), heads.join(file)).expect("a copy");
    }
    assert_eq!(find_assistants(&model).expect("one").only(), Some(heads.as_path()));
    std::fs::rename(twin.path("assistant"), twin.path("target-assistant")).expect("renamed");
    let found = find_assistants(twin.path("target")).expect("one");
    assert_eq!(found.only(), Some(twin.path("target-assistant").as_path()));
    let file = twin.write("target-UD-Q4_K_XL.gguf", &target);
    assert_eq!(find_assistants(file).expect("one").only(), Some(twin.path("target-assistant").as_path()));
    let inside = twin.write("target/mtp-target.gguf", &drafter);
    let found = find_assistants(twin.path("target")).expect("two");
    assert_eq!(found.only(), None);
    assert_eq!(found.fitting, [inside, twin.path("target-assistant")]);
}

/// In the layout of the Hub's cache: the current revision of the repository with that name, of any owner.
#[test]
fn an_assistant_in_the_hubs_cache_is_found() {
    let twin = Twin::of("edge");
    let repository = |name: &str, revision: &str, part: &str| {
        let to = format!("hub/models--{name}/snapshots/{revision}");
        std::fs::create_dir_all(twin.path(&to)).expect("a directory");
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(twin.path(part).join(file), twin.path(&to).join(file)).expect("a copy");
        }
        twin.path(&to)
    };
    let target = repository("google--gemma-4-E2B-it", "0f", "target");
    repository("google--gemma-4-E4B-it-assistant", "1a", "assistant");
    assert!(find_assistants(&target).expect("none").fitting.is_empty());
    repository("google--gemma-4-E2B-it-assistant", "2b", "assistant");
    let newest = repository("google--gemma-4-E2B-it-assistant", "3c", "assistant");
    assert!(find_assistants(&target).expect("none").fitting.is_empty(), "no revision is named");
    twin.write("hub/models--google--gemma-4-E2B-it-assistant/refs/main", "3c");
    let found = find_assistants(&target).expect("one");
    assert_eq!((found.only(), found.misfits.len()), (Some(newest.as_path()), 0), "{found:?}");
    assert!(engine(&target, found.only()).expect("a pair").assistant().is_some());
    // A GGUF file of the same model in another owner's repository.
    let file = twin.write(
        "hub/models--unsloth--gemma-4-E2B-it-GGUF/snapshots/4d/gemma-4-E2B-it-Q4_0.gguf",
        twin.gguf("target").bytes(),
    );
    assert_eq!(find_assistants(file).expect("one").only(), Some(newest.as_path()));
    // A second one.
    let drafter = twin.gguf("assistant").bytes();
    let other = "hub/models--unsloth--gemma-4-E2B-it-assistant-GGUF";
    twin.write(&format!("{other}/refs/main"), "5e\n");
    let drafter = twin.write(&format!("{other}/snapshots/5e/gemma-4-E2B-it-assistant-Q8_0.gguf"), drafter);
    let found = find_assistants(&target).expect("two");
    assert_eq!((found.only(), &found.fitting), (None, &vec![newest, drafter]));
}

#[test]
fn an_assistant_of_another_target_is_a_misfit() {
    let (edge, dense) = (Twin::of("edge"), Twin::of("dense"));
    let model = edge.write("models/edge.gguf", edge.gguf("target").bytes());
    let stranger = edge.write("models/mtp-dense.gguf", dense.gguf("assistant").bytes());
    let broken = edge.write("models/mtp-broken.gguf", b"GGUF");
    let found = find_assistants(&model).expect("two");
    assert_eq!(found.only(), None);
    let reasons: Vec<_> = found.misfits.iter().map(|(path, error)| (path.clone(), error.to_string())).collect();
    assert_eq!(reasons.iter().map(|(path, _)| path.clone()).collect::<Vec<_>>(), [broken, stranger]);
    assert!(reasons[1].1.contains("does not fit the target"), "{reasons:?}");
    // The one that fits is used, whatever else is there.
    let own = edge.write("models/mtp-edge.gguf", edge.gguf("assistant").bytes());
    assert_eq!(find_assistants(&model).expect("three").only(), Some(own.as_path()));
}

/// Acceptance falls along the chain, and is low on some texts: the statistics show it by position,
/// and the target's own greedy text does not change.
#[test]
fn acceptance_is_counted_by_position() {
    let twin = Twin::of("edge");
    let assistant = twin.write("mtp-edge.gguf", twin.gguf("assistant").bytes());
    let engine = engine(&twin.write("edge.gguf", twin.gguf("target").bytes()), Some(&assistant)).expect("a pair");
    let run = |speculation: &Speculation, simulated: &[f64]| {
        let mut session = engine.session(&SessionOptions::default()).expect("a session");
        let stop = Stop { end_of_generation: EndOfGeneration::Ignored, ..Stop::default() };
        let (speculation, simulate_acceptance) = (speculation.clone(), simulated.to_vec());
        let options =
            GenerateOptions { max_tokens: 1024, stop, speculation, simulate_acceptance, ..Default::default() };
        let mut generation = session.generate(&[2, 5, 7], &options).expect("a generation");
        let ids: Vec<u32> = generation.by_ref().flat_map(|piece| piece.expect("a piece").tokens).collect();
        (ids, generation.statistics().clone())
    };
    let drafts = Speculation::With(SpeculationOptions::mtp(5));
    let shares = |s: &Statistics| -> Vec<f64> {
        s.accepted_at.iter().zip(&s.drafted_at).map(|(accepted, n)| *accepted as f64 / *n as f64).collect()
    };
    // 31B with thinking off; JSON by an easy and a hard schema.
    for want in [[0.92, 0.78, 0.67, 0.57], [0.97; 4], [0.08, 0.0, 0.0, 0.0]] {
        let (_, statistics) = run(&drafts, &want);
        let got = shares(&statistics);
        // Four deviations of the shortest run's 250 rounds.
        assert!(
            got.len() == 4 && got.iter().zip(want).all(|(got, want)| (got - want).abs() < 0.13),
            "{got:?}, {want:?}"
        );
        assert!(got.is_sorted_by(|a, b| a >= b) && statistics.simulated, "{got:?}");
    }
    let (plain, _) = run(&Speculation::Off, &[]);
    let (drafted, statistics) = run(&drafts, &[]);
    assert_eq!((plain.len(), &drafted), (1024, &plain));
    assert!(!statistics.simulated && shares(&statistics).is_sorted_by(|a, b| a >= b), "{:?}", shares(&statistics));
}
