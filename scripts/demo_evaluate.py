#!/usr/bin/env python3
"""Losses and acceptance of a demo pair on held-out text, with transformers' own modules in f32.

    pip install torch transformers==5.17.0 safetensors tokenizers numpy
    python scripts/demo_corpus.py corpus
    python scripts/demo_evaluate.py            # models/demo -> target/train_demo/evaluation.json, the figures of its README.md

Acceptance is for greedy decoding with blocks of 4: three drafts per round, of which those before the first one that
differs from the target's own choice are accepted, as a share of all drafts.  Prompts are those of
models/demo/prompts.json and random windows of three held-out sets (demo_corpus.py):

    heldout           files of the training crates
    heldout_distinct  those of them that are not near-duplicates of training text
    heldout_crates    other crates, without near-duplicates; as many windows from each
"""
import argparse, json, platform, sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM

from demo_corpus import ROOT, WORK, documents
from train_demo import BLOCK, BOS, EOS, FULL, S, token_bytes

SETS = ["prompts.json", "heldout", "heldout_distinct", "heldout_crates"]
PROMPT, CONTINUED = 160, 128  # tokens of a window's prompt, and tokens generated after it


class Pair:
    """The Gemma pair; subclasses override what differs in other families."""
    eos, start = EOS, [BOS]  # the id that ends a text, the ids before a prompt

    def __init__(self, path, device):
        self.device = device
        self.target = Gemma4ForCausalLM.from_pretrained(path / "target", dtype=torch.float32).to(device).eval()
        self.assistant = Gemma4AssistantForCausalLM.from_pretrained(
            path / "assistant", dtype=torch.float32).to(device).eval()
        self.tokenizer = Tokenizer.from_file(str(path / "target/tokenizer.json"))
        self.bytes = token_bytes(path).to(device)

    def greedy(self, prompts, count):
        """Prompts of one length, with the target's continuations: `count` tokens, or fewer with `eos` as the last."""
        past, x = None, torch.tensor(prompts, device=self.device)
        out = []
        for _ in range(count):
            o = self.target(x, past_key_values=past, use_cache=True, logits_to_keep=1)
            past, x = o.past_key_values, o.logits[:, -1:].argmax(-1)
            out.append(x)
        rows = torch.cat(out, 1).tolist()
        return [p + (r[: r.index(self.eos) + 1] if self.eos in r else r) for p, r in zip(prompts, rows)]

    def rounds(self, ids, newest, block):
        """Speculative rounds along a greedy continuation, from position `newest` on: that of the last known token.

        Returns the rounds in which each draft was accepted, the rounds, and the drafts that the dense head agrees with."""
        o = self.target(torch.tensor([ids], device=self.device), output_hidden_states=True,
                        return_shared_kv_states=True, use_cache=False)
        hidden, kv, window = o.hidden_states[-1], o.shared_kv_states, self.target.config.sliding_window
        hits, rounds, covered = np.zeros(block - 1, dtype=int), 0, 0
        while newest + block <= len(ids):
            first = {FULL: 0, S: max(0, newest - window + 1)}
            seen = {t: tuple(z[:, :, first[t]: newest] for z in kv[t]) for t in kv}
            h, token, accepted = hidden[:, newest - 1: newest], ids[newest], 0
            for j in range(block - 1):
                e = self.target.get_input_embeddings()(torch.tensor([[token]], device=self.device))
                r = self.assistant(
                    inputs_embeds=torch.cat((e, h), -1), position_ids=torch.tensor([[newest]], device=self.device),
                    attention_mask=None, shared_kv_states=seen, output_hidden_states=True)
                token, h = r.logits.argmax().item(), r.last_hidden_state
                covered += self.assistant.lm_head(r.hidden_states[-1]).argmax().item() == token
                accepted += accepted == j and token == ids[newest + j + 1]
            hits[:accepted] += 1
            rounds, newest = rounds + 1, newest + accepted + 1
        return hits, rounds, covered

    def continued(self, prompts, count):
        same = len({len(p) for p in prompts}) == 1
        return self.greedy(prompts, count) if same else [self.greedy([p], count)[0] for p in prompts]

    def acceptance(self, prompts, texts, block=BLOCK):
        """Of the drafts in blocks of `block` rows along the texts that continue the prompts greedily."""
        parts = [self.rounds(t, len(p), block) for t, p in zip(texts, prompts)]
        hits, rounds, covered = (sum(p[i] for p in parts) for i in range(3))
        drafts = rounds * (block - 1)
        rate = hits.sum() / drafts
        # The standard error of a ratio of sums: prompts are independent, the rounds of one are not.
        spread = np.array([h.sum() - rate * n * (block - 1) for h, n, _ in parts])
        error = np.sqrt((spread ** 2).sum() * len(parts) / (len(parts) - 1)) / drafts
        return dict(
            prompts=len(parts), rounds=rounds, acceptance=rate, standard_error=error,
            per_position=(hits / rounds).tolist(), tokens_per_pass=1 + hits.sum() / rounds,
            centroid_coverage=covered / drafts,
            each=[round(h.sum() / (n * (block - 1)), 3) if n else None for h, n, _ in parts])

    def loss(self, texts, limit, length=1024):
        """Nats per byte over windows of `length` tokens: all of every text, or evenly spaced ones, `limit` tokens in all."""
        nats = size = windows = 0
        for ids in texts:
            x = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
            keep = min(len(x), limit // len(texts) // length)
            for b in x[np.linspace(0, len(x) - 1, keep).astype(int)].to(self.device):
                logits = self.target(b[None, :-1], use_cache=False).logits[0]
                nats += F.cross_entropy(logits.float(), b[1:], reduction="sum").item()
                size += self.bytes[b[1:]].sum().item()
                windows += 1
        return dict(nats_per_byte=nats / size, windows=windows)


def windows_of(texts, count, front):
    """`count` prompts cut from the texts' tokens at random positions, equally many from each, with `front` before each."""
    g = torch.Generator().manual_seed(1)
    each = max(1, count // len(texts))
    starts = [torch.randint(len(ids) - 200, (each,), generator=g).tolist() for ids in texts]
    return [front + ids[s: s + PROMPT] for ids, of_text in zip(texts, starts) for s in of_text]


def held_out(work, tokenizer, sets, eos):
    """The texts of every set, as token ids: one of all files, or one per crate."""
    files = {}
    for d in documents(work):
        names = [d["split"]] + ["heldout_distinct"] * (d["split"] == "heldout" and not d["near"])
        names = [name for name in names if name in sets]
        ids = tokenizer.encode(d["text"]).ids + [eos] if names else []
        for name in names:
            key = d["crate"] if name == "heldout_crates" else "files"
            files.setdefault(name, {}).setdefault(key, []).extend(ids)
    return files


@torch.inference_mode()
def evaluate(a, pair, blocks=(BLOCK,)):
    result = dict(
        command=" ".join(["python", f"scripts/{Path(sys.argv[0]).name}", *sys.argv[1:]]), torch=torch.__version__,
        transformers=transformers.__version__, machine=platform.machine())

    def report(name, **figures):
        result.setdefault(name, {}).update(figures)
        print(name, json.dumps(figures), flush=True)
        a.out.write_text(json.dumps(result, indent=1) + "\n")

    def accepted(name, prompts, count):
        texts = pair.continued(prompts, count)
        for block in blocks:
            figures = pair.acceptance(prompts, texts, block)
            report(name, **(figures if len(blocks) == 1 else {f"blocks_of_{block}": figures}))

    if SETS[0] in a.sets:
        prompts = json.loads((ROOT / "models/demo/prompts.json").read_text())
        accepted(SETS[0], [pair.tokenizer.encode(p).ids for p in prompts], 160)
    for name, texts in held_out(a.corpus, pair.tokenizer, a.sets, pair.eos).items():
        report(name, crates=list(texts), tokens=sum(map(len, texts.values())))
        texts = list(texts.values())
        accepted(name, windows_of(texts, a.windows, pair.start), CONTINUED)
        report(name, loss=pair.loss(texts, a.loss_tokens))


def arguments(description, pair, work):
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--pair", type=Path, default=ROOT / pair, help="directory of the pair, laid out like the demo pair")
    p.add_argument("--corpus", type=Path, default=WORK, help="directory of corpus.jsonl")
    p.add_argument("--out", type=Path, default=work / "evaluation.json", help="output file")
    p.add_argument("--sets", nargs="+", choices=SETS, default=SETS, help="sets to measure; they are independent of each other")
    p.add_argument("--windows", type=int, default=48, help="random windows of each held-out set")
    p.add_argument("--loss-tokens", type=int, default=98_304, help="tokens of each held-out set to measure the loss on")
    p.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    p.add_argument("--threads", type=int, default=1, help="CPU threads")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    return a


if __name__ == "__main__":
    a = arguments(__doc__, "models/demo", WORK)
    evaluate(a, Pair(a.pair, a.device))
