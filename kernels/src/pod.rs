//! Types whose values may be read from any bytes and written as bytes.

/// Plain old data: every bit pattern is a value, and there is no padding.
///
/// # Safety
/// Every bit pattern of the type is a value, and the type has no padding bytes.
pub unsafe trait Pod: Copy {}

macro_rules! pod {
    ($($name:ty)*) => {
        $(
            // SAFETY: a number, or an array of numbers.
            unsafe impl Pod for $name {}
        )*
    };
}

pod!(u8 i8 u16 i16 u32 i32 u64 f32 f64 half::f16 half::bf16 [i32; 2] [i32; 4] [u32; 2] [f32; 2]);
