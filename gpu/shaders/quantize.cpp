// Activations to 8 bits. Grid: (blocks of 256 inputs, by 4 warps; rows).

#include "quantize.h"

namespace {

struct Params {
    const DEVICE float* x; // (rows, inputs)
    Activations out;
    int block; // 32 or 256
};

CONSTEXPR int WARPS = 4;

} // namespace

KERNEL(quantize_rows, Params, 32 * WARPS, 8, None) {
    int first = (self.x * WARPS + self.warp) * 256 + self.lane * 8;
    float v[8];
    load8(p.x + i64(self.y) * p.out.inputs, first, p.out.inputs, v);
    quantize(p.out, p.block, self.y, first, self.lane, v);
}
