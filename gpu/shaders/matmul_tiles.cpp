// Quantized weights times many rows of activations, with the bits of matmul.cpp.
//
// There, every warp has inputs of its own, and so loads its own activations for 16 outputs. Here, the warps of a block have a
// panel of 16 outputs each and walk over the same inputs: the activations of a tile of 32 rows are copied to shared memory
// once for all of them, two stages of 256 inputs ahead.
//
//   stage s + 2  copied      |  32 rows x 256 inputs: quants 8 KiB, scales, sums; once per block
//   stage s      multiplied  |  warp w: panel 8 b + w, its weights from device memory, into 16 x 32 sums in registers
//
// The sums are those of matmul.cpp: each of its warps' runs of weight blocks is summed from zero, and then added to the
// sum of the runs before.
//
// Grid: (tiles of 32 rows; groups of 8 panels of all products), so that the tiles of a group run at about the same time and read
// its weights once from memory; (groups of 8 panels; buckets of up to 32 rows).

#include "formats_256.h"
#include "matrix.h"

namespace {

CONSTEXPR int PANELS = 8, TILES = 4, COLUMNS = 8 * TILES;
CONSTEXPR int INPUTS = 256, GROUPS = INPUTS / 32; // of a stage
CONSTEXPR int STAGES = 3;                         // as many as fit: 28.5 of 32 KiB
// Columns of a block's scales in blocks of 32: four more, so that the copies of 4 rows by 8 blocks are to different banks.
CONSTEXPR int PADDED = COLUMNS + 4;

// Activations of a tile. `quants` has the words of activations.h: of every 8 rows, the lanes' 8 bytes follow each other, so
// that a warp's loads have no bank conflicts.
template <int BLOCK>
struct Stage {
    uint4 quants[TILES * GROUPS * 16];
    uint4 sums[COLUMNS]; // eight i16 of a row
    float scales[COLUMNS];
};
template <>
struct Stage<32> {
    uint4 quants[TILES * GROUPS * 16];
    float scales[GROUPS * PADDED]; // [block][row]
    u16 sums[GROUPS * COLUMNS];    // [block][row]
};

template <int BLOCK>
struct Stages {
    Stage<BLOCK> at[STAGES];
    int rows[COLUMNS]; // of the activations; columns without a row have the last row
};

// A stage as a format reads it: blocks and groups are counted from the stage's first.
template <int BLOCK>
struct StagedColumns {
    static CONSTEXPR bool STAGED = true;
    const THREADGROUP Stage<BLOCK>* stage;
    int lane;
    int live[TILES];
};

template <int BLOCK>
INLINE uint2 quants(const THREAD StagedColumns<BLOCK>& x, int tile, int group) {
    return reinterpret_cast<const THREADGROUP uint2*>(x.stage->quants)[AT((tile * GROUPS + group) * 32 + x.lane)];
}
// Columns 2 t and 2 t + 1 as one load.
INLINE float2 scales(const THREAD StagedColumns<256>& x, int tile, int) {
    return reinterpret_cast<const THREADGROUP float2*>(x.stage->scales)[AT(tile * 4 + x.lane % 4)];
}
INLINE float2 scales(const THREAD StagedColumns<32>& x, int tile, int block) {
    return reinterpret_cast<const THREADGROUP float2*>(x.stage->scales)[AT(block * (PADDED / 2) + tile * 4 + x.lane % 4)];
}
INLINE uint4 bsums(const THREAD StagedColumns<256>& x, int tile, int column, int) {
    return x.stage->sums[AT(tile * 8 + x.lane % 4 * 2 + column)];
}
INLINE float2 scaled_sums(const THREAD StagedColumns<32>& x, int tile, int block) {
    u32 both = reinterpret_cast<const THREADGROUP u32*>(x.stage->sums)[AT(block * (COLUMNS / 2) + tile * 4 + x.lane % 4)];
    float2 sums;
    sums.x = half_to_float(u16(both)), sums.y = half_to_float(u16(both >> 16));
    return sums;
}

// Begins to copy the quants of groups `group..` of 32 inputs: a thread copies half of a group of every second 8 rows.
INLINE void copy_quants(const CONSTANT Activations& x, const THREADGROUP int* rows, int group, THREADGROUP uint4* to, Thread self) {
    const int each = GROUPS * 16, together = PANELS * 32 / each;
    int groups = x.inputs / 32, i = self.index % each, at = group + i / 16;
    if (at >= groups) return;
    for (int n = 0; n < TILES / together; n++) {
        int tile = n * together + self.index / each;
        // Less than 2^31 in a launch's activations.
        int from = int(quant_at(rows[tile * 8 + i % 16 / 2], at, groups) / 4) + i % 2;
        copy_async(to + tile * each + i, reinterpret_cast<const DEVICE uint4*>(x.quants) + AT(from));
    }
}

// Begins to copy the activations of weight blocks `block..` to a stage.
template <bool SUMS>
INLINE void copy_stage(const CONSTANT Activations& x, const THREADGROUP int* rows, int block, THREADGROUP Stage<256>& to,
                       Thread self) {
    copy_quants(x, rows, block * GROUPS, to.quants, self);
    int at = rows[self.lane] * (x.inputs / 256) + block;
    if (self.warp == 0) copy_async(to.scales + self.lane, x.scales + AT(at));
    if (SUMS && self.warp == 1) copy_async(to.sums + self.lane, reinterpret_cast<const DEVICE uint4*>(x.sums) + AT(at));
}
template <bool SUMS>
INLINE void copy_stage(const CONSTANT Activations& x, const THREADGROUP int* rows, int block, THREADGROUP Stage<32>& to,
                       Thread self) {
    copy_quants(x, rows, block, to.quants, self);
    int blocks = x.inputs / 32, column = self.index / GROUPS, i = self.index % GROUPS;
    if (block + i >= blocks) return;
    int at = rows[column] * blocks + block + i;
    copy_async(to.scales + i * PADDED + column, x.scales + AT(at));
    // Of two bytes: not aligned for asynchronous copies.
    if (SUMS) to.sums[i * COLUMNS + column] = x.sums[AT(at)];
}

// Ends a run: adds its sums to the total.
INLINE void add_run(THREAD Results<TILES>& run, THREAD Results<TILES>& total) {
    for (int tile = 0; tile < TILES; tile++)
        for (int i = 0; i < 4; i++) {
            total[tile][i / 2][i % 2] = add(total[tile][i / 2][i % 2], run[tile][i / 2][i % 2]);
            run[tile][i / 2][i % 2] = 0;
        }
}

// Adds the products of blocks `first..first + count`, which are staged in `x`, and ends the runs that end there, of which the
// first has `left` blocks left.
template <class F>
INLINE void add_stage(const DEVICE u8* weights, int first, int count, int warp_blocks, THREAD int& left,
                      const THREAD StagedColumns<F::BLOCK>& x, THREAD Results<TILES>& run, THREAD Results<TILES>& total) {
    for (int block = 0; block < count;) {
        int end = F::BLOCK == INPUTS ? 1 : min(count, block + left);
        left -= end - block;
        // Blocks of 32 are one load each: unrolled, so that loads overlap, as far as there are registers on every device.
#pragma unroll(F::BLOCK == 32 ? 2 : 1)
        for (; block < end; block++)
            F::template add<TILES>(weights + AT(i64(first + block)) * (16 * F::BYTES), block, x.lane / 4, x.lane % 4, x, run);
        if (left > 0) continue;
        add_run(run, total);
        left = warp_blocks;
    }
}

// A matrix, and the activations that it is multiplied by.
struct Operands {
    const DEVICE u8* weights; // of the warp's panel
    int warp_blocks;
    int count;       // columns with a row
    bool prefetches; // of the blocks that have this panel at the same time, one loads it into the L2 cache
};

// The sums over all inputs of a panel's rows 2 g and 2 g + 1 and the columns 2 t and 2 t + 1 of the rows in `s`.
template <class F>
INLINE void sum_panel(const CONSTANT Activations& x, Operands of, THREAD Results<TILES>& total,
                      THREADGROUP Stages<F::BLOCK>& s, Thread self) {
    const int blocks_of_stage = INPUTS / F::BLOCK, lines = blocks_of_stage * 16 * F::BYTES;
    int blocks = x.inputs / F::BLOCK, left = of.warp_blocks, stage = 0;
    StagedColumns<F::BLOCK> columns = {s.at, self.lane, {}};
    for (int tile = 0; tile < TILES; tile++) columns.live[tile] = min(max(of.count - tile * 8, 0), 8);
    Results<TILES> run = {};
    for (int ahead = 0; ahead < STAGES - 1; ahead++) {
        if (ahead * blocks_of_stage < blocks) copy_stage<F::SUMS>(x, s.rows, ahead * blocks_of_stage, s.at[ahead], self);
        end_copies();
    }
    for (int first = 0; first < blocks; first += blocks_of_stage) {
        wait_for_copies<STAGES - 2>();
        // Also ends the multiplications of the stage before, whose memory is the next to be copied to.
        barrier();
        int ahead = first + (STAGES - 1) * blocks_of_stage;
        if (ahead < blocks) copy_stage<F::SUMS>(x, s.rows, ahead, s.at[stage == 0 ? STAGES - 1 : stage - 1], self);
        end_copies();
        if (of.prefetches && ahead + blocks_of_stage <= blocks)
            for (int line = self.lane * 128; line < lines; line += 32 * 128)
                prefetch(of.weights + i64(ahead) * (16 * F::BYTES) + line);
        columns.stage = s.at + stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        int count = F::BLOCK == INPUTS ? 1 : min(blocks_of_stage, blocks - first);
        add_stage<F>(of.weights, first, count, of.warp_blocks, left, columns, run, total);
    }
    // A shorter last run.
    if (left < of.warp_blocks) add_run(run, total);
}

// Writes a panel's results to `y`, of the first column.
INLINE void store(const THREAD Results<TILES>& total, int count, int outputs, DEVICE float* y, Thread self) {
    int g = self.lane / 4, t = self.lane % 4;
    for (int tile = 0; tile < TILES; tile++)
        for (int column = 0; column < 2; column++) {
            int row = tile * 8 + 2 * t + column;
            if (row >= count) continue;
            float2 both;
            both.x = total[tile][0][column], both.y = total[tile][1][column];
            reinterpret_cast<DEVICE float2*>(y + AT(i64(row)) * outputs)[AT(g)] = both;
        }
}

template <class F>
INLINE void matmul_tiles(const CONSTANT Params& p, THREADGROUP Stages<F::BLOCK>& s, Thread self) {
    BlockOf at = block_of(p.products, p.count, self.y);
    const CONSTANT Product& product = p.products[at.product];
    int panel = at.index * PANELS + self.warp, panels = product.outputs / 16, first = self.x * COLUMNS;
    if (self.index < COLUMNS) s.rows[self.index] = min(first + self.index, p.rows - 1);
    barrier();
    // A warp without a panel computes the last one, because barriers need it.
    const DEVICE u8* weights = product.weights + AT(i64(min(panel, panels - 1))) * p.shape.panel_bytes;
    Results<TILES> total = {};
    sum_panel<F>(p.x, {weights, p.shape.warp_blocks, p.rows - first, self.x == 0}, total, s, self);
    if (panel >= panels) return;
    store(total, p.rows - first, product.outputs, product.y + i64(first) * product.outputs + panel * 16, self);
}

template <class F>
INLINE void matmul_buckets(const CONSTANT BucketParams& p, THREADGROUP Stages<F::BLOCK>& s, Thread self) {
    int bucket = self.y;
    if (bucket >= *p.count) return;
    int first = p.starts[AT(bucket)], count = p.starts[bucket + 1] - first;
    int panel = self.x * PANELS + self.warp, panels = p.outputs / 16;
    if (self.index < COLUMNS) {
        int entry = first + min(self.index, count - 1);
        s.rows[self.index] = p.rows ? p.rows[AT(entry)] : entry;
    }
    barrier();
    int index = p.matrices[AT(bucket)] * panels + min(panel, panels - 1);
    Results<TILES> total = {};
    sum_panel<F>(p.x, {p.weights + i64(index) * p.shape.panel_bytes, p.shape.warp_blocks, count, true}, total, s, self);
    if (panel >= panels) return;
    store(total, count, p.outputs, p.y + AT(i64(first)) * p.outputs + panel * 16, self);
}

} // namespace

#define MATMUL_TILES(name, F)                                                                                       \
    KERNEL(matmul_##name##_tiles, Params, 256, 2, Stages<F::BLOCK>) { matmul_tiles<F>(p, s, self); }                \
    KERNEL(matmul_buckets_##name##_tiles, BucketParams, 256, 2, Stages<F::BLOCK>) { matmul_buckets<F>(p, s, self); }

MATMUL_TILES(q4_0, Q4_0)
MATMUL_TILES(q5_0, Q5_0)
MATMUL_TILES(q8_0, Q8_0)
MATMUL_TILES(q4_k, Q4_K)
MATMUL_TILES(q5_k, Q5_K)
MATMUL_TILES(q6_k, Q6_K)
MATMUL_TILES(q4_1, Q4_1)
MATMUL_TILES(q5_1, Q5_1)
MATMUL_TILES(iq4_nl, IQ4_NL)
MATMUL_TILES(mxfp4, MXFP4)
MATMUL_TILES(q2_k, Q2_K)
MATMUL_TILES(q3_k, Q3_K)
MATMUL_TILES(iq4_xs, IQ4_XS)
