// Where the rows of a round stand, from a count that lies on the device: a recorded round needs no number from the host.

#include "device.cuh"

namespace {

struct PlaceParams {
    int* length;        // (1): committed positions
    const u32* emitted; // (1): how many to add first, or null
    int2* at;           // (rows): position and end, see attend.cuh
    int rows;
    int follow; // 1: rows follow each other, and each sees itself; 0: all stand behind the last position and see those before
};

struct AngleParams {
    const int2* at;           // (rows)
    const float* frequencies; // (pairs)
    float* cos;               // (rows, pairs)
    float* sin;
    int rows, pairs;
};

} // namespace

// One block.
KERNEL(place, PlaceParams, 32, 1) {
    int length = *p.length + (p.emitted ? int(*p.emitted) : 0);
    __syncthreads();
    if (threadIdx.x == 0) *p.length = length;
    for (int row = threadIdx.x; row < p.rows; row += 32) {
        int position = length + (p.follow ? row : 0);
        p.at[AT(row)] = {position, position + p.follow};
    }
}

// Grid: (pairs by 128, rows).
KERNEL(angles, AngleParams, 128, 8) {
    int pair = blockIdx.x * 128 + threadIdx.x, row = blockIdx.y;
    if (pair >= p.pairs) return;
    float angle = mul(p.frequencies[AT(pair)], float(p.at[AT(row)].x));
    p.cos[AT(row * p.pairs + pair)] = cosf(angle);
    p.sin[AT(row * p.pairs + pair)] = sinf(angle);
}
