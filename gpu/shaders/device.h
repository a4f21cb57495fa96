// Shared by all kernels, which are written in the common subset of CUDA C++ and the Metal Shading Language; a dialect,
// `cuda/device.cuh` or `metal/device.metal`, is included before this file and defines the rest. On the CPU, the headers
// of `tests/emulator` are included before the dialect and replace its language. Metal is C++14, has no doubles, no
// shared memory outside of kernels, and reserves words that C++ does not: half, device, constant, thread, threadgroup,
// kernel, vertex, fragment, quad and others (`tests/metal_stub`). No text for Metal declares one, not even a member.
//
// A dialect defines:
// * KERNEL(name, Params, threads, blocks, Scratch): a kernel with one parameter structure, which `src/plan` has in Rust,
//   field by field. `threads` is the largest block; registers are limited so that `blocks` blocks fit on a
//   multiprocessor. The body has the parameters `p`, the shared memory `s` of at most 32 KiB, and the thread `self`.
// * KERNEL_PER_WARP(name, Params, threads, blocks, OfWarp): the same with one OfWarp of shared memory for each warp: `s` points to
//   them. The launch states their bytes, where that is possible; else there are as many as the largest block has.
// * KERNEL_LARGE(name, Params, threads, blocks, Scratch), with HALF_PRODUCTS: KERNEL with any shared memory, whose bytes the launch
//   states.
// * DEVICE, CONSTANT, THREADGROUP, THREAD: address spaces: device memory, parameters, shared memory, the thread's own.
//   INLINE before functions, CONSTEXPR before constants.
// * AT(index): an index. The mutation test changes one at a time, and some test must fail.
// * `mul`, `add` and `sub` of floats, and `fmaf`: rounded as in the CPU's kernels, never contracted. Other operations may be
//   contracted. And the usual float functions: `expf`, `sqrtf`, `rintf`, ...
// * inverse_sqrt(x): 1 / sqrt(x), within 2 units in the last place.
// * quotient(a, b): a / b, within 2 units in the last place; 0 for a finite a and an infinite or very large b.
// * DOUBLES, if there are any, and then Exact: a double, with + - * / > >=, `mul` and `add` that are never contracted, `sqrt`;
//   `exact` converts from float, `narrow` to float. Without, it is Wide (`wide.h`), which has the same.
// * barrier() for the block; warp_barrier(), shuffle, shuffle_xor and warp_ballot for the 32 lanes of a warp, called by
//   all of them.
// * copy_async(to, from): copies 4, 8 or 16 bytes of device memory, aligned to their number, to shared memory, while the thread
//   goes on. end_copies() makes one group of the thread's copies since the last; wait_for_copies<N>() waits until the thread's
//   groups but the N last are done. A barrier after it shows them to other threads.
// * COPIES, if copies are asynchronous.
// * prefetch(at): loads a cache line of device memory into the L2 cache, where there is such an instruction.
// * atomic_min(at, x): the minimum with a word of device memory.
// * HALF_PRODUCTS, if there are tensor cores for f16, and then mma_f16.
// * mma_k32, mma_k16, mma_bf16, Pieces (below), dp2a_lo, dp2a_hi, permute_bytes, and PERMUTES: whether permute_bytes is a single
//   instruction.
// * half_to_float, float_to_half, bits_of and float_of: conversions of bits; u64, i64 (`long` has 32 bits on Windows).
//
// mma_k32(c, a, b, t, live): C += A B of i8, 16 rows by 32 inputs by 8 columns, in the fragments of m16n8k32. Lane = 4 g
// + t, g in 0..8, t in 0..4; a word is four consecutive inputs, word w is inputs 4 w .. 4 w + 4:
//
//        A (16 x 32)              B (32 x 8)               C (16 x 8), i32
//        word t     word t + 4    column g                 column 2 t   2 t + 1
// row g      a[0]       a[2]      word t      b.x     row g      c[0]       c[1]
// row g + 8  a[1]       a[3]      word t + 4  b.y     row g + 8  c[2]       c[3]
//
// mma_k16 has 16 inputs: words t only, a[0] of row g, a[1] of row g + 8, b. Columns from `live` on are unspecified, in
// B and in C.
//
// mma_bf16(c, first, second, b, t, live): C += A B of bf16 A and f32 B, 16 rows by 32 inputs by 8 columns, with C as above but
// f32. A lane has the inputs 8 t .. 8 t + 8, of A in pairs, words 0 to 3 of the rows g and g + 8:
//
//        first.x  .y  .z  .w     second.x  .y  .z  .w     b: column g, the `Pieces` that `pieces(x)` makes of
// row    g     g + 8  g  g + 8   g     g + 8  g  g + 8       eight floats
// word   0        0   1     1    2        2   3     3
//
// mma_f16(c, a, b): C += A B of f16, 16 rows by 16 inputs by 8 columns, with the first two words of both.
//
// Products are exact, and as usual of infinities and NaN; sums may be truncated to f32 instead of rounded, so that long ones
// are better added outside. The sums of a column do not depend on other columns, nor those of a row on other rows.
#pragma once

#include "wide.h"

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;

// A thread of a block.
struct Thread {
    int index, lane, warp, warps; // index in the block; lane in the warp; index of the warp; number of warps in the block
    int x, y, z;                  // the block's index in the grid
};

// What a block does while its inputs are still being computed: nothing, unless a source has an overload for its parameters.
template <class P>
INLINE void before_inputs(const CONSTANT P&, Thread) {}
template <class P, class S>
INLINE void before_inputs(const CONSTANT P&, THREADGROUP S*, Thread) {}

// The shared memory of kernels without any.
struct None {
    u8 unused;
};

// Tokens of a K/V page.
CONSTEXPR int PAGE = 128;

INLINE float bf16_to_float(u16 bits) { return float_of(u32(bits) << 16); }

// Rounds to nearest, ties to even; NaN stays NaN.
INLINE u16 float_to_bf16(float x) {
    u32 bits = bits_of(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return u16(bits >> 16 | 0x40);
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Element types of weights and K/V rows, numbered as in `src/plan/pages.rs`.
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
struct Bfloat16 {
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
// The same from shared memory.
INLINE void load4_shared(const THREADGROUP float* at, THREAD float (&x)[4]) {
    spread(*reinterpret_cast<const THREADGROUP float4*>(at), x);
}

// Sums and maxima over a warp: every lane gets the same bits.
template <class T>
INLINE T warp_sum(T x) {
    for (int mask = 16; mask > 0; mask /= 2) x = x + shuffle_xor(x, mask);
    return x;
}
// Lanes that differ in `mask` exchange halves of the first N values and add them; a single value is added by both.
template <int N, int COUNT>
INLINE void add_halves(THREAD float (&x)[COUNT], int lane, int mask) {
    if (N < 2) x[0] = x[0] + shuffle_xor(x[0], mask);
    for (int i = 0; i < N / 2; i++) {
        float low = x[i], high = x[i + N / 2];
        x[i] = (lane & mask ? high : low) + shuffle_xor(lane & mask ? low : high, mask);
    }
}
// Sums of N values, a power of two, each with the bits of `warp_sum`, in less than N + 5 instead of 5 N shuffles: lane l gets those
// of values l * N / 32 onwards, one at least, first in `x`.
template <int N>
INLINE void warp_sums(THREAD float (&x)[N], int lane) {
    add_halves<N>(x, lane, 16);
    add_halves<N / 2>(x, lane, 8);
    add_halves<N / 4>(x, lane, 4);
    add_halves<N / 8>(x, lane, 2);
    add_halves<N / 16>(x, lane, 1);
}
template <class T>
INLINE T warp_max(T x) {
    for (int mask = 16; mask > 0; mask /= 2) {
        T other = shuffle_xor(x, mask);
        if (other > x) x = other;
    }
    return x;
}
