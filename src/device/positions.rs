//! Positions of the rows of a pass, and their rotary angles.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::positions::{Tokens, angles, place};
use foretoken_gpu::plan::rows;
use foretoken_gpu::plan::segments::{Place, Segments};
use parking_lot::Mutex;

use super::kv::{KvPlan, PassRows, Span};
use super::queue::Queue;
use super::recurrent_rounds::PassStates;
use super::temporaries::Temporary;
use super::weights::DeviceRotary;
use crate::Result;

/// Angles of the rows that have queries. Without rotary pairs (a partial rotary factor of 0) nothing is rotated.
#[derive(Clone)]
pub(crate) struct DeviceAngles {
    cos: Arc<Temporary<f32>>, // (rows, pairs)
    sin: Arc<Temporary<f32>>,
    pairs: usize,
    pairing: rows::Pairing,
}

impl DeviceAngles {
    pub(super) fn rotary(&self) -> Option<rows::Rotary> {
        let Self { cos, sin, pairs, pairing } = self;
        (*pairs > 0).then(|| rows::Rotary { cos: cos.slice(), sin: sin.slice(), pairs: *pairs, pairing: *pairing })
    }
}

/// Angles of draft steps: computed by the first step of a draft, read by all. By the address of the
/// frequencies, and rows.
pub(super) type DraftAngles = Mutex<HashMap<(u64, usize), DeviceAngles>>;

/// The segments of a pass, in device memory and on the host.
#[derive(Clone)]
pub(super) struct PassSegments {
    pub segments: Segments,
    pub spans: Vec<Span>,
    /// See [`PassRows::horizon`].
    pub horizon: Option<usize>,
}

impl PassSegments {
    pub fn rows(&self) -> usize {
        self.spans.iter().map(|span| span.rows).sum()
    }

    fn placed(self, places: DeviceSlice<Place>) -> PassRows {
        let rows = self.rows();
        let Self { segments, spans, horizon } = self;
        PassRows { places, rows, segments, spans, horizon }
    }
}

/// The K and V that a pass reads and writes.
pub(super) struct Stores<'a> {
    pub plan: &'a KvPlan,
    /// Page tables of each segment.
    pub tables: Vec<DeviceSlice<u64>>,
    /// See [`fault_words`](super::kv::fault_words).
    pub faults: DeviceSlice<u32>,
}

/// K and V of a pass, and the positions of its rows that have queries.
pub(crate) struct PassKv<'a> {
    pub(super) stores: Stores<'a>,
    pub(super) rows: PassRows,
    /// The recurrent states, if the model has delta nets.
    pub(super) states: Option<PassStates>,
    source: Source<'a>,
}

/// Source of positions and angles.
enum Source<'a> {
    /// Consecutive rows; `outputs` are those with outputs.
    Pass { outputs: PassSegments, places: Temporary<Place> },
    /// A drafter, whose layer `i` reads the target's layer `donors[i]`.
    Draft { angles: &'a DraftAngles, donors: &'a [usize], step: usize },
}

impl<'a> PassKv<'a> {
    /// Consecutive positions of each segment, and the tokens.
    ///
    /// # Errors
    /// If the device is out of memory, or the driver fails.
    pub(super) fn consecutive(
        queue: &Queue,
        stores: Stores<'a>,
        states: Option<PassStates>,
        [pass, outputs]: [PassSegments; 2],
        tokens: &Tokens,
    ) -> Result<Self> {
        let (places, rows) = Self::place(queue, pass, Some(tokens))?;
        Ok(Self { stores, rows, states, source: Source::Pass { outputs, places } })
    }

    fn place(queue: &Queue, pass: PassSegments, tokens: Option<&Tokens>) -> Result<(Temporary<Place>, PassRows)> {
        let memory = queue.take(pass.rows())?;
        let rows = pass.placed(memory.slice());
        queue.launcher.run(place(&rows.segments, (rows.places, rows.rows), tokens))?;
        Ok((memory, rows))
    }

    /// The rows of draft step `step`, whose places are written.
    pub(super) fn draft(
        stores: Stores<'a>,
        pass: PassSegments,
        places: DeviceSlice<Place>,
        angles: &'a DraftAngles,
        donors: &'a [usize],
        step: usize,
    ) -> Self {
        Self { stores, rows: pass.placed(places), states: None, source: Source::Draft { angles, donors, step } }
    }

    /// Keeps only the rows with outputs.
    pub(super) fn narrow(&mut self, queue: &Queue) -> Result<()> {
        let Source::Pass { outputs, places } = &mut self.source else { return Ok(()) };
        (*places, self.rows) = Self::place(queue, outputs.clone(), None)?;
        Ok(())
    }

    /// The target's layer whose K and V layer `layer` reads.
    pub(super) fn donor(&self, layer: usize) -> usize {
        match self.source {
            Source::Pass { .. } => layer,
            Source::Draft { donors, .. } => donors[layer],
        }
    }

    /// The angles of the positions.
    pub(super) fn angles(&self, queue: &Queue, rotary: &DeviceRotary) -> Result<DeviceAngles> {
        let frequencies = rotary.frequencies.slice();
        let (angles, is_computed) = match &self.source {
            Source::Pass { .. } => (self.allocate(queue, rotary)?, false),
            Source::Draft { angles, step, .. } => {
                let angles = match angles.lock().entry((frequencies.address(), self.rows.rows)) {
                    Entry::Occupied(held) => held.get().clone(),
                    Entry::Vacant(place) => place.insert(self.allocate(queue, rotary)?).clone(),
                };
                (angles, *step > 0)
            }
        };
        if !is_computed {
            self.compute(queue, frequencies, &angles)?;
        }
        Ok(angles)
    }

    fn allocate(&self, queue: &Queue, rotary: &DeviceRotary) -> Result<DeviceAngles> {
        let pairs = rotary.frequencies.len();
        let new = || queue.take(self.rows.rows * pairs).map(Arc::new);
        Ok(DeviceAngles { cos: new()?, sin: new()?, pairs, pairing: rotary.pairing })
    }

    fn compute(&self, queue: &Queue, frequencies: DeviceSlice<f32>, to: &DeviceAngles) -> Result<()> {
        let at = (self.rows.places, self.rows.rows);
        to.rotary().map_or(Ok(()), |rotary| queue.launcher.run(angles(at, frequencies, &rotary)))
    }
}
