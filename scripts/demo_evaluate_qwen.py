#!/usr/bin/env python3
"""Losses and acceptance of a Qwen3.5 demo pair on held-out text, with transformers' own modules in f32.

    pip install torch transformers==5.23.0 safetensors tokenizers numpy
    python scripts/demo_corpus.py corpus
    python scripts/demo_evaluate_qwen.py    # models/demo-qwen -> target/train_demo/qwen/evaluation.json

Acceptance is measured as demo_evaluate.py does, on its prompts and windows, in blocks of 3 and of 4: two and three drafts
per round.  The head keeps K/V of the rows built from the trunk's hidden states; those of its own drafts are dropped.
"""
import copy

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import DynamicCache, Qwen3_5ForCausalLM
from transformers.modeling_layers import MtpLayer
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

import demo_evaluate
from demo_corpus import WORK
from make_qwen35_fixtures import MTP_NAMES
from train_demo_qwen import EOS, SPECIAL, VOCAB


class Pair(demo_evaluate.Pair):
    eos, start = EOS, []

    def __init__(self, path, device):
        self.device = device
        self.target = Qwen3_5ForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
        one = copy.deepcopy(self.target.config)
        one.num_hidden_layers, one.layer_types = 1, ["full_attention"]
        one._attn_implementation = "eager"
        self.one = one
        self.head = MtpLayer(one, qwen.Qwen3_5DecoderLayer, qwen.Qwen3_5RMSNorm, 0)
        stored, names = load_file(path / "model.safetensors"), {}
        for ours, theirs in MTP_NAMES.items():
            names |= {n: n.replace(f"mtp.{theirs}.", f"{ours}.", 1) for n in stored if n.startswith(f"mtp.{theirs}.")}
        self.head.load_state_dict({names[n]: stored[n] for n in stored if n.startswith("mtp.")})
        self.head.float().to(device).eval()
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        vocab = self.tokenizer.get_vocab(with_added_tokens=True)
        self.bytes = torch.zeros(VOCAB, device=device)
        for piece, i in vocab.items():  # a character of a byte-level piece is a byte
            self.bytes[i] = 0 if piece in SPECIAL else len(piece)

    def nextn(self, tokens, hidden, cache):
        """The head's hidden of rows (token, hidden) that follow those of `cache`."""
        text, rows, past = self.target.model, tokens.shape[1], cache.get_seq_length()
        position = torch.arange(past, past + rows, device=self.device).view(1, 1, -1).expand(3, 1, -1)
        mask = torch.full((rows, past + rows), -torch.inf, device=self.device).triu(past + 1)[None, None]
        return self.head(text.embed_tokens(tokens), hidden, text.rotary_emb(hidden, position), mask, position[0], cache)

    def rounds(self, ids, newest, block):
        x = torch.tensor([ids], device=self.device)
        hidden = self.target.model(x, use_cache=False).last_hidden_state
        cache, hits, rounds = DynamicCache(config=self.one), np.zeros(block - 1, dtype=int), 0
        while newest + block <= len(ids):
            known, accepted = cache.get_seq_length(), 0
            m = self.nextn(x[:, known + 1: newest + 1], hidden[:, known: newest], cache)[:, -1:]
            for j in range(block - 1):
                token = self.target.lm_head(m).argmax(-1)
                accepted += accepted == j and token.item() == ids[newest + j + 1]
                if j < block - 2:
                    m = self.nextn(token, m, cache)
            cache.crop(-(block - 2))  # the rows of its own drafts
            hits[:accepted] += 1
            rounds, newest = rounds + 1, newest + accepted + 1
        return hits, rounds, 0

    def acceptance(self, prompts, texts, block):
        figures = super().acceptance(prompts, texts, block)
        del figures["centroid_coverage"]  # this head scores the whole vocabulary
        return figures


if __name__ == "__main__":
    a = demo_evaluate.arguments(__doc__, "models/demo-qwen", WORK / "qwen")
    demo_evaluate.evaluate(a, Pair(a.pair, a.device), blocks=(3, 4))
