// What all kernels share. They are written once, in what CUDA C++ and the Metal Shading Language have in common; a dialect,
// `cuda/device.cuh` or `metal/device.metal`, says the rest, and goes before this file. On the CPU, the headers of
// `tests/emulator` go before the dialect, and stand for its language. Metal is C++14, has no doubles, no shared memory outside
// of kernels, and keywords that a name must not be: half, device, kernel, thread.
//
// A dialect has:
// * KERNEL(name, Params, threads, blocks, Scratch): a kernel of one parameter structure, which `src/gpu` has in Rust, field
//   by field. `threads` is the largest block, `blocks` how many of them registers must leave room for on a multiprocessor.
//   The body has the parameters `p`, the block's memory `s`, at most 32 KiB, and the thread `self`.
// * DEVICE, CONSTANT, THREADGROUP, THREAD: where lies what a pointer or a reference leads to: in the device's memory, among
//   the parameters, in the block's memory, in the thread's own. INLINE before functions, CONSTEXPR before constants.
// * AT(index): an index. The mutation test makes one of them wrong at a time and wants to see it noticed.
// * `mul`, `add` and `sub` of floats, and `fmaf`: products and sums whose rounding the CPU's kernels define. Others may be
//   contracted. And the usual functions of floats: `expf`, `sqrtf`, `rintf`, ...
// * Wide: a number of more than 40 bits, with + - * / > >=, `mul`, `add` and `sqrt`, of floats by `wide`, back by `narrow`.
// * barrier() for the block; warp_barrier(), shuffle, shuffle_xor and votes for the 32 lanes of a warp, all of which call.
// * least(at, x): a number in the device's memory, when all threads of a launch are done, is the least of what they said.
// * mma_k32, mma_k16, dp2a_lo, dp2a_hi, permute_bytes, and PERMUTES: whether that is a single instruction.
// * half_to_float, float_to_half, bits_of and float_of: of bits; u64.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;

// One of a block's threads.
struct Thread {
    int index, lane, warp, warps; // in the block; in its warp; of its warp; warps of the block
    int x, y, z;                  // the block's place in the grid
};

// The memory of blocks that need none.
struct None {
    u8 unused;
};

// Tokens of a K/V page.
CONSTEXPR int PAGE = 128;

INLINE float bf16_to_float(u16 bits) { return float_of(u32(bits) << 16); }

// To nearest, ties to even; a NaN stays one.
INLINE u16 float_to_bf16(float x) {
    u32 bits = bits_of(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return u16(bits >> 16 | 0x40);
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Element types of weights and K/V rows, with the numbers that `src/gpu` gives them.
CONSTEXPR int F32 = 0, F16 = 1, BF16 = 2;

struct Single {
    typedef float Bits;
    static INLINE float widen(Bits x) { return x; }
    static INLINE Bits narrow(float x) { return x; }
};
struct Half {
    typedef u16 Bits;
    static INLINE float widen(Bits x) { return half_to_float(x); }
    static INLINE Bits narrow(float x) { return float_to_half(x); }
};
struct Brain {
    typedef u16 Bits;
    static INLINE float widen(Bits x) { return bf16_to_float(x); }
    static INLINE Bits narrow(float x) { return float_to_bf16(x); }
};

INLINE void spread(float4 v, THREAD float (&x)[4]) { x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w; }

// Four consecutive elements, as one load: `at` is aligned to their size.
template <class E>
INLINE void load4(const DEVICE typename E::Bits* at, THREAD float (&x)[4]) {
    uint2 v = *reinterpret_cast<const DEVICE uint2*>(at);
    x[0] = E::widen(u16(v.x)), x[1] = E::widen(u16(v.x >> 16));
    x[2] = E::widen(u16(v.y)), x[3] = E::widen(u16(v.y >> 16));
}
template <>
INLINE void load4<Single>(const DEVICE float* at, THREAD float (&x)[4]) {
    spread(*reinterpret_cast<const DEVICE float4*>(at), x);
}
// The same of the block's memory.
INLINE void load4_shared(const THREADGROUP float* at, THREAD float (&x)[4]) {
    spread(*reinterpret_cast<const THREADGROUP float4*>(at), x);
}

// Sums and maxima over a warp: every lane gets the same bits.
template <class T>
INLINE T warp_sum(T x) {
    for (int mask = 16; mask > 0; mask /= 2) x = x + shuffle_xor(x, mask);
    return x;
}
template <class T>
INLINE T warp_max(T x) {
    for (int mask = 16; mask > 0; mask /= 2) {
        T other = shuffle_xor(x, mask);
        if (other > x) x = other;
    }
    return x;
}
