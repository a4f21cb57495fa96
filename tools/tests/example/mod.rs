//! Commands of tests.

use std::process::Command;

/// An example's executable, which `cargo test` builds beside the test's.
pub fn example(name: &str) -> Command {
    let own = std::env::current_exe().expect("a path");
    let profile = own.ancestors().nth(2).expect("target/PROFILE/deps/TEST");
    let path = profile.join("examples").join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    assert!(path.exists(), "{} is missing; build it: cargo build --example {name}", path.display());
    Command::new(path)
}
