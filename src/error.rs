//! The library's error type.

use std::any::Any;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use foretoken_kernels::UnknownName;

/// `Result` with this library's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// See [`Error::of_draft`].
const LOGITS_OF_DRAFT: &str = "logits of a draft";

/// The library's errors. Every message is one line that names the file, tensor, field or limit, and the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be opened, mapped, read or written. If the disk is full, the kind of `cause` is `StorageFull`
    /// or `QuotaExceeded`.
    #[error("{}", one_line(format_args!("{}: {cause}{}", path.display(), hint(cause))))]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's error, or one of its kind with more details. Not a `source`: the message already
        /// contains it.
        cause: std::io::Error,
    },
    /// A file that is malformed or of another kind than expected, or a path that cannot be used.
    #[error("{}", one_line(format_args!("{}: {problem}", path.display())))]
    File {
        /// The file; if a repository on the Hub is not a checkpoint, its name.
        path: PathBuf,
        /// The problem and its remedy.
        problem: String,
    },
    /// A download from the Hub failed.
    #[error("{}", one_line(format_args!("{repository}: {problem}")))]
    Download {
        /// The repository, `owner/name`.
        repository: String,
        /// The HTTP status, if the Hub refused: with 401, 403 or 404 the repository is missing, or not accessible;
        /// after 429 and from 500, the same call may succeed later. `None`: there was no usable response (no
        /// connection, a timeout, one that broke off, an endpoint or a token that is not valid), the files were of
        /// another commit, another process downloads them, or downloads are
        /// [disabled](crate::hub::HubOptions::offline); unless they are, or the endpoint or the token is wrong, the
        /// same call may succeed later.
        status: Option<u16>,
        /// The problem and its remedy.
        problem: String,
    },
    /// A configuration field is missing, malformed or contradicts others.
    #[error("{}", one_line(format_args!("{}: {field}: {problem}", path.display())))]
    Config {
        /// The configuration file.
        path: PathBuf,
        /// The field, with its nesting (`text_config.rope_parameters`).
        field: String,
        /// The problem.
        problem: String,
    },
    /// A tensor is missing or truncated, or its shape or type differs from the configuration's.
    #[error("{}", one_line(format_args!("{}: tensor {tensor}: {problem}", path.display())))]
    Tensor {
        /// The file or directory that was searched.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// The problem.
        problem: String,
    },
    /// An assistant of another target.
    #[error(
        "the assistant does not fit the target: {}; load the assistant published for this target",
        one_line(problem)
    )]
    AssistantMismatch {
        /// Both sides of the mismatch.
        problem: String,
    },
    /// A draft model with a different vocabulary.
    #[error(
        "the draft model does not fit the target: {}; load a smaller model with the same tokenizer",
        one_line(problem)
    )]
    DraftModelMismatch {
        /// Both sides of the mismatch.
        problem: String,
    },
    /// A valid file or combination of options needs something that is not implemented.
    #[error("{}", one_line(format_args!("{}{what}: {problem}", in_file(path.as_deref()))))]
    Unsupported {
        /// The file that needs it, if any.
        path: Option<PathBuf>,
        /// The field, tensor or feature.
        what: String,
        /// Its value, and what is implemented.
        problem: String,
    },
    /// An invalid argument: a prompt, a token id or an option.
    #[error("{}", one_line(format_args!("{name}: {problem}")))]
    Argument {
        /// The argument or option.
        name: &'static str,
        /// Its value, and the valid values.
        problem: String,
    },
    /// The model produced NaN or infinity; in K and V, as they are stored (rotated in quantized formats), also
    /// magnitudes above the largest f16, 65504.
    #[error(
        "{what}{}: not finite{}; the checkpoint is damaged, or does not match its configuration",
        place(*layer, *position),
        value(*found)
    )]
    NotFinite {
        /// The value: `K`, `V`, `logits` or `logits of a draft`.
        what: &'static str,
        /// The layer, from 0; `None` after the last.
        layer: Option<usize>,
        /// The position in the sequence, if known.
        position: Option<usize>,
        /// The value; `None` if found on a device.
        found: Option<f32>,
    },
    /// Out of memory: the system's, a device's, that of [`EngineOptions::kv_memory`](crate::EngineOptions), or
    /// [`KvOptions::memory`](crate::kv::KvOptions).
    #[error("{}", one_line(format_args!("{what}: {}; {remedy}", shortage(*needed, *available, *fits))))]
    Memory {
        /// What needs the memory.
        what: String,
        /// Bytes needed, if known.
        needed: Option<u64>,
        /// Bytes available, if known.
        available: Option<u64>,
        /// For K and V: the number of positions that fit, if known.
        fits: Option<usize>,
        /// The remedy.
        remedy: String,
    },
    /// The context is full.
    #[error("{needed} tokens do not fit the context of {limit}; shorten the prompt or raise KvOptions::max_context")]
    Context {
        /// Tokens needed.
        needed: usize,
        /// Tokens that fit.
        limit: usize,
    },
    /// No tokenizer, or a text that it cannot encode, or tokens that it cannot decode. A malformed tokenizer file is an
    /// [`Error::File`], [`Error::Config`] or [`Error::Unsupported`].
    #[error("tokenizer: {}", one_line(.0))]
    Tokenizer(String),
    /// No chat template, or one that does not compile or refuses the messages.
    #[error("chat template: {}", one_line(.0))]
    Template(String),
    /// A device that is missing, fails, or lacks a kernel.
    #[error("{}", one_line(format_args!("{device}: {problem}")))]
    Device {
        /// Its name.
        device: String,
        /// The problem and its remedy.
        problem: String,
    },
    /// A load, a conversion or a quantization was cancelled through the `cancel` of its options.
    #[error("cancelled by the caller; to start again, use a new handle")]
    Cancelled,
    /// Code run by a generation panicked: the caller's logits processor or drafter, or this library. Other sequences of
    /// the same pass are unaffected; this one's session must not be used again.
    #[error("a generation panicked: {}; fix the logits processor or drafter, or report a bug", one_line(.0))]
    Panic(String),
    /// A tensor operation failed: the caller's drafter's, or this library's. Not a `source`: the message
    /// already contains it, without its backtrace.
    #[error("a tensor operation failed: {}; fix the drafter, or report a bug", one_line(without_backtrace(.0)))]
    Candle(candle_core::Error),
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        Error::Candle(error)
    }
}

impl From<UnknownName> for Error {
    fn from(UnknownName { what, problem }: UnknownName) -> Self {
        Error::argument(what, problem)
    }
}

impl Error {
    pub(crate) fn io(path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Self {
        move |cause| Error::Io { path: path.as_ref().to_owned(), cause }
    }

    pub(crate) fn template(error: minijinja::Error) -> Self {
        match error.kind() {
            minijinja::ErrorKind::OutOfFuel => {
                Error::Template("executes too many instructions; use the published template".into())
            }
            // The prompt is too large: the cause says how large it may be.
            minijinja::ErrorKind::WriteFailure => {
                let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
                Error::Template(format!("cannot be rendered{}", cause.unwrap_or_default()))
            }
            // The message is complete without the sources.
            _ => Error::Template(error.to_string()),
        }
    }

    pub(crate) fn file(path: impl AsRef<Path>, problem: impl Into<String>) -> Self {
        Error::File { path: path.as_ref().to_owned(), problem: problem.into() }
    }

    /// Runs one sequence's part of a pass; a panic becomes an error of that sequence.
    ///
    /// # Errors
    /// Those of `work`, and its panic.
    pub(crate) fn catch<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
        // Only the sequence's own state can be left incomplete: its rounds are dropped, and its generation ends.
        catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(Error::panicked(&*panic)))
    }

    /// The error for a panic in a sequence's part of a pass.
    pub(crate) fn panicked(panic: &(dyn Any + Send)) -> Self {
        Error::Panic(panic_message(panic).to_owned())
    }

    pub(crate) fn argument(name: &'static str, problem: impl Into<String>) -> Self {
        Error::Argument { name, problem: problem.into() }
    }

    /// Some logits have no finite maximum: `found`, if known.
    pub(crate) fn logits(found: impl Into<Option<f32>>) -> Self {
        Error::NotFinite { what: "logits", layer: None, position: None, found: found.into() }
    }

    /// Marks a logits error as a drafter's; other errors are unchanged.
    pub(crate) fn of_draft(self) -> Self {
        match self {
            Error::NotFinite { what: "logits", layer, position, found } => {
                Error::NotFinite { what: LOGITS_OF_DRAFT, layer, position, found }
            }
            other => other,
        }
    }

    /// Whether it is marked by [`Error::of_draft`].
    pub(crate) fn is_of_draft(&self) -> bool {
        matches!(self, Error::NotFinite { what: LOGITS_OF_DRAFT, .. })
    }

    /// Sets what the memory was needed for; other errors are unchanged.
    pub(crate) fn needed_for(self, needs: impl FnOnce() -> String) -> Self {
        match self {
            Error::Memory { needed, available, fits, remedy, .. } => {
                Error::Memory { what: needs(), needed, available, fits, remedy }
            }
            other => other,
        }
    }
}

/// The message of a panic.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let message = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    message.unwrap_or("no message")
}

fn without_backtrace(error: &candle_core::Error) -> &candle_core::Error {
    match error {
        candle_core::Error::WithBacktrace { inner, .. } => without_backtrace(inner),
        error => error,
    }
}

/// Paths and names from files, and a driver's messages, may contain line breaks.
fn one_line(text: impl Display) -> String {
    text.to_string().replace(char::is_control, " ")
}

fn hint(cause: &std::io::Error) -> &'static str {
    match cause.kind() {
        std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => "; check the path, or download it there",
        std::io::ErrorKind::PermissionDenied => "; check the permissions of the file and its directory",
        std::io::ErrorKind::IsADirectory => "; a file is expected here",
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => "; free space there, or write elsewhere",
        std::io::ErrorKind::FileTooLarge | std::io::ErrorKind::ReadOnlyFilesystem => "; write elsewhere",
        _ => "",
    }
}

fn in_file(path: Option<&Path>) -> String {
    path.map_or(String::new(), |path| format!("{}: ", path.display()))
}

fn place(layer: Option<usize>, position: Option<usize>) -> String {
    let layer = layer.map_or(String::new(), |layer| format!(" of layer {layer}"));
    position.map_or(layer.clone(), |position| format!("{layer} at position {position}"))
}

fn value(found: Option<f32>) -> String {
    match found {
        None => String::new(),
        Some(value) if value.is_finite() => format!(" in f16 ({value})"),
        Some(value) => format!(" ({value})"),
    }
}

fn shortage(needed: Option<u64>, available: Option<u64>, fits: Option<usize>) -> String {
    let fits = fits.map_or(String::new(), |fits| format!("; {fits} positions fit"));
    match (needed, available) {
        (Some(needed), Some(available)) => format!("needs {}, {} available{fits}", size(needed), size(available)),
        (Some(needed), None) => format!("out of memory allocating {}{fits}", size(needed)),
        (None, _) => format!("out of memory{fits}"),
    }
}

fn size(bytes: u64) -> String {
    match bytes {
        0..0x10_0000 => format!("{bytes} bytes"),
        0x10_0000..0x4000_0000 => format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}
