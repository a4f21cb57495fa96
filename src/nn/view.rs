//! Tensors as slices.

use std::ops::Deref;

use candle_core::{CpuStorage, DType, Device, Shape, Storage, Tensor};
use parking_lot::RwLockReadGuard;

use crate::Result;

/// A contiguous `f32` CPU tensor, borrowed as a slice.
pub struct F32View<'a> {
    storage: RwLockReadGuard<'a, Storage>,
    range: (usize, usize),
}

impl<'a> F32View<'a> {
    /// # Errors
    /// If the tensor is not contiguous, not `f32`, or not on the CPU.
    pub fn new(tensor: &'a Tensor) -> Result<Self> {
        let (storage, layout) = tensor.storage_and_layout();
        let range = layout.contiguous_offsets().ok_or(candle_core::Error::RequiresContiguous { op: "f32 view" })?;
        match &*storage {
            Storage::Cpu(CpuStorage::F32(_)) => Ok(Self { storage, range }),
            Storage::Cpu(other) => {
                use candle_core::backend::BackendStorage;
                let got = other.dtype();
                Err(candle_core::Error::UnexpectedDType { msg: "f32 view", expected: DType::F32, got }.into())
            }
            _ => Err(candle_core::Error::Msg("f32 view: the tensor is not on the CPU".into()).into()),
        }
    }
}

impl Deref for F32View<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match &*self.storage {
            Storage::Cpu(CpuStorage::F32(data)) => &data[self.range.0..self.range.1],
            // Excluded by `new`.
            _ => &[],
        }
    }
}

/// Checks the inputs of a pointwise operation.
///
/// # Errors
/// If the shapes differ.
pub(crate) fn same_shape(op: &'static str, a: &Tensor, b: &Tensor) -> Result<()> {
    if a.dims() != b.dims() {
        let (lhs, rhs) = (a.shape().clone(), b.shape().clone());
        return Err(candle_core::Error::ShapeMismatchBinaryOp { lhs, rhs, op }.into());
    }
    Ok(())
}

/// Wraps a buffer as a CPU tensor, without a copy.
///
/// # Errors
/// If the shape has another number of elements.
pub fn tensor(data: Vec<f32>, shape: impl Into<Shape>) -> Result<Tensor> {
    Ok(Tensor::from_vec(data, shape.into(), &Device::Cpu)?)
}
