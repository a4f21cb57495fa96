// A block of GPU threads on the CPU: the base of the headers of the two kernel languages (`cuda.h`, `metal.h`).
//
// Every thread of a block is a fiber. A fiber runs until a barrier or a warp-wide exchange, and resumes when all others
// have arrived; if some never arrive, the launch ends with an error that names the waiting threads. Threads between two
// barriers run one after the other, forwards or backwards: a missing barrier usually gives a wrong result in one of the
// orders. Blocks also run one after the other. So this detects errors of indexing and logic, uneven barriers, and many
// missing ones; not all races, and no speed.
//
// Memory: buffers and shared memory end at inaccessible pages, so that an access to the first byte after them faults.
// The page before them cannot be written; the bytes between are known and checked after a launch. Sanitizer traps
// (misaligned access, an index beyond an array) are errors of the launch as well.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace machine {

struct Dim {
    unsigned x, y, z;
};

constexpr int WARP = 32;
constexpr int SLOT = 32; // bytes per lane of an exchange

// Reached from the thread's register: the libraries are opened at run time, where the default is a call for every access.
// All thread-local variables of such a library together may have some hundred bytes.
#define NEAR __thread __attribute__((tls_model("initial-exec")))

// A synchronization point: of a warp or of the block.
struct Gate {
    const char* what = nullptr; // where the first to arrive is
    int arrived = 0;
    unsigned generation = 0;
    alignas(16) unsigned char slots[2][WARP * SLOT];
};

// A copy to shared memory that its thread has not waited for.
struct Copy {
    int group;
    void* to;
    size_t len;
    unsigned char bytes[16];
};

// A thread's indices.
struct Self {
    Dim thread, block, blocks, threads;
    int linear, lane;
    Gate* warp;
    mutable std::vector<Copy> copies;
    mutable int groups; // of copies, that were ended
};
extern NEAR const Self* self; // the running thread

// Yields until the gate opens.
void wait(Gate& gate);

// Ends the launch with an error.
[[noreturn]] void fail(const char* format, ...);

#define INLINED __attribute__((always_inline)) inline

// Returns when `expected` threads have arrived. Inlined, as everything between a kernel and `wait` is: after a switch between
// threads the processor predicts each return wrongly, which was half of the time.
INLINED void arrive(Gate& gate, const char* what, int expected) {
    if (gate.arrived > 0 && gate.what != what)
        fail("some threads are at %s while others are at %s", gate.what, what);
    gate.what = what;
    gate.arrived++;
    if (gate.arrived == expected) {
        gate.arrived = 0;
        gate.generation++;
    } else {
        wait(gate);
    }
}

// Exchanges a value among all lanes of the warp: returns the 32 values, SLOT bytes apart, valid until the lane's second next
// exchange. `once` replaces them by what the lanes see instead.
template <class T, class Once> INLINED const unsigned char* exchange(const char* what, const T& value, Once once) {
    static_assert(sizeof value <= SLOT, "a slot holds the value");
    Gate& gate = *self->warp;
    unsigned char* slots = gate.slots[gate.generation % 2];
    memcpy(slots + self->lane * SLOT, &value, sizeof value);
    if (gate.arrived == WARP - 1) once(slots);
    arrive(gate, what, WARP);
    return slots;
}
template <class T> INLINED const unsigned char* exchange(const char* what, const T& value) {
    return exchange(what, value, [](unsigned char*) {});
}

// Begins a copy to shared memory: overwrites it at once, with poison, and copies when the thread waits.
template <class T> void copy_async(T* to, const T* from) {
    static_assert(sizeof(T) <= 16, "the bytes of a copy");
    T value = *from, poison;
    memset(&poison, 0xff, sizeof poison);
    *to = poison;
    Copy copy = {self->groups, to, sizeof value, {}};
    memcpy(copy.bytes, &value, sizeof value);
    self->copies.push_back(copy);
}

// Ends all groups of copies but the `pending` last.
inline void wait_for_copies(int pending) {
    size_t left = 0;
    for (const Copy& copy : self->copies)
        if (copy.group < self->groups - pending)
            memcpy(copy.to, copy.bytes, copy.len);
        else
            self->copies[left++] = copy;
    self->copies.resize(left);
}

// Returns when all threads of the block have arrived.
void barrier();

// The block's shared memory: guarded, poisoned at the beginning of a block, and at no multiple of more than `alignment`, as a
// compiler may place it.
void* shared(size_t bytes, size_t alignment);

// The marked index that is one too large, or 0: see the mutation test.
extern NEAR int mutant;

template <class T>
const T& shown(const unsigned char* slots, int lane) {
    return *reinterpret_cast<const T*>(slots + lane * SLOT);
}

} // namespace machine

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

#define FORETOKEN_EMULATED 1

// A kernel is called through a pointer to its parameters.
#define MACHINE_ENTRY(name, Params, largest, count, Shared, access)                                                 \
    extern "C" void name(const void* p) {                                                                           \
        const machine::Self& self = *machine::self;                                                                 \
        int threads = self.threads.x * self.threads.y * self.threads.z;                                             \
        if (threads > largest) machine::fail("a block of %d threads; its kernel has %d at most", threads, largest); \
        Thread own = {self.linear, self.lane, self.linear / machine::WARP, threads / machine::WARP,                 \
                      int(self.block.x), int(self.block.y), int(self.block.z)};                                     \
        Shared* s = (Shared*)machine::shared(sizeof(Shared) * (count), alignof(Shared));                            \
        access                                                                                                      \
    }                                                                                                               \
    extern "C" size_t name##_params() { return sizeof(Params); }
#define MACHINE_KERNEL(name, Params, largest, ...)                                                                  \
    static void name##_body(const CONSTANT Params& p, THREADGROUP __VA_ARGS__& s, Thread self);                     \
    typedef __VA_ARGS__ name##_shared;                                                                              \
    MACHINE_ENTRY(name, Params, largest, 1, THREADGROUP name##_shared, {                                            \
        before_inputs(*(const CONSTANT Params*)p, own);                                                             \
        name##_body(*(const CONSTANT Params*)p, *s, own);                                                           \
    })                                                                                                              \
    static void name##_body(const CONSTANT Params& p, THREADGROUP __VA_ARGS__& s, Thread self)
#define MACHINE_KERNEL_PER_WARP(name, Params, largest, ...)                                                         \
    static void name##_body(const CONSTANT Params& p, THREADGROUP __VA_ARGS__* s, Thread self);                     \
    typedef __VA_ARGS__ name##_shared;                                                                              \
    MACHINE_ENTRY(name, Params, largest, threads / machine::WARP, THREADGROUP name##_shared, {                      \
        before_inputs(*(const CONSTANT Params*)p, s, own);                                                          \
        name##_body(*(const CONSTANT Params*)p, s, own);                                                            \
    })                                                                                                              \
    static void name##_body(const CONSTANT Params& p, THREADGROUP __VA_ARGS__* s, Thread self)

// A marked index; the compiled copies of the sources number them.
#define AT(index) (index)
#define NUMBERED_AT(number, index) ((index) + (machine::mutant == (number)))
