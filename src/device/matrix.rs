//! Weights on the device, and the rows that meet them.

use std::cell::Cell;

use foretoken_kernels::ElementType;
use foretoken_kernels::gpu::matmul::{Activations, Buckets, Matrix, matmul, matmul_buckets, quantize};
use foretoken_kernels::gpu::matmul_float::{self, FloatMatrix};
use foretoken_kernels::gpu::pointwise::{TableType, embed};
use foretoken_kernels::gpu::{Span, Unfit};
use foretoken_kernels::quant::{ActivationType, PANEL_ROWS, WeightType, pack};

use super::{Buffer, Device, Work};
use crate::nn::{Stored, Weight};
use crate::{Error, Result};

/// Bytes that are packed before they are sent.
const PIECE: usize = 16 << 20;

/// A stack of matrices `(outputs, inputs)`, in the bytes that the CPU has them in.
pub(crate) struct Matrices {
    kind: Kind,
    count: usize,
    outputs: usize,
    inputs: usize,
    memory: Buffer<u8>,
}

#[derive(Clone, Copy)]
enum Kind {
    Float(ElementType),
    Packed(WeightType),
}

impl Matrices {
    /// Sends `weight`, of the tensor `name`, to the device.
    ///
    /// # Errors
    /// If the kernels do not read its type, or memory does not reach.
    pub fn upload(device: &dyn Device, name: &str, weight: &Weight) -> Result<Self> {
        let (count, outputs, inputs) = (weight.count(), weight.outputs(), weight.inputs());
        let shape = (count, outputs, inputs);
        let refuse = |problem: Unfit| {
            let remedy = "quantize to q4_0, q5_0, q8_0, q4_k, q5_k or q6_k, or use the CPU";
            Error::Device { device: device.name(), problem: format!("tensor {name}: {problem}; {remedy}") }
        };
        // Before memory is asked for: what no kernel reads need not be sent.
        let check = |weight_type: WeightType| {
            if !outputs.is_multiple_of(PANEL_ROWS) {
                let problem = format!("{outputs} quantized rows are no multiple of {PANEL_ROWS}; use the CPU");
                return Err(Error::Device { device: device.name(), problem: format!("tensor {name}: {problem}") });
            }
            let bytes = Matrix::bytes(weight_type, outputs, inputs).and_then(|one| one.checked_mul(count));
            Matrix::new(weight_type, shape, Span::new(0, bytes.unwrap_or(0))).map(drop).map_err(refuse)
        };
        let (memory, kind) = match weight.stored() {
            Stored::Float(element, bytes) => {
                FloatMatrix::new(element, shape, Span::new(0, bytes.len())).map_err(refuse)?;
                (Buffer::of(device, bytes)?, Kind::Float(element))
            }
            Stored::Packed(weight_type, bytes) => {
                check(weight_type)?;
                (Buffer::of(device, bytes)?, Kind::Packed(weight_type))
            }
            Stored::Rows(weight_type, bytes) => {
                check(weight_type)?;
                let memory = Buffer::new(device, bytes.len())?;
                let row = bytes.len() / outputs;
                let piece = (PIECE / row).next_multiple_of(PANEL_ROWS).max(PANEL_ROWS) * row;
                let mut panels = Vec::new();
                for (i, rows) in bytes.chunks(piece).enumerate() {
                    panels.resize(rows.len(), 0);
                    pack(weight_type, inputs, rows, &mut panels);
                    memory.write(i * piece, &panels)?;
                }
                (memory, Kind::Packed(weight_type))
            }
        };
        Ok(Self { kind, count, outputs, inputs, memory })
    }

    fn float(&self, element: ElementType) -> Result<FloatMatrix, Unfit> {
        FloatMatrix::new(element, (self.count, self.outputs, self.inputs), self.memory.span())
    }

    fn packed(&self, weight_type: WeightType) -> Result<Matrix, Unfit> {
        Matrix::new(weight_type, (self.count, self.outputs, self.inputs), self.memory.span())
    }

    /// Rows of a matrix.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Columns of a matrix.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// `y = x w^T` of the first matrix: `(rows, outputs)`.
    pub fn multiply(&self, work: &Work, x: &Input<'_>, y: Span<f32>) -> Result<()> {
        match self.kind {
            Kind::Float(element) => {
                work.run(self.float(element).and_then(|matrix| matmul_float::matmul(&matrix, (x.x, x.rows), y)))
            }
            Kind::Packed(weight_type) => {
                let x = x.quantized(work, weight_type.activation_type())?;
                work.run(self.packed(weight_type).and_then(|matrix| matmul(&matrix, &x, y)))
            }
        }
    }

    /// `y[e] = x[rows[e]] w[matrix of e's bucket]^T` for at most `most` buckets of `entries` entries: `(entries, outputs)`.
    pub fn multiply_buckets(
        &self,
        work: &Work,
        x: &Input<'_>,
        lists: &Buckets,
        size: (usize, usize),
        y: Span<f32>,
    ) -> Result<()> {
        match self.kind {
            Kind::Float(element) => work.run(
                self.float(element)
                    .and_then(|matrix| matmul_float::matmul_buckets(&matrix, (x.x, x.rows), lists, size, y)),
            ),
            Kind::Packed(weight_type) => {
                let x = x.quantized(work, weight_type.activation_type())?;
                work.run(self.packed(weight_type).and_then(|matrix| matmul_buckets(&matrix, &x, lists, size, y)))
            }
        }
    }

    /// The rows of `count` ids, times `scale`: `(count, inputs)`.
    pub fn look_up(&self, work: &Work, (ids, count): (Span<u32>, usize), scale: f32, y: Span<f32>) -> Result<()> {
        let table = match self.kind {
            Kind::Float(element) => TableType::Float(element),
            Kind::Packed(weight_type) => TableType::Quantized(weight_type),
        };
        work.run(embed(table, self.memory.span(), (self.outputs, self.inputs), (ids, count), scale, y))
    }
}

/// Room for rows in 8 bits, of either type.
pub(crate) struct Quants {
    q8_1: QuantsOf,
    q8_k: QuantsOf,
}

struct QuantsOf {
    quants: Buffer<u32>,
    scales: Buffer<f32>,
    sums: Buffer<i16>,
}

impl Quants {
    /// Room for `rows` rows of `width`, or as many elements in other shapes.
    pub fn new(device: &dyn Device, rows: usize, width: usize) -> Result<Self> {
        let of = || -> Result<QuantsOf> {
            // Both types fit, and so do rows that are no whole blocks.
            let width = width.next_multiple_of(256);
            Ok(QuantsOf {
                quants: Buffer::new(device, Activations::quants_len(rows, width))?,
                scales: Buffer::new(device, Activations::scales_len(ActivationType::Q8_1, rows, width))?,
                sums: Buffer::new(device, Activations::sums_len(ActivationType::Q8_K, rows, width))?,
            })
        };
        Ok(Self { q8_1: of()?, q8_k: of()? })
    }
}

/// Rows that meet several matrices: each type of 8-bit form is made once. The next input takes its room.
pub(crate) struct Input<'a> {
    x: Span<f32>, // (rows, width)
    rows: usize,
    width: usize,
    room: &'a Quants,
    q8_1: Cell<Option<Activations>>,
    q8_k: Cell<Option<Activations>>,
}

impl<'a> Input<'a> {
    pub fn new(room: &'a Quants, x: Span<f32>, (rows, width): (usize, usize)) -> Self {
        Self { x, rows, width, room, q8_1: Cell::new(None), q8_k: Cell::new(None) }
    }

    fn quantized(&self, work: &Work, kind: ActivationType) -> Result<Activations> {
        let (made, room) = match kind {
            ActivationType::Q8_1 => (&self.q8_1, &self.room.q8_1),
            ActivationType::Q8_K => (&self.q8_k, &self.room.q8_k),
        };
        if let Some(activations) = made.get() {
            return Ok(activations);
        }
        let room = (room.quants.span(), room.scales.span(), room.sums.span());
        let activations = Activations::new(kind, (self.rows, self.width), room)
            .map_err(|problem| super::unfit(work.device(), "activations", &problem))?;
        work.run(quantize(self.x, &activations))?;
        made.set(Some(activations));
        Ok(activations)
    }
}
