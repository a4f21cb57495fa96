// A kernel with known faults, which the machine must report.

#include "../../shaders/device.h"

namespace {

struct Params {
    DEVICE float* x; // (64)
    int fault;
};

struct Scratch {
    float x[64];
    float more; // some compilers treat a last array as a flexible array member
};

} // namespace

KERNEL(faulty, Params, 64, 1, Scratch) {
    int tid = self.index;
    float four[4];
    s.x[tid] = p.x[tid];
    if (p.fault != 1) barrier();       // 1: no barrier between writing and reading
    float next = s.x[(tid + 1) % 64];
    if (p.fault == 2 && tid < 40) barrier(); // 2: a barrier that some do not reach
    if (p.fault == 3) next = p.x[tid + 1];   // 3: beyond the buffer
    if (p.fault == 4) next = reinterpret_cast<const DEVICE float4*>(p.x + 1)->x; // 4: misaligned
    if (p.fault == 5) p.x[tid - 1] = 0;      // 5: before the buffer
    if (p.fault == 6 && tid != 7) next = shuffle_xor(next, 1); // 6: an exchange without a lane
    if (p.fault == 7) next = s.x[tid * 2];   // 7: beyond an array
    if (p.fault == 8) next = *(&s.x[0] + 64 + tid); // 8: beyond shared memory
    if (p.fault == 9 && tid % 2) warp_barrier(); // 9: half a warp at one barrier,
    if (p.fault == 9 && tid % 2 == 0) shuffle(next, 0); // the other at another
    if (p.fault == 10) load4_shared(s.x, four), next = four[0]; // 10: 16 bytes of what is aligned to 4
    if (p.fault == 11 || p.fault == 12) { // a copy, 11: without waiting for it; 12: waited for
        copy_async(s.x + tid, p.x + (tid + 1) % 64);
        end_copies();
        barrier(); // others write what it reads
        if (p.fault == 12) wait_for_copies<0>();
        next = s.x[tid];
    }
    p.x[tid] = next;
}
