//! Session files: a processed sequence that any process with the same model can continue.
//!
//! ```text
//! "foretoken session\n"   u32 length of the header   header (JSON)   tokens (u32)   state (f32)   K and V
//! recurrent state (f32)   u32 checksum
//! ```
//!
//! Values are little endian; the checksum (CRC-32) covers everything before it. K and V have the CPU's memory layout,
//! even if saved from a device; the header has their formats, which the loaded session uses.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::checkpoint::{Partial, regular_file};
use crate::engine::Engine;
use crate::kv::{ExactZones, KEqV, KvFormat, KvOptions, LayerFormat};
use crate::nn::tensor;
use crate::options::SessionOptions;
use crate::session::Session;
use crate::speculative::{DecodeState, SpeculativeDecoder};
use crate::{Error, Result};

const MAGIC: &[u8] = b"foretoken session\n";

/// Incremented when the layout of the file, the header or K and V changes.
const VERSION: u32 = 2;

/// Maximum length of the header.
const MAX_HEADER: usize = 1 << 20;

/// Numbers that are read or written in one call, with one update of the checksum. A recurrent state has millions.
const NUMBERS_AT_ONCE: usize = 1024;

#[derive(Serialize, Deserialize)]
struct Header {
    version: u32,
    /// The target's fingerprint.
    model: u64,
    key: String,
    value: String,
    exact: (usize, usize, String),
    layers: Vec<(usize, String, String)>,
    #[serde(rename = "keys_of_values_derived")]
    recomputes_keys: bool,
    max_context: usize,
    max_round_rows: usize,
    /// Committed positions.
    len: usize,
    /// Positions below it were written, and may have replaced others in a sliding window. More than `max_context` if
    /// that was larger then.
    written: usize,
    /// The last token and the width of the hidden state that predicted it, if any.
    last: Option<(u32, usize)>,
    /// Number of values in the recurrent state.
    #[serde(default)]
    recurrent: usize,
}

impl Session {
    /// Writes the session to `path`, for [`Engine::load_session`]. An existing file is replaced
    /// once the new one is complete.
    ///
    /// # Errors
    /// If the file cannot be written, or the device with K and V fails.
    pub fn save(&mut self, path: impl AsRef<Path>) -> Result<()> {
        self.save_with(Partial::create, path.as_ref())
    }

    /// The same, to a file that only its owner can read, where the system has such permissions.
    ///
    /// # Errors
    /// As [`Session::save`].
    pub(crate) fn save_private(&mut self, path: &Path) -> Result<()> {
        self.save_with(Partial::create_private, path)
    }

    fn save_with(&mut self, create: fn(&Path) -> Result<Partial>, path: &Path) -> Result<()> {
        let model = self.engine.target().fingerprint()?;
        let (engine, options) = (self.engine.clone(), self.kv_options().clone());
        let SpeculativeDecoder { backend, state, drafting } = self.decoder();
        // On the CPU, accepted rows may have to be applied first.
        let recurrent = engine.run(|| backend.save_recurrent(state))?;
        let (kv, newest) = (state.kv(), &drafting.newest);
        let state = newest.as_ref().map(|newest| backend.hidden(newest)).transpose()?;
        let state = state.unwrap_or_default();
        let header = Header {
            version: VERSION,
            model,
            key: options.key.to_string(),
            value: options.value.to_string(),
            exact: (options.exact.head, options.exact.tail, KvFormat::from(options.exact.element).to_string()),
            layers: options.layers.iter().map(|f| (f.layer, f.key.to_string(), f.value.to_string())).collect(),
            recomputes_keys: options.k_eq_v == KEqV::Recomputed,
            max_context: kv.max_context(),
            max_round_rows: kv.max_round_rows(),
            len: kv.len(),
            written: kv.written(),
            last: newest.as_ref().map(|newest| (newest.last, state.len())),
            recurrent: recurrent.len(),
        };
        let header = serde_json::to_vec(&header).map_err(|e| Error::file(path, e.to_string()))?;
        let mut to = Checked { inner: create(path)?, checksum: crc32fast::Hasher::new() };
        let mut write = || {
            to.write_all(MAGIC)?;
            to.write_all(&(header.len() as u32).to_le_bytes())?;
            to.write_all(&header)?;
            write_numbers(&mut to, &drafting.tokens[..kv.len()], u32::to_le_bytes)?;
            write_numbers(&mut to, &state, f32::to_le_bytes)?;
            backend.write_to(kv, &mut to)?;
            write_numbers(&mut to, &recurrent, f32::to_le_bytes)?;
            let checksum = to.checksum.clone().finalize();
            to.write_all(&checksum.to_le_bytes())
        };
        write().map_err(|cause| cause.downcast().unwrap_or_else(Error::io(path)))?;
        to.inner.publish()
    }
}

impl Engine {
    /// Loads a session saved by [`Session::save`]. If its context does not fit memory, it becomes
    /// the largest that fits.
    ///
    /// # Errors
    /// If the file cannot be read, has another version, is of another model, is damaged or truncated, or its K and V do
    /// not fit memory.
    pub fn load_session(&self, path: impl AsRef<Path>) -> Result<Session> {
        let session = self.read_session(path.as_ref())?;
        self.parts.warn_of_short_context(session.kv_options(), session.kv().max_context());
        Ok(session)
    }

    /// The same for forks with contexts of their own: a shorter context is not warned of.
    ///
    /// # Errors
    /// As [`Engine::load_session`].
    pub(crate) fn read_session(&self, path: &Path) -> Result<Session> {
        let mut file = Reading::open(path)?;
        let header = file.header()?;
        if header.model != self.target().fingerprint()? {
            return Err(file.problem("is a session of another model; load the model that it was saved with"));
        }
        let refused = |error: Error| match error {
            Error::Argument { name, problem } => file.damaged_header(format!(" ({name}: {problem})")),
            other => other,
        };
        let mut session = self.session_of(&header).map_err(refused)?;
        let width = self.target().hidden_size();
        let SpeculativeDecoder { backend, state, drafting } = session.decoder();
        if header.len > state.kv().max_context() || header.last.is_some_and(|(_, len)| len != width) {
            return Err(file.damaged_header(""));
        }
        let hidden_bytes = if header.last.is_some() { 4 * width } else { 0 };
        let kv_bytes = state.kv().written_bytes(header.len);
        let recurrent_bytes = header.recurrent.saturating_mul(4);
        file.check_size(&[header.len.saturating_mul(4), hidden_bytes, kv_bytes, recurrent_bytes])?;

        let mut tokens: Vec<u32> = file.numbers(header.len, u32::from_le_bytes)?;
        let newest = match header.last {
            None => None,
            Some((last, width)) => {
                tokens.push(last);
                Some(DecodeState { last, hidden: tensor(file.numbers(width, f32::from_le_bytes)?, (1, width))? })
            }
        };
        let read = backend.read_from(state.kv_mut(), header.len, header.written, newest.as_ref(), &mut file.from);
        read.map_err(|cause| file.failed(cause))?;
        if !backend.load_recurrent(state, &file.numbers(header.recurrent, f32::from_le_bytes)?)? {
            return Err(file.problem("has another model's recurrent state; save the session again"));
        }
        file.check_sum()?;
        let vocab = self.target().num_readable_tokens();
        if tokens.iter().any(|token| *token as usize >= vocab) {
            return Err(file.problem("has tokens outside the vocabulary; save the session again"));
        }
        (drafting.tokens, drafting.newest) = (tokens, newest);
        Ok(session)
    }

    /// An empty session with the header's options. Its context is smaller if that does not fit
    /// memory, but has all positions.
    ///
    /// # Errors
    /// If an option is out of its range, or the positions do not fit memory.
    fn session_of(&self, header: &Header) -> Result<Session> {
        let options = header.options()?;
        let error = match Session::new(self.clone(), &SessionOptions { kv: options.clone() }) {
            Err(error @ Error::Memory { .. }) => error,
            session => return session,
        };
        let kv = KvOptions { max_context: None, ..options };
        match Session::new(self.clone(), &SessionOptions { kv }) {
            Ok(mut session) if session.kv().max_context() >= header.len => {
                let kv = session.decoder().state.kv_mut();
                kv.set_max_context(kv.max_context().min(header.max_context));
                Ok(session)
            }
            _ => Err(error),
        }
    }
}

/// A session file being read.
struct Reading<'a> {
    path: &'a Path,
    from: Checked<BufReader<File>>,
    size: u64,
    start: usize, // bytes before the tokens, once the header is read
}

impl<'a> Reading<'a> {
    fn open(path: &'a Path) -> Result<Self> {
        regular_file(path, "a session file")?;
        let file = File::open(path).map_err(Error::io(path))?;
        let size = file.metadata().map_err(Error::io(path))?.len();
        let from = Checked { inner: BufReader::new(file), checksum: crc32fast::Hasher::new() };
        Ok(Self { path, from, size, start: 0 })
    }

    fn problem(&self, problem: impl Into<String>) -> Error {
        Error::file(self.path, problem)
    }

    fn damaged_header(&self, cause: impl Display) -> Error {
        self.problem(format!("has a damaged header{cause}; save the session again"))
    }

    /// The error of a read: the library's own inside it, a truncated file, or the system's.
    fn failed(&self, cause: io::Error) -> Error {
        cause.downcast().unwrap_or_else(|cause| match cause.kind() {
            io::ErrorKind::UnexpectedEof => self.problem("is truncated; save the session again"),
            _ => Error::io(self.path)(cause),
        })
    }

    fn header(&mut self) -> Result<Header> {
        let mut start = [0; MAGIC.len() + 4];
        match self.from.read_exact(&mut start) {
            Err(cause) if cause.kind() != io::ErrorKind::UnexpectedEof => return Err(self.failed(cause)),
            Ok(()) if start.starts_with(MAGIC) => {}
            _ => return Err(self.problem("is not a session file")),
        }
        let [.., a, b, c, d] = start;
        let len = u32::from_le_bytes([a, b, c, d]) as usize;
        if len > MAX_HEADER {
            return Err(self.damaged_header(""));
        }
        let mut header = vec![0; len];
        self.from.read_exact(&mut header).map_err(|cause| self.failed(cause))?;
        self.start = start.len() + len;
        let damaged = |error: serde_json::Error| self.damaged_header(format!(" ({error})"));
        let fields: serde_json::Value = serde_json::from_slice(&header).map_err(damaged)?;
        if fields["version"].as_u64() != Some(u64::from(VERSION)) {
            return Err(self.problem("was written by an incompatible version of this library; save the session again"));
        }
        serde_json::from_value(fields).map_err(damaged)
    }

    /// Compares the file's size with that of its parts after the header; the checksum follows them.
    ///
    /// # Errors
    /// If they differ.
    fn check_size(&self, parts: &[usize]) -> Result<()> {
        let expected = parts.iter().copied().fold(self.start + 4, usize::saturating_add);
        if self.size == expected as u64 {
            return Ok(());
        }
        Err(self.problem(format!("has {} bytes, expected {expected}: it is damaged or truncated", self.size)))
    }

    /// The next `count` numbers; the file's size was checked.
    fn numbers<T>(&mut self, count: usize, of: fn([u8; 4]) -> T) -> Result<Vec<T>> {
        let (mut numbers, mut block) = (Vec::new(), [0; 4 * NUMBERS_AT_ONCE]);
        while numbers.len() < count {
            let bytes = &mut block[..4 * NUMBERS_AT_ONCE.min(count - numbers.len())];
            self.from.read_exact(bytes).map_err(|cause| self.failed(cause))?;
            numbers.extend(bytes.as_chunks::<4>().0.iter().copied().map(of));
        }
        Ok(numbers)
    }

    /// # Errors
    /// If the checksum of all bytes so far is not the next number.
    fn check_sum(&mut self) -> Result<()> {
        let checksum = self.from.checksum.clone().finalize();
        match self.numbers(1, u32::from_le_bytes)?[0] == checksum {
            true => Ok(()),
            false => Err(self.problem("is damaged: checksum mismatch; save the session again")),
        }
    }
}

impl Header {
    fn options(&self) -> Result<KvOptions> {
        let layers: Result<_> = (self.layers.iter())
            .map(|(layer, key, value)| Ok(LayerFormat { layer: *layer, key: key.parse()?, value: value.parse()? }))
            .collect();
        let KvFormat::Exact(element) = self.exact.2.parse()? else {
            return Err(Error::argument("exact.element", "is a quantized format"));
        };
        Ok(KvOptions {
            key: self.key.parse()?,
            value: self.value.parse()?,
            exact: ExactZones { head: self.exact.0, tail: self.exact.1, element },
            layers: layers?,
            k_eq_v: match self.recomputes_keys {
                true => KEqV::Recomputed,
                false => KEqV::Stored,
            },
            max_context: Some(self.max_context),
            max_round_rows: self.max_round_rows,
            memory: None,
        })
    }
}

fn write_numbers<T: Copy>(to: &mut impl Write, numbers: &[T], bytes: fn(T) -> [u8; 4]) -> io::Result<()> {
    numbers.chunks(NUMBERS_AT_ONCE).try_for_each(|block| {
        let block: Vec<u8> = block.iter().copied().flat_map(bytes).collect();
        to.write_all(&block)
    })
}

/// A reader or writer with a running checksum. This library's errors are wrapped in `io::Error`;
/// `downcast` unwraps them.
struct Checked<T> {
    inner: T,
    checksum: crc32fast::Hasher,
}

impl<T: Read> Read for Checked<T> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(bytes)?;
        self.checksum.update(&bytes[..read]);
        Ok(read)
    }
}

impl Write for Checked<Partial> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.checksum.update(bytes);
        self.inner.put(bytes).map_err(io::Error::other)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It says nothing about the file, which need not be saved again.
    #[test]
    fn a_read_that_fails_is_no_damage() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("session");
        let only_written = File::create(&path).expect("a file");
        let from = Checked { inner: BufReader::new(only_written), checksum: crc32fast::Hasher::new() };
        let mut reading = Reading { path: &path, from, size: 0, start: 0 };
        let refused = [reading.header().map(drop), reading.numbers(1, u32::from_le_bytes).map(drop)];
        assert!(refused.iter().all(|read| matches!(read, Err(Error::Io { .. }))), "{refused:?}");
    }
}
