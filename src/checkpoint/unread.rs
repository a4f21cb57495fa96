//! Unsupported checkpoint formats: each is rejected by name, with an alternative.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::gguf::Gguf;
use super::{Checkpoint, Fields, TensorType};
use crate::gemma4::is_tower;
use crate::placeholder::refuse_placeholder;
use crate::{Error, Result};

/// Alternative to an unsupported directory.
pub(super) const INSTEAD: &str = "use the bf16 checkpoint, or a GGUF file of the model (Q4_K_M, Q6_K, Q8_0)";
/// Alternative to a GGUF file with unsupported types.
const OTHER_TYPES: &str = "use a file with another quantization (Q4_K_M, Q5_K_M, Q6_K, Q8_0 or BF16)";

/// Rejects a directory without a model's weights, if its contents explain why.
///
/// # Errors
/// If it holds a LoRA adapter or GGUF files.
pub(super) fn refuse_directory(directory: &Path) -> Result<()> {
    let has = |name: &str| directory.join(name).exists();
    let adapter = directory.join("adapter_config.json");
    if has("model.safetensors") || has("model.safetensors.index.json") {
        if adapter.exists() {
            tracing::warn!(path = %adapter.display(), "an adapter next to the model is ignored");
        }
        return Ok(());
    }
    if adapter.exists() {
        let base = Fields::read(&adapter)?.optional_string("base_model_name_or_path")?;
        let base = base.map_or_else(
            || "its base model".to_owned(),
            |name| format!("its base model {}", name.chars().take(100).collect::<String>()),
        );
        let problem = format!("LoRA adapters are not supported; merge it into {base}, and use the merged directory");
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
    if let Some(link) =
        ["model.safetensors", "model.safetensors.index.json"].iter().find(|name| names.iter().any(|n| n == *name))
    {
        let problem = format!("{link} is a dangling link; download the checkpoint again");
        return Err(Error::file(directory, problem));
    }
    if let Some(shard) = ending(&[".safetensors"]).filter(|_| files.is_empty()) {
        let problem = match shard.contains("-of-") {
            true => {
                format!("has {shard}, but no model.safetensors.index.json, which lists the shards; download it too")
            }
            false => format!("has {shard}, but no model.safetensors; rename the weights to that"),
        };
        return Err(Error::file(directory, problem));
    }
    let other = names.iter().filter_map(|name| Some((name, other_format(Path::new(name))?))).min();
    if let Some((file, format)) = other.filter(|_| files.is_empty()) {
        let problem = format!("has {file}, but no model.safetensors: {format} is not supported; {INSTEAD}");
        return Err(Error::file(directory, problem));
    }
    if let Some(snapshot) = snapshot_in(directory).filter(|_| files.is_empty()) {
        let problem = format!("is a directory of the Hub's cache; use the snapshot in it, {}", snapshot.display());
        return Err(Error::file(directory, problem));
    }
    files.sort();
    let more = files.len().saturating_sub(MAX_LISTED);
    files.truncate(MAX_LISTED);
    match files.is_empty() {
        true => Ok(()),
        false => {
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            Err(Error::file(directory, format!("contains GGUF files; use one of them: {}{more}", files.join(", "))))
        }
    }
}

/// The snapshot in a repository's directory of the Hub's cache, or in its `snapshots`.
fn snapshot_in(directory: &Path) -> Option<PathBuf> {
    let is_snapshots = directory.file_name().is_some_and(|name| name == "snapshots");
    let snapshots = if is_snapshots { directory.to_owned() } else { directory.join("snapshots") };
    let entries = std::fs::read_dir(snapshots).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    entries.filter(|path| path.is_dir()).max()
}

/// The format of another program's file, by its name.
fn other_format(path: &Path) -> Option<&'static str> {
    Some(match path.extension()?.to_str()?.to_lowercase().as_str() {
        "bin" | "pt" | "pth" | "ckpt" => "a PyTorch file",
        "onnx" => "an ONNX file",
        "task" | "litertlm" | "tflite" => "a LiteRT file",
        "h5" | "msgpack" | "npz" => "another framework's file",
        "part" | "partial" | "incomplete" => "an incomplete download",
        _ => return None,
    })
}

/// The error for a file that is used as a checkpoint but is not a GGUF file.
pub(super) fn other_file(path: &Path, beginning: &[u8]) -> Error {
    if let Err(error) = refuse_placeholder(path, beginning) {
        return error;
    }
    let problem = match other_format(path) {
        Some(format) => format!("is {format}, which is not supported; {INSTEAD}"),
        None => {
            "is a file, but not a GGUF file; use the checkpoint's directory (with config.json and model.safetensors)"
                .into()
        }
    };
    Error::file(path, problem)
}

/// Rejects a GGUF file without a model.
///
/// # Errors
/// If it is an adapter, an importance matrix, a control vector, or only towers.
pub(super) fn refuse_other_kind(gguf: &Gguf) -> Result<()> {
    let text = |key: &str| gguf.metadata(key).and_then(|value| value.as_str());
    let kind = text("general.type").or(text("adapter.type").map(|_| "adapter"));
    let (key, problem) = match (kind, text("general.architecture")) {
        (Some("adapter"), _) => {
            ("general.type", "is a LoRA adapter's, which is not supported; merge it into its model, and use that")
        }
        (Some("imatrix"), _) => {
            ("general.type", "is an importance matrix's, which is only for quantizing; use the model's file")
        }
        (Some("mmproj"), other) if other != Some("clip") => (
            "general.type",
            "is an image and audio projector's (mmproj), which text does not use; use the model's file",
        ),
        (_, Some("controlvector")) => {
            ("general.architecture", "is a control vector's, which is not supported; use the model's file")
        }
        _ => return Ok(()),
    };
    Err(gguf.key_error(key, problem))
}

/// Maximum files listed in an error.
const MAX_LISTED: usize = 4;

/// Supported layouts of a family's experts in a directory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Experts {
    /// In one tensor.
    Stacked,
    /// In one tensor, or a tensor per expert.
    Apart,
}

/// Rejects a directory of quantized safetensors.
///
/// # Errors
/// If its configuration or tensor names are those of a quantized format.
pub(super) fn refuse_quantized(config: &Fields, checkpoint: &Checkpoint, experts: Experts) -> Result<()> {
    for field in ["quantization_config", "compression_config", "quantization"] {
        let text = config.optional_object("text_config")?;
        let fields = [Some(config.clone()), text].into_iter().flatten();
        for fields in fields {
            if let Some(format) = fields.optional_object(field)?.as_ref().and_then(configured_format) {
                return Err(fields.unsupported(field, format!("this is {format}, which is not supported; {INSTEAD}")));
            }
        }
    }
    let names = checkpoint.names();
    let found = names.iter().filter(|name| !is_tower(name)).find_map(|name| {
        named_format(name, experts).or_else(|| shaped_format(name, checkpoint)).map(|format| (name, format))
    });
    match found {
        None => Ok(()),
        Some((name, format)) => {
            let (path, what) = (Some(checkpoint.path().to_owned()), format!("tensor {name}"));
            Err(Error::Unsupported {
                path,
                what,
                problem: format!("this is {format}, which is not supported; {INSTEAD}"),
            })
        }
    }
}

/// The format of a quantization configuration; `None` if it is supported.
fn configured_format(fields: &Fields) -> Option<String> {
    fields.names().next()?; // an empty object is no quantization
    let text =
        |name: &str| fields.get(name).and_then(Value::as_str).map(|text| text.chars().take(40).collect::<String>());
    let bits = fields.get("bits").and_then(Value::as_u64);
    let method = text("quant_method").unwrap_or_default();
    let bits = bits.map_or_else(String::new, |bits| format!(" of {bits} bits"));
    Some(match method.as_str() {
        // MLX names no method.
        "" if fields.get("group_size").is_some() => format!("an MLX checkpoint{bits}"),
        "" => "a quantized checkpoint".into(),
        // The matrices themselves determine whether their packing is supported.
        "fp8" => return None,
        "compressed-tensors" => format!("a compressed-tensors checkpoint ({})", compressed_tensors(fields)?),
        "modelopt" => format!("a ModelOpt {} checkpoint", text("quant_algo").unwrap_or_else(|| "quantized".into())),
        "bitsandbytes" => "a bitsandbytes checkpoint".into(),
        "awq" => format!("an AWQ checkpoint{bits}"),
        "gptq" => format!("a GPTQ checkpoint{bits}"),
        "mxfp4" => "an MXFP4 checkpoint".into(),
        other => format!("a checkpoint quantized by {other:?}"),
    })
}

/// The unsupported part of a compressed-tensors configuration; `None` if it is supported.
fn compressed_tensors(fields: &Fields) -> Option<String> {
    let transforms = fields.get("transform_config").and_then(Value::as_object);
    if transforms
        .is_some_and(|transforms| transforms.values().any(|value| value.as_object().is_some_and(|t| !t.is_empty())))
    {
        return Some("transform_config".into());
    }
    let groups =
        || fields.get("config_groups").and_then(Value::as_object).into_iter().flat_map(|groups| groups.values());
    // One format for all, or one per group.
    let all = fields.get("format").and_then(Value::as_str).filter(|format| *format != "mixed-precision");
    let formats: Vec<&str> = match all {
        Some(format) => vec![format],
        None => groups().filter_map(|group| group.get("format")?.as_str()).collect(),
    };
    if formats.is_empty() {
        return Some("of no format".into());
    }
    if let Some(format) = formats.iter().find(|format| !["pack-quantized", "float-quantized", "dense"].contains(format))
    {
        return Some(format.chars().take(40).collect());
    }
    let weights = || groups().filter_map(|group| group.get("weights"));
    let packed = formats.contains(&"pack-quantized");
    [
        ("weights of zero points", packed && weights().any(|weights| weights["symmetric"] == false)),
        ("packed floating point", packed && all.is_some() && weights().any(|weights| weights["type"] == "float")),
        ("actorder of groups", weights().any(|weights| weights["actorder"] == "group")),
    ]
    .into_iter()
    .find_map(|(what, is_there)| is_there.then(|| what.to_owned()))
}

/// The format that has this tensor in this shape: MLX's convolutions have the input channels last, and norms that are not
/// zero-centred, whatever the configuration says.
fn shaped_format(name: &str, checkpoint: &Checkpoint) -> Option<&'static str> {
    let convolution = name.strip_suffix("linear_attn.conv1d.weight").and_then(|_| checkpoint.get(name).ok()?)?;
    matches!(convolution.shape[..], [_, taps, 1] if taps > 1).then_some("an MLX checkpoint")
}

/// The format with tensors of this name, for directories whose configuration names none.
fn named_format(name: &str, experts: Experts) -> Option<&'static str> {
    let (module, last) = name.rsplit_once('.')?;
    match last {
        "scales" | "biases" => Some("an MLX checkpoint"),
        _ if module.split('.').any(|part| ["switch_glu", "switch_mlp"].contains(&part)) => Some("an MLX checkpoint"),
        _ if module.split('.').any(|part| part.starts_with("lora_")) => Some("a LoRA adapter"),
        "g_idx" => Some("a GPTQ checkpoint"),
        "qweight" | "qzeros" => Some("an AWQ or GPTQ checkpoint"),
        "weight_scale_2" => Some("an NVFP4 checkpoint"),
        "absmax" | "quant_map" | "SCB" => Some("a bitsandbytes checkpoint"),
        _ if experts == Experts::Stacked
            && module.split('.').skip_while(|part| *part != "experts").nth(1).is_some_and(is_number) =>
        {
            Some("a checkpoint with a tensor per expert, but not for all")
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

/// Rejects a GGUF file with types that no kernel supports, before any weight is loaded.
///
/// # Errors
/// If a tensor of the text model has such a type; the first is named.
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
    let problem = format!("is {type_name}, which is not supported ({count} of {all} tensors are); {OTHER_TYPES}");
    let path = Some(checkpoint.path().to_owned());
    Err(Error::Unsupported { path, what: format!("tensor {name}"), problem })
}

/// Whether an unused tensor scales, shifts or permutes quantized weights: a model without it computes something else.
pub(super) fn is_scale(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    let known = ["scale", "scales", "biases", "zero", "zeros", "qzeros", "idx", "absmax", "SCB"];
    last.split('_').any(|word| known.contains(&word))
}
