//! Floating-point element types of weights and K/V rows.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::UnknownName;

/// The floating-point types that weights and K/V rows are stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16: the upper 16 bits of a single.
    Bf16,
}

impl ElementType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            ElementType::F32 => 4,
            ElementType::F16 | ElementType::Bf16 => 2,
        }
    }

    /// Reads little-endian elements of any alignment; bytes after the last whole one are ignored.
    pub fn read(self, bytes: &[u8]) -> Vec<f32> {
        let mut out = vec![0.0; bytes.len() / self.size()];
        self.read_to(bytes, &mut out);
        out
    }

    /// Reads little-endian elements of any alignment to `out`, as many as both have.
    pub fn read_to(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            ElementType::F32 => {
                out.iter_mut().zip(bytes.as_chunks().0).for_each(|(out, x)| *out = f32::from_le_bytes(*x))
            }
            ElementType::F16 => {
                out.iter_mut().zip(bytes.as_chunks().0).for_each(|(out, x)| *out = f16::from_le_bytes(*x).to_f32());
            }
            ElementType::Bf16 => {
                out.iter_mut().zip(bytes.as_chunks().0).for_each(|(out, x)| *out = bf16::from_le_bytes(*x).to_f32());
            }
        }
    }

    /// Writes `x` to `out` as little-endian elements, rounded to nearest even; as many as both have.
    pub fn write(self, x: &[f32], out: &mut [u8]) {
        match self {
            ElementType::F32 => out.as_chunks_mut().0.iter_mut().zip(x).for_each(|(out, x)| *out = x.to_le_bytes()),
            ElementType::F16 => {
                out.as_chunks_mut().0.iter_mut().zip(x).for_each(|(out, x)| *out = f16::from_f32(*x).to_le_bytes());
            }
            ElementType::Bf16 => {
                out.as_chunks_mut().0.iter_mut().zip(x).for_each(|(out, x)| *out = bf16::from_f32(*x).to_le_bytes());
            }
        }
    }
}

impl std::str::FromStr for ElementType {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match name.to_ascii_lowercase().as_str() {
            "f32" => Ok(ElementType::F32),
            "f16" => Ok(ElementType::F16),
            "bf16" => Ok(ElementType::Bf16),
            _ => {
                let problem = format!("{name:?} is unknown; expected one of f32, f16, bf16");
                Err(UnknownName { what: "element type", problem })
            }
        }
    }
}

/// A slice of one of the [`ElementType`]s.
#[derive(Clone, Copy, Debug)]
pub enum Elements<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// Half precision.
    F16(&'a [f16]),
    /// bf16.
    Bf16(&'a [bf16]),
}

impl<'a> Elements<'a> {
    /// Number of elements.
    pub fn len(self) -> usize {
        match self {
            Elements::F32(x) => x.len(),
            Elements::F16(x) => x.len(),
            Elements::Bf16(x) => x.len(),
        }
    }

    /// Their type.
    pub fn element_type(self) -> ElementType {
        match self {
            Elements::F32(_) => ElementType::F32,
            Elements::F16(_) => ElementType::F16,
            Elements::Bf16(_) => ElementType::Bf16,
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The elements of `range`.
    ///
    /// # Panics
    /// If `range` is out of bounds.
    pub fn slice(self, range: std::ops::Range<usize>) -> Self {
        match self {
            Elements::F32(x) => Elements::F32(&x[range]),
            Elements::F16(x) => Elements::F16(&x[range]),
            Elements::Bf16(x) => Elements::Bf16(&x[range]),
        }
    }

    /// Converts every element to `f32` in `out`.
    ///
    /// # Panics
    /// If `out` has a different length.
    pub fn widen(self, out: &mut [f32]) {
        assert_eq!(self.len(), out.len(), "widen: lengths differ");
        match self {
            Elements::F32(x) => out.copy_from_slice(x),
            // In vectors where the processor can; a call for each element otherwise.
            Elements::F16(x) => x.convert_to_f32_slice(out),
            Elements::Bf16(x) => out.iter_mut().zip(x).for_each(|(o, x)| *o = x.to_f32()),
        }
    }
}
