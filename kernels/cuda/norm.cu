// Root-mean-square norms and the gated activation.

#include "device.cuh"

namespace {

struct NormParams {
    const float* x;        // (rows, width)
    const float* weight;   // (width), or null
    const float* residual; // (rows, width), or null: y = (residual + norm(x)) * scale
    float* y;
    int width;
    float eps, scale;
};

struct GateParams {
    const float* gate; // (rows, width), rows `stride` apart
    const float* up;   // the same
    float* y;          // (rows, width)
    int width, gate_stride, up_stride;
};

constexpr int WARPS = 8;

struct Sums {
    double warps[WARPS];
};

} // namespace

// A block per row: at most 21504 elements, 84 per thread; one block's latency is what a norm costs in a step of decoding.
KERNEL(rms_norm, NormParams, 32 * WARPS, 4) {
    SHARED(Sums, sums);
    long row = long(blockIdx.x) * p.width;
    int tid = threadIdx.x;
    float squares = 0;
    for (int i = tid; i < p.width; i += 32 * WARPS) {
        float v = p.x[AT(row + i)];
        squares = fmaf(v, v, squares);
    }
    // In double from here: an error of the inverse is common to the whole row.
    double sum = warp_sum(double(squares));
    if (tid % 32 == 0) sums.warps[tid / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < WARPS; w++) sum += sums.warps[AT(w)];
    float inverse = float(1.0 / sqrt(sum / p.width + double(p.eps)));
    for (int i = tid; i < p.width; i += 32 * WARPS) {
        float v = mul(p.x[AT(row + i)], inverse);
        if (p.weight) v = mul(v, p.weight[AT(i)]);
        if (p.residual) v = mul(add(p.residual[AT(row + i)], v), p.scale);
        p.y[AT(row + i)] = v;
    }
}

// y = gelu_tanh(gate) * up, four elements per thread. Grid: (elements by 1024, rows).
KERNEL(gelu_gate, GateParams, 256, 4) {
    int i = (blockIdx.x * 256 + threadIdx.x) * 4;
    if (i >= p.width) return;
    float gate[4], up[4];
    load4<Single>(p.gate + AT(long(blockIdx.y) * p.gate_stride + i), gate);
    load4<Single>(p.up + AT(long(blockIdx.y) * p.up_stride + i), up);
    for (int e = 0; e < 4; e++) {
        float x = gate[e];
        float cubic = fmaf(mul(x, x), mul(x, 0.044715f), x);
        // (1 + tanh u) / 2 = 1 / (1 + e^-2u), which loses nothing where tanh u is near -1.
        gate[e] = mul(x / add(1.0f, expf(mul(cubic, -2.0f * 0.7978846f))), up[e]);
    }
    float4 y = {gate[0], gate[1], gate[2], gate[3]};
    *reinterpret_cast<float4*>(p.y + AT(long(blockIdx.y) * p.width + i)) = y;
}
