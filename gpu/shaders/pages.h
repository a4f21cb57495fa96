// The memory of K and V: pages of 128 positions, all heads of a layer one after the other.
//
// * Exact: (heads, 128, channels) elements.
// * Quantized: per head codes, then scales (scale groups, 128) and mean (channels) in f16: the bytes of turboquant/layout.rs.
//
// A table has the address of each slot's page. Pages from `pinned` on share `ring` slots; with a ring of 0, every page
// has a slot. A sequence's tables are one after the other, at the same entries for all sequences of a pass.
#pragma once

#include "segments.h"

struct Pages {
    int start; // the first slot's entry
    int pinned, ring;
};

template <class T>
INLINE DEVICE T* page_of(const DEVICE Slot* tables, const CONSTANT Pages& pages, int page) {
    int slot = pages.ring && page >= pages.pinned ? pages.pinned + (page - pages.pinned) % pages.ring : page;
    return reinterpret_cast<DEVICE T*>(tables[AT(pages.start + slot)].page);
}
