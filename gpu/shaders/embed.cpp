// Embedding lookup by ids in device memory.
//
// A thread per element: there are a few rows of a few thousand elements only.
// Grid: (elements by 256, ids).

#include "formats_256.h"

namespace {

struct Params {
    const DEVICE u8* table; // packed panels, or (ids, inputs) elements
    const DEVICE u32* ids;
    DEVICE float* y; // (ids, inputs)
    int inputs, stride; // stride: elements of y from row to row
    u32 rows;    // of the table; rows of other ids are NaN
    float scale; // multiplies every element
};

template <class F>
struct Packed {
    static INLINE float element(const DEVICE u8* table, u32 row, int inputs, int i) {
        i64 block = i64(row / 16) * (inputs / F::BLOCK) + i / F::BLOCK;
        return F::value(table + AT(block) * (16 * F::BYTES), row % 16, i % F::BLOCK);
    }
};

template <class E>
struct Elements {
    static INLINE float element(const DEVICE u8* table, u32 row, int inputs, int i) {
        return E::widen(reinterpret_cast<const DEVICE typename E::Bits*>(table)[AT(i64(row) * inputs + i)]);
    }
};

template <class T>
INLINE void embed(const CONSTANT Params& p, Thread self) {
    int i = self.x * 256 + self.index;
    if (i >= p.inputs) return;
    u32 row = p.ids[AT(self.y)];
    float nan = float_of(0x7fc00000u);
    p.y[AT(i64(self.y) * p.stride + i)] = row < p.rows ? mul(T::element(p.table, row, p.inputs, i), p.scale) : nan;
}

} // namespace

#define EMBED(name, T) KERNEL(embed_##name, Params, 256, 4, None) { embed<T>(p, self); }

EMBED(q4_0, Packed<Q4_0>)
EMBED(q5_0, Packed<Q5_0>)
EMBED(q8_0, Packed<Q8_0>)
EMBED(q4_k, Packed<Q4_K>)
EMBED(q5_k, Packed<Q5_K>)
EMBED(q6_k, Packed<Q6_K>)
EMBED(q4_1, Packed<Q4_1>)
EMBED(q5_1, Packed<Q5_1>)
EMBED(iq4_nl, Packed<IQ4_NL>)
EMBED(mxfp4, Packed<MXFP4>)
EMBED(q2_k, Packed<Q2_K>)
EMBED(q3_k, Packed<Q3_K>)
EMBED(iq4_xs, Packed<IQ4_XS>)
EMBED(f32, Elements<Single>)
EMBED(f16, Elements<Half>)
EMBED(bf16, Elements<Bfloat16>)
