//! The sliding window: which keys a query sees, and which pages a ring retains.

use std::ops::Range;

use super::format::ExactZones;
use super::layout::PAGE;

/// The sliding-window mask: the positions visible to a query at `at.start`, of which `at.end` is the first masked one.
/// `window` counts the query's own position; `None` is full causal attention.
pub(super) fn visible(window: Option<usize>, at: Range<usize>) -> Range<usize> {
    window.map_or(0, |window| (at.start + 1).saturating_sub(window))..at.end
}

/// Which pages of a sequence are retained.
#[derive(Clone, Copy)]
pub(crate) enum Retention {
    /// All.
    All,
    /// The first `pinned`, and a ring of the last `newest` of the others.
    Ring { pinned: usize, newest: usize },
}

impl Retention {
    /// For a sliding window: the window of a round's first query and the round's rows, in whole pages. A round can then
    /// be rolled back, because its rows overwrite positions outside every window.
    pub(crate) fn window(window: usize, max_round_rows: usize) -> Self {
        Retention::Ring { pinned: 0, newest: (window - 1).saturating_add(max_round_rows).div_ceil(PAGE) }
    }

    /// For the exact head and tail of a quantized store. A page stays exact until all of it is older than the tail, so
    /// the oldest exact row of a round's first query is less than `PAGE` positions older than the tail.
    pub(crate) fn zones(zones: ExactZones, max_round_rows: usize) -> Self {
        let newest = zones.tail.saturating_add(PAGE - 1).saturating_add(max_round_rows).div_ceil(PAGE);
        Retention::Ring { pinned: zones.head.div_ceil(PAGE), newest }
    }

    /// `(pinned, newest)` of a ring.
    pub(crate) fn ring(self) -> Option<(usize, usize)> {
        match self {
            Retention::All => None,
            Retention::Ring { pinned, newest } => Some((pinned, newest)),
        }
    }

    /// Slot of page `page` of the sequence.
    pub(crate) fn slot(self, page: usize) -> usize {
        match self {
            Retention::Ring { pinned, newest } if page >= pinned => pinned + (page - pinned) % newest,
            _ => page,
        }
    }

    /// `pages` of the sequence in parts of which no two pages share a slot. A round may begin at the end of a page, and
    /// so touch one page more than a ring has.
    pub(super) fn distinct(self, pages: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let most = self.ring().map_or(usize::MAX, |(_, newest)| newest);
        std::iter::successors(Some(pages.start), move |start| start.checked_add(most))
            .take_while(move |start| *start < pages.end)
            .map(move |start| start..pages.end.min(start.saturating_add(most)))
    }

    /// Each of `pages` of the sequence with the items of its slot, of `items` with `per_page` per slot. No two pages
    /// may share a slot.
    pub(super) fn pages_mut<T>(
        self,
        items: &mut [T],
        per_page: usize,
        pages: Range<usize>,
    ) -> impl Iterator<Item = (usize, &mut [T])> {
        let first = (self.slot(pages.start) * per_page).min(items.len());
        let pinned = self.ring().map_or(first, |(pinned, _)| first.min(pinned * per_page));
        let (before, from) = items.split_at_mut(first);
        pages.zip(from.chunks_exact_mut(per_page).chain(before[pinned..].chunks_exact_mut(per_page)))
    }

    /// Whether the rows at `positions` are retained after positions below `written` were written: a row overwrites only
    /// that of the same place in the page that its slot had before.
    pub(crate) fn holds(self, positions: Range<usize>, written: usize) -> bool {
        let Retention::Ring { pinned, newest } = self else { return true };
        let oldest = positions.start.max(pinned * PAGE);
        oldest >= positions.end || oldest.saturating_add(newest.saturating_mul(PAGE)) >= written
    }

    /// Pages retained after the first `pages` of the sequence were written.
    pub(crate) fn held(self, pages: usize) -> usize {
        match self {
            Retention::All => pages,
            Retention::Ring { pinned, newest } => pages.min(pinned.saturating_add(newest)),
        }
    }
}

/// The first page of the exact tail of a query at `position` in a quantized store: whole pages
/// older than the last `tail` keys are read quantized.
pub(crate) fn first_exact_page(position: usize, tail: usize) -> usize {
    position.saturating_sub(tail) / PAGE
}
