//! Qwen3.5 from files: GGUF written by llama.cpp's converter computes what the safetensors do, and
//! unsupported files are rejected by name.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use foretoken::checkpoint::convert::{Outtype, ToGgufOptions, ToHuggingFaceOptions, to_gguf, to_hugging_face};
use foretoken::checkpoint::gguf::{self, Gguf};
use foretoken::checkpoint::{Checkpoint, LoadOptions};
use foretoken::kv::{Batch, KvOptions, PagePool};
use foretoken::nn::tensor;
use foretoken::qwen35::{Target, TensorLayout, TextConfig};
use foretoken::tokenizer::Tokenizer;
use foretoken::verify::{Outcome, VerifyOptions, verify};
use foretoken::{ElementType, Engine, EngineOptions, Isa, Model, NextnHead, OutputRows, OwnDrafter, target_facts};
use half::bf16;
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize_to_file};
use serde_json::{Value, json};

use crate::cases::{self, Case, max_difference, values};
use crate::gguf_writer::{self, GgufFile, Written, array, bool_value, f32_value, str_value, strings, u32_value};

/// The cases of this repository: others may have layers that metadata cannot represent.
fn shipped() -> Vec<Case> {
    cases::of(cases::QWEN35).into_iter().filter(Case::ships).collect()
}

/// The tensors of a case: shape and values.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

fn tensors(directory: &Path) -> Tensors {
    let bytes = std::fs::read(directory.join("model.safetensors")).expect("the tensors");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let numbers = |view: &TensorView<'_>| match view.dtype() {
        Dtype::F32 => view.data().as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect(),
        Dtype::BF16 => view.data().as_chunks().0.iter().map(|x| bf16::from_le_bytes(*x).to_f32()).collect(),
        other => panic!("{other:?}"),
    };
    let read = |(name, view): (String, TensorView<'_>)| (name, (view.shape().to_vec(), numbers(&view)));
    file.tensors().into_iter().map(read).collect()
}

/// The text model's part of config.json.
fn config(case: &Case) -> Value {
    let text = std::fs::read_to_string(case.path.join("target/config.json")).expect("config.json");
    let config: Value = serde_json::from_str(&text).expect("JSON");
    config.get("text_config").unwrap_or(&config).clone()
}

/// Value heads interleaved over the key heads: block `i * keys + k` is block `k * (values / keys) + i`.
fn tiled(blocks: &[f32], width: usize, keys: usize) -> Vec<f32> {
    let per_key = blocks.len() / width / keys;
    let of = |i: usize, k: usize| &blocks[(k * per_key + i) * width..][..width];
    (0..per_key).flat_map(|i| (0..keys).flat_map(move |k| of(i, k))).copied().collect()
}

const LAYER: [(&str, &str); 19] = [
    ("input_layernorm.weight", "attn_norm.weight"),
    ("post_attention_layernorm.weight", "post_attention_norm.weight"),
    ("self_attn.q_proj.weight", "attn_q.weight"),
    ("self_attn.k_proj.weight", "attn_k.weight"),
    ("self_attn.v_proj.weight", "attn_v.weight"),
    ("self_attn.o_proj.weight", "attn_output.weight"),
    ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    ("linear_attn.norm.weight", "ssm_norm.weight"),
    ("mlp.gate_proj.weight", "ffn_gate.weight"),
    ("mlp.up_proj.weight", "ffn_up.weight"),
    ("mlp.down_proj.weight", "ffn_down.weight"),
    ("mlp.gate.weight", "ffn_gate_inp.weight"),
    ("mlp.experts.down_proj", "ffn_down_exps.weight"),
    ("mlp.shared_expert.gate_proj.weight", "ffn_gate_shexp.weight"),
    ("mlp.shared_expert.up_proj.weight", "ffn_up_shexp.weight"),
    ("mlp.shared_expert.down_proj.weight", "ffn_down_shexp.weight"),
    ("linear_attn.in_proj_a.weight", "ssm_alpha.weight"),
    ("linear_attn.in_proj_b.weight", "ssm_beta.weight"),
];

/// The file that llama.cpp's converter makes from a case (qwen35.md, section 9), in f32.
struct Converter {
    keys: usize,   // delta-net key heads
    values: usize, // value heads
    key_dim: usize,
    value_dim: usize,
    hidden: usize,
    layers: usize,
}

impl Converter {
    fn new(config: &Value) -> Self {
        let size = |name: &str| config[name].as_u64().expect(name) as usize;
        Self {
            keys: size("linear_num_key_heads"),
            values: size("linear_num_value_heads"),
            key_dim: size("linear_key_head_dim"),
            value_dim: size("linear_value_head_dim"),
            hidden: size("hidden_size"),
            layers: size("num_hidden_layers"),
        }
    }

    fn metadata(&self, config: &Value) -> GgufFile {
        let size = |name: &str| u32_value(config[name].as_u64().expect(name) as usize);
        let moe = config["model_type"] == "qwen3_5_moe_text";
        let architecture = if moe { "qwen35moe" } else { "qwen35" };
        let key = |name: &str| format!("{architecture}.{name}");
        let rope = &config["rope_parameters"];
        let head_dim = config["head_dim"].as_u64().expect("head_dim") as usize;
        let rotary = head_dim as f64 * rope["partial_rotary_factor"].as_f64().expect("a factor");
        let interval = config["full_attention_interval"].as_u64().unwrap_or(4) as usize;
        let mut file = GgufFile::new()
            .key("general.architecture", str_value(architecture))
            .key(key("block_count"), u32_value(self.layers + 1))
            .key(key("nextn_predict_layers"), u32_value(1))
            .key(key("context_length"), size("max_position_embeddings"))
            .key(key("embedding_length"), size("hidden_size"))
            .key(key("attention.head_count"), size("num_attention_heads"))
            .key(key("attention.head_count_kv"), size("num_key_value_heads"))
            .key(key("attention.key_length"), size("head_dim"))
            .key(key("attention.value_length"), size("head_dim"))
            .key(key("attention.layer_norm_rms_epsilon"), f32_value(1e-6))
            .key(key("rope.freq_base"), f32_value(rope["rope_theta"].as_f64().expect("a base")))
            .key(key("rope.dimension_count"), u32_value(rotary as usize))
            .key(key("ssm.conv_kernel"), size("linear_conv_kernel_dim"))
            .key(key("ssm.state_size"), u32_value(self.key_dim))
            .key(key("ssm.group_count"), u32_value(self.keys))
            .key(key("ssm.time_step_rank"), u32_value(self.values))
            .key(key("ssm.inner_size"), u32_value(self.values * self.value_dim))
            .key(key("full_attention_interval"), u32_value(interval));
        let sizes: &[(&str, &str)] = match moe {
            false => &[("feed_forward_length", "intermediate_size")],
            true => &[
                ("expert_count", "num_experts"),
                ("expert_used_count", "num_experts_per_tok"),
                ("expert_feed_forward_length", "moe_intermediate_size"),
                ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
            ],
        };
        for (name, of) in sizes {
            file = file.key(key(name), size(of));
        }
        file
    }

    fn tensors(&self, mut file: GgufFile, mut tensors: Tensors) -> GgufFile {
        stack_experts(&mut tensors);
        for (name, (shape, mut numbers)) in tensors {
            let own = ["model.language_model.", "model."].into_iter().find_map(|prefix| name.strip_prefix(prefix));
            let (block, rest) = match (own.unwrap_or(&name).strip_prefix("layers."), name.strip_prefix("mtp.layers.0."))
            {
                (Some(layer), _) => layer.split_once('.').expect("a layer"),
                (None, Some(rest)) => (&*self.layers.to_string().leak(), rest),
                (None, None) => ("", own.unwrap_or(&name)),
            };
            if rest.ends_with("norm.weight") && rest != "linear_attn.norm.weight" || rest.contains("mtp.pre_fc_norm") {
                numbers.iter_mut().for_each(|x| *x += 1.0);
            }
            let block_name = |name: &str| format!("blk.{block}.{name}");
            let head = format!("blk.{}.nextn", self.layers);
            let (to, shape, numbers) = match rest {
                _ if rest.starts_with("visual.") => continue,
                "embed_tokens.weight" => ("token_embd.weight".into(), shape, numbers),
                "norm.weight" => ("output_norm.weight".into(), shape, numbers),
                "lm_head.weight" => ("output.weight".into(), shape, numbers),
                "mtp.fc.weight" => (format!("{head}.eh_proj.weight"), shape, numbers),
                "mtp.pre_fc_norm_embedding.weight" => (format!("{head}.enorm.weight"), shape, numbers),
                "mtp.pre_fc_norm_hidden.weight" => (format!("{head}.hnorm.weight"), shape, numbers),
                "mtp.norm.weight" => (format!("{head}.shared_head_norm.weight"), shape, numbers),
                "mlp.shared_expert_gate.weight" => (block_name("ffn_gate_inp_shexp.weight"), vec![shape[1]], numbers),
                "mlp.experts.gate_up_proj" => {
                    let [experts, rows, hidden] = shape[..] else { panic!("{shape:?}") };
                    let half = |first: usize| -> Vec<f32> {
                        let experts = numbers.chunks_exact(rows * hidden);
                        experts.flat_map(|e| &e[first * hidden..(first + rows / 2) * hidden]).copied().collect()
                    };
                    let shape = [experts, rows / 2, hidden];
                    file = file.floats(&block_name("ffn_gate_exps.weight"), &shape, &half(0)).floats(
                        &block_name("ffn_up_exps.weight"),
                        &shape,
                        &half(rows / 2),
                    );
                    continue;
                }
                "linear_attn.A_log" => {
                    let rates: Vec<f32> = numbers.iter().map(|x| -x.exp()).collect();
                    (block_name("ssm_a"), shape, tiled(&rates, 1, self.keys))
                }
                "linear_attn.dt_bias" => (block_name("ssm_dt.bias"), shape, tiled(&numbers, 1, self.keys)),
                "linear_attn.in_proj_a.weight" => {
                    (block_name("ssm_alpha.weight"), shape, tiled(&numbers, self.hidden, self.keys))
                }
                "linear_attn.in_proj_b.weight" => {
                    (block_name("ssm_beta.weight"), shape, tiled(&numbers, self.hidden, self.keys))
                }
                "linear_attn.in_proj_z.weight" => {
                    (block_name("attn_gate.weight"), shape, tiled(&numbers, self.value_dim * self.hidden, self.keys))
                }
                "linear_attn.in_proj_qkv.weight" => {
                    (block_name("attn_qkv.weight"), shape, self.values_behind_keys(&numbers, self.hidden))
                }
                "linear_attn.conv1d.weight" => {
                    let (channels, taps) = (shape[0], shape[2]);
                    (block_name("ssm_conv1d.weight"), vec![channels, taps], self.values_behind_keys(&numbers, taps))
                }
                "linear_attn.out_proj.weight" => {
                    let columns = |row: &[f32]| tiled(row, self.value_dim, self.keys);
                    let numbers = numbers.chunks_exact(self.values * self.value_dim).flat_map(columns).collect();
                    (block_name("ssm_out.weight"), shape, numbers)
                }
                other => {
                    let (_, to) = LAYER.iter().find(|(from, _)| *from == other).unwrap_or_else(|| panic!("{other}"));
                    (block_name(to), shape, numbers)
                }
            };
            file = file.floats(&to, &shape, &numbers);
        }
        file
    }

    /// Queries and keys unchanged, then the values' heads interleaved.
    fn values_behind_keys(&self, numbers: &[f32], width: usize) -> Vec<f32> {
        let (keys, values) = numbers.split_at(2 * self.keys * self.key_dim * width);
        [keys, &tiled(values, self.value_dim * width, self.keys)].concat()
    }
}

/// Joins the tensors of single experts.
fn stack_experts(tensors: &mut Tensors) {
    let apart: Vec<String> = tensors.keys().filter(|name| name.contains(".experts.0.")).cloned().collect();
    for first in apart.iter().filter(|name| !name.contains(".up_proj.")) {
        let (before, part) = first.split_once("0.").and_then(|_| first.split_once(".experts.0.")).expect("an expert");
        let (mut all, mut count, mut shape) = (Vec::new(), 0, Vec::new());
        while let Some((own, numbers)) = tensors.remove(&format!("{before}.experts.{count}.{part}")) {
            all.extend(numbers);
            shape = own;
            if part == "gate_proj.weight" {
                all.extend(tensors.remove(&format!("{before}.experts.{count}.up_proj.weight")).expect("up").1);
            }
            count += 1;
        }
        let rows = all.len() / count / shape[1];
        let to = if part == "gate_proj.weight" { "gate_up_proj" } else { "down_proj" };
        tensors.insert(format!("{before}.experts.{to}"), (vec![count, rows, shape[1]], all));
    }
}

fn converted(case: &Case) -> GgufFile {
    let config = config(case);
    let converter = Converter::new(&config);
    converter.tensors(converter.metadata(&config), tensors(&case.path.join("target")))
}

fn load(file: &GgufFile, folder: &Path) -> foretoken::Result<Target> {
    let path = folder.join("model.gguf");
    std::fs::write(&path, file.bytes()).expect("a file");
    Target::load(&Checkpoint::open(&path)?, Isa::best())
}

/// The trunk's states over the prompt, and its logits, which are checked.
fn computes_the_logits(case: &Case, target: &Target) -> Vec<f32> {
    let options = KvOptions { key: ElementType::F32.into(), value: ElementType::F32.into(), ..KvOptions::default() };
    let pool = PagePool::new(None);
    let mut state = target.new_state(&options, &pool).expect("a state");
    let ids = case.ids("input_ids");
    let round = state.begin_round(ids.len()).expect("a round");
    let output = target.forward_one(&ids, round, OutputRows::All, ids.len()).expect("a pass");
    let (logits, hidden) = (values(&output.logits), values(&output.hidden));
    let error = max_difference(&logits, &case.floats("logits"));
    assert!(error <= case.tolerances().0, "{}: logits {error}", case.name);
    hidden
}

/// Logits, and the head's states, over the prompt.
fn computes_the_references(case: &Case, target: &Target) {
    let hidden = computes_the_logits(case, target);
    let (ids, of_hidden) = (case.ids("input_ids"), case.tolerances().1);
    let options = KvOptions { key: ElementType::F32.into(), value: ElementType::F32.into(), ..KvOptions::default() };
    let pool = PagePool::new(None);
    let mut cache = target.nextn_cache(&options, &pool).expect("a cache");
    let rows = ids.len() - 1;
    let states = tensor(hidden[..rows * target.hidden_size()].to_vec(), (rows, target.hidden_size())).expect("states");
    let mut batch = Batch::of(&ids[1..], cache.begin_round(rows).expect("a round")).expect("a batch");
    let read = target.nextn_rows(&mut batch, &states).expect("a pass");
    let error = max_difference(&values(&read), &case.floats("nextn_hidden"));
    assert!(error <= of_hidden, "{}: the head's states {error}", case.name);
}

#[test]
fn a_gguf_file_computes_what_the_safetensors_do() {
    let folder = tempfile::tempdir().expect("a folder");
    for case in shipped() {
        computes_the_references(&case, &load(&converted(&case), folder.path()).expect(&case.name));
    }
}

/// The converter's file computes the same, and its tensors are those of the file above, bit for bit.
#[test]
fn checkpoints_are_converted() {
    let folder = tempfile::tempdir().expect("a folder");
    for case in shipped() {
        let (path, other) = (folder.path().join("converted.gguf"), folder.path().join("model.gguf"));
        let source = Checkpoint::open(case.path.join("target")).expect("a directory");
        to_gguf(&source, &path, &ToGgufOptions { outtype: Outtype::F32, ..ToGgufOptions::default() })
            .expect(&case.name);
        let gguf = Checkpoint::open(&path).expect("a file");
        computes_the_references(&case, &Target::load(&gguf, Isa::best()).expect(&case.name));
        std::fs::write(&other, converted(&case).bytes()).expect("a file");
        let other = Checkpoint::open(&other).expect("a file");
        let names = |checkpoint: &Checkpoint| BTreeSet::from_iter(checkpoint.names());
        assert_eq!(names(&gguf), names(&other), "{}", case.name);
        for name in other.names() {
            let get = |checkpoint: &Checkpoint| checkpoint.get(&name).expect(&name).expect(&name);
            let (got, want) = (get(&gguf), get(&other));
            assert_eq!((got.dtype, &got.shape), (want.dtype, &want.shape), "{}: {name}", case.name);
            assert!(got.bytes.as_slice() == want.bytes.as_slice(), "{}: {name} differs", case.name);
        }
    }
}

/// From a directory to a GGUF file and back: the values are the same, and the configuration is the file's. Norms and
/// rates, which the file stores in another form, as far as `f32` represents both.
#[test]
fn there_and_back_the_tensors_are_the_same() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo-qwen");
    let sources: Vec<PathBuf> = shipped().iter().map(|case| case.path.join("target")).chain([demo]).collect();
    assert!(sources.len() >= 4, "{}", sources.len());
    for source in &sources {
        let folder = tempfile::tempdir().expect("a folder");
        let (file, again) = (folder.path().join("model.gguf"), folder.path().join("again"));
        let open = |path: &Path| Checkpoint::open(path).unwrap_or_else(|e| panic!("{e}"));
        let to_file = ToGgufOptions { outtype: Outtype::F32, ..ToGgufOptions::default() };
        to_gguf(&open(source), &file, &to_file).unwrap_or_else(|e| panic!("{}: {e}", source.display()));
        let back = to_hugging_face(&open(&file), &again, &ToHuggingFaceOptions::default());
        back.unwrap_or_else(|e| panic!("{}: {e}", source.display()));

        let load = |path: &Path| Target::load(&open(path), Isa::best()).expect("a target");
        let tensor_layout = TensorLayout::HuggingFace;
        let want = TextConfig { tensor_layout, ..load(&file).config().clone() };
        assert_eq!(&want, load(&again).config(), "{}", source.display());
        let mut want = tensors(source);
        stack_experts(&mut want);
        want.retain(|name, _| !name.starts_with("model.visual."));
        let got = tensors(&again);
        let plain = |name: &String| name.replace("model.language_model.", "model.");
        assert!(want.keys().map(plain).eq(got.keys().cloned()), "{}", source.display());
        for (name, (shape, numbers)) in &want {
            let (own_shape, own) = &got[&plain(name)];
            assert_eq!(shape, own_shape, "{}: {name}", source.display());
            let is_norm = name.ends_with("norm.weight") || name.contains(".pre_fc_norm_");
            let is_changed = is_norm && !name.ends_with("linear_attn.norm.weight");
            let allowed = if is_changed { 0.5f32.powi(24) } else { 0.0 };
            let allowed = if name.ends_with(".A_log") { 1e-6 } else { allowed };
            let error = max_difference(own, numbers);
            assert!(error <= allowed, "{}: {name} differs by {error}", source.display());
        }
    }
}

#[test]
fn block_counts_with_and_without_the_head_are_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let case = &shipped()[0];
    let with = |count: usize| {
        let mut file = converted(case);
        let key = file.keys.iter_mut().find(|(key, _)| key.ends_with(b".block_count")).expect("the key");
        key.1 = u32_value(count);
        file
    };
    let refused = |file: &GgufFile, why: &str| {
        let message = load(file, folder.path()).expect_err("a refusal").to_string();
        assert!(message.contains(why) && !message.contains('\n'), "{message}");
    };
    computes_the_references(case, &load(&with(4), folder.path()).expect("a head after the blocks"));
    refused(&with(6), "block_count: is 6, but the NextN head is block 4");
    refused(&with(0), "block_count: is 0");

    let without = |part: &'static str| {
        let mut file = converted(case);
        let has = |name: &[u8]| String::from_utf8_lossy(name).contains(part);
        file.tensors.retain(|tensor| !has(&tensor.name));
        file
    };
    refused(&without("eh_proj"), "mtp.fc.weight: is missing (here blk.4.nextn.eh_proj.weight)");
    refused(
        &without("blk.4.attn_q.weight"),
        "mtp.layers.0.self_attn.q_proj.weight: is missing (here blk.4.attn_q.weight)",
    );
    refused(&without("blk.0."), "there is no block 0");
    refused(&without("blk.0."), "contains only a NextN head, or is incomplete; use the model's file");
    // A head alone, whatever its number and the number of blocks are.
    for (blocks, head) in [(5, 4), (1, 4), (1, 0), (2, 0)] {
        let mut file = with(blocks);
        file.tensors.retain(|tensor| !(0..4).any(|i| tensor.name.starts_with(format!("blk.{i}.").as_bytes())));
        for tensor in &mut file.tensors {
            let name = String::from_utf8(tensor.name.clone()).expect("a name");
            tensor.name = name.replace("blk.4.", &format!("blk.{head}.")).into();
        }
        refused(&file, &format!("block_count: is {blocks}, but there is no block 0 before the NextN head"));
    }
    let mut empty = with(1);
    empty.tensors.retain(|tensor| !tensor.name.starts_with(b"blk."));
    refused(&empty, "block_count: is 1, but there is no block 0");
    assert!(!load(&without("blk.4."), folder.path()).expect("a trunk alone").has_nextn());
    // The head is not counted, and not there.
    let mut trunk = with(4);
    trunk.tensors.retain(|tensor| !tensor.name.starts_with(b"blk.4."));
    assert!(!load(&trunk, folder.path()).expect("a trunk alone").has_nextn());
}

#[test]
fn the_width_of_a_value_head_is_limited() {
    let folder = tempfile::tempdir().expect("a folder");
    let case = &shipped()[0];
    let mut file = converted(case);
    let heads = config(case)["linear_num_value_heads"].as_u64().expect("a number") as usize;
    let key = file.keys.iter_mut().find(|(key, _)| key.ends_with(b".ssm.inner_size")).expect("the key");
    key.1 = u32_value(heads * 8193);
    let message = load(&file, folder.path()).expect_err("a refusal").to_string();
    assert!(message.contains(&format!("ssm.inner_size: is {}, must be at most", heads * 8193)), "{message}");
}

/// Output of other converters: Ollama's blobs with towers and shorter names, rates that are not
/// negated, heads in another order.
#[test]
fn files_of_other_converters_are_read_or_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let case = &shipped()[0];
    let mut file = converted(case).floats("v.blk.0.attn_q.weight", &[2, 2], &[0.0; 4]);
    file = file.floats("mm.0.weight", &[2, 2], &[0.0; 4]);
    for tensor in &mut file.tensors {
        let name = String::from_utf8(tensor.name.clone()).expect("a name");
        tensor.name = name.replace("ssm_dt.bias", "ssm_dt").into();
    }
    computes_the_references(case, &load(&file, folder.path()).expect("a blob"));
    for case in shipped() {
        has_a_head_that_is_not_read(&case, folder.path());
    }

    let refused = |file: GgufFile, about: [&str; 2]| {
        let message = load(&file, folder.path()).expect_err("a refusal").to_string();
        assert!(about.iter().all(|part| message.contains(part)) && !message.contains('\n'), "{message}");
    };
    refused(
        converted(case).key("qwen35.ssm.v_head_reordered", bool_value(false)),
        ["ssm.v_head_reordered", "llama.cpp's order"],
    );
    let mut file = converted(case);
    let rates = file.tensors.iter_mut().find(|tensor| tensor.name.ends_with(b"ssm_a")).expect("rates");
    rates.bytes =
        rates.bytes.as_chunks::<4>().0.iter().flat_map(|x| f32::from_le_bytes(*x).abs().to_le_bytes()).collect();
    refused(file, ["A_log", "is above 0"]);
}

/// Ollama's blobs have the head's tensors under names of their own, experts apart, outside the blocks.
fn has_a_head_that_is_not_read(case: &Case, folder: &Path) {
    let mut file = converted(case);
    let block = Converter::new(&config(case)).layers;
    let key = file.keys.iter_mut().find(|(key, _)| key.ends_with(b".block_count")).expect("the key");
    key.1 = u32_value(block);
    let of_block = format!("blk.{block}.");
    let moved = |name: &str| match name.strip_prefix(&of_block) {
        Some("nextn.eh_proj.weight") => Some("mtp.fc.weight".to_owned()),
        Some("nextn.enorm.weight") => Some("mtp.pre_fc_norm_embedding.weight".to_owned()),
        Some("nextn.hnorm.weight") => Some("mtp.pre_fc_norm_hidden.weight".to_owned()),
        Some("nextn.shared_head_norm.weight") => Some("mtp.norm.weight".to_owned()),
        Some(rest) => Some(format!("mtp.layers.0.{rest}")),
        None => None,
    };
    for tensor in &mut file.tensors {
        let name = String::from_utf8(tensor.name.clone()).expect("a name");
        tensor.name = moved(&name).unwrap_or(name).into();
    }
    file = file.floats("mtp.layers.0.mlp.experts.0.gate_proj.weight", &[2, 2], &[0.0; 4]);
    let target = load(&file, folder).expect("a blob with a head");
    assert!(!target.has_nextn(), "{}", case.name);
    computes_the_logits(case, &target);
    let checkpoint = Checkpoint::open(folder.join("model.gguf")).expect("a blob");
    let facts = target_facts(&checkpoint).expect("facts");
    assert!(matches!(facts.own_drafter, OwnDrafter::NoHead), "{}", case.name);
    assert_eq!(facts.has_experts, config(case)["model_type"] == "qwen3_5_moe_text", "{}", case.name);
    let findings = verify(&VerifyOptions { target: Some(folder.join("model.gguf")), ..VerifyOptions::default() });
    assert!(findings.iter().all(|finding| finding.outcome != Outcome::Failed), "{}: {findings:?}", case.name);
}

/// A head's own embedding and output head, which some converters write: copies of the trunk's, or others.
#[test]
fn a_head_drafts_with_its_own_tables() {
    // Models that are compared keep their files mapped.
    let load = |file: &GgufFile| load(file, tempfile::tempdir().expect("a folder").path());
    for case in shipped() {
        let file = converted(&case);
        let of = |name: &str| file.tensors.iter().find(|tensor| tensor.name == name.as_bytes()).cloned();
        let embedding = of("token_embd.weight").expect("an embedding");
        let output = of("output.weight").unwrap_or_else(|| embedding.clone());
        let names = file.tensors.iter().map(|tensor| String::from_utf8(tensor.name.clone()).expect("a name"));
        let head = names.filter_map(|name| Some(name.split_once(".nextn.")?.0.to_owned())).next().expect("a head");
        let with = |name: &str, table: &Written, bytes: Vec<u8>| {
            let mut file = file.clone();
            file.tensors.push(Written { name: format!("{head}.nextn.{name}.weight").into(), bytes, ..table.clone() });
            file
        };
        let (width, vocab) = (embedding.shape[1] as usize, embedding.shape[0] as usize);
        let plain = load(&file).expect(&case.name);
        let ids = &case.ids("input_ids")[1..];
        let states: Vec<f32> = (0..ids.len() * width).map(|i| (i % 17) as f32 / 8.0 - 1.0).collect();
        let rows = |target: &Target, ids: &[u32]| {
            let pool = PagePool::new(None);
            let mut cache = target.nextn_cache(&KvOptions::default(), &pool).expect("a cache");
            let states = tensor(states.clone(), (ids.len(), width)).expect("states");
            let mut batch = Batch::of(ids, cache.begin_round(ids.len()).expect("a round")).expect("a batch");
            target.nextn_rows(&mut batch, &states).expect("a pass")
        };
        let state = tensor(states[..width].to_vec(), (1, width)).expect("a state");
        let scores = |target: &Target| values(&target.nextn_logits(&state).expect("scores"));
        let trunks = |target: &Target| values(&target.logits(&state).expect("logits"));

        for (name, table) in [("embed_tokens", &embedding), ("shared_head_head", &output)] {
            let copy = load(&with(name, table, table.bytes.clone())).expect("a copy");
            computes_the_references(&case, &copy);
            assert_eq!((scores(&copy), values(&rows(&copy, ids))), (scores(&plain), values(&rows(&plain, ids))));
            let mut short = table.clone();
            (short.shape[0], short.bytes) = (1, table.bytes[..4 * width].to_vec());
            let message = load(&with(name, &short, short.bytes.clone())).expect_err("a refusal");
            assert!(message.to_string().contains("has shape [1,"), "{}: {message}", case.name);
        }
        // Row `i` is the trunk's row `i + 1`.
        let turned = [&embedding.bytes[4 * width..], &embedding.bytes[..4 * width]].concat();
        let own = load(&with("embed_tokens", &embedding, turned)).expect("an embedding");
        let next: Vec<u32> = ids.iter().map(|id| (id + 1) % vocab as u32).collect();
        assert_eq!(values(&rows(&own, ids)), values(&rows(&plain, &next)), "{}", case.name);
        assert_eq!((scores(&own), trunks(&own)), (scores(&plain), trunks(&plain)), "{}", case.name);
        // In a directory, config.json says so.
        let folder = tempfile::tempdir().expect("a folder");
        let (path, again) = (folder.path().join("model.gguf"), folder.path().join("again"));
        std::fs::write(&path, with("embed_tokens", &embedding, embedding.bytes.clone()).bytes()).expect("a file");
        let source = Checkpoint::open(&path).expect("a file");
        to_hugging_face(&source, &again, &ToHuggingFaceOptions::default()).expect("a directory");
        let again = Target::load(&Checkpoint::open(&again).expect("a directory"), Isa::best()).expect("a target");
        assert!(again.config().mtp_use_dedicated_embeddings && again.has_nextn(), "{}", case.name);
        // Twice the trunk's.
        let twice = output.bytes.as_chunks::<4>().0.iter();
        let twice = twice.flat_map(|x| (2.0 * f32::from_le_bytes(*x)).to_le_bytes()).collect();
        let own = load(&with("shared_head_head", &output, twice)).expect("an output head");
        let doubled: Vec<f32> = scores(&plain).iter().map(|x| 2.0 * x).collect();
        assert_eq!((scores(&own), trunks(&own)), (doubled, trunks(&plain)), "{}", case.name);
        computes_the_references(&case, &own);
    }
}

/// MLX transposes convolutions, and adds 1 to norms that are zero-centred.
#[test]
fn mlx_checkpoints_are_refused_by_name() {
    for case in shipped() {
        let folder = directory(&case, |_| true, |_| ());
        let path = folder.path().join("model.safetensors");
        let bytes = std::fs::read(&path).expect("the tensors");
        let file = SafeTensors::deserialize(&bytes).expect("safetensors");
        let mut tensors = file.tensors();
        for (_, view) in tensors.iter_mut().filter(|(name, _)| name.ends_with("conv1d.weight")) {
            let mut shape = view.shape().to_vec();
            shape.swap(1, 2);
            *view = TensorView::new(view.dtype(), shape, view.data()).expect("a tensor");
        }
        write(tensors, &path);
        let error =
            Target::load(&Checkpoint::open(folder.path()).expect("a directory"), Isa::best()).expect_err("a refusal");
        assert!(error.to_string().contains("an MLX checkpoint"), "{}: {error}", case.name);
    }
}

#[test]
fn other_architectures_in_gguf_are_refused_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    for (architecture, name) in [
        ("qwen3next", "Qwen3-Next"),
        ("qwen3vl", "Qwen3-VL"),
        ("qwen3vlmoe", "Qwen3-VL"),
        ("qwen3moe", "Qwen3 ("),
        ("qwen2", "Qwen2"),
        ("qwen2vl", "Qwen2"),
    ] {
        let mut file = converted(&shipped()[0]);
        let key = file.keys.iter_mut().find(|(key, _)| key.ends_with(b"architecture")).expect("the key");
        key.1 = str_value(architecture);
        let message = load(&file, folder.path()).expect_err("a refusal").to_string();
        for part in ["general.architecture", architecture, name, "Qwen3.5"] {
            assert!(message.contains(part) && !message.contains('\n'), "{architecture}: {message}");
        }
    }
}

/// A tokenizer.json, and the same as metadata, give transformers' ids.
#[test]
fn the_tokenizer_is_qwens() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/qwen35_tokenizer");
    let read = |name: &str| std::fs::read_to_string(path.join(name)).expect(name);
    let file: Value = serde_json::from_str(&read("tokenizer.json")).expect("JSON");
    let expected: Value = serde_json::from_str(&read("expected.json")).expect("JSON");

    let mut tokens: Vec<(u64, String, usize)> = Vec::new();
    for (token, id) in file["model"]["vocab"].as_object().expect("a vocabulary") {
        tokens.push((id.as_u64().expect("an id"), token.clone(), 1));
    }
    for added in file["added_tokens"].as_array().expect("added tokens") {
        tokens.push((added["id"].as_u64().expect("an id"), added["content"].as_str().expect("a token").into(), 3));
    }
    tokens.sort();
    let merges = file["model"]["merges"].as_array().expect("merges").iter().map(|pair| match pair {
        Value::String(joined) => joined.clone(),
        pair => format!("{} {}", pair[0].as_str().expect("left"), pair[1].as_str().expect("right")),
    });
    let kinds: Vec<_> = tokens.iter().map(|(_, _, kind)| u32_value(*kind)).collect();
    let gguf = |pre: &str, kinds: &[gguf_writer::Raw]| {
        let file = GgufFile::new()
            .key("tokenizer.ggml.model", str_value("gpt2"))
            .key("tokenizer.ggml.pre", str_value(pre))
            .key("tokenizer.ggml.tokens", strings(tokens.iter().map(|(_, token, _)| token)))
            .key("tokenizer.ggml.token_type", array(kinds))
            .key("tokenizer.ggml.merges", strings(merges.clone()));
        gguf::tokenizer(&Gguf::from_bytes(file.bytes()).expect("a file"))
    };
    let own = gguf("qwen35", &kinds).expect("a tokenizer").expect("one");
    let of_metadata = Tokenizer::new(own, &path, 1000).expect("a tokenizer");
    let of_file = Tokenizer::read(path.join("tokenizer.json"), 1000).expect("a tokenizer");
    for case in expected.as_array().expect("cases") {
        let text = case["text"].as_str().expect("a text");
        let want: Vec<u32> = serde_json::from_value(case["ids"].clone()).expect("ids");
        for tokenizer in [&of_file, &of_metadata] {
            assert_eq!(tokenizer.encode(text).expect("ids"), want, "{text:?}");
            let decoded = tokenizer.decode(&want).expect("text");
            assert!(!text.is_ascii() || text.contains("<|") || decoded == text, "{decoded:?} is not {text:?}");
        }
    }
    // Bytes of line ends and spaces are spelled differently.
    assert!(of_file.ids_with("\n").contains(&198) && of_file.ids_with(" ").contains(&220));
    // Control tokens of another type are still one id each, and no text.
    let turn = "<|im_start|>user\nHi<|im_end|>";
    for other in [0, 1, 4, 5] {
        let kinds = tokens.iter().map(|(_, _, kind)| u32_value(if *kind == 3 { other } else { 1 }));
        let own = gguf("qwen35", &kinds.collect::<Vec<_>>()).expect("a tokenizer").expect("one");
        let own = Tokenizer::new(own, &path, 1000).expect("a tokenizer");
        let ids = own.encode(turn).expect("ids");
        assert_eq!(ids, of_file.encode(turn).expect("ids"), "type {other}");
        assert_eq!(own.decode(&ids).expect("text"), "user\nHi", "type {other}");
    }
    let message = gguf("qwen2", &kinds).expect_err("a refusal").to_string();
    assert!(message.contains("tokenizer.ggml.pre") && message.contains("qwen2"), "{message}");
}

/// Writes safetensors: of a list, because every type of an iterator would be another instance of the writer.
fn write(tensors: Vec<(String, TensorView<'_>)>, path: &Path) {
    serialize_to_file(tensors, None, path).expect("the tensors");
}

/// A directory with the case's tensors, except those that `keep` rejects, and a changed config.json.
fn directory(case: &Case, keep: impl Fn(&str) -> bool, change: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let text = std::fs::read_to_string(case.path.join("target/config.json")).expect("config.json");
    let mut config: Value = serde_json::from_str(&text).expect("JSON");
    change(&mut config);
    std::fs::write(folder.path().join("config.json"), config.to_string()).expect("config.json");
    let bytes = std::fs::read(case.path.join("target/model.safetensors")).expect("the tensors");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let mut kept = file.tensors();
    kept.retain(|(name, _)| keep(name));
    write(kept, &folder.path().join("model.safetensors"));
    folder
}

#[test]
fn other_models_and_fields_are_refused_by_name() {
    let case = &shipped()[0];
    let refused = |change: Value, why: &[&str]| {
        let folder = directory(
            case,
            |_| true,
            |config| {
                let fields = config.as_object_mut().expect("an object");
                fields.extend(change.as_object().expect("an object").clone());
            },
        );
        let message = Engine::load(&EngineOptions::new(folder.path())).expect_err("a refusal").to_string();
        assert!(why.iter().all(|why| message.contains(why)) && !message.contains('\n'), "{message}");
    };
    refused(json!({"model_type": "qwen3_next"}), &["model_type", "Qwen3-Next", "Qwen3.5"]);
    refused(json!({"model_type": "qwen3_vl"}), &["Qwen3-VL"]);
    refused(json!({"model_type": "qwen2"}), &["Qwen2"]);
    refused(json!({"model_type": "qwen2_5_vl"}), &["Qwen2"]);
    refused(json!({"model_type": "qwen3_moe"}), &["Qwen3 ("]);
    refused(json!({"hidden_act": "gelu"}), &["hidden_act", "silu"]);
    refused(json!({"attn_output_gate": false}), &["attn_output_gate"]);
    refused(json!({"attention_bias": true}), &["attention_bias"]);
    refused(json!({"output_gate_type": "sigmoid"}), &["output_gate_type", "sigmoid", "silu"]);
    refused(json!({"model_type": "qwen3_5_moe_text", "norm_topk_prob": false}), &["norm_topk_prob"]);
    refused(json!({"mtp_num_hidden_layers": 2}), &["mtp_num_hidden_layers"]);
    refused(json!({"layer_types": ["linear_attention"]}), &["layer_types", "4 layers"]);
    refused(json!({"layer_types": vec!["sliding_attention"; 4]}), &["layer_types", "sliding_attention"]);
    refused(json!({"linear_num_key_heads": 4}), &["linear_num_key_heads", "6 value heads"]);
    refused(json!({"rope_parameters": {"rope_type": "yarn"}}), &["rope_type", "yarn", "the published config.json"]);
    refused(json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}), &["rope_scaling.type", "yarn"]);
    refused(json!({"rope_scaling": {"rope_theta": 5e3}}), &["rope_scaling", "rope_parameters", "rope_theta"]);
    refused(json!({"num_hidden_layers": 1_000_000, "layer_types": null}), &["num_hidden_layers"]);
    refused(json!({"linear_value_head_dim": 8192}), &["has shape"]);
    refused(json!({"vocab_size": 193}), &["embed_tokens.weight", "has shape"]);
}

/// Q, K and V of attention layers in one tensor, as llama.cpp's converter writes with `--fuse-qkv`.
#[test]
fn fused_projections_are_their_rows() {
    let folder = tempfile::tempdir().expect("a folder");
    for case in shipped() {
        let mut file = converted(&case);
        let mut fused = 0;
        for block in 0..=Converter::new(&config(&case)).layers {
            let of = |part: &str| format!("blk.{block}.attn_{part}.weight").into_bytes();
            let at = |part: &str| file.tensors.iter().find(|tensor| tensor.name == of(part)).cloned();
            let [Some(mut all), Some(k), Some(v)] = ["q", "k", "v"].map(at) else { continue };
            all.name = of("qkv");
            all.shape[0] += k.shape[0] + v.shape[0];
            all.bytes = [all.bytes, k.bytes, v.bytes].concat();
            file.tensors.retain(|tensor| !["q", "k", "v"].map(of).contains(&tensor.name));
            file.tensors.push(all);
            fused += 1;
        }
        assert!(fused >= 2, "{}: {fused} layers", case.name);
        computes_the_references(&case, &load(&file, folder.path()).expect(&case.name));
    }
}

/// The tensors of separate experts are listed up to the first that is missing, whatever number is claimed.
#[test]
fn claimed_numbers_of_experts_are_not_listed() {
    let is_moe = |case: &Case| config(case)["model_type"] == "qwen3_5_moe_text";
    let case = &shipped().into_iter().find(is_moe).expect("a mixture of experts");
    let folder = directory(
        case,
        |name| !name.contains(".experts.") || name.contains(".experts.0."),
        |config| {
            let text = if config.get("text_config").is_some() { &mut config["text_config"] } else { config };
            text["num_experts"] = json!(1_000_000);
        },
    );
    let opened = Checkpoint::open(folder.path()).expect("a directory");
    let message = Target::load(&opened, Isa::best()).expect_err("a refusal").to_string();
    assert!(message.contains("layers.0.mlp.experts.gate_up_proj: is missing"), "{message}");
    let findings = verify(&VerifyOptions { target: Some(folder.path().to_owned()), ..VerifyOptions::default() });
    assert!(findings.len() < 100, "{} findings", findings.len());
    let mut file = converted(case);
    file.tensors.retain(|tensor| !String::from_utf8_lossy(&tensor.name).contains("_exps."));
    let key = file.keys.iter_mut().find(|(key, _)| key.ends_with(b".expert_count")).expect("the key");
    key.1 = u32_value(1_000_000);
    let message = load(&file, folder.path()).expect_err("a refusal").to_string();
    assert!(message.contains("is missing (here blk.0.ffn_gate_up_exps.weight)"), "{message}");
}

#[test]
fn checkpoints_load_with_and_without_a_head() {
    let case = &shipped()[0];
    let no_change = |_: &mut Value| {};
    // The key without tensors: the model runs without a head.
    let folder = directory(case, |name| !name.starts_with("mtp."), no_change);
    let engine = Engine::load(&EngineOptions::new(folder.path())).expect("a trunk alone");
    assert!(!engine.has_mtp());
    // Tensors without the key.
    let without_key = |config: &mut Value| {
        config.as_object_mut().expect("an object").remove("mtp_num_hidden_layers");
    };
    let folder = directory(case, |_| true, without_key);
    assert!(Engine::load(&EngineOptions::new(folder.path())).expect("a head").has_mtp());
    // Everything inside another model.
    let folder = directory(case, |_| true, no_change);
    let path = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&path).expect("the tensors");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    for (trunk, around) in
        [("language_model.model.", "language_model."), ("model.language_model.", "model.language_model.")]
    {
        let nested =
            |name: String| match ["model.language_model.", "model."].iter().find_map(|own| name.strip_prefix(own)) {
                Some(own) => format!("{trunk}{own}"),
                None => format!("{around}{name}"),
            };
        write(file.tensors().into_iter().map(|(name, tensor)| (nested(name), tensor)).collect(), &path);
        assert!(Engine::load(&EngineOptions::new(folder.path())).expect(trunk).has_mtp());
        computes_the_references(
            case,
            &Target::load(&Checkpoint::open(folder.path()).expect("a directory"), Isa::best()).expect(trunk),
        );
    }
    // A head in a file of its own.
    let folder = directory(case, |name| !name.starts_with("mtp."), no_change);
    let head = directory(case, |name| name.starts_with("mtp."), no_change);
    std::fs::copy(head.path().join("model.safetensors"), folder.path().join("mtp.safetensors")).expect("a copy");
    assert!(Engine::load(&EngineOptions::new(folder.path())).expect("a head").has_mtp());
    for part in ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "mtp.pre_fc_norm_hidden.weight"] {
        let folder = directory(case, |name| name != part, no_change);
        let message = Engine::load(&EngineOptions::new(folder.path())).expect_err("a refusal").to_string();
        assert!(message.contains(part) && message.contains("is missing"), "{message}");
    }
    // A head with its own embedding.
    let dedicated = |config: &mut Value| config["mtp_use_dedicated_embeddings"] = json!(true);
    let folder = directory(case, |_| true, dedicated);
    let message = Engine::load(&EngineOptions::new(folder.path())).expect_err("a refusal").to_string();
    assert!(message.contains("mtp.embed_tokens.weight") && message.contains("is missing"), "{message}");
    // An assistant is Gemma 4's.
    let folder = directory(case, |_| true, no_change);
    let options = EngineOptions::new(folder.path()).with_assistant(folder.path());
    let message = Engine::load(&options).expect_err("a refusal").to_string();
    assert!(message.contains("assistant") && message.contains("qwen3_5_text"), "{message}");
}

/// A draft model drafts without its NextN head, even if the head is incomplete.
#[test]
fn the_head_of_a_draft_model_is_not_read() {
    let case = &shipped()[0];
    let target = directory(case, |_| true, |_| ());
    let draft = directory(case, |name| name != "mtp.fc.weight", |_| ());
    let options = EngineOptions { draft_model: Some(draft.path().into()), ..EngineOptions::new(target.path()) };
    let engine = Engine::load(&options).expect("a draft model");
    assert!(engine.has_mtp() && engine.draft_model().is_some());

    let path = target.path().join("model.gguf");
    for case in shipped() {
        std::fs::write(&path, converted(&case).bytes()).expect("a file");
        let options = LoadOptions { nextn: false, ..LoadOptions::from(Isa::best()) };
        let trunk = Target::load(&Checkpoint::open(&path).expect("a file"), options).expect(&case.name);
        assert!(!trunk.has_nextn(), "{}", case.name);
        computes_the_logits(&case, &trunk);
    }
}

/// The text model's fields at top level, under the outer model's name.
#[test]
fn a_flat_configuration_may_have_the_outer_name() {
    for case in shipped() {
        let flat = |fields: &mut Value| {
            *fields = config(&case);
            let name = fields["model_type"].as_str().and_then(|name| name.strip_suffix("_text")).expect("a text model");
            fields["model_type"] = json!(name);
        };
        let folder = directory(&case, |_| true, flat);
        let opened = Checkpoint::open(folder.path()).expect("a directory");
        computes_the_references(&case, &Target::load(&opened, Isa::best()).expect(&case.name));
        let empty = |fields: &mut Value| *fields = json!({"model_type": "qwen3_5"});
        let folder = directory(&case, |_| true, empty);
        let message = Engine::load(&EngineOptions::new(folder.path())).expect_err("a refusal").to_string();
        assert!(message.contains("text_config: is missing"), "{message}");
    }
}

#[test]
fn a_tensor_of_the_head_under_two_names_is_refused() {
    let folder = directory(&shipped()[0], |_| true, |_| {});
    let path = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&path).expect("the tensors");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let twin = ("model.mtp.fc.weight".to_owned(), file.tensor("mtp.fc.weight").expect("the head's"));
    write([file.tensors(), vec![twin]].concat(), &path);
    let message = Checkpoint::open(folder.path()).map(drop).expect_err("a refusal").to_string();
    assert!(message.contains("is mtp.fc.weight, which is there under another name as well"), "{message}");
}

/// A misspelt field would silently have its default.
#[test]
fn misspelt_names_are_refused() {
    fn text(config: &mut Value) -> &mut Value {
        if config.get("text_config").is_some() { &mut config["text_config"] } else { config }
    }
    fn rename(fields: &mut Value, name: &str, wrong: &str) {
        let fields = fields.as_object_mut().expect("an object");
        let value = fields.remove(name).expect("a field");
        fields.insert(wrong.into(), value);
    }
    let refused = |folder: &Path, about: [&str; 2]| {
        let config = TextConfig::of(&Checkpoint::open(folder).expect("a checkpoint"));
        let message = config.expect_err("a refusal").to_string();
        assert!(about.iter().all(|about| message.contains(about)), "{message} does not say {about:?}");
    };
    let folder = tempfile::tempdir().expect("a folder");
    for case in shipped() {
        for (name, wrong) in [
            ("rms_norm_eps", "rms_norm_epz"),
            ("rope_parameters", "rope_parameter"),
            ("max_position_embeddings", "max_positions_embeddings"),
        ] {
            let of = directory(&case, |_| true, |config| rename(text(config), name, wrong));
            refused(of.path(), [wrong, name]);
        }
        let of = directory(
            &case,
            |_| true,
            |config| rename(&mut text(config)["rope_parameters"], "rope_theta", "rope_thetb"),
        );
        refused(of.path(), ["rope_parameters.rope_thetb", "rope_theta"]);
        if case.name == "qwen35-nested" {
            let of = directory(&case, |_| true, |config| rename(config, "tie_word_embeddings", "tie_word_embedding"));
            refused(of.path(), ["tie_word_embedding:", "tie_word_embeddings"]);
        }
        let (path, mut file) = (folder.path().join("model.gguf"), converted(&case));
        let (key, _) = file.keys.iter_mut().find(|(key, _)| key.ends_with(b"nextn_predict_layers")).expect("a key");
        *key.last_mut().expect("a letter") = b'z';
        std::fs::write(&path, file.bytes()).expect("a file");
        refused(&path, ["nextn_predict_layerz", "nextn_predict_layers"]);
    }
}

/// Tensors of no dimensions, or of some and no elements, are no stack of experts.
#[test]
fn experts_matrices_without_rows_are_refused() {
    let case = cases::named("qwen35-moe");
    let folder = directory(&case, |name| !name.ends_with("layers.0.mlp.experts.down_proj"), |_| {});
    let path = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&path).expect("the tensors");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    for (shape, bytes) in [(vec![], &[0u8; 4][..]), (vec![1 << 63, 0], &[][..])] {
        let matrix = |expert: usize| {
            let matrix = TensorView::new(Dtype::F32, shape.clone(), bytes).expect("a tensor");
            (format!("model.layers.0.mlp.experts.{expert}.down_proj.weight"), matrix)
        };
        write(file.tensors().into_iter().chain((0..8).map(matrix)).collect(), &folder.path().join("new"));
        std::fs::rename(folder.path().join("new"), &path).expect("the tensors");
        let source = Checkpoint::open(folder.path()).expect("a directory");
        let result = to_gguf(&source, folder.path().join("x.gguf"), &ToGgufOptions::default());
        let (error, has) = (result.expect_err("a refusal").to_string(), format!("has shape {shape:?}"));
        assert!(error.contains("experts.0.down_proj.weight") && error.contains(&has), "{error}");
    }
}
