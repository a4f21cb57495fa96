//! Reference-counted byte ranges of files and buffers.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

use crate::{Error, Result};

/// The owner of byte ranges.
pub trait Source: AsRef<[u8]> + Send + Sync {
    /// Hints that `range` will not be read again soon, so that pages of a mapped file can be evicted.
    fn release(&self, range: Range<usize>) {
        let _ = range;
    }

    /// Refuses a file that has become shorter than its map, whose missing pages would fault when read. One that shrinks
    /// after its bytes were handed out cannot be detected: the fault then ends the process.
    ///
    /// # Errors
    /// If it has, or its length cannot be read.
    fn check_length(&self) -> Result<()> {
        Ok(())
    }
}

impl Source for Vec<u8> {}

/// A file, mapped read-only.
pub struct MappedFile {
    path: PathBuf,
    file: File, // for its current length
    map: Mmap,
}

impl MappedFile {
    /// Maps the file `path`.
    ///
    /// # Errors
    /// If it cannot be opened or mapped, or is a directory.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = File::open(path).map_err(Error::io(path))?;
        if file.metadata().map_err(Error::io(path))?.is_dir() {
            return Err(Error::file(path, "is a directory; a file is expected here"));
        }
        // SAFETY: the map is read-only, so nothing here changes its bytes. It is shared with the file: truncating or
        // rewriting that in place causes a fault, or changes what references see, which no user of mmap can rule
        // out. Checkpoints are not edited in place.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io(path))?;
        let mapped = Self { path: path.to_owned(), file, map };
        mapped.check_length()?;
        Ok(mapped)
    }
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}

impl Source for MappedFile {
    fn check_length(&self) -> Result<()> {
        let len = self.file.metadata().map_err(Error::io(&self.path))?.len();
        if len < self.map.len() as u64 {
            let problem =
                format!("shrank from {} to {len} bytes while being loaded; download it again", self.map.len());
            return Err(Error::file(&self.path, problem));
        }
        Ok(())
    }

    fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        {
            // Whole pages only: a page shared with another tensor stays.
            const PAGE: usize = 4096;
            let (start, end) = (range.start.next_multiple_of(PAGE), range.end / PAGE * PAGE);
            if start < end {
                // SAFETY: the range is in the map, which is read-only and backed by the file, so a page that is read
                // again has the same bytes, as long as the file is unchanged as `open` requires. On failure the
                // pages stay, which is not an error.
                let _ =
                    unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, end - start) };
            }
        }
    }
}

/// A reference-counted byte range of a file or a buffer.
#[derive(Clone)]
pub struct Bytes {
    owner: Arc<dyn Source>,
    range: Range<usize>,
}

impl Bytes {
    /// The bytes `range` of `owner`, or `None` if it has fewer.
    pub(crate) fn new(owner: Arc<dyn Source>, range: Range<usize>) -> Option<Self> {
        (*owner).as_ref().get(range.clone())?;
        Some(Self { owner, range })
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }

    /// As [`Source::check_length`].
    ///
    /// # Errors
    /// As [`Source::check_length`].
    pub(crate) fn check_length(&self) -> Result<()> {
        self.owner.check_length()
    }

    /// [`Source::release`] for `range` of these bytes.
    pub(crate) fn release(&self, range: Range<usize>) {
        self.owner.release(self.range.start + range.start..self.range.start + range.end);
    }

    /// [`Source::release`] for all of these bytes.
    pub(crate) fn release_all(&self) {
        self.owner.release(self.range.clone());
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        let range = 0..bytes.len();
        Self { owner: Arc::new(bytes), range }
    }
}

/// A buffer that records what is released.
#[cfg(test)]
pub(crate) struct Recorded {
    bytes: Vec<u8>,
    released: parking_lot::Mutex<Vec<Range<usize>>>,
}

#[cfg(test)]
impl Recorded {
    /// The buffer, and `range` of it.
    pub(crate) fn new(bytes: Vec<u8>, range: Range<usize>) -> (Arc<Self>, Bytes) {
        let buffer = Arc::new(Self { bytes, released: parking_lot::Mutex::default() });
        let bytes = Bytes::new(buffer.clone(), range).expect("a range of the buffer");
        (buffer, bytes)
    }

    /// The ranges released so far, in any order.
    pub(crate) fn released(&self) -> Vec<Range<usize>> {
        self.released.lock().clone()
    }
}

#[cfg(test)]
impl AsRef<[u8]> for Recorded {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
impl Source for Recorded {
    fn release(&self, range: Range<usize>) {
        self.released.lock().push(range);
    }
}
