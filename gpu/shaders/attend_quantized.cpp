// Attention over quantized pages with a scale per 128 channels: the integers of turboquant/scalar.rs, on tensor cores where
// available. Weights have the bits of the CPU for equal scores, which differ by the rounding of sums, as does a split's output.
//
// Eight warps share a page. Scores: a warp computes 16 tokens over all channels. Softmax: a warp computes one or two
// columns, and writes their weights times scales as 15-bit integers, in two planes of signed bytes. Values: a warp
// computes 16 channels of every group over all tokens. An unpacked fragment serves 8 or 16 columns: the heads of a group
// times the rows of a verification. Shared memory is 9 to 18 KiB per block, so that registers (two blocks) limit the
// occupancy. Grid: (splits, KV heads, segments by tiles of 8 or 16 columns).

#include "attend.h"
#include "planes.h"

namespace {

struct Params {
    Queries queries;
    const DEVICE u32* words;         // (rows, heads, HD / 4)
    const DEVICE float* word_scales; // (rows, heads, HD / 128)
    Pages keys;
    Pages values;
    Format key, value;
    int rotary_channels;       // channels of the keys; the others are those of the values, in the same format
    int key_bytes, value_bytes; // of a head's page
};

CONSTEXPR int THREADS = 256;

// A column's scores, then, in the same memory, its weights in two planes. 8 words of padding put eight columns in
// different banks. Weights are read two words at a time.
template <int GROUPS>
union alignas(8) ScoresOrWeights {
    float score[PAGE];
    u32 weight[2][GROUPS][32];
    u32 words[264];
};

template <int HD, int TILES>
struct Scratch {
    ScoresOrWeights<HD / 128> columns[8 * TILES];
    float mean[2][8 * TILES];
    float unit[HD / 128][8 * TILES];
    float factor[8 * TILES], total[8 * TILES];
    Column column[8 * TILES];
    Range visible[2][8 * TILES];
    u32 table[2][16];
};

// Adds the dot products of group `group`, times both scales, to the scores of the lane's two tokens and its columns.
template <int HD, int TILES>
INLINE void add_group(const CONSTANT Params& p, const THREAD int (&dot)[TILES][4], const DEVICE u16* scales, int token,
                      int group, const THREADGROUP Column* columns, THREAD float (&sum)[TILES][4]) {
    u32 both = *reinterpret_cast<const DEVICE u32*>(scales + AT(group * PAGE + token));
    float scale[2] = {half_to_float(u16(both)), half_to_float(u16(both >> 16))};
    for (int tile = 0; tile < TILES; tile++) {
        for (int i = 0; i < 4; i++) {
            int column = columns[tile * 8 + AT(i % 2)].index;
            float of_query = column < 0 ? 0.0f : p.word_scales[AT(i64(column) * (HD / 128) + group)];
            sum[tile][i] = fmaf(float(dot[tile][i]), mul(scale[i / 2], of_query), sum[tile][i]);
        }
    }
}

template <int HD, int TILES>
INLINE void attend(const CONSTANT Params& p, THREADGROUP Scratch<HD, TILES>& s, Thread self) {
    constexpr int COLUMNS = 8 * TILES, GROUPS = HD / 128;
    const CONSTANT Queries& q = p.queries;
    int tid = self.index, lane = self.lane, warp = self.warp, g = lane / 4, t = lane % 4;
    int kv_head = self.y, segment = self.z / q.tiles, first_column = self.z % q.tiles * COLUMNS;
    int rotary_groups = p.rotary_channels / 128;
    Range rows = rows_of(q, segment);
    if (rows.start >= rows.end || is_surplus<COLUMNS>(q, rows, self.x, kv_head, first_column, tid)) return;
    if (tid < COLUMNS) s.column[tid] = column_of(q, rows, kv_head, first_column + AT(tid));
    if (tid < 32) s.table[tid / 16][tid % 16] = tid < 16 ? p.key.levels[AT(tid) % 16] : p.value.levels[tid - 16];
    const THREADGROUP u8* key_table = reinterpret_cast<const THREADGROUP u8*>(s.table[0]);
    const THREADGROUP u8* value_table = reinterpret_cast<const THREADGROUP u8*>(s.table[1]);

    barrier();
    // The columns of this lane: g in the B fragment, 2 t and 2 t + 1 in the result.
    int operand_index[TILES], live[TILES];
    const THREADGROUP Column* columns = s.column + 2 * t;
    for (int tile = 0; tile < TILES; tile++) {
        live[tile] = min(max((rows.end - rows.start) * (q.heads / q.kv_heads) - first_column - tile * 8, 0), 8);
        operand_index[tile] = s.column[tile * 8 + AT(g)].index;
    }
    OnlineSoftmax softmax[TILES];
    for (int tile = 0; tile < TILES; tile++) softmax[tile] = empty_softmax();
    float output[GROUPS][TILES][4] = {};

    int first_page = (first_split(q, rows.start) + self.x) * q.split_pages;
    for (int page = first_page; page < first_page + q.split_pages; page++) {
        THREADGROUP Range* ranges = s.visible[page % 2];
        Range any = see_page<COLUMNS>(q, s.column, page, true, ranges, tid);
        int first = any.start, last = any.end;
        if (first >= last) continue;
        const DEVICE Slot* tables = q.segments[AT(segment)].tables;
        const DEVICE u8* key_page = page_of<const u8>(tables, p.keys, page) + AT(i64(kv_head)) * p.key_bytes;
        const DEVICE u8* value_page = page_of<const u8>(tables, p.values, page) + AT(i64(kv_head)) * p.value_bytes;
        QuantizedPage keys = quantized_page(p.key, key_page, p.rotary_channels);
        QuantizedPage values = quantized_page(p.value, value_page, HD);

        // Loads of later phases are waited for one at a time, so the whole page comes closer first.
        for (int i = tid * 128; i < p.key_bytes; i += THREADS * 128) prefetch(keys.upper + i);
        for (int i = tid * 128; i < p.value_bytes; i += THREADS * 128) prefetch(values.upper + i);

        // Sixteen lanes per query: a warp computes the mean scores of its one or two columns.
        {
            int n = TILES == 1 ? warp : 2 * warp + lane / 16;
            int of_query = s.column[AT(n)].index;
            const DEVICE float* query = of_query < 0 ? nullptr : q.rows + i64(of_query) * HD;
            float of_keys = mean_score(query, keys.mean, 0, p.rotary_channels, lane);
            float of_values = p.rotary_channels < HD ? mean_score(query, values.mean, p.rotary_channels, HD, lane) : 0.0f;
            if (lane % 16 == 0) s.mean[0][AT(n)] = of_keys, s.mean[1][n] = of_values;
        }
        barrier();

        // The warp's 16 tokens.
        if (warp * 16 < last && first < warp * 16 + 16) {
            float sum[TILES][4] = {}, value_sum[TILES][4] = {};
#pragma unroll 1
            for (int group = 0; group < GROUPS; group++) {
                bool transposed = group >= rotary_groups;
                int dot[TILES][4] = {};
#pragma unroll 1
                for (int step = 0; step < 4; step++) {
                    u32 a[4];
                    if (transposed) transposed_fragment(p.value, value_table, values, group * 8 + step * 2, warp, g, t, a);
                    else levels_fragment(p.key, key_table, keys, (group * 8 + warp) * 32 + step * 8, g, t, a);
                    for (int tile = 0; tile < TILES; tile++) {
                        uint2 b = {0, 0};
                        if (operand_index[tile] >= 0) {
                            i64 row = i64(operand_index[tile]) * (HD / 4);
                            const DEVICE u32* words = p.words + row + AT(group * 32 + step * 8);
                            if (transposed) b.x = words[t], b.y = words[t + 4];
                            else b = reinterpret_cast<const DEVICE uint2*>(words)[t];
                        }
                        mma_k32(dot[tile], a, b, t, live[tile]);
                    }
                }
                int token = warp * 16 + 2 * g;
                if (transposed) add_group<HD, TILES>(p, dot, values.scales, token, group, columns, value_sum);
                else add_group<HD, TILES>(p, dot, keys.scales, token, group, columns, sum);
            }
            for (int tile = 0; tile < TILES; tile++) {
                for (int i = 0; i < 4; i++) {
                    int n = tile * 8 + 2 * t + i % 2;
                    float score = sum[tile][i] + s.mean[0][n];
                    if (p.rotary_channels < HD) score += value_sum[tile][i] + s.mean[1][n];
                    s.columns[n].score[AT(warp * 16 + 2 * g + i / 2)] = score;
                }
            }
        }
        barrier();

        // The warp's columns; a lane has four tokens, which are one word of weights.
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            int n = tile * 8 + warp;
            Range range = ranges[n];
            float weight[4] = {0, 0, 0, 0}, factor = 1;
            if (range.start < range.end) {
                float score[4];
                bool seen[4];
                for (int i = 0; i < 4; i++) {
                    int token = 4 * lane + i;
                    seen[i] = range.start <= token && token < range.end;
                    score[i] = 0;
                    if (seen[i]) score[i] = s.columns[n].score[AT(token)];
                }
                softmax[tile] = advance(softmax[tile], score, seen, weight, factor);
            }
            warp_barrier(); // weights overwrite the scores
            float total = warp_sum(weight[0] + weight[1] + weight[2] + weight[3]);
            if (lane == 0) s.factor[n] = factor, s.total[n] = total;
            for (int group = 0; group < GROUPS; group++) {
                float scaled[4];
                u32 largest_bits = 0;
                for (int i = 0; i < 4; i++) {
                    scaled[i] = mul(weight[i], half_to_float(values.scales[AT(group * PAGE + 4 * lane + i)]));
                    largest_bits = max(largest_bits, bits_of(scaled[i]) & 0x7fffffffu);
                }
                IntegerScale integers = integer_scale(warp_max(largest_bits), p.value.unit);
                u32 high, low;
                integer_weights(scaled, integers.inverse, high, low);
                s.columns[n].weight[0][group][AT(lane)] = high;
                s.columns[n].weight[1][group][AT(lane)] = low;
                if (lane == 0) s.unit[group][n] = integers.unit;
            }
        }
        barrier();

        // The warp's 16 channels of every group.
#pragma unroll 1
        for (int group = 0; group < GROUPS; group++) {
            int strip = group * 8 + warp, upper[TILES][4] = {}, lower[TILES][4] = {};
#pragma unroll 2
            for (int step = 0; step < 4; step++) {
                u32 a[4];
                levels_fragment(p.value, value_table, values, strip * 32 + step * 8, g, t, a);
                for (int tile = 0; tile < TILES; tile++) {
                    int n = AT(tile * 8 + g), word = 8 * step + 2 * t;
                    uint2 high = *reinterpret_cast<const THREADGROUP uint2*>(&s.columns[n].weight[0][group][word]);
                    uint2 low = *reinterpret_cast<const THREADGROUP uint2*>(&s.columns[n].weight[1][group][word]);
                    mma_k32(upper[tile], a, high, t, live[tile]);
                    mma_k32(lower[tile], a, low, t, live[tile]);
                }
            }
            for (int tile = 0; tile < TILES; tile++) {
                for (int i = 0; i < 4; i++) {
                    int n = tile * 8 + 2 * t + i % 2;
                    float more = mul(float(256 * upper[tile][i] + lower[tile][i]), s.unit[group][n]);
                    if (values.mean) {
                        float mean = half_to_float(values.mean[AT(strip * 16 + 2 * g + i / 2)]);
                        more = fmaf(s.total[n], mean, more);
                    }
                    // Registers have no indices: every group compares.
#pragma unroll
                    for (int own = 0; own < GROUPS; own++)
                        if (own == group) output[own][tile][i] = fmaf(output[own][tile][i], s.factor[n], more);
                }
            }
        }
    }
    i64 split = i64(self.x) * q.count * q.heads;
    for (int tile = 0; tile < TILES; tile++) {
        int own = s.column[tile * 8 + AT(warp)].index;
        if (lane == 0 && own >= 0) q.softmax[AT(split + own)] = softmax[tile];
        for (int i = 0; i < 2; i++) {
            int column = columns[tile * 8 + AT(i)].index;
            if (column < 0) continue;
            // Channels 2 g and 2 g + 1 of a strip: 8 bytes per lane, 64 consecutive bytes per eight lanes.
            DEVICE float* to = q.output + (split + column) * HD;
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                float2 two = {output[group][tile][i], output[group][tile][2 + i]};
                *reinterpret_cast<DEVICE float2*>(to + AT((group * 8 + warp) * 16 + 2 * g)) = two;
            }
        }
    }
}

} // namespace

#define ATTEND(HD)                                                                                                  \
    KERNEL(attend_quantized_##HD##_8, Params, THREADS, 2, Scratch<HD, 1>) { attend<HD, 1>(p, s, self); }                \
    KERNEL(attend_quantized_##HD##_16, Params, THREADS, 2, Scratch<HD, 2>) { attend<HD, 2>(p, s, self); }

ATTEND(128)
ATTEND(256)
ATTEND(512)
