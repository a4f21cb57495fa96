// Quantizes a page of 128 rotated rows: the bytes of turboquant/encode.rs and turboquant/quantizer.rs.
//
// A block processes one group of 128 channels of one head's page. Sixteen threads share a row, because the CPU sums
// squares in sixteen partial sums: thread s of a row has the channels s, s + 16, ... Codes are collected in shared
// memory and written in the order of the planes, 64-byte lines at a time. This runs once per page of 128 tokens and is
// not tuned. Grid: (groups, heads, pages).

#include "pages.h"

namespace {

struct Params {
    const DEVICE Slot* tables; // of the sequence
    Pages rows;  // exact pages, rotated
    Pages codes; // quantized pages
    int first;   // page
    int channels, head_bytes;
    int element;
    int keys;         // 1: laid out as keys; 0: as values
    int centred;      // 1: codes are relative to the mean, which is stored
    int least_squares; // 1: scales of least squared error; 0: scales that preserve the norm
    int upper, lower; // bits of a code in the two planes
    int boundaries;   // how many
    float spread;
    float boundary[64];
    float level[64];
};

CONSTEXPR int THREADS = 256, GROUP = 128;

struct Scratch {
    float mean[GROUP];
    float boundary[64];
    float level[64];
    u8 codes[PAGE][GROUP + 4]; // rows 33 words apart: no bank conflicts in either order of reading
};

INLINE u16 finite_half(float x) { return float_to_half(fminf(fmaxf(x, -65504.0f), 65504.0f)); }

// Adds a row's sixteen partial sums in order.
INLINE Exact sum_of_partials(Exact partial, int lane) {
    Exact sum = exact(0.0f);
    for (int s = 0; s < 16; s++) sum = add(sum, shuffle(partial, (lane & 16) | s));
    return sum;
}

// Writes one plane: bits `drop..drop + bits` of every code.
INLINE void store_plane(const CONSTANT Params& p, const THREADGROUP Scratch& scratch, DEVICE u8* plane, int group, int bits,
                        int drop, Thread self) {
    // A run is 32 vectors of 16 lanes by 4; lanes are 16 tokens (keys) or 16 channels (values). A group has eight runs.
    int vectors = 8 / bits, lines = 32 / vectors, run = 64 * lines;
    for (int i = self.index; i < 8 * lines * 16; i += THREADS) {
        int strip = i / (lines * 16), line = i / 16 % lines, lane = i % 16;
        u32 word = 0;
        for (int v = 0; v < vectors; v++) {
            for (int d = 0; d < 4; d++) {
                int across = strip * 16 + lane, deep = (line * vectors + v) * 4 + d;
                u32 code = p.keys ? scratch.codes[AT(across)][deep] : scratch.codes[AT(deep)][across];
                word |= (code >> drop & ((1u << bits) - 1)) << (8 * d + v * bits);
            }
        }
        i64 at = i64(group * 8 + strip) * run;
        *reinterpret_cast<DEVICE u32*>(plane + AT(at + line * 64 + lane * 4)) = word;
    }
}

template <class E>
INLINE void encode(const CONSTANT Params& p, THREADGROUP Scratch& scratch, Thread self) {
    int tid = self.index, lane = self.lane, group = self.x, head = self.y, page = p.first + self.z;
    int groups = p.channels / GROUP;
    typedef typename E::Bits Bits;
    const DEVICE Bits* rows = page_of<const Bits>(p.tables, p.rows, page) + i64(head) * PAGE * p.channels + AT(group * GROUP);
    DEVICE u8* codes = page_of<u8>(p.tables, p.codes, page) + i64(head) * p.head_bytes;
    int plane = PAGE * p.channels / 8;
    DEVICE u16* scales = reinterpret_cast<DEVICE u16*>(codes + plane * (p.upper + p.lower));
    if (tid < 64) {
        scratch.boundary[tid] = p.boundary[AT(tid) % 64];
        scratch.level[tid] = p.level[tid];
    }
    if (tid < GROUP) {
        float mean = 0;
        if (p.centred) {
            for (int token = 0; token < PAGE; token++)
                mean = add(mean, mul(E::widen(rows[AT(i64(token) * p.channels + tid)]), 1.0f / PAGE));
            u16 stored = finite_half(mean);
            scales[AT(groups * PAGE + group * GROUP + tid)] = stored;
            mean = half_to_float(stored);
        }
        scratch.mean[tid] = mean;
    }
    barrier();
    for (int token = tid / 16; token < PAGE; token += THREADS / 16) {
        int s = tid % 16;
        float x[8];
        Exact squares = exact(0.0f);
        for (int k = 0; k < 8; k++) {
            x[k] = sub(E::widen(rows[AT(i64(token) * p.channels + s + 16 * k)]), scratch.mean[AT(s + 16 * k)]);
            squares = add(squares, mul(exact(x[k]), exact(x[k])));
        }
        Exact norm = sqrt(sum_of_partials(squares, lane));
        bool normal = norm >= exact(1.17549435e-38f);
        float to_levels = normal ? narrow(mul(exact(p.spread), sqrt(exact(float(GROUP)))) / norm) : 0.0f;
        Exact level_squares = exact(0.0f), products = exact(0.0f);
        for (int k = 0; k < 8; k++) {
            float scaled = mul(x[k], to_levels);
            // The number of boundaries at or below it, by bisection: they ascend.
            int code = 0;
            for (int step = 32; step > 0; step /= 2)
                if (code + step <= p.boundaries && scratch.boundary[code + step - 1] <= scaled) code += step;
            scratch.codes[token][AT(s + 16 * k)] = u8(code);
            Exact level = exact(scratch.level[code]);
            level_squares = add(level_squares, mul(level, level));
            products = add(products, mul(exact(x[k]), level));
        }
        level_squares = sum_of_partials(level_squares, lane);
        products = sum_of_partials(products, lane);
        Exact scale = p.least_squares ? products / level_squares : norm / sqrt(level_squares);
        if (s == 0) scales[AT(group * PAGE + token)] = normal ? finite_half(narrow(scale)) : u16(0);
    }
    barrier();
    store_plane(p, scratch, codes, group, p.upper, p.lower, self);
    if (p.lower) store_plane(p, scratch, codes + AT(plane * p.upper), group, p.lower, 0, self);
}

} // namespace

KERNEL(encode_page, Params, THREADS, 2, Scratch) {
    if (p.element == F32) encode<Single>(p, s, self);
    if (p.element == F16) encode<Half>(p, s, self);
    if (p.element == BF16) encode<Bfloat16>(p, s, self);
}
