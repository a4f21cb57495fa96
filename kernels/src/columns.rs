//! A column range of a row-major output matrix, so that threads can divide it.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

/// The columns `range` of a row-major `(rows, width)` matrix, mutably. Two values of one matrix never share a column:
/// they are constructed from all of the borrowed memory, or by [`ColumnsMut::split_at`].
pub struct ColumnsMut<'a> {
    data: *mut MaybeUninit<f32>,
    rows: usize,
    width: usize,
    first: usize, // the column at `data`
    range: Range<usize>,
    _matrix: PhantomData<&'a mut [MaybeUninit<f32>]>,
}

/// Columns that a product has written.
pub struct WrittenColumns<'a>(ColumnsMut<'a>);

// SAFETY: a value has exclusive access to its own columns of the borrowed matrix, as a `&mut [f32]`
// has to its elements.
unsafe impl Send for ColumnsMut<'_> {}

impl<'a> ColumnsMut<'a> {
    /// All columns of `matrix`, which is `(rows, width)` row-major.
    ///
    /// # Panics
    /// If `matrix` is not `rows * width` long.
    pub fn new(matrix: &'a mut [f32], rows: usize, width: usize) -> Self {
        let (data, len) = (matrix.as_mut_ptr().cast(), matrix.len());
        // SAFETY: the same memory, borrowed for as long; only this crate has `row_mut`, and writes
        // initialised floats to it.
        Self::uninit(unsafe { std::slice::from_raw_parts_mut(data, len) }, rows, width)
    }

    /// As [`ColumnsMut::new`], for uninitialised memory: functions that take columns write all of them.
    ///
    /// # Panics
    /// If `matrix` is not `rows * width` long.
    pub fn uninit(matrix: &'a mut [MaybeUninit<f32>], rows: usize, width: usize) -> Self {
        Self::of_range(matrix, rows, 0..width)
    }

    /// The columns `range` of a wider matrix, of which `matrix` `(rows, range.len())` holds only these.
    ///
    /// # Panics
    /// If `matrix` is not `rows * range.len()` long.
    pub fn of_range(matrix: &'a mut [MaybeUninit<f32>], rows: usize, range: Range<usize>) -> Self {
        let width = range.len();
        assert_eq!(Some(matrix.len()), rows.checked_mul(width), "columns: not a (rows, width) matrix");
        Self { data: matrix.as_mut_ptr(), rows, width, first: range.start, range, _matrix: PhantomData }
    }

    /// The same columns, for a shorter time.
    pub(crate) fn reborrow(&mut self) -> ColumnsMut<'_> {
        ColumnsMut { range: self.range.clone(), ..*self }
    }

    /// The same columns as floats.
    ///
    /// # Safety
    /// All of them are written.
    pub(crate) unsafe fn assume_written(self) -> WrittenColumns<'a> {
        WrittenColumns(self)
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

    /// Columns of the matrix in memory.
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
        let start = row * self.width + self.range.start - self.first;
        // SAFETY: `row < rows` and `range` lies within `first..first + width`, so the elements are inside the matrix;
        // no other value has these columns, and `&mut self` excludes a second slice.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), self.range.len()) }
    }
}

impl WrittenColumns<'_> {
    /// The columns held, as [`ColumnsMut::range`].
    pub fn range(&self) -> Range<usize> {
        self.0.range()
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.0.rows()
    }

    /// The held columns of one row.
    ///
    /// # Panics
    /// If `row` is out of range.
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        // SAFETY: `assume_written`'s caller has written them.
        unsafe { self.0.row_mut(row).assume_init_mut() }
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

    #[test]
    fn columns_of_a_wider_matrix_have_its_indices() {
        let mut matrix = [MaybeUninit::new(0.0); 2 * 3];
        let (mut left, mut right) = ColumnsMut::of_range(&mut matrix, 2, 7..10).split_at(8);
        assert_eq!((left.range(), right.range()), (7..8, 8..10));
        for row in 0..2 {
            left.row_mut(row).fill(MaybeUninit::new(1.0));
            right.reborrow().row_mut(row).fill(MaybeUninit::new(row as f32));
        }
        // SAFETY: the loop wrote both rows.
        let mut right = unsafe { right.assume_written() };
        assert_eq!((right.rows(), right.range()), (2, 8..10));
        assert_eq!(right.row_mut(0), [0.0; 2]);
        // SAFETY: the loop wrote every column of both rows.
        assert_eq!(matrix.map(|x| unsafe { x.assume_init() }), [1., 0., 0., 1., 1., 1.]);
    }
}
