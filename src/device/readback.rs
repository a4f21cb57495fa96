//! The words read by the host after a round, in one contiguous range:
//!
//! ```text
//! faults of K and V ..., accepted, next, emitted, newest, draft 1, draft 2, ...
//! ```
//!
//! The last token (`newest`) is stored where the next round's verification reads its first row.

use foretoken_gpu::DeviceSlice;

use super::Device;
use super::buffer::{Buffer, subslice};
use super::kv::{DeviceKv, NO_FAULT};
use crate::Result;

/// Words of an accept result: accepted, next, emitted, last token.
const ACCEPT_WORDS: usize = 4;

/// The words read by the host after a round. Token 0 is the last one, token `i` draft `i`.
pub(super) struct Readback {
    words: Buffer<u32>,
    faults: usize,
    accept: usize, // offset of the accept result, a multiple of 4 words
}

impl Readback {
    pub fn new(device: &dyn Device, faults: usize, most_rows: usize) -> Result<Self> {
        let accept = faults.next_multiple_of(4);
        let words = Buffer::new(device, accept + ACCEPT_WORDS + most_rows)?;
        words.write(0, &vec![NO_FAULT; faults])?;
        Ok(Self { words, faults, accept })
    }

    pub fn faults(&self) -> DeviceSlice<u32> {
        subslice(self.words.slice(), 0, self.faults)
    }

    pub fn accept(&self) -> DeviceSlice<u32> {
        subslice(self.words.slice(), self.accept, ACCEPT_WORDS)
    }

    /// `count` tokens from `token` on.
    pub fn from(&self, token: usize, count: usize) -> DeviceSlice<u32> {
        subslice(self.words.slice(), self.accept + ACCEPT_WORDS - 1 + token, count)
    }

    pub fn write(&self, token: usize, tokens: &[u32]) -> Result<()> {
        self.words.write(self.accept + ACCEPT_WORDS - 1 + token, tokens)
    }

    /// The accept result, and the first `count` drafts.
    ///
    /// # Errors
    /// If K or V of an earlier pass were NaN or infinite, or the driver fails.
    pub fn read(&self, count: usize, kv: &DeviceKv) -> Result<([u32; ACCEPT_WORDS], Vec<u32>)> {
        let words = self.words.read(0, self.accept + ACCEPT_WORDS + count)?;
        if let Err(error) = kv.check(&words[..self.faults]) {
            // Reported once: the caller drops the rows.
            self.words.write(0, &vec![NO_FAULT; self.faults])?;
            return Err(error);
        }
        let (result, drafts) = words[self.accept..].split_at(ACCEPT_WORDS);
        Ok((std::array::from_fn(|i| result[i]), drafts.to_vec()))
    }
}
