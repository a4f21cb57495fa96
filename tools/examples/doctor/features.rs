//! Type of a checkpoint, and the engine features it can use.

use std::collections::BTreeMap;

use anyhow::Result;
use foretoken::chat::ChatTemplate;
use foretoken::checkpoint::Checkpoint;
use foretoken::gemma4::AssistantConfig;
use foretoken::{Error, OwnDrafter, TargetFacts};
use foretoken_tools::println;
use foretoken_tools::report::{count, size};

/// A target and its features; `assistant` is the one that it is used with.
pub fn target(
    checkpoint: &Checkpoint,
    facts: &TargetFacts,
    assistant: Option<&(Checkpoint, AssistantConfig)>,
) -> Result<()> {
    file(checkpoint, &format!("{} target", facts.family));
    let TargetFacts { layers, hidden_size, vocab_size, .. } = facts;
    line("layers", &format!("{layers}; hidden size {hidden_size}, vocabulary {vocab_size}"));
    if !facts.parts.is_empty() {
        line("has", &facts.parts.join("; "));
    }
    line("MTP", &mtp(facts, assistant));
    let k_eq_v = facts.kv_layout.stores.iter().filter(|store| store.k_eq_v.is_some()).count();
    line(
        "K = V",
        &match k_eq_v {
            0 => "no: K and V are stored".into(),
            layers => format!("yes, in {}: V alone is stored", count(layers, "layer")),
        },
    );
    if facts.state_bytes > 0 {
        line("state", &format!("{} per sequence, in addition to the KV cache", size(facts.state_bytes)));
    }
    line("text", &text(checkpoint, facts.vocab_size)?);
    Ok(())
}

/// An assistant, and how it drafts.
pub fn assistant(checkpoint: &Checkpoint, config: &AssistantConfig) {
    file(checkpoint, "Gemma 4 assistant");
    line("fits", &format!("targets of hidden size {}", config.backbone_hidden_size));
    line(
        "centroids",
        &match &config.centroids {
            Some(of) => format!("yes: a draft scores the ids of {} of {} centroids", of.top_k, of.num_centroids),
            None => format!("no: a draft scores all {} ids", config.text.vocab_size),
        },
    );
}

fn mtp(facts: &TargetFacts, assistant: Option<&(Checkpoint, AssistantConfig)>) -> String {
    match (facts.own_drafter, assistant) {
        (OwnDrafter::NextnHead(_), _) => "yes, with its own NextN head".into(),
        (OwnDrafter::NoHead, _) => "no NextN head (mtp.*) in the checkpoint: use one that has it".into(),
        (OwnDrafter::Assistant, Some((checkpoint, _))) => format!("yes, with {}", checkpoint.path().display()),
        (OwnDrafter::Assistant, None) => format!(
            "no assistant for a hidden size of {}: put the model's -assistant (mtp-*.gguf) next to it, or pass both",
            facts.hidden_size
        ),
    }
}

fn text(checkpoint: &Checkpoint, vocab_size: usize) -> Result<String> {
    let tokenizer = match checkpoint.tokenizer(vocab_size)? {
        Some(_) => "a tokenizer",
        None => "no tokenizer (token ids only)",
    };
    let template = match ChatTemplate::of(checkpoint) {
        Ok(Some(_)) => "a chat template",
        Err(Error::Template(_)) => "a chat template that does not compile (plain prompts only)",
        read => read.map(|_| "no chat template")?,
    };
    let sampling = match checkpoint.sampling_defaults()? {
        Some(s) => format!("temperature {} by default in chats", s.temperature),
        None => "no sampling parameters (greedy)".into(),
    };
    Ok(format!("{tokenizer}, {template}, {sampling}"))
}

/// Role, format, types and size of a file.
fn file(checkpoint: &Checkpoint, role: &str) {
    let format = match checkpoint.gguf() {
        Some(gguf) => {
            let architecture = gguf.metadata("general.architecture").and_then(|value| value.as_str());
            format!("GGUF {}, {}", gguf.version(), architecture.unwrap_or("no architecture"))
        }
        None => "safetensors".into(),
    };
    println!("{}: a {role} ({format})", checkpoint.path().display());
    let mut types: BTreeMap<&str, usize> = BTreeMap::new();
    let names = checkpoint.names();
    for name in &names {
        let kind = checkpoint.type_and_shape(name).map_or("unread", |(dtype, _)| dtype.name());
        *types.entry(kind).or_default() += 1;
    }
    let types: Vec<_> = types.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    line("tensors", &format!("{}: {}; {}", names.len(), types.join(", "), size(checkpoint.bytes())));
}

pub fn line(name: &str, text: &str) {
    println!("  {name:10} {text}");
}
