//! Weight matrices in the types of their files.

use std::ops::Range;
use std::sync::Arc;

use foretoken_kernels::quant::{PANEL_ROWS, PackedMatrix, WeightType, dequantize_packed_row, dequantize_row, pack};
use foretoken_kernels::{ElementType, Elements};
use rayon::prelude::*;

use super::Bytes;
use super::arena::{Allocation, Arena};
use super::pod::cast;

/// A stack of `count` matrices `(outputs, inputs)`; most weights are one.
///
/// Floating-point matrices are read from the mapped file. Quantized ones are packed at load (the file's pages are released):
/// panels of 16 interleaved rows, so that one vector load serves 16 outputs. Packed they are as large as in the file, those of
/// grid-coded types larger ([`WeightType::packed_bytes_for`]).
#[derive(Clone)]
pub struct Weight {
    name: Arc<str>, // the tensor's, for errors
    storage: Storage,
    count: usize,
    outputs: usize,
    inputs: usize,
    factors: Arc<[f32]>, // of equal runs of rows, of every matrix or of all alike; empty: none
}

#[derive(Clone)]
enum Storage {
    Float(ElementType, Bytes),
    Packed(WeightType, Arc<Allocation>),
    /// Rows in the file's layout: for tables whose rows are gathered, never multiplied.
    Rows(WeightType, Bytes),
}

/// The name of a weight that did not come from a checkpoint.
const UNNAMED: &str = "unnamed";

/// The bytes of a [`Weight`] in their layout.
pub(crate) enum Stored<'a> {
    /// Elements.
    Float(ElementType, &'a [u8]),
    /// Packed matrices, one after the other.
    Packed(WeightType, &'a [u8]),
    /// Rows in the file's layout.
    Rows(WeightType, &'a [u8]),
}

impl<'a> Stored<'a> {
    /// The bytes.
    pub(crate) fn bytes(&self) -> &'a [u8] {
        match self {
            Self::Float(_, bytes) | Self::Packed(_, bytes) | Self::Rows(_, bytes) => bytes,
        }
    }
}

/// One matrix of a [`Weight`], ready to be multiplied.
#[derive(Clone, Copy)]
pub enum Matrix<'a> {
    /// Rows of floats.
    Float {
        /// `(outputs, inputs)`.
        elements: Elements<'a>,
        /// Columns.
        inputs: usize,
    },
    /// Packed quantized rows.
    Packed(PackedMatrix<'a>),
    /// Packed quantized rows, and the factors of as many equal runs of them.
    Scaled(PackedMatrix<'a>, &'a [f32]),
}

impl Matrix<'_> {
    /// Rows.
    pub fn outputs(&self) -> usize {
        match self {
            Matrix::Float { elements, inputs } => elements.len() / (*inputs).max(1),
            Matrix::Packed(matrix) | Matrix::Scaled(matrix, _) => matrix.outputs(),
        }
    }

    /// Columns.
    pub fn inputs(&self) -> usize {
        match self {
            Matrix::Float { inputs, .. } => *inputs,
            Matrix::Packed(matrix) | Matrix::Scaled(matrix, _) => matrix.inputs(),
        }
    }

    /// Bytes that a multiplication reads.
    pub fn bytes(&self) -> usize {
        match self {
            Matrix::Float { elements, .. } => elements.len() * elements.element_type().size(),
            Matrix::Packed(matrix) | Matrix::Scaled(matrix, _) => matrix.bytes().len(),
        }
    }
}

impl Weight {
    /// Floating-point matrices, read in place; bytes that are not aligned for the element type are copied once.
    ///
    /// Returns `None` if `bytes` is not `(count, outputs, inputs)` elements long.
    pub fn float(bytes: Bytes, element: ElementType, [count, outputs, inputs]: [usize; 3]) -> Option<Self> {
        let size = count.checked_mul(outputs)?.checked_mul(inputs)?.checked_mul(element.size())?;
        if bytes.as_slice().len() != size {
            return None;
        }
        let aligned = bytes.as_slice().as_ptr().align_offset(element.size()) == 0;
        // Allocators align buffers for any element type; `cast` checks.
        let bytes = if aligned { bytes } else { Bytes::from(bytes.as_slice().to_vec()) };
        Some(Self::of(Storage::Float(element, bytes), [count, outputs, inputs]))
    }

    /// A quantized table in the file's layout.
    ///
    /// Returns `None` if `bytes` is not the bytes of `(outputs, inputs)`.
    pub fn table(bytes: Bytes, weight_type: WeightType, outputs: usize, inputs: usize) -> Option<Self> {
        let fits = weight_type.bytes_for(outputs, inputs) == Some(bytes.as_slice().len());
        fits.then(|| Self::of(Storage::Rows(weight_type, bytes), [1, outputs, inputs]))
    }

    /// Packs quantized matrices, on all threads of the current pool; the file's pages are released while they are read.
    ///
    /// Returns `None` if `bytes` is not the bytes of `(count, outputs, inputs)`, or there is no memory for a copy.
    pub fn packed(arena: &mut Arena, bytes: Bytes, weight_type: WeightType, shape: [usize; 3]) -> Option<Self> {
        let [_, outputs, inputs] = shape;
        let matrix = weight_type.bytes_for(outputs, inputs)?;
        if matrix.checked_mul(shape[0])? != bytes.as_slice().len() {
            return None;
        }
        Self::fill_packed(arena, weight_type, shape, |matrix_index, rows, panels| {
            let row = weight_type.row_bytes(inputs).unwrap_or(0);
            let start = matrix_index * matrix + rows.start * row;
            let source = start..start + rows.len() * row;
            pack(weight_type, inputs, &bytes.as_slice()[source.clone()], panels);
            bytes.release(source);
        })
    }

    /// Allocates packed matrices and has `fill(matrix, rows, packed bytes)` write them, a run of whole panels at a
    /// time.
    pub(crate) fn fill_packed(
        arena: &mut Arena,
        weight_type: WeightType,
        [count, outputs, inputs]: [usize; 3],
        fill: impl Fn(usize, Range<usize>, &mut [u8]) + Sync,
    ) -> Option<Self> {
        let row = weight_type.packed_row_bytes(inputs)?;
        let matrix = row.checked_mul(outputs)?;
        let mut packed = arena.take(matrix.checked_mul(count)?)?;
        let chunk_rows = (CHUNK_BYTES / row.max(1)).next_multiple_of(PANEL_ROWS);
        for (index, matrix) in packed.as_mut_slice().chunks_mut(matrix.max(1)).enumerate() {
            matrix.par_chunks_mut(chunk_rows * row).enumerate().for_each(|(chunk, bytes)| {
                let first = chunk * chunk_rows;
                fill(index, first..first + bytes.len() / row, bytes);
            });
        }
        let storage = Storage::Packed(weight_type, Arc::new(packed));
        Some(Self::of(storage, [count, outputs, inputs]))
    }

    fn of(storage: Storage, [count, outputs, inputs]: [usize; 3]) -> Self {
        Self { name: UNNAMED.into(), storage, count, outputs, inputs, factors: [].into() }
    }

    /// The packed weight with factors of its rows: one for all, or as many for each matrix, in order, each of an equal run of
    /// rows.
    ///
    /// # Panics
    /// If the weight is not packed, or the runs are not equal.
    pub(crate) fn scaled(self, factors: Vec<f32>) -> Self {
        let runs = factors.len() / self.count.max(1);
        assert!(matches!(self.storage, Storage::Packed(..)), "weight: only packed matrices have factors");
        assert!(factors.len() <= 1 || runs * self.count == factors.len() && self.outputs.is_multiple_of(runs));
        Self { factors: factors.into(), ..self }
    }

    /// The factors of the rows of matrix `index`.
    fn factors_of(&self, index: usize) -> &[f32] {
        match self.factors.len() {
            0 | 1 => &self.factors,
            all => &self.factors[index * (all / self.count)..][..all / self.count],
        }
    }

    /// The same weight with the name of its tensor, which errors mention.
    pub fn named(self, name: &str) -> Self {
        Self { name: name.into(), ..self }
    }

    /// The tensor's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Matrices in the stack.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Rows of a matrix.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Columns of a matrix.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Bytes of the whole stack.
    pub fn bytes(&self) -> usize {
        match &self.storage {
            Storage::Float(_, bytes) | Storage::Rows(_, bytes) => bytes.as_slice().len(),
            Storage::Packed(_, bytes) => bytes.as_slice().len(),
        }
    }

    /// The element type, where the elements are floats.
    pub fn element(&self) -> Option<ElementType> {
        match self.storage {
            Storage::Float(element, _) => Some(element),
            _ => None,
        }
    }

    /// The bytes, for upload to a device.
    pub(crate) fn stored(&self) -> Stored<'_> {
        match &self.storage {
            Storage::Float(element, bytes) => Stored::Float(*element, bytes.as_slice()),
            Storage::Packed(weight_type, bytes) => Stored::Packed(*weight_type, bytes.as_slice()),
            Storage::Rows(weight_type, bytes) => Stored::Rows(*weight_type, bytes.as_slice()),
        }
    }

    /// Matrix `index` of the stack.
    ///
    /// # Panics
    /// If there is no such matrix, or the weight is a [`Weight::table`].
    pub fn matrix(&self, index: usize) -> Matrix<'_> {
        assert!(index < self.count, "weight: no matrix {index}");
        match &self.storage {
            Storage::Float(element, bytes) => {
                let size = self.outputs * self.inputs;
                let elements = cast_elements(*element, bytes.as_slice());
                Matrix::Float { elements: elements.slice(index * size..(index + 1) * size), inputs: self.inputs }
            }
            Storage::Packed(weight_type, bytes) => {
                let bytes = bytes.as_slice();
                let size = bytes.len() / self.count;
                let bytes = &bytes[index * size..(index + 1) * size];
                let packed = PackedMatrix::new(*weight_type, self.outputs, self.inputs, bytes);
                match self.factors_of(index) {
                    [] => Matrix::Packed(packed),
                    factors => Matrix::Scaled(packed, factors),
                }
            }
            Storage::Rows(..) => panic!("weight: a table is not multiplied"),
        }
    }

    /// Row `row` of the first matrix, widened into `out` `(inputs)`.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        match &self.storage {
            Storage::Float(element, bytes) => {
                let elements = cast_elements(*element, bytes.as_slice());
                elements.slice(row * self.inputs..(row + 1) * self.inputs).widen(out);
            }
            Storage::Rows(weight_type, bytes) => {
                let size = bytes.as_slice().len() / self.outputs;
                dequantize_row(*weight_type, &bytes.as_slice()[row * size..(row + 1) * size], out);
            }
            Storage::Packed(..) => match self.matrix(0) {
                Matrix::Packed(matrix) => dequantize_packed_row(&matrix, row, out),
                Matrix::Scaled(matrix, factors) => {
                    dequantize_packed_row(&matrix, row, out);
                    let factor = factors[row * factors.len() / self.outputs];
                    out.iter_mut().for_each(|x| *x *= factor);
                }
                Matrix::Float { .. } => {}
            },
        }
    }
}

/// Bytes packed at a time: source and result stay in the L2 cache.
const CHUNK_BYTES: usize = 256 << 10;

fn cast_elements(element: ElementType, bytes: &[u8]) -> Elements<'_> {
    match element {
        ElementType::F32 => Elements::F32(cast(bytes)),
        ElementType::F16 => Elements::F16(cast(bytes)),
        ElementType::Bf16 => Elements::Bf16(cast(bytes)),
    }
}
