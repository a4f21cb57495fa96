// Positions and tokens of a pass's rows, from lengths and tokens in device memory, so that a recorded round needs no parameter
// from the host; and rotary angles.

#include "segments.h"

namespace {

struct PlaceParams {
    const DEVICE Segment* segments;
    DEVICE Place* places;     // (rows)
    const DEVICE u32* given;  // (rows): tokens, or ON_DEVICE
    DEVICE u32* ids;          // (rows): the tokens; null: positions only
};

struct StepParams {
    const DEVICE Segment* segments;
    DEVICE Place* places;      // (segments)
    const DEVICE u32* given;   // (segments): tokens, or ON_DEVICE
    const DEVICE float* hidden; // (segments, width): the hidden states of the step before; null: it is the first step
    DEVICE u32* ids;           // (segments)
    DEVICE float* input;       // (segments, 2 * width): the second half gets the hidden states
    int width;
    int step;
};

struct AngleParams {
    const DEVICE Place* places;      // (rows)
    const DEVICE float* frequencies; // (pairs)
    DEVICE float* cos;               // (rows, pairs)
    DEVICE float* sin;
    int rows, pairs;
};

struct KeepParams {
    const DEVICE Segment* segments;
    const DEVICE float* x; // (rows before, width)
    DEVICE float* y;       // (rows, width)
    int width;
};

} // namespace

// Consecutive positions after the committed ones; each row sees itself. Grid: (segments).
KERNEL(place, PlaceParams, 32, 1, None) {
    const DEVICE Segment& segment = p.segments[AT(self.x)];
    int length = int(segment.state[0]) + segment.skipped;
    for (int i = self.lane; i < segment.rows; i += 32) {
        int row = segment.first + i;
        Place place = {length + i, length + i + 1, self.x, 0};
        p.places[AT(row)] = place;
        if (!p.ids) continue;
        u32 id = p.given[AT(row)];
        if (id == ON_DEVICE) id = segment.state[AT(1 + segment.skipped + i)];
        p.ids[AT(row)] = id;
    }
}

// A draft step: every row is at the position after the committed ones, and sees those only. Grid: (segments).
KERNEL(begin_step, StepParams, 256, 1, None) {
    const DEVICE Segment& segment = p.segments[AT(self.x)];
    if (self.index == 0) {
        int length = int(segment.state[0]);
        Place place = {length, length, self.x, 0};
        p.places[AT(self.x)] = place;
        u32 id = p.given[AT(self.x)];
        if (id == ON_DEVICE) id = segment.state[AT(1 + p.step)];
        p.ids[AT(self.x)] = id;
    }
    const DEVICE float* hidden = p.hidden ? p.hidden + AT(i64(self.x)) * p.width : segment.hidden;
    for (int i = self.index; i < p.width; i += 256) p.input[AT((2 * i64(self.x) + 1) * p.width + i)] = hidden[AT(i)];
}

// Grid: (pairs by 128, rows).
KERNEL(angles, AngleParams, 128, 8, None) {
    int pair = self.x * 128 + self.index, row = self.y;
    if (pair >= p.pairs) return;
    float angle = mul(p.frequencies[AT(pair)], float(p.places[AT(row)].position));
    p.cos[AT(row * p.pairs + pair)] = cosf(angle);
    p.sin[AT(row * p.pairs + pair)] = sinf(angle);
}

// The rows that remain. Grid: (width by 256, segments).
KERNEL(keep_rows, KeepParams, 256, 4, None) {
    const DEVICE Segment& segment = p.segments[AT(self.y)];
    int i = self.x * 256 + self.index;
    if (i >= p.width) return;
    for (int row = 0; row < segment.rows; row++)
        p.y[AT(i64(segment.first + row) * p.width + i)] = p.x[AT(i64(segment.source + row) * p.width + i)];
}
