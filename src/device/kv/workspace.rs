//! Device buffers of attention, shared by the layers of a pass.

use std::cell::{Cell, RefCell};

use foretoken_gpu::DeviceSlice;

use crate::Result;
use crate::device::{Buffer, Device};

/// Buffers for the queries of a pass and the split partials of attention.
pub(crate) struct AttentionWorkspace {
    pub rows: Buffer<f32>,        // (rows, heads, head_dim)
    pub words: Buffer<u32>,       // a fourth of the elements: 4 i8 per word
    pub word_scales: Buffer<f32>, // at least one per 128 elements and one per head
    partials: RefCell<Option<PartialBuffers>>,
    grown: Cell<usize>, // reallocations of `partials`
}

/// Per slot: the online softmax, and the weighted sum of values.
type PartialBuffers = (Buffer<[f64; 2]>, Buffer<f32>);

impl AttentionWorkspace {
    /// For `len` elements of queries.
    pub fn new(device: &dyn Device, len: usize) -> Result<Self> {
        Ok(Self {
            rows: Buffer::new(device, len)?,
            words: Buffer::new(device, len.div_ceil(4))?,
            word_scales: Buffer::new(device, len.div_ceil(64))?,
            partials: RefCell::new(None),
            grown: Cell::new(0),
        })
    }

    /// How often the partial buffers were reallocated: recordings made before refer to freed memory.
    pub fn grown(&self) -> usize {
        self.grown.get()
    }

    /// Buffers for `slots` split partials over `width` channels, reallocated if too small.
    pub(super) fn partials(
        &self,
        device: &dyn Device,
        slots: usize,
        width: usize,
    ) -> Result<(DeviceSlice<[f64; 2]>, DeviceSlice<f32>)> {
        let mut partials = self.partials.borrow_mut();
        if let Some((softmax, output)) = &*partials
            && softmax.len() >= slots
            && output.len() >= slots * width
        {
            return Ok((softmax.slice(), output.slice()));
        }
        // Freed first: old and new need not fit together.
        self.grown.set(self.grown.get() + 1);
        let (had, wide) = partials.take().map_or((0, 0), |(softmax, output)| (softmax.len(), output.len()));
        let grown = (slots.max(had), (slots * width).max(wide));
        let (softmax, output) = partials.insert((Buffer::new(device, grown.0)?, Buffer::new(device, grown.1)?));
        Ok((softmax.slice(), output.slice()))
    }
}
