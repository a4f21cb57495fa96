//! Rows that vectors are read from over and over.

use std::ops::{Deref, DerefMut};

/// Bytes of a cache line.
const LINE: usize = 64;

/// Numbers that begin on a cache line. A vector that straddles two lines takes two reads, and at 64 bytes every vector of a
/// row that begins elsewhere does: products of 16 rows ran at half the speed.
pub struct Aligned<T> {
    data: Vec<T>,
    start: usize,
}

impl<T: Copy + Default> Aligned<T> {
    /// A copy.
    pub fn copy(x: &[T]) -> Self {
        let mut copy = Self::room(x.len());
        copy.data.extend_from_slice(x);
        copy
    }

    /// Zeros.
    pub fn zeros(len: usize) -> Self {
        let mut zeros = Self::room(len);
        zeros.data.resize(zeros.start + len, T::default());
        zeros
    }

    fn room(len: usize) -> Self {
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
