// The memory of K and V: pages of 128 positions, all heads of a layer one after the other.
//
// * Exact: (heads, 128, channels) elements.
// * Quantized: per head codes, then scales (groups, 128) and mean (channels) in f16: the bytes of turboquant/layout.rs.
//
// A table has the address of each slot's page. Pages from `pinned` on share `ring` slots; with a ring of 0, every page
// has a slot.
#pragma once

#include "device.h"

// Metal allows pointers to pointers in structures only.
struct Slot {
    DEVICE u8* page;
};

struct Pages {
    const DEVICE Slot* table;
    int pinned, ring;
};

template <class T>
INLINE DEVICE T* page_of(const CONSTANT Pages& pages, int page) {
    int slot = pages.ring && page >= pages.pinned ? pages.pinned + (page - pages.pinned) % pages.ring : page;
    return reinterpret_cast<DEVICE T*>(pages.table[AT(slot)].page);
}
