// Weights of f32 and f16 times up to 16 rows of f32.
//
// A warp computes four outputs, so that a loaded activation serves four; lanes divide the inputs, four consecutive ones
// each: 8 or 16 bytes of every weight row per load. Sums are f32 in an order that depends on the number of inputs only.
// Tensor cores would round the activations, so that f32 checkpoints would not give the CPU's results; up to eight rows,
// memory bandwidth is the bound.
//
// Grid: (tiles of rows; outputs by 32, of all products); (outputs by 32; buckets).

#include "float_products.h"

namespace {

CONSTEXPR int WARPS = 8, OUTPUTS = 4;

// Entries first..first + count of y; `row_of` maps an entry to its row of x.
template <class E, int ROWS, class RowOf>
INLINE void matmul(const DEVICE typename E::Bits* weights, const DEVICE float* x, DEVICE float* y, int inputs, int outputs,
                   int block, int first, int count, RowOf row_of, Thread self) {
    int lane = self.lane, output = (block * WARPS + self.warp) * OUTPUTS;
    if (output >= outputs) return;
    float sum[ROWS * OUTPUTS] = {};
    // The weights of a row alone are all that is loaded: many at once.
#pragma unroll(ROWS == 1 ? 8 : 2)
    for (int i = lane * 4; i < inputs; i += 128) {
        float w[OUTPUTS][4] = {};
        for (int o = 0; o < OUTPUTS; o++)
            if (output + o < outputs) load4<E>(weights + AT(i64(output + o) * inputs + i), w[o]);
        for (int row = 0; row < ROWS; row++) {
            if (row >= count) break;
            float v[4];
            load4<Single>(x + AT(i64(row_of(first + row)) * inputs + i), v);
            for (int o = 0; o < OUTPUTS; o++)
                for (int e = 0; e < 4; e++) sum[row * OUTPUTS + o] = fmaf(w[o][e], v[e], sum[row * OUTPUTS + o]);
        }
    }
    warp_sums(sum, lane);
    const int VALUES = ROWS * OUTPUTS, OWN = VALUES < 32 ? 1 : VALUES / 32, SAME = VALUES < 32 ? 32 / VALUES : 1;
    for (int i = 0; i < OWN; i++) {
        int value = lane * VALUES / 32 + i, row = value / OUTPUTS, o = value % OUTPUTS;
        if (lane % SAME == 0 && row < count && output + o < outputs)
            y[AT(i64(first + row) * outputs + output + o)] = sum[i];
    }
}

template <class E, int ROWS>
INLINE void matmul(const CONSTANT Params& p, Thread self) {
    int first = self.x * ROWS;
    BlockOf block = block_of(p.products, p.count, self.y);
    const CONSTANT Product& product = p.products[block.product];
    matmul<E, ROWS>(reinterpret_cast<const DEVICE typename E::Bits*>(product.weights), p.x, product.y, p.inputs,
                    product.outputs, block.index, first, min(ROWS, p.rows - first), Same(), self);
}

template <class E>
INLINE void matmul_buckets(const CONSTANT BucketParams& p, Thread self) {
    int bucket = self.y;
    if (bucket >= *p.count) return;
    int first = p.starts[AT(bucket)], count = p.starts[bucket + 1] - first;
    const DEVICE typename E::Bits* weights = reinterpret_cast<const DEVICE typename E::Bits*>(p.weights);
    weights += AT(i64(p.matrices[bucket]) * p.outputs) * p.inputs;
    // Eight at a time: sixteen, with their rows, would spill registers.
    for (int part = 0; part < count; part += 8)
        matmul<E, 8>(weights, p.x, p.y, p.inputs, p.outputs, self.x, first + part, min(8, count - part), Listed{p.rows}, self);
}

} // namespace

#define MATMUL(name, E)                                                                                             \
    KERNEL(matmul_##name##_1, Params, 256, 2, None) { matmul<E, 1>(p, self); }                                      \
    KERNEL(matmul_##name##_4, Params, 256, 3, None) { matmul<E, 4>(p, self); }                                      \
    KERNEL(matmul_##name##_16, Params, 256, 2, None) { matmul<E, 16>(p, self); }                                    \
    KERNEL(matmul_buckets_##name, BucketParams, 256, 2, None) { matmul_buckets<E>(p, self); }

MATMUL(f32, Single)
MATMUL(f16, Half)
