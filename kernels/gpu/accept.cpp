// The greedy verdict over a draft, and the state that the next round begins with: nothing of it passes through the host.

#include "device.h"

namespace {

struct Params {
    const DEVICE u32* drafts; // (count)
    const DEVICE u32* chosen; // (count + 1): the target's own tokens
    const DEVICE u32* stops;  // (num_stops)
    const DEVICE float* hidden; // (count + 1, width)
    DEVICE u32* verdict;        // (4): drafts that stand, the token after them, tokens emitted, the newest of them
    DEVICE u32* tokens;         // (count + 1): what is emitted; behind it, nothing is written
    DEVICE float* newest;       // (width): the hidden row that predicted the newest token
    int count, num_stops, width;
};

} // namespace

// One block; every thread finds the verdict, of at most 16 tokens, and copies its part of the row.
KERNEL(accept_greedy, Params, 256, 1, None) {
    int tid = self.index, stand = 0;
    while (stand < p.count && p.drafts[AT(stand)] == p.chosen[stand]) stand++;
    // Cut behind the first stop token. Drafts that stand are the target's tokens.
    int emitted = 0;
    for (bool stopped = false; emitted <= stand && !stopped; emitted++) {
        u32 token = p.chosen[AT(emitted)];
        for (int i = 0; i < p.num_stops; i++) stopped = stopped || p.stops[AT(i)] == token;
        if (tid == 0) p.tokens[AT(emitted)] = token;
    }
    if (tid == 0) {
        p.verdict[0] = u32(stand);
        p.verdict[1] = p.chosen[AT(stand)];
        p.verdict[2] = u32(emitted);
        p.verdict[3] = p.chosen[AT(emitted - 1)];
    }
    for (int i = tid; i < p.width; i += 256) p.newest[AT(i)] = p.hidden[AT(long(emitted - 1) * p.width + i)];
}
