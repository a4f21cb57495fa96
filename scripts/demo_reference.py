#!/usr/bin/env python3
"""Outputs of transformers for a demo pair's target in f32: tests/demo/ and tests/demo_qwen/, references of
tests/quantized and tests/speculative_equals_greedy.rs.

    python3 scripts/demo_reference.py         (needs torch, transformers 5.17.0, tokenizers, safetensors)
    python3 scripts/demo_reference.py qwen    (with transformers 5.23.0)

Every prompt of models/demo/prompts.json, which are held out of the training text, is continued greedily by 64 tokens. The
tensors of greedy.safetensors:

    input_ids.N    (tokens,)      prompt N, counted from 0
    greedy_ids.N   (64,)          what the target continues it with
    logits.N       (4096,)        its logits after the prompt, soft-capped where the family does that
    margins.N      (64,)          by how much each chosen token's logit is above the second best
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
TOKENS = 64
# Argument: class, checkpoint, directory of the reference.
FAMILIES = {
    "gemma": ("Gemma4ForCausalLM", ROOT / "models/demo/target", ROOT / "tests/demo"),
    "qwen": ("Qwen3_5ForCausalLM", ROOT / "models/demo-qwen", ROOT / "tests/demo_qwen"),
}

name, path, directory = FAMILIES[sys.argv[1] if len(sys.argv) > 1 else "gemma"]
torch.set_num_threads(1)
tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
target = getattr(transformers, name).from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()

expected = {}
for n, prompt in enumerate(json.loads((ROOT / "models/demo/prompts.json").read_text())):
    prompt = tokenizer.encode(prompt).ids
    ids, margins, cache, first = torch.tensor([prompt]), [], None, None
    with torch.inference_mode():
        for _ in range(TOKENS):
            new = ids if cache is None else ids[:, -1:]
            output = target(input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, logits = output.past_key_values, output.logits[0, -1]
            first = logits if first is None else first
            best = logits.topk(2)
            margins.append((best.values[0] - best.values[1]).item())
            ids = torch.cat([ids, best.indices[:1, None]], 1)
    expected |= {
        f"input_ids.{n}": torch.tensor(prompt),
        f"greedy_ids.{n}": ids[0, len(prompt) :].clone(),
        f"logits.{n}": first.clone(),
        f"margins.{n}": torch.tensor(margins),
    }
    print(f"prompt {n}: {len(prompt)} tokens, smallest margin {min(margins):.3f}")

directory.mkdir(exist_ok=True)
save_file(expected, directory / "greedy.safetensors")
case = {"case": "demo", "transformers": transformers.__version__, "torch": torch.__version__, "tokens": TOKENS}
(directory / "case.json").write_text(json.dumps(case, indent=1) + "\n")
