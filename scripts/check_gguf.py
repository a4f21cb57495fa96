#!/usr/bin/env python3
"""Reads GGUF files with an independent reader, PyPI's `gguf`, and compares them with their source.

    check_gguf.py FILE.gguf                              names, shapes and types can be read, values are finite
    check_gguf.py FILE.gguf --source model.safetensors   ... and match the source within the error of their type
    check_gguf.py A.gguf B.gguf ... --source SOURCE      ... and print the errors of all files per type

SOURCE is a safetensors file or a GGUF file of floating point. `--importance imatrix.gguf` weights errors with an
importance matrix. Needs: pip install gguf numpy
"""

import argparse
import collections
import json
import re
import sys

import numpy as np
from gguf import GGUFReader, GGMLQuantizationType as Type
from gguf.quants import dequantize

# Largest allowed root mean square error of a tensor, relative to that of the tensor.
BOUNDS = {
    "F32": 0.0, "F16": 1e-3, "BF16": 4e-3, "Q8_0": 0.012, "Q6_K": 0.04, "Q5_0": 0.09, "Q5_1": 0.07, "Q5_K": 0.07,
    "Q4_0": 0.18, "Q4_1": 0.14, "Q4_K": 0.14, "IQ4_NL": 0.15, "IQ4_XS": 0.15, "MXFP4": 0.2, "Q3_K": 0.28, "Q2_K": 0.45,
}

NAMES = {
    "token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head",
    "per_layer_token_embd": "embed_tokens_per_layer", "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
    "nextn.pre_projection": "pre_projection", "nextn.post_projection": "post_projection",
    "mtp.pre_projection": "pre_projection", "mtp.post_projection": "post_projection",
    "masked_embd_centroids": "masked_embedding.centroids", "mtp.centroids": "masked_embedding.centroids",
    "masked_embd_ordering": "masked_embedding.token_ordering", "mtp.token_ordering": "masked_embedding.token_ordering",
}
IN_LAYER = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "layer_output_scale": "layer_scalar", "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm", "ffn_gate_inp": "router.proj", "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale", "ffn_gate_up_exps": "experts.gate_up_proj",
    "ffn_down_exps": "experts.down_proj", "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1", "post_ffw_norm_2": "post_feedforward_layernorm_2",
}


def hugging_face_name(name):
    """The tensor's name in safetensors, without the model's prefix and `.weight`."""
    name = name.removesuffix(".weight")
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    return f"layers.{layer[1]}.{IN_LAYER[layer[2]]}" if layer else NAMES[name]


def safetensors(path):
    """Tensors of a safetensors file by their short names, widened to f32."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        raw, kind = data[start:end], entry["dtype"]
        if kind == "BF16":
            values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(raw, {"F32": np.float32, "F16": np.float16, "I64": np.int64}[kind])
        short = name.removeprefix("model.language_model.").removeprefix("model.").removesuffix(".weight")
        tensors[short] = values.reshape(entry["shape"])
    return tensors


def values(tensor):
    """A tensor's values, outermost dimension first."""
    shape = [int(size) for size in reversed(tensor.shape)]
    if tensor.tensor_type in (Type.I32, Type.I64):
        return np.asarray(tensor.data).reshape(shape)
    return dequantize(np.asarray(tensor.data), tensor.tensor_type).reshape(shape)


def source_of(path):
    if not path.endswith(".gguf"):
        return safetensors(path), hugging_face_name
    return {tensor.name: values(tensor) for tensor in GGUFReader(path).tensors}, lambda name: name


def importance_of(path):
    sums = {tensor.name: np.asarray(tensor.data) for tensor in GGUFReader(path).tensors}
    named = {name.removesuffix(".in_sum2") for name in sums if name.endswith(".in_sum2")}
    # (matrices, inputs) / (matrices, 1)
    mean = lambda name: sums[name + ".in_sum2"].reshape(sums[name + ".counts"].size, -1) / sums[name + ".counts"].reshape(-1, 1)
    return {name: mean(name) for name in named}


def check(path, source, short_name, importance):
    """Prints the problems; returns error and size per type, and the number of problems."""
    wrong, errors = 0, collections.defaultdict(lambda: [0.0, 0.0, 0])
    for tensor in GGUFReader(path).tensors:
        got, kind = values(tensor), tensor.tensor_type.name
        if not np.isfinite(got).all():
            wrong += 1
            print(f"{path}: {tensor.name}: is not finite")
        if source is None or tensor.name == "rope_freqs.weight":
            continue
        want = source.get(short_name(tensor.name))
        if want is None or want.shape != got.shape:
            wrong += 1
            print(f"{path}: {tensor.name}: is {got.shape}, the source has {None if want is None else want.shape}")
            continue
        if kind in ("I32", "I64"):
            wrong += int(not (want == got).all())
            continue
        weights = 1.0
        if tensor.name in importance:
            weights = importance[tensor.name].reshape(got.shape[:-2] + (1, -1)).astype(np.float64)
        error = (weights * (got.astype(np.float64) - want) ** 2).sum()
        size = (weights * want.astype(np.float64) ** 2).sum()
        if error > BOUNDS[kind] ** 2 * size:
            wrong += 1
            print(f"{path}: {tensor.name}: {kind}: error {np.sqrt(error / size):.4f} is more than {BOUNDS[kind]}")
        total = errors[kind]
        total[0], total[1], total[2] = total[0] + error, total[1] + size, total[2] + 1
    return errors, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--source")
    parser.add_argument("--importance")
    arguments = parser.parse_args()
    source, short_name = source_of(arguments.source) if arguments.source else (None, None)
    importance = importance_of(arguments.importance) if arguments.importance else {}
    wrong = 0
    for path in arguments.files:
        errors, own = check(path, source, short_name, importance)
        wrong += own
        reader = GGUFReader(path)
        print(f"{path}: {len(reader.tensors)} tensors, {len(reader.fields)} fields")
        for kind, (error, size, count) in sorted(errors.items()):
            print(f"  {kind:7} {count:4} tensors, relative error {np.sqrt(error / max(size, 1e-300)):.6f}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
