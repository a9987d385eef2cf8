# SPDX-License-Identifier: Apache-2.0
"""Calibration text: a Hugging Face dataset, a local .jsonl or .txt file, or the small mixture in ``calib/data``.

`load_documents` yields texts, `token_windows` cuts them into samples. Documents are read only as far as needed.
"""

import codecs
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oscar_vllm.errors import OscarConfigError

BUNDLED = Path(__file__).parent / "data"
_OVERSAMPLING = 16
_MIN_TOKENS = 400_000
"""Tokens read: so many per token wanted, and so many at least, so that the seed has something to choose from."""
_MAX_CHARS = 2_000_000
"""Characters read of one document."""


def load_documents(
    dataset: str | None, *, split: str = "train", text_field: str = "text", seed: int = 0
) -> Iterator[str]:
    """Texts, one by one.

    Args:
        dataset: None: the bundled mixture. A path that ends in .jsonl (one JSON object a line with ``text_field``)
            or .txt: that file. Otherwise a dataset for `datasets.load_dataset`, ``name`` or ``name:config``.
        split: split of a Hugging Face dataset.
        text_field: field that holds the text.
        seed: order of a Hugging Face dataset.

    Raises:
        OscarConfigError: the file is missing, empty, binary or not UTF-8, or the field does not exist.

    """
    if dataset is None:
        for path in sorted(BUNDLED.glob("*.txt")):
            yield _read(path)
    elif dataset.endswith(".txt"):
        yield _read(Path(dataset))
    elif dataset.endswith(".jsonl"):
        yield from _read_jsonl(Path(dataset), text_field)
    elif Path(dataset).exists():
        raise OscarConfigError(f"dataset {dataset} has an unknown type; use a .txt or .jsonl file")
    else:
        yield from _read_hub(dataset, split, text_field, seed)


def _decode(raw: bytes, path: Path, *, cut: bool = False) -> str:
    """Text of a file or of its beginning, which may be ``cut`` inside a character."""
    if b"\0" in raw:
        raise OscarConfigError(f"{path} is a binary file (it holds zero bytes); give plain UTF-8 text")
    try:
        return codecs.getincrementaldecoder("utf-8-sig")().decode(raw, final=not cut)
    except UnicodeDecodeError as error:
        raise OscarConfigError(
            f"{path} is not UTF-8 (byte 0x{raw[error.start]:02x} at {error.start}); convert it, for example with "
            f"`iconv -f latin1 -t utf-8`"
        ) from None


def read_utf8(path: Path, limit: int = -1) -> str:
    """The text of a file.

    Args:
        path: a UTF-8 file.
        limit: bytes to read at most; -1: all.

    Raises:
        OscarConfigError: it cannot be read, is binary or not UTF-8.

    """
    try:
        with open(path, "rb") as file:
            raw, more = file.read(limit), bool(file.read(1))
    except OSError as error:
        raise OscarConfigError(f"text {path} cannot be read: {error.strerror}") from None
    return _decode(raw, path, cut=more)


def _read(path: Path) -> str:
    text = read_utf8(path, 4 * _MAX_CHARS)
    if not text.strip():
        raise OscarConfigError(f"dataset {path} is empty")
    return text


def _read_jsonl(path: Path, text_field: str) -> Iterator[str]:
    found = False
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise OscarConfigError(f"dataset {path} cannot be read: {error.strerror}") from None
    with file:
        for number, raw in enumerate(file, 1):
            line = _decode(raw, path)
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", str(error))
                raise OscarConfigError(f"{path}, line {number} is not JSON: {reason}") from None
            found = True
            yield _field(record, text_field, f"{path}, line {number}")
    if not found:
        raise OscarConfigError(f"dataset {path} is empty")


def _read_hub(dataset: str, split: str, text_field: str, seed: int) -> Iterator[str]:
    from datasets import load_dataset

    name, _, config = dataset.partition(":")
    try:
        records = load_dataset(name, config or None, split=split, streaming=True)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OscarConfigError(
            f"dataset {dataset!r} is neither a local .txt or .jsonl file nor a Hugging Face dataset with split "
            f"{split!r}: {reason}"
        ) from error
    for record in records.shuffle(seed=seed, buffer_size=1000):
        yield _field(record, text_field, f"dataset {dataset}")


def _field(record: Any, text_field: str, where: str) -> str:
    text = record.get(text_field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        fields = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise OscarConfigError(f"{where} has no text field {text_field!r} (found {fields}); set --text-field")
    return text.encode("utf-8", "replace").decode()  # JSON can hold halves of surrogate pairs, tokenizers cannot


def token_windows(documents: Iterator[str], tokenizer: Any, *, count: int, length: int, seed: int) -> list[Tensor]:
    """Samples of exactly ``length`` tokens.

    Long documents are cut into windows, short ones joined. Windows are taken in turn from each document, in an order
    that the seed decides, so that a small sample holds something of every document. Each starts with the tokenizer's
    beginning-of-sequence token where it has one.

    Args:
        documents: texts.
        tokenizer: a transformers tokenizer.
        count: samples wanted; fewer are returned when the texts hold no more.
        length: tokens per sample.
        seed: decides which windows are taken.

    Returns:
        int64 tensors [length].

    """
    bos = tokenizer.bos_token_id
    prefix = [bos] if bos is not None and tokenizer("a").input_ids[:1] == [bos] else []
    body = length - len(prefix)
    generator = random.Random(seed)
    piles: list[list[list[int]]] = []
    joined: list[int] = []
    total = 0
    for text in documents:
        tokens = tokenizer(text[:_MAX_CHARS], add_special_tokens=False, verbose=False).input_ids
        total += len(tokens)
        if len(tokens) >= body:
            start = generator.randrange(len(tokens) % body + 1)
            piles.append([tokens[i : i + body] for i in range(start, len(tokens) - body + 1, body)])
        else:
            joined += tokens
        if total >= max(_MIN_TOKENS, _OVERSAMPLING * count * length):
            break
    piles.append([joined[i : i + body] for i in range(0, len(joined) - body + 1, body)])
    for pile in piles:
        generator.shuffle(pile)
    generator.shuffle(piles)
    windows: list[list[int]] = []
    while any(piles) and len(windows) < count:
        for pile in piles:
            if pile and len(windows) < count:
                windows.append(pile.pop())
    return [torch.tensor(prefix + window) for window in windows]
