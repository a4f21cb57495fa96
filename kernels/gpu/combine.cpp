// Merges the splits of a query's attention, finishes the softmax, and brings the result back to the model's domain.
//
// A block has one group of 128 channels of one query. First all its threads weigh the splits; then eight warps add up
// outputs, each those of every eighth split. The weights are known by then, so that several splits' outputs are on their way
// at once: at 128 K positions there are hundreds, and one after the other they would take longer than the attention. Who adds
// which split follows from its place in the sequence, and so do the bits.
// Grid: (rows * heads, groups).

#include "attend.h"
#include "rotate.h"

namespace {

struct Params {
    Queries queries; // of the first part
    DEVICE float* y;        // (rows, heads, head_dim)
    int head_dim;
    int splits;
    int parts;        // 2: those of coded pages lie behind those of exact ones
    int rotated;      // 1: outputs are in the rotated domain
    int shared_pairs; // 0: the model's order; else that of a shared store
};

CONSTEXPR int WARPS = 8, THREADS = 32 * WARPS, CHUNK = 512;

template <int LEN>
struct Scratch {
    Wide max[WARPS], sum[WARPS];
    float weight[CHUNK][2]; // of a chunk of splits, of either part
    float output[WARPS][LEN];
};

// The first split, from the call's first on, whose place in the sequence is `rest` modulo `step`.
INLINE int first_of(int rest, int step, int first) { return (rest + step - first % step) % step; }

template <int LEN>
INLINE void combine(const CONSTANT Params& p, THREADGROUP Scratch<LEN>& s, Thread self) {
    constexpr int W = Row<LEN>::W;
    const CONSTANT Queries& q = p.queries;
    int tid = self.index, lane = self.lane, warp = self.warp, query = self.x, group = self.y;
    int all = q.count * q.heads, first = first_split(q);
    int own = first_of(tid, THREADS, first);

    Wide max = wide(-INFINITY);
    for (int split = own; split < p.splits; split += THREADS) {
        for (int part = 0; part < p.parts; part++) {
            Running running = q.running[AT((long(part) * p.splits + split) * all + query)];
            if (running.sum > wide(0.0f) && running.max > max) max = running.max;
        }
    }
    max = warp_max(max);
    if (lane == 0) s.max[warp] = max;
    barrier();
    for (int w = 0; w < WARPS; w++) {
        Wide other = s.max[AT(w)];
        if (other > max) max = other;
    }

    Row<LEN> row = {};
    Wide sum = wide(0.0f);
    for (int chunk = 0; chunk < p.splits; chunk += CHUNK) {
        int end = min(p.splits, chunk + CHUNK);
        for (int split = own; split < end; split += THREADS) {
            if (split < chunk) continue;
            for (int part = 0; part < p.parts; part++) {
                Running running = q.running[AT((long(part) * p.splits + split) * all + query)];
                float weight = 0;
                if (running.sum > wide(0.0f)) {
                    weight = expf(narrow(running.max - max));
                    sum = sum + running.sum * wide(weight);
                }
                s.weight[split - chunk][part] = weight;
            }
        }
        barrier();
#pragma unroll 4
        for (int split = chunk + first_of(warp, WARPS, first + chunk); split < end; split += WARPS) {
            for (int part = 0; part < p.parts; part++) {
                float weight = s.weight[split - chunk][part];
                // Where nothing was seen, nothing was written.
                if (weight == 0) continue;
                const DEVICE float* output = q.output + group * LEN;
                output += ((long(part) * p.splits + split) * all + AT(query)) * p.head_dim;
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
    sum = wide(0.0f);
    for (int w = 0; w < WARPS; w++) sum = sum + s.sum[AT(w)];
    float inverse = sum > wide(0.0f) ? narrow(wide(1.0f) / sum) : 0.0f;
    for (int e = 0; e < W; e++) {
        float v = 0;
        for (int w = 0; w < WARPS; w++) v += s.output[AT(w)][lane * W + e];
        row.v[0][e] = mul(v, inverse);
    }
    if (p.rotated) rotate(row, lane, true);
    for (int e = 0; e < W; e++) {
        int channel = group * LEN + lane * W + e;
        if (p.shared_pairs) channel = shared_channel(channel, p.shared_pairs, p.head_dim);
        p.y[AT(long(query) * p.head_dim + channel)] = row.v[0][e];
    }
}

} // namespace

KERNEL(combine_64, Params, THREADS, 4, Scratch<64>) { combine<64>(p, s, self); }
KERNEL(combine_128, Params, THREADS, 4, Scratch<128>) { combine<128>(p, s, self); }
