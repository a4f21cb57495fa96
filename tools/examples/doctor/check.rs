//! Results of all checks of the library, as text or JSON.

use std::process::ExitCode;

use foretoken::verify::{Finding, Outcome, VerifyOptions, verify};
use foretoken_tools::println;
use foretoken_tools::report::count;

pub fn print(options: &VerifyOptions) -> ExitCode {
    let findings = verify(options);
    println!("\nchecks");
    findings.iter().for_each(line);
    let failed = failures(&findings);
    println!("{}", if failed == 0 { "sound".into() } else { count(failed, "failure") });
    code(failed)
}

pub fn json(findings: &[Finding]) -> ExitCode {
    let failed = failures(findings);
    println!("{}", serde_json::json!({ "passed": failed == 0, "findings": findings }));
    code(failed)
}

fn failures(findings: &[Finding]) -> usize {
    findings.iter().filter(|finding| finding.outcome == Outcome::Failed).count()
}

fn code(failed: usize) -> ExitCode {
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn line(finding: &Finding) {
    let outcome = match finding.outcome {
        Outcome::Passed => "ok",
        Outcome::Warned => "warning",
        Outcome::Failed => "FAILED",
    };
    let part = format!("{:?}", finding.part).to_lowercase();
    println!("{outcome:8}{part:10}{:16}{}", finding.check, finding.detail);
}
