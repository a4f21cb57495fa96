// Several matrices with the same inputs in one launch.
#pragma once

#include "device.h"

CONSTEXPR int MAX_PRODUCTS = 3;

struct Product {
    const DEVICE u8* weights; // (outputs, inputs)
    DEVICE float* y;          // (rows, outputs)
    int outputs;
    int end; // blocks of this and of the products before it
};

// A block of a product.
struct BlockOf {
    int product, index;
};

INLINE BlockOf block_of(const CONSTANT Product (&products)[MAX_PRODUCTS], int count, int index) {
    int product = 0;
    while (product + 1 < count && index >= products[product].end) product++;
    return {product, product ? index - products[product - 1].end : index};
}
