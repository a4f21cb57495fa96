// Queries, keys and values between projection and attention, in one kernel: norm, rotary embedding, channel order,
// rotation, store.
//
// A warp per head of a row, in registers; the reordering goes through a row of shared memory. Operations and their order
// are those of ops/norm.rs, ops/rope.rs, turboquant/rotation.rs and turboquant/query.rs. Grid: (heads by 4, rows,
// projections).

#include "pages.h"
#include "rotate.h"

namespace {

// Heads of one projection.
struct Heads {
    const DEVICE float* x; // (rows, heads, stride): the first HD of every stride
    const DEVICE float* weight; // of the norm: (HD), or null
    const DEVICE float* cos;    // (rows, pairs)
    const DEVICE float* sin;
    const DEVICE float* after; // (HD): multiplies the rotated embedding, in the stored order; or null
    DEVICE float* y;           // (rows, heads, channels), or null
    DEVICE u32* words;         // (rows, heads, HD / 4): the row in 8 bits, for quantized keys; or null
    DEVICE float* word_scales; // (rows, heads, scale groups of the keys)
    const DEVICE Place* places;  // (rows); null: the rows are not stored in pages
    const DEVICE Segment* segments;
    DEVICE u32* fault;    // (1): atomicMin of the positions of rows that are not finite or too large for pages
    Pages pages;
    int heads;
    int stride;
    int channels;     // channels that are stored, from the first on
    int normalize;    // 1: divide by the root mean square
    int pairs;        // rotary pairs; 0: none
    int pair_stride;  // from a pair's first channel to its second: HD / 2, or `pairs`
    int k_eq_v_pairs; // 0: the model's channel order; else the channels of this many rotary pairs come first
    int rotates;      // 1: rotate
    int element;      // element type of the pages
    int scale_shift;  // 32 << scale_shift channels of quantized keys share a scale
    float eps;
    float unit; // of the keys' format
};

struct Params {
    Heads of[3]; // as many as the grid has layers
};

CONSTEXPR int WARPS = 4;

template <int HD>
struct Scratch {
    float rows[WARPS][HD];
};

// Pairs (i, i + HD / 2).
template <int HD>
INLINE void rope(THREAD Row<HD>& row, int lane, const DEVICE float* cos, const DEVICE float* sin, int pairs) {
    constexpr int GROUPS = Row<HD>::GROUPS, W = Row<HD>::W;
    if (GROUPS > 1) {
        // Both channels of a pair are in this lane.
        for (int group = 0; group < GROUPS / 2; group++) {
            for (int e = 0; e < W; e++) {
                int i = Row<HD>::channel(lane, group, e);
                if (i >= pairs) continue;
                float a = row.v[group][e], b = row.v[group + GROUPS / 2][e], c = cos[AT(i)], s = sin[AT(i)];
                row.v[group][e] = sub(mul(a, c), mul(b, s));
                row.v[group + GROUPS / 2][e] = add(mul(b, c), mul(a, s));
            }
        }
    } else {
        for (int e = 0; e < W; e++) {
            float self = row.v[0][e], other = shuffle_xor(self, 16);
            int i = Row<HD>::channel(lane % 16, 0, e);
            if (i >= pairs) continue;
            float c = cos[AT(i)], s = sin[AT(i)];
            row.v[0][e] = lane < 16 ? sub(mul(self, c), mul(other, s)) : add(mul(self, c), mul(other, s));
        }
    }
}

// Pairs (i, i + pairs), both in the first group: whole lanes, `pairs` / W apart.
template <int HD>
INLINE void rope_leading(THREAD Row<HD>& row, int lane, const DEVICE float* cos, const DEVICE float* sin, int pairs) {
    int reach = pairs / Row<HD>::W;
    for (int e = 0; e < Row<HD>::W; e++) {
        float own = row.v[0][e], other = shuffle(own, lane < reach ? lane + reach : lane - reach);
        if (lane >= 2 * reach) continue;
        int i = Row<HD>::channel(lane % reach, 0, e);
        float c = cos[AT(i)], s = sin[AT(i)];
        row.v[0][e] = lane < reach ? sub(mul(own, c), mul(other, s)) : add(mul(own, c), mul(other, s));
    }
}

template <class E, int HD>
INLINE void store_row(const CONSTANT Heads& p, const THREAD Row<HD>& row, int lane, int r, int head) {
    int position = p.places[AT(r)].position;
    const DEVICE Slot* tables = p.segments[AT(p.places[AT(r)].segment)].tables;
    DEVICE typename E::Bits* page = page_of<typename E::Bits>(tables, p.pages, position / PAGE);
    page += (i64(head) * PAGE + AT(position % PAGE)) * p.channels;
    for (int group = 0; group < Row<HD>::GROUPS; group++) {
        for (int e = 0; e < Row<HD>::W; e++) {
            int i = Row<HD>::channel(lane, group, e);
            if (i < p.channels) page[AT(i)] = E::narrow(row.v[group][e]);
        }
    }
}

// Whether the first `channels` of a row have a NaN, an infinity, or a magnitude above the largest f16.
template <int HD>
INLINE bool out_of_range(const THREAD Row<HD>& row, int lane, int channels) {
    bool found = false;
    for (int group = 0; group < Row<HD>::GROUPS; group++)
        for (int e = 0; e < Row<HD>::W; e++) {
            bool large = (bits_of(row.v[group][e]) & 0x7fffffffu) > bits_of(65504.0f);
            found = found || (large && Row<HD>::channel(lane, group, e) < channels);
        }
    return found;
}

// A rotated row in 8 bits, one scale per scale group of the keys.
template <int HD>
INLINE void quantize_query(const CONSTANT Heads& p, const THREAD Row<HD>& row, int lane, i64 index) {
    constexpr int W = Row<HD>::W;
    int scale_lanes = (32 << p.scale_shift) / W; // lanes that share a scale
    for (int group = 0; group < Row<HD>::GROUPS; group++) {
        u32 largest_bits = 0, word = 0;
        for (int e = 0; e < W; e++) largest_bits = max(largest_bits, bits_of(row.v[group][e]) & 0x7fffffffu);
        for (int mask = scale_lanes / 2; mask > 0; mask /= 2) largest_bits = max(largest_bits, shuffle_xor(largest_bits, mask));
        float largest = float_of(largest_bits);
        float inverse = largest < 1.17549435e-38f ? 0.0f : 127.0f / largest;
        int first = Row<HD>::channel(lane, group, 0);
        for (int e = 0; e < W; e++) {
            // Adding 1.5 * 2^23 puts the nearest integer, ties to even, in the lowest bits.
            u32 byte = bits_of(add(mul(row.v[group][e], inverse), 12582912.0f)) & 255;
            word |= byte << (8 * (first % 4 + e));
        }
        // 4 / W lanes share a word.
        for (int mask = 2 / W; mask > 0; mask /= 2) word |= shuffle_xor(word, mask);
        if (first % 4 == 0) p.words[AT((index * HD + first) / 4)] = word;
        i64 scale = (index * HD + first) >> (5 + p.scale_shift);
        if (lane % scale_lanes == 0) p.word_scales[AT(scale)] = mul(largest / 127.0f, p.unit);
    }
}

template <int HD>
INLINE void rows(const CONSTANT Heads& p, THREADGROUP Scratch<HD>& s, Thread self) {
    constexpr int GROUPS = Row<HD>::GROUPS, W = Row<HD>::W;
    int lane = self.lane, warp = self.warp, head = self.x * WARPS + warp, r = self.y;
    if (head >= p.heads) return;
    i64 index = i64(r) * p.heads + head;
    Row<HD> row;
    float squares = 0;
    for (int group = 0; group < GROUPS; group++) {
        for (int e = 0; e < W; e++) {
            float v = p.x[AT(index * p.stride + Row<HD>::channel(lane, group, e))];
            row.v[group][e] = v;
            squares = fmaf(v, v, squares);
        }
    }
    if (p.normalize) {
        float inverse = inverse_root_mean(sum_over(wide(squares), 32), float(HD), 1.0f / float(HD), p.eps);
        for (int group = 0; group < GROUPS; group++) {
            for (int e = 0; e < W; e++) {
                float v = mul(row.v[group][e], inverse);
                if (p.weight) v = mul(v, p.weight[AT(Row<HD>::channel(lane, group, e))]);
                row.v[group][e] = v;
            }
        }
    }
    if (p.pairs) {
        const DEVICE float* cos = p.cos + AT(i64(r) * p.pairs);
        const DEVICE float* sin = p.sin + AT(i64(r) * p.pairs);
        if (p.pair_stride == HD / 2) rope(row, lane, cos, sin, p.pairs);
        else rope_leading(row, lane, cos, sin, p.pairs);
    }
    if (p.k_eq_v_pairs) {
        for (int group = 0; group < GROUPS; group++)
            for (int e = 0; e < W; e++)
                s.rows[warp][k_eq_v_place<HD>(Row<HD>::channel(lane, group, e), p.k_eq_v_pairs)] = row.v[group][e];
        warp_barrier();
        for (int group = 0; group < GROUPS; group++)
            for (int e = 0; e < W; e++) row.v[group][e] = s.rows[warp][AT(Row<HD>::channel(lane, group, e))];
    }
    if (p.after)
        for (int group = 0; group < GROUPS; group++)
            for (int e = 0; e < W; e++) row.v[group][e] = mul(row.v[group][e], p.after[AT(Row<HD>::channel(lane, group, e))]);
    if (p.rotates) rotate(row, lane, false);
    if (p.places && warp_ballot(out_of_range(row, lane, p.channels)) && lane == 0) atomic_min(p.fault, u32(p.places[AT(r)].position));
    if (p.y) {
        for (int group = 0; group < GROUPS; group++) {
            for (int e = 0; e < W; e++) {
                int i = Row<HD>::channel(lane, group, e);
                if (i < p.channels) p.y[AT(index * p.channels + i)] = row.v[group][e];
            }
        }
    }
    if (p.words) quantize_query(p, row, lane, index);
    if (p.places) {
        if (p.element == F32) store_row<Single>(p, row, lane, r, head);
        if (p.element == F16) store_row<Half>(p, row, lane, r, head);
        if (p.element == BF16) store_row<Bfloat16>(p, row, lane, r, head);
    }
}

} // namespace

#define ROWS(HD) KERNEL(rows_##HD, Params, 32 * WARPS, 8, Scratch<HD>) { rows<HD>(p.of[self.z], s, self); }

ROWS(32)
ROWS(64)
ROWS(128)
ROWS(256)
ROWS(512)
