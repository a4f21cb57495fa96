//! Files in circulation.
#[test]
fn placeholder() {}
