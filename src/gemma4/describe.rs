//! A configuration as GGUF metadata: llama.cpp's keys, in its converter's order.

use std::path::Path;

use super::config::{AssistantConfig, AttentionType, LayerConfig, TextConfig};
use crate::checkpoint::convert::options::AssistantLayout;
use crate::checkpoint::convert::plan::positive;
use crate::checkpoint::gguf::GgufWriter;
use crate::{Error, Result};

/// Frequency divisor of a pair that does not rotate.
const NO_ROTATION: f32 = 1e30;

/// Declares an assistant's keys.
pub(super) fn assistant(
    file: &mut GgufWriter,
    path: &Path,
    config: &AssistantConfig,
    layout: AssistantLayout,
) -> Result<()> {
    let architecture = layout.architecture();
    let key = |name: &str| format!("{architecture}.{name}");
    text(file, path, architecture, &config.text)?;
    let centroids = config.centroids.as_ref();
    match layout {
        AssistantLayout::Nextn => {
            file.value(&key("embedding_length_out"), config.backbone_hidden_size as u32)?;
            file.value(&key("nextn_predict_layers"), config.text.layers.len() as u32)?;
        }
        AssistantLayout::Mtp => {
            file.value(&key("n_embd_backbone"), config.backbone_hidden_size as u32)?;
            file.value(&key("use_ordered_embeddings"), centroids.is_some())?;
            file.value(&key("attention.k_eq_v"), config.text.layers.iter().any(|layer| layer.k_eq_v))?;
            file.value(&key("requires_target_arch"), "gemma4")?;
            if let Some(centroids) = centroids {
                file.value(&key("n_centroids"), centroids.num_centroids as u32)?;
            }
        }
    }
    // llama.cpp reads no centroids and ignores the key.
    centroids.map_or(Ok(()), |centroids| file.value(&key("centroid_top_k"), centroids.top_k as u32))
}

/// Declares the keys of a text model, except for `general.*` and the tokenizer's.
pub(super) fn text(file: &mut GgufWriter, path: &Path, architecture: &str, config: &TextConfig) -> Result<()> {
    let key = |name: &str| format!("{architecture}.{name}");
    let layers = &config.layers;
    let shared = layers.iter().filter(|layer| layer.kv_shared).count();
    let head_dim = |of: AttentionType| layers.iter().find(|layer| layer.attention == of).map(|layer| layer.head_dim);
    let (full, sliding) = (head_dim(AttentionType::Full), head_dim(AttentionType::Sliding));
    let (full, sliding) = (full.or(sliding).unwrap_or(0), sliding.or(full).unwrap_or(0));
    if (config.rope_sliding.partial_rotary_factor, config.rope_sliding.factor) != (1.0, 1.0) {
        let field = "rope_parameters.sliding_attention".into();
        let problem = "rotates only some pairs or scales them, which a GGUF file cannot represent".into();
        return Err(Error::Config { path: path.to_owned(), field, problem });
    }
    file.value(&key("block_count"), layers.len() as u32)?;
    file.value(&key("context_length"), config.max_position_embeddings as u32)?;
    file.value(&key("embedding_length"), config.hidden_size as u32)?;
    per_layer(file, &key("feed_forward_length"), layers, |layer| layer.intermediate_size)?;
    file.value(&key("attention.head_count"), config.num_attention_heads as u32)?;
    per_layer(file, &key("attention.head_count_kv"), layers, |layer| layer.num_kv_heads)?;
    for (name, field, value) in [
        ("rope.freq_base", "rope_parameters.full_attention.rope_theta", config.rope_full.theta),
        ("rope.freq_base_swa", "rope_parameters.sliding_attention.rope_theta", config.rope_sliding.theta),
        ("attention.layer_norm_rms_epsilon", "rms_norm_eps", config.rms_norm_eps),
    ] {
        file.value(&key(name), positive(path, field, value)?)?;
    }
    if let Some(moe) = &config.moe {
        file.value(&key("expert_count"), moe.num_experts as u32)?;
        file.value(&key("expert_used_count"), moe.top_k_experts as u32)?;
        file.value(&key("expert_feed_forward_length"), moe.intermediate_size as u32)?;
    }
    if let Some(cap) = config.final_logit_softcapping {
        file.value(&key("final_logit_softcapping"), positive(path, "final_logit_softcapping", cap)?)?;
    }
    file.value(&key("attention.sliding_window"), config.sliding_window as u32)?;
    file.value(&key("attention.shared_kv_layers"), shared as u32)?;
    file.value(&key("embedding_length_per_layer_input"), config.hidden_size_per_layer_input as u32)?;
    let slides = layers.iter().map(|layer| layer.attention == AttentionType::Sliding);
    file.array(&key("attention.sliding_window_pattern"), slides)?;
    for (name, width) in [("", full), ("_swa", sliding)] {
        file.value(&key(&format!("attention.key_length{name}")), width as u32)?;
        file.value(&key(&format!("attention.value_length{name}")), width as u32)?;
        file.value(&key(&format!("rope.dimension_count{name}")), width as u32)?;
    }
    Ok(())
}

/// One value if all layers agree, else one per layer; signed, as llama.cpp's converter writes them.
fn per_layer(
    file: &mut GgufWriter,
    key: &str,
    layers: &[LayerConfig],
    size: impl Fn(&LayerConfig) -> usize,
) -> Result<()> {
    match layers.windows(2).all(|pair| size(&pair[0]) == size(&pair[1])) {
        true => file.value(key, layers.first().map_or(0, &size) as u32),
        false => file.array(key, layers.iter().map(|layer| size(layer) as i32)),
    }
}

/// Frequency divisors of full layers, one per pair.
pub(super) fn rope_freqs(config: &TextConfig) -> Option<Vec<f32>> {
    let full = config.layers.iter().find(|layer| layer.attention == AttentionType::Full)?;
    let pairs = full.head_dim / 2;
    let rotating = (config.rope_full.partial_rotary_factor * pairs as f64) as usize;
    let divisor = config.rope_full.factor as f32;
    Some((0..pairs).map(|pair| if pair < rotating { divisor } else { NO_ROTATION }).collect())
}
