// Quantized pages (turboquant/layout.rs) as A fragments of an mma (device.h).
//
// A step is 8 vectors of a run, each 16 lanes by 4 codes. Lane 4 g + t of the warp reads 8 bytes of a line: lanes 2 g and
// 2 g + 1 of the vectors 2 t and 2 t + 1. After the lookup:
//
//   a[0]  levels of lane 2 g,     vector 2 t        mma row g,     word t
//   a[1]  levels of lane 2 g + 1, vector 2 t        mma row g + 8, word t
//   a[2]  levels of lane 2 g,     vector 2 t + 1    mma row g,     word t + 4
//   a[3]  levels of lane 2 g + 1, vector 2 t + 1    mma row g + 8, word t + 4
//
// So mma row g is lane 2 g, row g + 8 is lane 2 g + 1, and the B fragment of lane 4 g + t is the consecutive words 2 t
// and 2 t + 1.
#pragma once

#include "device.h"

// A format: bits of a code in the upper and in the lower plane, and the levels.
struct Format {
    int upper, lower;
    u32 levels[16]; // 64 bytes
    float unit;      // the value of level 1 at scale 1
    int centred;     // 1: a page has a mean
    int scale_shift; // 32 << scale_shift channels share a scale
};

// A page of one head.
struct QuantizedPage {
    const DEVICE u8* upper;
    const DEVICE u8* lower;
    const DEVICE u16* scales; // (scale groups, 128)
    const DEVICE u16* mean;   // (channels), or null
};

INLINE QuantizedPage quantized_page(const CONSTANT Format& f, const DEVICE u8* page, int channels) {
    int plane = 128 * channels / 8; // bytes per bit
    const DEVICE u16* scales = reinterpret_cast<const DEVICE u16*>(page + plane * (f.upper + f.lower));
    return {page, page + plane * f.upper, scales, f.centred ? scales + AT(4 * channels >> f.scale_shift) : nullptr};
}

// Four codes in bytes as four nibbles: a selector of permute_bytes.
INLINE u32 selector(u32 codes) {
    codes = (codes | codes >> 4) & 0x00ff00ffu;
    return (codes | codes >> 8) & 0xffffu;
}

// Lookup of four nibbles in sixteen levels: in both halves, then selected by the nibble's upper bit.
INLINE u32 level_of_16(const CONSTANT u32 (&levels)[16], u32 nibbles) {
    u32 low = permute_bytes(levels[0], levels[1], nibbles & 0x7777u);
    u32 high = permute_bytes(levels[2], levels[3], nibbles & 0x7777u);
    return permute_bytes(low, high, 0x3210u | (nibbles & 0x8888u) >> 1);
}

// The levels of four codes. Up to four bits by permute_bytes, if that is an instruction; 8 bits are the level; others from shared
// memory: 64 levels are 16 words in 16 banks, and lanes that read one bank read the same word.
INLINE u32 levels_of(const CONSTANT Format& f, const THREADGROUP u8* table, u32 codes) {
    int bits = f.upper + f.lower;
    if (PERMUTES && bits <= 3) return permute_bytes(f.levels[0], f.levels[1], selector(codes));
    if (PERMUTES && bits == 4) return level_of_16(f.levels, selector(codes));
    if (bits == 8) return codes;
    u32 levels = 0;
    for (int i = 0; i < 32; i += 8) levels |= u32(table[codes >> i & 255]) << i;
    return levels;
}

// The codes of `vector` in a word of each plane.
INLINE u32 codes_in(const CONSTANT Format& f, u32 upper, u32 lower, int vector) {
    u32 codes = upper >> (vector * f.upper & 7) & ((1u << f.upper) - 1) * 0x01010101u;
    if (f.lower) codes = codes << f.lower | (lower >> (vector * f.lower & 7) & ((1u << f.lower) - 1) * 0x01010101u);
    return codes;
}

// The A fragment of the eight vectors from `first` on, which is a multiple of 8; vectors are counted from the page's first.
INLINE void levels_fragment(const CONSTANT Format& f, const THREADGROUP u8* table, const THREAD QuantizedPage& page,
                            int first, int g, int t, THREAD u32 (&a)[4]) {
    int vector = first + 2 * t;
    const DEVICE u8* at = page.upper + AT((vector * f.upper >> 3) * 64 + 8 * g);
    uint2 upper = *reinterpret_cast<const DEVICE uint2*>(at), lower = {0, 0};
    at = page.lower + AT((vector * f.lower >> 3) * 64 + 8 * g);
    if (f.lower) lower = *reinterpret_cast<const DEVICE uint2*>(at);
    if (PERMUTES && f.upper == 4 && !f.lower) {
        // Nibbles are selectors already: those of both vectors are interleaved, and are separated after the lookup.
        u32 words[2] = {upper.x, upper.y};
        for (int row = 0; row < 2; row++) {
            u32 first = level_of_16(f.levels, words[row]), second = level_of_16(f.levels, words[row] >> 16);
            a[row] = permute_bytes(first, second, 0x6420);
            a[2 + row] = permute_bytes(first, second, 0x7531);
        }
        return;
    }
    for (int h = 0; h < 2; h++) {
        a[2 * h] = levels_of(f, table, codes_in(f, upper.x, lower.x, vector + h));
        a[2 * h + 1] = levels_of(f, table, codes_in(f, upper.y, lower.y, vector + h));
    }
}

// The A fragment of keys stored in a page of values: mma rows are the 16 tokens of `strip`, words the 32 channels of
// runs `run` and `run + 1`. A lane reads four channels by four tokens of each run and transposes them; mma row g is token
// 2 g, row g + 8 token 2 g + 1. The B fragment is words t and t + 4.
INLINE void transposed_fragment(const CONSTANT Format& f, const THREADGROUP u8* table, const THREAD QuantizedPage& page,
                                int run, int strip, int g, int t, THREAD u32 (&a)[4]) {
    int vector = 4 * strip + g / 2;
    u32 pick = g % 2 ? 0x7362u : 0x5140u; // bytes 2 and 3, or 0 and 1, of two words, alternating
    for (int h = 0; h < 2; h++) {
        const DEVICE u8* at = page.upper + AT((run + h) * 256 * f.upper + (vector * f.upper >> 3) * 64 + 16 * t);
        uint4 upper = *reinterpret_cast<const DEVICE uint4*>(at), lower = {0, 0, 0, 0};
        at = page.lower + AT((run + h) * 256 * f.lower + (vector * f.lower >> 3) * 64 + 16 * t);
        if (f.lower) lower = *reinterpret_cast<const DEVICE uint4*>(at);
        u32 levels[4] = {levels_of(f, table, codes_in(f, upper.x, lower.x, vector)),
                         levels_of(f, table, codes_in(f, upper.y, lower.y, vector)),
                         levels_of(f, table, codes_in(f, upper.z, lower.z, vector)),
                         levels_of(f, table, codes_in(f, upper.w, lower.w, vector))};
        u32 first = permute_bytes(levels[0], levels[1], pick), second = permute_bytes(levels[2], levels[3], pick);
        a[2 * h] = permute_bytes(first, second, 0x5410);
        a[2 * h + 1] = permute_bytes(first, second, 0x7632);
    }
}

// A query's dot product with a page's mean over channels first..last: sixteen partial sums. Called by all lanes, sixteen per
// query.
INLINE float mean_score(const DEVICE float* query, const DEVICE u16* mean, int first, int last, int lane) {
    float partial = 0;
    if (mean && query)
        for (int i = first + lane % 16; i < last; i += 16) partial = fmaf(query[AT(i)], half_to_float(mean[i]), partial);
    float sum = 0;
    for (int s = 0; s < 16; s++) sum += shuffle(partial, (lane & 16) | s);
    return sum;
}

// Integer weights of a page's tokens, relative to the largest: the factor that gives them, and the value of integer 1 at level 1.
struct IntegerScale {
    float inverse, unit;
};
INLINE IntegerScale integer_scale(u32 largest_bits, float unit) {
    float largest = float_of(largest_bits);
    if (largest < 1e-30f) return {0.0f, 0.0f};
    return {32639.0f / largest, mul(largest, unit / 32639.0f)};
}

// Four integer weights, each 256 * upper + lower with signed bytes, in words of either.
INLINE void integer_weights(const THREAD float (&scaled)[4], float inverse, THREAD u32& high, THREAD u32& low) {
    high = 0, low = 0;
    for (int i = 0; i < 4; i++) {
        int integer = int(rintf(mul(scaled[i], inverse))), upper = (integer + 128) >> 8;
        high |= u32(upper & 255) << (8 * i);
        low |= u32((integer - 256 * upper) & 255) << (8 * i);
    }
}
