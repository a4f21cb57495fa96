// The CUDA dialect of `shaders/device.h`.
#pragma once

#define DEVICE
#define CONSTANT
#define THREADGROUP
#define THREAD
#define INLINE __device__ __forceinline__
#define CONSTEXPR constexpr

typedef unsigned long long u64;
typedef long long i64;

#ifndef FORETOKEN_EMULATED

// Programmatic dependent launch: blocks of a kernel start while those of the kernel before still run, and wait for its end,
// and so for all before it, because every kernel waits before its body. Until then it may load what no kernel writes:
// `before_inputs`. Without a programmatic edge in the graph, neither has an effect.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
INLINE void start_next_kernel() { asm volatile("griddepcontrol.launch_dependents;"); }
INLINE void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
INLINE void start_next_kernel() {}
INLINE void wait_for_earlier_kernels() {}
#endif

#define THIS_THREAD                                                                                                 \
    {int(threadIdx.x), int(threadIdx.x % 32), int(threadIdx.x / 32), int(blockDim.x / 32), int(blockIdx.x),         \
     int(blockIdx.y),  int(blockIdx.z)}

#define AT(index) (index)
#define KERNEL(name, Params, threads, blocks, ...)                                                                  \
    INLINE void name##_body(const Params& p, __VA_ARGS__& s, Thread self);                                          \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Params p) {          \
        __shared__ __VA_ARGS__ s;                                                                                   \
        Thread self = THIS_THREAD;                                                                                  \
        start_next_kernel();                                                                                        \
        before_inputs(p, self);                                                                                      \
        wait_for_earlier_kernels();                                                                                 \
        name##_body(p, s, self);                                                                                    \
    }                                                                                                               \
    INLINE void name##_body(const Params& p, __VA_ARGS__& s, Thread self)
#define KERNEL_LARGE(name, Params, threads, blocks, ...)                                                            \
    INLINE void name##_body(const Params& p, __VA_ARGS__& s, Thread self);                                          \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Params p) {          \
        extern __shared__ uint4 of_launch[];                                                                        \
        Thread self = THIS_THREAD;                                                                                  \
        start_next_kernel();                                                                                        \
        before_inputs(p, self);                                                                                      \
        wait_for_earlier_kernels();                                                                                 \
        name##_body(p, *reinterpret_cast<__VA_ARGS__*>(of_launch), self);                                           \
    }                                                                                                               \
    INLINE void name##_body(const Params& p, __VA_ARGS__& s, Thread self)
#define KERNEL_PER_WARP(name, Params, threads, blocks, ...)                                                         \
    INLINE void name##_body(const Params& p, __VA_ARGS__* s, Thread self);                                          \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Params p) {          \
        extern __shared__ uint4 of_warps[];                                                                         \
        __VA_ARGS__* s = reinterpret_cast<__VA_ARGS__*>(of_warps);                                                  \
        Thread self = THIS_THREAD;                                                                                  \
        start_next_kernel();                                                                                        \
        before_inputs(p, s, self);                                                                                  \
        wait_for_earlier_kernels();                                                                                 \
        name##_body(p, s, self);                                                                                    \
    }                                                                                                               \
    INLINE void name##_body(const Params& p, __VA_ARGS__* s, Thread self)

INLINE float half_to_float(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
INLINE unsigned short float_to_half(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// Loads the cache line at `at` into the L2 cache.
INLINE void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" :: "l"(at)); }

// Of 16 bytes past the L1 cache. Addresses of device memory are also generic ones.
template <class T>
INLINE void copy_async(T* to, const T* from) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "the sizes of cp.async");
    unsigned at = unsigned(__cvta_generic_to_shared(to));
    if (sizeof(T) == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" :: "r"(at), "l"(from), "n"(sizeof(T) % 16) : "memory");
}
INLINE void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
INLINE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

// On tensor cores; unused columns cost nothing extra. `shaders/device.h` draws the fragments.
INLINE void mma_k32(int (&c)[4], const unsigned (&a)[4], uint2 b, int t, int live) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}
INLINE void mma_k16(int (&c)[4], const unsigned (&a)[2], unsigned b, int t, int live) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
}
// Sixteen inputs of bf16: a lane's words are 2 t, 2 t + 1 and 2 t + 8, 2 t + 9, of row g, row g + 8, row g, row g + 8.
INLINE void mma_bf16_k16(float (&c)[4], uint4 a, uint2 b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}
INLINE void mma_f16(float (&c)[4], uint4 a, uint2 b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

#endif

INLINE float mul(float a, float b) { return __fmul_rn(a, b); }
INLINE float add(float a, float b) { return __fadd_rn(a, b); }
INLINE float sub(float a, float b) { return __fsub_rn(a, b); }
INLINE float inverse_sqrt(float x) { return rsqrtf(x); }
INLINE float quotient(float a, float b) { return __fdividef(a, b); }
INLINE float float_of(unsigned bits) { return __uint_as_float(bits); }
INLINE unsigned bits_of(float x) { return __float_as_uint(x); }

#define COPIES
#define HALF_PRODUCTS
#define DOUBLES
typedef double Exact;
INLINE Exact exact(float x) { return x; }
INLINE float narrow(Exact x) { return float(x); }
INLINE Exact mul(Exact a, Exact b) { return __dmul_rn(a, b); }
INLINE Exact add(Exact a, Exact b) { return __dadd_rn(a, b); }

INLINE void barrier() { __syncthreads(); }
INLINE void warp_barrier() { __syncwarp(); }
template <class T>
INLINE T shuffle(T x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
template <class T>
INLINE T shuffle_xor(T x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
INLINE unsigned warp_ballot(bool x) { return __ballot_sync(0xffffffffu, x); }
INLINE void atomic_min(unsigned* at, unsigned x) { atomicMin(at, x); }

CONSTEXPR int SHARED_BYTES = 49152; // of a block
CONSTEXPR bool PERMUTES = true;
INLINE unsigned permute_bytes(unsigned a, unsigned b, unsigned selector) { return __byte_perm(a, b, selector); }
INLINE int dp2a_lo(int a, int b, int c) { return __dp2a_lo(a, b, c); }
INLINE int dp2a_hi(int a, int b, int c) { return __dp2a_hi(a, b, c); }

// Eight floats as the sums of three bf16 each: the upper, middle and lower 8 bits of their 24, in pairs.
struct Pieces {
    uint4 upper, middle, lower;
};

// The upper halves of two floats: bf16 by truncation, so that no finite number becomes infinite.
INLINE unsigned upper_halves(float a, float b) { return __byte_perm(bits_of(a), bits_of(b), 0x7632); }
// What truncation drops, exactly.
INLINE float dropped(float x) { return sub(x, float_of(bits_of(x) & 0xffff0000u)); }

INLINE Pieces pieces(const float (&x)[8]) {
    unsigned piece[3][4];
    for (int i = 0; i < 4; i++) {
        float a = x[2 * i], b = x[2 * i + 1], infinity = float_of(0x7f800000u);
        piece[0][i] = upper_halves(a, b);
        // An infinity is its upper piece alone; a NaN stays one in the middle piece, even if the upper has lost its bits.
        a = fabsf(a) == infinity ? 0.0f : dropped(a), b = fabsf(b) == infinity ? 0.0f : dropped(b);
        piece[1][i] = upper_halves(a, b);
        piece[2][i] = upper_halves(dropped(a), dropped(b));
    }
    return {{piece[0][0], piece[0][1], piece[0][2], piece[0][3]},
            {piece[1][0], piece[1][1], piece[1][2], piece[1][3]},
            {piece[2][0], piece[2][1], piece[2][2], piece[2][3]}};
}

// Which of a lane's inputs an mma calls 2 t does not matter, as long as A and B agree. Small products first.
INLINE void mma_bf16(float (&c)[4], uint4 first, uint4 second, const Pieces& b, int t, int live) {
    mma_bf16_k16(c, first, {b.lower.x, b.lower.y});
    mma_bf16_k16(c, second, {b.lower.z, b.lower.w});
    mma_bf16_k16(c, first, {b.middle.x, b.middle.y});
    mma_bf16_k16(c, second, {b.middle.z, b.middle.w});
    mma_bf16_k16(c, first, {b.upper.x, b.upper.y});
    mma_bf16_k16(c, second, {b.upper.z, b.upper.w});
}
