# SPDX-License-Identifier: Apache-2.0
"""From options and artifact to what a layer serves with.

vllm_config -> engine_settings() -> EngineSettings.codec(layer)
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from oscar_vllm.artifact import Artifact, hadamard_codecs
from oscar_vllm.config import OscarConfig
from oscar_vllm.errors import OscarArtifactError
from triton_ops.codec import LayerCodec


@contextmanager
def plain_tensors() -> Iterator[None]:
    """New tensors are float32 on the CPU: vLLM makes and loads a model under the model's dtype and device."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


@dataclass(frozen=True)
class EngineSettings:
    """Options with every default filled in, and the artifact they came with.

    Attributes:
        options: resolved: ``sink``, ``recent`` and ``zero`` are never None.
        artifact: None in data-free mode.

    """

    options: OscarConfig
    artifact: Artifact | None

    @property
    def sink(self) -> int:
        """Tokens kept unquantized at the start of a sequence."""
        assert self.options.sink is not None
        return self.options.sink

    @property
    def recent(self) -> int:
        """Tokens kept unquantized at its end."""
        assert self.options.recent is not None
        return self.options.recent

    def codec(self, layer: int, *, num_kv_heads: int, head_size: int, tp_size: int = 1, tp_rank: int = 0) -> LayerCodec:
        """Codec of one layer's KV heads on one tensor-parallel rank, on the CPU.

        Args:
            layer: index of the layer in the model.
            num_kv_heads: KV heads on this rank.
            head_size: of the model's heads. The codec is one for padded heads (`triton_ops.layout.page_head_size`).
            tp_size: tensor-parallel ranks.
            tp_rank: this rank.

        Raises:
            OscarArtifactError: the artifact does not hold this layer or has another geometry.

        """
        if self.artifact is None:
            with plain_tensors():
                return hadamard_codecs(1, num_kv_heads, head_size, zero=self.options.zero or "page")[0]
        codec = self.artifact.layers.get(layer)
        if codec is None:
            raise OscarArtifactError(
                f"artifact {self.artifact.artifact_id} has no layer {layer}; calibrated layers: "
                f"{sorted(self.artifact.layers)}. Calibrate again, or serve this layer unquantized with "
                f"--kv-cache-dtype-skip-layers {layer}"
            )
        calibrated = self.artifact.geometry["head_size"]
        if calibrated != head_size:
            raise OscarArtifactError(
                f"artifact {self.artifact.artifact_id}, layer {layer}: calibrated for head size {calibrated}, "
                f"the model has {head_size}; calibrate this model again"
            )
        with plain_tensors():
            return codec.heads(local_kv_heads(codec.num_kv_heads, num_kv_heads, tp_size, tp_rank))


def local_kv_heads(total: int, local: int, tp_size: int, tp_rank: int) -> torch.Tensor:
    """Global indices [local] of the KV heads that a rank holds: sharded, or replicated when ranks outnumber heads.

    Raises:
        OscarArtifactError: the artifact's heads cannot be dealt out to the ranks like the model's.

    """
    if total == local * tp_size:
        return torch.arange(tp_rank * local, (tp_rank + 1) * local)
    if local == 1 and total < tp_size and tp_size % total == 0:
        return torch.tensor([tp_rank * total // tp_size])
    raise OscarArtifactError(
        f"the artifact was calibrated for {total} KV heads, the model has {local} on each of {tp_size} ranks; "
        "calibrate this model again"
    )


@functools.lru_cache(maxsize=4)
def _load(source: str, revision: str | None) -> Artifact:
    with plain_tensors():
        return Artifact.load(source, revision=revision)


def engine_settings(vllm_config: Any) -> EngineSettings:
    """Settings of an engine; the artifact is read once per process.

    Raises:
        OscarConfigError, OscarArtifactError: see `OscarConfig` and `Artifact.load`.

    """
    options = OscarConfig.from_additional_config(vllm_config.additional_config)
    source = options.artifact_source(vllm_config.model_config.model)
    if source is None:
        return EngineSettings(options.resolved(), None)
    artifact = _load(source, options.revision)
    return EngineSettings(options.resolved(sink=artifact.sink, recent=artifact.recent, zero=artifact.zero), artifact)
