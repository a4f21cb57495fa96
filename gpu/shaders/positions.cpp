// Positions of a round's rows, from a length in device memory, so that a recorded round needs no parameter from the host.

#include "device.h"

namespace {

struct PlaceParams {
    DEVICE int* length;        // (1): committed positions
    const DEVICE u32* emitted; // (1): added to the length first; or null
    DEVICE int2* at;           // (rows): position and end, see attend.h
    int rows;
    int consecutive; // 1: consecutive positions, each row sees itself; 0: all at the next position, seeing committed ones only
};

struct AngleParams {
    const DEVICE int2* at;           // (rows)
    const DEVICE float* frequencies; // (pairs)
    DEVICE float* cos;               // (rows, pairs)
    DEVICE float* sin;
    int rows, pairs;
};

} // namespace

// One block.
KERNEL(place, PlaceParams, 32, 1, None) {
    int length = 0;
    if (self.lane == 0) {
        length = *p.length + (p.emitted ? int(*p.emitted) : 0);
        *p.length = length;
    }
    length = shuffle(length, 0);
    for (int row = self.lane; row < p.rows; row += 32) {
        int position = length + (p.consecutive ? row : 0);
        int2 at = {position, position + p.consecutive};
        p.at[AT(row)] = at;
    }
}

// Grid: (pairs by 128, rows).
KERNEL(angles, AngleParams, 128, 8, None) {
    int pair = self.x * 128 + self.index, row = self.y;
    if (pair >= p.pairs) return;
    float angle = mul(p.frequencies[AT(pair)], float(p.at[AT(row)].x));
    p.cos[AT(row * p.pairs + pair)] = cosf(angle);
    p.sin[AT(row * p.pairs + pair)] = sinf(angle);
}
