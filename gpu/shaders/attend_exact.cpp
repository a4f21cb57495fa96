// Attention over pages of exact rows, f32, f16 or bf16, head dimensions 64 to 512, eight queries at a time.
//
// Scores: a thread computes half the channels of one key, so that two threads share a sum; the queries are in shared
// memory, where a warp reads one word for all lanes. Keys are read 8 or 16 bytes at a time from 32 rows at once:
// consecutive loads use whole sectors. Values: a thread computes one or two channels, and a warp's loads are consecutive.
// Products are f32, as on the CPU; sums run over 32 channels, then over those sums. 8 columns are the most without
// register spills at two blocks per multiprocessor; further columns read K and V again, from the cache. Grid: (splits, KV
// heads, tiles of 8 columns).

#include "attend.h"

namespace {

struct Params {
    Queries queries;
    Pages keys;   // (KV heads, 128, rotary_channels)
    Pages values; // (KV heads, 128, HD)
    int rotary_channels; // channels of the keys; the others are those of the values
};

CONSTEXPR int THREADS = 256, COLUMNS = 8;

template <int HD>
struct Scratch {
    alignas(16) float query[COLUMNS][HD]; // read four at a time
    float score[2][COLUMNS][PAGE];
    alignas(16) float weight[PAGE][COLUMNS];
    Range visible[2][COLUMNS]; // of even and odd pages, so that one barrier per page guards them
    float factor[COLUMNS];
};

template <class E, int HD>
INLINE void scores(THREADGROUP Scratch<HD>& s, const DEVICE typename E::Bits* key, const DEVICE typename E::Bits* value,
                   int rotary_channels, int side, int at) {
    float sum[COLUMNS] = {};
    for (int first = side * (HD / 2); first < (side + 1) * (HD / 2); first += 32) {
        // From the key or from the value; both have multiples of 32 channels.
        const DEVICE typename E::Bits* row = first < rotary_channels ? key : value;
        float partial[COLUMNS] = {};
        for (int c = first; c < first + 32; c += 4) {
            float k[4];
            load4<E>(row + AT(c), k);
            for (int n = 0; n < COLUMNS; n++) {
                float q[4];
                load4_shared(&s.query[n][c], q);
                for (int e = 0; e < 4; e++) partial[n] = fmaf(q[e], k[e], partial[n]);
            }
        }
        for (int n = 0; n < COLUMNS; n++) sum[n] += partial[n];
    }
    for (int n = 0; n < COLUMNS; n++) s.score[side][n][AT(at)] = sum[n];
}

template <class E, int HD>
INLINE void attend(const CONSTANT Params& p, THREADGROUP Scratch<HD>& s, Thread self) {
    constexpr int CHANNELS = HD > THREADS ? HD / THREADS : 1;
    const CONSTANT Queries& q = p.queries;
    int tid = self.index, lane = self.lane, warp = self.warp, kv_head = self.y, first_column = self.z * COLUMNS;
    for (int i = tid; i < COLUMNS * HD; i += THREADS) {
        Column column = column_of(q, kv_head, first_column + i / HD);
        s.query[i / HD][i % HD] = column.row < 0 ? 0.0f : q.rows[AT(i64(column.index) * HD + i % HD)];
    }
    // A warp computes the softmax of one column.
    Column warp_column = column_of(q, kv_head, first_column + warp);
    OnlineSoftmax softmax = empty_softmax();
    float output[COLUMNS][CHANNELS] = {};
    int channel = tid * CHANNELS;
    int first_page = (first_split(q) + self.x) * q.split_pages;
    for (int page = first_page; page < first_page + q.split_pages; page++) {
        THREADGROUP Range* ranges = s.visible[page % 2];
        if (tid < COLUMNS) {
            Column column = column_of(q, kv_head, first_column + tid);
            Range range = {0, 0};
            if (column.row >= 0) range = visible(q, column.row, page, false);
            ranges[tid] = range;
        }
        barrier();
        int first = PAGE, last = 0;
        for (int n = 0; n < COLUMNS; n++) {
            if (ranges[n].start >= ranges[n].end) continue;
            first = min(first, ranges[n].start);
            last = max(last, ranges[n].end);
        }
        if (first >= last) continue;
        typedef typename E::Bits Bits;
        const DEVICE Bits* values = page_of<const Bits>(p.values, page) + AT(i64(kv_head)) * PAGE * HD;
        const DEVICE Bits* keys = page_of<const Bits>(p.keys, page) + AT(i64(kv_head)) * PAGE * p.rotary_channels;
        int key = tid % PAGE;
        if (first <= key && key < last)
            scores<E, HD>(s, keys + i64(key) * p.rotary_channels, values + i64(key) * HD, p.rotary_channels, tid / PAGE, key);
        barrier();
        if (ranges[warp].start < ranges[warp].end) {
            Wide score[4];
            bool seen[4];
            float weight[4], factor;
            for (int i = 0; i < 4; i++) {
                int k = lane + 32 * i;
                seen[i] = ranges[warp].start <= k && k < ranges[warp].end;
                score[i] = seen[i] ? wide(s.score[0][warp][AT(k)]) + wide(s.score[1][warp][k]) : wide(0.0f);
            }
            softmax = advance(softmax, score, seen, weight, factor);
            for (int i = 0; i < 4; i++) s.weight[AT(lane + 32 * i)][warp] = weight[i];
            if (lane == 0) s.factor[warp] = factor;
        } else {
            for (int i = 0; i < 4; i++) s.weight[lane + 32 * i][warp] = 0;
            if (lane == 0) s.factor[warp] = 1;
        }
        barrier();
        if (channel < HD) {
            for (int n = 0; n < COLUMNS; n++)
                for (int c = 0; c < CHANNELS; c++) output[n][c] *= s.factor[n];
            // Values outside the range may not have been written.
#pragma unroll 4
            for (int k = first; k < last; k++) {
                float v[CHANNELS], w[COLUMNS / 4][4];
                for (int c = 0; c < CHANNELS; c++) v[c] = E::widen(values[AT(i64(k) * HD + channel + c)]);
                for (int n = 0; n < COLUMNS; n += 4) load4_shared(&s.weight[k][n], w[n / 4]);
                for (int n = 0; n < COLUMNS; n++)
                    for (int c = 0; c < CHANNELS; c++) output[n][c] = fmaf(w[n / 4][n % 4], v[c], output[n][c]);
            }
        }
    }
    i64 split = i64(self.x) * q.count * q.heads;
    if (lane == 0 && warp_column.row >= 0) q.softmax[AT(split + warp_column.index)] = softmax;
    if (channel >= HD) return;
    for (int n = 0; n < COLUMNS; n++) {
        Column column = column_of(q, kv_head, first_column + n);
        if (column.row < 0) break;
        for (int c = 0; c < CHANNELS; c++) q.output[AT((split + column.index) * HD + channel + c)] = output[n][c];
    }
}

} // namespace

#define ATTEND(name, E, HD) KERNEL(attend_##name##_##HD, Params, THREADS, 2, Scratch<HD>) { attend<E, HD>(p, s, self); }
#define ATTEND_ALL(name, E) ATTEND(name, E, 64) ATTEND(name, E, 128) ATTEND(name, E, 256) ATTEND(name, E, 512)

ATTEND_ALL(f32, Single)
ATTEND_ALL(f16, Half)
ATTEND_ALL(bf16, Bfloat16)
