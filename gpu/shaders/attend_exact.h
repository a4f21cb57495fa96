// Attention over pages of exact rows, f32, f16 or bf16, eight columns at a time.
//
// A lane has four consecutive channels of a row of K or V, and the lanes of a row are consecutive. Scores: `exact_scores.h`. Values:
// the keys of a page are divided among the groups of lanes, whose sums are added once per split.
// Products are f32, as on the CPU. 8 columns of 4 channels are the most without register spills at 512 threads per multiprocessor;
// further columns read K and V again, from the cache. One block of 16 warps and not two of 8: in decoding there are fewer blocks
// than multiprocessors, and the loops over a page are half as long. Where `attend_f16.cpp` has no tensor cores, it runs this with 8
// warps, as it launches them. Grid: (splits, KV heads, segments by tiles of columns).

#pragma once

#include "exact_scores.h"

namespace {

struct Params {
    Queries queries;
    Pages keys;   // (KV heads, 128, rotary_channels)
    Pages values; // (KV heads, 128, HD)
    int rotary_channels; // channels of the keys; the others are those of the values
};

// Columns whose sums of all groups of lanes fit into shared memory beside scores and weights.
CONSTEXPR int SUMMED = SHARED_BYTES < 49152 ? 2 : 4;

// Rows that the block's threads load at once, which decide the order of summation.
template <int HD, int THREADS>
CONSTEXPR int ROWS_AT_ONCE = THREADS * WIDTH / HD;

// Of them, per thread.
template <int HD, int THREADS>
CONSTEXPR int VALUES = ROWS_AT_ONCE<HD, THREADS> * 8 > PAGE ? PAGE / ROWS_AT_ONCE<HD, THREADS> : 8;

template <int HD, int THREADS>
struct Scratch {
    union {
        alignas(16) float query[COLUMNS][HD]; // read four at a time
        alignas(16) float sum[SUMMED][ROWS_AT_ONCE<HD, THREADS>][HD]; // of some columns, at the end
    };
    float score[COLUMNS][PAGE];
    alignas(16) float weight[PAGE][COLUMNS];
    Column column[COLUMNS];
    Range visible[2][COLUMNS]; // of even and odd pages, so that one barrier per page guards them
    float factor[COLUMNS];
    OnlineSoftmax softmax[COLUMNS]; // not in registers, of which none is free
};

template <class E, int HD, int THREADS>
INLINE void attend(const CONSTANT Params& p, int first_column, THREADGROUP Scratch<HD, THREADS>& s, Thread self) {
    constexpr int ROWS = ROWS_AT_ONCE<HD, THREADS>, OF_THREAD = VALUES<HD, THREADS>;
    const CONSTANT Queries& q = p.queries;
    int tid = self.index, lane = self.lane, warp = self.warp, kv_head = self.y, segment = self.z / q.tiles;
    Range rows = rows_of(q, segment);
    if (rows.start >= rows.end || is_surplus<COLUMNS>(q, rows, self.x, kv_head, first_column, tid)) return;
    if (tid < COLUMNS) s.column[tid] = column_of(q, rows, kv_head, first_column + AT(tid));
    barrier();
    for (int i = tid * WIDTH; i < COLUMNS * HD; i += THREADS * WIDTH) {
        Column column = s.column[i / HD];
        float x[WIDTH] = {};
        if (column.row >= 0) load4<Single>(q.rows + AT(i64(column.index) * HD + i % HD), x);
        for (int e = 0; e < WIDTH; e++) s.query[i / HD][i % HD + e] = x[e];
    }
    // Each of the first warps computes the softmax of one column.
    if (lane == 0 && warp < COLUMNS) s.softmax[AT(warp)] = empty_softmax();
    float output[COLUMNS][WIDTH] = {};
    int channel = tid % (HD / WIDTH) * WIDTH, own_row = tid / (HD / WIDTH);
    int first_page = (first_split(q, rows.start) + self.x) * q.split_pages;
    for (int page = first_page; page < first_page + q.split_pages; page++) {
        THREADGROUP Range* ranges = s.visible[page % 2];
        Range any = see_page<COLUMNS>(q, s.column, page, false, ranges, tid);
        int first = any.start, last = any.end;
        if (first >= last) continue;
        typedef typename E::Bits Bits;
        const DEVICE Slot* tables = q.segments[AT(segment)].tables;
        const DEVICE Bits* values = page_of<const Bits>(tables, p.values, page) + AT(i64(kv_head)) * PAGE * HD;
        const DEVICE Bits* keys = page_of<const Bits>(tables, p.keys, page) + AT(i64(kv_head)) * PAGE * p.rotary_channels;
        // While the scores are computed: values are read after them.
        constexpr int LINE = 128 / int(sizeof(Bits));
        for (int i = first * HD + tid * LINE; i < last * HD; i += THREADS * LINE) prefetch(values + i);
        exact_scores<E, HD>(s.query, s.score, keys, values, p.rotary_channels, first, last, self);
        barrier();
        if (warp < COLUMNS && ranges[warp].start < ranges[warp].end) {
            float score[4];
            bool seen[4];
            float weight[4], factor;
            for (int i = 0; i < 4; i++) {
                int k = lane + 32 * i;
                seen[i] = ranges[warp].start <= k && k < ranges[warp].end;
                score[i] = seen[i] ? s.score[warp][AT(k)] : 0.0f;
            }
            OnlineSoftmax softmax = advance(s.softmax[warp], score, seen, weight, factor);
            warp_barrier(); // before the state that all lanes have read is overwritten
            if (lane == 0) s.softmax[warp] = softmax;
            for (int i = 0; i < 4; i++) s.weight[AT(lane + 32 * i)][warp] = weight[i];
            if (lane == 0) s.factor[warp] = factor;
        } else if (warp < COLUMNS) {
            for (int i = 0; i < 4; i++) s.weight[lane + 32 * i][warp] = 0;
            if (lane == 0) s.factor[warp] = 1;
        }
        barrier();
        for (int n = 0; n < COLUMNS; n++)
            for (int e = 0; e < WIDTH; e++) output[n][e] *= s.factor[n];
#pragma unroll 1
        for (int start = 0; start < PAGE; start += OF_THREAD * ROWS) {
            if (start >= last || start + OF_THREAD * ROWS <= first) continue;
#pragma unroll
            for (int i = 0; i < OF_THREAD; i++) {
                int k = start + i * ROWS + own_row;
                float v[WIDTH] = {}, w[COLUMNS / 4][4];
                if (first <= k && k < last) load4<E>(values + AT(k * HD + channel), v);
                for (int n = 0; n < COLUMNS; n += 4) load4_shared(&s.weight[k][n], w[n / 4]);
                for (int n = 0; n < COLUMNS; n++)
                    for (int e = 0; e < WIDTH; e++) output[n][e] = fmaf(w[n / 4][n % 4], v[e], output[n][e]);
            }
        }
    }
    i64 split = i64(self.x) * q.count * q.heads;
    if (lane == 0 && warp < COLUMNS && s.column[warp].row >= 0) q.softmax[AT(split + s.column[warp].index)] = s.softmax[warp];
    for (int n = 0; n < COLUMNS; n += SUMMED) {
        barrier();
        for (int i = 0; i < SUMMED; i++)
            for (int e = 0; e < WIDTH; e++) s.sum[i][own_row][AT(channel + e)] = output[n + i][e];
        barrier();
#pragma unroll 1
        for (int i = tid; i < SUMMED * HD; i += THREADS) {
            Column column = s.column[n + i / HD];
            if (column.row < 0) break;
            if (s.softmax[n + i / HD].sum == 0) continue;
            float sum = 0;
            for (int row = 0; row < ROWS; row++) sum += s.sum[i / HD][row][AT(i % HD)];
            q.output[AT((split + column.index) * HD + i % HD)] = sum;
        }
    }
}

} // namespace
