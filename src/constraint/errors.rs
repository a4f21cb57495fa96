//! llguidance's errors as errors of the argument `constraint`, on one line.

use std::fmt::Display;

use crate::Error;

/// Wraps llguidance's error.
pub(super) fn refused(error: impl Display) -> Error {
    Error::argument("constraint", one_line(error))
}

/// Start of the part of llguidance's errors that is not for callers.
const STATE: [&str; 2] = ["<non-verbose/>", "<backtrace>"];

/// llguidance's whole error if a mask has no token.
const EMPTY_MASK: &str = "NoExtensionBias";

/// That error as [`one_line`] returns it.
pub(super) const NO_TOKEN: &str = "allows no next token";

/// The error with its causes, without the parser's state.
pub(super) fn one_line(error: impl Display) -> String {
    let error = format!("{error:#}");
    let words = error.split_whitespace().take_while(|word| !STATE.contains(word));
    match words.collect::<Vec<_>>().join(" ") {
        name if name == EMPTY_MASK => NO_TOKEN.into(),
        problem => problem,
    }
}
