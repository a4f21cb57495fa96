//! What an error says.

use foretoken::Result;

/// Checks that `result` is an error of one line that contains everything in `about`.
#[track_caller]
pub fn refused<T>(result: Result<T>, about: &[&str]) {
    let Err(error) = result else { panic!("accepted; an error with {about:?} was expected") };
    says(&error.to_string(), about);
}

/// Checks that `message` is one line, of fewer than 600 bytes, that contains everything in `about`.
#[track_caller]
pub fn says(message: &str, about: &[&str]) {
    assert!(message.lines().count() == 1 && message.len() < 600, "not one line: {message:?}");
    about.iter().for_each(|part| assert!(message.contains(part), "{message:?} does not say {part:?}"));
}
