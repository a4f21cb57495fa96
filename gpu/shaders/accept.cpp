// The end of a round without a round trip to the host: acceptance of drafts, and what the next round begins with.

#include "segments.h"

namespace {

struct AcceptParams {
    const DEVICE Segment* segments;
    const DEVICE u32* ids;      // of all rows of the pass: of a segment, the newest token and the drafts after it
    const DEVICE u32* chosen;   // of the rows with outputs: the target's own tokens
    const DEVICE float* hidden; // (rows, width), of the rows with outputs
    DEVICE u32* results;        // (segments, 2): accepted drafts, the token after them
    int width;
    int segment;  // the first one
    int accepted; // this many drafts are accepted; -1: those that equal the target's tokens, up to the first other
};

struct SetParams {
    DEVICE u32* state;
    DEVICE float* hidden;      // (width)
    const DEVICE float* from;  // (width); null: the hidden state stays
    int length;
    u32 newest;
    int width;
};

} // namespace

// Every thread compares all drafts, at most some tens, and copies its part of the row. Grid: (segments).
KERNEL(accept, AcceptParams, 256, 1, None) {
    int index = p.segment + self.x;
    const DEVICE Segment& segment = p.segments[AT(index)];
    const DEVICE u32* drafts = p.ids + segment.source + 1;
    const DEVICE u32* chosen = p.chosen + segment.first;
    int accepted = p.accepted;
    if (accepted < 0) {
        accepted = 0;
        while (accepted < segment.rows - 1 && drafts[AT(accepted)] == chosen[AT(accepted)]) accepted++;
    }
    u32 next = chosen[AT(accepted)];
    if (self.index == 0) {
        p.results[AT(2 * index)] = u32(accepted);
        p.results[AT(2 * index + 1)] = next;
        segment.state[0] += u32(segment.skipped + accepted + 1);
        segment.state[1] = next;
    }
    const DEVICE float* hidden = p.hidden + i64(segment.first + accepted) * p.width;
    for (int i = self.index; i < p.width; i += 256) segment.hidden[AT(i)] = hidden[AT(i)];
}

// One block.
KERNEL(set_state, SetParams, 256, 1, None) {
    if (self.index == 0) {
        p.state[0] = u32(p.length);
        p.state[1] = p.newest;
    }
    if (!p.from) return;
    for (int i = self.index; i < p.width; i += 256) p.hidden[AT(i)] = p.from[AT(i)];
}
