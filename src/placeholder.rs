//! What a download leaves in the place of a file: a pointer of git-LFS, or a web page.

use std::path::Path;

use crate::{Error, Result};

/// Bytes that tell.
pub(crate) const BEGINNING: usize = 64;

/// Refuses a file that begins as a pointer of git-LFS, or as a web page, does.
///
/// # Errors
/// If it does.
pub(crate) fn refuse_placeholder(path: &Path, bytes: &[u8]) -> Result<()> {
    let start = bytes[..bytes.len().min(BEGINNING)].trim_ascii_start().to_ascii_lowercase();
    let begins = |with: &str| start.starts_with(with.as_bytes());
    let problem = if begins("version https://git-lfs") {
        "is git-LFS's pointer to the file, not the file itself; run git lfs pull, or download it again"
    } else if begins("<!doctype html") || begins("<html") {
        "is a web page, not the file itself; download it again, and log in first if its repository is gated"
    } else {
        return Ok(());
    };
    Err(Error::file(path, problem))
}
