// Floating-point weights times up to 16 rows of f32.
//
// A warp has four outputs, so that a loaded activation serves four; lanes share the inputs, four consecutive ones each: 8 or
// 16 bytes of every weight row per load. Sums are f32 in an order that follows from the inputs alone. Tensor cores would
// round the activations, so that f32 checkpoints would not give the CPU's numbers; up to eight rows the weights' bytes are
// what it costs.
//
// Grid: (outputs by 32, tiles of rows or buckets).

#include "device.cuh"

namespace {

struct Params {
    const void* weights; // (outputs, inputs)
    const float* x;      // (rows, inputs)
    float* y;            // (rows, outputs)
    int rows, inputs, outputs;
};

// Which rows meet which matrix: bucket b is entries starts[b]..starts[b + 1] of the list, 16 at most.
struct BucketParams {
    const void* weights; // (matrices, outputs, inputs)
    const float* x;      // (rows, inputs)
    float* y;            // (entries, outputs)
    const int* matrices; // (buckets): the matrix of a bucket
    const int* starts;   // (buckets + 1)
    const int* count;    // (1): buckets in use
    const int* rows;     // (entries): the row of x; null if it is the entry itself
    int inputs, outputs;
};

constexpr int WARPS = 8, OUTPUTS = 4;

// Entries first..first + count of y, of which `row_of` says the row of x.
template <class E, int ROWS, class RowOf>
__device__ __forceinline__ void matmul(const typename E::Bits* weights, const float* x, float* y, int inputs, int outputs,
                                       int first, int count, RowOf row_of) {
    int lane = threadIdx.x % 32, output = (blockIdx.x * WARPS + threadIdx.x / 32) * OUTPUTS;
    if (output >= outputs) return;
    float sum[ROWS][OUTPUTS] = {};
#pragma unroll 2
    for (int i = lane * 4; i < inputs; i += 128) {
        float w[OUTPUTS][4] = {};
        for (int o = 0; o < OUTPUTS; o++)
            if (output + o < outputs) load4<E>(weights + AT(long(output + o) * inputs + i), w[o]);
        for (int row = 0; row < ROWS; row++) {
            if (row >= count) break;
            float v[4];
            load4<Single>(x + AT(long(row_of(first + row)) * inputs + i), v);
            for (int o = 0; o < OUTPUTS; o++)
                for (int e = 0; e < 4; e++) sum[row][o] = fmaf(w[o][e], v[e], sum[row][o]);
        }
    }
    for (int row = 0; row < ROWS; row++) {
        if (row >= count) break;
        for (int o = 0; o < OUTPUTS; o++) {
            float total = warp_sum(sum[row][o]);
            if (lane == 0 && output + o < outputs) y[AT(long(first + row) * outputs + output + o)] = total;
        }
    }
}

struct Same {
    __device__ __forceinline__ int operator()(int entry) const { return entry; }
};
struct Listed {
    const int* rows;
    __device__ __forceinline__ int operator()(int entry) const { return rows ? rows[AT(entry)] : entry; }
};

template <class E, int ROWS>
__device__ __forceinline__ void matmul(const Params& p) {
    int first = blockIdx.y * ROWS;
    matmul<E, ROWS>(static_cast<const typename E::Bits*>(p.weights), p.x, p.y, p.inputs, p.outputs, first,
                    min(ROWS, p.rows - first), Same());
}

template <class E>
__device__ __forceinline__ void matmul_buckets(const BucketParams& p) {
    int bucket = blockIdx.y;
    if (bucket >= *p.count) return;
    int first = p.starts[AT(bucket)], count = p.starts[bucket + 1] - first;
    const typename E::Bits* weights = static_cast<const typename E::Bits*>(p.weights);
    weights += AT(long(p.matrices[bucket]) * p.outputs) * p.inputs;
    // Eight at a time: sixteen with their rows' places take more registers than there are. Few experts meet more.
    for (int part = 0; part < count; part += 8)
        matmul<E, 8>(weights, p.x, p.y, p.inputs, p.outputs, first + part, min(8, count - part), Listed{p.rows});
}

} // namespace

#define MATMUL(name, E)                                                                                             \
    KERNEL(matmul_##name##_1, Params, 256, 4) { matmul<E, 1>(p); }                                                  \
    KERNEL(matmul_##name##_4, Params, 256, 3) { matmul<E, 4>(p); }                                                  \
    KERNEL(matmul_##name##_16, Params, 256, 2) { matmul<E, 16>(p); }                                                \
    KERNEL(matmul_buckets_##name, BucketParams, 256, 2) { matmul_buckets<E>(p); }

MATMUL(f32, Single)
MATMUL(f16, Half)
MATMUL(bf16, Brain)
