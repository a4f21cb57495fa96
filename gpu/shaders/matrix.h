// Parameters of the kernels that multiply by quantized matrices.
#pragma once

#include "activations.h"
#include "products.h"

namespace {

// Packed panels of 16 rows, of one or several matrices.
struct Shape {
    int inputs;
    int warp_blocks; // weight blocks per warp
    int panel_bytes;
};

struct Params {
    Product products[MAX_PRODUCTS]; // their blocks are panels, or groups of panels
    Activations x;
    Shape shape;
    int rows, count; // `count` products
};

// Entries by matrix: bucket b is entries starts[b]..starts[b + 1] of the list.
struct BucketParams {
    const DEVICE u8* weights; // matrices one after the other
    Activations x;
    DEVICE float* y;            // (entries, outputs)
    const DEVICE int* matrices; // (buckets): the matrix of a bucket
    const DEVICE int* starts;   // (buckets + 1)
    const DEVICE int* count;    // (1): buckets in use
    const DEVICE int* rows;     // (entries): the row of x; null if it is the entry itself
    Shape shape;
    int outputs; // of one matrix, a multiple of 16
};

} // namespace
