//! The error of a generation that cannot begin.

use std::fmt;

use crate::{Error, Session};

/// A refused generation: its session, unchanged, and the cause. A session is not `Sync`: for errors that must be, such
/// as anyhow's, convert it to an [`Error`], which drops the session.
pub struct NotStarted {
    /// The session that was passed.
    pub session: Session,
    /// Why it was refused.
    pub error: Error,
}

impl fmt::Debug for NotStarted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl fmt::Display for NotStarted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for NotStarted {}

impl From<Box<NotStarted>> for Error {
    fn from(refused: Box<NotStarted>) -> Self {
        refused.error
    }
}
