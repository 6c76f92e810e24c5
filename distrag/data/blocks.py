"""The checksums of a store's files, block by block, in `blocks.json`: what is copied from elsewhere is trusted a block at a time."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from distrag.data.plain_types import WrongType, convert, describe
from distrag.data.text_file import parse_json
from distrag.problem import problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

BLOCKS = "blocks.json"
_SMALLEST = 1 << 20
_MOST = 1 << 16
"""Blocks double from the smallest on until so many of them hold the largest file: the list of their sums stays a few megabytes."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of all files of a store, numbered one file after the other.

    Attributes:
        block_bytes: bytes of a block; the last one of a file may be shorter.
        sizes: bytes of each file, by its path inside the store.
        sums: sha256 of each block.
    """

    block_bytes: int
    sizes: Mapping[str, int]
    sums: Sequence[str]

    def __len__(self) -> int:
        """Blocks of all files."""
        return len(self.sums)

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum([_count(size, self.block_bytes) for size in self.sizes.values()])

    @cached_property
    def _names(self) -> list[str]:
        return list(self.sizes)

    def span(self, name: str, start: int = 0, end: int | None = None) -> slice:
        """Returns which blocks hold the bytes from `start` to `end` of the file `name`."""
        size, width = self.sizes[name], self.block_bytes
        first = int(self._ends[self._names.index(name)]) - _count(size, width)
        end = size if end is None else end
        return slice(first + start // width, first + _count(end, width)) if end > start else slice(first, first)

    def place(self, block: int) -> tuple[str, int, int]:
        """Returns the file of a block, its first byte in it, and one past its last."""
        at = int(np.searchsorted(self._ends, block, side="right"))
        name, width = self._names[at], self.block_bytes
        start = (block - int(self._ends[at]) + _count(self.sizes[name], width)) * width
        return name, start, min(start + width, self.sizes[name])

    def num_bytes(self, blocks: NDArray[np.int64]) -> int:
        """Returns the bytes of these blocks together."""
        missing = sum(
            _count(size, self.block_bytes) * self.block_bytes - size
            for end, size in zip(self._ends - 1, self.sizes.values(), strict=True)
            if end in blocks
        )
        return len(blocks) * self.block_bytes - missing


def write_blocks(folder: Path, names: Sequence[str]) -> str:
    """Returns the sha256 of the `blocks.json` it writes for these files of the store in `folder`."""
    sizes = {name: (folder / name).stat().st_size for name in names}
    block_bytes = _SMALLEST
    while max(sizes.values()) > _MOST * block_bytes:
        block_bytes *= 2
    sums: list[str] = []
    for name in names:
        with (folder / name).open("rb") as file:
            while block := file.read(block_bytes):
                sums.append(hashlib.sha256(block).hexdigest())
    text = json.dumps({"block_bytes": block_bytes, "sizes": sizes, "sha256": sums}).encode()
    (folder / BLOCKS).write_bytes(text)
    return hashlib.sha256(text).hexdigest()


def parse_blocks(text: bytes, names: Sequence[str], where: str) -> Blocks:
    """Returns the blocks that `write_blocks` wrote as `text`.

    Args:
        text: content of `blocks.json`.
        names: the files that the schema wants, in any order.
        where: for the error.

    Raises:
        ValueError: for other files, or as many sums as do not fit their sizes.
    """
    raw = parse_json(text, where, what="The block sums of the store", todo=_AGAIN)
    if not isinstance(raw, dict) or set(raw) != set(_FIELDS):
        got = sorted(raw) if isinstance(raw, dict) else f"{raw!r:.80}"
        raise problem("Not the block sums of a store", got=got, wanted=sorted(_FIELDS), where=where, todo=_AGAIN)
    for name, kind in _FIELDS.items():
        try:
            convert(raw[name], kind)
        except WrongType:
            got, wanted = f"{name} {raw[name]!r:.80}", describe(kind)
            raise problem("Not the block sums of a store", got=got, wanted=wanted, where=where, todo=_AGAIN) from None
    found = Blocks(raw["block_bytes"], raw["sizes"], raw["sha256"])
    right = found.block_bytes > 0 and min(found.sizes.values(), default=0) >= 0
    right = right and sum(_count(size, found.block_bytes) for size in found.sizes.values()) == len(found)
    got = sorted(found.sizes) if right else "sums that do not fit the sizes"
    if got != sorted(names):
        raise problem("Not the block sums of this store", got=got, wanted=sorted(names), where=where, todo=_AGAIN)
    return found


_FIELDS: dict[str, Any] = {"block_bytes": int, "sizes": dict[str, int], "sha256": list[str]}
_AGAIN = "copy the store again, or run `distrag prepare` again with --overwrite"


def _count(size: int, block_bytes: int) -> int:
    return -(-size // block_bytes)
