// Weights of bf16 times rows of f32, on tensor cores where there are any (`mma_bf16`).
//
// The inputs are eight runs of whole steps of 32. A step's products are summed by `mma_bf16`, steps within a run and then the
// runs by rounded additions, in order. That depends on the number of inputs only: every kernel here gives a row the same bits,
// whatever the other rows and the number of outputs.
//
// Up to eight rows, or where tiles would be few: a warp per run, each of which reads its part of 16 or 32 weight rows once.
// More rows: tiles of 128 outputs by 32 rows, whose operands, split into pieces once, are staged in shared memory.
//
// Grid: (tiles of rows; outputs by the block's, of all products), so that tiles of a block of weights run at about the same
// time; (outputs by 16; buckets).

#include "float_products.h"

namespace {

CONSTEXPR int RUNS = 8, STEP = 32;

INLINE int steps_of(int inputs) { return (inputs + STEP - 1) / STEP; }
INLINE int steps_of_run(int inputs) { return (steps_of(inputs) + RUNS - 1) / RUNS; }

// Eight inputs of a row from `k` on, of a whole step: rows begin at multiples of 16 bytes if `inputs` is a multiple of 8.
INLINE uint4 eight_weights(const DEVICE u16* row, int k) { return *reinterpret_cast<const DEVICE uint4*>(row + AT(k)); }
INLINE void eight_inputs(const DEVICE float* row, int k, THREAD float (&x)[8]) {
    for (int i = 0; i < 8; i += 4) {
        float four[4];
        load4<Single>(row + AT(k + i), four);
        for (int e = 0; e < 4; e++) x[i + e] = four[e];
    }
}

// The same of any step and row: zeros after the last of `inputs`, a multiple of 4.
INLINE uint4 some_weights(const DEVICE u16* row, int k, int inputs) {
    uint4 words = {0, 0, 0, 0};
    if (inputs % 8 == 0) {
        if (k < inputs) words = eight_weights(row, k);
        return words;
    }
    uint2 first = {0, 0}, second = {0, 0};
    if (k < inputs) first = *reinterpret_cast<const DEVICE uint2*>(row + AT(k));
    if (k + 4 < inputs) second = *reinterpret_cast<const DEVICE uint2*>(row + AT(k + 4));
    return {first.x, first.y, second.x, second.y};
}
INLINE void some_inputs(const DEVICE float* row, int k, int inputs, THREAD float (&x)[8]) {
    for (int i = 0; i < 8; i += 4) {
        float four[4] = {};
        if (k + i < inputs) load4<Single>(row + AT(k + i), four);
        for (int e = 0; e < 4; e++) x[i + e] = four[e];
    }
}

// Weight rows g and g + 8 as `mma_bf16` takes them.
struct Rows {
    uint4 first, second;
};
INLINE Rows interleaved(uint4 a, uint4 a8) { return {{a.x, a8.x, a.y, a8.y}, {a.z, a8.z, a.w, a8.w}}; }

// Adds a step's products, if it `counts`.
INLINE void add_step(Rows a, const THREAD Pieces& b, int t, int live, THREAD float (&sum)[4], bool counts = true) {
    float part[4] = {};
    mma_bf16(part, a.first, a.second, b, t, live);
    for (int i = 0; i < 4; i++) sum[i] = add(sum[i], counts ? part[i] : 0.0f);
}

// Sums by run, row and output.
template <int TILES>
struct Partial {
    float y[RUNS][8][16 * TILES];
};

// A warp's operands: 16 * TILES weight rows and the columns.
template <int TILES>
struct Operands {
    const DEVICE u16* weights[2 * TILES]; // rows g, g + 8, ...
    const DEVICE float* x;                // of column g
};

// The sums of a warp's run. Loads of several steps, eight of weights, come before their products.
template <int TILES>
INLINE void run_sums(const THREAD Operands<TILES>& at, int inputs, int live, THREAD float (&sum)[TILES][4], Thread self) {
    constexpr int AHEAD = 4 / TILES;
    int t = self.lane % 4, per_run = steps_of_run(inputs);
    int step = self.warp * per_run, end = min(steps_of(inputs), step + per_run);
    int whole = inputs % 8 == 0 ? min(end, inputs / STEP) : step;
    for (; step < whole; step += AHEAD) {
        uint4 w[AHEAD][2 * TILES];
        float x[AHEAD][8];
        for (int i = 0; i < AHEAD; i++) {
            // Steps after the last are loaded as the last, from the same cache lines, and do not count.
            int k = min(step + i, whole - 1) * STEP + 8 * t;
            for (int row = 0; row < 2 * TILES; row++) w[i][row] = eight_weights(at.weights[row], k);
            eight_inputs(at.x, k, x[i]);
        }
        // Without branches, so that the products of a step do not wait for those of the step before.
        for (int i = 0; i < AHEAD; i++) {
            Pieces b = pieces(x[i]);
            bool counts = step + i < whole;
            for (int tile = 0; tile < TILES; tile++)
                add_step(interleaved(w[i][2 * tile], w[i][2 * tile + 1]), b, t, live, sum[tile], counts);
        }
    }
    for (step = max(self.warp * per_run, whole); step < end; step++) {
        int k = step * STEP + 8 * t;
        float x[8];
        some_inputs(at.x, k, inputs, x);
        Pieces b = pieces(x);
        for (int tile = 0; tile < TILES; tile++) {
            uint4 a = some_weights(at.weights[2 * tile], k, inputs), a8 = some_weights(at.weights[2 * tile + 1], k, inputs);
            add_step(interleaved(a, a8), b, t, live, sum[tile]);
        }
    }
}

// Entries first..first + count of y, eight at most, and 16 * TILES outputs; `row_of` maps an entry to its row of x.
template <int TILES, class RowOf>
INLINE void panel(const DEVICE u16* weights, const DEVICE float* x, DEVICE float* y, int inputs, int outputs, int output,
                  int first, int count, RowOf row_of, THREADGROUP Partial<TILES>& s, Thread self) {
    int g = self.lane / 4, t = self.lane % 4;
    // Outputs and columns beyond the last are computed as the last, from the same cache lines, and not written.
    Operands<TILES> at;
    at.x = x + AT(i64(row_of(first + min(g, count - 1))) * inputs);
    for (int i = 0; i < 2 * TILES; i++) at.weights[i] = weights + AT(i64(min(output + 8 * i + g, outputs - 1)) * inputs);
    float sum[TILES][4] = {};
    run_sums<TILES>(at, inputs, count, sum, self);
    for (int tile = 0; tile < TILES; tile++)
        for (int i = 0; i < 4; i++) s.y[self.warp][2 * t + AT(i % 2)][16 * tile + g + i / 2 * 8] = sum[tile][i];
    barrier();
    int row = self.index / (16 * TILES), column = self.index % (16 * TILES);
    if (row >= count || output + column >= outputs) return;
    float total = 0;
    for (int run = 0; run < RUNS; run++) total = add(total, s.y[run][row][column]);
    y[AT(i64(first + row) * outputs + output + column)] = total;
}

template <int TILES>
INLINE void matmul(const CONSTANT Params& p, THREADGROUP Partial<TILES>& s, Thread self) {
    int first = self.x * 8;
    BlockOf block = block_of(p.products, p.count, self.y);
    const CONSTANT Product& product = p.products[block.product];
    panel<TILES>(reinterpret_cast<const DEVICE u16*>(product.weights), p.x, product.y, p.inputs, product.outputs,
                 block.index * (16 * TILES), first, min(8, p.rows - first), Same(), s, self);
}

INLINE void matmul_buckets(const CONSTANT BucketParams& p, THREADGROUP Partial<1>& s, Thread self) {
    int bucket = self.y;
    if (bucket >= *p.count) return;
    int first = p.starts[AT(bucket)], count = p.starts[bucket + 1] - first;
    const DEVICE u16* weights = reinterpret_cast<const DEVICE u16*>(p.weights);
    weights += AT(i64(p.matrices[bucket]) * p.outputs) * p.inputs;
    for (int part = 0; part < count; part += 8) {
        if (part > 0) barrier(); // before the sums of the part before are overwritten
        panel<1>(weights, p.x, p.y, p.inputs, p.outputs, self.x * 16, first + part, min(8, count - part), Listed{p.rows}, s,
                 self);
    }
}

CONSTEXPR int TILE_OUTPUTS = 128, TILE_ROWS = 32;

// A step's operands: 14 KiB.
struct Stage {
    uint4 first[TILE_OUTPUTS / 2][4], second[TILE_OUTPUTS / 2][4]; // of Rows
    Pieces x[TILE_ROWS][4];
};
struct Stages {
    Stage at[2];
};

// What a thread stages: eight inputs of two weight rows, eight apart, and the first 128 threads of a row of x.
struct Staged {
    const DEVICE u16* weights[2];
    const DEVICE float* x;
    uint4 w[2];
    float v[8];
};
INLINE void load(THREAD Staged& staged, int step, int inputs, int index) {
    int k = step * STEP + index % 4 * 8;
    for (int i = 0; i < 2; i++) staged.w[i] = some_weights(staged.weights[i], k, inputs);
    if (index < TILE_ROWS * 4) some_inputs(staged.x, k, inputs, staged.v);
}
INLINE void store(const THREAD Staged& staged, THREADGROUP Stage& stage, int index) {
    Rows rows = interleaved(staged.w[0], staged.w[1]);
    stage.first[AT(index / 4)][index % 4] = rows.first;
    stage.second[AT(index / 4)][index % 4] = rows.second;
    if (index < TILE_ROWS * 4) stage.x[AT(index / 4)][index % 4] = pieces(staged.v);
}

// A warp's products of a stage: 32 outputs by 16 rows.
INLINE void add_stage(const THREADGROUP Stage& stage, int output, int row, int rows, THREAD float (&sum)[2][2][4],
                      Thread self) {
    int g = self.lane / 4, t = self.lane % 4;
    Rows a[2];
    for (int m = 0; m < 2; m++)
        a[m] = {stage.first[output / 2 + 8 * m + AT(g)][t], stage.second[output / 2 + 8 * m + AT(g)][t]};
    for (int n = 0; n < 2; n++) {
        Pieces b = stage.x[row + AT(8 * n + g)][t];
        int live = min(max(rows - row - 8 * n, 0), 8);
        for (int m = 0; m < 2; m++) add_step(a[m], b, t, live, sum[n][m]);
    }
}

INLINE void matmul_tile(const CONSTANT Params& p, THREADGROUP Stages& s, Thread self) {
    BlockOf block = block_of(p.products, p.count, self.y);
    const CONSTANT Product& product = p.products[block.product];
    int first = self.x * TILE_ROWS, rows = min(TILE_ROWS, p.rows - first), tile = block.index * TILE_OUTPUTS;
    int index = self.index, output = self.warp / 2 * 32, row = self.warp % 2 * 16;
    const DEVICE u16* weights = reinterpret_cast<const DEVICE u16*>(product.weights);
    Staged staged;
    // Outputs and rows beyond the last are computed as the last, and not written.
    for (int i = 0; i < 2; i++)
        staged.weights[i] = weights + AT(i64(min(tile + index / 32 * 16 + 8 * i + index / 4 % 8, product.outputs - 1)) * p.inputs);
    staged.x = p.x + AT(i64(first + min(index / 4, rows - 1)) * p.inputs);
    float sum[2][2][4] = {}, total[2][2][4] = {};
    bool used = tile + output < product.outputs && row < rows;
    int steps = steps_of(p.inputs), left = steps_of_run(p.inputs);
    load(staged, 0, p.inputs, index);
    store(staged, s.at[0], index);
    for (int step = 0; step < steps; step++) {
        barrier();
        if (step + 1 < steps) load(staged, step + 1, p.inputs, index);
        if (used) add_stage(s.at[step % 2], output, row, rows, sum, self);
        if (step + 1 < steps) store(staged, s.at[(step + 1) % 2], index);
        if (--left > 0 && step + 1 < steps) continue;
        left = steps_of_run(p.inputs);
        for (int i = 0; i < 16; i++) {
            THREAD float& of_run = sum[i / 8][i / 4 % 2][i % 4];
            THREAD float& of_all = total[i / 8][i / 4 % 2][i % 4];
            of_all = add(of_all, of_run), of_run = 0;
        }
    }
    for (int i = 0; i < 16; i++) {
        int at_row = row + i / 8 * 8 + 2 * (self.lane % 4) + i % 2;
        int at_output = tile + output + i / 4 % 2 * 16 + i % 4 / 2 * 8 + self.lane / 4;
        if (at_row < rows && at_output < product.outputs)
            product.y[AT(i64(first + at_row) * product.outputs + at_output)] = total[i / 8][i / 4 % 2][i % 4];
    }
}

} // namespace

KERNEL(matmul_bf16_8, Params, 256, 2, Partial<1>) { matmul<1>(p, s, self); }
KERNEL(matmul_bf16_8_wide, Params, 256, 2, Partial<2>) { matmul<2>(p, s, self); }
KERNEL(matmul_bf16_32, Params, 256, 2, Stages) { matmul_tile(p, s, self); }
KERNEL(matmul_buckets_bf16, BucketParams, 256, 2, Partial<1>) { matmul_buckets(p, s, self); }
