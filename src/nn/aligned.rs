//! Rows that vectors are read from over and over.

use std::ops::Deref;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Floats that begin on a cache line. A vector that straddles two lines takes two reads, and at 64 bytes every vector of a
/// row that begins elsewhere does: products of 16 rows ran at half the speed.
pub struct Aligned {
    data: Vec<f32>,
    start: usize,
}

impl Aligned {
    /// A copy.
    pub fn copy(x: &[f32]) -> Self {
        let mut data: Vec<f32> = Vec::with_capacity(x.len() + LINE / size_of::<f32>());
        let start = data.as_ptr().align_offset(LINE).min(data.capacity() - x.len());
        data.resize(start, 0.0);
        data.extend_from_slice(x);
        Self { data, start }
    }
}

impl Deref for Aligned {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.data[self.start..]
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
