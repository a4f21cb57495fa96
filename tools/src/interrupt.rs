//! Ctrl-C ends a generation, so that what was generated is not lost.

use std::process::exit;

use foretoken::Cancel;

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
