// The formats in blocks of 256; formats.h describes them.
#pragma once

#include "formats.h"

// The 6-bit scales and mins of Q4_K and Q5_K, four to a word; see quant/ggml.rs for their bits.
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
    static CONSTEXPR int BLOCK = 256, BYTES = 16 + 32 * BITS, WEIGHTS = 16 * 16;
    static CONSTEXPR bool SUMS = true;

    template <int TILES, class X>
    static INLINE void add(const DEVICE u8* at, int block, int g, int t, const THREAD X& x, THREAD Results<TILES>& y) {
        int sum[TILES][2][2] = {};
        SixBits six(at, g);
        // Two f16 each, converted after the loops, which have no registers left.
        u32 both_d = *reinterpret_cast<const DEVICE u32*>(at + AT(4 * g));
        u32 both_dmin = *reinterpret_cast<const DEVICE u32*>(at + 32 + AT(4 * g));
        // Weights from device memory: all loads of a block overlap.
#pragma unroll(X::STAGED && BITS == 4 ? 2 : 1)
        for (int side = 0; side < 2; side++) {
            u32 scales[2] = {side ? six.scales[0][1] : six.scales[0][0], side ? six.scales[1][1] : six.scales[1][0]};
            uint2 low[2][2];
            if (BITS == 4)
                for (int pair = 0; pair < 2; pair++)
                    for (int h = 0; h < 2; h++)
                        low[pair][h] = load_rows(at + 64 * t, WEIGHTS + 64 * (16 * side + 8 * pair + 4 * h), g);
            for (int q = 0; q < 4; q++) {
                int s = 4 * side + q;
                u32 a[4];
                if (BITS == 5) {
                    five_bits_fragment(at + WEIGHTS + 5 * 64 * s, g, t, a);
                } else {
                    for (int h = 0; h < 2; h++) {
                        a[2 * h] = low[q / 2][h].x >> (q % 2 * 4) & 0x0f0f0f0fu;
                        a[2 * h + 1] = low[q / 2][h].y >> (q % 2 * 4) & 0x0f0f0f0fu;
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
        float d[2] = {half_to_float(u16(both_d)), half_to_float(u16(both_d >> 16))};
        float dmin[2] = {half_to_float(u16(both_dmin)), half_to_float(u16(both_dmin >> 16))};
        for (int tile = 0; tile < TILES; tile++) {
            float2 both_dx = scales(x, tile, block);
            for (int column = 0; column < 2; column++) {
                uint4 sums = bsums(x, tile, column, block);
                float dx = column ? both_dx.y : both_dx.x;
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
        int scale, min, q;
        six_bits(at, row, i / 32, scale, min);
        if (BITS == 5)
            q = five_bits(at + WEIGHTS + 5 * 64 * (i / 32), row, i % 32);
        else
            q = packed_byte(at + WEIGHTS, i / 64 * 32 + i % 32, row) >> (i % 64 / 32 * 4) & 15;
        return sub(mul(packed_half(at, 0, row) * float(scale), float(q)), mul(packed_half(at, 2, row), float(min)));
    }
};
typedef QK<4> Q4_K;
typedef QK<5> Q5_K;

// Blocks of 256 in sixteen sub-blocks of 16.
struct Q6_K {
    static CONSTEXPR int BLOCK = 256, BYTES = 210;
    static CONSTEXPR bool SUMS = false;
    static CONSTEXPR int D = 0, SCALES = 16 * 2, WEIGHTS = 16 * 18;

    // Quad t (h = 0) or 4 + t of 32 weights: in word t, upper bits of the second in word 4 + t / 2; see quant/recode.rs.
    static INLINE u32 quad_of(u32 word, u32 next, int t, int h) {
        if (h == 0) return word & 0x3f3f3f3fu;
        return (word >> 6 & 0x03030303u) | (next >> (t % 2 * 4) & 0x0f0f0f0fu) << 2;
    }

    template <int TILES, class X>
    static INLINE void add(const DEVICE u8* at, int block, int g, int t, const THREAD X& x, THREAD Results<TILES>& y) {
        float d[2];
        int sum[TILES][2][2] = {};
        load_scales(at, D, g, d);
        // All loads of a block overlap, if there are registers for them.
#pragma unroll(TILES == 1 ? 2 : 1)
        for (int side = 0; side < 2; side++) {
            // Two in turn: with four, 16 columns take so many registers that one block fits on a multiprocessor.
#pragma unroll(TILES == 1 ? 4 : 2)
            for (int quarter = 0; quarter < 4; quarter++) {
                uint2 b[TILES];
                for (int tile = 0; tile < TILES; tile++) b[tile] = quants(x, tile, block * 8 + side * 4 + quarter);
                const DEVICE u8* weights = at + WEIGHTS + 6 * 64 * (side * 4 + quarter);
                uint2 word = load_rows(weights, 64 * t, g), next = load_rows(weights, 64 * (4 + t / 2), g);
                for (int h = 0; h < 2; h++) {
                    int s = side * 8 + quarter * 2 + h;
                    u32 a[2] = {minus(quad_of(word.x, next.x, t, h), 32), minus(quad_of(word.y, next.y, t, h), 32)};
                    // Scales of the rows are interleaved by byte.
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
        for (int tile = 0; tile < TILES; tile++) {
            float2 dx = scales(x, tile, block);
            for (int i = 0; i < 4; i++) {
                THREAD float& all = y[tile][i / 2][i % 2];
                all = fmaf(mul(float(sum[tile][i / 2][i % 2]), d[i / 2]), i % 2 ? dx.y : dx.x, all);
            }
        }
    }
    static INLINE float value(const DEVICE u8* at, int row, int i) {
        const DEVICE u8* weights = at + WEIGHTS + 6 * 64 * (i / 32);
        int t = i / 4 % 4, word = packed_byte(weights, i % 16, row), next = packed_byte(weights, 16 + t / 2 * 4 + i % 4, row);
        float d = half_to_float(reinterpret_cast<const DEVICE u16*>(at + D)[row]);
        float by = float((i8)at[AT(SCALES + 16 * (i / 16) + row)]) * d;
        return mul(by, float(int(quad_of(word, next, t, i % 32 / 16)) - 32));
    }
};

// Blocks of 256 in eight sub-blocks of 32, each with a 6-bit scale.
struct IQ4_XS {
    static CONSTEXPR int BLOCK = 256, BYTES = 136;
    static CONSTEXPR bool SUMS = false;

    template <int TILES, class X>
    static INLINE void add(const DEVICE u8* at, int block, int g, int t, const THREAD X& x, THREAD Results<TILES>& y) {
        float d[2];
        int sum[TILES][2][2] = {};
        load_scales(at, 0, g, d);
        uint2 low = load_rows(at, 64, g);
        // Upper bits of the scales: two bytes, each interleaved by row.
        u32 first = *reinterpret_cast<const DEVICE u16*>(at + 32 + AT(2 * g));
        u32 second = *reinterpret_cast<const DEVICE u16*>(at + 48 + AT(2 * g));
        u32 high[2] = {(first & 255) | (second & 255) << 8, first >> 8 | (second & 0xff00u)};
        for (int s = 0; s < 8; s++) {
            u32 a[4];
            IQ4Levels::nibbles_fragment(load_rows(at, 128 + 64 * (4 * s + t), g), a);
            int by[2] = {int((low.x >> (4 * s) & 15) | (high[0] >> (2 * s) & 3) << 4) - 32,
                         int((low.y >> (4 * s) & 15) | (high[1] >> (2 * s) & 3) << 4) - 32};
            for (int tile = 0; tile < TILES; tile++) {
                uint2 b = quants(x, tile, block * 8 + s);
                int dot[4] = {0, 0, 0, 0};
                mma_k32(dot, a, b, t, x.live[tile]);
                for (int i = 0; i < 4; i++) sum[tile][i / 2][i % 2] += dot[i] * by[i / 2];
            }
        }
        for (int tile = 0; tile < TILES; tile++) {
            float2 dx = scales(x, tile, block);
            for (int i = 0; i < 4; i++) {
                THREAD float& all = y[tile][i / 2][i % 2];
                all = fmaf(mul(float(sum[tile][i / 2][i % 2]), d[i / 2]), i % 2 ? dx.y : dx.x, all);
            }
        }
    }
    static INLINE float value(const DEVICE u8* at, int row, int i) {
        int s = i / 32, high = at[AT(32 + s / 4 * 16 + row)] >> (s % 4 * 2) & 3;
        int by = (packed_byte(at + 64, s / 2, row) >> (s % 2 * 4) & 15) | high << 4;
        int q = packed_byte(at + 128, i / 32 * 16 + i % 16, row) >> (i % 32 / 16 * 4) & 15;
        return mul(mul(packed_half(at, 0, row), float(by - 32)), IQ4Levels::one(q));
    }
};

// Quads `t` and `4 + t` of 32 weights of three bits, in three words; see quant/recode.rs.
struct ThreeBits {
    int word[2], shift[2];
    u32 mask, upper; // of the bits in `word`, and of the upper one in the middle word

    INLINE explicit ThreeBits(int t) {
        word[0] = t == 2, word[1] = t ? 2 : 1;
        shift[0] = t == 1 ? 3 : t == 3 ? 6 : 0, shift[1] = t == 1 ? 0 : t == 3 ? 6 : 3;
        mask = t == 3 ? 0x03030303u : 0x07070707u, upper = t == 3 ? 0x04040404u : 0;
    }
    INLINE u32 quad_of(u32 bits, u32 middle, int h) const { return (bits >> shift[h] & mask) | (middle >> (4 + h) & upper); }
};

// Blocks of 256 in sixteen sub-blocks of 16. BITS is 2, with a 4-bit scale and min each, or 3, with a 6-bit scale.
template <int BITS>
struct SmallK {
    static CONSTEXPR int BLOCK = 256, BYTES = BITS == 2 ? 84 : 110;
    static CONSTEXPR bool SUMS = false;
    static CONSTEXPR int D = BITS == 2 ? 80 : 0, SCALES = BITS == 2 ? 0 : 16 * 2, WEIGHTS = 16 * (BITS == 2 ? 16 : 14);

    // The scale of sub-block `s`: in `word` and, of Q3_K, two upper bits in `upper`.
    static INLINE int scale_of(u32 word, u32 upper, int s) {
        if (BITS == 2) return word >> (s % 4 * 8) & 15;
        return int((word >> (s % 4 * 8 + s / 8 * 4) & 15) | (upper >> (s % 4 * 8 + s / 4 * 2) & 3) << 4) - 32;
    }
    template <int TILES, class X>
    static INLINE void add(const DEVICE u8* at, int block, int g, int t, const THREAD X& x, THREAD Results<TILES>& y) {
        float d[2], dmin[2] = {0, 0};
        int sum[TILES][2][2] = {}, mins[TILES][4] = {};
        load_scales(at, 16 * D, g, d);
        if (BITS == 2) load_scales(at, 16 * D + 32, g, dmin);
        ThreeBits three(t);
        uint2 upper = {0, 0}, words[2], middle = {0, 0};
        if (BITS == 3) upper = load_rows(at + SCALES, 128, g);
        for (int side = 0; side < 2; side++) {
            if (BITS == 2)
                for (int h = 0; h < 2; h++) words[h] = load_rows(at + WEIGHTS, 64 * (8 * side + t + 4 * h), g);
#pragma unroll(BITS == 2 && X::STAGED ? 1 : TILES > 2 ? 2 : 4)
            for (int quarter = 0; quarter < 4; quarter++) {
                uint2 b[TILES];
                for (int tile = 0; tile < TILES; tile++) b[tile] = quants(x, tile, block * 8 + side * 4 + quarter);
                if (BITS == 3) {
                    const DEVICE u8* weights = at + WEIGHTS + 64 * 3 * (4 * side + quarter);
                    for (int h = 0; h < 2; h++) words[h] = load_rows(weights, AT(64 * three.word[h]), g);
                    middle = load_rows(weights, 64, g);
                }
                uint2 scales = load_rows(at + SCALES, 64 * (BITS == 2 ? 2 * side + quarter / 2 : quarter / 2), g);
                for (int h = 0; h < 2; h++) {
                    int s = side * 8 + quarter * 2 + h;
                    int by[2] = {scale_of(scales.x, upper.x, s), scale_of(scales.y, upper.y, s)};
                    u32 a[2] = {words[h].x >> (quarter * 2) & 0x03030303u, words[h].y >> (quarter * 2) & 0x03030303u};
                    if (BITS == 3) {
                        a[0] = minus(three.quad_of(words[h].x, middle.x, h), 4);
                        a[1] = minus(three.quad_of(words[h].y, middle.y, h), 4);
                    }
                    // The mins times the sums of x: a product with rows of the min.
                    u32 m[2] = {(scales.x >> (s % 4 * 8 + 4) & 15) * 0x01010101u,
                                (scales.y >> (s % 4 * 8 + 4) & 15) * 0x01010101u};
                    for (int tile = 0; tile < TILES; tile++) {
                        int dot[4] = {0, 0, 0, 0};
                        mma_k16(dot, a, h ? b[tile].y : b[tile].x, t, x.live[tile]);
                        for (int i = 0; i < 4; i++) sum[tile][i / 2][i % 2] += dot[i] * by[i / 2];
                        if (BITS == 2) mma_k16(mins[tile], m, h ? b[tile].y : b[tile].x, t, x.live[tile]);
                    }
                }
            }
        }
        for (int tile = 0; tile < TILES; tile++) {
            float2 dx = scales(x, tile, block);
            for (int i = 0; i < 4; i++) {
                float all = mul(float(sum[tile][i / 2][i % 2]), d[i / 2]);
                if (BITS == 2) all = fmaf(float(mins[tile][i]), -dmin[i / 2], all);
                THREAD float& to = y[tile][i / 2][i % 2];
                to = fmaf(all, i % 2 ? dx.y : dx.x, to);
            }
        }
    }
    static INLINE float value(const DEVICE u8* at, int row, int i) {
        int s = i / 16;
        float d = packed_half(at, D, row);
        if (BITS == 2) {
            int q = packed_byte(at + WEIGHTS, i / 128 * 32 + i % 32, row) >> (i % 128 / 32 * 2) & 3;
            int both = packed_byte(at, s, row);
            return sub(mul(mul(d, float(both & 15)), float(q)), mul(packed_half(at, D + 2, row), float(both >> 4)));
        }
        ThreeBits three(i / 4 % 4);
        int h = s % 2, word = i / 32 * 12 + i % 4; // byte `i % 4` of the first of three words
        int bits = packed_byte(at + WEIGHTS, word + 4 * three.word[h], row);
        int q = three.quad_of(bits, packed_byte(at + WEIGHTS, word + 4, row), h);
        int low = packed_byte(at + SCALES, s % 8, row) >> (s / 8 * 4) & 15;
        int high = packed_byte(at + SCALES, 8 + s % 4, row) >> (s / 4 * 2) & 3;
        return mul(mul(d, float((low | high << 4) - 32)), float(q - 4));
    }
};
typedef SmallK<2> Q2_K;
typedef SmallK<3> Q3_K;
