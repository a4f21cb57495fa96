//! Bytes inside something that keeps them alive.

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;

use crate::{Error, Result};

/// What bytes can lie in.
pub trait Source: AsRef<[u8]> + Send + Sync {
    /// Says that `range` will not be read again soon: pages of a mapped file need not stay in memory.
    fn release(&self, range: Range<usize>) {
        let _ = range;
    }
}

impl Source for Vec<u8> {}

/// A file, mapped read-only.
pub struct MappedFile(Mmap);

impl MappedFile {
    /// Maps the file `path`.
    ///
    /// # Errors
    /// If it cannot be opened or mapped, or is a directory.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::io(path))?;
        if file.metadata().map_err(Error::io(path))?.is_dir() {
            return Err(Error::file(path, "is a directory; a file is expected here"));
        }
        // SAFETY: the map is read-only, so nothing here changes its bytes. It is shared with the file: one that is shortened or
        // rewritten in place meanwhile faults, or changes what references see, which nothing here can rule out, as no user of
        // mmap can. Checkpoints are not edited in place.
        Ok(Self(unsafe { Mmap::map(&file) }.map_err(Error::io(path))?))
    }
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Source for MappedFile {
    fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        {
            // Whole pages only; a neighbour's bytes on the same page stay.
            const PAGE: usize = 4096;
            let (start, end) = (range.start.next_multiple_of(PAGE), range.end / PAGE * PAGE);
            if start < end {
                // SAFETY: the range lies in the map. That is of a file and read-only, so a page that is read again comes back
                // from the file with the same bytes, as long as the file is as `open` asks. Failure means that the pages stay,
                // which is no error.
                let _ =
                    unsafe { self.0.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, end - start) };
            }
        }
    }
}

/// A run of bytes of a [`Source`].
#[derive(Clone)]
pub struct Bytes {
    owner: Arc<dyn Source>,
    range: Range<usize>,
}

impl Bytes {
    /// The bytes `range` of `owner`, or `None` if it has fewer.
    pub fn new(owner: Arc<dyn Source>, range: Range<usize>) -> Option<Self> {
        (*owner).as_ref().get(range.clone())?;
        Some(Self { owner, range })
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }

    /// Says that `range` of these bytes will not be read again soon.
    pub fn release(&self, range: Range<usize>) {
        self.owner.release(self.range.start + range.start..self.range.start + range.end);
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        let range = 0..bytes.len();
        Self { owner: Arc::new(bytes), range }
    }
}
