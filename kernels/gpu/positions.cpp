// Where the rows of a round stand, from a count that lies on the device: a recorded round needs no number from the host.

#include "device.h"

namespace {

struct PlaceParams {
    DEVICE int* length;        // (1): committed positions
    const DEVICE u32* emitted; // (1): how many to add first, or null
    DEVICE int2* at;           // (rows): position and end, see attend.h
    int rows;
    int follow; // 1: rows follow each other, and each sees itself; 0: all stand behind the last position and see those before
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
        int position = length + (p.follow ? row : 0);
        int2 at = {position, position + p.follow};
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
