//! Converts Hugging Face checkpoints to GGUF like llama.cpp's converter, and back.

use std::path::Path;

use foretoken_kernels::ElementType;
use serde_json::{Value, json};

use super::config::{LayerType, TensorLayout, TextConfig};
use super::implied::implied;
use super::names::names;
use super::nextn::has_nextn;
use crate::Result;
use crate::checkpoint::convert::options::ToGgufOptions;
use crate::checkpoint::convert::plan::{Change, Description, Directory, plan, positive};
use crate::checkpoint::gguf::GgufWriter;
use crate::checkpoint::{Checkpoint, RawTensor, TensorType, is_head, is_tower};
use crate::nn::{Bytes, DeltaNetConfig};

/// Describes the GGUF file of a checkpoint.
///
/// # Errors
/// If the configuration needs something that is not implemented, or a tensor belongs to no text model.
pub(crate) fn description(source: &Checkpoint, options: &ToGgufOptions) -> Result<Description> {
    let config = TextConfig::of(source)?;
    let (prefix, layers, tied) = (source.text_prefix()?, config.layers.len(), config.tie_word_embeddings);
    let has_head = has_nextn(source);
    let names = names(has_head.then_some(layers as u32));
    let name = |own: &str| {
        let own = if is_head(own) { "lm_head.weight" } else { own.strip_prefix(prefix).unwrap_or(own) };
        if is_tower(own) {
            return Err("the vision tower is not part of a text model");
        }
        if tied && own == "lm_head.weight" {
            return Err("the embedding is the head");
        }
        Ok(names.gguf(own).into_iter().next())
    };
    let (mut planned, left_out) = plan(source, options, "Qwen3.5", name)?;
    planned.iter_mut().for_each(|tensor| tensor.change = change(&config.delta_net, &tensor.name, TensorLayout::Gguf));
    let architecture = if config.moe.is_some() { "qwen35moe" } else { "qwen35" };
    let (vocab_size, bos) = (config.vocab_size, config.bos_token_id);
    let eos = config.eos_token_ids.clone();
    let path = source.path().to_owned();
    let describe = move |file: &mut GgufWriter| describe(file, &path, architecture, &config, has_head);
    Ok(Description {
        architecture,
        vocab_size,
        bos,
        eos,
        describe: Box::new(describe),
        constants: Vec::new(),
        planned,
        left_out,
        implied: implied(source)?.tensors,
    })
}

/// Writes the configuration's keys.
fn describe(file: &mut GgufWriter, path: &Path, architecture: &str, config: &TextConfig, has_head: bool) -> Result<()> {
    let key = |name: &str| format!("{architecture}.{name}");
    let net = &config.delta_net;
    let mut sizes = vec![
        ("block_count", config.layers.len() + usize::from(has_head)),
        ("context_length", config.max_position_embeddings),
        ("embedding_length", config.hidden_size),
        ("attention.head_count", config.num_attention_heads),
        ("attention.head_count_kv", config.num_key_value_heads),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
        ("rope.dimension_count", config.rotary_dim),
        ("ssm.conv_kernel", net.conv_kernel_dim),
        ("ssm.state_size", net.key_head_dim),
        ("ssm.group_count", net.num_key_heads),
        ("ssm.time_step_rank", net.num_value_heads),
        ("ssm.inner_size", net.values()),
    ];
    if has_head {
        sizes.push(("nextn_predict_layers", 1));
    }
    match &config.moe {
        None => sizes.push(("feed_forward_length", config.intermediate_size)),
        Some(moe) => sizes.extend([
            ("expert_count", moe.num_experts),
            ("expert_used_count", moe.num_experts_per_tok),
            ("expert_feed_forward_length", moe.intermediate_size),
            ("expert_shared_feed_forward_length", moe.shared_intermediate_size),
        ]),
    }
    for (name, size) in sizes {
        file.value(&key(name), size as u32)?;
    }
    file.value(&key("attention.layer_norm_rms_epsilon"), positive(path, "rms_norm_eps", config.rms_norm_eps)?)?;
    file.value(&key("rope.freq_base"), positive(path, "rope_parameters.rope_theta", config.rope_theta)?)?;
    let [time, height, width] = sections(config);
    file.array(&key("rope.dimension_sections"), [time, height, width, 0])?;
    let full = |layer: &LayerType| *layer == LayerType::Full;
    match (1..=config.layers.len()).find(|interval| {
        config.layers.iter().enumerate().all(|(i, layer)| full(layer) == (i + 1).is_multiple_of(*interval))
    }) {
        Some(interval) => file.value(&key("full_attention_interval"), interval as u32),
        // One flag per block, the head's included.
        None => {
            let flags = config.layers.iter().map(|layer| !full(layer)).chain(has_head.then_some(false));
            file.array(&key("attention.recurrent_layers"), flags)
        }
    }
}

/// Pairs of channels per axis of a position: in text all three are equal.
fn sections(config: &TextConfig) -> [i32; 3] {
    let pairs = (config.rotary_dim / 2) as i32;
    let (height, width) = ((pairs + 1) / 3, pairs / 3);
    [pairs - height - width, height, width]
}

/// Describes the directory of a GGUF checkpoint.
///
/// # Errors
/// If the metadata need something that is not implemented.
pub(crate) fn directory(source: &Checkpoint) -> Result<Directory> {
    let config = TextConfig::of(source)?;
    let net = config.delta_net.clone();
    Ok(Directory {
        family: "Qwen3.5",
        implied: implied(source)?.tensors,
        config: config_json(&config),
        reads_back: Box::new(move |fields| {
            let (tensor_layout, eos_token_ids) = (config.tensor_layout, config.eos_token_ids.clone());
            Ok(TextConfig { tensor_layout, eos_token_ids, ..TextConfig::target(fields)? } == config)
        }),
        left_out: &[],
        outside: &["lm_head.", "mtp."],
        shape: |name, shape| match (&shape[..], name) {
            ([channels, taps], _) if name.ends_with(".conv1d.weight") => vec![*channels, 1, *taps],
            ([hidden], _) if name.ends_with(".shared_expert_gate.weight") => vec![1, *hidden],
            _ => shape,
        },
        change: Box::new(move |name| change(&net, name, TensorLayout::HuggingFace)),
    })
}

/// config.json, with the fields of transformers' text model classes.
fn config_json(config: &TextConfig) -> Value {
    let layer_types = config.layers.iter().map(|layer| match layer {
        LayerType::Linear => "linear_attention",
        LayerType::Full => "full_attention",
    });
    let (net, moe) = (&config.delta_net, config.moe.as_ref());
    let (class, model_type) = match moe {
        Some(_) => ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
        None => ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    };
    let mut json = json!({
        "architectures": [class],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "hidden_act": "silu",
        "num_hidden_layers": config.layers.len(),
        "layer_types": layer_types.collect::<Vec<_>>(),
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "attention_bias": false,
        "attn_output_gate": true,
        "linear_num_key_heads": net.num_key_heads,
        "linear_num_value_heads": net.num_value_heads,
        "linear_key_head_dim": net.key_head_dim,
        "linear_value_head_dim": net.value_head_dim,
        "linear_conv_kernel_dim": net.conv_kernel_dim,
        "mamba_ssm_dtype": "float32",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "mtp_num_hidden_layers": config.mtp_num_hidden_layers,
        "mtp_use_dedicated_embeddings": config.mtp_use_dedicated_embeddings,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": config.rotary_dim as f64 / config.head_dim as f64,
            "mrope_section": sections(config),
            "mrope_interleaved": true,
        },
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids,
    });
    let sizes = match moe {
        None => vec![("intermediate_size", config.intermediate_size)],
        Some(moe) => vec![
            ("num_experts", moe.num_experts),
            ("num_experts_per_tok", moe.num_experts_per_tok),
            ("moe_intermediate_size", moe.intermediate_size),
            ("shared_expert_intermediate_size", moe.shared_intermediate_size),
        ],
    };
    sizes.into_iter().for_each(|(name, size)| json[name] = json!(size));
    json
}

/// The change to a tensor's values, by its GGUF name, on conversion `to` a layout. GGUF files have norms with the added
/// 1, rates as `-exp(A_log)`, and value heads interleaved over the key heads.
fn change(net: &DeltaNetConfig, name: &str, to: TensorLayout) -> Option<Change> {
    let rest = name.strip_prefix("blk.").and_then(|name| name.split_once('.')).map_or(name, |(_, rest)| rest);
    let (values, width) = (net.num_value_heads, net.value_head_dim);
    // Changes of the values of norms and rates, and the inner dimension of the new order of value heads.
    let (norm, rate, inner): (Number, Number, usize) = match to {
        TensorLayout::Gguf => (|x| 1.0 + x, |a_log| -a_log.exp(), net.num_key_heads),
        TensorLayout::HuggingFace => (|x| x - 1.0, |rate| (-rate).ln(), values / net.num_key_heads),
    };
    // Block `b` of the new order is block `order[b]`.
    let order = move || (0..values).map(move |b| b % inner * (values / inner) + b / inner);
    let before = 2 * net.keys();
    match rest {
        "ssm_norm.weight" => None,
        _ if rest.ends_with("norm.weight") => Some(Box::new(move |tensor| floats(tensor, norm))),
        "ssm_a" => Some(Box::new(move |tensor| blocks(floats(tensor, rate)?, 0, 1, order()))),
        "ssm_dt.bias" | "ssm_dt" | "ssm_alpha.weight" | "ssm_beta.weight" => {
            Some(Box::new(move |tensor| blocks(tensor, 0, 1, order())))
        }
        "attn_gate.weight" => Some(Box::new(move |tensor| blocks(tensor, 0, width, order()))),
        "attn_qkv.weight" | "ssm_conv1d.weight" => Some(Box::new(move |tensor| blocks(tensor, before, width, order()))),
        "ssm_out.weight" => Some(Box::new(move |tensor| columns(tensor, width, order()))),
        _ => None,
    }
}

/// A change of one value.
type Number = fn(f32) -> f32;

type Changed = Result<RawTensor, String>;

const NOT_FLOATS: &str = "is not floating point; convert the published checkpoint";

/// The tensor in f32, with each value changed.
fn floats(tensor: RawTensor, of: impl Fn(f32) -> f32) -> Changed {
    let TensorType::Float(element) = tensor.dtype else { return Err(NOT_FLOATS.into()) };
    let numbers = element.read(tensor.bytes.as_slice());
    let changed: Vec<u8> = numbers.into_iter().flat_map(|x| of(x).to_le_bytes()).collect();
    Ok(RawTensor { dtype: TensorType::Float(ElementType::F32), bytes: Bytes::from(changed), ..tensor })
}

/// Reorders the rows from `first` on, in blocks of `width`.
fn blocks(tensor: RawTensor, first: usize, width: usize, order: impl Iterator<Item = usize>) -> Changed {
    let rows = tensor.shape.first().copied().unwrap_or(1);
    let bytes = tensor.bytes.as_slice();
    let row = bytes.len() / rows.max(1);
    let order: Vec<usize> = order.collect();
    if row * rows != bytes.len() || first + order.len() * width != rows {
        return Err(format!("has {rows} rows, the configuration implies {}", first + order.len() * width));
    }
    let (head, tail) = bytes.split_at(first * row);
    let moved = order.into_iter().flat_map(|block| &tail[block * width * row..][..width * row]);
    Ok(RawTensor { bytes: Bytes::from([head, &moved.copied().collect::<Vec<_>>()].concat()), ..tensor })
}

/// Reorders the columns, in blocks of `width`.
fn columns(tensor: RawTensor, width: usize, order: impl Iterator<Item = usize>) -> Changed {
    let TensorType::Float(element) = tensor.dtype else { return Err(NOT_FLOATS.into()) };
    let (columns, order): (_, Vec<usize>) = (tensor.shape.last().copied().unwrap_or(1), order.collect());
    if order.len() * width != columns {
        return Err(format!("has {columns} columns, the configuration implies {}", order.len() * width));
    }
    let block = width * element.size();
    let rows = tensor.bytes.as_slice().chunks_exact(columns * element.size());
    let moved: Vec<u8> = rows.flat_map(|row| order.iter().flat_map(|b| &row[b * block..][..block])).copied().collect();
    Ok(RawTensor { bytes: Bytes::from(moved), ..tensor })
}
