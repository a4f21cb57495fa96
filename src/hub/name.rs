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
    (plain(owner) && plain(name) && tag.is_none_or(plain)).then_some(Name { repository, tag })
}
