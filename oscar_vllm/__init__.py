# SPDX-License-Identifier: Apache-2.0
"""OSCAR for vLLM: a 2-bit KV cache selected with ``--kv-cache-dtype oscar_int2``.

Importing this package loads neither torch nor vLLM. vLLM finds :func:`register` through the entry
point group ``vllm.general_plugins`` and calls it in every process it starts.
"""

__version__ = "0.1.0"


def register() -> None:
    """Teach this process's vLLM the dtype ``oscar_int2``. Idempotent."""
    from oscar_vllm.plugin import register as register_everything

    register_everything()
