# SPDX-License-Identifier: Apache-2.0
"""The bytes of one INT2 page. Every kernel, the reference and the KV-cache spec take them from here.

A *page* holds 128 tokens of one KV head: a 2-bit code for every key slot and value dimension, and float16
scales. ``head_size`` is d. Sections are contiguous and start at

    offset  d = 128   section
    0       0         key codes    32 d bytes   128 tokens x d slots x 2 bit
    32 d    4096      value codes  32 d bytes   d dims x 128 tokens x 2 bit (transposed)
    64 d    8192      key scale    256 bytes    float16 x 128, in metadata order
            8448      value scale  256 bytes    float16 x 128, in metadata order
            8704      value zero   256 bytes    float16 x 128, in metadata order
            8960      key mean     2 d bytes    float16 x d, plain order         (zero="page")
                  or  key zero     256 bytes    float16 x 128, metadata order    (zero="token")

    page bytes          d = 64   d = 128   d = 256
    zero="page"         4992     9216      17664
    zero="token"        5120     9216      17408

**Codes** lie in the order in which ``mma.sync`` wants its operands, so that a lane's 16-byte load is its register
fragment and nothing moves through shared memory. A code section is a matrix of d rows by 32
bytes; a byte carries four *planes*, plane j in bits 2j and 2j+1. The byte at (row, column) lies at

    (row >> 4) * 512 + (row & 7) * 64 + ((column >> 2) & 3) * 16
                     + (column >> 4) * 8 + ((row >> 3) & 1) * 4 + (column & 3)

                 row                          plane j, column c
    values       dim                          token = 32 j + 16 c4 + 8 c0 + 4 c3 + 2 c2 + c1, bits c4 … c0 of c
    keys d=128   token                        slot = 32 j + c
    keys d=64    token & 63                   slot = 32 (j & 1) + c, token = row + 64 (j >> 1)
    keys d=256   token + 128 (slot >> 7)      slot = 128 (row >> 7) + 32 j + c

Worked example, d = 128: token 21, slot 75 is row 21, plane 2 (75 = 64 + 11), column 11, hence byte
512 + 5*64 + 2*16 + 0 + 0 + 3 = 867, bits 4 and 5. Token 21's key scale is the float16 at
8192 + 2 * (2*32 + 2*2 + 1) = 8330.

**Order of tokens in values and metadata.** From 8 query rows on, keys are the B operand of the first MMA: lane q of
four holds the logits of tokens 8 n + 2 q and 8 n + 2 q + 1 of each tile n, as a pair. The columns of a value row are
such that this pair is also what the lane has to bring to the second MMA, and metadata order puts token t at
((t >> 1) & 3) * 32 + (t >> 3) * 2 + (t & 1): what a lane needs lies together, pair by pair.
"""

from dataclasses import dataclass
from typing import Literal

PAGE_TOKENS = 128
"""Tokens of a page; also the block size of the history cache, in tokens."""

SUPPORTED_HEAD_SIZES = (64, 128, 256)
"""Head sizes that have a page layout."""

SERVED_HEAD_SIZES = range(8, 257, 8)
"""Head sizes of models: heads without a page of their own size are padded (`page_head_size`)."""

Zero = Literal["page", "token"]


def metadata_position(token: int) -> int:
    """Index, in float16 elements, of a token inside a 128-long metadata vector."""
    return ((token >> 1) & 3) * 32 + (token >> 3) * 2 + (token & 1)


def value_column(token: int) -> int:
    """Byte column, 0 to 31, of a token's codes in a row of values."""
    return (token & 16) | ((token & 7) << 1) | ((token >> 3) & 1)


def code_byte(row: int, column: int) -> int:
    """Byte offset of (row, column) inside a code section of d rows by 32 columns."""
    return (
        (row >> 4) * 512
        + (row & 7) * 64
        + ((column >> 2) & 3) * 16
        + (column >> 4) * 8
        + ((row >> 3) & 1) * 4
        + (column & 3)
    )


def page_head_size(head_size: int) -> int:
    """Head size of the page that serves heads of ``head_size`` elements: the smallest that holds them.

    Their queries, keys and values are padded with zeros up to it, and outputs are cut.

    Raises:
        ValueError: it is larger than every page's or not a multiple of 8.

    """
    if head_size not in SERVED_HEAD_SIZES:
        raise ValueError(
            f"head size {head_size} fits no INT2 page; multiples of {SERVED_HEAD_SIZES.step} up to "
            f"{SERVED_HEAD_SIZES[-1]} are served"
        )
    return next(size for size in SUPPORTED_HEAD_SIZES if size >= head_size)


@dataclass(frozen=True)
class PageLayout:
    """Sizes and offsets, in bytes, of one KV head's page.

    Attributes:
        head_size: d, one of 64, 128, 256.
        zero: where the key zero point lives: ``"page"`` stores the page's mean key, ``"token"`` a zero per token.

    Raises:
        ValueError: ``head_size`` has no page layout, or ``zero`` is unknown.

    """

    head_size: int
    zero: Zero = "page"

    def __post_init__(self) -> None:
        if self.head_size not in SUPPORTED_HEAD_SIZES:
            raise ValueError(f"head size {self.head_size} has no INT2 page layout; supported: {SUPPORTED_HEAD_SIZES}")
        if self.zero not in ("page", "token"):
            raise ValueError(f"zero={self.zero!r} is unknown; use 'page' or 'token'")

    @property
    def code_bytes(self) -> int:
        """Bytes of one code section (keys or values)."""
        return PAGE_TOKENS * self.head_size // 4

    @property
    def value_codes(self) -> int:
        return self.code_bytes

    @property
    def key_scale(self) -> int:
        return 2 * self.code_bytes

    @property
    def value_scale(self) -> int:
        return self.key_scale + 2 * PAGE_TOKENS

    @property
    def value_zero(self) -> int:
        return self.value_scale + 2 * PAGE_TOKENS

    @property
    def key_zero(self) -> int:
        """Offset of the key zeros (``zero="token"``) or of the mean key (``zero="page"``)."""
        return self.value_zero + 2 * PAGE_TOKENS

    @property
    def page_bytes(self) -> int:
        return self.key_zero + 2 * (self.head_size if self.zero == "page" else PAGE_TOKENS)

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token and KV head, keys and values together. Whole for every supported head size."""
        return self.page_bytes // PAGE_TOKENS

    @property
    def bits_per_element(self) -> float:
        """Stored bits per key or value element, scales included (2.25 at head size 128)."""
        return self.page_bytes * 8 / (2 * PAGE_TOKENS * self.head_size)

    def key_code(self, token: int, slot: int) -> tuple[int, int]:
        """(byte, shift) of a key slot's code inside the page."""
        if self.head_size == 64:
            row, plane = token & 63, 2 * (token >> 6) + (slot >> 5)
        else:
            row, plane = token + PAGE_TOKENS * (slot >> 7), (slot >> 5) & 3
        return code_byte(row, slot & 31), 2 * plane

    def value_code(self, token: int, dim: int) -> tuple[int, int]:
        """(byte, shift) of a value dimension's code inside the page."""
        return self.value_codes + code_byte(dim, value_column(token)), 2 * (token >> 5)


@dataclass(frozen=True)
class FloatPageLayout:
    """A page that stores keys and values unquantized: no compression, for checking everything around the codec.

    A page is [128 tokens, 2 d] elements of the model's dtype, key first.

    Attributes:
        head_size: d.
        itemsize: bytes of one element.

    """

    head_size: int
    itemsize: int

    @property
    def page_bytes(self) -> int:
        return PAGE_TOKENS * self.bytes_per_token

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token and KV head, keys and values together."""
        return 2 * self.head_size * self.itemsize

    @property
    def bits_per_element(self) -> float:
        return 8.0 * self.itemsize
