//! A test that cannot run here passes, and prints `skipped: WHAT: WHY`.

use std::fmt::Display;
use std::io::Write;

/// Prints a line to stderr directly: the test harness captures `eprintln!` of passing tests.
pub fn print(line: &str) {
    std::io::stderr().write_all(format!("{line}\n").as_bytes()).expect("stderr");
}

/// Reports that a test, or a part of one, did not run.
pub fn skipped(what: &str, why: impl Display) {
    print(&format!("skipped: {what}: {why}"));
}
