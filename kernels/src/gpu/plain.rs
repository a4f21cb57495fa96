/// Element types of a device's buffers: any bytes are a value, and they have no padding.
///
/// # Safety
/// Exactly that.
pub unsafe trait Plain: Copy {}

macro_rules! plain {
    ($($name:ty)*) => {
        $(
            // SAFETY: a number, or two of them.
            unsafe impl Plain for $name {}
        )*
    };
}

plain!(u8 i8 u16 i16 u32 i32 u64 f32 f64 half::f16 half::bf16 [i32; 2] [u32; 2] [f64; 2]);
