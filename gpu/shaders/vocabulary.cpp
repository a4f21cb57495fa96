// Argmax and top-k over rows of scores.

#include "segments.h"

namespace {

// A float's bits as an unsigned integer of the same order.
INLINE u32 ordered(float x) {
    u32 bits = bits_of(x);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

CONSTEXPR int MAX_TOP_K = 4096;

struct TopParams {
    const DEVICE float* x; // (rows, n)
    DEVICE int* indices;   // (rows, k)
    int n, padded, k; // padded: n rounded up to a power of two
};

struct Keys {
    u64 keys[MAX_TOP_K];
};

struct Best {
    float value;
    u32 id;
};

// Elements of a row that are kept, and parts of a row that are merged, at most.
CONSTEXPR int KEPT = 64;

struct LargestParams {
    const DEVICE float* x;        // (rows, n)
    const DEVICE u32* suppressed; // (num_suppressed): ids that are not kept, unless they are NaN
    DEVICE Best* partial;         // (rows, parts, KEPT)
    DEVICE Best* best;            // (rows, KEPT): the largest first, the lower id first among equals; NaN before all; id NO_ID: none
    int n, stride, num_suppressed, parts;
};

CONSTEXPR u32 NO_ID = 0xffffffffu;

struct ArgmaxParams {
    const DEVICE float* x;        // (rows, n)
    const DEVICE u32* suppressed; // (num_suppressed): ids that are never chosen
    const DEVICE int* groups;     // (rows, n / group); null: element i is id i; else elements come in groups of ordering
    const DEVICE u32* ordering;   // element i is id ordering[groups[row][i / group] * group + i % group]
    DEVICE Best* partial;         // (rows, blocks)
    DEVICE u32* ids;              // (rows): the lowest id of the largest; NO_ID if any is NaN, or it is infinite; or null
    const DEVICE Segment* segments; // (rows): receive it as draft `draft` of their states, if ids is null
    int n, stride, num_suppressed, group, blocks, draft;
    float cap; // 0: none
};

CONSTEXPR int THREADS = 256, PER_BLOCK = 4096;

struct Warps {
    Best best[THREADS / 32];
};

INLINE bool better(Best a, Best b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
}

INLINE Best best_of_warp(Best best) {
    for (int mask = 16; mask > 0; mask /= 2) {
        Best other = {shuffle_xor(best.value, mask), shuffle_xor(best.id, mask)};
        if (better(other, best)) best = other;
    }
    return best;
}

// A bitonic sort in one block: 2048 elements take 66 steps of one exchange per thread, a few microseconds.
INLINE void sort(THREADGROUP Keys& s, int padded, Thread self) {
    int threads = self.warps * 32;
    barrier();
    for (int run = 2; run <= padded; run *= 2) {
        for (int step = run / 2; step > 0; step /= 2) {
            for (int i = self.index; i < padded / 2; i += threads) {
                int low = 2 * i - (i & (step - 1)), high = low + step;
                bool ascends = (low & run) == 0;
                u64 a = s.keys[low], b = s.keys[AT(high) % MAX_TOP_K];
                if ((a > b) == ascends) s.keys[low] = b, s.keys[high] = a;
            }
            barrier();
        }
    }
}

// Sorts before all smaller elements, equal ones by id; NaN first.
INLINE u64 key_of(float value, u32 id) {
    u32 order = value == value ? ~ordered(value) : 0;
    return u64(order) << 32 | id;
}

// The smallest power of two from 2 on that is at least n.
INLINE int padded_to(int n) {
    int padded = 2;
    while (padded < n) padded *= 2;
    return padded;
}

} // namespace

// Equal scores are in order of index. Grid: (rows).
KERNEL(top_k, TopParams, 1024, 1, Keys) {
    int tid = self.index, threads = self.warps * 32;
    for (int i = tid; i < p.padded; i += threads)
        s.keys[i] = i < p.n ? u64(~ordered(p.x[AT(self.x * p.n + i)])) << 32 | u32(i) : ~u64(0);
    sort(s, p.padded, self);
    for (int i = tid; i < p.k; i += threads) p.indices[AT(self.x * p.k + i)] = int(u32(s.keys[i]));
}

// The best of 4096 elements per block; `argmax` reduces the blocks. Grid: (blocks, rows).
KERNEL(argmax_parts, ArgmaxParams, THREADS, 4, Warps) {
    int tid = self.index, row = self.y;
    Best best = {-INFINITY, NO_ID};
    float inverse = p.cap != 0 ? 1.0f / p.cap : 0.0f;
    for (int i = self.x * PER_BLOCK + tid; i < min(p.n, int(self.x + 1) * PER_BLOCK); i += THREADS) {
        Best one = {p.x[AT(i64(row) * p.stride + i)], u32(i)};
        if (p.cap != 0) one.value = mul(tanhf(mul(one.value, inverse)), p.cap);
        if (p.groups) {
            int group = p.groups[AT(row * (p.n / p.group) + i / p.group)];
            one.id = p.ordering[AT(i64(group) * p.group + i % p.group)];
        }
        bool allowed = true;
        for (int n = 0; n < p.num_suppressed; n++) allowed = allowed && p.suppressed[AT(n)] != one.id;
        // Nothing is better than the infinity without an id.
        if (one.value != one.value || (allowed && one.value == INFINITY)) best = {INFINITY, NO_ID};
        else if (allowed && better(one, best) && one.value > -INFINITY) best = one;
    }
    best = best_of_warp(best);
    if (self.lane == 0) s.best[self.warp] = best;
    barrier();
    if (tid > 0) return;
    for (int w = 1; w < THREADS / 32; w++)
        if (better(s.best[AT(w) % (THREADS / 32)], best)) best = s.best[w];
    p.partial[AT(i64(row) * p.blocks + self.x)] = best;
}

// Grid: (rows). One warp.
KERNEL(argmax, ArgmaxParams, 32, 1, None) {
    int row = self.x;
    Best best = {-INFINITY, NO_ID};
    for (int i = self.index; i < p.blocks; i += 32) {
        Best one = p.partial[AT(i64(row) * p.blocks + i)];
        if (better(one, best)) best = one;
    }
    best = best_of_warp(best);
    if (self.index > 0) return;
    if (p.ids) p.ids[AT(row)] = best.id;
    else p.segments[AT(row)].state[AT(2 + p.draft)] = best.id;
}

// The largest of 4096 elements per block, for sampling; `largest` merges the blocks. Grid: (parts, rows).
KERNEL(largest_parts, LargestParams, 1024, 1, Keys) {
    int first = self.x * PER_BLOCK, count = min(p.n - first, PER_BLOCK), threads = self.warps * 32;
    int padded = padded_to(count);
    const DEVICE float* x = p.x + i64(self.y) * p.stride + first;
    for (int i = self.index; i < padded; i += threads) {
        u64 key = i < count ? key_of(x[AT(i)], u32(i)) : ~u64(0);
        bool allowed = true;
        for (int k = 0; k < p.num_suppressed; k++) allowed = allowed && p.suppressed[AT(k)] != u32(first + i);
        // The host reports NaN, also of a suppressed id.
        s.keys[i] = allowed || key >> 32 == 0 ? key : ~u64(0);
    }
    sort(s, padded, self);
    for (int i = self.index; i < KEPT; i += threads) {
        Best best = {-INFINITY, NO_ID};
        if (i < padded && s.keys[i] != ~u64(0)) {
            u32 at = u32(s.keys[i]);
            best.value = x[AT(at)];
            best.id = u32(first) + at;
        }
        p.partial[AT((i64(self.y) * p.parts + self.x) * KEPT + i)] = best;
    }
}

// Grid: (rows).
KERNEL(largest, LargestParams, 1024, 1, Keys) {
    const DEVICE Best* partial = p.partial + i64(self.x) * p.parts * KEPT;
    int count = p.parts * KEPT, padded = padded_to(count), threads = self.warps * 32;
    for (int i = self.index; i < padded; i += threads) {
        s.keys[i] = ~u64(0);
        if (i < count && partial[AT(i)].id != NO_ID) s.keys[i] = key_of(partial[AT(i)].value, partial[AT(i)].id);
    }
    sort(s, padded, self);
    const DEVICE float* x = p.x + i64(self.x) * p.stride;
    for (int i = self.index; i < KEPT; i += threads) {
        Best best = {-INFINITY, NO_ID};
        if (s.keys[i] != ~u64(0)) {
            best.id = u32(s.keys[i]);
            best.value = x[AT(best.id)];
        }
        p.best[AT(self.x * KEPT + i)] = best;
    }
}
