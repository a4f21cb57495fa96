//! Files that are refused by name.

use super::*;

/// Scales that no module applies: every spelling in circulation.
#[test]
fn a_stray_scale_is_an_error() {
    let twin = Twin::of("moe");
    let one = 1f32.to_le_bytes().to_vec();
    // Nor is one left out on request, except a tower's.
    let to_directory = ToHuggingFaceOptions { unknown: Unknown::LeftOut, ..ToHuggingFaceOptions::default() };
    let to_file = ToGgufOptions { unknown: Unknown::LeftOut, ..ToGgufOptions::default() };
    for (name, shown) in [
        ("blk.0.attn_q.scale", "blk.0.attn_q.scale"),
        ("blk.0.attn_q.input_scale", "input_scale"),
        ("blk.1.ffn_gate.weight.scale", "ffn_gate.weight.scale"),
        ("blk.0.ffn_up_exps.scale", "ffn_up_exps.scale"),
        ("output.scale", "output.scale"),
    ] {
        let file = twin.gguf("target").tensor(name, &[1], F32, one.clone());
        let path = twin.write("model.gguf", file.bytes());
        refused(engine(&path, None), &["model.gguf", shown, "is a scale", "use"]);
        let converted = to_hugging_face(&Checkpoint::open(&path).expect("a file"), twin.path("new"), &to_directory);
        refused(converted, &["model.gguf", shown, "is a scale"]);
        let file = twin.gguf("assistant").tensor(name, &[1], F32, one.clone());
        let drafter = twin.write("drafter.gguf", file.bytes());
        refused(engine(&twin.path("target"), Some(&drafter)), &["drafter.gguf", shown, "is a scale"]);
    }
    for name in ["weight_scale", "input_scale", "k_scale", "weight.scale"] {
        let twin = Twin::of("moe");
        let full = format!("model.layers.0.self_attn.q_proj.{name}");
        let scale = (Dtype::F32, vec![1], one.clone());
        twin.tensors(WEIGHTS, |tensors| drop(tensors.insert(full.clone(), scale)));
        refused(engine(&twin.path("target"), None), &[&full, "is a scale", "use"]);
        let source = Checkpoint::open(twin.path("target")).expect("a checkpoint");
        refused(to_gguf(&source, twin.path("new.gguf"), &to_file), &[&full, "is a scale"]);
    }
    let file = twin.gguf("target").tensor("v.std_scale", &[1], F32, one);
    let source = Checkpoint::open(twin.write("with-tower.gguf", file.bytes())).expect("a file");
    to_hugging_face(&source, twin.path("new"), &to_directory).expect("a directory");
    // The scales that a mixture of experts has are none of these.
    computes_the_references(&case("moe"), &target(&twin.path("target")).expect("a target"));
    computes_the_references(
        &case("moe"),
        &target(&twin.write("model.gguf", twin.gguf("target").bytes())).expect("a target"),
    );
}

#[test]
fn quantized_directories_are_refused_by_name() {
    for (field, value, name) in [
        ("quantization", json!({"group_size": 64, "bits": 4, "mode": "affine"}), "an MLX checkpoint of 4 bits"),
        (
            "quantization_config",
            json!({"quant_method": "compressed-tensors", "format": "naive-quantized", "config_groups": {"group_0": {"weights": {"type": "int"}}}}),
            "a compressed-tensors checkpoint (naive-quantized integers)",
        ),
        ("quantization_config", json!({"group_size": 64, "bits": 8}), "an MLX checkpoint of 8 bits"),
        (
            "quantization_config",
            json!({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
            "a compressed-tensors checkpoint (nvfp4-pack-quantized)",
        ),
        (
            "quantization_config",
            json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}),
            "a ModelOpt NVFP4 checkpoint",
        ),
        ("quantization_config", json!({"quant_method": "awq", "bits": 4}), "an AWQ checkpoint of 4 bits"),
        ("quantization_config", json!({"quant_method": "gptq", "bits": 4}), "a GPTQ checkpoint of 4 bits"),
        (
            "quantization_config",
            json!({"quant_method": "bitsandbytes", "load_in_4bit": true}),
            "a bitsandbytes checkpoint",
        ),
        ("quantization_config", json!({"quant_method": "auto-round"}), "\"auto-round\""),
        ("quantization_config", json!({"quant_method": "mxfp4"}), "an MXFP4 checkpoint"),
        (
            "quantization_config",
            json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}),
            "a compressed-tensors checkpoint (transform_config)",
        ),
        (
            "quantization_config",
            json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {"weights": {"symmetric": false}}}}),
            "a compressed-tensors checkpoint (weights of zero points)",
        ),
    ] {
        let twin = Twin::of("dense");
        twin.json(CONFIG, |config| config[field] = value.clone());
        refused(engine(&twin.path("target"), None), &[CONFIG, field, name, "use the bf16 checkpoint, or a GGUF file"]);
        let twin = Twin::of("nested");
        twin.json(CONFIG, |config| config["text_config"][field] = value.clone());
        refused(engine(&twin.path("target"), None), &[CONFIG, name]);
    }
    // Without a quantization in config.json, the tensors are checked.
    let q = "model.layers.0.self_attn.q_proj";
    for (tensor, name) in [
        (format!("{q}.scales"), "an MLX checkpoint"),
        (format!("{q}.biases"), "an MLX checkpoint"),
        (format!("{q}.qweight"), "an AWQ or GPTQ checkpoint"),
        (format!("{q}.g_idx"), "a GPTQ checkpoint"),
        (format!("{q}.weight_scale_2"), "an NVFP4 checkpoint"),
        (format!("{q}.weight.absmax"), "a bitsandbytes checkpoint"),
        (format!("{q}.lora_A.weight"), "a LoRA adapter"),
        ("model.layers.0.experts.switch_glu.up_proj.weight".into(), "an MLX checkpoint"),
        (format!("{q}.weight.quant_state.bitsandbytes__nf4"), "a bitsandbytes checkpoint"),
    ] {
        let twin = Twin::of("dense");
        let one = (Dtype::F32, vec![1], vec![0; 4]);
        twin.tensors(WEIGHTS, |tensors| drop(tensors.insert(tensor.clone(), one)));
        refused(engine(&twin.path("target"), None), &[&tensor, name, "use the bf16 checkpoint"]);
        let one = (Dtype::F32, vec![1], vec![0; 4]);
        twin.tensors("assistant/model.safetensors", |tensors| drop(tensors.insert(tensor.clone(), one)));
        let own = Twin::of("dense");
        refused(engine(&own.path("target"), Some(&twin.path("assistant"))), &[&tensor, name]);
    }
    // FP8 without a configuration or scales: detected by type.
    let twin = Twin::of("dense");
    twin.tensors(WEIGHTS, |tensors| {
        let tensor = tensors.get_mut(&format!("{q}.weight")).expect("the tensor");
        *tensor = (Dtype::F8_E4M3, tensor.1.clone(), vec![0; tensor.2.len() / 4]);
    });
    refused(engine(&twin.path("target"), None), &[q, "F8_E4M3", "not supported"]);
}

/// git-LFS leaves pointers, and a gated repository's URL an HTML page.
#[test]
fn placeholders_are_refused() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 9523\n";
    let page = "<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>";
    for (content, about) in [(pointer, ["git-LFS pointer", "git lfs pull"]), (page, ["a web page", "log in first"])] {
        let files =
            ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "generation_config.json"];
        for file in files {
            let twin = Twin::of("dense");
            twin.write(&format!("target/{file}"), content);
            refused(engine(&twin.path("target"), None), &[file, about[0], about[1]]);
        }
        for file in ["model.gguf", "0a1b2c"] {
            let twin = Twin::of("dense");
            refused(engine(&twin.write(file, content), None), &[file, about[0], about[1]]);
        }
    }
}

/// Devices and pipes: reading one could wait for a writer forever.
#[cfg(unix)]
#[test]
fn special_files_are_refused() {
    for file in ["config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"] {
        let twin = Twin::of("dense");
        let path = twin.path("target").join(file);
        let _ = std::fs::remove_file(&path);
        std::os::unix::fs::symlink("/dev/null", &path).expect("a link");
        refused(engine(&twin.path("target"), None), &[file, "is not a regular file"]);
    }
}

/// A link whose file is missing is an incomplete download; its model would lack a tokenizer, or write suppressed tokens.
#[cfg(unix)]
#[test]
fn dangling_links_are_refused() {
    for file in ["tokenizer.json", "chat_template.jinja", "tokenizer_config.json", "generation_config.json"] {
        let twin = Twin::of("dense");
        let path = twin.path("target").join(file);
        let _ = std::fs::remove_file(&path);
        std::os::unix::fs::symlink("../../blobs/gone", &path).expect("a link");
        refused(engine(&twin.path("target"), None), &[file, "check the path, or download it there"]);
    }
}

/// Truncated downloads leave files of full length with zeros: detected by the layers' factors.
#[test]
fn factors_that_are_zero_are_refused() {
    for (case, name) in [
        ("dense", "model.norm.weight"),
        ("dense", "model.layers.1.input_layernorm.weight"),
        ("dense", "model.layers.2.layer_scalar"),
        ("moe", "model.layers.0.router.scale"),
        ("moe", "model.layers.0.router.per_expert_scale"),
    ] {
        let twin = Twin::of(case);
        twin.tensors(WEIGHTS, |tensors| tensors.get_mut(name).expect("the factors").2.fill(0));
        refused(engine(&twin.path("target"), None), &[name, "is all zeros", "download the file again"]);
    }
}

#[test]
fn gguf_files_without_a_model_are_refused_by_name() {
    let twin = Twin::of("dense");
    for (key, value, about) in [
        ("general.type", "adapter", "a LoRA adapter's"),
        ("general.type", "imatrix", "an importance matrix's"),
        ("general.type", "mmproj", "an image and audio projector's"),
        ("general.architecture", "controlvector", "a control vector's"),
    ] {
        let path = twin.write("file.gguf", twin.gguf("target").with(key, str_value(value)).bytes());
        refused(engine(&path, None), &["file.gguf", key, about, "use"]);
    }
    let mut vocabulary = twin.gguf("target");
    vocabulary.tensors.clear();
    let about = ["file.gguf", "has no tensors", "use the model's file"];
    refused(engine(&twin.write("file.gguf", vocabulary.bytes()), None), &about);
    let pooled = twin.gguf("target").with("gemma4.pooling_type", u32_value(1));
    let about = ["pooling_type", "an embedding model", "use a Gemma 4"];
    refused(engine(&twin.write("file.gguf", pooled.bytes()), None), &about);
    let yarn = twin.gguf("target").with("gemma4.rope.scaling.type", str_value("yarn"));
    refused(engine(&twin.write("file.gguf", yarn.bytes()), None), &["rope.scaling.type", "yarn", "a file without it"]);
    let rotated = twin.gguf("target").with("prism.hadamard.version", u32_value(1));
    let about = ["file.gguf", "prism.hadamard.version", "rotated weights", "a file without it"];
    refused(engine(&twin.write("file.gguf", rotated.bytes()), None), &about);
    for (key, value) in [("expert_gating_func", u32_value(2)), ("attention.causal", bool_value(false))] {
        let file = twin.gguf("target").with(&format!("gemma4.{key}"), value);
        refused(engine(&twin.write("file.gguf", file.bytes()), None), &[key, "not implemented"]);
    }
}

/// Models that are not implemented, as files and as directories: what they are, and what to use.
#[test]
fn models_of_other_architectures_are_refused_by_name() {
    let twin = Twin::of("dense");
    let (own_file, none) = (twin.gguf("target"), "generates no text");
    for (architecture, model_type, about) in [
        ("gemma", "gemma", ["Gemma 1", "run this one with"]),
        ("gemma2", "gemma2", ["Gemma 2", "run this one with"]),
        ("gemma3", "gemma3", ["Gemma 3,", "run this one with"]),
        ("gemma3", "gemma3_text", ["Gemma 3,", "run this one with"]),
        ("gemma3n", "gemma3n", ["Gemma 3n,", "run this one with"]),
        ("diffusion-gemma", "diffusion_gemma", ["DiffusionGemma", "run this one with"]),
        ("llama", "llama", ["Llama", "run this one with"]),
        ("llama4", "llama4", ["Llama 4", "run this one with"]),
        ("mistral3", "mistral", ["Mistral", "run this one with"]),
        ("qwen2", "qwen2", ["Qwen2", "run this one with"]),
        ("qwen3", "qwen3", ["Qwen3", "run this one with"]),
        ("qwen3moe", "qwen3_moe", ["Qwen3", "run this one with"]),
        ("qwen3next", "qwen3_next", ["Qwen3-Next", "run this one with"]),
        ("olmo9", "olmo9", ["another architecture", "run this one with"]),
        ("gemma-embedding", "modernbert", ["an embedding model", none]),
        ("nomic-bert", "nomic_bert", ["an embedding model", none]),
        ("qwen_image", "qwen_image", ["diffusion model", none]),
        ("flux", "sd3", ["diffusion model", none]),
        ("eagle3", "eagle3", ["drafter", none]),
    ] {
        let path = twin.write("other.gguf", own_file.clone().architecture(architecture).bytes());
        let with_program =
            |program| if about[1] == none { about[1].to_owned() } else { format!("{} {program}", about[1]) };
        let own = format!("{architecture:?}");
        let remedy = with_program("llama.cpp");
        refused(
            engine(&path, None),
            &["other.gguf", "architecture", &own, about[0], &remedy, "use a Gemma 4, Qwen3.5"],
        );
        twin.json(CONFIG, |config| config["model_type"] = json!(model_type));
        let (own, remedy) = (format!("{model_type:?}"), with_program("transformers"));
        let about = ["config.json", "model_type", &own, about[0], &remedy, "use a Gemma 4, Qwen3.5"];
        refused(engine(&twin.path("target"), None), &about);
    }
    let target = twin.write("target.gguf", own_file.bytes());
    let other = twin.write("other.gguf", own_file.architecture("llama").bytes());
    refused(engine(&target, Some(&other)), &["other.gguf", "\"llama\"", "use the -assistant or mtp- file"]);

    // A family's model with another head, or inside another module.
    let twin = Twin::of("dense");
    twin.json(CONFIG, |config| config["architectures"] = json!(["Gemma4ForSequenceClassification"]));
    let about = ["architectures", "Gemma4ForSequenceClassification", "does not generate text", "use the checkpoint"];
    refused(engine(&twin.path("target"), None), &about);
    let twin = Twin::of("dense");
    twin.tensors(WEIGHTS, |tensors| {
        let of_wrapper = |(name, tensor)| (format!("_orig_mod.{name}"), tensor);
        *tensors = std::mem::take(tensors).into_iter().map(of_wrapper).collect();
    });
    refused(
        engine(&twin.path("target"), None),
        &["there is _orig_mod.model.embed_tokens.weight", "without the wrapper"],
    );

    twin.json(CONFIG, |config| drop(config.as_object_mut().expect("an object").remove("model_type")));
    let about = ["config.json", "model_type", "is missing", "published with the language model"];
    refused(engine(&twin.path("target"), None), &about);

    // A pipeline of diffusers, whose models have no config.json at the top.
    twin.write("pipeline/model_index.json", "{}");
    refused(engine(&twin.path("pipeline"), None), &["model_index.json", "diffusion model", "use a Gemma 4"]);
    twin.write("transformer/diffusion_pytorch_model.safetensors", [0; 64]);
    refused(engine(&twin.path("transformer"), None), &["diffusion_pytorch_model", "diffusion model", "use a Gemma 4"]);
}

/// Types without a kernel: the error names tensor, type and an alternative, before any weight is loaded.
#[test]
fn gguf_types_without_kernels_are_refused_by_name() {
    let twin = Twin::of("dense");
    // ggml's ids and blocks: elements, bytes.
    for (id, name, elements, bytes) in [
        (9, "Q8_1", 32, 36),
        (15, "Q8_K", 256, 292),
        (41, "Q1_0", 128, 18),
        (42, "an unknown type", 64, 18),
        (139, "a type of ik_llama.cpp", 256, 144),
        (142, "a type of PrismML's llama.cpp", 128, 34),
    ] {
        for part in ["target", "assistant"] {
            let file = twin.gguf(part).dropped("blk.1.ffn_down.weight");
            // A separate scale does not hide the type.
            let file = file.tensor("blk.1.ffn_down.weight", &[1, elements], id, vec![0; bytes]).tensor(
                "blk.1.ffn_down.scale",
                &[1],
                F32,
                vec![0; 4],
            );
            let path = twin.write("model-UD-Q4_K_XL.gguf", file.bytes());
            let loaded = match part {
                "target" => engine(&path, None),
                _ => engine(&twin.path("target"), Some(&path)),
            };
            refused(loaded, &["model-UD-Q4_K_XL.gguf", "tensor blk.1.ffn_down.weight", name, "1 of ", "Q4_K_M"]);
        }
    }
}
