# SPDX-License-Identifier: Apache-2.0
"""The engines of tests/engine, one set per file of tests."""

from tests.engine.conftest import engines

__all__ = ["engines"]
