//! The configuration from a GGUF file's metadata, checked like `config.json`: every key that affects the computation is
//! implemented or refused by name.

use foretoken_kernels::ElementType;

use super::config::{AssistantConfig, AttentionType, CentroidConfig, LayerConfig, MoeConfig, TextConfig};
use super::rope_config::RopeConfig;
use crate::checkpoint::gguf::{
    ARCHITECTURE, GgmlType, Gguf, Keys, TensorInfo, architecture, eos_token_ids, only, refuse_unsupported, rows, types,
};
use crate::checkpoint::{MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, NameOf, other_model};
use crate::{Error, Result};

const TARGET: &str = "gemma4";
/// The layout of llama.cpp (`nextn.*`), and those of forks (`mtp.*`, `mtp_*`). One fork has
/// assistants, with `assistant.*`, under the target's name.
const ASSISTANTS: [&str; 3] = ["gemma4-assistant", "gemma4_assistant", "gemma4_mtp"];
/// Image and audio towers in a separate file.
const PROJECTOR: &str = "clip";
/// Frequency divisor from which a pair counts as not rotated: below 1e-6 radians at position 1e6.
const NO_ROTATION: f32 = 1e20;
/// transformers' default, for files without the key.
const DEFAULT_CENTROID_TOP_K: usize = 32;
/// Share of the pairs of full layers that rotate, for assistants without `rope_freqs.weight`.
const DEFAULT_PARTIAL_ROTARY_FACTOR: f64 = 0.25;

/// The configuration of a target (architecture `gemma4`).
///
/// # Errors
/// If the file is of another architecture, a key is missing or malformed, or it needs something
/// that is not implemented.
pub fn target_config(gguf: &Gguf) -> Result<TextConfig> {
    let keys = Keys::new(gguf, TARGET);
    let problem = match architecture(gguf)? {
        name if is_assistants_file(gguf, name) => {
            Some("is an assistant's; use the file as the assistant and its target as the model".to_owned())
        }
        TARGET => None,
        name => Some(other_architecture(name)),
    };
    if let Some(problem) = problem {
        return Err(gguf.key_error(ARCHITECTURE, problem));
    }
    let shared = keys.optional_size("attention.shared_kv_layers")?.unwrap_or(0);
    let text = text(&keys, shared, None)?;
    keys.refuse_misspelt()?;
    Ok(text)
}

/// The configuration of an assistant (architecture `gemma4-assistant`, `gemma4_assistant`,
/// `gemma4_mtp`, or `gemma4` with an assistant's tensors).
///
/// # Errors
/// As [`target_config`].
pub fn assistant_config(gguf: &Gguf) -> Result<AssistantConfig> {
    let name = architecture(gguf)?;
    if !is_assistants_file(gguf, name) {
        let problem = match name {
            TARGET => "is a target's; use the file as the model, and its -assistant or mtp- file here".to_owned(),
            PROJECTOR => other_architecture(name),
            _ => format!(
                "{name:?} is not a Gemma 4 assistant's ({}); use the -assistant or mtp- file published for the target",
                ASSISTANTS.join(", ")
            ),
        };
        return Err(gguf.key_error(ARCHITECTURE, problem));
    }
    let keys = Keys::new(gguf, name);
    if let Some(other) = keys.optional_str("requires_target_arch")?.filter(|arch| *arch != TARGET) {
        return Err(keys.error("requires_target_arch", format!("{other:?} is not gemma4")));
    }
    let layers = keys.size("block_count")?;
    if let Some(shared) = keys.optional_size("attention.shared_kv_layers")?.filter(|n| *n > 0 && *n != layers) {
        let problem = format!("is {shared}, but all {layers} layers of an assistant read the target's");
        return Err(keys.error("attention.shared_kv_layers", problem));
    }
    let mut text = text(&keys, layers, Some(DEFAULT_PARTIAL_ROTARY_FACTOR))?;
    if text.moe.is_some() || text.hidden_size_per_layer_input > 0 {
        let key = if text.moe.is_some() { "expert_count" } else { "embedding_length_per_layer_input" };
        return Err(keys.error(key, "is not 0, but an assistant has neither per-layer embeddings nor experts"));
    }
    if keys.optional_bool("attention.k_eq_v")?.unwrap_or(false) {
        let full = text.layers.iter_mut().filter(|layer| layer.attention == AttentionType::Full);
        full.for_each(|layer| layer.k_eq_v = true);
    }
    let backbone_hidden_size = backbone_hidden_size(&keys)?;
    let centroids = centroids(&keys, text.vocab_size)?;
    keys.refuse_misspelt()?;
    Ok(AssistantConfig { text, backbone_hidden_size, centroids })
}

/// Whether the file is an assistant's.
///
/// # Errors
/// If it has no architecture.
pub(crate) fn is_assistant(gguf: &Gguf) -> Result<bool> {
    architecture(gguf).map(|name| is_assistants_file(gguf, name))
}

/// Whether the file is an assistant's: under the target's name, one with an assistant's projection and without K
/// projections. (A target's file may also contain its assistant's tensors.)
fn is_assistants_file(gguf: &Gguf, architecture: &str) -> bool {
    let projection = || gguf.info_of_weight("pre_projection.weight").is_some();
    let own_keys = || gguf.info("blk.0.attn_k.weight").is_some();
    ASSISTANTS.contains(&architecture) || (architecture == TARGET && projection() && !own_keys())
}

/// The problem with a file of the architecture `name`.
fn other_architecture(name: &str) -> String {
    match name {
        PROJECTOR => format!(
            "{name:?} is an image and audio projector's (mmproj), which text does not use; use the model's file"
        ),
        _ => other_model(name, NameOf::Gguf),
    }
}

/// The text model, whose last `shared` layers are KV-shared. `partial_rotary_factor` applies to files without
/// `rope_freqs.weight`; with `None` those are refused.
fn text(keys: &Keys<'_>, shared: usize, partial_rotary_factor: Option<f64>) -> Result<TextConfig> {
    refuse_unsupported(keys)?;
    only(keys, "attention.scale", &[1.0])?;
    let hidden_size = keys.size("embedding_length")?;
    let layers = layers(keys, shared)?;
    let hidden_size_per_layer_input = keys.optional_size("embedding_length_per_layer_input")?.unwrap_or(0);
    let vocab_size_per_layer_input = match hidden_size_per_layer_input {
        0 => 0,
        _ => rows(keys.gguf(), "per_layer_token_embd.weight")?,
    };
    let rope_theta = |key: &str, default: f64| Ok::<_, Error>(keys.optional_positive(key)?.unwrap_or(default));
    let eps = keys.optional_positive("attention.layer_norm_rms_epsilon")?;
    Ok(TextConfig {
        vocab_size: vocab_size(keys.gguf())?,
        hidden_size,
        num_attention_heads: heads(keys, layers.len())?,
        rms_norm_eps: eps.ok_or_else(|| keys.missing("attention.layer_norm_rms_epsilon"))?,
        sliding_window: keys.size("attention.sliding_window")?,
        max_position_embeddings: keys.size("context_length")?,
        final_logit_softcapping: keys.positive_or_none("final_logit_softcapping")?,
        hidden_size_per_layer_input,
        vocab_size_per_layer_input,
        moe: moe(keys, layers.len())?,
        tie_word_embeddings: keys.gguf().info("output.weight").is_none(),
        rope_sliding: RopeConfig {
            theta: rope_theta("rope.freq_base_swa", 1e4)?,
            partial_rotary_factor: 1.0,
            factor: 1.0,
        },
        rope_full: rope_full(keys, rope_theta("rope.freq_base", 1e6)?, &layers, partial_rotary_factor)?,
        layers,
        bos_token_id: keys.optional_token_id("tokenizer.ggml.bos_token_id")?,
        eos_token_ids: eos_token_ids(keys)?,
    })
}

/// Rows of the embedding; of an assistant without one, whose tokens its target embeds, those of its output head.
fn vocab_size(gguf: &Gguf) -> Result<usize> {
    let (embedding, head) = ("token_embd.weight", "output.weight");
    let has_head_only = gguf.info(embedding).is_none() && gguf.info(head).is_some();
    rows(gguf, if has_head_only { head } else { embedding })
}

fn heads(keys: &Keys<'_>, layers: usize) -> Result<usize> {
    let heads = of_all_layers(keys, "attention.head_count", layers)?;
    if heads > MAX_HEADS {
        return Err(keys.error("attention.head_count", format!("is {heads}, must be at most {MAX_HEADS}")));
    }
    Ok(heads)
}

/// A size that is the same in all layers: a number, or an array of equal ones.
fn of_all_layers(keys: &Keys<'_>, key: &str, layers: usize) -> Result<usize> {
    let sizes = keys.sizes(key, layers)?;
    match sizes.iter().any(|size| *size != sizes[0]) {
        true => Err(keys.unsupported(key, "differs between layers, which is not implemented")),
        false => Ok(sizes[0]),
    }
}

fn layers(keys: &Keys<'_>, shared: usize) -> Result<Vec<LayerConfig>> {
    let count = keys.size_up_to("block_count", MAX_LAYERS)?;
    if shared > count {
        return Err(keys.error("attention.shared_kv_layers", format!("is {shared} of {count} layers")));
    }
    let sliding = keys.flags("attention.sliding_window_pattern", count)?;
    if sliding.last() == Some(&true) {
        let problem = "ends in a sliding layer, but the last layer of a Gemma 4 is full; convert the checkpoint again";
        return Err(keys.error("attention.sliding_window_pattern", problem));
    }
    let intermediate_size = keys.sizes("feed_forward_length", count)?;
    let num_kv_heads = keys.sizes("attention.head_count_kv", count)?;
    let heads = heads(keys, count)?;
    let head_dim_full = head_dim(keys, "")?;
    let head_dim_sliding = match keys.value("attention.key_length_swa") {
        Some(_) => head_dim(keys, "_swa")?,
        None => head_dim_full,
    };
    let no_v = |i: usize| keys.gguf().info(&format!("blk.{i}.attn_v.weight")).is_none();
    let own_full = || (0..count - shared).filter(|i| !sliding[*i]);
    // KV-shared layers have no V tensor; they are assumed to be like the others.
    let shared_k_eq_v = own_full().next().is_some() && own_full().all(no_v);
    let layer = |i: usize| {
        if !heads.is_multiple_of(num_kv_heads[i]) {
            let problem = format!("layer {i}: {} K/V heads do not divide {heads} query heads", num_kv_heads[i]);
            return Err(keys.error("attention.head_count_kv", problem));
        }
        let kv_shared = i >= count - shared;
        Ok(LayerConfig {
            attention: if sliding[i] { AttentionType::Sliding } else { AttentionType::Full },
            head_dim: if sliding[i] { head_dim_sliding } else { head_dim_full },
            num_kv_heads: num_kv_heads[i],
            intermediate_size: intermediate_size[i],
            k_eq_v: !sliding[i] && if kv_shared { shared_k_eq_v } else { no_v(i) },
            kv_shared,
        })
    };
    (0..count).map(layer).collect()
}

/// The head width, common to K, V and the rotation. `suffix` is `_swa` for sliding layers.
fn head_dim(keys: &Keys<'_>, suffix: &str) -> Result<usize> {
    let key = format!("attention.key_length{suffix}");
    let width = keys.size(&key)?;
    if !width.is_multiple_of(2) || width > MAX_HEAD_DIM {
        return Err(keys.error(&key, format!("is {width}, must be even and at most {MAX_HEAD_DIM}")));
    }
    for other in [format!("attention.value_length{suffix}"), format!("rope.dimension_count{suffix}")] {
        if let Some(size) = keys.optional_size(&other)?.filter(|size| *size != width) {
            return Err(
                keys.unsupported(&other, format!("is {size}, not {width} as {key} is; that is not implemented"))
            );
        }
    }
    Ok(width)
}

/// The partial rotary factor of full layers. llama.cpp stores frequency divisors: 1 for rotary pairs, then 1e30. Any
/// other table is refused. `default` is the factor without a table; with `None` a table is required.
fn rope_full(keys: &Keys<'_>, theta: f64, layers: &[LayerConfig], default: Option<f64>) -> Result<RopeConfig> {
    let none = RopeConfig { theta, partial_rotary_factor: 1.0, factor: 1.0 };
    let Some(full) = layers.iter().find(|layer| layer.attention == AttentionType::Full) else { return Ok(none) };
    let (name, pairs) = ("rope_freqs.weight", full.head_dim / 2);
    let gguf = keys.gguf();
    let missing = || gguf.error(name, "is missing; convert the checkpoint again");
    let tensor = match (gguf.tensor(name)?, default) {
        (Some(tensor), _) => tensor,
        (None, Some(partial_rotary_factor)) => return Ok(RopeConfig { theta, partial_rotary_factor, factor: 1.0 }),
        (None, None) => return Err(missing()),
    };
    if tensor.type_id != types::F32 || tensor.shape != [pairs] {
        let stored = GgmlType::name_of(tensor.type_id);
        let problem = format!("is {stored} of shape {:?}, must be F32 of {pairs}", tensor.shape);
        return Err(gguf.error(name, format!("{problem}; convert the checkpoint again")));
    }
    let divisors = ElementType::F32.read(tensor.bytes.as_slice());
    // If no pair rotates, the angles are undefined.
    let factor = divisors.first().copied().filter(|factor| *factor < NO_ROTATION).unwrap_or(1.0);
    let rotating = divisors.iter().take_while(|x| **x == factor).count();
    let rest_is_fixed = divisors[rotating..].iter().all(|x| *x >= NO_ROTATION);
    if !(factor > 0.0 && factor < NO_ROTATION && rest_is_fixed) {
        let problem = "must be one divisor for the first pairs and 1e30 for the rest, as in Gemma 4";
        return Err(gguf.error(name, format!("{problem}; convert the checkpoint again")));
    }
    // Rounding the exact factor could lose a pair.
    let gives = |factor: &f64| (factor * full.head_dim as f64 / 2.0).floor() as usize == rotating;
    let exact = rotating as f64 / pairs as f64;
    let partial_rotary_factor = if gives(&exact) { exact } else { (rotating as f64 + 0.5) / pairs as f64 };
    Ok(RopeConfig { theta, partial_rotary_factor, factor: f64::from(factor) })
}

fn moe(keys: &Keys<'_>, layers: usize) -> Result<Option<MoeConfig>> {
    if keys.optional_size("expert_count")?.unwrap_or(0) == 0 {
        return Ok(None);
    }
    let (num_experts, top_k_experts) = (keys.size("expert_count")?, keys.size("expert_used_count")?);
    if top_k_experts > num_experts {
        return Err(keys.error("expert_used_count", format!("is {top_k_experts} of {num_experts} experts")));
    }
    let intermediate_size = of_all_layers(keys, "expert_feed_forward_length", layers)?;
    Ok(Some(MoeConfig { num_experts, top_k_experts, intermediate_size }))
}

/// The target's hidden size: a key in either layout, and the shape of the projection in both.
fn backbone_hidden_size(keys: &Keys<'_>) -> Result<usize> {
    let gguf = keys.gguf();
    let name = "pre_projection.weight";
    let missing = || {
        gguf.error(
            name,
            "is missing, under any name (nextn.*, mtp.*, mtp_*, assistant.*); this is not a Gemma 4 assistant",
        )
    };
    let projection = gguf.info_of_weight(name).ok_or_else(missing)?;
    let [_, inputs] = projection.shape() else {
        return Err(gguf.error(projection.name(), format!("has shape {:?}, must be a matrix", projection.shape())));
    };
    if inputs % 2 != 0 || *inputs >= 1 << 31 {
        return Err(
            gguf.error(projection.name(), format!("has {inputs} inputs, must have twice the target's hidden size"))
        );
    }
    for key in ["embedding_length_out", "n_embd_backbone", "assistant.backbone_hidden_size"] {
        if let Some(size) = keys.optional_size(key)?.filter(|size| size * 2 != *inputs) {
            let problem = format!("is {size}, but {} has {inputs} inputs, not twice that", projection.name());
            return Err(keys.error(key, problem));
        }
    }
    Ok(inputs / 2)
}

/// The centroid head, if the file has its tensors and does not disable it.
fn centroids(keys: &Keys<'_>, vocab_size: usize) -> Result<Option<CentroidConfig>> {
    let gguf = keys.gguf();
    let enabled = keys.optional_bool("use_ordered_embeddings")?;
    let name = "masked_embedding.centroids.weight";
    let tensors = (gguf.info_of_weight(name), gguf.info_of_weight("masked_embedding.token_ordering"));
    let (centroids, ordering) = match (enabled, tensors) {
        (Some(false), _) | (None, (None, None)) => return Ok(None),
        (_, (Some(centroids), Some(ordering))) => (centroids, ordering),
        (Some(true), (None, None)) => {
            let problem = "is true, but the file has no mtp.centroids.weight and mtp.token_ordering.weight";
            return Err(keys.error("use_ordered_embeddings", problem));
        }
        (_, (Some(half), None) | (None, Some(half))) => {
            let problem = "is half of a centroid head: centroids and the order of tokens belong together; \
                           download or convert the assistant again";
            return Err(gguf.error(half.name(), problem));
        }
    };
    let num_centroids = first_dimension(centroids);
    if let Some(count) = keys.optional_size("n_centroids")?.filter(|count| *count != num_centroids) {
        return Err(keys.error("n_centroids", format!("is {count}, but {} has {num_centroids}", centroids.name())));
    }
    if !vocab_size.is_multiple_of(num_centroids) || first_dimension(ordering) != vocab_size {
        let problem = format!("{num_centroids} centroids cannot share {} tokens equally", first_dimension(ordering));
        return Err(gguf.error(ordering.name(), format!("{problem}, of a vocabulary of {vocab_size}")));
    }
    let top_k = match keys.value("centroid_top_k") {
        Some(_) => keys.size("centroid_top_k")?,
        None => DEFAULT_CENTROID_TOP_K,
    };
    if top_k > num_centroids {
        return Err(keys.error("centroid_top_k", format!("is {top_k}, more than the {num_centroids} centroids")));
    }
    Ok(Some(CentroidConfig { num_centroids, top_k }))
}

fn first_dimension(tensor: &TensorInfo) -> usize {
    tensor.shape().first().copied().unwrap_or(1)
}
