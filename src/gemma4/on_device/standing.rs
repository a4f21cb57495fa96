//! Where the rows of a pass stand, and the angles there.

use foretoken_kernels::gpu::Span;
use foretoken_kernels::gpu::positions::{Stand, angles, place};
use foretoken_kernels::gpu::rows::Rotary;

use crate::Result;
use crate::device::{Buffer, Device, Standing, Work};
use crate::gemma4::AttentionType;
use crate::gemma4::rope::Rotations;

/// A model's inverse frequencies.
pub(super) struct Frequencies {
    sliding: Option<Buffer<f32>>,
    full: Option<Buffer<f32>>,
}

impl Frequencies {
    pub(super) fn upload(device: &dyn Device, rotations: &Rotations) -> Result<Self> {
        let of = |rotary: &Option<crate::nn::Rotary>| {
            rotary.as_ref().map(|rotary| Buffer::of(device, rotary.inverse_frequencies())).transpose()
        };
        Ok(Self { sliding: of(&rotations.sliding)?, full: of(&rotations.full)? })
    }
}

/// A position that the device has, and how far it may be when what is launched for it is replayed: see [`Standing`].
#[derive(Clone, Copy)]
pub(super) struct At {
    pub(super) position: usize,
    pub(super) horizon: Option<usize>,
}

/// Room for positions and angles of up to `rows` rows.
pub(super) struct Places {
    at: Buffer<[i32; 2]>,
    sliding: Option<Turns>,
    full: Option<Turns>,
}

struct Turns {
    cos: Buffer<f32>, // (rows, pairs)
    sin: Buffer<f32>,
    pairs: usize,
}

/// Rows in their places.
#[derive(Clone, Copy)]
pub(super) struct Placed {
    pub(super) standing: Standing,
    sliding: Option<Rotary>,
    full: Option<Rotary>,
}

impl Places {
    pub(super) fn new(device: &dyn Device, frequencies: &Frequencies, rows: usize) -> Result<Self> {
        let turns = |frequencies: &Option<Buffer<f32>>| {
            let turns = frequencies.as_ref().map(|frequencies| -> Result<_> {
                let (pairs, room) = (frequencies.len(), || Buffer::new(device, rows * frequencies.len()));
                Ok(Turns { cos: room()?, sin: room()?, pairs })
            });
            turns.transpose()
        };
        let (sliding, full) = (turns(&frequencies.sliding)?, turns(&frequencies.full)?);
        Ok(Self { at: Buffer::new(device, rows)?, sliding, full })
    }

    /// Places `rows` rows from `length` on, which is `first` once `emitted` is added to it.
    pub(super) fn place(
        &self,
        work: &Work,
        frequencies: &Frequencies,
        (length, emitted, first): (Span<i32>, Option<Span<u32>>, At),
        (rows, stand): (usize, Stand),
    ) -> Result<Placed> {
        let at = (self.at.span(), rows);
        work.run(place(length, emitted, at, stand))?;
        let placed = self.placed(first, (rows, stand));
        for (rotary, frequencies) in [(placed.sliding, &frequencies.sliding), (placed.full, &frequencies.full)] {
            if let (Some(rotary), Some(frequencies)) = (rotary, frequencies) {
                work.run(angles(at, frequencies.span(), &rotary))?;
            }
        }
        Ok(placed)
    }

    /// Rows that were placed before.
    pub(super) fn placed(&self, first: At, (rows, stand): (usize, Stand)) -> Placed {
        // Where a part of 0 of the pairs turns, nothing does.
        let rotary = |turns: &Option<Turns>| {
            let turns = turns.as_ref().filter(|turns| turns.pairs > 0);
            turns.map(|turns| Rotary { cos: turns.cos.span(), sin: turns.sin.span(), pairs: turns.pairs })
        };
        let At { position: first, horizon } = first;
        let end = if stand == Stand::Following { first + rows } else { first };
        let standing = Standing { at: self.at.span(), rows, first, end, horizon };
        Placed { standing, sliding: rotary(&self.sliding), full: rotary(&self.full) }
    }
}

impl Placed {
    pub(super) fn rotary(&self, attention: AttentionType) -> Option<Rotary> {
        match attention {
            AttentionType::Sliding => self.sliding,
            AttentionType::Full => self.full,
        }
    }
}
