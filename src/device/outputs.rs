//! Results of passes for later launches and for the host, at fixed addresses shared by recordings.

use foretoken_gpu::plan::matmul::Buckets;
use foretoken_gpu::plan::segments::Place;
use foretoken_gpu::plan::vocabulary::{Grouped, KEPT, Largest, NO_ID, Scores};

use super::Device;
use super::buffer::{Buffer, subslice};
use crate::Result;

/// Results of the target's passes of up to `rows` output rows.
pub(crate) struct TargetOutputs {
    pub rows: usize,
    pub hidden: Buffer<f32>,         // (rows, hidden), after the final norm
    pub logits: Buffer<f32>,         // (rows, vocab), before the soft cap
    pub partial: Buffer<[u32; 2]>,   // of the argmax
    pub chosen: Buffer<u32>,         // (rows): the argmax of every row
    largest_parts: Buffer<[u32; 2]>, // of the largest of a row
    largest: Buffer<[u32; 2]>,       // (rows, KEPT)
}

/// Results of draft steps of up to `rows` rows.
pub(crate) struct DraftOutputs {
    pub rows: usize,
    pub places: Buffer<Place>,
    pub ids: Buffer<u32>,          // (rows): the tokens of a step
    pub input: Buffer<f32>,        // (rows, 2 * backbone): embeddings of tokens, then the states that predicted them
    pub hidden: Buffer<f32>,       // (rows, backbone): the step's hidden states
    pub groups: Buffer<i32>,       // (rows, top_k): the best centroids
    scores: Buffer<f32>,           // (rows, scored tokens)
    pub partial: Buffer<[u32; 2]>, // of the argmax
    // Buckets of one row: of every row one per chosen centroid.
    starts: Buffer<i32>,
    counts: Buffer<i32>, // (rows, 4), aligned for kernels: entry (i, 0) is the number of buckets of i + 1 rows
    row: Buffer<i32>,
}

/// Some logits of a row, by ascending id.
pub(crate) struct Row {
    pub ids: Vec<u32>,
    pub logits: Vec<f32>,
}

/// Scores, and their ids (`None`: all, in order).
pub(super) type IdsAndScores = (Option<Vec<u32>>, Vec<f32>);

/// Output rows are allocated in multiples of it.
const ROWS: usize = 16;

impl TargetOutputs {
    /// For at least `rows` rows.
    pub fn new(device: &dyn Device, rows: usize, hidden: usize, vocab: usize) -> Result<Self> {
        // A batch grows by a few rows at a time, and every growth drops the recordings.
        let rows = rows.next_multiple_of(ROWS);
        Ok(Self {
            rows,
            hidden: Buffer::new(device, rows * hidden)?,
            logits: Buffer::new(device, rows * vocab)?,
            partial: Buffer::new(device, Scores::partial_len(rows, vocab))?,
            chosen: Buffer::new(device, rows)?,
            largest_parts: Buffer::new(device, Largest::partial_len(rows, vocab))?,
            largest: Buffer::new(device, rows * KEPT)?,
        })
    }

    /// Memory for the largest scores of rows.
    pub fn largest(&self) -> Largest {
        Largest { partial: self.largest_parts.slice(), best: self.largest.slice() }
    }

    /// The largest scores of `rows` rows, and their ids, ascending.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn read_largest(&self, rows: usize) -> Result<Vec<Row>> {
        let largest = self.largest.read(0, rows * KEPT)?;
        let of_row = |row: &[[u32; 2]]| {
            let of = row.iter().filter(|[_, id]| *id != NO_ID);
            let mut of: Vec<_> = of.map(|[bits, id]| (*id, f32::from_bits(*bits))).collect();
            of.sort_unstable_by_key(|(id, _)| *id);
            let (ids, logits) = of.into_iter().unzip();
            Row { ids, logits }
        };
        Ok(largest.chunks_exact(KEPT).map(of_row).collect())
    }
}

impl DraftOutputs {
    /// For scores of `scores` tokens per row, in `groups` groups if the head has centroids.
    pub fn new(device: &dyn Device, rows: usize, backbone: usize, groups: usize, scores: usize) -> Result<Self> {
        let counts: Vec<i32> = (1..=rows).flat_map(|rows| [(rows * groups) as i32, 0, 0, 0]).collect();
        let starts: Vec<i32> = (0..=rows * groups).map(|bucket| bucket as i32).collect();
        let row: Vec<i32> = (0..rows * groups).map(|bucket| (bucket / groups) as i32).collect();
        Ok(Self {
            rows,
            places: Buffer::new(device, rows)?,
            ids: Buffer::new(device, rows)?,
            input: Buffer::new(device, rows * 2 * backbone)?,
            hidden: Buffer::new(device, rows * backbone)?,
            groups: Buffer::new(device, rows * groups)?,
            scores: Buffer::new(device, rows * scores)?,
            partial: Buffer::new(device, Scores::partial_len(rows, scores))?,
            starts: Buffer::of(device, &starts)?,
            counts: Buffer::of(device, &counts)?,
            row: Buffer::of(device, &row)?,
        })
    }

    /// The `best` chosen centroids of each of `rows` rows as buckets.
    pub fn buckets(&self, rows: usize, best: usize) -> Buckets {
        Buckets {
            max_buckets: rows * best,
            entries: rows * best,
            largest: 1,
            matrices: self.groups.slice(),
            starts: self.starts.slice(),
            count: subslice(self.counts.slice(), 4 * (rows - 1), 1),
            rows: Some(self.row.slice()),
        }
    }

    /// Memory for `n` scores of each of `rows` rows.
    pub fn scores(&self, rows: usize, n: usize, grouped: Option<Grouped>) -> Scores {
        Scores { x: self.scores.slice(), rows, n, stride: n, cap: None, suppressed: None, grouped }
    }

    /// The last step's `n` scores of row `row`.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn read_scores(&self, row: usize, n: usize) -> Result<Vec<f32>> {
        self.scores.read(row * n, n)
    }
}
