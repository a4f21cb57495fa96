// RMS norms and gated activations, and the quantization of their results.
//
// A warp has 256 consecutive elements of a row, eight per lane, in registers from the first norm to the quantized result: a launch
// per norm, each with its own loads, takes three times as long. In decoding the cost is one block's latency, which fell with the
// length of the code: both norms are one loop.

#include "exponential.h"
#include "quantize.h"

namespace {

// y = norm(x), or with a residual (residual + norm(x)) * scale.
struct Norm {
    const DEVICE float* weight;   // (width), or null
    const DEVICE float* residual; // (rows, width), or null
    DEVICE float* y;
    float eps, scale;
    int normalizes; // 0: x in place of norm(x)
};

struct NormParams {
    const DEVICE float* x; // (rows, width)
    Norm norms[2];         // the second is of the first's result
    Activations out;       // of the last result
    int width;
    int count; // norms: 1 or 2
    int block; // inputs of a block of activations: 32 or 256; 0: none
};

struct GateParams {
    const DEVICE float* gate; // (rows, width), rows `stride` apart
    const DEVICE float* up;   // the same
    DEVICE float* y;          // (rows, width)
    Activations out;          // of y
    int width, gate_stride, up_stride;
    int block; // as above
    // Of `normed_silu_gate`: the norm of every `head` consecutive elements of `up`, a power of two from 8 to 256.
    const DEVICE float* weight; // (head)
    int head;
    float eps;
};

CONSTEXPR int WARPS = 32, GATE_WARPS = 4;

struct Sums {
    Wide warps[2][WARPS];
};

// No kernel writes the norms' weights.
INLINE void before_inputs(const CONSTANT NormParams& p, Thread self) {
    for (int i = 0; i < p.count; i++)
        if (p.norms[i].weight && self.index * 32 < p.width) prefetch(p.norms[i].weight + self.index * 32);
}

INLINE void normalize(float eps, int width, THREAD float (&v)[8], THREADGROUP Wide* warps, Thread self) {
    float squares = 0, inverse_width = 1.0f / float(width);
    for (int i = 0; i < 8; i++) squares = fmaf(v[i], v[i], squares);
    // Wide from here: an error of the inverse scales the whole row, and its last bit decides how activations are rounded to 8 bits.
    Wide sum = sum_over(wide(squares), 32);
    if (self.lane == 0) warps[AT(self.warp)] = sum;
    barrier();
    int lanes = 1;
    while (lanes < self.warps) lanes *= 2;
    sum = wide(0.0f);
    if (self.lane % lanes < self.warps) sum = warps[self.lane % lanes];
    float inverse = inverse_root_mean(sum_over(sum, lanes), float(width), inverse_width, eps);
    for (int i = 0; i < 8; i++) v[i] = mul(v[i], inverse);
}

// A lane's part of what a norm reads besides its input.
struct Operands {
    float weight[8], residual[8];
};
INLINE void load(const CONSTANT Norm& p, i64 row, int at, int width, THREAD Operands& of) {
    if (p.weight) load8(p.weight, at, width, of.weight);
    if (p.residual) load8(p.residual + row, at, width, of.residual);
}

INLINE void norm(const CONSTANT Norm& p, i64 row, int at, int width, const THREAD Operands& of, THREAD float (&v)[8],
                 THREADGROUP Wide* warps, Thread self) {
    if (p.normalizes) normalize(p.eps, width, v, warps, self);
    if (p.weight)
        for (int i = 0; i < 8; i++) v[i] = mul(v[i], of.weight[i]);
    if (p.residual)
        for (int i = 0; i < 8; i++) v[i] = mul(add(of.residual[i], v[i]), p.scale);
    store8(p.y + row, at, width, v);
}

struct GeluTanh {
    static INLINE float of(float x) {
        float cubic = fmaf(mul(x, x), mul(x, 0.044715f), x);
        // (1 + tanh u) / 2 = 1 / (1 + e^-2u), without cancellation for tanh u near -1.
        return quotient(x, add(1.0f, expf(mul(cubic, -2.0f * 0.7978846f))));
    }
};
struct Silu {
    static INLINE float of(float x) { return silu(x); }
};
struct Sigmoid {
    static INLINE float of(float x) { return sigmoid(x); }
};

// What becomes of `up` first.
struct AsItIs {
    static INLINE void apply(const CONSTANT GateParams&, int, THREAD float (&)[8]) {}
};
// A head is in consecutive lanes. The operations are those of `normalize`.
struct Normed {
    static INLINE void apply(const CONSTANT GateParams& p, int at, THREAD float (&v)[8]) {
        float squares = 0, weight[8];
        for (int i = 0; i < 8; i++) squares = fmaf(v[i], v[i], squares);
        float inverse = inverse_root_mean(sum_over(wide(squares), p.head / 8), float(p.head), 1.0f / float(p.head), p.eps);
        load8(p.weight, at % p.head, p.head, weight);
        for (int i = 0; i < 8; i++) v[i] = mul(mul(v[i], inverse), weight[i]);
    }
};

// y = f(gate) * up. Grid: (elements by 1024, rows).
template <class F, class Up>
INLINE void gated(const CONSTANT GateParams& p, Thread self) {
    int at = (self.x * GATE_WARPS + self.warp) * 256 + self.lane * 8;
    float gate[8], up[8];
    load8(p.gate + i64(self.y) * p.gate_stride, at, p.width, gate);
    load8(p.up + i64(self.y) * p.up_stride, at, p.width, up);
    Up::apply(p, at, up);
    for (int e = 0; e < 8; e++) gate[e] = mul(F::of(gate[e]), up[e]);
    store8(p.y + i64(self.y) * p.width, at, p.width, gate);
    quantize(p.out, p.block, self.y, at, self.lane, gate);
}

} // namespace

// A block per row of at most 8192 elements.
KERNEL(rms_norm, NormParams, 32 * WARPS, 1, Sums) {
    i64 row = i64(self.x) * p.width;
    int at = self.index * 8;
    float v[8];
    load8(p.x + row, at, p.width, v);
    // All loads overlap: after a norm, they would take as long as the norm.
    Operands of, next;
    load(p.norms[0], row, at, p.width, of);
    if (p.count > 1) load(p.norms[1], row, at, p.width, next);
#pragma unroll 1
    for (int i = 0; i < p.count; i++) {
        norm(p.norms[i], row, at, p.width, of, v, s.warps[i], self);
        of = next;
    }
    quantize(p.out, p.block, self.x, at, self.lane, v);
}

KERNEL(gelu_gate, GateParams, 32 * GATE_WARPS, 4, None) { gated<GeluTanh, AsItIs>(p, self); }
KERNEL(silu_gate, GateParams, 32 * GATE_WARPS, 4, None) { gated<Silu, AsItIs>(p, self); }
KERNEL(sigmoid_gate, GateParams, 32 * GATE_WARPS, 4, None) { gated<Sigmoid, AsItIs>(p, self); }
KERNEL(normed_silu_gate, GateParams, 32 * GATE_WARPS, 4, None) { gated<Silu, Normed>(p, self); }
