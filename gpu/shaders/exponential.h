// The exponential function and what is made of it, with the bits of the CPU kernels (simd/float.rs, ops/activation.rs).
#pragma once

#include "device.h"

// e^x: zero below -88, and NaN stays NaN.
INLINE float exponential(float x) {
    x = x < -88.0f ? -88.0f : x;
    x = x > 88.37626f ? 88.37626f : x;
    float n = rintf(mul(x, 1.44269504f));
    float r = fmaf(n, 2.1219444e-4f, fmaf(n, -0.6933594f, x));
    float p = 1.9875691e-4f;
    p = fmaf(p, r, 1.3981999e-3f);
    p = fmaf(p, r, 8.333452e-3f);
    p = fmaf(p, r, 4.1665796e-2f);
    p = fmaf(p, r, 1.6666665e-1f);
    p = fmaf(p, r, 0.5f);
    return mul(fmaf(mul(p, r), r, add(r, 1.0f)), float_of(u32(int(n) + 127) << 23));
}

INLINE float sigmoid(float x) { return 1.0f / add(1.0f, exponential(-x)); }

INLINE float silu(float x) { return x / add(1.0f, exponential(-x)); }
