#!/usr/bin/env python3
"""Golden blocks for kernels/tests/turbo_golden.rs, from the published description of the formats alone.

    python3 scripts/turbo_golden.py > kernels/tests/turbo_golden.txt          (needs numpy)

Each line: block type, seed of the input vector, the block in hexadecimal. The inputs are generated from integers, so that they are
the same in any language: x[i] = (h >> 40) / 2^22 - 2 with h the i-th output of splitmix64(seed), plus 1.5 on every fourth
element of odd seeds (a constant part), times 2^(seed % 5 - 2). Arithmetic is in double precision; a vector with an element
or a norm so close to a boundary that single precision could round differently is skipped.
"""

import numpy as np

SIGNS_1 = 0x49F250A9A4C63BBB42F85949E46A0359
SIGNS_2 = 0xBEA56562B7A5357A3F628FDC16ACEE90
CENTROIDS = {
    "turbo2": [0.039994, 0.133462],
    "turbo3": [0.021460, 0.065717, 0.117832, 0.190685],
    "turbo4": [0.011353, 0.034311, 0.058069, 0.083317, 0.111065, 0.143047, 0.182907, 0.241556],
}
BOUNDARIES = {
    "turbo2": [0.086728],
    "turbo3": [0.043589, 0.091775, 0.154259],
    "turbo4": [0.022832, 0.046190, 0.070693, 0.097191, 0.127056, 0.162977, 0.212232],
}
MASK = (1 << 64) - 1
VECTORS = 40


def vector(seed):
    state, x = seed, []
    for i in range(128):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        z ^= z >> 31
        value = (z >> 40) / 2**22 - 2.0
        if seed % 2 == 1 and i % 4 == 0:
            value += 1.5
        x.append(value * 2.0 ** (seed % 5 - 2))
    return np.array(x)


def signs(mask):
    return np.array([-1.0 if mask >> i & 1 else 1.0 for i in range(128)])


def hadamard():
    h = np.ones((1, 1))
    while len(h) < 128:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(128.0)


def bits_to_bytes(fields, width):
    """Packs fields of `width` bits, the first lowest."""
    per = 8 // width
    return bytes(sum(int(fields[at + j]) << (width * j) for j in range(per)) for at in range(0, len(fields), per))


def block(name, x):
    """The block's bytes, or None if single precision could give different ones."""
    upper, bounds = CENTROIDS[name], BOUNDARIES[name]
    centroids = np.array([-c for c in reversed(upper)] + upper)
    boundaries = np.array([-b for b in reversed(bounds)] + [0.0] + bounds)
    norm = np.linalg.norm(x)
    u = signs(SIGNS_2) * (hadamard() @ (signs(SIGNS_1) * x)) / norm
    if np.abs(u[:, None] - boundaries[None, :]).min() < 1e-6:
        return None
    codes = (u[:, None] >= boundaries[None, :]).sum(axis=1)
    scale = norm / np.linalg.norm(centroids[codes])
    if np.float16(scale * (1 - 1e-6)) != np.float16(scale * (1 + 1e-6)):
        return None
    head = np.float16(scale).astype("<f2").tobytes()
    if name == "turbo2":
        return head + bits_to_bytes(codes, 2)
    if name == "turbo3":
        return head + bits_to_bytes(codes & 3, 2) + bits_to_bytes(codes >> 2, 1)
    return head + bits_to_bytes(codes, 4)


for name in CENTROIDS:
    for seed in range(VECTORS):
        data = block(name, vector(seed))
        if data is not None:
            print(name, seed, data.hex())
