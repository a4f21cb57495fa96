//! Results of passes for later launches and for the host, at fixed addresses shared by recordings.

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::vocabulary::Scores;

use super::Device;
use super::buffer::Buffer;
use super::matrix::Matrices;
use super::weights::DeviceCentroidHead;
use crate::Result;

/// The hidden state of a draft step: the second half of a drafter's input `(1, 2 * width)`; the next step's embedding fills the
/// first half.
#[derive(Clone, Copy)]
pub(crate) struct DraftState {
    pub input: DeviceSlice<f32>,
}

/// Results of the target's passes of up to `rows` output rows.
pub(crate) struct TargetOutputs {
    pub rows: usize,
    pub hidden: Buffer<f32>,       // (rows, hidden), after the final norm
    pub logits: Buffer<f32>,       // (rows, vocab), before the soft cap
    pub partial: Buffer<[u32; 2]>, // of the argmax
    pub chosen: Buffer<u32>,       // (rows): the argmax of every row
}

/// Results of draft steps.
pub(crate) struct DraftOutputs {
    /// `(2 * backbone)`: a token's embedding, then the hidden state that predicted it; for the first step, and for later ones.
    pub first: Buffer<f32>,
    next: Buffer<f32>,
    pub groups: Buffer<i32>, // (top_k): the best centroids
    scores: Buffer<f32>,
    pub partial: Buffer<[u32; 2]>, // of the argmax
}

impl TargetOutputs {
    pub fn new(device: &dyn Device, rows: usize, (hidden, vocab): (usize, usize)) -> Result<Self> {
        Ok(Self {
            rows,
            hidden: Buffer::new(device, rows * hidden)?,
            logits: Buffer::new(device, rows * vocab)?,
            partial: Buffer::new(device, Scores::partial_len(rows, vocab))?,
            chosen: Buffer::new(device, rows)?,
        })
    }
}

impl DraftOutputs {
    /// For scores of `scores` tokens, in `groups` groups if the head has centroids.
    pub fn new(device: &dyn Device, backbone: usize, (groups, scores): (usize, usize)) -> Result<Self> {
        Ok(Self {
            first: Buffer::new(device, 2 * backbone)?,
            next: Buffer::new(device, 2 * backbone)?,
            groups: Buffer::new(device, groups)?,
            scores: Buffer::new(device, scores)?,
            partial: Buffer::new(device, Scores::partial_len(1, scores))?,
        })
    }

    /// The input state of step `link` of a chain.
    pub fn state(&self, link: usize) -> DraftState {
        if link == 0 { DraftState { input: self.first.slice() } } else { self.next_state() }
    }

    pub fn next_state(&self) -> DraftState {
        DraftState { input: self.next.slice() }
    }

    pub fn dense_scores(&self, head: &Matrices) -> Scores {
        self.scores_of(head.outputs())
    }

    pub fn centroid_scores(&self, head: &DeviceCentroidHead) -> Scores {
        let grouped = Some(head.grouped(self.groups.slice()));
        Scores { grouped, ..self.scores_of(head.top_k * head.table.outputs()) }
    }

    fn scores_of(&self, n: usize) -> Scores {
        Scores { x: self.scores.slice(), rows: 1, n, stride: n, cap: None, suppressed: None, grouped: None }
    }

    /// The last step's first `n` scores.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn read_scores(&self, n: usize) -> Result<Vec<f32>> {
        self.scores.read(0, n)
    }
}
