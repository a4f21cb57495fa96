//! Files and directories of unsupported formats: each is refused by name, with an alternative.

use std::path::{Path, PathBuf};

use super::fields::Fields;
use super::gguf::Gguf;
use super::model_name;
use super::other_models::SUPPORTED;
use super::placeholder::refuse_placeholder;
use crate::{Error, Result};

/// Alternative to an unsupported directory.
pub(super) const INSTEAD: &str = "use the bf16 checkpoint, or a GGUF file of the model (Q4_K_M, Q6_K, Q8_0)";

/// Maximum files listed in an error.
const MAX_LISTED: usize = 4;

/// Refuses a directory without a model's weights, if its contents explain why.
///
/// # Errors
/// If it holds a LoRA adapter, GGUF files or directories of checkpoints.
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
        return Err(adapter_error(directory, "adapter_config.json", base));
    }
    let entries = std::fs::read_dir(directory).map_err(Error::io(directory))?.filter_map(|entry| entry.ok());
    let names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    if let Some(link) =
        ["model.safetensors", "model.safetensors.index.json"].iter().find(|name| names.iter().any(|n| n == *name))
    {
        let problem = format!("{link} is a dangling link; download the checkpoint again");
        return Err(Error::file(directory, problem));
    }
    let is_pipeline = |name: &String| name == "model_index.json" || name.starts_with("diffusion_pytorch_model");
    if let Some(file) = names.iter().filter(|name| is_pipeline(name)).min() {
        let problem = format!("has {file}: it is a diffusion model, which generates no text; {SUPPORTED}");
        return Err(Error::file(directory, problem));
    }
    let files: Vec<&str> = names.iter().map(String::as_str).filter(|name| is_gguf(Path::new(name))).collect();
    if !files.is_empty() {
        return Err(Error::file(directory, several("GGUF files", files)));
    }
    if let Some(weights) = names.iter().filter(|name| name.starts_with("adapter_model.")).min() {
        return Err(adapter_error(directory, weights, None));
    }
    if let Some(shard) = names.iter().filter(|name| name.ends_with(".safetensors")).min() {
        return Err(Error::file(directory, without_list(shard, &names)));
    }
    let other = names.iter().filter_map(|name| Some((name, other_format(Path::new(name))?))).min();
    if let Some((file, (format, problem))) = other {
        let problem = format!("has {file}, but no model.safetensors: {format} {problem}");
        return Err(Error::file(directory, problem));
    }
    if let Some(snapshot) = snapshot_in(directory) {
        let problem = format!("is a directory of the Hub's cache; use the snapshot in it, {}", snapshot.display());
        return Err(Error::file(directory, problem));
    }
    let is_checkpoint = |name: &&str| directory.join(name).join("config.json").is_file();
    let checkpoints: Vec<&str> = names.iter().map(String::as_str).filter(is_checkpoint).collect();
    if has("config.json") || checkpoints.is_empty() {
        return Ok(());
    }
    Err(Error::file(directory, several("checkpoints", checkpoints)))
}

/// The problem with a directory of several checkpoints, which are `kind`.
fn several(kind: &str, mut names: Vec<&str>) -> String {
    names.sort_unstable();
    let more = names.len().saturating_sub(MAX_LISTED);
    names.truncate(MAX_LISTED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("contains {kind}; use one of them: {}{more}", names.join(", "))
}

/// The error for an adapter with the file `what`, which names its base model if that is known.
fn adapter_error(directory: &Path, what: &str, base: Option<String>) -> Error {
    let base = base.map_or_else(
        || "its base model".to_owned(),
        |name| format!("its base model {}", name.chars().take(100).collect::<String>()),
    );
    let problem =
        format!("LoRA adapters are not supported; merge the adapter into {base}, and use the merged directory");
    Error::Unsupported { path: Some(directory.to_owned()), what: what.into(), problem }
}

/// The problem with weights that neither have the name of a whole file nor an index.
fn without_list(shard: &str, names: &[String]) -> String {
    let others = names.iter().filter(|name| name.ends_with(".safetensors")).count().saturating_sub(1);
    match (shard.contains("-of-"), others) {
        (true, _) => {
            format!("has {shard}, but no model.safetensors.index.json, which lists the shards; download it too")
        }
        (false, 0) => format!("has {shard}, but no model.safetensors; rename the weights to that"),
        (false, _) => format!(
            "has {shard} and {others} more, but no model.safetensors or model.safetensors.index.json, which lists \
             them; download that too"
        ),
    }
}

/// The snapshot in a repository's directory of the Hub's cache, or in its `snapshots`: the current one, or any.
fn snapshot_in(directory: &Path) -> Option<PathBuf> {
    let is_snapshots = directory.file_name().is_some_and(|name| name == "snapshots");
    let snapshots = if is_snapshots { directory.to_owned() } else { directory.join("snapshots") };
    if let Some(current) = snapshots.parent().and_then(model_name::snapshot) {
        return Some(current);
    }
    let entries = std::fs::read_dir(snapshots).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    entries.filter(|path| path.is_dir()).max()
}

/// The format of another program's file, by its name; and the problem with it, with the remedy.
fn other_format(path: &Path) -> Option<(&'static str, String)> {
    let format = match path.extension()?.to_str()?.to_lowercase().as_str() {
        "bin" | "pt" | "pth" | "ckpt" => "a PyTorch file",
        "onnx" => "an ONNX file",
        "task" | "litertlm" | "tflite" => "a LiteRT file",
        "h5" | "msgpack" | "npz" => "another framework's file",
        "part" | "partial" | "incomplete" | "crdownload" | "aria2" => {
            return Some(("an incomplete download", "is not read; resume it, or download the file again".into()));
        }
        _ => return None,
    };
    Some((format, format!("is not supported; {INSTEAD}")))
}

/// Whether the file, or a piece of it, is named like a GGUF file.
fn is_gguf(path: &Path) -> bool {
    let is_named = |path: &Path| path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    is_named(path) || (is_piece(path) && path.file_stem().is_some_and(|stem| is_named(Path::new(stem))))
}

/// Whether the file is a piece of one that was cut for its size: `NAME.gguf.part1of2`. The first begins like a GGUF file.
pub(super) fn is_piece(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    let numbers = extension.and_then(|extension| extension.strip_prefix("part")?.split_once("of"));
    numbers.is_some_and(|(number, count)| [number, count].iter().all(|digits| digits.parse::<u32>().is_ok()))
}

/// The error for a file that is used as a checkpoint but is not a GGUF file.
pub(super) fn other_file(path: &Path, beginning: &[u8]) -> Error {
    if let Err(error) = refuse_placeholder(path, beginning) {
        return error;
    }
    let stem = path.file_stem().unwrap_or_default().display();
    let problem = match other_format(path) {
        _ if is_piece(path) => {
            format!(
                "is a piece of {stem}; join all in their order (cat $(ls -v {stem}.part*) > {stem}), and use that file"
            )
        }
        Some((format, problem)) => format!("is {format}, which {problem}"),
        None => {
            "is a file, but not a GGUF file; use the checkpoint's directory (with config.json and model.safetensors)"
                .into()
        }
    };
    Error::file(path, problem)
}

/// Refuses a GGUF file without a model.
///
/// # Errors
/// If it is an adapter, an importance matrix, a control vector, only towers, or only metadata.
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
        _ if gguf.tensors().next().is_none() => {
            let problem = "has no tensors, only metadata, such as a vocabulary; use the model's file";
            return Err(Error::file(gguf.path(), problem));
        }
        _ => return Ok(()),
    };
    Err(gguf.key_error(key, problem))
}
