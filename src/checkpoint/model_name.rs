//! Names of models.

use std::path::{Path, PathBuf};

/// The name of a model's file or directory; of a snapshot in the Hub's cache, whose directory is named by its commit, the
/// repository's.
pub fn model_name(model: impl AsRef<Path>) -> String {
    let model = model.as_ref();
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let snapshots = model.parent().filter(|parent| parent.ends_with("snapshots"));
    let repository = snapshots.and_then(Path::parent).and_then(repository_name);
    repository.or_else(|| name(model)).unwrap_or_else(|| "model".into())
}

/// `name` of `models--owner--name`, a directory of the Hub's cache.
pub(super) fn repository_name(directory: &Path) -> Option<String> {
    Some(directory.file_name()?.to_str()?.strip_prefix("models--")?.split_once("--")?.1.to_owned())
}

/// The snapshot of a repository's directory in the Hub's cache that its `refs/main` names.
pub(super) fn snapshot(repository: &Path) -> Option<PathBuf> {
    let revision = std::fs::read_to_string(repository.join("refs/main")).ok()?;
    Some(repository.join("snapshots").join(revision.trim())).filter(|snapshot| snapshot.is_dir())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_named_by_file_directory_or_repository() {
        for (model, name) in [
            ("hub/models--google--gemma-4-E2B-it/snapshots/0123abcd", "gemma-4-E2B-it"),
            ("hub/models--a--b-GGUF/snapshots/0123abcd/b-Q4_K_M.gguf", "b-Q4_K_M.gguf"),
            ("mine/snapshots/first", "first"),
            ("models/Qwen3.5-0.8B", "Qwen3.5-0.8B"),
            ("/", "model"),
        ] {
            assert_eq!(model_name(Path::new(model)), name, "{model}");
        }
    }
}
