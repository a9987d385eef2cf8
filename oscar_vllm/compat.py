# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on vLLM's version or changes vLLM from outside. No other module does either.

Each patch is an idempotent function whose docstring says what goes wrong without it, why, where upstream stands and
when it can go. :func:`oscar_vllm.plugin.register` calls them in order, in every process vLLM starts.

What this module needs from ``oscar_vllm.backend``:

* ``OscarBackend``: ``validate_configuration(**selector_config, device_capability=...) -> list[str]`` and
  ``customize_spec`` that keeps every field of the spec it does not pack (``page_size_padded`` above all).
* ``OscarImpl`` (through ``layer.impl``): ``settings.options``, the resolved options, and ``attach(layer_name)``,
  called once per layer after construction.
"""

import functools
import re
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from oscar_vllm.config import ALIAS, DTYPE
from oscar_vllm.errors import OscarUnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SUPPORTED_VERSIONS = ((0, 32), (0, 33))
BACKEND_NAME = "OSCAR_INT2"
BACKEND_PATH = "oscar_vllm.backend.OscarBackend"

_MARK = "__oscar_patch__"
_DRAFT_MODEL_PREFIX = "draft_model."
"""What the names of a separate draft model's layers begin with."""


def vllm_version() -> tuple[int, int]:
    """(major, minor) of the installed vLLM."""
    import vllm

    numbers = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def version_problem() -> str | None:
    """One line if the installed vLLM is outside the supported range, else None."""
    if vllm_version() in SUPPORTED_VERSIONS:
        return None
    import vllm

    supported = " and ".join(f"{major}.{minor}.x" for major, minor in SUPPORTED_VERSIONS)
    return (
        f"oscar-vllm supports vLLM {supported}, found {vllm.__version__}: --kv-cache-dtype {DTYPE} is not available; "
        f"install a supported vLLM, or a release of oscar-vllm made for this one"
    )


def _patch(owner: Any, name: str, make: Callable[[Callable], Callable], *, as_classmethod: bool = False) -> None:
    """Replace ``owner.name`` by ``make(original)`` unless that was done before."""
    original = getattr(owner, name)
    if getattr(original, _MARK, False):
        return
    replacement = functools.wraps(original)(make(original))
    setattr(replacement, _MARK, True)
    setattr(owner, name, classmethod(replacement) if as_classmethod else replacement)


def refuse_in_other_versions(problem: str) -> None:
    """Stop an engine that asks for our dtype under an unsupported vLLM; leave every other engine alone.

    Symptom: without it the user reads that the dtype is not one of vLLM's, and not why.
    Remove: never; the range moves.
    """
    from vllm.engine.arg_utils import EngineArgs

    def make(original: Callable) -> Callable:
        def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.kv_cache_dtype in (DTYPE, ALIAS):
                raise OscarUnsupportedError(problem)
            return original(self, *args, **kwargs)

        return create_engine_config

    _patch(EngineArgs, "create_engine_config", make)


def register_dtypes() -> None:
    """Make ``oscar_int2`` and ``oscar`` valid values of ``--kv-cache-dtype``.

    Symptom: "Invalid kv_cache_dtype" from the command line, pydantic or the backend selector.
    Cause: the values are a closed ``Literal`` in 0.32. 0.33 added ``register_kv_cache_dtype`` for out-of-tree dtypes
    (vllm/config/cache.py); in 0.32 the Literal object, shared by all its users, is extended in place and the two
    pydantic classes that compiled it are rebuilt. The storage dtype is uint8, the quantization mode NONE: any other
    mode would select a kernel of vLLM's own, and in 0.33 ``KVQuantMode.CUSTOM`` is an alias of ``OCTAVE_K3V4``.
    Remove: the 0.32 branch with support for 0.32.
    """
    import torch
    import vllm.config.cache as cache_module

    if vllm_version() >= (0, 33):
        from vllm.v1.kv_cache_interface import KVQuantMode

        for dtype_name in (DTYPE, ALIAS):
            if cache_module.get_kv_cache_dtype_handler(dtype_name) is not None:
                continue

            @cache_module.register_kv_cache_dtype(dtype_name)
            class _Handler:
                name = dtype_name

                def torch_dtype(self) -> torch.dtype:
                    return torch.uint8

                def quant_mode(self) -> KVQuantMode:
                    return KVQuantMode.NONE

        return

    from pydantic.dataclasses import rebuild_dataclass
    from vllm.config import VllmConfig
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    literal = cache_module.CacheDType
    missing = [name for name in (DTYPE, ALIAS) if name not in typing.get_args(literal)]
    if not missing:
        return
    literal.__args__ = (*typing.get_args(literal), *missing)
    STR_DTYPE_TO_TORCH_DTYPE.update(dict.fromkeys(missing, torch.uint8))
    rebuild_dataclass(cache_module.CacheConfig, force=True)
    rebuild_dataclass(VllmConfig, force=True)


def register_cache_spec() -> None:
    """Tell vLLM which manager serves :class:`~oscar_vllm.cache_spec.SinkWindowSpec`.

    Symptom without the first line: "No manager found for KV cache spec" for vLLM's own specs.
    Cause: ``_ensure_registered`` registers vLLM's specs only while the registry is empty
    (vllm/v1/kv_cache_spec_registry.py), so a plugin that registers first disables that.
    Remove: the first line, once upstream keeps a flag instead of testing for emptiness.
    """
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from oscar_vllm.cache_manager import SinkWindowManager
    from oscar_vllm.cache_spec import SinkWindowSpec

    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(SinkWindowSpec, manager_class=SinkWindowManager)


def register_attention_backend() -> None:
    """Add the enum member ``OSCAR_INT2`` that an attention layer looks up by its backend's name.

    Symptom without the guard: "Backend OSCAR_INT2 already exists" when a process loads plugins twice.
    Cause: ``register_backend`` creates the member anew (vllm/v1/attention/backends/registry.py). The member must never
    enter a config: a process in which no plugin has run cannot unpickle it.
    Remove: never.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if BACKEND_NAME not in AttentionBackendEnum.__members__:
        register_backend(BACKEND_NAME, BACKEND_PATH)


def select_backend_by_dtype() -> None:
    """Let layers of our dtype use our backend and all others what the platform picks.

    Symptom: "No valid attention backend found", or one backend for all layers if it is forced.
    Cause: platforms choose among vLLM's own backends, and ``--attention-backend`` knows no dtype.
    Upstream: ``Platform.get_attn_backend_cls`` has no hook for plugins that are not platforms.
    Remove: when backends can register the dtypes they serve.
    """
    from vllm.platforms import current_platform

    platform = type(current_platform)

    def make(original: Callable) -> Callable:
        def get_attn_backend_cls(
            cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
        ) -> str:
            if attn_selector_config.kv_cache_dtype != DTYPE:
                return original(selected_backend, attn_selector_config, *args, **kwargs)
            from oscar_vllm.backend import OscarBackend

            reasons = OscarBackend.validate_configuration(
                device_capability=cls.get_device_capability(), **attn_selector_config._asdict()
            )
            if reasons:
                raise OscarUnsupportedError(
                    f"--kv-cache-dtype {DTYPE} cannot serve an attention layer of this model: {'; '.join(reasons)} "
                    f"({attn_selector_config!r}); leave it unquantized with --kv-cache-dtype-skip-layers, "
                    "or use --kv-cache-dtype auto"
                )
            return BACKEND_PATH

        return get_attn_backend_cls

    _patch(platform, "get_attn_backend_cls", make, as_classmethod=True)


def attach_window_caches() -> None:
    """Give every attention layer of our dtype a second cache, its window.

    Symptom: a layer has one KV cache and no place for unquantized tokens that the scheduler would know of.
    Cause: ``Attention.__init__`` registers only itself in ``static_forward_context``, from which vLLM collects cache
    specs. The window goes in *before* its layer: 0.32 takes the last registered layer for the drafter's, and of two
    groups the blocks of the first are evicted last, which keeps the sinks of a prefix as long as its pages.
    Upstream: no layer may declare more than one cache.
    Remove: when one may.
    """
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.attention import Attention

    def make(original: Callable) -> Callable:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if self.kv_cache_dtype == DTYPE:
                # Here and not at registration: only a worker builds layers, other processes need no model runner.
                zero_no_pages_on_cpu()
                end_prefills_at_states_on_cpu()
                _attach_window_cache(self, get_current_vllm_config())
            elif self.layer_name.startswith(_DRAFT_MODEL_PREFIX):
                _put_draft_model_first(get_current_vllm_config())

        return __init__

    _patch(Attention, "__init__", make)


def _attach_window_cache(layer: Any, vllm_config: "VllmConfig") -> None:
    from oscar_vllm.backend import OscarBackend
    from oscar_vllm.cache_spec import WindowCache

    if layer.attn_backend is not OscarBackend:
        raise OscarUnsupportedError(
            f"layer {layer.layer_name} brings its own attention ({layer.attn_backend.get_name()}), which cannot read "
            f"{DTYPE} pages; leave it unquantized with --kv-cache-dtype-skip-layers, or use --kv-cache-dtype auto"
        )
    if layer.head_size_v != layer.head_size:
        raise OscarUnsupportedError(
            f"layer {layer.layer_name} has keys of {layer.head_size} and values of {layer.head_size_v} elements; "
            f"{DTYPE} pages need equal sizes; use --kv-cache-dtype auto"
        )
    owner = layer.kv_sharing_target_layer_name
    if owner is not None:
        # vLLM hands such a layer no keys and values, and the middle of a prefill chunk is in no window block.
        raise OscarUnsupportedError(
            f"layer {layer.layer_name} reads the cache of {owner}, which {DTYPE} does not serve; leave both "
            "unquantized with --kv-cache-dtype-skip-layers and their layer numbers, or use --kv-cache-dtype auto"
        )
    layer.impl.attach(layer.layer_name)
    window = WindowCache(layer, layer.impl.settings.options, vllm_config.model_config.dtype)
    context = vllm_config.compilation_config.static_forward_context
    context[window.layer_name] = window
    context[layer.layer_name] = context.pop(layer.layer_name)


def _put_draft_model_first(vllm_config: "VllmConfig") -> None:
    """Register the layers of a separate draft model before all others.

    Symptom: with ``--speculative-config '{"method": "draft_model", ...}'`` the target's own first token is wrong.
    Cause: the V1 runner hands a draft model the block table of cache group 0, whichever group its layers are in
    (``GPUModelRunner._build_attention_metadata``, 0.32 and 0.33: only EAGLE-like drafters are asked for their group).
    Group 0 would be the windows, and the drafter would write into blocks of other requests.
    Remove: when ``DraftModelProposer.kv_cache_gid`` is honoured there.
    """
    context = vllm_config.compilation_config.static_forward_context
    for name in [name for name in context if not name.startswith(_DRAFT_MODEL_PREFIX)]:
        context[name] = context.pop(name)


def equal_pages() -> None:
    """Make the pages of layers that keep another dtype as large as ours, by their block size.

    Symptom: with skip layers or a drafter, INT2 pages are padded seven- to twelvefold (73,728 to 524,288 bytes at head
    size 128) and the cache shrinks.
    Cause: a full-attention layer takes ``cache_config.block_size``, 128 tokens here, whatever its dtype, and
    ``unify_kv_cache_spec_page_size`` pads all pages to the largest (vllm/v1/core/kv_cache_utils.py; 0.33
    kv_cache_planning.py). Such a layer works as well with blocks of 16.
    Remove: when full-attention layers choose their block by page size, as sliding-window layers do.
    """
    from vllm.model_executor.layers.attention import Attention

    def make(original: Callable) -> Callable:
        def get_kv_cache_spec(self: Any, vllm_config: "VllmConfig") -> Any:
            spec = original(self, vllm_config)
            if spec is None or vllm_config.cache_config.cache_dtype != DTYPE:
                return spec
            from oscar_vllm.cache_spec import fit_to_shared_page

            return fit_to_shared_page(self, spec, vllm_config)

        return get_kv_cache_spec

    _patch(Attention, "get_kv_cache_spec", make)


def fix_block_size() -> None:
    """Set the block size to one page, 128 tokens (several in a hybrid model), and the page of other layers to ours.

    Symptom: a window block is not a whole page, or (Gemma) every page is padded from 10,240 to 131,072 bytes; in a
    hybrid model a block of pages and one of states differ in size.
    Cause: with skip layers ``_align_heterogeneous_kv_block_size`` raises the block until the quantized page covers an
    unquantized one of the model's head size, which our unequal blocks do not need (vllm/platforms/interface.py); with
    windows in the model, the size that all backends share is not the page's; and ``_align_hybrid_block_size`` knows no
    window blocks.
    Remove: with :func:`equal_pages`.
    """
    from vllm.platforms import current_platform

    def make(original: Callable) -> Callable:
        def update_block_size_for_backend(cls: Any, vllm_config: "VllmConfig") -> None:
            from oscar_vllm.cache_spec import WindowCache, pages_per_block, shared_page_bytes
            from triton_ops.layout import PAGE_TOKENS

            cache_config = vllm_config.cache_config
            layers = vllm_config.compilation_config.static_forward_context.values()
            if cache_config.cache_dtype != DTYPE or not any(isinstance(layer, WindowCache) for layer in layers):
                original(vllm_config)
                return
            cache_config.block_size = PAGE_TOKENS * pages_per_block(vllm_config)
            if vllm_config.model_config.is_hybrid:
                cache_config.mamba_page_size_padded = shared_page_bytes(vllm_config)
                if cache_config.mamba_cache_mode == "align":
                    cache_config.mamba_block_size = cache_config.block_size
            if cache_config.kv_cache_dtype_skip_layers:
                cache_config.skip_page_size_padded = shared_page_bytes(vllm_config)

        return update_block_size_for_backend

    _patch(type(current_platform), "update_block_size_for_backend", make, as_classmethod=True)


def state_block_alignment(vllm_config: "VllmConfig") -> int:
    """Tokens that a block must be a multiple of where recurrent states are cached.

    0.33's linear attention exports states from within a prefill at ends of its chunks, and blocks are to hold whole
    chunks (``_align_hybrid_block_size``); 0.32 asks for nothing.
    """
    if vllm_config.cache_config.mamba_cache_mode != "align" or vllm_version() < (0, 33):
        return 1
    from vllm.model_executor.layers.mamba.abstract import get_mamba_prefill_checkpoint_alignment

    return get_mamba_prefill_checkpoint_alignment(vllm_config) or 1


def hit_whole_blocks() -> None:
    """Keep prefix hits of hybrid models from ending within a block.

    Symptom: such a request continues from pages that were never copied to it (seen in 0.32, with vLLM's own cache
    dtypes and ``--prefix-match-unit`` as well).
    Cause: hashes are taken in units of the smallest block, the windows', and where recurrent states are cached, hits
    may end at any unit. The last block is then copied by ``copy_kv_cache_blocks_inplace``, which copies once per
    address: of layers that overlay each other only the first one's bytes. A unit need not be whole pages either.
    Remove: when it copies whole blocks and the unit can be asked for.
    """
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator

    def make(original: Callable) -> Callable:
        def __init__(self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
            from oscar_vllm.cache_spec import SinkWindowSpec

            if any(isinstance(group.kv_cache_spec, SinkWindowSpec) for group in kv_cache_config.kv_cache_groups):
                kwargs["allow_partial_hash_hits"] = False
            original(self, kv_cache_config, *args, **kwargs)

        return __init__

    _patch(HybridKVCacheCoordinator, "__init__", make)


def resume_with_own_tails() -> None:
    """Tell the window manager where a prompt parts from what is cached, and let it shorten hits by the recent tail.

    Symptom: where many prompts share a beginning and then part, the 256 tokens before that place are read from pages
    by every one of them (with ``prefill="invariant"`` none of them hits the beginning at all).
    Cause: ``KVCacheManager.get_computed_blocks`` reports the place to the scheduler, which tells the managers when the
    blocks of the step have been chosen; and a manager's lookup has no request to choose blocks for.
    Remove: when managers are given the request.
    """
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    def make(original: Callable) -> Callable:
        def get_computed_blocks(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            from oscar_vllm.cache_manager import resume_with_own_tail

            return resume_with_own_tail(self, request, original(self, request, *args, **kwargs))

        return get_computed_blocks

    _patch(KVCacheManager, "get_computed_blocks", make)


def split_prefills_at_state_blocks() -> None:
    """Let the scheduler end prefill chunks where a block of recurrent states ends, not where a window block does.

    Symptom: in a hybrid model with prefix caching a chunk runs past the end of a state block, whose hash then stands
    for a state of fewer tokens; requests that hit it continue from a wrong state.
    Cause: ``Scheduler._mamba_block_aligned_split`` takes ``cache_config.block_size`` for the states' block, and
    ``EngineCore._initialize_kv_caches`` sets that to the smallest block of all groups, which is the windows'.
    Remove: when the scheduler asks the states' own spec.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    def make(original: Callable) -> Callable:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if self.need_mamba_block_aligned_split and self.cache_config.cache_dtype == DTYPE:
                from vllm.v1.kv_cache_interface import MambaSpec

                specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
                (self.cache_config.block_size,) = {spec.block_size for spec in specs if isinstance(spec, MambaSpec)}

        return __init__

    _patch(Scheduler, "__init__", make)


def zero_no_pages_on_cpu() -> None:
    """Let the CPU runner zero whole blocks, of every layer with another dtype, and none of ours.

    Symptom: answers of NaN in models with sliding windows; in hybrid models, pages of running requests turn to zeros.
    Cause: where layers of several dtypes share blocks, what another layer left in a block may be NaN, and kernels
    multiply slots that nobody wrote by zero. So vLLM zeroes new blocks; but ``CPUModelRunner._zero_block_ids`` passes
    sliding windows over, and indexes a layer's cache with block numbers although the cache is in kernel blocks, several
    to a block. Our pages and windows need no zeros: they are read only where they were written. On a GPU
    ``KVBlockZeroer`` does it right.
    Remove: when the CPU runner does, too.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import torch
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    def make(original: Callable) -> Callable:
        def _zero_block_ids(self: Any, block_ids: list[int]) -> None:
            context, config = self.compilation_config.static_forward_context, self.kv_cache_config
            layers = [context[name] for group in config.kv_cache_groups for name in group.layer_names]
            if all(getattr(layer, "kv_cache_dtype", None) != DTYPE for layer in layers):
                return original(self, block_ids)
            for layer in layers:
                if getattr(layer, "kv_cache_dtype", DTYPE) != DTYPE and isinstance(layer.kv_cache, torch.Tensor):
                    layer.kv_cache.unflatten(0, (config.num_blocks, -1))[block_ids] = 0

        return _zero_block_ids

    _patch(CPUModelRunner, "_zero_block_ids", make)


def end_prefills_at_states_on_cpu() -> None:
    """Let a CPU engine compute Mamba2 states at ends of prefill chunks only, as other kinds of states are.

    Symptom: with prefix caching, "IndexError: index 3 is out of bounds" in ``conv_ssm_forward``, or hits that continue
    from a wrong state; with vLLM's own cache dtypes as well (seen in 0.32).
    Cause: ``MambaMixer2.get_kv_cache_spec`` says that states can be taken from within a prefill, but the CPU kernel
    (``_mamba_chunk_scan_combined_fwd_cpu``) returns final states only and they are indexed like those of chunks.
    Remove: when either is right.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from dataclasses import replace

    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    def make(original: Callable) -> Callable:
        def get_kv_cache_spec(self: Any, vllm_config: "VllmConfig") -> Any:
            spec = original(self, vllm_config)
            if spec is None or vllm_config.cache_config.cache_dtype != DTYPE:
                return spec
            return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

        return get_kv_cache_spec

    _patch(MambaMixer2, "get_kv_cache_spec", make)


def check_engine_config(prepare: Callable[["VllmConfig"], None]) -> None:
    """Run ``prepare`` on every finished engine configuration of our dtype, in the process that creates the engine.

    Symptom: an option that cannot work is found by a worker, minutes later, and the user reads "Engine core
    initialization failed".
    Cause: plugins have no hook between the parsed options and the engine. ``EngineArgs.create_engine_config`` is what
    ``LLM``, ``vllm serve`` and the asynchronous engine have in common.
    Remove: when ``vllm.general_plugins`` may check a configuration.
    """
    from vllm.engine.arg_utils import EngineArgs

    def make(original: Callable) -> Callable:
        def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> "VllmConfig":
            if self.kv_cache_dtype == ALIAS:
                self.kv_cache_dtype = DTYPE
            vllm_config = original(self, *args, **kwargs)
            if vllm_config.cache_config.cache_dtype == DTYPE:
                prepare(vllm_config)
            return vllm_config

        return create_engine_config

    _patch(EngineArgs, "create_engine_config", make)
