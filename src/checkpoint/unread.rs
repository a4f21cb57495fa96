//! Checkpoints that are not read, each refused by its name, with what to take instead.

use std::path::Path;

use serde_json::Value;

use super::{Checkpoint, Fields, TensorType};
use crate::gemma4::is_tower;
use crate::{Error, Result};

/// What to take instead of a quantized directory.
pub(super) const INSTEAD: &str = "take the bf16 checkpoint, or a GGUF file of the model (Q4_K_M, Q6_K, Q8_0)";
/// What to take instead of a GGUF file with other types.
const OTHER_TYPES: &str = "take a file of another quantization (Q4_K_M, Q5_K_M, Q6_K, Q8_0 or BF16)";

/// Refuses a directory without the weights of a model, if what is there instead says why.
///
/// # Errors
/// If it holds a LoRA adapter or GGUF files.
pub(super) fn refuse_directory(directory: &Path) -> Result<()> {
    let has = |name: &str| directory.join(name).exists();
    if has("model.safetensors") || has("model.safetensors.index.json") {
        return Ok(());
    }
    let adapter = directory.join("adapter_config.json");
    if adapter.exists() {
        let base = Fields::read(&adapter)?.optional_string("base_model_name_or_path")?;
        let base = base.map_or_else(
            || "its base model".to_owned(),
            |name| format!("its base model {}", name.chars().take(100).collect::<String>()),
        );
        let problem = format!("a LoRA adapter is not read; merge it into {base}, and give the directory of that");
        return Err(Error::Unsupported {
            path: Some(directory.to_owned()),
            what: "adapter_config.json".into(),
            problem,
        });
    }
    let entries = std::fs::read_dir(directory).map_err(Error::io(directory))?.filter_map(|entry| entry.ok());
    let names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let ending = |ends: &[&str]| names.iter().filter(|name| ends.iter().any(|end| name.ends_with(end))).min();
    let mut files: Vec<String> = names.iter().filter(|name| name.ends_with(".gguf")).cloned().collect();
    if let Some(shard) = ending(&[".safetensors"]).filter(|_| files.is_empty()) {
        let problem = match shard.contains("-of-") {
            true => {
                format!("has {shard}, but no model.safetensors.index.json, which lists the shards; download it too")
            }
            false => format!("has {shard}, but no model.safetensors; give the weights that name"),
        };
        return Err(Error::file(directory, problem));
    }
    if let Some(file) = ending(&[".bin", ".pt", ".pth", ".ckpt"]).filter(|_| files.is_empty()) {
        let problem = format!("has {file}, but no model.safetensors: PyTorch's files are not read; {INSTEAD}");
        return Err(Error::file(directory, problem));
    }
    files.sort();
    let more = files.len().saturating_sub(MAX_LISTED);
    files.truncate(MAX_LISTED);
    match files.is_empty() {
        true => Ok(()),
        false => {
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            Err(Error::file(directory, format!("holds GGUF files; give one of them: {}{more}", files.join(", "))))
        }
    }
}

/// Files listed in an error.
const MAX_LISTED: usize = 4;

/// How a family's experts may lie in a directory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Experts {
    /// In one tensor.
    Stacked,
    /// In one, or a tensor for each.
    Apart,
}

/// Refuses a directory of quantized safetensors.
///
/// # Errors
/// If its configuration or the names of its tensors are those of a quantized format.
pub(super) fn refuse_quantized(config: &Fields, checkpoint: &Checkpoint, experts: Experts) -> Result<()> {
    for field in ["quantization_config", "compression_config", "quantization"] {
        let text = config.optional_object("text_config")?;
        let fields = [Some(config.clone()), text].into_iter().flatten();
        for fields in fields {
            if let Some(format) = fields.optional_object(field)?.as_ref().and_then(configured_format) {
                return Err(fields.unsupported(field, format!("this is {format}, which is not read; {INSTEAD}")));
            }
        }
    }
    let names = checkpoint.names();
    let found = names.iter().filter(|name| !is_tower(name)).find_map(|name| Some((name, named_format(name, experts)?)));
    match found {
        None => Ok(()),
        Some((name, format)) => {
            let (path, what) = (Some(checkpoint.path().to_owned()), format!("tensor {name}"));
            Err(Error::Unsupported { path, what, problem: format!("this is {format}, which is not read; {INSTEAD}") })
        }
    }
}

/// The format that a quantization configuration describes; `None` if it is read.
fn configured_format(fields: &Fields) -> Option<String> {
    let text =
        |name: &str| fields.get(name).and_then(Value::as_str).map(|text| text.chars().take(40).collect::<String>());
    let bits = fields.get("bits").and_then(Value::as_u64);
    let method = text("quant_method").unwrap_or_default();
    let bits = bits.map_or_else(String::new, |bits| format!(" of {bits} bits"));
    Some(match method.as_str() {
        // MLX names no method.
        "" if fields.get("group_size").is_some() => format!("an MLX checkpoint{bits}"),
        "" => "a quantized checkpoint".into(),
        // The matrices themselves say whether they are packed as is read.
        "fp8" => return None,
        "compressed-tensors" => match text("format") {
            Some(format) if ["pack-quantized", "float-quantized"].contains(&format.as_str()) => return None,
            Some(format) => format!("a compressed-tensors checkpoint ({format})"),
            None => "a compressed-tensors checkpoint".into(),
        },
        "modelopt" => format!("a ModelOpt {} checkpoint", text("quant_algo").unwrap_or_else(|| "quantized".into())),
        "bitsandbytes" => "a bitsandbytes checkpoint".into(),
        "awq" => format!("an AWQ checkpoint{bits}"),
        "gptq" => format!("a GPTQ checkpoint{bits}"),
        "mxfp4" => "an MXFP4 checkpoint".into(),
        other => format!("a checkpoint quantized by {other:?}"),
    })
}

/// The format that has tensors of this name, for directories whose configuration names none.
fn named_format(name: &str, experts: Experts) -> Option<&'static str> {
    let (module, last) = name.rsplit_once('.')?;
    match last {
        "scales" | "biases" => Some("an MLX checkpoint"),
        "g_idx" => Some("a GPTQ checkpoint"),
        "qweight" | "qzeros" => Some("an AWQ or GPTQ checkpoint"),
        "weight_scale_2" => Some("an NVFP4 checkpoint"),
        "absmax" | "quant_map" | "SCB" => Some("a bitsandbytes checkpoint"),
        _ if experts == Experts::Stacked
            && module.split('.').skip_while(|part| *part != "experts").nth(1).is_some_and(is_number) =>
        {
            Some("a checkpoint with a tensor for each expert, but not for all")
        }
        last if module.ends_with(".quant_state") || last.starts_with("bitsandbytes__") => {
            Some("a bitsandbytes checkpoint")
        }
        _ => None,
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Refuses a GGUF file with types that no kernel reads, before any weight is loaded.
///
/// # Errors
/// If a tensor of the text model has such a type; the first of them is named.
pub(super) fn refuse_types(checkpoint: &Checkpoint) -> Result<()> {
    let Some(gguf) = checkpoint.gguf() else { return Ok(()) };
    let unread = |type_id: u32| match super::tensor_type(type_id) {
        TensorType::Other(name) => Some(name),
        _ => None,
    };
    let text = || gguf.tensors().filter(|tensor| !is_tower(tensor.name()));
    let found = text().find_map(|tensor| Some((tensor.name(), unread(tensor.type_id())?)));
    let Some((name, type_name)) = found else { return Ok(()) };
    let (count, all) = (text().filter(|tensor| unread(tensor.type_id()).is_some()).count(), text().count());
    let problem =
        format!("is {type_name}, a type that is not read ({count} of {all} tensors have such); {OTHER_TYPES}");
    let path = Some(checkpoint.path().to_owned());
    Err(Error::Unsupported { path, what: format!("tensor {name}"), problem })
}

/// Whether an unused tensor holds what quantized weights are multiplied with, shifted by or ordered by: a model without it computes
/// something else.
pub(super) fn is_scale(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    let known = ["scale", "scales", "biases", "zero", "zeros", "qzeros", "idx", "absmax", "SCB"];
    last.split('_').any(|word| known.contains(&word))
}
