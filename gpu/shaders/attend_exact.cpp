// Attention over pages of exact rows: f32, bf16, and f16 with head dimensions that `attend_f16.cpp` does not have.

#include "attend_exact.h"

#define ATTEND(name, E, HD)                                                                                         \
    KERNEL(attend_##name##_##HD, Params, 512, 1, Scratch<HD, 512>) {                                                 \
        attend<E, HD, 512>(p, self.z % p.queries.tiles * COLUMNS, s, self);                                          \
    }
#define ATTEND_ALL(name, E) ATTEND(name, E, 64) ATTEND(name, E, 128) ATTEND(name, E, 256) ATTEND(name, E, 512)

ATTEND_ALL(f32, Single)
ATTEND_ALL(bf16, Bfloat16)
ATTEND(f16, Half, 64)
ATTEND(f16, Half, 128)
