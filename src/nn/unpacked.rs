//! Rows of quantized matrices before they are packed.

use std::ops::Range;

use foretoken_kernels::quant::{PANEL_ROWS, WeightType, dequantize_row, pack, quantize_row};
use foretoken_kernels::{ElementType, Isa};
use rayon::prelude::*;

use super::Bytes;
use super::pod::elements;

/// Rows as stored in a file, and the type they are packed in. They are read while packing, a few at a time.
#[derive(Clone)]
pub(crate) struct Unpacked {
    weight_type: WeightType,
    inputs: usize,
    row_bytes: usize, // in the file
    stored: Stored,
    bytes: Bytes,
}

#[derive(Clone, Copy)]
enum Stored {
    /// In the type they are packed in.
    Quantized,
    /// As floats, quantized before packing.
    Floats(ElementType, Isa),
}

/// Bytes packed at a time: source and result stay in the L2 cache.
const CHUNK_BYTES: usize = 256 << 10;

impl Unpacked {
    /// Quantized rows in the file's layout.
    ///
    /// Returns `None` if `bytes` is not the bytes of `(rows, inputs)`.
    pub fn quantized(bytes: Bytes, weight_type: WeightType, rows: usize, inputs: usize) -> Option<Self> {
        let fits = weight_type.bytes_for(rows, inputs) == Some(bytes.as_slice().len());
        let row_bytes = weight_type.row_bytes(inputs).filter(|_| fits)?;
        Some(Self { weight_type, inputs, row_bytes, stored: Stored::Quantized, bytes })
    }

    /// Rows of floats, quantized to `weight_type` with `isa`. `bytes` is aligned for `element`.
    ///
    /// Returns `None` if a row is not whole blocks.
    pub(super) fn floats(
        bytes: Bytes,
        element: ElementType,
        weight_type: WeightType,
        inputs: usize,
        isa: Isa,
    ) -> Option<Self> {
        weight_type.row_bytes(inputs)?;
        Some(Self {
            weight_type,
            inputs,
            row_bytes: inputs * element.size(),
            stored: Stored::Floats(element, isa),
            bytes,
        })
    }

    /// The type the rows are packed in.
    pub fn weight_type(&self) -> WeightType {
        self.weight_type
    }

    /// Columns.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Bytes of a row, packed.
    pub fn packed_row_bytes(&self) -> usize {
        self.weight_type.packed_row_bytes(self.inputs).unwrap_or(0)
    }

    /// The file's bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        self.bytes.as_slice()
    }

    /// Packs rows from `first` on, as many as fit in `packed`, on all threads of the current pool. The
    /// file's pages are released as they are read, except those that two chunks share; reading the next chunk may map
    /// some again.
    ///
    /// # Panics
    /// If there are fewer rows.
    pub(crate) fn pack(&self, first: usize, packed: &mut [u8]) {
        let row = self.packed_row_bytes().max(1);
        let rows = (CHUNK_BYTES / row).next_multiple_of(PANEL_ROWS);
        packed.par_chunks_mut(rows * row).enumerate().for_each(|(chunk, packed)| {
            let first = first + chunk * rows;
            let rows = first..first + packed.len() / row;
            let source = rows.start * self.row_bytes..rows.end * self.row_bytes;
            match self.stored {
                Stored::Quantized => pack(self.weight_type, self.inputs, &self.bytes()[source.clone()], packed),
                Stored::Floats(element, isa) => self.quantize(element, isa, rows, packed),
            }
            self.bytes.release(source);
        });
    }

    /// Releases the file's pages of all rows.
    pub(super) fn release(&self) {
        self.bytes.release_all();
    }

    /// Quantizes floats and packs them, a panel at a time.
    fn quantize(&self, element: ElementType, isa: Isa, rows: Range<usize>, packed: &mut [u8]) {
        let Some(row_bytes) = self.weight_type.row_bytes(self.inputs) else { return };
        let packed_row = self.packed_row_bytes().max(1);
        let mut quantized = vec![0; PANEL_ROWS * row_bytes];
        let mut floats = vec![0.0; self.inputs];
        for (panel, packed) in packed.chunks_mut(PANEL_ROWS * packed_row).enumerate() {
            let quantized = &mut quantized[..packed.len() / packed_row * row_bytes];
            for (i, out) in quantized.chunks_exact_mut(row_bytes).enumerate() {
                self.quantize_row(element, isa, rows.start + panel * PANEL_ROWS + i, &mut floats, out);
            }
            pack(self.weight_type, self.inputs, quantized, packed);
        }
    }

    fn quantize_row(&self, element: ElementType, isa: Isa, row: usize, floats: &mut [f32], out: &mut [u8]) {
        elements(element, &self.bytes()[row * self.row_bytes..(row + 1) * self.row_bytes]).widen(floats);
        quantize_row(isa, self.weight_type, floats, out);
    }

    /// Row `row` in the packed type's precision, widened into `out` `(inputs)`.
    ///
    /// # Panics
    /// If there is no such row.
    pub(super) fn row(&self, row: usize, out: &mut [f32]) {
        match self.stored {
            Stored::Quantized => {
                dequantize_row(self.weight_type, &self.bytes()[row * self.row_bytes..(row + 1) * self.row_bytes], out);
            }
            Stored::Floats(element, isa) => {
                let mut quantized = vec![0; self.weight_type.row_bytes(self.inputs).unwrap_or(0)];
                let mut floats = vec![0.0; self.inputs];
                self.quantize_row(element, isa, row, &mut floats, &mut quantized);
                dequantize_row(self.weight_type, &quantized, out);
            }
        }
    }
}
