// Merges the splits of a query's attention, finishes the softmax, and brings the result back to the model's domain.
//
// A block per query: eight warps take the splits in turn, by their places in the sequence, and are added up in order, so that
// the bits follow from the splits alone. A hundred splits of 2 KiB are latency, not bandwidth: eight of them on their way.
// Grid: (rows * heads).

#include "attend.cuh"
#include "rotate.cuh"

namespace {

struct Params {
    Queries queries; // of the first part
    float* y;        // (rows, heads, HD)
    int splits;
    int parts;        // 2: those of coded pages lie behind those of exact ones
    int rotated;      // 1: outputs are in the rotated domain
    int shared_pairs; // 0: the model's order; else that of a shared store
};

constexpr int WARPS = 8;

template <int HD>
struct Scratch {
    float output[WARPS][HD];
    double sum[WARPS], max[WARPS];
};

template <int HD>
__device__ __forceinline__ void combine(const Params& p) {
    SHARED(Scratch<HD>, s);
    constexpr int GROUPS = Row<HD>::GROUPS, W = Row<HD>::W;
    const Queries& q = p.queries;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, query = blockIdx.x, all = q.count * q.heads, slots = p.splits * p.parts;
    double max = -INFINITY;
    for (int slot = threadIdx.x; slot < slots; slot += 32 * WARPS) {
        Running running = q.running[AT(long(slot) * all + query)];
        if (running.sum > 0 && running.max > max) max = running.max;
    }
    max = warp_max(max);
    if (lane == 0) s.max[warp] = max;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) max = s.max[AT(w)] > max ? s.max[w] : max;
    Row<HD> row = {};
    double sum = 0;
    int first = first_split(q);
    for (int slot = 0; slot < slots; slot++) {
        if ((first + slot % p.splits) % WARPS != warp) continue;
        Running running = q.running[AT(long(slot) * all + query)];
        if (!(running.sum > 0)) continue;
        float weight = expf(float(running.max - max));
        sum += running.sum * double(weight);
        const float* output = q.output + AT(long(slot) * all + query) * HD;
        for (int group = 0; group < GROUPS; group++)
            for (int e = 0; e < W; e++)
                row.v[group][e] = fmaf(output[AT(Row<HD>::channel(lane, group, e))], weight, row.v[group][e]);
    }
    for (int group = 0; group < GROUPS; group++)
        for (int e = 0; e < W; e++) s.output[warp][Row<HD>::channel(lane, group, e)] = row.v[group][e];
    if (lane == 0) s.sum[warp] = sum;
    __syncthreads();
    if (warp > 0) return;
    sum = 0;
    for (int w = 0; w < WARPS; w++) sum += s.sum[AT(w)];
    float inverse = sum > 0 ? float(1.0 / sum) : 0.0f;
    for (int group = 0; group < GROUPS; group++) {
        for (int e = 0; e < W; e++) {
            float v = 0;
            for (int w = 0; w < WARPS; w++) v += s.output[AT(w)][Row<HD>::channel(lane, group, e)];
            row.v[group][e] = mul(v, inverse);
        }
    }
    if (p.rotated) rotate(row, lane, true);
    if (p.shared_pairs) {
        // Only this warp is left.
        for (int group = 0; group < GROUPS; group++)
            for (int e = 0; e < W; e++) s.output[0][Row<HD>::channel(lane, group, e)] = row.v[group][e];
        __syncwarp();
        for (int group = 0; group < GROUPS; group++)
            for (int e = 0; e < W; e++)
                row.v[group][e] = s.output[0][AT(shared_place<HD>(Row<HD>::channel(lane, group, e), p.shared_pairs))];
    }
    for (int group = 0; group < GROUPS; group++)
        for (int e = 0; e < W; e++) p.y[AT(long(query) * HD + Row<HD>::channel(lane, group, e))] = row.v[group][e];
}

} // namespace

KERNEL(combine_64, Params, 32 * WARPS, 4) { combine<64>(p); }
KERNEL(combine_128, Params, 32 * WARPS, 4) { combine<128>(p); }
KERNEL(combine_256, Params, 32 * WARPS, 4) { combine<256>(p); }
KERNEL(combine_512, Params, 32 * WARPS, 4) { combine<512>(p); }
