//! Gemma 4: a target, and an assistant.

use std::sync::Arc;

use anyhow::{Result, ensure};
use foretoken::checkpoint::gguf::GgufWriter;
use foretoken_tools::progress::ProgressLine;

use super::echo::Echo;
use super::shape::Shape;
use super::tensors::{self, Centroids};
use super::{Args, File};

/// Tokens in the vocabulary.
const VOCAB: u32 = 262_144;
/// Tokens under a centroid, and centroids whose tokens are scored.
const CENTROID_TOKENS: usize = 128;
const CENTROID_TOP_K: usize = 32;

/// Both files of a pair.
pub fn files(args: &Args, name: &str, shape: Shape) -> Result<Vec<File>> {
    let (vocab, quantize) = (args.vocab.unwrap_or(VOCAB) as usize, args.quantize);
    let shape = match args.layers {
        Some(layers) => shape.with_layers(layers.into()),
        None => shape,
    };
    if args.centroids {
        ensure!(shape.per_layer > 0, "--centroids: only the assistants of e2b and e4b have a centroid head");
        ensure!(
            vocab.is_multiple_of(CENTROID_TOKENS),
            "--vocab: with --centroids, give a multiple of {CENTROID_TOKENS}"
        );
    }
    let (target, assistant) = (shape.target(), shape.assistant());
    let echo = Arc::new(Echo::new(args.seed, shape.hidden, assistant.hidden));
    let centroids = args.centroids.then(|| {
        let line = ProgressLine::new("grouping tokens", vocab as u64);
        // Half of the scored centroids, so that rounding the weights does not put a token out of reach.
        let (count, nearest) = (vocab / CENTROID_TOKENS, CENTROID_TOP_K.min(vocab / CENTROID_TOKENS).div_ceil(2));
        Centroids { count, ids: echo.group(vocab, count, nearest, |tokens| line.add(tokens as u64)) }
    });
    let count = centroids.as_ref().map(|centroids| centroids.count);
    let target_tensors = tensors::target(&shape, &target, quantize, args.key_norm, vocab, &echo);
    let assistant_tensors = tensors::assistant(&shape, &assistant, quantize, vocab, &echo, centroids);
    let architecture = if count.is_some() { "gemma4_assistant" } else { "gemma4-assistant" };
    let (file_type, both) = (quantize.file_type(), shape.clone());
    let (title, assistant_title) = (format!("echo {name}"), format!("echo {name} assistant"));
    Ok(vec![
        File {
            name: format!("{name}-target.gguf"),
            tensors: target_tensors,
            describe: Box::new(move |file| {
                target.describe(file, "gemma4", &title, file_type, vocab)?;
                describe_target(file, &shape)
            }),
        },
        File {
            name: format!("{name}-assistant.gguf"),
            tensors: assistant_tensors,
            describe: Box::new(move |file| {
                assistant.describe(file, architecture, &assistant_title, file_type, vocab)?;
                describe_assistant(file, &both, count)
            }),
        },
    ])
}

fn describe_target(file: &mut GgufWriter, shape: &Shape) -> Result<()> {
    file.value("gemma4.final_logit_softcapping", 30f32)?;
    file.value("gemma4.embedding_length_per_layer_input", shape.per_layer as u32)?;
    if let Some(experts) = shape.experts {
        file.value("gemma4.expert_count", experts.count as u32)?;
        file.value("gemma4.expert_used_count", experts.used as u32)?;
        file.value("gemma4.expert_feed_forward_length", experts.ffn as u32)?;
    }
    Ok(())
}

fn describe_assistant(file: &mut GgufWriter, shape: &Shape, centroids: Option<usize>) -> Result<()> {
    let Some(count) = centroids else {
        file.value("gemma4-assistant.embedding_length_out", shape.hidden as u32)?;
        return Ok(file.value("gemma4-assistant.nextn_predict_layers", 4u32)?);
    };
    file.value("gemma4_assistant.n_embd_backbone", shape.hidden as u32)?;
    file.value("gemma4_assistant.n_centroids", count as u32)?;
    file.value("gemma4_assistant.centroid_top_k", CENTROID_TOP_K.min(count) as u32)?;
    file.value("gemma4_assistant.use_ordered_embeddings", true)?;
    file.value("gemma4_assistant.attention.k_eq_v", shape.k_eq_v)?;
    Ok(file.value("gemma4_assistant.requires_target_arch", "gemma4")?)
}
