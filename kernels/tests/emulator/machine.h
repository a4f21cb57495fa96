// A block of GPU threads on the CPU: what a kernel language's header is built on (`cuda.h`; a Metal one would sit beside it).
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

// The block's memory of `tag`: guarded, and of poisonous content at the beginning of a block.
void* shared(const void* tag, size_t bytes);

// Ends the launch with an error.
[[noreturn]] void fail(const char* format, ...);

// Whether the index at this line is to be wrong: see the mutation test.
extern thread_local const char* mutant_file;
extern thread_local int mutant_line;
inline int mutated(const char* file, int line) {
    return line == mutant_line && strcmp(file, mutant_file) == 0;
}

template <class T>
const T& shown(const unsigned char* slots, int lane) {
    return *reinterpret_cast<const T*>(slots + lane * SLOT);
}

} // namespace machine
