// Attention over pages of any formats of K and V: those that neither `attend_exact.cpp` reads, which has rows of one type, nor
// `attend_quantized.cpp`, which has a scale per 128 channels.
//
// Formats are parameters, so that there is one kernel per head dimension. The arithmetic of exact rows and of quantized pages is
// that of those kernels. Eight warps share a page. Scores: a warp computes 16 tokens or, of exact keys, four per lane. Softmax: a
// warp computes one column. Values: a warp computes 16 channels of every group of 128 over all tokens; integer weights, which differ
// by scale group, are computed where they are multiplied. Grid: (splits, KV heads, segments by tiles of 8 columns).

#include "exact_scores.h"
#include "planes.h"

namespace {

// K or V.
struct Side {
    Pages pages;
    Format format; // of quantized pages
    int element;   // of exact pages; QUANTIZED for others
    int channels;  // of a row
    int bytes;     // of a head's quantized page
};

CONSTEXPR int THREADS = 256;
CONSTEXPR int QUANTIZED = 3; // after F32, F16, BF16

struct Params {
    Queries queries;
    const DEVICE u32* words;         // (rows, heads, HD / 4), for quantized keys
    const DEVICE float* word_scales; // (rows, heads, scale groups of HD)
    Side keys;   // if it has fewer than HD channels, the others are those of the values, in the same quantized format
    Side values; // without a mean
    int quantized; // 1: the positions that are read quantized where a side is; 0: those that are read exactly
};

// Columns end in different banks.
CONSTEXPR int STRIDE = PAGE + 8;

template <int HD>
struct Scratch {
    alignas(16) float query[COLUMNS][HD]; // for exact keys
    alignas(16) float score[COLUMNS][STRIDE]; // then the weights
    float factor[COLUMNS];
    Column column[COLUMNS];
    Range visible[2][COLUMNS];
    u32 table[2][16]; // levels of keys and of values
};

template <int HD>
CONSTEXPR int GROUPS = HD < 128 ? 1 : HD / 128;

// A lane's channels 2 g and 2 g + 1 of the warp's 16 in every group of 128, by the columns 2 t and 2 t + 1, as in an mma.
template <int HD>
using Output = float[GROUPS<HD>][4];

// The first of the warp's channels in a group. Heads below 128 have fewer than eight strips.
INLINE int first_channel(int group, int warp) { return (group * 8 + warp) * 16; }

// As `levels_fragment`; also of codes of 8 bits, which are levels, a vector in every line.
INLINE void any_fragment(const CONSTANT Format& f, const THREADGROUP u8* table, const THREAD QuantizedPage& page, int first, int g,
                         int t, THREAD u32 (&a)[4]) {
    if (f.upper < 8) return levels_fragment(f, table, page, first, g, t, a);
    const DEVICE uint2* lines = reinterpret_cast<const DEVICE uint2*>(page.upper + AT((first + 2 * t) * 64 + 8 * g));
    uint2 vectors[2] = {lines[0], lines[AT(8)]};
    for (int h = 0; h < 2; h++) a[2 * h] = vectors[h].x, a[2 * h + 1] = vectors[h].y;
}

template <int HD>
INLINE void quantized_scores(const CONSTANT Params& p, THREADGROUP Scratch<HD>& s, const THREAD QuantizedPage& keys,
                             const THREAD QuantizedPage& values, int live, Thread self) {
    int g = self.lane / 4, t = self.lane % 4, warp = self.warp, shift = p.keys.format.scale_shift;
    const THREADGROUP u8* key_table = reinterpret_cast<const THREADGROUP u8*>(s.table[0]);
    const THREADGROUP u8* value_table = reinterpret_cast<const THREADGROUP u8*>(s.table[1]);
    int index = s.column[AT(g)].index, dot[4] = {};
    float sum[4] = {};
#pragma unroll 1
    for (int step = 0; step < HD / 32; step++) {
        // Of the page of keys, a scale group has 2^shift steps per strip.
        int group = step >> shift, of_group = step & ((1 << shift) - 1);
        bool transposed = step * 32 >= p.keys.channels;
        u32 a[4];
        if (transposed) transposed_fragment(p.values.format, value_table, values, step * 2, warp, g, t, a);
        else any_fragment(p.keys.format, key_table, keys, (((group * 8 + warp) << shift) + of_group) * 8, g, t, a);
        uint2 b = {0, 0};
        if (index >= 0) {
            const DEVICE u32* words = p.words + AT(i64(index) * (HD / 4) + step * 8);
            if (transposed) b.x = words[t], b.y = words[t + 4];
            else b = reinterpret_cast<const DEVICE uint2*>(words)[t];
        }
        mma_k32(dot, a, b, t, live);
        if ((step + 1) & ((1 << shift) - 1)) continue; // the scale group goes on
        const DEVICE u16* scales = (transposed ? values.scales : keys.scales) + AT(group * PAGE + warp * 16 + 2 * g);
        u32 both = *reinterpret_cast<const DEVICE u32*>(scales);
        float scale[2] = {half_to_float(u16(both)), half_to_float(u16(both >> 16))};
        for (int i = 0; i < 4; i++) {
            int column = s.column[2 * t + AT(i % 2)].index;
            float of_query = column < 0 ? 0.0f : p.word_scales[AT(i64(column) * (HD / 32 >> shift) + group)];
            sum[i] = fmaf(float(dot[i]), mul(scale[i / 2], of_query), sum[i]);
            dot[i] = 0;
        }
    }
    for (int i = 0; i < 4; i++) s.score[2 * t + i % 2][AT(warp * 16 + 2 * g + i / 2)] = sum[i];
}

// A column's softmax over a page; a lane has four tokens. Its weights replace the scores.
template <int HD>
INLINE OnlineSoftmax weights(THREADGROUP Scratch<HD>& s, OnlineSoftmax softmax, Range range, float mean, Thread self) {
    int n = self.warp, first = 4 * self.lane;
    float weight[4] = {0, 0, 0, 0}, factor = 1;
    if (range.start < range.end) {
        float score[4];
        bool seen[4];
        for (int i = 0; i < 4; i++) {
            seen[i] = range.start <= first + i && first + i < range.end;
            score[i] = seen[i] ? s.score[n][AT(first + i)] + mean : 0.0f;
        }
        softmax = advance(softmax, score, seen, weight, factor);
    }
    for (int i = 0; i < 4; i++) s.score[n][AT(first + i)] = weight[i];
    if (self.lane == 0) s.factor[n] = factor;
    return softmax;
}

// The weights of four tokens from `first` on, times their scales.
INLINE void scaled_weights(const THREADGROUP float* weights, const DEVICE u16* scales, int first, THREAD float (&scaled)[4]) {
    float weight[4];
    load4_shared(weights + first, weight);
    uint2 both = *reinterpret_cast<const DEVICE uint2*>(scales + AT(first));
    u32 of[2] = {both.x, both.y};
    for (int i = 0; i < 4; i++) scaled[i] = mul(weight[i], half_to_float(u16(of[i / 2] >> i % 2 * 16)));
}

template <int HD>
INLINE void add_quantized_values(const CONSTANT Params& p, THREADGROUP Scratch<HD>& s, const THREAD QuantizedPage& values,
                                 int live, THREAD Output<HD>& output, Thread self) {
    int g = self.lane / 4, t = self.lane % 4;
    const CONSTANT Format& format = p.values.format;
    const THREADGROUP u8* table = reinterpret_cast<const THREADGROUP u8*>(s.table[1]);
#pragma unroll
    for (int group = 0; group < GROUPS<HD>; group++) {
        int channel = first_channel(group, self.warp);
        if (channel >= HD) continue;
        const DEVICE u16* scales = values.scales + AT((channel >> (5 + format.scale_shift)) * PAGE);
        // Column g's weights of the tokens 32 step + 8 t + 4 h + i.
        float scaled[4];
        u32 largest_bits = 0;
        for (int word = 0; word < 8; word++) {
            scaled_weights(s.score[AT(g)], scales, word / 2 * 32 + 8 * t + word % 2 * 4, scaled);
            for (int i = 0; i < 4; i++) largest_bits = max(largest_bits, bits_of(scaled[i]) & 0x7fffffffu);
        }
        for (int mask = 1; mask < 4; mask *= 2) largest_bits = max(largest_bits, shuffle_xor(largest_bits, mask));
        IntegerScale integers = integer_scale(largest_bits, format.unit);
        int upper[4] = {}, lower[4] = {};
#pragma unroll 1
        for (int step = 0; step < 4; step++) {
            u32 a[4];
            u32 high[2], low[2];
            any_fragment(format, table, values, channel * 2 + step * 8, g, t, a);
            for (int h = 0; h < 2; h++) {
                scaled_weights(s.score[g], scales, step * 32 + 8 * t + 4 * h, scaled);
                integer_weights(scaled, integers.inverse, high[h], low[h]);
            }
            uint2 uppers = {high[0], high[1]}, lowers = {low[0], low[1]};
            mma_k32(upper, a, uppers, t, live);
            mma_k32(lower, a, lowers, t, live);
        }
        for (int i = 0; i < 4; i++) {
            int n = 2 * t + i % 2;
            float more = mul(float(256 * upper[i] + lower[i]), shuffle(integers.unit, 4 * n));
            output[group][i] = fmaf(output[group][i], s.factor[n], more);
        }
    }
}

// Two consecutive elements.
template <class E>
INLINE float2 load2(const DEVICE typename E::Bits* at) {
    u32 both = *reinterpret_cast<const DEVICE u32*>(at);
    return {E::widen(u16(both)), E::widen(u16(both >> 16))};
}
template <>
INLINE float2 load2<Single>(const DEVICE float* at) {
    return *reinterpret_cast<const DEVICE float2*>(at);
}

// Adds the values first..last.
template <class E, int HD>
INLINE void add_exact_values(THREADGROUP Scratch<HD>& s, const DEVICE u8* page, int first, int last,
                             THREAD Output<HD>& output, Thread self) {
    const DEVICE typename E::Bits* values = reinterpret_cast<const DEVICE typename E::Bits*>(page);
    int g = self.lane / 4, t = self.lane % 4;
    for (int group = 0; group < GROUPS<HD>; group++)
        for (int i = 0; i < 4; i++) output[group][i] *= s.factor[2 * t + i % 2];
#pragma unroll 2
    for (int start = first / 4 * 4; start < last; start += 4) {
        float weight[2][4];
        for (int i = 0; i < 2; i++) load4_shared(&s.score[2 * t + i][AT(start)], weight[i]);
#pragma unroll
        for (int group = 0; group < GROUPS<HD>; group++) {
            int channel = first_channel(group, self.warp) + 2 * g;
            if (channel >= HD) continue;
            for (int k = 0; k < 4; k++) {
                // Rows outside the range may not have been written.
                if (start + k < first || start + k >= last) continue;
                float2 v = load2<E>(values + AT((start + k) * HD + channel));
                for (int i = 0; i < 4; i++)
                    output[group][i] = fmaf(weight[i % 2][k], i < 2 ? v.x : v.y, output[group][i]);
            }
        }
    }
}

// The first byte of a head's page.
INLINE const DEVICE u8* head_page(const CONSTANT Side& side, const DEVICE Slot* tables, int page, int head) {
    i64 bytes = side.bytes;
    if (side.element != QUANTIZED) bytes = PAGE * side.channels * (side.element == F32 ? 4 : 2);
    return page_of<const u8>(tables, side.pages, page) + AT(i64(head)) * bytes;
}

template <class E, int HD>
INLINE void exact_scores_of(THREADGROUP Scratch<HD>& s, const DEVICE u8* page, int first, int last, Thread self) {
    const DEVICE typename E::Bits* keys = reinterpret_cast<const DEVICE typename E::Bits*>(page);
    exact_scores<E, HD>(s.query, s.score, keys, keys, HD, first, last, self);
}

template <int HD>
INLINE void attend(const CONSTANT Params& p, THREADGROUP Scratch<HD>& s, Thread self) {
    const CONSTANT Queries& q = p.queries;
    int tid = self.index, lane = self.lane, warp = self.warp, g = lane / 4, t = lane % 4, kv_head = self.y;
    int segment = self.z / q.tiles, first_column = self.z % q.tiles * COLUMNS;
    Range rows = rows_of(q, segment);
    if (rows.start >= rows.end || is_surplus<COLUMNS>(q, rows, self.x, kv_head, first_column, tid)) return;
    int live = min(max((rows.end - rows.start) * (q.heads / q.kv_heads) - first_column, 0), COLUMNS);
    if (tid < COLUMNS) s.column[tid] = column_of(q, rows, kv_head, first_column + AT(tid));
    if (tid < 32) s.table[tid / 16][tid % 16] = tid < 16 ? p.keys.format.levels[AT(tid) % 16] : p.values.format.levels[tid - 16];
    barrier();
    const DEVICE float* query = nullptr; // of the warp's column
    if (s.column[AT(warp)].row >= 0) query = q.rows + i64(s.column[warp].index) * HD;
    for (int i = lane * WIDTH; i < HD; i += 32 * WIDTH) {
        float x[WIDTH] = {};
        if (query) load4<Single>(query + AT(i), x);
        for (int e = 0; e < WIDTH; e++) s.query[warp][i + e] = x[e];
    }
    OnlineSoftmax softmax = empty_softmax();
    float output[GROUPS<HD>][4] = {};
    int first_page = (first_split(q, rows.start) + self.x) * q.split_pages;
    for (int page = first_page; page < first_page + q.split_pages; page++) {
        THREADGROUP Range* ranges = s.visible[page % 2];
        Range any = see_page<COLUMNS>(q, s.column, page, p.quantized != 0, ranges, tid);
        int first = any.start, last = any.end;
        if (first >= last) continue;
        const DEVICE Slot* tables = q.segments[AT(segment)].tables;
        const DEVICE u8* key_page = head_page(p.keys, tables, page, kv_head);
        const DEVICE u8* value_page = head_page(p.values, tables, page, kv_head);
        QuantizedPage keys = quantized_page(p.keys.format, key_page, p.keys.channels);
        QuantizedPage values = quantized_page(p.values.format, value_page, HD);
        for (int i = tid * 128; i < p.keys.bytes; i += THREADS * 128) prefetch(key_page + i);
        for (int i = tid * 128; i < p.values.bytes; i += THREADS * 128) prefetch(value_page + i);

        float mean = 0;
        if (p.keys.element == F32) exact_scores_of<Single>(s, key_page, first, last, self);
        if (p.keys.element == F16) exact_scores_of<Half>(s, key_page, first, last, self);
        if (p.keys.element == BF16) exact_scores_of<Bfloat16>(s, key_page, first, last, self);
        if (p.keys.element == QUANTIZED) {
            quantized_scores(p, s, keys, values, live, self);
            mean = mean_score(query, keys.mean, 0, p.keys.channels, lane);
        }
        barrier();
        softmax = weights(s, softmax, ranges[warp], mean, self);
        barrier();
        if (p.values.element == F32) add_exact_values<Single>(s, value_page, first, last, output, self);
        if (p.values.element == F16) add_exact_values<Half>(s, value_page, first, last, output, self);
        if (p.values.element == BF16) add_exact_values<Bfloat16>(s, value_page, first, last, output, self);
        if (p.values.element == QUANTIZED) add_quantized_values(p, s, values, live, output, self);
    }
    i64 split = i64(self.x) * q.count * q.heads;
    if (lane == 0 && query) q.softmax[AT(split + s.column[warp].index)] = softmax;
    for (int i = 0; i < 2; i++) {
        int column = s.column[2 * t + AT(i)].index;
        if (column < 0) continue;
#pragma unroll
        for (int group = 0; group < GROUPS<HD>; group++) {
            int channel = first_channel(group, warp) + 2 * g;
            if (channel >= HD) continue;
            float2 two = {output[group][i], output[group][2 + i]};
            *reinterpret_cast<DEVICE float2*>(q.output + AT((split + column) * HD + channel)) = two;
        }
    }
}

} // namespace

#define ATTEND(HD) KERNEL(attend_mixed_##HD, Params, THREADS, 2, Scratch<HD>) { attend<HD>(p, s, self); }

ATTEND(32)
ATTEND(64)
ATTEND(128)
ATTEND(256)
ATTEND(512)
