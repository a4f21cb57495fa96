// Words of device memory: a few from the host, in order with other launches and without a wait; and copies.

#include "device.h"

namespace {

CONSTEXPR int MOST = 240;

struct WordsParams {
    DEVICE u32* to;
    int count;
    u32 words[MOST];
};

struct CopyParams {
    DEVICE u32* to;
    const DEVICE u32* from; // null: zeros
    int count;
};

} // namespace

// One block.
KERNEL(write_words, WordsParams, 256, 1, None) {
    if (self.index < p.count) p.to[AT(self.index)] = p.words[AT(self.index) % MOST];
}

// Grid: (words by 1024).
KERNEL(copy_words, CopyParams, 256, 4, None) {
    for (int i = self.x * 1024 + self.index; i < min(p.count, int(self.x + 1) * 1024); i += 256)
        p.to[AT(i)] = p.from ? p.from[AT(i)] : 0;
}
