// Reads memory and does next to nothing with it: the bandwidth that every other kernel is measured against.

#include "device.h"

namespace {

struct Params {
    const DEVICE uint4* x; // (count)
    DEVICE u32* y;         // (blocks, 8): what a warp read, all words joined by exclusive or
    u64 count;
    int blocks;
};

} // namespace

// Four loads of a thread are under way at once.
KERNEL(read_all, Params, 256, 8, None) {
    long threads = long(p.blocks) * 256;
    u32 joined = 0;
#pragma unroll 4
    for (long i = long(self.x) * 256 + self.index; i < long(p.count); i += threads) {
        uint4 v = p.x[AT(i)];
        joined ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    for (int mask = 16; mask > 0; mask /= 2) joined ^= shuffle_xor(joined, mask);
    if (self.lane == 0) p.y[AT(self.x * 8 + self.warp)] = joined;
}
