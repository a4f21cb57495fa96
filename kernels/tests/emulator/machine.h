// A block of GPU threads on the CPU: what the headers of the two kernel languages are built on (`cuda.h`, `metal.h`).
//
// Every thread of a block is a fiber. A fiber runs until it meets a barrier or a warp-wide exchange, and goes on when all
// others are there; if they never come, the launch ends with an error that says who waits where. Threads between two
// barriers run one after the other, forwards or backwards: a missing barrier shows as a wrong result in one of the orders,
// most of the time. Blocks run one after the other, too. So this finds errors of indexing, of logic, of uneven barriers and
// many missing ones; it cannot find all races, and says nothing about speed.
//
// Memory: buffers and shared memory end where an inaccessible page begins, so that the first byte behind them is an
// error; before them lie known bytes that are checked after a launch. Sanitizer traps (misaligned access, an index beyond
// an array) are errors of the launch as well.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace machine {

struct Dim {
    unsigned x, y, z;
};

constexpr int WARP = 32;
constexpr int SLOT = 32; // bytes that one lane can show the others at a time

// What the running thread sees of itself.
struct Self {
    Dim thread, block, blocks, threads;
    int linear, lane;
};
extern thread_local Self self;

// All lanes of the warp show `bytes` of `value`, and each gets a pointer to what all 32 showed, SLOT bytes apart. It is
// valid until the lane's next exchange but one.
const unsigned char* exchange(const char* what, const void* value, size_t bytes);

// Returns when all threads of the block are here.
void barrier();

// The block's memory: guarded, and of poisonous content at the beginning of a block.
void* shared(size_t bytes);

// Ends the launch with an error.
[[noreturn]] void fail(const char* format, ...);

// The marked index that is one too large, or 0: see the mutation test.
extern thread_local int mutant;

template <class T>
const T& shown(const unsigned char* slots, int lane) {
    return *reinterpret_cast<const T*>(slots + lane * SLOT);
}

} // namespace machine

#ifdef FORETOKEN_ADDRESS_SPACES
typedef unsigned uint2 __attribute__((ext_vector_type(2)));
typedef unsigned uint4 __attribute__((ext_vector_type(4)));
typedef int int2 __attribute__((ext_vector_type(2)));
typedef float float2 __attribute__((ext_vector_type(2)));
typedef float float4 __attribute__((ext_vector_type(4)));
#else
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
#endif

#define FORETOKEN_EMULATED 1

// A kernel is called through a pointer to its parameters.
#define MACHINE_KERNEL(name, Params, largest, ...)                                                                  \
    static void name##_body(const CONSTANT Params& p, THREADGROUP __VA_ARGS__& s, Thread self);                     \
    extern "C" void name(const void* p) {                                                                           \
        const machine::Self& self = machine::self;                                                                  \
        int threads = self.threads.x * self.threads.y * self.threads.z;                                             \
        if (threads > largest) machine::fail("a block of %d threads; its kernel has %d at most", threads, largest); \
        Thread own = {self.linear, self.lane, self.linear / machine::WARP, threads / machine::WARP,                 \
                      int(self.block.x), int(self.block.y), int(self.block.z)};                                     \
        void* s = machine::shared(sizeof(__VA_ARGS__));                                                             \
        name##_body(*(const CONSTANT Params*)p, *(THREADGROUP __VA_ARGS__*)s, own);                                 \
    }                                                                                                               \
    extern "C" size_t name##_params() { return sizeof(Params); }                                                    \
    static void name##_body(const CONSTANT Params& p, THREADGROUP __VA_ARGS__& s, Thread self)

// A marked index; in the copies of the sources that are compiled, each has a number of its own.
#define AT(index) (index)
#define NUMBERED_AT(number, index) ((index) + (machine::mutant == (number)))
