// Attention over pages of K and V, split along the sequence: what the kernels of exact and of coded pages share.
//
// A block has one split of `split_pages` pages, one KV head, and a tile of columns. A column is a query: row r and member m
// of the head's group, at r * group + m. It leaves a softmax that is not finished, and `combine.cpp` merges the splits. Splits
// lie fixed in the sequence, so a row's bits do not depend on its neighbours, nor on how long the sequence is.
//
// Which pages a query reads exactly and which as codes is a function of its own position (src/kv/store.rs).
#pragma once

#include "pages.h"

// max and sum of e^(score - max) over the keys that were seen.
struct alignas(16) Running {
    Wide max, sum;
};

INLINE Running nothing_seen() { return {wide(-INFINITY), wide(0.0f)}; }

struct Queries {
    const DEVICE float* rows; // (rows, heads, HD), in the domain of the store
    const DEVICE int2* at;    // (rows): position, and the first position that must not be seen; neither falls from row to row
    DEVICE Running* running;  // (splits, rows * heads)
    DEVICE float* output;     // (splits, rows * heads, HD), unfinished; of no meaning where the sum is 0
    int count, heads, kv_heads;
    int window;      // positions that a query sees, its own among them; 0: all
    int exact_head;  // positions at the beginning that are read exactly, where there are codes
    int exact_tail;  // positions before a query that are; -1: no codes
    int split_pages;
};

struct Range {
    int start, end;
};

INLINE int first_seen(const CONSTANT Queries& q, int row) {
    int position = q.at[AT(row)].x;
    return q.window ? max(0, position + 1 - q.window) : 0;
}

// The first split of this call.
INLINE int first_split(const CONSTANT Queries& q) { return first_seen(q, 0) / (PAGE * q.split_pages); }

// The keys of a page that a row reads exactly, or as codes.
INLINE Range visible(const CONSTANT Queries& q, int row, int page, bool coded) {
    int2 at = q.at[AT(row)];
    int start = min(max(first_seen(q, row) - page * PAGE, 0), PAGE);
    int end = max(min(max(at.y - page * PAGE, 0), PAGE), start);
    int codes_from = 0;
    if (q.exact_tail < 0 || page >= max(at.x - q.exact_tail, 0) / PAGE) codes_from = PAGE;
    else if (page == 0) codes_from = q.exact_head;
    Range exact = {min(start, codes_from), min(end, codes_from)};
    Range codes = {max(start, codes_from), max(end, codes_from)};
    return coded ? codes : exact;
}

// A column of the tile that begins at `first`: its row, and its place among rows * heads. -1: there is none.
struct Column {
    int row, index;
};
INLINE Column column_of(const CONSTANT Queries& q, int kv_head, int entry) {
    int group = q.heads / q.kv_heads, row = entry / group;
    if (row >= q.count) return {-1, -1};
    return {row, row * q.heads + kv_head * group + entry % group};
}

// e^x with the CPU kernels' bits.
INLINE float exponential(float x) {
    x = fminf(fmaxf(x, -87.33654f), 88.37626f);
    float n = rintf(mul(x, 1.44269504f));
    float r = fmaf(n, 2.1219444e-4f, fmaf(n, -0.6933594f, x));
    float p = 1.9875691e-4f;
    p = fmaf(p, r, 1.3981999e-3f);
    p = fmaf(p, r, 8.333452e-3f);
    p = fmaf(p, r, 4.1665796e-2f);
    p = fmaf(p, r, 1.6666665e-1f);
    p = fmaf(p, r, 0.5f);
    return mul(fmaf(mul(p, r), r, add(r, 1.0f)), float_of(u32(int(n) + 127) << 23));
}

// What a column's softmax becomes with the scores of a page; `factor` is what its output so far is multiplied with.
// A lane has four scores, of which `seen` says which count.
INLINE Running advance(Running before, const THREAD Wide (&score)[4], const THREAD bool (&seen)[4],
                       THREAD float (&weight)[4], THREAD float& factor) {
    Running after = before;
    for (int i = 0; i < 4; i++)
        if (seen[i] && score[i] > after.max) after.max = score[i];
    after.max = warp_max(after.max);
    Wide sum = wide(0.0f);
    for (int i = 0; i < 4; i++) {
        weight[i] = seen[i] ? exponential(narrow(score[i] - after.max)) : 0.0f;
        sum = sum + wide(weight[i]);
    }
    sum = warp_sum(sum);
    factor = before.sum > wide(0.0f) ? expf(narrow(before.max - after.max)) : 0.0f;
    after.sum = before.sum * wide(factor) + sum;
    return after;
}
