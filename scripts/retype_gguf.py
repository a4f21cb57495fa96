#!/usr/bin/env python3
"""Replace a GGUF file's tensors of one type by random blocks of another, to measure types that `quantize` does not write.

    pip install gguf numpy
    scripts/retype_gguf.py IN.gguf OUT.gguf IQ4_XS IQ3_XXS

The new type must have blocks of 256 that begin with an f16 scale. The model then computes noise, at the type's true speed.
"""

import sys

import gguf
import numpy as np

source, target, old, new = sys.argv[1:]
old, new = gguf.GGMLQuantizationType[old], gguf.GGMLQuantizationType[new]
block, block_bytes = gguf.GGML_QUANT_SIZES[new]
assert block == 256, f"{new.name}: blocks of {block}"
reader = gguf.GGUFReader(source)
writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
for key, field in reader.fields.items():
    if not key.startswith("GGUF.") and key != "general.architecture":
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], element)
random = np.random.default_rng(1)
for tensor in reader.tensors:
    data, kind = tensor.data, tensor.tensor_type
    if kind == old:
        *rows, inputs = (int(size) for size in reversed(tensor.shape))
        blocks = random.integers(0, 256, (*rows, inputs // block, block_bytes), dtype=np.uint8)
        blocks[..., :2] = np.full(1, 0.002, np.float16).view(np.uint8)
        data, kind = blocks.reshape(*rows, -1), new
    writer.add_tensor(tensor.name, data, raw_shape=data.shape if data.dtype == np.uint8 else None, raw_dtype=kind)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
