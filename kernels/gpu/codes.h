// Reading the planes of coded pages (turbo/layout.rs): vectors of 16 lanes by 4, a byte of a line for every code of several
// vectors. For tensor cores a warp reads two vectors at a time: lane 4 g + t the lanes 2 g and 2 g + 1 (8 bytes), of the
// vectors 2 t and 2 t + 1 of eight. They are the mma's rows g and g + 8, and its words t and t + 4; whose right operand
// then is two consecutive words, 2 t and 2 t + 1.
#pragma once

#include "device.h"

// A format: bits in the upper and the lower plane, and the levels of the codes.
struct Format {
    int upper, lower;
    u32 levels[16]; // 64 bytes
    float unit;     // of a level at scale 1
    int centred;    // 1: a page has a mean
};

// A head's page.
struct Codes {
    const DEVICE u8* upper;
    const DEVICE u8* lower;
    const DEVICE u16* scales; // (groups, 128)
    const DEVICE u16* mean;   // (channels), or null
};

INLINE Codes codes_of(const CONSTANT Format& f, const DEVICE u8* page, int channels) {
    int plane = 128 * channels / 8; // bytes per bit
    const DEVICE u16* scales = reinterpret_cast<const DEVICE u16*>(page + plane * (f.upper + f.lower));
    return {page, page + plane * f.upper, scales, f.centred ? scales + AT(channels) : nullptr};
}

// The bytes' nibbles, side by side: what permute_bytes selects by.
INLINE u32 selector(u32 codes) {
    codes = (codes | codes >> 4) & 0x00ff00ffu;
    return (codes | codes >> 8) & 0xffffu;
}

// Sixteen levels for the four nibbles of a selector: looked up in either half, and chosen by the upper bit.
INLINE u32 level_of_16(const CONSTANT u32 (&levels)[16], u32 nibbles) {
    u32 low = permute_bytes(levels[0], levels[1], nibbles & 0x7777u);
    u32 high = permute_bytes(levels[2], levels[3], nibbles & 0x7777u);
    return permute_bytes(low, high, 0x3210u | (nibbles & 0x8888u) >> 1);
}

// The levels of four codes. Up to four bits they come from registers where bytes permute in one instruction; 64 levels take
// 16 banks of the block's memory, no two of which share a bank, so that lanes that meet in one read one word.
INLINE u32 levels_of(const CONSTANT Format& f, const THREADGROUP u8* table, u32 codes) {
    int bits = f.upper + f.lower;
    if (PERMUTES && bits <= 3) return permute_bytes(f.levels[0], f.levels[1], selector(codes));
    if (PERMUTES && bits == 4) return level_of_16(f.levels, selector(codes));
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

// The left operand of an mma: vectors 8 * step + 2 t and + 1 of a run of 32 that is `run` runs into the planes.
INLINE void operand(const CONSTANT Format& f, const THREADGROUP u8* table, const THREAD Codes& codes, int run,
                    int step, int g, int t, THREAD u32 (&a)[4]) {
    int vector = 8 * step + 2 * t;
    const DEVICE u8* at = codes.upper + AT(run * 256 * f.upper + (vector * f.upper >> 3) * 64 + 8 * g);
    uint2 upper = *reinterpret_cast<const DEVICE uint2*>(at), lower = {0, 0};
    at = codes.lower + AT(run * 256 * f.lower + (vector * f.lower >> 3) * 64 + 8 * g);
    if (f.lower) lower = *reinterpret_cast<const DEVICE uint2*>(at);
    if (PERMUTES && f.upper == 4 && !f.lower) {
        // Nibbles are selectors as they lie: those of both vectors alternate, and are parted afterwards.
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

// The left operand of an mma for keys that lie as values do: 16 tokens of `strip` as rows, the 32 channels of two runs as
// words. A lane reads four channels of four tokens from either run and turns them; row g is token 2 g, row g + 8 the next,
// so the right operand is words t and t + 4.
INLINE void turned_operand(const CONSTANT Format& f, const THREADGROUP u8* table, const THREAD Codes& codes, int run,
                           int strip, int g, int t, THREAD u32 (&a)[4]) {
    int vector = 4 * strip + g / 2;
    u32 pick = g % 2 ? 0x7362u : 0x5140u; // bytes 2 and 3, or 0 and 1, of two words in turn
    for (int h = 0; h < 2; h++) {
        const DEVICE u8* at = codes.upper + AT((run + h) * 256 * f.upper + (vector * f.upper >> 3) * 64 + 16 * t);
        uint4 upper = *reinterpret_cast<const DEVICE uint4*>(at), lower = {0, 0, 0, 0};
        at = codes.lower + AT((run + h) * 256 * f.lower + (vector * f.lower >> 3) * 64 + 16 * t);
        if (f.lower) lower = *reinterpret_cast<const DEVICE uint4*>(at);
        u32 levels[4] = {levels_of(f, table, codes_in(f, upper.x, lower.x, vector)),
                         levels_of(f, table, codes_in(f, upper.y, lower.y, vector)),
                         levels_of(f, table, codes_in(f, upper.z, lower.z, vector)),
                         levels_of(f, table, codes_in(f, upper.w, lower.w, vector))};
        u32 left = permute_bytes(levels[0], levels[1], pick), right = permute_bytes(levels[2], levels[3], pick);
        a[2 * h] = permute_bytes(left, right, 0x5410);
        a[2 * h + 1] = permute_bytes(left, right, 0x7632);
    }
}
