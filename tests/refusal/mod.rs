//! What an error says.

use foretoken::Result;

/// Checks that `result` is a one-line error that contains everything in `about`.
#[track_caller]
pub fn refused<T>(result: Result<T>, about: &[&str]) {
    let Err(error) = result else { panic!("accepted; an error with {about:?} was expected") };
    let message = error.to_string();
    assert!(message.lines().count() == 1 && message.len() < 600, "not one line: {message:?}");
    about.iter().for_each(|part| assert!(message.contains(part), "{message:?} does not say {part:?}"));
}
