//! Weight matrices in the types of their files.

use std::sync::Arc;

use foretoken_kernels::quant::{PackedMatrix, WeightType, dequantize_packed_row};
use foretoken_kernels::{ElementType, Elements, Isa};
use rayon::prelude::*;

use super::Bytes;
use super::arena::{Allocation, Arena};
use super::pod::elements;
use super::unpacked::Unpacked;

/// A stack of `count` matrices `(outputs, inputs)`; most weights are one.
///
/// Floating-point matrices are read from the mapped file. Quantized ones are packed at load (the file's pages are
/// released) in panels of 16 interleaved rows, so that one vector load serves 16 outputs. Packed size equals the
/// file's, except that grid types are larger ([`WeightType::packed_bytes_for`]).
#[derive(Clone)]
pub struct Weight {
    name: Arc<str>, // the tensor's, for errors
    storage: Storage,
    count: usize,
    outputs: usize,
    inputs: usize,
    factors: Arc<[f32]>, // one per equal run of rows, per matrix or shared by all; empty: none
}

/// Storage of a [`Weight`].
#[derive(Clone)]
pub(crate) enum Storage {
    /// Elements.
    Float(ElementType, Bytes),
    /// Packed matrices, one after the other.
    Packed(WeightType, Arc<Allocation>),
    /// Rows as in the file: for gathered tables, and for matrices that are uploaded to a device.
    Unpacked(Unpacked),
}

/// The name of a weight that did not come from a checkpoint.
const UNNAMED: &str = "unnamed";

impl Storage {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Float(_, bytes) => bytes.as_slice(),
            Self::Packed(_, bytes) => bytes.as_slice(),
            Self::Unpacked(rows) => rows.bytes(),
        }
    }
}

/// One matrix of a [`Weight`], ready for multiplication.
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
    /// Packed quantized rows, with one factor per equal run of rows.
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

    /// Bytes read by a multiplication.
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
        let bytes = if aligned {
            bytes
        } else {
            let copy = Bytes::from(bytes.as_slice().to_vec());
            bytes.release_all();
            copy
        };
        Some(Self::of(Storage::Float(element, bytes), [count, outputs, inputs]))
    }

    /// Floating-point matrices that are quantized with `isa` while packing.
    ///
    /// Returns `None` if their elements are not floats, or a row is not whole blocks.
    pub(crate) fn quantized(self, weight_type: WeightType, isa: Isa) -> Option<Unpacked> {
        match self.storage {
            Storage::Float(element, bytes) => Unpacked::floats(bytes, element, weight_type, self.inputs, isa),
            Storage::Packed(..) | Storage::Unpacked(..) => None,
        }
    }

    /// Matrices that are not packed: a table whose rows are gathered, or weights to be uploaded.
    /// `rows` are those of all matrices.
    pub(crate) fn unpacked(rows: Unpacked, [count, outputs]: [usize; 2]) -> Self {
        let inputs = rows.inputs();
        Self::of(Storage::Unpacked(rows), [count, outputs, inputs])
    }

    /// Packs matrices, on all threads of the current pool. `rows` are those of all matrices.
    ///
    /// Returns `None` if memory is exhausted.
    pub(crate) fn packed(arena: &mut Arena, rows: &Unpacked, [count, outputs]: [usize; 2]) -> Option<Self> {
        let (weight_type, inputs) = (rows.weight_type(), rows.inputs());
        let matrix = weight_type.packed_row_bytes(inputs)?.checked_mul(outputs)?;
        let mut packed = arena.allocate(matrix.checked_mul(count)?)?;
        let matrices = packed.as_mut_slice().par_chunks_mut(matrix.max(1)).enumerate();
        matrices.for_each(|(index, packed)| rows.pack(index * outputs, packed));
        rows.release();
        Some(Self::of(Storage::Packed(weight_type, Arc::new(packed)), [count, outputs, inputs]))
    }

    fn of(storage: Storage, [count, outputs, inputs]: [usize; 3]) -> Self {
        Self { name: UNNAMED.into(), storage, count, outputs, inputs, factors: [].into() }
    }

    /// The quantized weight with row factors: one for all, or the same number for each matrix, in
    /// order, each for an equal run of rows.
    ///
    /// # Panics
    /// If the weight is not quantized, or the runs are not equal.
    pub(crate) fn scaled(self, factors: Vec<f32>) -> Self {
        let runs = factors.len() / self.count.max(1);
        assert!(self.element().is_none(), "weight: only quantized matrices have factors");
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

    /// The same weight with its tensor's name, for errors.
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

    /// Bytes of the whole stack, packed if it is quantized.
    pub fn bytes(&self) -> usize {
        match &self.storage {
            Storage::Unpacked(rows) => rows.packed_row_bytes() * self.outputs * self.count,
            storage => storage.bytes().len(),
        }
    }

    /// The element type, if floating point.
    pub fn element(&self) -> Option<ElementType> {
        match self.storage {
            Storage::Float(element, _) => Some(element),
            _ => None,
        }
    }

    /// Its storage, for upload to a device.
    pub(crate) fn storage(&self) -> &Storage {
        &self.storage
    }

    /// Matrix `index` of the stack.
    ///
    /// # Panics
    /// If there is no such matrix, or the weight is not packed.
    pub fn matrix(&self, index: usize) -> Matrix<'_> {
        assert!(index < self.count, "weight: no matrix {index}");
        match &self.storage {
            Storage::Float(element, bytes) => {
                let size = self.outputs * self.inputs;
                let elements = elements(*element, bytes.as_slice());
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
            Storage::Unpacked(..) => panic!("weight: unpacked matrices cannot be multiplied"),
        }
    }

    /// Row `row` of the first matrix, widened into `out` `(inputs)`.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        match &self.storage {
            Storage::Float(element, bytes) => {
                elements(*element, bytes.as_slice()).slice(row * self.inputs..(row + 1) * self.inputs).widen(out);
            }
            Storage::Unpacked(rows) => rows.row(row, out),
            Storage::Packed(..) => match self.matrix(0) {
                Matrix::Packed(matrix) | Matrix::Scaled(matrix, _) => dequantize_packed_row(&matrix, row, out),
                Matrix::Float { .. } => {}
            },
        }
        let factors = self.factors_of(0);
        if !factors.is_empty() {
            let factor = factors[row * factors.len() / self.outputs];
            out.iter_mut().for_each(|x| *x *= factor);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::Recorded;

    /// Also the pages of two chunks, which no chunk releases.
    #[test]
    fn packing_releases_every_page() {
        const PAGE: usize = 4096;
        let (inputs, outputs) = (96, 15_000);
        let len = WeightType::Q4_0.bytes_for(outputs, inputs).expect("whole blocks");
        let (file, bytes) = Recorded::new(vec![0; len], 0..len);
        let rows = Unpacked::quantized(bytes, WeightType::Q4_0, outputs, inputs).expect("as long as its shape");
        Weight::packed(&mut Arena::default(), &rows, [1, outputs]).expect("memory");
        let released = file.released();
        let is_released =
            |page: usize| released.iter().any(|range| range.start <= page * PAGE && (page + 1) * PAGE <= range.end);
        assert!((0..len / PAGE).all(is_released), "{released:?}");
    }

    #[test]
    fn copies_of_unaligned_floats_release_the_file() {
        let values = [1.5f32, -2.0, 0.25];
        for is_aligned in [true, false] {
            let mut buffer = vec![0u8; 16];
            let start = buffer.as_ptr().align_offset(size_of::<f32>()) + usize::from(!is_aligned);
            let range = start..start + size_of_val(&values);
            buffer[range.clone()].copy_from_slice(values.map(f32::to_le_bytes).as_flattened());
            let (file, bytes) = Recorded::new(buffer, range.clone());
            let weight = Weight::float(bytes, ElementType::F32, [1, 1, 3]).expect("as long as its shape");
            let mut row = [0.0; 3];
            weight.row(0, &mut row);
            assert_eq!(row, values);
            assert_eq!(file.released(), if is_aligned { vec![] } else { vec![range] });
        }
    }
}
