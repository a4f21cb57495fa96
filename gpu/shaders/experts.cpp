// The mixture of experts, except its products: routing, and the weighted sum of the experts' results. The products are
// those of buckets in `matmul.cpp`: every chosen expert is read once, for all rows that chose it.

#include "exponential.h"

namespace {

CONSTEXPR int MAX_ROWS = 16, MAX_CHOICES = 16, PER_LANE = 8;

struct RouteParams {
    const DEVICE float* scores; // (rows, experts)
    const DEVICE float* scale;  // (experts)
    DEVICE int* matrices;       // (entries): the expert of a bucket
    DEVICE int* starts;         // (entries + 1)
    DEVICE int* count;          // (1)
    DEVICE int* rows_of;        // (entries): the row of an entry
    DEVICE int* entries;        // (rows, top_k): the entry of a row's choice, choices in order of expert
    DEVICE float* weights;      // (rows, top_k)
    int rows, experts, top_k;
};

struct Route {
    int expert[MAX_ROWS * MAX_CHOICES];
    float weight[MAX_ROWS * MAX_CHOICES];
    int sorted[MAX_ROWS * MAX_CHOICES];
};

struct MixParams {
    const DEVICE float* parts;   // (entries, width)
    const DEVICE int* entries;   // (rows, top_k)
    const DEVICE float* weights; // (rows, top_k)
    const DEVICE float* shared;  // (rows, width): of an expert that all rows have; or null
    const DEVICE float* gate;    // (rows): its weight before the sigmoid
    DEVICE float* y;             // (rows, width)
    int width, top_k;
};

// A sort key of scores: larger scores are larger, equal scores by lower index.
INLINE u64 rank_of(float x, int index) {
    u32 bits = bits_of(x);
    bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
    return u64(bits) << 32 | (0xffffffffu - u32(index));
}

} // namespace

// One block, a warp per row: the scores of 256 experts are eight per lane. Entries are sorted by counting smaller ones.
KERNEL(route, RouteParams, 32 * MAX_ROWS, 1, Route) {
    int tid = self.index, lane = self.lane, row = self.warp, all = p.rows * p.top_k;
    if (row < p.rows) {
        u64 ranks[PER_LANE];
        for (int i = 0; i < PER_LANE; i++) {
            int expert = lane + 32 * i;
            ranks[i] = expert < p.experts ? rank_of(p.scores[AT(row * p.experts + expert)], expert) : 0;
        }
        float largest = 0, total = 0, exponential = 0;
        int chosen = 0x7fffffff;
        for (int j = 0; j < p.top_k; j++) {
            u64 best = 0;
            for (int i = 0; i < PER_LANE; i++) best = ranks[i] > best ? ranks[i] : best;
            best = warp_max(best);
            for (int i = 0; i < PER_LANE; i++)
                if (ranks[i] == best) ranks[i] = 0;
            int expert = int(0xffffffffu - u32(best));
            float score = p.scores[AT(row * p.experts + expert)];
            if (j == 0) largest = score;
            // The sum over all experts cancels in the renormalisation.
            float e = expf(score - largest);
            total += e;
            if (lane == j) chosen = expert, exponential = e;
        }
        // The choice's index in order of expert.
        int place = 0;
        for (int j = 0; j < p.top_k; j++) place += shuffle(chosen, j) < chosen;
        if (lane < p.top_k) {
            s.expert[AT(row * p.top_k + place) % (MAX_ROWS * MAX_CHOICES)] = chosen;
            s.weight[row * p.top_k + place] = mul(exponential / total, p.scale[AT(chosen)]);
        }
    }
    barrier();
    int entry = 0;
    if (tid < all) {
        int expert = s.expert[tid], entry_row = tid / p.top_k;
        for (int i = 0; i < all; i++) entry += s.expert[i] < expert || (s.expert[i] == expert && i / p.top_k < entry_row);
        s.sorted[entry] = expert;
        p.rows_of[AT(entry)] = entry_row;
        p.entries[AT(tid)] = entry;
        p.weights[AT(tid)] = s.weight[tid];
    }
    barrier();
    if (tid >= all) return;
    // A bucket begins where the expert changes.
    int buckets = 0;
    for (int i = 0; i < tid; i++) buckets += i == 0 || s.sorted[i - 1] != s.sorted[i];
    bool begins = tid == 0 || s.sorted[tid - 1] != s.sorted[tid];
    if (begins) {
        p.matrices[AT(buckets)] = s.sorted[tid];
        p.starts[AT(buckets)] = tid;
    }
    if (tid == all - 1) {
        *p.count = buckets + begins;
        p.starts[AT(buckets + begins)] = all;
    }
}

// A row's experts, added up in their order, then the shared one. Grid: (elements by 256, rows).
KERNEL(mix, MixParams, 256, 4, None) {
    int i = self.x * 256 + self.index, row = self.y;
    if (i >= p.width) return;
    float sum = 0;
    for (int j = 0; j < p.top_k; j++) {
        i64 entry = p.entries[AT(row * p.top_k + j)];
        sum = add(sum, mul(p.weights[AT(row * p.top_k + j)], p.parts[AT(entry * p.width + i)]));
    }
    if (p.shared) sum = add(sum, mul(sigmoid(p.gate[AT(row)]), p.shared[AT(i64(row) * p.width + i)]));
    p.y[AT(i64(row) * p.width + i)] = sum;
}
