//! Finds assistants next to a target, or in the cache of the Hugging Face Hub.

use std::path::{Path, PathBuf};

use super::architecture::Architecture;
use super::files::Checkpoint;
use super::gguf::split_part;
use super::model_name;
use crate::gemma4::{TextConfig, check_pair};
use crate::{Error, Result};

/// The assistants found for a target, by path.
#[derive(Debug, Default)]
pub struct FoundAssistants {
    /// Those that fit the target.
    pub fitting: Vec<PathBuf>,
    /// Those that do not fit or cannot be read, with the reason.
    pub misfits: Vec<(PathBuf, Error)>,
}

impl FoundAssistants {
    /// The only one that fits; `None` if none does, or several do.
    pub fn only(&self) -> Option<&Path> {
        match &self.fitting[..] {
            [one] => Some(one),
            _ => None,
        }
    }
}

/// Looks for assistants next to the target `model`, a directory or a GGUF file: in its own directory `mtp-*.gguf`,
/// `*-mtp*.gguf`, `*-assistant*.gguf`, `assistant.gguf` and the checkpoints in the directories `assistant` and `MTP`,
/// and next to it a checkpoint `MODEL-assistant` or `MODEL-mtp.gguf`, where MODEL is the name with or without its
/// type (`-Q4_K_M`). For a model in a cache of the Hub (`models--OWNER--NAME/snapshots/REVISION`) it is the
/// repository `NAME-assistant` of any owner in the same cache, by its `refs/main`; nothing is downloaded. Headers are
/// read, not weights. If the model's own directory contains an assistant ([`Checkpoint::inner_assistant`]) that fits,
/// only that one is returned, as the path `model`.
///
/// # Errors
/// If the target cannot be read.
pub fn find_assistants(model: impl AsRef<Path>) -> Result<FoundAssistants> {
    let model = model.as_ref();
    let candidates = candidates(model);
    if candidates.is_empty() && !model.is_dir() {
        return Ok(FoundAssistants::default());
    }
    let target = Checkpoint::open(model)?;
    if !Architecture::of(&target.model_type()?).takes_assistants() {
        // It has a NextN head; files named like an assistant are that head.
        return Ok(FoundAssistants::default());
    }
    let inner = target.inner_assistant()?;
    if candidates.is_empty() && inner.is_none() {
        return Ok(FoundAssistants::default());
    }
    let target = target.target_config()?;
    let mut found = FoundAssistants::default();
    if let Some(inner) = inner {
        match inner.assistant_config().and_then(|config| check_pair(&config, &target)) {
            Ok(_) => return Ok(FoundAssistants { fitting: vec![model.to_owned()], ..found }),
            Err(error) => found.misfits.push((model.to_owned(), error)),
        }
    }
    for path in candidates {
        match fits(&path, &target) {
            Ok(()) => found.fitting.push(path),
            Err(error) => found.misfits.push((path, error)),
        }
    }
    Ok(found)
}

fn fits(path: &Path, target: &TextConfig) -> Result<()> {
    check_pair(&Checkpoint::open_assistant(path)?.assistant_config()?, target).map(drop)
}

/// Paths named like an assistant, sorted, without duplicates; of split files the first part.
fn candidates(model: &Path) -> Vec<PathBuf> {
    // So that `.` has a name. Links are not resolved: their targets may be elsewhere, under another name.
    let model = std::path::absolute(model).unwrap_or_else(|_| model.to_owned());
    let (inside, stem) = match model.is_dir() {
        true => (Some(model.as_path()), model.file_name()),
        false => (model.parent(), model.file_stem()),
    };
    let mut found = Vec::new();
    if let Some(inside) = inside {
        found.extend(gguf_files(inside).filter(|path| file_name(path).is_some_and(|name| may_be_assistants(&name))));
        let named = |path: &PathBuf| file_name(path).is_some_and(|name| ["mtp", "assistant"].contains(&name.as_str()));
        let directories = entries(inside).filter(|path| named(path) && path.is_dir());
        found.extend(directories.flat_map(checkpoints).filter(|path| is_checkpoint(path)));
    }
    if let (Some(parent), Some(stem)) = (model.parent(), stem.and_then(|stem| stem.to_str())) {
        let stem = split_part(stem).map_or(stem, |(name, ..)| name);
        let names = [stem, without_type(stem)]
            .map(|stem| [format!("{stem}-assistant"), format!("{stem}-assistant.gguf"), format!("{stem}-mtp.gguf")]);
        found.extend(names.concat().iter().flat_map(|name| checkpoints(parent.join(name))));
    }
    found.extend(in_hub_cache(&model));
    found.retain(|path| *path != model && path.exists() && !is_later_part(path));
    found.sort();
    found.dedup();
    found
}

/// Whether this is a file, or a directory with config.json.
fn is_checkpoint(path: &Path) -> bool {
    !path.is_dir() || path.join("config.json").exists()
}

/// The GGUF files in the directory `path`, which may have a config.json beside them; `path` itself
/// if there are none, or if it has safetensors.
fn checkpoints(path: PathBuf) -> Vec<PathBuf> {
    let files: Vec<_> = gguf_files(&path).collect();
    if files.is_empty() || path.join("model.safetensors").exists() { vec![path] } else { files }
}

/// Whether a GGUF file of this lowercase name is an assistant's.
pub(crate) fn is_assistants_name(name: &str) -> bool {
    name.starts_with("mtp-")
        || ["-assistant", "_assistant"].iter().any(|part| name.contains(part))
        || name == "assistant.gguf"
}

/// As [`is_assistants_name`], or with `-mtp` anywhere: next to a Gemma 4 that is its assistant, but a
/// Qwen3.5 of this name has its head in the file.
fn may_be_assistants(name: &str) -> bool {
    is_assistants_name(name) || ["-mtp.", "-mtp-"].iter().any(|part| name.contains(part))
}

/// The name without a weight type at its end: `-Q4_K_M`, `-UD-IQ2_XXS`, `.BF16`.
fn without_type(stem: &str) -> &str {
    let starts = ["q", "iq", "tq", "bf16", "f16", "f32", "mxfp4", "nvfp4"];
    let is_type = |last: &str| {
        let last = last.to_lowercase();
        starts.iter().any(|start| last.starts_with(start)) && last.bytes().any(|byte| byte.is_ascii_digit())
    };
    match stem.rsplit_once(['-', '.']).filter(|(_, last)| is_type(last)) {
        Some((name, _)) => name.strip_suffix("-UD").unwrap_or(name),
        None => stem,
    }
}

/// The assistants in the Hub cache that contains the model: directories, and GGUF files. A target's repository of GGUF
/// files (`NAME-GGUF`) has the assistants of `NAME`.
fn in_hub_cache(model: &Path) -> Vec<PathBuf> {
    let ancestors = || model.ancestors().zip(model.ancestors().skip(1));
    let snapshots = ancestors().find(|(_, parent)| parent.file_name().is_some_and(|name| name == "snapshots"));
    let repository = snapshots.and_then(|(_, snapshots)| snapshots.parent());
    let Some((cache, name)) = repository.and_then(|own| Some((own.parent()?, repository_name(own)?))) else {
        return Vec::new();
    };
    let assistant = format!("{}-assistant", name.trim_end_matches("-gguf"));
    let its = entries(cache)
        .filter(|path| repository_name(path).is_some_and(|name| name.trim_end_matches("-gguf") == assistant));
    its.filter_map(|path| model_name::snapshot(&path))
        .flat_map(checkpoints)
        .filter(|path| is_checkpoint(path))
        .collect()
}

/// The repository's name in lowercase.
fn repository_name(path: &Path) -> Option<String> {
    model_name::repository_name(path).map(|name| name.to_lowercase())
}

/// The entries of a directory; empty if it cannot be read.
fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    std::fs::read_dir(directory).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()))
}

fn gguf_files(directory: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    entries(directory).filter(|path| path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf")))
}

fn file_name(path: &Path) -> Option<String> {
    path.file_name()?.to_str().map(str::to_lowercase)
}

/// Whether the name is that of a later part of a split file (`-00002-of-00003.gguf`).
fn is_later_part(path: &Path) -> bool {
    path.file_stem().and_then(|stem| split_part(stem.to_str()?)).is_some_and(|(_, number, _)| number > 1)
}
