// The sequences of a pass. A segment is the rows of one sequence: consecutive rows, at consecutive positions.
#pragma once

#include "device.h"

// Metal allows pointers to pointers in structures only.
struct Slot {
    DEVICE u8* page;
};

// The recurrent state of a sequence, see delta_net.cpp: of all delta nets, one after the other.
struct Recurrent {
    DEVICE float* matrices;       // (layers, heads, key_dim, value_dim)
    DEVICE float* window;         // (layers, taps - 1, channels): the convolution's last inputs, the oldest row first
    const DEVICE float* replayed; // (layers, log_rows, row): the log of the round before
    DEVICE float* log;            // the same, of this round
    DEVICE float* whole;          // as `matrices`: gets them after all rows of the pass; null: the rows are logged
    DEVICE u32* accepted;         // (1): rows of `replayed` that are committed and not yet in `matrices`
};

struct Segment {
    const DEVICE Slot* tables; // of all stores, see pages.h
    DEVICE u32* state;    // number of committed positions, the token after them, and drafts after that
    DEVICE float* hidden; // (width): the hidden state that predicted the token after the committed positions
    const DEVICE Recurrent* recurrent; // null without delta nets
    int first, rows;      // rows of the pass
    int source;           // its first row before rows without outputs were dropped
    int skipped;          // dropped rows of this sequence
};

// A row's position, the first position that it does not see, and its segment.
struct alignas(16) Place {
    int position, end, segment, unused;
};

// In place of a token that the sequence's state has.
CONSTEXPR u32 ON_DEVICE = 0xfffffffeu;
