# SPDX-License-Identifier: Apache-2.0
"""What happens when vLLM loads the plugin, and when an engine with ``--kv-cache-dtype oscar_int2`` is configured.

    register()            every process: dtype, cache spec, backend, and the patches of compat.py
    prepare(vllm_config)  the process that creates the engine: settings that follow from the dtype, every refusal,
                          and one line that says what will be served

A refusal is one line: what was asked for, why it cannot be, what to do instead. It comes before any worker starts.
"""

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from oscar_vllm import compat
from oscar_vllm.config import ALIAS, DTYPE, OscarConfig
from oscar_vllm.errors import OscarConfigError, OscarUnsupportedError
from triton_ops.layout import PAGE_TOKENS, page_head_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

_USE_AUTO = "use --kv-cache-dtype auto"


def register() -> None:
    """Register everything with this process's vLLM. Idempotent; does nothing but log under an unsupported version."""
    _use_vllm_log_handlers()
    problem = compat.version_problem()
    if problem is not None:
        logger.error(problem)
        compat.refuse_in_other_versions(problem)
        return
    compat.register_dtypes()
    compat.register_cache_spec()
    compat.register_attention_backend()
    compat.select_backend_by_dtype()
    compat.attach_window_caches()
    compat.equal_pages()
    compat.fix_block_size()
    compat.hit_whole_blocks()
    compat.resume_with_own_tails()
    compat.split_prefills_at_state_blocks()
    compat.check_engine_config(prepare)


def _use_vllm_log_handlers() -> None:
    """Send this package's log records to vLLM's handlers; vLLM configures its own logger only."""
    logging.getLogger("oscar_vllm").parent = logging.getLogger("vllm")


def prepare(vllm_config: "VllmConfig") -> None:
    """Complete and check the configuration of an engine whose cache dtype is ``oscar_int2``, then describe it.

    Raises:
        OscarConfigError, OscarUnsupportedError, OscarArtifactError: see :func:`validate_vllm_config`.

    """
    keep_sliding_window_layers(vllm_config)
    keep_shared_layers(vllm_config)
    keep_draft_dtype(vllm_config)
    offload_with_windows(vllm_config)
    logger.info(validate_vllm_config(vllm_config))
    if warning := beyond_calibration(vllm_config):
        logger.warning(warning)


def beyond_calibration(vllm_config: "VllmConfig") -> str | None:
    """What to say where the engine takes longer contexts than its artifact was calibrated for."""
    from oscar_vllm.rotation import engine_settings

    artifact, longest = engine_settings(vllm_config).artifact, vllm_config.model_config.max_model_len
    calibrated = None if artifact is None else artifact.max_position
    if calibrated is None or longest <= calibrated:
        return None
    return (
        f"--max-model-len {longest}: the artifact was calibrated for contexts of up to {calibrated} tokens, and keys "
        f"further on lose more; calibrate again with --max-position {longest}, or lower --max-model-len"
    )


def keep_sliding_window_layers(vllm_config: "VllmConfig") -> None:
    """Leave sliding-window layers in the model's dtype: they hold few tokens and vLLM already bounds them."""
    skip = vllm_config.cache_config.kv_cache_dtype_skip_layers
    if _has_sliding_window_layers(vllm_config) and "sliding_window" not in skip:
        vllm_config.cache_config.kv_cache_dtype_skip_layers = [*skip, "sliding_window"]


def keep_shared_layers(vllm_config: "VllmConfig") -> None:
    """Leave a cache that several layers read in the model's dtype (Gemma 3n): the readers get no keys of their own.

    The last layers of such a model read the cache of the last layer of their kind that has one.
    """
    text = vllm_config.model_config.hf_text_config
    kinds = list(getattr(text, "layer_types", None) or ())
    own = len(kinds) - (getattr(text, "num_kv_shared_layers", None) or 0)
    readers = range(own, len(kinds))
    owners = {max(i for i in range(own) if kinds[i] == kind) for kind in set(kinds[own:]) & set(kinds[:own])}
    skip = vllm_config.cache_config.kv_cache_dtype_skip_layers
    added = [str(i) for i in sorted(owners | set(readers)) if "sliding" not in kinds[i] and str(i) not in skip]
    if added:
        vllm_config.cache_config.kv_cache_dtype_skip_layers = [*skip, *added]


def keep_draft_dtype(vllm_config: "VllmConfig") -> None:
    """Leave the drafter's own layers in their dtype; vLLM would hand them the target's.

    Raises:
        OscarUnsupportedError: the drafter was given our dtype.

    """
    speculative = vllm_config.speculative_config
    if speculative is None or not (speculative.use_eagle() or speculative.uses_draft_model()):
        return
    if speculative.kv_cache_dtype in (DTYPE, ALIAS):
        raise OscarUnsupportedError(
            f"speculative config kv_cache_dtype={speculative.kv_cache_dtype!r}: draft layers keep the draft model's "
            "dtype; drop kv_cache_dtype from --speculative-config"
        )
    if speculative.kv_cache_dtype is None:
        speculative.kv_cache_dtype = "auto"


def offload_with_windows(vllm_config: "VllmConfig") -> None:
    """Hand ``--kv-offloading-size`` and vLLM's ``SimpleCPUOffloadConnector`` to ours, which brings windows back too."""
    transfer, cache = vllm_config.kv_transfer_config, vllm_config.cache_config
    if transfer is None:
        return
    native = cache.kv_offloading_size is not None and cache.kv_offloading_backend == "native"
    if native or (transfer.kv_connector == "SimpleCPUOffloadConnector" and not transfer.kv_connector_module_path):
        transfer.kv_connector, transfer.kv_connector_module_path = "OscarOffloadConnector", "oscar_vllm.offload"


def validate_vllm_config(vllm_config: "VllmConfig") -> str:
    """Check everything that can be known before a worker starts.

    Returns:
        The start-up summary, one line.

    Raises:
        OscarConfigError: an option has a wrong value.
        OscarUnsupportedError: a feature of the engine or the model that cannot be combined with this cache.
        OscarArtifactError: the artifact is missing, damaged or made for another model.

    """
    from oscar_vllm.rotation import engine_settings

    for problem in _unsupported(vllm_config):
        raise OscarUnsupportedError(f"--kv-cache-dtype {DTYPE} {problem}")
    cache_config = vllm_config.cache_config
    if cache_config.user_specified_block_size and cache_config.block_size != PAGE_TOKENS:
        raise OscarConfigError(
            f"--block-size {cache_config.block_size}: {DTYPE} pages hold {PAGE_TOKENS} tokens; "
            f"drop --block-size or set it to {PAGE_TOKENS}"
        )
    settings = engine_settings(vllm_config)
    try:
        page_head_size(vllm_config.model_config.get_head_size())
    except ValueError as error:
        raise OscarUnsupportedError(f"--kv-cache-dtype {DTYPE}: {error}; {_USE_AUTO}") from None
    _check_gpu(vllm_config, settings.options)
    if settings.artifact is not None:
        settings.artifact.check_model(vllm_config.model_config.hf_config)
    return summary(vllm_config, settings)


def _check_gpu(vllm_config: "VllmConfig", options: OscarConfig) -> None:
    """What the Triton kernels and CUDA graphs need on a GPU."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backend import max_decode_query_len

    from triton_ops.schedule import MAX_QUERY_LEN

    if not current_platform.is_cuda():
        return
    if options.payload == "float" or options.ops == "reference":
        if vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
            raise OscarConfigError(
                f"oscar options payload={options.payload!r}, ops={options.ops!r} run the PyTorch reference, "
                "which no CUDA graph can hold; add --enforce-eager"
            )
        return
    if vllm_config.model_config.dtype not in (torch.bfloat16, torch.float16):
        raise OscarUnsupportedError(
            f"--kv-cache-dtype {DTYPE} on a GPU needs --dtype bfloat16 or float16, not {vllm_config.model_config.dtype}"
        )
    longest = max_decode_query_len(vllm_config)
    if longest > MAX_QUERY_LEN:
        raise OscarUnsupportedError(
            f"--kv-cache-dtype {DTYPE} verifies at most {MAX_QUERY_LEN} tokens of a request a step, "
            f"num_speculative_tokens={vllm_config.num_speculative_tokens} asks for {longest}; lower it in "
            "--speculative-config"
        )


def _unsupported(vllm_config: "VllmConfig") -> Iterator[str]:
    """Why this configuration cannot be served: sentences that continue ``--kv-cache-dtype oscar_int2``."""
    yield from _unsupported_engine(vllm_config)
    yield from _unsupported_model(vllm_config)


def _unsupported_engine(vllm_config: "VllmConfig") -> Iterator[str]:
    import vllm.envs as envs
    from vllm.platforms import current_platform

    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        yield f"runs on NVIDIA GPUs and on CPUs, not on {current_platform.device_name}; {_USE_AUTO}"
    # Before the hybrid manager, which vLLM turns off for some connectors.
    if vllm_config.kv_transfer_config is not None:
        yield from _unsupported_transfer(vllm_config)
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        yield (
            "needs the hybrid KV cache manager, which holds pages and windows in one pool; "
            f"drop --disable-hybrid-kv-cache-manager (or what turned it off), or {_USE_AUTO}"
        )
    for option in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, option)
        if size > 1:
            flag = "--" + option.replace("_", "-")
            yield f"cannot split a sequence over ranks ({flag} {size}); set {flag} 1, or {_USE_AUTO}"
    if parallel.use_ubatching:
        yield f"cannot run two micro-batches at once: drop --enable-dbo and --ubatch-size, or {_USE_AUTO}"
    if cache.kv_sharing_fast_prefill:
        yield f"needs every layer to see every token: drop --kv-sharing-fast-prefill, or {_USE_AUTO}"
    if vllm_config.attention_config.hisparse_config is not None:
        yield f"cannot be combined with HiSparse: drop its configuration, or {_USE_AUTO}"
    if vllm_config.speculative_config is not None and vllm_config.model_config.is_hybrid and current_platform.is_cpu():
        # Seen in 0.32 with every cache dtype: other tokens than without drafts.
        yield ("does not speculate in hybrid models on a CPU, where vLLM answers wrongly: drop --speculative-config")
    if vllm_config.model_config.is_hybrid and parallel.pipeline_parallel_size > 1:
        # A rank without attention layers would take another block size than the others.
        yield (
            f"was not tried with hybrid models in stages (--pipeline-parallel-size {parallel.pipeline_parallel_size}): "
            f"use --tensor-parallel-size instead, or {_USE_AUTO}"
        )
    if envs.VLLM_BATCH_INVARIANT:
        yield (
            "has no batch-invariant attention in vLLM's sense: unset VLLM_BATCH_INVARIANT; "
            """--additional-config '{"oscar": {"prefill": "invariant"}}' makes results independent of chunks and hits"""
        )


def _unsupported_transfer(vllm_config: "VllmConfig") -> Iterator[str]:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.platforms import current_platform

    from oscar_vllm.offload import OscarOffloadConnector

    transfer = vllm_config.kv_transfer_config
    connector = KVConnectorFactory.get_connector_class(transfer)
    if not issubclass(connector, OscarOffloadConnector):
        yield (
            f"cannot be moved by {transfer.kv_connector}, which knows nothing of windows and would bring back pages "
            "without their sinks; to offload to CPU memory use --kv-offloading-size with its native backend, otherwise "
            f"drop --kv-transfer-config and --kv-offloading-size, or {_USE_AUTO}"
        )
        return
    without = f"drop --kv-offloading-size and --kv-transfer-config, or {_USE_AUTO}"
    if transfer.kv_role != "kv_both":
        # vLLM keeps blocks that a step in flight still writes from being loaded into, for consumers only.
        yield f"both stores and loads when it offloads; set kv_role to kv_both, or {_USE_AUTO}"
    if connector is OscarOffloadConnector and not current_platform.is_cuda():
        yield f"offloads to CPU memory from NVIDIA GPUs only; {without}"
    if transfer.kv_connector_extra_config.get("kv_offload_backend", "cpu") != "cpu":
        yield f"offloads to CPU memory only, not to disk; drop kv_offload_backend, or {_USE_AUTO}"
    if vllm_config.model_config.is_hybrid:
        yield f"does not offload recurrent states, of which a hit would need the right one; {without}"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        yield f"does not offload with pipeline parallelism, where ranks have different numbers of blocks; {without}"


def _unsupported_model(vllm_config: "VllmConfig") -> Iterator[str]:
    model = vllm_config.model_config
    text = model.hf_text_config
    kind = getattr(text, "model_type", "this model")
    if model.use_mla:
        yield f"does not serve latent attention (MLA, {kind}), whose cache holds no keys per head; {_USE_AUTO}"
    elif model.is_attention_free:
        yield f"has nothing to compress: {kind} has no attention layers; {_USE_AUTO}"
    elif model.is_encoder_decoder or model.attn_type not in ("decoder", "hybrid"):
        yield f"serves decoder attention only, not encoder or cross attention ({kind}); {_USE_AUTO}"
    if model.is_mm_prefix_lm:
        yield f"does not serve bidirectional attention over image tokens ({kind}); {_USE_AUTO}"
    if model.attention_chunk_size is not None:
        yield f"does not serve chunked local attention ({kind}); {_USE_AUTO}"
    if kind == "zamba2":
        # Their layers are named by the order of their uses, an artifact's by the model's.
        yield f"does not serve attention blocks that several layers share ({kind}); {_USE_AUTO}"
    if _uses_alibi(text):
        yield f"does not serve ALiBi position biases ({kind}); {_USE_AUTO}"
    if vllm_config.cache_config.sliding_window is not None:
        yield (
            f"has nothing to compress: every layer of {kind} attends to a sliding window of "
            f"{vllm_config.cache_config.sliding_window} tokens, and such layers stay unquantized; "
            f"{_USE_AUTO}, or --disable-sliding-window"
        )


def _uses_alibi(text: Any) -> bool:
    attention = getattr(text, "attn_config", None)
    nested = attention.get("alibi") if isinstance(attention, dict) else getattr(attention, "alibi", False)
    position = getattr(text, "position_embedding_type", None)
    return bool(nested or getattr(text, "alibi", False) or position == "alibi" or text.model_type == "bloom")


def _has_sliding_window_layers(vllm_config: "VllmConfig") -> bool:
    layer_types = getattr(vllm_config.model_config.hf_text_config, "layer_types", None) or ()
    return any("sliding" in layer_type for layer_type in layer_types)


def _quantized_layers(vllm_config: "VllmConfig") -> list[bool]:
    """For every layer of the model, whether it will use our dtype."""
    skip = set(vllm_config.cache_config.kv_cache_dtype_skip_layers)
    return [str(index) not in skip and kind == "full" for index, kind in enumerate(_layer_kinds(vllm_config))]


def _layer_kinds(vllm_config: "VllmConfig") -> list[str]:
    """Per layer "full", "sliding" or "" (no attention, as in hybrid models), from what the model's family states."""
    text = vllm_config.model_config.hf_text_config
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if kinds is None:  # MiniMax: 1 is full attention, 0 linear
        codes = getattr(text, "attn_type_list", None) or [1] * text.num_hidden_layers
        kinds = ["attention" if code == 1 else "linear" for code in codes]

    def kind_of(name: str) -> str:
        if "sliding" in name:
            return "sliding"
        return "full" if name == "hybrid" or ("attention" in name and "linear" not in name) else ""

    return [kind_of(name) for name in kinds]


def engine_config(model: str, additional_config: dict[str, Any]) -> "VllmConfig":
    """The checked configuration of an engine that would serve ``model``; reads neither weights nor tokenizer.

    Raises:
        OscarConfigError, OscarUnsupportedError, OscarArtifactError: see :func:`validate_vllm_config`.

    """
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=model,
        kv_cache_dtype=DTYPE,
        additional_config=additional_config,
        skip_tokenizer_init=True,
        enforce_eager=True,  # nothing is run: graphs are the server's choice
    )
    return arguments.create_engine_config()


def layer_backends(vllm_config: "VllmConfig") -> dict[str, list[int]]:
    """Indices of the model's layers by the name of the attention backend that vLLM selects for them."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    model = vllm_config.model_config
    found: dict[str, list[int]] = {}
    with set_current_vllm_config(vllm_config):
        for index, (kind, ours) in enumerate(
            zip(_layer_kinds(vllm_config), _quantized_layers(vllm_config), strict=True)
        ):
            if not kind:
                continue
            backend = get_attn_backend(
                model.get_head_size(),
                model.dtype,
                DTYPE if ours else "auto",
                num_heads=model.get_num_attention_heads(vllm_config.parallel_config),
                has_sliding_window=kind == "sliding",
            )
            found.setdefault(backend.get_name(), []).append(index)
    return found


def summary(vllm_config: "VllmConfig", settings: Any) -> str:
    """One line: bits per element, bytes per token, windows, and where the rotations come from."""
    from oscar_vllm.cache_spec import history_layout

    model, options = vllm_config.model_config, settings.options
    head_size = model.get_head_size()
    layout = history_layout(options, head_size, model.dtype)
    padded = "" if layout.head_size == head_size else f", padded to {layout.head_size}"
    bits = layout.bytes_per_token * 8 / (2 * head_size)  # of the model's own elements
    heads, layers = model.get_total_num_kv_heads(), sum(_quantized_layers(vllm_config))
    if options.payload == "float":
        source = "payload float: nothing is compressed"
    elif settings.artifact is None:
        source = "data-free Hadamard rotation, no calibration"
    else:
        source = f"artifact {settings.artifact.artifact_id}, fitted on {settings.artifact.model}"
    return (
        f"OSCAR KV cache: {bits:.3g} bits per element in pages of {PAGE_TOKENS} tokens, "
        f"{layers * heads * layout.bytes_per_token:,} bytes per token ({layers} layers, {heads} KV heads of size "
        f"{head_size}{padded}); the first {options.sink} and last {options.recent} tokens stay "
        f"{str(model.dtype).removeprefix('torch.')}; prefill {options.prefill}; {source}"
    )
