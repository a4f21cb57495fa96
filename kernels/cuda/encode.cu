// Codes a page of 128 rotated rows: turbo/page.rs and turbo/quantizer.rs, to their bytes.
//
// A block has one group of 128 channels of one head's page. Sixteen threads have a row, because the CPU adds up squares in
// sixteen strands, in double: thread s of a row has the channels s, s + 16, ... The codes meet in shared memory and leave it
// in the order of the planes, 64-byte lines at a time. A page is coded once in 128 tokens: what it costs hardly matters.
// Grid: (groups, heads, pages).

#include "pages.cuh"

namespace {

struct Params {
    Pages rows;  // exact pages, rotated
    Pages codes; // coded ones
    int first;   // page
    int channels, head_bytes;
    int element;
    int keys;         // 1: laid out as keys; 0: as values
    int centred;      // 1: codes are relative to the mean, which is kept
    int least_squares; // 1: scales of least squared error; 0: scales that keep the norm
    int upper, lower; // bits of a code in the two planes
    int boundaries;   // how many
    float spread;
    float boundary[64];
    float level[64];
};

constexpr int THREADS = 256, GROUP = 128;

struct Scratch {
    float mean[GROUP];
    float boundary[64];
    float level[64];
    u8 codes[PAGE][GROUP + 4]; // rows 33 words apart: neither order of reading meets one bank
};

__device__ __forceinline__ u16 finite_half(float x) { return float_to_half(fminf(fmaxf(x, -65504.0f), 65504.0f)); }

// Adds the strands of a row in order.
__device__ __forceinline__ double strands(double strand, int lane) {
    double sum = 0;
    for (int s = 0; s < 16; s++) sum = __dadd_rn(sum, __shfl_sync(ALL, strand, (lane & 16) | s));
    return sum;
}

// Writes one plane: bits `drop..drop + bits` of every code.
__device__ __forceinline__ void put(const Params& p, const Scratch& scratch, u8* plane, int group, int bits, int drop) {
    // A run: 32 vectors of 16 lanes by 4, of 16 tokens for keys, of 16 channels for values; eight of either are a group's.
    int vectors = 8 / bits, lines = 32 / vectors, run = 64 * lines;
    for (int i = threadIdx.x; i < 8 * lines * 16; i += THREADS) {
        int strip = i / (lines * 16), line = i / 16 % lines, lane = i % 16;
        u32 word = 0;
        for (int v = 0; v < vectors; v++) {
            for (int d = 0; d < 4; d++) {
                int across = strip * 16 + lane, deep = (line * vectors + v) * 4 + d;
                u32 code = p.keys ? scratch.codes[AT(across)][deep] : scratch.codes[AT(deep)][across];
                word |= (code >> drop & ((1u << bits) - 1)) << (8 * d + v * bits);
            }
        }
        long at = long(group * 8 + strip) * run;
        *reinterpret_cast<u32*>(plane + AT(at + line * 64 + lane * 4)) = word;
    }
}

template <class E>
__device__ __forceinline__ void encode(const Params& p, Scratch& scratch) {
    int tid = threadIdx.x, lane = tid % 32, group = blockIdx.x, head = blockIdx.y, page = p.first + blockIdx.z;
    int groups = p.channels / GROUP;
    const typename E::Bits* rows = page_of<const typename E::Bits>(p.rows, page) + long(head) * PAGE * p.channels + AT(group * GROUP);
    u8* codes = page_of<u8>(p.codes, page) + long(head) * p.head_bytes;
    int plane = PAGE * p.channels / 8;
    u16* scales = reinterpret_cast<u16*>(codes + plane * (p.upper + p.lower));
    if (tid < 64) {
        scratch.boundary[tid] = p.boundary[AT(tid) % 64];
        scratch.level[tid] = p.level[tid];
    }
    if (tid < GROUP) {
        float mean = 0;
        if (p.centred) {
            for (int token = 0; token < PAGE; token++)
                mean = add(mean, mul(E::widen(rows[AT(long(token) * p.channels + tid)]), 1.0f / PAGE));
            u16 kept = finite_half(mean);
            scales[AT(groups * PAGE + group * GROUP + tid)] = kept;
            mean = half_to_float(kept);
        }
        scratch.mean[tid] = mean;
    }
    __syncthreads();
    for (int token = tid / 16; token < PAGE; token += THREADS / 16) {
        int s = tid % 16;
        float x[8];
        double squares = 0;
        for (int k = 0; k < 8; k++) {
            x[k] = sub(E::widen(rows[AT(long(token) * p.channels + s + 16 * k)]), scratch.mean[AT(s + 16 * k)]);
            squares = __dadd_rn(squares, __dmul_rn(double(x[k]), double(x[k])));
        }
        double norm = sqrt(strands(squares, lane));
        bool some = norm >= double(1.17549435e-38f);
        float to_levels = some ? float(__dmul_rn(double(p.spread), sqrt(double(GROUP))) / norm) : 0.0f;
        double level_squares = 0, products = 0;
        for (int k = 0; k < 8; k++) {
            float scaled = mul(x[k], to_levels);
            // How many boundaries are at or below it: they ascend.
            int code = 0;
            for (int step = 32; step > 0; step /= 2)
                if (code + step <= p.boundaries && scratch.boundary[code + step - 1] <= scaled) code += step;
            scratch.codes[token][AT(s + 16 * k)] = u8(code);
            double level = scratch.level[code];
            level_squares = __dadd_rn(level_squares, __dmul_rn(level, level));
            products = __dadd_rn(products, __dmul_rn(double(x[k]), level));
        }
        level_squares = strands(level_squares, lane);
        products = strands(products, lane);
        double scale = p.least_squares ? products / level_squares : norm / sqrt(level_squares);
        if (s == 0) scales[AT(group * PAGE + token)] = some ? finite_half(float(scale)) : u16(0);
    }
    __syncthreads();
    put(p, scratch, codes, group, p.upper, p.lower);
    if (p.lower) put(p, scratch, codes + AT(plane * p.upper), group, p.lower, 0);
}

} // namespace

KERNEL(encode_page, Params, THREADS, 2) {
    SHARED(Scratch, scratch);
    if (p.element == F32) encode<Single>(p, scratch);
    if (p.element == F16) encode<Half>(p, scratch);
    if (p.element == BF16) encode<Brain>(p, scratch);
}
