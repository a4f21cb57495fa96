// Floating-point weights times up to 16 rows of f32.
//
// A warp has four outputs, so that a loaded activation serves four; lanes share the inputs, four consecutive ones each: 8 or
// 16 bytes of every weight row per load. Sums are f32 in an order that follows from the inputs alone. Tensor cores would
// round the activations, so that f32 checkpoints would not give the CPU's numbers; up to eight rows the weights' bytes are
// what it costs.
//
// Grid: (outputs by 32, tiles of rows).

#include "device.cuh"

namespace {

struct Params {
    const void* weights; // (outputs, inputs)
    const float* x;      // (rows, inputs)
    float* y;            // (rows, outputs)
    int rows, inputs, outputs;
};

constexpr int WARPS = 8, OUTPUTS = 4;

template <class E, int ROWS>
__device__ __forceinline__ void matmul(const Params& p) {
    const typename E::Bits* weights = static_cast<const typename E::Bits*>(p.weights);
    int lane = threadIdx.x % 32, output = (blockIdx.x * WARPS + threadIdx.x / 32) * OUTPUTS, first = blockIdx.y * ROWS;
    if (output >= p.outputs) return;
    float sum[ROWS][OUTPUTS] = {};
#pragma unroll 2
    for (int i = lane * 4; i < p.inputs; i += 128) {
        float w[OUTPUTS][4];
        for (int o = 0; o < OUTPUTS; o++)
            if (output + o < p.outputs) load4<E>(weights + AT(long(output + o) * p.inputs + i), w[o]);
        for (int row = 0; row < ROWS; row++) {
            if (first + row >= p.rows) break;
            float x[4];
            load4<Single>(p.x + AT(long(first + row) * p.inputs + i), x);
            for (int o = 0; o < OUTPUTS; o++)
                for (int e = 0; e < 4; e++) sum[row][o] = fmaf(w[o][e], x[e], sum[row][o]);
        }
    }
    for (int row = 0; row < ROWS; row++) {
        if (first + row >= p.rows) break;
        for (int o = 0; o < OUTPUTS; o++) {
            float y = warp_sum(sum[row][o]);
            if (lane == 0 && output + o < p.outputs) p.y[AT(long(first + row) * p.outputs + output + o)] = y;
        }
    }
}

} // namespace

#define MATMUL(name, E)                                                                                             \
    KERNEL(matmul_##name##_1, Params, 256, 4) { matmul<E, 1>(p); }                                                  \
    KERNEL(matmul_##name##_4, Params, 256, 3) { matmul<E, 4>(p); }                                                  \
    KERNEL(matmul_##name##_16, Params, 256, 2) { matmul<E, 16>(p); }

MATMUL(f32, Single)
MATMUL(f16, Half)
MATMUL(bf16, Brain)
