// What all kernels share. The same sources run on the CPU under `tests/emulator`, whose `cuda.h` then takes the place of
// the CUDA half of this file.
//
// * KERNEL(name, Params, threads, blocks): a kernel of one parameter structure, which `src/gpu` has in Rust, field by
//   field. `threads` is the largest block, `blocks` how many of them registers must leave room for on a multiprocessor.
// * SHARED(Type, name): memory of the block.
// * AT(index): an index. The mutation test makes one of them wrong at a time and wants to see it noticed.
//
// Products and sums whose rounding the CPU's kernels define are written with `mul`, `add`, `sub` and `fmaf`: the compiler
// contracts the others as it likes.
#pragma once

#ifndef FORETOKEN_EMULATED

#define KERNEL(name, Params, threads, blocks)                                                                       \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Params p)
#define SHARED(Type, name) __shared__ Type name
#define AT(index) (index)

__device__ __forceinline__ float half_to_float(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
__device__ __forceinline__ unsigned short float_to_half(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// c += a b over signed bytes, 16 rows by 8 columns by 32. With lane = 4 g + t: a0 and a2 are the words t and t + 4 (of four
// bytes) of row g, a1 and a3 of row g + 8; b0 and b1 of column g; c are row g, columns 2 t and 2 t + 1, then row g + 8.
__device__ __forceinline__ void mma_k32(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                        unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The same over 16: words t only.
__device__ __forceinline__ void mma_k16(int (&c)[4], unsigned a0, unsigned a1, unsigned b0) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
}

#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 ALL = 0xffffffffu; // lanes of a warp

// Tokens of a K/V page.
constexpr int PAGE = 128;

__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }

__device__ __forceinline__ float bf16_to_float(u16 bits) { return __uint_as_float(u32(bits) << 16); }

// To nearest, ties to even; a NaN stays one.
__device__ __forceinline__ u16 float_to_bf16(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return u16(bits >> 16 | 0x40);
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Element types of weights and K/V rows, with the numbers that `src/gpu` gives them.
constexpr int F32 = 0, F16 = 1, BF16 = 2;

struct Single {
    typedef float Bits;
    static constexpr int SIZE = 4;
    static __device__ __forceinline__ float widen(Bits x) { return x; }
    static __device__ __forceinline__ Bits narrow(float x) { return x; }
};
struct Half {
    typedef u16 Bits;
    static constexpr int SIZE = 2;
    static __device__ __forceinline__ float widen(Bits x) { return half_to_float(x); }
    static __device__ __forceinline__ Bits narrow(float x) { return float_to_half(x); }
};
struct Brain {
    typedef u16 Bits;
    static constexpr int SIZE = 2;
    static __device__ __forceinline__ float widen(Bits x) { return bf16_to_float(x); }
    static __device__ __forceinline__ Bits narrow(float x) { return float_to_bf16(x); }
};

// Four consecutive elements, as one load: `at` is aligned to their size.
template <class E>
__device__ __forceinline__ void load4(const typename E::Bits* at, float (&x)[4]);
template <>
__device__ __forceinline__ void load4<Single>(const float* at, float (&x)[4]) {
    float4 v = *reinterpret_cast<const float4*>(at);
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}
template <class E>
__device__ __forceinline__ void load4_halves(const u16* at, float (&x)[4]) {
    uint2 v = *reinterpret_cast<const uint2*>(at);
    x[0] = E::widen(u16(v.x)), x[1] = E::widen(u16(v.x >> 16));
    x[2] = E::widen(u16(v.y)), x[3] = E::widen(u16(v.y >> 16));
}
template <>
__device__ __forceinline__ void load4<Half>(const u16* at, float (&x)[4]) { load4_halves<Half>(at, x); }
template <>
__device__ __forceinline__ void load4<Brain>(const u16* at, float (&x)[4]) { load4_halves<Brain>(at, x); }

// Sums and maxima over a warp: every lane gets the same bits.
template <class T>
__device__ __forceinline__ T warp_sum(T x) {
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(ALL, x, mask);
    return x;
}
template <class T>
__device__ __forceinline__ T warp_max(T x) {
    for (int mask = 16; mask > 0; mask /= 2) {
        T other = __shfl_xor_sync(ALL, x, mask);
        x = other > x ? other : x;
    }
    return x;
}
