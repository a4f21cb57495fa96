// Quantized weights times 1 to 16 rows of activations, and the same for the matrices of chosen experts or centroids.
//
// A block of threads computes one panel of 16 outputs; its warps divide the inputs into runs of whole weight blocks, and
// their sums are added in the order of the runs. The number of warps depends on the number of inputs only, so that the
// bits of a row do not depend on other rows. A small matrix (2560 by 2560: 160 panels) then has 50,000 threads and more
// in flight, a 10 KiB panel per block: enough loads to saturate 4.8 TB/s, unlike one warp per panel. On tensor cores 8
// columns cost what one costs, in 64 registers, so that two blocks of 16 warps fit a multiprocessor; 9 to 16 columns take
// two mma per A fragment, which is unpacked once, and twice the registers.
//
// Grid: (panels, tiles of 16 rows or buckets).

#include "formats_256.h"

namespace {

CONSTEXPR int MAX_WARPS = 16;

struct Matrix {
    const DEVICE u8* weights; // packed panels of one or several matrices, one after the other
    int inputs;
    int outputs;     // of one matrix, a multiple of 16
    int warp_blocks; // weight blocks per warp
};

struct Params {
    Matrix matrix;
    Activations x;
    DEVICE float* y; // (rows, outputs)
    int rows;
};

// Entries by matrix: bucket b is entries starts[b]..starts[b + 1] of the list.
struct BucketParams {
    Matrix matrix;
    Activations x;
    DEVICE float* y;            // (entries, outputs)
    const DEVICE int* matrices; // (buckets): the matrix of a bucket
    const DEVICE int* starts;   // (buckets + 1)
    const DEVICE int* count;    // (1): buckets in use
    const DEVICE int* rows;     // (entries): the row of x; null if it is the entry itself
};

template <int TILES>
struct Partial {
    float y[MAX_WARPS][TILES * 8][16];
};

// Columns `first..first + count` of the result.
template <class F, int TILES, class RowOf>
INLINE void panel(const CONSTANT Matrix& m, const DEVICE u8* weights, const CONSTANT Activations& x, DEVICE float* y,
                  int first, int count, RowOf row_of, THREADGROUP Partial<TILES>& s, Thread self) {
    int lane = self.lane, g = lane / 4, t = lane % 4, warp = self.warp;
    int blocks = m.inputs / F::BLOCK, groups = m.inputs / 32;
    Columns<TILES> columns = {x.quants, x.scales, x.sums, blocks, groups, {}, {}, {}};
    for (int tile = 0; tile < TILES; tile++) {
        // Columns without a row use the last row, whose repeated loads cost nothing, so that loads are unconditional.
        int column = min(tile * 8 + g, count - 1);
        columns.live[tile] = min(max(count - tile * 8, 0), 8);
        columns.quants_at[tile] = int(quant_at(row_of(first + AT(column)), 0, groups) / 2) + t;
        for (int i = 0; i < 2; i++) {
            column = min(tile * 8 + 2 * t + i, count - 1);
            columns.rows[tile][i] = row_of(first + AT(column));
        }
    }
    Results<TILES> sums = {};
    const DEVICE u8* at = weights + i64(self.x) * blocks * (16 * F::BYTES);
    int end = min(blocks, (warp + 1) * m.warp_blocks);
    // Blocks of 32 are one load each: unrolled, so that several loads overlap.
#pragma unroll(F::BLOCK == 32 ? 4 : 1)
    for (int block = warp * m.warp_blocks; block < end; block++)
        F::template add<TILES>(at + AT(i64(block)) * (16 * F::BYTES), block, g, t, columns, sums);
    for (int tile = 0; tile < TILES; tile++)
        for (int i = 0; i < 4; i++)
            s.y[warp][AT(tile * 8 + 2 * t + i % 2)][2 * g + i / 2] = sums[tile][i / 2][i % 2];
    barrier();
    for (int i = self.index; i < count * 16; i += self.warps * 32) {
        float sum = 0;
        for (int w = 0; w < self.warps; w++) sum += s.y[w][i / 16][i % 16];
        y[AT(i64(first + i / 16) * m.outputs + self.x * 16 + i % 16)] = sum;
    }
}

struct Same {
    INLINE int operator()(int entry) const { return entry; }
};
struct Listed {
    const DEVICE int* rows;
    INLINE int operator()(int entry) const { return rows ? rows[AT(entry)] : entry; }
};

template <class F, int TILES>
INLINE void matmul(const CONSTANT Params& p, THREADGROUP Partial<TILES>& s, Thread self) {
    int first = self.y * (8 * TILES);
    panel<F, TILES>(p.matrix, p.matrix.weights, p.x, p.y, first, min(8 * TILES, p.rows - first), Same(), s, self);
}

template <class F>
INLINE void matmul_buckets(const CONSTANT BucketParams& p, THREADGROUP Partial<2>& s, Thread self) {
    int bucket = self.y;
    if (bucket >= *p.count) return;
    int first = p.starts[AT(bucket)], count = p.starts[bucket + 1] - first;
    i64 matrix_bytes = i64(p.matrix.outputs) * (p.matrix.inputs / F::BLOCK) * F::BYTES;
    const DEVICE u8* weights = p.matrix.weights + AT(p.matrices[bucket]) * matrix_bytes;
    panel<F, 2>(p.matrix, weights, p.x, p.y, first, count, Listed{p.rows}, s, self);
}

} // namespace

#define MATMUL(name, F)                                                                                             \
    KERNEL(matmul_##name##_8, Params, 512, 2, Partial<1>) { matmul<F, 1>(p, s, self); }                             \
    KERNEL(matmul_##name##_16, Params, 512, 1, Partial<2>) { matmul<F, 2>(p, s, self); }                            \
    KERNEL(matmul_buckets_##name, BucketParams, 512, 1, Partial<2>) { matmul_buckets<F>(p, s, self); }

MATMUL(q4_0, Q4_0)
MATMUL(q5_0, Q5_0)
MATMUL(q8_0, Q8_0)
MATMUL(q4_k, Q4_K)
MATMUL(q5_k, Q5_K)
MATMUL(q6_k, Q6_K)
MATMUL(q4_1, Q4_1)
MATMUL(q5_1, Q5_1)
MATMUL(iq4_nl, IQ4_NL)
MATMUL(mxfp4, MXFP4)
MATMUL(q2_k, Q2_K)
MATMUL(q3_k, Q3_K)
MATMUL(iq4_xs, IQ4_XS)
