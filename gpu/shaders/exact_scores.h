// Scores of exact keys for eight columns.
//
// A lane has four consecutive channels of a key, and the lanes of a key are consecutive. Four keys per lane at a time, so that an
// element of a query in shared memory, loaded once, serves four; 32 partial sums (four keys, eight columns) become 32 sums in 31
// shuffles.
#pragma once

#include "attend.h"

CONSTEXPR int COLUMNS = 8, KEYS = 4, WIDTH = 4;

// Sums of 32 values over LANES lanes: lane l gets those of values l * 32 / LANES onwards, first in `v`.
template <int LANES>
INLINE void scatter_sums(THREAD float (&v)[32], int lane) {
    add_halves<32>(v, lane, LANES / 2);
    add_halves<16>(v, lane, LANES / 4);
    add_halves<8>(v, lane, LANES / 8);
    if (LANES >= 16) add_halves<4>(v, lane, LANES / 16);
    if (LANES >= 32) add_halves<2>(v, lane, LANES / 32);
}

// The scores of the keys first..last of a page: their channels from `rotary_channels` on are those of the values. Called by all
// threads.
template <class E, int HD, int STRIDE>
INLINE void exact_scores(const THREADGROUP float (&query)[COLUMNS][HD], THREADGROUP float (&score)[COLUMNS][STRIDE],
                         const DEVICE typename E::Bits* keys, const DEVICE typename E::Bits* values, int rotary_channels,
                         int first, int last, Thread self) {
    constexpr int LANES = HD < 256 ? HD / WIDTH : 32, ROWS = 32 / LANES, STEP = KEYS * ROWS;
    int lane = self.lane % LANES;
#pragma unroll 1
    for (int start = self.warp * STEP; start < PAGE; start += self.warps * STEP) {
        if (start >= last || start + STEP <= first) continue;
        float sum[KEYS * COLUMNS] = {};
        for (int channel = lane * WIDTH; channel < HD; channel += LANES * WIDTH) {
            float k[KEYS][WIDTH] = {};
            for (int i = 0; i < KEYS; i++) {
                int key = start + self.lane / LANES * KEYS + i;
                const DEVICE typename E::Bits* row = values + key * HD;
                if (channel < rotary_channels) row = keys + key * rotary_channels;
                // Rows outside the range may not have been written.
                if (first <= key && key < last) load4<E>(row + AT(channel), k[i]);
            }
            for (int n = 0; n < COLUMNS; n++) {
                float q[WIDTH];
                load4_shared(&query[n][AT(channel)], q);
                for (int i = 0; i < KEYS; i++)
                    for (int e = 0; e < WIDTH; e++) sum[i * COLUMNS + n] = fmaf(q[e], k[i][e], sum[i * COLUMNS + n]);
            }
        }
        scatter_sums<LANES>(sum, lane);
        for (int i = 0; i < ROWS; i++) {
            int at = lane * ROWS + i;
            score[at % COLUMNS][AT(start + self.lane / LANES * KEYS + at / COLUMNS)] = sum[i];
        }
    }
}
