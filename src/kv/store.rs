//! The K and V of one layer.

use std::ops::Range;

use foretoken_kernels::attend::{self, KvTile};
use foretoken_kernels::turbo::{CodeFormat, Groups, Side};
use foretoken_kernels::{Elements, Isa};

use super::coded::CodedRows;
use super::derived::AngleTable;
use super::format::{ExactZones, KvFormat};
use super::options::KeysOfValues;
use super::rows::{Keep, Rows};
use super::{KvOptions, PAGE, StoreLayout};
use crate::Result;
use crate::nn::{Arena, Piece};

/// The K and V of one layer.
pub(super) struct Store {
    pub layout: StoreLayout,
    keys: Option<Kept>, // absent where they are made from the values: see `derived`
    values: Kept,
    zones: ExactZones,
}

/// The rows of K, or of V.
enum Kept {
    Exact(Rows),
    Coded(CodedRows),
}

/// How a query reads keys: exact rows near its position and at the very beginning, codes between, where there are codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    Exact,
    Coded,
}

impl Store {
    /// # Errors
    /// If heads of this width cannot be kept so.
    pub(super) fn new(layout: &StoreLayout, (key, value): (KvFormat, KvFormat), options: &KvOptions) -> Result<Self> {
        let derived = layout.key_weight.is_some()
            && matches!((key, value), (KvFormat::Exact(key), KvFormat::Exact(value)) if key == value)
            && options.keys_of_values == KeysOfValues::Derived;
        let kept = |format, side| Kept::new(layout, format, side, options);
        let keys = if derived { None } else { Some(kept(key, Side::Keys)?) };
        Ok(Self { layout: layout.clone(), keys, values: kept(value, Side::Values)?, zones: options.exact })
    }

    /// Whether keys are made as they are read.
    pub(super) fn derives_keys(&self) -> bool {
        self.keys.is_none()
    }

    /// What the keys are coded in, if they are.
    pub(super) fn key_codes(&self) -> Option<(CodeFormat, Groups)> {
        self.keys.as_ref().and_then(Kept::codes)
    }

    /// What the values are coded in, if they are.
    pub(super) fn value_codes(&self) -> Option<(CodeFormat, Groups)> {
        self.values.codes()
    }

    /// The first `len` rows of one head in page `page` of the sequence, where they are read exactly, else the whole page.
    /// Derived keys are made in `made`, which has room for a page of them.
    pub(super) fn tile<'a>(
        &'a self,
        reading: Reading,
        (page, head, len): (usize, usize, usize),
        angles: &AngleTable,
        made: &'a mut [f32],
    ) -> KvTile<'a> {
        let values = self.values.tile(reading, page, head, len);
        let head_dim = self.layout.head_dim;
        let keys = match (&self.keys, &self.layout.key_weight, values) {
            (None, Some(weight), attend::Rows::Exact(rows)) => {
                let keys = &mut made[..rows.len()];
                angles.keys(page, rows, weight, keys);
                attend::Rows::Exact(Elements::F32(keys))
            }
            (Some(keys), ..) => keys.tile(reading, page, head, len),
            _ => unreachable!("only exact values stand for keys"),
        };
        KvTile { keys, values, head_dim }
    }

    /// The positions that a query sees, of `at`: its position up to an end.
    pub(super) fn seen(&self, at: Range<usize>) -> Range<usize> {
        self.layout.window.map_or(0, |window| (at.start + 1).saturating_sub(window))..at.end
    }

    /// Of the keys of `page` that a query at `position` sees (`seen`, counted from the page's first), those that it reads
    /// this way. The query alone decides, so a row's bits do not depend on who rides with it.
    pub(super) fn part(&self, reading: Reading, page: usize, position: usize, seen: Range<usize>) -> Range<usize> {
        let coded = self.key_codes().or(self.value_codes()).is_some();
        let codes_from = match page {
            _ if !coded || page >= first_exact_page(position, self.zones.tail) => PAGE,
            0 => self.zones.head,
            _ => 0,
        };
        match reading {
            Reading::Exact => seen.start.min(codes_from)..seen.end.min(codes_from),
            Reading::Coded => seen.start.max(codes_from)..seen.end.max(codes_from),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.kept().map(Kept::bytes).sum()
    }

    /// Bytes once positions below `end` were written.
    pub(super) fn bytes_at(&self, end: usize) -> usize {
        self.kept().map(|kept| kept.bytes_at(end)).fold(0, usize::saturating_add)
    }

    fn kept(&self) -> impl Iterator<Item = &Kept> {
        self.keys.iter().chain([&self.values])
    }

    /// Writes the K and V of the positions from `first` on, `(n, num_kv_heads, head_dim)` each.
    ///
    /// # Errors
    /// If the system has no more memory.
    pub(super) fn write(&mut self, arena: &mut Arena, isa: Isa, first: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let end = first + k.len() / (self.layout.num_kv_heads * self.layout.head_dim);
        self.reserve(arena, end)?;
        if let Some(keys) = &mut self.keys {
            keys.write(isa, first, k);
        }
        self.values.write(isa, first, v);
        Ok(())
    }

    /// Makes room for positions below `end`.
    ///
    /// # Errors
    /// If the system has no more memory.
    pub(super) fn reserve(&mut self, arena: &mut Arena, end: usize) -> Result<()> {
        self.keys.iter_mut().chain([&mut self.values]).try_for_each(|kept| kept.reserve(arena, end))
    }

    /// The memory that holds the positions below `end`, in a fixed order.
    pub(super) fn pieces(&self, end: usize) -> Vec<&Piece> {
        self.kept().flat_map(|kept| kept.pieces(end)).collect()
    }

    /// As [`Store::pieces`], to be filled.
    pub(super) fn pieces_mut(&mut self, end: usize) -> Vec<&mut Piece> {
        self.keys.iter_mut().chain([&mut self.values]).flat_map(|kept| kept.pieces_mut(end)).collect()
    }

    /// Whether both hold the same at the positions that a query at `end` or later sees.
    pub(super) fn same(&self, other: &Self, end: usize) -> bool {
        let oldest = self.layout.window.map_or(0, |window| (end + 1).saturating_sub(window));
        let mut pairs = self.kept().zip(other.kept());
        self.kept().count() == other.kept().count() && pairs.all(|(a, b)| a.same(b, oldest..end))
    }
}

impl Kept {
    fn new(layout: &StoreLayout, format: KvFormat, side: Side, options: &KvOptions) -> Result<Self> {
        let StoreLayout { num_kv_heads, head_dim, window, .. } = *layout;
        // A ring needs the window of the oldest query and the rows of one round; whole pages keep page boundaries fixed in
        // the sequence.
        let keep = window.map_or(Keep::All, |window| {
            let newest = (window - 1).saturating_add(options.max_round_rows).div_ceil(PAGE);
            Keep::Ring { pinned: 0, newest }
        });
        Ok(match format {
            KvFormat::Exact(element) => Kept::Exact(Rows::new(element, num_kv_heads, head_dim, keep)),
            KvFormat::Coded(format) => Kept::Coded(CodedRows::new(format, side, layout, keep, options)?),
        })
    }

    /// Makes room for positions below `end`.
    ///
    /// # Errors
    /// If the system has no more memory.
    fn reserve(&mut self, arena: &mut Arena, end: usize) -> Result<()> {
        match self {
            Kept::Exact(rows) => rows.reserve(arena, end),
            Kept::Coded(rows) => rows.reserve(arena, end),
        }
    }

    /// Writes `rows` `(n, num_kv_heads, head_dim)` at `first` and the positions after it, for which there is room.
    fn write(&mut self, isa: Isa, first: usize, rows: &[f32]) {
        match self {
            Kept::Exact(kept) => kept.write(first, rows),
            Kept::Coded(kept) => kept.write(isa, first, rows),
        }
    }

    /// The first `len` rows of one head in page `page` of the sequence, or all of them.
    fn tile(&self, reading: Reading, page: usize, head: usize, len: usize) -> attend::Rows<'_> {
        match (self, reading) {
            (Kept::Exact(rows), _) => rows.tile(page, head, len).into(),
            (Kept::Coded(rows), Reading::Exact) => rows.tile(page, head, len).into(),
            (Kept::Coded(rows), Reading::Coded) => attend::Rows::Coded(rows.page(page, head)),
        }
    }

    /// What they are coded in, if they are.
    fn codes(&self) -> Option<(CodeFormat, Groups)> {
        match self {
            Kept::Exact(_) => None,
            Kept::Coded(rows) => Some((rows.format(), rows.groups())),
        }
    }

    fn pieces(&self, end: usize) -> Vec<&Piece> {
        match self {
            Kept::Exact(rows) => rows.pieces(end).iter().collect(),
            Kept::Coded(rows) => rows.pieces(end).collect(),
        }
    }

    fn pieces_mut(&mut self, end: usize) -> Vec<&mut Piece> {
        match self {
            Kept::Exact(rows) => rows.pieces_mut(end).iter_mut().collect(),
            Kept::Coded(rows) => rows.pieces_mut(end).collect(),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Kept::Exact(rows) => rows.bytes(),
            Kept::Coded(rows) => rows.bytes(),
        }
    }

    fn bytes_at(&self, end: usize) -> usize {
        match self {
            Kept::Exact(rows) => rows.bytes_at(end),
            Kept::Coded(rows) => rows.bytes_at(end),
        }
    }

    /// Whether both hold bit-equal rows, and codes, where queries at `end` and later find `positions`.
    fn same(&self, other: &Self, positions: Range<usize>) -> bool {
        match (self, other) {
            (Kept::Exact(a), Kept::Exact(b)) => a.same(b, positions),
            (Kept::Coded(a), Kept::Coded(b)) => a.same(b, positions),
            _ => false,
        }
    }
}

/// The first page that a query at `position` reads exactly, where there are codes: whole pages before its newest `tail`
/// keys are codes to it.
pub(super) fn first_exact_page(position: usize, tail: usize) -> usize {
    position.saturating_sub(tail) / PAGE
}
