#!/usr/bin/env python3
"""Trains a demo pair like the one in models/demo: a small Gemma 4 target and its MTP assistant.

    pip install torch transformers==5.17.0 safetensors tokenizers numpy
    python scripts/demo_corpus.py corpus                # the crates of demo_corpus.tsv: a minute of CPU
    python scripts/train_demo.py tokenizer check        # a minute of CPU
    python scripts/train_demo.py target assistant       # 22 minutes of one H200 GPU
    python scripts/train_demo.py export                 # writes target/train_demo/pair, or --out
    python scripts/demo_evaluate.py --pair target/train_demo/pair

Stages run in the order given and read what earlier ones left in --work and --out.  `target` and `assistant` train for a
given time, save a checkpoint every minute and continue from it when started again.  A smoke run on a CPU:
--target-minutes 1 --assistant-minutes 1 --batch-tokens 2048 --generate 2 --held-windows 1.
"""
import copy, json, os, re, time
from pathlib import Path

import torch
import torch.nn.functional as F

from demo_corpus import WORK, documents
from demo_training import Trainer, continue_text, load_ids, parser, run, windows, write_ids

S, FULL = "sliding_attention", "full_attention"
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>"]
PAD, EOS, BOS = 0, 1, 2
VOCAB = 4096
# A scaled-down E2B / E4B: per-layer embeddings, a KV-shared tail with a double-wide MLP, two head sizes.
TARGET = dict(
    vocab_size=VOCAB, hidden_size=256, intermediate_size=576, num_hidden_layers=10, num_attention_heads=4,
    num_key_value_heads=1, head_dim=64, global_head_dim=128, sliding_window=128, layer_types=[S, FULL] * 5,
    num_kv_shared_layers=4, use_double_wide_mlp=True, hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCAB,
    final_logit_softcapping=30.0, max_position_embeddings=8192, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=BOS)
ASSISTANT = TARGET | dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=4, layer_types=[S, S, S, FULL], use_double_wide_mlp=False,
    hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, final_logit_softcapping=None)
CENTROIDS, CENTROID_TOP_K = 64, 8  # 512 of the 4096 tokens are scored per draft
DRAFT_STEPS = 5  # chained steps that the assistant is trained on
BLOCK = 4  # rows per verification that the assistant recommends: 3 drafts and the last token


# ------------------------------------------------------------------------------------------------------- tokenizer
# Bounds what a piece may span while merges are learned.  The finished tokenizer has no pre-tokenizer, as Gemma's has
# none: pieces stay inside these bounds because no merge that crosses one was ever learned.
SPLIT = r"\n+|▁{2,}|▁?_?\p{L}+|\p{N}|▁?[^\p{L}\p{N}▁\n]{1,4}|▁"


def tokenizer(a):
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.Replace(" ", "▁")
    tok.pre_tokenizer = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    head = SPECIAL + [f"<0x{b:02X}>" for b in range(256)]
    train = [d["text"] for d in documents(a.work) if d["split"] == "train"]
    tok.train_from_iterator(train, trainers.BpeTrainer(
        vocab_size=VOCAB - len(head), limit_alphabet=120, max_token_length=24, show_progress=False))
    model = json.loads(tok.to_str())["model"]
    pieces = head + sorted(model["vocab"], key=model["vocab"].get)
    assert len(pieces) == VOCAB and len(set(pieces)) == VOCAB
    added = [dict(id=i, content=t, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
             for i, t in enumerate(SPECIAL)]
    sequence = lambda k: {"Sequence": {"id": k, "type_id": 0}}
    bos = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    final = dict(
        version="1.0", truncation=None, padding=None, added_tokens=added,
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        pre_tokenizer={"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        post_processor={"type": "TemplateProcessing", "single": [bos, sequence("A")],
                        "pair": [bos, sequence("A"), bos, sequence("B")],
                        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [BOS], "tokens": ["<bos>"]}}},
        decoder={"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}]},
        model=dict(type="BPE", dropout=None, unk_token="<unk>", continuing_subword_prefix=None, end_of_word_suffix=None,
                   fuse_unk=True, byte_fallback=True, ignore_merges=False, vocab={p: i for i, p in enumerate(pieces)},
                   merges=model["merges"]))
    out = a.out / "target"
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").write_text(json.dumps(final, ensure_ascii=False, indent=1))
    (out / "tokenizer_config.json").write_text(json.dumps(dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        pad_token="<pad>", mask_token="<mask>", clean_up_tokenization_spaces=False, padding_side="left",
        model_max_length=TARGET["max_position_embeddings"]), indent=1))
    tok = Tokenizer.from_file(str(out / "tokenizer.json"))
    write_ids(a.work, a.work, tok, EOS)


def token_bytes(pair):
    """Bytes of text per id."""
    vocab = json.loads((pair / "target/tokenizer.json").read_text())["model"]["vocab"]
    size = torch.zeros(VOCAB)
    for piece, i in vocab.items():
        size[i] = 0 if i < len(SPECIAL) else 1 if i < len(SPECIAL) + 256 else len(piece.replace("▁", " ").encode())
    return size


def sample(ids, batch, length):
    """Random windows; half of them start with <bos>, as every prompt does, wherever they were cut."""
    x = windows(ids, batch, length)
    x[:, 0] = torch.where(torch.rand(batch, device=ids.device) < 0.5, BOS, x[:, 0])
    return x


# ---------------------------------------------------------------------------------------- the training forward pass
# The same arithmetic as transformers' modules, whose weights it uses, written so that it compiles into few kernels
# and so that an assistant can be run at every position of a sequence at once.  `check` compares the two.
def rms(x, norm):
    w = norm.weight.float() if norm.with_scale else None
    return F.rms_norm(x.float(), x.shape[-1:], w, norm.eps).to(x.dtype)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def run_layers(text, x, per_layer, positions, masks, kv, dropout=0.0):
    """masks: per layer type, None for plain causal.  kv: per layer type, filled by a target, read by an assistant."""
    rope = {}
    for t in (S, FULL):
        angle = positions.float()[:, None] * getattr(text.rotary_emb, f"{t}_inv_freq").float()
        angle = torch.cat((angle, angle), -1)[None, :, None]
        rope[t] = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    for i, layer in enumerate(text.layers):
        att = layer.self_attn
        t, split = att.layer_type, (-1, att.head_dim)
        h = rms(x, layer.input_layernorm)
        q = rotate(rms(att.q_proj(h).unflatten(-1, split), att.q_norm), *rope[t]).transpose(1, 2)
        if att.is_kv_shared_layer:
            k, v = kv[t]
        else:
            k = rotate(rms(att.k_proj(h).unflatten(-1, split), att.k_norm), *rope[t]).transpose(1, 2)
            v = rms(att.v_proj(h).unflatten(-1, split), att.v_norm).transpose(1, 2)
            if att.store_full_length_kv:
                kv[t] = k, v
        # One KV head; laid out as q is, which the compiled backward of the attention kernels expects.
        k, v = (z.transpose(1, 2).expand(-1, -1, q.shape[1], -1).contiguous().transpose(1, 2) for z in (k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=masks[t], is_causal=masks[t] is None, scale=1.0)
        o = att.o_proj(o.transpose(1, 2).flatten(2))
        x = x + F.dropout(rms(o, layer.post_attention_layernorm), dropout)
        h = rms(x, layer.pre_feedforward_layernorm)
        h = layer.mlp.down_proj(F.gelu(layer.mlp.gate_proj(h), approximate="tanh") * layer.mlp.up_proj(h))
        x = x + F.dropout(rms(h, layer.post_feedforward_layernorm), dropout)
        if per_layer is not None:
            g = F.gelu(layer.per_layer_input_gate(x), approximate="tanh") * per_layer[:, :, i]
            x = x + rms(layer.per_layer_projection(g), layer.post_per_layer_input_norm)
        x = x * layer.layer_scalar.to(x.dtype)
    return rms(x, text.norm)


def window_mask(n, first, keys, window, device):
    """Query first+i may see key k when k <= its position (k < it, for an assistant) and inside the window."""
    distance = torch.arange(first, first + n, device=device)[:, None] - torch.arange(keys, device=device)[None]
    return lambda lowest: (distance >= lowest) & (distance < window)


def run_target(model, ids, dropout=0.0):
    """Hidden states after the final norm, capped logits (f32), and the K/V that an assistant reads."""
    text, c, n = model.model, model.config, ids.shape[1]
    dtype = torch.bfloat16 if torch.is_autocast_enabled(ids.device.type) else torch.float32
    x = text.embed_tokens(ids).to(dtype)
    shape = (c.num_hidden_layers, c.hidden_size_per_layer_input)
    context = rms((text.per_layer_model_projection(x) * c.hidden_size ** -0.5).unflatten(-1, shape),
                  text.per_layer_projection_norm)
    per_layer = (context + text.embed_tokens_per_layer(ids).unflatten(-1, shape).to(dtype)) * 2 ** -0.5
    masks = {FULL: None, S: window_mask(n, 0, n, c.sliding_window, ids.device)(0)}
    kv = {}
    h = run_layers(text, x, per_layer, torch.arange(n, device=ids.device), masks, kv, dropout)
    cap = c.final_logit_softcapping
    return h, cap * torch.tanh(F.linear(h, text.embed_tokens.weight).float() / cap), kv


def run_assistant(model, embeds, hidden, kv, first):
    """One draft step from every position first, first+1, ... at once: the normed state and the next step's hidden.

    Position T sees the target's rows before T alone (its own row does not exist yet) and keeps its RoPE position
    through all the steps of a draft, so only `embeds` and `hidden` change from step to step.
    """
    n, keys = embeds.shape[1], kv[FULL][0].shape[2]
    mask = lambda window: window_mask(n, first, keys, window, embeds.device)(1)
    masks = {FULL: mask(1 << 30), S: mask(model.config.text_config.sliding_window)}
    x = model.pre_projection(torch.cat((embeds, hidden), -1))
    h = run_layers(model.model, x, None, torch.arange(first, first + n, device=embeds.device), masks, dict(kv))
    return h, model.post_projection(h)


# ------------------------------------------------------------------------------------------------------- the models
def build_target():
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig
    model = Gemma4ForCausalLM(Gemma4TextConfig(**TARGET)).float()
    init(model)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 0.05)
        model.model.embed_tokens_per_layer.weight.normal_(0, 0.1)
    return model


def build_assistant():
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig
    model = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**ASSISTANT), backbone_hidden_size=TARGET["hidden_size"],
        use_ordered_embeddings=True, num_centroids=CENTROIDS, centroid_intermediate_top_k=CENTROID_TOP_K)).float()
    init(model)
    return model


def init(model):
    model.tie_weights()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if re.search(r"[qk]_norm", name):
                p.fill_(0.35)  # attention has no 1/sqrt(d), so the two norms start where q.k is about N(0, 1.4)
            elif "post_" in name and "norm" in name:
                p.fill_(0.5)
            elif "norm" not in name:
                p.normal_(0, p.shape[-1] ** -0.5)


def compiled(a, f):
    return torch.compile(f, dynamic=False) if a.device.type == "cuda" and not a.eager else f


def autocast(a):
    return torch.autocast(a.device.type, torch.bfloat16, enabled=a.device.type == "cuda")


def target(a):
    model = build_target().to(a.device)
    tr = Trainer(a, "target", model, a.target_minutes)
    ids, size = load_ids(a, "train"), token_bytes(a.out).to(a.device)
    held = {split: load_ids(a, split) for split in ("heldout", "heldout_crates")}

    def loss_of(x):
        _, logits, _ = run_target(model, x[:, :-1], a.dropout)
        return F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())

    def held_loss(split, length=1024, windows=a.held_windows):
        x = held[split]
        x = x[: len(x) // length * length].view(-1, length)
        x = x[:: max(1, len(x) // windows)][:windows].long()  # evenly spaced, so from every crate
        with torch.no_grad(), autocast(a):
            nll = sum(F.cross_entropy(run_target(model, b[:, :-1])[1].flatten(0, 1), b[:, 1:].flatten(),
                                      reduction="sum") for b in x.split(16))
        return (nll / size[x[:, 1:]].sum()).item()

    def held_losses():
        return "nats/byte " + " ".join(f"{split} {held_loss(split):.4f}" for split in held)

    step = compiled(a, loss_of)
    while tr.progress < 1:
        # Short windows first: four fifths of the time at 512 tokens, then 2048 so that long contexts work.
        length = 512 if tr.progress < 0.8 else 2048
        batch = a.batch_tokens // length
        with autocast(a):
            loss = step(sample(ids, batch, length + 1))
        tr.step(loss, batch * length)
        if tr.log_due():
            tr.log(f"length {length}  train {loss.item():.3f} nats/token  {held_losses()}")
        if time.time() - tr.saved > 60:
            tr.save()
    tr.save(final=True)
    tr.log(f"done: {held_losses()}")


def balanced_clusters(rows, count, rounds=15):
    """k-means on the unit sphere whose clusters all have the same size; one row of ids per cluster."""
    rows = F.normalize(rows.float(), dim=-1)
    n, room = len(rows), len(rows) // count
    centre = rows[torch.randperm(n, generator=torch.Generator().manual_seed(0))[:count]]
    for _ in range(rounds):
        near = rows @ centre.T
        owner, free = [-1] * n, [room] * count
        for pair in near.flatten().argsort(descending=True).tolist():
            i, c = divmod(pair, count)
            if owner[i] < 0 and free[c]:
                owner[i], free[c] = c, free[c] - 1
        owner = torch.tensor(owner)
        centre = F.normalize(torch.stack([rows[owner == c].mean(0) for c in range(count)]), dim=-1)
    return owner.argsort(stable=True).view(count, room), centre


def initial_assistant(table):
    """The head is initialised with the target's table, projected on its principal directions."""
    model = build_assistant()
    order, centre = balanced_clusters(table, CENTROIDS)
    with torch.no_grad():
        axes = torch.linalg.svd(table, full_matrices=False)[2][: ASSISTANT["hidden_size"]].T
        model.model.embed_tokens.weight.copy_(table @ axes)
        model.masked_embedding.centroids.weight.copy_(centre @ axes)
        model.masked_embedding.token_ordering.copy_(order.flatten())
    return model


def own_text(a, base, text, length):
    """Beginnings of `text` with the target's continuations: acceptance is measured on its own output."""
    cache = a.work / "generated.pt"
    if not cache.exists():
        start, parts = time.time(), []
        lower = copy.deepcopy(base)
        for w in lower.parameters():
            w.data = w.data.bfloat16()
        for temperature in (0.0, 0.0, 0.0, 0.7, 1.0):
            prompts = sample(text, a.generate, length // 4)
            parts.append(continue_text(lower, prompts, length - length // 4, temperature).int())
            print(f"generated {parts[-1].numel()} tokens at temperature {temperature}, {time.time() - start:.0f} s",
                  flush=True)
        torch.save(torch.cat(parts).cpu(), cache)
    return torch.load(cache).to(a.device)


def assistant(a):
    base = build_target()
    base.load_state_dict(torch.load(a.work / "target.pt", map_location="cpu")["model"])
    base = base.to(a.device).requires_grad_(False).eval()
    for w in base.parameters():
        w.data = w.data.bfloat16().float()  # the exported weights (the RoPE frequencies, buffers, stay exact)
    model = initial_assistant(base.model.embed_tokens.weight.cpu())
    model.to(a.device)
    tr = Trainer(a, "assistant", model, a.assistant_minutes)
    order = model.masked_embedding.token_ordering  # as in the checkpoint, if there was one
    text, length = load_ids(a, "train"), 512

    own = own_text(a, base, text, length)

    # Anchors 1..n: each starts a draft of DRAFT_STEPS tokens inside the window.
    n = (length - DRAFT_STEPS - 1) // 8 * 8

    def target_side(x):
        h, logits, kv = run_target(base, x)
        return h, logits, kv

    def draft_step(embeds, hidden, kv, teacher):
        """The loss of one draft step, the hidden for the next, and how often it picks the target's token."""
        h, out = run_assistant(model, embeds, hidden, kv, 1)
        logp = F.linear(h, model.model.embed_tokens.weight).float().log_softmax(-1)
        p, best = teacher.softmax(-1), teacher.argmax(-1)
        entropy = -(p * teacher.log_softmax(-1)).sum(-1).mean()
        distil = -(p * logp).sum(-1).mean() - entropy
        pick = -logp.gather(-1, best[..., None]).mean()
        group = model.masked_embedding.centroids(h).float().log_softmax(-1)
        group = -(p[..., order].unflatten(-1, (CENTROIDS, -1)).sum(-1) * group).sum(-1).mean()
        return 0.5 * distil + 0.5 * pick + 0.3 * group, out, (logp.argmax(-1) == best).float().mean(), distil

    side, step = compiled(a, target_side), compiled(a, draft_step)
    batch = a.batch_tokens // 2 // length
    while tr.progress < 1:
        pick = torch.randint(len(own), (batch * 3 // 4,), device=a.device)
        x = torch.cat((own[pick].long(), sample(text, batch - len(pick), length)))
        with autocast(a):
            with torch.no_grad():
                h, logits, kv = side(x)
                embeds = base.model.embed_tokens(x).to(h.dtype)
            hidden, loss, hits = h[:, :n], 0.0, []
            for j in range(DRAFT_STEPS):
                at = slice(1 + j, 1 + j + n)
                part, hidden, hit, distil = step(embeds[:, at], hidden, kv, logits[:, at])
                loss, hits = loss + 0.85 ** j * part, hits + [hit]
        tr.step(loss / DRAFT_STEPS, batch * n)
        if tr.log_due():
            tr.log(f"loss {loss.item() / DRAFT_STEPS:.3f}  last KL {distil.item():.3f}  agreement per step "
                   + " ".join(f"{h.item():.3f}" for h in hits))
        if time.time() - tr.saved > 60:
            tr.save()
    tr.save(final=True)
    tr.log("done")


# ---------------------------------------------------------------------------------------------------------- export
def export(a):
    generation = dict(bos_token_id=BOS, eos_token_id=[EOS], pad_token_id=PAD)
    drafting = dict(is_assistant=True, num_assistant_tokens=BLOCK - 1)
    for name, model, extra in (("target", build_target(), {}), ("assistant", build_assistant(), drafting)):
        model.load_state_dict(torch.load(a.work / f"{name}.pt", map_location="cpu")["model"])
        out = a.out / name
        model.bfloat16().save_pretrained(out)
        config = json.loads((out / "config.json").read_text())
        for part in (config, config.get("text_config") or {}):
            # The published checkpoints' keys, which this transformers version reads but no longer writes.
            if part.pop("per_layer_config", None) is not None:
                part |= dict(global_head_dim=TARGET["global_head_dim"], num_global_key_value_heads=None)
        (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        (out / "generation_config.json").write_text(json.dumps(generation | extra, indent=1) + "\n")
        size = (out / "model.safetensors").stat().st_size
        print(name, sum(p.numel() for p in model.parameters()), "parameters,", size, "bytes")


@torch.no_grad()
def check(a):
    """The training forward pass against transformers' modules, in f32 with random weights."""
    torch.manual_seed(0)
    model, draft = build_target().eval(), build_assistant().eval()
    draft.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    ids = torch.randint(5, VOCAB, (2, 300))
    h, logits, kv = run_target(model, ids)
    o = model(ids, output_hidden_states=True, return_shared_kv_states=True)
    e = model.get_input_embeddings()(ids)
    worst = [(logits - o.logits).abs().max(), (h - o.hidden_states[-1]).abs().max()]
    n = 280
    state1, out1 = run_assistant(draft, e[:, 1: 1 + n], h[:, :n], kv, 1)
    state2, out2 = run_assistant(draft, e[:, 2: 2 + n], out1, kv, 1)
    for anchor in (1, 5, 127, 128, 129, 250):
        low = max(0, anchor - TARGET["sliding_window"] + 1)
        seen = {t: tuple(z[:, :, (low if t == S else 0):anchor] for z in o.shared_kv_states[t]) for t in kv}
        prev = o.hidden_states[-1][:, anchor - 1: anchor]
        for j, (state, out) in enumerate(((state1, out1), (state2, out2))):
            r = draft(inputs_embeds=torch.cat((e[:, anchor + j: anchor + j + 1], prev), -1), attention_mask=None,
                      position_ids=torch.full((2, 1), anchor), shared_kv_states=seen, output_hidden_states=True)
            prev = r.last_hidden_state
            worst += [(prev[:, 0] - out[:, anchor - 1]).abs().max(),
                      (r.hidden_states[-1][:, 0] - state[:, anchor - 1]).abs().max()]
    print("largest differences", [f"{w:.1e}" for w in worst])
    assert max(worst) < 1e-4


STAGES = [tokenizer, check, target, assistant, export]

if __name__ == "__main__":
    p = parser(__doc__, STAGES)
    p.add_argument("--work", type=Path, default=WORK, help="corpus, token ids and checkpoints")
    p.add_argument("--target-minutes", type=float, default=13.5, help="compilation included")
    p.add_argument("--assistant-minutes", type=float, default=8.0,
                   help="generation of its text and compilation included")
    p.add_argument("--batch-tokens", type=int, default=65536)
    p.add_argument("--dropout", type=float, default=0.05)
    p.add_argument("--generate", type=int, default=4096, help="continuations per round of on-policy text")
    p.add_argument("--held-windows", type=int, default=128, help="windows of 1024 in the progress figure")
    p.add_argument("--eager", action="store_true", help="no torch.compile")
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # the two others take these masks and head sizes without a plan search
    run(p, STAGES)
