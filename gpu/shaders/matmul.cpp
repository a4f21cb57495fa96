// Quantized weights times rows of activations, and the same for the matrices of chosen experts or centroids.
//
// A block of threads computes one panel of 16 outputs; its warps divide the inputs into runs of whole weight blocks, and
// their sums are added in the order of the runs. The number of warps depends on the matrix only, so that the bits of a row do
// not depend on other rows. On tensor cores 8 columns cost what one costs, in 64 registers, so that 32 warps fit a
// multiprocessor; 16 or 32 columns take two or four mma per A fragment, which is unpacked once, and twice the registers. A small
// matrix is a chain of latencies: its first blocks prefetch their weights while the kernel before computes the inputs.
//
// Grid: (tiles of 8, 16 or 32 rows; panels of all products), so that tiles of a panel run at about the same time and read it once
// from memory; (panels, buckets).

#include "formats_256.h"
#include "products.h"

namespace {

CONSTEXPR int MAX_WARPS = 16;

// Packed panels of 16 rows, of one or several matrices.
struct Shape {
    int inputs;
    int warp_blocks; // weight blocks per warp
    int panel_bytes;
    int prefetched;  // bytes of a panel to prefetch before the inputs are ready
};

struct Params {
    Product products[MAX_PRODUCTS]; // their blocks are panels
    Activations x;
    Shape shape;
    int rows, count; // `count` products
};

// Entries by matrix: bucket b is entries starts[b]..starts[b + 1] of the list.
struct BucketParams {
    const DEVICE u8* weights; // matrices one after the other
    Activations x;
    DEVICE float* y;            // (entries, outputs)
    const DEVICE int* matrices; // (buckets): the matrix of a bucket
    const DEVICE int* starts;   // (buckets + 1)
    const DEVICE int* count;    // (1): buckets in use
    const DEVICE int* rows;     // (entries): the row of x; null if it is the entry itself
    Shape shape;
    int outputs; // of one matrix, a multiple of 16
};

// Blocks that run at once on an H200 with two on each multiprocessor: later ones do not wait for inputs.
CONSTEXPR int FIRST_BLOCKS = 264;

INLINE void before_inputs(const CONSTANT Params& p, Thread self) {
    if (self.y >= FIRST_BLOCKS) return;
    BlockOf at = block_of(p.products, p.count, self.y);
    const DEVICE u8* panel = p.products[at.product].weights + i64(at.index) * p.shape.panel_bytes;
    for (int line = self.index * 128; line < p.shape.prefetched; line += self.warps * 32 * 128) prefetch(panel + line);
}

template <int TILES>
struct Partial {
    float y[MAX_WARPS][TILES * 8][16];
};

// Rows `first..first + count` of the columns of y, from `output` on, that a panel of weights computes.
template <class F, int TILES, class RowOf>
INLINE void panel(const CONSTANT Shape& m, const DEVICE u8* weights, const CONSTANT Activations& x, DEVICE float* y, int output,
                  int outputs, int first, int count, RowOf row_of, THREADGROUP Partial<TILES>& s, Thread self) {
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
    int end = min(blocks, (warp + 1) * m.warp_blocks);
    // Blocks of 32 are one load each: unrolled, so that several loads overlap.
#pragma unroll(F::BLOCK == 32 ? 4 : 1)
    for (int block = warp * m.warp_blocks; block < end; block++)
        F::template add<TILES>(weights + AT(i64(block)) * (16 * F::BYTES), block, g, t, columns, sums);
    for (int tile = 0; tile < TILES; tile++)
        for (int i = 0; i < 4; i++)
            s.y[warp][AT(tile * 8 + 2 * t + i % 2)][2 * g + i / 2] = sums[tile][i / 2][i % 2];
    barrier();
    for (int i = self.index; i < count * 16; i += self.warps * 32) {
        float sum = 0;
        for (int w = 0; w < self.warps; w++) sum += s.y[w][i / 16][i % 16];
        y[AT(i64(first + i / 16) * outputs + output + i % 16)] = sum;
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
    int first = self.x * (8 * TILES);
    BlockOf at = block_of(p.products, p.count, self.y);
    const CONSTANT Product& product = p.products[at.product];
    const DEVICE u8* weights = product.weights + AT(i64(at.index)) * p.shape.panel_bytes;
    panel<F, TILES>(p.shape, weights, p.x, product.y, at.index * 16, product.outputs, first, min(8 * TILES, p.rows - first),
                    Same(), s, self);
}

template <class F, int TILES>
INLINE void matmul_buckets(const CONSTANT BucketParams& p, THREADGROUP Partial<TILES>& s, Thread self) {
    int bucket = self.y;
    if (bucket >= *p.count) return;
    int first = p.starts[AT(bucket)], count = p.starts[bucket + 1] - first;
    int index = p.matrices[AT(bucket)] * (p.outputs / 16) + self.x;
    const DEVICE u8* weights = p.weights + i64(index) * p.shape.panel_bytes;
    panel<F, TILES>(p.shape, weights, p.x, p.y, self.x * 16, p.outputs, first, count, Listed{p.rows}, s, self);
}

} // namespace

#define MATMUL(name, F)                                                                                             \
    KERNEL(matmul_##name##_8, Params, 512, 2, Partial<1>) { matmul<F, 1>(p, s, self); }                             \
    KERNEL(matmul_##name##_16, Params, 512, 1, Partial<2>) { matmul<F, 2>(p, s, self); }                            \
    KERNEL(matmul_##name##_32, Params, 512, 1, Partial<4>) { matmul<F, 4>(p, s, self); }                            \
    KERNEL(matmul_buckets_##name##_8, BucketParams, 512, 2, Partial<1>) { matmul_buckets<F, 1>(p, s, self); }       \
    KERNEL(matmul_buckets_##name##_16, BucketParams, 512, 1, Partial<2>) { matmul_buckets<F, 2>(p, s, self); }

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
