// Quantizes a page of 128 rotated rows: the bytes of turboquant/encode.rs and turboquant/quantizer.rs.
//
// A block processes up to 128 channels of one head's page. Sixteen threads share a row, because the CPU sums
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
    int boundaries;   // how many; 0: codes are integers
    int scale_shift;  // 32 << scale_shift channels share a scale
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

INLINE float magnitude(float x) { return float_of(bits_of(x) & 0x7fffffffu); }

INLINE u16 finite_half(float x) { return float_to_half(fminf(fmaxf(x, -65504.0f), 65504.0f)); }

// Adds a row's sixteen partial sums in order.
INLINE Exact sum_of_partials(Exact partial, int lane) {
    Exact sum = exact(0.0f);
    for (int s = 0; s < 16; s++) sum = add(sum, shuffle(partial, (lane & 16) | s));
    return sum;
}

// Writes one plane: bits `drop..drop + bits` of every code of the `len` channels of group `group`.
INLINE void store_plane(const CONSTANT Params& p, const THREADGROUP Scratch& scratch, DEVICE u8* plane, int group, int len, int bits,
                        int drop, Thread self) {
    // Vectors of 16 lanes by 4; lanes are 16 tokens (keys) or 16 channels (values). A run is the vectors of 16 lanes: those of a
    // scale group for keys, of the page for values.
    int vectors = 8 / bits, lines = 2 * len / vectors, in_run = p.keys ? 8 << p.scale_shift : 32;
    for (int i = self.index; i < lines * 16; i += THREADS) {
        int line = i / 16, lane = i % 16;
        u32 word = 0;
        for (int v = 0; v < vectors; v++) {
            int vector = line * vectors + v, run = vector / in_run, depth = vector % in_run * 4;
            for (int d = 0; d < 4; d++) {
                int token = run % 8 * 16 + lane, channel = run / 8 * 4 * in_run + depth + d;
                if (!p.keys) token = depth + d, channel = run * 16 + lane;
                u32 code = scratch.codes[AT(token)][AT(channel)];
                word |= (code >> drop & ((1u << bits) - 1)) << (8 * d + v * bits);
            }
        }
        *reinterpret_cast<DEVICE u32*>(plane + AT(group * GROUP * 16 * bits + line * 64 + lane * 4)) = word;
    }
}

// The code of a row's channel, and the scale of `count` of a thread's channels, for levels of a codebook.
INLINE u16 quantize_to_levels(const CONSTANT Params& p, const THREADGROUP Scratch& scratch, const THREAD float (&x)[8],
                              THREAD int (&code)[8], int count, int lane) {
    Exact squares = exact(0.0f);
    for (int k = 0; k < 8; k++)
        if (k < count) squares = add(squares, mul(exact(x[k]), exact(x[k])));
    Exact norm = sqrt(sum_of_partials(squares, lane));
    bool normal = norm >= exact(1.17549435e-38f);
    float to_levels = normal ? narrow(mul(exact(p.spread), sqrt(exact(float(16 * count)))) / norm) : 0.0f;
    Exact level_squares = exact(0.0f), products = exact(0.0f);
    for (int k = 0; k < 8; k++) {
        if (k >= count) continue;
        float scaled = mul(x[k], to_levels);
        // The number of boundaries at or below it, by bisection: they ascend.
        int found = 0;
        for (int step = 32; step > 0; step /= 2)
            if (found + step <= p.boundaries && scratch.boundary[found + step - 1] <= scaled) found += step;
        code[k] = found;
        Exact level = exact(scratch.level[found]);
        level_squares = add(level_squares, mul(level, level));
        products = add(products, mul(exact(x[k]), level));
    }
    level_squares = sum_of_partials(level_squares, lane);
    products = sum_of_partials(products, lane);
    Exact scale = p.least_squares ? products / level_squares : norm / sqrt(level_squares);
    return normal ? finite_half(narrow(scale)) : u16(0);
}

// The same for integers of 4 or 8 bits, as ggml's `q4_0` and `q8_0`.
INLINE u16 quantize_to_integers(const CONSTANT Params& p, const THREAD float (&x)[8], THREAD int (&code)[8], int count, int lane) {
    // The first value of the largest magnitude.
    float extreme = 0;
    int at = GROUP;
    for (int k = 0; k < 8; k++)
        if (k < count && magnitude(x[k]) > magnitude(extreme)) extreme = x[k], at = 16 * k + lane % 16;
    for (int mask = 1; mask < 16; mask *= 2) {
        float other = shuffle_xor(extreme, mask);
        int other_at = shuffle_xor(at, mask);
        bool larger = magnitude(other) > magnitude(extreme), first = magnitude(other) == magnitude(extreme) && other_at < at;
        if (larger || first) extreme = other, at = other_at;
    }
    bool four_bits = p.upper == 4;
    float scale = four_bits ? extreme / -8.0f : magnitude(extreme) / 127.0f;
    float inverse = magnitude(scale) >= 1.17549435e-38f ? 1.0f / scale : 0.0f;
    for (int k = 0; k < 8; k++) {
        float scaled = mul(x[k], inverse);
        // To the nearest; ties away from zero for 8 bits.
        int integer = int(scaled);
        float rest = sub(scaled, float(integer));
        if (four_bits) code[k] = int(fminf(add(scaled, 8.5f), 15.0f));
        else code[k] = integer + (rest >= 0.5f) - (rest <= -0.5f);
    }
    return finite_half(scale);
}

template <class E>
INLINE void encode(const CONSTANT Params& p, THREADGROUP Scratch& scratch, Thread self) {
    int tid = self.index, lane = self.lane, group = self.x, head = self.y, page = p.first + self.z;
    int len = min(p.channels - group * GROUP, GROUP), of_scale = 32 << p.scale_shift;
    typedef typename E::Bits Bits;
    const DEVICE Bits* rows = page_of<const Bits>(p.tables, p.rows, page) + i64(head) * PAGE * p.channels + AT(group * GROUP);
    DEVICE u8* codes = page_of<u8>(p.tables, p.codes, page) + i64(head) * p.head_bytes;
    int plane = PAGE * p.channels / 8;
    DEVICE u16* scales = reinterpret_cast<DEVICE u16*>(codes + plane * (p.upper + p.lower));
    if (tid < 64) {
        scratch.boundary[tid] = p.boundary[AT(tid) % 64];
        scratch.level[tid] = p.level[tid];
    }
    if (tid < len) {
        float mean = 0;
        if (p.centred) {
            for (int token = 0; token < PAGE; token++)
                mean = add(mean, mul(E::widen(rows[AT(i64(token) * p.channels + tid)]), 1.0f / PAGE));
            u16 stored = finite_half(mean);
            scales[AT(p.channels / of_scale * PAGE + group * GROUP + tid)] = stored;
            mean = half_to_float(stored);
        }
        scratch.mean[tid] = mean;
    }
    barrier();
    for (int token = tid / 16; token < PAGE; token += THREADS / 16) {
        int s = tid % 16, count = of_scale / 16;
        for (int first = 0; first < len; first += of_scale) {
            float x[8] = {};
            int code[8] = {};
            for (int k = 0; k < 8; k++) {
                if (k >= count) continue;
                int channel = first + s + 16 * k;
                x[k] = sub(E::widen(rows[AT(i64(token) * p.channels + channel)]), scratch.mean[AT(channel)]);
            }
            u16 scale = p.boundaries ? quantize_to_levels(p, scratch, x, code, count, lane)
                                     : quantize_to_integers(p, x, code, count, lane);
            for (int k = 0; k < 8; k++)
                if (k < count) scratch.codes[token][AT(first + s + 16 * k)] = u8(code[k]);
            if (s == 0) scales[AT((group * GROUP + first) / of_scale * PAGE + token)] = scale;
        }
    }
    barrier();
    store_plane(p, scratch, codes, group, len, p.upper, p.lower, self);
    if (p.lower) store_plane(p, scratch, codes + AT(plane * p.upper), group, len, p.lower, 0, self);
}

} // namespace

KERNEL(encode_page, Params, THREADS, 2, Scratch) {
    if (p.element == F32) encode<Single>(p, s, self);
    if (p.element == F16) encode<Half>(p, s, self);
    if (p.element == BF16) encode<Bfloat16>(p, s, self);
}
