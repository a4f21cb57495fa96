// A few words from the host to device memory, in order with other launches and without a wait.

#include "device.h"

namespace {

CONSTEXPR int MOST = 240;

struct Params {
    DEVICE u32* to;
    int count;
    u32 words[MOST];
};

} // namespace

// One block.
KERNEL(write_words, Params, 256, 1, None) {
    if (self.index < p.count) p.to[AT(self.index)] = p.words[AT(self.index) % MOST];
}
