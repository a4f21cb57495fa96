//! The benchmark's journal, tables and report, on the demo pair and with a fake llama.cpp server.

#[path = "../../tools/tests/example/mod.rs"]
mod example;

use std::collections::BTreeMap;
use std::fs::read_to_string;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output};

use example::example;
use serde_json::{Value, json};

const TOKENS: usize = 16;

/// A small matrix: two runs of three modes, after prompts of 32 tokens unless the arguments say otherwise.
fn command(out: &Path, further: &[&str]) -> Command {
    let mut command = example("bench_matrix");
    command.args("--kv f16 --blocks 3 --max-tokens 16 --runs 2 --threads 1".split(' ')).arg("--out").arg(out);
    if !further.contains(&"--prompts") {
        command.args(["--prompts", "32"]);
    }
    command.args(further);
    command
}

fn bench(out: &Path, further: &[&str]) -> Output {
    command(out, further).output().expect("a run")
}

fn succeeds(out: &Path, further: &[&str]) -> String {
    let run = bench(out, further);
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    String::from_utf8_lossy(&run.stdout).into_owned()
}

fn fails(out: &Path, further: &[&str]) -> String {
    let run = bench(out, further);
    assert!(!run.status.success(), "{}", String::from_utf8_lossy(&run.stdout));
    String::from_utf8_lossy(&run.stderr).into_owned()
}

/// Runs by prompt, mode and number.
type Runs = BTreeMap<(u64, String, u64), Value>;

/// The runs in the journal.
fn runs(out: &Path) -> Runs {
    let mut runs = BTreeMap::new();
    for line in read_to_string(out.join("runs.ndjson")).expect("a journal").lines() {
        let line: Value = serde_json::from_str(line).expect("JSON");
        for field in ["machine", "commit"] {
            assert!(line[field].as_str().is_some_and(|text| !text.is_empty()), "{line}");
        }
        if line["event"] == "run" {
            let number = |field: &str| line[field].as_u64().expect("a number");
            let key = (number("prompt"), line["mode"].as_str().expect("a mode").to_owned(), number("run"));
            assert!(runs.insert(key, line).is_none(), "measured twice");
        }
    }
    runs
}

/// A table with quoted fields, by the names of its columns.
fn csv(out: &Path) -> Vec<BTreeMap<String, String>> {
    let text = read_to_string(out.join("results.csv")).expect("a table");
    let fields = |line: &str| {
        let (mut fields, mut quoted) = (vec![String::new()], false);
        for c in line.chars() {
            match c {
                '"' => quoted = !quoted,
                ',' if !quoted => fields.push(String::new()),
                c => fields.last_mut().expect("a field").push(c),
            }
        }
        fields
    };
    let mut lines = text.lines().map(fields);
    let names = lines.next().expect("a head");
    let row = |fields: Vec<String>| {
        assert_eq!(fields.len(), names.len());
        names.iter().cloned().zip(fields).collect()
    };
    lines.map(row).collect()
}

#[test]
fn a_matrix_is_measured_once_and_told_thrice() {
    let directory = tempfile::tempdir().expect("a directory");
    let out = directory.path();
    let listed = succeeds(out, &["--dry-run", "--prompts", "32,1100,8k"]);
    assert_eq!(listed.lines().filter(|line| line.contains("K/V f16")).count(), 6, "{listed}");
    assert!(listed.contains("skipped: 8 K deep: 8208 positions, the model supports 8192"), "{listed}");
    assert!(!out.join("runs.ndjson").exists());

    // The longer prompt is read once, and every run continues from there. An interrupted run has left its sessions.
    let sessions = out.join("sessions.partial");
    std::fs::create_dir_all(&sessions).expect("a folder");
    std::fs::write(sessions.join("session-0"), "a session").expect("a file");
    let prompts = ["--prompts", "32,1100"];
    succeeds(out, &prompts);
    let all = runs(out);
    let modes = ["B = 3", "auto", "off"];
    let wanted =
        [32, 1100].iter().flat_map(|prompt| modes.map(|mode| [1, 2].map(|run| (*prompt, mode.to_owned(), run))));
    assert!(all.keys().cloned().eq(wanted.flatten()), "{:?}", all.keys());
    for ((prompt, mode, _), run) in &all {
        let number = |field: &str| run[field].as_f64().expect("a number");
        assert_eq!(run["written"], all[&(*prompt, "off".into(), 1)]["written"], "{mode} generates a different text");
        assert!(number("tokens_per_second") > 0.0 && number("prefill_tokens_per_second") > 0.0);
        assert_eq!(number("rounds") + number("accepted"), (TOKENS - 1) as f64);
        assert!(number("kv_bytes") > 0.0 && number("weights_gb_per_second") > 0.0);
    }

    check_table(out, &all);
    check_page(out, modes);

    assert!(!sessions.exists(), "sessions are left");

    // Nothing is missing, so nothing is measured; an incomplete last line is measured again.
    let journal = out.join("runs.ndjson");
    let before = read_to_string(&journal).expect("a journal");
    let printed = succeeds(out, &[&prompts[..], &["--markdown"]].concat());
    assert_eq!(read_to_string(&journal).expect("a journal"), before);
    assert!(printed.contains("| tokens/s | off | B = 3 | auto |"), "{printed}");
    assert!(printed.contains("| demo, 1100 tokens, K/V f16 |"), "{printed}");
    std::fs::write(&journal, &before[..before.len() - 40]).expect("a file");
    succeeds(out, &prompts);
    let after = read_to_string(&journal).expect("a journal");
    let whole = before[..before.len() - 40].rfind('\n').expect("lines") + 1;
    assert!(after.starts_with(&before[..whole]));
    assert!(runs(out).keys().eq(all.keys()));
}

/// The table has the medians and ranges of the two runs.
fn check_table(out: &Path, all: &Runs) {
    let table = csv(out);
    assert_eq!(table.len(), 6);
    for row in &table {
        let number = |name: &str| row[name].parse::<f64>().expect(name);
        let run = |i| &all[&(row["prompt_tokens"].parse().expect("tokens"), row["mode"].clone(), i)];
        let speeds = [1, 2].map(|i| run(i)["tokens_per_second"].as_f64().expect("a speed"));
        let is = |name: &str, want: f64| assert!((number(name) / want - 1.0).abs() < 1e-12, "{name} of {row:?}");
        is("tokens_per_second_min", speeds[0].min(speeds[1]));
        is("tokens_per_second_max", speeds[0].max(speeds[1]));
        is("tokens_per_second", (speeds[0] + speeds[1]) / 2.0);
        assert!(row["command"].starts_with("bench_matrix --kv f16") && row["commit"] == run(1)["commit"]);
        if row["mode"] == "B = 3" {
            let sum = |field: &str| [1, 2].map(|i| run(i)[field].as_f64().expect("a count")).iter().sum::<f64>();
            assert!((number("acceptance") - sum("accepted") / sum("drafted")).abs() < 1e-9);
        }
    }
}

/// The report has every cell, and needs no other file.
fn check_page(out: &Path, modes: [&str; 3]) {
    let page = read_to_string(out.join("report.html")).expect("a page");
    for foreign in ["http:", "https:", "src=", "href=", "@import", "url("] {
        assert!(!page.contains(foreign), "the report has an external reference: {foreign}");
    }
    for prompt in ["32 tokens", "1100 tokens"] {
        for mode in modes {
            assert!(page.contains(&format!("data-cell=\"{prompt}, K/V f16, {mode}\"")), "{prompt}, {mode}");
        }
    }
    assert_eq!(page.matches("<svg").count(), 2 * 2 + 1);
}

/// Answers `replies` completions like llama.cpp's server, then closes. Returns its address.
fn server(replies: usize) -> String {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    std::thread::spawn(move || {
        let mut left = replies;
        for stream in listener.incoming() {
            let mut stream = BufReader::new(stream.expect("a connection"));
            let (mut line, mut length) = (String::new(), 0);
            stream.read_line(&mut line).expect("a request");
            let completion = line.starts_with("POST /completion ");
            while line.trim() != "" {
                line.clear();
                stream.read_line(&mut line).expect("a head");
                if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                    length = value.trim().parse().expect("a length");
                }
            }
            let mut body = vec![0; length];
            stream.read_exact(&mut body).expect("a body");
            let reply = match completion {
                false => json!({"status": "ok"}),
                true if left == 0 => return,
                true => {
                    left -= 1;
                    complete(&serde_json::from_slice(&body).expect("JSON"))
                }
            };
            let (reply, head) =
                (reply.to_string(), "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: application/json");
            write!(stream.get_mut(), "{head}\r\nContent-Length: {}\r\n\r\n{reply}", reply.len()).expect("a reader");
        }
    });
    url
}

fn complete(request: &Value) -> Value {
    assert_eq!((&request["temperature"], &request["n_predict"]), (&json!(0.0), &json!(TOKENS)));
    assert_eq!((&request["cache_prompt"], &request["ignore_eos"]), (&json!(false), &json!(true)));
    let prompt = request["prompt"].as_array().expect("ids").len();
    json!({
        "content": "", "tokens": vec![7; TOKENS],
        "timings": {"prompt_n": prompt, "prompt_ms": 10.0, "predicted_n": TOKENS, "predicted_ms": 150.0,
            "draft_n": 5, "draft_n_accepted": 4},
    })
}

#[test]
fn a_server_that_dies_costs_nothing_that_was_measured() {
    let directory = tempfile::tempdir().expect("a directory");
    let out = directory.path();
    let dying = server(1);
    let complaint = fails(out, &["--llama-url", &dying]);
    assert!(complaint.contains(&format!("llama.cpp's server at {dying}")), "{complaint}");
    assert!(complaint.contains("demo, 32 tokens, K/V f16, llama.cpp, run 2"), "{complaint}");
    let before = runs(out);
    assert_eq!(before.len(), 7);
    assert_eq!(csv(out).len(), 4, "what was measured is not reported");

    succeeds(out, &["--llama-url", &server(1)]);
    let after = runs(out);
    assert_eq!(after.len(), 8);
    assert!(before.iter().all(|(key, run)| after[key] == *run), "what was there was measured again");
    let theirs = &after[&(32, "llama.cpp".into(), 2)];
    // Fifteen tokens in 150 ms: the timer starts after the first token.
    assert_eq!(theirs["tokens_per_second"], json!(100.0));
    assert_eq!(theirs["prefill_tokens_per_second"], json!(3200.0));
    assert_eq!((&theirs["rounds"], &theirs["drafted"], &theirs["accepted"]), (&json!(11), &json!(5), &json!(4)));
    let page = read_to_string(out.join("report.html")).expect("a page");
    assert!(page.contains("<td>different</td>"), "the report does not say that the text is different");
}

/// Runs are recorded although what is said of them cannot be written.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_for_stderr_costs_no_measurement() {
    let directory = tempfile::tempdir().expect("a directory");
    let full = std::fs::File::options().write(true).open("/dev/full").expect("a device");
    let run = command(directory.path(), &[]).stderr(full).output().expect("a run");
    assert!(run.status.success(), "{}", run.status);
    assert_eq!(runs(directory.path()).len(), 6);
}

#[test]
fn what_is_wrong_is_named() {
    let directory = tempfile::tempdir().expect("a directory");
    let out = directory.path().join("out");
    let missing = directory.path().join("missing.gguf");
    let missing = missing.to_str().expect("UTF-8");
    assert!(fails(&out, &["--model", missing]).contains(missing));
    assert!(fails(&out, &["--model", missing, "--assistant", "a", "--assistant", "b"]).contains("in pairs"));
    assert!(fails(&out, &["--prompts", "some"]).contains("\"some\" is not a prompt length"));
    assert!(fails(&out, &["--kv", "q1"]).contains("q1"));
    assert!(fails(&out, &["--mixture", "oracle"]).contains("\"oracle\" is not a drafter"));
    for rows in ["1", "513"] {
        assert!(fails(&out, &["--blocks", rows]).contains(&format!("--blocks: is {rows}, must be from 2 to 512")));
    }
    for rate in ["nan", "inf", "-0.5", "1.5"] {
        let out = directory.path().join("rates");
        assert!(fails(&out, &["--simulate-acceptance", rate]).contains("must be from 0 to 1"), "{rate}");
        assert!(!out.exists(), "{rate}: was written to the journal");
    }

    let file = directory.path().join("file");
    std::fs::write(&file, "a text\n").expect("a file");
    let below = file.join("out");
    assert!(fails(&below, &[]).contains(&below.display().to_string()));

    let foreign = directory.path().join("foreign");
    std::fs::create_dir(&foreign).expect("a folder");
    let journal = foreign.join("runs.ndjson");
    std::fs::write(&journal, "a text\nand no more").expect("a file");
    assert!(fails(&foreign, &[]).contains(&format!("{}:1", journal.display())));
    assert_eq!(read_to_string(&journal).expect("a file"), "a text\nand no more");

    assert!(fails(&out, &["--llama-server", missing]).contains(missing));
    let server = file.to_str().expect("UTF-8");
    assert!(fails(&out, &["--llama-server", server]).contains("llama.cpp reads GGUF files"));
}

/// A server that exits before it is ready is reported with its last line of output.
#[cfg(unix)]
#[test]
fn the_last_words_of_a_server_are_kept() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name).to_str().expect("UTF-8").to_owned();
    let demo = foretoken_tools::demo("target");
    let model = path("demo.gguf");
    let checkpoint = foretoken::checkpoint::Checkpoint::open(&demo).expect("the demo");
    let options = foretoken::checkpoint::convert::ToGgufOptions::default();
    foretoken::checkpoint::convert::to_gguf(&checkpoint, &model, &options).expect("a file");
    let server = path("server");
    std::fs::write(&server, "#!/bin/sh\necho \"$@\"\necho no such flag >&2\nexit 3\n").expect("a script");
    std::fs::set_permissions(&server, std::fs::Permissions::from_mode(0o755)).expect("a mode");
    let out = directory.path().join("out");
    let options = ["--model", &model, "--mixture", "ngram-simple", "--llama-args", "-fa on"];
    let complaint = fails(&out, &[&options[..], &["--llama-server", &server]].concat());
    assert!(complaint.contains("no such flag") && complaint.contains("exit status: 3"), "{complaint}");
    let log = read_to_string(out.join("llama-server-1.log")).expect("a log");
    assert!(log.starts_with(&format!("--model {model} --host 127.0.0.1 --port ")), "{log}");
    assert!(log.contains("--parallel 1 --ctx-size 112 --threads 1 -fa on\n"), "{log}");
    assert_eq!(runs(&out).len(), 2, "what was measured before is lost");
}
