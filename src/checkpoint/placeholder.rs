//! Detects files that were not downloaded: git-LFS pointers and HTML pages.

use std::path::Path;

use crate::{Error, Result};

/// Bytes to inspect.
pub(crate) const BEGINNING: usize = 64;

/// Refuses a git-LFS pointer or an HTML page.
///
/// # Errors
/// If `bytes` begin as one does.
pub(crate) fn refuse_placeholder(path: &Path, bytes: &[u8]) -> Result<()> {
    let start = bytes[..bytes.len().min(BEGINNING)].trim_ascii_start().to_ascii_lowercase();
    let begins = |with: &str| start.starts_with(with.as_bytes());
    let problem = if begins("version https://git-lfs") {
        "is a git-LFS pointer, not the file itself; run git lfs pull, or download it again"
    } else if begins("<!doctype html") || begins("<html") {
        "is a web page, not the file itself; download it again, and log in first if its repository is gated"
    } else {
        return Ok(());
    };
    Err(Error::file(path, problem))
}
