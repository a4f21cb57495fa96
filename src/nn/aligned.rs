//! Buffers aligned to cache lines.

use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};

/// Bytes of a cache line.
const LINE: usize = 64;

/// A buffer aligned to a cache line. A load that straddles two lines costs two reads, and with unaligned rows every
/// 64-byte load straddles: matrix products of 16 rows ran at half the speed.
pub struct Aligned<T> {
    data: Vec<T>,
    start: usize,
}

impl<T: Copy + Default> Aligned<T> {
    /// An aligned copy of `x`.
    pub fn copy(x: &[T]) -> Self {
        let mut copy = Self::with_capacity(x.len());
        copy.data.extend_from_slice(x);
        copy
    }

    /// `len` zeros.
    pub fn zeros(len: usize) -> Self {
        let mut zeros = Self::with_capacity(len);
        zeros.data.resize(zeros.start + len, T::default());
        zeros
    }

    /// `len` values, which `write` writes.
    ///
    /// # Safety
    /// `write` initialises all of them.
    pub unsafe fn written(len: usize, write: impl FnOnce(&mut [MaybeUninit<T>])) -> Self {
        let mut written = Self::with_capacity(len);
        write(&mut written.data.spare_capacity_mut()[..len]);
        // SAFETY: the capacity suffices, and the caller's `write` initialised the values.
        unsafe { written.data.set_len(written.start + len) };
        written
    }

    fn with_capacity(len: usize) -> Self {
        let mut data: Vec<T> = Vec::with_capacity(len + LINE / size_of::<T>());
        let start = data.as_ptr().align_offset(LINE).min(data.capacity() - len);
        data.resize(start, T::default());
        Self { data, start }
    }
}

impl<T> Deref for Aligned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.data[self.start..]
    }
}

impl<T> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.data[self.start..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_begin_on_a_line() {
        for len in [0, 1, 15, 16, 17, 1000] {
            let x: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let copy = Aligned::copy(&x);
            assert_eq!(*copy, x[..]);
            assert!(len == 0 || copy.as_ptr().align_offset(LINE) == 0, "{len}");
        }
    }
}
