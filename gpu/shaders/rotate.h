// Rows of a head in a warp's registers, and their rotation, with the bits of turboquant/rotation.rs.
//
// A row of HD channels is groups of 128 (one of HD if that is less). Lane l has W consecutive channels of every group, from
// channel W l of the group on: loads of a warp are consecutive; the transform's first stages are in registers, the others
// shuffles.
#pragma once

#include "device.h"

template <int HD>
struct Row {
    static CONSTEXPR int GROUPS = HD < 128 ? 1 : HD / 128;
    static CONSTEXPR int LEN = HD / GROUPS, W = LEN / 32;
    float v[GROUPS][W];

    // The channel of element e.
    static INLINE int channel(int lane, int group, int e) { return group * LEN + lane * W + e; }
};

// Signs before and after the transform: element i of a group is negated where bit i is set.
INLINE u32 signs(bool after, int word) {
    if (after) return word == 0 ? 0x16acee90u : word == 1 ? 0x3f628fdcu : word == 2 ? 0xb7a5357au : 0xbea56562u;
    return word == 0 ? 0xe46a0359u : word == 1 ? 0x42f85949u : word == 2 ? 0xa4c63bbbu : 0x49f250a9u;
}

// y = D(second) H D(first) x / sqrt(LEN) per group; `back` swaps the signs, which undoes it.
template <int HD>
INLINE void rotate(THREAD Row<HD>& row, int lane, bool back) {
    constexpr int W = Row<HD>::W, LEN = Row<HD>::LEN;
    // A lane's signs are in one word.
    int bit = lane * W % 32;
    u32 first = signs(back, lane * W / 32) >> bit, second = signs(!back, lane * W / 32) >> bit;
    const float norm = 1.0f / sqrtf(float(LEN));
    for (int group = 0; group < Row<HD>::GROUPS; group++) {
        THREAD float (&v)[W] = row.v[group];
        for (int e = 0; e < W; e++)
            if (first >> e & 1) v[e] = -v[e];
        for (int reach = 1; reach < W; reach *= 2) {
            for (int e = 0; e < W; e++) {
                if (e & reach) continue;
                float a = v[e], b = v[e + reach];
                v[e] = add(a, b);
                v[e + reach] = sub(a, b);
            }
        }
        for (int mask = 1; mask < 32; mask *= 2) {
            for (int e = 0; e < W; e++) {
                float other = shuffle_xor(v[e], mask);
                v[e] = lane & mask ? sub(other, v[e]) : add(v[e], other);
            }
        }
        for (int e = 0; e < W; e++) v[e] = mul(v[e], second >> e & 1 ? -norm : norm);
    }
}

// The index of a model's channel in the order of an attention_k_eq_v store: the rotary channels, those i with
// i % (HD / 2) < pairs, come first.
template <int HD>
INLINE int k_eq_v_place(int channel, int pairs) {
    int side = channel / (HD / 2), i = channel % (HD / 2);
    return i < pairs ? side * pairs + i : 2 * pairs + side * (HD / 2 - pairs) + i - pairs;
}

// The model's channel at index `place` of that order.
INLINE int k_eq_v_channel(int place, int pairs, int head_dim) {
    int side = head_dim / 2;
    if (place < 2 * pairs) return place / pairs * side + place % pairs;
    place -= 2 * pairs;
    return place / (side - pairs) * side + pairs + place % (side - pairs);
}
