#include "machine.h"

#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <memory>
#include <vector>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

namespace machine {

NEAR const Self* self;
NEAR int mutant = 0;

namespace {

// Not a multiple of 4 KiB: the tops of the stacks are in different sets of the caches.
constexpr size_t STACK = (32 << 10) + 5 * 64;
constexpr unsigned char POISON = 0xa5;

// Where a fiber or the scheduler goes on. The compiler's own functions save three registers and check nothing.
#if defined(__x86_64__)
typedef void* Place[5];
#define SAVE(place) __builtin_setjmp(place)
#define CONTINUE(place) __builtin_longjmp(place, 1)
#else
typedef jmp_buf Place;
#define SAVE(place) _setjmp(place)
#define CONTINUE(place) _longjmp(place, 1)
#endif
// Not in the function that saves the place.
#define APART __attribute__((noinline))

// A stack and its saved context, reused by the threads of every block.
struct Context {
    Place resume;
    bool started = false;
};

struct Fiber {
    Self self;
    Context* context;
    Gate* waits;
    unsigned generation;
    bool done;
};

struct Guarded {
    unsigned char *map, *data;
    size_t map_len, len;
};

// One per test thread, so that launches can run in parallel.
struct Machine {
    ~Machine();

    std::vector<Fiber> fibers;
    std::vector<Context> contexts; // one per stack
    ucontext_t entry;
    unsigned char* stacks = nullptr;
    size_t num_stacks = 0;
    std::vector<Gate> warps;
    Gate block;
    std::list<Guarded> shared; // of every size that a launch had
    Guarded* own_shared = nullptr; // this launch's, or none yet
    std::vector<Guarded> buffers;
    Fiber* running = nullptr;
    size_t left = 0; // threads that have not returned
    bool backwards = false;
    Place scheduler;
    sigjmp_buf escape;
    bool launched = false;
    void (*kernel)(const void*) = nullptr;
    const void* params = nullptr;
    char error[512];
};
thread_local std::unique_ptr<Machine> owned;
NEAR Machine* m = nullptr; // `owned`'s, from the thread's first use on

void enter() {
    if (!owned) owned = std::make_unique<Machine>();
    m = owned.get();
}

const size_t page = sysconf(_SC_PAGESIZE);

// Inaccessible bytes around a buffer: a wrong index that lands behind one page is not to write another thread's memory.
constexpr size_t AROUND = 16 << 20;

// `len` bytes that begin `data_len` before inaccessible ones.
Guarded guard(size_t len, size_t data_len) {
    size_t pages = (data_len + page - 1) / page + 1; // one more page before, which can be read and not be written
    Guarded g;
    g.map_len = pages * page;
    void* map = mmap(nullptr, AROUND + g.map_len + AROUND, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) abort();
    g.map = static_cast<unsigned char*>(map) + AROUND;
    if (mprotect(g.map, g.map_len, PROT_READ | PROT_WRITE) != 0) abort();
    g.data = g.map + pages * page - data_len;
    g.len = len;
    memset(g.map, POISON, g.map_len);
    if (mprotect(g.map, page, PROT_READ) != 0) abort();
    return g;
}

void free_guarded(const Guarded& g) { munmap(g.map - AROUND, AROUND + g.map_len + AROUND); }

void free_shared() {
    for (const Guarded& s : m->shared) free_guarded(s);
    m->shared.clear();
    m->own_shared = nullptr;
}

Machine::~Machine() {
    for (const Guarded& s : shared) free_guarded(s);
    if (stacks) munmap(stacks, num_stacks * STACK);
}

bool intact(const Guarded& g) {
    // The bytes are all poison if the first is and each equals the next. The data themselves are not compared.
    auto poisoned = [](const unsigned char* at, const unsigned char* end) {
        return at == end || (*at == POISON && memcmp(at, at + 1, size_t(end - at) - 1) == 0);
    };
    return poisoned(g.map + page, g.data) && poisoned(g.data + g.len, g.map + g.map_len);
}

void run_fiber();
[[noreturn]] void stuck();

// Runs the fiber until it waits or ends.
[[noreturn]] APART void resume(Fiber& fiber, size_t index) {
    m->running = &fiber;
    self = &fiber.self;
    fiber.waits = nullptr;
    if (fiber.context->started) CONTINUE(fiber.context->resume);
    fiber.context->started = true;
    getcontext(&m->entry);
    m->entry.uc_stack.ss_sp = m->stacks + index * STACK;
    m->entry.uc_stack.ss_size = STACK;
    m->entry.uc_link = nullptr;
    makecontext(&m->entry, run_fiber, 0);
    setcontext(&m->entry);
    abort();
}

// The index after this one, in turn, of `n`.
size_t after(size_t index, size_t n) {
    return m->backwards ? (index == 0 ? n : index) - 1 : (index + 1 == n ? 0 : index + 1);
}

// Switches to the next fiber that can run: of the same warp, whose stacks are in the nearest cache, if there is one; to the
// scheduler after the last.
[[noreturn]] APART void next() {
    if (m->left == 0) CONTINUE(m->scheduler);
    auto resume_if_it_can_run = [](size_t index) {
        Fiber& fiber = m->fibers[index];
        if (!fiber.done && !(fiber.waits && fiber.waits->generation == fiber.generation)) resume(fiber, index);
    };
    size_t n = m->fibers.size(), index = size_t(m->running - m->fibers.data()), lane = index % WARP;
    for (int i = 0; i < WARP; i++) resume_if_it_can_run(index - index % WARP + (lane = after(lane, WARP)));
    for (size_t i = 0; i < n; i++) resume_if_it_can_run(index = after(index, n));
    stuck();
}

void run_fiber() {
    for (;;) {
        m->kernel(m->params);
        m->running->done = true;
        m->left--;
        if (SAVE(m->running->context->resume) == 0) next();
    }
}

[[noreturn]] void stuck() {
    int done = 0, at_barrier = 0, at_exchange = 0;
    const Fiber* first = nullptr;
    for (const Fiber& fiber : m->fibers) {
        if (fiber.done) {
            done++;
            continue;
        }
        if (!first) first = &fiber;
        (fiber.waits == &m->block ? at_barrier : at_exchange)++;
    }
    fail("a barrier is not reached by all: %d threads wait for the block, %d for their warp, %d have returned; thread %d is at %s",
         at_barrier, at_exchange, done, first->self.linear, first->waits->what);
}

void run_block() {
    if (m->own_shared) memset(m->own_shared->data, 0xff, m->own_shared->len);
    m->left = m->fibers.size();
    size_t first = m->backwards ? m->left - 1 : 0;
    if (SAVE(m->scheduler) == 0) resume(m->fibers[first], first);
}

void on_signal(int signal, siginfo_t* info, void*) {
    if (!m || !m->launched) { // not from a launch
        ::signal(signal, SIG_DFL);
        return;
    }
    if (signal == SIGSEGV || signal == SIGBUS) {
        auto* at = static_cast<unsigned char*>(info->si_addr);
        auto name = [&](const Guarded& g, const char* kind, size_t index) {
            if (at < g.map - AROUND || at >= g.map + g.map_len + AROUND) return;
            snprintf(m->error, sizeof m->error, "thread %d of block (%u, %u, %u): byte %td of %s %zu, which has %zu",
                     self->linear, self->block.x, self->block.y, self->block.z, at - g.data, kind, index, g.len);
        };
        snprintf(m->error, sizeof m->error, "thread %d of block (%u, %u, %u): no memory at %p", self->linear, self->block.x,
                 self->block.y, self->block.z, static_cast<void*>(at));
        for (size_t i = 0; i < m->buffers.size(); i++) name(m->buffers[i], "buffer", i);
        if (m->own_shared) name(*m->own_shared, "shared memory", 0);
    } else {
        snprintf(m->error, sizeof m->error,
                 "thread %d of block (%u, %u, %u): a misaligned access, or an index beyond an array's end", self->linear,
                 self->block.x, self->block.y, self->block.z);
    }
    siglongjmp(m->escape, 1);
}

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP};

#if defined(__x86_64__)
constexpr unsigned FLUSH = 0x8040; // subnormal operands and results are zeros
unsigned float_mode() { return __builtin_ia32_stmxcsr(); }
void set_float_mode(unsigned mode) { __builtin_ia32_ldmxcsr(mode); }
#elif defined(__aarch64__)
constexpr uint64_t FLUSH = 1 << 24; // FZ: the same
uint64_t float_mode() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
void set_float_mode(uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
#else
constexpr unsigned FLUSH = 0; // not emulated
unsigned float_mode() { return 0; }
void set_float_mode(unsigned) {}
#endif

void install_handlers() {
    // Once per process: other signals get the default action.
    static bool installed = [] {
        struct sigaction action = {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_NODEFER;
        for (int signal : SIGNALS) sigaction(signal, &action, nullptr);
        return true;
    }();
    (void)installed;
}

} // namespace

void fail(const char* format, ...) {
    va_list args;
    va_start(args, format);
    int len = snprintf(m->error, sizeof m->error, "block (%u, %u, %u): ", self->block.x, self->block.y, self->block.z);
    vsnprintf(m->error + len, sizeof m->error - len, format, args);
    va_end(args);
    siglongjmp(m->escape, 1);
}

void wait(Gate& gate) {
    Fiber* own = m->running;
    own->waits = &gate;
    own->generation = gate.generation;
    if (SAVE(own->context->resume) == 0) next();
}

void barrier() {
    arrive(m->block, "the block's barrier", static_cast<int>(m->fibers.size()));
}

void* shared(size_t bytes, size_t alignment) {
    if (!m->own_shared) {
        size_t data_len = bytes / alignment % 2 ? bytes : bytes + alignment;
        for (Guarded& s : m->shared)
            if (s.len == bytes && size_t(s.map + s.map_len - s.data) == data_len) m->own_shared = &s;
        if (!m->own_shared) {
            m->shared.push_back(guard(bytes, data_len));
            m->own_shared = &m->shared.back();
        }
        memset(m->own_shared->data, 0xff, bytes);
    }
    return m->own_shared->data;
}

} // namespace machine

using namespace machine;

extern "C" {

// Guarded memory of `len` bytes of poison.
unsigned char* machine_buffer(size_t len) {
    enter();
    m->buffers.push_back(guard(len, (len + 15) / 16 * 16));
    return m->buffers.back().data;
}

// Frees one buffer: later accesses are errors.
void machine_free_buffer(const unsigned char* data) {
    enter();
    for (size_t i = 0; i < m->buffers.size(); i++) {
        if (m->buffers[i].data != data) continue;
        free_guarded(m->buffers[i]);
        m->buffers.erase(m->buffers.begin() + i);
        return;
    }
}

// Frees all buffers of this thread.
void machine_free_buffers() {
    enter();
    for (Guarded& g : m->buffers) free_guarded(g);
    m->buffers.clear();
}

void machine_mutate(int number) {
    mutant = number;
}

// Runs a kernel; null, or an error message. `flushes`: in arithmetic with floats, subnormal numbers are zeros.
const char* machine_launch(void (*kernel)(const void*), const unsigned* grid, const unsigned* block, const void* params,
                           int backwards, int flushes) {
    Dim threads = {block[0], block[1], block[2]};
    size_t n = size_t(threads.x) * threads.y * threads.z;
    if (n == 0 || n > 1024 || n % WARP != 0) return "the block is not of whole warps, or too large";
    enter();
    install_handlers();
    if (m->num_stacks < n) {
        if (m->stacks) munmap(m->stacks, m->num_stacks * STACK);
        void* map = mmap(nullptr, n * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (map == MAP_FAILED) return "no memory for stacks";
        m->stacks = static_cast<unsigned char*>(map);
        m->num_stacks = n;
        m->contexts.assign(n, Context());
    }
    m->own_shared = nullptr;
    m->kernel = kernel;
    m->params = params;
    m->backwards = backwards;
    m->warps.assign(n / WARP, Gate()); // after a block, all are open
    m->block = Gate();
    m->error[0] = 0;
    m->launched = true;
    const auto mode = float_mode();
    set_float_mode(flushes ? mode | FLUSH : mode & ~FLUSH);
    if (sigsetjmp(m->escape, 1) == 0) {
        size_t blocks = size_t(grid[0]) * grid[1] * grid[2];
        for (size_t i = 0; i < blocks; i++) {
            size_t b = backwards ? blocks - 1 - i : i;
            Dim at = {unsigned(b % grid[0]), unsigned(b / grid[0] % grid[1]), unsigned(b / grid[0] / grid[1])};
            m->fibers.assign(n, Fiber());
            for (size_t t = 0; t < n; t++) {
                Dim thread = {unsigned(t % threads.x), unsigned(t / threads.x % threads.y), unsigned(t / threads.x / threads.y)};
                m->fibers[t].context = &m->contexts[t];
                m->fibers[t].self = {thread, at, {grid[0], grid[1], grid[2]}, threads, int(t), int(t % WARP),
                                     &m->warps[t / WARP], {}, 0};
            }
            run_block();
        }
        if (m->own_shared && !intact(*m->own_shared))
            snprintf(m->error, sizeof m->error, "shared memory was written outside its bounds");
        for (const Guarded& g : m->buffers)
            if (!intact(g)) snprintf(m->error, sizeof m->error, "a buffer was written before its beginning");
    } else {
        // The fibers are suspended within the kernel.
        m->contexts.assign(m->num_stacks, Context());
    }
    if (m->error[0]) free_shared(); // the bytes around it are not what they were
    set_float_mode(mode);
    m->launched = false;
    return m->error[0] ? m->error : nullptr;
}

}
