// The Metal dialect of `shaders/device.h`: Metal 3, GPUs of family Apple7 (M1) and later, whose warps are simdgroups of 32.
//
// The Mac compiles the sources when a device is opened, with fast math off and without contraction, as the specified
// rounding requires. Parameters hold addresses, as in CUDA; the memory must have been made resident.
#pragma once

#pragma METAL fp contract(off)

#ifndef FORETOKEN_EMULATED

#include <metal_stdlib>

#define AT(index) (index)
#define KERNEL(name, Params, threads, blocks, ...)                                                                  \
    INLINE void name##_body(const constant Params& p, threadgroup __VA_ARGS__& s, Thread self);                     \
    extern "C" [[kernel, max_total_threads_per_threadgroup(threads)]] void name(                                    \
        const constant Params& p [[buffer(0)]], uint3 block [[threadgroup_position_in_grid]],                       \
        uint lane [[thread_index_in_simdgroup]], uint warp [[simdgroup_index_in_threadgroup]],                      \
        uint warps [[simdgroups_per_threadgroup]]) {                                                                \
        threadgroup __VA_ARGS__ s;                                                                                  \
        Thread self = {int(warp * 32 + lane), int(lane), int(warp), int(warps), int(block.x), int(block.y), int(block.z)}; \
        name##_body(p, s, self);                                                                                    \
    }                                                                                                               \
    INLINE void name##_body(const constant Params& p, threadgroup __VA_ARGS__& s, Thread self)
#define KERNEL_PER_WARP(name, Params, threads, blocks, ...)                                                         \
    INLINE void name##_body(const constant Params& p, threadgroup __VA_ARGS__* s, Thread self);                     \
    extern "C" [[kernel, max_total_threads_per_threadgroup(threads)]] void name(                                    \
        const constant Params& p [[buffer(0)]], uint3 block [[threadgroup_position_in_grid]],                       \
        uint lane [[thread_index_in_simdgroup]], uint warp [[simdgroup_index_in_threadgroup]],                      \
        uint warps [[simdgroups_per_threadgroup]]) {                                                                \
        threadgroup __VA_ARGS__ s[threads / 32];                                                                    \
        Thread self = {int(warp * 32 + lane), int(lane), int(warp), int(warps), int(block.x), int(block.y), int(block.z)}; \
        name##_body(p, s, self);                                                                                    \
    }                                                                                                               \
    INLINE void name##_body(const constant Params& p, threadgroup __VA_ARGS__* s, Thread self)

#define INLINE inline __attribute__((__always_inline__))

INLINE float expf(float x) { return metal::precise::exp(x); }
INLINE float logf(float x) { return metal::precise::log(x); }
INLINE float sinf(float x) { return metal::precise::sin(x); }
INLINE float cosf(float x) { return metal::precise::cos(x); }
INLINE float tanhf(float x) { return metal::precise::tanh(x); }
INLINE float sqrtf(float x) { return metal::precise::sqrt(x); }
INLINE float inverse_sqrt(float x) { return metal::precise::rsqrt(x); }
INLINE float rintf(float x) { return metal::rint(x); }
INLINE float fminf(float a, float b) { return metal::fmin(a, b); }
INLINE float fmaxf(float a, float b) { return metal::fmax(a, b); }
INLINE float fmaf(float a, float b, float c) { return metal::fma(a, b, c); }

#endif

using namespace metal;

#define DEVICE device
#define CONSTANT constant
#define THREADGROUP threadgroup
#define THREAD thread
#define CONSTEXPR constant constexpr

typedef unsigned long u64;
typedef long i64;

INLINE float mul(float a, float b) { return a * b; }
INLINE float add(float a, float b) { return a + b; }
INLINE float sub(float a, float b) { return a - b; }
INLINE float quotient(float a, float b) { return a / b; }
INLINE float float_of(uint bits) { return as_type<float>(bits); }
INLINE uint bits_of(float x) { return as_type<uint>(x); }
INLINE float half_to_float(ushort bits) { return float(as_type<half>(bits)); }
INLINE ushort float_to_half(float x) { return as_type<ushort>(half(x)); }

INLINE void barrier() { threadgroup_barrier(mem_flags::mem_threadgroup); }
INLINE void warp_barrier() { simdgroup_barrier(mem_flags::mem_threadgroup); }
template <class T>
INLINE T shuffle(T x, int lane) { return simd_shuffle(x, ushort(lane)); }
template <class T>
INLINE T shuffle_xor(T x, int mask) { return simd_shuffle_xor(x, ushort(mask)); }
// simd_shuffle takes 32 bits.
INLINE u64 shuffle_xor(u64 x, int mask) { return as_type<u64>(simd_shuffle_xor(as_type<uint2>(x), ushort(mask))); }
INLINE void atomic_min(device uint* at, uint x) {
    atomic_fetch_min_explicit(reinterpret_cast<device atomic_uint*>(at), x, memory_order_relaxed);
}
INLINE void prefetch(const device void*) {}
template <class T>
INLINE void copy_async(threadgroup T* to, const device T* from) { *to = *from; }
INLINE void end_copies() {}
template <int N>
INLINE void wait_for_copies() {}
INLINE uint warp_ballot(bool x) { return uint(static_cast<simd_vote::vote_t>(simd_ballot(x))); }

CONSTEXPR int SHARED_BYTES = 32768; // of a threadgroup
CONSTEXPR bool PERMUTES = false;
// Each nibble of the selector, 0 to 7, selects one of the eight bytes of `a` and `b`.
INLINE uint permute_bytes(uint a, uint b, uint selector) {
    uint bytes = 0;
    for (int i = 0; i < 4; i++) {
        uint nibble = selector >> (4 * i);
        bytes |= ((nibble & 4 ? b : a) >> (nibble % 4 * 8) & 255) << (8 * i);
    }
    return bytes;
}

// The dot product of four signed bytes; below, of two i16 and two signed bytes.
INLINE int dot_4(uint a, uint b) {
    int sum = 0;
    for (int i = 0; i < 32; i += 8) sum += int((signed char)(a >> i)) * int((signed char)(b >> i));
    return sum;
}
INLINE int dp2a_lo(int a, int b, int c) {
    return c + short(a) * int((signed char)b) + (a >> 16) * int((signed char)(b >> 8));
}
INLINE int dp2a_hi(int a, int b, int c) { return dp2a_lo(a, b >> 16, c); }

// Adds to column `n` the sum over the four lanes that have a row's words.
template <class T>
INLINE void add_column(thread T (&c)[4], T low, T high, int t, int n) {
    for (int mask = 1; mask < 4; mask *= 2) {
        low += shuffle_xor(low, mask);
        high += shuffle_xor(high, mask);
    }
    for (int i = 0; i < 2; i++) {
        if (2 * t + i != n) continue;
        c[i] += low;
        c[2 + i] += high;
    }
}

// Metal has no integer tensor cores: dot products for each of the `live` columns, of which decoding has one.
// `shaders/device.h` draws the fragments.
INLINE void mma_k32(thread int (&c)[4], const thread uint (&a)[4], uint2 b, int t, int live) {
    for (int n = 0; n < live; n++) {
        uint x = shuffle(b.x, AT(4 * n) + t), y = shuffle(b.y, 4 * n + t);
        add_column(c, dot_4(a[0], x) + dot_4(a[2], y), dot_4(a[1], x) + dot_4(a[3], y), t, n);
    }
}
INLINE void mma_k16(thread int (&c)[4], const thread uint (&a)[2], uint b, int t, int live) {
    for (int n = 0; n < live; n++) {
        uint x = shuffle(b, AT(4 * n) + t);
        add_column(c, dot_4(a[0], x), dot_4(a[1], x), t, n);
    }
}

// Metal multiplies floats, so that numbers need no pieces.
struct Pieces {
    float4 first, second;
};
INLINE Pieces pieces(const thread float (&x)[8]) { return {{x[0], x[1], x[2], x[3]}, {x[4], x[5], x[6], x[7]}}; }

INLINE void mma_bf16(thread float (&c)[4], uint4 first, uint4 second, Pieces b, int t, int live) {
    uint rows[2][4] = {{first.x, first.z, second.x, second.z}, {first.y, first.w, second.y, second.w}};
    float x[8] = {b.first.x, b.first.y, b.first.z, b.first.w, b.second.x, b.second.y, b.second.z, b.second.w};
    for (int n = 0; n < live; n++) {
        float sums[2] = {0.0f, 0.0f};
        for (int i = 0; i < 8; i++) {
            float of_column = shuffle(x[i], AT(4 * n) + t);
            for (int row = 0; row < 2; row++) {
                uint pair = rows[row][i / 2];
                sums[row] = fmaf(float_of(i % 2 ? pair & 0xffff0000u : pair << 16), of_column, sums[row]);
            }
        }
        add_column(c, sums[0], sums[1], t, n);
    }
}
