//! The warnings that a test provokes.

use std::sync::{Arc, Mutex};

use tracing::{Dispatch, Subscriber};

/// The warnings so far.
#[derive(Default)]
struct Warnings(Mutex<Vec<String>>);

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut line = String::new();
        event.record(&mut |field: &tracing::field::Field, value: &dyn std::fmt::Debug| {
            line += &format!("{}={value:?} ", field.name());
        });
        self.0.lock().expect("a line").push(line);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// What `work` returns, and the warnings that it logs on this thread.
pub fn warnings<T>(work: impl FnOnce() -> T) -> (T, Vec<String>) {
    // While there is one subscriber, a warning that a thread without it is the first to log is disabled on all threads.
    let _second = Dispatch::new(Warnings::default());
    let warnings = Arc::new(Warnings::default());
    let done = tracing::subscriber::with_default(warnings.clone(), work);
    let lines = std::mem::take(&mut *warnings.0.lock().expect("the lines"));
    (done, lines)
}

#[test]
fn a_warning_that_another_thread_logs_first_is_seen() {
    let log = || tracing::warn!("a warning");
    let ((), lines) = warnings(|| {
        std::thread::spawn(log).join().expect("no panic");
        log();
    });
    assert_eq!(lines.len(), 1, "{lines:?}");
}
