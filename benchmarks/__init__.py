# SPDX-License-Identifier: Apache-2.0
"""Measurements. `python -m benchmarks.run` checks the kernels first and refuses to time on red."""
