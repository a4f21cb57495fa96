// Greedy acceptance of a draft, and the hidden row that the next round begins with, without a round trip to the host.

#include "device.h"

namespace {

struct Params {
    const DEVICE u32* drafts; // (count)
    const DEVICE u32* chosen; // (count + 1): the target's own tokens
    const DEVICE u32* stops;  // (num_stops)
    const DEVICE float* hidden; // (count + 1, width)
    DEVICE u32* counts;         // (4): accepted drafts, the token after them, emitted tokens, the last emitted token
    DEVICE u32* tokens;         // (count + 1): the emitted tokens; the rest is not written
    DEVICE float* last_hidden;  // (width): the hidden row that predicted the last emitted token
    int count, num_stops, width;
};

} // namespace

// One block; every thread compares all of at most 16 tokens, and copies its part of the row.
KERNEL(accept_greedy, Params, 256, 1, None) {
    int tid = self.index, accepted = 0;
    while (accepted < p.count && p.drafts[AT(accepted)] == p.chosen[accepted]) accepted++;
    // Truncated after the first stop token. Accepted drafts equal the target's tokens.
    int emitted = 0;
    for (bool stopped = false; emitted <= accepted && !stopped; emitted++) {
        u32 token = p.chosen[AT(emitted)];
        for (int i = 0; i < p.num_stops; i++) stopped = stopped || p.stops[AT(i)] == token;
        if (tid == 0) p.tokens[AT(emitted)] = token;
    }
    if (tid == 0) {
        p.counts[0] = u32(accepted);
        p.counts[1] = p.chosen[AT(accepted)];
        p.counts[2] = u32(emitted);
        p.counts[3] = p.chosen[AT(emitted - 1)];
    }
    for (int i = tid; i < p.width; i += 256) p.last_hidden[AT(i)] = p.hidden[AT(i64(emitted - 1) * p.width + i)];
}
