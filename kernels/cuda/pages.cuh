// The memory of K and V: pages of 128 positions, all heads of a layer one after the other.
//
// * Exact: (heads, 128, channels) elements.
// * Coded: per head codes, then scales (groups, 128) and mean (channels), which are f16: the bytes of turbo/layout.rs.
//
// A table says where the page of a slot begins. Pages from `pinned` on share `ring` slots; a ring of 0 has a slot for every
// page.
#pragma once

#include "device.cuh"

struct Pages {
    const u64* table;
    int pinned, ring;
};

template <class T>
__device__ __forceinline__ T* page_of(const Pages& pages, int page) {
    int slot = pages.ring && page >= pages.pinned ? pages.pinned + (page - pages.pinned) % pages.ring : page;
    return reinterpret_cast<T*>(pages.table[AT(slot)]);
}
