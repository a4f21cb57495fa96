//! A column range of a row-major output matrix, so that threads can divide it.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

/// The columns `range` of a row-major `(rows, width)` matrix, mutably. Two values of one matrix never share a column:
/// they are constructed from the whole matrix, or by [`ColumnsMut::split_at`].
pub struct ColumnsMut<'a> {
    data: *mut MaybeUninit<f32>,
    rows: usize,
    width: usize,
    range: Range<usize>,
    _matrix: PhantomData<&'a mut [MaybeUninit<f32>]>,
}

// SAFETY: a value has exclusive access to its own columns of the borrowed matrix, as a `&mut [f32]` has to its elements.
unsafe impl Send for ColumnsMut<'_> {}

impl<'a> ColumnsMut<'a> {
    /// All columns of `matrix`, which is `(rows, width)` row-major.
    ///
    /// # Panics
    /// If `matrix` is not `rows * width` long.
    pub fn new(matrix: &'a mut [f32], rows: usize, width: usize) -> Self {
        let (data, len) = (matrix.as_mut_ptr().cast(), matrix.len());
        // SAFETY: the same memory, borrowed for as long; only this crate has `row_mut`, and writes initialised floats to it.
        Self::uninit(unsafe { std::slice::from_raw_parts_mut(data, len) }, rows, width)
    }

    /// As [`ColumnsMut::new`], for uninitialised memory: functions that take columns write all of them.
    ///
    /// # Panics
    /// If `matrix` is not `rows * width` long.
    pub fn uninit(matrix: &'a mut [MaybeUninit<f32>], rows: usize, width: usize) -> Self {
        assert_eq!(Some(matrix.len()), rows.checked_mul(width), "columns: not a (rows, width) matrix");
        Self { data: matrix.as_mut_ptr(), rows, width, range: 0..width, _matrix: PhantomData }
    }

    /// Splits into the columns before `column` and the rest; `column` is an index in the whole matrix.
    ///
    /// # Panics
    /// If `column` is outside [`ColumnsMut::range`].
    pub fn split_at(self, column: usize) -> (Self, Self) {
        assert!(self.range.start <= column && column <= self.range.end, "columns: split outside the range");
        let right = Self { range: column..self.range.end, ..self };
        (Self { range: self.range.start..column, ..self }, right)
    }

    /// The columns held, as indices in the whole matrix.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the whole matrix.
    #[cfg(target_arch = "x86_64")] // only read by AMX
    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// The held columns of one row.
    ///
    /// # Panics
    /// If `row` is out of range.
    #[inline]
    pub(crate) fn row_mut(&mut self, row: usize) -> &mut [MaybeUninit<f32>] {
        assert!(row < self.rows, "columns: no row {row}");
        // SAFETY: `row < rows` and `range` lies within `width`, so the elements are inside the matrix; no other value
        // has these columns, and `&mut self` excludes a second slice.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(row * self.width + self.range.start), self.range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_columns_fill_one_matrix() {
        let mut matrix = vec![0.0; 2 * 5];
        let (mut left, mut right) = ColumnsMut::new(&mut matrix, 2, 5).split_at(2);
        for row in 0..2 {
            left.row_mut(row).fill(MaybeUninit::new(1.0 + row as f32));
            right.row_mut(row).fill(MaybeUninit::new(-1.0));
        }
        assert_eq!(matrix, [1., 1., -1., -1., -1., 2., 2., -1., -1., -1.]);
    }
}
