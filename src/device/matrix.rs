//! Weight matrices on the device, and their input rows.

use std::cell::Cell;

use foretoken_gpu::plan::matmul::{Activations, Buckets, Matrix, matmul, matmul_buckets, quantize};
use foretoken_gpu::plan::matmul_float::{self, FloatMatrix};
use foretoken_gpu::plan::pointwise::{TableType, embed};
use foretoken_gpu::{DeviceSlice, LaunchError};
use foretoken_kernels::ElementType;
use foretoken_kernels::quant::{ActivationType, PANEL_ROWS, WeightType, pack};

use super::{Buffer, Device, Launcher};
use crate::nn::{Stored, Weight};
use crate::{Error, Result};

/// Bytes packed per upload.
const CHUNK: usize = 16 << 20;

/// A stack of matrices `(outputs, inputs)`, in the CPU's layout.
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
    /// Uploads `weight` of the tensor `name`.
    ///
    /// # Errors
    /// If no kernel reads its type, or the device is out of memory.
    pub fn upload(device: &dyn Device, name: &str, weight: &Weight) -> Result<Self> {
        let (count, outputs, inputs) = (weight.count(), weight.outputs(), weight.inputs());
        let shape = (count, outputs, inputs);
        let no_memory = |error: Error| error.needed_for(|| format!("tensor {name} on {}", device.name()));
        let refuse = |problem: LaunchError| {
            let remedy = "quantize to q4_0, q5_0, q8_0, q4_k, q5_k or q6_k, or use the CPU";
            Error::Device { device: device.name(), problem: format!("tensor {name}: {problem}; {remedy}") }
        };
        // Checked before memory is allocated.
        let check = |weight_type: WeightType| {
            if !outputs.is_multiple_of(PANEL_ROWS) {
                let problem = format!("{outputs} quantized rows, not a multiple of {PANEL_ROWS}; use the CPU");
                return Err(Error::Device { device: device.name(), problem: format!("tensor {name}: {problem}") });
            }
            let bytes = Matrix::bytes(weight_type, outputs, inputs).and_then(|one| one.checked_mul(count));
            Matrix::new(weight_type, shape, DeviceSlice::new(0, bytes.unwrap_or(0))).map(drop).map_err(refuse)
        };
        let (memory, kind) = match weight.stored() {
            Stored::Float(element, bytes) => {
                FloatMatrix::new(element, shape, DeviceSlice::new(0, bytes.len())).map_err(refuse)?;
                (Buffer::of(device, bytes).map_err(no_memory)?, Kind::Float(element))
            }
            Stored::Packed(weight_type, bytes) => {
                check(weight_type)?;
                (Buffer::of(device, bytes).map_err(no_memory)?, Kind::Packed(weight_type))
            }
            Stored::Rows(weight_type, bytes) => {
                check(weight_type)?;
                let memory = Buffer::new(device, bytes.len()).map_err(no_memory)?;
                let row = bytes.len() / outputs;
                let chunk = (CHUNK / row).next_multiple_of(PANEL_ROWS).max(PANEL_ROWS) * row;
                let mut panels = Vec::new();
                for (i, rows) in bytes.chunks(chunk).enumerate() {
                    panels.resize(rows.len(), 0);
                    pack(weight_type, inputs, rows, &mut panels);
                    memory.write(i * chunk, &panels)?;
                }
                (memory, Kind::Packed(weight_type))
            }
        };
        Ok(Self { kind, count, outputs, inputs, memory })
    }

    fn float(&self, element: ElementType) -> Result<FloatMatrix, LaunchError> {
        FloatMatrix::new(element, (self.count, self.outputs, self.inputs), self.memory.slice())
    }

    fn packed(&self, weight_type: WeightType) -> Result<Matrix, LaunchError> {
        Matrix::new(weight_type, (self.count, self.outputs, self.inputs), self.memory.slice())
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
    pub fn multiply(&self, launcher: &Launcher, x: &Input<'_>, y: DeviceSlice<f32>) -> Result<()> {
        match self.kind {
            Kind::Float(element) => {
                launcher.run(self.float(element).and_then(|matrix| matmul_float::matmul(&matrix, (x.x, x.rows), y)))
            }
            Kind::Packed(weight_type) => {
                let x = x.quantized(launcher, weight_type.activation_type())?;
                launcher.run(self.packed(weight_type).and_then(|matrix| matmul(&matrix, &x, y)))
            }
        }
    }

    /// `y[e] = x[rows[e]] w[matrix of e's bucket]^T` for at most `most` buckets of `entries` entries: `(entries,
    /// outputs)`.
    pub fn multiply_buckets(
        &self,
        launcher: &Launcher,
        x: &Input<'_>,
        lists: &Buckets,
        size: (usize, usize),
        y: DeviceSlice<f32>,
    ) -> Result<()> {
        match self.kind {
            Kind::Float(element) => launcher.run(
                self.float(element)
                    .and_then(|matrix| matmul_float::matmul_buckets(&matrix, (x.x, x.rows), lists, size, y)),
            ),
            Kind::Packed(weight_type) => {
                let x = x.quantized(launcher, weight_type.activation_type())?;
                launcher.run(self.packed(weight_type).and_then(|matrix| matmul_buckets(&matrix, &x, lists, size, y)))
            }
        }
    }

    /// The rows of `count` ids, times `scale`: `(count, inputs)`.
    pub fn embed_rows(
        &self,
        launcher: &Launcher,
        (ids, count): (DeviceSlice<u32>, usize),
        scale: f32,
        y: DeviceSlice<f32>,
    ) -> Result<()> {
        let table = match self.kind {
            Kind::Float(element) => TableType::Float(element),
            Kind::Packed(weight_type) => TableType::Quantized(weight_type),
        };
        launcher.run(embed(table, self.memory.slice(), (self.outputs, self.inputs), (ids, count), scale, y))
    }
}

/// Buffers for rows quantized to 8 bits, one set per activation type.
pub(crate) struct QuantizedInputs {
    q8_1: ActivationBuffers,
    q8_k: ActivationBuffers,
}

struct ActivationBuffers {
    quants: Buffer<u32>,
    scales: Buffer<f32>,
    sums: Buffer<i16>,
}

impl QuantizedInputs {
    /// Buffers for `rows` rows of `width`, or as many elements in other shapes.
    pub fn new(device: &dyn Device, rows: usize, width: usize) -> Result<Self> {
        let of = || -> Result<ActivationBuffers> {
            // Whole blocks of either type.
            let width = width.next_multiple_of(256);
            Ok(ActivationBuffers {
                quants: Buffer::new(device, Activations::quants_len(rows, width))?,
                scales: Buffer::new(device, Activations::scales_len(ActivationType::Q8_1, rows, width))?,
                sums: Buffer::new(device, Activations::sums_len(ActivationType::Q8_K, rows, width))?,
            })
        };
        Ok(Self { q8_1: of()?, q8_k: of()? })
    }
}

/// Input rows of one or more matrices. Each 8-bit activation type is quantized once, into `workspace`, which the next
/// input overwrites.
pub(crate) struct Input<'a> {
    x: DeviceSlice<f32>, // (rows, width)
    rows: usize,
    width: usize,
    workspace: &'a QuantizedInputs,
    q8_1: Cell<Option<Activations>>,
    q8_k: Cell<Option<Activations>>,
}

impl<'a> Input<'a> {
    pub fn new(workspace: &'a QuantizedInputs, x: DeviceSlice<f32>, (rows, width): (usize, usize)) -> Self {
        Self { x, rows, width, workspace, q8_1: Cell::new(None), q8_k: Cell::new(None) }
    }

    fn quantized(&self, launcher: &Launcher, kind: ActivationType) -> Result<Activations> {
        let (cell, workspace) = match kind {
            ActivationType::Q8_1 => (&self.q8_1, &self.workspace.q8_1),
            ActivationType::Q8_K => (&self.q8_k, &self.workspace.q8_k),
        };
        if let Some(activations) = cell.get() {
            return Ok(activations);
        }
        let workspace = (workspace.quants.slice(), workspace.scales.slice(), workspace.sums.slice());
        let activations = Activations::new(kind, (self.rows, self.width), workspace)
            .map_err(|problem| super::launch_error(launcher.device(), "activations", &problem))?;
        launcher.run(quantize(self.x, &activations))?;
        cell.set(Some(activations));
        Ok(activations)
    }
}
