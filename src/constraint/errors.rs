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

/// Parts of llguidance's errors, and what helps.
const REMEDIES: [(&str, &str); 4] = [
    ("Unimplemented keys: ", "remove them, or check the text for them afterwards"),
    (
        "oneOf constraints are not supported",
        "or give its cases different types, or a required property with different constants",
    ),
    ("circular references with sibling keys", "remove the keywords beside the reference"),
    ("Only absolute $ref's", "refer to a place in this schema, as #/$defs/name"),
];

/// The error with its causes, and what helps, without the parser's state.
pub(super) fn one_line(error: impl Display) -> String {
    let error = format!("{error:#}");
    let words = error.split_whitespace().take_while(|word| !STATE.contains(word));
    match words.collect::<Vec<_>>().join(" ") {
        name if name == EMPTY_MASK => NO_TOKEN.into(),
        problem => {
            let is_new = |(part, remedy): &&(&str, &str)| problem.contains(*part) && !problem.contains(*remedy);
            match REMEDIES.iter().find(is_new) {
                Some((_, remedy)) => format!("{problem}; {remedy}"),
                None => problem,
            }
        }
    }
}
