// Parameters of the products of floating-point weights and f32.
#pragma once

#include "products.h"

namespace {

struct Params {
    Product products[MAX_PRODUCTS]; // their blocks are `block_outputs` outputs
    const DEVICE float* x; // (rows, inputs)
    int rows, inputs, count; // `count` products
    int row_bytes, block_outputs;
};

// The first cache lines of the block's weight rows, one per thread.
INLINE void before_inputs(const CONSTANT Params& p, Thread self) {
    BlockOf block = block_of(p.products, p.count, self.y);
    const CONSTANT Product& product = p.products[block.product];
    int lines = 256 / p.block_outputs;
    int output = block.index * p.block_outputs + self.index / lines, at = self.index % lines * 128;
    if (output < product.outputs && at < p.row_bytes) prefetch(product.weights + i64(output) * p.row_bytes + at);
}

// Entries by matrix: bucket b is entries starts[b]..starts[b + 1] of the list, 16 at most.
struct BucketParams {
    const DEVICE u8* weights; // (matrices, outputs, inputs)
    const DEVICE float* x;      // (rows, inputs)
    DEVICE float* y;            // (entries, outputs)
    const DEVICE int* matrices; // (buckets): the matrix of a bucket
    const DEVICE int* starts;   // (buckets + 1)
    const DEVICE int* count;    // (1): buckets in use
    const DEVICE int* rows;     // (entries): the row of x; null if it is the entry itself
    int inputs, outputs;
};

struct Same {
    INLINE int operator()(int entry) const { return entry; }
};
struct Listed {
    const DEVICE int* rows;
    INLINE int operator()(int entry) const { return rows ? rows[AT(entry)] : entry; }
};

} // namespace
