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
use super::shared::Sharing;
use super::{KvOptions, PAGE, StoreLayout};
use crate::Result;
use crate::nn::{Arena, Piece};

/// The K and V of one layer.
pub(super) struct Store {
    pub layout: StoreLayout,
    keys: Keys,
    values: Kept,
    zones: ExactZones,
}

/// Where keys come from.
enum Keys {
    /// They are kept.
    Own(Kept),
    /// They are made of the values as they are read: see `derived`. The weight of their norm.
    Derived(Vec<f32>),
    /// Some channels are kept, and the codes of the values serve for the others: see `shared`.
    Shared(Sharing, Kept),
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
    pub(super) fn new(
        layout: &StoreLayout,
        rotating_pairs: usize,
        (key, value): (KvFormat, KvFormat),
        options: &KvOptions,
    ) -> Result<Self> {
        let kept = |width, format, side| Kept::new(layout, width, format, side, options);
        let width = layout.head_dim;
        let own = || -> Result<Keys> { Ok(Keys::Own(kept(width, key, Side::Keys)?)) };
        let (keys, values) = match (&layout.key_weight, key, value, options.keys_of_values) {
            (Some(weight), KvFormat::Exact(k), KvFormat::Exact(v), KeysOfValues::Derived) if k == v => {
                (Keys::Derived(weight.clone()), kept(width, value, Side::Values)?)
            }
            (Some(_), KvFormat::Coded(_), KvFormat::Coded(_), KeysOfValues::Derived) => {
                match Sharing::of(layout, rotating_pairs) {
                    // What serves as keys has the keys' format.
                    Some(sharing) => {
                        let own = kept(sharing.own(), key, Side::Keys)?;
                        (Keys::Shared(sharing, own), kept(width, key, Side::Shared)?)
                    }
                    None => (own()?, kept(width, value, Side::Values)?),
                }
            }
            _ => (own()?, kept(width, value, Side::Values)?),
        };
        Ok(Self { layout: layout.clone(), keys, values, zones: options.exact })
    }

    /// The formats of the keys, where any are kept, and of the values.
    pub(super) fn formats(&self) -> (Option<KvFormat>, KvFormat) {
        match &self.keys {
            Keys::Own(keys) | Keys::Shared(_, keys) => (Some(keys.format()), self.values.format()),
            Keys::Derived(_) => (None, self.values.format()),
        }
    }

    /// Whether keys are made as they are read.
    pub(super) fn derives_keys(&self) -> bool {
        matches!(self.keys, Keys::Derived(_))
    }

    /// Whether exact keys are put together in memory of the caller's.
    pub(super) fn makes_keys(&self) -> bool {
        !matches!(self.keys, Keys::Own(_))
    }

    /// How the codes of the values serve as keys, if they do.
    pub(super) fn sharing(&self) -> Option<&Sharing> {
        match &self.keys {
            Keys::Shared(sharing, _) => Some(sharing),
            Keys::Own(_) | Keys::Derived(_) => None,
        }
    }

    /// What the keys of their own are coded in, if they are.
    pub(super) fn key_codes(&self) -> Option<(CodeFormat, Groups)> {
        match &self.keys {
            Keys::Own(keys) | Keys::Shared(_, keys) => keys.codes(),
            Keys::Derived(_) => None,
        }
    }

    /// What the values are coded in, if they are.
    pub(super) fn value_codes(&self) -> Option<(CodeFormat, Groups)> {
        self.values.codes()
    }

    /// The ways in which parts of a page may have to be read.
    pub(super) fn readings(&self) -> &'static [Reading] {
        if self.is_coded() { &[Reading::Exact, Reading::Coded] } else { &[Reading::Exact] }
    }

    fn is_coded(&self) -> bool {
        self.key_codes().or(self.value_codes()).is_some()
    }

    /// The first `len` rows of one head in page `page` of the sequence, where they are read exactly, else the whole page.
    /// Keys that are not kept as they are read are made in `made`, which has room for a page of them.
    pub(super) fn tile<'a>(
        &'a self,
        reading: Reading,
        (page, head, len): (usize, usize, usize),
        angles: &AngleTable,
        made: &'a mut [f32],
    ) -> KvTile<'a> {
        let values = self.values.tile(reading, page, head, len);
        let head_dim = self.layout.head_dim;
        let keys = match (&self.keys, values) {
            (Keys::Own(keys), _) => keys.tile(reading, page, head, len),
            (Keys::Shared(_, own), attend::Rows::Coded(values)) => match own.tile(reading, page, head, len) {
                attend::Rows::Coded(own) => attend::Rows::Shared { own, values },
                other => other,
            },
            (Keys::Derived(weight), attend::Rows::Exact(rows)) => {
                let keys = &mut made[..rows.len()];
                angles.keys(page, rows, weight, keys);
                attend::Rows::Exact(Elements::F32(keys))
            }
            (Keys::Shared(sharing, own), values) => {
                let keys = &mut made[..len * head_dim];
                sharing.exact_keys(own.tile(reading, page, head, len), values, keys);
                attend::Rows::Exact(Elements::F32(keys))
            }
            (Keys::Derived(_), values) => values,
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
        let codes_from = match page {
            _ if !self.is_coded() || page >= first_exact_page(position, self.zones.tail) => PAGE,
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
        let keys = match &self.keys {
            Keys::Own(keys) | Keys::Shared(_, keys) => Some(keys),
            Keys::Derived(_) => None,
        };
        keys.into_iter().chain([&self.values])
    }

    fn kept_mut(&mut self) -> impl Iterator<Item = &mut Kept> {
        let keys = match &mut self.keys {
            Keys::Own(keys) | Keys::Shared(_, keys) => Some(keys),
            Keys::Derived(_) => None,
        };
        keys.into_iter().chain([&mut self.values])
    }

    /// Writes the K and V of the positions from `first` on, `(n, num_kv_heads, head_dim)` each.
    ///
    /// # Errors
    /// If the system has no more memory.
    pub(super) fn write(&mut self, arena: &mut Arena, isa: Isa, first: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let end = first + k.len() / (self.layout.num_kv_heads * self.layout.head_dim);
        self.reserve(arena, end)?;
        match &mut self.keys {
            Keys::Own(keys) => keys.write(isa, first, k),
            Keys::Derived(_) => {}
            Keys::Shared(sharing, keys) => {
                keys.write(isa, first, &sharing.own_keys(k));
                self.values.write(isa, first, &sharing.ordered(v));
                return Ok(());
            }
        }
        self.values.write(isa, first, v);
        Ok(())
    }

    /// Makes room for positions below `end`.
    ///
    /// # Errors
    /// If the system has no more memory.
    pub(super) fn reserve(&mut self, arena: &mut Arena, end: usize) -> Result<()> {
        self.kept_mut().try_for_each(|kept| kept.reserve(arena, end))
    }

    /// The memory that holds the positions below `end`, in a fixed order.
    pub(super) fn pieces(&self, end: usize) -> Vec<&Piece> {
        self.kept().flat_map(|kept| kept.pieces(end)).collect()
    }

    /// As [`Store::pieces`], to be filled.
    pub(super) fn pieces_mut(&mut self, end: usize) -> Vec<&mut Piece> {
        self.kept_mut().flat_map(|kept| kept.pieces_mut(end)).collect()
    }

    /// Whether both hold the same at the positions that a query at `end` or later sees.
    pub(super) fn same(&self, other: &Self, end: usize) -> bool {
        let oldest = self.layout.window.map_or(0, |window| (end + 1).saturating_sub(window));
        let mut pairs = self.kept().zip(other.kept());
        self.kept().count() == other.kept().count() && pairs.all(|(a, b)| a.same(b, oldest..end))
    }
}

impl Kept {
    fn new(layout: &StoreLayout, width: usize, format: KvFormat, side: Side, options: &KvOptions) -> Result<Self> {
        let StoreLayout { num_kv_heads, window, .. } = *layout;
        let keep = window.map_or(Keep::All, |window| Keep::window(window, options.max_round_rows));
        Ok(match format {
            KvFormat::Exact(element) => Kept::Exact(Rows::new(element, num_kv_heads, width, keep)),
            KvFormat::Coded(format) => {
                Kept::Coded(CodedRows::new((format, side), (num_kv_heads, width), keep, options)?)
            }
        })
    }

    fn format(&self) -> KvFormat {
        match self {
            Kept::Exact(rows) => rows.element().into(),
            Kept::Coded(rows) => rows.format().into(),
        }
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
pub(crate) fn first_exact_page(position: usize, tail: usize) -> usize {
    position.saturating_sub(tail) / PAGE
}
