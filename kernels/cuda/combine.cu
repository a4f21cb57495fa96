// Merges the splits of a query's attention, finishes the softmax, and brings the result back to the model's domain.
//
// A block has one group of 128 channels of one query. First all its threads weigh the splits; then eight warps add up
// outputs, each those of every eighth split. The weights are known by then, so that several splits' outputs are on their way
// at once: at 128 K positions there are hundreds, and one after the other they would take longer than the attention. Who adds
// which split follows from its place in the sequence, and so do the bits.
// Grid: (rows * heads, groups).

#include "attend.cuh"
#include "rotate.cuh"

namespace {

struct Params {
    Queries queries; // of the first part
    float* y;        // (rows, heads, head_dim)
    int head_dim;
    int splits;
    int parts;        // 2: those of coded pages lie behind those of exact ones
    int rotated;      // 1: outputs are in the rotated domain
    int shared_pairs; // 0: the model's order; else that of a shared store
};

constexpr int WARPS = 8, THREADS = 32 * WARPS, CHUNK = 512;

template <int LEN>
struct Scratch {
    double max[WARPS], sum[WARPS];
    float weight[CHUNK][2]; // of a chunk of splits, of either part
    float output[WARPS][LEN];
};

// The first split, from the call's first on, whose place in the sequence is `rest` modulo `step`.
__device__ __forceinline__ int first_of(int rest, int step, int first) { return (rest + step - first % step) % step; }

template <int LEN>
__device__ __forceinline__ void combine(const Params& p) {
    SHARED(Scratch<LEN>, s);
    constexpr int W = Row<LEN>::W;
    const Queries& q = p.queries;
    int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, query = blockIdx.x, group = blockIdx.y;
    int all = q.count * q.heads, first = first_split(q);
    int own = first_of(tid, THREADS, first);

    double max = -INFINITY;
    for (int split = own; split < p.splits; split += THREADS) {
        for (int part = 0; part < p.parts; part++) {
            Running running = q.running[AT((long(part) * p.splits + split) * all + query)];
            if (running.sum > 0 && running.max > max) max = running.max;
        }
    }
    max = warp_max(max);
    if (lane == 0) s.max[warp] = max;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) max = s.max[AT(w)] > max ? s.max[w] : max;

    Row<LEN> row = {};
    double sum = 0;
    for (int chunk = 0; chunk < p.splits; chunk += CHUNK) {
        int end = min(p.splits, chunk + CHUNK);
        for (int split = own; split < end; split += THREADS) {
            if (split < chunk) continue;
            for (int part = 0; part < p.parts; part++) {
                Running running = q.running[AT((long(part) * p.splits + split) * all + query)];
                float weight = running.sum > 0 ? expf(float(running.max - max)) : 0.0f;
                if (running.sum > 0) sum += running.sum * double(weight);
                s.weight[split - chunk][part] = weight;
            }
        }
        __syncthreads();
#pragma unroll 4
        for (int split = chunk + first_of(warp, WARPS, first + chunk); split < end; split += WARPS) {
            for (int part = 0; part < p.parts; part++) {
                float weight = s.weight[split - chunk][part];
                // Where nothing was seen, nothing was written.
                if (weight == 0) continue;
                const float* output = q.output + ((long(part) * p.splits + split) * all + AT(query)) * p.head_dim + group * LEN;
                for (int e = 0; e < W; e++) row.v[0][e] = fmaf(output[AT(lane * W + e)], weight, row.v[0][e]);
            }
        }
        __syncthreads();
    }
    for (int e = 0; e < W; e++) s.output[warp][lane * W + e] = row.v[0][e];
    sum = warp_sum(sum);
    if (lane == 0) s.sum[warp] = sum;
    __syncthreads();
    if (warp > 0) return;
    sum = 0;
    for (int w = 0; w < WARPS; w++) sum += s.sum[AT(w)];
    float inverse = sum > 0 ? float(1.0 / sum) : 0.0f;
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

KERNEL(combine_64, Params, THREADS, 4) { combine<64>(p); }
KERNEL(combine_128, Params, THREADS, 4) { combine<128>(p); }
