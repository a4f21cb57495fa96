//! The page that shows a trace, in a real browser.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::example::example;
use crate::skipped;

/// A page of the demo pair's, and the trace that it shows.
fn page(directory: &Path) -> (PathBuf, String) {
    let (trace, page) = (directory.join("trace.ndjson"), directory.join("trace.html"));
    let run = example("generate")
        .args(["fn main() {\n    let <x> & y = \"", "--max-tokens", "48", "--threads", "2"])
        .args(["--spec-type", "ngram-map-k:n=2,mtp", "--trace"])
        .arg(&trace)
        .output()
        .expect("a run");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let run = example("trace_view").arg(&trace).output().expect("a run");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    (page, std::fs::read_to_string(&trace).expect("a trace"))
}

#[test]
fn a_page_needs_nothing_else() {
    let directory = tempfile::tempdir().expect("a directory");
    let (page, trace) = page(directory.path());
    let html = std::fs::read_to_string(page).expect("a page");
    for foreign in ["http:", "https:", "src=", "href=", "@import", "url("] {
        assert!(!html.contains(foreign), "the page refers to something outside: {foreign}");
    }
    assert_eq!(html.matches("<svg").count(), 3);
    let rounds = trace.lines().filter(|line| line.contains("\"event\":\"round\"")).count();
    assert!(html.contains(&format!("data-round={}", rounds - 1)) && !html.contains(&format!("data-round={rounds} ")));
}

#[test]
fn what_is_no_trace_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("text");
    std::fs::write(&path, "no trace").expect("a file");
    for path in [path, directory.path().join("missing")] {
        let run = example("trace_view").arg(&path).output().expect("a run");
        let complaint = String::from_utf8_lossy(&run.stderr);
        assert!(!run.status.success() && complaint.contains(&path.display().to_string()), "{complaint}");
    }
}

#[test]
fn the_trace_is_not_overwritten() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("trace.html");
    let trace = "{\"event\": \"begin\", \"session\": 0}\n";
    std::fs::write(&path, trace).expect("a file");
    let run = example("trace_view").arg(&path).output().expect("a run");
    let complaint = String::from_utf8_lossy(&run.stderr);
    assert!(!run.status.success() && complaint.contains("is the trace itself"), "{complaint}");
    assert_eq!(std::fs::read_to_string(&path).expect("a trace"), trace);
}

/// No field of a trace, which may come from elsewhere, is markup.
#[test]
fn fields_are_text() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("trace.ndjson");
    let begin = r#"{"event": "begin", "session": 0, "prompt_tokens": "<b>"}"#;
    let round = r#"{"event": "round", "session": 0, "drafter": "<b>", "draft": [{"id": 1}], "accepted": 1,
        "tokens": [{"id": "<b>"}, {"id": 2, "text": "<b>"}]}"#;
    std::fs::write(&path, format!("{begin}\n{}\n", round.replace('\n', ""))).expect("a file");
    let run = example("trace_view").arg(&path).output().expect("a run");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let html = std::fs::read_to_string(path.with_extension("html")).expect("a page");
    assert!(!html.contains("<b>"), "{html}");
    // Two tokens, the count of the prompt's, and the drafter in three places.
    assert_eq!(html.matches("&lt;b&gt;").count(), 6, "{html}");
}

/// The page renders, and a token under the pointer shows its round.
#[test]
fn hovering_shows_the_round() {
    let browsers = ["chromium", "chromium-browser", "google-chrome"];
    let runs = |name: &&str| Command::new(name).arg("--version").output().is_ok_and(|run| run.status.success());
    let Some(browser) = browsers.into_iter().find(runs) else {
        return skipped::skipped(
            "browser",
            format!("none of {browsers:?} is installed (Debian: apt-get install chromium)"),
        );
    };
    let directory = tempfile::tempdir().expect("a directory");
    let (page, trace) = page(directory.path());
    let pointer = "<script>document.querySelector('[data-round=\"2\"]')\
        .dispatchEvent(new MouseEvent('mouseover', { bubbles: true }))</script>";
    let html = std::fs::read_to_string(&page).expect("a page") + pointer;
    std::fs::write(&page, html).expect("a page");
    let profile = format!("--user-data-dir={}", directory.path().join("profile").display());
    let run = Command::new(browser)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            &profile,
            "--dump-dom",
        ])
        .arg(format!("file://{}", page.display()))
        .output()
        .expect("a run");
    let dom = String::from_utf8_lossy(&run.stdout);
    let panel = dom.split("<aside id=\"round\">").nth(1).and_then(|rest| rest.split("</aside>").next());
    let panel = panel.unwrap_or_else(|| panic!("no panel: {}", String::from_utf8_lossy(&run.stderr)));
    let rounds: Vec<serde_json::Value> = (trace.lines())
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .filter(|line: &serde_json::Value| line["event"] == "round")
        .collect();
    let round = &rounds[2];
    assert!(panel.starts_with("round 3 of session 0"), "{panel}");
    assert!(panel.contains(&format!("position {}, after token {}", round["position"], round["last"])), "{panel}");
    // 0.02 of 256 tokens may be lost before any is saved.
    let balance = round["expected"]["balance"].as_f64().expect("a number");
    assert!(panel.contains(&format!("saved so far, plus the loss budget: {balance:.1} plain steps")), "{panel}");
    assert!(panel.contains(&format!(
        "{} rows because: {}",
        round["rows"],
        round["reason"].as_str().expect("a reason")
    )));
    assert_eq!(dom.matches("class=\"token same\"").count(), round["tokens"].as_array().expect("tokens").len());
}
