// Merges the splits of a query's attention, normalises the softmax, and rotates the result back.
//
// A block processes one query. First all threads compute the splits' weights; then eight warps for each group of 128 channels add
// up outputs, each those of every eighth split. With the weights known, loads of several splits' outputs overlap: at 128 K
// positions there are hundreds of splits, and a sequential merge would take longer than the attention. The warp that adds a split
// follows from the split's position in the sequence, and so do the bits.
//
// A NaN score makes its split's sum NaN, and all of the query's result.
//
// Up to 32 splits: one warp per group of channels, whose lanes have a split's weight each. It adds the same numbers in the same
// order, without barriers. Grid: (rows * heads).

#include "attend.h"
#include "quantize.h"
#include "rotate.h"

namespace {

struct Params {
    Queries queries; // with the softmaxes and outputs of the first store
    DEVICE float* y;        // (rows, heads, head_dim)
    Activations out; // of y, if a query has whole blocks of 256 channels
    int block; // inputs of a block of activations: 32 or 256; 0: none
    int splits;
    int stores;       // 2: the partials of quantized pages follow those of exact ones
    int rotated;      // 1: outputs are in the rotated domain
    int k_eq_v_pairs; // 0: channels are in the model's order; else the channels of this many rotary pairs come first
};

CONSTEXPR int WARPS = 8, CHUNK = 512; // warps of a group

// Groups of LEN channels.
template <int LEN, int GROUPS>
struct Scratch {
    float max[WARPS * GROUPS], sum[WARPS * GROUPS];
    float weight[CHUNK][2]; // (splits of a chunk, stores)
    float output[WARPS][LEN * GROUPS];
    alignas(16) float y[LEN * GROUPS];
};

// The first split, counted from `first`, whose index in the sequence is `rest` modulo `step`.
INLINE int first_of(int rest, int step, int first) { return (rest + step - first % step) % step; }

// Normalises a group of channels, rotates it back, and writes it to `y` and the shared row.
template <int LEN, int GROUPS>
INLINE void write(const CONSTANT Params& p, THREAD Row<LEN>& row, float sum, int query, int group, THREADGROUP float* y, int lane) {
    const int W = Row<LEN>::W, HD = LEN * GROUPS;
    float inverse = sum != 0 ? 1.0f / sum : 0.0f;
    for (int e = 0; e < W; e++) row.v[0][e] = mul(row.v[0][e], inverse);
    if (p.rotated) rotate(row, lane, true);
    for (int e = 0; e < W; e++) {
        int channel = group * LEN + lane * W + e;
        if (p.k_eq_v_pairs) channel = k_eq_v_channel(channel, p.k_eq_v_pairs, HD);
        p.y[AT(i64(query) * HD + channel)] = y[AT(channel)] = row.v[0][e];
    }
}

// Quantizes a row of HD channels, 256 per warp.
template <int HD>
INLINE void quantize_row(const CONSTANT Params& p, int query, const THREADGROUP float* y, Thread self) {
    if (self.warp * 256 >= HD) return;
    float v[8];
    for (int i = 0; i < 8; i++) v[i] = y[AT(self.warp * 256 + self.lane * 8 + i)];
    int heads = p.queries.heads, at = query % heads * HD + self.warp * 256 + self.lane * 8;
    quantize(p.out, p.block, query / heads, at, self.lane, v);
}

template <int LEN, int GROUPS>
INLINE void combine(const CONSTANT Params& p, THREADGROUP Scratch<LEN, GROUPS>& s, Thread self) {
    const int W = Row<LEN>::W, HD = LEN * GROUPS, ALL_WARPS = WARPS * GROUPS, THREADS = 32 * ALL_WARPS;
    const CONSTANT Queries& q = p.queries;
    int tid = self.index, lane = self.lane, query = self.x, group = self.warp / WARPS, warp = self.warp % WARPS;
    int all = q.count * q.heads;
    int segment = q.places[AT(q.first + query / q.heads)].segment, first = first_split(q, rows_of(q, segment).start);
    int thread_first = first_of(tid, THREADS, first);

    float max = -INFINITY;
#pragma unroll 1
    for (int split = thread_first; split < p.splits; split += THREADS) {
        for (int store = 0; store < p.stores; store++) {
            OnlineSoftmax softmax = q.softmax[AT((i64(store) * p.splits + split) * all + query)];
            if (softmax.sum != 0) max = fmaxf(max, softmax.max);
        }
    }
    max = warp_max(max);
    if (lane == 0) s.max[self.warp] = max;
    barrier();
    for (int w = 0; w < ALL_WARPS; w++) max = fmaxf(max, s.max[AT(w)]);

    Row<LEN> row = {};
    float sum = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < p.splits; chunk += CHUNK) {
        int end = min(p.splits, chunk + CHUNK);
#pragma unroll 1
        for (int split = thread_first; split < end; split += THREADS) {
            if (split < chunk) continue;
            for (int store = 0; store < p.stores; store++) {
                OnlineSoftmax softmax = q.softmax[AT((i64(store) * p.splits + split) * all + query)];
                float weight = 0;
                if (softmax.sum != 0) {
                    weight = exponential(softmax.max - max);
                    sum = fmaf(softmax.sum, weight, sum);
                }
                s.weight[split - chunk][store] = weight;
            }
        }
        barrier();
#pragma unroll 1
        for (int store = 0; store < p.stores; store++) {
#pragma unroll 4
            for (int split = chunk + first_of(warp, WARPS, first + chunk); split < end; split += WARPS) {
                float weight = s.weight[split - chunk][store];
                // No visible key: the output is not written.
                if (weight == 0) continue;
                const DEVICE float* output = q.output + group * LEN;
                output += ((i64(store) * p.splits + split) * all + AT(query)) * HD;
                for (int e = 0; e < W; e++) row.v[0][e] = fmaf(output[AT(lane * W + e)], weight, row.v[0][e]);
            }
        }
        barrier();
    }
    for (int e = 0; e < W; e++) s.output[warp][group * LEN + lane * W + e] = row.v[0][e];
    sum = warp_sum(sum);
    if (lane == 0) s.sum[self.warp] = sum;
    barrier();
    if (warp == 0) {
        sum = 0;
        for (int w = 0; w < ALL_WARPS; w++) sum += s.sum[AT(w)];
        for (int e = 0; e < W; e++) {
            float v = 0;
            for (int w = 0; w < WARPS; w++) v += s.output[AT(w)][group * LEN + lane * W + e];
            row.v[0][e] = v;
        }
        write<LEN, GROUPS>(p, row, sum, query, group, s.y, lane);
    }
    if (p.block == 0) return;
    barrier();
    quantize_row<LEN * GROUPS>(p, query, s.y, self);
}

template <int LEN, int GROUPS>
struct FewScratch {
    alignas(16) float y[LEN * GROUPS];
};

template <int LEN, int GROUPS>
INLINE void combine_few(const CONSTANT Params& p, THREADGROUP FewScratch<LEN, GROUPS>& s, Thread self) {
    const int W = Row<LEN>::W, HD = LEN * GROUPS, ALL_WARPS = WARPS * GROUPS;
    const CONSTANT Queries& q = p.queries;
    int lane = self.lane, query = self.x, group = self.warp, all = q.count * q.heads;
    int segment = q.places[AT(q.first + query / q.heads)].segment, first = first_split(q, rows_of(q, segment).start);
    // The lane of a split is that of the thread which has it in `combine`.
    int own = first_of(lane, 32, first);
    OnlineSoftmax softmax[2] = {empty_softmax(), empty_softmax()};
    for (int store = 0; store < 2; store++)
        if (store < p.stores && own < p.splits) softmax[store] = q.softmax[AT((i64(store) * p.splits + own) * all + query)];
    float max = -INFINITY, weight[2] = {0, 0}, sum = 0;
    for (int store = 0; store < 2; store++)
        if (softmax[store].sum != 0) max = fmaxf(max, softmax[store].max);
    max = warp_max(max);
    for (int store = 0; store < 2; store++) {
        if (softmax[store].sum == 0) continue;
        weight[store] = exponential(softmax[store].max - max);
        sum = fmaf(softmax[store].sum, weight[store], sum);
    }
    // Consecutive splits are in two warps of `combine` at most.
    bool second = (first + own) / 32 % ALL_WARPS != first / 32 % ALL_WARPS;
    sum = warp_sum(second ? 0.0f : sum) + warp_sum(second ? sum : 0.0f);

    Row<LEN> row = {};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        float part[W] = {};
        for (int store = 0; store < p.stores; store++) {
            for (int split = first_of(w, WARPS, first); split < p.splits; split += WARPS) {
                float of_split = shuffle(store == 0 ? weight[0] : weight[1], (first + split) % 32);
                // No visible key: the output is not written.
                if (of_split == 0) continue;
                const DEVICE float* output = q.output + group * LEN;
                output += ((i64(store) * p.splits + split) * all + AT(query)) * HD;
                for (int e = 0; e < W; e++) part[e] = fmaf(output[AT(lane * W + e)], of_split, part[e]);
            }
        }
        for (int e = 0; e < W; e++) row.v[0][e] += part[e];
    }
    write<LEN, GROUPS>(p, row, sum, query, group, s.y, lane);
    if (p.block == 0) return;
    barrier();
    quantize_row<HD>(p, query, s.y, self);
}

} // namespace

#define COMBINE(head_dim, LEN, GROUPS)                                                                              \
    KERNEL(combine_##head_dim, Params, 32 * WARPS * GROUPS, GROUPS < 4 ? 4 / GROUPS : 1, Scratch<LEN, GROUPS>) {        \
        combine<LEN, GROUPS>(p, s, self);                                                                            \
    }                                                                                                               \
    KERNEL(combine_few_##head_dim, Params, 32 * GROUPS, 8, FewScratch<LEN, GROUPS>) { combine_few<LEN, GROUPS>(p, s, self); }

COMBINE(32, 32, 1)
COMBINE(64, 64, 1)
COMBINE(128, 128, 1)
COMBINE(256, 128, 2)
COMBINE(512, 128, 4)
