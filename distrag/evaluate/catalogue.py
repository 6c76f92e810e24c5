"""Where the item vectors lie: blocks of whole table rows, each scored by the rank that holds it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from distrag.problem import problem

Shard = tuple[int, int, torch.Tensor]
Box = tuple[int, int, int, int]


class Ranks(Protocol):
    """What evaluation needs of the other ranks; `distrag.world.World` is one."""

    @property
    def rank(self) -> int:
        """Number of this rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def device(self) -> torch.device:
        """Where tensors of a collective lie."""

    def all_reduce_sum(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the elementwise sum over ranks."""

    def all_gather_uneven(self, value: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
        """Returns each rank's tensor, rank r's with `sizes[r]` rows."""

    def all_gather_object(self, value: object) -> list[object]:
        """Returns each rank's small Python object."""


@dataclass(frozen=True)
class Catalogue:
    """This rank's part of the item table, as whole rows.

    Attributes:
        blocks: `(row_lo, [n, D])` in ascending rows; over all ranks every row of the table occurs once.
        num_rows: `V`, rows of the whole table, row 0 (unknown) included.
        dim: `D`.
        num_nonfinite_items: rows of the whole table that hold a NaN or infinity, row 0 aside.
    """

    blocks: tuple[tuple[int, torch.Tensor], ...]
    num_rows: int
    dim: int
    num_nonfinite_items: int

    def tile_bounds(self, width: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns first row, and one past the last, of each tile of `tiles`, int64 `[T]` both."""
        bounds = [(lo + a, lo + min(a + width, len(block))) for lo, block in self.blocks for a in range(0, len(block), width)]
        starts, ends = np.array(bounds, np.int64).reshape(-1, 2).T
        return starts, ends

    def tiles(self, width: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yields `(row_lo, n, float32 [width, D])` over this rank's rows; rows from n on are zero.

        Every tile has one shape, whatever the shards: BLAS picks its kernel, and so the order of its additions, by shape.
        """
        for row_lo, block in self.blocks:
            for lo in range(0, len(block), width):
                part = block[lo : lo + width].float()
                n = len(part)
                yield row_lo + lo, n, part if n == width else torch.nn.functional.pad(part, (0, 0, 0, width - n))


def build_catalogue(world: Ranks, shards: Sequence[Shard], num_rows: int, dim: int, *, chunk_rows: int = 65536) -> Catalogue:
    """Returns this rank's rows of the item table, found from the shards that every rank holds.

    Row-wise and table-wise shards stay where they lie. Of a table that every rank holds whole, each rank takes an equal slice without a
    copy. Column-wise shards are turned into row slices once, chunk by chunk: a rank then holds `V/W` whole rows more, less travels than
    partial scores would, and a score is still one dot product, so that equal rows tie. A collective: all ranks call it.

    Args:
        world: the ranks.
        shards: `(row_lo, col_lo, [rows, cols])` held here; none, or empty ones, are fine.
        num_rows: `V`, rows of the whole table.
        dim: `D`, columns of the whole table.
        chunk_rows: rows of column-wise shards exchanged at once; bounds the memory of the exchange.

    Raises:
        ValueError: on every rank alike, when the shards do not cover the table exactly once.
    """
    kept = [(row, col, t.detach()) for row, col, t in shards if t.numel()]
    boxes = [_boxes(value) for value in world.all_gather_object([(row, col, *t.shape) for row, col, t in kept])]
    whole = (0, 0, num_rows, dim)
    if all(own == [whole] for own in boxes):
        lo, hi = _slice(num_rows, world)
        blocks = [(lo, kept[0][2][lo:hi])]
    elif all(cols == dim for own in boxes for _, _, _, cols in own):
        _check_rows(boxes, num_rows)
        blocks = sorted(((row, t) for row, _, t in kept), key=lambda block: block[0])
    else:
        _check_area(boxes, num_rows, dim)
        blocks = [_rows_from_columns(world, kept, boxes, num_rows, dim, chunk_rows)]
    part = Catalogue(tuple(blocks), num_rows, dim, 0)
    return Catalogue(part.blocks, num_rows, dim, _count_nonfinite(world, part, chunk_rows))


def _boxes(value: object) -> list[Box]:
    assert isinstance(value, list)
    return [(int(row), int(col), int(rows), int(cols)) for row, col, rows, cols in value]


def _slice(num_rows: int, world: Ranks) -> tuple[int, int]:
    return num_rows * world.rank // world.size, num_rows * (world.rank + 1) // world.size


def _check_rows(boxes: list[list[Box]], num_rows: int) -> None:
    ranges = sorted((row, row + rows) for own in boxes for row, _, rows, _ in own)
    ends = [0, *(end for _, end in ranges)]
    if [start for start, _ in ranges] != ends[:-1] or ends[-1] != num_rows:
        raise _uncovered(ranges, f"rows 0 .. {num_rows}, each once")


def _check_area(boxes: list[list[Box]], num_rows: int, dim: int) -> None:
    area = sum(rows * cols for own in boxes for _, _, rows, cols in own)
    if area != num_rows * dim:
        raise _uncovered(boxes, f"{num_rows} x {dim} = {num_rows * dim} cells, got {area}")


def _uncovered(got: object, wanted: str) -> ValueError:
    todo = "pass every rank's local shards of the one item table, and its full size"
    return problem("Shards do not cover the item table exactly once", got=got, wanted=wanted, where="evaluate.build_catalogue", todo=todo)


def _count_nonfinite(world: Ranks, catalogue: Catalogue, width: int) -> int:
    count = torch.zeros(1, dtype=torch.int64, device=world.device)
    for row_lo, block in catalogue.blocks:
        for lo in range(0, len(block), width):
            bad = ~torch.isfinite(block[lo : lo + width]).all(1)
            count += bad[1:].sum() if row_lo + lo == 0 else bad.sum()
    return int(world.all_reduce_sum(count).item())


def _rows_from_columns(
    world: Ranks, shards: list[Shard], boxes: list[list[Box]], num_rows: int, dim: int, chunk_rows: int
) -> tuple[int, torch.Tensor]:
    lo, hi = _slice(num_rows, world)
    own = torch.empty(hi - lo, dim, device=world.device)
    for start in range(0, num_rows, chunk_rows):
        end = min(start + chunk_rows, num_rows)
        chunk = _gather_rows(world, shards, boxes, start, end, dim)
        a, b = max(lo, start), min(hi, end)
        if a < b:
            own[a - lo : b - lo] = chunk[a - start : b - start]
    return lo, own


def _gather_rows(world: Ranks, shards: list[Shard], boxes: list[list[Box]], start: int, end: int, dim: int) -> torch.Tensor:
    """Returns rows `[start, end)` whole, float32 `[end-start, dim]`, out of every rank's columns."""
    parts = [[_overlap(box, start, end) for box in own] for own in boxes]
    pieces = [t[a - row : b - row].float().reshape(-1) for (row, _, t), (a, b, _, _) in zip(shards, parts[world.rank], strict=True)]
    flat = torch.cat(pieces) if pieces else torch.empty(0, device=world.device)
    gathered = world.all_gather_uneven(flat, [sum((b - a) * (d - c) for a, b, c, d in own) for own in parts])
    chunk = torch.empty(end - start, dim, device=world.device)
    for values, own in zip(gathered, parts, strict=True):
        split = torch.split(values, [(b - a) * (d - c) for a, b, c, d in own])
        for piece, (a, b, c, d) in zip(split, own, strict=True):
            chunk[a - start : b - start, c:d] = piece.view(b - a, d - c)
    return chunk


def _overlap(box: Box, start: int, end: int) -> Box:
    """Returns rows and columns `(row_lo, row_hi, col_lo, col_hi)` of a shard that lie in `[start, end)`; row_lo == row_hi when none do."""
    row, col, rows, cols = box
    a = min(max(row, start), row + rows)
    return a, max(a, min(row + rows, end)), col, col + cols
