// The block formats of weights, in the packed order of quant/layout.rs: a panel is 16 rows; the field at byte o of a GGUF
// block begins at byte 16 o of a packed block, and the rows alternate every 4 bytes (scales: every 2).
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
// A format has BLOCK (inputs), BYTES (of a GGUF block), `add`, and `value` for single weights.
#pragma once

#include "activations.h"

// The activation rows that a lane reads: quants of column g, scales and sums of columns 2 t and 2 t + 1; -1 for columns
// without a row, which read no bytes. Offsets, not pointers, which would take twice the registers.
template <int TILES>
struct Columns {
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
    uint2 words = {0, 0};
    int at = x.quants_at[tile];
    if (at >= 0) words = reinterpret_cast<const DEVICE uint2*>(x.quants)[AT(at + group * 32)];
    return words;
}

template <int TILES>
INLINE float scale(const THREAD Columns<TILES>& x, int tile, int column, int block) {
    int row = x.rows[tile][column];
    return row < 0 ? 0.0f : x.scales[AT(row * x.blocks + block)];
}

// The bsums of a block of 256: eight i16.
template <int TILES>
INLINE uint4 bsums(const THREAD Columns<TILES>& x, int tile, int column, int block) {
    uint4 sums = {0, 0, 0, 0};
    int row = x.rows[tile][column];
    if (row >= 0) sums = reinterpret_cast<const DEVICE uint4*>(x.sums)[AT(row * x.blocks + block)];
    return sums;
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
template <int TILES>
INLINE void add_block_of_32(const THREAD Columns<TILES>& x, int block, int t, const THREAD u32 (&a)[4],
                            const THREAD float (&d)[2], THREAD Results<TILES>& y) {
    for (int tile = 0; tile < TILES; tile++) {
        uint2 b = quants(x, tile, block);
        int dot[4] = {0, 0, 0, 0};
        mma_k32(dot, a, b, t, x.live[tile]);
        for (int i = 0; i < 4; i++) {
            THREAD float& sum = y[tile][i / 2][i % 2];
            sum = fmaf(mul(float(dot[i]), scale(x, tile, i % 2, block)), d[i / 2], sum);
        }
    }
}

struct Q4_0 {
    static CONSTEXPR int BLOCK = 32, BYTES = 18;

    template <int TILES>
    static INLINE void add(const DEVICE u8* at, int block, int g, int t, const THREAD Columns<TILES>& x,
                           THREAD Results<TILES>& y) {
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

struct Q5_0 {
    static CONSTEXPR int BLOCK = 32, BYTES = 22;

    template <int TILES>
    static INLINE void add(const DEVICE u8* at, int block, int g, int t, const THREAD Columns<TILES>& x,
                           THREAD Results<TILES>& y) {
        float d[2];
        load_scales(at, 0, g, d);
        // Fifth bits: bit 8 i + w is that of input 4 w + i.
        uint2 high = load_rows(at, 32, g), q = load_rows(at, 96 + 64 * t, g);
        u32 words[2] = {q.x, q.y}, bits[2] = {high.x, high.y}, a[4];
        for (int row = 0; row < 2; row++) {
            a[row] = minus((words[row] & 0x0f0f0f0fu) | (bits[row] >> t & 0x01010101u) << 4, 16);
            a[2 + row] = minus((words[row] >> 4 & 0x0f0f0f0fu) | (bits[row] >> (t + 4) & 0x01010101u) << 4, 16);
        }
        add_block_of_32<TILES>(x, block, t, a, d, y);
    }
    static INLINE float value(const DEVICE u8* at, int row, int i) {
        int low = packed_byte(at + 96, i % 16, row) >> (i / 16 * 4) & 15;
        int high = packed_byte(at + 32, i % 4, row) >> (i / 4) & 1;
        return mul(packed_half(at, 0, row), float((low | high << 4) - 16));
    }
};

struct Q8_0 {
    static CONSTEXPR int BLOCK = 32, BYTES = 34;

    template <int TILES>
    static INLINE void add(const DEVICE u8* at, int block, int g, int t, const THREAD Columns<TILES>& x,
                           THREAD Results<TILES>& y) {
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

// The 6-bit scales and mins of Q4_K and Q5_K, four to a word; quant/ggml.rs says which bits they are.
struct SixBits {
    u32 scales[2][2], mins[2][2]; // [panel row][sub-blocks 0..4 or 4..8]

    INLINE SixBits(const DEVICE u8* at, int g) {
        uint2 a = load_rows(at, 64, g), b = load_rows(at, 128, g), c = load_rows(at, 192, g);
        unpack(0, a.x, b.x, c.x);
        unpack(1, a.y, b.y, c.y);
    }
    INLINE void unpack(int row, u32 a, u32 b, u32 c) {
        scales[row][0] = a & 0x3f3f3f3fu;
        scales[row][1] = (c & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u);
        mins[row][0] = b & 0x3f3f3f3fu;
        mins[row][1] = (c >> 4 & 0x0f0f0f0fu) | (b >> 2 & 0x30303030u);
    }
};

// The scale and the min of sub-block `s` of one row.
INLINE void six_bits(const DEVICE u8* at, int row, int s, THREAD int& scale, THREAD int& min) {
    int a = packed_byte(at + 64, s % 4, row), b = packed_byte(at + 64, 4 + s % 4, row);
    if (s < 4) {
        scale = a & 63, min = b & 63;
    } else {
        int c = packed_byte(at + 64, 4 + s, row);
        scale = (c & 15) | (a >> 6) << 4, min = c >> 4 | (b >> 6) << 4;
    }
}

// Blocks of 256 in eight sub-blocks of 32 with mins. BITS is 4 or 5.
template <int BITS>
struct QK {
    static CONSTEXPR int BLOCK = 256, BYTES = 112 + 32 * (BITS - 4) + 32;
    static CONSTEXPR int LOW = 256 + (BITS - 4) * 512; // where the nibbles begin; fifth bits are before them

    template <int TILES>
    static INLINE void add(const DEVICE u8* at, int block, int g, int t, const THREAD Columns<TILES>& x,
                           THREAD Results<TILES>& y) {
        float d[2], dmin[2];
        int sum[TILES][2][2] = {};
        uint2 fifth[2] = {{0, 0}, {0, 0}};
        if (BITS == 5)
            for (int h = 0; h < 2; h++) fifth[h] = load_rows(at, 256 + 64 * (t + 4 * h), g);
        load_scales(at, 0, g, d);
        load_scales(at, 32, g, dmin);
        SixBits six(at, g);
        // The loads of half a block overlap: all of it would take 16 registers more than there are.
#pragma unroll 1
        for (int side = 0; side < 2; side++) {
            u32 scales[2] = {side ? six.scales[0][1] : six.scales[0][0], side ? six.scales[1][1] : six.scales[1][0]};
            uint2 low[2][2];
            for (int pair = 0; pair < 2; pair++)
                for (int h = 0; h < 2; h++) low[pair][h] = load_rows(at, LOW + 64 * (16 * side + 8 * pair + t + 4 * h), g);
            for (int q = 0; q < 4; q++) {
                int s = 4 * side + q;
                u32 a[4];
                for (int h = 0; h < 2; h++) {
                    uint2 words = low[q / 2][h];
                    a[2 * h] = words.x >> (q % 2 * 4) & 0x0f0f0f0fu;
                    a[2 * h + 1] = words.y >> (q % 2 * 4) & 0x0f0f0f0fu;
                    if (BITS == 5) {
                        a[2 * h] |= (fifth[h].x >> s & 0x01010101u) << 4;
                        a[2 * h + 1] |= (fifth[h].y >> s & 0x01010101u) << 4;
                    }
                }
                int by[2] = {int(scales[0] >> (q * 8) & 255), int(scales[1] >> (q * 8) & 255)};
                for (int tile = 0; tile < TILES; tile++) {
                    uint2 b = quants(x, tile, block * 8 + s);
                    int dot[4] = {0, 0, 0, 0};
                    mma_k32(dot, a, b, t, x.live[tile]);
                    for (int i = 0; i < 4; i++) sum[tile][i / 2][i % 2] += dot[i] * by[i / 2];
                }
            }
        }
        for (int tile = 0; tile < TILES; tile++) {
            for (int column = 0; column < 2; column++) {
                uint4 sums = bsums(x, tile, column, block);
                float dx = scale(x, tile, column, block);
                for (int row = 0; row < 2; row++) {
                    int total = dp2a_lo(int(sums.x), int(six.mins[row][0]), 0);
                    total = dp2a_hi(int(sums.y), int(six.mins[row][0]), total);
                    total = dp2a_lo(int(sums.z), int(six.mins[row][1]), total);
                    total = dp2a_hi(int(sums.w), int(six.mins[row][1]), total);
                    float all = fmaf(float(total), -dmin[row], mul(float(sum[tile][row][column]), d[row]));
                    y[tile][row][column] = fmaf(all, dx, y[tile][row][column]);
                }
            }
        }
    }
    static INLINE float value(const DEVICE u8* at, int row, int i) {
        int scale, min;
        six_bits(at, row, i / 32, scale, min);
        int q = packed_byte(at + LOW, i / 64 * 32 + i % 32, row) >> (i % 64 / 32 * 4) & 15;
        if (BITS == 5) q |= (packed_byte(at + 256, i % 32, row) >> (i / 32) & 1) << 4;
        return sub(mul(packed_half(at, 0, row) * float(scale), float(q)), mul(packed_half(at, 2, row), float(min)));
    }
};
typedef QK<4> Q4_K;
typedef QK<5> Q5_K;

// Blocks of 256 in sixteen sub-blocks of 16.
struct Q6_K {
    static CONSTEXPR int BLOCK = 256, BYTES = 210;
    static CONSTEXPR int HIGH = 16 * 128, SCALES = 16 * 192, D = 16 * 208;

    template <int TILES>
    static INLINE void add(const DEVICE u8* at, int block, int g, int t, const THREAD Columns<TILES>& x,
                           THREAD Results<TILES>& y) {
        float d[2];
        int sum[TILES][2][2] = {};
        load_scales(at, D, g, d);
        for (int side = 0; side < 2; side++) {
            // Of 16 words, word w has inputs 4 w.. of the half's first 64 in its low nibbles, of its last 64 in the high
            // ones; of 8 words, word w has two upper bits for each quarter.
            uint2 low[4], high[2];
            for (int i = 0; i < 4; i++) low[i] = load_rows(at, 64 * (16 * side + t + 4 * i), g);
            for (int i = 0; i < 2; i++) high[i] = load_rows(at + HIGH, 64 * (8 * side + t + 4 * i), g);
            for (int quarter = 0; quarter < 4; quarter++) {
                uint2 b[TILES];
                for (int tile = 0; tile < TILES; tile++) b[tile] = quants(x, tile, block * 8 + side * 4 + quarter);
                for (int h = 0; h < 2; h++) {
                    int s = side * 8 + quarter * 2 + h;
                    uint2 q = low[quarter % 2 * 2 + h], up = high[h];
                    u32 words[2] = {q.x, q.y}, bits[2] = {up.x, up.y}, a[2];
                    for (int row = 0; row < 2; row++) {
                        u32 low_bits = words[row] >> (quarter / 2 * 4) & 0x0f0f0f0fu;
                        a[row] = minus(low_bits | (bits[row] >> (quarter * 2) & 0x03030303u) << 4, 32);
                    }
                    // Scales of the rows alternate every byte.
                    u32 scales = *reinterpret_cast<const DEVICE u16*>(at + SCALES + AT(16 * s + 2 * g));
                    int by[2] = {(i8)scales, (i8)(scales >> 8)};
                    for (int tile = 0; tile < TILES; tile++) {
                        int dot[4] = {0, 0, 0, 0};
                        mma_k16(dot, a, h ? b[tile].y : b[tile].x, t, x.live[tile]);
                        for (int i = 0; i < 4; i++) sum[tile][i / 2][i % 2] += dot[i] * by[i / 2];
                    }
                }
            }
        }
        for (int tile = 0; tile < TILES; tile++)
            for (int i = 0; i < 4; i++) {
                THREAD float& all = y[tile][i / 2][i % 2];
                all = fmaf(mul(float(sum[tile][i / 2][i % 2]), d[i / 2]), scale(x, tile, i % 2, block), all);
            }
    }
    static INLINE float value(const DEVICE u8* at, int row, int i) {
        int side = i / 128, quarter = i % 128 / 32;
        int low = packed_byte(at, side * 64 + i % 64, row) >> (quarter / 2 * 4) & 15;
        int high = packed_byte(at + HIGH, side * 32 + i % 32, row) >> (quarter * 2) & 3;
        float d = half_to_float(reinterpret_cast<const DEVICE u16*>(at + D)[row]);
        float by = float((i8)at[AT(SCALES + 16 * (i / 16) + row)]) * d;
        return mul(by, float((low | high << 4) - 32));
    }
};
