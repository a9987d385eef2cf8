# SPDX-License-Identifier: Apache-2.0
"""Load configurations, tokenizers and weights with transformers; what cannot be loaded is one line, not a traceback."""

import os
from typing import Any

from oscar_vllm.errors import OscarConfigError

_WANTED = {
    "AutoConfig": ("configuration", "the hub id of a transformers model, or its folder with a config.json"),
    "AutoTokenizer": ("tokenizer", "a model that has one, such as a folder with a tokenizer.json"),
    "AutoModelForCausalLM": ("weights", "a model with complete weights, and a device and a dtype that exist here"),
}
"""Class of transformers -> (what it loads, what to give it)."""


def check_folder(model: str) -> None:
    """Refuse a model that can only be a folder, and is none, before anyone asks the hub for it.

    Args:
        model: hub id or folder.

    Raises:
        OscarConfigError: the folder does not exist.

    """
    path_like = not model or model.startswith((os.sep, ".", "~")) or (model.count("/") > 1 and "://" not in model)
    if path_like and not os.path.exists(model):
        raise OscarConfigError(f"model folder {model!r} does not exist; give a folder that does, or a hub id")


def from_pretrained(kind: Any, model: str, **options: Any) -> Any:
    """``kind.from_pretrained(model, **options)``.

    Args:
        kind: ``AutoConfig``, ``AutoTokenizer`` or ``AutoModelForCausalLM``.
        model: hub id or folder.
        options: passed on.

    Raises:
        OscarConfigError: it cannot be loaded.

    """
    check_folder(model)
    what, wanted = _WANTED[kind.__name__]
    try:
        return kind.from_pretrained(model, **options)
    except Exception as error:  # of many classes, from OSError to SafetensorError; their text says why
        reason = " ".join((str(error).strip() or type(error).__name__).splitlines()[0].split()).rstrip(":.")
        raise OscarConfigError(f"the {what} of model {model!r} cannot be loaded: {reason}; give {wanted}") from error
