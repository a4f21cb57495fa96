// Attention over pages of K and V, split along the sequence: shared by the kernels over exact and quantized pages.
//
// A block processes one split of `split_pages` pages, one KV head, and a tile of columns of one segment. A column is a
// query: row r of the segment and head m of the KV head's group are column r * group + m. The result is a partial softmax;
// `combine.cpp` merges the splits. Split boundaries are fixed positions of a sequence, so a row's bits depend neither on other
// rows nor on the sequence length.
//
// Whether a query reads a page exactly or quantized is a function of its own position.
#pragma once

#include "exponential.h"
#include "pages.h"

// Maximum score, and sum of e^(score - max), over the keys seen so far.
struct alignas(8) OnlineSoftmax {
    float max, sum;
};

INLINE OnlineSoftmax empty_softmax() { return {-INFINITY, 0.0f}; }

struct Queries {
    const DEVICE float* rows; // (rows, heads, HD), in the domain of the store
    const DEVICE Place* places; // of all rows of the pass; in a segment, positions and ends are non-decreasing
    const DEVICE Segment* segments;
    DEVICE OnlineSoftmax* softmax; // (splits, rows * heads)
    DEVICE float* output;     // (splits, rows * heads, HD): weighted sums, not normalised; undefined where the sum is 0
    int first, count;         // rows of the pass that this call attends
    int heads, kv_heads;
    int window;      // positions that a query sees, its own included; 0: all
    int exact_head;  // first positions that are read exactly, if there are quantized pages
    int exact_tail;  // positions before a query that are read exactly; -1: no quantized pages
    int split_pages;
    int tiles; // of a segment, at most
};

struct Range {
    int start, end;
};

INLINE int first_seen(const CONSTANT Queries& q, int row) {
    int position = q.places[AT(row)].position;
    return q.window ? max(0, position + 1 - q.window) : 0;
}

// The rows of a segment that this call attends.
INLINE Range rows_of(const CONSTANT Queries& q, int segment) {
    const DEVICE Segment& s = q.segments[AT(segment)];
    return {max(s.first, q.first), min(s.first + s.rows, q.first + q.count)};
}

// The first split of a segment whose first row is `row`.
INLINE int first_split(const CONSTANT Queries& q, int row) { return first_seen(q, row) / (PAGE * q.split_pages); }

// The keys of a page that a row sees in the exact or in the quantized store.
INLINE Range visible(const CONSTANT Queries& q, int row, int page, bool quantized) {
    int position = q.places[AT(row)].position;
    int start = min(max(first_seen(q, row) - page * PAGE, 0), PAGE);
    int end = max(min(max(q.places[AT(row)].end - page * PAGE, 0), PAGE), start);
    int quantized_from = 0;
    if (q.exact_tail < 0 || page >= max(position - q.exact_tail, 0) / PAGE) quantized_from = PAGE;
    else if (page == 0) quantized_from = q.exact_head;
    Range exact = {min(start, quantized_from), min(end, quantized_from)};
    Range rest = {max(start, quantized_from), max(end, quantized_from)};
    return quantized ? rest : exact;
}

// A column of a segment's `rows`: its row, and its index in rows * heads; -1 beyond the last.
struct Column {
    int row, index;
};
INLINE Column column_of(const CONSTANT Queries& q, Range rows, int kv_head, int entry) {
    int group = q.heads / q.kv_heads, row = rows.start + entry / group;
    if (row >= rows.end) return {-1, -1};
    return {row, (row - q.first) * q.heads + kv_head * group + entry % group};
}

// Whether a split is behind all keys that the segment's `rows` see, as some of a recorded pass are. Then the tile's columns, from
// `first_column` on, have no weights in it. Called by all threads.
template <int COLUMNS>
INLINE bool is_surplus(const CONSTANT Queries& q, Range rows, int split, int kv_head, int first_column, int tid) {
    if ((first_split(q, rows.start) + split) * q.split_pages * PAGE < q.places[AT(rows.end - 1)].end) return false;
    int index = tid < COLUMNS ? column_of(q, rows, kv_head, first_column + tid).index : -1;
    if (index >= 0) q.softmax[AT(i64(split) * q.count * q.heads + index)] = empty_softmax();
    return true;
}

// The keys of a page that any of a tile's columns sees; `seen` gets those of each. Ends with a barrier of the block.
template <int COLUMNS>
INLINE Range see_page(const CONSTANT Queries& q, const THREADGROUP Column* columns, int page, bool quantized,
                      THREADGROUP Range* seen, int tid) {
    if (tid < COLUMNS) {
        Range range = {0, 0};
        if (columns[tid].row >= 0) range = visible(q, columns[tid].row, page, quantized);
        seen[tid] = range;
    }
    barrier();
    Range any = {PAGE, 0};
    for (int n = 0; n < COLUMNS; n++) {
        if (seen[n].start >= seen[n].end) continue;
        any.start = min(any.start, seen[n].start);
        any.end = max(any.end, seen[n].end);
    }
    return any;
}

// Weights below e^MIN_EXPONENT are zero, as on the CPU.
CONSTEXPR float MIN_EXPONENT = -64.0f;

// One online-softmax step of a column over a page: four scores per lane, of which `seen` are visible. Returns the new
// state and the keys' weights; `factor` rescales the output so far.
INLINE OnlineSoftmax advance(OnlineSoftmax before, const THREAD float (&score)[4], const THREAD bool (&seen)[4],
                       THREAD float (&weight)[4], THREAD float& factor) {
    OnlineSoftmax after = before;
    for (int i = 0; i < 4; i++)
        if (seen[i] && score[i] > after.max) after.max = score[i];
    after.max = warp_max(after.max);
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        float difference = score[i] - after.max;
        weight[i] = seen[i] && !(MIN_EXPONENT > difference) ? exponential(difference) : 0.0f;
        sum += weight[i];
    }
    float difference = before.max - after.max;
    factor = before.sum > 0 && !(MIN_EXPONENT > difference) ? exponential(difference) : 0.0f;
    after.sum = fmaf(before.sum, factor, warp_sum(sum));
    return after;
}
