"""Writes a tiny Gemma 4 that calls the tool `weather` once, and says "It is sunny." after its result:
`python3 scripts/tiny_caller.py OUT_DIR`. For client tests; small models do not generate tool calls by themselves.

The shapes are those of tests/fixtures/dense, with attention and MLPs modified to add nothing, except for the last MLP: each of its first units maps
one token to another. The tokens of the script have distinct directions, so every reply follows the script."""

import array
import json
import pathlib
import random
import shutil
import struct
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURE = ROOT / "tests/fixtures/dense/target"
# Gemma's control tokens.
CONTROL = {
    0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>", 46: "<|tool>", 47: "<tool|>", 48: "<|tool_call>",
    49: "<tool_call|>", 50: "<|tool_response>", 51: "<tool_response|>", 52: '<|"|>', 98: "<|think|>", 100: "<|channel>",
    101: "<channel|>", 105: "<|turn>", 106: "<turn|>",
}
CALL, ANSWER = "call:weather{city:Ulm}", "It\u2581is\u2581sunny."
# Token transitions: <channel|> ends the template's generation prompt, <tool_response|> a result.
SCRIPT = ["<channel|>", "<|tool_call>", CALL, "<tool_call|>", "<|tool_response>"], ["<tool_response|>", ANSWER, "<eos>"]


def vocabulary(size):
    tokens = dict(CONTROL)
    rest = ["\n", "\u2581", *map(chr, range(33, 127)), CALL, ANSWER, *(f"<0x{byte:02X}>" for byte in range(256))]
    free = (id for id in range(size) if id not in tokens)
    tokens.update({next(free): token for token in rest})
    tokens.update({id: f"[unused{id}]" for id in range(size) if id not in tokens})
    return {token: id for id, token in tokens.items()}


def tokenizer(vocab):
    added = [
        {"id": id, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for id, token in CONTROL.items()
    ]
    steps = [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "vocab": vocab, "merges": []},
    }


def tensors(vocab):
    """Name to (header, values) of the fixture's file, modified for the script."""
    data = (FIXTURE / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    made = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        made[name] = (entry["shape"], array.array("f", data[8 + length + begin : 8 + length + end]))
    last = max(int(name.split(".")[2]) for name in made if ".layers." in name)
    for name, (_, values) in made.items():
        if name.endswith(("o_proj.weight", "mlp.down_proj.weight")):
            values[:] = array.array("f", [0.0] * len(values))
        if name.endswith(("layer_scalar", "layernorm.weight", "model.norm.weight")):
            values[:] = array.array("f", [4.0 if f".{last}.post_feedforward" in name else 1.0] * len(values))
    script = sorted({token for chain in SCRIPT for token in chain})
    shape, embedding = made["model.embed_tokens.weight"]
    hidden, direction = shape[1], {token: i for i, token in enumerate(script)}
    numbers = random.Random(1)
    for token, id in vocab.items():
        row = [0.0] * hidden
        if token in direction:
            row[direction[token]] = 1.0
        else:
            row[len(script) :] = [numbers.gauss(0, (hidden - len(script)) ** -0.5) for _ in range(hidden - len(script))]
        embedding[id * hidden : (id + 1) * hidden] = array.array("f", row)
    gate, up, down = (made[f"model.layers.{last}.mlp.{part}_proj.weight"] for part in ["gate", "up", "down"])
    units = gate[0][0]
    gate[1][:] = up[1][:] = array.array("f", [0.0] * len(gate[1]))
    steps = [step for chain in SCRIPT for step in zip(chain, chain[1:])]
    for unit, (token, following) in enumerate(steps):
        gate[1][unit * hidden + direction[token]] = up[1][unit * hidden + direction[token]] = 1.0
        down[1][direction[following] * units + unit] = 1.0
    return made


def write(path, made):
    header, blob = {}, b""
    for name, (shape, values) in made.items():
        bytes_ = values.tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(blob), len(blob) + len(bytes_)]}
        blob += bytes_
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + blob)


if __name__ == "__main__":
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((FIXTURE / "config.json").read_text())
    vocab = vocabulary(config["vocab_size"])
    shutil.copy(FIXTURE / "config.json", out)
    shutil.copy(ROOT / "tests/chat_templates/gemma_tools.jinja", out / "chat_template.jinja")
    (out / "tokenizer.json").write_text(json.dumps(tokenizer(vocab)))
    write(out / "model.safetensors", tensors(vocab))
