// Attention over pages of f16 with head dimensions 256 and 512: on tensor cores where there are any for f16, else by `attend_exact.h`.
// Tiles of 8 columns, and of 32 or 24 for prompts, as registers allow. Grid: (splits, KV heads, segments by tiles of columns).

#include "attend_exact.h"

#ifdef HALF_PRODUCTS

#include "attend_halves.h"

// The shared memory of large tiles is stated by `src/plan/attention.rs`.
static_assert(sizeof(HalfScratch<256, 4>) == 67328 && sizeof(HalfScratch<512, 3>) == 75072, "bytes");

#define ATTEND_F16(HD, MANY, STRIPS, TIMES)                                                                         \
    KERNEL(attend_f16_##HD, Params, 32 * WARPS, 1, HalfScratch<HD, 1>) {                                             \
        attend_halves<HD, 1, HD / 128, 1>(p, s, self);                                                               \
    }                                                                                                               \
    KERNEL_LARGE(attend_f16_##HD##_##MANY, Params, 32 * WARPS, 2, HalfScratch<HD, MANY / 8>) {                       \
        attend_halves<HD, MANY / 8, STRIPS, TIMES>(p, s, self);                                                      \
    }

#else

CONSTEXPR int WARPS = 8;

#define ATTEND_F16(HD, MANY, STRIPS, TIMES)                                                                         \
    KERNEL(attend_f16_##HD, Params, 32 * WARPS, 1, Scratch<HD, 32 * WARPS>) {                                        \
        attend<Half, HD, 32 * WARPS>(p, self.z % p.queries.tiles * COLUMNS, s, self);                                \
    }                                                                                                               \
    KERNEL(attend_f16_##HD##_##MANY, Params, 32 * WARPS, 1, Scratch<HD, 32 * WARPS>) {                               \
        for (int i = 0; i < MANY; i += COLUMNS) {                                                                    \
            attend<Half, HD, 32 * WARPS>(p, self.z % p.queries.tiles * MANY + i, s, self);                           \
            barrier(); /* before what the last columns still read is overwritten */                                  \
        }                                                                                                           \
    }

#endif

ATTEND_F16(256, 32, 4, 1)
ATTEND_F16(512, 24, 2, 2)
