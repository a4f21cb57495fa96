// The parts of the Metal Shading Language that the Metal dialect uses, on `machine.h`. Included before every source
// (`-include`).
#pragma once

#include "machine.h"

#include <cmath>

typedef unsigned int uint;
typedef unsigned short ushort;

#define INLINE inline
#define KERNEL(name, Params, threads, blocks, ...)                                                                  \
    static_assert(sizeof(__VA_ARGS__) <= 32768 && (threads) <= 1024, "the limits of a threadgroup");                \
    MACHINE_KERNEL(name, Params, threads, __VA_ARGS__)
#define KERNEL_PER_WARP(name, Params, threads, blocks, ...)                                                         \
    static_assert(sizeof(__VA_ARGS__) * ((threads) / 32) <= 32768 && (threads) <= 1024, "the limits of a threadgroup"); \
    MACHINE_KERNEL_PER_WARP(name, Params, threads, __VA_ARGS__)

typedef _Float16 half;
#define device
#define constant
#define threadgroup
#define thread

template <class To, class From> To as_type(From x) {
    static_assert(sizeof(To) == sizeof(From), "as_type");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}

namespace metal {

inline int min(int a, int b) { return b < a ? b : a; }
inline int max(int a, int b) { return a < b ? b : a; }
inline uint min(uint a, uint b) { return b < a ? b : a; }
inline uint max(uint a, uint b) { return a < b ? b : a; }

// Threads run one at a time: no interleaving.
struct atomic_uint { uint value; };
enum memory_order { memory_order_relaxed };
inline uint atomic_fetch_min_explicit(volatile device atomic_uint* at, uint x, memory_order) {
    uint was = at->value;
    at->value = min(was, x);
    return was;
}

enum class mem_flags { mem_none, mem_threadgroup };

struct simd_vote {
    typedef uint64_t vote_t;
    vote_t bits;
    explicit operator vote_t() const { return bits; }
};

// For 32-bit types and their vectors.
template <class T> struct Shuffled { static constexpr bool can = false; };
template <> struct Shuffled<int> { static constexpr bool can = true; };
template <> struct Shuffled<uint> { static constexpr bool can = true; };
template <> struct Shuffled<float> { static constexpr bool can = true; };
template <> struct Shuffled<uint2> { static constexpr bool can = true; };

template <class T> INLINED T simd_shuffle(T value, ushort lane) {
    static_assert(Shuffled<T>::can, "no shuffle of this type");
    if (lane > 31) machine::fail("simd_shuffle from lane %d", lane);
    return machine::shown<T>(machine::exchange("simd_shuffle", value), lane);
}
template <class T> INLINED T simd_shuffle_xor(T value, ushort mask) {
    static_assert(Shuffled<T>::can, "no shuffle of this type");
    int lane = machine::self->lane;
    return machine::shown<T>(machine::exchange("simd_shuffle_xor", value), (lane ^ mask) & 31);
}
inline simd_vote simd_ballot(bool predicate) {
    const unsigned char* all = machine::exchange("simd_ballot", predicate);
    uint64_t bits = 0;
    for (int lane = 0; lane < 32; lane++) bits |= uint64_t(machine::shown<bool>(all, lane)) << lane;
    return {bits};
}

} // namespace metal

inline void threadgroup_barrier(metal::mem_flags) { machine::barrier(); }
inline void simdgroup_barrier(metal::mem_flags) { char none = 0; machine::exchange("simdgroup_barrier", none); }

inline float inverse_sqrt(float x) { return 1.0f / sqrtf(x); }

#define double there_is_no_double_in_metal

#include "../../metal/device.metal"
