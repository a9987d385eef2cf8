# SPDX-License-Identifier: Apache-2.0
"""Small random models for the engine tests, written as Hugging Face directories."""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY = 4096


@dataclass(frozen=True)
class Geometry:
    """Shape of a random decoder.

    ``family`` decides what surrounds attention: ``qwen3`` normalizes queries and keys per head, ``qwen2`` has biases on
    Q, K and V (the keys' as large as real Qwen2.5 models have them), ``llama`` has neither. ``sharpness`` is the
    standard deviation of the attention logits.
    """

    family: str
    head_size: int
    kv_heads: int
    query_heads_per_kv_head: int
    layers: int = 3
    sharpness: float = 3.0
    seed: int = 1
    dtype: str = "float32"

    @property
    def name(self) -> str:
        shape = f"{self.family}-d{self.head_size}-h{self.kv_heads}-g{self.query_heads_per_kv_head}"
        return shape if self.sharpness == 3.0 else f"{shape}-s{self.sharpness}"

    @property
    def heads(self) -> int:
        return self.kv_heads * self.query_heads_per_kv_head

    @property
    def hidden(self) -> int:
        return self.heads * self.head_size if self.family == "qwen2" else 192  # vLLM's Qwen2 divides by the heads


def config(geometry: Geometry) -> dict:
    architecture = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
    result = {
        "architectures": [architecture[geometry.family]],
        "model_type": geometry.family,
        "hidden_size": geometry.hidden,
        "intermediate_size": 2 * geometry.hidden,
        "num_hidden_layers": geometry.layers,
        "num_attention_heads": geometry.heads,
        "num_key_value_heads": geometry.kv_heads,
        "head_dim": geometry.head_size,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": geometry.dtype,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if geometry.family != "qwen2":
        result["attention_bias"] = False
    return result


def write_model(geometry: Geometry, directory: Path) -> Path:
    """Write config and weights under ``directory / geometry.name`` unless they are there; return that path.

    With a sharpness of 3 single tokens matter even in long contexts. The vocabulary's logits have a standard
    deviation of about 4, so that the greedy token does not hang on the last bits of a float32 sum.
    """
    path = directory / geometry.name
    if (path / "geometry.json").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(geometry.seed)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    def linear(out_features: int, in_features: int, scale: float = 1.0) -> torch.Tensor:
        return normal(out_features, in_features, scale=scale / in_features**0.5)

    hidden, head = geometry.hidden, geometry.head_size
    query_width, kv_width = geometry.heads * head, geometry.kv_heads * head
    tensors = {
        "model.embed_tokens.weight": normal(VOCABULARY, hidden, scale=0.5),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": linear(VOCABULARY, hidden, 4.0),
    }
    for layer in range(geometry.layers):
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        tensors |= {
            attention + "q_proj.weight": linear(query_width, hidden, geometry.sharpness),
            attention + "k_proj.weight": linear(kv_width, hidden),
            attention + "v_proj.weight": linear(kv_width, hidden),
            attention + "o_proj.weight": linear(hidden, query_width, 2.0),
            prefix + "mlp.gate_proj.weight": linear(2 * hidden, hidden),
            prefix + "mlp.up_proj.weight": linear(2 * hidden, hidden),
            prefix + "mlp.down_proj.weight": linear(hidden, 2 * hidden),
            prefix + "input_layernorm.weight": torch.ones(hidden),
            prefix + "post_attention_layernorm.weight": torch.ones(hidden),
        }
        if geometry.family == "qwen3":
            tensors |= {
                attention + "q_norm.weight": torch.full((head,), geometry.sharpness),
                attention + "k_norm.weight": torch.ones(head),
            }
        if geometry.family == "qwen2":
            tensors |= {
                attention + "q_proj.bias": normal(query_width, scale=0.5),
                attention + "k_proj.bias": normal(kv_width, scale=5.0),
                attention + "v_proj.bias": normal(kv_width, scale=0.5),
            }
    dtype = getattr(torch, geometry.dtype)
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config(geometry), indent=1))
    (path / "geometry.json").write_text(json.dumps(asdict(geometry)))
    return path


def prompts(lengths: Sequence[int], *, seed: int, prefix: Sequence[int] = ()) -> list[list[int]]:
    """Random token ids, one prompt per length; prompts longer than ``prefix`` begin with it."""
    generator = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [generator.randrange(3, VOCABULARY) for _ in range(count)]

    return [
        [*prefix, *tokens(length - len(prefix))] if length > len(prefix) else tokens(length) for length in lengths
    ]
