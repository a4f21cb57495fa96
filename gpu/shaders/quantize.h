// Activations to 8 bits, with the bits of quant/activations.rs: a warp has 256 consecutive inputs of a row, eight per lane.
#pragma once

#include "activations.h"

// The nearest integer to `inverse * x`, ties to even, within -127..127.
INLINE int quant(float x, float inverse) {
    return int(fminf(fmaxf(rintf(mul(inverse, x)), -127.0f), 127.0f));
}

INLINE u32 largest_of(const THREAD float (&v)[8]) {
    u32 largest = 0;
    for (int i = 0; i < 8; i++) largest = max(largest, bits_of(v[i]) & 0x7fffffffu);
    return largest;
}

// Writes a lane's two words and returns the sum of its quants. `first` is the lane's first input in the row.
INLINE int store_quants(const CONSTANT Activations& out, int row, int first, const THREAD float (&v)[8], float inverse) {
    u32 words[2] = {0, 0};
    int sum = 0;
    for (int i = 0; i < 8; i++) {
        int q = quant(v[i], inverse);
        sum += q;
        words[i / 4] |= u32(q & 255) << (8 * (i % 4));
    }
    // Word t + 4 h of the group is stored at 2 t + h.
    int word = first % 32 / 4;
    i64 at = quant_at(row, first / 32, out.inputs / 32);
    out.quants[AT(at + word % 4 * 2 + word / 4)] = words[0];
    out.quants[AT(at + (word + 1) % 4 * 2 + word / 4)] = words[1];
    return sum;
}

// A block of 256: the scale is -max / 127 with the sign of the first of the largest magnitude.
INLINE void quantize_q8_k(const CONSTANT Activations& out, int row, int block, int lane, const THREAD float (&v)[8]) {
    u32 largest = warp_max(largest_of(v));
    // The first lane that has it: lanes are in order of the inputs.
    bool negative = false, found = false;
    for (int i = 7; i >= 0; i--) {
        if ((bits_of(v[i]) & 0x7fffffffu) == largest) {
            negative = bits_of(v[i]) >> 31;
            found = true;
        }
    }
    u32 finders = warp_ballot(found), negatives = warp_ballot(negative);
    u32 winner = finders & (0u - finders);
    float extreme = float_of(largest | (negatives & winner ? 0x80000000u : 0));
    float inverse = largest ? -127.0f / extreme : 0.0f;
    int first = block * 256 + lane * 8;
    int sum = store_quants(out, row, first, v, inverse);
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    if (lane % 4 == 0) out.sums[AT(i64(row) * (out.inputs / 32) + first / 32)] = u16(sum);
    if (lane == 0) out.scales[AT(i64(row) * (out.inputs / 256) + block)] = largest ? 1.0f / inverse : 0.0f;
}

// Eight blocks of 32: the scale is max / 127, rounded to f16, and the f16 product of the scale and the sum of the quants. Lanes
// beyond the row are not `inside`.
INLINE void quantize_q8_1(const CONSTANT Activations& out, int row, int first, bool inside, int lane,
                          const THREAD float (&v)[8]) {
    u32 largest = largest_of(v);
    largest = max(largest, shuffle_xor(largest, 1));
    largest = max(largest, shuffle_xor(largest, 2));
    float scale = float_of(largest) / 127.0f;
    int sum = 0;
    if (inside) sum = store_quants(out, row, first, v, scale != 0 ? 1.0f / scale : 0.0f);
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    if (!inside || lane % 4 != 0) return;
    i64 at = i64(row) * (out.inputs / 32) + first / 32;
    out.scales[AT(at)] = half_to_float(float_to_half(scale));
    out.sums[AT(at)] = float_to_half(mul(float(sum), scale));
}

// Quantizes 256 consecutive inputs of a row, from `first` of this lane on, in blocks of `block`: 32 or 256; 0: not at all.
INLINE void quantize(const CONSTANT Activations& out, int block, int row, int first, int lane, const THREAD float (&v)[8]) {
    if (block == 256 && first - lane * 8 < out.inputs) quantize_q8_k(out, row, first / 256, lane, v);
    if (block == 32) quantize_q8_1(out, row, first, first < out.inputs, lane, v);
}

// Eight consecutive elements from `at` on, zero beyond `width`, which is a multiple of 4, as is the address in elements.
INLINE void load8(const DEVICE float* x, int at, int width, THREAD float (&v)[8]) {
    for (int part = 0; part < 8; part += 4) {
        float4 four = {0, 0, 0, 0};
        if (at + part < width) four = *reinterpret_cast<const DEVICE float4*>(x + AT(at + part));
        v[part] = four.x, v[part + 1] = four.y, v[part + 2] = four.z, v[part + 3] = four.w;
    }
}

// The converse, up to `width`.
INLINE void store8(DEVICE float* y, int at, int width, const THREAD float (&v)[8]) {
    for (int part = 0; part < 8; part += 4) {
        float4 four = {v[part], v[part + 1], v[part + 2], v[part + 3]};
        if (at + part < width) *reinterpret_cast<DEVICE float4*>(y + AT(at + part)) = four;
    }
}
