//! Selects GGUF files of a repository by tag.

use std::path::Path;

use super::name::Name;
use crate::checkpoint::gguf::split_part;
use crate::checkpoint::is_assistants_name;

/// The models among `files` with the tag in their names, or all without a tag; of split ones the first part. Projectors
/// are excluded, and assistants if there is a target. A file named by the tag is the only result.
pub(super) fn tagged<'a>(files: &[&'a str], name: Name<'_>) -> Vec<&'a str> {
    let models = files.iter().copied().filter(|file| {
        let name = file_name(file);
        let Some(stem) = name.strip_suffix(".gguf") else { return false };
        !name.contains("mmproj") && split_part(stem).is_none_or(|(_, number, _)| number == 1)
    });
    let tag = name.tag.map(str::to_lowercase);
    let has_tag = |file: &&str| tag.as_ref().is_none_or(|tag| has_tag(&file_name(file), tag));
    let found: Vec<&str> = models.filter(has_tag).collect();
    let named: Vec<&str> = found.iter().copied().filter(|file| is_named(file, name)).collect();
    if named.len() == 1 {
        return named;
    }
    let targets: Vec<&str> = found.iter().copied().filter(|file| !is_assistant(file)).collect();
    if targets.is_empty() { found } else { targets }
}

/// Whether the file's name is the tag, or the name of the repository and the tag. An assistant is that by its whole name
/// only.
fn is_named(file: &str, Name { repository, tag, .. }: Name<'_>) -> bool {
    let (name, base) = (file_name(file), file_name(repository));
    let (Some(stem), Some(tag)) = (name.strip_suffix(".gguf"), tag.map(str::to_lowercase)) else { return false };
    let stem = split_part(stem).map_or(stem, |(name, ..)| name);
    let base = base.strip_suffix("-gguf").unwrap_or(&base);
    stem.strip_suffix(&tag).is_some_and(|before| {
        before.is_empty() || is_model(file, repository) && before.strip_suffix(['-', '.']) == Some(base)
    })
}

/// The file that `name` means on the Hub, if it is among the `cached` ones and no other can be meant: it is named
/// by the tag, or without a tag it is the only one of a repository of GGUF files.
pub(super) fn certain<'a>(cached: &[&'a str], name: Name<'_>) -> Option<&'a str> {
    let is_of_gguf = file_name(name.repository).ends_with("-gguf");
    likely(cached, name).filter(|file| if name.tag.is_some() { is_named(file, name) } else { is_of_gguf })
}

/// The only one of the `cached` files with the tag, unless it is an assistant in a repository of models. The Hub may have
/// others with that tag.
pub(super) fn likely<'a>(cached: &[&'a str], name: Name<'_>) -> Option<&'a str> {
    let [file] = tagged(cached, name)[..] else { return None };
    (is_model(file, name.repository) || is_named(file, name)).then_some(file)
}

/// Whether the file is not an assistant, or its repository is an assistant's.
fn is_model(file: &str, repository: &str) -> bool {
    !is_assistant(file) || is_assistants_name(&file_name(repository))
}

/// All parts of the file whose first is `first`, in order; `None` if one is missing.
pub(super) fn parts<'a>(first: &'a str, files: &[&'a str]) -> Option<Vec<&'a str>> {
    let Some((stem, _, count)) = first.strip_suffix(".gguf").and_then(split_part) else { return Some(vec![first]) };
    let named = |number: usize| format!("{stem}-{number:05}-of-{count:05}.gguf");
    (1..=count).map(|number| files.iter().copied().find(|file| *file == named(number))).collect()
}

/// The files in a directory and its direct subdirectories, as relative paths.
pub(super) fn in_directory(directory: &Path) -> Vec<String> {
    let names = |of: &Path| -> Vec<String> {
        let entries = std::fs::read_dir(of).into_iter().flatten().filter_map(|entry| entry.ok());
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    };
    let mut files = Vec::new();
    for name in names(directory) {
        match directory.join(&name) {
            path if path.is_dir() => files.extend(names(&path).into_iter().map(|file| format!("{name}/{file}"))),
            path if path.exists() => files.push(name), // not a dangling link
            _ => {}
        }
    }
    files.sort();
    files
}

/// Whether `tag` is in the name, between its separators.
fn has_tag(name: &str, tag: &str) -> bool {
    name.match_indices(tag).any(|(at, _)| {
        let separates = |c: char| matches!(c, '-' | '.');
        name[..at].chars().next_back().is_none_or(separates) && name[at + tag.len()..].starts_with(separates)
    })
}

fn is_assistant(file: &str) -> bool {
    is_assistants_name(&file_name(file)) || file.to_lowercase().starts_with("mtp/")
}

fn file_name(file: &str) -> String {
    file.rsplit('/').next().unwrap_or_default().to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: [&str; 12] = [
        "README.md",
        "gemma-4-E2B-it-Q4_K_M.gguf",
        "gemma-4-E2B-it-Q4_K_S.gguf",
        "gemma-4-E2B-it-UD-Q4_K_XL.gguf",
        "gemma-4-E2B-it-Q8_0.gguf",
        "gemma-4-E2B-it-qat-Q8_0.gguf",
        "mmproj-Q8_0.gguf",
        "mtp-gemma-4-E2B-it-Q8_0.gguf",
        "BF16/gemma-4-E2B-it-BF16-00001-of-00002.gguf",
        "BF16/gemma-4-E2B-it-BF16-00002-of-00002.gguf",
        "F32/gemma-4-E2B-it-F32-00001-of-00002.gguf",
        "gemma-4-E2B-it.mmproj-Q8_0.gguf",
    ];

    #[test]
    fn a_tag_is_a_part_of_a_name() {
        fn of(repository: &str, tag: Option<&str>) -> Vec<&'static str> {
            tagged(&FILES, Name { repository, revision: None, tag })
        }
        let found = |tag: &str| of("a/b", Some(tag));
        assert_eq!(found("Q4_K_M"), [FILES[1]]);
        assert_eq!(found("q4_k_s"), [FILES[2]]);
        assert_eq!(found("Q4_K_XL"), [FILES[3]]);
        assert_eq!(found("UD-Q4_K_XL"), [FILES[3]]);
        assert_eq!(found("Q4_K"), [""; 0], "not a tag's prefix");
        assert_eq!(found("K_M"), [""; 0], "not a tag's suffix");
        assert_eq!(found("Q8_0"), [FILES[4], FILES[5]], "neither projectors nor assistants");
        assert_eq!(of("a/gemma-4-E2B-it-GGUF", Some("Q8_0")), [FILES[4]], "of the repository's name");
        assert_eq!(found("gemma-4-E2B-it-Q8_0"), [FILES[4]], "the file of that name");
        assert_eq!(found("mtp-gemma-4-E2B-it-Q8_0"), [FILES[7]]);
        assert_eq!(found("BF16"), [FILES[8]]);
        assert_eq!(of("a/b", None).len(), 7);
        let alone = Name { repository: "a/b", revision: None, tag: None };
        assert_eq!(tagged(&FILES[6..8], alone), [FILES[7]], "an assistant's repository");
        assert_eq!(parts(FILES[8], &FILES), Some(vec![FILES[8], FILES[9]]));
        assert_eq!(parts(FILES[10], &FILES), None, "a part is missing");
        assert_eq!(parts(FILES[1], &FILES), Some(vec![FILES[1]]));
    }
}
