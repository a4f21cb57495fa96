//! The launch queue, and its results.

use std::sync::Arc;

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::pointwise::Strided;

use super::buffer::subslice;
use super::launcher::Launcher;
use super::temporaries::Temporary;
use crate::Result;

/// Launches of passes, and the memory of their activations.
pub(crate) struct Queue {
    pub launcher: Launcher,
    /// Bytes that attention's split partials of a few rows take at most, at depth.
    pub partial_bytes: usize,
}

/// `f32` `(rows, width)`.
#[derive(Clone)]
pub(crate) struct DeviceTensor {
    pub(super) slice: DeviceSlice<f32>,
    pub(super) rows: usize,
    pub(super) width: usize,
    stride: usize,                        // elements from row to row
    _memory: Option<Arc<Temporary<f32>>>, // `None`: it belongs to the outputs
}

impl Queue {
    /// Memory for `len` elements.
    ///
    /// # Errors
    /// If the device is out of memory.
    pub fn take<T>(&self, len: usize) -> Result<Temporary<T>> {
        self.launcher.temporaries.take(len)
    }

    /// Memory for a result.
    ///
    /// # Errors
    /// If the device is out of memory.
    pub fn new_tensor(&self, rows: usize, width: usize) -> Result<DeviceTensor> {
        let memory = self.take(rows * width)?;
        Ok(DeviceTensor { slice: memory.slice(), rows, width, stride: width, _memory: Some(Arc::new(memory)) })
    }
}

impl DeviceTensor {
    /// Memory of the outputs, at a constant address.
    pub(super) fn of_outputs(slice: DeviceSlice<f32>, rows: usize, width: usize) -> Self {
        Self { slice: subslice(slice, 0, rows * width), rows, width, stride: width, _memory: None }
    }

    /// `rows` rows from `first` on.
    pub(super) fn some_rows(&self, first: usize, rows: usize) -> Self {
        let len = if self.stride == self.width { rows * self.width } else { self.slice.len() };
        Self { slice: subslice(self.slice, first * self.stride, len), rows, ..self.clone() }
    }

    /// `width` columns from `start` on.
    pub(super) fn some_columns(&self, start: usize, width: usize) -> Self {
        Self { slice: subslice(self.slice, start, self.slice.len()), width, ..self.clone() }
    }

    /// Whether rows follow each other without gaps.
    pub(super) fn is_contiguous(&self) -> bool {
        self.stride == self.width
    }

    pub(super) fn strided(&self) -> Strided {
        Strided { slice: self.slice, stride: self.stride }
    }
}
