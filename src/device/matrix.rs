//! Weight matrices on the device, and their input rows.

use std::cell::OnceCell;

use foretoken_gpu::plan::matmul::{Activations, Buckets, LARGEST_BUCKET, Matrix, matmul, matmul_buckets, quantize};
use foretoken_gpu::plan::matmul_float::{self, FloatMatrix};
use foretoken_gpu::plan::pointwise::{Strided, TableType, embed};
use foretoken_gpu::{DeviceSlice, LaunchError};
use foretoken_kernels::ElementType;
use foretoken_kernels::quant::{ActivationType, PANEL_ROWS, WeightType};

use super::Device;
use super::buffer::Buffer;
use super::launcher::Launcher;
use super::queue::{DeviceTensor, Queue};
use super::temporaries::Temporary;
use crate::nn::{Storage, Weight};
use crate::{Error, Result};

/// Bytes packed and uploaded at a time.
const CHUNK_BYTES: usize = 16 << 20;

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
    /// Uploads `weight`, chunk by chunk; the file's pages are released.
    ///
    /// # Errors
    /// If no kernel supports its type, or the device is out of memory.
    pub fn upload(device: &dyn Device, weight: &Weight) -> Result<Self> {
        let name = weight.name();
        let (count, outputs, inputs) = (weight.count(), weight.outputs(), weight.inputs());
        let shape = (count, outputs, inputs);
        let no_memory = |error: Error| error.needed_for(|| format!("tensor {name} on {}", device.name()));
        let of_tensor =
            |device: String, problem: String| Error::Device { device, problem: format!("tensor {name}: {problem}") };
        let refuse = |problem: LaunchError| {
            of_tensor(device.name(), format!("{problem}; quantize to another type, or use the CPU"))
        };
        let failed = |error: Error| match error {
            Error::Device { device, problem } => of_tensor(device, problem),
            other => other,
        };
        // Checked before allocation; returns the bytes.
        let check = |weight_type: WeightType| {
            if !outputs.is_multiple_of(PANEL_ROWS) {
                let problem = format!("{outputs} quantized rows, not a multiple of {PANEL_ROWS}; use the CPU");
                return Err(of_tensor(device.name(), problem));
            }
            let bytes = Matrix::bytes(weight_type, outputs, inputs).and_then(|one| one.checked_mul(count)).unwrap_or(0);
            Matrix::new(weight_type, shape, DeviceSlice::new(0, bytes)).map(|_| bytes).map_err(refuse)
        };
        let (memory, kind) = match weight.storage() {
            Storage::Float(element, bytes) => {
                let elements = bytes.as_slice();
                FloatMatrix::new(*element, shape, DeviceSlice::new(0, elements.len())).map_err(refuse)?;
                let memory = Buffer::new(device, elements.len()).map_err(no_memory)?;
                for (i, chunk) in elements.chunks(CHUNK_BYTES).enumerate() {
                    memory.write(i * CHUNK_BYTES, chunk).map_err(failed)?;
                    bytes.release(i * CHUNK_BYTES..i * CHUNK_BYTES + chunk.len());
                }
                (memory, Kind::Float(*element))
            }
            Storage::Packed(weight_type, packed) => {
                let packed = packed.as_slice();
                check(*weight_type)?;
                let memory = Buffer::new(device, packed.len()).map_err(no_memory)?;
                memory.write(0, packed).map_err(failed)?;
                (memory, Kind::Packed(*weight_type))
            }
            Storage::Unpacked(rows) => {
                let memory = Buffer::new(device, check(rows.weight_type())?).map_err(no_memory)?;
                let row = rows.packed_row_bytes().max(1);
                let panel = PANEL_ROWS * row;
                let mut chunk = vec![0; memory.len().min((CHUNK_BYTES / panel).max(1) * panel)];
                for at in (0..memory.len()).step_by(chunk.len().max(1)) {
                    let len = chunk.len().min(memory.len() - at);
                    let packed = &mut chunk[..len];
                    rows.pack(at / row, packed);
                    memory.write(at, packed).map_err(failed)?;
                }
                (memory, Kind::Packed(rows.weight_type()))
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
    pub fn multiply(&self, x: &Input<'_>, y: DeviceSlice<f32>) -> Result<()> {
        let launcher = &x.queue.launcher;
        match self.kind {
            Kind::Float(element) => {
                let x = (x.x.slice, x.x.rows);
                launcher.run(self.float(element).and_then(|matrix| matmul_float::matmul(&matrix, x, y)))
            }
            Kind::Packed(weight_type) => {
                let x = x.quantized(weight_type.activation_type())?;
                launcher.run(self.packed(weight_type).and_then(|matrix| matmul(&matrix, &x, y)))
            }
        }
    }

    /// Entries of a bucket that [`Matrices::multiply_buckets`] takes, at most.
    pub fn largest_bucket(&self) -> usize {
        match self.kind {
            Kind::Float(_) => matmul_float::LARGEST_BUCKET,
            Kind::Packed(_) => LARGEST_BUCKET,
        }
    }

    /// `y[e] = x[rows[e]] w[matrix of e's bucket]^T`: `(entries, outputs)`.
    pub fn multiply_buckets(&self, x: &Input<'_>, lists: &Buckets, y: DeviceSlice<f32>) -> Result<()> {
        let launcher = &x.queue.launcher;
        match self.kind {
            Kind::Float(element) => {
                let x = (x.x.slice, x.x.rows);
                let plan = |matrix| matmul_float::matmul_buckets(&matrix, x, lists, y);
                launcher.run(self.float(element).and_then(plan))
            }
            Kind::Packed(weight_type) => {
                let x = x.quantized(weight_type.activation_type())?;
                launcher.run(self.packed(weight_type).and_then(|matrix| matmul_buckets(&matrix, &x, lists, y)))
            }
        }
    }

    /// The rows of `ids`, times `scale`: `(ids, inputs)`.
    pub fn embed_rows(&self, launcher: &Launcher, ids: DeviceSlice<u32>, scale: f32, y: Strided) -> Result<()> {
        let count = ids.len();
        let table = match self.kind {
            Kind::Float(element) => TableType::Float(element),
            Kind::Packed(weight_type) => TableType::Quantized(weight_type),
        };
        launcher.run(embed(table, self.memory.slice(), (self.outputs, self.inputs), (ids, count), scale, y))
    }
}

/// Input rows of one or more matrices. Each 8-bit activation type is quantized once.
pub(crate) struct Input<'a> {
    queue: &'a Queue,
    x: &'a DeviceTensor,
    q8_1: OnceCell<QuantizedInput>,
    q8_k: OnceCell<QuantizedInput>,
}

struct QuantizedInput {
    activations: Activations,
    _memory: (Temporary<u32>, Temporary<f32>, Temporary<i16>),
}

impl<'a> Input<'a> {
    pub fn new(queue: &'a Queue, x: &'a DeviceTensor) -> Self {
        Self { queue, x, q8_1: OnceCell::new(), q8_k: OnceCell::new() }
    }

    fn quantized(&self, activation_type: ActivationType) -> Result<Activations> {
        let cell = match activation_type {
            ActivationType::Q8_1 => &self.q8_1,
            ActivationType::Q8_K => &self.q8_k,
        };
        if let Some(quantized) = cell.get() {
            return Ok(quantized.activations);
        }
        let (rows, width, queue) = (self.x.rows, self.x.width, self.queue);
        let memory = (
            queue.take(Activations::quants_len(rows, width))?,
            queue.take(Activations::scales_len(activation_type, rows, width))?,
            queue.take(Activations::sums_len(rows, width))?,
        );
        let slices = (memory.0.slice(), memory.1.slice(), memory.2.slice());
        let launcher = &queue.launcher;
        let activations = Activations::new(activation_type, (rows, width), slices)
            .map_err(|problem| super::launch_error(launcher.device(), "activations", &problem))?;
        launcher.run(quantize(self.x.slice, &activations))?;
        Ok(cell.get_or_init(|| QuantizedInput { activations, _memory: memory }).activations)
    }
}
