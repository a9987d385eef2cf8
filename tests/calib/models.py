# SPDX-License-Identifier: Apache-2.0
"""Small random transformers models and a tokenizer of bytes."""

from types import SimpleNamespace

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCABULARY = 256


class ByteTokenizer:
    """One token per UTF-8 byte, no special tokens."""

    bos_token_id = None

    def __call__(self, text: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(input_ids=list(text.encode()))


def random_model(*, family: str = "llama", kv_heads: int = 2, group: int = 2, head_size: int = 64, layers: int = 2):
    """A decoder with random weights whose queries and keys are far from white."""
    torch.manual_seed(0)
    shape = {
        "hidden_size": 24 * kv_heads * group,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family == "gemma3":
        config = Gemma3TextConfig(
            **shape,
            sliding_window=32,
            query_pre_attn_scalar=head_size,
            layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        )
        model = Gemma3ForCausalLM(config)
    elif family == "gpt_oss":
        config = GptOssConfig(
            **shape,
            sliding_window=32,
            layer_types=["sliding_attention", "full_attention"] * (layers // 2),
            num_local_experts=2,
            num_experts_per_tok=1,
        )
        model = GptOssForCausalLM(config)
    else:
        config_class, model_class = {
            "llama": (LlamaConfig, LlamaForCausalLM),
            "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        }[family]
        model = model_class(config_class(**shape))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj.weight" in name or "k_proj.weight" in name:
                parameter.copy_(torch.randn_like(parameter) * torch.linspace(0.05, 0.6, parameter.shape[0])[:, None])
            elif "proj.bias" in name:
                parameter.copy_(torch.randn_like(parameter))
            elif name.endswith("sinks"):
                parameter.copy_(torch.randn_like(parameter) + 4)  # about as heavy as the tokens together
            elif "expert" in name or "router" in name:  # not initialized by transformers
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return model.eval()
