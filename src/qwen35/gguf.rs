//! The configuration of a checkpoint, including from a GGUF file's metadata (architectures `qwen35`
//! and `qwen35moe`), validated like config.json.

use super::config::{LayerType, MAX_TAPS, MoeConfig, TensorLayout, TextConfig, other_family};
use crate::Result;
use crate::checkpoint::gguf::{ARCHITECTURE, Gguf, Keys, Value, eos_token_ids, refuse_unsupported, rows, truth};
use crate::checkpoint::{Checkpoint, ConfigSource, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, NameOf};
use crate::nn::DeltaNetConfig;

impl TextConfig {
    /// The configuration of a checkpoint.
    ///
    /// # Errors
    /// If a field is missing, malformed, or needs something that is not implemented.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self> {
        match checkpoint.config_source()? {
            ConfigSource::Json(fields) => {
                let mut config = Self::target(&fields)?;
                config.tie_word_embeddings = config.tie_word_embeddings && !checkpoint.unties_head()?;
                Ok(config)
            }
            ConfigSource::Gguf(gguf) => config(gguf),
        }
    }
}

/// # Errors
/// If the file is of another architecture, a key is missing or malformed, or it needs something
/// that is not implemented.
fn config(gguf: &Gguf) -> Result<TextConfig> {
    let architecture = Keys::new(gguf, "").optional_str(ARCHITECTURE)?.unwrap_or_default();
    let experts = match architecture {
        "qwen35" => false,
        "qwen35moe" => true,
        other => return Err(gguf.key_error(ARCHITECTURE, other_family(other, NameOf::Gguf))),
    };
    let keys = Keys::new(gguf, architecture);
    let config = text(&keys, experts)?;
    keys.refuse_misspelt()?;
    Ok(config)
}

fn text(keys: &Keys<'_>, experts: bool) -> Result<TextConfig> {
    refuse_unsupported(keys)?;
    if keys.optional_bool("ssm.v_head_reordered")? == Some(false) {
        let problem = "is false, but value heads must be in llama.cpp's order; use a file from its converter";
        return Err(keys.unsupported("ssm.v_head_reordered", problem));
    }
    let (layers, nextn) = layers(keys)?;
    let num_attention_heads = of_full_layers(keys, "attention.head_count", &layers)?;
    let num_key_value_heads = of_full_layers(keys, "attention.head_count_kv", &layers)?;
    divides(keys, "attention.head_count_kv", num_key_value_heads, num_attention_heads)?;
    let head_dim = keys.size_up_to("attention.key_length", MAX_HEAD_DIM)?;
    let value_length = keys.optional_size("attention.value_length")?;
    if let Some(width) = value_length.filter(|width| *width != head_dim) {
        return Err(keys.unsupported("attention.value_length", format!("is {width}, not {head_dim} as key_length is")));
    }
    let rotary_dim = keys.size("rope.dimension_count")?;
    if rotary_dim > head_dim || !rotary_dim.is_multiple_of(2) {
        return Err(keys.error("rope.dimension_count", format!("is {rotary_dim} of {head_dim}, must be even")));
    }
    let num_value_heads = keys.size_up_to("ssm.time_step_rank", MAX_HEADS)?;
    let inner = keys.size_up_to("ssm.inner_size", num_value_heads * MAX_HEAD_DIM)?;
    divides(keys, "ssm.time_step_rank", num_value_heads, inner)?;
    let delta_net = DeltaNetConfig {
        num_key_heads: keys.size_up_to("ssm.group_count", MAX_HEADS)?,
        num_value_heads,
        key_head_dim: keys.size_up_to("ssm.state_size", MAX_HEAD_DIM)?,
        value_head_dim: inner / num_value_heads,
        conv_kernel_dim: keys.size_up_to("ssm.conv_kernel", MAX_TAPS)?,
    };
    divides(keys, "ssm.group_count", delta_net.num_key_heads, num_value_heads)?;
    let eps = keys.optional_positive("attention.layer_norm_rms_epsilon")?;
    Ok(TextConfig {
        vocab_size: rows(keys.gguf(), "token_embd.weight")?,
        hidden_size: keys.size("embedding_length")?,
        intermediate_size: if experts { 0 } else { keys.size("feed_forward_length")? },
        moe: if experts { Some(moe(keys)?) } else { None },
        layers,
        num_attention_heads,
        num_key_value_heads,
        head_dim,
        rotary_dim,
        rope_theta: keys.optional_positive("rope.freq_base")?.ok_or_else(|| keys.missing("rope.freq_base"))?,
        delta_net,
        rms_norm_eps: eps.ok_or_else(|| keys.missing("attention.layer_norm_rms_epsilon"))?,
        max_position_embeddings: keys.size("context_length")?,
        tie_word_embeddings: keys.gguf().info("output.weight").is_none(),
        tensor_layout: TensorLayout::Gguf,
        mtp_num_hidden_layers: Some(nextn),
        mtp_use_dedicated_embeddings: keys.gguf().has_weight("mtp.embed_tokens.weight"),
        bos_token_id: keys.optional_token_id("tokenizer.ggml.bos_token_id")?,
        eos_token_ids: eos_token_ids(keys)?,
    })
}

/// The trunk's layers, and the number of NextN layers after them.
fn layers(keys: &Keys<'_>) -> Result<(Vec<LayerType>, usize)> {
    let blocks = keys.size_up_to("block_count", MAX_LAYERS)?;
    let head = keys.gguf().names().nextn.map(|block| block as usize);
    let nextn = match keys.optional_size("nextn_predict_layers")? {
        Some(count @ 2..) => {
            return Err(keys.unsupported("nextn_predict_layers", format!("is {count}, which is not implemented")));
        }
        count => count.unwrap_or(usize::from(head.is_some())),
    };
    let missing = |block: usize| keys.gguf().info(&format!("blk.{block}.attn_norm.weight")).is_none();
    if let Some(head) = head.filter(|head| *head == 0 || missing(0)) {
        let problem = format!("is {blocks}, but there is no block 0 before the NextN head, which is block {head}");
        let remedy = "the file contains only a NextN head, or is incomplete; use the model's file";
        return Err(keys.error("block_count", format!("{problem}; {remedy}")));
    }
    // Some converters count the head among the blocks, some do not.
    let count = match head {
        Some(head) if head == blocks || head + 1 == blocks => head,
        Some(head) => {
            let problem = format!("is {blocks}, but the NextN head is block {head}; convert the checkpoint again");
            return Err(keys.error("block_count", problem));
        }
        None if nextn <= blocks && missing(blocks - nextn) => blocks - nextn,
        None => blocks,
    };
    if let Some(block) = (0..count.max(1)).find(|block| missing(*block)) {
        let problem = format!("is {blocks}, but there is no block {block} (blk.{block}.attn_norm.weight)");
        return Err(keys.error("block_count", format!("{problem}; the file is incomplete; download it again")));
    }
    if let Some(flags) = keys.value("attention.recurrent_layers").and_then(Value::as_array) {
        let of = |linear: bool| if linear { LayerType::Linear } else { LayerType::Full };
        let layers: Option<Vec<_>> = flags.iter().take(count).map(|flag| truth(flag).map(of)).collect();
        let wrong = || keys.error("attention.recurrent_layers", format!("must be {count} booleans"));
        return Ok((layers.filter(|layers| layers.len() == count).ok_or_else(wrong)?, nextn));
    }
    let interval =
        if keys.value("full_attention_interval").is_some() { keys.size("full_attention_interval")? } else { 4 };
    let of = |i: usize| if (i + 1).is_multiple_of(interval) { LayerType::Full } else { LayerType::Linear };
    Ok(((0..count).map(of).collect(), nextn))
}

/// A number of heads: one for all layers, or an array whose attention layers agree.
fn of_full_layers(keys: &Keys<'_>, key: &str, layers: &[LayerType]) -> Result<usize> {
    let heads = match keys.value(key).and_then(Value::as_array) {
        None => keys.size(key)?,
        Some(array) => {
            let full = array.iter().zip(layers).filter(|(_, layer)| **layer == LayerType::Full);
            let mut heads: Vec<_> = full.map(|(heads, _)| heads.as_u64()).collect();
            heads.dedup();
            let [Some(heads)] = heads[..] else {
                return Err(keys.unsupported(key, "differs between attention layers, which is not implemented"));
            };
            usize::try_from(heads).unwrap_or(usize::MAX)
        }
    };
    if heads == 0 || heads > MAX_HEADS {
        return Err(keys.error(key, format!("is {heads}, must be from 1 to {MAX_HEADS}")));
    }
    Ok(heads)
}

fn divides(keys: &Keys<'_>, key: &str, part: usize, whole: usize) -> Result<()> {
    if whole.is_multiple_of(part) { Ok(()) } else { Err(keys.error(key, format!("{part} does not divide {whole}"))) }
}

fn moe(keys: &Keys<'_>) -> Result<MoeConfig> {
    let (num_experts, num_experts_per_tok) = (keys.size("expert_count")?, keys.size("expert_used_count")?);
    if num_experts_per_tok > num_experts {
        let problem = format!("is {num_experts_per_tok} of {num_experts} experts");
        return Err(keys.error("expert_used_count", problem));
    }
    Ok(MoeConfig {
        num_experts,
        num_experts_per_tok,
        intermediate_size: keys.size("expert_feed_forward_length")?,
        shared_intermediate_size: keys.size("expert_shared_feed_forward_length")?,
    })
}
