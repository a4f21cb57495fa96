//! Compressed safetensors, and experts in tensors of their own.

use foretoken::checkpoint::convert::Outtype;

use super::*;

const W4A16: &str = r#"{"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "quantization_status": "compressed", "kv_cache_scheme": null, "config_groups": {"group_0": {"targets": ["Linear"],
    "input_activations": null, "weights": {"num_bits": 4, "type": "int", "symmetric": true, "strategy": "group",
    "group_size": 32}}}}"#;

/// Packs a twin's matrices: eight integers per word, a scale in bf16 for every `group`. A second
/// twin has the dequantized weights.
fn packed_pair(fixture: &str, group: impl Fn(usize) -> usize) -> (Twin, Twin) {
    let (packed, plain) = (Twin::of(fixture), Twin::of(fixture));
    let mut exact = Tensors::new();
    packed.tensors(WEIGHTS, |tensors| {
        for name in matrices(tensors) {
            let (_, shape, bytes) = tensors.remove(&name).expect("the matrix");
            let group = group(shape[1]);
            let (mut nibbles, mut scales, mut values) = (Vec::new(), Vec::new(), Vec::new());
            for weights in f32s(&bytes).chunks(group) {
                let most = weights.iter().fold(0f32, |most, x| most.max(x.abs()));
                let scale = half::bf16::from_f32(most / 7.5);
                scales.extend(scale.to_le_bytes());
                for weight in weights {
                    let q = (weight / scale.to_f32()).round_ties_even().clamp(-8.0, 7.0);
                    nibbles.push((q as i32 + 8) as u32);
                    values.push(q * scale.to_f32());
                }
            }
            let words = nibbles.chunks(8).map(|eight| eight.iter().rev().fold(0, |word, q| word << 4 | q));
            let words = words.flat_map(u32::to_le_bytes).collect();
            let dimensions = shape.iter().flat_map(|size| (*size as i64).to_le_bytes()).collect();
            let (rows, inputs) = (shape[0], shape[1]);
            tensors.insert(format!("{name}_packed"), (Dtype::I32, vec![rows, inputs / 8], words));
            tensors.insert(format!("{name}_scale"), (Dtype::BF16, vec![rows, inputs / group], scales));
            tensors.insert(format!("{name}_shape"), (Dtype::I64, vec![2], dimensions));
            exact.insert(name, (Dtype::F32, shape, f32_bytes(values)));
        }
    });
    plain.tensors(WEIGHTS, |tensors| tensors.extend(exact));
    let config: Value = serde_json::from_str(W4A16).expect("JSON");
    packed.json(CONFIG, |json| json["quantization_config"] = config);
    (packed, plain)
}

/// Every weight is exactly the dequantized value.
#[test]
fn packed_integers_are_the_dequantized_weights() {
    for (fixture, group) in [("dense", 0), ("dense", 32), ("edge", 32)] {
        let (packed, plain) = packed_pair(fixture, |inputs| if group == 0 { inputs } else { group });
        let (a, b) = (packed.path("target"), plain.path("target"));
        let (a, b) = (Checkpoint::open(a).expect("a directory"), Checkpoint::open(b).expect("a directory"));
        assert_eq!(a.names(), b.names());
        let mut count = 0;
        for name in a.names().iter().filter(|name| name.ends_with("_proj.weight")) {
            let tensor = |checkpoint: &Checkpoint| checkpoint.get(name).expect("readable").expect("there");
            let (got, want) = (tensor(&a), tensor(&b));
            assert_eq!((got.shape.clone(), got.dtype.name()), (want.shape, "q4_0"), "{name}");
            assert_eq!(a.len_bytes(name), Some(got.bytes.as_slice().len()), "{name}");
            let mut row = vec![0.0; got.shape[1]];
            let rows = got.bytes.as_slice().chunks(got.shape[1] / 32 * 18);
            for (bytes, want) in rows.zip(f32s(want.bytes.as_slice()).chunks(got.shape[1])) {
                dequantize_row(WeightType::Q4_0, bytes, &mut row);
                assert_eq!(row, want, "{name}");
            }
            count += 1;
        }
        assert!(count > 30, "{count} matrices");
        // Products round their activations, as those of Q4_0 do; other weights would be off by more than 1.
        let ids = case(fixture).ids("input_ids");
        let got = logits(&target(&packed.path("target")).expect("a target"), &ids);
        let want = logits(&target(&plain.path("target")).expect("a target"), &ids);
        let error = relative_error(&got, &want);
        println!("{fixture}, groups of {group}: logits off by {error:.3}");
        assert!(error > 0.0 && error < 0.2, "{error}");
    }
}

/// With a copy of the tied head, as in Google's w4a16 files.
#[test]
fn packed_checkpoints_load_whole_pairs() {
    let (packed, _) = packed_pair("edge", |_| 32);
    let open = |part: &str| Checkpoint::open(packed.path(part)).expect("a directory");
    let bytes = || {
        let config = open("assistant").assistant_config().expect("a configuration");
        let target = foretoken::target_facts(&open("target")).expect("a target");
        (target.weight_bytes, open("assistant").assistant_bytes(&config))
    };
    let read = bytes();
    assert_eq!(read, (open("target").loaded_bytes(), open("assistant").loaded_bytes()));
    for weights in [WEIGHTS, "assistant/model.safetensors"] {
        packed.tensors(weights, |tensors| {
            tensors.insert("lm_head.weight".into(), tensors["model.embed_tokens.weight"].clone());
        });
    }
    // Nothing reads the copies.
    assert_eq!(bytes(), read);
    let engine = engine(&packed.path("target"), Some(&packed.path("assistant"))).expect("a pair");
    let mut session = engine.session(&SessionOptions::default()).expect("a session");
    let generation = session.generate(&[2, 5, 7], &GenerateOptions::default()).expect("a generation");
    assert!(generation.map(|piece| piece.expect("a piece").tokens.len()).sum::<usize>() > 0);
}

#[test]
fn packings_that_are_not_read_are_refused() {
    let q = "model.layers.0.self_attn.q_proj.weight";
    let refused_with = |change: &dyn Fn(&mut Tensors), about: &[&str]| {
        let (twin, _) = packed_pair("dense", |_| 32);
        twin.tensors(WEIGHTS, change);
        refused(engine(&twin.path("target"), None), &[&["target", q][..], about].concat());
    };
    // Eight bits: twice as many words.
    let eight = |tensors: &mut Tensors| {
        let (_, shape, words) = tensors.get_mut(&format!("{q}_packed")).expect("words");
        (shape[1], *words) = (shape[1] * 2, words.repeat(2));
    };
    refused_with(&eight, &["does not have the shape in weight_shape", "symmetric 4-bit integers"]);
    let sixteen = |tensors: &mut Tensors| {
        let (_, shape, scales) = tensors.get_mut(&format!("{q}_scale")).expect("scales");
        (shape[1], *scales) = (shape[1] * 2, scales.repeat(2));
    };
    refused_with(&sixteen, &["unsupported packing", "groups of 32"]);
    let empty = |tensors: &mut Tensors| {
        let (_, shape, words) = tensors.get_mut(&format!("{q}_packed")).expect("words");
        (shape[1], *words) = (0, Vec::new());
    };
    refused_with(&empty, &["unsupported packing", "groups of 32"]);
    let no_rows = |tensors: &mut Tensors| {
        for part in ["packed", "scale"] {
            let (_, shape, bytes) = tensors.get_mut(&format!("{q}_{part}")).expect("words");
            (*shape, *bytes) = (vec![0, 1 << 61], Vec::new());
        }
    };
    refused_with(&no_rows, &["unsupported packing"]);
    let huge = |tensors: &mut Tensors| {
        let (_, _, scales) = tensors.get_mut(&format!("{q}_scale")).expect("scales");
        scales[..2].copy_from_slice(&half::bf16::from_f32(1e9).to_le_bytes());
    };
    refused_with(&huge, &["not finite in f16", "use the bf16 checkpoint"]);
    for (extra, dtype) in [("zero_point", Dtype::I32), ("g_idx", Dtype::I32)] {
        let stray = |tensors: &mut Tensors| drop(tensors.insert(format!("{q}_{extra}"), (dtype, vec![1], vec![0; 4])));
        let (twin, _) = packed_pair("dense", |_| 32);
        twin.tensors(WEIGHTS, stray);
        refused(engine(&twin.path("target"), None), &[&format!("{q}_{extra}"), "is a scale"]);
    }
}

/// The 256 values of E4M3, from its definition as a sum of bits.
fn e4m3(byte: u8) -> f64 {
    let bit = |i: u8| f64::from(byte >> i & 1);
    let fraction = bit(2) / 2.0 + bit(1) / 4.0 + bit(0) / 8.0;
    let exponent = (byte >> 3 & 15) as i32;
    let size = if exponent == 0 { fraction / 64.0 } else { (1.0 + fraction) * f64::powi(2.0, exponent - 7) };
    if byte > 127 { -size } else { size }
}

#[test]
fn fp8_is_the_dequantized_weights() {
    assert_eq!([0x00, 0x01, 0x38, 0x7e, 0xb8].map(e4m3), [0.0, 1.0 / 512.0, 1.0, 448.0, -1.0]);
    let numbers: [f64; 256] = std::array::from_fn(|byte| e4m3(byte as u8));
    // The scale's suffix, and its shape for (rows, inputs).
    type Shape = fn(usize, usize) -> Vec<usize>;
    let of_blocks = json!({"weights": {"strategy": "block", "block_structure": "48x16"}, "format": "float-quantized"});
    // And the rows and inputs that share a scale, if these are blocks.
    let layouts: [(&str, Shape, Option<[usize; 2]>, Value); 7] = [
        ("scale", |_, _| vec![1], None, json!({"quant_method": "compressed-tensors", "format": "float-quantized"})),
        (
            "scale",
            |rows, _| vec![rows, 1],
            None,
            // Without quantized activations.
            json!({"quant_method": "compressed-tensors", "format": "naive-quantized",
                "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8}}}}),
        ),
        ("scale", |rows, _| vec![rows], None, json!({"quant_method": "fp8", "activation_scheme": "static"})),
        ("scale", |_, _| vec![], None, json!({"quant_method": "modelopt", "quant_algo": "FP8"})),
        (
            "scale_inv",
            |rows, inputs| vec![rows.div_ceil(128), inputs.div_ceil(128)],
            Some([128, 128]),
            json!({"quant_method": "fp8"}),
        ),
        (
            "scale_inv",
            |rows, inputs| vec![rows.div_ceil(32), inputs.div_ceil(64)],
            Some([32, 64]),
            json!({"quant_method": "fp8", "weight_block_size": [32, 64]}),
        ),
        (
            "scale",
            |rows, inputs| vec![rows.div_ceil(48), inputs.div_ceil(16)],
            Some([48, 16]),
            json!({"quant_method": "compressed-tensors", "config_groups": {"group_0": of_blocks}}),
        ),
    ];
    for (suffix, shape_of, block, config) in layouts {
        let (fp8, plain) = (Twin::of("edge"), Twin::of("edge"));
        let mut exact = Tensors::new();
        fp8.tensors(WEIGHTS, |tensors| {
            for name in matrices(tensors) {
                let (_, shape, bytes) = tensors.remove(&name).expect("the matrix");
                let (rows, inputs) = (shape[0], shape[1]);
                let of_scales = shape_of(rows, inputs);
                let count: usize = of_scales.iter().product();
                let scales: Vec<f32> = (0..count).map(|i| 0.003 + 0.001 * (i % 7) as f32).collect();
                let columns = of_scales.get(1).copied().unwrap_or(1);
                let scale = |i: usize| match block {
                    Some([high, wide]) => scales[i / inputs / high * columns + i % inputs / wide],
                    None => scales[i / inputs * count / rows],
                };
                let nearest = |value: f64| {
                    let far = |byte: &u8| (numbers[usize::from(*byte)] - value).abs();
                    (0..=255u8)
                        .filter(|byte| byte & 127 != 127)
                        .min_by(|a, b| far(a).total_cmp(&far(b)))
                        .expect("a byte")
                };
                let weights = f32s(&bytes);
                let coded: Vec<u8> =
                    weights.iter().enumerate().map(|(i, x)| nearest(f64::from(x / scale(i)))).collect();
                let values = coded.iter().enumerate().map(|(i, byte)| e4m3(*byte) as f32 * scale(i));
                let values = values.flat_map(|x| half::bf16::from_f32(x).to_le_bytes()).collect();
                exact.insert(name.clone(), (Dtype::BF16, shape.clone(), values));
                tensors.insert(format!("{name}_{suffix}"), (Dtype::F32, of_scales, f32_bytes(scales)));
                if config["activation_scheme"] == "static" || config["quant_algo"] == "FP8" {
                    let module = name.strip_suffix(".weight").expect("a matrix");
                    for of_inputs in ["input_scale", "activation_scale"].map(|scale| format!("{module}.{scale}")) {
                        tensors.insert(of_inputs, (Dtype::F32, vec![], f32_bytes([0.02])));
                    }
                }
                tensors.insert(name, (Dtype::F8_E4M3, shape, coded));
            }
            // Of an FP8 KV cache, which this one is not; and buffers that the configuration implies.
            for scale in ["k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale"] {
                let name = format!("model.layers.0.self_attn.{scale}");
                tensors.insert(name, (Dtype::F32, vec![1], f32_bytes([0.5])));
            }
            for table in ["embed_tokens", "embed_tokens_per_layer"] {
                tensors.insert(format!("model.{table}.embed_scale"), (Dtype::F32, vec![], f32_bytes([8.0])));
            }
        });
        plain.tensors(WEIGHTS, |tensors| tensors.extend(exact));
        let field = if config["config_groups"].is_null() { "quantization_config" } else { "compression_config" };
        fp8.json(CONFIG, |json| json[field] = config.clone());
        let ids = case("edge").ids("input_ids");
        let got = target(&fp8.path("target")).unwrap_or_else(|error| panic!("{config}: {error}"));
        let want = target(&plain.path("target")).expect("a target");
        assert_eq!(logits(&got, &ids), logits(&want, &ids), "{config}");
        let findings = verify(&VerifyOptions { target: Some(fp8.path("target")), ..VerifyOptions::default() });
        let unused = findings.into_iter().find(|finding| finding.check == "unused").expect("a finding");
        assert_eq!(unused.outcome, Outcome::Passed, "{config}: {}", unused.detail);
    }
}

#[test]
fn fp8_in_other_shapes_is_refused() {
    let twin = Twin::of("edge");
    let q = "model.layers.0.self_attn.q_proj.weight";
    twin.tensors(WEIGHTS, |tensors| {
        let (_, shape, _) = tensors[q].clone();
        let len = shape.iter().product();
        tensors.insert(q.into(), (Dtype::F8_E4M3, shape, vec![0x38; len]));
        tensors.insert(format!("{q}_scale"), (Dtype::F32, vec![3, 5], vec![0; 60]));
    });
    refused(engine(&twin.path("target"), None), &[q, "scales of shape [3, 5]", "for each row"]);
    for shape in [vec![0, 1 << 62], vec![2, 2, 0], vec![0]] {
        let empty = (Dtype::F8_E4M3, shape, Vec::new());
        twin.tensors(WEIGHTS, |tensors| drop(tensors.insert(q.into(), empty)));
        refused(engine(&twin.path("target"), None), &[q, "is of shape", "matrices are supported"]);
    }
}

/// Splits the stacks of experts into tensors for each expert's matrices, as written by `store`.
fn experts_apart(tensors: &mut Tensors, store: impl Fn(&mut Tensors, String, [usize; 2], &[f32])) {
    let stacks: Vec<String> = tensors.keys().filter(|name| name.contains(".experts.")).cloned().collect();
    assert!(!stacks.is_empty());
    for name in stacks {
        let (_, shape, bytes) = tensors.remove(&name).expect("the stack");
        let (values, (module, part)) = (f32s(&bytes), name.rsplit_once('.').expect("a part"));
        let parts = if part == "gate_up_proj" { &["gate_proj", "up_proj"][..] } else { &["down_proj"] };
        let matrix = [shape[1] / parts.len(), shape[2]];
        for (i, values) in values.chunks(matrix[0] * matrix[1]).enumerate() {
            let (expert, part) = (i / parts.len(), parts[i % parts.len()]);
            store(tensors, format!("{module}.{expert}.{part}.weight"), matrix, values);
        }
    }
}

/// As [`experts_apart`], in floats.
fn floats_apart(tensors: &mut Tensors) {
    experts_apart(tensors, |tensors, name, shape, values| {
        tensors.insert(name, (Dtype::F32, shape.to_vec(), f32_bytes(values.iter().copied())));
    });
}

fn open(twin: &Twin) -> Checkpoint {
    Checkpoint::open(twin.path("target")).expect("a checkpoint")
}

#[test]
fn separate_experts_load_as_stacks() {
    let (twin, case) = (Twin::of("moe"), case("moe"));
    twin.tensors(WEIGHTS, floats_apart);
    computes_the_references(&case, &target(&twin.path("target")).expect("a target"));
    let options = ToGgufOptions { outtype: Outtype::F32, ..ToGgufOptions::default() };
    to_gguf(&open(&twin), twin.path("model.gguf"), &options).expect("a file");
    computes_the_references(&case, &target(&twin.path("model.gguf")).expect("a target"));
}

/// All experts of the configuration, of its shapes, and no further ones.
#[test]
fn separate_experts_are_those_of_the_configuration() {
    let twin = Twin::of("moe");
    let options = ToGgufOptions { outtype: Outtype::F32, ..ToGgufOptions::default() };
    let file = twin.path("partial.gguf");
    let last = ["gate", "up", "down"].map(|part| format!("model.layers.2.experts.7.{part}_proj.weight"));
    for missing in [&["model.layers.0.experts.1.up_proj.weight".to_owned()][..], &last] {
        let partial = Twin::of("moe");
        partial.tensors(WEIGHTS, |tensors| {
            floats_apart(tensors);
            missing.iter().for_each(|name| drop(tensors.remove(name).expect("a matrix")));
        });
        refused(target(&partial.path("target")), &[&missing[0], "is missing"]);
        refused(to_gguf(&open(&partial), &file, &options), &[&missing[0], "is missing"]);
        assert!(!file.exists());
    }
    let transposed = Twin::of("moe");
    let turned = "model.layers.1.experts.3.down_proj.weight";
    transposed.tensors(WEIGHTS, |tensors| {
        floats_apart(tensors);
        tensors.get_mut(turned).expect("a matrix").1.reverse();
    });
    refused(target(&transposed.path("target")), &[turned, "has shape [24, 64]", "implies [64, 24]"]);
    refused(to_gguf(&open(&transposed), &file, &options), &[turned, "has shape [24, 64]", "implies [64, 24]"]);
    twin.json(CONFIG, |config| config["num_experts"] = json!(7));
    twin.tensors(WEIGHTS, |tensors| {
        floats_apart(tensors);
        for (name, (_, shape, bytes)) in tensors.iter_mut() {
            if name.ends_with("router.proj.weight") || name.ends_with("router.per_expert_scale") {
                bytes.truncate(bytes.len() / 8 * 7);
                shape[0] = 7;
            }
        }
    });
    refused(target(&twin.path("target")), &[".experts.7.", "no module"]);
    refused(to_gguf(&open(&twin), &file, &options), &[".experts.7.", "an expert that the configuration lacks"]);
}

/// With a tensor per matrix, whose bytes per step are known before they are loaded, and in stacks.
#[test]
fn experts_in_fp8_are_the_dequantized_weights() {
    let (fp8, plain) = (Twin::of("moe"), Twin::of("moe"));
    let byte = |i: usize| (0x18 + i * 7 % 40) as u8 | if i.is_multiple_of(3) { 0x80 } else { 0 };
    let scale = |row: usize| 0.02 + 0.001 * (row % 5) as f32;
    let value = |i: usize, inputs: usize| half::bf16::from_f32(e4m3(byte(i)) as f32 * scale(i / inputs)).to_f32();
    fp8.tensors(WEIGHTS, |tensors| {
        experts_apart(tensors, |tensors, name, [rows, inputs], values| {
            let scales = f32_bytes((0..rows).map(scale));
            tensors.insert(format!("{name}_scale"), (Dtype::F32, vec![rows, 1], scales));
            tensors.insert(name, (Dtype::F8_E4M3, vec![rows, inputs], (0..values.len()).map(byte).collect()));
        });
    });
    fp8.json(CONFIG, |json| json["quantization_config"] = json!({"quant_method": "fp8"}));
    plain.tensors(WEIGHTS, |tensors| {
        experts_apart(tensors, |tensors, name, shape, values| {
            let bytes =
                (0..values.len()).flat_map(|i| half::bf16::from_f32(value(i, shape[1])).to_le_bytes()).collect();
            tensors.insert(name, (Dtype::BF16, shape.to_vec(), bytes));
        });
    });
    let ids = case("moe").ids("input_ids");
    let of = |twin: &Twin| logits(&target(&twin.path("target")).expect("a target"), &ids);
    assert_eq!(of(&fp8), of(&plain));
    // In stacks: a scale per row, or per half of a matrix.
    for of_rows in [true, false] {
        let (fp8, plain) = (Twin::of("moe"), Twin::of("moe"));
        let scale = |row: usize, rows: usize| scale(if of_rows { row } else { row / (rows / 2) });
        let stacks = |tensors: &Tensors| -> Vec<(String, Vec<usize>)> {
            let stacks = tensors.iter().filter(|(name, _)| name.contains(".experts."));
            stacks.map(|(name, (_, shape, _))| (name.clone(), shape.clone())).collect()
        };
        fp8.tensors(WEIGHTS, |tensors| {
            for (name, shape) in stacks(tensors) {
                let (count, rows) = (shape[0], if of_rows { shape[1] } else { 2 });
                let scales = (0..count * rows).map(|i| if of_rows { scale(i % rows, rows) } else { scale(i % 2, 2) });
                tensors.insert(format!("{name}_scale_inv"), (Dtype::F32, vec![count, rows, 1], f32_bytes(scales)));
                let of_inputs = (Dtype::F32, vec![count], f32_bytes(vec![0.5; count]));
                tensors.insert(format!("{name}_activation_scale"), of_inputs);
                let bytes = (0..shape.iter().product()).map(byte).collect();
                tensors.insert(name, (Dtype::F8_E4M3, shape, bytes));
            }
        });
        fp8.json(CONFIG, |json| json["quantization_config"] = json!({"quant_method": "fp8"}));
        plain.tensors(WEIGHTS, |tensors| {
            for (name, shape) in stacks(tensors) {
                let value = |i: usize| e4m3(byte(i)) as f32 * scale(i / shape[2] % shape[1], shape[1]);
                let values = (0..shape.iter().product()).map(|i| half::bf16::from_f32(value(i)));
                let bytes = values.flat_map(half::bf16::to_le_bytes).collect();
                tensors.insert(name, (Dtype::BF16, shape.clone(), bytes));
            }
        });
        assert_eq!(of(&fp8), of(&plain), "of rows: {of_rows}");
    }
    let checkpoint = open(&fp8);
    let loaded = Target::load(&checkpoint, Isa::best()).expect("a target").step_cost().bytes as u64;
    assert_eq!(checkpoint.target_step_bytes(&checkpoint.target_config().expect("one")).expect("bytes"), loaded);
}

#[test]
fn directories_without_a_model_say_what_they_hold() {
    let twin = Twin::of("dense");
    std::fs::remove_file(twin.path(WEIGHTS)).expect("it was there");
    twin.write("target/adapter_model.safetensors", [0; 16]);
    twin.write("target/adapter_config.json", json!({"base_model_name_or_path": "google/gemma-4-E2B-it"}).to_string());
    let about = ["target", "LoRA adapter", "merge the adapter into its base model google/gemma-4-E2B-it"];
    refused(engine(&twin.path("target"), None), &about);

    for (file, about) in [
        ("model-00001-of-00002.safetensors", ["no model.safetensors.index.json", "download it too"]),
        ("weights.safetensors", ["no model.safetensors", "rename the weights"]),
        ("pytorch_model.bin", ["a PyTorch file is not supported", "use the bf16 checkpoint, or a GGUF file"]),
        ("model.onnx", ["an ONNX file", "use the bf16 checkpoint, or a GGUF file"]),
        ("gemma.litertlm", ["a LiteRT file", "use the bf16 checkpoint, or a GGUF file"]),
        ("model.safetensors.part", ["an incomplete download is not read", "resume it, or download the file again"]),
        ("adapter_model.safetensors", ["LoRA adapter", "merge the adapter into its base model"]),
        ("gemma-4-E2B-it-Q4_0.GGUF", ["contains GGUF files", "use one of them"]),
        ("gemma-4-E2B-it-Q4_0.gguf.part1of2", ["contains GGUF files", "use one of them"]),
    ] {
        let directory = twin.path(&format!("of {file}"));
        std::fs::create_dir(&directory).expect("a directory");
        std::fs::copy(twin.path(CONFIG), directory.join("config.json")).expect("a copy");
        std::fs::write(directory.join(file), [0; 64]).expect("written");
        refused(engine(&directory, None), &[file, about[0], about[1]]);
    }
    for (file, about) in [("files.onnx", "an ONNX file"), ("model.pth", "a PyTorch file")] {
        refused(engine(&twin.write(file, [1; 64]), None), &[file, about, "use the bf16 checkpoint, or a GGUF file"]);
    }
    for file in ["model.gguf.crdownload", "0a1b.incomplete"] {
        let about = [file, "an incomplete download, which is not read", "resume it, or download the file again"];
        refused(engine(&twin.write(file, [0; 64]), None), &about);
    }

    twin.write("of weights.safetensors/more.safetensors", [0; 64]);
    let about =
        ["more.safetensors and 1 more", "no model.safetensors or model.safetensors.index.json", "download that"];
    refused(engine(&twin.path("of weights.safetensors"), None), &about);
    // Renamed files.
    for (content, about) in [
        (&b"GGUF\x03\0\0\0\0\0\0\0"[..], ["a GGUF file under another name", "use the file itself"]),
        (b"PK\x03\x04\0\0\0\0\0\0", ["a PyTorch file under another name", "use the bf16 checkpoint, or a GGUF file"]),
    ] {
        twin.write(WEIGHTS, content);
        refused(engine(&twin.path("target"), None), &["model.safetensors", about[0], about[1]]);
    }

    // The Hub's cache, and a dangling link in it.
    let revision = "models--google--gemma/snapshots/0a1b";
    twin.write(&format!("{revision}/config.json"), "{}");
    for folder in ["models--google--gemma", "models--google--gemma/snapshots"] {
        refused(engine(&twin.path(folder), None), &["a directory of the Hub's cache", "0a1b"]);
    }
    // The current one of several.
    twin.write("models--google--gemma/snapshots/ff00/config.json", "{}");
    twin.write("models--google--gemma/refs/main", "0a1b");
    for folder in ["models--google--gemma", "models--google--gemma/snapshots"] {
        refused(engine(&twin.path(folder), None), &["a directory of the Hub's cache", "snapshots/0a1b"]);
    }
    #[cfg(unix)]
    {
        let link = twin.path(&format!("{revision}/model.safetensors"));
        std::os::unix::fs::symlink("../../blobs/gone", link).expect("a link");
        refused(engine(&twin.path(revision), None), &["model.safetensors is a dangling link"]);
    }

    twin.write("files/gemma-4-E2B-it-Q4_K_M.gguf", b"GGUF");
    twin.write("files/mmproj-F16.gguf", b"GGUF");
    twin.write("files/snapshots/training/step-1", b"");
    let about = ["files", "contains GGUF files", "gemma-4-E2B-it-Q4_K_M.gguf, mmproj-F16.gguf"];
    refused(engine(&twin.path("files"), None), &about);
}
