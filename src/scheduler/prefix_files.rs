//! Files of a prefix cache, in a directory that those of other processes may share.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// The names of one cache's files: `NAME-N.session`, while `NAME.lock` is locked.
pub(super) struct PrefixFiles {
    directory: PathBuf,
    name: String, // random
    written: u64,
    _lock: File,
}

const PREFIX: &str = "prefix-";

impl PrefixFiles {
    /// Names of its own. Files of caches whose processes were killed are deleted.
    ///
    /// # Errors
    /// If the directory cannot be read or written.
    pub fn new(directory: &Path) -> io::Result<Self> {
        for name in names(directory, ".lock")? {
            // The lock is held while its files are deleted. Files that cannot be deleted are left to the next cache.
            if let Some(_held) = abandoned(&lock(directory, &name)) {
                for ending in [".session", ".session.partial"] {
                    for session in names(directory, ending)?.iter().filter(|session| session.starts_with(&name)) {
                        let _ = std::fs::remove_file(directory.join(format!("{session}{ending}")));
                    }
                }
                let _ = std::fs::remove_file(lock(directory, &name));
            }
        }
        let name = format!("{PREFIX}{:016x}", rand::random::<u64>());
        // Locked before it gets the name that other caches look for.
        let unlocked = directory.join(format!("{name}.unlocked"));
        let file = File::create_new(&unlocked)?;
        // Where files cannot be locked, no cache takes this one for abandoned.
        let _ = file.try_lock();
        std::fs::rename(&unlocked, lock(directory, &name))?;
        Ok(Self { directory: directory.to_owned(), name, written: 0, _lock: file })
    }

    /// The path of a new file.
    pub fn next(&mut self) -> PathBuf {
        self.written += 1;
        self.directory.join(format!("{}-{}.session", self.name, self.written))
    }
}

impl Drop for PrefixFiles {
    fn drop(&mut self) {
        // If it stays, the next cache deletes it.
        let _ = std::fs::remove_file(lock(&self.directory, &self.name));
    }
}

fn lock(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{name}.lock"))
}

/// The names with this ending, without it, of the files of prefix caches.
fn names(directory: &Path, ending: &str) -> io::Result<Vec<String>> {
    let entries = std::fs::read_dir(directory)?.collect::<io::Result<Vec<_>>>()?;
    let names = entries.into_iter().filter_map(|entry| entry.file_name().into_string().ok());
    let own = names.filter(|name| name.starts_with(PREFIX));
    Ok(own.filter_map(|name| name.strip_suffix(ending).map(str::to_owned)).collect())
}

/// The lock, taken, if no process held it.
fn abandoned(lock: &Path) -> Option<File> {
    // For writing: NFS has exclusive locks only of files that are open for that.
    File::options().write(true).open(lock).ok().filter(|file| file.try_lock().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_killed_processes_are_deleted_and_others_kept() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut running = PrefixFiles::new(directory.path()).expect("names");
        let kept = [running.next(), running.next(), directory.path().join("notes.session")];
        let killed = PrefixFiles::new(directory.path()).map(|mut files| (files.next(), files.name.clone()));
        let (left, name) = killed.expect("names");
        let (lock_of_killed, partial) = (lock(directory.path(), &name), left.with_extension("session.partial"));
        for path in kept.iter().chain([&left, &lock_of_killed, &partial]) {
            std::fs::write(path, "a session").expect("written");
        }
        drop(PrefixFiles::new(directory.path()).expect("names"));
        assert!(kept.iter().all(|path| path.exists()));
        assert!(![left, lock_of_killed, partial].iter().any(|path| path.exists()));
        assert_eq!(std::fs::read_dir(directory.path()).expect("a directory").count(), 4);
    }
}
