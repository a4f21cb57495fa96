//! Matrices where they lie.

use std::ops::Range;
use std::sync::Arc;

use foretoken_kernels::{ElementType, Elements};
use half::{bf16, f16};

/// A run of bytes inside something that keeps them alive: a mapped file, or a buffer.
#[derive(Clone)]
pub struct Bytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl Bytes {
    /// The bytes `range` of `owner`, or `None` if it has fewer.
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>, range: Range<usize>) -> Option<Self> {
        (*owner).as_ref().get(range.clone())?;
        Some(Self { owner, range })
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        let range = 0..bytes.len();
        Self { owner: Arc::new(bytes), range }
    }
}

/// A matrix `(outputs, inputs)`, row-major, in the type it was stored in.
#[derive(Clone)]
pub struct Weight {
    bytes: Bytes,
    element: ElementType,
    outputs: usize,
    inputs: usize,
}

impl Weight {
    /// Borrows the matrix from `bytes`; bytes that do not lie on the element's own boundary are copied once.
    ///
    /// Returns `None` if `bytes` is not `(outputs, inputs)` elements long.
    pub fn new(bytes: Bytes, element: ElementType, outputs: usize, inputs: usize) -> Option<Self> {
        let size = outputs.checked_mul(inputs)?.checked_mul(element.size())?;
        if bytes.as_slice().len() != size {
            return None;
        }
        let aligned = bytes.as_slice().as_ptr().align_offset(element.size()) == 0;
        // A new buffer of bytes comes from the allocator aligned for any element here; were it not, `elements` says so.
        let bytes = if aligned { bytes } else { Bytes::from(bytes.as_slice().to_vec()) };
        Some(Self { bytes, element, outputs, inputs })
    }

    /// Rows of the matrix.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Columns of the matrix.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// The stored type.
    pub fn element(&self) -> ElementType {
        self.element
    }

    /// All elements.
    pub fn elements(&self) -> Elements<'_> {
        let bytes = self.bytes.as_slice();
        match self.element {
            ElementType::F32 => Elements::F32(cast(bytes)),
            ElementType::F16 => Elements::F16(cast(bytes)),
            ElementType::Bf16 => Elements::Bf16(cast(bytes)),
        }
    }

    /// The elements of rows `rows`.
    ///
    /// # Panics
    /// If there are fewer rows.
    pub fn rows(&self, rows: Range<usize>) -> Elements<'_> {
        self.elements().slice(rows.start * self.inputs..rows.end * self.inputs)
    }
}

/// Types of which every bit pattern is a value, and which have no padding.
trait Plain {}
impl Plain for f32 {}
impl Plain for f16 {}
impl Plain for bf16 {}

fn cast<T: Plain>(bytes: &[u8]) -> &[T] {
    // SAFETY: `T: Plain`, so any bytes are values of it; `align_to` itself sees to alignment and length.
    let (before, elements, after) = unsafe { bytes.align_to::<T>() };
    assert!(before.is_empty() && after.is_empty(), "weights are aligned when they are loaded");
    elements
}
