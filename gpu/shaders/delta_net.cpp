// The gated delta net, except its products: gates, convolution, recurrence, and the commit of a round. Specification:
// ops/delta_net.rs.
//
// Rows that may be rejected are not written into a sequence's matrices: what the recurrence reads of them is logged, and the next
// round first applies those that were accepted, while it reads the matrices anyway. A row takes the same operations in the same
// order then, so the matrices are, bit for bit, those of single steps. Rows that are committed whole or not at all, such as a
// prompt's, are not logged; the matrices after them are written at once.
//
// A row of inputs, in a log or in the pass's memory:
//
//   0               channels       + heads        + heads     stride      + channels
//   | q  | k  | v   | decay        | beta         | padding   | q | k | v  before the convolution, in logs only |
//
// q and k are (key_heads, key_dim), normalized, v is (heads, value_dim).

#include "exponential.h"
#include "segments.h"

namespace {

struct Shape {
    int key_heads, heads; // of values
    int key_dim, value_dim;
    int values_per_key; // heads of values that share a key, consecutive; 0: head h has key h % key_heads
    int taps;           // rows that the convolution sees
    int log_rows;
    int stride; // of a row of inputs, a multiple of 4
};

struct InputParams {
    const DEVICE Segment* segments;
    const DEVICE Place* places;  // (rows)
    const DEVICE float* qkv;     // (rows, channels)
    const DEVICE float* a;       // (rows, heads)
    const DEVICE float* b;       // (rows, heads)
    const DEVICE float* weight;  // (taps, channels), the oldest row's first
    const DEVICE float* dt_bias; // (heads)
    const DEVICE float* rate;    // (heads): -exp(A_log)
    DEVICE float* inputs;        // (rows, stride): of rows that are not logged
    Shape shape;
    int layer;         // index among the delta nets
    float query_scale; // key_dim^-0.5
};

struct RuleParams {
    const DEVICE Segment* segments;
    const DEVICE float* inputs; // (rows, stride): of rows that are not logged
    DEVICE float* y;            // (rows, heads, value_dim)
    Shape shape;
    int layer;
};

struct CommitParams {
    const DEVICE Segment* segments;
    const DEVICE u32* results; // (segments, 2), of `accept`; null: `rows` rows are committed
    Shape shape;
    int segment; // the first one
    int rows;
};

INLINE int key_channels(const CONSTANT Shape& s) { return s.key_heads * s.key_dim; }
INLINE int channels_of(const CONSTANT Shape& s) { return 2 * key_channels(s) + s.heads * s.value_dim; }

// The start of row `i` of a layer in a log.
INLINE i64 log_at(const CONSTANT Shape& s, int layer, int i) {
    return (i64(layer) * s.log_rows + i) * (s.stride + channels_of(s));
}

// A warp's channels of a row, four per lane.
CONSTEXPR int RUN = 128;
CONSTEXPR int INPUT_WARPS = 4;

// Added to the sum of squares.
CONSTEXPR float L2_EPS = 1e-6f;

// log(1 + x) for x from 0 to 1: the second factor corrects the rounding of 1 + x.
INLINE float log_1_plus(float x) {
    float sum = add(1.0f, x);
    return sum == 1.0f ? x : mul(logf(sum), x / sub(sum, 1.0f));
}

// The first channel of a warp's: heads of queries and of keys come first.
INLINE int first_channel(const CONSTANT Shape& s, int unit) {
    int values = unit - 2 * s.key_heads;
    return values < 0 ? unit * s.key_dim : 2 * key_channels(s) + values * RUN;
}

// No kernel writes the convolution's weight.
INLINE void before_inputs(const CONSTANT InputParams& p, Thread self) {
    int channels = channels_of(p.shape);
    int channel = first_channel(p.shape, self.x * INPUT_WARPS + self.warp) + self.lane * 4;
    for (int tap = 0; tap < p.shape.taps && channel < channels; tap++) prefetch(p.weight + tap * channels + channel);
}

INLINE void gates(const CONSTANT InputParams& p, int r, int lane, DEVICE float* row) {
    int heads = p.shape.heads;
    for (int head = lane; head < heads; head += 32) {
        float x = add(p.a[AT(r * heads + head)], p.dt_bias[AT(head)]);
        float softplus = add(fmaxf(x, 0.0f), log_1_plus(exponential(x < 0 ? x : -x)));
        row[AT(head)] = exponential(mul(p.rate[AT(head)], softplus));
        row[AT(heads + head)] = sigmoid(p.b[AT(r * heads + head)]);
    }
}

// The state of a head is divided by columns, which are independent: a warp has eight, two per lane, and all rows of them, each
// lane the sixteen of `state_row`. Sums over rows are chains within a lane, then shuffles.
CONSTEXPR int KEY = 128, GROUPS = 8, PER_LANE = KEY / GROUPS, PER_WARP = 8, RULE_WARPS = 4, COLUMNS = PER_WARP * RULE_WARPS;

// Rows that are in shared memory at once.
CONSTEXPR int CHUNK = 16;

struct Chunk {
    alignas(16) float key[CHUNK][KEY];   // zeros beyond key_dim
    alignas(16) float query[CHUNK][KEY];
    alignas(16) float value[CHUNK][COLUMNS];
    float decay[CHUNK], beta[CHUNK];
};

// Row `i` of a group's lanes: of the eight groups, the keys of four rows are consecutive in shared memory.
INLINE int state_row(int group, int i) { return i / 4 * 32 + group * 4 + i % 4; }

struct Columns {
    float v[PER_LANE][2];
};

// The sums over the groups, with the same bits in each.
INLINE void sum_groups(THREAD float (&x)[2]) {
    for (int mask = 4; mask < 32; mask *= 2)
        for (int c = 0; c < 2; c++) x[c] = add(x[c], shuffle_xor(x[c], mask));
}

// S^T x.
INLINE void dot(const THREAD Columns& state, const THREADGROUP float* x, int group, THREAD float (&sum)[2]) {
    sum[0] = sum[1] = 0;
    for (int i = 0; i < PER_LANE; i += 4) {
        float four[4];
        load4_shared(x + state_row(group, i), four);
        for (int e = 0; e < 4; e++)
            for (int c = 0; c < 2; c++) sum[c] = fmaf(state.v[i + e][c], four[e], sum[c]);
    }
    sum_groups(sum);
}

// d = beta (v - decay S^T k), S = decay S + k d^T.
INLINE void step(THREAD Columns& state, const THREADGROUP Chunk& s, int j, int group, int column) {
    float known[2], delta[2], decay = s.decay[j], beta = s.beta[j];
    dot(state, s.key[j], group, known);
    for (int c = 0; c < 2; c++) delta[c] = mul(beta, sub(s.value[j][column + c], mul(decay, known[c])));
    for (int i = 0; i < PER_LANE; i += 4) {
        float key[4];
        load4_shared(s.key[j] + state_row(group, i), key);
        for (int e = 0; e < 4; e++)
            for (int c = 0; c < 2; c++) state.v[i + e][c] = fmaf(key[e], delta[c], mul(decay, state.v[i + e][c]));
    }
}

// A warp's part of copying row `j` of the chunk: the key and the query of `key_head`, and the block's columns of the value.
INLINE void load_row(const CONSTANT Shape& shape, const DEVICE float* row, int key_head, int head, int first,
                     THREADGROUP Chunk& s, int j, int lane) {
    float query[4] = {0, 0, 0, 0}, key[4] = {0, 0, 0, 0};
    int at = lane * 4, keys = key_channels(shape), channels = channels_of(shape);
    if (at < shape.key_dim) {
        load4<Single>(row + AT(key_head * shape.key_dim + at), query);
        load4<Single>(row + AT(keys + key_head * shape.key_dim + at), key);
    }
    for (int e = 0; e < 4; e++) s.query[j][at + e] = query[e], s.key[j][at + e] = key[e];
    if (at < COLUMNS && first + at < shape.value_dim) {
        float value[4];
        load4<Single>(row + AT(2 * keys + head * shape.value_dim + first + at), value);
        for (int e = 0; e < 4; e++) s.value[j][at + e] = value[e];
    }
    if (lane == 0) s.decay[j] = row[AT(channels + head)], s.beta[j] = row[AT(channels + shape.heads + head)];
}

} // namespace

// A warp per head of queries and of keys, then per 128 channels of the values, and one for the gates. Grid: (those by 4, rows).
KERNEL(delta_inputs, InputParams, 32 * INPUT_WARPS, 8, None) {
    const CONSTANT Shape& shape = p.shape;
    int unit = self.x * INPUT_WARPS + self.warp, r = self.y;
    const DEVICE Segment& segment = p.segments[AT(p.places[AT(r)].segment)];
    const DEVICE Recurrent& state = *segment.recurrent;
    int channels = channels_of(shape), before = shape.taps - 1, i = r - segment.first;
    DEVICE float* row = state.whole ? p.inputs + AT(i64(r)) * shape.stride : state.log + log_at(shape, p.layer, AT(i));
    bool of_keys = unit < 2 * shape.key_heads;
    int first = first_channel(shape, unit), end = min(first + (of_keys ? shape.key_dim : RUN), channels);
    if (first >= channels) {
        if (first < channels + RUN) gates(p, r, self.lane, row + channels);
        return;
    }
    int channel = first + self.lane * 4;
    float x[4] = {0, 0, 0, 0};
    if (channel < end) {
        const DEVICE float* window = state.window + i64(p.layer) * before * channels;
        float own[4];
        for (int tap = 0; tap < shape.taps; tap++) {
            float weight[4];
            load4<Single>(p.weight + AT(tap * channels + channel), weight);
            int from = i + tap - before; // row of the segment
            if (from < 0) load4<Single>(window + AT(i64(from + before) * channels + channel), own);
            else load4<Single>(p.qkv + AT(i64(segment.first + from) * channels + channel), own);
            for (int e = 0; e < 4; e++) x[e] = add(x[e], mul(weight[e], own[e]));
        }
        for (int e = 0; e < 4; e++) x[e] = silu(x[e]);
        // A log has the last rows; those of a prompt are more than it has.
        int logged = i - max(0, segment.rows - shape.log_rows);
        if (logged >= 0) {
            DEVICE float* to = state.log + log_at(shape, p.layer, logged) + shape.stride + channel;
            for (int e = 0; e < 4; e++) to[AT(e)] = own[e];
        }
    }
    if (of_keys) {
        float squares = 0;
        for (int e = 0; e < 4; e++) squares = fmaf(x[e], x[e], squares);
        float scale = unit < shape.key_heads ? p.query_scale : 1.0f;
        float factor = narrow(wide(scale) / sqrt(sum_over(wide(squares), 32) + wide(L2_EPS)));
        for (int e = 0; e < 4; e++) x[e] = mul(x[e], factor);
    }
    if (channel >= end) return;
    for (int e = 0; e < 4; e++) row[AT(channel + e)] = x[e];
}

// Accepted rows of the round before, then the segment's rows. Grid: (columns by 32, heads, segments).
KERNEL(delta_rule, RuleParams, 32 * RULE_WARPS, 4, Chunk) {
    const CONSTANT Shape& shape = p.shape;
    const DEVICE Segment& segment = p.segments[AT(self.z)];
    const DEVICE Recurrent& recurrent = *segment.recurrent;
    int head = self.y, accepted = int(*recurrent.accepted), count = accepted + segment.rows;
    int key_head = shape.values_per_key ? head / shape.values_per_key : head % shape.key_heads;
    int first = self.x * COLUMNS, column = self.warp * PER_WARP + self.lane % 4 * 2, group = self.lane / 4;
    bool inside = first + column < shape.value_dim;
    i64 matrix = (i64(p.layer) * shape.heads + head) * shape.key_dim * shape.value_dim + first + column;
    Columns state = {};
    for (int i = 0; i < PER_LANE; i++) {
        if (!inside || state_row(group, i) >= shape.key_dim) continue;
        float2 two = *reinterpret_cast<const DEVICE float2*>(
            recurrent.matrices + AT(matrix + state_row(group, i) * shape.value_dim));
        state.v[i][0] = two.x, state.v[i][1] = two.y;
    }
    DEVICE float* to = recurrent.whole ? recurrent.whole : recurrent.matrices;
    int written_after = recurrent.whole ? count : accepted;
#pragma unroll 1
    for (int chunk = 0; chunk < count; chunk += CHUNK) {
        int end = min(count, chunk + CHUNK);
        barrier();
        for (int index = chunk + self.warp; index < end; index += RULE_WARPS) {
            int i = index - accepted;
            const DEVICE float* row = recurrent.log + log_at(shape, p.layer, i);
            if (i < 0) row = recurrent.replayed + log_at(shape, p.layer, AT(index));
            else if (recurrent.whole) row = p.inputs + AT(i64(segment.first + i)) * shape.stride;
            load_row(shape, row, key_head, head, first, s, index - chunk, self.lane);
        }
        barrier();
#pragma unroll 1
        for (int index = chunk; index < end; index++) {
            step(state, s, index - chunk, group, column);
            if (index >= accepted) {
                float y[2];
                dot(state, s.query[index - chunk], group, y);
                i64 row = i64(segment.first + index - accepted) * shape.heads + head;
                if (inside && group < 2) p.y[AT(row * shape.value_dim + first + column + group)] = y[group];
            }
            if (index + 1 != written_after || !inside) continue;
            for (int i = 0; i < PER_LANE; i++) {
                if (state_row(group, i) >= shape.key_dim) continue;
                float2 two = {state.v[i][0], state.v[i][1]};
                *reinterpret_cast<DEVICE float2*>(to + AT(matrix + state_row(group, i) * shape.value_dim)) = two;
            }
        }
    }
}

// The rows that the next round applies, and the convolution's window: the last of the window and the committed rows. Grid:
// (channels by 256, layers, segments).
KERNEL(delta_commit, CommitParams, 256, 4, None) {
    const CONSTANT Shape& shape = p.shape;
    int index = p.segment + self.z, layer = self.y, channel = self.x * 256 + self.index;
    const DEVICE Segment& segment = p.segments[AT(index)];
    const DEVICE Recurrent& state = *segment.recurrent;
    int rows = p.results ? segment.skipped + int(p.results[AT(2 * index)]) + 1 : p.rows;
    if (channel == 0 && layer == 0) *state.accepted = state.whole ? 0 : u32(rows);
    int channels = channels_of(shape), before = shape.taps - 1, logged = min(rows, shape.log_rows);
    if (channel >= channels) return;
    DEVICE float* window = state.window + i64(layer) * before * channels + channel;
    for (int i = 0; i < before; i++) {
        int from = i + logged;
        window[AT(i64(i) * channels)] = from < before
            ? window[AT(i64(from) * channels)]
            : state.log[AT(log_at(shape, layer, from - before) + shape.stride + channel)];
    }
}
