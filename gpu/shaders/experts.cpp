// The mixture of experts, except its products: routing, and the weighted sum of the experts' results. The products are
// those of buckets: every chosen expert is read once for up to 16 rows that chose it (`matmul.cpp`), or 32 (`matmul_tiles.cpp`).

#include "exponential.h"

namespace {

CONSTEXPR int BLOCK_ROWS = 16, WARPS_TO_SORT = 32; // rows of a block; warps of the kernel that sorts
CONSTEXPR int MAX_ENTRIES = 4096, MAX_EXPERTS = 256, PER_LANE = MAX_EXPERTS / 32;

struct RouteParams {
    const DEVICE float* scores; // (rows, experts)
    const DEVICE float* scale;  // (experts)
    DEVICE int* matrices;       // (buckets): the expert of a bucket
    DEVICE int* starts;         // (buckets + 1)
    DEVICE int* count;          // (1)
    DEVICE int* rows_of;        // (entries): the row of an entry
    DEVICE int* entries;        // (rows, top_k): the entry of a row's choice, choices in order of expert; unsorted, its expert
    DEVICE float* weights;      // (rows, top_k)
    int rows, experts, top_k;
    int largest;                // entries of a bucket, at most
};

// A warp sorts a run of consecutive choices, of at most MAX_ENTRIES / WARPS_TO_SORT.
struct Route {
    u8 expert[MAX_ENTRIES];                // of a choice
    u8 rank[MAX_ENTRIES];                  // among the choices of its run that have its expert
    u16 counts[WARPS_TO_SORT][MAX_EXPERTS]; // (runs, experts): choices; then those of the runs before
    u16 first[MAX_EXPERTS];                // the first entry of an expert
    u32 sums[MAX_EXPERTS / 32];            // of 32 experts: entries, and buckets << 16
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

INLINE int up(int a, int b) { return (a + b - 1) / b; }

// A warp's row: its experts in order, and their weights. The scores of 256 experts are eight per lane.
INLINE void choose(const CONSTANT RouteParams& p, int row, THREADGROUP Route& s, int lane) {
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
    if (lane >= p.top_k) return;
    int at = row * p.top_k + place;
    if (p.rows > BLOCK_ROWS) p.entries[AT(at)] = chosen;
    else s.expert[AT(at)] = u8(chosen);
    p.weights[AT(at)] = mul(exponential / total, p.scale[AT(chosen)]);
}

// Ranks the choices first..end of a warp's run, 32 at a time, and counts them by expert.
INLINE void rank(const CONSTANT RouteParams& p, int first, int end, THREADGROUP Route& s, Thread self) {
    int lane = self.lane;
    for (int expert = lane; expert < p.experts; expert += 32) s.counts[self.warp][AT(expert)] = 0;
    warp_barrier();
    for (; first < end; first += 32) {
        int i = first + lane, expert = i < end ? s.expert[AT(i)] : -1, place = 0;
        bool last = true;
        for (int j = 0; j < 32; j++) {
            bool same = shuffle(expert, j) == expert;
            place += same && j < lane;
            last = last && !(same && j > lane);
        }
        if (i < end) {
            place += s.counts[self.warp][AT(expert)];
            s.rank[AT(i)] = u8(place);
        }
        warp_barrier();
        if (i < end && last) s.counts[self.warp][AT(expert)] = u16(place + 1);
        warp_barrier();
    }
}

// Sorts the choices by expert, then row, and divides every expert's entries into buckets. One block; a thread per expert.
INLINE void sort(const CONSTANT RouteParams& p, THREADGROUP Route& s, Thread self) {
    int all = p.rows * p.top_k, run = 32 * up(all, 32 * self.warps), tid = self.index, lane = self.lane;
    int first = self.warp * run, end = min(first + run, all);
    if (first < all) rank(p, first, end, s, self);
    barrier();
    int total = 0;
    if (tid < p.experts) {
        for (int i = 0; i * run < all; i++) {
            int count = s.counts[i][AT(tid)];
            s.counts[i][AT(tid)] = u16(total);
            total += count;
        }
    }
    u32 both = u32(total) | u32(up(total, p.largest)) << 16, sum = both;
    for (int i = 1; i < 32; i *= 2) {
        u32 other = shuffle(sum, max(lane - i, 0));
        if (lane >= i) sum += other;
    }
    if (lane == 31 && tid < MAX_EXPERTS) s.sums[AT(self.warp)] = sum;
    barrier();
    if (tid < p.experts) {
        for (int i = 0; i < self.warp; i++) sum += s.sums[AT(i)];
        int entry = int(sum - both) & 0xffff, bucket = int((sum - both) >> 16);
        s.first[AT(tid)] = u16(entry);
        for (int i = 0; i < total; i += p.largest, bucket++) {
            p.matrices[AT(bucket)] = tid;
            p.starts[AT(bucket)] = entry + i;
        }
        if (tid == p.experts - 1) {
            *p.count = bucket;
            p.starts[AT(bucket)] = all;
        }
    }
    barrier();
    for (int i = first + lane; i < end; i += 32) {
        int expert = s.expert[AT(i)], entry = s.first[AT(expert)] + s.counts[self.warp][AT(expert)] + s.rank[AT(i)];
        p.entries[AT(i)] = entry;
        p.rows_of[AT(entry)] = i / p.top_k;
    }
}

} // namespace

// A warp per row, 16 rows per block; a block that has all rows sorts their choices, for which others need another launch.
KERNEL(route, RouteParams, 32 * BLOCK_ROWS, 1, Route) {
    int row = self.x * BLOCK_ROWS + self.warp;
    if (row < p.rows) choose(p, row, s, self.lane);
    if (p.rows > BLOCK_ROWS) return;
    barrier();
    sort(p, s, self);
}

KERNEL(sort_route, RouteParams, 32 * WARPS_TO_SORT, 1, Route) {
    for (int i = self.index; i < p.rows * p.top_k; i += 32 * WARPS_TO_SORT) s.expert[AT(i)] = u8(p.entries[AT(i)]);
    barrier();
    sort(p, s, self);
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
