// Activations to 8 bits, with the bits of quant/activations.rs.
//
// A warp quantizes 256 inputs of one row, eight consecutive ones per lane, so that loads are 16 bytes wide and everything
// else stays in registers. Grid: (blocks of 256 inputs, by 4 warps; rows).

#include "activations.h"

namespace {

struct Params {
    const DEVICE float* x; // (rows, inputs)
    Activations out;
};

CONSTEXPR int WARPS = 4;

// The nearest integer to `inverse * x`, ties to even, within -127..127.
INLINE int quant(float x, float inverse) {
    return int(fminf(fmaxf(rintf(mul(inverse, x)), -127.0f), 127.0f));
}

INLINE void load(const DEVICE float* x, THREAD float (&v)[8], bool inside) {
    for (int side = 0; side < 2; side++) {
        float4 four = {0, 0, 0, 0};
        if (inside) four = reinterpret_cast<const DEVICE float4*>(x)[side];
        v[4 * side] = four.x, v[4 * side + 1] = four.y, v[4 * side + 2] = four.z, v[4 * side + 3] = four.w;
    }
}

INLINE u32 largest_of(const THREAD float (&v)[8]) {
    u32 largest = 0;
    for (int i = 0; i < 8; i++) largest = max(largest, bits_of(v[i]) & 0x7fffffffu);
    return largest;
}

// Writes a lane's two words and returns the sum of its quants. `first` is the lane's first input in the row.
INLINE int store(const CONSTANT Activations& out, int row, int first, const THREAD float (&v)[8], float inverse) {
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

} // namespace

// Blocks of 256: the scale is -max / 127 with the sign of the first of the largest magnitude.
KERNEL(quantize_q8_k, Params, 32 * WARPS, 8, None) {
    int lane = self.lane, row = self.y;
    int block = self.x * WARPS + self.warp, blocks = p.out.inputs / 256;
    if (block >= blocks) return;
    int first = block * 256 + lane * 8;
    float v[8];
    load(p.x + AT(i64(row) * p.out.inputs + first), v, true);
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
    int sum = store(p.out, row, first, v, inverse);
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    if (lane % 4 == 0) p.out.sums[AT(i64(row) * (p.out.inputs / 32) + first / 32)] = u16(sum);
    if (lane == 0) p.out.scales[AT(i64(row) * blocks + block)] = largest ? 1.0f / inverse : 0.0f;
}

// Blocks of 32: the scale is max / 127, rounded to f16, and the f16 product of the scale and the sum of the quants.
KERNEL(quantize_q8_1, Params, 32 * WARPS, 8, None) {
    int lane = self.lane, row = self.y;
    int first = (self.x * WARPS + self.warp) * 256 + lane * 8;
    bool inside = first < p.out.inputs;
    float v[8];
    load(p.x + AT(i64(row) * p.out.inputs + first), v, inside);
    u32 largest = largest_of(v);
    largest = max(largest, shuffle_xor(largest, 1));
    largest = max(largest, shuffle_xor(largest, 2));
    float scale = float_of(largest) / 127.0f;
    int sum = 0;
    if (inside) sum = store(p.out, row, first, v, scale != 0 ? 1.0f / scale : 0.0f);
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    if (!inside || lane % 4 != 0) return;
    i64 at = i64(row) * (p.out.inputs / 32) + first / 32;
    p.out.scales[AT(at)] = half_to_float(float_to_half(scale));
    p.out.sums[AT(at)] = float_to_half(mul(float(sum), scale));
}
