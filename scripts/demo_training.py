"""What the training of both demo pairs shares: token ids, a trainer with checkpoints, and the stages of a command line."""
import argparse, collections, os, time, unicodedata
from pathlib import Path

import numpy as np
import torch

from demo_corpus import documents


def write_ids(corpus, work, tok, eos, every=1):
    """The splits of the corpus as 16-bit ids, every text followed by `eos`; of training text every `every`th file."""
    same = lambda text: unicodedata.normalize("NFC", text)
    for split in ("heldout", "heldout_crates", "train"):
        texts = [d["text"] for d in documents(corpus) if d["split"] == split]
        texts, ids = texts[:: every if split == "train" else 1], []
        for i in range(0, len(texts), 256):
            part = texts[i: i + 256]
            encoded = [e.ids for e in tok.encode_batch(part)]
            if split != "train":  # lossless, bytes without a piece included
                decoded = [tok.decode(e, skip_special_tokens=False) for e in encoded]
                assert all(same(d).endswith(same(t)) for d, t in zip(decoded, part))  # <bos> first
            ids += [np.array(e + [eos], dtype=np.uint16) for e in encoded]
        ids, size = np.concatenate(ids), sum(len(text.encode()) for text in texts)
        ids.tofile(work / f"{split}.u16")
        print(f"{split}: {len(ids)} tokens, {size} bytes, {size / len(ids):.3f} bytes per token")


def load_ids(a, split):
    return torch.from_numpy(np.fromfile(a.work / f"{split}.u16", dtype=np.uint16).astype(np.int32)).to(a.device)


def windows(ids, batch, length):
    """Random windows of the ids."""
    start = torch.randint(len(ids) - length, (batch, 1), device=ids.device)
    return ids[start + torch.arange(length, device=ids.device)].long()


class Muon:
    """Momentum orthogonalised by Newton-Schulz for the matrices, all of one shape in one batch."""

    def __init__(self, params, momentum=0.95, decay=0.1):
        self.shapes, self.momentum, self.decay = collections.defaultdict(list), momentum, decay
        for p in params:
            self.shapes[p.shape].append(p)
        self.buffers = {s: torch.zeros(len(ps), *s, device=ps[0].device) for s, ps in self.shapes.items()}

    @torch.no_grad()
    def step(self, lr):
        for shape, params in self.shapes.items():
            g, buf = torch.stack([p.grad for p in params]), self.buffers[shape]
            buf.lerp_(g, 1 - self.momentum)
            x = g.lerp(buf, self.momentum).bfloat16()
            if shape[0] > shape[1]:
                x = x.mT
            x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-7)
            for c0, c1, c2 in [(3.4445, -4.7750, 2.0315)] * 5:
                y = x @ x.mT
                x = c0 * x + (c1 * y + c2 * y @ y) @ x
            if shape[0] > shape[1]:
                x = x.mT
            x = x.float() * (lr * max(1, shape[0] / shape[1]) ** 0.5)
            torch._foreach_mul_(params, 1 - lr * self.decay)
            torch._foreach_sub_(params, list(x))


class Trainer:
    """Muon for matrices, AdamW for the rest; a schedule over a wall-clock budget; checkpoints to continue from."""

    def __init__(self, a, name, model, minutes, muon_lr=0.012, adam_lr=2.5e-3, warmup=200):
        self.a, self.path, self.model, self.budget = a, a.work / f"{name}.pt", model, minutes * 60
        self.muon_lr, self.adam_lr, self.warmup = muon_lr, adam_lr, warmup
        named = dict(model.named_parameters())  # a tied head appears once
        table = lambda n: "embed" in n or "centroids" in n
        matrices = [p for n, p in named.items() if p.dim() == 2 and not table(n)]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(
            [dict(params=[p for n, p in named.items() if table(n)], weight_decay=0.1),
             dict(params=[p for p in named.values() if p.dim() != 2], weight_decay=0.0)],
            lr=adam_lr, betas=(0.9, 0.95), fused=a.device.type == "cuda")
        self.used, self.steps, self.tokens = 0.0, 0, 0
        if self.path.exists():
            c = torch.load(self.path, map_location=a.device)
            model.load_state_dict(c["model"])
            if "adam" in c:
                self.adam.load_state_dict(c["adam"])
                for s, b in c["muon"].items():
                    self.muon.buffers[s].copy_(b)
            self.used, self.steps, self.tokens = c["used"], c["steps"], c["tokens"]
        self.mark = self.saved = self.logged = time.time()

    @property
    def progress(self):
        return self.used / self.budget

    def step(self, loss, tokens):
        """Backward and update; the rate holds to 40 % of the budget, then falls linearly to zero."""
        rate = min(1.0, (self.steps + 1) / self.warmup, max(0.0, (1 - self.progress) / 0.6))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.muon.step(self.muon_lr * rate)
        for g in self.adam.param_groups:
            g["lr"] = self.adam_lr * rate
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        self.steps, self.tokens = self.steps + 1, self.tokens + tokens
        if self.a.device.type == "cuda" and self.steps % 8 == 0:
            torch.cuda.synchronize()  # else the clock would run ahead of the device
        now = time.time()
        self.used, self.mark = self.used + now - self.mark, now

    def log_due(self, seconds=20):
        if time.time() - self.logged < seconds:
            return False
        self.logged = time.time()
        return True

    def log(self, text):
        print(f"{self.path.stem} {self.used:6.0f} s  step {self.steps}  {self.tokens / 1e6:.1f} M tokens  {text}",
              flush=True)

    def save(self, final=False):
        state = dict(model=self.model.state_dict(), used=self.used, steps=self.steps, tokens=self.tokens)
        if not final:
            state |= dict(adam=self.adam.state_dict(), muon=dict(self.muon.buffers))
        torch.save(state, self.path.with_suffix(".tmp"))
        os.replace(self.path.with_suffix(".tmp"), self.path)
        self.saved = time.time()


@torch.no_grad()
def continue_text(model, prompts, count, temperature=0.0):
    """The target's own continuations, greedy or sampled; <eos> does not stop them, the next file begins."""
    out, past, x = [prompts], None, prompts
    for _ in range(count):
        o = model(x, past_key_values=past, use_cache=True, logits_to_keep=1)
        logits, past = o.logits[:, -1].float(), o.past_key_values
        x = torch.multinomial((logits / temperature).softmax(-1), 1) if temperature else logits.argmax(-1, keepdim=True)
        out.append(x)
    return torch.cat(out, 1)


def parser(description, stages):
    """The options of every pair; `--work` and others are the pair's own."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("stages", nargs="+", choices=[s.__name__ for s in stages])
    p.add_argument("--out", type=Path, help="output directory; default: pair/ in --work")
    p.add_argument("--device", type=torch.device, default=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    p.add_argument("--threads", type=int, help="CPU threads")
    return p


def run(p, stages):
    """Runs the stages that the command line names, in its order."""
    a = p.parse_args()
    a.out = a.out or a.work / "pair"
    a.work.mkdir(parents=True, exist_ok=True)
    if a.threads:
        torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    by_name = {stage.__name__: stage for stage in stages}
    for name in a.stages:
        by_name[name](a)
