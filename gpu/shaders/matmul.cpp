// Quantized weights times rows of activations, and the same for the matrices of chosen experts or centroids.
//
// A block of threads computes one panel of 16 outputs; its warps divide the inputs into runs of whole weight blocks, and
// their sums are added in the order of the runs. The number of warps depends on the matrix only, so that the bits of a row do
// not depend on other rows. On tensor cores 8 columns cost what one costs, in 64 registers, so that 32 warps fit a
// multiprocessor; 16 or 32 columns take two or four mma per A fragment, which is unpacked once, and twice the registers.
//
// Where there are asynchronous copies, a warp copies its run through shared memory, two stages ahead, and begins before the
// inputs are ready: loads into registers keep too few bytes in flight.
//
// Grid: (tiles of 8, 16 or 32 rows; panels of all products), so that tiles of a panel run at about the same time and read it once
// from memory; (panels, buckets).

#include "formats_256.h"
#include "matrix.h"

namespace {

// The shared memory of a warp: its weights on the way, then its sums.
template <class F, int TILES>
struct OfWarp {
#ifdef COPIES
    // Blocks of a stage: 256 inputs, or 128 if a block of 32 takes more than 24 bytes.
    static CONSTEXPR int BLOCKS = F::BLOCK == 256 ? 1 : (F::BYTES > 24 ? 4 : 8), STAGE = BLOCKS * 16 * F::BYTES;
    // Columns of sums are padded by four floats: half as many bank conflicts.
    static CONSTEXPR int STAGES = 2, BYTES = STAGES * STAGE, COLUMN = 20;
    static_assert(BYTES >= TILES * 8 * COLUMN * 4, "the sums");
#else
    static CONSTEXPR int COLUMN = 16, BYTES = TILES * 8 * COLUMN * 4;
#endif
    alignas(16) u8 bytes[BYTES];
};

// A warp's run of a panel.
struct Run {
    const DEVICE u8* weights; // of block 0
    int begin, end;           // blocks
};
INLINE Run run_of(const CONSTANT Shape& m, const DEVICE u8* panel, int block, Thread self) {
    int begin = self.warp * m.warp_blocks;
    return {panel, begin, min(m.inputs / block, begin + m.warp_blocks)};
}

#ifdef COPIES
// Starts copying a stage, the blocks from `first` on, if there are any.
template <class F, int TILES>
INLINE void copy_stage(Run run, int first, int stage, THREADGROUP OfWarp<F, TILES>& s, Thread self) {
    const int STAGE = OfWarp<F, TILES>::STAGE;
    int bytes = (run.end - first) * (16 * F::BYTES);
    const DEVICE uint4* from = reinterpret_cast<const DEVICE uint4*>(run.weights + i64(first) * (16 * F::BYTES));
    THREADGROUP uint4* to = reinterpret_cast<THREADGROUP uint4*>(s.bytes + stage * STAGE);
#pragma unroll
    for (int i = self.lane; i < STAGE / 16; i += 32)
        if (i * 16 < bytes) copy_async(to + i, from + i);
    end_copies();
}
template <class F, int TILES>
INLINE void copy_first_stages(Run run, THREADGROUP OfWarp<F, TILES>& s, Thread self) {
    for (int stage = 0; stage < OfWarp<F, TILES>::STAGES; stage++)
        copy_stage<F, TILES>(run, run.begin + stage * OfWarp<F, TILES>::BLOCKS, stage, s, self);
}

template <class F, int TILES>
INLINE void before_inputs(const CONSTANT Params& p, THREADGROUP OfWarp<F, TILES>* s, Thread self) {
    BlockOf at = block_of(p.products, p.count, self.y);
    const DEVICE u8* panel = p.products[at.product].weights + i64(at.index) * p.shape.panel_bytes;
    copy_first_stages(run_of(p.shape, panel, F::BLOCK, self), s[self.warp], self);
}

// Adds a run whose first stages are being copied.
template <class F, int TILES>
INLINE void add_run(Run run, const THREAD Columns<TILES>& columns, THREAD Results<TILES>& sums, THREADGROUP OfWarp<F, TILES>& s,
                    Thread self) {
    typedef OfWarp<F, TILES> Of;
    int stage = 0;
    for (int first = run.begin; first < run.end; first += Of::BLOCKS) {
        wait_for_copies<Of::STAGES - 1>();
        warp_barrier();
        const THREADGROUP u8* at = s.bytes + stage * Of::STAGE;
#pragma unroll(F::BLOCK == 32 ? 4 : 1)
        for (int i = 0; i < Of::BLOCKS; i++)
            if (first + i < run.end)
                F::template add<TILES>(at + i * (16 * F::BYTES), first + i, self.lane / 4, self.lane % 4, columns, sums);
        warp_barrier();
        copy_stage(run, first + Of::STAGES * Of::BLOCKS, stage, s, self);
        stage = stage + 1 == Of::STAGES ? 0 : stage + 1;
    }
}
#else
template <class F, int TILES>
INLINE void copy_first_stages(Run, THREADGROUP OfWarp<F, TILES>&, Thread) {}

template <class F, int TILES>
INLINE void add_run(Run run, const THREAD Columns<TILES>& columns, THREAD Results<TILES>& sums, THREADGROUP OfWarp<F, TILES>&,
                    Thread self) {
    // Blocks of 32 are one load each: unrolled, so that several loads overlap.
#pragma unroll(F::BLOCK == 32 ? 4 : 1)
    for (int block = run.begin; block < run.end; block++)
        F::template add<TILES>(run.weights + i64(block) * (16 * F::BYTES), block, self.lane / 4, self.lane % 4, columns, sums);
}
#endif

// Rows `first..first + count` of the columns of y, from `output` on, that a panel of weights computes.
template <class F, int TILES, class RowOf>
INLINE void panel(const CONSTANT Shape& m, Run run, const CONSTANT Activations& x, DEVICE float* y, int output, int outputs,
                  int first, int count, RowOf row_of, THREADGROUP OfWarp<F, TILES>* s, Thread self) {
    const int COLUMN = OfWarp<F, TILES>::COLUMN;
    int g = self.lane / 4, t = self.lane % 4;
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
    add_run<F, TILES>(run, columns, sums, s[self.warp], self);
    THREADGROUP float* own = reinterpret_cast<THREADGROUP float*>(s[self.warp].bytes);
    for (int tile = 0; tile < TILES; tile++)
        for (int i = 0; i < 4; i++) own[AT(tile * 8 + 2 * t + i % 2) * COLUMN + 2 * g + i / 2] = sums[tile][i / 2][i % 2];
    barrier();
    for (int i = self.index; i < count * 16; i += self.warps * 32) {
        float sum = 0;
        for (int w = 0; w < self.warps; w++)
            sum += reinterpret_cast<const THREADGROUP float*>(s[w].bytes)[i / 16 * COLUMN + i % 16];
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
INLINE void matmul(const CONSTANT Params& p, THREADGROUP OfWarp<F, TILES>* s, Thread self) {
    int first = self.x * (8 * TILES);
    BlockOf at = block_of(p.products, p.count, self.y);
    const CONSTANT Product& product = p.products[at.product];
    Run run = run_of(p.shape, product.weights + AT(i64(at.index)) * p.shape.panel_bytes, F::BLOCK, self);
    panel<F, TILES>(p.shape, run, p.x, product.y, at.index * 16, product.outputs, first, min(8 * TILES, p.rows - first), Same(),
                    s, self);
}

template <class F, int TILES>
INLINE void matmul_buckets(const CONSTANT BucketParams& p, THREADGROUP OfWarp<F, TILES>* s, Thread self) {
    int bucket = self.y;
    if (bucket >= *p.count) return;
    int first = p.starts[AT(bucket)], count = p.starts[bucket + 1] - first;
    int index = p.matrices[AT(bucket)] * (p.outputs / 16) + self.x;
    Run run = run_of(p.shape, p.weights + i64(index) * p.shape.panel_bytes, F::BLOCK, self);
    copy_first_stages(run, s[self.warp], self);
    panel<F, TILES>(p.shape, run, p.x, p.y, self.x * 16, p.outputs, first, count, Listed{p.rows}, s, self);
}

} // namespace

#define MATMUL(name, F)                                                                                                    \
    KERNEL_PER_WARP(matmul_##name##_8, Params, 512, 2, OfWarp<F, 1>) { matmul<F, 1>(p, s, self); }                         \
    KERNEL_PER_WARP(matmul_##name##_16, Params, 512, 1, OfWarp<F, 2>) { matmul<F, 2>(p, s, self); }                        \
    KERNEL_PER_WARP(matmul_##name##_32, Params, 512, 1, OfWarp<F, 4>) { matmul<F, 4>(p, s, self); }                        \
    KERNEL_PER_WARP(matmul_buckets_##name##_8, BucketParams, 512, 2, OfWarp<F, 1>) { matmul_buckets<F, 1>(p, s, self); }   \
    KERNEL_PER_WARP(matmul_buckets_##name##_16, BucketParams, 512, 1, OfWarp<F, 2>) { matmul_buckets<F, 2>(p, s, self); }

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
