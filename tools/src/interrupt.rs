//! Ctrl-C ends a generation, so that what was generated is not lost.

#[cfg(unix)]
pub use unix::cancel_on_interrupt;

/// Nothing: Ctrl-C ends the process.
#[cfg(not(unix))]
pub fn cancel_on_interrupt(_: foretoken::Cancel) {}

#[cfg(unix)]
mod unix {
    use std::sync::OnceLock;

    use foretoken::Cancel;

    static CANCEL: OnceLock<Cancel> = OnceLock::new();

    /// The next SIGINT cancels with `cancel`, a second one ends the process. An ignored SIGINT stays ignored. Only the
    /// first call of a process has an effect.
    pub fn cancel_on_interrupt(cancel: Cancel) {
        if CANCEL.set(cancel).is_err() {
            return;
        }
        // SAFETY: the handler only stores to atomics and calls `signal`, which are async-signal-safe; what it reads is set.
        unsafe {
            if libc::signal(libc::SIGINT, interrupted as *const () as libc::sighandler_t) == libc::SIG_IGN {
                libc::signal(libc::SIGINT, libc::SIG_IGN);
            }
        }
    }

    extern "C" fn interrupted(_: libc::c_int) {
        if let Some(cancel) = CANCEL.get() {
            cancel.cancel();
        }
        // SAFETY: `signal` is async-signal-safe.
        unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
    }
}
