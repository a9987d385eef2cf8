# SPDX-License-Identifier: Apache-2.0
"""Situations in which quantized KV caches have failed users of other projects; `README.md` lists them all."""
