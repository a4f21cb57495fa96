//! Texts from files and stdin, and this project's.

use std::fs::{File, read_dir};
use std::io::{Read, stdin};
use std::path::Path;

use foretoken::{Error, Result};

use crate::repository;

/// The text of a file, or of stdin if `path` is `-`, without a byte order mark.
///
/// # Errors
/// [`Error::File`] if it cannot be read or is not UTF-8, with the offset of the first byte that is not.
pub fn text(path: &Path) -> Result<String> {
    text_within(path, u64::MAX)
}

/// As [`text`], of at most `limit` bytes.
///
/// # Errors
/// As [`text`], or if it is longer.
pub fn text_within(path: &Path, limit: u64) -> Result<String> {
    match path == Path::new("-") {
        true => read(Path::new("stdin"), stdin(), limit),
        false => file_within(path, limit),
    }
}

/// As [`text`], but `-` is a file of that name.
///
/// # Errors
/// As [`text`].
pub fn file(path: &Path) -> Result<String> {
    file_within(path, u64::MAX)
}

/// As [`file()`], of at most `limit` bytes.
///
/// # Errors
/// As [`file()`], or if it is longer.
pub fn file_within(path: &Path, limit: u64) -> Result<String> {
    read(path, File::open(path).map_err(|cause| error(path, cause.to_string()))?, limit)
}

/// The prompts of a file with a JSON list of them, or of stdin if `path` is `-`.
///
/// # Errors
/// As [`text`], or if it is not such a list.
pub fn prompts(path: &Path) -> Result<Vec<String>> {
    let text = text(path)?;
    serde_json::from_str(&text).map_err(|cause| error(path, format!("is not a JSON list of prompts: {cause}")))
}

/// Sources of this project, in a fixed order: a long text that needs no download.
///
/// # Errors
/// If one cannot be read.
pub fn sources() -> Result<String> {
    let mut text = String::new();
    for folder in ["kernels/src/quant", "src/checkpoint", "src/gemma4", "src/speculative"] {
        let folder = repository().join(folder);
        let entries = read_dir(&folder).map_err(|cause| error(&folder, cause.to_string()))?;
        let mut files: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        files.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
        files.sort();
        for path in files {
            text += &file(&path)?;
        }
    }
    Ok(text)
}

fn read(path: &Path, source: impl Read, limit: u64) -> Result<String> {
    let mut bytes = Vec::new();
    let read = source.take(limit.saturating_add(1)).read_to_end(&mut bytes);
    read.map_err(|cause| error(path, cause.to_string()))?;
    if bytes.len() as u64 > limit {
        return Err(error(path, format!("is longer than {} MiB; shorten it", limit >> 20)));
    }
    let text = String::from_utf8(bytes).map_err(|not_text| {
        let at = not_text.utf8_error().valid_up_to();
        error(path, format!("is not UTF-8 at byte offset {at}; convert it to UTF-8"))
    })?;
    Ok(text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text))
}

/// Not [`Error::Io`], which would propose to download the file.
fn error(path: &Path, problem: String) -> Error {
    Error::File { path: path.to_owned(), problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With one, an API key would not match, and a prompt would have another token.
    #[test]
    fn a_byte_order_mark_is_not_text() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("keys");
        for (content, want) in [("\u{feff}a\u{feff}\r\n", "a\u{feff}\r\n"), ("\u{feff}", ""), ("a", "a"), ("", "")] {
            std::fs::write(&path, content).expect("a file");
            assert_eq!(text(&path).expect("a text"), want, "{content:?}");
            assert_eq!(file(&path).expect("a text"), want, "{content:?}");
        }
        std::fs::write(&path, b"\xEF\xBB\xBFa\xFF").expect("a file");
        let error = file(&path).expect_err("not UTF-8").to_string();
        assert!(error.contains("is not UTF-8 at byte offset 4"), "{error}");
        std::fs::write(&path, "\u{feff}[\"a\"]").expect("a file");
        assert_eq!(prompts(&path).expect("prompts"), ["a"]);
    }
}
