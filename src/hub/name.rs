//! Names of checkpoints on the Hub.

use std::path::Path;

/// A repository, a revision of it, and the tag of a GGUF file in it.
#[derive(Clone, Copy)]
pub(super) struct Name<'a> {
    /// `owner/name`.
    pub repository: &'a str,
    /// A branch, a tag or a commit.
    pub revision: Option<&'a str>,
    pub tag: Option<&'a str>,
}

#[cfg(feature = "hub")]
impl<'a> Name<'a> {
    /// The branch, tag or commit; without one, the branch `main`.
    pub fn revision(&self) -> &'a str {
        self.revision.unwrap_or("main")
    }

    /// The revision, if it is a commit.
    pub fn commit(&self) -> Option<&'a str> {
        let is_digit = |c: u8| matches!(c, b'0'..=b'9' | b'a'..=b'f');
        self.revision.filter(|revision| revision.len() == 40 && revision.bytes().all(is_digit))
    }
}

/// Parses `owner/name`, `owner/name@revision`, `owner/name:tag` or `owner/name@revision:tag`.
pub(super) fn name(path: &Path) -> Option<Name<'_>> {
    let whole = path.to_str()?;
    let (whole, tag) = split(whole, ':');
    let (repository, revision) = split(whole, '@');
    let (owner, name) = repository.split_once('/')?;
    let plain = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    let is_file = [".gguf", ".safetensors"].iter().any(|extension| name.ends_with(extension));
    let is_name = plain(owner) && plain(name) && !is_file && tag.is_none_or(plain);
    // Names of branches may contain slashes (refs/pr/1).
    let is_revision = revision.is_none_or(|revision| revision.split('/').all(plain));
    (is_name && is_revision).then_some(Name { repository, revision, tag })
}

/// What is before the first `separator`, and what is after it.
fn split(text: &str, separator: char) -> (&str, Option<&str>) {
    text.split_once(separator).map_or((text, None), |(before, after)| (before, Some(after)))
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
        assert_eq!((tagged.repository, tagged.revision, tagged.tag), ("a/b", None, Some("Q4_K_M")));
        for revision in ["main", "v1.0", "refs/pr/1", "0123456789abcdef0123456789abcdef01234567"] {
            let whole = format!("a/b@{revision}");
            let of = name(Path::new(&whole)).expect("a name");
            assert_eq!((of.repository, of.revision, of.tag), ("a/b", Some(revision), None));
            let whole = format!("a/b@{revision}:Q4_K_M");
            let of = name(Path::new(&whole)).expect("a name");
            assert_eq!((of.repository, of.revision, of.tag), ("a/b", Some(revision), Some("Q4_K_M")));
        }
        for path in ["model.gguf", "models/model.gguf", "models/model.safetensors", "./models", "a/b/c", "/a", "a/b:"] {
            assert!(name(Path::new(path)).is_none(), "{path}");
        }
        for path in ["a/b@", "a/b@:Q4_0", "a/b@../c", "a/b@c//d", "a/b@c@d", "a/b:Q4_0@c", "a/model.gguf@c"] {
            assert!(name(Path::new(path)).is_none(), "{path}");
        }
    }
}
