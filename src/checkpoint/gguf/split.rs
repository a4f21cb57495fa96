//! Checkpoints in several files, as gguf-split writes them: `NAME-00001-of-00003.gguf` and so on, all metadata in the
//! first, `split.no` and `split.count` in each.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::file::{Gguf, Part};
use super::header::Header;
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
        let path = path.as_ref();
        let part = Part::open(path)?;
        let header = Header::read(part.bytes(), 0).map_err(|problem| problem.of(path))?;
        let gguf = Self::single(part, header);
        let whole = if count(&gguf)? == 1 { gguf } else { open_all(&gguf)? };
        Ok(whole.split_qkv())
    }

    /// Reads a checkpoint in memory.
    ///
    /// # Errors
    /// If it is malformed, or one part of a split checkpoint.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self> {
        let part = Part { path: "(memory)".into(), bytes: Arc::new(bytes) };
        let header = Header::read(part.bytes(), 0).map_err(|problem| problem.of(&part.path))?;
        let gguf = Self::single(part, header);
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

/// Opens all files of the checkpoint that `part` belongs to.
fn open_all(given: &Gguf) -> Result<Gguf> {
    let count = count(given)?;
    let mut whole: Option<Gguf> = None;
    for (i, path) in paths(given.path(), count)?.iter().enumerate() {
        let part = Part::open(path)?;
        let header = Header::read(part.bytes(), i).map_err(|problem| problem.of(path))?;
        let file = Gguf::single(part, header);
        if number(&file, "split.count")? != Some(count) {
            return Err(
                file.key_error("split.count", format!("is not {count}, as in the other files of the checkpoint"))
            );
        }
        if number(&file, "split.no")? != Some(i) {
            return Err(file.key_error("split.no", format!("is not {i}, as the file's name says")));
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
    let of = format!("-of-{count:05}.gguf");
    let stem = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(&of));
    let name = stem.and_then(|stem| stem.rsplit_once('-')).filter(|(_, number)| {
        number.len() == 5 && number.parse::<usize>().is_ok_and(|number| (1..=count).contains(&number))
    });
    match name {
        Some((name, _)) => Ok((1..=count).map(|i| path.with_file_name(format!("{name}-{i:05}{of}"))).collect()),
        None => {
            let problem = format!("is one of {count} files, but is not named NAME-00001{of}; restore its name");
            Err(Error::file(path, problem))
        }
    }
}
