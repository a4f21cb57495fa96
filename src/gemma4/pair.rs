//! Whether an assistant fits a target.

use super::config::{AssistantConfig, AttentionType, TextConfig};
use crate::{Error, Result};

/// Checks that the assistant's queries fit the target's K and V; returns the donor layer of each of its layers.
pub(crate) fn check_pair(assistant: &AssistantConfig, target: &TextConfig) -> Result<Vec<usize>> {
    let refuse = |problem: String| Err(Error::AssistantMismatch { problem });
    if assistant.backbone_hidden_size != target.hidden_size {
        let (made_for, is) = (assistant.backbone_hidden_size, target.hidden_size);
        return refuse(format!("it was made for hidden_size {made_for}, the target's is {is}"));
    }
    if assistant.text.vocab_size != target.vocab_size {
        let (a, t) = (assistant.text.vocab_size, target.vocab_size);
        return refuse(format!("its vocab_size is {a}, the target's is {t}"));
    }
    let mut donors = Vec::with_capacity(assistant.text.layers.len());
    for (i, layer) in assistant.text.layers.iter().enumerate() {
        let name = layer.attention.name();
        let Some(donor) = target.kv_donor(layer.attention) else {
            return refuse(format!("its layer {i} is of {name}, for which the target has no K and V"));
        };
        let of_target = &target.layers[donor];
        if layer.head_dim != of_target.head_dim {
            let (a, t) = (layer.head_dim, of_target.head_dim);
            return refuse(format!("its {name} layer {i} has head_dim {a}, the target's layer {donor} {t}"));
        }
        if layer.num_kv_heads != of_target.num_kv_heads {
            let (a, t) = (layer.num_kv_heads, of_target.num_kv_heads);
            return refuse(format!("its {name} layer {i} has {a} K/V heads, the target's layer {donor} {t}"));
        }
        if layer.attention == AttentionType::Sliding && assistant.text.sliding_window != target.sliding_window {
            let (a, t) = (assistant.text.sliding_window, target.sliding_window);
            return refuse(format!("its sliding_window is {a}, the target's {t}"));
        }
        donors.push(donor);
    }
    Ok(donors)
}
