//! Words written by a launch, in order with others and without a wait, and copies of words: `words.cpp`.

use crate::launch::{DeviceSlice, Launch, LaunchError, Params, dimension, optional};

/// Words of one launch, at most.
pub const MAX_WORDS: usize = 240;

/// Parameters of [`write_words`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct WordsParams {
    to: u64,
    count: i32,
    words: [u32; MAX_WORDS],
}

// SAFETY: the `WordsParams` of words.cpp.
unsafe impl Params for WordsParams {}

/// Writes at most [`MAX_WORDS`] words.
///
/// # Errors
/// If there are more, or the slice is too short.
pub fn write_words(to: DeviceSlice<u32>, from: &[u32]) -> Result<Launch<WordsParams>, LaunchError> {
    let mut words = [0; MAX_WORDS];
    let Some(start) = words.get_mut(..from.len()) else {
        return Err(LaunchError(format!("{} words; at most {MAX_WORDS} are supported", from.len())));
    };
    start.copy_from_slice(from);
    let params = WordsParams { to: to.checked_unaligned("the words", from.len())?, count: from.len() as i32, words };
    Ok(Launch { kernel: "write_words", grid: [1, 1, 1], threads: 256, shared: 0, params })
}

/// Parameters of [`copy_words`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CopyParams {
    to: u64,
    from: u64,
    count: i32,
}

// SAFETY: the `CopyParams` of words.cpp.
unsafe impl Params for CopyParams {}

/// Copies `from` to `to`, which has as many words; zeros if `None`.
///
/// # Errors
/// If `from` is shorter.
pub fn copy_words(to: DeviceSlice<u32>, from: Option<DeviceSlice<u32>>) -> Result<Launch<CopyParams>, LaunchError> {
    let params = CopyParams {
        to: to.checked("the copy", to.len())?,
        from: optional(from, "the words", to.len())?,
        count: dimension("words", to.len())?,
    };
    let grid = [dimension("words", to.len().div_ceil(1024).max(1))? as u32, 1, 1];
    Ok(Launch { kernel: "copy_words", grid, threads: 256, shared: 0, params })
}
