//! Checkpoints in several files, as gguf-split writes them: `NAME-00001-of-00003.gguf` and so on, all metadata in the
//! first, `split.no` and `split.count` in each.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::file::{Gguf, Part};
use crate::{Error, Result};

/// The number in a file's name has five digits, the one in the metadata two bytes.
const MAX_FILES: usize = u16::MAX as usize;

impl Gguf {
    /// Opens the file `path`. If it belongs to a split checkpoint (`NAME-00001-of-00003.gguf`), the others are
    /// opened as well; `path` may be any of them.
    ///
    /// # Errors
    /// If a file is missing, malformed, or of another version or byte order.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let gguf = Self::single(Part::open(path.as_ref())?, 0)?;
        let count = count(&gguf)?;
        let whole = if count == 1 { gguf } else { open_all(&gguf, count)? };
        Ok(whole.split_qkv())
    }

    /// Reads a checkpoint in memory.
    ///
    /// # Errors
    /// If it is malformed, or one part of a split checkpoint.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self> {
        let gguf = Self::single(Part { path: "(memory)".into(), bytes: Arc::new(bytes) }, 0)?;
        match count(&gguf)? {
            1 => Ok(gguf.split_qkv()),
            count => Err(Error::file(gguf.path(), format!("is one of {count} files; open the first of them by path"))),
        }
    }
}

/// Number of files of the checkpoint that `gguf` belongs to.
fn count(gguf: &Gguf) -> Result<usize> {
    match number(gguf, "split.count")? {
        None | Some(0) => Ok(1), // 0: merged from several
        Some(count @ 1..=MAX_FILES) => Ok(count),
        Some(count) => Err(gguf.key_error("split.count", format!("is {count}, must be at most {MAX_FILES}"))),
    }
}

fn number(gguf: &Gguf, key: &str) -> Result<Option<usize>> {
    let Some(value) = gguf.metadata(key) else { return Ok(None) };
    match value.as_u64().and_then(|number| usize::try_from(number).ok()) {
        Some(number) => Ok(Some(number)),
        None => Err(gguf.key_error(key, format!("is {value:?}, must be an integer"))),
    }
}

/// Opens all `count` files of the checkpoint that `given` belongs to.
fn open_all(given: &Gguf, count: usize) -> Result<Gguf> {
    let mut whole: Option<Gguf> = None;
    for (i, path) in paths(given.path(), count)?.iter().enumerate() {
        let file = Gguf::single(Part::open(path)?, i)?;
        if number(&file, "split.count")? != Some(count) {
            let problem = format!("is not {count}, as in the other files of the checkpoint; download the files again");
            return Err(file.key_error("split.count", problem));
        }
        if number(&file, "split.no")? != Some(i) {
            let problem = format!("is not {i}, as the file's name says; restore its name, or download it again");
            return Err(file.key_error("split.no", problem));
        }
        match &mut whole {
            None => whole = Some(file),
            Some(whole) => append(whole, file)?,
        }
    }
    let whole = whole.ok_or_else(|| given.key_error("split.count", "is 0; convert the checkpoint again"))?;
    let tensors = number(&whole, "split.tensors.count")?;
    if let Some(tensors) = tensors.filter(|tensors| *tensors != whole.tensors.len()) {
        let problem = format!("is {tensors}, but the files contain {}; download them again", whole.tensors.len());
        return Err(whole.key_error("split.tensors.count", problem));
    }
    Ok(whole)
}

fn append(whole: &mut Gguf, file: Gguf) -> Result<()> {
    for tensor in &file.tensors {
        if whole.index.insert(tensor.name.clone(), whole.tensors.len()).is_some() {
            return Err(file.error(&tensor.name, "is also in another file of the checkpoint; download the files again"));
        }
        whole.tensors.push(tensor.clone());
    }
    whole.parts.extend(file.parts);
    Ok(())
}

/// The paths of all files, from the path of any.
fn paths(path: &Path, count: usize) -> Result<Vec<PathBuf>> {
    let stem = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".gguf"));
    match stem.and_then(split_part) {
        Some((name, number, of)) if of == count && (1..=count).contains(&number) => {
            Ok((1..=count).map(|i| path.with_file_name(format!("{name}-{i:05}-of-{count:05}.gguf"))).collect())
        }
        _ => {
            let named = format!("NAME-00001-of-{count:05}.gguf");
            Err(Error::file(path, format!("is one of {count} files, but is not named {named}; restore its name")))
        }
    }
}

/// Name, number and count of a part of a split checkpoint, from its path without the extension: `NAME-00002-of-00003`.
pub(crate) fn split_part(stem: &str) -> Option<(&str, usize, usize)> {
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (name, number) = rest.rsplit_once('-')?;
    let parse = |digits: &str| {
        let is_number = digits.len() == 5 && digits.bytes().all(|byte| byte.is_ascii_digit());
        if is_number { digits.parse::<usize>().ok() } else { None }
    };
    Some((name, parse(number)?, parse(count)?))
}
