//! Names of checkpoints on the Hub.

use std::path::Path;

/// A repository, and the tag of a GGUF file in it.
#[derive(Clone, Copy)]
pub(super) struct Name<'a> {
    /// `owner/name`.
    pub repository: &'a str,
    pub tag: Option<&'a str>,
}

/// Parses `owner/name` or `owner/name:tag`.
pub(super) fn name(path: &Path) -> Option<Name<'_>> {
    let whole = path.to_str()?;
    let (repository, tag) = match whole.split_once(':') {
        Some((repository, tag)) => (repository, Some(tag)),
        None => (whole, None),
    };
    let (owner, name) = repository.split_once('/')?;
    let plain = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    let is_file = [".gguf", ".safetensors"].iter().any(|extension| name.ends_with(extension));
    (plain(owner) && plain(name) && !is_file && tag.is_none_or(plain)).then_some(Name { repository, tag })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_from_paths() {
        for repository in ["google/gemma-4-E2B-it", "a/b", "owner/Qwen3.5-4B-GGUF", "a/model.v1"] {
            assert_eq!(name(Path::new(repository)).map(|name| name.repository), Some(repository));
        }
        let tagged = name(Path::new("a/b:Q4_K_M")).expect("a name");
        assert_eq!((tagged.repository, tagged.tag), ("a/b", Some("Q4_K_M")));
        for path in ["model.gguf", "models/model.gguf", "models/model.safetensors", "./models", "a/b/c", "/a", "a/b:"] {
            assert!(name(Path::new(path)).is_none(), "{path}");
        }
    }
}
