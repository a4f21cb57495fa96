//! Atomically replaced files: `NAME.partial` until complete and synced, then renamed. An existing file stays until that
//! moment, and no incomplete one ever has the name.

use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, BufWriter, ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// Size of the write buffer.
const BUFFER: usize = 1 << 18;

/// A file under its temporary name. If dropped before [`Partial::publish`], it is removed.
pub(crate) struct Partial {
    path: PathBuf,    // the final name
    partial: PathBuf, // the temporary name; the file is locked under it
    file: BufWriter<File>,
    len: u64,
    total: Option<u64>, // bytes of the whole file, once known
    broken: bool,       // a write failed, the bytes so far are invalid
    published: bool,
}

impl Partial {
    pub(crate) fn create(path: &Path) -> Result<Self> {
        Self::create_with(path, &mut File::options())
    }

    /// The same for a file that only its owner can read, where the system has such permissions.
    pub(crate) fn create_private(path: &Path) -> Result<Self> {
        let mut options = File::options();
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        Self::create_with(path, &mut options)
    }

    fn create_with(path: &Path, options: &mut OpenOptions) -> Result<Self> {
        match std::fs::metadata(path) {
            Ok(meta) if meta.is_dir() => {
                return Err(Error::file(path, "is a directory; use the name of a file in it"));
            }
            Ok(meta) if !meta.is_file() => {
                return Err(Error::file(path, "is not a regular file; use the name of one, or a new name"));
            }
            _ => {}
        }
        // `file_name` ignores a separator at the end, with which a file cannot be renamed to the path.
        let ends_path = |name: &&OsStr| path.as_os_str().as_encoded_bytes().ends_with(name.as_encoded_bytes());
        let Some(name) = path.file_name().filter(ends_path) else {
            return Err(Error::file(path, "is not a file name; use the name of the file to write"));
        };
        let mut partial_name = OsString::from(name);
        partial_name.push(".partial");
        let partial = path.with_file_name(partial_name);
        let file = create_locked(path, &partial, options.write(true).create_new(true))?;
        let file = BufWriter::with_capacity(BUFFER, file);
        Ok(Self { path: path.to_owned(), partial, file, len: 0, total: None, broken: false, published: false })
    }

    /// The final name.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes so far.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Sets the final length, for error messages.
    pub(crate) fn expect(&mut self, total: u64) {
        self.total = Some(total);
    }

    pub(crate) fn put(&mut self, bytes: &[u8]) -> Result<()> {
        let result = self.file.write_all(bytes);
        self.checked(result)?;
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// Overwrites the bytes at `at`.
    pub(crate) fn patch(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        let result = (|| {
            self.file.seek(SeekFrom::Start(at))?;
            self.file.write_all(bytes)?;
            self.file.seek(SeekFrom::Start(self.len)).map(drop)
        })();
        self.checked(result)
    }

    /// Syncs the file, where the file system can, and renames it.
    pub(crate) fn publish(mut self) -> Result<()> {
        if self.broken {
            return Err(Error::file(&self.path, "is incomplete after an error; write it again"));
        }
        let result = self.file.flush().and_then(|()| sync(self.file.get_ref()));
        self.checked(result)?;
        let renamed = std::fs::rename(&self.partial, &self.path);
        self.checked(renamed)?;
        self.published = true;
        // Sync the directory, so that the rename survives a power loss; not every system can open directories.
        let directory = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        if let Ok(directory) = File::open(directory.unwrap_or(Path::new("."))) {
            let _ = directory.sync_all();
        }
        Ok(())
    }

    fn checked(&mut self, result: io::Result<()>) -> Result<()> {
        result.map_err(|cause| {
            self.broken = true;
            failed(&self.path, self.len, self.total, cause)
        })
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.published {
            // Errors cannot be reported from `drop`; the next writer of this file replaces it.
            let _ = std::fs::remove_file(&self.partial);
        }
    }
}

/// Creates and locks `partial`, with options of a new file, replacing one left by a killed process.
fn create_locked(path: &Path, partial: &Path, options: &OpenOptions) -> Result<File> {
    // The old file stays locked until the new one is: of several processes that find it, one replaces it.
    let mut _leftover = None;
    for _ in 0..2 {
        match options.open(partial) {
            Ok(file) => return lock_named(path, partial, file),
            Err(cause) if cause.kind() == ErrorKind::AlreadyExists => {
                let file = File::options().write(true).open(partial).map_err(Error::io(partial))?;
                _leftover = Some(lock_named(path, partial, file)?);
                tracing::warn!(path = %partial.display(), "replacing the file of an interrupted run");
                std::fs::remove_file(partial).map_err(Error::io(partial))?;
            }
            Err(cause) if cause.kind() == ErrorKind::NotFound => {
                return Err(Error::file(path, "its directory does not exist; create it first"));
            }
            Err(cause) => return Err(failed(path, 0, None, cause)),
        }
    }
    Err(busy(path))
}

/// Locks `file`, which was opened under the name `partial`. Who has the lock may remove the name, or publish the file.
///
/// # Errors
/// If another writer has the lock, or had it since: the name is that of another file or of none then.
fn lock_named(path: &Path, partial: &Path, file: File) -> Result<File> {
    let file = lock(path, file)?;
    if is_named(&file, partial) { Ok(file) } else { Err(busy(path)) }
}

/// Whether `name` is the name of the open `file`.
#[cfg(unix)]
fn is_named(file: &File, name: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let same =
        |(file, named): (std::fs::Metadata, std::fs::Metadata)| (file.dev(), file.ino()) == (named.dev(), named.ino());
    file.metadata().ok().zip(std::fs::metadata(name).ok()).is_some_and(same)
}

/// The same as far as this system tells.
#[cfg(not(unix))]
fn is_named(_: &File, name: &Path) -> bool {
    name.exists()
}

fn lock(path: &Path, file: File) -> Result<File> {
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => Err(busy(path)),
        // Some file systems do not support locks.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(file),
    }
}

/// Syncs `file`, where its file system can.
fn sync(file: &File) -> io::Result<()> {
    file.sync_all().or_else(|cause| if cannot_sync(&cause) { Ok(()) } else { Err(cause) })
}

/// Whether a sync failed because the file system has none, not because of the file. On Apple's systems `sync_all` also
/// flushes the drive's cache, which network shares refuse.
fn cannot_sync(cause: &io::Error) -> bool {
    const REFUSALS: [i32; 3] = [22, 25, 45]; // EINVAL, ENOTTY, ENOTSUP of these systems
    let is_refused = |code| cfg!(target_vendor = "apple") && REFUSALS.contains(&code);
    cause.kind() == ErrorKind::Unsupported || cause.raw_os_error().is_some_and(is_refused)
}

fn busy(path: &Path) -> Error {
    Error::file(path, "is being written by another process; wait for it, or use another name")
}

/// The error of writing `path` after `len` bytes of `total`.
fn failed(path: &Path, len: u64, total: Option<u64>, cause: io::Error) -> Error {
    let of = total.map_or(String::new(), |total| format!(" of {total}"));
    let problem = match cause.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => format!("the disk is full after {len}{of} bytes"),
        ErrorKind::FileTooLarge => format!("the file system does not support files this large ({len}{of} bytes)"),
        ErrorKind::NotFound => return Error::file(path, "its .partial file was removed meanwhile; write it again"),
        _ => return Error::io(path)(cause),
    };
    Error::io(path)(io::Error::new(cause.kind(), problem))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    /// Of two writers that find a file, the slower one locks it when the other has already replaced it, or has even
    /// published the new one.
    #[test]
    fn a_replaced_file_is_not_replaced_again() {
        let directory = tempfile::tempdir().expect("a directory");
        let (path, partial) = (directory.path().join("file"), directory.path().join("file.partial"));
        std::fs::write(&partial, "of a killed run").expect("written");
        let found = || File::options().write(true).open(&partial).expect("the partial file");
        let leftover = found();
        assert!(lock_named(&path, &partial, found()).is_ok());
        let mut first = Partial::create(&path).expect("the faster writer");
        let new = found();
        let refused = |file| lock_named(&path, &partial, file).expect_err("another writer").to_string();
        for file in [leftover.try_clone().expect("a handle"), new.try_clone().expect("a handle")] {
            let problem = refused(file);
            assert!(problem.contains("being written by another process"), "{problem}");
        }
        first.put(b"whole").expect("written");
        first.publish().expect("published");
        for file in [leftover, new] {
            refused(file);
        }
        assert_eq!(std::fs::read(&path).expect("the file"), b"whole");
    }

    #[test]
    fn a_removed_file_is_told_from_a_missing_directory() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("file");
        let mut file = Partial::create(&path).expect("a writer");
        file.put(b"whole").expect("written");
        std::fs::remove_file(directory.path().join("file.partial")).expect("the partial file");
        let removed = file.publish().expect_err("no file").to_string();
        assert!(removed.ends_with("/file: its .partial file was removed meanwhile; write it again"), "{removed}");
        let missing = Partial::create(&path.join("file")).map(drop).expect_err("no directory").to_string();
        assert!(missing.ends_with("its directory does not exist; create it first"), "{missing}");
    }

    #[test]
    fn a_missing_sync_is_told_from_a_failed_one() {
        assert!(cannot_sync(&ErrorKind::Unsupported.into()));
        for kind in [ErrorKind::StorageFull, ErrorKind::QuotaExceeded, ErrorKind::Other] {
            assert!(!cannot_sync(&kind.into()), "{kind}");
        }
        let input_output = 5;
        assert!(!cannot_sync(&io::Error::from_raw_os_error(input_output)));
        for code in [22, 25] {
            assert_eq!(cannot_sync(&io::Error::from_raw_os_error(code)), cfg!(target_vendor = "apple"), "{code}");
        }
    }
}
