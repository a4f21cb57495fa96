//! Machine and commit of a measurement.

use std::process::Command;

use foretoken::Isa;
use foretoken_tools::report::shell_word;
use foretoken_tools::repository;

use crate::journal::Origin;

/// This machine, and the checked-out commit.
pub fn origin(isa: Option<Isa>) -> Origin {
    Origin { machine: machine(isa.unwrap_or_else(Isa::best)), commit: commit() }
}

/// Processor, memory and instruction set in use.
fn machine(isa: Isa) -> String {
    let field = |file: &str, name: &str| {
        let text = std::fs::read_to_string(file).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.trim_start_matches([' ', '\t', ':']).trim().to_owned())
    };
    let processor = field("/proc/cpuinfo", "model name").unwrap_or_else(|| std::env::consts::ARCH.into());
    let usable = std::thread::available_parallelism().map_or(1, usize::from);
    let kilobytes = field("/proc/meminfo", "MemTotal:").and_then(|total| total.strip_suffix("kB")?.trim().parse().ok());
    let memory = kilobytes.map_or(String::new(), |kb: f64| format!(", {:.0} GiB", kb / f64::from(1 << 20)));
    let (isa, system) = (isa.name(), std::env::consts::OS);
    format!("{processor}, {usable} CPUs{memory}, {isa}, {system}")
}

/// The checked-out commit, with a checksum of uncommitted changes to the sources; `unknown` outside of git.
fn commit() -> String {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").arg("-C").arg(repository()).args(arguments).output().ok()?;
        output.status.success().then_some(output.stdout)
    };
    let Some(head) = git(&["rev-parse", "--short=10", "HEAD"]) else { return "unknown".into() };
    let head = String::from_utf8_lossy(&head).trim().to_owned();
    let sources =
        ["diff", "HEAD", "--", "src", "kernels", "gpu", "benches/examples/bench_matrix", "tools/src", "Cargo.lock"];
    match git(&sources) {
        Some(difference) if !difference.is_empty() => format!("{head}+{:08x}", crc32fast::hash(&difference)),
        _ => head,
    }
}

/// The command line, without the executable's directory.
pub fn command() -> String {
    let arguments = std::env::args().skip(1).map(|argument| shell_word(&argument));
    std::iter::once("bench_matrix".into()).chain(arguments).collect::<Vec<_>>().join(" ")
}

/// Now, as `2026-11-21 20:15 UTC`.
pub fn now() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M UTC").to_string()
}

/// Resets the process's peak memory counter, if the system supports it.
pub fn forget_peak() {
    // 5 resets the peak resident set size (proc_pid_clear_refs(5)); elsewhere the peak is that of the whole process.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}
