//! Variants of GGUF files: metadata, merged and separate tensors, mixes of types.

use std::collections::BTreeMap;

use super::*;
use crate::published::{Place, Published, census};

/// Padding is read; more bytes after the last tensor are another file's, or a tensor's whose size is damaged.
#[test]
fn bytes_after_the_last_tensor_are_padding_or_refused() {
    let twin = Twin::of("dense");
    let file = twin.gguf("target").bytes();
    let with = |rest: &[u8]| twin.write("long.gguf", [&file, rest].concat());
    for padding in [1, 31, 512, 4096, 1 << 16] {
        computes_the_references(&case("dense"), &target(&with(&vec![0; padding])).expect("padding"));
    }
    // Less than the alignment, whatever it is.
    target(&with(&[7; 31])).expect("padding");
    for rest in [vec![0; (1 << 16) + 1], vec![7; 32], [vec![0; 4096], vec![1]].concat()] {
        let about =
            ["long.gguf", &format!("{} bytes after the end of its last tensor", rest.len()), "download it again"];
        refused(target(&with(&rest)), &about);
    }
    let about = ["long.gguf", "several GGUF files in one", "parts of a split checkpoint apart"];
    refused(target(&with(&file)), &about);
    refused(target(&with(&[&[0; 24], &file[..]].concat())), &about);

    // safetensors has no padding.
    let weights = std::fs::read(twin.path(WEIGHTS)).expect("a file");
    for rest in [vec![0], vec![0; 4096], weights.clone()] {
        twin.write(WEIGHTS, [&weights[..], &rest].concat());
        let length = format!("is {} bytes long", weights.len() + rest.len());
        let about = [WEIGHTS, &length, "not the end of its last tensor", "download it again"];
        refused(target(&twin.path("target")), &about);
    }
}

fn names_and_shapes(file: &GgufFile) -> Vec<(String, Vec<usize>)> {
    let name = |tensor: &Written| String::from_utf8(tensor.name.clone()).expect("a name");
    let shape = |tensor: &Written| tensor.shape.iter().map(|size| *size as usize).collect();
    file.tensors.iter().map(|tensor| (name(tensor), shape(tensor))).collect()
}

fn bytes_of(file: &GgufFile, name: &str) -> Option<(u32, Vec<u8>)> {
    let found = file.tensors.iter().find(|tensor| tensor.name == name.as_bytes());
    found.map(|tensor| (tensor.type_id, tensor.bytes.clone()))
}

/// Q, K and V of the layers that have all three in one tensor, as llama.cpp's converter writes with `--fuse-qkv`.
fn with_fused_qkv(mut file: GgufFile) -> (GgufFile, usize) {
    let mut count = 0;
    for block in 0..8 {
        let names = ["q", "k", "v"].map(|part| format!("blk.{block}.attn_{part}.weight"));
        let parts: Vec<(u32, Vec<u8>)> = names.iter().filter_map(|name| bytes_of(&file, name)).collect();
        if parts.len() < 3 {
            continue;
        }
        let inputs = 64;
        let bytes: Vec<u8> = parts.iter().flat_map(|(_, bytes)| bytes.clone()).collect();
        file = names.iter().fold(file, |file, name| file.dropped(name));
        let shape = [bytes.len() / 4 / inputs, inputs];
        file = file.tensor(format!("blk.{block}.attn_qkv.weight"), &shape, F32, bytes);
        count += 1;
    }
    (file, count)
}

#[test]
fn fused_projections_are_their_rows() {
    for (fixture, fused) in [("edge", 5), ("moe", 5)] {
        let (twin, case) = (Twin::of(fixture), case(fixture));
        let plain = twin.write("plain.gguf", twin.gguf("target").bytes());
        let (file, count) = with_fused_qkv(twin.gguf("target"));
        assert_eq!(count, fused, "{fixture}");
        let path = twin.write("fused.gguf", file.bytes());
        computes_the_references(&case, &target(&path).expect("a target"));
        let names = |path: &Path| {
            let mut names = Checkpoint::open(path).expect("a file").names();
            names.sort();
            names
        };
        assert_eq!(names(&path), names(&plain), "{fixture}");
        // K and V have equally many rows.
        let mut odd = file;
        let tensor = odd.tensors.iter_mut().find(|tensor| tensor.name == b"blk.0.attn_qkv.weight").expect("there");
        tensor.shape[0] -= 1;
        tensor.bytes.truncate(tensor.bytes.len() - 64 * 4);
        refused(target(&twin.write("odd.gguf", odd.bytes())), &["odd.gguf", "layers.0.self_attn", "is missing"]);
    }
}

/// Gate and up of the experts as two tensors are one stack if they are alike.
#[test]
fn separate_gates_and_ups_of_experts_are_the_stack() {
    let (twin, case) = (Twin::of("moe"), case("moe"));
    let apart = |up_type: u32, encode: &dyn Fn(&[u8]) -> Vec<u8>| {
        let mut file = twin.gguf("target");
        for (name, shape) in names_and_shapes(&file) {
            if !name.ends_with("ffn_gate_up_exps.weight") {
                continue;
            }
            let (_, bytes) = bytes_of(&file, &name).expect("there");
            let halves: Vec<&[u8]> = bytes.chunks(bytes.len() / shape[0] / 2).collect();
            let [gate, up] =
                [0, 1].map(|half| halves.iter().skip(half).step_by(2).copied().flatten().copied().collect());
            let shape = [shape[0], shape[1] / 2, shape[2]];
            let up: Vec<u8> = up;
            file = file.dropped(&name).tensor(name.replace("gate_up", "gate"), &shape, F32, gate);
            file = file.tensor(name.replace("gate_up", "up"), &shape, up_type, encode(&up));
        }
        twin.write("model.gguf", file.bytes())
    };
    computes_the_references(&case, &target(&apart(F32, &|bytes| bytes.to_vec())).expect("a target"));
    let halves = |bytes: &[u8]| f32s(bytes).into_iter().flat_map(|x| half::f16::from_f32(x).to_le_bytes()).collect();
    let about = ["blk.0.ffn_up_exps.weight", "is F16", "blk.0.ffn_gate_exps.weight is F32", "use a file"];
    refused(target(&apart(1, &halves)), &about);
}

/// Names of two converters for one weight, or a stack of experts next to a part of it.
#[test]
fn a_weight_under_two_names_is_refused() {
    let twin = Twin::of("moe");
    for (part, own, other) in [
        ("target", "blk.0.layer_output_scale.weight", "blk.0.layer_output_scale"),
        ("target", "blk.1.ffn_down_exps.scale", "blk.1.ffn_gate_inp.per_expert_scale"),
        ("target", "blk.0.ffn_gate_up_exps.weight", "blk.0.ffn_up_exps.weight"),
        ("assistant", "nextn.pre_projection.weight", "mtp.pre_projection.weight"),
    ] {
        let file = twin.gguf(part);
        let (_, shape) = names_and_shapes(&file).into_iter().find(|(name, _)| name == own).expect("a shape");
        let (type_id, bytes) = bytes_of(&file, own).expect("the tensor");
        let path = twin.write("both.gguf", file.tensor(other, &shape, type_id, bytes).bytes());
        refused(Checkpoint::open(&path), &["both.gguf", own, other, "is the same weight", "convert the model again"]);
    }
}

/// The width of the experts as an array, of equal ones or not.
#[test]
fn widths_of_experts_are_one_for_all_layers() {
    let (twin, case, key) = (Twin::of("moe"), case("moe"), "gemma4.expert_feed_forward_length");
    let with = |widths: [usize; 6]| {
        let file = twin.gguf("target").with(key, array(&widths.map(u32_value)));
        target(&twin.write("model.gguf", file.bytes()))
    };
    computes_the_references(&case, &with([24; 6]).expect("a target"));
    refused(with([24, 24, 24, 24, 24, 16]), &["model.gguf", key, "differs between layers", "not implemented"]);
}

/// Writers choose other types for the same values, and omit defaults: the same model.
#[test]
fn metadata_in_other_types_is_the_same() {
    let (twin, ids) = (Twin::of("edge"), case("edge").ids("input_ids"));
    let vocabulary = Vocabulary::new();
    let plain = vocabulary.in_gguf(twin.gguf("target"), "gemma4", &[]);
    let mut file = plain.clone();
    let wider = |kind: u32, bytes: &[u8]| -> (u32, Vec<u8>) {
        let word = || u64::from(u32::from_le_bytes(bytes.try_into().expect("four bytes")));
        match kind {
            4 => (10, word().to_le_bytes().to_vec()),
            5 => (11, (word() as i32 as i64).to_le_bytes().to_vec()),
            6 => {
                let x = f32::from_bits(word() as u32);
                match x.fract() == 0.0 && x > 0.0 {
                    true => (4, (x as u32).to_le_bytes().to_vec()),
                    false => (12, x.to_string().parse::<f64>().expect("a number").to_le_bytes().to_vec()),
                }
            }
            7 => (0, bytes.to_vec()),
            other => (other, bytes.to_vec()),
        }
    };
    let mut changed = 0;
    for (_, Raw(kind, bytes)) in &mut file.keys {
        let (element, width) = (bytes.first().copied().unwrap_or(0).into(), 12);
        let after = match *kind {
            9 if [4, 5, 7].contains(&element) && bytes.len() > width => {
                let each = if element == 7 { 1 } else { 4 };
                let values: Vec<_> = bytes[width..].chunks(each).map(|value| wider(element, value)).collect();
                let all = values.iter().flat_map(|(_, value)| value.clone()).collect::<Vec<u8>>();
                (9, raw_array(values[0].0, values.len() as u64, &all).1)
            }
            9 => continue,
            kind => wider(kind, bytes),
        };
        changed += usize::from(after.0 != *kind || after.1 != *bytes);
        (*kind, *bytes) = after;
    }
    assert!(changed > 15, "{changed} keys are changed");
    // One for every layer, where one for all would suffice.
    let heads = file.keys.iter_mut().find(|(key, _)| key.ends_with(b"attention.head_count_kv")).expect("the heads");
    let Raw(10, one) = &heads.1 else { panic!("no number for all") };
    heads.1 = raw_array(10, 8, &one.repeat(8));
    for key in ["token_type", "bos_token_id", "unknown_token_id", "scores"] {
        file = file.without(&format!("tokenizer.ggml.{key}"));
    }
    // Norms in bf16, scalars without a dimension; the same values in the plain file.
    let mut plain = plain;
    for (tensor, plain) in file.tensors.iter_mut().zip(&mut plain.tensors) {
        let name = String::from_utf8_lossy(&tensor.name).into_owned();
        if name.ends_with("norm.weight") {
            let halves: Vec<_> = f32s(&tensor.bytes).into_iter().map(half::bf16::from_f32).collect();
            (tensor.type_id, tensor.bytes) = (30, halves.iter().flat_map(|x| x.to_le_bytes()).collect());
            plain.bytes = f32_bytes(halves.iter().map(|x| x.to_f32()));
        }
        if name.contains("layer_output_scale") {
            tensor.shape = Vec::new();
        }
    }
    file.tensors.reverse();
    let of = |name: &str, file: &GgufFile| engine(&twin.write(name, file.bytes()), None).expect("an engine");
    let (got, want) = (of("other.gguf", &file), of("plain.gguf", &plain));
    let (of_got, of_want) = (got.gemma4().expect("a Gemma"), want.gemma4().expect("a Gemma"));
    assert_eq!(of_got.config().layers, of_want.config().layers);
    assert_eq!(logits(of_got, &ids), logits(of_want, &ids));
    for text in ["the inner\n", "a<turn|>b", "<bos>\u{e9}"] {
        let ids = |engine: &Engine| engine.tokenizer().expect("a tokenizer").encode(text).expect("ids");
        assert_eq!(ids(&got), ids(&want), "{text:?}");
    }
    assert_eq!(got.end_of_generation(), want.end_of_generation());
}

/// The rotation with the fields of other Gemmas: equivalent, or rejected by field.
#[test]
fn rotary_fields_of_other_models_are_the_same_or_refused() {
    let twin = Twin::of("dense");
    let original = std::fs::read(twin.path(CONFIG)).expect("a file");
    let with = |change: &dyn Fn(&mut Value)| {
        twin.write(CONFIG, &original);
        twin.json(CONFIG, change);
        target(&twin.path("target"))
    };
    let set = |name: &'static str, value: Value| with(&|config: &mut Value| config[name] = value.clone());
    for (name, value) in [
        ("rope_theta", json!(1e6)),
        ("rope_local_base_freq", json!(10_000)),
        ("rope_scaling", Value::Null),
        ("rope_scaling", json!({"rope_type": "default"})),
        ("rope_parameters", Value::Null),
    ] {
        assert!(set(name, value).is_ok(), "{name}");
    }
    for (name, value) in [
        ("rope_theta", json!(5e5)),
        ("rope_local_base_freq", json!(1e6)),
        ("rope_scaling", json!({"rope_type": "linear", "factor": 8.0})),
        ("rope_scaling", json!({"type": "yarn", "factor": 4.0})),
    ] {
        refused(set(name, value), &[CONFIG, name]);
    }
    // What a layer type lacks is that of the whole configuration.
    let lacking = |layers: &str, field: &str| {
        let moved = with(&|config: &mut Value| {
            let own = config["rope_parameters"][layers].as_object_mut().expect("an object");
            own.remove(field);
            config[field] = json!(if field == "rope_theta" { 1e6 } else { 0.5 });
        });
        moved.expect("a target").config().clone()
    };
    assert_eq!(lacking("full_attention", "partial_rotary_factor").rope_full.partial_rotary_factor, 0.5);
    assert_eq!(lacking("sliding_attention", "rope_theta").rope_sliding.theta, 1e6);
    let named = with(&|config: &mut Value| {
        let full = config["rope_parameters"]["full_attention"].as_object_mut().expect("an object");
        let kind = full.remove("rope_type").expect("a type");
        full.insert("type".into(), kind);
    });
    assert_eq!(named.expect("a target").config().rope_full.partial_rotary_factor, 0.25);
    // The divisor of the frequencies, which is in every format.
    let scaled = with(&|config: &mut Value| config["rope_parameters"]["full_attention"]["factor"] = json!(8.0));
    let scaled = scaled.expect("a target").config().clone();
    assert_eq!((scaled.rope_full.factor, scaled.rope_sliding.factor), (8.0, 1.0));
    let path = twin.write("model.gguf", twin.gguf("target").bytes());
    assert_eq!(target(&path).expect("a target").config().rope_full, scaled.rope_full);
    let flat = json!({"rope_theta": 1e6, "rope_type": "default"});
    refused(set("rope_parameters", flat), &["rope_parameters.rope_theta", "is not a layer type"]);
    for (layers, field, value) in [
        ("sliding_attention", "partial_rotary_factor", 0.5),
        ("sliding_attention", "factor", 8.0),
        ("full_attention", "attention_factor", 1.2),
    ] {
        let changed = with(&|config: &mut Value| config["rope_parameters"][layers][field] = json!(value));
        refused(changed, &[CONFIG, &format!("rope_parameters.{layers}.{field}"), "not implemented"]);
    }
}

/// One divisor of all frequencies: that of `proportional`, of which every pair rotates.
#[test]
fn a_linear_rope_scaling_divides_every_frequency() {
    let twin = Twin::of("dense");
    let of = |own: Value| {
        twin.json(CONFIG, |config| config["rope_parameters"]["full_attention"] = own);
        target(&twin.path("target"))
    };
    let all = json!({"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 1.0, "factor": 8.0});
    let want = of(all).expect("a target");
    let linear = of(json!({"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0})).expect("a target");
    assert_eq!(linear.config(), want.config());
    let path = twin.write("model.gguf", twin.gguf("target").bytes());
    assert_eq!(target(&path).expect("a target").config().rope_full, want.config().rope_full);
    let lacking = of(json!({"rope_type": "linear", "rope_theta": 1e6}));
    refused(lacking, &[CONFIG, "rope_parameters.full_attention.factor", "is missing"]);
    let partial = json!({"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0, "partial_rotary_factor": 0.5});
    refused(of(partial), &[CONFIG, "rope_parameters.full_attention.partial_rotary_factor", "not implemented"]);
}

/// Types for rows of whole blocks of 32, and floats of 16 bits, in one file: the model of the dequantized weights.
/// (`weight_types` has every type, in rows of 256.)
#[test]
fn types_in_files_that_are_read_load() {
    let (twin, case) = (Twin::of("dense"), case("dense"));
    let (mut mixed, mut plain) = (twin.gguf("target"), twin.gguf("target"));
    let types =
        [WeightType::Q4_0, WeightType::Q4_1, WeightType::Q5_0, WeightType::MXFP4, WeightType::Q8_0, WeightType::IQ4_NL];
    let quantized = types.iter().enumerate().map(|(i, of)| (format!("blk.{i}.ffn_down.weight"), of.ggml_id()));
    let halves = [("blk.0.attn_q.weight".to_owned(), F16), ("blk.0.attn_k.weight".to_owned(), BF16)];
    for (name, type_id) in quantized.chain(halves) {
        let tensor = plain.tensors.iter().find(|tensor| tensor.name == name.as_bytes()).expect("the tensor");
        let shape: Vec<usize> = tensor.shape.iter().map(|size| *size as usize).collect();
        let (bytes, exact) = stored(&f32s(&tensor.bytes), shape[1], type_id);
        mixed = mixed.dropped(&name).tensor(&name, &shape, type_id, bytes);
        plain = plain.dropped(&name).tensor(&name, &shape, F32, f32_bytes(exact));
    }
    let ids = case.ids("input_ids");
    let of = |name: &str, file: GgufFile| logits(&target(&twin.write(name, file.bytes())).expect("a target"), &ids);
    let error = relative_error(&of("mixed.gguf", mixed), &of("plain.gguf", plain));
    println!("logits off by {error:.3}");
    assert!(error > 0.0 && error < 0.2, "{error}");
}

/// Tensors by type as published: names, layers and the types of every matrix, by llama.cpp's rules or the counts.
#[test]
fn published_mixes_have_their_counts_and_load() {
    for (name, published, counts) in published_files() {
        let [file, plain] = published.files();
        let want: BTreeMap<_, _> = counts.into_iter().collect();
        assert_eq!(census(&file), want, "{name}: {} tensors", file.tensors.len());
        let twin = tempfile::tempdir().expect("a directory");
        let logits = |file: GgufFile| {
            let path = twin.path().join(name);
            std::fs::write(&path, file.bytes()).expect("written");
            logits(&target(&path).expect(name), &[2, 17, 90, 5, 64, 33, 100, 8])
        };
        let error = relative_error(&logits(file), &logits(plain));
        println!("{name}: logits off by {error:.3}");
        assert!(error > 0.0 && error < 0.2, "{name}: {error}");
    }
}

/// The GGML type of a tensor.
type TypeOf = fn(&str, Place) -> u32;

/// Number of tensors per type.
type Counts = Vec<(&'static str, usize)>;

/// Names, files, and the types of their tensors.
fn published_files() -> Vec<(&'static str, Published, Counts)> {
    let of = |variant, layers, widths, type_of: TypeOf| Published { variant, layers, widths, type_of };
    let moe = |type_of: TypeOf| of("26B-A4B", 30, [288, 96], type_of);
    vec![
        (
            "gemma-4-E2B-it-Q4_K_M.gguf",
            of("E2B", 35, [256, 0], |name, place| match name {
                "per_layer_model_proj.weight" => BF16,
                _ if name.contains("inp_gate") || name.contains(".proj.") => WeightType::Q5_K.ggml_id(),
                _ if name.contains("attn_k.") && Place::has_more_bits(place.layer) => WeightType::Q6_K.ggml_id(),
                _ => q4_k_m(name, place),
            }),
            vec![("f32", 283), ("q4_K", 194), ("q5_K", 70), ("q6_K", 53), ("bf16", 1)],
        ),
        (
            "gemma-4-E4B-it-Q4_K_M.gguf",
            of("E4B", 42, [256, 0], |name, place| if name.contains("model_proj") { BF16 } else { q4_k_m(name, place) }),
            vec![("f32", 339), ("q4_K", 336), ("q6_K", 44), ("bf16", 1)],
        ),
        (
            "gemma-4-12B-it-Q4_K_M.gguf",
            of("12B", 48, [256, 0], q4_k_m),
            vec![("f32", 338), ("q4_K", 284), ("q6_K", 45)],
        ),
        (
            "gemma-4-26B-A4B-it-Q4_K_M.gguf",
            // Rows of these are not whole blocks of 256.
            moe(|name, place| match (name.contains("ffn_down"), Place::has_more_bits(place.layer)) {
                (true, true) => WeightType::Q8_0.ggml_id(),
                (true, false) => WeightType::Q5_0.ggml_id(),
                (false, _) => q4_k_m(name, place),
            }),
            vec![("f32", 392), ("q4_K", 192), ("q5_0", 32), ("q8_0", 28), ("q6_K", 14)],
        ),
        (
            "gemma-4-26B-A4B-it-APEX.gguf",
            moe(|name, place| match (name.contains("ffn_down"), place.layer.0) {
                (false, _) => WeightType::Q6_K.ggml_id(),
                (true, 0..5) => WeightType::Q5_1.ggml_id(),
                (true, 5..10) => WeightType::IQ4_NL.ggml_id(),
                (true, _) => WeightType::Q8_0.ggml_id(),
            }),
            vec![("f32", 392), ("q6_K", 206), ("q8_0", 40), ("q5_1", 10), ("iq4_nl", 10)],
        ),
        (
            "gemma-4-26B-A4B-it-UD-Q6_K_XL.gguf",
            moe(|name, place| {
                let is_coarser = name.contains("ffn_gate_up_exps") && place.layer.0 > 0;
                if is_coarser { WeightType::Q6_K.ggml_id() } else { WeightType::Q8_0.ggml_id() }
            }),
            vec![("f32", 392), ("q8_0", 237), ("q6_K", 29)],
        ),
    ]
}

/// llama.cpp's Q4_K_M, for rows of whole blocks.
fn q4_k_m(name: &str, place: Place) -> u32 {
    let has_more_bits = match name {
        "token_embd.weight" | "per_layer_token_embd.weight" => true,
        _ if name.contains("attn_v.") => Place::has_more_bits(place.value),
        _ => name.contains("ffn_down") && Place::has_more_bits(place.layer),
    };
    if has_more_bits { WeightType::Q6_K.ggml_id() } else { WeightType::Q4_K.ggml_id() }
}

fn q4_0(name: &str, of_embedding: WeightType) -> u32 {
    let of = if name == "token_embd.weight" { of_embedding } else { WeightType::Q4_0 };
    of.ggml_id()
}

/// The embedding of files called Q4_0 is in one of three types.
#[test]
fn a_q4_0_file_has_its_embedding_in_any_type() {
    let of_embedding: [(&str, TypeOf); 3] = [
        ("google", |name, _| q4_0(name, WeightType::Q6_K)),
        ("unsloth", |name, _| q4_0(name, WeightType::Q4_0)),
        ("ggml-org", |name, _| q4_0(name, WeightType::Q8_0)),
    ];
    for (owner, type_of) in of_embedding {
        let [file, plain] = Published { variant: "26B-A4B", layers: 6, widths: [288, 96], type_of }.files();
        let directory = tempfile::tempdir().expect("a directory");
        let logits = |file: GgufFile| {
            let path = directory.path().join("gemma-4-26B-A4B-it-Q4_0.gguf");
            std::fs::write(&path, file.bytes()).expect("written");
            logits(&target(&path).expect(owner), &[2, 17, 90, 5])
        };
        let error = relative_error(&logits(file), &logits(plain));
        println!("{owner}: logits off by {error:.3}");
        assert!(error > 0.0 && error < 0.2, "{owner}: {error}");
    }
}

/// Blocks of NVFP4: random signs and sizes, scales from 2^-2 to 2, divided by 2^`halvings`.
fn nvfp4(elements: usize, halvings: u8) -> Vec<u8> {
    let mut state = elements as u64;
    let mut byte = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    let mut bytes = Vec::new();
    for _ in 0..elements / 64 {
        bytes.extend((0..4).map(|_| 0x28 + byte() % 24 - 8 * halvings));
        bytes.extend((0..32).map(|_| byte()));
    }
    bytes
}

/// Replaces the matrices that have whole blocks by NVFP4, scaled by separate tensors or in the blocks.
fn with_nvfp4(mut file: GgufFile, scaled: bool) -> GgufFile {
    const NVFP4: u32 = 40;
    let halvings = |turn: usize| (turn % 3) as u8;
    let factor = |turn: usize| f32::powi(0.5, i32::from(halvings(turn)));
    let is_own = |name: &str| {
        ["_q", "_k", "_v", "_output", "ffn_gate", "ffn_up", "_gate_up_exps"].iter().any(|last| {
            name.strip_suffix(".weight").is_some_and(|name| name.starts_with("blk.") && name.ends_with(last))
        })
    };
    let matrices: Vec<(String, Vec<usize>)> = (file.tensors.iter())
        .map(|tensor| (String::from_utf8(tensor.name.clone()).expect("a name"), &tensor.shape))
        .map(|(name, shape)| (name, shape.iter().map(|size| *size as usize).collect()))
        .filter(|(name, shape): &(String, Vec<usize>)| is_own(name) && shape.last().is_some_and(|n| n % 64 == 0))
        .collect();
    assert!(matrices.len() > 8 && matrices.iter().any(|(name, _)| name.contains("_gate_up_exps")), "{matrices:?}");
    for (turn, (name, shape)) in matrices.iter().enumerate() {
        file = file.dropped(name);
        // Experts' gates and ups are separate, and every expert has its own scale.
        let halves = [name.replace("gate_up", "gate"), name.replace("gate_up", "up")];
        let parts = if name.contains("gate_up") { &halves[..] } else { &halves[..1] };
        for (part, name) in parts.iter().enumerate() {
            let (base, experts) = (name.strip_suffix(".weight").expect("a matrix"), shape.len() == 3);
            let count = if experts { shape[0] } else { 1 };
            let shape = match shape[..] {
                [count, rows, inputs] => vec![count, rows / parts.len(), inputs],
                _ => shape.clone(),
            };
            let elements = shape.iter().product::<usize>() / count;
            let of = |i: usize| turn + part + i;
            let blocks = (0..count).flat_map(|i| nvfp4(elements, if scaled { 0 } else { halvings(of(i)) })).collect();
            file = file.tensor(name, &shape, NVFP4, blocks);
            if scaled {
                let factors = f32_bytes((0..count).map(|i| factor(of(i))));
                let spelled = if turn % 2 == 0 || experts { "scale" } else { "weight.scale" };
                file = file.tensor(format!("{base}.{spelled}"), &[count], F32, factors);
                file = file.tensor(format!("{base}.input_scale"), &[count], F32, f32_bytes(vec![0.01; count]));
            }
        }
    }
    file
}

/// A separate scale of an NVFP4 matrix multiplies its products: halved blocks compute the same, to the bit.
#[test]
fn nvfp4_matrices_are_scaled() {
    let (twin, ids) = (Twin::of("moe"), case("moe").ids("input_ids"));
    let scaled = with_nvfp4(twin.gguf("target"), true);
    let of = |file: &GgufFile| logits(&target(&twin.write("model.gguf", file.bytes())).expect("a target"), &ids);
    let halved = with_nvfp4(twin.gguf("target"), false);
    let (got, want) = (of(&scaled), of(&halved));
    assert!(got.iter().all(|x| x.is_finite()) && got.iter().any(|x| *x != got[0]));
    assert_eq!(got, want);
    // An output head of its own.
    let head =
        |file: &GgufFile, halvings| file.clone().tensor("output.weight", &[512, 64], 40, nvfp4(512 * 64, halvings));
    let scale = |name: &str, value| (format!("output.{name}"), f32_bytes([value]));
    let [factor, of_inputs] = [scale("scale", 0.5), scale("input_scale", 0.01)];
    let file = head(&scaled, 0).tensor(factor.0, &[1], F32, factor.1).tensor(of_inputs.0, &[1], F32, of_inputs.1);
    let with_head = of(&file);
    assert_eq!(with_head, of(&head(&halved, 1)));
    assert_ne!(with_head, got);
    let checked = |file: &GgufFile| {
        let path = twin.write("model.gguf", file.bytes());
        verify(&VerifyOptions { target: Some(path), ..VerifyOptions::default() })
    };
    let unused = checked(&file).into_iter().find(|finding| finding.check == "unused").expect("a finding");
    assert_eq!(unused.outcome, Outcome::Passed, "{}", unused.detail);
    let name = scaled.tensors.iter().find(|tensor| tensor.name.ends_with(b"_q.scale")).expect("a scale").name.clone();
    let name = String::from_utf8(name).expect("a name");
    for (shape, values) in [(vec![3], vec![1.0; 3]), (vec![1], vec![f32::NAN])] {
        let file = scaled.clone().dropped(&name).tensor(&name, &shape, F32, f32_bytes(values));
        refused(target(&twin.write("model.gguf", file.bytes())), &["model.gguf", &name, "must be F32, finite"]);
        let findings = checked(&file);
        let failed = findings.iter().find(|finding| finding.outcome == Outcome::Failed).expect("a failure");
        assert!(failed.check == "tensors" && failed.detail.contains(&name), "{}", failed.detail);
    }
    // Both spellings: one of them would be applied, and which is ambiguous.
    let other = name.replace(".scale", ".weight.scale");
    let file = scaled.tensor(&other, &[1], F32, f32_bytes([1.0]));
    refused(target(&twin.write("model.gguf", file.bytes())), &[&other, "is a scale that no module applies"]);
}

/// Files have K and V of KV-shared layers, which nothing reads, and their scales.
#[test]
fn scales_of_unused_matrices_are_unused() {
    let (twin, case) = (Twin::of("edge"), case("edge"));
    let mut file = twin.gguf("target");
    for name in ["blk.5.attn_k", "blk.6.attn_v", "blk.7.attn_k"] {
        file = file.tensor(format!("{name}.weight"), &[64, 64], 40, nvfp4(64 * 64, 0));
        for scale in ["scale", "input_scale"] {
            file = file.tensor(format!("{name}.{scale}"), &[1], F32, f32_bytes([0.5]));
        }
    }
    let path = twin.write("model.gguf", file.bytes());
    computes_the_references(&case, &target(&path).expect("a target"));
    let findings = verify(&VerifyOptions { target: Some(path), ..VerifyOptions::default() });
    assert!(findings.iter().all(|finding| finding.outcome != Outcome::Failed), "{findings:?}");
    // Those of a layer that has its own.
    let file = file.tensor("blk.4.attn_k.scale", &[1], F32, f32_bytes([0.5]));
    refused(
        target(&twin.write("model.gguf", file.bytes())),
        &["blk.4.attn_k.scale", "is a scale that no module applies"],
    );
}
