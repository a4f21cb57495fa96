//! Bytes as numbers.

use half::{bf16, f16};

/// Types of numbers.
///
/// # Safety
/// Every bit pattern is a value, and there is no padding.
pub(crate) unsafe trait Plain: Copy {}

// SAFETY: an integer.
unsafe impl Plain for u8 {}
// SAFETY: all bits are a number, an infinity or a NaN.
unsafe impl Plain for f32 {}
// SAFETY: as for `f32`.
unsafe impl Plain for f16 {}
// SAFETY: as for `f32`.
unsafe impl Plain for bf16 {}

/// The numbers that `bytes` are.
///
/// # Panics
/// If `bytes` does not begin on a number's boundary, or is not a whole count of them.
pub(crate) fn cast<T: Plain>(bytes: &[u8]) -> &[T] {
    // SAFETY: `T: Plain`, so any bytes are values of it; `align_to` itself sees to alignment and length.
    let (before, numbers, after) = unsafe { bytes.align_to::<T>() };
    assert!(before.is_empty() && after.is_empty(), "cast: bytes off the boundaries of numbers");
    numbers
}

/// As [`cast`], to write.
///
/// # Panics
/// As [`cast`].
pub(crate) fn cast_mut<T: Plain>(bytes: &mut [u8]) -> &mut [T] {
    // SAFETY: as in `cast`; and any value of `T` that is written leaves initialised bytes, since there is no padding.
    let (before, numbers, after) = unsafe { bytes.align_to_mut::<T>() };
    assert!(before.is_empty() && after.is_empty(), "cast: bytes off the boundaries of numbers");
    numbers
}
