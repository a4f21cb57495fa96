//! llguidance's errors as errors of the argument `constraint`, on one line.

use std::fmt::Display;

use crate::Error;

/// Wraps llguidance's error.
pub(super) fn refused(error: impl Display) -> Error {
    Error::argument("constraint", one_line(error))
}

/// Start of the part of llguidance's errors that is not for callers.
const STATE: [&str; 2] = ["<non-verbose/>", "<backtrace>"];

/// The error with its causes, without the parser's state.
pub(super) fn one_line(error: impl Display) -> String {
    let error = format!("{error:#}");
    let words = error.split_whitespace().take_while(|word| !STATE.contains(word));
    words.collect::<Vec<_>>().join(" ")
}
