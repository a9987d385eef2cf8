# SPDX-License-Identifier: Apache-2.0
"""Texts and windows: what is read, what is refused, what the seed decides."""

import json

import pytest
import torch

from calib.data import BUNDLED, load_documents, token_windows
from oscar_vllm.errors import OscarConfigError
from tests.calib.models import ByteTokenizer


class MarkedTokenizer(ByteTokenizer):
    """A byte tokenizer with a beginning-of-sequence token."""

    bos_token_id = 1

    def __call__(self, text, *, add_special_tokens=True, **_):
        encoding = super().__call__(text)
        encoding.input_ids = [1] * add_special_tokens + encoding.input_ids
        return encoding


def windows(documents, **options):
    settings = {"count": 4, "length": 100, "seed": 0} | options
    return token_windows(iter(documents), ByteTokenizer(), **settings)


def test_the_bundled_text_is_small_mixed_and_described():
    files = sorted(BUNDLED.glob("*.txt"))
    documents = list(load_documents(None))
    assert len(documents) == len(files) >= 6
    assert 200_000 < sum(len(text.encode()) for text in documents) < 320_000
    sources = (BUNDLED / "SOURCES.md").read_text()
    assert all(f"`{path.name}`" in sources for path in files)


def test_a_small_bundled_sample_holds_something_of_every_document():
    documents = list(load_documents(None))
    chosen = token_windows(iter(documents), ByteTokenizer(), count=len(documents), length=2048, seed=3)
    encoded = [text.encode() for text in documents]
    found = {next(i for i, text in enumerate(encoded) if bytes(window.tolist()) in text) for window in chosen}
    assert found == set(range(len(encoded)))


def test_jsonl_and_txt(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n\n{"body": "zwei ü"}\n', encoding="utf-8")
    (tmp_path / "a.txt").write_text("hello", encoding="utf-8-sig")
    assert list(load_documents(str(tmp_path / "a.jsonl"), text_field="body")) == ["one", "zwei ü"]
    assert list(load_documents(str(tmp_path / "a.txt"))) == ["hello"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "cannot be read: No such file"),
        ("missing.jsonl", None, "cannot be read: No such file"),
        ("a.txt", b"", "is empty"),
        ("a.txt", b" \n\n", "is empty"),
        ("a.jsonl", b"\n", "is empty"),
        ("a.txt", b"MZ\x00\x01\x02", "is a binary file"),
        ("a.txt", "Grüße".encode("latin1"), "is not UTF-8 .byte 0xfc at 2.; convert it"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
        ("a.jsonl", b'{"body": "a"}\n', r"line 1 has no text field 'text' \(found \['body'\]\); set --text-field"),
        ("a.jsonl", b"[1]\n", "line 1 has no text field"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON: maximum recursion depth"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ' + b"9" * 5000 + b"}", "line 2 is not JSON: Exceeds the limit"),
        ("a.jsonl", b'{"text": null}\n', "line 1 has no text field 'text'"),
        ("a.jsonl", '{"text": "Grüße"}'.encode("latin1"), "is not UTF-8"),
        ("a.txt", "Grüße".encode("utf-16"), "is a binary file"),
        ("a.csv", b"text\nhello\n", "has an unknown type"),
    ],
)
def test_unusable_files_are_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(OscarConfigError, match=message):
        list(load_documents(str(tmp_path / name)))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_folder_is_no_dataset(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(OscarConfigError, match="cannot be read: Is a directory"):
        list(load_documents(str(tmp_path / name)))


@pytest.mark.parametrize("word", ["word ", "line\n", "ü", "語"])
def test_the_beginning_of_a_huge_text_is_read(tmp_path, word):
    """Also of one without a line end, whatever character the limit cuts."""
    (tmp_path / "a.txt").write_text("-" + word * 9_000_000, encoding="utf-8")
    (text,) = load_documents(str(tmp_path / "a.txt"))
    assert text == ("-" + word * len(text))[: len(text)]
    assert 8_000_000 - 4 < len(text.encode()) <= 8_000_000


def test_a_damaged_byte_of_a_huge_text_is_found(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"word " * 1_000_000 + b"\xff" + b"word " * 1_000_000)
    with pytest.raises(OscarConfigError, match=r"is not UTF-8 .byte 0xff at 5000000"):
        list(load_documents(str(tmp_path / "a.txt")))


def test_a_huge_line_is_one_document(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "word " * 3_000_000}) + '\n{"text": "b"}\n')
    first, second = load_documents(str(tmp_path / "a.jsonl"))
    assert (len(first), second) == (15_000_000, "b")
    assert len(windows([first], count=2)) == 2


def test_half_a_surrogate_pair_is_replaced(tmp_path):
    """JSON can hold it, UTF-8 cannot, and tokenizers stop at it."""
    (tmp_path / "a.jsonl").write_text(r'{"text": "a \ud800 \ud83d\ude00"}')
    assert list(load_documents(str(tmp_path / "a.jsonl"))) == ["a ? 😀"]


def test_an_unknown_dataset_is_refused(monkeypatch):
    import datasets

    def fail(*_, **__):
        raise ConnectionError("no network\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(OscarConfigError, match=r"neither a local .* with split 'train': no network$"):
        list(load_documents("some/dataset"))


def test_a_hub_dataset_is_read_through_datasets(monkeypatch):
    import datasets

    asked = []

    def load(name, config, *, split, streaming):
        asked.append((name, config, split, streaming))
        return datasets.IterableDataset.from_generator(lambda: iter([{"text": "a"}, {"text": "b"}]))

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert sorted(load_documents("some/dataset:en", split="test")) == ["a", "b"]
    assert asked == [("some/dataset", "en", "test", True)]


def test_windows_have_the_length_asked_for_and_do_not_overlap():
    document = "".join(f"{i:05d}" for i in range(400))
    chosen = windows([document], count=19)
    assert [len(window) for window in chosen] == [100] * 19
    assert len({tuple(window.tolist()) for window in chosen}) == 19


def test_short_documents_are_joined():
    chosen = windows([f"{i:030d}" for i in range(20)], count=3)
    assert len(chosen) == 3
    assert all(len(window) == 100 for window in chosen)


def test_fewer_windows_than_asked_for_when_the_text_ends():
    assert len(windows(["x" * 250], count=9)) in (1, 2)
    assert windows(["x" * 50]) == []


def test_the_seed_decides():
    document = "".join(json.dumps(i) for i in range(2000))
    first, again, other = (windows([document], seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_each_window_starts_with_the_beginning_token():
    chosen = token_windows(iter(["x" * 500]), MarkedTokenizer(), count=2, length=100, seed=0)
    assert [window[:2].tolist() for window in chosen] == [[1, ord("x")]] * 2
    assert len(chosen[0]) == 100


def test_reading_stops_when_there_is_enough():
    read = 0

    def endless():
        nonlocal read
        while True:
            read += 1
            yield "word " * 10_000

    assert len(token_windows(endless(), ByteTokenizer(), count=2, length=100, seed=0)) == 2
    assert read == 8
