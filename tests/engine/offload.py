# SPDX-License-Identifier: Apache-2.0
"""The offloading connector for an engine on a CPU: the real one, with copies that need no CUDA.

Everything but the copy itself is vLLM's and the plugin's own. A copy happens at the latest moment that the protocol
allows: ``polls`` steps after it was asked for, just before its completion is reported. A block that is read too early
or reused too soon is thus seen as wrong tokens.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

from oscar_vllm.offload import OscarOffloadConnector


class LateCopy:
    """What the worker polls in the place of a CUDA event."""

    def __init__(self, copy: Callable[[], None], polls: int) -> None:
        self.copy, self.polls = copy, polls

    def query(self) -> bool:
        self.polls -= 1
        if self.polls <= 0:
            self.copy()
        return self.polls <= 0

    def synchronize(self) -> None:
        self.copy()


class Copies:
    """Copies blocks between the caches of the engine and those of the store, region by region."""

    def __init__(self, caches: dict[str, torch.Tensor], stored: dict[str, torch.Tensor], polls: int) -> None:
        self.caches, self.stored, self.polls = caches, stored, polls

    def launch_copy(
        self, source: list[int], target: list[int], is_store: bool, event_idx: int, events_list: list, **_: Any
    ) -> None:
        def copy() -> None:
            for name, cache in self.caches.items():
                held = self.stored[name]
                if is_store:
                    held[target] = cache[source]
                else:
                    cache[target] = held[source]

        events_list.append((event_idx, LateCopy(copy, self.polls)))


class CPUWorker(SimpleCPUOffloadWorker):
    polls: int

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        with patch("torch.cuda.Stream") as stream:
            stream.priority_range.return_value = (0, -1)
            super().register_kv_caches(kv_caches)

    def _init_cpu_mode(self, unique_gpu_caches: dict[str, torch.Tensor], *_: Any) -> None:
        self.cpu_kv_caches = {
            name: torch.full((self.num_cpu_blocks, *cache.shape[1:]), 127, dtype=cache.dtype)
            for name, cache in unique_gpu_caches.items()
        }
        self._backend = Copies(unique_gpu_caches, self.cpu_kv_caches, self.polls)

    def wait_for_save(self) -> None:
        metadata = self._connector_metadata
        if metadata is not None and metadata.store_gpu_blocks:
            self._backend.launch_copy(
                metadata.store_gpu_blocks, metadata.store_cpu_blocks, True, metadata.store_event, self._store_events
            )


class CPUOffloadConnector(OscarOffloadConnector):
    """Takes one more option in ``kv_connector_extra_config``: ``polls``."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        if role == KVConnectorRole.WORKER:
            self.worker_handler = CPUWorker(vllm_config, kv_cache_config, int(extra["cpu_bytes_to_use"]))
            self.worker_handler.polls = extra["polls"]
