// The block formats of weights, in the packed order of quant/layout.rs: a panel is 16 rows; the field at byte o of a GGUF
// block begins at byte 16 o of a packed block (except for Q6_K), and rows are interleaved every 4 bytes (scales: every
// 2).
//
// A warp multiplies a packed block by tensor cores: 16 weight rows by 8 activation rows (columns). Lane 4 g + t reads 8
// bytes, word t of the panel rows 2 g and 2 g + 1, so a warp reads 256 consecutive bytes:
//
//   byte     0           4           8           12               56          60
//   word t | row 0     | row 1     | row 2     | row 3     | .. | row 14    | row 15    |
//          | g = 0     |           | g = 1     |                | g = 7                 |
//
//   a[0]  row 2 g,     quad t        mma row g          (mma_k32 of device.h)
//   a[1]  row 2 g + 1, quad t        mma row g + 8
//   a[2]  row 2 g,     quad t + 4
//   a[3]  row 2 g + 1, quad t + 4
//
// Integer sums are exact; the operations on floats are those of quant/scalar.rs, in their order, so a run of blocks
// has the CPU's bits.
//
// A format has BLOCK (inputs), BYTES (of a GGUF block), SUMS (whether it reads the activations' sums), `add`, and `value`
// for single weights.
#pragma once

#include "activations.h"

// The activation rows that a lane reads in device memory: quants of column g, scales and sums of columns 2 t and 2 t + 1.
// Offsets, not pointers, which would take twice the registers. `add` takes any type with these functions of it: `quants`,
// `scales`, `bsums`, `scaled_sums`; StagedColumns of matmul_tiles.cpp is in shared memory.
template <int TILES>
struct Columns {
    static CONSTEXPR bool STAGED = false; // whether they are in shared memory, without registers for addresses
    const DEVICE u32* quants;
    const DEVICE float* scales;
    const DEVICE u16* sums;
    int blocks, groups; // of a row
    int quants_at[TILES]; // column g's offset in pairs of words, at this lane's t of group 0
    int rows[TILES][2];
    int live[TILES]; // columns with a row
};

// The lane's results: [tile][panel row 2 g or 2 g + 1][column 2 t or 2 t + 1].
template <int TILES>
using Results = float[TILES][2][2];

template <int TILES>
INLINE uint2 quants(const THREAD Columns<TILES>& x, int tile, int group) {
    return reinterpret_cast<const DEVICE uint2*>(x.quants)[AT(x.quants_at[tile] + group * 32)];
}

// Of both columns.
template <int TILES>
INLINE float2 scales(const THREAD Columns<TILES>& x, int tile, int block) {
    float2 both;
    both.x = x.scales[AT(x.rows[tile][0] * x.blocks + block)];
    both.y = x.scales[AT(x.rows[tile][1] * x.blocks + block)];
    return both;
}

// The bsums of a block of 256: eight i16.
template <int TILES>
INLINE uint4 bsums(const THREAD Columns<TILES>& x, int tile, int column, int block) {
    return reinterpret_cast<const DEVICE uint4*>(x.sums)[AT(x.rows[tile][column] * x.blocks + block)];
}

// The f16 products of scale and sum of a block of 32, of both columns.
template <int TILES>
INLINE float2 scaled_sums(const THREAD Columns<TILES>& x, int tile, int block) {
    float2 both;
    both.x = half_to_float(x.sums[AT(x.rows[tile][0] * x.groups + block)]);
    both.y = half_to_float(x.sums[AT(x.rows[tile][1] * x.groups + block)]);
    return both;
}

INLINE uint2 load_rows(const DEVICE u8* block, int offset, int g) {
    return *reinterpret_cast<const DEVICE uint2*>(block + offset + AT(8 * g));
}

// The two rows' f16.
INLINE void load_scales(const DEVICE u8* block, int offset, int g, THREAD float (&d)[2]) {
    u32 both = *reinterpret_cast<const DEVICE u32*>(block + offset + AT(4 * g));
    d[0] = half_to_float(u16(both));
    d[1] = half_to_float(u16(both >> 16));
}

INLINE float packed_half(const DEVICE u8* block, int offset, int row) {
    return half_to_float(reinterpret_cast<const DEVICE u16*>(block + 16 * offset)[AT(row)]);
}
// Byte `at` of the GGUF block.
INLINE int packed_byte(const DEVICE u8* block, int at, int row) {
    return block[AT(16 * (at / 4 * 4) + 4 * row + at % 4)];
}

// Bytes minus `offset`. Bytes are below 128, so setting bit 7 first keeps borrows within a byte.
INLINE u32 minus(u32 bytes, u32 offset) {
    return ((bytes | 0x80808080u) - offset * 0x01010101u) ^ 0x80808080u;
}

// y += (dot * x's scale) * d, for formats with one scale per 32.
template <int TILES, class X>
INLINE void add_block_of_32(const THREAD X& x, int block, int t, const THREAD u32 (&a)[4],
                            const THREAD float (&d)[2], THREAD Results<TILES>& y) {
    for (int tile = 0; tile < TILES; tile++) {
        uint2 b = quants(x, tile, block);
        int dot[4] = {0, 0, 0, 0};
        mma_k32(dot, a, b, t, x.live[tile]);
        float2 dx = scales(x, tile, block);
        for (int i = 0; i < 4; i++) {
            THREAD float& sum = y[tile][i / 2][i % 2];
            sum = fmaf(mul(float(dot[i]), i % 2 ? dx.y : dx.x), d[i / 2], sum);
        }
    }
}

// y += m * x's scaled sum, for formats with one min per 32.
template <int TILES, class X>
INLINE void add_mins_of_32(const THREAD X& x, int block, const THREAD float (&m)[2], THREAD Results<TILES>& y) {
    for (int tile = 0; tile < TILES; tile++) {
        float2 sums = scaled_sums(x, tile, block);
        for (int i = 0; i < 4; i++) {
            THREAD float& sum = y[tile][i / 2][i % 2];
            sum = fmaf(m[i / 2], i % 2 ? sums.y : sums.x, sum);
        }
    }
}

// Sixteen signed levels, the bytes of four words.
template <u32 L0, u32 L1, u32 L2, u32 L3>
struct Levels {
    // The levels of four codes in bytes.
    static INLINE u32 of(u32 codes) {
        codes = (codes | codes >> 4) & 0x00ff00ffu;
        u32 nibbles = (codes | codes >> 8) & 0xffffu;
        u32 low = permute_bytes(L0, L1, nibbles & 0x7777u), high = permute_bytes(L2, L3, nibbles & 0x7777u);
        return permute_bytes(low, high, 0x3210u | (nibbles & 0x8888u) >> 1);
    }
    static INLINE float one(int code) {
        u32 word = code < 8 ? (code < 4 ? L0 : L1) : (code < 12 ? L2 : L3);
        return float((i8)(word >> (code % 4 * 8)));
    }
    // Word t of two rows: quad t in the low nibbles, quad t + 4 in the high ones.
    static INLINE void nibbles_fragment(uint2 q, THREAD u32 (&a)[4]) {
        a[0] = of(q.x & 0x0f0f0f0fu), a[1] = of(q.y & 0x0f0f0f0fu);
        a[2] = of(q.x >> 4 & 0x0f0f0f0fu), a[3] = of(q.y >> 4 & 0x0f0f0f0fu);
    }
};
typedef Levels<0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u> IQ4Levels;
// E2M1, doubled.
typedef Levels<0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu> E2M1Levels;

struct Q4_0 {
    static CONSTEXPR int BLOCK = 32, BYTES = 18;
    static CONSTEXPR bool SUMS = false;

    template <int TILES, class X>
    static INLINE void add(const DEVICE u8* at, int block, int g, int t, const THREAD X& x, THREAD Results<TILES>& y) {
        float d[2];
        load_scales(at, 0, g, d);
        // Word t of a row: quad t in the low nibbles, quad t + 4 in the high ones.
        uint2 q = load_rows(at, 32 + 64 * t, g);
        u32 a[4] = {minus(q.x & 0x0f0f0f0fu, 8), minus(q.y & 0x0f0f0f0fu, 8), minus(q.x >> 4 & 0x0f0f0f0fu, 8),
                    minus(q.y >> 4 & 0x0f0f0f0fu, 8)};
        add_block_of_32<TILES>(x, block, t, a, d, y);
    }
    static INLINE float value(const DEVICE u8* at, int row, int i) {
        int q = packed_byte(at + 32, i % 16, row) >> (i / 16 * 4) & 15;
        return mul(packed_half(at, 0, row), float(q - 8));
    }
};

// Quads t and 4 + t of 32 weights of five bits: in word t, upper bits of the second in the last word; see quant/recode.rs.
INLINE u32 lower_five_bits(u32 word) { return word & 0x1f1f1f1fu; }
INLINE u32 upper_five_bits(u32 word, u32 last, int t) {
    return (word >> 5 & 0x07070707u) | (last >> (2 * t) & 0x03030303u) << 3;
}

// Their fragment, from words `at`.
INLINE void five_bits_fragment(const DEVICE u8* at, int g, int t, THREAD u32 (&a)[4]) {
    uint2 word = load_rows(at, 64 * t, g), last = load_rows(at, 256, g);
    a[0] = lower_five_bits(word.x), a[1] = lower_five_bits(word.y);
    a[2] = upper_five_bits(word.x, last.x, t), a[3] = upper_five_bits(word.y, last.y, t);
}

// Weight `i` of them.
INLINE int five_bits(const DEVICE u8* at, int row, int i) {
    int word = packed_byte(at, i % 16, row), last = packed_byte(at, 16 + i % 4, row);
    return i < 16 ? lower_five_bits(word) : upper_five_bits(word, last, i / 4 % 4);
}

struct Q5_0 {
    static CONSTEXPR int BLOCK = 32, BYTES = 22;
    static CONSTEXPR bool SUMS = false;

    template <int TILES, class X>
    static INLINE void add(const DEVICE u8* at, int block, int g, int t, const THREAD X& x, THREAD Results<TILES>& y) {
        float d[2];
        load_scales(at, 0, g, d);
        u32 a[4];
        five_bits_fragment(at + 32, g, t, a);
        for (int i = 0; i < 4; i++) a[i] = minus(a[i], 16);
        add_block_of_32<TILES>(x, block, t, a, d, y);
    }
    static INLINE float value(const DEVICE u8* at, int row, int i) {
        return mul(packed_half(at, 0, row), float(five_bits(at + 32, row, i) - 16));
    }
};

struct Q8_0 {
    static CONSTEXPR int BLOCK = 32, BYTES = 34;
    static CONSTEXPR bool SUMS = false;

    template <int TILES, class X>
    static INLINE void add(const DEVICE u8* at, int block, int g, int t, const THREAD X& x, THREAD Results<TILES>& y) {
        float d[2];
        load_scales(at, 0, g, d);
        // Packed bytes are weights plus 128.
        uint2 low = load_rows(at, 32 + 64 * t, g), high = load_rows(at, 32 + 64 * (t + 4), g);
        u32 a[4] = {low.x ^ 0x80808080u, low.y ^ 0x80808080u, high.x ^ 0x80808080u, high.y ^ 0x80808080u};
        add_block_of_32<TILES>(x, block, t, a, d, y);
    }
    static INLINE float value(const DEVICE u8* at, int row, int i) {
        return mul(packed_half(at, 0, row), float(packed_byte(at + 32, i, row) - 128));
    }
};

struct Q4_1 {
    static CONSTEXPR int BLOCK = 32, BYTES = 20;
    static CONSTEXPR bool SUMS = true;

    template <int TILES, class X>
    static INLINE void add(const DEVICE u8* at, int block, int g, int t, const THREAD X& x, THREAD Results<TILES>& y) {
        float d[2], m[2];
        load_scales(at, 0, g, d);
        load_scales(at, 32, g, m);
        uint2 q = load_rows(at, 64 + 64 * t, g);
        u32 a[4] = {q.x & 0x0f0f0f0fu, q.y & 0x0f0f0f0fu, q.x >> 4 & 0x0f0f0f0fu, q.y >> 4 & 0x0f0f0f0fu};
        add_block_of_32<TILES>(x, block, t, a, d, y);
        add_mins_of_32<TILES>(x, block, m, y);
    }
    static INLINE float value(const DEVICE u8* at, int row, int i) {
        int q = packed_byte(at + 64, i % 16, row) >> (i / 16 * 4) & 15;
        return sub(mul(packed_half(at, 0, row), float(q)), -packed_half(at, 2, row));
    }
};

struct Q5_1 {
    static CONSTEXPR int BLOCK = 32, BYTES = 24;
    static CONSTEXPR bool SUMS = true;

    template <int TILES, class X>
    static INLINE void add(const DEVICE u8* at, int block, int g, int t, const THREAD X& x, THREAD Results<TILES>& y) {
        float d[2], m[2];
        load_scales(at, 0, g, d);
        load_scales(at, 32, g, m);
        u32 a[4];
        five_bits_fragment(at + 64, g, t, a);
        add_block_of_32<TILES>(x, block, t, a, d, y);
        add_mins_of_32<TILES>(x, block, m, y);
    }
    static INLINE float value(const DEVICE u8* at, int row, int i) {
        return sub(mul(packed_half(at, 0, row), float(five_bits(at + 64, row, i))), -packed_half(at, 2, row));
    }
};

struct IQ4_NL {
    static CONSTEXPR int BLOCK = 32, BYTES = 18;
    static CONSTEXPR bool SUMS = false;

    template <int TILES, class X>
    static INLINE void add(const DEVICE u8* at, int block, int g, int t, const THREAD X& x, THREAD Results<TILES>& y) {
        float d[2];
        u32 a[4];
        load_scales(at, 0, g, d);
        IQ4Levels::nibbles_fragment(load_rows(at, 32 + 64 * t, g), a);
        add_block_of_32<TILES>(x, block, t, a, d, y);
    }
    static INLINE float value(const DEVICE u8* at, int row, int i) {
        int q = packed_byte(at + 32, i % 16, row) >> (i / 16 * 4) & 15;
        return mul(packed_half(at, 0, row), IQ4Levels::one(q));
    }
};

struct MXFP4 {
    static CONSTEXPR int BLOCK = 32, BYTES = 17;
    static CONSTEXPR bool SUMS = false;

    // 2^(exponent - 128): half of 2^(exponent - 127), because the levels are doubled. Subnormal below 2.
    static INLINE float half_power_of_two(u32 exponent) {
        return float_of(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
    }
    template <int TILES, class X>
    static INLINE void add(const DEVICE u8* at, int block, int g, int t, const THREAD X& x, THREAD Results<TILES>& y) {
        // Scales of the rows are interleaved by byte.
        u32 exponents = *reinterpret_cast<const DEVICE u16*>(at + AT(2 * g));
        float d[2] = {half_power_of_two(exponents & 255), half_power_of_two(exponents >> 8)};
        u32 a[4];
        E2M1Levels::nibbles_fragment(load_rows(at, 16 + 64 * t, g), a);
        add_block_of_32<TILES>(x, block, t, a, d, y);
    }
    static INLINE float value(const DEVICE u8* at, int row, int i) {
        int q = packed_byte(at + 16, i % 16, row) >> (i / 16 * 4) & 15;
        return mul(half_power_of_two(at[AT(row)]), E2M1Levels::one(q));
    }
};
