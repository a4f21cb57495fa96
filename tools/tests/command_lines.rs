//! Every command once, small, on the demo pair: what it prints, its exit code, its errors, and a reader that leaves.

mod example;
#[path = "../../kernels/tests/skipped/mod.rs"]
mod skipped;
mod trace_view;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use foretoken::Statistics;
use foretoken::checkpoint::{Checkpoint, LoadOptions};
use foretoken::gemma4::Target;
use foretoken::speculative::{Costs, DrafterKind, DrafterStats};
use foretoken::{Engine, EngineOptions, Error, Isa};
use serde_json::Value;

/// An example's executable. Backtraces are asked for: no output may have them.
fn example(name: &str) -> Command {
    let mut command = example::example(name);
    command.env_remove("RUST_LOG").env("RUST_BACKTRACE", "1").current_dir(env!("CARGO_MANIFEST_DIR"));
    command
}

fn run(name: &str, arguments: &[&str]) -> Output {
    example(name).args(arguments).output().expect("a run")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Runs a command that must fail as all of them do: with exit code 1, nothing on stdout, and one line on stderr, the
/// result.
fn refused(name: &str, arguments: &[&str]) -> String {
    let Output { status, stdout, stderr } = run(name, arguments);
    let line = text(&stderr);
    let is_one = status.code() == Some(1) && stdout.is_empty() && line.lines().count() == 1;
    assert!(is_one && line.starts_with("Error: "), "{name} {arguments:?}: {status}: {line}");
    line
}

/// Runs a command that must succeed; its stdout and stderr.
fn succeeds(name: &str, arguments: &[&str]) -> (String, String) {
    let run = run(name, arguments);
    assert!(run.status.success(), "{name} {arguments:?}: {}", text(&run.stderr));
    (text(&run.stdout), text(&run.stderr))
}

/// The last line of a command's stdout.
fn json(name: &str, arguments: &[&str]) -> Value {
    let (stdout, _) = succeeds(name, arguments);
    let last = stdout.lines().last().unwrap_or_else(|| panic!("{name} printed nothing"));
    serde_json::from_str(last).unwrap_or_else(|e| panic!("{name}: {e}: {last}"))
}

fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<_> = value.as_object().expect("an object").keys().map(String::as_str).collect();
    keys.sort_unstable(); // serde_json's map has another order with its feature `preserve_order`
    keys
}

/// What the table under a heading of docs/commands.md describes, sorted.
fn documented(heading: &str) -> Vec<String> {
    let path = foretoken_tools::repository().join("docs/commands.md");
    let page = std::fs::read_to_string(path).expect("the page");
    let is_heading = |line: &&str| line.starts_with('#') && line.trim_start_matches('#').trim() == heading;
    let section = page.lines().skip_while(|line| !is_heading(line)).skip(1).take_while(|line| !line.starts_with('#'));
    let cells = section.filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
    let mut names: Vec<_> = cells.flat_map(|cell| cell.split(", ").map(|name| name.replace('`', ""))).collect();
    names.sort_unstable();
    names
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is not a number"))
}

fn demo(part: &str) -> PathBuf {
    foretoken_tools::demo(part)
}

/// A checkpoint with a NextN head and recurrent layers.
const DEMO_QWEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo-qwen");

/// Replaces a part of a file.
fn edit(path: &Path, from: &str, to: &str) {
    let own = std::fs::read_to_string(path).expect("a file");
    let edited = own.replace(from, to);
    assert_ne!(edited, own, "{} has no {from}", path.display());
    std::fs::write(path, edited).expect("written");
}

/// A path in UTF-8.
fn utf8(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

const COMMANDS: [&str; 15] = [
    "acceptance",
    "batch",
    "bench_matrix",
    "constraint",
    "convert",
    "depth",
    "doctor",
    "drafters",
    "generate",
    "kv_quality",
    "perplexity",
    "quantize",
    "synthesize",
    "trace_view",
    "verify_curve",
];

#[test]
fn every_command_is_listed() {
    let mut names = Vec::new();
    for package in ["tools", "benches"] {
        let examples = foretoken_tools::repository().join(package).join("examples");
        for entry in std::fs::read_dir(examples).expect("the examples") {
            let path = entry.expect("an entry").path();
            assert!(path.extension().is_none_or(|end| end == "rs"), "{}", path.display());
            names.push(path.file_stem().and_then(|name| name.to_str()).expect("a name").to_owned());
        }
    }
    names.sort_unstable();
    assert_eq!(names, COMMANDS);
}

// ---- generate ----

#[test]
fn generate_ends_with_one_line() {
    let all = ["fn main() {", "--threads", "1", "--max-tokens", "96", "--ignore-eos"];
    let with = |more: &[&str]| succeeds("generate", &[&all[..], more].concat());
    let (written, line) = with(&[]);
    assert!(written.trim().len() > 50, "{written}");
    assert_eq!(line.lines().count(), 1, "{line}");
    assert!(line.starts_with("96 tokens at ") && line.contains(" drafted tokens accepted"), "{line}");

    let (plain, line) = with(&["--no-speculation"]);
    assert_eq!(plain, written, "speculation changed the text");
    assert_eq!(line.lines().count(), 1, "{line}");
    assert!(line.starts_with("96 tokens at ") && line.ends_with(" tokens/s\n"), "{line}");

    let (same, details) = with(&["--stats"]);
    assert_eq!(same, written);
    for part in ["K/V of layers 1, 3, 5: keys f16, values f16", "\nmtp: ", "rounds by rows: ", "v(B): 1.00 "] {
        assert!(details.contains(part), "{details} has no {part:?}");
    }
    assert!(details.lines().last().is_some_and(|line| line.starts_with("96 tokens at ")), "{details}");

    // At a limit that was not given: a line before it.
    let (_, lines) = succeeds("generate", &["fn main() {", "--threads", "1", "--ignore-eos"]);
    let limit = "ended at 128 tokens; raise --max-tokens, or pass -1 for no limit\n128 tokens at ";
    assert!(lines.starts_with(limit) && lines.lines().count() == 2, "{lines}");
    let (_, lines) = with(&["--context", "40"]);
    assert!(lines.starts_with("the context of 40 tokens is full; raise --context\n"), "{lines}");

    let (_, line) = with(&["--simulate-acceptance", "1"]);
    assert!(line.lines().count() == 1 && line.contains("acceptance was simulated: the text is meaningless"), "{line}");
}

/// The prompt as an argument, as an option, in a file or on stdin is the same, and short options are the long ones.
#[test]
fn a_prompt_from_anywhere() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = |name: &str, content: &[u8]| {
        let path = directory.path().join(name);
        std::fs::write(&path, content).expect("a file");
        path.to_str().expect("UTF-8").to_owned()
    };
    let all = ["--threads", "1", "--max-tokens", "16", "--no-assistant"];
    let want = succeeds("generate", &[&["fn main() {\n    let x"][..], &all].concat()).0;
    let with_newline = file("prompt", b"fn main() {\n    let x\n");
    let (target, crlf) = (demo("target"), file("crlf", b"fn main() {\n    let x\r\n"));
    let short = ["-m", utf8(&target), "-n", "16", "-t", "1", "--no-assistant"];
    assert_eq!(succeeds("generate", &[&["-p", "fn main() {\n    let x"][..], &short].concat()).0, want);
    for path in [&with_newline, &crlf] {
        assert_eq!(succeeds("generate", &[&["-f", path.as_str()][..], &all].concat()).0, want);
    }
    assert_eq!(json("generate", &[&["-p", "- a", "--json"][..], &all].concat())["generated_tokens"], 16);
    let stdin = File::open(&with_newline).expect("a file");
    let piped = example("generate").args([&["--file", "-"][..], &all].concat()).stdin(stdin).output().expect("a run");
    assert_eq!(text(&piped.stdout), want, "{}", text(&piped.stderr));

    let fails = |arguments: &[&str], what: &str| {
        let line = refused("generate", arguments);
        assert!(line.contains(what), "{arguments:?}: {line}");
    };
    for other in [&["x"][..], &["-p", "x"], &["--prompt-ids", "2"], &["--chat", "--messages", &crlf]] {
        fails(&[&["-f", with_newline.as_str()][..], other].concat(), "cannot be used with");
    }
    fails(&["x", "-p", "y"], "cannot be used with");
    // Said before the model is loaded.
    let nowhere = directory.path().join("nowhere");
    fails(&["-f", utf8(&nowhere), "-m", "no-model"], "nowhere: No such file or directory (os error 2)\n");
    fails(&["-f", utf8(directory.path()), "-m", "no-model"], utf8(directory.path()));
    fails(
        &["-f", &file("bytes", b"fn \xFF"), "-m", "no-model"],
        "bytes: is not UTF-8 at byte offset 3; convert it to UTF-8",
    );
    let large = directory.path().join("large");
    File::create(&large).and_then(|file| file.set_len((64 << 20) + 1)).expect("a file");
    fails(&["-f", utf8(&large), "-m", "no-model"], "large: is longer than 64 MiB; shorten it");
    // By its bytes, before it is tokenized: 60 are the longest token's.
    let long = file("long", &b"x;".repeat(5000));
    let problem =
        format!("{} tokens do not fit the context of 64; shorten the prompt or raise --context", 9999 / 60 + 1);
    fails(&["-f", &long, "--context", "64"], &problem);
    fails(&["-f", &file("empty", b"\n")], "prompt: is empty");
}

/// Files of prompts and texts are read before the model is loaded, and an error names them.
#[test]
fn files_are_read_before_the_model() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = |name: &str, content: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, content).expect("a file");
        path
    };
    let (lines, empty, nowhere) = (file("lines", "fn main() {\n"), file("empty", ""), directory.path().join("nowhere"));
    let [lines, empty, nowhere] = [&lines, &empty, &nowhere].map(|path| utf8(path));
    let cases: [(&str, &[&str], &str, &str); 7] = [
        ("batch", &[nowhere], nowhere, "No such file or directory (os error 2)"),
        ("batch", &[empty], empty, "has no prompts; put one on each line"),
        ("acceptance", &["--prompts", nowhere], nowhere, "No such file or directory (os error 2)"),
        (
            "acceptance",
            &["--prompts", lines],
            lines,
            "is not a JSON list of prompts: expected ident at line 1 column 2",
        ),
        ("perplexity", &[nowhere], nowhere, "No such file or directory (os error 2)"),
        ("kv_quality", &["--text", nowhere], nowhere, "No such file or directory (os error 2)"),
        ("kv_quality", &["--text", empty], empty, "is empty; use another text"),
    ];
    for (name, arguments, path, problem) in cases {
        let line = refused(name, &[arguments, &["--model", "no-model"]].concat());
        assert_eq!(line, format!("Error: {path}: {problem}\n"), "{name}");
    }
}

/// Prompts and texts may come from stdin wherever they may come from a file.
#[test]
fn texts_are_read_from_stdin() {
    let directory = tempfile::tempdir().expect("a directory");
    let source = std::fs::read_to_string(foretoken_tools::repository().join(file!())).expect("this file");
    let cases: [(&str, &str, &[&str]); 5] = [
        ("bench_matrix", &source, &["--dry-run", "--out", "/nowhere", "--text", "-"]),
        ("batch", "fn main() {\nstruct A\n", &["-", "--max-tokens", "2", "--threads", "1"]),
        (
            "acceptance",
            r#"["fn main() {"]"#,
            &["--prompts", "-", "--blocks", "2", "--max-tokens", "2", "--threads", "1"],
        ),
        ("perplexity", &source, &["-", "--window", "64", "--windows", "1"]),
        ("kv_quality", &source, &["--text", "-", "--tokens", "16", "--generate", "0", "--only", "exact"]),
    ];
    for (name, content, arguments) in cases {
        let path = directory.path().join(name);
        std::fs::write(&path, content).expect("a file");
        let stdin = File::open(&path).expect("a file");
        let piped = example(name).args(arguments).stdin(stdin).output().expect("a run");
        assert!(piped.status.success() && !piped.stdout.is_empty(), "{name}: {}", text(&piped.stderr));
    }
}

/// Constraints are not read without end.
#[cfg(unix)]
#[test]
fn constraints_are_limited() {
    let directory = tempfile::tempdir().expect("a directory");
    for (path, problem) in [(Path::new("/dev/zero"), "is longer than 16 MiB"), (directory.path(), "Is a directory")] {
        for option in ["--json-schema", "--grammar"] {
            let arguments = ["x", "--threads", "1", "--no-assistant", "--max-tokens", "1", option, utf8(path)];
            let line = refused("generate", &arguments);
            assert!(line.starts_with(&format!("Error: {}: {problem}", path.display())), "{option}: {line}");
        }
    }
}

/// A text that is not UTF-8: the file, the byte and the remedy.
#[test]
fn bytes_that_are_not_utf_8_are_named() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("latin-1");
    std::fs::write(&path, b"fn caf\xE9() {}\n").expect("a file");
    let path = utf8(&path);
    let cases: [(&str, &[&str]); 6] = [
        ("batch", &[path]),
        ("acceptance", &["--prompts", path]),
        ("perplexity", &[path]),
        ("kv_quality", &["--text", path]),
        ("bench_matrix", &["--dry-run", "--out", "/nowhere", "--text", path]),
        ("trace_view", &[path]),
    ];
    for (name, arguments) in cases {
        let line = format!("Error: {path}: is not UTF-8 at byte offset 6; convert it to UTF-8\n");
        assert_eq!(refused(name, arguments), line, "{name}");
    }
}

/// A file that is written at the end: if its directory is missing, or it is a directory, the error precedes the run.
#[test]
fn directories_of_results_are_checked_first() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("absent/file");
    let file = utf8(&file);
    let cases: [(&str, &[&str]); 6] = [
        ("generate", &["--costs", file]),
        ("generate", &["--trace", file, "--model", "no-model"]),
        ("generate", &["--spec-type", "ngram-cache", "--ngram-dynamic", file]),
        ("kv_quality", &["--tokens", "16", "--csv", file]),
        ("kv_quality", &["--tokens", "16", "--svg", file]),
        ("drafters", &["--max-tokens", "2", "--repeats", "1", "--out", file]),
    ];
    for (name, arguments) in cases {
        let line = format!("Error: {file}: its directory does not exist; create it first\n");
        assert_eq!(refused(name, arguments), line, "{name}");
        let at = utf8(directory.path());
        let arguments: Vec<&str> = arguments.iter().map(|part| if *part == file { at } else { *part }).collect();
        let line = format!("Error: {at}: is a directory; use the name of a file in it\n");
        assert_eq!(refused(name, &arguments), line, "{name}");
    }
}

/// Files of n-gram counts are used by the drafter ngram-cache, and refused without it.
#[test]
fn files_of_ngram_counts_need_their_drafter() {
    let directory = tempfile::tempdir().expect("a directory");
    let counts = directory.path().join("counts");
    let all = ["fn main() {", "--threads", "1", "--max-tokens", "8", "--ngram-dynamic", utf8(&counts)];
    for more in [&[][..], &["--spec-type", "ngram-map-k,mtp"], &["--no-assistant"]] {
        let line = "Error: --ngram-dynamic: only the drafter ngram-cache uses it; list it in --spec-type\n";
        assert_eq!(refused("generate", &[&all[..], more].concat()), line, "{more:?}");
    }
    // Others read the file that generate writes.
    let line = format!("Error: --ngram-dynamic: {} does not exist; generate creates it\n", utf8(&counts));
    for name in ["batch", "constraint"] {
        assert_eq!(refused(name, &["--spec-type", "ngram-cache", "--ngram-dynamic", utf8(&counts)]), line, "{name}");
    }
    succeeds("generate", &[&all[..], &["--spec-type", "ngram-cache"]].concat());
    assert!(counts.is_file());
    let corpus = ["--ngram-static", utf8(&counts)];
    succeeds("generate", &[&all[..], &corpus, &["--spec-type", "mtp,ngram-cache"]].concat());
}

/// If one of the files that are saved at the end cannot be written, or stdout is full, the others are saved, and the
/// error is reported.
#[cfg(target_os = "linux")]
#[test]
fn other_files_are_saved_if_one_cannot_be() {
    let directory = tempfile::tempdir().expect("a directory");
    let (costs, counts) = (directory.path().join("costs"), directory.path().join("counts"));
    let all = ["fn main() {", "--threads", "1", "--max-tokens", "8", "--spec-type", "ngram-cache", "--costs"];
    let all = [&all[..], &[utf8(&costs), "--ngram-dynamic", utf8(&counts)]].concat();
    for (failing, other) in [(&costs, &counts), (&counts, &costs)] {
        let in_the_way = failing.with_added_extension("partial");
        std::fs::create_dir(&in_the_way).expect("a directory");
        let Output { status, stdout, stderr } = run("generate", &all);
        let stderr = text(&stderr);
        let last = stderr.lines().last().unwrap_or_default();
        let is_named = last.starts_with("Error: ") && last.contains(utf8(failing));
        assert!(status.code() == Some(1) && is_named && !stdout.is_empty(), "{status}: {stderr}");
        assert!(other.is_file() && !failing.exists(), "{stderr}");
        std::fs::remove_file(other).expect("removed");
        std::fs::remove_dir(in_the_way).expect("removed");
    }
    for json in [&[][..], &["--json"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").expect("a device");
        let output = example("generate").args(&all).args(json).stdout(full).output().expect("a run");
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
        for file in [&costs, &counts] {
            std::fs::remove_file(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        }
    }
}

/// Options of which one would have no effect beside the other are refused together.
#[test]
fn options_without_effect_are_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let (target, gguf) = (demo("target"), directory.path().join("demo.gguf"));
    let (target, gguf, back) = (utf8(&target), utf8(&gguf), directory.path().join("back"));
    succeeds("convert", &[target, gguf]);
    let chat = ["--chat", "--think", "--chat-template-kwargs", r#"{"enable_thinking": false}"#];
    let greedy = "no filter applies at temperature 0, the default; pass a --temperature, or omit it";
    let cases: [(&str, &[&str], &str); 41] = [
        ("generate", &["--no-speculation", "--ngram-static", "x"], "cannot be used with"),
        ("generate", &["--no-speculation", "--ngram-dynamic", "x"], "cannot be used with"),
        ("generate", &["--no-speculation", "--simulate-acceptance", "1"], "cannot be used with"),
        ("generate", &["--no-speculation", "--pipeline-depth", "2"], "--pipeline-depth 2: nothing drafts; "),
        ("generate", &["--no-assistant", "--skip-streak", "2"], "--skip-streak: nothing drafts; pass --assistant or "),
        ("generate", &["--no-assistant", "--simulate-acceptance", "1"], "--simulate-acceptance: nothing drafts; "),
        ("generate", &["--no-assistant", "--sample-drafts"], "--sample-drafts: nothing drafts; "),
        ("generate", &["--no-assistant", "--centroids", "auto"], "cannot be used with"),
        ("generate", &["--no-cache"], "--no-cache: no centroids are built; pass --centroids auto or N/K, or omit it"),
        (
            "generate",
            &["--model", gguf, "--centroids", "8/2"],
            "--centroids: no assistant is loaded; pass --assistant, ",
        ),
        ("acceptance", &["--model", gguf, "--centroids", "none"], "--centroids: no assistant is loaded; "),
        ("generate", &["--dry-base", "2"], "--dry-base: DRY is off; pass a --dry-multiplier above 0, or omit it"),
        ("generate", &["--dry-multiplier", "0", "--dry-allowed-length", "3"], "--dry-allowed-length: DRY is off; "),
        ("generate", &["--dry-penalty-last-n", "-1"], "--dry-penalty-last-n: DRY is off; "),
        ("generate", &["--dry-multiplier", "1", "--dry-sequence-breaker", ""], "--dry-sequence-breaker: is empty; "),
        ("batch", &["--dry-sequence-breaker", "none"], "--dry-sequence-breaker: DRY is off; "),
        (
            "generate",
            &["--xtc-threshold", "0.2"],
            "--xtc-threshold: XTC is off; pass an --xtc-probability above 0, or omit it",
        ),
        ("generate", &["--top-k", "40"], &format!("--top-k: {greedy}")),
        ("generate", &["--min-p", "0.1"], &format!("--min-p: {greedy}")),
        ("generate", &["--typical-p", "0.9"], &format!("--typical: {greedy}")),
        ("generate", &["--top-n-sigma", "1"], &format!("--top-n-sigma: {greedy}")),
        ("generate", &["--xtc-probability", "0.5"], &format!("--xtc-probability: {greedy}")),
        ("batch", &["--top-k", "0", "--top-p", "1", "--min-p", "0.1"], &format!("--min-p: {greedy}")),
        ("generate", &["--sample-drafts"], "--sample-drafts: nothing is sampled at temperature 0; "),
        ("batch", &["--sample-drafts", "--temp", "0"], "--sample-drafts: nothing is sampled at temperature 0; "),
        ("constraint", &["--sample-drafts"], "--sample-drafts: all texts are greedy; omit it"),
        (
            "generate",
            &["--spec-type", "ngram-map-k", "--skip-streak", "2"],
            "--skip-streak: no model drafts; list mtp ",
        ),
        (
            "batch",
            &["--spec-type", "ngram-mod", "--sample-drafts", "--temp", "1"],
            "--sample-drafts: no model drafts; ",
        ),
        ("generate", &["--draft-model", target], "--draft-model: nothing drafts with it; list draft-model in "),
        ("batch", &["--draft-model", target, "--spec-type", "ngram-mod"], "--draft-model: nothing drafts with it; "),
        ("generate", &["--repeat-last-n", "8"], "--repeat-last-n: all penalties are off; set --repeat-penalty, "),
        ("generate", &["--repeat-penalty", "1", "--repeat-last-n", "8"], "--repeat-last-n: all penalties are off; "),
        ("generate", &chat, "--think: contradicts enable_thinking in --chat-template-kwargs"),
        ("batch", &["--prompt-tokens", "8"], "not provided: --model"),
        ("batch", &["x", "--model", target, "--prompt-tokens", "8"], "cannot be used with"),
        ("doctor", &[target, "--check", "--json", "--contents"], "cannot be used with"),
        ("convert", &[target, utf8(&back), "--layout", "gemma4_assistant"], "--layout: applies to an assistant"),
        ("convert", &[gguf, utf8(&back), "--layout", "gemma4_assistant"], "--layout: applies to a GGUF file"),
        ("kv_quality", &["--synthetic", "--only", "turbo2"], "cannot be used with"),
        ("bench_matrix", &["--dry-run", "--markdown"], "cannot be used with"),
        ("bench_matrix", &["--dry-run", "--llama-args", "-fa on"], "not provided: "),
    ];
    for (name, arguments, what) in cases {
        let line = refused(name, arguments);
        assert!(line.contains(what), "{name} {arguments:?}: {line}");
    }
    // A draft model that is the only model, or listed before another.
    for drafters in [&["--no-assistant", "--skip-streak", "2"][..], &["--spec-type", "draft-model,mtp"]] {
        let all = ["fn main() {", "--draft-model", target, "--threads", "1", "--max-tokens", "4"];
        succeeds("generate", &[&all[..], drafters].concat());
    }
}

/// The demo's target and assistant, under these names in `directory`.
fn beside(directory: &Path, parts: [(&str, &str); 2]) {
    for (part, name) in parts {
        let to = directory.join(name);
        std::fs::create_dir(&to).expect("a directory");
        copy_demo(part, &to);
    }
}

/// Copies the files of a part of the demo pair.
fn copy_demo(part: &str, to: &Path) {
    for entry in std::fs::read_dir(demo(part)).expect("the demo") {
        let entry = entry.expect("an entry");
        std::fs::copy(entry.path(), to.join(entry.file_name())).expect("a copy");
    }
}

#[test]
fn the_assistant_beside_the_model_is_used_and_said() {
    let directory = tempfile::tempdir().expect("a directory");
    beside(directory.path(), [("target", "model"), ("assistant", "model-assistant")]);
    let model = directory.path().join("model");
    let all = ["fn main() {", "--model", utf8(&model), "--threads", "1", "--max-tokens", "32", "--ignore-eos"];
    let with = |more: &[&str]| succeeds("generate", &[&all[..], more].concat());
    let (written, lines) = with(&[]);
    let (said, statistics) = lines.split_once('\n').expect("two lines");
    assert!(said.starts_with("assistant: ") && said.contains("model-assistant (found automatically"), "{lines}");
    assert!(statistics.lines().count() == 1 && statistics.contains(" drafted tokens accepted"), "{lines}");
    for none in ["--no-assistant", "--no-speculation"] {
        let (plain, lines) = with(&[none]);
        assert_eq!(plain, written);
        assert!(lines.lines().count() == 1 && !lines.contains("drafted"), "{none}: {lines}");
    }
    // A second one: the error lists both.
    std::fs::create_dir(model.join("MTP")).expect("a directory");
    let gguf = model.join("MTP/mtp-model.gguf");
    succeeds("convert", &[utf8(&demo("assistant")), utf8(&gguf)]);
    let line = refused("generate", &all);
    let several = ["Error: several assistants", "--assistant", "--no-assistant", "model-assistant", "mtp-model.gguf"];
    several.iter().for_each(|part| assert!(line.contains(part), "{line} has no {part:?}"));
    assert_eq!(with(&["--no-assistant"]).0, written);
    assert!(with(&["--assistant", utf8(&gguf)]).1.contains("drafted tokens accepted"));
    // One that does not fit.
    std::fs::remove_dir_all(model.join("MTP")).expect("it was there");
    let config = directory.path().join("model-assistant/config.json");
    edit(&config, "\"backbone_hidden_size\": 256", "\"backbone_hidden_size\": 512");
    let (plain, lines) = with(&[]);
    assert_eq!(plain, written);
    assert!(
        lines.starts_with("ignoring assistant ") && lines.contains("hidden_size 512, the target's is 256"),
        "{lines}"
    );
}

/// An assistant without centroids: said once, unless the command line says which to draft with.
#[test]
fn missing_centroids_are_reported() {
    let directory = tempfile::tempdir().expect("a directory");
    beside(directory.path(), [("target", "model"), ("assistant", "dense")]);
    let [model, dense] = ["model", "dense"].map(|part| directory.path().join(part));
    let config = dense.join("config.json");
    edit(&config, "\"use_ordered_embeddings\": true", "\"use_ordered_embeddings\": false");
    let all = ["fn main() {", "--model", utf8(&model), "--threads", "1", "--max-tokens", "16", "--ignore-eos"];
    let lines = |more: &[&str]| succeeds("generate", &[&all[..], more].concat()).1;
    let said = lines(&["--assistant", utf8(&dense)]);
    let first = "centroids: the assistant has none, so every draft step reads its whole LM head (--centroids auto: ";
    assert!(said.starts_with(first) && said.lines().count() == 2, "{said}");
    let chosen = lines(&["--assistant", utf8(&dense), "--centroids", "none"]);
    let own = lines(&["--assistant", utf8(&demo("assistant"))]);
    for other in [chosen, own, lines(&["--no-assistant"])] {
        assert!(!other.contains("centroids"), "{other}");
    }
}

#[test]
fn a_chat_is_sampled_as_its_publisher_says() {
    let directory = tempfile::tempdir().expect("a directory");
    beside(directory.path(), [("target", "model"), ("assistant", "model-assistant")]);
    let model = directory.path().join("model");
    let file = |name: &str, content: &str| std::fs::write(model.join(name), content).expect("a file");
    file("chat_template.jinja", "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}");
    let settings = r#"{"do_sample": true, "temperature": 1.5, "top_k": 64, "top_p": 0.95, "eos_token_id": [1, 106]}"#;
    file("generation_config.json", settings);
    let all = ["fn main() {", "--model", utf8(&model), "--no-assistant", "--threads", "1", "--max-tokens", "32"];
    let with = |more: &[&str]| succeeds("generate", &[&all[..], more].concat());
    let greedy = with(&["--ignore-eos"]);
    assert!(!greedy.1.contains("sampling: "), "{}", greedy.1);
    let sampled = with(&["--ignore-eos", "--chat"]);
    assert_ne!(sampled.0, greedy.0);
    let line = sampled.1.lines().next().expect("a line");
    assert!(line.starts_with("sampling: temperature 1.5, top-k 64, top-p 0.95, min-p 0;"), "{line}");
    let said = ["--temperature", "1.5", "--top-k", "64", "--top-p", "0.95"];
    assert_eq!(
        with(&[&["--ignore-eos"][..], &said].concat()).0,
        sampled.0,
        "the same draws from the same distribution"
    );
    let own = with(&["--ignore-eos", "--chat", "--top-k", "3", "--xtc-probability", "0.5"]);
    let said = "sampling: temperature 1.5, top-k 3, top-p 0.95, min-p 0, XTC 0.5 above 0.1; ";
    assert!(own.1.starts_with(said), "{}", own.1);
    let all = with(&["--ignore-eos", "--chat", "--top-k", "0"]);
    assert!(all.1.starts_with("sampling: temperature 1.5, top-k all, top-p 0.95"), "{}", all.1);
    let zero = with(&["--ignore-eos", "--chat", "--temperature", "0"]);
    assert_eq!((zero.0, zero.1.contains("sampling: ")), (greedy.0, false));
}

/// Messages, tools and variables from files reach the template; what is not read is said in a line.
#[test]
fn a_chat_from_files() {
    let directory = tempfile::tempdir().expect("a directory");
    beside(directory.path(), [("target", "model"), ("assistant", "model-assistant")]);
    let model = directory.path().join("model");
    let file = |name: &str, content: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, content).expect("a file");
        path
    };
    let template =
        "{{ bos_token }}{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}{{ tools | tojson }}{{ x }}";
    file("model/chat_template.jinja", template);
    let messages =
        file("messages.json", r#"[{"role": "user", "content": "fn main"}, {"role": "tool", "content": "0"}]"#);
    let tools = file("tools.json", r#"[{"type": "function", "function": {"name": "f"}}]"#);
    let all = ["--chat", "--model", utf8(&model), "--threads", "1", "--max-tokens", "4", "--json"];
    let prompt_tokens = |more: &[&str]| number(&json("generate", &[&all[..], more].concat())["prompt_tokens"]);
    let messages = ["--messages", utf8(&messages)];
    let (alone, with_tools) =
        (prompt_tokens(&messages), prompt_tokens(&[&messages[..], &["--tools", utf8(&tools)]].concat()));
    let x = ["--chat-template-kwargs", r#"{"x": "a whole line of further text"}"#];
    let with_x = prompt_tokens(&[&messages[..], &x].concat());
    assert!(alone < with_tools && alone < with_x, "{alone}, {with_tools}, {with_x}");
    let image =
        file("image.json", r#"[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]"#);
    let output = run("generate", &[&all[..], &["--messages", utf8(&image)]].concat());
    let line = text(&output.stderr);
    let last = line.lines().last().unwrap_or_default();
    assert!(
        !output.status.success() && last.contains("messages: [0].content[0]") && last.contains("image_url"),
        "{line}"
    );
}

/// An error in JSON names the file or the option that has it.
#[test]
fn malformed_json_is_named() {
    let directory = tempfile::tempdir().expect("a directory");
    beside(directory.path(), [("target", "model"), ("assistant", "model-assistant")]);
    let model = directory.path().join("model");
    std::fs::write(model.join("chat_template.jinja"), "{{ messages }}").expect("a file");
    let file = directory.path().join("odd.json");
    for (content, option, about) in [
        ("{", "--messages", "odd.json: JSON: cannot be parsed"),
        ("{}", "--messages", "odd.json: messages: must be a list"),
        ("[", "--tools", "odd.json: JSON: cannot be parsed"),
        ("{}", "--tools", "odd.json: JSON: is a map; a list is expected"),
        ("[1]", "--tools", "--tools: tools[0] is not an object; use the tool's JSON schema"),
        ("[", "--chat-template-kwargs", "'--chat-template-kwargs <JSON>': cannot be parsed"),
        ("[]", "--chat-template-kwargs", "'--chat-template-kwargs <JSON>': is a sequence; an object is expected"),
        (r#"{"tools": []}"#, "--chat-template-kwargs", "<JSON>': tools cannot be set here; remove it"),
        (r#"{"enable_thinking": 1}"#, "--chat-template-kwargs", "<JSON>': enable_thinking must be true or false"),
    ] {
        std::fs::write(&file, content).expect("a file");
        let value = if option == "--chat-template-kwargs" { content } else { utf8(&file) };
        let arguments = ["--chat", "--no-assistant", "--model", utf8(&model), "--threads", "1", option, value];
        let line = refused("generate", &arguments);
        assert!(line.contains(about), "{line}");
    }
}

/// What is printed and cannot be written is an error, not a panic.
#[cfg(target_os = "linux")]
#[test]
fn a_full_stdout_is_one_line() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let (target, gguf, quantized) = (demo("target"), at("a.gguf"), at("b.gguf"));
    for (name, arguments) in [
        ("generate", &["a", "--max-tokens", "2"][..]),
        ("convert", &[utf8(&target), utf8(&gguf)]),
        ("quantize", &[utf8(&gguf), utf8(&quantized), "q8_0"]),
        ("doctor", &[utf8(&gguf)]),
        ("kv_quality", &["--tokens", "16", "--generate", "1", "--only", "exact"]),
        ("bench_matrix", &["--dry-run", "--out", "/nowhere"]),
    ] {
        let full = std::fs::File::options().write(true).open("/dev/full").expect("a device");
        let output = example(name).args(arguments).stdout(full).output().expect("a run");
        let errors = text(&output.stderr);
        let last = errors.lines().last().unwrap_or_default();
        let is_named = last.starts_with("Error: ") && last.contains("No space left on device");
        assert!(output.status.code() == Some(1) && is_named && !errors.contains("panicked"), "{name}: {errors}");
    }
}

/// Lines that a command cannot write on stderr are lost: its output and its exit code are the same.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_for_stderr_is_no_error() {
    let directory = tempfile::tempdir().expect("a directory");
    beside(directory.path(), [("target", "model"), ("assistant", "model-assistant")]);
    let model = directory.path().join("model");
    let plain = ["fn main() {", "--model", utf8(&model), "--threads", "1", "--max-tokens", "8", "--stats"];
    // These keys are warned of.
    let all = [&plain[..], &["--cache-type-k", "turbo3"]].concat();
    let written = succeeds("generate", &all).0;
    for (arguments, code, stdout) in [(&all[..], 0, &*written), (&["a", "--max-tokens"][..], 1, "")] {
        let full = std::fs::File::options().write(true).open("/dev/full").expect("a device");
        let output = example("generate").args(arguments).stderr(full).output().expect("a run");
        assert_eq!((output.status.code(), &*text(&output.stdout)), (Some(code), stdout), "{arguments:?}");
    }
}

/// Penalties and filters by llama.cpp's names: they change the text, and drafts do not.
#[test]
fn sampling_by_llama_cpps_names() {
    let all = ["fn main() {", "--threads", "1", "--max-tokens", "48", "--ignore-eos"];
    let with = |more: &[&str]| succeeds("generate", &[&all[..], more].concat()).0;
    let greedy = with(&[]);
    let penalties = ["--repeat-penalty", "1.3", "--repeat-last-n", "-1", "--presence-penalty", "0.2"];
    let dry =
        ["--dry-multiplier", "2", "--dry-allowed-length", "1", "--dry-base", "2", "--dry-sequence-breaker", "none"];
    for options in [&penalties[..], &dry] {
        let penalized = with(options);
        assert_ne!(penalized, greedy, "{options:?}");
        assert_eq!(with(&[options, &["--no-speculation"]].concat()), penalized, "{options:?}");
    }
    let filters = ["--temp", "1", "--top-n-sigma", "1", "--typical", "0.9", "--xtc-probability", "0.5"];
    assert_ne!(with(&filters), greedy);
    let at_zero = ["--temp", "0", "--top-k", "40", "--top-p", "0.95", "--min-p", "0.05"];
    for options in [&at_zero[..], &["--top-k", "1", "--top-p", "0.95"], &["--top-n-sigma", "-1"]] {
        assert_eq!(with(options), greedy, "{options:?}");
    }
    for (arguments, problem) in [
        (
            &["--temp", "1", "--xtc-probability", "0.5", "--xtc-threshold", "0.7"][..],
            "--xtc-threshold: must be from 0 to 0.5",
        ),
        (&["--repeat-last-n", "-2"], "-2 is not in -1.."),
        (&["--dry-penalty-last-n", "-2"], "-2 is not in -1.."),
    ] {
        let line = refused("generate", &[&all[..], arguments].concat());
        assert!(line.contains(problem), "{line}");
    }
}

/// 100 tokens of rounds in a second, where plain steps would have taken 20 ms each.
#[test]
fn the_speed_up_is_plain_decoding_over_the_time_taken() {
    let mut s = Statistics {
        generations: 1,
        generated_tokens: 101,
        rounds: 40,
        drafted: 90,
        accepted: 60,
        decode: Duration::from_secs(1),
        ..Statistics::default()
    };
    assert_eq!(s.speed_up(), None);
    assert_eq!(s.to_string(), "101 tokens at 100.0 tokens/s");
    let short = |generated_tokens| Statistics { generations: 1, generated_tokens, ..Statistics::default() }.to_string();
    assert_eq!([short(0), short(1)], ["0 tokens", "1 token"], "the first token is not a round's: it has no speed");
    s.speculation.plain_ms = Some(2000.0);
    s.speculation.rows = vec![0, 10, 30];
    let phases = [200, 700, 100].map(Duration::from_millis);
    [s.speculation.wait, s.speculation.verify, s.speculation.accept] = phases;
    assert_eq!(s.speed_up(), None, "there are no drafters");
    s.speculation.drafters = vec![DrafterStats { kind: Some(DrafterKind::Mtp), ..DrafterStats::default() }];
    assert_eq!(s.speed_up(), Some(2.0));
    let line =
        "101 tokens at 100.0 tokens/s, 60 of 90 drafted tokens accepted, 2.00x the estimated speed without speculation";
    assert_eq!(s.to_string(), line);
    s.speculation.plain_ms = None;
    assert_eq!(s.to_string(), line.split(", 2.00x").next().expect("a first part"));
    let mut sum = Statistics::default();
    s.speculation.plain_ms = Some(2000.0);
    sum.add(&s);
    sum.add(&s);
    assert_eq!(sum.speed_up(), Some(2.0));
    s.speculation.plain_ms = None;
    sum.add(&s);
    assert_eq!(sum.speed_up(), None);
}

/// Texts so short that the planner has verified no draft yet.
#[test]
fn no_verified_draft_is_said() {
    let mut s = Statistics {
        generations: 1,
        generated_tokens: 6,
        rounds: 5,
        decode: Duration::from_secs(1),
        ..Statistics::default()
    };
    let calls = DrafterStats { kind: Some(DrafterKind::Mtp), calls: 5, proposed: 5, ..DrafterStats::default() };
    s.speculation.drafters = vec![calls];
    assert_eq!(s.to_string(), "6 tokens at 5.0 tokens/s, no draft was verified");
    let details = foretoken_tools::report::details(&s, 0);
    for part in
        ["5 rounds, 1.00 tokens per round, no draft was verified; ", "\nmtp: 5 calls, no draft was verified; 0.0 ms\n"]
    {
        assert!(details.contains(part), "{details} has no {part:?}");
    }
}

/// Five drafts of three tokens: each number says what it counts.
#[test]
fn drafts_and_their_tokens_are_told_apart() {
    let mut s = Statistics { generations: 1, rounds: 5, drafted: 15, accepted: 12, ..Statistics::default() };
    let mtp = DrafterStats {
        kind: Some(DrafterKind::Mtp),
        calls: 5,
        proposed: 15,
        drafts: 5,
        accepted_drafts: 5,
        drafted: 15,
        accepted: 12,
        ..DrafterStats::default()
    };
    s.speculation.drafters = vec![mtp];
    let details = foretoken_tools::report::details(&s, 0);
    let of_drafter = "\nmtp: 5 calls, 5 drafts verified, 5 at least partly accepted; 15 tokens verified, 12 accepted; ";
    for part in [", 80 % of 15 drafted tokens accepted; ", of_drafter] {
        assert!(details.contains(part), "{details} has no {part:?}");
    }
}

/// Where plain steps were measured there is an estimate; where every round has the same rows there is none.
#[test]
fn the_speed_up_is_left_out_where_it_is_not_known() {
    let options = EngineOptions::new(demo("target")).with_assistant(demo("assistant"));
    let engine = Engine::load(&EngineOptions { threads: Some(1), ..options }).expect("the demo pair");
    let mut costs = Costs::new(engine.costs().machine().clone());
    for rows in (1..=8).cycle().take(64) {
        costs.verified(0, rows, 1.0 + 0.1 * rows as f64);
    }
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("costs.json");
    costs.save(&path).expect("a file");
    let arguments = ["x", "--threads", "1", "--max-tokens", "40", "--ignore-eos"];
    let line = |more: &[&str]| succeeds("generate", &[&arguments[..], more].concat()).1;
    let measured = line(&["--costs", utf8(&path)]);
    let factor =
        measured.split(", ").last().and_then(|part| part.strip_suffix("x the estimated speed without speculation\n"));
    let factor: f64 = factor.unwrap_or_else(|| panic!("{measured}")).parse().expect("a number");
    // How large it is depends on the machine's other load.
    assert!(factor.is_finite() && factor >= 0.0, "{measured}");
    let fixed = line(&["--draft-block-size", "4"]);
    assert!(!fixed.contains("estimated"), "{fixed}");
}

#[test]
fn the_keys_of_generate_json() {
    let directory = tempfile::tempdir().expect("a directory");
    let trace = directory.path().join("trace");
    let arguments = ["fn main() {", "--json", "--max-tokens", "12", "--threads", "1", "--ignore-eos"];
    let report = json("generate", &[&arguments[..], &["--trace", utf8(&trace)]].concat());
    let mut fields = documented("generate --json");
    fields.retain(|field| !["error", "reasoning", "tool_calls"].contains(&field.as_str()));
    assert_eq!(keys(&report), fields);
    assert_eq!(keys(&report["speculation"]), documented("speculation"));
    let of_drafters = documented("drafters");
    let drafters = report["speculation"]["drafters"].as_array().expect("drafters");
    assert!(!drafters.is_empty() && drafters.iter().all(|drafter| keys(drafter) == of_drafters), "{drafters:?}");

    let tokens = report["tokens"].as_array().expect("tokens");
    assert!(
        tokens.len() == 12 && report["generated_tokens"] == 12 && !report["text"].as_str().expect("text").is_empty()
    );
    assert!(report["simulated_acceptance"] == false && report["finish_reason"] == "max_tokens", "{report}");
    // A trace has the same names.
    let trace = std::fs::read_to_string(&trace).expect("a trace");
    let end: Value = serde_json::from_str(trace.lines().last().expect("a line")).expect("JSON");
    assert_eq!((&end["event"], &end["finish"]), (&Value::from("end"), &report["finish_reason"]));
    // The first token comes from the prompt's pass.
    let rounds = number(&report["rounds"]);
    assert!((number(&report["tokens_per_round"]) * rounds - 11.0).abs() < 1e-9, "{report}");
    assert!(number(&report["accepted"]) <= number(&report["drafted"]) && number(&report["kv_bytes"]) > 0.0);
}

/// A command that Ctrl-C reaches: a shell's job in the background would ignore the signal.
#[cfg(unix)]
fn interruptible(name: &str) -> Command {
    use std::os::unix::process::CommandExt;
    let mut command = example(name);
    // SAFETY: `signal` is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            Ok(())
        });
    }
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Sends Ctrl-C after `count` lines with this part on stderr. The command's output, and what it wrote on stderr after
/// these lines.
#[cfg(unix)]
fn interrupted_after(count: usize, part: &str, mut command: Command) -> (Output, String) {
    use std::io::{BufRead, BufReader, Read};
    let mut child = command.spawn().expect("a run");
    let mut errors = BufReader::new(child.stderr.take().expect("a pipe"));
    let (mut line, mut seen) = (String::new(), 0);
    while seen < count {
        line.clear();
        assert_ne!(errors.read_line(&mut line).expect("a line"), 0, "{seen} lines had {part:?}");
        seen += usize::from(line.contains(part));
    }
    // SAFETY: the child has not been waited for, so the id is its own.
    assert_eq!(unsafe { libc::kill(child.id().cast_signed(), libc::SIGINT) }, 0);
    let mut rest = String::new();
    errors.read_to_string(&mut rest).expect("the rest");
    (child.wait_with_output().expect("an end"), rest)
}

/// Ctrl-C ends the generation: what was generated is printed, and the exit code is that of SIGINT.
#[cfg(unix)]
#[test]
fn an_interrupted_generation_is_printed() {
    let mut command = interruptible("generate");
    let arguments =
        ["fn main() {", "--json", "--no-speculation", "--threads", "1", "--max-tokens", "4000", "--ignore-eos"];
    // The generation waits for the trace to be read: all of it is more than a pipe holds.
    command.args(arguments).args(["--trace", "-"]);
    let (output, rest) = interrupted_after(1, r#""event":"round""#, command);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {rest}"));
    let tokens = report["tokens"].as_array().map_or(0, Vec::len);
    assert!(output.status.code() == Some(130) && report["finish_reason"] == "cancelled", "{}", output.status);
    assert!(tokens > 1 && tokens < 4000 && report["generated_tokens"] == tokens, "{tokens}");
    assert!(report["text"].as_str().is_some_and(|text| !text.is_empty()), "{report}");
}

/// Ctrl-C ends the texts that are being written: they are printed with those before them, and no others are begun.
#[cfg(unix)]
#[test]
fn an_interrupted_batch_is_printed() {
    const PROMPTS: usize = 2000;
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("prompts.txt");
    std::fs::write(&path, "fn main() {\n".repeat(PROMPTS)).expect("a file");
    // A warning for every sequence: at the third, two texts are complete. The command waits for the warnings to be
    // read: all of them are more than a pipe holds.
    let arguments = ["--sequences", "1", "--max-tokens", "16", "--ignore-eos", "--no-speculation", "--threads", "1"];
    let run = |more: &[&str]| {
        let mut command = interruptible("batch");
        command.arg(&path).args(arguments).args(["--cache-type-k", "turbo3"]).args(more);
        let (output, rest) = interrupted_after(3, "keys in fewer than 5 bits", command);
        assert_eq!(output.status.code(), Some(130), "{rest}");
        (text(&output.stdout), rest)
    };
    let (stdout, rest) = run(&["--json"]);
    let report: Value = serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{error}: {rest}"));
    let list = |name: &str| report[name].as_array().expect("a list").clone();
    let (texts, reasons) = (list("texts"), list("finish_reasons"));
    let begun = reasons.iter().filter(|reason| !reason.is_null()).count();
    assert!(begun > 2 && begun < PROMPTS && texts.len() == PROMPTS && reasons.len() == PROMPTS, "{begun}");
    assert!(texts[0] != "" && texts[0] == texts[1] && reasons[..2] == ["max_tokens", "max_tokens"], "{report}");
    assert!(texts[begun] == "" && list("errors").iter().all(Value::is_null), "{report}");
    let line = rest.lines().last().unwrap_or_default();
    assert!(line.starts_with(&format!("{begun} of {PROMPTS} prompts, 1 at a time: ")), "{line}");
    let (printed, _) = run(&[]);
    assert!(printed.starts_with("== 1\n") && printed.contains("\n== 3\n"), "{printed}");
}

/// Ctrl-C while a file is written removes the incomplete file.
#[cfg(unix)]
#[test]
fn an_interrupted_file_is_removed() {
    let directory = tempfile::tempdir().expect("a directory");
    // 3 GB: the signal arrives before the file is complete.
    let mut child = interruptible("synthesize").arg(directory.path()).arg("e2b").spawn().expect("a run");
    let partial = directory.path().join("e2b-target.gguf.partial");
    while !partial.exists() {
        assert!(child.try_wait().expect("a state").is_none(), "it ended before");
        std::thread::yield_now();
    }
    // SAFETY: the child has not been waited for, so the id is its own.
    assert_eq!(unsafe { libc::kill(child.id().cast_signed(), libc::SIGINT) }, 0);
    let output = child.wait_with_output().expect("an end");
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(text(&output.stderr), "interrupted; the incomplete file is removed\n");
    assert_eq!(std::fs::read_dir(directory.path()).expect("a directory").count(), 0);
}

/// Every instruction set of this processor, by name: the measured costs are those of that one.
#[test]
fn an_instruction_set_can_be_chosen() {
    let line = refused("generate", &["x", "--isa", "sse9"]);
    assert!(line.contains("--isa") && line.contains("sse9") && line.contains("scalar"), "{line}");
    let costs = tempfile::tempdir().expect("a directory");
    for isa in Isa::available() {
        let path = costs.path().join(isa.name());
        let arguments = ["x", "--isa", isa.name(), "--max-tokens", "4", "--threads", "1", "--costs", utf8(&path)];
        succeeds("generate", &arguments);
        let measured = std::fs::read_to_string(&path).expect("costs");
        let measured: Value = serde_json::from_str(&measured).expect("JSON");
        assert_eq!(measured["machine"]["isa"], isa.name());
    }
}

/// Keys in fewer than 5 bits harm a model that does not scale its scores; the user is told once, on one line.
#[test]
fn coarse_keys_are_warned_of() {
    for (arguments, warned) in [
        (&["--cache-type-k", "turbo3"][..], true),
        (&["--kv-preset", "compact"], true),
        (&["--kv-preset", "balanced"], false),
        (&["--cache-type-v", "turbo3"], false),
        (&[], false),
    ] {
        let (_, stderr) = succeeds("generate", &[&["x", "--max-tokens", "1", "--threads", "1"], arguments].concat());
        let warnings = stderr.lines().filter(|line| line.contains("WARN")).collect::<Vec<_>>();
        assert_eq!(warnings.len(), usize::from(warned), "{arguments:?}: {stderr}");
        assert!(warnings.iter().all(|line| line.contains("keys in fewer than 5 bits")), "{stderr}");
    }
}

/// More context than the model was trained for is possible, and the user is told once, not for every sequence: on
/// stderr, where stdout is one JSON object.
#[test]
fn contexts_beyond_the_trained_length_are_warned_of() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("prompts.txt");
    std::fs::write(&path, "fn main() {\nstruct A\nimpl B\n").expect("a file");
    let prompts = utf8(&path);
    for (name, prompt, context, warned) in
        [("generate", "x", "8192", 0), ("generate", "x", "8193", 1), ("batch", prompts, "8193", 1)]
    {
        let arguments = [prompt, "--max-tokens", "1", "--threads", "1", "--json", "--context", context];
        let (stdout, stderr) = succeeds(name, &arguments);
        let report: Value = serde_json::from_str(&stdout).unwrap_or_else(|e| panic!("{e}: {stdout}"));
        assert!(number(&report["generated_tokens"]) > 0.0, "{report}");
        let warnings: Vec<_> = stderr.lines().filter(|line| line.contains("WARN")).collect();
        assert_eq!(warnings.len(), warned, "{name} --context {context}: {stderr}");
        let says = |line: &&str| line.contains("longer than the model was trained for") && line.contains("8192");
        assert!(warnings.iter().all(says), "{stderr}");
    }
}

/// In-situ quantization holds the quantized weights, not the file beside them.
#[test]
fn quantizing_while_loading_does_not_hold_the_file() {
    let directory = tempfile::tempdir().expect("a directory");
    succeeds("synthesize", &[utf8(directory.path()), "e2b", "--layers", "2", "--vocab", "4096", "--quantize", "bf16"]);
    let model = directory.path().join("e2b-target.gguf");
    let file = std::fs::metadata(&model).expect("a file").len() as f64;
    let common = ["--model", utf8(&model), "--prompt-ids", "400,500", "--max-tokens", "2", "--threads", "2", "--json"];
    let peak = |more: &[&str]| json("generate", &[&common[..], more].concat())["peak_rss_bytes"].as_f64();
    let Some(quantized) = peak(&["--quantize", "q8_0"]) else {
        return skipped::skipped("peak memory of --quantize", "this system has no /proc/self/status");
    };
    // 34 bytes for 32 weights of 2 bytes each, and what every process has: code, stacks, buffers, an embedding's rows.
    let bound = file * 34.0 / 64.0 + f64::from(48 << 20);
    assert!(bound < file, "the file of {file} bytes is too small to tell");
    assert!(quantized < bound, "{quantized} bytes at most, {bound} allowed; the file has {file}");

    // The files are what they are called.
    let assistant = directory.path().join("e2b-assistant.gguf");
    let (sound, _) = succeeds("doctor", &[utf8(&model), utf8(&assistant), "--contents", "--check"]);
    assert!(sound.contains("general.architecture = \"gemma4\"") && sound.contains(" bf16, "), "{sound}");
    assert_eq!(sound.lines().last(), Some("sound"), "{sound}");
}

// ---- checkpoints ----

#[test]
fn doctor_says_what_is_unsound() {
    let (target, assistant) = (demo("target"), demo("assistant"));
    let both = [utf8(&target), utf8(&assistant), "--check"];
    let (sound, stderr) = succeeds("doctor", &both);
    assert!(sound.lines().last() == Some("sound") && stderr.is_empty(), "{sound}{stderr}");
    assert!(sound.lines().any(|line| line.starts_with("ok      pair      acceptance")), "{sound}");
    let report = json("doctor", &[&both[..], &["--json"]].concat());
    assert_eq!((keys(&report), &report["passed"]), (vec!["findings", "passed"], &Value::Bool(true)));
    for finding in report["findings"].as_array().expect("findings") {
        assert_eq!(keys(finding), documented("findings"));
        assert_eq!(finding["outcome"], "passed", "{finding}");
    }

    // A tensor of nothing but zeros, which loads.
    let directory = tempfile::tempdir().expect("a directory");
    beside(directory.path(), [("target", "model"), ("assistant", "model-assistant")]);
    let (model, name) = (directory.path().join("model"), "model.norm.weight");
    let weights = model.join("model.safetensors");
    let mut bytes = std::fs::read(&weights).expect("a file");
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let tensors: Value = serde_json::from_slice(&bytes[8..header]).expect("JSON");
    let place = |i: usize| header + tensors[name]["data_offsets"][i].as_u64().expect("a place") as usize;
    bytes[place(0)..place(1)].fill(0);
    std::fs::write(&weights, bytes).expect("written");
    let unsound = run("doctor", &[utf8(&model), "--check"]);
    let printed = text(&unsound.stdout);
    assert_eq!(unsound.status.code(), Some(1), "{printed}");
    let failed: Vec<_> = printed.lines().filter(|line| line.starts_with("FAILED  ")).collect();
    assert!(matches!(failed[..], [one] if one.contains(name)), "{printed}");
    assert_eq!(printed.lines().last(), Some("1 failure"));
    let unsound = run("doctor", &[utf8(&model), "--check", "--json"]);
    let report: Value = serde_json::from_slice(&unsound.stdout).expect("JSON");
    assert_eq!((unsound.status.code(), &report["passed"]), (Some(1), &Value::Bool(false)));

    // A name on the Hub without the feature: the reason, not that there is no such file.
    if cfg!(not(feature = "hub")) {
        let absent = run("doctor", &[utf8(&target), "owner/name", "--check", "--json"]);
        let report: Value = serde_json::from_slice(&absent.stdout).expect("JSON");
        let findings = report["findings"].as_array().expect("findings");
        let detail = findings[0]["detail"].as_str().expect("a finding");
        assert!(absent.status.code() == Some(1) && detail.contains("rebuild with --features hub"), "{report}");
        assert!(
            findings.iter().any(|finding| finding["part"] == "target" && finding["outcome"] == "passed"),
            "{report}"
        );
    }
}

#[test]
fn doctor_says_what_files_are() {
    let (target, assistant) = (demo("target"), demo("assistant"));
    let (said, stderr) = succeeds("doctor", &[utf8(&assistant), utf8(&target), "--threads", "1"]);
    assert!(stderr.is_empty(), "{stderr}");
    let checkpoint = Checkpoint::open(&target).expect("the demo");
    let names = checkpoint.names();
    for part in [
        "target: a Gemma 4 target (safetensors)",
        &format!("tensors    {}: {} bf16; 19.6 MiB", names.len(), names.len()),
        "layers     10: 5 full, 5 with a window of ",
        "4 layers read the K and V of earlier ones",
        &format!("MTP        yes, with {}", assistant.display()),
        "K = V      no",
        "a tokenizer, no chat template",
        "assistant: a Gemma 4 assistant (safetensors)",
        "centroids  yes: a draft scores the ids of 8 of 64 centroids",
        "8192 of 8192 positions fit with K/V exact (",
        "positions fit with K/V compact (",
        " GB/s with 1 thread at best",
        " tokens/s at a short context",
        " with three drafts per pass",
    ] {
        assert!(said.contains(part), "{said} has no {part:?}");
    }
    assert!(!said.contains("model.norm.weight"), "{said}");
    let (listed, _) = succeeds("doctor", &[utf8(&target), "--contents"]);
    assert!(names.iter().all(|name| listed.lines().any(|line| line.starts_with(&format!("{name} ")))), "{listed}");
    assert!(listed.contains("\"hidden_size\": 256") && listed.contains("MTP        no assistant"), "{listed}");
    // An assistant alone has no K and V, and generates nothing.
    let (alone, _) = succeeds("doctor", &[utf8(&assistant)]);
    assert!(!alone.contains("K/V") && !alone.contains("command"), "{alone}");
    // What is neither.
    let line = refused("doctor", &[utf8(&target), utf8(&target)]);
    assert!(line.contains("is a second target"), "{line}");
}

/// With --json stdout is one JSON object, and a warning is on stderr.
#[test]
fn doctor_warns_on_stderr() {
    let directory = tempfile::tempdir().expect("a directory");
    beside(directory.path(), [("target", "model"), ("assistant", "model-assistant")]);
    let model = directory.path().join("model");
    std::fs::write(model.join("generation_config.json"), r#"{"mirostat": 2}"#).expect("a file");
    let config = directory.path().join("model-assistant/config.json");
    edit(&config, "\"backbone_hidden_size\": 256", "\"backbone_hidden_size\": 512");
    for arguments in [&[utf8(&model)][..], &[utf8(&model), "--check", "--json"]] {
        let (stdout, stderr) = succeeds("doctor", arguments);
        assert!(stderr.lines().any(|line| line.starts_with("ignoring assistant ")), "{stderr}");
        assert!(stderr.contains("WARN") && stderr.contains("Mirostat is not implemented"), "{stderr}");
        if arguments.len() > 1 {
            let report: Value = serde_json::from_str(&stdout).unwrap_or_else(|e| panic!("{e}: {stdout}"));
            assert_eq!(report["passed"], true);
        }
    }
}

/// What is wrong with an assistant, not that it is not a target.
#[test]
fn doctor_names_the_defect_of_an_assistant() {
    let directory = tempfile::tempdir().expect("a directory");
    beside(directory.path(), [("target", "model"), ("assistant", "drafter")]);
    let [model, drafter] = ["model", "drafter"].map(|part| directory.path().join(part));
    edit(&drafter.join("config.json"), "\"num_centroids\": 64", "\"num_centroids\": 7");
    let of = |finding: &Value, outcome: &str| finding["outcome"] == outcome;
    for files in [&[utf8(&drafter)][..], &[utf8(&drafter), utf8(&model)], &[utf8(&model), utf8(&drafter)]] {
        let line = refused("doctor", files);
        assert!(line.contains("num_centroids"), "{files:?}: {line}");
        let checked = run("doctor", &[files, &["--check", "--json"]].concat());
        let report: Value = serde_json::from_slice(&checked.stdout).expect("JSON");
        let findings = report["findings"].as_array().expect("findings");
        let failed: Vec<_> = findings.iter().filter(|finding| of(finding, "failed")).collect();
        let [failure] = failed[..] else { panic!("{files:?}: {report}") };
        let detail = failure["detail"].as_str().expect("a text");
        assert!(failure["part"] == "assistant" && detail.contains("num_centroids"), "{files:?}: {report}");
        let has_target = findings.iter().any(|finding| finding["part"] == "target" && of(finding, "passed"));
        assert_eq!(has_target, files.len() == 2, "{report}");
    }
}

/// The command runs as it is printed, with the assistant beside the model.
#[test]
fn the_doctors_command_generates() {
    let directory = tempfile::tempdir().expect("a directory");
    let folder = directory.path().join("it's here");
    std::fs::create_dir(&folder).expect("a directory");
    beside(&folder, [("target", "model"), ("assistant", "model-assistant")]);
    let (said, _) = succeeds("doctor", &[utf8(&folder.join("model"))]);
    let line = said.lines().last().expect("a line");
    let (_, arguments) = line.split_once("--example generate -- ").expect("the command");
    let generate = example("generate").get_program().to_owned();
    let script = format!("{} {arguments} --max-tokens 4", utf8(Path::new(&generate)));
    let output = Command::new("sh").args(["-c", &script]).output().expect("a shell");
    let lines = text(&output.stderr);
    let drafts = ["drafted tokens accepted", "no draft was verified"].iter().any(|part| lines.contains(part));
    assert!(output.status.success() && drafts, "{script}: {lines}");
}

/// Directory to GGUF, GGUF to fewer bits, and GGUF to a directory; all of them load and continue a text.
#[test]
fn checkpoints_are_converted_and_quantized() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let (bf16, q8_0, back, source) = (at("demo.gguf"), at("demo-q8_0.gguf"), at("demo"), demo("target"));
    let (report, _) = succeeds("convert", &[utf8(&source), utf8(&bf16), "--outtype", "bf16"]);
    // The rotation's frequencies are a tensor in GGUF files.
    let tensors = Checkpoint::open(&source).expect("the demo").names().len() + 1;
    assert_eq!(report, format!("{}: {tensors} tensors, 19.7 MiB\n", bf16.display()));
    let (listed, _) = succeeds("quantize", &[utf8(&bf16), utf8(&q8_0), "q8_0", "--verbose"]);
    assert_eq!(listed.lines().count(), tensors + 1, "{listed}");
    assert!(
        listed.lines().any(|line| line.starts_with("token_embd.weight ") && line.contains("BF16 -> Q8_0, 1114112 "))
    );
    assert!(listed.lines().last().is_some_and(|line| line.starts_with(&format!("{}: {tensors} ", q8_0.display()))));
    let bytes = |path: &Path| std::fs::metadata(path).expect("a file").len();
    assert!(bytes(&q8_0) * 10 < bytes(&bf16) * 6, "{} of {} bytes", bytes(&q8_0), bytes(&bf16));
    let line = refused("convert", &[utf8(&bf16), utf8(&back), "--name", "demo"]);
    assert!(line.starts_with("Error: --name: applies to a GGUF file"), "{line}");
    let (report, _) = succeeds("convert", &[utf8(&bf16), utf8(&back)]);
    assert!(report.starts_with(&format!("{}: ", back.display())), "{report}");
    let weights =
        |path: &Path| std::fs::read(path.join("model.safetensors")).map(|bytes| bytes.len()).expect("weights");
    assert!(weights(&back).abs_diff(weights(&source)) < 65_536);
    for model in [&bf16, &q8_0] {
        let (written, _) = succeeds("generate", &["fn main() {", "--model", utf8(model), "--max-tokens", "4"]);
        assert!(!written.trim().is_empty());
    }
    let line = refused("quantize", &[utf8(&q8_0), utf8(&at("again.gguf")), "q4_0"]);
    let (named, problem) = (format!("Error: --allow-requantize: {}: tensor ", q8_0.display()), "is already q8_0; ");
    assert!(line.starts_with(&named) && line.contains(problem), "{line}");
}

/// A new repository of an owner in a cache of the Hub: the directory of its files.
fn snapshot(cache: &Path, name: &str) -> PathBuf {
    let repository = cache.join(format!("models--owner--{name}"));
    let files = repository.join("snapshots/0123abcd");
    std::fs::create_dir_all(&files).expect("a directory");
    std::fs::create_dir_all(repository.join("refs")).expect("a directory");
    std::fs::write(repository.join("refs/main"), "0123abcd").expect("a file");
    files
}

/// Checkpoints by name on the Hub, from its cache, in commands that measure or convert.
#[test]
fn names_on_the_hub_are_resolved() {
    let cache = tempfile::tempdir().expect("a directory");
    for (name, part) in [("fox", "target"), ("fox-assistant", "assistant")] {
        copy_demo(part, &snapshot(cache.path(), name));
    }
    let gguf = snapshot(cache.path(), "fox-GGUF").join("fox-BF16.gguf");
    succeeds("convert", &[utf8(&demo("target")), utf8(&gguf), "--outtype", "bf16"]);
    let at = |name: &str| cache.path().join(name);
    let (prompts, converted, quantized) = (at("prompts.json"), at("fox.gguf"), at("fox-q8_0.gguf"));
    std::fs::write(&prompts, r#"["fn main() {"]"#).expect("a file");
    let pair = ["--model", "owner/fox", "--assistant", "owner/fox-assistant"];
    let cases: [(&str, &[&str], &str); 9] = [
        (
            "acceptance",
            &["--blocks", "2", "--max-tokens", "2", "--prompts", utf8(&prompts)],
            "1 prompt, up to 2 tokens ",
        ),
        ("drafters", &["--blocks", "2", "--mixture", "mtp", "--max-tokens", "2", "--repeats", "1"], ""),
        ("verify_curve", &["--repeats", "1"], ""),
        ("kv_quality", &["--tokens", "16", "--generate", "2", "--only", "exact"], "K/V "),
        ("bench_matrix", &["--dry-run", "--out", "/nowhere"], "fox: "),
        ("perplexity", &["tests/command_lines.rs", "--window", "64", "--windows", "1"], "perplexity "),
        ("depth", &["--depths", "16", "--kv", "f16", "--repeats", "1"], "depth "),
        ("convert", &["owner/fox", utf8(&converted)], utf8(&converted)),
        ("quantize", &["owner/fox-GGUF:BF16", utf8(&quantized), "q8_0"], utf8(&quantized)),
    ];
    for (name, arguments, begin) in cases {
        let named: &[&str] = match name {
            "convert" | "quantize" => &[],
            "perplexity" | "depth" => &pair[..2],
            _ => &pair,
        };
        let run = example(name).args(arguments).args(named).env("HF_HUB_CACHE", cache.path()).output().expect("a run");
        let (stdout, stderr) = (text(&run.stdout), text(&run.stderr));
        if cfg!(feature = "hub") {
            assert!(run.status.success() && stdout.starts_with(begin), "{name}: {stdout}{stderr}");
        } else {
            assert!(
                stderr.contains("rebuild with --features hub, or download it with: hf download owner/"),
                "{stderr}"
            );
        }
    }
}

/// The variables of Hugging Face's own tools.
#[cfg(all(unix, feature = "hub"))]
#[test]
fn the_hubs_variables_are_read() {
    let directory = tempfile::tempdir().expect("a directory");
    let home = directory.path().join("huggingface");
    copy_demo("target", &snapshot(&home.join("hub"), "fox"));
    let doctor = |name: &str, variables: &[(&str, &str)]| {
        let mut command = example("doctor");
        for variable in ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_TOKEN"] {
            command.env_remove(variable);
        }
        let Output { status, stderr, .. } =
            command.arg(name).env("HOME", directory.path()).envs(variables.iter().copied()).output().expect("a run");
        (status.success(), text(&stderr))
    };
    for cache in [
        ("HF_HUB_CACHE", utf8(&home.join("hub"))),
        ("HF_HOME", utf8(&home)),
        ("HF_HOME", "~/huggingface"),
        ("XDG_CACHE_HOME", utf8(directory.path())),
    ] {
        let (is_found, stderr) = doctor("owner/fox", &[cache, ("HF_HUB_OFFLINE", "1")]);
        assert!(is_found, "{cache:?}: {stderr}");
    }
    // No server listens there.
    let endpoint = ("HF_ENDPOINT", "http://127.0.0.1:9/");
    let (_, stderr) = doctor("owner/bear", &[endpoint]);
    assert!(stderr.contains("owner/bear: cannot be downloaded from http://127.0.0.1:9: "), "{stderr}");
    let (_, stderr) = doctor("owner/bear", &[endpoint, ("HF_HUB_OFFLINE", "0")]);
    assert!(stderr.contains("cannot be downloaded from"), "{stderr}");
    let (_, stderr) = doctor("owner/bear", &[endpoint, ("HF_HUB_OFFLINE", "yes")]);
    assert!(stderr.contains("owner/bear: is not complete in the cache, and downloads are disabled"), "{stderr}");
}

/// A copy of the demo target that shrinks between two tensors is an error that names the file, not a fault.
#[test]
fn safetensors_that_shrink_are_noticed() {
    let directory = tempfile::tempdir().expect("a directory");
    let weights = directory.path().join("model.safetensors");
    let copy = || {
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(demo("target").join(file), directory.path().join(file)).expect("a copy");
        }
        Checkpoint::open(directory.path()).expect("the demo")
    };
    let shrink = |path: &Path| {
        let file = std::fs::OpenOptions::new().write(true).open(path).expect("opened");
        file.set_len(4096).expect("truncated");
    };
    let noticed = |error: Error| {
        let message = error.to_string();
        let named = message.starts_with(utf8(&weights)) && !message.contains('\n');
        assert!(named && message.contains("shrank from 20608940 to 4096 bytes"), "{message}");
    };
    let checkpoint = copy();
    let name = "model.norm.weight";
    assert!(checkpoint.get(name).expect("readable").is_some());
    shrink(&weights);
    assert!(checkpoint.has(name));
    noticed(checkpoint.get(name).err().expect("an error"));
    noticed(Target::load(&checkpoint, Isa::best()).expect_err("an error"));

    // Behind the first tensor, while the others are loaded.
    let (checkpoint, path) = (copy(), weights.clone());
    let progress = Some(Arc::new(move |_| shrink(&path)) as Arc<_>);
    noticed(Target::load(&checkpoint, LoadOptions { progress, ..Isa::best().into() }).expect_err("an error"));

    // Another file that takes its name is no matter: the old one stays mapped.
    let (checkpoint, other) = (copy(), directory.path().join("other"));
    std::fs::write(&other, "short").expect("a file");
    std::fs::rename(&other, &weights).expect("renamed");
    Target::load(&checkpoint, Isa::best()).expect("the file that was opened");
}

// ---- measurements ----

#[test]
fn perplexity_of_a_text() {
    let arguments = ["tests/command_lines.rs", "--window", "64", "--windows", "2"];
    let report = json("perplexity", &[&arguments[..], &["--json"]].concat());
    assert_eq!(keys(&report), documented("perplexity --json"));
    assert_eq!((&report["windows"], &report["scored_tokens"]), (&2.into(), &62.into()));
    let value = number(&report["perplexity"]);
    assert!(value > 1.0 && value < 4096.0, "{value}");
    let (line, progress) = succeeds("perplexity", &arguments);
    assert_eq!(progress, "", "stderr is not a terminal");
    assert!(line.starts_with(&format!("perplexity {value:.4} +/- ")), "{line}");
    assert!(line.ends_with(" over 62 tokens in 2 windows\n"), "{line}");
    let (one, _) = succeeds("perplexity", &[&arguments[..3], &["--windows", "1"]].concat());
    assert!(one.ends_with(" over 31 tokens in 1 window\n"), "{one}");
    let (other, _) = succeeds("perplexity", &[&arguments[..], &["--quantize", "q4_0"]].concat());
    assert_ne!(other, line);
}

#[test]
fn kv_quality_compares_formats() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let (source, csv, svg) = (at("text"), at("kv.csv"), at("kv.svg"));
    let own = std::fs::read_to_string(foretoken_tools::repository().join(file!())).expect("this file");
    std::fs::write(&source, &own[..4000]).expect("a text");
    let arguments = ["--text", utf8(&source), "--tokens", "704", "--generate", "64", "--only", "turbo2"];
    let (table, _) = succeeds("kv_quality", &[&arguments[..], &["--csv", utf8(&csv), "--svg", utf8(&svg)]].concat());
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows.iter().map(|row| row[0]).collect::<Vec<_>>(), ["K/V", "exact", "turbo2"], "{table}");
    let csv = std::fs::read_to_string(csv).expect("a table");
    let rows: Vec<Vec<f64>> = csv
        .lines()
        .skip(1)
        .map(|line| line.split(',').skip(1).map(|x| x.parse().expect("a number")).collect())
        .collect();
    // bits, divergences (median, mean, 99.9 %), the same best token, acceptance.
    let [exact, turbo2] = &rows[..] else { panic!("{csv}") };
    assert_eq!(exact[..5], [16.0, 0.0, 0.0, 0.0, 1.0]);
    assert!(turbo2[0] > 2.0 && turbo2[0] < 3.0, "{csv}");
    // A few positions diverge most.
    assert!(turbo2[2] > 2.0 * turbo2[1] && turbo2[3] > 2.0 * turbo2[2], "{csv}");
    assert!(turbo2[4] > 0.5 && exact[5] > 0.2 && turbo2[5] > 0.2, "{csv}");
    assert!(std::fs::read_to_string(svg).expect("a plot").starts_with("<svg"));
    let unknown = refused("kv_quality", &["--only", "turbo9"]);
    assert!(unknown.contains("--only: \"turbo9\" is unknown; expected some of exact, quality, "), "{unknown}");
    assert!(!unknown.contains("no exact"), "a name that --only cannot have: {unknown}");
    let too_many = refused("kv_quality", &["--tokens", "8193", "--only", "exact"]);
    assert_eq!(too_many, "Error: --tokens is 8193, more than the context of 8192\n");
    let (table, _) = succeeds("kv_quality", &["--tokens", "16", "--generate", "0", "--only", "exact"]);
    assert!(table.lines().nth(1).is_some_and(|row| row.starts_with("exact ") && row.ends_with(" -")), "{table}");
}

#[test]
fn bench_matrix_lists_its_cells() {
    let directory = tempfile::tempdir().expect("a directory");
    let out = directory.path().join("none");
    let arguments = ["--dry-run", "--kv", "f16", "--blocks", "3", "--prompts", "short", "--out", utf8(&out)];
    let (cells, _) = succeeds("bench_matrix", &arguments);
    let mode = |name: &str| format!("  short (128 tokens), K/V f16, {name}\n");
    let want = ["off", "B = 3", "auto"].map(mode).concat();
    assert_eq!(cells, format!("demo: 3 cells, 5 runs of each\n{want}"));
    assert!(!out.exists());
}

#[test]
fn verify_curve_measures_sixteen_row_counts() {
    let report = json("verify_curve", &["--json", "--repeats", "1", "--threads", "1"]);
    assert_eq!(keys(&report), documented("verify_curve --json"));
    assert_eq!(report["rollback"], serde_json::json!([]), "there is no recurrent state");
    let list = |name: &str| report[name].as_array().expect("a list").iter().map(number).collect::<Vec<_>>();
    let (ms, v) = (list("ms"), list("v"));
    assert!(ms.len() == 16 && ms.iter().all(|ms| *ms > 0.0), "{report}");
    assert!(v.iter().zip(&ms).all(|(v, of)| (v - of / ms[0]).abs() < 1e-9), "{report}");
    assert!(report["threads"] == 1 && report["isa"] == Isa::best().name() && report["step_bytes"] == 19_251_200);
    assert!(number(&report["read_gb_per_second"]) > 0.0 && number(&report["draft_ms"]) > 0.0, "{report}");

    let report = json("verify_curve", &["--json", "--repeats", "1", "--threads", "1", "--model", DEMO_QWEN]);
    let rollbacks = report["rollback"].as_array().expect("a list");
    let rounds: Vec<_> = rollbacks.iter().map(|of| (number(&of["rows"]), number(&of["keep"]))).collect();
    assert_eq!(rounds, [(3.0, 1.0), (3.0, 3.0), (5.0, 1.0), (5.0, 5.0)]);
    let draft_ms = number(&report["draft_ms"]);
    assert!(draft_ms > 0.0, "{report}");
    for (of, (rows, _)) in rollbacks.iter().zip(rounds) {
        assert_eq!(keys(of), documented("rollback"));
        let [verify, rollback, share] = ["verify_ms", "ms", "of_round"].map(|name| number(&of[name]));
        assert!(verify > 0.0, "{of}");
        assert!((share - rollback / (verify + rollback + draft_ms * (rows - 1.0))).abs() < 1e-9, "{report}");
    }
}

/// On a terminal a line says what is being measured, and is erased at the end.
#[cfg(unix)]
#[test]
fn verify_curve_says_what_it_measures() {
    use std::io::Read;
    use std::os::fd::FromRawFd;
    use std::ptr::null_mut;
    let (mut terminal, mut end) = (-1, -1);
    // SAFETY: the first two are places for descriptors, the others may be null.
    assert_eq!(unsafe { libc::openpty(&raw mut terminal, &raw mut end, null_mut(), null_mut(), null_mut()) }, 0);
    for descriptor in [terminal, end] {
        // The processes of other tests would hold it open.
        // SAFETY: it was opened above.
        assert_eq!(unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) }, 0);
    }
    // SAFETY: they were opened above, and nothing else owns them.
    let (mut terminal, end) = unsafe { (File::from_raw_fd(terminal), File::from_raw_fd(end)) };
    let mut command = example("verify_curve");
    command.args(["--json", "--repeats", "1", "--depth", "1", "--threads", "1"]).stdout(Stdio::null()).stderr(end);
    let mut child = command.spawn().expect("a run");
    // It holds this process's other end.
    drop(command);
    let mut shown = Vec::new();
    // On Linux, an error is what follows the last byte.
    drop(terminal.read_to_end(&mut shown));
    assert!(child.wait().expect("an end").success());
    let shown = text(&shown);
    for part in ["\rmeasuring passes over 1 to 16 rows\x1b[K", "\rmeasuring the read bandwidth\x1b[K"] {
        assert!(shown.contains(part), "{shown:?} has no {part:?}");
    }
    assert!(shown.ends_with("\r\x1b[K"), "{shown:?}");
}

#[test]
fn depth_measures_formats_in_turn() {
    let arguments = ["--depths", "200,64", "--kv", "f16,turbo3", "--repeats", "1", "--threads", "1"];
    let (lines, _) = succeeds("depth", &[&arguments[..], &["--json"]].concat());
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let cells: Vec<_> =
        lines.iter().map(|line| (number(&line["depth"]), line["kv"].as_str().expect("a name"))).collect();
    assert_eq!(cells, [(64.0, "f16"), (64.0, "turbo3"), (200.0, "f16"), (200.0, "turbo3")]);
    for line in &lines {
        assert_eq!(keys(line), documented("depth --json"));
        assert!(number(&line["step_ms"]) > 0.0 && number(&line["kv_bytes"]) > 0.0, "{line}");
    }
    let (table, _) = succeeds("depth", &arguments);
    assert!(table.lines().count() == 5 && table.starts_with("depth    K/V "), "{table}");
    // Said before the model is loaded.
    let line = refused("depth", &["--kv", "f16,exakt", "--model", "no-model"]);
    assert!(line.starts_with("Error: invalid value 'exakt' for '--kv <KV>': "), "{line}");
    assert!(line.contains("expected one of f32, f16, ") && line.contains("presets are exact, quality, "), "{line}");
}

#[test]
fn drafters_are_compared() {
    let directory = tempfile::tempdir().expect("a directory");
    let out = directory.path().join("drafters.json");
    let arguments = ["--blocks", "3", "--mixture", "mtp", "--max-tokens", "8", "--repeats", "1", "--threads", "2"];
    let (table, _) = succeeds("drafters", &[&arguments[..], &["--out", utf8(&out)]].concat());
    let report: Value = serde_json::from_slice(&std::fs::read(out).expect("a report")).expect("JSON");
    let kinds = report["kinds"].as_array().expect("kinds");
    assert_eq!((kinds.len(), table.lines().count()), (5, 5 * 5), "{table}");
    for kind in kinds {
        let modes = kind["modes"].as_array().expect("modes");
        let names: Vec<_> = modes.iter().map(|mode| mode["mode"].as_str().expect("a name")).collect();
        assert_eq!(names, ["off", "B = 3", "auto", "mtp"]);
        assert!(modes.iter().all(|mode| number(&mode["tokens_per_second"]) > 0.0), "{kind}");
        assert_eq!(modes[0]["tokens_per_round"], 1.0);
    }
    // A NextN head needs no assistant.
    let (table, _) = succeeds("drafters", &[&arguments[..], &["--model", DEMO_QWEN]].concat());
    assert_eq!(table.lines().count(), 5 * 5, "{table}");
    let line = refused("drafters", &["--model", utf8(&demo("target"))]);
    assert!(line.starts_with("Error: --assistant: is missing, "), "{line}");
}

#[test]
fn acceptance_by_place() {
    let directory = tempfile::tempdir().expect("a directory");
    let prompts = directory.path().join("prompts.json");
    std::fs::write(&prompts, r#"["fn main() {\n    let mut ", "impl Iterator for Counter {\n"]"#).expect("a file");
    let arguments = ["--prompts", utf8(&prompts), "--blocks", "1,4", "--max-tokens", "24", "--threads", "1"];
    let report = json("acceptance", &[&arguments[..], &["--json"]].concat());
    let [off, four] = &report.as_array().expect("blocks")[..] else { panic!("{report}") };
    let fields = documented("acceptance --json");
    assert!(keys(off) == fields && keys(four) == fields, "{report}");
    assert_eq!(
        (&off["block_size"], &off["tokens_per_round"], &off["acceptance_rate"]),
        (&1.into(), &1.0.into(), &0.0.into())
    );
    assert_eq!((&four["block_size"], four["acceptance_at"].as_array().map(Vec::len)), (&4.into(), Some(3)));
    assert!(number(&four["tokens_per_round"]) > 1.0, "{report}");
    let (table, _) = succeeds("acceptance", &arguments);
    assert!(table.starts_with("2 prompts, up to 24 tokens each, 1 thread\n") && table.lines().count() == 4, "{table}");
    let target = demo("target");
    let alone = [&arguments[..2], &["--max-tokens", "2", "--model", utf8(&target)]].concat();
    let line = refused("acceptance", &alone);
    assert!(line.starts_with("Error: --assistant: is missing, "), "{line}");
    succeeds("acceptance", &[&alone[..], &["--blocks", "1"]].concat());
}

// ---- errors and pipes ----

/// One line, whatever is wrong, and exit code 1, also where backtraces are asked for.
#[test]
fn errors_are_one_line() {
    let directory = tempfile::tempdir().expect("a directory");
    let (empty, nowhere) = (utf8(directory.path()), directory.path().join("nowhere"));
    let nowhere = utf8(&nowhere);
    let gguf = format!("{nowhere}.gguf");
    let both = ["--model", nowhere, "--assistant", nowhere];
    let wrong = |name: &str| -> Vec<&str> {
        match name {
            "bench_matrix" => vec!["--render", "--out", empty],
            "convert" => vec![nowhere, &gguf],
            "drafters" => both.to_vec(),
            "doctor" | "perplexity" | "trace_view" => vec![nowhere],
            "quantize" => vec![nowhere, &gguf, "q8_0"],
            "synthesize" => vec![nowhere, "31b", "--centroids"],
            _ => both[..2].to_vec(),
        }
    };
    for name in COMMANDS {
        for arguments in [wrong(name), vec!["--no-such-flag"], vec!["a", "b", "c", "d", "e"]] {
            let line = refused(name, &arguments);
            assert!(line.len() < 600, "{name} {arguments:?}: {line}");
        }
    }
    for name in COMMANDS {
        let (help, stderr) = succeeds(name, &["--help"]);
        assert!(help.contains("Usage: ") && stderr.is_empty(), "{name}: {help}{stderr}");
        for (short, long) in [("-m, ", "--model <"), ("-t, ", "--threads <"), ("-n, ", "--max-tokens <")] {
            let has_short = help.contains(&format!("{short}{long}"));
            assert_eq!(has_short, help.contains(long), "{name}: {long} has the same short option everywhere");
        }
        let (version, _) = succeeds(name, &["--version"]);
        assert!(version.ends_with(concat!(" ", env!("CARGO_PKG_VERSION"), "\n")), "{name}: {version}");
    }
}

/// Errors name the options of the command, not the library's arguments.
#[test]
fn errors_name_options() {
    let ids = ["--prompt-ids", "2,3,5", "--threads", "1", "--max-tokens", "1"];
    let cases: [(&[&str], &str); 20] = [
        (&["--context", "0"], "--context: is 0, must be at least 1"),
        (&["--ctx-size", "0"], "--context: is 0, must be at least 1"),
        (&["--context", "2"], "3 tokens do not fit the context of 2; shorten the prompt or raise --context"),
        (&["--draft-block-size", "600"], "--draft-block-size: is 600, must be from 1 to 512"),
        (&["--skip-streak", "33"], "--skip-streak: is 33, must be from 1 to 32"),
        (
            &["--spec-type", "draft-model"],
            "--spec-type: draft-model needs a draft model; pass --draft-model, or omit it",
        ),
        (&["--no-assistant", "--spec-type", "ngram-mod,mtp"], "--spec-type: mtp needs an assistant, or a model with"),
        (&["--no-assistant", "--draft-block-size", "3"], "--draft-block-size: mtp needs an assistant, or a model with"),
        (&["--no-assistant", "--mtp-preset", "balanced"], "--mtp-preset: mtp needs an assistant, or a model with"),
        (&["--centroids", "8192/32"], "--centroids: 8192, of 4096 tokens: must be a power of two that divides"),
        (&["--simulate-acceptance", "2"], "--simulate-acceptance: is 2, must be from 0 to 1"),
        (&["--temp=-1"], "--temperature: must be a finite number of 0 or more"),
        (&["--temp", "1", "--top-p", "2"], "--top-p: must be above 0 and at most 1"),
        (&["--temp", "1", "--min-p", "2"], "--min-p: must be from 0 to 1"),
        (&["--temp", "1", "--typical-p", "0"], "--typical: must be above 0 and at most 1"),
        (&["--repeat-penalty", "0"], "--repeat-penalty: must be from 0.1 to 10"),
        (&["--presence-penalty", "-101"], "--presence-penalty: must be from -100 to 100"),
        (&["--frequency-penalty", "101"], "--frequency-penalty: must be from -100 to 100"),
        (&["--dry-multiplier", "1", "--dry-base", "0"], "--dry-base: must be from 1 to 16"),
        (&["--dry-multiplier", "1", "--dry-allowed-length", "0"], "--dry-allowed-length: must be at least 1"),
    ];
    for (arguments, what) in cases {
        let line = refused("generate", &[&ids[..], arguments].concat());
        assert!(line.starts_with(&format!("Error: {what}")), "{line}");
    }
}

/// An error that ends a text names the option in JSON, as it does on stderr.
#[cfg(feature = "constraint")]
#[test]
fn an_error_that_ends_a_text_names_the_option() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("wide.lark");
    // After forty letters the parser has more items than its limit of 2000.
    let names: Vec<_> = (0..2100).map(|i| format!("r{i}")).collect();
    let rules: String = (0..2100).map(|i| format!("r{i}: L \"{i}\"\n")).collect();
    let grammar = format!("start: {}wide\nwide: {}\n{rules}L: /[a-z]/\n", "L ".repeat(40), names.join(" | "));
    std::fs::write(&path, grammar).expect("a file");
    let Output { status, stdout, stderr } =
        run("generate", &["a", "--threads", "1", "--max-tokens", "60", "--json", "--grammar", utf8(&path)]);
    let stderr = text(&stderr);
    assert_eq!(status.code(), Some(1), "{stderr}");
    let report: Value = serde_json::from_slice(&stdout).unwrap_or_else(|error| panic!("{error}: {stderr}"));
    let error = report["error"].as_str().expect("an error");
    assert!(error.starts_with("--grammar: ") && report["finish_reason"] == "error", "{report}");
    assert_eq!(stderr.lines().last(), Some(&*format!("Error: {error}")));
}

/// What fails of one prompt of several is said, and loses nothing of the others.
#[test]
fn a_prompt_that_fails_loses_no_other() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("prompts.txt");
    std::fs::write(&path, format!("fn main() {{\n{}\nstruct A\n", "let x = 1; ".repeat(100))).expect("a file");
    let arguments =
        [utf8(&path), "--sequences", "2", "--context", "64", "--max-tokens", "4", "--ignore-eos", "--threads", "1"];
    let Output { status, stdout, stderr } = run("batch", &[&arguments[..], &["--json"]].concat());
    let (stdout, stderr) = (text(&stdout), text(&stderr));
    assert_eq!(status.code(), Some(1), "{stderr}");
    let report: Value = serde_json::from_str(&stdout).expect("JSON");
    assert_eq!(keys(&report), documented("batch --json"));
    assert_eq!(report["generated_tokens"], 8);
    for i in [0, 2] {
        assert!(report["errors"][i].is_null() && report["texts"][i] != "", "{report}");
    }
    let problem = report["errors"][1].as_str().expect("an error");
    assert!(problem.ends_with(" do not fit the context of 64; shorten the prompt or raise --context"), "{problem}");
    let last = stderr.lines().last().unwrap_or_default();
    assert_eq!(last, format!("Error: 1 of 3 prompts failed; prompt 2: {problem}"));
    let printed = text(&run("batch", &arguments).stdout);
    assert!(printed.contains("\n== 2 failed: ") && printed.contains("\n== 3\n"), "{printed}");
    // With nothing to generate, prompts are read and that is all.
    let report = json("batch", &[utf8(&path), "--max-tokens", "0", "--threads", "1", "--json"]);
    assert_eq!((&report["generated_tokens"], report["texts"].as_array().map(Vec::len)), (&Value::from(0), Some(3)));
}

/// What does not fit the context is refused before anything is measured, with the option and the context.
#[test]
fn depths_beyond_the_context_are_refused() {
    let (target, huge) = (demo("target"), usize::MAX.to_string());
    let cases: [(&str, &[&str], &str); 6] = [
        ("depth", &["--depths", "64,8189"], "--depths: 8189 positions and 4 rows do not fit the context of 8192; "),
        ("depth", &["--depths", &huge], &format!("--depths: {huge} positions and 4 rows do not fit the context of ")),
        ("verify_curve", &["--depth", "8177"], "--depth: 8177 positions and 16 rows do not fit the context of 8192; "),
        ("verify_curve", &["--depth", &huge], &format!("--depth: {huge} positions and 16 rows do not fit the context")),
        (
            "verify_curve",
            &["--model", DEMO_QWEN, "--repeats", "1000"],
            "--depth: 64 positions and 90016 rows do not fit the context of ",
        ),
        (
            "batch",
            &["--model", utf8(&target), "--prompt-tokens", &huge],
            &format!("--prompt-tokens is {huge}, must be from 1 to the context of 8192"),
        ),
    ];
    for (name, arguments, what) in cases {
        let Output { status, stderr, .. } = run(name, &[arguments, &["--threads", "1"]].concat());
        let errors = text(&stderr);
        let line = errors.lines().last().unwrap_or_default();
        assert!(status.code() == Some(1) && line.starts_with(&format!("Error: {what}")), "{name}: {errors}");
    }
}

/// More tokens than a u32 counts, in a context that would have them.
#[cfg(target_os = "linux")]
#[test]
fn batch_refuses_a_context_that_does_not_fit_memory() {
    let target = demo("target");
    let arguments = ["--model", utf8(&target), "--context", "1125899906842624", "--prompt-tokens", "4294967297"];
    let Output { status, stderr, .. } = run("batch", &[&arguments[..], &["--threads", "1"]].concat());
    let errors = text(&stderr);
    let line = errors.lines().last().unwrap_or_default();
    let what = "Error: K and V of a context of 1125899906842624: needs ";
    assert!(status.code() == Some(1) && line.starts_with(what), "{errors}");
}

/// v(N) is measured with the options of the sequences, and what cannot be measured is refused before they are decoded.
#[test]
fn batch_measures_v_with_its_own_options() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("prompts.txt");
    std::fs::write(&path, "fn main() {\n").expect("a file");
    let all = [utf8(&path), "--measure", "1", "--max-tokens", "2", "--threads", "1", "--ignore-eos", "--context", "24"];
    let report = json("batch", &[&all[..], &["--sequences", "2", "--json"]].concat());
    assert!(number(&report["batches"][0]["v"]) > 0.0, "{report}");
    assert_eq!(keys(&report["batches"][0]), documented("batches"));
    let Output { status, stderr, .. } = run("batch", &[&all[..], &["--sequences", "2,32"]].concat());
    let line = text(&stderr);
    assert!(status.code() == Some(1) && line.contains("do not fit the context of 24"), "{line}");
}

/// Speeds are measured after the first token; without a second token there is nothing to measure.
#[test]
fn batch_measures_no_text_of_one_token() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("prompts.txt");
    std::fs::write(&path, "fn main() {\n").expect("a file");
    let first = json("generate", &["fn main() {", "-n", "1", "--no-assistant", "--threads", "1", "--json"]);
    let stop = format!("--stop={}", first["text"].as_str().expect("a text"));
    let line = refused("batch", &[utf8(&path), "--measure", "1", "--sequences", "2", "--threads", "1", &stop]);
    assert!(line.starts_with("Error: --measure: the texts end with their first tokens; "), "{line}");
}

/// A scheduler drafts nothing ahead: the option is not accepted without effect.
#[test]
fn batch_has_no_pipeline_depth() {
    let line = "Error: unexpected argument '--pipeline-depth' found; see --help\n";
    assert_eq!(refused("batch", &["--pipeline-depth", "2"]), line);
}

/// Types that can only be loaded are refused before a model is, and no error proposes one.
#[test]
fn types_to_quantize_to() {
    let directory = tempfile::tempdir().expect("a directory");
    let out = utf8(directory.path());
    let cases: [(&str, &[&str]); 5] = [
        ("generate", &["--model", "no-model"]),
        ("batch", &["--model", "no-model"]),
        ("perplexity", &["tests/command_lines.rs", "--model", "no-model"]),
        ("bench_matrix", &["--dry-run", "--out", "/nowhere"]),
        ("synthesize", &[out, "e2b"]),
    ];
    for (name, arguments) in cases {
        for (weight_type, what) in [("IQ2_S", "can be loaded, but not quantized to; "), ("q9", "is unknown; ")] {
            let line = refused(name, &[arguments, &["--quantize", weight_type]].concat());
            let named =
                format!("Error: invalid value '{weight_type}' for '--quantize <TYPE>': {what}use one of q4_0, ");
            assert!(line.starts_with(&named), "{name}: {line}");
            assert!(line.contains(", iq4_xs, mxfp4") && !line.contains("iq1_s"), "{name}: {line}");
        }
        let (help, _) = succeeds(name, &["--help"]);
        assert!(help.contains("q8_0") && !help.contains("iq2_"), "{name}: {help}");
    }
}

/// A command's help describes that command: `batch` has no chats.
#[test]
fn chats_are_described_where_they_are() {
    let help = |name: &str| succeeds(name, &["--help"]).0.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(help("generate").contains("XTC and the repeat penalty has the checkpoint's defaults then"));
    let batch = help("batch");
    assert!(batch.contains("--temperature <") && !batch.contains("chat"), "{batch}");
}

/// A file after `--measure` is taken for its value.
#[test]
fn the_value_of_measure_is_a_number() {
    for value in ["prompts.txt", "0"] {
        let problem = "TIMES must be a number, at least 1; put a FILE before --measure; see --help";
        let line = format!("Error: invalid value '{value}' for '--measure [<TIMES>]': {problem}\n");
        assert_eq!(refused("batch", &["--measure", value]), line);
    }
}

/// A negative value is blamed on its option.
#[test]
fn negative_values_are_the_options() {
    for (option, what) in [
        ("--temperature", "--temperature: must be"),
        ("--max-tokens", "for '--max-tokens <N>': -2 is not in -1.."),
        ("--top-k", "for '--top-k <K>': -2 is not in -1.."),
    ] {
        let line = refused("generate", &[option, "-2"]);
        assert!(line.contains(what), "{line}");
    }
}

/// -1 is no limit, as in llama.cpp: a text ends where the context does, and all tokens are sampled from.
#[test]
fn minus_one_is_no_limit() {
    let all = ["fn main() {", "--context", "40", "--ignore-eos", "--no-assistant", "--threads", "1"];
    let report = json("generate", &[&all[..], &["-n", "-1", "--json"]].concat());
    let tokens = number(&report["prompt_tokens"]) + number(&report["generated_tokens"]);
    // The last token is not read.
    assert!(report["finish_reason"] == "context" && (40.0..=41.0).contains(&tokens), "{report}");
    let sampled =
        |more: &[&str]| succeeds("generate", &[&all[..], &["--max-tokens", "16", "--temp", "1.5"], more].concat()).0;
    let unfiltered = sampled(&[]);
    assert_eq!([sampled(&["--top-k", "-1"]), sampled(&["--top-k", "0"])], [unfiltered.clone(), unfiltered.clone()]);
    assert_ne!(sampled(&["--top-k", "1"]), unfiltered);
}

/// Counts of nothing, and of too many threads, are refused, not computed with.
#[test]
fn counts_of_nothing_are_refused() {
    let target = demo("target");
    let directory = tempfile::tempdir().expect("a directory");
    let (prompts, gguf) = (directory.path().join("prompts.json"), directory.path().join("demo.gguf"));
    std::fs::write(&prompts, "[]").expect("a file");
    let (of_quantize, no_prompts) = ([utf8(&target), utf8(&gguf), "q8_0", "--threads", "100000"], utf8(&prompts));
    let empty = directory.path().join("empty");
    std::fs::write(&empty, "").expect("a file");
    let cases: [(&str, &[&str], &str); 16] = [
        ("depth", &["--repeats", "0"], "--repeats must be at least 1"),
        ("drafters", &["--repeats", "0"], "--repeats must be at least 1"),
        ("drafters", &["--max-tokens", "1"], "--max-tokens must be at least 2"),
        ("acceptance", &["--max-tokens", "1"], "--max-tokens must be at least 2"),
        ("constraint", &["--turns", "0"], "--turns must be at least 1"),
        ("constraint", &["--max-tokens", "1"], "--max-tokens must be at least 2"),
        ("doctor", &[utf8(&target), "--threads", "100000"], "--threads must be from 1 to 1024"),
        ("verify_curve", &["--repeats", "0"], "--repeats must be at least 1"),
        ("batch", &["--measure", "--max-tokens", "1"], "--max-tokens must be at least 2 with --measure"),
        ("batch", &["--measure", "--sequences", "1,600"], "--sequences must be from 1 to 512 with --measure"),
        ("kv_quality", &["--tokens", "0"], "--tokens must be at least 1"),
        ("acceptance", &["--prompts", no_prompts], &format!("{no_prompts}: has no prompts")),
        (
            "perplexity",
            &["tests/command_lines.rs", "--windows", "0"],
            "--windows: is 0, must be at least 1; omit it to read the whole text",
        ),
        ("perplexity", &["tests/command_lines.rs", "--window", "3"], "--window: is 3, must be at least 4 tokens"),
        ("perplexity", &[utf8(&empty)], &format!("{}: prompt: is empty; give some text to continue", utf8(&empty))),
        ("quantize", &of_quantize, "--threads must be from 1 to 1024, or 0 for all hardware threads"),
    ];
    for (name, arguments, what) in cases {
        assert_eq!(refused(name, arguments), format!("Error: {what}\n"), "{name}");
    }
}

/// A command that is refused leaves an earlier trace as it was.
#[test]
fn a_refused_command_replaces_no_trace() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("trace.ndjson");
    succeeds("generate", &["x", "--threads", "1", "-n", "2", "--trace", utf8(&path)]);
    let trace = std::fs::read(&path).expect("a trace");
    assert!(!trace.is_empty());
    for refused in [["--temp=1", "--top-p=0"], ["--regex", "("]] {
        let run = run("generate", &[&["x", "--threads", "1", "--trace", utf8(&path)][..], &refused].concat());
        assert_eq!(run.status.code(), Some(1), "{refused:?}");
        assert_eq!(std::fs::read(&path).expect("a trace"), trace, "{refused:?}");
    }
}

/// A trace that was edited is shown as far as it makes sense.
#[test]
fn an_edited_trace_is_shown() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("trace.ndjson");
    let round =
        r#"{"event": "round", "session": 0, "drafter": "mtp", "draft": [{"id": 5}], "accepted": 7, "tokens": []}"#;
    std::fs::write(&path, format!("{round}\n")).expect("a file");
    succeeds("trace_view", &[utf8(&path)]);
    assert!(
        std::fs::read_to_string(directory.path().join("trace.html"))
            .expect("a page")
            .contains("<p>1 round, 0 tokens, ")
    );
}

/// Runs a command whose reader is gone before it begins.
fn unread(name: &str, arguments: &[&str]) -> Output {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    example(name).args(arguments).stdout(writer).stderr(Stdio::piped()).output().expect("a run")
}

/// A closed pipe ends a command as it ends `cat`: by SIGPIPE, with nothing on stderr.
#[cfg(unix)]
#[test]
fn a_closed_pipe_ends_a_command_quietly() {
    use std::os::unix::process::ExitStatusExt;
    let (target, assistant) = (demo("target"), demo("assistant"));
    let printing: [(&str, &[&str]); 8] = [
        ("generate", &["fn main() {", "--max-tokens", "8"]),
        ("generate", &["fn main() {", "--max-tokens", "8", "--json"]),
        ("doctor", &[utf8(&target)]),
        ("doctor", &[utf8(&target), "--check"]),
        ("doctor", &[utf8(&target), utf8(&assistant), "--check", "--json"]),
        ("depth", &["--depths", "16", "--kv", "f16", "--repeats", "1"]),
        ("kv_quality", &["--tokens", "16", "--generate", "1", "--only", "exact"]),
        ("bench_matrix", &["--dry-run", "--out", "/nowhere"]),
    ];
    let help = COMMANDS.map(|name| (name, &["--help"][..]));
    for (name, arguments) in printing.into_iter().chain(help) {
        let Output { status, stderr, .. } = unread(name, arguments);
        let stderr = text(&stderr);
        assert!(stderr.is_empty(), "{name} {arguments:?}: {stderr}");
        assert_eq!(status.signal(), Some(13), "{name} {arguments:?}: {status}");
    }
}
