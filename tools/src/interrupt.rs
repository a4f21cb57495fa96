//! Ctrl-C ends a generation, so that what was generated is not lost, and removes a file that is not complete.

use std::process::{ExitCode, exit};

use anyhow::Result;
use foretoken::{Cancel, Error};

use crate::eprintln;

/// A shell's exit code for a command that SIGINT ended.
pub const INTERRUPTED: u8 = 130;

/// The next Ctrl-C cancels with `cancel`, a second one ends the process. Without effect if there is a handler already,
/// or the signal is ignored.
pub fn cancel_on_interrupt(cancel: Cancel) {
    drop(ctrlc::try_set_handler(move || {
        if cancel.is_cancelled() {
            exit(INTERRUPTED.into());
        }
        cancel.cancel();
    }));
}

/// The exit code of a command that writes files. If [`cancel_on_interrupt`] cancelled it, that is reported on stderr.
///
/// # Errors
/// Every error of `result` but [`Error::Cancelled`].
pub fn exit_code(result: Result<()>) -> Result<ExitCode> {
    match result {
        Err(error) if matches!(error.downcast_ref(), Some(Error::Cancelled)) => {
            eprintln!("interrupted; the incomplete file is removed");
            Ok(ExitCode::from(INTERRUPTED))
        }
        result => result.map(|()| ExitCode::SUCCESS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cancelled_command_is_no_error() {
        let code = |result| exit_code(result).map(|code| format!("{code:?}"));
        assert_eq!(code(Err(Error::Cancelled.into())).expect("a code"), format!("{:?}", ExitCode::from(INTERRUPTED)));
        assert_eq!(code(Ok(())).expect("a code"), format!("{:?}", ExitCode::SUCCESS));
        assert!(code(Err(anyhow::anyhow!("another"))).is_err());
    }
}
