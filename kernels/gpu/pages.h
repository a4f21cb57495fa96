// The memory of K and V: pages of 128 positions, all heads of a layer one after the other.
//
// * Exact: (heads, 128, channels) elements.
// * Coded: per head codes, then scales (groups, 128) and mean (channels), which are f16: the bytes of turbo/layout.rs.
//
// A table says where the page of a slot begins. Pages from `pinned` on share `ring` slots; a ring of 0 has a slot for every
// page.
#pragma once

#include "device.h"

// Metal has pointers to pointers only in structures.
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
