//! Casts between bytes and plain old data.

use foretoken_kernels::{ElementType, Elements, Pod};

/// `bytes` as elements of `T`.
///
/// # Panics
/// If `bytes` is not aligned for `T`, or not a whole number of elements.
pub(crate) fn cast<T: Pod>(bytes: &[u8]) -> &[T] {
    // SAFETY: `T: Pod`, so any bytes are values of it; `align_to` handles alignment and length.
    let (before, elements, after) = unsafe { bytes.align_to::<T>() };
    assert!(before.is_empty() && after.is_empty(), "cast: bytes are misaligned, or not a whole number of elements");
    elements
}

/// As [`cast`], writable.
///
/// # Panics
/// As [`cast`].
pub(crate) fn cast_mut<T: Pod>(bytes: &mut [u8]) -> &mut [T] {
    // SAFETY: as in `cast`; and any value of `T` that is written leaves initialised bytes, since there is no padding.
    let (before, elements, after) = unsafe { bytes.align_to_mut::<T>() };
    assert!(before.is_empty() && after.is_empty(), "cast: bytes are misaligned, or not a whole number of elements");
    elements
}

/// The bytes as elements.
///
/// # Panics
/// As [`cast`].
pub(crate) fn elements(element: ElementType, bytes: &[u8]) -> Elements<'_> {
    match element {
        ElementType::F32 => Elements::F32(cast(bytes)),
        ElementType::F16 => Elements::F16(cast(bytes)),
        ElementType::Bf16 => Elements::Bf16(cast(bytes)),
    }
}
