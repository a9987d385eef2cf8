# SPDX-License-Identifier: Apache-2.0
"""Small random models for the engine tests, written as Hugging Face directories."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCABULARY = 4096


@dataclass(frozen=True)
class Geometry:
    """Shape of a random decoder.

    ``family`` decides what surrounds attention: ``qwen3`` normalizes queries and keys per head, ``qwen2`` has biases on
    Q, K and V (the keys' as large as real Qwen2.5 models have them), ``llama`` has neither. ``mimo`` is ``qwen2`` with
    a layer that predicts a second token (MTP). ``sharpness`` is the standard deviation of the attention logits.
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
        return self.heads * self.head_size if self.has_biases else 192  # vLLM's Qwen2 divides by the heads

    @property
    def has_biases(self) -> bool:
        return self.family in ("qwen2", "mimo")


ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mimo": "MiMoForCausalLM",
}


def config(geometry: Geometry) -> dict:
    result = {
        "architectures": [ARCHITECTURES[geometry.family]],
        "model_type": "qwen2" if geometry.family == "mimo" else geometry.family,
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
    if not geometry.has_biases:
        result["attention_bias"] = False
    if geometry.family == "mimo":
        result["num_nextn_predict_layers"] = 1
    return result


def decoder_layer(geometry: Geometry, prefix: str, normal: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of one decoder layer by name."""

    def linear(out_features: int, in_features: int, scale: float = 1.0) -> torch.Tensor:
        return normal(out_features, in_features, scale=scale / in_features**0.5)

    hidden, head = geometry.hidden, geometry.head_size
    query_width, kv_width = geometry.heads * head, geometry.kv_heads * head
    attention = prefix + "self_attn."
    tensors = {
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
    if geometry.has_biases:
        tensors |= {
            attention + "q_proj.bias": normal(query_width, scale=0.5),
            attention + "k_proj.bias": normal(kv_width, scale=5.0),
            attention + "v_proj.bias": normal(kv_width, scale=0.5),
        }
    return tensors


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

    hidden = geometry.hidden
    tensors = {
        "model.embed_tokens.weight": normal(VOCABULARY, hidden, scale=0.5),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": linear(VOCABULARY, hidden, 4.0),
    }
    for layer in range(geometry.layers):
        tensors |= decoder_layer(geometry, f"model.layers.{layer}.", normal)
    if geometry.family == "mimo":
        prefix = "model.mtp_layers.0."
        tensors |= decoder_layer(geometry, prefix, normal)
        tensors[prefix + "input_proj.weight"] = linear(hidden, 2 * hidden)
        for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(hidden)
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

    return [[*prefix, *tokens(length - len(prefix))] if length > len(prefix) else tokens(length) for length in lengths]


def write_eagle_head(target: Geometry, directory: Path) -> Path:
    """A random EAGLE drafter for ``target``: one llama layer behind a projection of (embedding, hidden state)."""
    geometry = replace(target, family="llama", layers=1, seed=target.seed + 1)
    path = directory / f"eagle-{target.name}"
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(geometry.seed)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    tensors = decoder_layer(geometry, "layers.0.", normal)
    del tensors["layers.0.input_layernorm.weight"]
    tensors["fc.weight"] = normal(geometry.hidden, 2 * geometry.hidden, scale=(2 * geometry.hidden) ** -0.5)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config(geometry), indent=1))
    return path


def write_shortened(target: Geometry, layers: int, directory: Path) -> Path:
    """The first ``layers`` layers of ``target`` as a model of its own: a drafter that is often right."""
    path = directory / f"{target.name}-first-{layers}"
    path.mkdir(parents=True, exist_ok=True)
    tensors = load_file(write_model(target, directory) / "model.safetensors")
    dropped = tuple(f"model.layers.{layer}." for layer in range(layers, target.layers))
    save_file({n: x for n, x in tensors.items() if not n.startswith(dropped)}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config(replace(target, layers=layers)), indent=1))
    return path


def write_quantized(geometry: Geometry, method: str, directory: Path) -> Path:
    """The model with its layers' matrices in 4 bits, in groups of 64 inputs: ``method`` is ``gptq`` or ``awq``.

    Eight codes lie in an int32, along the inputs (GPTQ) or along the outputs in AutoAWQ's order (AWQ); zero is code 8.
    """
    path = directory / f"{geometry.name}-{method}"
    path.mkdir(parents=True, exist_ok=True)
    group = 64

    def packed(codes: torch.Tensor) -> torch.Tensor:
        """[n, 8] codes -> [n] int32, the first in the lowest bits."""
        words = (codes.long() << torch.arange(0, 32, 4)).sum(-1)
        return words.where(words < 2**31, words - 2**32).int()

    def quantized(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs, inputs = weight.shape
        rows = weight.float().view(outputs, inputs // group, group)
        scales = rows.abs().amax(-1) / 7
        codes = ((rows / scales[..., None]).round() + 8).clamp(0, 15).view(outputs, inputs).T.contiguous()
        tensors = {f"{name}.scales": scales.T.contiguous().half()}
        zeros = torch.full((inputs // group, outputs // 8, 8), 7.0 if method == "gptq" else 8.0)  # GPTQ stores zero - 1
        tensors[f"{name}.qzeros"] = packed(zeros)
        if method == "gptq":
            tensors[f"{name}.qweight"] = packed(codes.view(inputs // 8, 8, outputs).mT)
            tensors[f"{name}.g_idx"] = torch.arange(inputs, dtype=torch.int32) // group
        else:
            tensors[f"{name}.qweight"] = packed(codes.view(inputs, outputs // 8, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]])
        return tensors

    tensors = {}
    for name, tensor in load_file(write_model(geometry, directory) / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors |= quantized(name.removesuffix(".weight"), tensor)
        else:
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors")
    settings = {"quant_method": method, "bits": 4, "group_size": group}
    settings |= {"desc_act": False, "sym": True} if method == "gptq" else {"zero_point": True, "version": "gemm"}
    (path / "config.json").write_text(json.dumps(config(geometry) | {"quantization_config": settings}, indent=1))
    return path


IMAGE_TOKEN = 3 + 256


def byte_tokenizer() -> Any:
    """A tokenizer whose tokens are bytes, from 3 on; 0 to 2 are special, and `IMAGE_TOKEN` stands for an image."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *alphabet, "<image>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=["<image>"], **special)


def write_lora(geometry: Geometry, directory: Path, rank: int = 8) -> Path:
    """A random adapter of the projections that make queries, keys and values, large enough to change every answer."""
    path = directory / f"lora-{geometry.name}"
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(geometry.seed + 2)
    widths = {"q_proj": geometry.heads, "k_proj": geometry.kv_heads, "v_proj": geometry.kv_heads}
    tensors = {}
    for layer in range(geometry.layers):
        for projection, heads in widths.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}.lora_"
            down = torch.randn(rank, geometry.hidden, generator=generator) / geometry.hidden**0.5
            tensors[name + "A.weight"] = down
            tensors[name + "B.weight"] = torch.randn(heads * geometry.head_size, rank, generator=generator) / 4
    save_file(tensors, path / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(widths), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(adapter))
    return path


def write_mixed(family: str, directory: Path, sharpness: float = 3.0) -> Path:
    """A random model whose layers alternate between a window of 256 tokens and all tokens, made by transformers.

    ``gemma2``: logits are capped at 50. ``gemma3``: every layer has a cache. ``gemma3n``: the last two of six read the
    caches of the two before them. ``gpt_oss``: every head has a learned sink, about as heavy as its tokens; experts.
    """
    import transformers

    path = directory / (family if sharpness == 3.0 else f"{family}-s{sharpness}")
    layers = 6 if family == "gemma3n" else 4
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 192,
        "num_hidden_layers": layers,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 128,
        "sliding_window": 256,
        "max_position_embeddings": 8192,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family == "gemma2":
        settings = transformers.Gemma2Config(**shape, query_pre_attn_scalar=64)
    elif family == "gemma3":
        settings = transformers.Gemma3TextConfig(**shape, query_pre_attn_scalar=64)
    elif family == "gemma3n":
        shape |= {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 16}
        shape |= {"altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * layers, "num_kv_shared_layers": 2}
        settings = transformers.Gemma3nTextConfig(**shape)
    else:
        rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 2.0, "original_max_position_embeddings": 4096}
        rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        settings = transformers.GptOssConfig(**shape, num_local_experts=4, num_experts_per_tok=2, rope_parameters=rope)
    model = transformers.AutoModelForCausalLM.from_config(settings).float()
    randomize(model, sharpness)
    if family.startswith("gemma"):
        # Gemma's embeddings are its vocabulary's weights and outweigh what layers add: it would repeat its input.
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("post_attention_layernorm.weight"):
                    parameter += 1
                elif name == "model.norm.weight":  # scales around 0, not around 1
                    parameter += torch.randn(parameter.shape, generator=generator) / 3 - 1
    model.save_pretrained(path)
    return path


def write_hybrid(directory: Path) -> Path:
    """A random Granite 4 in float32: Mamba2 and attention layers in turn; a state is as large as 271 tokens' keys."""
    import transformers

    path = directory / "hybrid"
    settings = transformers.GraniteMoeHybridConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=4,
        layer_types=["mamba", "attention"] * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        shared_intermediate_size=256,
        num_local_experts=0,
        position_embedding_type="rope",
        attention_multiplier=0.125,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_d_state=128,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(settings).float()
    randomize(model)
    model.save_pretrained(path)
    return path


def write_linear_hybrid(directory: Path, sharpness: float = 1.0) -> Path:
    """A random Qwen3-Next in bfloat16: three layers with the gated delta rule to one with full attention, experts."""
    import transformers

    path = directory / "linear-hybrid"
    settings = transformers.Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=4,
        layer_types=[*["linear_attention"] * 3, "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(settings).bfloat16()
    randomize(model, sharpness)
    model.save_pretrained(path)
    return path


def write_blip2(directory: Path) -> Path:
    """A random BLIP-2: images of 28 x 28 pixels become 8 tokens in front of a decoder of 3 heads of size 64."""
    import transformers

    path = directory / "blip2"
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": VOCABULARY, "hidden_size": 192, "word_embed_proj_dim": 192, "ffn_dim": 384}
    text |= {"num_hidden_layers": 3, "num_attention_heads": 3, "max_position_embeddings": 4096, "dropout": 0.0}
    text |= {"model_type": "opt", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    settings = transformers.Blip2Config(
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        qformer_config={**vision, "vocab_size": 64, "encoder_hidden_size": 64},
        text_config=text,
        num_query_tokens=8,
        image_token_index=IMAGE_TOKEN,
        image_text_hidden_size=64,
    )
    model = transformers.Blip2ForConditionalGeneration(settings).float()
    randomize(model)
    model.save_pretrained(path)
    tokenizer = byte_tokenizer()
    tokenizer.image_token, tokenizer.image_token_id = "<image>", IMAGE_TOKEN
    images = transformers.BlipImageProcessor(size={"height": 28, "width": 28})
    transformers.Blip2Processor(images, tokenizer, num_query_tokens=8).save_pretrained(path)
    return path


def randomize(model: torch.nn.Module, sharpness: float = 3.0) -> None:
    """Weights of a transformers model as `write_model` draws them, by the names of their parameters."""
    generator = torch.Generator().manual_seed(1)
    scales = {"embed": 0.5, "q_proj": sharpness, "o_proj": 2.0, "lm_head": 4.0}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) + 8)
            elif parameter.ndim > 1:
                scale = next((scale for part, scale in scales.items() if part in name), 1.0)
                scale /= 1.0 if "embed" in name else parameter.shape[-1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
