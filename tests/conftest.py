# SPDX-License-Identifier: Apache-2.0
"""Settings for every test: threads, Triton's interpreter, reproducible hypothesis runs, the skipping of GPU tests."""

import os
from collections import Counter

import pytest

# Two test processes share a small machine; more threads each would only fight for its cores. PyTorch reads it once.
os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")

import torch

# Without a GPU kernels run in Triton's interpreter. It must be on before anything, vLLM too, imports Triton.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    from hypothesis import HealthCheck, settings

    settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("explore", deadline=None, max_examples=1000)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
    # Files with many slow tests start first: one of them at the end would leave a process alone with it.
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])
