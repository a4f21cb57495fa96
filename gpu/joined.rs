//! The text compiled on a Mac, for `build.rs` and for the test that compiles it here.

use std::fs;
use std::path::{Path, PathBuf};

/// A source after its dialect, with its headers inlined: the Mac compiles a string, without include paths.
pub fn joined(dialect: &Path, source: &Path) -> Result<String, String> {
    let mut text = read(dialect)?.replace("#pragma once", "");
    join(source, &mut Vec::new(), &mut text)?;
    Ok(text)
}

/// Appends a source after the headers that it includes, each of them once.
fn join(source: &Path, done: &mut Vec<PathBuf>, text: &mut String) -> Result<(), String> {
    if done.iter().any(|known| known == source) {
        return Ok(());
    }
    done.push(source.into());
    for line in read(source)?.lines() {
        match line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"')) {
            Some(header) => join(&source.with_file_name(header), done, text)?,
            None if line == "#pragma once" => {}
            None => {
                text.push_str(line);
                text.push('\n');
            }
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}
