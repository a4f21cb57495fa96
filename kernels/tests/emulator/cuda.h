// The CUDA C++ that the kernels use, on `machine.h`. Included before every .cu file (`-include`).
#pragma once

#include "machine.h"

#include <cmath>

#define FORETOKEN_EMULATED 1
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__

#define threadIdx (machine::self.thread)
#define blockIdx (machine::self.block)
#define gridDim (machine::self.blocks)
#define blockDim (machine::self.threads)

// A kernel takes one structure; it is called through a pointer to it.
#define KERNEL(name, Params, threads, blocks)                                                                       \
    static void name##_body(const Params& p);                                                                      \
    extern "C" void name(const void* p) { name##_body(*static_cast<const Params*>(p)); }                           \
    extern "C" size_t name##_params() { return sizeof(Params); }                                                   \
    static void name##_body([[maybe_unused]] const Params& p)

#define SHARED(Type, name)                                                                                         \
    static const char name##_tag = 0;                                                                              \
    Type& name = *static_cast<Type*>(machine::shared(&name##_tag, sizeof(Type)))

#define AT(index) ((index) + machine::mutated(__FILE__, __LINE__))

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

inline void __syncthreads() { machine::barrier(); }
inline void __syncwarp() { char none = 0; machine::exchange("__syncwarp", &none, 1); }

template <class T> T __shfl_sync(unsigned, T value, int lane) {
    return machine::shown<T>(machine::exchange("__shfl_sync", &value, sizeof value), lane & 31);
}
template <class T> T __shfl_xor_sync(unsigned, T value, int mask) {
    int lane = machine::self.lane;
    return machine::shown<T>(machine::exchange("__shfl_xor_sync", &value, sizeof value), (lane ^ mask) & 31);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
    const unsigned char* all = machine::exchange("__ballot_sync", &predicate, sizeof predicate);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; lane++) bits |= unsigned(machine::shown<int>(all, lane) != 0) << lane;
    return bits;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }

// Bytes chosen from the eight of `a` and `b` by the selector's nibbles; the upper bit of a nibble repeats the byte's sign.
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

// Two products of signed halves with signed bytes: the lower, or the upper two bytes of `b`.
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
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }

inline float half_to_float(unsigned short bits) { _Float16 x; memcpy(&x, &bits, 2); return float(x); }
inline unsigned short float_to_half(float x) { _Float16 y = _Float16(x); unsigned short bits; memcpy(&bits, &y, 2); return bits; }

// mma.sync.m16n8k32 of signed bytes. With lane = 4 g + t: `a` holds words t and t + 4 of rows g and g + 8 (first both
// rows' word t), `b` words t and t + 4 of column g; `c` gets rows g and g + 8, columns 2 t and 2 t + 1 (first both of row g).
inline int mma_dot(const unsigned char* all, int row, int column, int words) {
    struct Operands { unsigned a[4], b[2]; };
    int sum = 0;
    for (int k = 0; k < 4 * words; k++) {
        int t = k / 4 % 4, upper = k / 16;
        unsigned a = machine::shown<Operands>(all, row % 8 * 4 + t).a[row / 8 + 2 * upper];
        unsigned b = machine::shown<Operands>(all, column * 4 + t).b[upper];
        sum += int8_t(a >> (8 * (k % 4))) * int8_t(b >> (8 * (k % 4)));
    }
    return sum;
}
inline void mma_collective(const char* what, int (&c)[4], const unsigned (&operands)[6], int words) {
    const unsigned char* all = machine::exchange(what, operands, sizeof operands);
    int g = machine::self.lane / 4, t = machine::self.lane % 4;
    for (int i = 0; i < 4; i++) c[i] += mma_dot(all, g + i / 2 * 8, 2 * t + i % 2, words);
}
inline void mma_k32(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    mma_collective("mma.m16n8k32", c, {a0, a1, a2, a3, b0, b1}, 8);
}
// mma.sync.m16n8k16: as above, of word t only.
inline void mma_k16(int (&c)[4], unsigned a0, unsigned a1, unsigned b0) {
    mma_collective("mma.m16n8k16", c, {a0, a1, 0, 0, b0, 0}, 4);
}
