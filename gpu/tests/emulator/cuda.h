// The parts of CUDA C++ that the CUDA dialect uses, on `machine.h`. Included before every source (`-include`).
#pragma once

#include "machine.h"

#include <cmath>

#define __device__
#define __forceinline__ inline
#define KERNEL(name, Params, threads, blocks, ...) MACHINE_KERNEL(name, Params, threads, __VA_ARGS__)
// The bytes of shared memory that a launch of so many warps has to state.
#define KERNEL_LARGE(name, Params, threads, blocks, ...)                                                            \
    extern "C" size_t name##_of_launch(size_t) { return sizeof(__VA_ARGS__); }                                      \
    MACHINE_KERNEL(name, Params, threads, __VA_ARGS__)
#define KERNEL_PER_WARP(name, Params, threads, blocks, ...)                                                         \
    extern "C" size_t name##_of_launch(size_t warps) { return warps * sizeof(__VA_ARGS__); }                        \
    MACHINE_KERNEL_PER_WARP(name, Params, threads, __VA_ARGS__)

inline void __syncthreads() { machine::barrier(); }
inline void __syncwarp() { char none = 0; machine::exchange("__syncwarp", none); }

template <class T> INLINED T __shfl_sync(unsigned, T value, int lane) {
    return machine::shown<T>(machine::exchange("__shfl_sync", value), lane & 31);
}
template <class T> INLINED T __shfl_xor_sync(unsigned, T value, int mask) {
    int lane = machine::self->lane;
    return machine::shown<T>(machine::exchange("__shfl_xor_sync", value), (lane ^ mask) & 31);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
    const unsigned char* all = machine::exchange("__ballot_sync", predicate);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; lane++) bits |= unsigned(machine::shown<int>(all, lane) != 0) << lane;
    return bits;
}

// Each nibble of the selector selects one of the eight bytes of `a` and `b`; its upper bit replicates the byte's sign.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t pool = uint64_t(b) << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) {
        unsigned nibble = selector >> (4 * i) & 15;
        unsigned byte = unsigned(pool >> (8 * (nibble & 7))) & 255;
        if (nibble & 8) byte = byte & 128 ? 255 : 0;
        out |= byte << (8 * i);
    }
    return out;
}

// The dot product of two i16 with the lower, or the upper, two signed bytes of `b`.
inline int two_products(int a, int b, int first) {
    int sum = 0;
    for (int i = 0; i < 2; i++) sum += int(int16_t(unsigned(a) >> (16 * i))) * int8_t(unsigned(b) >> (8 * (first + i)));
    return sum;
}
inline int __dp2a_lo(int a, int b, int c) { return c + two_products(a, b, 0); }
inline int __dp2a_hi(int a, int b, int c) { return c + two_products(a, b, 2); }

inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
// Threads run one at a time: no interleaving.
inline unsigned atomicMin(unsigned* at, unsigned x) { unsigned was = *at; *at = min(was, x); return was; }

inline void prefetch(const void* at) { volatile unsigned char read = *static_cast<const unsigned char*>(at); (void)read; }

template <class T> void copy_async(T* to, const T* from) { machine::copy_async(to, from); }
inline void end_copies() { machine::self->groups++; }
template <int N> void wait_for_copies() { machine::wait_for_copies(N); }

inline float half_to_float(unsigned short bits) { _Float16 x; memcpy(&x, &bits, 2); return float(x); }
inline unsigned short float_to_half(float x) { _Float16 y = _Float16(x); unsigned short bits; memcpy(&bits, &y, 2); return bits; }

// The product of a tile of 16 rows and a tile of 8 columns, for all lanes at once. Lane 4g + t has of rows g and g + 8, and of
// column g, inputs PER t.. in word 0, and 4 PER further in the next; of the result, columns 2t and 2t + 1 of both rows.
struct Tiles {
    unsigned a[4], b[2];
};
template <class T, int PER, class Value> void multiply_tiles(unsigned char* slots, Value value) {
    typedef T Eight __attribute__((vector_size(8 * sizeof(T))));
    T rows[16][8 * PER];
    Eight columns[8 * PER], sums[16] = {};
    for (int lane = 0; lane < 32; lane++) {
        const Tiles& own = machine::shown<Tiles>(slots, lane);
        for (int i = 0; i < 2; i++)
            for (int e = 0; e < PER; e++) {
                int k = (4 * i + lane % 4) * PER + e;
                rows[lane / 4][k] = value(own.a[2 * i], e);
                rows[lane / 4 + 8][k] = value(own.a[2 * i + 1], e);
                columns[k][lane / 4] = value(own.b[i], e);
            }
    }
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 8 * PER; k++) sums[row] += rows[row][k] * columns[k];
    for (int lane = 0; lane < 32; lane++) {
        T own[4];
        for (int i = 0; i < 4; i++) own[i] = sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
        memcpy(slots + lane * machine::SLOT, own, sizeof own);
    }
}
template <class T, int PER, class Value>
INLINED void mma_collective(const char* what, T (&c)[4], const Tiles& operands, Value value) {
    struct Sums { T of[4]; };
    const unsigned char* all = machine::exchange(
        what, operands, [=](unsigned char* slots) { multiply_tiles<T, PER>(slots, value); });
    for (int i = 0; i < 4; i++) c[i] += machine::shown<Sums>(all, machine::self->lane).of[i];
}

// mma.sync.m16n8k32 of signed bytes, and m16n8k16, which is its first half: see the dialect.
inline int signed_byte(unsigned word, int index) { return int8_t(word >> (8 * index)); }
inline void mma_k32(int (&c)[4], const unsigned (&a)[4], uint2 b, int, int) {
    mma_collective<int, 4>("mma.m16n8k32", c, {{a[0], a[1], a[2], a[3]}, {b.x, b.y}}, signed_byte);
}
inline void mma_k16(int (&c)[4], const unsigned (&a)[2], unsigned b, int, int) {
    mma_collective<int, 4>("mma.m16n8k16", c, {{a[0], a[1], 0, 0}, {b, 0}}, signed_byte);
}

// mma.sync.m16n8k16 of bf16 and of f16, whose products are exact.
inline float wide_bf16(unsigned word, int upper) { return __uint_as_float(upper ? word & 0xffff0000u : word << 16); }
inline void mma_bf16_k16(float (&c)[4], uint4 a, uint2 b) {
    mma_collective<float, 2>("mma.m16n8k16.bf16", c, {{a.x, a.y, a.z, a.w}, {b.x, b.y}}, wide_bf16);
}
inline float wide_f16(unsigned word, int upper) { return half_to_float((unsigned short)(word >> (16 * upper))); }
inline void mma_f16(float (&c)[4], uint4 a, uint2 b) {
    mma_collective<float, 2>("mma.m16n8k16.f16", c, {{a.x, a.y, a.z, a.w}, {b.x, b.y}}, wide_f16);
}

#include "../../cuda/device.cuh"

#define long long_has_32_bits_on_windows
