// Reads memory: measures the bandwidth that the other kernels are compared with.

#include "device.h"

namespace {

struct Params {
    const DEVICE uint4* x; // (count)
    DEVICE u32* y;         // (blocks, 8): the exclusive or of the words that a warp read
    u64 count;
    int blocks;
};

} // namespace

// Four loads per thread overlap.
KERNEL(read_all, Params, 256, 8, None) {
    i64 threads = i64(p.blocks) * 256;
    u32 joined = 0;
#pragma unroll 4
    for (i64 i = i64(self.x) * 256 + self.index; i < i64(p.count); i += threads) {
        uint4 v = p.x[AT(i)];
        joined ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    for (int mask = 16; mask > 0; mask /= 2) joined ^= shuffle_xor(joined, mask);
    if (self.lane == 0) p.y[AT(self.x * 8 + self.warp)] = joined;
}
