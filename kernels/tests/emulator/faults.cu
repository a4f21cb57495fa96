// Kernels with known faults: what the machine must report.

#include "../../cuda/device.cuh"

namespace {

struct Params {
    float* x; // (64)
    int fault;
};

struct Scratch {
    float x[64];
    float more; // the last array of a structure may end anywhere, to some compilers
};

} // namespace

KERNEL(faulty, Params, 64, 1) {
    SHARED(Scratch, s);
    int tid = threadIdx.x;
    s.x[tid] = p.x[tid];
    if (p.fault != 1) __syncthreads();       // 1: no barrier between writing and reading
    float next = s.x[(tid + 1) % 64];
    if (p.fault == 2 && tid < 40) __syncthreads(); // 2: a barrier that some do not reach
    if (p.fault == 3) next = p.x[tid + 1];   // 3: beyond the buffer
    if (p.fault == 4) next = reinterpret_cast<const float4*>(p.x + 1)->x; // 4: misaligned
    if (p.fault == 5) p.x[tid - 1] = 0;      // 5: before the buffer
    if (p.fault == 6 && tid != 7) next = __shfl_xor_sync(ALL, next, 1); // 6: an exchange without a lane
    if (p.fault == 7) next = s.x[tid * 2];   // 7: beyond an array
    if (p.fault == 8) next = *(&s.x[0] + 64 + tid); // 8: beyond shared memory
    if (p.fault == 9 && tid % 2) __syncwarp(); // 9: half a warp at one barrier,
    if (p.fault == 9 && tid % 2 == 0) __shfl_sync(ALL, next, 0); // the other at another
    p.x[tid] = next;
}
