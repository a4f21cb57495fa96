// Merges the splits of a query's attention, normalises the softmax, and rotates the result back.
//
// A block processes one group of 128 channels of one query. First all threads compute the splits' weights; then eight
// warps add up outputs, each those of every eighth split. With the weights known, loads of several splits' outputs
// overlap: at 128 K positions there are hundreds of splits, and a sequential merge would take longer than the attention.
// The warp that adds a split follows from the split's position in the sequence, and so do the bits. Grid: (rows * heads,
// groups).

#include "attend.h"
#include "rotate.h"

namespace {

struct Params {
    Queries queries; // with the softmaxes and outputs of the first store
    DEVICE float* y;        // (rows, heads, head_dim)
    int head_dim;
    int splits;
    int stores;       // 2: the partials of quantized pages follow those of exact ones
    int rotated;      // 1: outputs are in the rotated domain
    int k_eq_v_pairs; // 0: channels are in the model's order; else the channels of this many rotary pairs come first
};

CONSTEXPR int WARPS = 8, THREADS = 32 * WARPS, CHUNK = 512;

template <int LEN>
struct Scratch {
    float max[WARPS], sum[WARPS];
    float weight[CHUNK][2]; // (splits of a chunk, stores)
    float output[WARPS][LEN];
};

// The first split, counted from `first`, whose index in the sequence is `rest` modulo `step`.
INLINE int first_of(int rest, int step, int first) { return (rest + step - first % step) % step; }

template <int LEN>
INLINE void combine(const CONSTANT Params& p, THREADGROUP Scratch<LEN>& s, Thread self) {
    constexpr int W = Row<LEN>::W;
    const CONSTANT Queries& q = p.queries;
    int tid = self.index, lane = self.lane, warp = self.warp, query = self.x, group = self.y;
    int all = q.count * q.heads;
    int segment = q.places[AT(q.first + query / q.heads)].segment, first = first_split(q, rows_of(q, segment).start);
    int thread_first = first_of(tid, THREADS, first);

    float max = -INFINITY;
#pragma unroll 1
    for (int split = thread_first; split < p.splits; split += THREADS) {
        for (int store = 0; store < p.stores; store++) {
            OnlineSoftmax softmax = q.softmax[AT((i64(store) * p.splits + split) * all + query)];
            if (softmax.sum > 0) max = fmaxf(max, softmax.max);
        }
    }
    max = warp_max(max);
    if (lane == 0) s.max[warp] = max;
    barrier();
    for (int w = 0; w < WARPS; w++) max = fmaxf(max, s.max[AT(w)]);

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
                if (softmax.sum > 0) {
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
                output += ((i64(store) * p.splits + split) * all + AT(query)) * p.head_dim;
                for (int e = 0; e < W; e++) row.v[0][e] = fmaf(output[AT(lane * W + e)], weight, row.v[0][e]);
            }
        }
        barrier();
    }
    for (int e = 0; e < W; e++) s.output[warp][lane * W + e] = row.v[0][e];
    sum = warp_sum(sum);
    if (lane == 0) s.sum[warp] = sum;
    barrier();
    if (warp > 0) return;
    sum = 0;
    for (int w = 0; w < WARPS; w++) sum += s.sum[AT(w)];
    float inverse = sum > 0 ? 1.0f / sum : 0.0f;
    for (int e = 0; e < W; e++) {
        float v = 0;
        for (int w = 0; w < WARPS; w++) v += s.output[AT(w)][lane * W + e];
        row.v[0][e] = mul(v, inverse);
    }
    if (p.rotated) rotate(row, lane, true);
    for (int e = 0; e < W; e++) {
        int channel = group * LEN + lane * W + e;
        if (p.k_eq_v_pairs) channel = k_eq_v_channel(channel, p.k_eq_v_pairs, p.head_dim);
        p.y[AT(i64(query) * p.head_dim + channel)] = row.v[0][e];
    }
}

} // namespace

KERNEL(combine_32, Params, THREADS, 4, Scratch<32>) { combine<32>(p, s, self); }
KERNEL(combine_64, Params, THREADS, 4, Scratch<64>) { combine<64>(p, s, self); }
KERNEL(combine_128, Params, THREADS, 4, Scratch<128>) { combine<128>(p, s, self); }
