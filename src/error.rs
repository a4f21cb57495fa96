//! The library's one error type.

use std::fmt::Display;
use std::path::{Path, PathBuf};

/// Shorthand for results of this library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong. Every message is one line that names the file, tensor, field or limit, and the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be opened, mapped or read.
    #[error("{}", one_line(format_args!("{}: {cause}{}", path.display(), hint(cause))))]
    Io {
        /// The file.
        path: PathBuf,
        /// What the operating system said. Not an error source in `std`'s sense: the message has it already, and a report
        /// that follows sources would say it twice.
        cause: std::io::Error,
    },
    /// A file is not what its name promises.
    #[error("{}", one_line(format_args!("{}: {problem}", path.display())))]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        problem: String,
    },
    /// A field of a configuration has a value that this library cannot honour.
    #[error("{}", one_line(format_args!("{}: {field}: {problem}", path.display())))]
    Config {
        /// The configuration file.
        path: PathBuf,
        /// The field, with its nesting (`text_config.rope_parameters`).
        field: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A tensor is missing, or has another shape or type than the configuration implies.
    #[error("{}", one_line(format_args!("{}: tensor {tensor}: {problem}", path.display())))]
    Tensor {
        /// The file or directory that was searched.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// What is wrong with it.
        problem: String,
    },
    /// An assistant that was made for another target.
    #[error("the assistant does not fit the target: {problem}; load the assistant that was published for this target")]
    Pair {
        /// Both sides of the mismatch.
        problem: String,
    },
    /// A draft model that speaks another vocabulary.
    #[error("the draft model does not fit the target: {problem}; load a smaller model with the same tokenizer")]
    DraftModel {
        /// Both sides of the mismatch.
        problem: String,
    },
    /// A prompt, token or option that cannot be used.
    #[error("{}", one_line(.0))]
    Input(String),
    /// The context is full.
    #[error("{needed} tokens do not fit the context of {limit}; shorten the prompt or raise the limit")]
    Context {
        /// Tokens asked for.
        needed: usize,
        /// Tokens that fit.
        limit: usize,
    },
    /// A tokenizer file or a text that it cannot encode.
    #[error("tokenizer: {}", one_line(.0))]
    Tokenizer(String),
    /// A chat template that does not compile or refuses the messages.
    #[error("chat template: {}", one_line(.0))]
    Template(String),
    /// A device that is not there, has not enough memory, or lacks a kernel.
    #[error("{device}: {problem}")]
    Device {
        /// Its name.
        device: String,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// A tensor operation failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl Error {
    pub(crate) fn io(path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Self {
        move |cause| Error::Io { path: path.as_ref().to_owned(), cause }
    }

    pub(crate) fn template(error: minijinja::Error) -> Self {
        // The detail says where; the chain below it has no more.
        Error::Template(error.to_string())
    }

    pub(crate) fn file(path: impl AsRef<Path>, problem: impl Into<String>) -> Self {
        Error::File { path: path.as_ref().to_owned(), problem: problem.into() }
    }
}

/// Paths, and names that come from files, may have line breaks.
fn one_line(text: impl Display) -> String {
    text.to_string().replace(char::is_control, " ")
}

fn hint(cause: &std::io::Error) -> &'static str {
    match cause.kind() {
        std::io::ErrorKind::NotFound => "; check the path, or download the checkpoint there",
        std::io::ErrorKind::IsADirectory => "; a file is expected here",
        _ => "",
    }
}
