#!/usr/bin/env python3
"""Dequantizes blocks with PyPI's `gguf`: for every TYPE.blocks in a directory, writes TYPE.values, f32.

    dequantize.py DIRECTORY

Needs: pip install gguf numpy
"""

import pathlib
import sys

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

np.seterr(all="ignore")  # random scales may be infinite
for path in pathlib.Path(sys.argv[1]).glob("*.blocks"):
    kind = GGMLQuantizationType[path.stem]
    blocks = np.fromfile(path, np.uint8).reshape(-1, GGML_QUANT_SIZES[kind][1])
    dequantize(blocks, kind).astype(np.float32).tofile(path.with_suffix(".values"))
