//! KV cache formats on keys like those of trained Gemmas: formats without a mean collapse, `balanced` does not.

#[path = "../../tools/tests/example/mod.rs"]
mod example;

use example::example;

/// The median divergence of every format, in nats, and the last printed line.
fn medians(arguments: &[&str]) -> (impl Fn(&str) -> f64 + use<>, String) {
    let output = example("kv_quality").args(arguments).output().expect("a run");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8(output.stdout).expect("UTF-8");
    let last = printed.lines().last().expect("a line").to_owned();
    let median = move |name: &str| {
        let line = printed.lines().find(|line| line.starts_with(&format!("{name:<26} "))).expect("a line of the table");
        line[26..].split_whitespace().nth(1).and_then(|median| median.parse().ok()).expect("a number")
    };
    (median, last)
}

#[test]
fn balanced_holds_on_gemmas_keys_where_turbo4_collapses() {
    let only = ["--tokens", "1536", "--only", "balanced,turbo4", "--gemma-keys"];
    for group in [&["8"][..], &["16"], &["16", "--k-eq-v"]] {
        let (median, last) = medians(&[&only[..], group].concat());
        // With K = V, different rows are stored, and turbo4 holds.
        assert!(group.len() > 1 || median("turbo4") > 0.1, "{group:?}: {}", median("turbo4"));
        assert!(median("balanced") < 0.01, "{group:?}: {}", median("balanced"));
        assert_eq!(last, "recommendation: on this text --kv-preset balanced is the smallest that is safe");
    }
}

#[test]
fn balanced_holds_on_the_demo_pair() {
    let (median, last) = medians(&["--tokens", "1536", "--generate", "64", "--only", "balanced"]);
    assert!(median("balanced") < 0.01, "{}", median("balanced"));
    assert!(last.starts_with("recommendation: "), "{last}");
}

#[test]
fn without_a_divergence_there_is_no_plot() {
    let directory = tempfile::tempdir().expect("a directory");
    let svg = directory.path().join("kv.svg");
    let arguments = ["--tokens", "8", "--only", "exact", "--gemma-keys", "8", "--svg"];
    let run = example("kv_quality").args(arguments).arg(&svg).output().expect("a run");
    let complaint = String::from_utf8_lossy(&run.stderr);
    assert!(complaint.contains("Error: --svg: at the median no format differs from the exact cache; "), "{complaint}");
    assert!(!run.status.success() && !svg.exists());
}
