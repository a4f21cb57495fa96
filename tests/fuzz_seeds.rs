//! The seeds of fuzz/: small valid files of every supported kind. All but the texts in fuzz/seeds/constraint and the
//! synthetic GGUF files, which are in tests/gguf/main.rs, are written here:
//! `cargo test --release --test gguf --test fuzz_seeds -- --ignored write_fuzz_seeds`.

use std::path::{Path, PathBuf};

use foretoken::chat::{ChatOptions, ChatTemplate, Message};
use foretoken::checkpoint::convert::{ToGgufOptions, to_gguf};
use foretoken::checkpoint::gguf::Gguf;
use foretoken::checkpoint::quantize::{Mix, QuantizeOptions, quantize};
use foretoken::checkpoint::{Checkpoint, Fields};
use foretoken::gemma4::{AssistantConfig, Target, TextConfig};
use foretoken::kv::{ExactZones, KvFormat, KvOptions};
use foretoken::qwen35::{self, LayerType};
use foretoken::tokenizer::Tokenizer;
use foretoken::{Engine, EngineOptions, GenerateOptions, Isa, SessionOptions};
use half::bf16;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

fn seeds(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(target)
}

fn write(target: &str, name: &str, bytes: impl AsRef<[u8]>) {
    std::fs::create_dir_all(seeds(target)).expect("a directory");
    std::fs::write(seeds(target).join(name), bytes).expect("written");
}

/// Every seed of `target`: its name and its bytes.
fn read(target: &str) -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(seeds(target)).expect("the committed seeds").map(|entry| entry.expect("an entry"));
    let files = entries.map(|entry| (entry.file_name().to_string_lossy().into_owned(), std::fs::read(entry.path())));
    files.map(|(name, bytes)| (name, bytes.expect("a file"))).collect()
}

// ---- models ----

const VOCAB: usize = 32;

/// Gemma 4's smaller models in miniature: per-layer embeddings, layers that share K and V, a wide MLP in those.
fn dense() -> Value {
    json!({
        "model_type": "gemma4", "eos_token_id": [1, 3],
        "text_config": {
            "model_type": "gemma4_text", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 16,
            "num_hidden_layers": 3, "num_kv_shared_layers": 1, "use_double_wide_mlp": true,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 32,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "sliding_window": 4,
            "max_position_embeddings": 256, "final_logit_softcapping": 30.0, "bos_token_id": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    })
}

/// Its larger ones: experts, keys that are the values, an output head of its own.
fn moe() -> Value {
    json!({
        "model_type": "gemma4_text", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 16,
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "attention_k_eq_v": true,
        "num_attention_heads": 2, "num_key_value_heads": 2, "num_global_key_value_heads": 1, "head_dim": 16,
        "global_head_dim": 32, "hidden_size_per_layer_input": 0, "sliding_window": 4, "max_position_embeddings": 256,
        "enable_moe_block": true, "num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 32,
        "tie_word_embeddings": false,
    })
}

/// One layer whose rows are whole blocks of 256, as k-quants require.
fn wide() -> Value {
    json!({
        "model_type": "gemma4_text", "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 16,
        "num_hidden_layers": 1, "layer_types": ["full_attention"], "num_attention_heads": 1, "num_key_value_heads": 1,
        "head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 0, "max_position_embeddings": 256,
    })
}

/// Qwen3.5 in miniature, with the fields `own`: a delta net and gated attention.
fn qwen35_config(own: Value) -> Value {
    let mut config = json!({
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "max_position_embeddings": 256,
        "tie_word_embeddings": true, "eos_token_id": 1,
    });
    config.as_object_mut().expect("an object").extend(own.as_object().expect("an object").clone());
    config
}

/// With a NextN head.
fn qwen35_dense() -> Value {
    qwen35_config(json!({"model_type": "qwen3_5_text", "intermediate_size": 32, "mtp_num_hidden_layers": 1}))
}

/// With experts.
fn qwen35_moe() -> Value {
    qwen35_config(json!({
        "model_type": "qwen3_5_moe_text", "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }))
}

/// The names and shapes of the tensors of a Qwen3.5 and its NextN head, if it has one.
fn qwen35_shapes(config: &qwen35::TextConfig) -> Vec<(String, Vec<usize>)> {
    let (hidden, net) = (config.hidden_size, &config.delta_net);
    let (keys, values) = (net.num_key_heads * net.key_head_dim, net.num_value_heads * net.value_head_dim);
    let (q, kv) = (config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim);
    let mut shapes =
        vec![("model.embed_tokens.weight".into(), vec![VOCAB, hidden]), ("model.norm.weight".into(), vec![hidden])];
    let mut layers: Vec<_> =
        (config.layers.iter().enumerate()).map(|(i, layer)| (format!("model.layers.{i}"), *layer)).collect();
    if config.mtp_num_hidden_layers == Some(1) {
        let norms = ["norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"];
        shapes.extend(norms.map(|norm| (format!("mtp.{norm}.weight"), vec![hidden])));
        shapes.push(("mtp.fc.weight".into(), vec![hidden, 2 * hidden]));
        layers.push(("mtp.layers.0".into(), LayerType::Full));
    }
    for (at, layer) in layers {
        let mut push = |name: &str, shape: &[usize]| shapes.push((format!("{at}.{name}"), shape.to_vec()));
        push("input_layernorm.weight", &[hidden]);
        push("post_attention_layernorm.weight", &[hidden]);
        match layer {
            LayerType::Linear => {
                push("linear_attn.in_proj_qkv.weight", &[2 * keys + values, hidden]);
                push("linear_attn.in_proj_z.weight", &[values, hidden]);
                push("linear_attn.in_proj_a.weight", &[net.num_value_heads, hidden]);
                push("linear_attn.in_proj_b.weight", &[net.num_value_heads, hidden]);
                push("linear_attn.conv1d.weight", &[2 * keys + values, 1, net.conv_kernel_dim]);
                push("linear_attn.A_log", &[net.num_value_heads]);
                push("linear_attn.dt_bias", &[net.num_value_heads]);
                push("linear_attn.norm.weight", &[net.value_head_dim]);
                push("linear_attn.out_proj.weight", &[hidden, values]);
            }
            LayerType::Full => {
                push("self_attn.q_proj.weight", &[2 * q, hidden]);
                push("self_attn.k_proj.weight", &[kv, hidden]);
                push("self_attn.v_proj.weight", &[kv, hidden]);
                push("self_attn.q_norm.weight", &[config.head_dim]);
                push("self_attn.k_norm.weight", &[config.head_dim]);
                push("self_attn.o_proj.weight", &[hidden, q]);
            }
        }
        let (mlp, width) = match &config.moe {
            None => ("mlp", config.intermediate_size),
            Some(moe) => {
                push("mlp.gate.weight", &[moe.num_experts, hidden]);
                push("mlp.shared_expert_gate.weight", &[1, hidden]);
                push("mlp.experts.gate_up_proj", &[moe.num_experts, 2 * moe.intermediate_size, hidden]);
                push("mlp.experts.down_proj", &[moe.num_experts, hidden, moe.intermediate_size]);
                ("mlp.shared_expert", moe.shared_intermediate_size)
            }
        };
        push(&format!("{mlp}.gate_proj.weight"), &[width, hidden]);
        push(&format!("{mlp}.up_proj.weight"), &[width, hidden]);
        push(&format!("{mlp}.down_proj.weight"), &[hidden, width]);
    }
    shapes
}

/// The names and shapes of a target's tensors. `prefix` begins those of the text model.
fn gemma4_shapes(config: &TextConfig, prefix: &str) -> Vec<(String, Vec<usize>)> {
    let mut shapes: Vec<_> =
        shapes(config).into_iter().map(|(name, shape)| (format!("{prefix}{name}"), shape)).collect();
    if !config.tie_word_embeddings {
        shapes.push(("lm_head.weight".into(), vec![VOCAB, config.hidden_size]));
    }
    shapes
}

/// Those of its text model, without prefix.
fn shapes(config: &TextConfig) -> Vec<(String, Vec<usize>)> {
    let (hidden, per_layer) = (config.hidden_size, config.hidden_size_per_layer_input);
    let mut shapes = vec![("embed_tokens.weight".into(), vec![VOCAB, hidden]), ("norm.weight".into(), vec![hidden])];
    if per_layer > 0 {
        let all = config.layers.len() * per_layer;
        shapes.push(("embed_tokens_per_layer.weight".into(), vec![VOCAB, all]));
        shapes.push(("per_layer_model_projection.weight".into(), vec![all, hidden]));
        shapes.push(("per_layer_projection_norm.weight".into(), vec![per_layer]));
    }
    for (i, layer) in config.layers.iter().enumerate() {
        let mut push = |name: &str, shape: &[usize]| shapes.push((format!("layers.{i}.{name}"), shape.to_vec()));
        let norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"];
        norms.iter().for_each(|norm| push(&format!("{norm}_layernorm.weight"), &[hidden]));
        push("layer_scalar", &[1]);
        let (q, kv) = (config.num_attention_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim);
        push("self_attn.q_proj.weight", &[q, hidden]);
        push("self_attn.q_norm.weight", &[layer.head_dim]);
        push("self_attn.o_proj.weight", &[hidden, q]);
        if !layer.kv_shared {
            push("self_attn.k_proj.weight", &[kv, hidden]);
            push("self_attn.k_norm.weight", &[layer.head_dim]);
        }
        if !layer.kv_shared && !layer.k_eq_v {
            push("self_attn.v_proj.weight", &[kv, hidden]);
        }
        push("mlp.gate_proj.weight", &[layer.intermediate_size, hidden]);
        push("mlp.up_proj.weight", &[layer.intermediate_size, hidden]);
        push("mlp.down_proj.weight", &[hidden, layer.intermediate_size]);
        if per_layer > 0 {
            push("per_layer_input_gate.weight", &[per_layer, hidden]);
            push("per_layer_projection.weight", &[hidden, per_layer]);
            push("post_per_layer_input_norm.weight", &[hidden]);
        }
        if let Some(moe) = &config.moe {
            let norms = ["post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"];
            norms.iter().for_each(|norm| push(&format!("{norm}.weight"), &[hidden]));
            push("router.scale", &[hidden]);
            push("router.proj.weight", &[moe.num_experts, hidden]);
            push("router.per_expert_scale", &[moe.num_experts]);
            push("experts.gate_up_proj", &[moe.num_experts, 2 * moe.intermediate_size, hidden]);
            push("experts.down_proj", &[moe.num_experts, hidden, moe.intermediate_size]);
        }
    }
    shapes
}

/// The directory of a checkpoint of that configuration.
fn checkpoint(config: &Value) -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    let file = |name: &str| directory.path().join(name);
    std::fs::write(file("config.json"), config.to_string()).expect("written");
    std::fs::write(file("tokenizer.json"), tokenizer().to_string()).expect("written");
    std::fs::write(file("chat_template.jinja"), TEMPLATE).expect("written");
    let prefix = if config.get("text_config").is_some() { "model.language_model." } else { "model." };
    let fields = Fields::read(file("config.json")).expect("JSON");
    let shapes = match qwen35::TextConfig::target(&fields) {
        Ok(config) => qwen35_shapes(&config),
        Err(_) => gemma4_shapes(&TextConfig::target(&fields).expect("a target"), prefix),
    };
    let tensors: Vec<_> = (shapes.into_iter())
        .map(|(name, shape)| {
            // Matrices in bf16, vectors in f32; small numbers that repeat every 13.
            let value = |i: usize| (i % 13) as f32 / 64.0 - 0.1;
            let values = (0..shape.iter().product()).map(value);
            match shape.len() {
                1 => (name, Dtype::F32, values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>(), shape),
                _ => (name, Dtype::BF16, values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(), shape),
            }
        })
        .collect();
    let view = |dtype, bytes, shape: &Vec<usize>| TensorView::new(dtype, shape.clone(), bytes).expect("a view");
    let views = tensors.iter().map(|(name, dtype, bytes, shape)| (name, view(*dtype, bytes, shape)));
    let file = safetensors::serialize(views, None).expect("serialized");
    std::fs::write(directory.path().join("model.safetensors"), file).expect("written");
    directory
}

/// A checkpoint as one input: config.json, a NUL, model.safetensors.
fn joined(directory: &Path) -> Vec<u8> {
    let bytes = |name: &str| std::fs::read(directory.join(name)).expect("written above");
    [bytes("config.json"), vec![0], bytes("model.safetensors")].concat()
}

fn split(seed: &[u8]) -> tempfile::TempDir {
    let end = seed.iter().position(|byte| *byte == 0).expect("two files");
    let directory = tempfile::tempdir().expect("a directory");
    std::fs::write(directory.path().join("config.json"), &seed[..end]).expect("written");
    std::fs::write(directory.path().join("model.safetensors"), &seed[end + 1..]).expect("written");
    directory
}

fn engine(directory: &Path) -> Engine {
    Engine::load(&EngineOptions { threads: Some(1), ..EngineOptions::new(directory) }).expect("the model of the seeds")
}

// ---- tokenizers, templates ----

/// Gemma's kind of tokenizer in miniature: BPE over characters, bytes where there is no character.
fn tokenizer() -> Value {
    let special = ["<pad>", "<eos>", "<bos>", "<unk>"];
    let others = [
        "<0x00>", "<0x0A>", "<0x20>", "<0xC3>", "<0xB6>", "<0xE4>", "▁", "a", "e", "t", "x", "n", "o", "d", "m", "r",
        "te", "xt", "text", "▁a", "an", "and", "▁and",
    ];
    let vocabulary = special.iter().chain(&others).zip(0..).map(|(token, id)| ((*token).to_owned(), json!(id)));
    let added = special.iter().zip(0..).map(|(token, id): (_, u32)| {
        let flags =
            json!({"single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
        let mut added = json!({"id": id, "content": token});
        added.as_object_mut().expect("an object").extend(flags.as_object().expect("an object").clone());
        added
    });
    let merges = [["t", "e"], ["x", "t"], ["te", "xt"], ["▁", "a"], ["a", "n"], ["an", "d"], ["▁", "and"]];
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        ]},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocabulary.collect::<serde_json::Map<_, _>>(), "merges": merges,
        },
    })
}

/// Without added tokens and template; a space before every text, as older files have it.
fn prefixing_tokenizer() -> Value {
    let mut file = tokenizer();
    file["normalizer"] = json!({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"Regex": " +"}, "content": "▁"},
    ]});
    file["pre_tokenizer"] = Value::Null;
    file["post_processor"] = Value::Null;
    file["decoder"]["decoders"]
        .as_array_mut()
        .expect("a list")
        .push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    file["model"]["merges"] = json!(["t e", "x t", "te xt"]);
    file
}

/// Qwen's kind of tokenizer in miniature: BPE over the bytes of split texts.
fn byte_level_tokenizer() -> Value {
    let tokens =
        "<|endoftext|> <|im_end|> \u{10a} \u{120} \u{c3} \u{b6} a e t x n o d m r te xt text an and \u{120}and";
    let tokens: Vec<&str> = tokens.split(' ').collect();
    let mut file = tokenizer();
    let added = file["added_tokens"].as_array_mut().expect("a list");
    added.truncate(2);
    added.iter_mut().zip(&tokens).for_each(|(added, token)| added["content"] = json!(token));
    let vocabulary = tokens.into_iter().zip(0..).map(|(token, id)| (token.to_owned(), json!(id)));
    file["model"]["vocab"] = Value::Object(vocabulary.collect());
    file["model"]["merges"] =
        json!([["t", "e"], ["x", "t"], ["te", "xt"], ["a", "n"], ["an", "d"], ["\u{120}", "and"]]);
    file["model"]["unk_token"] = Value::Null;
    file["model"]["fuse_unk"] = json!(false);
    file["model"]["byte_fallback"] = json!(false);
    let pattern = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s+(?!\S)|\s+";
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    file["normalizer"] = json!({"type": "NFC"});
    file["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false}, bytes,
    ]});
    file["post_processor"] = json!({
        "type": "TemplateProcessing", "special_tokens": {}, "single": [{"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    });
    file["decoder"] = bytes;
    file
}

const TEMPLATE: &str = "\
{{- bos_token -}}
{%- set ns = namespace(system=false) -%}
{%- macro turn(role, text) -%}
    {{- '<|turn>' + role + '\\n' + text | trim + '<turn|>\\n' -}}
{%- endmacro -%}
{%- if messages and messages[0]['role'] in ['system', 'developer'] -%}
    {%- set ns.system = true -%}
    {{- turn('system', messages[0].content ~ ('<|think|>' if enable_thinking else '')) -}}
{%- endif -%}
{%- set turns = messages[1:] if ns.system else messages -%}
{%- for message in turns -%}
    {%- set role = 'model' if message.role == 'assistant' else message.role -%}
    {%- if role not in ('model', 'user') -%}
        {{- raise_exception('a ' ~ role ~ ' out of place') -}}
    {%- endif -%}
    {%- if message.content is string and message.content.startswith('Hello') -%}
        {{- turn(role, message.content.replace('{', '<').upper()) -}}
    {%- else -%}
        {{- turn(role, message['content'] | default('') | string) -}}
    {%- endif -%}
    {#- the parts of a list -#}
    {%- for part in message.parts | default([]) | selectattr('text') -%}{{ loop.index0 }}{{ part.items() | list | tojson }}{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt and not messages | length == 0 -%}{{- '<|turn>model\\n' -}}{%- endif -%}
";

// ---- the seeds ----

#[test]
#[ignore = "writes to fuzz/seeds"]
fn write_fuzz_seeds() {
    let models = [("dense", dense()), ("moe", moe()), ("qwen35-dense", qwen35_dense()), ("qwen35-moe", qwen35_moe())];
    let directories = models.map(|(name, config)| (name, checkpoint(&config)));
    for (name, directory) in &directories {
        write("safetensors", name, joined(directory.path()));
        write("config", name, std::fs::read(directory.path().join("config.json")).expect("written above"));
    }
    let to = tempfile::tempdir().expect("a directory");
    let wide = ("wide", checkpoint(&wide()));
    for (name, directory) in directories.iter().chain([&wide]) {
        let f16 = to.path().join(format!("{name}.gguf"));
        let source = Checkpoint::open(directory.path()).expect("written above");
        to_gguf(&source, &f16, &ToGgufOptions { name: Some("seed".into()), ..ToGgufOptions::default() })
            .expect("converted");
        let mixes = match *name {
            "wide" => &[Mix::Q2_K, Mix::Q3_K_M, Mix::Q4_K_M, Mix::Q5_K_S][..],
            "qwen35-dense" | "qwen35-moe" => &[Mix::Q8_0],
            _ => &[Mix::Q4_0, Mix::Q5_0, Mix::Q8_0, Mix::IQ4_NL],
        };
        for mix in mixes {
            let quantized = to.path().join("quantized.gguf");
            quantize(&Checkpoint::open(&f16).expect("converted"), &quantized, &QuantizeOptions::new(*mix))
                .expect("quantized");
            write("gguf", &format!("model-{name}-{}", mix.name()), std::fs::read(&quantized).expect("quantized"));
        }
    }
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    for fixture in std::fs::read_dir(fixtures).expect("the fixtures").map(|entry| entry.expect("an entry").path()) {
        for part in ["target", "assistant"] {
            let name = format!("{}-{part}", fixture.file_name().expect("a name").to_string_lossy());
            let config = std::fs::read(fixture.join(part).join("config.json"));
            config.into_iter().for_each(|config| write("config", &name, config));
        }
    }
    let mut per_layer = moe();
    per_layer["per_layer_config"] = json!({"1": {"head_dim": 32, "num_key_value_heads": 1}});
    write("config", "per_layer", per_layer.to_string());

    write("tokenizer", "bpe", tokenizer().to_string());
    write("tokenizer", "prefixing", prefixing_tokenizer().to_string());
    write("tokenizer", "byte_level", byte_level_tokenizer().to_string());
    write("chat_template", "template", TEMPLATE);
    write("chat_template", "config", json!({"bos_token": {"content": "<s>"}, "chat_template": TEMPLATE}).to_string());
    let several =
        json!([{"name": "tools", "template": ""}, {"name": "default", "template": "{{ messages | tojson }}"}]);
    write("chat_template", "several", json!({"eos_token": "</s>", "chat_template": several}).to_string());

    let engine = engine(split(&joined(directories[0].1.path())).path());
    for format in ["f32", "f16", "q8_0", "tqc5", "turbo3"] {
        let parsed: KvFormat = format.parse().expect("a format");
        // Past the first page, which stays exact.
        let exact = ExactZones { head: 0, tail: 0, ..ExactZones::default() };
        let prompt = if matches!(parsed, KvFormat::Exact(_)) { 3 } else { 140 };
        let kv = KvOptions {
            key: parsed,
            value: parsed,
            exact,
            max_round_rows: 4,
            max_context: Some(256),
            ..KvOptions::default()
        };
        let mut session = engine.session(&SessionOptions { kv }).expect("a session");
        write("session_file", &format!("{format}-empty"), saved(&mut session));
        let options = GenerateOptions { max_tokens: 2, ..GenerateOptions::default() };
        let prompt: Vec<u32> = (2..32).cycle().take(prompt).collect();
        session.generate(&prompt, &options).expect("a generation").for_each(|piece| drop(piece.expect("a piece")));
        write("session_file", format, saved(&mut session));
    }
}

fn saved(session: &mut foretoken::Session) -> Vec<u8> {
    let directory = tempfile::tempdir().expect("a directory");
    session.save(directory.path().join("session")).expect("saved");
    std::fs::read(directory.path().join("session")).expect("saved")
}

/// Loads a model of the family that its file is named after.
fn load(name: &str, checkpoint: &Checkpoint) {
    match name.contains("qwen35") {
        true => drop(qwen35::Target::load(checkpoint, Isa::best()).expect(name)),
        false => drop(Target::load(checkpoint, Isa::best()).expect(name)),
    }
}

/// Fuzzing starts after the checks that a valid file passes; a stale seed would not get there.
#[test]
fn the_committed_seeds_are_accepted() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = |name: &str, bytes: &[u8]| {
        let path = directory.path().join(name);
        std::fs::write(&path, bytes).expect("written");
        path
    };
    let mut model = None;
    for (name, seed) in read("safetensors") {
        let directory = split(&seed);
        load(&name, &Checkpoint::open(directory.path()).expect(&name));
        if name == "dense" {
            model = Some(directory);
        }
    }
    for (name, seed) in read("gguf") {
        if ["merges", "scores"].contains(&&*name) {
            // Vocabularies: no checkpoints.
            Gguf::from_bytes(seed).expect(&name);
            continue;
        }
        let checkpoint = Checkpoint::open(file("model.gguf", &seed)).expect(&name);
        // The others have a few tensors.
        if name.starts_with("model-") {
            load(&name, &checkpoint);
        }
    }
    for (name, seed) in read("config") {
        let fields = Fields::read(file("config.json", &seed)).expect(&name);
        let read = [
            TextConfig::target(&fields).map(drop),
            AssistantConfig::read(&fields).map(drop),
            qwen35::TextConfig::target(&fields).map(drop),
        ];
        assert!(read.iter().any(Result::is_ok), "{name}: {read:?}");
    }
    for (name, seed) in read("tokenizer") {
        let tokenizer = Tokenizer::read(file("tokenizer.json", &seed), VOCAB).expect(&name);
        let ids = tokenizer.encode("a text and more").expect(&name);
        assert!(tokenizer.decode(&ids).expect(&name).contains("text"), "{name}");
    }
    for (name, seed) in read("chat_template") {
        let at = if seed.starts_with(b"{\"") { "tokenizer_config.json" } else { "chat_template.jinja" };
        let path = file(at, &seed);
        let template = ChatTemplate::read(directory.path()).expect(&name).expect(&name);
        let message = Message::user("Hello");
        assert!(!template.render(&[message], &ChatOptions::default()).expect(&name).is_empty(), "{name}");
        std::fs::remove_file(path).expect("it was written");
    }
    let engine = engine(model.expect("the dense model").path());
    for (name, seed) in read("session_file") {
        engine.load_session(file("session", &seed)).expect(&name);
    }
    let bytes = |target| read(target).iter().map(|(_, seed)| seed.len()).sum::<usize>();
    let targets = ["gguf", "safetensors", "tokenizer", "chat_template", "session_file", "config", "constraint"];
    assert!(targets.into_iter().map(bytes).sum::<usize>() < 1_500_000, "the seeds are to stay small");
    for (name, seed) in targets.into_iter().flat_map(read) {
        assert!(seed.len() <= 1 << 16, "{name} is longer than scripts/fuzz.sh lets an input be");
    }
}
