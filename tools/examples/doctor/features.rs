//! What a file is, and what of the engine it can use.

use std::collections::BTreeMap;

use anyhow::Result;
use foretoken::chat::ChatTemplate;
use foretoken::checkpoint::Checkpoint;
use foretoken::gemma4::{AssistantConfig, AttentionType, TextConfig};

/// A target, and what it can use; `assistant` is the one that it is used with.
pub fn target(
    checkpoint: &Checkpoint,
    config: &TextConfig,
    assistant: Option<&(Checkpoint, AssistantConfig)>,
) -> Result<()> {
    file(checkpoint, "target");
    let of_type = |attention| config.layers.iter().filter(|layer| layer.attention == attention).count();
    line(
        "layers",
        &format!(
            "{}: {} full, {} with a window of {}; hidden size {}, vocabulary {}",
            config.layers.len(),
            of_type(AttentionType::Full),
            of_type(AttentionType::Sliding),
            config.sliding_window,
            config.hidden_size,
            config.vocab_size
        ),
    );
    let shared = config.layers.len() - config.num_own_kv_layers();
    let mut parts = Vec::new();
    if let Some(moe) = &config.moe {
        parts.push(format!("{} of {} experts for a token", moe.top_k_experts, moe.num_experts));
    }
    if config.hidden_size_per_layer_input > 0 {
        parts.push(format!("per-layer embeddings of {}", config.hidden_size_per_layer_input));
    }
    if shared > 0 {
        parts.push(format!("{shared} layers read the K and V of earlier ones"));
    }
    if !parts.is_empty() {
        line("has", &parts.join("; "));
    }
    line("MTP", &mtp(config, assistant));
    let k_eq_v = config.layers.iter().filter(|layer| layer.k_eq_v && !layer.kv_shared).count();
    line(
        "K = V",
        &match k_eq_v {
            0 => "no: K and V are stored".into(),
            count => format!("yes, in {count} layers: V alone is stored"),
        },
    );
    line("text", &text(checkpoint, config)?);
    Ok(())
}

/// An assistant, and how it drafts.
pub fn assistant(checkpoint: &Checkpoint, config: &AssistantConfig) {
    file(checkpoint, "assistant");
    line("fits", &format!("targets of hidden size {}", config.backbone_hidden_size));
    line(
        "centroids",
        &match &config.centroids {
            Some(of) => format!("yes: a draft scores the ids of {} of {} centroids", of.top_k, of.num_centroids),
            None => {
                format!("no: a draft scores all {} ids", config.text.vocab_size)
            }
        },
    );
}

fn mtp(config: &TextConfig, assistant: Option<&(Checkpoint, AssistantConfig)>) -> String {
    match assistant {
        Some((checkpoint, _)) => format!("yes, with {}", checkpoint.path().display()),
        None => format!(
            "no assistant for a hidden size of {}: put the model's -assistant (mtp-*.gguf) beside it, or give both",
            config.hidden_size
        ),
    }
}

fn text(checkpoint: &Checkpoint, config: &TextConfig) -> Result<String> {
    let tokenizer = match checkpoint.tokenizer(config.vocab_size)? {
        Some(_) => "a tokenizer",
        None => "no tokenizer (token ids only)",
    };
    let template = if ChatTemplate::of(checkpoint)?.is_some() { "a chat template" } else { "no chat template" };
    let sampling = match checkpoint.sampling_defaults()? {
        Some(s) => format!("temperature {} by default in chats", s.temperature),
        None => "no sampling parameters (greedy)".into(),
    };
    Ok(format!("{tokenizer}, {template}, {sampling}"))
}

/// What the file is: role, format, types, size.
fn file(checkpoint: &Checkpoint, role: &str) {
    let format = match checkpoint.gguf() {
        Some(gguf) => {
            let architecture = gguf.metadata("general.architecture").and_then(|value| value.as_str());
            format!("GGUF {}, {}", gguf.version(), architecture.unwrap_or("no architecture"))
        }
        None => "safetensors".into(),
    };
    println!("{}: a Gemma 4 {role} ({format})", checkpoint.path().display());
    let mut types: BTreeMap<&str, usize> = BTreeMap::new();
    let names = checkpoint.names();
    for name in &names {
        let kind = checkpoint.get(name).ok().flatten().map_or("unread", |tensor| tensor.dtype.name());
        *types.entry(kind).or_default() += 1;
    }
    let types: Vec<_> = types.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    line("tensors", &format!("{}: {}; {}", names.len(), types.join(", "), mebibytes(checkpoint.bytes())));
}

pub fn line(name: &str, text: &str) {
    println!("  {name:10} {text}");
}

pub fn mebibytes(bytes: u64) -> String {
    match bytes {
        0x4000_0000.. => format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30)),
        _ => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
    }
}
