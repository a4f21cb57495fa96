// Attention over pages of f16 on tensor cores (`mma_f16`).
//
// Both products have K or V as the left operand, whose fragments a lane loads from device memory, and queries or weights of eight
// columns as the right one, in two halves of 11 bits each (`halves`). A query is scaled by a power of two before, so that no half
// overflows. Per page and column:
//   scores  = (K of the first half of the channels) q + (K of the other half) q     sums in the order of the channels
//   output  = output * factor + (V of the page) weights                             sums in the order of the keys
//
// Sums are over steps of 32 channels or keys, each in four products, those of the lower halves first. Any number of tiles of eight
// columns does the same for a column, so that its bits do not depend on it. A warp has the scores of 16 keys, then the values of
// 32 or 64 channels.
#pragma once

#include "attend_exact.h"

namespace {

CONSTEXPR int WARPS = 8;
CONSTEXPR int STEP = 32, TOKEN_STEPS = PAGE / STEP;
CONSTEXPR int STRIDE = PAGE + 4; // of a column's scores: those of a fragment are in different banks

// Right operands of TILES tiles of eight columns, by step and lane: the upper halves of eight channels or keys of a column, then
// the lower ones.
template <int TILES, int STEPS>
struct Operand {
    uint4 half[2][TILES][STEPS][32];
};

template <int HD, int TILES>
struct HalfScratch {
    static CONSTEXPR int COUNT = 8 * TILES;
    Operand<TILES, HD / STEP> queries;
    Operand<TILES, TOKEN_STEPS> weights;
    alignas(16) float score[COUNT][STRIDE];
    float inverse[COUNT]; // of a query's scale
    float factor[COUNT];
    OnlineSoftmax softmax[COUNT]; // not in registers, of which none is free
    Column column[COUNT];
    Range visible[2][COUNT]; // of even and odd pages, so that one barrier per page guards them
};

// Two numbers as sums of two f16 each, to 22 bits.
struct Halves {
    u32 upper, lower;
};
INLINE Halves halves(float a, float b) {
    u16 x = float_to_half(a), y = float_to_half(b);
    u32 lower = float_to_half(sub(a, half_to_float(x))) | u32(float_to_half(sub(b, half_to_float(y)))) << 16;
    return {x | u32(y) << 16, lower};
}

// A warp's queries, columns `warp`, `warp + 8`, ..: scaled, so that the largest element is between 2^13 and 2^14.
template <int HD, int TILES>
INLINE void stage_queries(const CONSTANT Queries& q, THREADGROUP HalfScratch<HD, TILES>& s, int warp, int lane) {
    float x[TILES][HD / 256][8] = {};
    for (int tile = 0; tile < TILES; tile++) {
        i64 index = s.column[tile * 8 + warp].index;
        if (index < 0) continue;
        for (int i = 0; i < HD / 32; i += 4) {
            float four[4];
            load4<Single>(q.rows + AT(index * HD + i / 8 * 256 + lane * 8) + i % 8, four);
            for (int e = 0; e < 4; e++) x[tile][i / 8][i % 8 + e] = four[e];
        }
    }
    for (int tile = 0; tile < TILES; tile++) {
        u32 largest = 0;
        for (int i = 0; i < HD / 32; i++) largest = max(largest, bits_of(x[tile][i / 8][i % 8]) & 0x7fffffffu);
        u32 exponent = min(max(warp_max(largest) >> 23, 14u), 254u);
        float scale = float_of((267 - exponent) << 23);
        if (lane == 0) s.inverse[tile * 8 + warp] = float_of((exponent - 13) << 23);
        for (int i = 0; i < HD / 256; i++) {
            Halves pairs[4];
            for (int j = 0; j < 4; j++) {
                int e = j / 2 * 4 + j % 2; // as `scores` pairs channels
                pairs[j] = halves(mul(x[tile][i][e], scale), mul(x[tile][i][e + 2], scale));
            }
            int step = i * 8 + lane / 4, to = warp * 4 + lane % 4;
            s.queries.half[0][tile][step][AT(to)] = {pairs[0].upper, pairs[1].upper, pairs[2].upper, pairs[3].upper};
            s.queries.half[1][tile][step][to] = {pairs[0].lower, pairs[1].lower, pairs[2].lower, pairs[3].lower};
        }
    }
}

// The lower halves of two words, and the upper ones.
INLINE u32 even(u32 a, u32 b) { return permute_bytes(a, b, 0x5410); }
INLINE u32 odd(u32 a, u32 b) { return permute_bytes(a, b, 0x7632); }

// Adds a step of 32: `first` and `second` are a left operand's rows g, g + 8 of words 0, 1 and 2, 3.
INLINE void add_step(THREAD float (&sum)[4], uint4 first, uint4 second, uint4 upper, uint4 lower) {
    mma_f16(sum, first, {lower.x, lower.y});
    mma_f16(sum, second, {lower.z, lower.w});
    mma_f16(sum, first, {upper.x, upper.y});
    mma_f16(sum, second, {upper.z, upper.w});
}

// Keys and values of a page, and those that a column sees.
struct HalfPage {
    const DEVICE u16* keys;
    const DEVICE u16* values;
    int rotary_channels;
    Range seen;
};

// A key in place of `key`, if no column sees it: it may not have been written, and its weight is zero, which times NaN is not.
INLINE int seen_key(const THREAD HalfPage& page, int key) { return min(max(key, page.seen.start), page.seen.end - 1); }

// Keys g and g + 8 of a warp's 16, in a step of 32 channels.
struct KeyWords {
    uint4 first, second;
};
template <int HD>
INLINE KeyWords keys_of(const THREAD HalfPage& page, int key, int step, int lane) {
    bool rotary = step * STEP < page.rotary_channels;
    int stride = rotary ? page.rotary_channels : HD;
    const DEVICE u16* from = (rotary ? page.keys : page.values) + AT((key + lane / 4) * stride + step * STEP + lane % 4 * 8);
    uint4 a = *reinterpret_cast<const DEVICE uint4*>(from), b = *reinterpret_cast<const DEVICE uint4*>(from + 8 * stride);
    return {{even(a.x, a.y), even(b.x, b.y), odd(a.x, a.y), odd(b.x, b.y)},
            {even(a.z, a.w), even(b.z, b.w), odd(a.z, a.w), odd(b.z, b.w)}};
}

// A warp's scores of a page: of 16 keys and all columns. Those of keys that no column sees may be NaN.
template <int HD, int TILES>
INLINE void scores(const THREAD HalfPage& page, THREADGROUP HalfScratch<HD, TILES>& s, int warp, int lane) {
    constexpr int STEPS = HD / STEP / 2; // of half of the channels
    int key = warp * 16, g = lane / 4, t = lane % 4;
    if (key + 16 <= page.seen.start || key >= page.seen.end) return;
    // Both halves of the channels at once, if there are registers: chains of dependent products are half as long.
    constexpr int AT_ONCE = TILES == 1 ? 2 : 1;
    for (int first = 0; first < 2; first += AT_ONCE) {
        float sum[AT_ONCE][TILES][4] = {};
#pragma unroll(TILES == 1 ? 4 : HD == 256 ? 2 : 1)
        for (int step = 0; step < STEPS; step++) {
            KeyWords k[AT_ONCE];
            for (int half = 0; half < AT_ONCE; half++) k[half] = keys_of<HD>(page, key, (first + half) * STEPS + step, lane);
            for (int half = 0; half < AT_ONCE; half++)
                for (int n = 0; n < TILES; n++) {
                    int at = (first + half) * STEPS + step;
                    uint4 upper = s.queries.half[0][n][at][lane], lower = s.queries.half[1][n][at][lane];
                    add_step(sum[half][n], k[half].first, k[half].second, upper, lower);
                }
        }
        for (int n = 0; n < TILES; n++)
            for (int e = 0; e < 4; e++) {
                THREADGROUP float& score = s.score[n * 8 + 2 * t + e % 2][AT(key + e / 2 * 8 + g)];
                if (AT_ONCE == 2) score = add(sum[0][n][e], sum[AT_ONCE - 1][n][e]);
                else score = first == 0 ? sum[0][n][e] : add(score, sum[0][n][e]);
            }
    }
}

// The online softmax of column `n` over the page, and its weights as a right operand. A lane has four consecutive keys.
template <int HD, int TILES>
INLINE void weigh(int n, Range seen_keys, THREADGROUP HalfScratch<HD, TILES>& s, int lane) {
    float weight[4] = {0, 0, 0, 0}, factor = 1;
    if (seen_keys.start < seen_keys.end) {
        float score[4], inverse = s.inverse[n];
        bool seen[4];
        load4_shared(&s.score[n][AT(4 * lane)], score);
        for (int i = 0; i < 4; i++) {
            int key = 4 * lane + i;
            seen[i] = seen_keys.start <= key && key < seen_keys.end;
            score[i] = seen[i] ? mul(score[i], inverse) : 0.0f;
        }
        OnlineSoftmax softmax = advance(s.softmax[n], score, seen, weight, factor);
        warp_barrier(); // before the state that all lanes have read is overwritten
        if (lane == 0) s.softmax[n] = softmax;
    }
    if (lane == 0) s.factor[n] = factor;
    Halves first = halves(weight[0], weight[1]), second = halves(weight[2], weight[3]);
    // Two lanes have the eight keys of a fragment's lane.
    int step = lane / 8, to = n % 8 * 4 + lane % 8 / 2;
    THREADGROUP uint4* upper = s.weights.half[0][n / 8][step] + AT(to);
    THREADGROUP uint4* lower = s.weights.half[1][n / 8][step] + to;
    reinterpret_cast<THREADGROUP uint2*>(upper)[lane % 2] = {first.upper, second.upper};
    reinterpret_cast<THREADGROUP uint2*>(lower)[lane % 2] = {first.lower, second.lower};
}

// 2 * STRIPS consecutive channels of a value.
template <int STRIPS>
struct Channels {
    u32 word[STRIPS];
};
INLINE void load(const DEVICE u16* at, THREAD Channels<2>& to) {
    uint2 words = *reinterpret_cast<const DEVICE uint2*>(at);
    to.word[0] = words.x, to.word[1] = words.y;
}
INLINE void load(const DEVICE u16* at, THREAD Channels<4>& to) {
    uint4 words = *reinterpret_cast<const DEVICE uint4*>(at);
    to.word[0] = words.x, to.word[1] = words.y, to.word[2] = words.z, to.word[3] = words.w;
}

// Multiplies the output by the page's factors and adds the page's values times weights: STRIPS strips of 16 channels from `channel`
// on, of which a lane has channels 2 STRIPS g .. 2 STRIPS (g + 1), and TILES tiles from `tile` on.
template <int HD, int STRIPS, int TILES, int ALL>
INLINE void add_values(const THREAD HalfPage& page, const THREADGROUP Operand<ALL, TOKEN_STEPS>& weights,
                       const THREADGROUP float* factors, int channel, int tile, int lane,
                       THREAD float (&output)[STRIPS][TILES][4]) {
    int g = lane / 4, t = lane % 4;
    for (int n = 0; n < TILES; n++)
        for (int e = 0; e < 4; e++) {
            float factor = factors[(tile + n) * 8 + 2 * t + e % 2];
            for (int i = 0; i < STRIPS; i++) output[i][n][e] = mul(output[i][n][e], factor);
        }
    // One tile: without branches, so that loads of all steps come before their products.
#pragma unroll(TILES == 1 ? 4 : 1)
    for (int step = 0; step < TOKEN_STEPS; step++) {
        if (TILES > 1 && (step * STEP >= page.seen.end || step * STEP + STEP <= page.seen.start)) continue;
        Channels<STRIPS> v[8];
        for (int i = 0; i < 8; i++) {
            int key = seen_key(page, step * STEP + 8 * t + i);
            load(page.values + AT(key * HD + channel + 2 * STRIPS * g), v[i]);
        }
        uint4 words[STRIPS][2]; // pairs of keys of channels 2 i and 2 i + 1
        for (int i = 0; i < STRIPS; i++)
            for (int half = 0; half < 2; half++) {
                u32 a = v[4 * half].word[i], b = v[4 * half + 1].word[i], c = v[4 * half + 2].word[i], d = v[4 * half + 3].word[i];
                words[i][half] = {even(a, b), odd(a, b), even(c, d), odd(c, d)};
            }
        for (int n = 0; n < TILES; n++) {
            uint4 upper = weights.half[0][tile + n][step][lane], lower = weights.half[1][tile + n][step][lane];
            for (int i = 0; i < STRIPS; i++) add_step(output[i][n], words[i][0], words[i][1], upper, lower);
        }
    }
}

// STRIPS: of 16 channels, per warp of values, TIMES times.
template <int HD, int ALL, int STRIPS, int TIMES>
INLINE void attend_halves(const CONSTANT Params& p, THREADGROUP HalfScratch<HD, ALL>& s, Thread self) {
    constexpr int COUNT = 8 * ALL;
    // Warps with different channels; the others have different tiles of columns.
    constexpr int OF_CHANNELS = HD / (16 * STRIPS * TIMES), TILES = ALL * OF_CHANNELS / WARPS;
    const CONSTANT Queries& q = p.queries;
    int tid = self.index, lane = self.lane, warp = self.warp, kv_head = self.y;
    int segment = self.z / q.tiles, first_column = self.z % q.tiles * COUNT;
    Range rows = rows_of(q, segment);
    if (rows.start >= rows.end || is_surplus<COUNT>(q, rows, self.x, kv_head, first_column, tid)) return;
    if (tid < COUNT) s.column[tid] = column_of(q, rows, kv_head, first_column + AT(tid));
    barrier();
    stage_queries(q, s, warp, lane);
    if (tid < COUNT) s.softmax[tid] = empty_softmax();
    float output[TIMES][STRIPS][TILES][4] = {};
    int channel = warp % OF_CHANNELS * (16 * STRIPS * TIMES), tile = OF_CHANNELS == WARPS ? 0 : warp / OF_CHANNELS * TILES;
    int first_page = (first_split(q, rows.start) + self.x) * q.split_pages;
    for (int page = first_page; page < first_page + q.split_pages; page++) {
        THREADGROUP Range* ranges = s.visible[page % 2];
        Range any = see_page<COUNT>(q, s.column, page, false, ranges, tid);
        if (any.start >= any.end) continue;
        const DEVICE Slot* tables = q.segments[AT(segment)].tables;
        HalfPage of_page = {page_of<const u16>(tables, p.keys, page) + AT(i64(kv_head)) * PAGE * p.rotary_channels,
                            page_of<const u16>(tables, p.values, page) + AT(i64(kv_head)) * PAGE * HD, p.rotary_channels, any};
        // While the scores are computed: values are read after them.
        if (ALL == 1)
            for (int i = any.start * HD + tid * 64; i < any.end * HD; i += 32 * WARPS * 64) prefetch(of_page.values + i);
        scores(of_page, s, warp, lane);
        barrier();
#pragma unroll 1
        for (int i = 0; i < ALL; i++) weigh(8 * i + warp, ranges[AT(8 * i + warp)], s, lane);
        barrier();
#pragma unroll
        for (int i = 0; i < TIMES; i++)
            add_values<HD>(of_page, s.weights, s.factor, channel + i * 16 * STRIPS, tile, lane, output[i]);
    }
    i64 split = i64(self.x) * q.count * q.heads;
    if (tid < COUNT && s.column[tid].index >= 0) q.softmax[AT(split + s.column[tid].index)] = s.softmax[tid];
    channel += 2 * STRIPS * (lane / 4);
    for (int n = 0; n < TILES; n++)
        for (int e = 0; e < 2; e++) {
            int at = (tile + n) * 8 + lane % 4 * 2 + e, column = s.column[AT(at)].index;
            if (column < 0 || s.softmax[AT(at)].sum == 0) continue;
            DEVICE float* to = q.output + AT((split + column) * HD + channel);
            for (int i = 0; i < TIMES; i++)
                for (int strip = 0; strip < STRIPS; strip += 2) {
                    const THREAD float(&of)[STRIPS][TILES][4] = output[i];
                    reinterpret_cast<DEVICE float4*>(to + i * 16 * STRIPS)[strip / 2] =
                        {of[strip][n][e], of[strip][n][2 + e], of[strip + 1][n][e], of[strip + 1][n][2 + e]};
                }
        }
}

} // namespace
