// Rows of activations in signed bytes, as the matrix products read them.
//
// * quants: (tiles of 8 rows, groups of 32 inputs, 8 rows, 4 words t, 2 halves h) words of four bytes: word t + 4 h of the
//   group. That is the order of an mma's right operand: the 32 lanes of a warp read 256 consecutive bytes.
// * scales: (rows, blocks of 32 or 256 inputs) f32.
// * sums: (rows, groups of 32 inputs) i16: of blocks of 256 only.
#pragma once

#include "device.h"

struct Activations {
    DEVICE u32* quants;
    DEVICE float* scales;
    DEVICE u16* sums;
    int inputs;
};

// The first word of a row's group.
INLINE long quant_at(int row, int group, int groups) {
    return (long(row / 8) * groups + group) * 64 + row % 8 * 8;
}
