//! A configuration as config.json, with the fields of transformers' classes.

use serde_json::{Value, json};

use super::config::{AssistantConfig, AttentionType, LayerConfig, TextConfig};

/// A target's configuration.
pub(super) fn target(config: &TextConfig) -> Value {
    let mut json = text(config);
    json["architectures"] = json!(["Gemma4ForCausalLM"]);
    json
}

/// An assistant's configuration.
pub(super) fn assistant(config: &AssistantConfig) -> Value {
    let mut json = json!({
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": config.backbone_hidden_size,
        "tie_word_embeddings": config.text.tie_word_embeddings,
        "use_ordered_embeddings": config.centroids.is_some(),
        "text_config": text(&config.text),
    });
    if let Some(centroids) = &config.centroids {
        json["num_centroids"] = json!(centroids.num_centroids);
        json["centroid_intermediate_top_k"] = json!(centroids.top_k);
    }
    json
}

fn text(config: &TextConfig) -> Value {
    let layers = &config.layers;
    let of = |attention| layers.iter().find(move |layer: &&LayerConfig| layer.attention == attention);
    let full = of(AttentionType::Full).or(layers.first());
    let sliding = of(AttentionType::Sliding).or(full);
    let (own_kv, full_kv) = (sliding.map(|l| l.num_kv_heads), full.map(|l| l.num_kv_heads));
    let width = layers.first().map_or(0, |layer| layer.intermediate_size);
    let moe = config.moe.as_ref();
    json!({
        "model_type": "gemma4_text",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": layers.len(),
        "layer_types": layers.iter().map(|layer| layer.attention.name()).collect::<Vec<_>>(),
        "num_kv_shared_layers": layers.iter().filter(|layer| layer.kv_shared).count(),
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": own_kv,
        // Read only with K = V: in every variant the different head count of full layers implies it.
        "num_global_key_value_heads": full_kv,
        "attention_k_eq_v": layers.iter().any(|layer| layer.k_eq_v) || own_kv != full_kv,
        "attention_bias": false,
        "head_dim": sliding.map(|layer| layer.head_dim),
        "global_head_dim": full.map(|layer| layer.head_dim),
        "intermediate_size": width,
        "use_double_wide_mlp": layers.iter().any(|layer| layer.intermediate_size != width),
        "rms_norm_eps": config.rms_norm_eps,
        "sliding_window": config.sliding_window,
        "max_position_embeddings": config.max_position_embeddings,
        "final_logit_softcapping": config.final_logit_softcapping,
        "hidden_size_per_layer_input": config.hidden_size_per_layer_input,
        "vocab_size_per_layer_input": config.vocab_size_per_layer_input,
        "enable_moe_block": moe.is_some(),
        "num_experts": moe.map(|moe| moe.num_experts),
        "top_k_experts": moe.map(|moe| moe.top_k_experts),
        "moe_intermediate_size": moe.map(|moe| moe.intermediate_size),
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_parameters": {
            "sliding_attention": { "rope_type": "default", "rope_theta": config.rope_sliding.theta },
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": config.rope_full.theta,
                "partial_rotary_factor": config.rope_full.partial_rotary_factor,
                "factor": config.rope_full.factor,
            },
        },
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids,
    })
}
