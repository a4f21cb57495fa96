"""Gives the demo target a vocabulary of 262144 tokens and half a million merges: large_tokenizer.py models/demo/target DIRECTORY"""
import json
import random
import shutil
import struct
import sys
from pathlib import Path

TOKENS = 262144
source, directory = Path(sys.argv[1]), Path(sys.argv[2])
random.seed(1)

ranges = [(0x21, 0x7F), (0xA1, 0x250), (0x400, 0x500), (0x4E00, 0x5E00)]
characters = [chr(c) for first, end in ranges for c in range(first, end)] + ["\u2581"]
tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"] + [f"<unused{i}>" for i in range(99)]
tokens += [f"<0x{byte:02X}>" for byte in range(256)] + characters
known, merges = set(tokens), []
mergeable = characters[:94] + ["\u2581"] * 30
before = {}  # the first characters of the tokens that end in a text


def add(token, *pairs):
    known.add(token)
    tokens.append(token)
    mergeable.append(token)
    before.setdefault(token[1:], []).append(token[0])
    merges.extend(pairs)


while len(tokens) < TOKENS:
    end = random.choice(mergeable)
    if len(mergeable) > 5000 and random.random() < 0.97:
        # A token with two splits.
        first = before.get(end[:-1]) if 2 <= len(end) < 16 else None
        token = first and random.choice(first) + end
        if token and token not in known:
            add(token, (token[0], end), (token[:-1], token[-1]))
        continue
    start = random.choice(mergeable)
    if len(start + end) <= 16 and start + end not in known:
        add(start + end, (start, end))

shutil.copytree(source, directory)
file = json.loads((source / "tokenizer.json").read_text())
file["added_tokens"] = [added for added in file["added_tokens"] if added["content"] in known]
file["model"]["vocab"] = {token: i for i, token in enumerate(tokens)}
file["model"]["merges"] = merges
(directory / "tokenizer.json").write_text(json.dumps(file, ensure_ascii=False, indent=1))
config = json.loads((source / "config.json").read_text())
times = TOKENS // config["vocab_size"]
config["vocab_size"] = config["vocab_size_per_layer_input"] = TOKENS
(directory / "config.json").write_text(json.dumps(config))

weights = (source / "model.safetensors").read_bytes()
(length,) = struct.unpack("<Q", weights[:8])
header, parts, end = json.loads(weights[8 : 8 + length]), [], 0
header.pop("__metadata__", None)
for name, tensor in header.items():
    first, last = tensor["data_offsets"]
    part = weights[8 + length + first : 8 + length + last]
    if "embed_tokens" in name:
        part, tensor["shape"][0] = part * times, TOKENS
    tensor["data_offsets"] = [end, end + len(part)]
    end += len(part)
    parts.append(part)
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
(directory / "model.safetensors").write_bytes(b"".join([struct.pack("<Q", len(text)), text, *parts]))
print(f"{len(tokens)} tokens, {len(merges)} merges")
