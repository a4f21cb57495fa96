#!/usr/bin/env python3
"""Scaled-down published variants with every field of their config.json, and transformers' outputs for them: tests/shapes/,
a reference of tests/hf_parity/published_shapes.rs.

    python3 scripts/published_shapes.py [NAME...]       (needs torch, transformers 5.23, safetensors)

Fields, layer patterns and ratios of heads are the published ones; widths, vocabulary, experts and, beyond E4B, layers are
scaled down. Weights are random, in bf16, under the published names. The tensors of NAME/expected.safetensors:

    input_ids            (tokens,)          a few more than the sliding window
    logits, hidden       (tokens, ...)      of the text model in f64
    reference_rounding   (2,)               difference of transformers' own f32 from that
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

ROOT = Path(__file__).resolve().parent.parent / "tests/shapes"
HIDDEN, VOCABULARY, TOKENS, SEED = 64, 128, 24, 20

ROPE = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}


def text(model_type, layers, period, heads, kv, **other):
    """The text model's fields in the order of published files."""
    types = ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers)]
    fields = {
        "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": False, "bos_token_id": 2,
        "dtype": "bfloat16", "enable_moe_block": False, "eos_token_id": 1, "final_logit_softcapping": 30.0,
        "global_head_dim": 32, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": HIDDEN,
        "hidden_size_per_layer_input": 0, "initializer_range": 0.02, "intermediate_size": 32, "layer_types": types,
        "max_position_embeddings": 262144, "model_type": model_type, "moe_intermediate_size": None,
        "num_attention_heads": heads, "num_experts": None, "num_global_key_value_heads": None,
        "num_hidden_layers": layers, "num_key_value_heads": kv, "num_kv_shared_layers": 0, "pad_token_id": 0,
        "rms_norm_eps": 1e-06, "rope_parameters": ROPE, "sliding_window": 16, "tie_word_embeddings": True,
        "top_k_experts": None, "use_bidirectional_attention": None, "use_cache": True, "use_double_wide_mlp": False,
        "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY,
    }  # fmt: skip
    assert not other.keys() - fields.keys(), other
    return fields | other


SMALL = {"hidden_size_per_layer_input": 16, "max_position_embeddings": 131072}
LARGE = {"attention_k_eq_v": True, "use_bidirectional_attention": "vision"}
VARIANTS = {
    "E2B": text("gemma4_text", 35, 5, 8, 1, num_kv_shared_layers=20, use_double_wide_mlp=True, **SMALL),
    "E4B": text("gemma4_text", 42, 6, 8, 2, num_kv_shared_layers=18, **SMALL),
    "12B": text("gemma4_unified_text", 12, 6, 16, 8, num_global_key_value_heads=1, **LARGE),
    "26B-A4B": text("gemma4_text", 12, 6, 16, 8, num_global_key_value_heads=2, enable_moe_block=True, num_experts=16,
                    top_k_experts=8, moe_intermediate_size=16, **LARGE),
    "31B": text("gemma4_text", 6, 6, 32, 16, num_global_key_value_heads=4, **LARGE),
}  # fmt: skip


def published(name, fields):
    """The complete config.json."""
    unified, small = name == "12B", fields["hidden_size_per_layer_input"] > 0
    prefix, cls = ("gemma4_unified", "Gemma4Unified") if unified else ("gemma4", "Gemma4")
    audio = {"model_type": f"{prefix}_audio"} if unified or small else None
    return {
        "architectures": [f"{cls}ForConditionalGeneration"], "audio_config": audio, "audio_token_id": 258881,
        "boa_token_id": 256000, "boi_token_id": 255999, "dtype": "bfloat16", "eoa_token_id": 258883,
        "eoa_token_index": 258883, "eoi_token_id": 258882, "eos_token_id": [1, 106], "image_token_id": 258880,
        "initializer_range": 0.02, "model_type": prefix, "text_config": fields, "tie_word_embeddings": True,
        "transformers_version": "5.5.0.dev0", "video_token_id": 258884,
        "vision_config": {"model_type": f"{prefix}_vision"}, "vision_soft_tokens_per_image": 280,
    }  # fmt: skip


def randomized(model):
    """Random weights in bf16 that keep activations and logits of the order of 1, and a rounding from growing with the layers:
    attention is soft, and what a layer adds is small compared with the residual."""
    generator = torch.Generator().manual_seed(SEED)
    normal = lambda shape: torch.randn(shape, generator=generator)
    uniform = lambda shape, low, high: torch.rand(shape, generator=generator) * (high - low) + low
    state = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # is the embedding
        if name.endswith("layer_scalar"):
            new = uniform(value.shape, 0.9, 1.0)
        elif "q_norm" in name or ".post_" in name:
            new = uniform(value.shape, 0.05, 0.3)
        elif value.dim() < 2:
            new = uniform(value.shape, 0.5, 1.5)
        else:
            new = normal(value.shape) / value.shape[-1] ** 0.5
        state[name] = new.to(torch.bfloat16)
    missing = model.load_state_dict({name: value.float() for name, value in state.items()}, strict=False)
    assert missing == (["lm_head.weight"], []), missing
    return state


def run(model, ids):
    with torch.inference_mode():
        output = model(input_ids=ids[None], output_hidden_states=True, use_cache=False)
    return output.logits[0], output.hidden_states[-1][0]


class Doubled:
    """Computes in f64 where transformers uses f32 for any weight type."""

    def __enter__(self):
        self.float, self.softmax = torch.Tensor.float, torch.nn.functional.softmax
        torch.Tensor.float = torch.Tensor.double
        torch.nn.functional.softmax = lambda x, dim=None, dtype=None: self.softmax(x, dim=dim)

    def __exit__(self, *_):
        torch.Tensor.float, torch.nn.functional.softmax = self.float, self.softmax


def main(names):
    torch.set_num_threads(1)
    for name, fields in VARIANTS.items():
        if names and name not in names:
            continue
        own = {key: value for key, value in fields.items() if key not in ("dtype", "model_type")}
        config = Gemma4TextConfig(**own, attn_implementation="eager", experts_implementation="eager")
        model = Gemma4ForCausalLM(config).eval()
        state = randomized(model)
        ids = torch.randint(3, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(SEED))
        single = run(model, ids)
        with Doubled():
            double = run(model.double(), ids)
        rounding = [(a.double() - b).abs().max().item() for a, b in zip(single, double)]
        target = ROOT / name / "target"
        target.mkdir(parents=True, exist_ok=True)
        (target / "config.json").write_text(json.dumps(published(name, fields), indent=1) + "\n")
        tensors = {key.replace("model.", "model.language_model.", 1): value for key, value in state.items()}
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        expected = {
            "input_ids": ids, "logits": double[0].to(torch.float32), "hidden": double[1].to(torch.float32),
            "reference_rounding": torch.tensor(rounding, dtype=torch.float32),
        }  # fmt: skip
        save_file({key: value.contiguous() for key, value in expected.items()}, ROOT / name / "expected.safetensors")
        case = {"case": name, "seed": SEED, "transformers": transformers.__version__, "torch": torch.__version__}
        (ROOT / name / "case.json").write_text(json.dumps(case, indent=1) + "\n")
        spread = [double[0].std().item(), double[1].std().item()]
        print(f"{name}: {sum(v.numel() for v in state.values())} weights, spread {spread}, rounding {rounding}")


if __name__ == "__main__":
    main(sys.argv[1:])
