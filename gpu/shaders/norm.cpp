// RMS norm and gated activation.

#include "device.h"

namespace {

struct NormParams {
    const DEVICE float* x;        // (rows, width)
    const DEVICE float* weight;   // (width), or null
    const DEVICE float* residual; // (rows, width), or null: y = (residual + norm(x)) * scale
    DEVICE float* y;
    int width;
    float eps, scale;
};

struct GateParams {
    const DEVICE float* gate; // (rows, width), rows `stride` apart
    const DEVICE float* up;   // the same
    DEVICE float* y;          // (rows, width)
    int width, gate_stride, up_stride;
};

CONSTEXPR int WARPS = 8;

struct Sums {
    Wide warps[WARPS];
};

} // namespace

// A block per row of at most 21504 elements, 84 per thread. In decoding, the cost is one block's latency.
KERNEL(rms_norm, NormParams, 32 * WARPS, 4, Sums) {
    i64 row = i64(self.x) * p.width;
    int tid = self.index;
    float squares = 0;
    for (int i = tid; i < p.width; i += 32 * WARPS) {
        float v = p.x[AT(row + i)];
        squares = fmaf(v, v, squares);
    }
    // Wide from here: an error of the inverse scales the whole row.
    Wide sum = warp_sum(wide(squares));
    if (self.lane == 0) s.warps[self.warp] = sum;
    barrier();
    sum = wide(0.0f);
    for (int w = 0; w < WARPS; w++) sum = sum + s.warps[AT(w)];
    float inverse = narrow(wide(1.0f) / sqrt(sum / wide(float(p.width)) + wide(p.eps)));
    for (int i = tid; i < p.width; i += 32 * WARPS) {
        float v = mul(p.x[AT(row + i)], inverse);
        if (p.weight) v = mul(v, p.weight[AT(i)]);
        if (p.residual) v = mul(add(p.residual[AT(row + i)], v), p.scale);
        p.y[AT(row + i)] = v;
    }
}

// y = gelu_tanh(gate) * up, four elements per thread. Grid: (elements by 1024, rows).
KERNEL(gelu_gate, GateParams, 256, 4, None) {
    int i = (self.x * 256 + self.index) * 4;
    if (i >= p.width) return;
    float gate[4], up[4];
    load4<Single>(p.gate + AT(i64(self.y) * p.gate_stride + i), gate);
    load4<Single>(p.up + AT(i64(self.y) * p.up_stride + i), up);
    for (int e = 0; e < 4; e++) {
        float x = gate[e];
        float cubic = fmaf(mul(x, x), mul(x, 0.044715f), x);
        // (1 + tanh u) / 2 = 1 / (1 + e^-2u), without cancellation for tanh u near -1.
        gate[e] = mul(x / add(1.0f, expf(mul(cubic, -2.0f * 0.7978846f))), up[e]);
    }
    float4 y = {gate[0], gate[1], gate[2], gate[3]};
    *reinterpret_cast<DEVICE float4*>(p.y + AT(i64(self.y) * p.width + i)) = y;
}
