// Activations in 8 bits, in the order of an mma's B fragments (device.h).
//
// quants, words of four i8, for every tile of 8 rows and every group of 32 inputs (x n is input n of the group):
//
//   byte        0         4         8         12        16        20        24        28
//   row 0     | x 0..4  | x16..20 | x 4..8  | x20..24 | x 8..12 | x24..28 | x12..16 | x28..32 |
//             | t = 0: b.x, b.y   | t = 1             | t = 2             | t = 3             |
//   row 1     32 bytes further, .. row 7
//
//   Lane 4 g + t reads the 8 bytes of row g at 8 t, so a warp reads 256 consecutive bytes.
//
// scales: (rows, blocks of 32 or 256 inputs) f32. sums: (rows, groups of 32 inputs), i16 sums of the quants of blocks of
// 256, f16 products of scale and sum of blocks of 32.
#pragma once

#include "device.h"

struct Activations {
    DEVICE u32* quants;
    DEVICE float* scales;
    DEVICE u16* sums;
    int inputs;
};

// The first word of a row's group.
INLINE i64 quant_at(int row, int group, int groups) {
    return (i64(row / 8) * groups + group) * 64 + row % 8 * 8;
}
