"""Writes small random Qwen3.5 checkpoints with a NextN head, and the outputs that transformers computes for them.

    pip install --target target/transformers torch transformers safetensors numpy
    PYTHONPATH=target/transformers python3 scripts/make_qwen35_fixtures.py tests/fixtures
    PYTHONPATH=target/transformers python3 scripts/make_qwen35_fixtures.py tests/qwen35_tokenizer --tokenizer

Each case is one directory:
  target/config.json, target/model.safetensors   the checkpoint in Hugging Face layout, mtp.* included
  expected.safetensors                            tensors named as below, float32 / int64, computed in float64
  case.json                                       what the case exercises, library versions

expected.safetensors:
  input_ids [T]            prompt
  logits [T, V]            target logits at every prompt position
  hidden [T, H]            hidden states after the final norm
  reference_rounding [2]   largest difference of logits / hidden between the reference's float32 and float64
  greedy_ids [N]           tokens that the target continues the prompt with
  greedy_margins [N]       best logit less the second
  recurrent [L, Hv, K, V]  state of every delta-net layer after the prompt
  convolution [L, C, 3]    the last inputs of its convolution
  nextn_hidden [T-1, H]    the head's output for the rows (hidden[p], input_ids[p+1])
  first_id []              greedy_ids[0]
  draft_ids [K], draft_logits [K, V], draft_hidden [K, H], draft_margins [K]
                           the head chained from (hidden[T-1], first_id)

Norm weights and dt_bias are randomised: at their initial values the zero-centred norms and the gates are invisible.
"""
import argparse, copy, json, os
import torch, transformers
from safetensors.torch import load_file, save_file
from transformers import (DynamicCache, Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration,
                          Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig)
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers.modeling_layers import MtpLayer
from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as moe

K_DRAFT, N_GREEDY = 5, 24
# Seeds are tried in order until all decisions of the reference have at least this margin (in logits), and its own float32 is
# accurate enough to check 1e-4.
LEAST_MARGIN, MOST_ROUNDING = 0.05, 5e-5


class InDouble:
    """Replaces explicit float32 computation in the modelling files by float64."""

    def __getattr__(self, name):
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)

    def __enter__(self):
        self.single = torch.Tensor.float
        torch.Tensor.float = torch.Tensor.double
        dense.torch = moe.torch = self

    def __exit__(self, *_):
        torch.Tensor.float = self.single
        dense.torch = moe.torch = torch


def randomise(module, gen, tied):
    for name, p in module.named_parameters():
        with torch.no_grad():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                p.uniform_(0.1, 0.7, generator=gen)  # scores of standard deviation 2
            elif name.endswith("linear_attn.norm.weight"):
                p.uniform_(0.5, 1.5, generator=gen)
            elif "norm" in name:
                p.uniform_(-0.5, 0.5, generator=gen)
            elif name.endswith("A_log"):
                p.uniform_(-4.0, 0.7, generator=gen)
            elif name.endswith("dt_bias"):
                p.normal_(0.0, 1.0, generator=gen)
            elif name.endswith("conv1d.weight"):
                p.normal_(0.0, 0.6, generator=gen)
            elif "embed_tokens" in name or "lm_head" in name:
                head = "lm_head" in name or tied
                p.normal_(0.0, 3.0 / p.shape[-1] ** 0.5 if head else 1.0, generator=gen)
            elif p.dim() >= 2:
                p.normal_(0.0, 1.3 / p.shape[-1] ** 0.5, generator=gen)
            else:
                p.normal_(0.0, 0.3, generator=gen)


BASE = dict(vocab_size=192, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, linear_key_head_dim=16, linear_value_head_dim=16,
            linear_num_key_heads=2, linear_num_value_heads=4, rms_norm_eps=1e-6, max_position_embeddings=4096,
            pad_token_id=None, bos_token_id=None, eos_token_id=1, tie_word_embeddings=False,
            rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5,
                                 mrope_section=[3, 3, 2], mrope_interleaved=True))
CASES = {
    # 27B's shape: three value heads per key head, V not K wide; flat config
    "qwen35-dense": dict(cfg=dict(linear_num_value_heads=6, linear_value_head_dim=24), T=70),
    # 35B-A3B's: experts in every layer, fused in the trunk, one by one in the head, as published
    "qwen35-moe": dict(moe=True, bf16=True, T=67, cfg=dict(
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40)),
    # nested like a published file, with a vision tower; tied embeddings, an interval instead of layer_types, no key for
    # the head
    "qwen35-nested": dict(nested=True, bf16=True, T=66, keyless=True, cfg=dict(
        num_hidden_layers=5, full_attention_interval=2, linear_num_key_heads=4, tie_word_embeddings=True)),
}


def modules(spec):
    kw = {**BASE, **spec["cfg"]}
    if spec.get("moe"):
        kw.pop("intermediate_size")
        text = Qwen3_5MoeTextConfig(**kw)
        return Qwen3_5MoeForCausalLM(text), text, (moe.Qwen3_5MoeDecoderLayer, moe.Qwen3_5MoeRMSNorm)
    text = Qwen3_5TextConfig(**kw)
    model = Qwen3_5ForCausalLM(text)
    if spec.get("nested"):
        vision = dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=kw["hidden_size"],
                      patch_size=4, num_position_embeddings=16)
        nested = Qwen3_5Config(text_config=text.to_dict(), vision_config=vision,
                               tie_word_embeddings=kw["tie_word_embeddings"])
        model = Qwen3_5ForConditionalGeneration(nested)
        text = model.config.text_config
    return model, text, (dense.Qwen3_5DecoderLayer, dense.Qwen3_5RMSNorm)


# transformers' names of the head's parts, and the checkpoint's names after `mtp.`
MTP_NAMES = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "mtp_block": "layers.0",
             "post_norm": "norm"}


def mtp_tensors(head):
    tensors = {}
    for name, p in head.state_dict().items():
        first, rest = name.split(".", 1)
        name = f"mtp.{MTP_NAMES[first]}.{rest}"
        if name.endswith("experts.gate_up_proj"):
            base = name.removesuffix("gate_up_proj")
            for e, matrix in enumerate(p):
                gate, up = matrix.chunk(2)
                tensors[f"{base}{e}.gate_proj.weight"], tensors[f"{base}{e}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            base = name.removesuffix("down_proj")
            tensors.update({f"{base}{e}.down_proj.weight": matrix for e, matrix in enumerate(p)})
        else:
            tensors[name] = p
    return {name: p.contiguous().clone() for name, p in tensors.items()}


def save(model, head, spec, d):
    model.save_pretrained(d, save_original_format=not spec.get("moe"))
    path = os.path.join(d, "model.safetensors")
    tensors = {**load_file(path), **mtp_tensors(head)}
    stored = torch.bfloat16 if spec.get("bf16") else torch.float32
    save_file({name: p.to(stored) for name, p in tensors.items()}, path, metadata={"format": "pt"})
    path = os.path.join(d, "config.json")
    cfg = json.load(open(path))
    inner = cfg.get("text_config", cfg)
    if spec.get("keyless"):
        inner.pop("layer_types")
        inner["full_attention_interval"] = spec["cfg"]["full_attention_interval"]
    else:
        inner["mtp_num_hidden_layers"] = 1
    json.dump(cfg, open(path, "w"), indent=1)
    extra = os.path.join(d, "generation_config.json")
    if os.path.exists(extra):
        os.remove(extra)


def top_margin(row):
    top = row.topk(2)
    return int(top.indices[0]), float(top.values[0] - top.values[1])


def continuation(trunk, ids):
    """The greedy tokens and their margins, up to the first one that is too small."""
    tokens, margins = [], []
    while len(tokens) < N_GREEDY and min(margins, default=LEAST_MARGIN) >= LEAST_MARGIN:
        token, margin = top_margin(trunk(ids, use_cache=False)[0][0, -1])
        tokens.append(token), margins.append(margin)
        ids = torch.cat([ids, torch.tensor([[token]])], 1)
    return tokens, margins


def random_pair(spec, gen):
    """A trunk and its head, and the configurations of both."""
    model, text, (layer_class, norm_class) = modules(spec)
    model = model.float().eval()
    cfg1 = copy.deepcopy(text)
    cfg1.num_hidden_layers, cfg1.layer_types = 1, ["full_attention"]
    cfg1._attn_implementation = text._attn_implementation = "eager"
    model.get_decoder().config._experts_implementation = cfg1._experts_implementation = "eager"
    head = MtpLayer(cfg1, layer_class, norm_class, 0).float().eval()
    randomise(model, gen, text.tie_word_embeddings)
    randomise(head, gen, False)
    if spec.get("bf16"):
        # Parameters only: rotary frequencies are buffers.
        for p in [*model.parameters(), *head.parameters()]:
            p.data = p.data.bfloat16().float()
    model.tie_weights()
    return model, head, text, cfg1


def write_expected(out, name, seed, spec, expected):
    as_stored = lambda v: (v.to(torch.float32) if v.is_floating_point() else v.long()).contiguous().clone()
    d = os.path.join(out, name)
    save_file({k: as_stored(v) for k, v in expected.items()}, os.path.join(d, "expected.safetensors"))
    json.dump(dict(case=name, seed=seed, transformers=transformers.__version__, torch=torch.__version__, spec=spec),
              open(os.path.join(d, "case.json"), "w"), indent=1)


def build(name, spec, seed, out):
    """Writes a case; false, with nothing but its checkpoint written, if the seed does not meet the limits above."""
    gen = torch.Generator().manual_seed(seed)
    model, head, text, cfg1 = random_pair(spec, gen)
    decoder = model.get_decoder()
    ids = torch.randint(3, text.vocab_size, (1, spec["T"]), generator=gen)
    T = spec["T"]

    def trunk(ids, **kw):
        h = decoder(ids, **kw).last_hidden_state
        return model.lm_head(h), h

    def nextn(tokens, h, first, cache):
        rows = tokens.shape[1]
        position = torch.arange(first, first + rows).view(1, 1, -1).expand(3, 1, -1)
        past = cache.get_seq_length()
        mask = torch.full((rows, past + rows), float("-inf"), dtype=h.dtype).triu(past + 1).view(1, 1, rows, -1)
        return head(decoder.embed_tokens(tokens), h, decoder.rotary_emb(h, position), mask, position[0], cache)

    with torch.no_grad():
        single_logits, single_hidden = trunk(ids, use_cache=False)
        save(model, head, spec, os.path.join(out, name, "target"))
        model.double(), head.double()
        with InDouble():
            cache = DynamicCache(config=text)
            logits, hidden = trunk(ids, past_key_values=cache, use_cache=True)
            rounding = [(single_logits - logits).abs().max(), (single_hidden - hidden).abs().max()]
            if max(rounding) > MOST_ROUNDING:
                return False
            linear = [i for i, kind in enumerate(text.layer_types) if kind == "linear_attention"]
            recurrent = torch.stack([cache.get_recurrent_state(i, state_idx=0)[0] for i in linear])
            taps = text.linear_conv_kernel_dim - 1
            convolution = torch.stack([cache.get_conv_state(i, state_idx=0)[0][:, -taps:] for i in linear])
            greedy, margins = continuation(trunk, ids)
            if min(margins) < LEAST_MARGIN or len(set(greedy)) < N_GREEDY // 2:
                return False  # a repetitive text tests little
            drafts = DynamicCache(config=cfg1)
            read = nextn(ids[:, 1:], hidden[:, :-1], 0, drafts)
            token, h, links = greedy[0], hidden[:, -1:], []
            for k in range(K_DRAFT):
                h = nextn(torch.tensor([[token]]), h, T - 1 + k, drafts)
                row = model.lm_head(h)[0, 0]
                token, margin = top_margin(row)
                if margin < LEAST_MARGIN:
                    return False
                links.append((token, margin, row, h[0, 0]))
    ids_of, margins_of, logits_of, hidden_of = zip(*links)
    expected = dict(input_ids=ids[0], logits=logits[0], hidden=hidden[0], reference_rounding=torch.stack(rounding),
                    greedy_ids=torch.tensor(greedy), greedy_margins=torch.tensor(margins), recurrent=recurrent,
                    convolution=convolution, nextn_hidden=read[0], first_id=torch.tensor(greedy[0]),
                    draft_ids=torch.tensor(ids_of), draft_margins=torch.tensor(margins_of),
                    draft_logits=torch.stack(logits_of), draft_hidden=torch.stack(hidden_of))
    assert logits.dtype == hidden.dtype == recurrent.dtype == read.dtype == torch.float64
    write_expected(out, name, seed, spec, expected)
    print(name, "seed", seed, "logit std %.2f" % logits.std(), "rounding %.1e %.1e" % tuple(rounding), "least margins",
          "%.2f %.2f" % (min(margins), min(margins_of)), "greedy", greedy[:6], "draft", ids_of, flush=True)
    return True


TEXTS = ["Hello, world!", "it's  IT'LL\n\n  do 12345 x2", "na\u0308ive cafe\u0301 \u0939\u093f\u0928\u094d\u0926\u0940",
         " \t\r\n a", "fn main() {\n    println!(\"{}\", 1 + 2);\n}\n", "\u4f60\u597d\uff0c\u4e16\u754c \U0001f980!?",
         "<|im_start|>user\nhi<|im_end|>\n"]


def tokenizer(out):
    """A small byte-level vocabulary with Qwen3.5's split, and the ids of some texts."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bare = Qwen3_5Tokenizer()._tokenizer
    trained = Tokenizer(models.BPE())
    trained.normalizer, trained.pre_tokenizer = bare.normalizer, bare.pre_tokenizer
    text = open(__file__).read().split("\n") + TEXTS
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(text, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    model = json.loads(trained.to_str())["model"]
    whole = Qwen3_5Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    whole.add_special_tokens({"additional_special_tokens": special})
    os.makedirs(out, exist_ok=True)
    whole._tokenizer.save(os.path.join(out, "tokenizer.json"))
    ids = [dict(text=text, ids=whole._tokenizer.encode(text).ids) for text in TEXTS]
    json.dump(ids, open(os.path.join(out, "expected.json"), "w"), indent=1)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("out")
    p.add_argument("--seed", type=int, default=11)
    p.add_argument("--case", choices=CASES)
    p.add_argument("--tokenizer", action="store_true", help="write a tokenizer instead of cases")
    a = p.parse_args()
    if a.tokenizer:
        tokenizer(a.out)
        raise SystemExit
    torch.set_num_threads(1)
    for i, (name, spec) in enumerate(CASES.items()):
        if a.case in (None, name):
            seed = a.seed + i
            while not build(name, spec, seed, a.out):
                seed += 100
