//! A checkpoint of Hugging Face's layout as a GGUF file, as llama.cpp's converter writes it.

use foretoken_kernels::ElementType;
use half::{bf16, f16};

use super::config::{DeltaNetConfig, LayerType, TextConfig};
use super::names::{names, of_expert};
use super::target::is_vision;
use crate::Result;
use crate::checkpoint::convert::options::ToGguf;
use crate::checkpoint::convert::plan::{Change, Description, Place, plan};
use crate::checkpoint::gguf::GgufWriter;
use crate::checkpoint::{Checkpoint, RawTensor, TensorType};
use crate::nn::Bytes;

/// What a GGUF file of the checkpoint has in it.
///
/// # Errors
/// If the configuration needs something that is not implemented, or there are tensors that no text model has.
pub(crate) fn description(source: &Checkpoint, options: &ToGguf) -> Result<Description> {
    let config = TextConfig::of(source)?;
    let (prefix, layers, tied) = (source.text_prefix()?, config.layers.len(), config.tie_word_embeddings);
    let has_head = source.names().iter().any(|name| name.starts_with("mtp."));
    let names = names(has_head.then_some(layers as u32));
    let name = |own: &str| {
        let own = own.strip_prefix(prefix).unwrap_or(own);
        if is_vision(own) {
            return Err("the vision tower is no part of a text model");
        }
        if tied && own == "lm_head.weight" {
            return Err("the embedding is the head");
        }
        Ok(match of_expert(&names, own) {
            Some((name, index, per_matrix)) => Some((name, Some(Place { index, per_matrix }))),
            None => names.gguf(own).into_iter().next().map(|name| (name, None)),
        })
    };
    let (mut planned, left_out) = plan(source, options, "Qwen3.5", name)?;
    planned.iter_mut().for_each(|tensor| tensor.change = change(&config.delta_net, &tensor.name));
    let architecture = if config.moe.is_some() { "qwen35moe" } else { "qwen35" };
    let (vocab_size, bos) = (config.vocab_size, config.bos_token_id);
    let eos = config.eos_token_ids.first().copied();
    let describe = move |file: &mut GgufWriter| describe(file, architecture, &config, has_head);
    Ok(Description {
        architecture,
        vocab_size,
        bos,
        eos,
        describe: Box::new(describe),
        constants: Vec::new(),
        planned,
        left_out,
    })
}

/// The keys of the configuration.
fn describe(file: &mut GgufWriter, architecture: &str, config: &TextConfig, has_head: bool) -> Result<()> {
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
    file.value(&key("attention.layer_norm_rms_epsilon"), config.rms_norm_eps as f32)?;
    file.value(&key("rope.freq_base"), config.rope_theta as f32)?;
    // Pairs of the axes of a position: text has one number for all three.
    let pairs = (config.rotary_dim / 2) as i32;
    let (height, width) = ((pairs + 1) / 3, pairs / 3);
    file.array(&key("rope.dimension_sections"), [pairs - height - width, height, width, 0])?;
    let full = |layer: &LayerType| *layer == LayerType::Full;
    match (1..=config.layers.len()).find(|interval| {
        config.layers.iter().enumerate().all(|(i, layer)| full(layer) == (i + 1).is_multiple_of(*interval))
    }) {
        Some(interval) => file.value(&key("full_attention_interval"), interval as u32),
        None => file.array(&key("attention.recurrent_layers"), config.layers.iter().map(|layer| !full(layer))),
    }
}

/// What becomes of the numbers of a tensor: norms have the 1 added, rates are `-exp(A_log)`, value heads stand in turns
/// over the key heads.
fn change(net: &DeltaNetConfig, name: &str) -> Option<Change> {
    let rest = name.strip_prefix("blk.").and_then(|name| name.split_once('.')).map_or(name, |(_, rest)| rest);
    let (keys, values, width) = (net.num_key_heads, net.num_value_heads, net.value_head_dim);
    // Block `b` of the new order is block `order[b]`.
    let order = move |count: usize| (0..count).map(move |b| b % keys * (count / keys) + b / keys);
    let before = 2 * net.keys();
    match rest {
        "ssm_norm.weight" => None,
        _ if rest.ends_with("norm.weight") => Some(Box::new(|tensor| floats(tensor, |x| 1.0 + x))),
        "ssm_a" => Some(Box::new(move |tensor| {
            let tensor = floats(tensor, |a_log| -a_log.exp())?;
            blocks(tensor, 0, 1, order(values))
        })),
        "ssm_dt.bias" | "ssm_alpha.weight" | "ssm_beta.weight" => {
            Some(Box::new(move |tensor| blocks(tensor, 0, 1, order(values))))
        }
        "attn_gate.weight" => Some(Box::new(move |tensor| blocks(tensor, 0, width, order(values)))),
        "attn_qkv.weight" | "ssm_conv1d.weight" => {
            Some(Box::new(move |tensor| blocks(tensor, before, width, order(values))))
        }
        "ssm_out.weight" => Some(Box::new(move |tensor| columns(tensor, width, order(values)))),
        _ => None,
    }
}

type Changed = Result<RawTensor, String>;

const NOT_FLOATS: &str = "is no floating point; convert the published checkpoint";

/// The tensor in f32, each number changed.
fn floats(tensor: RawTensor, of: impl Fn(f32) -> f32) -> Changed {
    let bytes = tensor.bytes.as_slice();
    let numbers: Vec<f32> = match tensor.dtype {
        TensorType::Float(ElementType::F32) => bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect(),
        TensorType::Float(ElementType::F16) => {
            bytes.as_chunks().0.iter().map(|x| f16::from_le_bytes(*x).to_f32()).collect()
        }
        TensorType::Float(ElementType::Bf16) => {
            bytes.as_chunks().0.iter().map(|x| bf16::from_le_bytes(*x).to_f32()).collect()
        }
        _ => return Err(NOT_FLOATS.into()),
    };
    let changed: Vec<u8> = numbers.into_iter().flat_map(|x| of(x).to_le_bytes()).collect();
    Ok(RawTensor { dtype: TensorType::Float(ElementType::F32), bytes: Bytes::from(changed), ..tensor })
}

/// Rows from `first` on, in blocks of `width`, in another order.
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

/// Columns in blocks of `width`, in another order.
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
