#!/usr/bin/env python3
"""Trains the demo pair of models/demo-qwen: a small Qwen3.5 with its NextN head, in one checkpoint.

    pip install torch transformers==5.23.0 safetensors tokenizers numpy
    python scripts/demo_corpus.py corpus                       # the crates of demo_corpus.tsv: a minute of CPU
    python scripts/train_demo_qwen.py tokenizer check          # two minutes of CPU
    python scripts/train_demo_qwen.py train own_text           # 20 minutes on --device
    python scripts/train_demo_qwen.py export                   # writes target/train_demo/qwen/pair, or --out
    python scripts/demo_evaluate_qwen.py --pair target/train_demo/qwen/pair

Stages run in the order given and read what earlier ones left in --work and --out.  `train` trains trunk and head together,
`own_text` the head alone on what the trunk writes; each for a given time, with a checkpoint every minute (`train`) from
which it continues when started again.
"""
import copy, json, time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from demo_corpus import WORK, documents
from demo_training import Trainer, continue_text, load_ids, parser, run, windows, write_ids

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
           "<tool_response>", "</tool_response>"]
EOS, IM_END = 0, 2
VOCAB = 4096
# The family's pattern once: three delta nets, one full attention. 0.8B's ties, 9B's two value heads per key head.
CONFIG = dict(
    vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=2,
    num_key_value_heads=1, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
    linear_value_head_dim=32, linear_conv_kernel_dim=4, rms_norm_eps=1e-6, max_position_embeddings=8192,
    pad_token_id=None, bos_token_id=None, eos_token_id=EOS, tie_word_embeddings=True,
    rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[6, 5, 5],
                         mrope_interleaved=True))
CHUNK = 32  # rows of a chunk of the delta rule
NEXTN_WEIGHT = 0.5  # of each of the head's two steps, added to the trunk's loss
CHAIN_FROM = 0.35  # progress at which the head's second step joins the training


# ------------------------------------------------------------------------------------------------------- tokenizer
def tokenizer(a):
    """Byte-level BPE with Qwen3.5's split; the special tokens come first, as ids 0, 1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer
    bare = Qwen3_5Tokenizer()._tokenizer
    trained = Tokenizer(models.BPE())
    trained.normalizer, trained.pre_tokenizer, trained.decoder = bare.normalizer, bare.pre_tokenizer, bare.decoder
    train = [d["text"] for d in documents(a.corpus) if d["split"] == "train"]
    trained.train_from_iterator(train[::8], trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, max_token_length=24, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    assert trained.get_vocab_size() == VOCAB
    a.out.mkdir(parents=True, exist_ok=True)
    trained.save(str(a.out / "tokenizer.json"))
    (a.out / "tokenizer_config.json").write_text(json.dumps(dict(
        tokenizer_class="PreTrainedTokenizerFast", eos_token="<|im_end|>", pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False, model_max_length=CONFIG["max_position_embeddings"]), indent=1) + "\n")
    write_ids(a.corpus, a.work, Tokenizer.from_file(str(a.out / "tokenizer.json")), EOS, a.every)


# ---------------------------------------------------------------------------------------- the training forward pass
# The same arithmetic as transformers' modules, whose weights it uses, with a chunked delta rule that is quick on a CPU
# and a NextN head that drafts from every position at once.  `check` compares the two.
def rms(x, norm):
    return F.rms_norm(x.float(), x.shape[-1:], 1 + norm.weight.float(), CONFIG["rms_norm_eps"]).to(x.dtype)


def delta_rule(q, k, v, g, beta):
    """Chunked gated delta rule in f32.  q, k [B, H, T, K] normalised; v [B, H, T, V]; g, beta [B, H, T]; state 0."""
    count, rows = q.shape[2], q.shape[1]
    pad = -count % CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, CHUNK)) for x in (q, k, v))
    g, beta = (F.pad(x, (0, pad)).unflatten(2, (-1, CHUNK)) for x in (g, beta))
    total = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    kb = k * beta[..., None]
    mixed = (kb @ k.mT * decay).tril(-1)
    solved = torch.linalg.solve_triangular(
        mixed, torch.cat((v * beta[..., None], kb * total.exp()[..., None]), -1), upper=False, unitriangular=True)
    new, seen = solved.split((v.shape[-1], k.shape[-1]), -1)
    within, early = q @ k.mT * decay, q * total.exp()[..., None]
    late, keep = (k * (total[..., -1:] - total).exp()[..., None]).mT, total[..., -1:, None].exp()
    state, out = torch.zeros(q.shape[0], rows, k.shape[-1], v.shape[-1], device=q.device, dtype=q.dtype), []
    for new, seen, early, within, keep, late in zip(*(x.unbind(2) for x in (new, seen, early, within, keep, late))):
        delta = new - seen @ state
        out.append(early @ state + within @ delta)
        state = keep * state + late @ delta
    return torch.stack(out, 2).flatten(2, 3)[:, :, :count]


def delta_net(m, x):
    taps, count = m.conv1d.weight[:, 0], x.shape[1]
    u = F.pad(m.in_proj_qkv(x).float(), (0, 0, taps.shape[1] - 1, 0))
    u = F.silu(sum(u[:, j: j + count] * taps[:, j] for j in range(taps.shape[1])))
    kd, vd, kh, vh = (CONFIG[f"linear_{n}"] for n in
                      ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads"))
    q, k, v = u.split((kh * kd, kh * kd, vh * vd), -1)
    unit = lambda y: y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + 1e-6)
    q, k = (unit(y.unflatten(-1, (kh, kd))).repeat_interleave(vh // kh, 2).transpose(1, 2) for y in (q, k))
    beta = m.in_proj_b(x).float().sigmoid().mT
    g = -m.A_log.float().exp()[:, None] * F.softplus(m.in_proj_a(x).float() + m.dt_bias).mT
    o = delta_rule(q * kd ** -0.5, k, v.unflatten(-1, (vh, vd)).transpose(1, 2), g, beta).transpose(1, 2)
    o = F.rms_norm(o, (vd,), m.norm.weight.float(), CONFIG["rms_norm_eps"])
    o = o * F.silu(m.in_proj_z(x).float().unflatten(-1, (vh, vd)))
    return m.out_proj(o.flatten(2).to(x.dtype))


def rotate(x, first):
    """RoPE of [B, H, T, D] whose rows are at positions first, first+1, ...; the tail of every head passes through."""
    r = int(CONFIG["head_dim"] * CONFIG["rope_parameters"]["partial_rotary_factor"])
    frequency = CONFIG["rope_parameters"]["rope_theta"] ** (-torch.arange(0, r, 2, device=x.device).float() / r)
    angle = torch.arange(first, first + x.shape[2], device=x.device).float()[:, None] * frequency
    a, b, tail = x.split((r // 2, r // 2, x.shape[-1] - r), -1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, tail), -1)


def attention(m, x, first=0, true_rows=None):
    """Gated attention; returns its output and K/V.  `true_rows`, the K/V of an earlier call: row p then sees those of
    rows before p, and of the rows of this call only itself."""
    dim, rows = CONFIG["head_dim"], x.shape[1]
    q, gate = m.q_proj(x).unflatten(-1, (-1, 2, dim)).unbind(-2)
    k, v = (p(x).unflatten(-1, (-1, dim)) for p in (m.k_proj, m.v_proj))
    q, k = (rotate(rms(y, n).transpose(1, 2), first) for y, n in ((q, m.q_norm), (k, m.k_norm)))
    own = k, v.transpose(1, 2)
    keys, values, mask = *own, None
    if true_rows is not None:
        # Row i of this call is at position first + i, row j of true_rows at j.
        before = torch.ones(rows, true_rows[0].shape[2], dtype=torch.bool, device=x.device).tril(first - 1)
        mask = torch.cat((before, torch.eye(rows, dtype=torch.bool, device=x.device)), 1)
        keys, values = (torch.cat((t, o), 2) for t, o in zip(true_rows, own))
    keys, values = (y.expand(-1, q.shape[1], -1, -1) for y in (keys, values))
    o = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=mask is None)
    return m.o_proj((o.transpose(1, 2) * gate.sigmoid()).flatten(2)), own


def layer(m, x, **rows):
    h, kv = rms(x, m.input_layernorm), None
    if hasattr(m, "linear_attn"):
        x = x + delta_net(m.linear_attn, h)
    else:
        h, kv = attention(m.self_attn, h, **rows)
        x = x + h
    h = rms(x, m.post_attention_layernorm)
    return x + m.mlp.down_proj(F.silu(m.mlp.gate_proj(h)) * m.mlp.up_proj(h)), kv


def run_trunk(trunk, ids):
    """Hidden states after the final norm."""
    x = trunk.model.embed_tokens(ids)
    for m in trunk.model.layers:
        x, _ = layer(m, x)
    return rms(x, trunk.model.norm)


def run_nextn(head, embeds, hidden, **rows):
    """One step of the head at every row: (embedding of the next token, hidden) -> hidden, K/V."""
    x = head.eh_proj(torch.cat((rms(embeds, head.enorm), rms(hidden, head.hnorm)), -1))
    x, kv = layer(head.mtp_block, x, **rows)
    return rms(x, head.post_norm), kv


# -------------------------------------------------------------------------------------------------------- the model
class Pair(nn.Module):
    def __init__(self):
        from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
        from transformers.modeling_layers import MtpLayer
        from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
        super().__init__()
        config = Qwen3_5TextConfig(**CONFIG)
        one = copy.deepcopy(config)
        one.num_hidden_layers, one.layer_types = 1, ["full_attention"]
        config._attn_implementation = one._attn_implementation = "eager"
        self.trunk = Qwen3_5ForCausalLM(config).float()
        self.head = MtpLayer(one, qwen.Qwen3_5DecoderLayer, qwen.Qwen3_5RMSNorm, 0).float()
        self.trunk.tie_weights()


@torch.no_grad()
def init(pair):
    for name, p in pair.named_parameters():
        if "embed" in name:
            p.normal_(0, 0.05)
        elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            p.normal_(0, 0.05 * p.shape[-1] ** -0.5)  # every layer starts near the identity
        elif name.endswith("A_log"):
            p.uniform_(1, 16).log_()
        elif name.endswith("dt_bias"):
            step = torch.exp(torch.empty_like(p).uniform_(-6.9, -2.3))  # 0.001 to 0.1
            p.copy_(step.expm1().log())
        elif name.endswith("linear_attn.norm.weight"):
            p.fill_(1)
        elif "norm" in name:
            p.zero_()
        elif "conv1d" in name:
            p.normal_(0, 0.5)
        else:
            p.normal_(0, p.shape[-1] ** -0.5)


# --------------------------------------------------------------------------------------------------------- training
def nextn_loss(logits, teacher):
    """Half distillation of the trunk's distribution, half cross-entropy with its most likely token; and how often the two agree."""
    teacher = teacher.detach()
    p, best = teacher.softmax(-1), teacher.argmax(-1)
    wanted = 0.5 * (p * logits).sum(-1) + 0.5 * logits.gather(-1, best[..., None])[..., 0]
    return (logits.logsumexp(-1) - wanted).mean(), (logits.argmax(-1) == best).float().mean()


def nextn_steps(pair, x, hidden, logits, chain):
    """Losses and agreements of the head's steps.  x [B, T+1]; hidden, logits: the trunk's of the first T tokens."""
    embed, t = pair.trunk.model.embed_tokens, hidden.shape[1] - 2
    # Row p: hidden p with token p+1 predicts the trunk's output at p+1, one step later at p+2.
    m, kv = run_nextn(pair.head, embed(x[:, 1: t + 1]), hidden[:, :t])
    steps = [nextn_loss(F.linear(m, embed.weight).float(), logits[:, 1: t + 1])]
    if chain:
        m, _ = run_nextn(pair.head, embed(x[:, 2: t + 2]), m, first=1, true_rows=kv)
        steps.append(nextn_loss(F.linear(m, embed.weight).float(), logits[:, 2: t + 2]))
    return steps


def losses(pair, x, n, chain):
    """Trunk's loss, those of the head's steps, and their agreements.  x [B, T+1]; the head runs on the first n windows."""
    hidden = run_trunk(pair.trunk, x[:, :-1])
    logits = F.linear(hidden, pair.trunk.model.embed_tokens.weight).float()
    trunk = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
    return trunk, nextn_steps(pair, x[:n], hidden[:n], logits[:n], chain)


def train(a):
    pair = Pair()
    init(pair)
    pair.to(a.device)
    tr = Trainer(a, "pair", pair, a.minutes, muon_lr=a.muon_lr, adam_lr=a.adam_lr)
    ids, held = load_ids(a, "train"), load_ids(a, "heldout")
    checked = held[: len(held) // 257 * 257].view(-1, 257)[:: max(1, len(held) // 257 // 8)][:8].long()
    mixed = torch.autocast(a.device.type, torch.bfloat16, enabled=a.bf16)
    describe = lambda trunk, steps: (f"{trunk.item():.3f} nats/token  agreement "
                                     + " ".join(f"{hit.item():.3f}" for _, hit in steps))
    while tr.progress < 1:
        length = 256 if tr.progress < 0.8 else 512  # longer ones at the end so that longer contexts work
        batch = max(1, a.batch_tokens // length)
        with mixed:
            trunk, steps = losses(pair, windows(ids, batch, length + 1), max(1, int(batch * a.nextn_share)),
                                  tr.progress >= CHAIN_FROM)
            loss = trunk + NEXTN_WEIGHT * sum(part for part, _ in steps)
        tr.step(loss, batch * length)
        if tr.log_due(60):
            with torch.no_grad(), mixed:
                tr.log(f"train {describe(trunk, steps)}  heldout {describe(*losses(pair, checked, 8, True))}")
        if time.time() - tr.saved > 60:
            tr.save()
    tr.save(final=True)
    tr.log("done")


def own_text(a):
    """Trains the head alone, on windows of training text that the trunk, rounded to bf16, continues greedily.

    Drafts are verified on the trunk's own output: a small trunk repeats itself, which the corpus does not show the head."""
    pair = Pair()
    pair.load_state_dict(torch.load(a.work / "pair.pt", map_location="cpu")["model"])
    pair.to(a.device).trunk.requires_grad_(False).eval()
    for w in pair.trunk.parameters():
        w.data = w.data.bfloat16().float()
    ids, embed = load_ids(a, "train"), pair.trunk.model.embed_tokens
    x = continue_text(pair.trunk, windows(ids, a.own_windows, 160), 128)
    with torch.no_grad():
        hidden = torch.cat([run_trunk(pair.trunk, part[:, :-1]) for part in x.split(32)])
    tr = Trainer(a, "head", pair.head, a.own_minutes, muon_lr=a.muon_lr / 2, adam_lr=a.adam_lr / 2, warmup=20)
    batch = max(1, a.batch_tokens // x.shape[1])
    while tr.progress < 1:
        at = torch.randint(len(x), (batch,), device=a.device)
        steps = nextn_steps(pair, x[at], hidden[at], F.linear(hidden[at], embed.weight), True)
        tr.step(sum(part for part, _ in steps), batch * x.shape[1])
        if tr.log_due(30):
            tr.log("agreement " + " ".join(f"{hit.item():.3f}" for _, hit in steps))
    tr.save(final=True)
    tr.log("done")


# ----------------------------------------------------------------------------------------------------------- export
def export(a):
    from safetensors.torch import load_file, save_file
    from make_qwen35_fixtures import mtp_tensors
    pair = Pair()
    pair.load_state_dict(torch.load(a.work / "pair.pt", map_location="cpu")["model"])
    if (a.work / "head.pt").exists():
        pair.head.load_state_dict(torch.load(a.work / "head.pt", map_location="cpu")["model"])
    pair.trunk.bfloat16().save_pretrained(a.out)
    path = a.out / "model.safetensors"
    tensors = {**load_file(path), **mtp_tensors(pair.head.bfloat16())}
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((a.out / "config.json").read_text()) | dict(mtp_num_hidden_layers=1)
    (a.out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (a.out / "generation_config.json").write_text(json.dumps(dict(eos_token_id=[IM_END, EOS], pad_token_id=EOS)) + "\n")
    print(sum(t.numel() for t in tensors.values()), "parameters,", path.stat().st_size, "bytes")


@torch.no_grad()
def check(a):
    """The training forward pass against transformers' modules, in f32 with random weights."""
    torch.manual_seed(0)
    pair = Pair().eval()
    init(pair)
    for name, p in pair.named_parameters():
        if "norm" in name:
            p.add_(torch.randn_like(p) * 0.3)
        elif p.dim() == 2 and "embed" not in name:
            p.normal_(0, p.shape[-1] ** -0.5)
    ids = torch.randint(len(SPECIAL), VOCAB, (2, 150))
    text, embed = pair.trunk.model, pair.trunk.model.embed_tokens
    hidden, ours = text(ids).last_hidden_state, run_trunk(pair.trunk, ids)
    worst = [(hidden - ours).abs().max()]

    def reference(tokens, h):
        n = tokens.shape[1]
        position = torch.arange(n).view(1, 1, -1).expand(3, 1, -1)
        mask = torch.full((n, n), float("-inf")).triu(1).view(1, 1, n, n)
        return pair.head(embed(tokens), h, text.rotary_emb(h, position), mask, position[0], None)

    t = 148
    first, kv = run_nextn(pair.head, embed(ids[:, 1: t + 1]), hidden[:, :t])
    worst.append((first - reference(ids[:, 1: t + 1], hidden[:, :t])).abs().max())
    second, _ = run_nextn(pair.head, embed(ids[:, 2: t + 2]), first, first=1, true_rows=kv)
    for p in (0, 1, 63, 100, t - 1):  # chained from row p: the rows up to p are true ones
        rows = torch.cat((hidden[:, : p + 1], first[:, p: p + 1]), 1)
        worst.append((second[:, p] - reference(ids[:, 1: p + 3], rows)[:, -1]).abs().max())
    print("largest differences", [f"{w:.1e}" for w in worst])
    assert max(worst) < 1e-4


STAGES = [tokenizer, check, train, own_text, export]

if __name__ == "__main__":
    p = parser(__doc__, STAGES)
    p.add_argument("--corpus", type=Path, default=WORK, help="directory of corpus.jsonl")
    p.add_argument("--work", type=Path, default=WORK / "qwen", help="token ids and checkpoints")
    p.add_argument("--every", type=int, default=1, help="use every Nth training file")
    p.add_argument("--minutes", type=float, default=17.4)
    p.add_argument("--own-minutes", type=float, default=3.5)
    p.add_argument("--own-windows", type=int, default=256, help="windows that the trunk continues for the head")
    p.add_argument("--batch-tokens", type=int, default=2048)
    p.add_argument("--nextn-share", type=float, default=0.5, help="share of a batch's windows that the head is trained on")
    p.add_argument("--muon-lr", type=float, default=0.02)
    p.add_argument("--adam-lr", type=float, default=4e-3)
    p.add_argument("--bf16", action="store_true", help="multiply matrices in bfloat16")
    run(p, STAGES)
