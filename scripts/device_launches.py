#!/usr/bin/env python3
"""The launches of a forward pass of Gemma 4 on a GPU, as made by src/gemma4 and src/device, with their bytes, operations and waits.

    scripts/device_launches.py FILE

compares kernels, grids and blocks with those that the library recorded (tests/idle_device). scripts/roofline.py computes
times from them.
"""
import functools
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE, PANEL = 128, 16  # gpu/shaders: tokens of a page; rows of a panel of products
H200_BLOCKS = 2 * 132  # gpu/src/plan/mod.rs
# gpu/src/plan/matmul.rs
MAX_WARPS, SHARED_BYTES, STAGES = 16, 96 << 10, 2
TILE_ROWS, TILE_PANELS, MANY_ROWS = 32, 8, 65
WIDE_OUTPUTS, TILED = H200_BLOCKS * 32, 64 * 32 * 128  # gpu/src/plan/matmul_float.rs
SPLIT_PAGES, WINDOW_SPLIT_PAGES = 2, 1  # src/device/kv.rs
FEW_SPLITS = 32  # gpu/src/plan/attention.rs
ZONES = 64 + 512  # src/kv/format.rs: exact positions of `balanced`

# Fields of the published config.json that tests/shapes scales down; and the assistants' hidden_size, intermediate_size,
# num_attention_heads.
WIDE = dict(head_dim=256, global_head_dim=512, vocab_size=262144)
PUBLISHED = {
    "E2B": (dict(hidden_size=1536, intermediate_size=6144, hidden_size_per_layer_input=256, sliding_window=512), (256, 2048, 4)),
    "E4B": (dict(hidden_size=2560, intermediate_size=10240, hidden_size_per_layer_input=256, sliding_window=512), (256, 2048, 4)),
    "12B": (dict(hidden_size=3840, intermediate_size=15360, num_hidden_layers=48, sliding_window=1024), (1024, 8192, 16)),
    "26B-A4B": (dict(hidden_size=2816, intermediate_size=2112, num_hidden_layers=30, sliding_window=1024, num_experts=128,
                     moe_intermediate_size=704), (1024, 8192, 16)),
    "31B": (dict(hidden_size=5376, intermediate_size=21504, num_hidden_layers=60, sliding_window=1024), (1024, 8192, 32)),
}  # fmt: skip


def published(name):
    """The text configuration of a variant, and the configuration of its assistant."""
    text = json.loads((ROOT / f"tests/shapes/{name}/target/config.json").read_text())["text_config"]
    fields, (hidden, intermediate, heads) = PUBLISHED[name]
    types = text["layer_types"]
    text |= WIDE | fields
    text["layer_types"] = [types[i % len(types)] for i in range(text["num_hidden_layers"])]
    own = dict(hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads, num_hidden_layers=4,
               layer_types=["sliding_attention"] * 3 + ["full_attention"], num_kv_shared_layers=4, hidden_size_per_layer_input=0,
               enable_moe_block=False, use_double_wide_mlp=False)  # fmt: skip
    centroids = dict(use_ordered_embeddings=name in ("E2B", "E4B"), num_centroids=2048, centroid_intermediate_top_k=32)
    return text, dict(text_config=text | own, **centroids)


class Layer(NamedTuple):
    sliding: bool
    head_dim: int
    kv_heads: int
    ffn: int
    own_kv: bool
    k_eq_v: bool


class Shape:
    """A text model's dimensions, read as src/gemma4/config.rs does."""

    def __init__(self, text):
        get = lambda name, default=0: text.get(name) or default
        self.hidden, self.heads, self.vocab = text["hidden_size"], text["num_attention_heads"], text["vocab_size"]
        self.window, self.per_layer = text["sliding_window"], get("hidden_size_per_layer_input")
        self.experts = None
        if get("enable_moe_block"):
            self.experts = text["num_experts"], text["top_k_experts"], text["moe_intermediate_size"]
        part = lambda kind, default: text["rope_parameters"].get(kind, {}).get("partial_rotary_factor", default)
        sliding_pairs = int(part("sliding_attention", 1.0) * text["head_dim"] / 2)
        self.pairs = {True: sliding_pairs, False: int(part("full_attention", 0.25) * text["global_head_dim"] / 2)}
        count, k_eq_v = text["num_hidden_layers"], get("attention_k_eq_v", False)
        shared_from, self.layers = count - get("num_kv_shared_layers"), []
        for i, kind in enumerate(text["layer_types"]):
            sliding = kind == "sliding_attention" and i + 1 < count
            kv_heads = text["num_key_value_heads"]
            if k_eq_v and not sliding:
                kv_heads = get("num_global_key_value_heads", kv_heads)
            wide = 2 if get("use_double_wide_mlp") and i >= shared_from > 0 else 1
            head_dim, ffn = text["head_dim" if sliding else "global_head_dim"], wide * text["intermediate_size"]
            self.layers.append(Layer(sliding, head_dim, kv_heads, ffn, i < shared_from, k_eq_v and not sliding))


class Format(NamedTuple):
    """A format of weights, and what ptxas makes of the loops of gpu/cuda/prebuilt/matmul.ptx for sm_90."""

    bytes: int  # of a block
    block: int
    activations: str
    trips: float  # dependent loads per block
    narrow: float  # instructions of a lane per weight, of up to 8 rows
    wide: float  # and of up to 16 rows, and by buckets


FORMATS = {
    "q4_k": Format(144, 256, "q8_k", 2, 2.3, 3.1),
    "q6_k": Format(210, 256, "q8_k", 2, 4.5, 5.3),
    "q5_0": Format(22, 32, "q8_1", 1 / 2, 3.5, 4.6),
    "q8_0": Format(34, 32, "q8_1", 1 / 2, 1.9, 3.0),
    "f32": Format(4, 1, None, 0, 0, 0),
    "f16": Format(2, 1, None, 0, 0, 0),
    "bf16": Format(2, 1, None, 0, 0, 0),
}


class Weights(NamedTuple):
    """The types of tensors: one type, or q4_k_m; `kept` is the type of what is not quantized."""

    name: str
    kept: str

    def of(self, tensor, inputs, more=False):
        """As src/checkpoint/quantize/mix.rs has them, and `in_situ_type` of src/checkpoint/loader.rs."""
        if tensor in ("router", "per_layer_model_projection"):
            return self.kept
        if self.name != "q4_k_m":
            return self.kept if tensor == "per_layer_table" or inputs % FORMATS[self.name].block else self.name
        if inputs % 32:
            return "f16"
        wanted = "q6_k" if more or tensor in ("embedding", "per_layer_table") else "q4_k"
        return wanted if inputs % 256 == 0 else {"q4_k": "q5_0", "q6_k": "q8_0"}[wanted]


class Launch(NamedTuple):
    kernel: str
    grid: tuple
    threads: int
    bytes: float = 0  # read and written
    instructions: float = 0  # of lanes
    products: float = 0
    dots: float = 0  # products of bytes
    mma: float = 0  # and of columns without a row, on tensor cores
    trips: float = 0  # dependent loads of a block from memory
    near: float = 1  # and from the L2 cache, and operations of the same latency
    shared: int = 0  # bytes of shared memory beside the kernel's own
    parts: int = 1  # launches merged: gpu/src/plan/merge.rs
    quantizes: bool = False  # whether its last part is a quantization


def up(a, b):
    return -(-a // b)


class Ops:
    """Collects the launches of a pass: src/device/ops.rs, with the plans of gpu/src/plan."""

    def __init__(self, weights, kv, depth, rows, is_draft=False):
        self.weights, self.kv, self.depth, self.rows, self.is_draft = weights, kv, depth, rows, is_draft
        end = depth + (0 if is_draft else rows)
        step = max((1 << (end - 1).bit_length()) // 8, 512)
        self.horizon = up(end, step) * step  # src/device/recordings.rs: positions that the recorded splits cover
        self.launches = []

    def run(self, kernel, grid, threads, **costs):
        self.launches.append(Launch(kernel, (*grid, 1, 1)[:3], threads, **costs))

    def merge(self, most, grid=None, into=None, **changes):
        """Merges the last launch with the one before: of `into`, by default of the same kernel, with less than `most` parts."""
        if len(self.launches) < 2:
            return
        first, last = self.launches[-2:]
        if first.kernel not in (into or [last.kernel]) or first.parts + last.parts > most or first.quantizes:
            return
        if grid and first.threads != last.threads:
            return  # matrices of few panels and of many
        add = {name: getattr(first, name) + getattr(last, name) for name in ("bytes", "instructions", "products", "dots", "mma")}
        # One after the other, or side by side.
        longest = max if grid else sum
        waits = {name: longest([getattr(first, name), getattr(last, name)]) for name in ("trips", "near")}
        parts = first.parts + last.parts
        if grid:
            changes["grid"] = grid(first.grid, last.grid, parts)
        self.launches[-2:] = [first._replace(parts=parts, **add, **waits, **changes)]

    def place(self):
        self.run("place", (1,), 32, bytes=24 * self.rows, near=4)

    def angles(self, pairs):
        if pairs:
            self.run("angles", (up(pairs, 128), self.rows), 128, bytes=8 * self.rows * pairs, near=3)

    def embed(self, stored, inputs):
        size = 4 + FORMATS[stored].bytes / FORMATS[stored].block
        self.run(f"embed_{stored}", (up(inputs, 256), self.rows), 256, bytes=self.rows * inputs * size, trips=1)

    def norm(self, width, rows=None, residual=False, again=False):
        """`again`: of the last norm's result."""
        rows = rows or self.rows
        self.run("rms_norm", (rows,), 32 * max(up(width, 256), 1), bytes=4 * width * (rows * (3 if residual else 2) + 1),
                 instructions=8 * rows * width, near=4)  # fmt: skip
        if again:
            self.merge(2)

    def gelu_gate(self, width, rows=None):
        elements = (rows or self.rows) * width
        self.run("gelu_gate", (up(width, 1024), rows or self.rows), 128, bytes=12 * elements, instructions=20 * elements)

    def quantize(self, activations, inputs, rows):
        elements = rows * inputs
        self.run("quantize_rows", (up(inputs, 1024), rows), 128, bytes=5.2 * elements, instructions=8 * elements, near=2)
        self.merge(3, into=("rms_norm", "gelu_gate", "combine_256", "combine_512", "combine_few_256", "combine_few_512"), quantizes=True)

    def project(self, matrices, rows=None, buckets=None, quantized=None, again=False):
        """Matrices of one input, each (type, outputs, inputs). `buckets`: entries, distinct matrices that are expected, and buckets
        at most. `quantized`: the types of activations that the input was quantized to. `again`: the input is that of the product before,
        which is not quantized again."""
        rows, quantized = rows or self.rows, set() if quantized is None else quantized
        side_by_side = lambda a, b, _: (a[0], a[1] + b[1], 1)
        for i, (stored, outputs, inputs) in enumerate(matrices):
            form, (entries, distinct, most) = FORMATS[stored], buckets or (rows, 1, 1)
            weights, products = distinct * outputs * inputs, entries * outputs * inputs
            costs = dict(bytes=weights * form.bytes / form.block + 4 * (rows * inputs + entries * outputs), products=products)
            near = 3 if buckets else 1
            if stored == "bf16":
                self.project_bf16(outputs, inputs, rows, most if buckets else 0, costs, weights, near)
                if (i or again) and not buckets:
                    self.merge(3, side_by_side)
                continue
            if not form.activations:
                tile = 1 if rows == 1 else 4 if rows <= 4 else 16
                kernel = f"matmul_buckets_{stored}" if buckets else f"matmul_{stored}_{tile}"
                # A lane loads four inputs of four outputs at a time, then each row's, which other warps have also loaded.
                trips, panels = up(inputs, 128), up(outputs, 32)
                grid = (panels, most) if buckets else (up(rows, tile), panels)
                self.run(kernel, grid, 256, **costs, instructions=2.3 * weights + 1.26 * products, trips=trips,
                         near=near + (trips * entries / distinct / 4 if entries > distinct else 0))  # fmt: skip
                if (i or again) and not buckets:
                    self.merge(3, side_by_side)
                continue
            if form.activations not in quantized:
                quantized.add(form.activations)
                self.quantize(form.activations, inputs, rows)
            # A row chooses an expert once.
            columns = self.rows if buckets else rows
            blocks, tiles = inputs // form.block, 1 if columns <= 8 else 2 if columns <= 16 else 4
            panels = up(outputs, PANEL)
            # Of a warp: stages of 256 inputs, or of 128.
            shared = STAGES * PANEL * form.bytes * (128 if form.block == 32 and form.bytes > 24 else 256) // form.block
            per_warp = up(blocks, min(MAX_WARPS if panels <= H200_BLOCKS else MAX_WARPS // 2, SHARED_BYTES // shared))
            kernel = f"matmul_{'buckets_' if buckets else ''}{stored}_{8 * tiles}"
            grid = (panels, most) if buckets else (up(rows, 8 * tiles), panels)
            warps, trips = up(blocks, per_warp), math.ceil(form.trips * per_warp)
            many = (up(rows, TILE_ROWS), up(panels, TILE_PANELS))
            if not buckets and rows >= MANY_ROWS and many[0] * many[1] >= H200_BLOCKS:
                kernel, grid, warps, shared, trips = f"matmul_{stored}_tiles", many, TILE_PANELS, 0, up(inputs, 256)
            instructions = weights * (form.narrow if tiles == 1 else form.wide)
            self.run(kernel, grid, 32 * warps, **costs, instructions=instructions, dots=products, mma=weights * 8 * tiles,
                     trips=trips, near=1 + near, shared=warps * shared)  # fmt: skip
            if i and not buckets:
                self.merge(3, side_by_side)

    def project_bf16(self, outputs, inputs, rows, buckets, costs, weights, near):
        """gpu/src/plan/matmul_float.rs. Three products on tensor cores, at half the rate of bytes, for each of eight columns; a warp
        has loaded four steps of 32 inputs by 16 outputs, or two by 32, before it multiplies them."""
        wide, tiled = outputs >= WIDE_OUTPUTS, rows > 8 and rows * outputs >= TILED
        tile, panel = (32, 128) if tiled else (8, 32 if wide else 16)
        kernel, grid = f"matmul_bf16_{tile}" + ("_wide" if wide and not tiled else ""), (up(rows, tile), up(outputs, panel))
        if buckets:
            kernel, grid, tile, panel = "matmul_buckets_bf16", (up(outputs, 16), buckets), 8, 16
        tiles, steps = 1 if buckets else up(rows, tile), up(inputs, 32)
        trips = steps if tiled else up(up(steps, 8), 64 // panel)
        self.run(kernel, grid, 256, **costs, instructions=(7.3 if panel == 16 else 5.1) * weights * tiles, dots=costs["products"],
                 mma=weights * tiles * tile * 6, trips=trips, near=near)  # fmt: skip

    def heads(self, heads, head_dim, written=2):
        """Norm, rotary embedding, rotation and storage: gpu/src/plan/rows.rs."""
        elements, grid = self.rows * heads * head_dim, (up(heads, 4), self.rows)
        self.run(f"rows_{head_dim}", grid, 128, bytes=elements * (4 + written), instructions=40 * elements, near=5)
        self.merge(3, lambda a, b, parts: (max(a[0], b[0]), a[1], parts))

    def attend(self, layer, heads, window, pairs):
        """`attend` of src/device/kv.rs."""
        rows, width, kv_heads = self.rows, layer.head_dim, layer.kv_heads
        zones = self.kv == "balanced" and not layer.sliding
        pages = WINDOW_SPLIT_PAGES if layer.sliding else SPLIT_PAGES
        splits = up(self.horizon, pages * PAGE)
        seen = self.depth + rows
        if layer.sliding:
            splits, seen = min(up(window + rows - 1, pages * PAGE) + 1, splits), min(seen, window)
        self.heads(heads, width, 5 if zones else 4)
        columns, products = rows * heads // kv_heads, 2 * rows * heads * width  # of a position
        # With K = V, keys have the rotary channels alone, if those are whole groups.
        keys = 2 * pairs if layer.k_eq_v and 2 * pairs < width and 2 * pairs % 128 == 0 else width
        partial = rows * heads * (4 * width + 8)
        exact = min(seen, ZONES) if zones else seen
        tensor, parts = width >= 256, up(exact, PAGE * pages)
        large = tensor and columns > 16 and splits * kv_heads * up(columns, 8) > H200_BLOCKS
        tile = (32 if width == 256 else 24) if large else 8
        tiles, work = up(columns, tile), exact * width * kv_heads
        # What ptxas makes of the loops of gpu/cuda/prebuilt/attend_f16.ptx for sm_90: 4.5 instructions of a lane per channel of a
        # position for 8 columns, 8 for 32 or 24. Queries and weights are two f16 each, at half the rate of bytes. The loads of a page's keys,
        # then of its values, are on their way together. On Metal, and of narrow heads, 26 instructions for 8 columns.
        instructions = (8 if large else 4.5 if tensor else 26) * work * tiles
        self.run(f"attend_f16_{width}" + (f"_{tile}" if large else ""), (splits, kv_heads, tiles), 256 if tensor else 512,
                 bytes=2 * exact * kv_heads * (keys + width) + partial * parts, products=products * exact, instructions=instructions,
                 mma=8 * work * tiles * tile if tensor else 0, dots=(26 - 4.5) * work * up(columns, 8) * 16 / 54 if tensor else 0,
                 trips=min(pages, up(exact, PAGE)) * 2 * up(width, 256), near=3 + 3 * pages)  # fmt: skip
        if zones:
            rest, groups, tile = max(seen - exact, 0), width // 128, 8 if columns <= 8 else 16
            tiles, parts = up(columns, tile), up(rest, PAGE * pages)
            # Bits of tqc5 keys and tqc4 values, with a scale per group. 20 instructions of a lane per channel of a position; a step
            # of 32 channels of keys, or of 32 positions of values, waits for a load. Weights of values are two bytes.
            bits = (5 + 1 / 8) * keys + (4 + 1 / 8) * width
            self.run(f"attend_quantized_{width}_{tile}", (splits, kv_heads, tiles), 256, products=products * rest,
                     bytes=rest * kv_heads * bits / 8 + partial * parts, instructions=20 * rest * width * kv_heads * tiles,
                     dots=1.5 * products * rest, mma=3 * rest * kv_heads * tiles * tile * width, near=2 + pages * (3 + 2 * groups),
                     trips=min(pages, up(rest, PAGE)) * 8 * groups)  # fmt: skip
        stores = 2 if zones else 1
        few = splits <= FEW_SPLITS
        self.run(f"combine_few_{width}" if few else f"combine_{width}", (rows * heads,), (32 if few else 256) * up(width, 128),
                 bytes=stores * splits * partial + 4 * rows * heads * width,
                 near=4 + stores * (1 if few else up(splits, 8)))  # fmt: skip

    def argmax(self, n):
        parts = up(n, 4096)
        self.run("argmax_parts", (parts, self.rows), 256, bytes=4 * self.rows * n, instructions=30 * self.rows * n, near=16)
        self.run("argmax", (self.rows,), 32, bytes=8 * self.rows * parts, near=1 + up(parts, 32))


def decoder_layer(ops, shape, i):
    """src/gemma4/layer.rs."""
    layer, of, hidden, rows = shape.layers[i], ops.weights.of, shape.hidden, ops.rows
    queries, kv = shape.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    ops.norm(hidden, again=i > 0)
    projections = [(of("q", hidden), queries, hidden)]
    if layer.own_kv:
        projections.append((of("k", hidden), kv, hidden))
        if not layer.k_eq_v:
            with_values = [j for j, other in enumerate(shape.layers) if other.own_kv and not other.k_eq_v]
            projections.append((of("v", hidden, has_more_bits(with_values.index(i), len(with_values))), kv, hidden))
    ops.project(projections)
    if layer.own_kv:
        ops.heads(layer.kv_heads, layer.head_dim)
        ops.heads(layer.kv_heads, layer.head_dim)
    ops.attend(layer, shape.heads, shape.window, shape.pairs[layer.sliding])
    ops.project([(of("o", queries), hidden, queries)])
    ops.norm(hidden, residual=True)
    ops.norm(hidden, again=True)
    ops.project([(of("gate", hidden), layer.ffn, hidden), (of("up", hidden), layer.ffn, hidden)])
    ops.gelu_gate(layer.ffn)
    more = has_more_bits(i, len(shape.layers))
    ops.project([(of("down", layer.ffn, more), hidden, layer.ffn)])
    if shape.experts:  # src/gemma4/moe.rs, src/device/experts.rs
        count, top_k, width = shape.experts
        entries = rows * top_k
        distinct = count * (1 - (1 - top_k / count) ** rows)  # of rows that choose independently
        buckets = entries, distinct, min(entries, count + entries // min(rows, 16))  # gpu/src/plan/experts.rs
        ops.norm(hidden)
        ops.norm(hidden)
        ops.project([(of("router", hidden), count, hidden)])
        ops.norm(hidden)
        ops.run("route", (1,), 512, bytes=4 * rows * count, near=4 + top_k)
        ops.project([(of("gate_up", hidden), 2 * width, hidden)], buckets=buckets)
        ops.gelu_gate(width, entries)
        ops.project([(of("down", width, more), hidden, width)], entries, buckets)
        ops.run("mix", (up(hidden, 256), rows), 256, bytes=4 * (entries + rows) * hidden, near=2 + top_k / 2)
        ops.norm(hidden, residual=True)
    ops.norm(hidden, residual=True, again=bool(shape.experts))
    if shape.per_layer:  # src/gemma4/per_layer.rs
        ops.project([(of("inp_gate", hidden), shape.per_layer, hidden)])
        ops.gelu_gate(shape.per_layer)
        ops.project([(of("proj", shape.per_layer), hidden, shape.per_layer)])
        ops.norm(hidden, residual=True)


def has_more_bits(i, n):
    """`deserves_more` of src/checkpoint/quantize/mix.rs."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def verify(shape, weights, kv, depth, rows):
    """A pass of the target over rows that all have logits: src/gemma4/text_model.rs."""
    ops = Ops(weights, kv, depth, rows)
    of, of_layers = weights.of, len(shape.layers) * shape.per_layer
    ops.place()
    ops.embed(of("embedding", shape.hidden), shape.hidden)
    if shape.per_layer:
        ops.embed(of("per_layer_table", of_layers), of_layers)
        ops.project([(of("per_layer_model_projection", shape.hidden), of_layers, shape.hidden)])
        ops.norm(shape.per_layer, rows * len(shape.layers), residual=True)
    ops.angles(shape.pairs[True])
    ops.angles(shape.pairs[False])
    for i in range(len(shape.layers)):
        decoder_layer(ops, shape, i)
    ops.norm(shape.hidden, again=True)
    ops.project([(of("embedding", shape.hidden), shape.vocab, shape.hidden)])
    return ops.launches


def accept(shape, rows):
    """The choice of the target's tokens, and acceptance: src/device/passes.rs."""
    ops = Ops(None, None, 1, rows)
    ops.argmax(shape.vocab)
    ops.run("accept", (1,), 256, bytes=8 * shape.hidden, near=5)
    return ops.launches


def draft(target, assistant, table, first, weights, kv, depth):
    """A step of the assistant, the `first` of a draft or not: src/gemma4/assistant.rs. `table`: the type of the target's embedding."""
    shape, ops, of = Shape(assistant["text_config"]), Ops(weights, kv, depth, 1, True), weights.of
    ops.run("begin_step", (1,), 256, bytes=8 * target.hidden, near=4)
    ops.embed(table, target.hidden)
    ops.project([(of("pre", 2 * target.hidden), shape.hidden, 2 * target.hidden)])
    if first:
        ops.angles(shape.pairs[True])
        ops.angles(shape.pairs[False])
    for i in range(len(shape.layers)):
        decoder_layer(ops, shape, i)
    ops.norm(shape.hidden, again=True)
    scored, head = shape.vocab, of("embedding", shape.hidden)
    if assistant["use_ordered_embeddings"]:
        count, best = assistant["num_centroids"], assistant["centroid_intermediate_top_k"]
        scored, exponent = best * (shape.vocab // count), (count - 1).bit_length()
        quantized = set()
        ops.project([(of("centroids", shape.hidden), count, shape.hidden)], quantized=quantized)
        sort = exponent * (exponent + 1) / 2  # steps with a barrier each
        ops.run("top_k", (1,), min(max(2**exponent // 2, 32), 1024), bytes=4 * count, near=2 + sort / 5)
        ops.project([(head, shape.vocab // count, shape.hidden)], buckets=(best, best, best), quantized=quantized)
    else:
        ops.project([(head, shape.vocab, shape.hidden)])
    ops.project([(of("post", shape.hidden), target.hidden, shape.hidden)], again=not assistant["use_ordered_embeddings"])
    ops.argmax(scored)
    return ops.launches


@functools.cache
def bytes_of(name, weights):
    """Bytes of a variant's matrices, and of its assistant's."""
    text, assistant = published(name)
    shape, weights, total = Shape(text), Weights(weights, "bf16"), 0
    passes = [verify(shape, weights, "f16", 1, 1), draft(shape, assistant, "bf16", False, weights, "f16", 1)]
    total = sum(launch.bytes for launches in passes for launch in launches if launch.kernel.startswith("matmul"))
    size = lambda tensor, inputs: FORMATS[weights.of(tensor, inputs)].bytes / FORMATS[weights.of(tensor, inputs)].block
    if shape.experts:
        count, top_k, width = shape.experts
        others = len(shape.layers) * (count - top_k) * shape.hidden * width
        total += others * (2 * size("gate_up", shape.hidden) + size("down", width))
    return total + shape.vocab * len(shape.layers) * shape.per_layer * size("per_layer_table", 256)


def check(path):
    """Compares launches with those of the library."""
    launches = 0
    for case in json.loads(Path(path).read_text()):
        shape, assistant, rows = Shape(case["target"].get("text_config", case["target"])), case["assistant"], case["rows"]
        kv, depth, (target, drafter) = case["kv"], case["depth"], (Weights(*types) for types in case["weights"])
        passes, table = [accept(shape, 1)], target.of("embedding", shape.hidden)
        for link in range(rows - 1):
            passes.append(draft(shape, assistant, table, link == 0, drafter, kv, depth))
        passes += [verify(shape, target, kv, depth, rows), accept(shape, rows)]
        if len(passes) != len(case["passes"]):
            sys.exit(f"{case['what']}, {rows} rows: {len(case['passes'])} passes; {len(passes)} here")
        for i, (want, found) in enumerate(zip(case["passes"], passes)):
            found = [[launch.kernel, list(launch.grid), launch.threads] for launch in found]
            at = next((n for n, (a, b) in enumerate(zip(want, found)) if a != b), min(len(want), len(found)))
            if want != found:
                where = f"{case['what']}, weights {case['weights']}, {kv} K/V, {rows} rows, pass {i}, launch {at}"
                sys.exit(f"{where}: {want[at:at + 1]} of {len(want)}; {found[at:at + 1]} of {len(found)} here")
            launches += len(want)
    print(f"{launches} launches are the library's")


if __name__ == "__main__":
    check(sys.argv[1])
