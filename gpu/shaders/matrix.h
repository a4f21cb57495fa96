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

} // namespace
