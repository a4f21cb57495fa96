//! Shared code of the commands and the server: entry points, command lines, and reports.

pub mod arguments;
pub mod centroids;
mod environment;
mod errors;
pub mod html;
pub mod input;
pub mod interrupt;
pub mod measure;
pub mod progress;
pub mod prompt;
pub mod reply;
pub mod report;
pub mod sampling;

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Termination};

use anyhow::{Result, anyhow, ensure};
use clap::Parser;

use crate::errors::{Options, one_line};

/// Runs `command` with the process's arguments. An error, including a usage error, is one line on stderr, which names
/// options instead of the library's arguments, and exit code 1, with or without `RUST_BACKTRACE` (`anyhow`'s own report
/// would print the frames). A closed pipe ends the process by SIGPIPE, as with other Unix programs; Rust ignores that
/// signal by default, and `println!` would panic.
pub fn run<A: Parser, T: Termination>(command: impl FnOnce(A) -> Result<T>) -> ExitCode {
    sigpipe::reset();
    run_service(command)
}

/// As [`run`], for commands that write to sockets: if a peer closes its connection, the write fails
/// instead of raising a signal.
pub fn run_service<A: Parser, T: Termination>(command: impl FnOnce(A) -> Result<T>) -> ExitCode {
    let (result, options) = match parse(std::env::args_os()) {
        Ok((arguments, options)) => (command(arguments), options),
        Err(error) => (Err(error), Options::default()),
    };
    match result {
        Ok(value) => value.report(),
        Err(error) => {
            crate::eprintln!("Error: {}", options.line(&error));
            ExitCode::FAILURE
        }
    }
}

/// Writes the library's warnings to stderr.
pub fn log_warnings() {
    let log = tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(tracing::Level::WARN);
    // A line that cannot be written is lost: reporting that on stderr would panic.
    log.log_internal_errors(false).init();
}

/// An error and its causes on one line, with the options of this command, `A`, for the library's arguments: for errors
/// that do not end the command.
pub fn describe<A: Parser>(error: &anyhow::Error) -> String {
    let options = parse::<A>(std::env::args_os()).map(|(_, options)| options);
    options.unwrap_or_default().line(error)
}

/// As the standard macro, but if stdout cannot be written (a full disk), the process ends with an
/// error on one line and exit code 1.
#[macro_export]
macro_rules! println {
    ($($text:tt)*) => {
        $crate::print_line(format_args!($($text)*))
    };
}

/// As the standard macro, but a line that cannot be written to stderr (a full disk) is lost, where the standard one
/// panics.
#[macro_export]
macro_rules! eprintln {
    ($($text:tt)*) => {
        $crate::report_line(format_args!($($text)*))
    };
}

/// Prints a line to stdout, or ends the process with exit code 1.
pub fn print_line(text: std::fmt::Arguments<'_>) {
    if let Err(error) = std::io::stdout().write_fmt(format_args!("{text}\n")) {
        crate::eprintln!("Error: stdout: {error}");
        std::process::exit(1);
    }
}

/// Prints a line to stderr, if it can be written.
pub fn report_line(text: std::fmt::Arguments<'_>) {
    let _ = std::io::stderr().write_fmt(format_args!("{text}\n"));
}

/// Parses the arguments; `--help` and `--version` print and exit.
fn parse<A: Parser>(arguments: impl Iterator<Item = OsString>) -> Result<(A, Options)> {
    // A negative value is the option's, which says what is wrong with it, and no unknown option.
    let mut command = A::command().mut_args(|arg| {
        let is_value = !arg.is_positional() && arg.get_action().takes_values();
        if is_value { arg.allow_negative_numbers(true) } else { arg }
    });
    let parsed = command.try_get_matches_from_mut(arguments).and_then(|mut matches| {
        let options = Options::new(&A::command(), &matches);
        let parsed = A::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))?;
        Ok((parsed, options))
    });
    parsed.map_err(|error| {
        if !error.use_stderr() {
            error.exit();
        }
        // After an empty line there are hints and the usage. A value that is quoted may have one as well.
        let message = error.to_string();
        let ends = ["\n\nUsage:", "\n\nFor more information", "\n\n  tip:", "\n\n  note:"];
        let end = ends.iter().filter_map(|end| message.find(end)).min().unwrap_or(message.len());
        let problem = one_line(message[..end].trim_end());
        anyhow!("{}; see --help", problem.strip_prefix("error: ").unwrap_or(&problem))
    })
}

/// Checks that there is a directory for a file that is written at the end of a run.
///
/// # Errors
/// If it does not exist, or `file` is itself a directory.
pub fn check_directory_of(file: &Path) -> Result<()> {
    ensure!(!file.is_dir(), "{}: is a directory; use the name of a file in it", file.display());
    let directory = file.parent().filter(|directory| !directory.as_os_str().is_empty());
    let exists = directory.is_none_or(Path::is_dir);
    ensure!(exists, "{}: its directory does not exist; create it first", file.display());
    Ok(())
}

/// `part` of the demo pair that the repository ships: `target`, `assistant` or `prompts.json`.
pub fn demo(part: &str) -> PathBuf {
    repository().join("models/demo").join(part)
}

/// The root of the repository that this was built in.
pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new(""))
}
