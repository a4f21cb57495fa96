//! Tensors of unsupported formats: each is refused by name, with an alternative.

use serde_json::Value;

use super::compressed::descriptions;
use super::fields::Fields;
use super::files::Checkpoint;
use super::tensor::{TensorType, tensor_type};
use super::tower_names::is_tower;
use super::unsupported::INSTEAD;
use crate::{Error, Result};

/// Alternative to a GGUF file with unsupported types.
const OTHER_TYPES: &str = "use a file with another quantization (Q4_K_M, Q5_K_M, Q6_K, Q8_0 or BF16)";

/// Refuses a directory of quantized safetensors.
///
/// # Errors
/// If its configuration or tensor names are those of a quantized format.
pub(super) fn refuse_quantized(config: &Fields, checkpoint: &Checkpoint) -> Result<()> {
    for (fields, name, own) in descriptions(config)? {
        if let Some(format) = configured_format(&own) {
            return Err(fields.unsupported(name, format!("this is {format}, which is not supported; {INSTEAD}")));
        }
    }
    let names = checkpoint.names();
    let found = names
        .iter()
        .filter(|name| !is_tower(name))
        .find_map(|name| named_format(name).or_else(|| shaped_format(name, checkpoint)).map(|format| (name, format)));
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

/// Refuses a model whose head scores texts instead of generating them.
///
/// # Errors
/// If a class in `architectures` is such a model's.
pub(super) fn refuse_other_head(config: &Fields) -> Result<()> {
    let classes = config.get("architectures").and_then(Value::as_array);
    let mut classes = classes.into_iter().flatten().filter_map(Value::as_str);
    let other = ["Classification", "QuestionAnswering", "Reward"];
    match classes.find(|class| other.iter().any(|part| class.contains(part))) {
        None => Ok(()),
        Some(class) => {
            let class: String = class.chars().take(60).collect();
            let problem =
                "does not generate text; use the checkpoint of the model's ForCausalLM or ForConditionalGeneration";
            Err(config.unsupported("architectures", format!("{class} {problem}")))
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
        "modelopt" if text("quant_algo").as_deref() == Some("FP8") => return None,
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
    let read = ["pack-quantized", "float-quantized", "naive-quantized", "dense"];
    if let Some(format) = formats.iter().find(|format| !read.contains(format)) {
        return Some(format.chars().take(40).collect());
    }
    let weights = || groups().filter_map(|group| group.get("weights"));
    let (packed, naive) = (formats.contains(&"pack-quantized"), all == Some("naive-quantized"));
    [
        // FP8 whose inputs are not quantized has the format of such integers.
        ("naive-quantized integers", naive && weights().any(|weights| weights["type"] != "float")),
        ("weights of zero points", packed && weights().any(|weights| weights["symmetric"] == false)),
        ("packed floating point", packed && all.is_some() && weights().any(|weights| weights["type"] == "float")),
        ("actorder of groups", weights().any(|weights| weights["actorder"] == "group")),
    ]
    .into_iter()
    .find_map(|(what, is_there)| is_there.then(|| what.to_owned()))
}

/// The format that has this tensor in this shape: MLX's convolutions have the input channels last, and norms that are
/// not zero-centred, whatever the configuration says.
fn shaped_format(name: &str, checkpoint: &Checkpoint) -> Option<&'static str> {
    let convolution = name.strip_suffix("linear_attn.conv1d.weight").and_then(|_| checkpoint.get(name).ok()?)?;
    matches!(convolution.shape[..], [_, taps, 1] if taps > 1).then_some("an MLX checkpoint")
}

/// The format with tensors of this name, for directories whose configuration names none.
fn named_format(name: &str) -> Option<&'static str> {
    let (module, last) = name.rsplit_once('.')?;
    match last {
        "scales" | "biases" => Some("an MLX checkpoint"),
        _ if module.split('.').any(|part| ["switch_glu", "switch_mlp"].contains(&part)) => Some("an MLX checkpoint"),
        _ if module.split('.').any(|part| part.starts_with("lora_")) => Some("a LoRA adapter"),
        "g_idx" => Some("a GPTQ checkpoint"),
        "qweight" | "qzeros" => Some("an AWQ or GPTQ checkpoint"),
        "weight_scale_2" => Some("an NVFP4 checkpoint"),
        "absmax" | "quant_map" | "SCB" => Some("a bitsandbytes checkpoint"),
        last if module.ends_with(".quant_state") || last.starts_with("bitsandbytes__") => {
            Some("a bitsandbytes checkpoint")
        }
        _ => None,
    }
}

/// Refuses a GGUF file with types that no kernel supports, before any weight is loaded.
///
/// # Errors
/// If a tensor of the text model has such a type; the first is named.
pub(super) fn refuse_types(checkpoint: &Checkpoint) -> Result<()> {
    let Some(gguf) = checkpoint.gguf() else { return Ok(()) };
    let unsupported = |type_id: u32| match tensor_type(type_id) {
        TensorType::Other(name) => Some(name),
        _ => None,
    };
    let text = || gguf.tensors().filter(|tensor| !is_tower(tensor.name()));
    let found = text().find_map(|tensor| Some((tensor.name(), unsupported(tensor.type_id())?)));
    let Some((name, type_name)) = found else { return Ok(()) };
    let (count, all) = (text().filter(|tensor| unsupported(tensor.type_id()).is_some()).count(), text().count());
    let problem = format!("is {type_name}, which is not supported ({count} of {all} tensors are); {OTHER_TYPES}");
    let path = Some(checkpoint.path().to_owned());
    Err(Error::Unsupported { path, what: format!("tensor {name}"), problem })
}

/// Whether an unused tensor is not needed: a buffer saved by older versions of transformers, which the configuration
/// implies, or a scale of an FP8 KV cache, which this cache does not have.
pub(crate) fn is_unneeded(name: &str) -> bool {
    let unneeded =
        ["inv_freq", ".embed_scale", "self_attn.k_scale", "self_attn.v_scale", "k_proj.k_scale", "v_proj.v_scale"];
    unneeded.iter().any(|end| name.ends_with(end))
}

/// The problem with such a scale, and the remedy.
pub(super) const STRAY_SCALE: &str = "is a scale that no module applies, so the weights would be wrong; \
     use a file quantized without such scales (Q4_K_M, Q6_K, Q8_0), or the bf16 checkpoint";

/// Whether an unused tensor scales, shifts or permutes quantized weights: a model without it computes something else.
pub(super) fn is_scale(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    let known = ["scale", "scales", "biases", "zero", "zeros", "qzeros", "idx", "absmax", "SCB"];
    !is_unneeded(name) && last.split('_').any(|word| known.contains(&word))
}
