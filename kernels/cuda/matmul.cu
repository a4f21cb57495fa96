// Quantized weights times 1 to 16 rows of activations, and the same for the matrices of chosen experts or centroids.
//
// A block of threads has one panel of 16 outputs; its warps share the inputs, a run of whole weight blocks each, and add up
// in the order of the runs. How many warps follows from the inputs alone, so that the bits of a row do not depend on the
// others. A small matrix (2560 by 2560: 160 panels) then has 50,000 threads and more in flight, a 10 KiB panel per block:
// enough loads to keep 4.8 TB/s busy, which one warp per panel would not. Tensor cores make 8 columns cost what one costs,
// in 64 registers, so that two blocks of 16 warps fit a multiprocessor; 9 to 16 columns take two mma per weight operand,
// which is unpacked once, and twice the registers.
//
// Grid: (panels, tiles of 16 rows or buckets). Block: (32, warps).

#include "formats.cuh"

namespace {

constexpr int MOST_WARPS = 16;

struct Matrix {
    const u8* weights; // packed panels; of several matrices, one after the other
    int inputs;
    int outputs;     // of one matrix, a multiple of 16
    int warp_blocks; // weight blocks per warp
};

struct Params {
    Matrix matrix;
    Activations x;
    float* y; // (rows, outputs)
    int rows;
};

// Which rows meet which matrix: bucket b is entries starts[b]..starts[b + 1] of the list.
struct BucketParams {
    Matrix matrix;
    Activations x;
    float* y;            // (entries, outputs)
    const int* matrices; // (buckets): the matrix of a bucket
    const int* starts;   // (buckets + 1)
    const int* count;    // (1): buckets in use
    const int* rows;     // (entries): the row of x; null if it is the entry itself
};

template <int TILES>
struct Partial {
    float y[MOST_WARPS][TILES * 8][16];
};

// Columns `first..first + count` of the result.
template <class F, int TILES, class RowOf>
__device__ __forceinline__ void panel(const Matrix& m, const u8* weights, const Activations& x, float* y, int first, int count,
                                      RowOf row_of) {
    SHARED(Partial<TILES>, partial);
    int lane = threadIdx.x, g = lane / 4, t = lane % 4, warp = threadIdx.y;
    int blocks = m.inputs / F::BLOCK, groups = m.inputs / 32;
    Columns<TILES> columns = {x.quants, x.scales, x.sums, blocks, groups, {}, {}};
    for (int tile = 0; tile < TILES; tile++) {
        int column = tile * 8 + g;
        columns.quants_at[tile] = -1;
        if (column < count) columns.quants_at[tile] = int(quant_at(row_of(first + AT(column)), 0, groups) / 2) + t;
        for (int i = 0; i < 2; i++) {
            column = tile * 8 + 2 * t + i;
            columns.rows[tile][i] = column < count ? row_of(first + AT(column)) : -1;
        }
    }
    Results<TILES> sums = {};
    const u8* at = weights + long(blockIdx.x) * blocks * (16 * F::BYTES);
    int end = min(blocks, (warp + 1) * m.warp_blocks);
    // Blocks of 32 are a single load: several at a time.
#pragma unroll(F::BLOCK == 32 ? 4 : 1)
    for (int block = warp * m.warp_blocks; block < end; block++)
        F::template add<TILES>(at + AT(long(block)) * (16 * F::BYTES), block, g, t, columns, sums);
    for (int tile = 0; tile < TILES; tile++)
        for (int i = 0; i < 4; i++)
            partial.y[warp][AT(tile * 8 + 2 * t + i % 2)][2 * g + i / 2] = sums[tile][i / 2][i % 2];
    __syncthreads();
    for (int i = warp * 32 + lane; i < count * 16; i += blockDim.y * 32) {
        float sum = 0;
        for (int w = 0; w < int(blockDim.y); w++) sum += partial.y[w][i / 16][i % 16];
        y[AT(long(first + i / 16) * m.outputs + blockIdx.x * 16 + i % 16)] = sum;
    }
}

struct Same {
    __device__ __forceinline__ int operator()(int entry) const { return entry; }
};
struct Listed {
    const int* rows;
    __device__ __forceinline__ int operator()(int entry) const { return rows ? rows[AT(entry)] : entry; }
};

template <class F, int TILES>
__device__ __forceinline__ void matmul(const Params& p) {
    int first = blockIdx.y * (8 * TILES);
    panel<F, TILES>(p.matrix, p.matrix.weights, p.x, p.y, first, min(8 * TILES, p.rows - first), Same());
}

template <class F>
__device__ __forceinline__ void matmul_buckets(const BucketParams& p) {
    int bucket = blockIdx.y;
    if (bucket >= *p.count) return;
    int first = p.starts[AT(bucket)], count = p.starts[bucket + 1] - first;
    long matrix_bytes = long(p.matrix.outputs) * (p.matrix.inputs / F::BLOCK) * F::BYTES;
    const u8* weights = p.matrix.weights + AT(p.matrices[bucket]) * matrix_bytes;
    panel<F, 2>(p.matrix, weights, p.x, p.y, first, count, Listed{p.rows});
}

} // namespace

#define MATMUL(name, F)                                                                                             \
    KERNEL(matmul_##name##_8, Params, 512, 2) { matmul<F, 1>(p); }                                                  \
    KERNEL(matmul_##name##_16, Params, 512, 1) { matmul<F, 2>(p); }                                                 \
    KERNEL(matmul_buckets_##name, BucketParams, 512, 1) { matmul_buckets<F>(p); }

MATMUL(q4_0, Q4_0)
MATMUL(q5_0, Q5_0)
MATMUL(q8_0, Q8_0)
MATMUL(q4_k, Q4_K)
MATMUL(q5_k, Q5_K)
MATMUL(q6_k, Q6_K)
