//! Other containers and layouts of the same model.

use std::sync::Mutex;

use super::*;

/// A blob of Ollama's store: no extension, the towers in the same file, `llama` as the tokenizer's model.
#[test]
fn a_blob_with_towers_computes_the_references() {
    let (twin, case) = (Twin::of("edge"), case("edge"));
    let vocabulary = Vocabulary::new();
    let scores: Vec<_> = (0..512).map(|id| f32_value(f64::from(id))).collect();
    let mut file = vocabulary
        .in_gguf(twin.gguf("target"), "llama", &[50, STRIKE_END])
        .with("tokenizer.ggml.pre", str_value("gemma4"))
        .with("tokenizer.ggml.scores", array(&scores))
        .with("tokenizer.ggml.eos_token_id", u32_value(1))
        .with("tokenizer.ggml.eos_token_ids", array(&[u32_value(1), u32_value(106)]))
        .with("gemma4.vision.block_count", u32_value(1))
        .with("gemma4.audio.block_count", u32_value(1));
    for name in [
        "v.blk.0.attn_q.weight",
        "v.std_scale",
        "v.clamp_data",
        "a.blk.0.per_dim_scale.weight",
        "a.conv1d.0.weight",
        "mm.input_projection.weight",
        "mm.a.fc.weight",
    ] {
        file = file.tensor(name, &[32], 39, vec![0; 17]); // an unsupported type as well
    }
    let path =
        twin.write("blobs/sha256-4c27e0f5b5adf02ac956c7322bd2ee7636fe3f45a8512c9aba5385242cb6e09a", file.bytes());
    computes_the_references(&case, &target(&path).expect("a target"));
    // Towers are not loaded.
    let text = twin.write("text.gguf", twin.gguf("target").bytes());
    let loaded = |path: &Path| Checkpoint::open(path).expect("a file").loaded_bytes();
    assert_eq!(loaded(&path), loaded(&text));
    let pair = engine(&path, Some(&twin.path("assistant"))).expect("a pair");
    assert_eq!(pair.tokenizer().expect("one").encode("the").expect("ids"), [2, vocabulary.id("the")]);
    assert_eq!(pair.end_of_generation(), [1, 50, 106]);

    // Its scores are the ids: without the merges they would give another tokenizer.
    let path = twin.write("blobs/sha256-0", file.without("tokenizer.ggml.merges").bytes());
    refused(engine(&path, None), &["tokenizer.ggml.scores", "order of merges", "tokenizer.json"]);

    let short = twin.write("blobs/short", b"GG");
    refused(target(&short), &["short", "not a GGUF file", "use the checkpoint's directory"]);
}

/// Ollama's name of the factor of each expert.
#[test]
fn factors_of_experts_have_either_name() {
    let (twin, case) = (Twin::of("moe"), case("moe"));
    let mut file = twin.gguf("target");
    let mut renamed = 0;
    for tensor in &mut file.tensors {
        let name = String::from_utf8(tensor.name.clone()).expect("a name");
        let other = name.replace("ffn_down_exps.scale", "ffn_gate_inp.per_expert_scale");
        renamed += usize::from(other != name);
        tensor.name = other.into();
    }
    assert!(renamed > 0);
    computes_the_references(&case, &target(&twin.write("blobs/sha256-0", file.bytes())).expect("a target"));
}

/// As in transformers: a head with other values than the embedding is used, also if the configuration ties them.
#[test]
fn a_head_that_differs_from_the_embedding_is_the_head() {
    let ids = case("edge").ids("input_ids");
    let with_head = |tied: bool| {
        let twin = Twin::of("edge");
        twin.tensors(WEIGHTS, |tensors| {
            let (dtype, shape, bytes) = tensors["model.embed_tokens.weight"].clone();
            let reversed = bytes.rchunks_exact(4).flatten().copied().collect();
            tensors.insert("lm_head.weight".into(), (dtype, shape, reversed));
        });
        twin.json(CONFIG, |config| config["tie_word_embeddings"] = tied.into());
        twin
    };
    let twin = with_head(true);
    let used = logits(&target(&twin.path("target")).expect("a target"), &ids);
    assert_eq!(used, logits(&target(&with_head(false).path("target")).expect("a target"), &ids));
    assert_ne!(used, logits(&target(&Twin::of("edge").path("target")).expect("a target"), &ids));

    // Alone.
    twin.tensors(WEIGHTS, |tensors| drop(tensors.remove("model.embed_tokens.weight")));
    refused(target(&twin.path("target")), &["embed_tokens.weight", "is missing", "there is lm_head.weight"]);
}

/// As in transformers: of a nested configuration, the outer flag ties head and embedding, by default.
#[test]
fn the_flag_that_ties_the_head_is_the_outer_one() {
    let (case, twin) = (case("nested"), Twin::of("nested"));
    for part in ["target", "assistant"] {
        twin.json(&format!("{part}/config.json"), |config| {
            config.as_object_mut().expect("an object").remove("tie_word_embeddings");
            config["text_config"]["tie_word_embeddings"] = false.into();
        });
    }
    let target = target(&twin.path("target")).expect("a target");
    computes_the_references(&case, &target);
    drafts_the_references(&case, &target, &assistant(&twin.path("assistant"), &target).expect("an assistant"));
}

/// Prefixes, a copy of the tied head, K and V of KV-shared layers, towers in a shard of their own.
#[test]
fn directories_of_every_layout_compute_the_references() {
    let case = case("edge");
    for prefix in ["model.language_model.", "language_model.model.", "language_model.", ""] {
        let twin = Twin::of("edge");
        twin.tensors(WEIGHTS, |tensors| {
            let renamed = std::mem::take(tensors).into_iter();
            tensors.extend(renamed.map(|(name, tensor)| (name.replacen("model.", prefix, 1), tensor)));
            // A copy of the tied head, which is ignored.
            let (dtype, shape, bytes) = tensors[&format!("{prefix}embed_tokens.weight")].clone();
            let head = format!("{}lm_head.weight", if prefix.starts_with("language") { "language_model." } else { "" });
            tensors.insert(head, (dtype, shape, bytes));
        });
        computes_the_references(&case, &target(&twin.path("target")).expect(prefix));
    }
    let shared = |name: &str| (5..8).any(|layer| name.contains(&format!(".layers.{layer}.self_attn.")));
    let dead = ["k_proj", "v_proj", "k_norm"];
    let is_dead = |name: &str| shared(name) && dead.iter().any(|part| name.contains(part));
    for with_dead in [true, false] {
        let twin = Twin::of("edge");
        twin.tensors(WEIGHTS, |tensors| {
            tensors.retain(|name, _| !is_dead(name));
            if with_dead {
                let of_donor = |layer: usize, part: &str| {
                    let donor = if layer == 7 { 3 } else { 4 };
                    tensors.get(&format!("model.layers.{donor}.self_attn.{part}.weight")).cloned()
                };
                let copies: Vec<_> = (5..8)
                    .flat_map(|layer| dead.map(|part| (layer, part)))
                    .map(|(layer, part)| {
                        let (dtype, shape, bytes) = of_donor(layer, part).expect("the donor's");
                        (format!("model.layers.{layer}.self_attn.{part}.weight"), (dtype, shape, vec![0; bytes.len()]))
                    })
                    .collect();
                tensors.extend(copies);
            }
            tensors.insert("lm_head.weight".into(), tensors["model.embed_tokens.weight"].clone());
        });
        computes_the_references(&case, &target(&twin.path("target")).expect("a target"));
    }
    let twin = Twin::of("edge");
    let mut names = Vec::new();
    twin.tensors(WEIGHTS, |tensors| names.extend(tensors.keys().cloned()));
    std::fs::rename(twin.path(WEIGHTS), twin.path("target/model-00001-of-00002.safetensors")).expect("renamed");
    std::fs::copy(twin.path("assistant/model.safetensors"), twin.path(WEIGHTS)).expect("a copy");
    let tower = ["model.vision_tower.std_scale", "model.audio_tower.layers.0.self_attn.per_dim_scale"];
    twin.tensors(WEIGHTS, |tensors| {
        *tensors = tower.map(|name| (name.to_owned(), (Dtype::F8_E4M3, vec![2], vec![0; 2]))).into();
    });
    std::fs::rename(twin.path(WEIGHTS), twin.path("target/model-00002-of-00002.safetensors")).expect("renamed");
    let of_file =
        |names: &[String], file: &str| names.iter().map(|name| (name.clone(), json!(file))).collect::<Vec<_>>();
    let mut map = of_file(&names, "model-00001-of-00002.safetensors");
    map.extend(of_file(&tower.map(String::from), "model-00002-of-00002.safetensors"));
    let map: serde_json::Map<_, _> = map.into_iter().collect();
    twin.write("target/model.safetensors.index.json", json!({"weight_map": map}).to_string());
    computes_the_references(&case, &target(&twin.path("target")).expect("a target"));
}

/// An index that does not match its files: read as in transformers, or an error that names the index, tensor and shard.
#[test]
fn odd_indexes_load_or_are_refused() {
    const INDEX: &str = "target/model.safetensors.index.json";
    let case = case("edge");
    let shard = |number: usize| format!("model-0000{number}-of-00002.safetensors");
    // Two shards, and the names of their tensors.
    let split = || {
        let twin = Twin::of("edge");
        let mut halves = [Vec::new(), Vec::new()];
        twin.tensors(WEIGHTS, |all| all.keys().enumerate().for_each(|(i, name)| halves[i % 2].push(name.clone())));
        for (i, names) in halves.iter().enumerate() {
            let file = format!("target/{}", shard(i + 1));
            std::fs::copy(twin.path(WEIGHTS), twin.path(&file)).expect("a copy");
            twin.tensors(&file, |tensors| tensors.retain(|name, _| names.contains(name)));
        }
        std::fs::remove_file(twin.path(WEIGHTS)).expect("it was there");
        let of = |i: usize| halves[i].iter().map(move |name| (name.clone(), json!(shard(i + 1))));
        let map: serde_json::Map<String, Value> = of(0).chain(of(1)).collect();
        (twin, map)
    };
    let with = |twin: &Twin, map: &Value| {
        twin.write(INDEX, json!({"metadata": {"total_size": 1}, "weight_map": map}).to_string());
        target(&twin.path("target"))
    };
    let (twin, map) = split();
    let (first, second) = (map.keys().next().expect("a tensor").clone(), shard(2));
    computes_the_references(&case, &with(&twin, &json!(map)).expect("two shards"));

    // The wrong shard for a tensor, and an unlisted tensor: both are present.
    let mut odd = map.clone();
    odd.remove("model.norm.weight").expect("it was listed");
    odd.insert("model.embed_tokens.weight".into(), json!(shard(1)));
    computes_the_references(&case, &with(&twin, &json!(odd)).expect("all tensors"));
    odd.insert("model.embed_tokens.weight".into(), json!(shard(2)));
    computes_the_references(&case, &with(&twin, &json!(odd)).expect("all tensors"));

    // In no shard: of an optional module as well.
    let mut odd = map.clone();
    odd.insert("model.layers.9.layer_scalar".into(), json!(second));
    refused(
        with(&twin, &json!(odd)),
        &[INDEX, "weight_map.model.layers.9.layer_scalar", &second, "download both again"],
    );

    // Names that leave the directory, or are in another.
    std::fs::create_dir(twin.path("target/shards")).expect("a directory");
    std::fs::copy(twin.path(&format!("target/{second}")), twin.path("target/shards/a")).expect("a copy");
    let absolute = twin.path(&format!("target/{second}")).display().to_string();
    for name in ["shards/a", "./shards/a", "../target/shards/a", &absolute, "..", ".", "", "shards/", "/"] {
        let mut odd = map.clone();
        odd.insert(first.clone(), json!(name));
        refused(with(&twin, &json!(odd)), &[INDEX, &first, "is not a file name", "next to the index"]);
    }
    for (odd, about) in [
        (json!({}), &["weight_map: lists no shard", "download the index again"]),
        (json!(null), &["weight_map: is missing", "download the index again"]),
        (json!([second]), &["weight_map: is [", "must be an object"]),
        (json!("model.safetensors"), &["weight_map: is ", "must be an object"]),
        (json!({"model.norm.weight": 3}), &["weight_map.model.norm.weight", "must be a string"]),
        (json!({"model.norm.weight": null}), &["weight_map.model.norm.weight", "is missing"]),
    ] {
        refused(with(&twin, &odd), &[&[INDEX][..], about].concat());
    }
    for text in ["", "[]", "{\"weight_map\": {"] {
        twin.write(INDEX, text);
        refused(target(&twin.path("target")), &[INDEX]);
    }

    // A missing shard.
    let path = twin.path(&format!("target/{second}"));
    let bytes = std::fs::read(&path).expect("a shard");
    std::fs::remove_file(&path).expect("it was there");
    refused(with(&twin, &json!(map)), &[&second, "check the path, or download"]);
    // The whole file next to the index: it takes precedence, unless the index lists it.
    std::fs::copy(Twin::of("edge").path(WEIGHTS), twin.path(WEIGHTS)).expect("a copy");
    computes_the_references(&case, &with(&twin, &json!(map)).expect("the whole file"));
    twin.write(INDEX, "{}");
    refused(target(&twin.path("target")), &[INDEX, "weight_map: is missing", "download the index again"]);
    let own = map.keys().map(|name| (name.clone(), json!("model.safetensors")));
    let own: serde_json::Map<_, _> = own.collect();
    computes_the_references(&case, &with(&twin, &json!(own)).expect("the whole file"));
    // A tensor in two shards.
    std::fs::write(&path, bytes).expect("written");
    let mut both = own;
    both.insert("model.norm.weight".into(), json!(second));
    refused(
        with(&twin, &json!(both)),
        &["model.safetensors", "repeats tensor", "of another shard", "download all again"],
    );
}

/// The bytes read per step are known from names and sizes, before anything is loaded.
#[test]
fn step_bytes_are_those_of_the_loaded_model() {
    for fixture in ["dense", "edge", "moe", "nested"] {
        let twin = Twin::of(fixture);
        let file = twin.write("target.gguf", twin.gguf("target").bytes());
        for path in [twin.path("target"), file] {
            let checkpoint = Checkpoint::open(&path).expect("a checkpoint");
            let config = checkpoint.target_config().expect("a configuration");
            let loaded = Target::load(&checkpoint, Isa::best()).expect("a target").step_cost().bytes as u64;
            let said = checkpoint.target_step_bytes(&config).expect("a target");
            assert_eq!(said, loaded, "{fixture}, {}", path.display());
        }
        // An assistant's head, tied or not, is read as its configuration says.
        let of_assistant = || {
            let checkpoint = Checkpoint::open(twin.path("assistant")).expect("a checkpoint");
            checkpoint.assistant_step_bytes(&checkpoint.assistant_config().expect("a configuration"))
        };
        let tied = of_assistant();
        twin.tensors("assistant/model.safetensors", |tensors| {
            let table = tensors.remove("model.embed_tokens.weight").expect("the table");
            tensors.insert("lm_head.weight".into(), table);
        });
        twin.json("assistant/config.json", |config| config["tie_word_embeddings"] = false.into());
        assert_eq!(of_assistant(), tied, "{fixture}");
    }
}

#[test]
fn split_files_compute_the_references() {
    let (twin, case) = (Twin::of("edge"), case("edge"));
    let whole = twin.gguf("target");
    let (keys, tensors) = (whole.keys, whole.tensors);
    let half = tensors.len() / 2;
    let mut parts = [GgufFile::new(), GgufFile::new()];
    parts[0].keys = keys;
    for (i, tensor) in tensors.into_iter().enumerate() {
        parts[usize::from(i >= half)].tensors.push(tensor);
    }
    let mut paths: Vec<PathBuf> = Vec::new();
    for (i, part) in parts.into_iter().enumerate() {
        let short = |x: u16| Raw(2, x.to_le_bytes().to_vec());
        let part = part.key("split.no", short(i as u16)).key("split.count", short(2));
        paths.push(twin.write(&format!("split/model-0000{}-of-00002.gguf", i + 1), part.bytes()));
    }
    for path in &paths {
        computes_the_references(&case, &target(path).expect("a target"));
    }
    std::fs::rename(twin.path("assistant"), twin.path("split/model-assistant")).expect("renamed");
    let found = find_assistants(&paths[0]).expect("one");
    assert_eq!(found.only(), Some(twin.path("split/model-assistant").as_path()));
    // Merged by llama-gguf-split.
    let merged = twin.gguf("target").key("split.count", Raw(2, vec![0; 2]));
    computes_the_references(&case, &target(&twin.write("merged.gguf", merged.bytes())).expect("a target"));
    std::fs::rename(&paths[1], twin.path("split/part2.gguf")).expect("renamed");
    refused(target(&paths[0]), &["model-00002-of-00002.gguf", "check the path"]);
    refused(target(&twin.path("split/part2.gguf")), &["part2.gguf", "one of 2 files", "restore its name"]);
    // Cut without regard to the format.
    for (file, content) in [("model.gguf.part1of2", &b"GGUF\x03\0\0\0"[..]), ("model.gguf.part2of2", b"weights")] {
        refused(
            target(&twin.write(file, content)),
            &[file, "is a piece of model.gguf", "cat $(ls -v model.gguf.part*)"],
        );
    }
}

/// The progress of a load is that of all parts of the model together, without towers, and ends at its total.
#[test]
fn progress_counts_what_is_read() {
    let twin = Twin::of("edge");
    let read = Checkpoint::open(twin.path("target")).expect("a checkpoint").bytes();
    let tower = (Dtype::F32, vec![4096], f32_bytes(vec![0.5; 4096]));
    twin.tensors(WEIGHTS, |tensors| drop(tensors.insert("model.vision_tower.patch_embedder.weight".into(), tower)));
    // Its trunk and its NextN head have different prefixes.
    let qwen = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo-qwen");
    let of_qwen = Checkpoint::open(&qwen).expect("the demo").bytes();
    for (path, total) in [(twin.path("target"), read), (qwen, of_qwen)] {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sink = seen.clone();
        let progress: Arc<dyn Fn(Progress) + Send + Sync> =
            Arc::new(move |progress: Progress| sink.lock().expect("progress").push(progress));
        let options = EngineOptions { threads: Some(1), progress: Some(progress), ..EngineOptions::new(&path) };
        Engine::load(&options).expect("an engine");
        let seen = seen.lock().expect("progress");
        assert!(seen.iter().all(|progress| progress.total == total), "{}: {seen:?} of {total}", path.display());
        assert!(seen.is_sorted_by_key(|progress| progress.loaded), "{}: {seen:?}", path.display());
        assert_eq!(seen.last().map(|progress| progress.loaded), Some(total), "{}", path.display());
        // Before the end as well: nothing large is left out.
        let read = seen[seen.len() - 2].loaded as f64;
        assert!(read > 0.9 * total as f64, "{}: {read} of {total}", path.display());
    }
}
